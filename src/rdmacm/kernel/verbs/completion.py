"""Completion queues and completion channels of a kernel's device.

The kernel reports a completion through a channel only once the queue is armed. Three readers may want that: the
program, through its channel; a thread in :meth:`KernelCQ.wait`; and ``notify``, which endpoints set. A queue has one
channel for all three: the program's, or the device's own where the program has none. Each report is read as soon as any
thread makes progress, and passed on to those who have asked for it.

A wait takes completions off the device's queue to see whether there are any. They stay in ``_fetched`` for the next
poll.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections import deque
from collections.abc import Callable
from ctypes import addressof, byref, c_char, c_void_p
from dataclasses import dataclass
from socket import ntohl
from typing import TYPE_CHECKING

from rdmacm.errors import cm_error
from rdmacm.interrupts.protection import deferred_finalizers, finalize, run_finalizers
from rdmacm.kernel.verbs.layouts import WC as WC_FORMAT
from rdmacm.kernel.verbs.layouts import ibv_comp_channel, ibv_cq
from rdmacm.kernel.verbs.library import code_of, last_error
from rdmacm.kernel.verbs.opened import OpenedDevice, Rank
from rdmacm.kernel.verbs.refusals import check, made, refusal
from rdmacm.progress.waiting import count_cpus
from rdmacm.verbs.enums import WC, EventType, WCFlag, WCOpcode, WCStatus

if TYPE_CHECKING:
    from rdmacm.verbs.backend import AsyncEvents

# How the program has armed a queue: for any completion, or for solicited ones and errors.
_ANY, _SOLICITED = 1, 2
#: Completions in one call of ibv_poll_cq(3).
_BATCH = 256
#: One in this many polls of an empty queue looks for asynchronous events, such as the removal of the device, if nothing
#: has for a while.
_POLLS_PER_LOOK = 16
#: After this many empty polls in a row, the processor is yielded once: the device may be a thread of the kernel.
_POLLS_PER_YIELD = 1 if count_cpus() == 1 else 64

_GRH, _WITH_IMM, _WITH_INV = int(WCFlag.GRH), int(WCFlag.WITH_IMM), int(WCFlag.WITH_INV)
_IP_CSUM_OK = int(WCFlag.IP_CSUM_OK)
_STATUS = list(WCStatus)
_OPCODES = {int(opcode): opcode for opcode in WCOpcode}
_SUCCESS = WCStatus.SUCCESS


@dataclass(slots=True, eq=False, repr=False)
class KernelWC(WC):
    """A completion with what only a kernel's device has: P_Key index, LIDs, and flags that are not in ``WC``."""

    pkey_index: int = 0
    slid: int = 0
    sl: int = 0
    dlid_path_bits: int = 0
    wc_flags: WCFlag = WCFlag(0)  # noqa: RUF009 (immutable)


