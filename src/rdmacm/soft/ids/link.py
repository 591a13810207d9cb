"""The seams between an id, its addresses, and the network it is on: RoCE or InfiniBand, or a wire yet to be added.

The *resolver* of an id goes with the family of its addresses: it binds them, and resolves a destination to a port and a
GID. The *link* goes with the port: it finds the path to the peer, and describes that path to the connection manager.
IP addresses lead to RoCE ports, and by IPoIB to InfiniBand ports.

**A new wire must provide** a :class:`Link` for its ids. A wire that connects without the InfiniBand connection manager
provides a :class:`rdmacm.soft.ids.connector.Connector` as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from rdmacm.address import Address
from rdmacm.errors import Failure
from rdmacm.explanation import Explanation, Step
from rdmacm.proto.cm.codes import ApStatus, FailoverAccepted, RejectReason
from rdmacm.proto.cm.messages import Path
from rdmacm.proto.sa import PathRecord
from rdmacm.verbs.attr import AHAttr
from rdmacm.verbs.enums import AccessFlag

if TYPE_CHECKING:
    from collections.abc import Hashable

    from rdmacm.errors import RdmaError
    from rdmacm.net.types import Neighbour
    from rdmacm.proto.cm.connection import CmConnection
    from rdmacm.provider import ServiceBackend
    from rdmacm.provider.multicast import GroupJoin
    from rdmacm.soft.connection_manager import ConnectionManager

#: The reason and the additional information of a REJ.
Refusal: TypeAlias = tuple[RejectReason, bytes]

#: Exponent of 4.096 µs: the longest time that this device takes to acknowledge, 0.13 s.
CA_ACK_DELAY = 15

#: See :attr:`Link.access`: of an adapter, and of a software device, which has FLUSH as well.
ADAPTER_ACCESS = (
    AccessFlag.REMOTE_WRITE,
    AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_ATOMIC,
)
SOFTWARE_ACCESS = ADAPTER_ACCESS[0], ADAPTER_ACCESS[1] | AccessFlag.FLUSH_GLOBAL | AccessFlag.FLUSH_PERSISTENT

#: The Q_Key of Linux's rdma_cm for the port spaces UDP and IB.
UDP_QKEY = 0x01234567


class AddressLookup(Protocol):
    """A resolution of an address, finished or not (:mod:`rdmacm.resolution`)."""

    #: Name, nanoseconds and result of each step taken.
    steps: list[tuple[str, int, str]]

    def explain(self, node: str | None, failure: Failure | None, extra: tuple[Step, ...] = ()) -> Explanation:
        """Everything that is known, ending in ``failure`` if there is one; ``extra`` steps come first."""


class Resolver(Protocol):
    """Resolves addresses for one id. Every method is called with the runtime's lock held and works on the id's core.

    A resolution that has begun is the ``lookup`` of the core.
    """

    def bind(self, address: Address) -> Address:
        """Bind the id to an address: its device first, then the port number. Returns the address with its port number.

        Failure when no device has the address; RdmaError (EADDRINUSE, EACCES) when the port number cannot be taken.
        """

    def resolve_addr(self, destination: Address, origin: str, timeout_ms: int) -> None:
        """Resolve ``destination``: ADDR_RESOLVED or ADDR_ERROR is posted, at once or within ``timeout_ms``.

        ``origin`` says where the source address comes from: "given" or "bound". The state becomes ADDR_QUERY and, with
        the event, ADDR_RESOLVED or ADDR_BOUND. RdmaError when the routing tables or the ports exclude the destination.
        """

    def stop(self) -> None:
        """Cancel the resolution, without an event."""

    def neighbour_changed(self, neighbour: Neighbour) -> None:
        """Post UNREACHABLE if the peer is this neighbour, and its hardware address is not the one it had before."""

    def managers(self) -> list[ConnectionManager]:
        """The connection managers that may receive a request for this id when it listens."""


class Link(Protocol):
    """The way to the peer of one id. Every method is called with the runtime's lock held and works on the id's core.

    Its users are :class:`rdmacm.soft.ids.identifier.SoftId` and, for the last part, the connector of the id.
    """

    def resolve_route(self, timeout_ms: int, alternate: bool) -> None:
        """Find the paths to the peer: ROUTE_RESOLVED or ROUTE_ERROR is posted within ``timeout_ms``.

        ``alternate`` asks for a second path as well.
        """

    def resolve_service(self, service: str) -> None:
        """Query a service by name or number: ADDRINFO_RESOLVED or ADDRINFO_ERROR is posted.

        EOPNOTSUPP when there is no subnet administrator. An id with IP addresses has AF_IB addresses afterwards.
        """

    def register_service(
        self, name: bytes, lease: int, data: bytes, done: Callable[[RdmaError | None], None]
    ) -> ServiceBackend:
        """Register a service at the id's service id; EOPNOTSUPP also for an id with IP addresses."""

    def stop(self) -> None:
        """Cancel every query and withdraw every service, without an event."""

    def check_request(self, connection: CmConnection, has_header: bool, cm: ConnectionManager) -> Refusal | None:
        """The reason and the additional information of a REJ if a request to ``cm`` does not fit this host, else None.

        ``has_header``: the private data may begin with the IP addresses; they do not in a request between AF_IB
        addresses.
        """

    def accept_request(self, connection: CmConnection, has_header: bool, cm: ConnectionManager) -> Refusal | None:
        """Set addresses, port, GIDs and path from a request, which makes this id the passive side.

        The arguments, and the result if nothing is set, are those of :meth:`check_request`.
        """

    def join_multicast(self, join: GroupJoin, group: Address, send_only: bool) -> None:
        """See :class:`rdmacm.provider.multicast.MulticastBackend`. The id is bound to a port and of type UD."""

    def leave_multicast(self, join: GroupJoin) -> None:
        """End a join, which this link has; no event follows."""

    @property
    def pkey_index(self) -> int:
        """The index of :meth:`partition` in the port's P_Key table."""

    def default_qkey(self) -> int:
        """The Q_Key of a datagram id that the application gives none; EADDRNOTAVAIL if it is not known yet."""

    # -- for the connector ----------------------------------------------------------------------------

    #: What the peer may do with local memory: without READs and atomics of its own in progress, and with them.
    access: tuple[AccessFlag, AccessFlag]
    #: What a REP says of an alternate path that is not among the paths of the id.
    no_failover: FailoverAccepted

    @property
    def cm(self) -> ConnectionManager:
        """The connection manager of the port that the id is bound to."""

    def cm_path(self, path: PathRecord) -> Hashable:
        """The address of the peer's connection manager at the end of one of the id's paths.

        For :meth:`rdmacm.soft.connection_manager.Gsi.send_mad`.
        """

    def partition(self) -> int:
        """The P_Key of the connection."""

    def request_path(self, path: PathRecord) -> Path:
        """A path as a REQ carries it, with the id's ACK timeout, or one for the path if the id has none."""

    def path_fault(self, alternate: Path) -> ApStatus | None:
        """Why an alternate path of the peer's does not lead to the id's port; None if it does."""

    def why_no_alternate(self, path: PathRecord) -> str:
        """Why a path does not begin at the id's port, in words; empty if it does."""

    def address_vector(self, path: PathRecord) -> AHAttr:
        """The address vector of a queue pair that sends to the peer, by one of the id's paths."""
