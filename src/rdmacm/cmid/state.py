"""What the parts of an id share: its attributes, and waiting for its events.

The parts are :class:`~rdmacm.cmid.resolving.Resolving`, :class:`~rdmacm.cmid.queues.Queues` and
:class:`~rdmacm.cmid.connecting.Connecting`. Each has the calls of some manual pages and no attributes of its own, and
knows this module, but none of the others. :class:`rdmacm.CmId` joins them.
"""

from __future__ import annotations

import errno
from typing import NoReturn, Protocol, cast

from rdmacm.cmid.acks import EventOwner
from rdmacm.cmid.failures import STEPS
from rdmacm.cmid.lookups import AddrinfoOutcome, NameLookups
from rdmacm.cmid.multicast import Groups
from rdmacm.constants import CmEventType, PortSpace
from rdmacm.errors import CmStateError, RdmaError, cm_error
from rdmacm.provider import EventQueue, IdBackend, Provider, QueuedEvent
from rdmacm.provider.cmstate import State, destroyed
from rdmacm.provider.connparam import ConnParam
from rdmacm.verbs.cq import CQ, CompChannel
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import QPType
from rdmacm.verbs.pd import PD
from rdmacm.verbs.qp import QP, QPInitAttr
from rdmacm.verbs.srq import SRQ

#: What to try where an id has no device, or no address.
BIND_HINT = "resolve_addr(), or bind_addr() with an address of this host"


class FetchedEvent(Protocol):
    """What an id asks of an event; :class:`rdmacm.CmEvent` is it."""

    type: CmEventType
    status: int
    message: str

    @property
    def error(self) -> RdmaError | None:
        """The exception for a failure."""

    def ack(self) -> None:
        """Acknowledge the event."""


class Channel(Protocol):
    """What an id asks of its channel; :class:`rdmacm.EventChannel` is it."""

    _queue: EventQueue
    #: Where name resolutions run.
    _lookups: NameLookups
    #: Why the provider auto has not chosen the kernel's devices; empty where it has.
    _choice_reason: str

    @property
    def provider(self) -> Provider:
        """The provider of the channel and of its ids."""

    @property
    def _is_inherited(self) -> bool:
        """Whether this is a child of fork(2), and the channel is the parent's."""

    def get_event(self, timeout: float | None = None) -> FetchedEvent:
        """The next event."""


#: Not an annotation of the attribute: CmId has the type that users see.
_NO_EVENT = cast("FetchedEvent | None", None)


