"""The seam between an id and the network it is on: RoCE or InfiniBand, and any wire that is added.

**What a new wire must provide to an id** is a :class:`Link`: how an address is bound, how a destination becomes a
device, a GID and a path, and what the messages of a connection manager need to know of that path. A wire that connects
without the InfiniBand connection manager provides a :class:`rdmacm.soft.ids.connector.Connector` as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from rdmacm.address import Address
from rdmacm.explanation import Explanation, Step
from rdmacm.failure import Failure
from rdmacm.proto.cm.messages import REQ, SIDR_REQ, Path
from rdmacm.proto.sa import PathRecord
from rdmacm.verbs.attr import AHAttr

if TYPE_CHECKING:
    from collections.abc import Hashable

    from rdmacm.errors import RdmaError
    from rdmacm.proto.cm.codes import RejectReason
    from rdmacm.provider import ServiceBackend
    from rdmacm.soft.connection_manager import ConnectionManager

__all__ = ["Link", "LookupOfLink"]


class LookupOfLink(Protocol):
    """A resolution, finished or not (:mod:`rdmacm.resolution`)."""

    #: Name, nanoseconds and detail of each step taken.
    steps: list[tuple[str, int, str]]

    def explain(self, node: str | None, failure: Failure | None, extra: tuple[Step, ...] = ()) -> Explanation:
        """Everything that is known, ending in ``failure`` if there is one."""


class Link(Protocol):
    """One id's way to its peer. Every method is called with the runtime's lock held and works on the id's core."""

    @property
    def lookup(self) -> LookupOfLink | None:
        """The last address resolution; None before the first."""

    @property
    def cm(self) -> ConnectionManager:
        """The connection manager of the device that the id is bound to."""

    def managers(self) -> list[ConnectionManager]:
        """The connection managers that may get a request for this id when it listens."""

    def bind(self, address: Address) -> Address:
        """Bind the id to an address: the device first, then the port. Returns the address with its port.

        Failure when no device has the address; RdmaError (EADDRINUSE, EACCES) when the port cannot be taken.
        """

    def resolve_addr(self, destination: Address, origin: str, timeout_ms: int) -> None:
        """Resolve ``destination``: ADDR_RESOLVED or ADDR_ERROR is posted, at once or within ``timeout_ms``.

        ``origin`` says where the source address came from: "given" or "bound". RdmaError for a destination that cannot
        be reached whatever happens. The state is moved to ADDR_QUERY and, with the event, on from there.
        """

    def resolve_route(self, timeout_ms: int, alternate: bool) -> None:
        """Find the paths to the peer: ROUTE_RESOLVED or ROUTE_ERROR is posted within ``timeout_ms``."""

    def resolve_service(self, service: str) -> None:
        """Ask for a service by name: ADDRINFO_RESOLVED or ADDRINFO_ERROR is posted.

        EOPNOTSUPP when there is no subnet administrator.
        """

    def register_service(
        self, name: bytes, lease: int, data: bytes, done: Callable[[RdmaError | None], None]
    ) -> ServiceBackend:
        """Register a service at the id's service id; EOPNOTSUPP without an administrator."""

    def stop(self) -> None:
        """Abandon whatever is in progress; nothing is posted for it any more."""

    # -- for the connector ----------------------------------------------------------------------------

    def accept_request(
        self, request: REQ | SIDR_REQ, path: Hashable, cm: ConnectionManager
    ) -> tuple[RejectReason, bytes] | None:
        """Become the passive side of a request: addresses, device, GIDs and path.

        Returns the reason and the additional information of a REJ when that is not possible.
        """

    def cm_path(self) -> Hashable:
        """The address of the peer's connection manager, for :meth:`rdmacm.soft.connection_manager.Gsi.send_mad`."""

    def partition(self) -> int:
        """The P_Key of the connection."""

    def pkey_index(self) -> int:
        """The index of that P_Key in the port's table."""

    def request_path(self, path: PathRecord, local_ack_timeout: int) -> Path:
        """A path as a REQ carries it."""

    def address_vector(self) -> AHAttr:
        """The address vector of a queue pair that sends to the peer."""
