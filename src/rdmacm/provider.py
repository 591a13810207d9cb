"""The seam between the API and what carries it.

A provider owns devices and the machinery of ids; the API objects (:class:`rdmacm.CmId`,
:class:`rdmacm.EventChannel`) hold one backend each and add what the manual pages say about events, reference
counts and synchronous mode. A provider is chosen per network namespace: by argument, else by the environment
variable ``RDMACM_PROVIDER``, else the first that works here.
"""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast

from rdmacm.address import Gid, InetAddr, SockAddrIB
from rdmacm.cmstate import State
from rdmacm.connparam import ConnParam, Ece, UdParam
from rdmacm.constants import CmEventType
from rdmacm.errors import RdmaError, cm_error
from rdmacm.explanation import Explanation, Step
from rdmacm.proto.sa import PathRecord
from rdmacm.proto.wire import Buffer
from rdmacm.verbs.attr import QPAttr
from rdmacm.verbs.backend import DeviceBackend
from rdmacm.verbs.device import Context, Device
from rdmacm.verbs.enums import QPAttrMask, QPState
from rdmacm.verbs.qp import QP

if TYPE_CHECKING:
    from rdmacm.proto.sa.subnet import ServiceRecord

__all__ = [
    "Address",
    "EventQueue",
    "FoundServices",
    "IdBackend",
    "IdOptions",
    "Provider",
    "QueuedEvent",
    "RouteChoice",
    "ServiceBackend",
    "Tap",
    "get_provider",
]

T = TypeVar("T")

#: (outgoing, local, remote, source_port, dest_port, data, segment): packets that pass. The addresses are packed, the
#: ports those in the packets' UDP headers. ``data`` is one packet from its BTH to its ICRC, whole or in pieces, or
#: with ``segment`` > 0 a train of packets of that size, the last one perhaps shorter; it is not kept.
Tap: TypeAlias = "Callable[[bool, bytes, bytes, int, int, Sequence[Buffer] | memoryview, int], None]"

#: Addresses as they cross the seam: parsed.
Address: TypeAlias = InetAddr | SockAddrIB


class Owner(Protocol):
    """The API object a backend works for."""

    def reported(self) -> None:
        """An event of this owner is being handed to the calling thread."""


class QueuedEvent(NamedTuple):
    """An event on its way to the application; ``owner`` is the API object the backend was made for.

    ``status`` follows rdma_get_cm_event(3): 0, a negative errno, or a positive transport code. ``explain`` makes
    the explanation of a failure when somebody asks for it. A connection event carries ``param``; CONNECT_REQUEST,
    which is its listener's, also the backend of the id that the request makes.
    """

    owner: Any
    type: CmEventType
    status: int = 0
    arg: int = 0
    explain: Callable[[], Explanation] | None = None
    message: str = ""
    param: ConnParam | UdParam | None = None
    new_id: IdBackend | None = None


class RouteChoice(NamedTuple):
    """What a host would use to reach a destination: the answer of :meth:`Provider.find_route`."""

    source: InetAddr | SockAddrIB
    device: str
    port_num: int
    gid_index: int
    path: PathRecord


class EventQueue(Protocol):
    """Where events wait for a reader; one per channel. Waiting on it drives the provider."""

    def fileno(self) -> int:
        """A descriptor that polls readable when :meth:`get` may have something."""

    def get(self, timeout: float | None) -> QueuedEvent | None:
        """The next event, waiting up to ``timeout`` seconds (None: for ever); None when there was none.

        The event's owner is told of the hand-over (:meth:`Owner.reported`) before anything else can happen to it.
        """

    def post(self, event: QueuedEvent) -> None:
        """Add an event; from any thread."""

    #: Called whenever an event is added, by whichever thread adds it and with the provider's lock held.
    notify: Callable[[], None] | None

    def take(self, owner: object) -> list[QueuedEvent]:
        """Remove and return the waiting events of one owner."""

    def close(self) -> None:
        """Release the descriptors; a reader that waits gets EBADF."""


@dataclass(slots=True)
class IdOptions:
    """What rdma_set_option(3) sets; None where the default holds."""

    tos: int | None = None
    reuseaddr: bool = False
    afonly: bool | None = None
    ack_timeout: int | None = None


class ServiceBackend(Protocol):
    """A service that the subnet administrator knows."""

    record: ServiceRecord

    def withdraw(self, done: Callable[[RdmaError | None], None] | None = None) -> None: ...


class FoundServices(NamedTuple):
    """Services that an InfiniBand port's subnet administrator knows, and that port."""

    gid: Gid
    device: str
    port_num: int
    records: tuple[ServiceRecord, ...]