class KernelChannel:
    """See :class:`rdmacm.verbs.backend.ChannelBackend`. ``get`` and ``fileno`` are not used of the device's own."""

    def __init__(self, opened: OpenedDevice) -> None:
        self._opened = opened
        #: The queues that have reported, oldest first.
        self._events: deque[KernelCQ] = deque()
        self._pollable = opened.runtime.pollable()
        self._closed = True
        #: The identities of the queues that report here.
        self._cqs: set[int] = set()
        #: Whether the last reference is gone, and it is to be closed with its last queue.
        self._is_forgotten = False
        # Reused for each event.
        self._cq, self._unused = c_void_p(), c_void_p()
        library = opened.library
        with opened.runtime.lock, opened.call("create_comp_channel"):
            #: The address that the library gave it.
            self.address: int = made(
                library.ibv_create_comp_channel(opened.context), "create_comp_channel", opened.name
            )
            opened.hold(self, Rank.CHANNEL, library.ibv_destroy_comp_channel, self.address)
            self._closed = False
            #: The kernel's descriptor.
            self.fd: int = ibv_comp_channel.from_address(self.address).fd
            os.set_blocking(self.fd, False)
            opened.channel_fds.add(self.fd)
            opened.watch.add(self.fd, weakref.WeakMethod(self.read))

    def read(self) -> None:
        """Read the reports that are there, and pass each to its queue. The lock is held."""
        while self.read_one():
            pass

    def read_one(self) -> bool:
        """As :meth:`read`, for the oldest report; False where there is none."""
        opened = self._opened
        library = opened.library
        if self._closed or opened.abandoned or opened.removed:
            return False
        if library.ibv_get_cq_event(self.address, byref(self._cq), byref(self._unused)):
            if last_error() not in (errno.EAGAIN, errno.EINTR):
                opened.lose()
            return False
        # Acknowledged at once: what waits for this is the library's destroy, which would wait under the lock.
        library.ibv_ack_cq_events(self._cq, 1)
        found = opened.elements.get(self._cq.value or 0)
        if isinstance(found, KernelCQ):
            found.reported()
        return True

    def post(self, cq: KernelCQ) -> None:
        """Add the event of a queue that the program has armed. The lock is held."""
        self._events.append(cq)
        self._pollable.signal(bool(self._events))
        self._opened.runtime.waiters.wake()

    def forget(self, cq: KernelCQ) -> None:
        """Drop the events of a queue that is being destroyed. The lock is held."""
        if cq in self._events:
            self._events = deque(other for other in self._events if other is not cq)
            self._pollable.signal(bool(self._events))

    def _take(self) -> KernelCQ | None:
        if self._closed or self._opened.abandoned:
            raise cm_error(errno.EBADF, "the channel is closed", "get_cq_event")
        while not self._events and self.read_one():
            pass
        if not self._events:
            if self._opened.removed:
                raise self._opened.gone("get_cq_event")
            return None
        cq = self._events.popleft()
        self._pollable.signal(bool(self._events))
        return cq

    def get(self, timeout: float | None) -> object | None:
        cq = self._opened.runtime.drive(self._take, timeout)
        return None if cq is None else cq.owner

    def fileno(self) -> int:
        with self._opened.runtime.lock:
            if self._closed:
                return -1
            if not self._pollable.is_open:
                self._opened.check("fileno")
            return self._pollable.fileno(bool(self._events))

    def close(self) -> None:
        opened = self._opened
        with opened.runtime.lock:
            if self._closed:
                return
            self._closed = True
            self._events.clear()
            self._pollable.close()
            if not opened.abandoned:
                if not opened.removed:
                    opened.channel_fds.discard(self.fd)
                    opened.watch.remove(self.fd)
                opened.discard(self)
                opened.runtime.waiters.wake()

    def use(self, cq: KernelCQ) -> None:
        """A queue reports here from now on."""
        self._cqs.add(id(cq))

    def release(self, cq: KernelCQ) -> None:
        """A queue has been destroyed."""
        self._cqs.discard(id(cq))
        if self._is_forgotten:
            self._close_forgotten()

    def _close_forgotten(self) -> None:
        if not self._cqs:
            self.close()

    def __del__(self, finalize: Callable[..., None] = finalize) -> None:
        if not getattr(self, "_closed", True):
            # The device's own. In a cycle of garbage the collector may finalize it before its completion queues.
            self._is_forgotten = True
            finalize(self, self._close_forgotten)


class _Buffer:
    """Takes the completions of one call."""

    __slots__ = ("address", "room", "view")

    def __init__(self, count: int) -> None:
        #: How many it has room for.
        self.room = max(count, 16)
        data = bytearray(self.room * WC_FORMAT.size)
        self.address = addressof(c_char.from_buffer(data))
        self.view = memoryview(data)


