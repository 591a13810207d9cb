"""RDMACM_CORE chooses the core, what cannot be is a clear error, and the tools say which runs."""

from __future__ import annotations

import errno
import json
import subprocess
import sys

import pytest

from rdmacm import RdmaError
from rdmacm.proto import core_choice
from rdmacm.proto.core_choice import _find
from rdmacm.tools.core_name import core_line, core_name
from rdmacm.tools.main import main
from support.netns import python_environment

NEEDS_CORE = pytest.mark.skipif(core_choice.compiled is None, reason=f"runs {core_choice.description()}")


def without_a_core(monkeypatch: pytest.MonkeyPatch, error: ImportError) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(core_choice, "import_module", fail)


ABSENT = ModuleNotFoundError("No module named 'rdmacm.proto._core'", name="rdmacm.proto._core")
UNLOADABLE = ImportError("wrong ELF class")


def test_python_refuses_the_compiled_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMACM_CORE", "python")
    assert _find() == (None, "RDMACM_CORE is python")


@pytest.mark.parametrize(
    ("error", "why"),
    [(ABSENT, "it is not installed"), (UNLOADABLE, "it cannot be loaded: wrong ELF class")],
    ids=["absent", "unloadable"],
)
def test_auto_does_without_a_core_and_c_demands_it(
    error: ImportError, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_a_core(monkeypatch, error)
    for automatic in ("auto", ""):
        monkeypatch.setenv("RDMACM_CORE", automatic)
        assert _find() == (None, why)
    monkeypatch.setenv("RDMACM_CORE", "c")
    with pytest.raises(RdmaError, match=f"^core: RDMACM_CORE demands the compiled core, and {why} .*; try: ") as raised:
        _find()
    assert raised.value.errno == errno.ENOENT


@NEEDS_CORE
@pytest.mark.parametrize("wanted", ["auto", "c"])
def test_the_compiled_core_is_found(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMACM_CORE", wanted)
    module, _ = _find()
    assert module is core_choice.compiled


def test_unknown_value_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rdmacm", "devices", "--provider", "soft"],
        env=python_environment() | {"RDMACM_CORE": "fast"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "rdmacm: core: no core 'fast' (from the environment variable RDMACM_CORE) [EINVAL];"
        " try: one of: auto, c, python\n"
    )


def test_description_says_why_python_runs_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(core_choice, "compiled", None)
    monkeypatch.setattr(core_choice, "name", "python")
    monkeypatch.setattr(core_choice, "_why", "it is not installed")
    assert core_line("soft") == "software device without the compiled core (it is not installed)\n"
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.endswith(", without the compiled core (it is not installed)\n")
    assert main(["devices", "--provider", "soft", "--json"]) == 0
    assert {device["core"] for device in json.loads(capsys.readouterr().out)} == {"python"}


def test_devices_of_the_kernel_have_no_core() -> None:
    assert core_name("kernel") is None
    assert core_line("kernel") == ""
