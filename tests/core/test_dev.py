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
        self.built = directory / "src" / self.dev.CORE
        self.built.parent.mkdir(parents=True)
        self.source = directory / "core" / "engine" / "rc.c"
        self.source.parent.mkdir(parents=True)
        self.builds = 0
        for path in (self.source, directory / "hatch_build.py"):
            path.touch()
            os.utime(path, (1000, 1000))
        monkeypatch.setattr(self.dev, "ROOT", str(directory))
        monkeypatch.setattr(self.dev, "PACKAGE", str(directory / "src"))
        monkeypatch.setattr(hatch_build, "build", self.build)
        monkeypatch.delenv("RDMACM_CORE", raising=False)

    def build(self, target: Path) -> None:
        assert target == self.built
        self.builds += 1
        target.touch()

    def prepare(self) -> None:
        self.dev._build_core()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    return Checkout(tmp_path, monkeypatch)


def test_core_is_built_if_it_is_older_than_its_sources(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        checkout.prepare()
    assert checkout.builds == 1
    os.utime(checkout.built, (999, 999))
    for _ in range(2):
        checkout.prepare()
    assert checkout.builds == 2
    assert capsys.readouterr() == ("", "")


def test_without_a_compiler_a_line_says_so(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(target: Path) -> None:
        raise checkout.hatch_build.NotBuiltError("no C compiler")

    monkeypatch.setattr(checkout.hatch_build, "build", fail)
    checkout.built.touch()
    os.utime(checkout.built, (999, 999))
    checkout.prepare()
    assert capsys.readouterr() == ("", "dev.py: without the compiled core: no C compiler\n")
    assert not checkout.built.exists(), "the tests would run what the sources are no longer"


def test_python_alone_needs_no_build(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMACM_CORE", "python")
    checkout.prepare()
    assert checkout.builds == 0
