"""Completion queues and completion channels: ibv_create_cq(3), ibv_get_cq_event(3), ibv_poll_cq(3).

To sleep until work completes: arm the queue (:meth:`CQ.req_notify`), poll it once more for completions that were added
before, and wait on the channel (:meth:`CompChannel.get_cq_event`), which returns the queue. For a single queue, without
a descriptor, :meth:`CQ.wait` is enough.
"""

from __future__ import annotations

import errno
import time
import weakref
from types import TracebackType

from rdmacm.errors import CmTimeoutError, CmWouldBlockError, check_timeout, cm_error
from rdmacm.verbs.async_event import EventOwner
from rdmacm.verbs.backend import ChannelBackend, CQBackend
from rdmacm.verbs.checks import check_context, check_kind, check_number
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import WC
from rdmacm.verbs.resource import Resource


class CompChannel(Resource):
    """Where armed completion queues report, ``struct ibv_comp_channel``. It cannot be closed before they are."""

    __slots__ = {
        "context": "The :class:`Context` of its device.",
        "backend": "The provider's object (:mod:`rdmacm.verbs.backend`).",
    }

    def __init__(self, context: Context) -> None:
        self._closed = True
        self.context: Context = context
        if context is None or context.closed:
            check_context(context, "create_comp_channel")
        self.backend: ChannelBackend = self._make("create_comp_channel", (), context.backend.create_channel)

    def get_cq_event(self, timeout: float | None = None) -> CQ:
        """The next queue that was armed and has a completion, ibv_get_cq_event(3).

        ``timeout`` is in seconds: None waits for ever, 0 not at all. Acknowledge each event with
        :meth:`CQ.ack_events`, and arm the queue again for the next. CmTimeoutError when the time runs out,
        CmWouldBlockError for 0; EBADF once the channel is closed, also in threads that were waiting; ValueError for a
        negative timeout.
        """
        check_timeout(timeout)
        limit = None if timeout is None else time.monotonic() + timeout
        left = timeout
        while True:
            if self._closed:
                raise self._closed_error("get_cq_event")
            owner = self.backend.get(left)
            if owner is None:
                break
            cq = owner() if isinstance(owner, weakref.ref) else None
            if isinstance(cq, CQ) and cq._reported():
                return cq
            # The queue was closed or collected after it had reported.
            left = None if limit is None else max(0.0, limit - time.monotonic())
        if not timeout:
            raise CmWouldBlockError(errno.EAGAIN, "no completion queue has reported", "get_cq_event")
        raise CmTimeoutError(errno.ETIMEDOUT, f"no completion queue reported within {timeout} s", "get_cq_event")

    def fileno(self) -> int:
        """A descriptor that polls readable when there may be an event (try with ``timeout=0``); -1 once closed."""
        return -1 if self._closed else self.backend.fileno()

    @property
    def fd(self) -> int:
        """:meth:`fileno`, with C's name."""
        return self.fileno()

    def _destroy(self) -> None:
        self.backend.close()

    def __repr__(self) -> str:
        return f"<CompChannel {self.context.name}{' closed' if self._closed else ''}>"


