"""Importing the package, and the names of C."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import rdmacm.cma

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
