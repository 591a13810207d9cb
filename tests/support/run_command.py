"""Programs that tests start by ``rdmacm run``, and whether they have used the devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["datagrams", "has_tcp_socket", "is_listening", "running", "started"]


@contextmanager
def started(library: Path, *argv: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A program with the library in a directory; it is ended at the end. Its errors are in its output."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),
        "RDMACM_RUN_LIBRARY": str(library / "libibverbs.so.1"),
        **variables,
    }
    command = [sys.executable, "-m", "rdmacm", "run", "--", *argv]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True
    ) as program:
        try:
            yield program
        finally:
            program.terminate()


def running(library: Path, *argv: str, **variables: str) -> str:
    """What a program prints, which has to succeed."""
    with started(library, *argv, **variables) as program:
        printed, _ = program.communicate(timeout=100)
    assert program.returncode == 0, printed[-4000:]
    return printed


def datagrams() -> int:
    """How many this thread's network namespace has sent. Packets of a train, which the kernel splits, count once."""
    rows = [
        line.split() for line in Path("/proc/thread-self/net/snmp").read_text().splitlines() if line.startswith("Udp:")
    ]
    ipv6 = Path("/proc/thread-self/net/snmp6")
    by_name = dict(line.split() for line in ipv6.read_text().splitlines()) if ipv6.exists() else {}
    return int(dict(zip(*rows, strict=True))["OutDatagrams"]) + int(by_name.get("Udp6OutDatagrams", 0))


def is_listening(port: int) -> bool:
    """Whether a socket of TCP and IPv4 listens to a port, in this thread's network namespace."""
    return f":{port:04X} 00000000:0000 0A" in Path("/proc/thread-self/net/tcp").read_text()


def has_tcp_socket() -> bool:
    """Whether this process has a socket of the kernel's TCP and IPv4 that is bound or connected."""
    table = Path("/proc/thread-self/net/tcp").read_text().splitlines()
    inodes = {line.split()[9] for line in table[1:]}
    links = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return any(link[len("socket:[") : -1] in inodes for link in links if link.startswith("socket:["))