class KernelCQ:
    """See :class:`rdmacm.verbs.backend.CQBackend`."""

    def __init__(
        self,
        opened: OpenedDevice,
        cqe: int,
        channel: KernelChannel,
        is_own: bool,
        owner: object,
        comp_vector: int,
    ) -> None:
        """``channel``: the program's (``is_own``), or the device's."""
        self._opened = opened
        self._channel = channel
        #: How the program has armed it, or 0; None without a channel of the program's.
        self._armed: int | None = 0 if is_own else None
        #: Whether it is armed for a wait or ``notify``.
        self._is_armed_inside = False
        #: Whether the kernel may have reported since, as a wait has ended by then.
        self._may_be_reported = False
        #: Completions that were taken from the device's queue and are not polled yet.
        self._fetched: deque[WC] = deque()
        self._notify: Callable[[], None] | None = None
        #: Takes CQ_ERR.
        self.async_events: AsyncEvents | None = None
        #: The API object that a channel returns.
        self.owner = owner
        self._is_destroyed = False
        #: Whether it has overflowed.
        self._overrun = False
        self._empty_polls = 0
        self._poll: Callable[[int, int, int], int] = opened.operations.poll_cq
        #: Threads in :meth:`wait`.
        self._waiting = 0
        #: Buffers that no call uses. Nothing is locked: a thread that finds none makes its own.
        self._buffers: list[_Buffer] = []
        library = opened.library
        with opened.runtime.lock, opened.call("create_cq"):
            found = library.ibv_create_cq(opened.context, cqe, None, channel.address, comp_vector)
            #: The address that the library gave it.
            self.address: int = made(found, "create_cq", opened.name)
            opened.hold(self, Rank.CQ, library.ibv_destroy_cq, self.address)
            #: How many completions it has room for.
            self.cqe: int = ibv_cq.from_address(self.address).cqe
            opened.elements[self.address] = self
            channel.use(self)
            opened.runtime.use(self)

    # -- polling --------------------------------------------------------------------------------------

    def poll(self, num_entries: int) -> list[WC]:
        if self._fetched or self._waiting:
            with self._opened.runtime.lock:
                fetched = self._fetched
                found = [fetched.popleft() for _ in range(min(num_entries, len(fetched)))]
                if len(found) < num_entries:
                    found += self._take(num_entries - len(found))
        else:
            found = self._take(num_entries)
        if not found:
            self._found_nothing()
        return found

    def _take(self, most: int) -> list[WC]:
        """Up to ``most`` completions from the device's queue."""
        count = min(most, _BATCH)
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = _Buffer(count)
        if count > buffer.room:
            buffer = _Buffer(count)
        # No other thread runs between the look-up of these attributes and the call.
        got = self._poll(self.address, count, buffer.address)
        if got <= 0:
            if got < 0:
                self._refuse(got)
            self._buffers.append(buffer)
            return []
        found = [
            WC(wr_id, _SUCCESS, _OPCODES[opcode], byte_len, None, None, False, qp_num, src_qp)
            if not (status or flags or pkey_index or slid or sl or bits)
            else self._completion(
                wr_id, status, opcode, vendor, byte_len, imm, qp_num, src_qp, flags, pkey_index, slid, sl, bits
            )
            for (
                wr_id, status, opcode, vendor, byte_len, imm, qp_num, src_qp, flags, pkey_index, slid, sl, bits,
            ) in WC_FORMAT.iter_unpack(buffer.view[: got * WC_FORMAT.size])
        ]  # fmt: skip
        self._buffers.append(buffer)
        if got == _BATCH and most > got:
            found += self._take(most - got)
        return found

    def _completion(
        self,
        wr_id: int,
        status: int,
        opcode: int,
        vendor_err: int,
        byte_len: int,
        imm: int,
        qp_num: int,
        src_qp: int,
        flags: int,
        pkey_index: int,
        slid: int,
        sl: int,
        dlid_path_bits: int,
    ) -> WC:
        kind = _OPCODES.get(opcode, WCOpcode.SEND)
        qp = self._opened.queue_pairs.get(qp_num)
        if status:
            result = _STATUS[status] if status < len(_STATUS) else WCStatus.GENERAL_ERR
            if qp is not None:
                qp.failed(kind)
            return WC(wr_id, result, kind, qp_num=qp_num, vendor_err=vendor_err)
        if flags & _IP_CSUM_OK and not self._opened.checks_sums:
            flags ^= _IP_CSUM_OK | _WITH_INV  # rdma_rxe passes on the kernel's flag of that name
        if qp is None or not qp.is_datagram:
            flags &= ~_GRH  # rdma_rxe sets it for every receive
        has_more = flags & _IP_CSUM_OK or pkey_index or slid or sl or dlid_path_bits
        wc = (KernelWC if has_more else WC)(
            wr_id,
            _SUCCESS,
            kind,
            byte_len,
            ntohl(imm) if flags & _WITH_IMM else None,
            imm if flags & _WITH_INV else None,
            False,
            qp_num,
            src_qp,
            bool(flags & _GRH),
        )
        if isinstance(wc, KernelWC):
            wc.pkey_index, wc.slid, wc.sl, wc.dlid_path_bits = pkey_index, slid, sl, dlid_path_bits
            wc.wc_flags = WCFlag(flags)
        return wc

    def _refuse(self, result: int) -> None:
        """The device cannot poll."""
        self._check()
        raise refusal(code_of(result), "poll_cq", self._opened.name)

    def _found_nothing(self) -> None:
        """A poll has found nothing: see once in a while what else has happened."""
        if deferred_finalizers:
            run_finalizers()
        self._empty_polls += 1
        if self._empty_polls % _POLLS_PER_YIELD == 0:
            os.sched_yield()
        if self._empty_polls % _POLLS_PER_LOOK == 0:
            runtime = self._opened.runtime
            now = runtime.clock()
            if now >= runtime.progress_due:
                with runtime.lock:
                    runtime.progress(now=now)
        if self._overrun:
            text = f"more than {self.cqe} completions arrived between two polls, and some are lost"
            raise cm_error(errno.EOVERFLOW, text, "poll_cq", self._opened.name, "a larger completion queue")
        self._check()

    def _check(self) -> None:
        if self._opened.abandoned:
            raise cm_error(errno.EBADF, "the completion queue was made before fork(2)", "poll_cq")
        if self._is_destroyed:
            raise cm_error(errno.EBADF, "the completion queue is closed", "wait")
        if self._opened.removed:
            raise self._opened.gone("poll_cq")

    def drop(self, qp_num: int) -> None:
        """Remove the completions of a queue pair that is reset or destroyed. The lock is held."""
        self._fetched.extend(self._take(self.cqe))
        if any(wc.qp_num == qp_num for wc in self._fetched):
            kept = [wc for wc in self._fetched if wc.qp_num != qp_num]
            self._fetched.clear()
            self._fetched.extend(kept)
        if self._notify is not None:
            self._notify()

    def add(self, made: list[WC]) -> None:
        """Add completions that the device does not make, behind those that it has made."""
        with self._opened.runtime.lock:
            self._fetched.extend(self._take(self.cqe))
            self._fetched.extend(made)
            self._tell()

    # -- waiting --------------------------------------------------------------------------------------

    def wait(self, timeout: float | None) -> bool:
        with self._opened.runtime.lock:
            self._waiting += 1
            self._may_be_reported = self._is_armed_inside
        try:
            return self._opened.runtime.waiters.drive(self._ready, timeout, look=self._look)
        finally:
            with self._opened.runtime.lock:
                self._waiting -= 1

    def _look(self) -> bool:
        """Whether there is something to poll or raise. The lock is held."""
        if self._fetched or self._overrun:
            return True
        self._check()
        self._fetched.extend(self._take(16))
        return bool(self._fetched)

    def _ready(self) -> bool:
        """:meth:`_look`; if not, the queue is armed."""
        if self._look():
            return True
        if self._may_be_reported:
            self._may_be_reported = False
            self._channel.read_one()  # poll(2) would return at once because of it
        if not self._is_armed_inside:
            self._arm_inside()
            return self._look()  # a completion that was there before is not reported
        return False

    def _arm_inside(self) -> None:
        self._is_armed_inside = True
        check(self._opened.operations.req_notify_cq(self.address, 0), "req_notify_cq", self._opened.name)

    @property
    def notify(self) -> Callable[[], None] | None:
        """See :class:`rdmacm.verbs.backend.CQBackend`."""
        return self._notify

    @notify.setter
    def notify(self, call: Callable[[], None] | None) -> None:
        with self._opened.runtime.lock:
            self._notify = call
            if call is not None and not self._is_destroyed and not self._opened.abandoned:
                if not self._is_armed_inside and not self._opened.removed:
                    self._arm_inside()
                call()

    def req_notify(self, solicited_only: bool) -> None:
        with self._opened.runtime.lock:
            self._check()
            if self._armed is None:
                return  # there is no channel to report to
            # A request for solicited completions does not undo one for any (InfiniBand Architecture 11.4.2.2).
            self._armed = _SOLICITED if solicited_only and self._armed != _ANY else _ANY
            only_solicited = self._armed == _SOLICITED and not self._is_armed_inside
            code = self._opened.operations.req_notify_cq(self.address, only_solicited)
            check(code, "req_notify_cq", self._opened.name)

    def reported(self) -> None:
        """The kernel has reported a completion, and the queue is no longer armed. The lock is held."""
        self._is_armed_inside = False
        if self._armed:
            self._armed = 0
            self._channel.post(self)
        if self._notify is not None:
            self._arm_inside()
            self._notify()
        self._opened.runtime.waiters.wake()

    # -- the rest -------------------------------------------------------------------------------------

    def happened(self, event: EventType) -> None:
        if event is EventType.CQ_ERR:
            self._overrun = True
        if self.async_events is not None:
            self.async_events.post(event)
        self._tell()

    def _tell(self) -> None:
        """Have everybody poll who waits for a completion. The lock is held."""
        if self._armed:
            self._armed = 0
            self._channel.post(self)
        self._opened.runtime.waiters.wake()
        if self._notify is not None:
            self._notify()

    def lost(self) -> None:
        self._fetched.extend(self._take(self.cqe))
        self._poll = _nothing
        self._tell()

    def resize(self, cqe: int) -> None:
        with self._opened.runtime.lock, self._opened.call("resize_cq"):
            if self._overrun:
                raise cm_error(errno.EINVAL, "the queue has overflowed", "resize_cq", hint="a new completion queue")
            if len(self._fetched) > cqe:
                text = f"the queue has {len(self._fetched)} completions, and would have room for {cqe}"
                raise cm_error(errno.EINVAL, text, "resize_cq", hint="poll() them first")
            check(self._opened.library.ibv_resize_cq(self.address, cqe), "resize_cq", self._opened.name)
            self.cqe = ibv_cq.from_address(self.address).cqe

    def destroy(self) -> None:
        opened = self._opened
        with opened.runtime.lock:
            self._is_destroyed = True
            self._notify = None
            self._fetched.clear()
            self._armed = None
            self._channel.forget(self)
            self._poll = _nothing
            opened.elements.pop(self.address, None)
            opened.runtime.release(self)
            if not opened.abandoned:
                self._channel.read()  # what is read later has no object any more
                opened.discard(self)
                self._channel.release(self)
                opened.runtime.waiters.wake()

    def abandon(self) -> None:
        self._poll = _nothing
        self._fetched.clear()


def _nothing(address: int, count: int, where: int) -> int:  # noqa: ARG001
    """Polls a queue that is not there any more."""
    return 0
