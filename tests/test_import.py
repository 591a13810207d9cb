"""Importing the package, and the names of C."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import rdmacm.cma
from rdmacm.proto import core_choice

PROBE = """
import json, os, sys, threading
descriptors = lambda: set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
opened, modules = descriptors(), set(sys.modules)
import rdmacm, rdmacm.cma
late = {"asyncio", "ctypes", "logging", "ipaddress", "rdmacm.soft"}
heavy = sorted((set(sys.modules) - modules) & late)
print(json.dumps([sorted(descriptors() - opened), threading.active_count(), heavy]))
"""


MAPPED = "from interop.libraries import main; main('soft', '127.0.0.1')"


def test_import_opens_no_socket_and_starts_no_thread() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{PROBE}"],
        capture_output=True,
        text=True,
        check=True,
    )
    opened, threads, heavy = json.loads(done.stdout)
    assert opened == []
    assert threads == 1
    assert heavy == [], "modules that only some callers need must be imported later"


LOADED = """
import json, sys
before = set(sys.modules)
{statement}
print(json.dumps(sorted(set(sys.modules) - before)))
"""
#: Modules that take long to import, as they import many others or make classes of annotations.
HEAVY = {"argparse", "asyncio", "ctypes", "dataclasses", "inspect", "logging", "re", "socket", "ssl", "typing"}


def loaded_by(statement: str) -> set[str]:
    """The modules that a new process loads in a statement. What it writes before its last line does not count."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{LOADED.format(statement=statement)}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def of_package(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] == "rdmacm"}


def test_import_loads_what_the_first_use_of_a_name_needs_no_sooner() -> None:
    loaded = loaded_by("import rdmacm; dir(rdmacm); rdmacm.__version__")
    assert of_package(loaded) == {"rdmacm", "rdmacm.interrupts", "rdmacm.interrupts.command"}
    assert loaded & HEAVY == set()


def test_a_name_loads_its_own_room_and_those_below() -> None:
    loaded = loaded_by("from rdmacm import CmTimeoutError, PortSpace, RdmaError")
    assert of_package(loaded) - of_package(loaded_by("import rdmacm")) == {"rdmacm.constants", "rdmacm.errors"}
    assert loaded & HEAVY <= {"re", "socket", "typing"}
    above = {"addrinfo", "aio", "cma", "cmid", "diagnosis", "endpoint", "kernel", "run", "soft", "testing", "tools"}
    for statement in ("import rdmacm.verbs", "from rdmacm import Device, QPType"):
        assert {name.split(".")[1] for name in of_package(loaded_by(statement)) - {"rdmacm"}} & above == set()


def test_a_connection_loads_no_engine_in_python_where_the_compiled_core_runs() -> None:
    loaded = loaded_by("import rdmacm.endpoint, rdmacm.soft")
    engines = {"rdmacm.proto.roce.rc.engine", "rdmacm.proto.roce.uc", "rdmacm.proto.roce.xrc"}
    expected = set() if core_choice.name == "c" else {"rdmacm.proto.roce.rc.engine"}
    assert loaded & engines == expected
    unused = {
        "rdmacm.aio",
        "rdmacm.cma",
        "rdmacm.ib.access",
        "rdmacm.kernel",
        "rdmacm.proto.sa.subnet",
        "rdmacm.testing",
    }
    assert loaded & unused == set()


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_command_without_a_command_loads_none_of_the_tools(option: str) -> None:
    loaded = loaded_by(f"from rdmacm.tools.main import main; assert main([{option!r}]) == 0")
    tools = {name for name in loaded if name.startswith("rdmacm.tools.")}
    assert tools == {f"rdmacm.tools.{name}" for name in ("arguments", "commands", "main", "output")}
    assert loaded & {"dataclasses", "inspect", "rdmacm.address", "rdmacm.provider", "rdmacm.verbs"} == set()


