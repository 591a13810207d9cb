"""Faults of a host with the kernel's rxe, and the rules of ``rdmacm doctor`` that see them.

python3 -m interop.doctor_faults RULE

Each takes a process of its own: what auto chooses is decided once.
"""

from __future__ import annotations

import glob
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import rdmacm
from interop.kernel_choice import CM_FILE, HERE, VERBS_FILE, as_nobody, mode, without
from support.clock import eventually

GIDS = "/sys/class/infiniband/rxe1/ports/1/gids"
CONFIG = "/sys/kernel/config/rdma_cm/rxe0"


def doctor(*arguments: str) -> dict[str, Any]:
    """What the command finds."""
    argv = [sys.executable, "-m", "rdmacm", "doctor", "--json", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 1), done
    return found


def notes(*arguments: str) -> dict[str, str]:
    """The notes, by rule."""
    return {each["rule"]: each["finding"] for each in doctor(*arguments)["notes"]}


def findings(*arguments: str) -> dict[str, str]:
    """The findings, by rule."""
    return {each["rule"]: each["finding"] for each in doctor(*arguments)["findings"]}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def sysctl(name: str, value: str) -> Iterator[None]:
    path = f"/proc/sys/{name}"
    with open(path) as file:
        before = file.read()
    for text in (value, before):
        with open(path, "w") as file:
            file.write(text)
        if text is value:
            yield


def healthy() -> None:
    found = doctor()
    assert (found["ok"], found["provider"], found["devices"]) == (True, "kernel", ["rxe0"]), found
    assert [each["rule"] for each in found["notes"]] == ["D10"], found["notes"]
    assert findings("--to", HERE) == {}


def c4_events_that_nobody_reads() -> None:
    """Of a program in C: its address is resolved, and nobody reads that."""
    import ctypes

    from interop.rdma_core import CmId, SockAddrIn, rdma

    channel, cmid = rdma.rdma_create_event_channel(), ctypes.POINTER(CmId)()
    rdma.rdma_create_id(channel, ctypes.byref(cmid), None, rdmacm.PortSpace.TCP)
    destination = SockAddrIn(socket.AF_INET, 7471, (ctypes.c_ubyte * 4)(*socket.inet_aton("10.0.0.2")))
    rdma.rdma_resolve_addr(cmid, None, ctypes.byref(destination), 2000)
    assert select.select([channel.contents.fd], [], [], 60)[0]
    _says(notes(), "C4", f"process {os.getpid()} ")


def q1_another_device() -> None:
    """The destination is reached by rxe1, and programs without rdma_cm take rxe0."""
    ip("link", "add", "qa", "type", "veth", "peer", "name", "qb")
    try:
        ip("address", "add", "10.0.3.1/24", "dev", "qa")
        ip("link", "set", "qb", "up")
        ip("link", "set", "qa", "up")
        subprocess.run(["rdma", "link", "add", "rxe1", "type", "rxe", "netdev", "qa"], check=True)
        eventually(lambda: any("0a00:0301" in _text(path) for path in glob.glob(f"{GIDS}/[0-9]")))
        found = notes("--to", "10.0.3.1")
        _says(found, "Q1", "rdma_cm takes rxe1 port 1")
        _says(found, "Q1", "ib_write_bw and others take rxe0")
        os.environ["NCCL_IB_HCA"] = "=rxe0"
        _says(findings("--to", "10.0.3.1"), "Q1", "NCCL_IB_HCA names rxe0")
    finally:
        subprocess.run(["rdma", "link", "delete", "rxe1"], check=False)
        ip("link", "delete", "qa")


def _text(path: str) -> str:
    with open(path) as file:
        return file.read()


def d10_the_port_is_the_kernels() -> None:
    found = findings("--provider", "soft")
    assert "the kernel's (rdma_rxe)" in found["D10"], found


def d3_a_library_is_missing() -> None:
    with ExitStack() as hidden:
        for path in glob.glob("/usr/lib/*/libibverbs/librxe-*.so"):
            hidden.enter_context(without(path))
        assert "rxe0 (rdma_rxe)" in findings()["D3"]
    assert "D3" not in findings()