class IdState(EventOwner):
    """See the module."""

    __slots__ = {
        "ps": "The :class:`PortSpace`.",
        "qp_type": "The :class:`QPType` of its queue pair.",
        "context": "The user's own object; a new id of a listener has the listener's.",
        "__weakref__": "The provider refers to an id weakly.",
        "_backend": "The id inside its provider.",
        "_channel": "Where its events go.",
        "_private": "Whether the id is synchronous, and has a channel of its own.",
        "_closed": "Whether it is destroyed, or not made yet.",
        "_event": "The last event of a synchronous id, until its next call; else None.",
        "_send_cq": "Where sends complete; None without a queue pair.",
        "_recv_cq": "Where receives complete; None without a queue pair.",
        "_send_cq_channel": "The channel of the former, if create_qp() made both; else None.",
        "_recv_cq_channel": "The channel of the latter, if create_qp() made both; else None.",
        "_addrinfo": "What resolve_addrinfo has begun, until its outcome is fetched.",
        "_pd": "None until it is asked for, or a queue pair is created.",
        "_qp": "The queue pair, or None.",
        "_srq": "The shared receive queue, or None.",
        "_own_queues": "What :meth:`create_qp` made, and :meth:`destroy_qp` closes.",
        "_srq_queues": "What :meth:`create_srq` made, and :meth:`destroy_srq` closes.",
        "_qp_template": "What create_ep() gives a listener for the queue pairs of its accepted ids.",
        "_connect_prefix": "The connect data of a resolved address, ahead of the private data of the first connect().",
        "_request": "The parameters of the request that made this id.",
        "_groups": "The multicast groups that it has joined.",
    }

    _backend: IdBackend
    _channel: Channel

    def _begin(self, channel: Channel, is_private: bool, ps: PortSpace, qp_type: QPType, context: object) -> None:
        """Set every attribute but the backend; the id counts as closed until it has one."""
        EventOwner.__init__(self)
        self._closed = True
        self._channel, self._private = channel, is_private
        self.ps: PortSpace = ps
        self.qp_type: QPType = qp_type
        self.context: object = context
        self._event = _NO_EVENT  # CmId has the type that users see
        self._addrinfo: AddrinfoOutcome | None = None
        self._pd: PD | None = None
        self._qp: QP | None = None
        self._srq: SRQ | None = None
        self._send_cq: CQ | None = None
        self._recv_cq: CQ | None = None
        self._send_cq_channel: CompChannel | None = None
        self._recv_cq_channel: CompChannel | None = None
        self._own_queues: tuple[CQ | CompChannel, ...] = ()
        self._srq_queues: tuple[CQ | CompChannel, ...] = ()
        self._qp_template: QPInitAttr | None = None
        self._connect_prefix = b""
        self._request: ConnParam | None = None
        self._groups = Groups()

    def _check_alive(self, call: str) -> None:
        """Raise ENXIO if the id is destroyed, by :meth:`CmId.destroy` or with its channel.

        For calls that do more than call the backend, which raises the same.
        """
        if self._closed or self._backend.state is State.DESTROYING:
            raise destroyed(call)

    def _bound(self, call: str) -> Context:
        """The device of the id; EINVAL if it is bound to none."""
        context = None if self._closed else self._backend.verbs
        if context is None:
            self._check_alive(call)
            self._lacks("is not bound to a device", call, BIND_HINT)
        return context

    def _lacks(self, what: str, call: str, hint: str) -> NoReturn:
        """Raise the error of an attribute, or of a call that needs it, before the id has it."""
        raise CmStateError(errno.EINVAL, f"the id {what} (state {self._backend.state.name})", call, hint=hint)

    @property
    def peer_addr_text(self) -> str:
        """The destination for messages, ``-`` where there is none."""
        return str(self._backend.peer_addr or "-")

    # -- events ---------------------------------------------------------------------------------------

    def _post(self, kind: CmEventType, status: int = 0, arg: int = 0, message: str = "") -> None:
        """Add an event of this id to its channel."""
        self._channel._queue.post(QueuedEvent(self, kind, status, arg, message=message))

    def _await(self, wanted: CmEventType, *failures: CmEventType) -> None:
        """Synchronous mode: wait for an event of type ``wanted``; raise for ``failures`` and DEVICE_REMOVAL.

        The id's ``event`` is then the event that ended the wait.
        """
        while True:
            self._release_event()
            event = self._next_event(STEPS[failures[0]] if failures else "disconnect")
            self._event = event
            if event.type is wanted and event.status == 0:
                return
            if event.type in (wanted, *failures, CmEventType.DEVICE_REMOVAL):
                error = event.error
                if error is None and event.type is CmEventType.DISCONNECTED:
                    error = cm_error(errno.ECONNRESET, "the peer disconnected meanwhile", "accept", self.peer_addr_text)
                raise error or cm_error(errno.ENODEV, event.message or "the device was removed", str(event.type))

    def _next_event(self, call: str, timeout: float | None = None) -> FetchedEvent:
        """The next event of a synchronous id; ENXIO if another thread destroys the id meanwhile."""
        try:
            return self._channel.get_event(timeout)
        except RdmaError:
            self._check_alive(call)
            raise

    def _release_event(self) -> None:
        """Acknowledge the last event of a synchronous id."""
        if self._event is not None:
            self._event.ack()
            self._event = None
