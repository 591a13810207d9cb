"""The seam between the API and what carries it, and how a provider is chosen.

A provider owns the devices, the connection management and the progress of one network namespace. This module is the
half of the seam for connection management, :mod:`rdmacm.verbs.backend` the half for queue pairs and memory. Each API
object (:class:`rdmacm.CmId`, :class:`rdmacm.EventChannel`, the classes of :mod:`rdmacm.verbs`) holds one backend. The
API does what is the same for every provider: it parses addresses, checks what can be checked without a device, counts
references and events, resolves names, and makes synchronous calls of asynchronous ones. The rules below hold for both
modules.

**A new provider** is a class with the methods of :class:`Provider`, objects for :class:`EventQueue` and
:class:`IdBackend`, and devices as in :mod:`rdmacm.verbs.backend`. It says what it can do (:mod:`rdmacm.capabilities`).
Its module has ``open_provider()`` and an entry in :mod:`rdmacm.provider.choice`. The scenarios of ``tests/conformance``
must pass on it.

Errors
    A call that fails raises :class:`~rdmacm.errors.RdmaError` (made by :func:`~rdmacm.errors.cm_error`), leaves
    everything as it was, and posts no event, unless its docstring says otherwise. What fails after the call has
    returned is an event with a negative errno in ``status``, or a completion with an error status. ``EINVAL: the
    state`` means :class:`~rdmacm.errors.CmStateError` with the errno of :func:`rdmacm.provider.cmstate.refusal`. Any
    call may also fail because the system has run out of a resource: ENOMEM, EMFILE, ENOBUFS.

Threads and the lock
    Every method may be called from any thread. A provider has one lock, which it takes by itself. Code of the API runs
    with that lock held in these places only: ``done`` of :meth:`Provider.drive`, ``notify`` of an event queue or a
    completion queue, :meth:`Owner._reported`, and ``done`` of a service or a path. So two threads are never in such
    code of one provider at the same time; the state of endpoints relies on that. The code does not wait, but it may
    call any method of the seam with a timeout of 0: the lock is re-entrant, and a provider calls the API only where its
    own data are consistent. The API may hold a lock of its own while it calls :meth:`EventQueue.post`; none of the
    callbacks takes that lock. The garbage collector may call ``destroy`` and ``close`` in any thread at any time, also
    in one that is inside the provider.

Waiting
    :meth:`Provider.drive`, :meth:`Provider.find_path`, :meth:`Provider.find_services`, :meth:`EventQueue.get`,
    ``ChannelBackend.get`` and ``CQBackend.wait`` may wait. No other call waits for a peer, a subnet administrator or
    another thread's wait. A ``timeout`` is in seconds of :attr:`Provider.clock`, None for ever, 0 not at all; a
    ``timeout_ms`` is in milliseconds. A wait ends early by an exception only (KeyboardInterrupt among them).

Progress
    A provider may make its progress in the threads that wait or poll, in threads of its own, or in the kernel. As long
    as an event queue or a completion queue is open, it serves peers even if the application calls nothing: it answers
    requests and one-sided operations, retransmits, and lets timers fire (a simulated provider: while a thread waits). A
    descriptor to poll (``fileno``) is readable when there is something to fetch; where callers make the progress, also
    when there is progress to be made. A fetch with timeout 0 then makes it, and may find nothing.

Life
    A backend lives until its ``destroy``, ``close`` or ``dereg``, which happens once; an id's ``destroy`` may come
    again, and does nothing. The API releases dependents first: queue pairs before their completion queues and shared
    receive queues, completion queues before their channel, ids before their event queue. A queue pair is detached from
    its id before it is destroyed; the id may be destroyed before both. No callback, event or completion of an object
    follows once its release has returned. A device has no release: a provider may let go of descriptors and threads
    once the last event queue and completion queue is closed, and take them again at the next. A process may end with
    objects left; a provider that wants peers to know registers its own exit handler.

Fork
    In a child of fork(2), everything made before belongs to the parent. There, calls that wait, open or start something
    raise EBADF; releasing calls free what the child holds, with no effect on the parent and no message to any peer. The
    opener of :func:`get_provider` returns a new provider in the child.

Explanations
    A resolution that fails carries an :class:`~rdmacm.explanation.Explanation`: as ``explanation`` of the error, or
    through ``explain`` of the event. ``explain`` is called later, if at all, in any thread, without the lock, perhaps
    after the id is destroyed; it describes what was found then, and looks nothing up.

Asynchronous events, ibv_get_async_event(3)
    A device reports them to the queues of its contexts (:class:`rdmacm.verbs.backend.AsyncQueueBackend`), which perhaps
    nobody reads. So a provider acts on them itself as well: COMM_EST of an attached queue pair establishes its
    connection (:meth:`IdBackend.attach_qp`); a queue pair that fails is in ERR and flushes its work; a completion queue
    that overflows raises EOVERFLOW; a device that goes away is an event of each id bound to it (DEVICE_REMOVAL), as is
    a change of its addresses (ADDR_CHANGE).
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

from rdmacm.address import Address, Gid, InetAddr
from rdmacm.constants import CmEventType
from rdmacm.errors import RdmaError, cm_error
from rdmacm.explanation import Explanation, Step
from rdmacm.proto.sa import PathRecord
from rdmacm.proto.wire import Buffer
from rdmacm.provider.choice import opener_of
from rdmacm.provider.cmstate import State
from rdmacm.provider.connparam import ConnParam, Ece, UdParam
from rdmacm.provider.counters import Counters
from rdmacm.provider.multicast import GroupJoin, MulticastBackend
from rdmacm.provider.udp import UdpSocket
from rdmacm.verbs.attr import QPAttr
from rdmacm.verbs.backend import DeviceBackend
from rdmacm.verbs.device import Context, Device
from rdmacm.verbs.enums import QPAttrMask, QPState
from rdmacm.verbs.qp import QP

if TYPE_CHECKING:
    from rdmacm.capabilities import Capabilities
    from rdmacm.proto.sa.subnet import ServiceRecord

__all__ = [
    "EventQueue",
    "FoundServices",
    "IdBackend",
    "IdOptions",
    "Owner",
    "Provider",
    "QueuedEvent",
    "RouteChoice",
    "ServiceBackend",
    "PathDone",
    "ServiceDone",
    "Tap",
    "Tapped",
    "TellsUndelivered",
    "UndeliveredTap",
    "get_provider",
    "open_device",
]

T = TypeVar("T")

#: Takes the outcome of a request to the subnet administrator: None, or the error.
ServiceDone: TypeAlias = Callable[[RdmaError | None], None]

#: Called once when the peer has answered an offered path: with None, or why it is not the alternate path.
PathDone: TypeAlias = Callable[[RdmaError | None], None]


class Tap(Protocol):
    """Sees the RoCEv2 packets of a provider as they pass its sockets."""

    def __call__(
        self,
        outgoing: bool,
        local: bytes,
        remote: bytes,
        source_port: int,
        dest_port: int,
        data: Sequence[Buffer] | memoryview,
        segment: int,
        /,
    ) -> None:
        """Look at packets, and keep nothing: ``data`` is reused. In any thread, with or without the provider's lock.

        ``local`` and ``remote`` are IP addresses of 4 or 16 bytes, the ports those of the UDP header. ``data`` goes
        from the BTH to the ICRC: one packet where ``segment`` is 0, whole or in pieces; else packets of ``segment``
        bytes each, the last perhaps shorter.
        """


class Tapped(Protocol):
    """A source of packets, which passes them to its tap: a wire of the software device, or a :class:`Provider`."""

    #: Sees each packet; None for none.
    tap: Tap | None


#: Sees the ICMP errors about connection requests: the packet from the BTH on, its first bytes; its destination; the
#: errno (ECONNREFUSED of a closed port, EHOSTUNREACH, ENETUNREACH, EACCES); the address that reports it.
UndeliveredTap: TypeAlias = Callable[[bytes, bytes, int, bytes], None]


@runtime_checkable
class TellsUndelivered(Protocol):
    """A source of packets that learns of those that the network has not delivered."""

    #: Sees each report; None for none.
    undelivered_tap: UndeliveredTap | None


class Owner(Protocol):
    """The API object that an id backend works for. A backend refers to it weakly, or it would never be collected."""

    def _reported(self, thread: int, /) -> None:
        """A thread, which calls this with the lock held, fetches an event of this owner."""


class QueuedEvent(NamedTuple):
    """An event on its way to the application, rdma_get_cm_event(3).

    The types, and what they carry beside ``owner``:

    - ADDR_RESOLVED, ROUTE_RESOLVED, ADDRINFO_RESOLVED: nothing.
    - ADDR_ERROR, ROUTE_ERROR, ADDRINFO_ERROR: ``status``, ``message``, ``explain``.
    - CONNECT_REQUEST: ``param`` of the peer, ``new_id``. The owner is the listener's.
    - CONNECT_RESPONSE, and ESTABLISHED of the active side: ``param`` of the peer's reply.
    - ESTABLISHED of the passive side, TIMEWAIT_EXIT: nothing.
    - REJECTED: ``status`` is the REJ's reason, InfiniBand Architecture 12.6.7.2; a wire with codes of its own maps them
      to 8 (no listener), 28 (the application refused) or another. ``param`` has the private data, ``message`` the
      reason in words.
    - UNREACHABLE: -ETIMEDOUT, or what the network reports: -ECONNREFUSED, -EHOSTUNREACH, -ENETUNREACH, -EACCES ...,
      with ``message``; of a datagram id also the positive status of the SIDR_REP (12.11.2.1), with ``param``. A
      connected id's -ETIMEDOUT: the peer has another hardware address, and the connection stays.
    - CONNECT_ERROR: ``status``, ``message``.
    - DISCONNECTED: 0, or -ETIMEDOUT where the peer never confirmed.
    - DEVICE_REMOVAL: ``message``. ADDR_CHANGE: -ENETDOWN, -EADDRNOTAVAIL or 0 (another hardware address), ``message``.
    - MULTICAST_JOIN, MULTICAST_ERROR: ``join``, and as :class:`rdmacm.provider.multicast.MulticastBackend` says.
    - ALTERNATE_PATH: nothing; :class:`AlternatePathBackend` has the path.
    - USER: the application's ``status`` and ``arg``.
    """

    #: The API object of the id, as it was given to ``create_id`` or ``adopt``.
    owner: Owner
    #: What has happened.
    type: CmEventType
    #: 0, a negative errno, a positive code of the transport; an EAI code where the API resolved a name.
    status: int = 0
    #: The number that rdma_write_cm_event(3) was given.
    arg: int = 0
    #: Makes the explanation of a failed resolution.
    explain: Callable[[], Explanation] | None = None
    #: The cause in words, without address and errno.
    message: str = ""
    #: Seen from this side: ``initiator_depth`` is what this side may have outstanding. The private data are the
    #: message's whole field, with its padding, without any header of the connection manager's.
    param: ConnParam | UdParam | None = None
    #: The id that a CONNECT_REQUEST has made: in state CONNECT, its addresses, device, GIDs and path set.
    new_id: IdBackend | None = None
    #: The join of a multicast group that the event is about.
    join: GroupJoin | None = None


class EventQueue(Protocol):
    """The events of one channel that are not fetched yet."""

    #: Called after each event is added, by the thread that adds it, with the lock held. The API sets it.
    notify: Callable[[], None] | None

    def fileno(self) -> int:
        """A descriptor to poll; -1 once closed."""

    def get(self, timeout: float | None) -> QueuedEvent | None:
        """The oldest event, waiting up to ``timeout`` seconds; None when there was none.

        :meth:`Owner._reported` is called under the lock as the event leaves the queue, so that destroying the id either
        counts the event or discards it. EBADF once the queue is closed, also in threads that were waiting.
        """

    def post(self, event: QueuedEvent) -> None:
        """Add an event, wake those who wait, call :attr:`notify`. Does nothing once closed."""

    def take(self, owner: object) -> list[QueuedEvent]:
        """Remove and return the events of one owner, oldest first."""

    def close(self) -> None:
        """Destroy the ids whose events come here, drop the events and release the descriptor."""


@dataclass(frozen=True, slots=True)
class IdOptions:
    """The options of rdma_set_option(3) at level ID; None where the default holds. Replaced by a change."""

    #: Type of service, 8 bits: the IP header's, or on InfiniBand the path record's traffic class.
    tos: int | None = None
    #: Whether the port may be shared with ids that have this option as well.
    reuseaddr: bool = False
    #: Whether an IPv6 wildcard leaves IPv4 to others; None: as the system does for sockets.
    afonly: bool | None = None
    #: Local ACK timeout: exponent of 4.096 µs.
    ack_timeout: int | None = None


class ServiceBackend(Protocol):
    """A service record that a subnet administrator keeps for an id."""

    #: The record as it was registered.
    record: ServiceRecord

    def withdraw(self, done: ServiceDone | None = None) -> None:
        """Ask the administrator to delete the record; ``done`` is called once, perhaps before this returns.

        A record that is withdrawn already counts as done. Destroying the id withdraws its records.
        """


class FoundServices(NamedTuple):
    """What a subnet administrator knows of a service: the answer of :meth:`Provider.find_services`."""

    #: The GID of the port whose administrator answered.
    gid: Gid
    #: The name of its device.
    device: str
    #: Its number, from 1.
    port_num: int
    #: At least one.
    records: tuple[ServiceRecord, ...]


class RouteChoice(NamedTuple):
    """What a host would use to reach a destination: the answer of ``find_route`` and ``find_path``."""

    #: The source address; its port is that of the source asked for, or 0.
    source: Address
    #: The device's name.
    device: str
    #: The port's number, from 1.
    port_num: int
    #: The row of the source in the port's GID table.
    gid_index: int
    #: The path from the source. None where none is known: of ``find_route`` on InfiniBand, as it asks nobody, and of
    #: ``find_path`` if nobody has answered; a wire without path records, such as iWARP, has none.
    path: PathRecord | None


class AlternatePathBackend(Protocol):
    """The alternate path of one connection (InfiniBand Architecture 12.8)."""

    #: The path that the peer has offered, between ALTERNATE_PATH and :meth:`answer`; None otherwise.
    offered: PathRecord | None

    def allow(self) -> None:
        """Post ALTERNATE_PATH when the peer offers a path that leads to this port; without, the peer is refused."""

    def load(self, path: PathRecord, done: PathDone) -> None:
        """Offer the peer a path. ``done`` is called once, perhaps before this returns.

        With None, and the path is the second of :attr:`IdBackend.paths`; or with ETIMEDOUT (no answer), EOPNOTSUPP or
        ECONNREFUSED (refused), ECONNRESET (the connection ended), ECANCELED (the id was destroyed). EINVAL: the state,
        the passive side, another load, or a path that does not fit the connection.
        """

    def answer(self, status: int) -> None:
        """Answer what the peer has offered, with an :class:`~rdmacm.proto.cm.codes.ApStatus`; EINVAL: nothing is.

        SUCCESS makes it the second path of :attr:`IdBackend.paths`.
        """


class IdBackend(MulticastBackend, Protocol):
    """One rdma_cm_id inside a provider. Its states are those of :mod:`rdmacm.provider.cmstate`.

    The calls of a destroyed id raise :func:`rdmacm.provider.cmstate.destroyed`.
    The API reads the attributes at any time, without the lock; after :meth:`destroy` they may be as they were or as at
    the beginning.
    """

    #: Changes by the tables of :mod:`rdmacm.provider.cmstate` only.
    state: State
    #: The options that are set.
    options: IdOptions
    #: The source; None until bound. An id bound to a wildcard has a specific address once its address is resolved.
    local_addr: Address | None
    #: The destination that was last asked for, or the peer of a request; None before.
    peer_addr: Address | None
    #: The device, as a context that the provider makes; None until the id is bound to one. The contexts of one device
    #: have the same ``backend``, that of :meth:`Provider.open_device`.
    verbs: Context | None
    #: The port of the device, from 1; 0 until bound to a device.
    port_num: int
    #: The GIDs of both ends; the zero GID until known.
    sgid: Gid
    dgid: Gid
    #: The P_Key, 16 bits; 0 until bound to a device, and on a wire without partitions.
    pkey: int
    #: The path records: none until the route is resolved, then the primary, then the alternate where there is one. A
    #: wire without path records makes one of what it knows (GIDs, MTU, hop limit, traffic class, rate).
    paths: tuple[PathRecord, ...]
    #: What :meth:`resolve_service` found; empty before.
    services: tuple[ServiceRecord, ...]

    @property
    def gid_index(self) -> int:
        """The row of :attr:`sgid` in the port's GID table; 0 until bound to a device."""

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of binding and resolving so far, with their durations."""

    @property
    def is_put_off(self) -> bool:
        """Whether the peer has confirmed that it has the request of :meth:`connect`, before its application answers."""

    def explain(self) -> Explanation:
        """The last resolution of this id, and why it came out so; one without ``node`` where there was none."""

    # -- addresses ------------------------------------------------------------------------------------

    def bind_addr(self, address: Address) -> None:
        """Bind to a source, rdma_bind_addr(3): a port number, and for a specific address its device.

        Port 0 takes a free port. EADDRNOTAVAIL: the address is not this host's, the port is taken by or for a
        wildcard, or no port is free; EADDRINUSE: address and port are taken; EACCES: a privileged port; ENODEV: the
        GID is no InfiniBand port's; EPROTONOSUPPORT: the service id is of another port space; EINVAL: the state, a
        link-local address without scope, a P_Key that the port lacks.
        """

    def resolve_addr(self, source: Address | None, destination: Address, timeout_ms: int) -> None:
        """Find device, GIDs and next hop, rdma_resolve_addr(3). Ends in ADDR_RESOLVED or ADDR_ERROR.

        An unbound id is bound first, to ``source`` or to the wildcard of the destination's family; it stays bound when
        this call then raises. ADDR_ERROR: -ETIMEDOUT (no neighbour answered within ``timeout_ms``), -ENODEV or -EINVAL
        (no device on the way, or none that will do), -EADDRNOTAVAIL (the source went away). Raises :meth:`bind_addr`'s
        errors and those of the routing tables (ENETUNREACH, EHOSTUNREACH, EACCES, EINVAL); ENODEV or EINVAL where no
        InfiniBand port will do; EINVAL: the state, a negative timeout, another address family, a source other than the
        one bound to.
        """

    def resolve_route(self, timeout_ms: int, alternate: bool = False) -> None:
        """Find the path, rdma_resolve_route(3). Ends in ROUTE_RESOLVED, with :attr:`paths` set, or ROUTE_ERROR.

        ``alternate`` asks for a second path by other LIDs; it is no failure where there is none. EOPNOTSUPP: the wire
        has no alternate paths. ROUTE_ERROR on InfiniBand: -ETIMEDOUT (no answer of the administrator within
        ``timeout_ms``), -EINVAL (it refused, or knows no path), -EIO (an answer that cannot be read). ENETUNREACH: no
        administrator is known; ENODEV: the port is gone; EINVAL: the state, a timeout of 0 or less, a device whose MTU
        is too small.
        """

    def resolve_service(self, service: str) -> None:
        """Ask the subnet administrator for a service by its name, or by its number as strtoull(3) reads it.

        Ends in ADDRINFO_RESOLVED, with :attr:`services` set and the first of them as destination, or in ADDRINFO_ERROR:
        -ETIMEDOUT, -ENODATA (it is not registered), -EINVAL, -EIO. EOPNOTSUPP: the id's port has no subnet
        administrator, as on Ethernet; ENETUNREACH: none is known; EINVAL: the state, as of an unbound id.
        """

    def register_service(self, name: bytes, lease: int, data: bytes, done: ServiceDone) -> ServiceBackend:
        """Have the subnet administrator keep a service record for the id's service id and port.

        ``name``: 1 to 63 bytes; ``data``: up to 16 bytes; ``lease``: seconds, before whose end the record is registered
        anew as long as the id lives. ``done`` is called once, perhaps before this returns: with None, or with
        ETIMEDOUT, EINVAL (refused), EIO, ENODEV, ENETUNREACH, or ECANCELED where the id was destroyed meanwhile.
        EOPNOTSUPP: the port has no subnet administrator; EINVAL: the id is bound to no device.
        """

    # -- options --------------------------------------------------------------------------------------

    def set_option(self, level: int, name: int, value: int | bytes) -> None:
        """Set an option, rdma_set_option(3). ``value``: a number, or C's representation of it.

        IB_PATH takes ``struct ibv_path_data`` in an array; one that is GMP, PRIMARY and BIDIRECTIONAL becomes the path,
        one that is ALTERNATE and BIDIRECTIONAL the alternate path, and ROUTE_RESOLVED follows. EOPNOTSUPP: an alternate
        path on a wire without; ENOSYS: an unknown option; EINVAL: size, value or state; EADDRINUSE or EADDRNOTAVAIL
        where REUSEADDR or AFONLY would take a port that others hold.
        """

    def migrate(self, queue: EventQueue) -> None:
        """Move the id and its events that are not fetched to another queue of this provider. EINVAL: the state."""

    # -- connections ----------------------------------------------------------------------------------

    def listen(self, backlog: int) -> None:
        """Take requests, rdma_listen(3): CONNECT_REQUESTs of this id's owner, each with a new id. EINVAL: the state.

        ``backlog``: how many wait to be fetched; outside 1 to 1024 it is 1024. Others are dropped. An unbound id gets
        the IPv4 wildcard. EADDRINUSE, EADDRNOTAVAIL: a shared port; EACCES, EADDRINUSE, EBUSY: that of the wire.
        """

    def allow_requests(self, count: int) -> None:
        """Post only ``count`` further CONNECT_REQUESTs; without a call, all. The others stay in the backlog."""

    def adopt(self, owner: Owner) -> None:
        """Give a new id, which the provider has made without one, its API object: events go to ``owner`` from now on.

        Until the application has accepted, no event of the connection is posted.
        """

    def connect(self, param: ConnParam) -> None:
        """Send the request for a connection, or on a datagram id for the peer's queue pair, rdma_connect(3).

        ``param`` is complete: resources within the device's limits, ``qp_num`` the queue pair's. Ends in ESTABLISHED;
        without attached queue pair in CONNECT_RESPONSE instead, and the application calls :meth:`establish`; or in
        REJECTED, UNREACHABLE, or CONNECT_ERROR where the queue pair could not be made ready. On all but the first two
        the attached queue pair goes to ERR. EINVAL: the state, private data that do not fit beside the connection
        manager's own (:meth:`rdmacm.CmId.connect` has the sizes), an invalid path MTU, a P_Key that the port lacks.
        Opening the wire may fail as in :meth:`listen`.
        """

    def establish(self) -> None:
        """Confirm a CONNECT_RESPONSE, rdma_establish(3); no event follows on this side. EINVAL: the state."""

    def accept(self, param: ConnParam) -> None:
        """Accept the request that made this id, rdma_accept(3); ``param`` is complete, as for :meth:`connect`.

        The attached queue pair is ready before the peer learns of it. Ends in ESTABLISHED, or in REJECTED, UNREACHABLE
        or DISCONNECTED; on a datagram id no event follows. EINVAL: the state, a second time, the peer has given up,
        private data that do not fit. Where the queue pair cannot be made ready, this raises, rejects the request, and
        leaves the queue pair in ERR.
        """

    def reject(self, private_data: bytes, reason: int) -> None:
        """Refuse the request that made this id, rdma_reject(3); no event follows.

        ``reason``: 28 (consumer defined) or 35 (vendor option not supported, of rdma_reject_ece(3)). EINVAL: another
        reason, the state, private data that do not fit.
        """

    def notify(self, event: int) -> None:
        """The application has seen ``event`` (4, COMM_EST; 6, PATH_MIG) on a queue pair of its own, rdma_notify(3).

        COMM_EST: an accepted connection is then established, with its event; the peer's confirmation may be lost.
        EISCONN: it is established already. PATH_MIG: the two paths of :attr:`paths` change places, and messages of the
        connection manager take the new one. EINVAL: the state, no second path, another event.
        """

    def alternate_paths(self, call: str) -> AlternatePathBackend:
        """The alternate path of this connection, for ``call``. EOPNOTSUPP: the wire has none; EINVAL: the state."""

    def disconnect(self) -> bool:
        """End the connection, rdma_disconnect(3): the attached queue pair goes to ERR, and the peer learns of it.

        Returns whether DISCONNECTED will follow: False where it was posted already or there is nothing to end any
        more. TIMEWAIT_EXIT comes when the wire's time-wait is over; a wire without one posts none. EINVAL: the state.
        """

    def init_qp_attr(self, state: QPState) -> tuple[QPAttr, QPAttrMask]:
        """The attributes that a queue pair of the application's needs to get to ``state``, rdma_init_qp_attr(3).

        RTR and RTS need what the peer has sent. EINVAL: the id is bound to no device, the state is unknown, or the
        peer has sent nothing yet.
        """

    def attach_qp(self, qp: QP | None) -> None:
        """Make a queue pair the connection's: it goes from RESET to INIT. None detaches it.

        ``qp.backend`` is one that this provider's device has made, for the id's device and port. The provider moves it
        to RTS when the connection needs it, and to ERR when the connection ends or fails. Where data arrive before the
        peer's confirmation (COMM_EST), the connection is established.
        """

    def set_local_ece(self, ece: Ece) -> None:
        """The ECE options to send with the next request or reply; a wire without ECE sends none."""

    def remote_ece(self) -> Ece:
        """The ECE options that the peer has sent; ``Ece(0)`` for none."""

    # -- the end --------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Cancel what is in progress and release port, device, connection and queue pair, rdma_destroy_id(3).

        It never waits: a connection is ended without the peer's answer, a request that was not answered is rejected.
        The state is DESTROYING from then on. The API takes the events that are left (:meth:`EventQueue.take`) and
        destroys the new ids in them.
        """


