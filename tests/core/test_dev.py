"""dev.py builds the compiled core for the tests where it can, and says in one line where it cannot."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


class Checkout:
    """A directory with sources of a core, and dev.py for it."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(ROOT))
        spec = importlib.util.spec_from_file_location("dev", ROOT / "dev.py")
        assert spec is not None
        assert spec.loader is not None
        self.dev: ModuleType = importlib.util.module_from_spec(spec)
        handler = signal.getsignal(signal.SIGINT)
        spec.loader.exec_module(self.dev)
        signal.signal(signal.SIGINT, handler)  # it has set one for its own process
        import hatch_build

        self.hatch_build: ModuleType = hatch_build
        self.built, self.library = (directory / "src" / each for each in (self.dev.CORE, self.dev.LIBRARY))
        for built in (self.built, self.library):
            built.parent.mkdir(parents=True)
        self.source = directory / "core" / "engine" / "rc.c"
        self.source.parent.mkdir(parents=True)
        #: Whether it was the library, of each build.
        self.builds: list[bool] = []
        for path in (self.source, directory / "hatch_build.py"):
            path.touch()
            os.utime(path, (1000, 1000))
        monkeypatch.setattr(self.dev, "ROOT", str(directory))
        monkeypatch.setattr(self.dev, "PACKAGE", str(directory / "src"))
        monkeypatch.setattr(hatch_build, "build", self.build)
        monkeypatch.delenv("RDMACM_CORE", raising=False)

    def build(self, target: Path, *, is_library: bool) -> None:
        assert target == (self.library if is_library else self.built)
        self.builds.append(is_library)
        target.touch()

    def prepare(self) -> None:
        self.dev._build_core()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    return Checkout(tmp_path, monkeypatch)


def test_core_is_built_if_it_is_older_than_its_sources(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        checkout.prepare()
    assert checkout.builds == [False, True]
    for built in (checkout.library, checkout.built):
        checkout.builds.clear()
        os.utime(built, (999, 999))
        for _ in range(2):
            checkout.prepare()
        assert checkout.builds == [built == checkout.library]
    assert capsys.readouterr() == ("", "")


def test_without_a_compiler_a_line_says_so(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(target: Path, *, is_library: bool) -> None:
        raise checkout.hatch_build.NotBuiltError("no C compiler")

    monkeypatch.setattr(checkout.hatch_build, "build", fail)
    for built in (checkout.built, checkout.library):
        built.touch()
        os.utime(built, (999, 999))
    checkout.prepare()
    lines = [f"dev.py: without {what}: no C compiler\n" for what in ("the compiled core", "the library for programs")]
    assert capsys.readouterr() == ("", "".join(lines))
    for built in (checkout.built, checkout.library):
        assert not built.exists(), "the tests would run what the sources are no longer"


def test_python_alone_needs_no_build(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMACM_CORE", "python")
    checkout.prepare()
    assert checkout.builds == []
