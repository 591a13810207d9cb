"""Ids, event channels and events: rdma_create_id(3), rdma_create_event_channel(3), rdma_get_cm_event(3).

The three stand in one module because each names the others, as the structures of ``rdma/rdma_cma.h`` do: an id has a
channel and a last event, a channel hands out events, an event names its id. What is done with an id is in the classes
that :class:`CmId` extends.

A provider may make its progress in the thread that waits (the soft device does). A channel's descriptor is then
readable when there is an event *or* progress to be made: call :meth:`EventChannel.get_event` with ``timeout=0`` and
expect :class:`~rdmacm.errors.CmWouldBlockError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from rdmacm.address import SockAddr, lookup_address
from rdmacm.cmid import acks
from rdmacm.cmid.acks import ACK_LOCK, wait_acked
from rdmacm.cmid.connecting import Connecting
from rdmacm.cmid.failures import error_of
from rdmacm.cmid.lookups import NameLookups
from rdmacm.cmid.multicast import GroupMembership
from rdmacm.cmid.queues import Queues
from rdmacm.cmid.resolving import Resolving
from rdmacm.constants import CmEventType, McJoinFlag, PortSpace
from rdmacm.errors import CmTimeoutError, CmWouldBlockError, RdmaError, check_timeout, cm_error
from rdmacm.explanation import Explanation
from rdmacm.interrupts.protection import finalize
from rdmacm.provider import EventQueue, IdBackend, Provider, QueuedEvent, get_provider
from rdmacm.provider.choice import choose, note_choice
from rdmacm.provider.connparam import ConnParam, UdParam
from rdmacm.provider.multicast import GroupJoin
from rdmacm.verbs.checks import member
from rdmacm.verbs.enums import QPType

_FETCH_HINT = ", or fetch it in a with statement"


def event_str(event: int) -> str:
    """``RDMA_CM_EVENT_ADDR_RESOLVED`` for 0, rdma_event_str(3); ``UNKNOWN EVENT`` for an unknown number."""
    try:
        return f"RDMA_CM_EVENT_{CmEventType(event).name}"
    except ValueError:
        return "UNKNOWN EVENT"


class CmEvent:
    """An event, ``struct rdma_cm_event``, made by :meth:`EventChannel.get_event`.

    Acknowledge it: with :meth:`ack`, or by leaving a ``with`` block. Destroying an id waits until its events are
    acknowledged. An event that is garbage collected acknowledges itself.
    """

    __slots__ = {
        "id": "The id it is about; for CONNECT_REQUEST the new id.",
        "listen_id": "The listener of a CONNECT_REQUEST, else None.",
        "type": "The :class:`CmEventType`.",
        "status": (
            "0, a negative errno, or the transport's positive code (REJ reason, SIDR status). Of an ADDRINFO_ERROR an "
            "EAI code, or a negative errno where a subnet administrator was asked for a service."
        ),
        "arg": "The number given to :meth:`CmId.write_cm_event`.",
        "message": "The cause of a failure in words; may be empty.",
        "_param": "The parameters, or None.",
        "_error": "The error of a resolution in :attr:`type` ADDRINFO_ERROR.",
        "_join": "The join that counts a multicast event as well; else None.",
        "_explain": "Makes the explanation of a failed resolution; else None.",
        "_owner": "The id that counts the event: the listener for CONNECT_REQUEST.",
        "_pending": "Whether it is still to be acknowledged.",
        "_thread": "The thread that fetched it; it must not destroy the id before it acknowledges the event.",
    }

    arg: int
    status: int

    def __init__(self, queued: QueuedEvent) -> None:
        self._pending = False
        owner, kind, self.status, self.arg, self._explain, text, self._param, new_id, join = queued
        self.type: CmEventType = kind
        self.message: str = text
        assert isinstance(owner, CmId)
        self._owner = owner
        self.id: CmId = owner
        self.listen_id: CmId | None = None
        if new_id is not None:
            self.listen_id = owner
            self.id = owner._take_request(new_id, self._param)
        self._join: GroupMembership | None = None
        if join is not None:
            self._take_join(join)
        self._error: RdmaError | None = None
        self._thread = threading.get_ident()
        self._pending = True

    def _take_join(self, join: GroupJoin) -> None:
        assert isinstance(join, GroupMembership)
        self._join = join
        if self.type is CmEventType.MULTICAST_JOIN and isinstance(self._param, UdParam):
            error = self._owner._groups.attach(join, self._owner._qp, self._param)
            if error is not None:
                self.type, self.status = CmEventType.MULTICAST_ERROR, -(error.errno or errno.EIO)
                self.message = f"the queue pair was not attached: {error.strerror}"

    @property
    def event(self) -> CmEventType:
        """C's name of :attr:`type`."""
        return self.type

    @property
    def join_context(self) -> object:
        """Of a multicast event, the ``context`` of the join; C has it as ``param.ud.private_data``."""
        return None if self._join is None else self._join.context

    @property
    def param(self) -> ConnParam | UdParam:
        """The parameters: ``param.conn`` are those of a connection, ``param.ud`` of a datagram id, as in C.

        EINVAL: the event is of a type that has none.
        """
        if self._param is None:
            raise cm_error(errno.EINVAL, f"an event {self.type.name} has no parameters", "event.param")
        return self._param

    @property
    def private_data(self) -> bytes:
        """The private data of the peer: the message's whole field, padded with zeros; empty without :attr:`param`."""
        return b"" if self._param is None else self._param.private_data

    @property
    def explanation(self) -> Explanation | None:
        """The resolution as data, for one that failed."""
        return self._explain() if self._explain is not None else None

    @property
    def error(self) -> RdmaError | None:
        """The exception a synchronous call would have raised; None where ``status`` is 0."""
        if self.status == 0:
            return None
        if self._error is not None:
            return self._error
        address = str(self.id.peer_addr_text)
        error = error_of(self.type, self.status, self.message, address, self.private_data, self.explanation)
        note_choice(error, self.id._channel._choice_reason)
        return error

    def ack(self) -> None:
        """Acknowledge the event, rdma_ack_cm_event(3). More than once does nothing."""
        self.__exit__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with ACK_LOCK:  # the lock itself: entering a Condition takes three times as long
            if not self._pending:
                return
            self._pending = False
            owner, thread = self._owner, self._thread
            owner._events_completed += 1
            if thread in owner._holders:
                owner._holders.remove(thread)
            if self._join is not None:
                self._join._acknowledged(thread)
            if acks.waiters:
                acks.wake_waiters()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._pending and not is_finalizing():
            self.ack()

    def __repr__(self) -> str:
        status = f" status={self.status}" if self.status else ""
        return f"<CmEvent {event_str(self.type)}{status} {self.message}".rstrip() + ">"