def d4_a_file_is_missing() -> None:
    with without(CM_FILE):
        found = findings()
    assert f"{CM_FILE} is not there" in found["D4"], found
    assert "D2" not in found, found


def d4_a_file_may_not_be_opened() -> None:
    def closed() -> None:
        assert f"{VERBS_FILE} may not be opened" in findings()["D4"]

    with mode(VERBS_FILE, 0o600):
        as_nobody(closed)


def d7_little_locked_memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    as_nobody(lambda: _says(findings(), "D7", "64 KiB"))


def a2_a_loopback_address() -> None:
    _says(findings("--provider", "kernel", "--to", "127.0.0.1"), "A2", "127.0.0.1 is on the loopback interface")


def a4_a_source_that_is_gone() -> None:
    _says(findings("--to", HERE, "--from", "10.0.0.99"), "A4", "10.0.0.99 is no address")


def a10_a_next_hop_that_does_not_answer() -> None:
    _says(findings("--to", "10.0.0.77"), "A10", "10.0.0.77 on va does not answer")


def a18_an_interface_is_down() -> None:
    ip("link", "set", "va", "down")
    _says(findings(), "A18", "port 1 of rxe0 is DOWN: interface va is down")


def c2_a_small_backlog() -> None:
    with sysctl("net/rdma_ucm/max_backlog", "16"):
        _says(findings(), "C2", "max_backlog is 16")


def g2_no_address() -> None:
    ip("-4", "address", "flush", "dev", "va")
    ip("-6", "address", "flush", "dev", "va", "scope", "global")
    _says(findings("--provider", "kernel"), "G2", "rxe0 has link-local GIDs only")


def q3_a_tos_with_ecn() -> None:
    subprocess.run(["mount", "-t", "configfs", "none", "/sys/kernel/config"], check=False)
    os.makedirs(CONFIG, exist_ok=True)
    with open(f"{CONFIG}/ports/1/default_roce_tos", "w") as file:
        file.write("107")
    _says(findings(), "Q3", "default_roce_tos of rxe0 is 107")
    os.rmdir(CONFIG)


def j1_nobody_listens() -> None:
    _says(findings("--to", HERE, "--port", "7999"), "J1", "reason 8")


def j3_the_application_refuses() -> None:
    with rdmacm.listen((HERE, 7471)) as listener:
        thread = threading.Thread(target=lambda: listener.get_request(timeout=60).reject(b"no"))
        thread.start()
        found = findings("--to", HERE, "--port", "7471")
        thread.join()
    _says(found, "J3", "reason 28")


def j7_a_tcp_port() -> None:
    """Beside siw."""
    with socket.create_server(("", 7471)):
        _says(findings("--provider", "kernel", "--port", "7471"), "J7", "a TCP socket listens on port 7471")
    assert "J7" not in findings("--provider", "kernel", "--port", "7471")


def _says(found: dict[str, str], rule: str, text: str) -> None:
    assert text in found.get(rule, ""), found


RULES: tuple[Callable[[], None], ...] = (
    healthy,
    d10_the_port_is_the_kernels,
    d3_a_library_is_missing,
    d4_a_file_is_missing,
    d4_a_file_may_not_be_opened,
    d7_little_locked_memory,
    a2_a_loopback_address,
    a4_a_source_that_is_gone,
    a10_a_next_hop_that_does_not_answer,
    c2_a_small_backlog,
    j1_nobody_listens,
    j3_the_application_refuses,
    c4_events_that_nobody_reads,
    q1_another_device,
    q3_a_tos_with_ecn,
    a18_an_interface_is_down,
    g2_no_address,
)
#: After these the network is made again.
CHANGING = (a18_an_interface_is_down, g2_no_address)

if __name__ == "__main__":
    {rule.__name__: rule for rule in (*RULES, j7_a_tcp_port)}[sys.argv[1]]()
    print("as expected")