class CQ(Resource):
    """A completion queue, ``struct ibv_cq``, with room for ``cqe`` completions.

    ``channel``: where it reports once it is armed; ``cq_context``: the user's own object; ``comp_vector``: which of the
    device's completion vectors signals its events, 0 to ``context.num_comp_vectors - 1``. It cannot be closed while a
    queue pair reports to it. EINVAL: a size or a vector beyond the device's, or a channel of another device.
    """

    __slots__ = {
        "context": "The :class:`Context` of its device.",
        "channel": "Where it reports once it is armed, or None.",
        "cq_context": "The user's own object.",
        "backend": "The provider's object (:mod:`rdmacm.verbs.backend`).",
        "_event_owner": "The owner of its events, which refers to it weakly.",
        "_unacked": "Events of the channel that are not acknowledged.",
    }

    def __init__(
        self,
        context: Context,
        cqe: int,
        channel: CompChannel | None = None,
        cq_context: object = None,
        comp_vector: int = 0,
    ) -> None:
        self._closed = True
        if context is None or context.closed:
            check_context(context, "create_cq")
        device = context.backend
        check_number("cqe", cqe, 1, device.attr.max_cqe, "create_cq")
        if comp_vector != 0:  # the only one of most devices
            check_number("comp_vector", comp_vector, 0, device.num_comp_vectors - 1, "create_cq")
        try:
            if channel is not None and channel.context.backend is not device:
                raise cm_error(errno.EINVAL, "the channel is of another device", "create_cq")
        except AttributeError:
            check_kind("channel", channel, CompChannel, "create_cq")
            raise
        self.context: Context = context
        self.channel: CompChannel | None = channel
        self.cq_context: object = cq_context
        self._unacked = 0
        channel_backend = None if channel is None else channel.backend
        owner = self._event_owner = EventOwner(self)
        self.backend: CQBackend = self._make(
            "create_cq",
            () if channel is None else (channel,),
            lambda: device.create_cq(cqe, channel_backend, owner, comp_vector),
        )
        self.backend.async_events = owner
        _ = context._async_queue  # events of the device are queued from now on

    @property
    def comp_channel(self) -> CompChannel | None:
        """``channel``, with pyverbs' name."""
        return self.channel

    @property
    def cqe(self) -> int:
        """How many completions it has room for; at least as many as asked for."""
        return self.backend.cqe

    def poll(self, num_entries: int = 1) -> list[WC]:
        """Up to ``num_entries`` completions, oldest first, ibv_poll_cq(3). Never waits.

        EOVERFLOW: the queue had no room for a completion, and all that it had before are polled.
        """
        if self._closed:
            raise self._closed_error("poll_cq")
        return self.backend.poll(num_entries)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until there is a completion to poll, for ``timeout`` seconds; False when the time runs out.

        EBADF once the queue is closed, also in threads that were waiting. ValueError for a negative timeout.
        """
        check_timeout(timeout)
        self._check_open("wait")
        return self.backend.wait(timeout)

    def resize(self, cqe: int) -> None:
        """Make room for ``cqe`` completions, ibv_resize_cq(3). Completions in the queue are kept.

        EINVAL: a size beyond the device's, fewer than there are in the queue, or the queue has overflowed. Nothing is
        changed then.
        """
        self._check_open("resize_cq")
        check_number("cqe", cqe, 1, self.context.backend.attr.max_cqe, "resize_cq")
        self.backend.resize(cqe)

    def req_notify(self, solicited_only: bool | int = False) -> None:
        """Arm the queue: report its next completion to the channel, once, ibv_req_notify_cq(3).

        ``solicited_only``: only a completion whose sender asked for it (SOLICITED), or with an error.
        """
        self._check_open("req_notify_cq")
        self.backend.req_notify(bool(solicited_only))

    def ack_events(self, n: int = 1) -> None:
        """Acknowledge events of the channel, ibv_ack_cq_events(3); EINVAL for more than there are."""
        if not 0 <= n <= self._unacked:
            raise cm_error(
                errno.EINVAL, f"{n} events, but the number of unacknowledged events is {self._unacked}", "ack_cq_events"
            )
        self._unacked -= n

    def _reported(self) -> bool:
        """Count an event that the channel returns; False where the queue is closed."""
        self._unacked += 1
        return not self._closed

    def _check_close(self) -> None:
        super()._check_close()
        if self._unacked:
            raise cm_error(
                errno.EBUSY, f"{self._unacked} events are not acknowledged", "close", repr(self), "ack_events()"
            )

    def _destroy(self) -> None:
        self.backend.destroy()
        self.context._forget_events(self._event_owner)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._unacked = 0  # the events of the block count as acknowledged
        super().__exit__(kind, error, tb)

    def _close_forgotten(self) -> None:
        self._unacked = 0
        super()._close_forgotten()

    def __repr__(self) -> str:
        return "<CQ closed>" if self._closed else f"<CQ {self.context.name} cqe={self.cqe}>"
