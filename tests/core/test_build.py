"""The hook that builds the core into a wheel: what RDMACM_BUILD_CORE decides, and what is said where it cannot be."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def hatch_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class App:
    """What hatchling gives a hook to write with."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, message: str) -> None:
        self.warnings.append(message)


class Hook:
    """The hook, as hatchling calls it."""

    #: Those of a test, which are finalized after it.
    made: ClassVar[list[Hook]] = []

    def __init__(self, hatch_build: ModuleType, target: str = "wheel", version: str = "standard") -> None:
        class Called(hatch_build.CustomBuildHook):  # type: ignore[misc,name-defined]
            app, target_name = App(), target

            def __init__(self) -> None: ...

        self.hook = Called()
        self.made.append(self)
        self.data: dict[str, Any] = {"force_include": {}, "shared_data": {}, "pure_python": True}
        self.hook.initialize(version, self.data)
        self.warnings = self.hook.app.warnings
        #: What share/ has, by path; without it in an sdist and in the sources.
        self.share = {
            file.relative_to(place).as_posix(): file.read_text()
            for place, name in self.data["shared_data"].items()
            if name == "share"
            for file in Path(place).rglob("*.*")
            if file.is_file()
        }

    @property
    def is_pure(self) -> bool:
        return self.data == {"force_include": {}, "shared_data": self.data["shared_data"], "pure_python": True}


@pytest.fixture(autouse=True)
def share(request: pytest.FixtureRequest, hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What takes long to make is made by a test of it only."""
    if "real_share" not in request.fixturenames:
        monkeypatch.setattr(hatch_build, "make_share", lambda _: None)
    yield
    while Hook.made:
        Hook.made.pop().hook.finalize("", {}, "")


@pytest.fixture
def real_share() -> None: ...


@pytest.mark.usefixtures("real_share")
def test_wheel_has_manual_pages_and_completions(hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMACM_BUILD_CORE", "refuse")
    built = Hook(hatch_build)
    assert built.share["man/man1/rdmacm-perf.1"].startswith('.TH "RDMACM\\-PERF" 1 ')
    assert {"man/man3/rdmacm.CmId.3", "fish/vendor_completions.d/rdmacm.fish"} <= built.share.keys()
    built.hook.finalize("", {}, "")
    assert not any(map(os.path.exists, built.data["shared_data"]))


@pytest.mark.parametrize("wanted", ["auto", "require"])
def test_wheel_has_the_core_and_the_library(
    wanted: str, hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(target: Path, *, is_library: bool = False) -> None:
        target.write_bytes(b"the library" if is_library else b"the core")
        if is_library:
            target.with_name(hatch_build.SOCKETS).write_bytes(b"sockets")

    monkeypatch.setenv("RDMACM_BUILD_CORE", wanted)
    monkeypatch.setattr(hatch_build, "build", build)
    built = Hook(hatch_build)
    platform = sysconfig.get_platform().replace("-", "_")
    assert (built.data["pure_python"], built.data["tag"]) == (False, f"cp311-abi3-{platform}")
    found = {target: Path(source).read_bytes() for source, target in built.data["force_include"].items()}
    assert found == {
        "rdmacm/proto/_core.abi3.so": b"the core",
        "rdmacm/run/librdmacm_run.so.1": b"the library",
        "rdmacm/run/librdmacm_sockets.so.1": b"sockets",
    }
    assert built.warnings == []
    built.hook.finalize("", {}, "")
    assert not any(map(os.path.exists, built.data["force_include"]))


@pytest.fixture
def header(tmp_path: Path, hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the hook looks for Python.h, which is not there yet."""
    found = SimpleNamespace(get_path=lambda name: str(tmp_path), get_config_var=sysconfig.get_config_var)
    monkeypatch.setattr(hatch_build, "sysconfig", found)
    return tmp_path / "Python.h"


def insist(hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """``auto`` warns and makes a pure wheel, ``require`` fails; both say why."""
    monkeypatch.delenv("RDMACM_BUILD_CORE", raising=False)
    built = Hook(hatch_build)
    assert built.is_pure
    (warning,) = built.warnings
    assert re.match(f"without the compiled core: {why}", warning)
    monkeypatch.setenv("RDMACM_BUILD_CORE", "require")
    with pytest.raises(hatch_build.NotBuiltError, match=f"^{why}"):
        Hook(hatch_build)


def test_without_a_header(hatch_build: ModuleType, header: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    insist(hatch_build, monkeypatch, f"Python.h is not in {header.parent}; ")


def test_without_a_compiler(hatch_build: ModuleType, header: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header.touch()
    monkeypatch.setenv("CC", "/nonexistent/cc")
    insist(hatch_build, monkeypatch, "no C compiler: there is no /nonexistent/cc")


def test_fault_of_the_compiler_is_shown(hatch_build: ModuleType, header: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header.touch()
    monkeypatch.setenv("CC", f"{sys.executable} -c 'import sys; sys.exit(\"bad line\")'")
    insist(hatch_build, monkeypatch, r"(?s:.*) failed:\nbad line")


def test_elsewhere_than_on_linux(hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hatch_build, "sys", SimpleNamespace(platform="darwin"))
    insist(hatch_build, monkeypatch, "the core is for Linux, not for darwin$")


@pytest.mark.parametrize(
    ("wanted", "target", "version"),
    [("refuse", "wheel", "standard"), ("require", "sdist", "standard"), ("require", "wheel", "editable")],
)
def test_nothing_is_built(
    wanted: str, target: str, version: str, hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RDMACM_BUILD_CORE", wanted)
    monkeypatch.setattr(hatch_build, "build", None)
    built = Hook(hatch_build, target, version)
    assert (built.is_pure, built.warnings) == (True, [])


def test_unknown_value_is_refused(hatch_build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMACM_BUILD_CORE", "yes")
    with pytest.raises(ValueError, match=r"^RDMACM_BUILD_CORE is 'yes', not auto, require or refuse$"):
        Hook(hatch_build)


def test_script_says_what_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "hatch_build.py")],
        env=os.environ | {"CC": "/nonexistent/cc"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