class EventChannel:
    """Where the events of ids arrive (``struct rdma_event_channel``). Close it after its ids are destroyed.

    ``provider``: a name or an object, see :func:`rdmacm.provider.get_provider`. A channel belongs to the network
    namespace of the thread that makes it. Any number of threads may read; each event goes to one of them.

    >>> with EventChannel() as channel:
    ...     channel.get_event(timeout=0)
    Traceback (most recent call last):
    rdmacm.errors.CmWouldBlockError: get_cm_event: no event is waiting [EAGAIN]

    Attributes:

    - ``provider``: the provider of the channel and of all its ids.
    - ``blocking``: whether :meth:`get_event` without ``timeout`` waits; C sets O_NONBLOCK on the descriptor instead.
    """

    def __init__(self, provider: str | Provider | None = None) -> None:
        self._closed = True
        self.provider: Provider = get_provider(provider)
        #: Why auto has not chosen the kernel's devices; empty where it has, or where the provider was named.
        self._choice_reason = choose(provider).reason if isinstance(provider, str | None) else ""
        #: The provider's queue of events that are not fetched yet.
        self._queue: EventQueue = self.provider.open_queue()
        #: The name resolutions of its ids.
        self._lookups = NameLookups()
        self.blocking = True
        #: The process that has made it.
        self._pid = os.getpid()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._closed

    @property
    def _is_inherited(self) -> bool:
        """Whether this is a child of fork(2), and the channel is the parent's: nobody acknowledges events here."""
        return self._pid != os.getpid()

    def fileno(self) -> int:
        """A descriptor to poll; -1 once closed.

        It is readable when there is an event, or progress to be made: call :meth:`get_event` with ``timeout=0``, and
        expect :class:`CmWouldBlockError`.
        """
        return self._queue.fileno()

    @property
    def fd(self) -> int:
        """C's name of :meth:`fileno`."""
        return self._queue.fileno()

    def get_event(self, timeout: float | None = None) -> CmEvent:
        """The next event, rdma_get_cm_event(3).

        ``timeout`` is in seconds: None waits for ever, 0 not at all. CmTimeoutError when it runs out;
        CmWouldBlockError for 0, or where ``channel.blocking`` is False; EBADF once the channel is closed; ValueError
        for a negative timeout.
        """
        if timeout is not None:
            if not timeout >= 0:
                check_timeout(timeout)
        elif not self.blocking:
            timeout = 0
        queued = self._queue.get(timeout)
        if queued is None:
            if not timeout:
                raise CmWouldBlockError(errno.EAGAIN, "no event is waiting", "get_cm_event")
            raise CmTimeoutError(errno.ETIMEDOUT, f"no event came within {timeout} s", "get_cm_event")
        event = CmEvent(queued)
        if queued.type is CmEventType.ADDRINFO_ERROR:
            event._error = event.id._addrinfo_failed()
        return event

    def __iter__(self) -> Iterator[CmEvent]:
        """Events as they come, until the channel is closed; acknowledge each."""
        while True:
            try:
                event = self.get_event()
            except CmWouldBlockError:
                return
            except RdmaError as error:
                if error.errno == errno.EBADF and self._closed:
                    return
                raise
            yield event

    def close(self) -> None:
        """Release the descriptor, rdma_destroy_event_channel(3). A thread that waits for an event gets EBADF."""
        if not self._closed:
            self._closed = True
            self._lookups.close()
            self._queue.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self, finalize: Callable[..., None] = finalize) -> None:
        if not getattr(self, "_closed", True):
            finalize(self, self._close_forgotten, unclosed="unclosed event channel")

    def _close_forgotten(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def __repr__(self) -> str:
        return f"<EventChannel {self.provider.name}{' closed' if self._closed else ''}>"


class CmId(Resolving, Connecting, Queues):
    """A communication identifier, ``struct rdma_cm_id``: the counterpart of a socket.

    ``channel``: where its events go; None makes the id *synchronous*: each call then waits for its outcome and raises
    its error. ``port_space``: a :class:`PortSpace`. ``qp_type``: a :class:`QPType`, for ``PortSpace.IB`` only; it is UD
    for the port spaces UDP and IPOIB, else RC. ``context``: the user's own object. ``provider``: a name or an object,
    for a synchronous id only; else it is the channel's.

    Asynchronous calls return as soon as the work is started; the outcome is an event. EINVAL for an unknown port
    space, and for a call that the id's state does not allow (:class:`CmStateError`). ENXIO for every call on a
    destroyed id, also if another thread destroys it during a synchronous call; only the calls that release something,
    and :meth:`explain`, remain possible, and the attributes keep their values.

    >>> with CmId(port_space=PortSpace.TCP) as cmid:
    ...     cmid.resolve_addr(("127.0.0.1", 7471))
    ...     cmid.resolve_route()
    ...     str(cmid.route.dgid)
    '::ffff:127.0.0.1'
    """

    __slots__ = ()

    _channel: EventChannel
    _event: CmEvent | None

    def __init__(
        self,
        channel: EventChannel | None = None,
        port_space: int = PortSpace.TCP,
        *,
        context: object = None,
        qp_type: int | None = None,
        provider: str | Provider | None = None,
    ) -> None:
        self._closed = True  # of one that cannot be made
        ps = port_space if type(port_space) is PortSpace else member(PortSpace, port_space, "port space", "create_id")
        kind = member(QPType, qp_type, "qp_type", "create_id") if qp_type else None
        if kind is None or ps is not PortSpace.IB:  # as in the kernel, the other port spaces leave no choice
            kind = QPType.UD if ps in (PortSpace.UDP, PortSpace.IPOIB) else QPType.RC
        if channel is not None and provider is not None:
            raise TypeError("a channel has its provider: give one or the other")
        own = EventChannel(provider) if channel is None else channel
        self._begin(own, channel is None, ps, kind, context)
        self._backend = own.provider.create_id(own._queue, self, ps, kind)
        self._closed = False

    @property
    def channel(self) -> EventChannel:
        """The channel of its events; a private one for a synchronous id."""
        return self._channel

    @property
    def event(self) -> CmEvent:
        """The last event of a synchronous id, until its next call; CmStateError: there is none."""
        return self._event or self._lacks("has no event", "event", "a synchronous id, after a call that waits")

    # -- connection requests --------------------------------------------------------------------------

    def _take_request(self, backend: IdBackend, param: ConnParam | UdParam | None) -> CmId:
        """The new id of a CONNECT_REQUEST to this listener, as the event is fetched."""
        new = type(self).__new__(type(self))
        new._begin(self._channel, False, self.ps, self.qp_type, self.context)
        new._backend = backend
        new._request = param if isinstance(param, ConnParam) else None
        new._closed = False
        backend.adopt(new)
        return new

    def get_request(self, timeout: float | None = None) -> Self:
        """The next connection request to a synchronous listener, as a synchronous id, rdma_get_request(3).

        Its ``event`` is the request (``event.param``, ``event.private_data``) until its next call. With a listener of
        :func:`create_ep` it has a queue pair. CmTimeoutError after ``timeout`` seconds; EINVAL for an asynchronous
        listener.
        """
        self._check_alive("get_request")
        if not self._private:
            raise cm_error(errno.EINVAL, "the listener has a channel: its requests are events there", "get_request")
        while True:
            self._release_event()
            event = self._next_event("get_request", timeout)
            assert isinstance(event, CmEvent)
            if event.type is CmEventType.CONNECT_REQUEST:
                break
            self._event = event
            if event.type is CmEventType.DEVICE_REMOVAL:
                text = event.message or "the device was removed"
                raise event.error or cm_error(errno.ENODEV, text, "get_request", str(self._backend.local_addr))
        new = event.id
        assert isinstance(new, type(self))
        try:
            new.migrate(None)
            new._event = event
            if self._qp_template is not None:
                new.create_qp(self._qp_template.copy(), self._pd)
        except BaseException:
            new._event = None
            event.ack()
            new.destroy()
            raise
        return new

    # -- events ---------------------------------------------------------------------------------------

    def write_cm_event(self, event: int = CmEventType.USER, status: int = 0, arg: int = 0) -> None:
        """Queue an event of the user's on the id's channel, rdma_write_cm_event(3); EINVAL for another type."""
        if event != CmEventType.USER:
            raise cm_error(errno.EINVAL, f"{event} is not RDMA_CM_EVENT_USER", "write_cm_event")
        self._check_alive("write_cm_event")
        self._post(CmEventType.USER, status, arg)

    # -- multicast groups -----------------------------------------------------------------------------

    def join_multicast(self, address: SockAddr, context: object = None) -> None:
        """Join a multicast group on the id's port, to send to it and receive from it, rdma_join_multicast(3).

        Ends in MULTICAST_JOIN, whose ``event.param`` has the address vector, queue pair number 0xFFFFFF and the Q_Key
        to send with, or in MULTICAST_ERROR; both have ``context`` as ``event.join_context``. As the event is fetched,
        the id's queue pair is attached to the group: it receives its messages, the id's own as well. An id without one
        attaches the application's with :meth:`rdmacm.verbs.QP.attach_mcast`.

        EINVAL: the id is not of type UD, is not bound to a device, or is resolving or connected; not a multicast
        address, or one of another family than the id's; ENOMEM: ``max_mcast_grp`` groups of the device are in use.
        """
        self.join_multicast_ex(address, McJoinFlag.FULLMEMBER, context)

    def join_multicast_ex(
        self, address: SockAddr, join_flags: int = McJoinFlag.FULLMEMBER, context: object = None
    ) -> None:
        """As :meth:`join_multicast`; with SENDONLY_FULLMEMBER to send only, rdma_join_multicast_ex(3).

        ``join_flags``: a :class:`McJoinFlag`. On InfiniBand, EOPNOTSUPP if the subnet administrator lacks send-only
        members.
        """
        self._check_alive("join_multicast")
        flag = member(McJoinFlag, join_flags, "join_flags", "join_multicast")
        membership = self._groups.join(self._backend, lookup_address(address), flag, context)
        if self._private:
            try:
                self._await(CmEventType.MULTICAST_JOIN, CmEventType.MULTICAST_ERROR)
            except BaseException:
                self._groups.drop(self._backend, membership)
                raise

    def leave_multicast(self, address: SockAddr) -> None:
        """Leave a group, rdma_leave_multicast(3), with the address that it was joined with.

        The id's queue pair receives no more of its messages. Waits until other threads have acknowledged the events of
        this join; EDEADLK where this thread holds one. Also before MULTICAST_JOIN has come. EADDRNOTAVAIL: it was not
        joined. Destroying the id leaves all groups.
        """
        self._check_alive("leave_multicast")
        membership = self._groups.find(lookup_address(address))
        if self._private:
            self._release_event()
        self._groups.leave(self._backend, membership, wait=not self._channel._is_inherited)

    # -- migration and destruction --------------------------------------------------------------------

    def migrate(self, channel: EventChannel | None) -> None:
        """Move the id to another channel, or with None to synchronous mode, rdma_migrate_id(3).

        Events that are not fetched yet move along. Waits until other threads have acknowledged those they fetched.
        EINVAL for a synchronous id and None, or a channel of another provider; EDEADLK where this thread holds an
        event of the id.
        """
        self._check_alive("migrate_id")
        if channel is None and self._private:
            raise cm_error(errno.EINVAL, "the id is synchronous already", "migrate_id")
        if channel is not None and channel.provider is not self._channel.provider:
            raise cm_error(errno.EINVAL, "the channel belongs to another provider", "migrate_id")
        if self._private:
            self._release_event()
        self._check_holder("migrate_id", "id", hint=_FETCH_HINT)
        new = channel if channel is not None else EventChannel(self._channel.provider)
        old, was_private = self._channel, self._private
        try:
            self._backend.migrate(new._queue)
        except RdmaError:
            if channel is None:
                new.close()
            raise
        self._channel, self._private = new, channel is None
        with ACK_LOCK:
            reported = self._events_completed + len(self._holders)
        try:
            wait_acked(lambda: self._events_completed >= reported, "migrate_id")
        finally:
            if was_private:
                old.close()

    def destroy(self) -> None:
        """Release the id, its queues, its port and its device, rdma_destroy_id(3). More than once does nothing.

        Operations in progress are cancelled and their events discarded. Waits until other threads have acknowledged
        the events they fetched; EDEADLK, and nothing is destroyed, where this thread holds one itself.
        """
        if self._closed:
            return
        if self._private:
            self._release_event()
        if self._holders:
            self._check_holder("destroy_id", "id", hint=_FETCH_HINT)
        self._closed = True
        if self._addrinfo is not None and self._addrinfo.lookup is not None:
            self._channel._lookups.cancel(self._addrinfo.lookup)
        self._backend.destroy()
        for waiting in self._channel._queue.take(self):
            if waiting.new_id is not None:  # a request that was never fetched
                waiting.new_id.destroy()
        try:
            if self._holders and not self._channel._is_inherited:
                wait_acked(lambda: not self._holders, "destroy_id")
        finally:  # an interrupt ends the wait
            if self._private:
                self._channel.close()
            if self._qp is not None or self._own_queues:
                self.destroy_qp()
            if self._srq is not None or self._srq_queues:
                self.destroy_srq()

    close = destroy

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.destroy()

    def __del__(self, finalize: Callable[..., None] = finalize) -> None:
        if not getattr(self, "_closed", True):
            channel = self._channel if self._private else None
            finalize(self, _destroy_forgotten, self._backend, channel, unclosed="undestroyed id")
            self._closed = True

    def __repr__(self) -> str:
        b = self._backend
        addresses = f" {b.local_addr or '-'} -> {b.peer_addr or '-'}"
        return f"<CmId {self.ps.name} {b.state.name}{addresses}>"


def _destroy_forgotten(backend: IdBackend, channel: EventChannel | None) -> None:
    with contextlib.suppress(Exception):
        backend.destroy()
        if channel is not None:
            channel.close()
