"""What the user is told about a program on standard error: ``--explain``, and why a connection has failed."""

from __future__ import annotations

import sys
from contextlib import suppress
from socket import AF_INET, AF_INET6, inet_ntop

from rdmacm.address import InetAddr
from rdmacm.constants import CmEventType
from rdmacm.errors import printable
from rdmacm.explanation import Explanation, RouteUsed
from rdmacm.net import Network
from rdmacm.provider import IdBackend, QueuedEvent

#: Peers whose holes are told of one program.
_MOST_HOLES = 16


class Teller:
    """Writes lines about a program."""

    def __init__(self, pid: int) -> None:
        self._program = f"{_name_of(pid)}[{pid}]"
        #: The peers of which holes were told: a program may have many connections to each.
        self._holes: set[bytes] = set()

    def hole(self, network: Network, peer: bytes, qp_num: int, arrived: int, lost: int) -> None:
        """Long packets to a peer do not arrive."""
        if peer in self._holes or len(self._holes) >= _MOST_HOLES:
            return
        self._holes.add(peer)
        from rdmacm.diagnosis.holes import hole_error

        family = AF_INET if len(peer) == 4 else AF_INET6
        host = inet_ntop(family, peer)
        self.line(str(hole_error(arrived, lost, f"QP 0x{qp_num:06x}", host, _route_to(network, family, peer, host))))

    def line(self, what: str, *more: str) -> None:
        """Write a line, and some that belong to it."""
        lines = [f"{self._program}: {what}", *(f"  {line}" for line in more)]
        with suppress(OSError, ValueError):  # standard error may be closed
            sys.stderr.write("".join(f"{printable(line)}\n" for line in lines))
            sys.stderr.flush()


def _route_to(network: Network, family: int, ip: bytes, host: str) -> RouteUsed | None:
    with suppress(OSError):
        found = network.route(family, ip, None, 0, 0)
        name = next((each.name for each in network.interfaces() if each.index == found.ifindex), "")
        gateway = inet_ntop(family, found.gateway) if found.gateway else None
        return RouteUsed(host, found.kind, name, gateway, None, found.table, found.hop_limit, found.mtu)
    return None


class Explanations:
    """The explanations of one program. One is written when the route is resolved, or when a step has failed."""

    def __init__(self, teller: Teller) -> None:
        self._line = teller.line
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


def _name_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            return file.read().rstrip("\n")
    except OSError:
        return "?"
