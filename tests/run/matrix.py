"""librdmacm's tools and ours, each with each, many times: what fails now and then shows here.

One server of ``rdmacm run`` serves all programs of librdmacm. Those of this package are processes with devices of their
own, so both kinds share the port. From the checkout, in a network namespace where nobody else uses it:

    PYTHONPATH=src:tests python tests/run/matrix.py --times 100 --address 127.0.0.1 --address ::1 --only rping

It prints a line for each pair of ends, with the number of runs that failed, and the output of each failure; the status
is 1 if there was one. ``c`` is librdmacm's tool, ``py`` that of this package, and the server comes first. No test runs
it. A pair whose program is not installed is left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rdmacm.run.command import _directory, _library_path, _served, environment_of
from rdmacm.run.server import NO_OPTIONS, Server
from support.clock import eventually

SECONDS = 40


@dataclass(frozen=True)
class Tool:
    """A pair of programs. ``@`` is the server's address, ``%`` a multicast group."""

    name: str
    server: str
    client: str
    #: Whether this package has it too.
    is_ours: bool = True
    #: Whether the server serves until it is stopped.
    goes_on: bool = False
    #: Whether the server listens; a receiver of a group joins it instead, and the route of IPv6's leaves loopback.
    listens: bool = True
    #: Whether the server listens at the address that it is given; else at all of IPv4.
    is_bound: bool = True

    def suits(self, address: str) -> bool:
        """Whether the server can be reached at an address."""
        return ":" not in address or (self.is_bound and (self.listens or address != "::1"))


TOOLS = (
    Tool("rping", "rping -s -a @ -C 5 -V", "rping -c -a @ -C 5 -V"),
    Tool("ucmatose", "ucmatose -b @ -c 5 -C 5 -S 3000", "ucmatose -s @ -c 5 -C 5 -S 3000"),
    Tool("udaddy", "udaddy -b @ -c 3", "udaddy -s @ -c 3"),
    Tool("mckey", "mckey -m % -b @ -C 5", "mckey -m % -b @ -C 5 -s", listens=False),
    Tool("cmtime", "cmtime -b @", "cmtime -s @ -c 50", goes_on=True),
    Tool("rdma_server", "rdma_server -s @", "rdma_client -s @", is_ours=False),
    Tool("rdma_xserver -c r", "rdma_xserver -c r", "rdma_xclient -c r -s @", is_ours=False, is_bound=False),
    Tool("rdma_xserver -c x", "rdma_xserver -c x", "rdma_xclient -c x -s @", is_ours=False, is_bound=False),
)


class Matrix:
    """Runs pairs. ``environment``: of programs of librdmacm."""

    def __init__(self, served: Server, environment: Mapping[str, str]) -> None:
        self._listeners = served.provider.host.cm._listeners
        self._environment = environment

    @contextmanager
    def _started(self, command: str, of: str, output: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
        words = command.split()
        argv, variables = (words, self._environment) if of == "c" else ([sys.executable, "-m", "rdmacm", *words], {})
        environment = {**os.environ, **variables}
        with subprocess.Popen(argv, env=environment, stdout=output, stderr=subprocess.STDOUT) as program:
            try:
                yield program
            finally:
                program.kill()

    def once(self, tool: Tool, ends: tuple[str, str], address: str) -> str:
        """One run; what is wrong, or nothing."""
        group = "ff05::7471" if ":" in address else "239.1.2.3"
        server, client = (text.replace("@", address).replace("%", group) for text in (tool.server, tool.client))
        with ExitStack() as stack:
            heard, printed = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            serving = stack.enter_context(self._started(server, ends[0], heard))
            eventually(
                lambda: (
                    (self._is_listening(ends[0], heard) if tool.listens else _is_joined(group))
                    or serving.poll() is not None
                )
            )
            asking = stack.enter_context(self._started(client, ends[1], printed))
            wrong = _wait(asking, "client")
            if not wrong and not tool.goes_on:
                wrong = _wait(serving, "server")
            if not wrong and tool.goes_on and serving.poll() is not None:
                wrong = f"the server has ended with {serving.returncode}"
            if wrong:
                for name, output in (("server", heard), ("client", printed)):
                    output.seek(0)
                    wrong += f"\n--- {name}\n" + output.read().decode(errors="replace")[-1500:]
        eventually(lambda: not self._listeners and not _is_joined(group))
        return wrong

    def _is_listening(self, of: str, heard: IO[bytes]) -> bool:
        if of == "c":
            return bool(self._listeners)
        return b"listening" in os.pread(heard.fileno(), 1000, 0)


def _is_joined(group: str) -> bool:
    """Whether a process of this network namespace is a member of a group."""
    if ":" in group:
        return socket.inet_pton(socket.AF_INET6, group).hex() in Path("/proc/net/igmp6").read_text()
    return socket.inet_aton(group)[::-1].hex().upper() in Path("/proc/net/igmp").read_text()


def _wait(program: subprocess.Popen[bytes], name: str) -> str:
    try:
        status = program.wait(SECONDS)
    except subprocess.TimeoutExpired:
        return f"the {name} does not end"
    return f"the {name} ends with {status}" if status else ""


@contextmanager
def _matrix() -> Iterator[Matrix]:
    is_over = threading.Event()
    with _directory(_library_path()) as place, _served(place, NO_OPTIONS) as server:
        thread = threading.Thread(target=server.serve, args=(is_over.is_set,))
        thread.start()
        try:
            yield Matrix(server, environment_of(place, server.path))
        finally:
            is_over.set()
            server.wake()
            thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description="librdmacm's tools and ours, each with each, many times")
    parser.add_argument("--times", type=int, default=10, help="runs of each pair (10)")
    parser.add_argument("--address", action="append", help="of the server, several times (127.0.0.1 and ::1)")
    parser.add_argument("--only", default="", help="tools whose name begins so")
    parser.add_argument("--ends", action="append", choices=["c-c", "c-py", "py-c"], help="several times (all)")
    arguments = parser.parse_args()
    is_wrong = False
    with _matrix() as matrix:
        for tool in TOOLS:
            if not tool.name.startswith(arguments.only) or shutil.which(tool.server.split()[0]) is None:
                continue
            for pair in arguments.ends or ["c-c", "c-py", "py-c"]:
                server, _, client = pair.partition("-")
                if "py" in (server, client) and not tool.is_ours:
                    continue
                for address in filter(tool.suits, arguments.address or ["127.0.0.1", "::1"]):
                    found = [matrix.once(tool, (server, client), address) for _ in range(arguments.times)]
                    failures = [each for each in found if each]
                    is_wrong = is_wrong or bool(failures)
                    print(f"{tool.name} {pair} {address}: {len(failures)} of {len(found)} failed", flush=True)
                    for each in failures:
                        print(each, flush=True)
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