class Provider(Protocol):
    """What carries the API in one network namespace."""

    #: The provider's name, for messages.
    name: str
    #: The time of all its timeouts and deadlines: seconds that only go forward. A simulated provider has its own.
    clock: Callable[[], float]

    @property
    def tap(self) -> Tap | None:
        """Sees the packets that pass; None for no one.

        A provider that does not see its packets, as one of kernel devices, raises EOPNOTSUPP for anything but None.
        """

    @tap.setter
    def tap(self, tap: Tap | None) -> None: ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; its devices have objects of their own (:class:`rdmacm.verbs.backend.DeviceBackend`)."""

    def devices(self) -> tuple[Device, ...]:
        """Every device, as it is now."""

    def query_counters(self) -> Counters:
        """What was counted in this process. Counting may not slow down packets or messages."""

    def open_device(self, name: str) -> DeviceBackend:
        """The device of a name; the same object as long as the device exists. ENODEV: there is no such device."""

    def fork_init(self) -> None:
        """Keep registered memory of this process valid when it forks, ibv_fork_init(3); nothing where it is anyway.

        EINVAL: memory is registered already.
        """

    def fork_status(self) -> int:
        """Whether :meth:`fork_init` was called, ``enum ibv_fork_status``: 0 it was not, 1 it was, 2 not needed."""

    def open_queue(self) -> EventQueue:
        """A new event queue, for a channel."""

    def create_id(self, queue: EventQueue, owner: Owner, port_space: int, qp_type: int) -> IdBackend:
        """A new id in state IDLE; ``queue`` is one of this provider's.

        ``port_space`` is a :class:`~rdmacm.constants.PortSpace`; ``qp_type`` is UD for the port spaces UDP and IPOIB,
        else RC, and any :class:`~rdmacm.verbs.enums.QPType` for IB. No device is needed. What the provider does not
        carry is refused where it shows: when binding, or when the queue pair is created (EOPNOTSUPP).
        """

    def drive(self, done: Callable[[], T], timeout: float | None) -> T:
        """Wait until ``done()`` returns something true, or ``timeout`` seconds; returns what it returned last.

        Where callers make the progress, this makes it, and with ``timeout`` 0 once. ``done`` is called with the lock
        held, at the beginning and whenever something may have changed: progress of any thread, events, completions,
        outcomes of services. Its exceptions are the caller's. Any number of threads may be in this call; from within
        ``done`` it is called with timeout 0 only.
        """

    def open_udp(self, family: int, on_readable: Callable[[], None]) -> UdpSocket:
        """A UDP socket of the host. ``on_readable()`` is called once a datagram has come, if it has no descriptor."""

    def find_route(
        self, destination: InetAddr, source: InetAddr | None, like: PathRecord | None = None
    ) -> RouteChoice | None:
        """What the host would use to reach an IP address, without waiting.

        ``like``: the path has to have its fields, as far as they are not 0 (:mod:`rdmacm.proto.sa.restriction`). Its
        SGID is the source if none is given. None where the host has no device to reach the address, or no such path. On
        IPoIB without the path, which the subnet administrator has, and so without regard to ``like``.
        """

    def explain_route(self, destination: InetAddr, source: InetAddr | None) -> Explanation:
        """As :meth:`find_route`, with every candidate and the reasons."""

    def owner_of(self, address: InetAddr) -> tuple[str, int] | None:
        """The name of the device and the number of the port that have a local IP address; None where none has it."""

    def find_path(
        self, destination: Address, source: Address | None, port_space: int, like: PathRecord | None = None
    ) -> RouteChoice | None:
        """As :meth:`find_route`, to a GID, or to an IP address on IPoIB; the source is of the same family.

        Waits for the neighbour and for the subnet administrator, together as long as rdma_create_ep(3) would for the
        route. ``port_space``: that of the service at an IP address. None where there is no such path, or no InfiniBand
        port on the way; without the path where the neighbour or the administrator has not answered.
        """

    def find_services(self, service: str) -> FoundServices | None:
        """Ask the subnet administrator of each active InfiniBand port in turn for a service, and wait.

        ``service``: as for :meth:`IdBackend.resolve_service`. None where no administrator knows it, or there is none.
        """


def open_device(name: str, provider: str | Provider | None = None) -> Context:
    """Open a device by its name, ibv_open_device(3).

    ``provider``: as for :func:`get_provider`. The context stays that of the same device if its network interface gets
    another name. Close it, or use ``with``, if you read its asynchronous events. ENODEV: there is no such device; the
    text names those that exist. Once it has been removed, queries raise ENODEV.

    >>> open_device("soft_lo").query_gid(1, 0)
    Gid('::ffff:127.0.0.1')
    """
    chosen = get_provider(provider)
    found = chosen.devices()
    device = next((each for each in found if each.name == name), None)
    if device is None:
        names = ", ".join(each.name for each in found)
        text = f"no device {name!r}" if names else f"no device {name!r}, nor any other"
        raise cm_error(errno.ENODEV, text, "open_device", hint=f"one of: {names}" if names else None)
    index, backend = device.index, chosen.open_device(device.name)
    context = Context(
        name, lambda: next((each for each in chosen.devices() if each.index == index), None), lambda: backend
    )
    with contextlib.suppress(RdmaError):  # a device without queue pairs
        _ = context._async_queue  # events are queued from now on
    return context


def get_provider(provider: str | Provider | None = None, hosts: Sequence[str] = ()) -> Provider:
    """The provider to use in the calling thread's network namespace.

    ``provider``: a provider object, used as it is; a name; or None for the name in the environment variable
    ``RDMACM_PROVIDER``, else ``auto``: the kernel's devices where there are some to use, the software devices elsewhere
    (:mod:`rdmacm.provider.choice`). ``hosts``: the names or addresses that it is going to be used with, if they are
    known: with ``auto``, loopback addresses are the software devices'. A provider's module has ``open_provider()``,
    which returns the one object of the calling thread's network namespace in this process. ENODEV for an unknown name.
    """
    if provider is not None and not isinstance(provider, str):
        return provider
    return cast("Provider", opener_of(provider, hosts)())