def test_star_and_attributes_have_what_is_not_loaded_yet() -> None:
    everything = {name for name in dir(rdmacm) if not isinstance(getattr(rdmacm, name), ModuleType)}
    statement = "from rdmacm import *; names = set(globals()); assert names >= {everything!r}, {everything!r} - names"
    assert loaded_by(statement.format(everything=everything)) >= {"rdmacm.cmid", "rdmacm.endpoint", "rdmacm.verbs"}
    loaded_by("import rdmacm; rdmacm.provider.Provider, rdmacm.net.Network, rdmacm.verbs.backend.DeviceBackend")
    loaded_by("import pickle, rdmacm; one = rdmacm.ConnParam(); assert pickle.loads(pickle.dumps(one)) == one")
    with pytest.raises(AttributeError, match="module 'rdmacm' has no attribute 'conect'"):
        rdmacm.conect  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError):
        rdmacm.__all__  # type: ignore[attr-defined]  # noqa: B018


def test_the_software_devices_load_no_library_of_rdma_core() -> None:
    """In a process that has connected, and moved data. ``tests/interop`` has the same for the kernel's devices."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{MAPPED}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "none\n"


def test_c_names_have_the_values_of_c() -> None:
    cma = rdmacm.cma
    assert [cma.RDMA_PS_IPOIB, cma.RDMA_PS_TCP, cma.RDMA_PS_UDP, cma.RDMA_PS_IB] == [0x2, 0x106, 0x111, 0x13F]
    flags = [cma.RAI_PASSIVE, cma.RAI_NUMERICHOST, cma.RAI_NOROUTE, cma.RAI_FAMILY, cma.RAI_SA, cma.RAI_DNS]
    assert flags == [1, 2, 4, 8, 16, 32]
    events = [value for name, value in vars(cma).items() if name.startswith("RDMA_CM_EVENT_")]
    assert events == list(range(19))
    for name, value in vars(cma).items():
        if name.startswith("RDMA_CM_EVENT_"):
            assert cma.rdma_event_str(value) == name
    assert (cma.RDMA_OPTION_ID_ACK_TIMEOUT, cma.RDMA_OPTION_IB_PATH, cma.AF_IB) == (3, 1, 27)


REFUSE = """
import importlib, pkgutil, socket, sys

def refuse(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = arguments[1]
        if isinstance(address, tuple) and not str(address[0]).startswith("127.") and address[0] != "::1":
            raise SystemExit(f"{event} {address}")
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "urllib.Request", "subprocess.Popen", "os.system"):
        raise SystemExit(f"{event} {arguments}")

sys.addaudithook(refuse)
import rdmacm
for module in pkgutil.walk_packages(rdmacm.__path__, "rdmacm."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(len([name for name in sys.modules if name.startswith("rdmacm.")]))
try:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("192.0.2.1", 9))
except SystemExit:
    print("refused")
"""


def test_import_of_any_module_fetches_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{REFUSE}"],
        capture_output=True,
        text=True,
        check=False,
    )
    modules, refused = done.stdout.split()
    assert (done.returncode, done.stderr, refused) == (0, "", "refused")
    assert int(modules) > 150


def test_build_fetches_nothing() -> None:
    """The build has one requirement, its backend; its only step, which compiles the core, uses nothing else."""
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert [requirement.partition(">")[0] for requirement in project["build-system"]["requires"]] == ["hatchling"]
    assert project["project"]["dependencies"] == []
    assert set(project["tool"]["hatch"]) == {"build"}
    assert project["tool"]["hatch"]["build"].keys() == {"targets", "hooks"}
    for target in project["tool"]["hatch"]["build"]["targets"].values():
        assert set(target) <= {"packages", "exclude"}, "no build hook"
    assert project["tool"]["hatch"]["build"]["hooks"] == {"custom": {}}, "no dependency of its own"
    tree = ast.parse((root / "hatch_build.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= {"hatchling", *sys.stdlib_module_names}
