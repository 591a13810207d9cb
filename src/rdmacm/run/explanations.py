"""``--explain``: why the resolutions of a program had the results that they had, on standard error."""

from __future__ import annotations

import sys
from contextlib import suppress

from rdmacm.address import InetAddr
from rdmacm.constants import CmEventType
from rdmacm.errors import printable
from rdmacm.explanation import Explanation
from rdmacm.provider import IdBackend, QueuedEvent


class Explanations:
    """The explanations of one program. One is written when the route is resolved, or when a step has failed."""

    def __init__(self, pid: int) -> None:
        self._program = f"{_name_of(pid)}[{pid}]"
        #: The ids whose address is resolved, and whose explanation is not written.
        self._resolved: set[IdBackend] = set()

    def see(self, backend: IdBackend, event: QueuedEvent) -> None:
        """An event is on its way to the program."""
        if event.type is CmEventType.ADDR_RESOLVED:
            self._resolved.add(backend)
        elif event.type is CmEventType.ROUTE_RESOLVED:
            self._resolved.discard(backend)
            self._write(backend, backend.explain())
        elif event.explain is not None:
            self._resolved.discard(backend)
            self._write(backend, event.explain())

    def failed(self, error: Exception) -> None:
        """A command has failed."""
        found = getattr(error, "explanation", None)
        if isinstance(found, Explanation):
            self._write(None, found)

    def looked_up(self, outcome: str) -> None:
        """rdma_getaddrinfo(3) has returned."""
        self._line(f"rdma_getaddrinfo: {outcome}")

    def end(self, backend: IdBackend) -> None:
        """An id is about to be destroyed, perhaps without a route."""
        if backend in self._resolved:
            self._resolved.remove(backend)
            self._write(backend, backend.explain())

    def _write(self, backend: IdBackend | None, found: Explanation) -> None:
        peer = None if backend is None else backend.peer_addr
        if found.node is None and isinstance(peer, InetAddr):
            found = found.replace(node=peer.host, service=str(peer.port))
        self._line("this is resolved" if found.ok else "this is not resolved", *found.text().split("\n"))

    def _line(self, what: str, *more: str) -> None:
        lines = [f"{self._program}: {what}", *(f"  {line}" for line in more)]
        with suppress(OSError, ValueError):  # standard error may be closed
            sys.stderr.write("".join(f"{printable(line)}\n" for line in lines))
            sys.stderr.flush()


def _name_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().rstrip("\n")
    except OSError:
        return "?"