class IdBackend(Protocol):
    """One id inside a provider. Calls raise :class:`rdmacm.RdmaError`; outcomes arrive on the queue."""

    state: State
    options: IdOptions
    local_addr: Address | None
    peer_addr: Address | None
    verbs: Context | None
    port_num: int
    gid_index: int
    sgid: Gid
    dgid: Gid
    pkey: int
    paths: tuple[PathRecord, ...]
    services: tuple[ServiceRecord, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        """What has been done so far and how long each took."""

    def bind_addr(self, address: Address) -> None: ...

    def resolve_addr(self, source: Address | None, destination: Address, timeout_ms: int) -> None: ...

    def resolve_route(self, timeout_ms: int, alternate: bool = False) -> None: ...

    def resolve_service(self, service: str) -> None:
        """Ask for a service of InfiniBand's; what is found is in :attr:`services` then, the first as destination."""

    def register_service(
        self, name: bytes, lease: int, data: bytes, done: Callable[[RdmaError | None], None]
    ) -> ServiceBackend:
        """Tell the subnet administrator of a service at the id's service id, now and before ``lease`` seconds end.

        ``done`` is called once it has answered, with what went wrong.
        """

    def set_option(self, level: int, name: int, value: int | bytes) -> None: ...

    def migrate(self, queue: EventQueue) -> None: ...

    def listen(self, backlog: int) -> None: ...

    def connect(self, param: ConnParam) -> None: ...

    def accept(self, param: ConnParam) -> None: ...

    def reject(self, private_data: bytes, reason: int) -> None: ...

    def establish(self) -> None: ...

    def notify(self, event: int) -> None: ...

    def disconnect(self) -> bool:
        """Fail the queue pair and tell the peer; whether DISCONNECTED will follow."""

    def init_qp_attr(self, state: QPState) -> tuple[QPAttr, QPAttrMask]:
        """What a queue pair of this id needs to get to a state."""

    def set_local_ece(self, ece: Ece) -> None: ...

    def remote_ece(self) -> Ece: ...

    def adopt(self, owner: Owner) -> None:
        """The application has taken this id, which a request has made; ``owner`` stands for it from now on."""

    def attach_qp(self, qp: QP | None) -> None:
        """The queue pair that connecting and disconnecting takes along, in its first state from now on; None for one
        that the user cares for."""

    def explain(self) -> Explanation:
        """The last resolution of this id."""

    def destroy(self) -> None: ...


class Provider(Protocol):
    """What a way of carrying the API must offer."""

    name: str
    #: The time all its deadlines are in, as seconds that only go forward.
    clock: Callable[[], float]
    #: Where set, is shown the packets that pass (:data:`Tap`).
    tap: Tap | None

    def devices(self) -> tuple[Device, ...]:
        """Every device, as it is now."""

    def open_device(self, name: str) -> DeviceBackend:
        """A device to create memory regions, completion queues and queue pairs on; ENODEV where there is none."""

    def open_queue(self) -> EventQueue: ...

    def create_id(self, queue: EventQueue, owner: Owner, port_space: int, qp_type: int) -> IdBackend: ...

    def drive(self, done: Callable[[], T], timeout: float | None) -> T:
        """Make progress until ``done()`` returns something true, for ``timeout`` seconds (None: for ever, 0: once).

        Returns what ``done()`` said last. Every wait goes through here. ``done`` is called under the provider's lock
        and must not wait.
        """

    def find_route(self, destination: InetAddr, source: InetAddr | None) -> RouteChoice | None:
        """What the host would use to reach a destination; None where it cannot be reached. Never waits."""

    def find_path(
        self, destination: SockAddrIB, source: SockAddrIB | None, like: PathRecord | None
    ) -> RouteChoice | None:
        """As :meth:`find_route`, to an InfiniBand port. The path is the subnet administrator's, who is waited for.

        ``like``: a path whose fields it has to have, where they are not 0.
        """

    def find_services(self, service: str) -> FoundServices | None:
        """Ask for a service at each active InfiniBand port in turn, and wait; None where no port knows one."""

    def explain_route(self, destination: InetAddr, source: InetAddr | None) -> Explanation:
        """As :meth:`find_route`, with the reasons."""

    def owner_of(self, address: InetAddr) -> tuple[str, int] | None:
        """The device and port that own a local address, or None."""


ENVIRONMENT = "RDMACM_PROVIDER"

#: Known providers: name → module with ``open_provider()``. Imported when chosen, so that nothing above the seam
#: depends on any of them.
_MODULES = {"soft": "rdmacm.soft"}
_openers: dict[str, Callable[[], Provider]] = {}


def get_provider(provider: str | Provider | None = None) -> Provider:
    """The provider to use in the calling thread's network namespace.

    ``provider``: a provider object (used as it is), a name, or None for the environment's choice and then the
    automatic one, which is the software device. ENODEV for a name that is unknown or cannot work here.
    """
    if provider is not None and not isinstance(provider, str):
        return provider
    name = provider or os.environ.get(ENVIRONMENT) or "soft"
    opener = _openers.get(name)
    if opener is None:
        module = _MODULES.get(name)
        if module is None:
            origin = "argument" if provider else f"environment variable {ENVIRONMENT}"
            raise cm_error(
                errno.ENODEV,
                f"no provider {name!r} (from the {origin})",
                "provider",
                hint=f"one of: {', '.join(sorted(_MODULES))}",
            )
        opener = _openers[name] = cast("Callable[[], Provider]", importlib.import_module(module).open_provider)
    return opener()
