"""How packets leave and arrive: the seam below the software device.

A wire is UDP port 4791 of a network namespace (:mod:`rdmacm.soft.wire.udp`), or an imagined network
(:mod:`rdmacm.testing`). What goes over it begins with a BTH and ends with an ICRC.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

from rdmacm.proto.wire import Buffer
from rdmacm.provider import Tap

__all__ = ["Received", "Wire", "WirePath", "WireRoute"]


class WirePath(NamedTuple):
    """One port of ours and one of a peer's: packed IP addresses, and for link-local ones the interface index."""

    local: bytes
    remote: bytes
    scope_id: int = 0


#: (data, segment, remote, local). ``data`` is valid until the next ``receive()``; with ``segment`` > 0 it is a train
#: of packets of that size, the last one perhaps shorter. ``remote`` is the socket address it came from, ``local`` the
#: packed address it came to.
Received: TypeAlias = "tuple[memoryview, int, tuple[str, int] | tuple[str, int, int, int], bytes]"


class WireRoute(Protocol):
    """A path as a wire wants it, to be kept by whoever sends there often."""

    path: WirePath
    #: How datagrams that come back along it name their sender: ``received.remote[0]``.
    remote_host: str
    #: The UDP port that packets leave from.
    source_port: int


class Wire(Protocol):
    """``slot`` is the top byte of the QP numbers whose packets arrive here, 1..255; known once opened."""

    slot: int
    #: Where set, is shown every packet and train that passes (:data:`rdmacm.provider.Tap`).
    tap: Tap | None

    def open(self) -> None:
        """Begin to receive. EADDRINUSE where somebody else has the port, EACCES where another user has."""

    def close(self) -> None: ...

    def abandon(self) -> None:
        """In a child of fork(2): let go of what is the parent's, without harm to it."""

    def filenos(self) -> Sequence[int]:
        """Descriptors that poll readable when :meth:`receive` has something; none before :meth:`open`."""

    def aside(self) -> Sequence[int]:
        """Descriptors that poll readable when something has come for any process of this host, and is left to others.

        Others may be gone or busy: what waits there for a while is to be taken, see :meth:`look_aside`.
        """

    def look_aside(self) -> bool:
        """Whether something waits there; the next :meth:`receive` takes it."""

    def receive(self, glance: bool = False) -> Sequence[Received]:
        """What has arrived, a bounded number at a time; never waits.

        ``glance``: for a caller that comes again at once, and need not be told of everything each time.
        """

    def route(self, path: WirePath, traffic_class: int = 0) -> WireRoute: ...

    def send(self, route: WireRoute, buffers: Sequence[Buffer], segment: int = 0) -> bool:
        """Send one packet, or with ``segment`` a train; False where the system had no room (a lost packet)."""

    def can_segment(self) -> int:
        """How many bytes of packets a train may have; 0 where there are no trains."""

    def listen(self, service_id: int, local: bytes | None) -> object:
        """Let requests for a service id (to one local address, or any) come to this process; returns a token."""

    def unlisten(self, token: object) -> None: ...
