"""Queue pairs and shared receive queues of a kernel's device."""

from __future__ import annotations

import errno
import weakref
from collections import deque
from contextlib import suppress
from ctypes import addressof, byref, c_void_p
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rdmacm.address import Gid
from rdmacm.errors import RdmaError
from rdmacm.kernel.differences import RULES, To
from rdmacm.kernel.verbs.attributes import fill_qp_attr, qp_attr_of
from rdmacm.kernel.verbs.completion import KernelCQ
from rdmacm.kernel.verbs.extended import EXTENDED_ONLY, ExtendedPosting
from rdmacm.kernel.verbs.inline import InlineCopies
from rdmacm.kernel.verbs.late_posts import flushed
from rdmacm.kernel.verbs.layouts import (
    ibv_mw,
    ibv_mw_bind,
    ibv_qp,
    ibv_qp_attr,
    ibv_qp_init_attr,
    ibv_send_wr,
    ibv_sge,
    ibv_srq_attr,
)
from rdmacm.kernel.verbs.library import code_of
from rdmacm.kernel.verbs.memory import KernelMR, KernelMW
from rdmacm.kernel.verbs.opened import Handle, OpenedDevice, Rank
from rdmacm.kernel.verbs.posting import RecvArray, SendArray, refused
from rdmacm.kernel.verbs.refusals import check, refusal
from rdmacm.proto.plainints import QP_STATE
from rdmacm.verbs.attr import QPAttr, QPCap, SrqAttr
from rdmacm.verbs.enums import EventType, MWType, QPAttrMask, QPState, QPType, SrqAttrMask, WCOpcode, WROpcode
from rdmacm.verbs.wr import RecvWR, SendWR

if TYPE_CHECKING:
    from collections.abc import Callable

    from rdmacm.verbs.backend import AsyncEvents, ReceiveTaker, WorkTaker

#: What ibv_query_qp(3) is asked for.
_EVERYTHING = int(sum(QPAttrMask)) & ~int(QPAttrMask.RATE_LIMIT)
_FATAL = frozenset({EventType.QP_FATAL, EventType.QP_REQ_ERR, EventType.QP_ACCESS_ERR})
#: The states that an iWARP queue pair gets to with its connection, which the kernel's connection manager does.
_BY_CONNECTION = frozenset({QPState.RTR, QPState.RTS})
_RECEIVES = int(WCOpcode.RECV)


class KernelQP:
    """See :class:`rdmacm.verbs.backend.QPBackend`.

    ``state`` is what the last call or event told. The kernel moves a queue pair by itself where it fails, which a
    completion or an event tells. On iWARP the connection moves it to RTS: then the kernel is asked, and :meth:`modify`
    only notes it.
    """

    #: Every request is checked first.
    core: WorkTaker | None = None

    def __init__(
        self,
        opened: OpenedDevice,
        address: int,
        qp_type: QPType,
        cap: QPCap,
        pd: Handle | None,
        cqs: tuple[KernelCQ, ...],
        needs: tuple[object, ...],
    ) -> None:
        """``address``: the address that the library gave it. ``needs``: other objects that it uses.

        ``cqs``: the queue of sends, and that of receives if it is another.
        """
        self._opened = opened
        self.address = address
        self.qp_num: int = ibv_qp.from_address(address).qp_num
        self.state = QPState.RESET
        #: Takes its asynchronous events.
        self.async_events: AsyncEvents | None = None
        self._qp_type = qp_type
        #: Whether it receives datagrams.
        self.is_datagram: bool = RULES[qp_type].to is To.HANDLE
        self._is_xrc = RULES[qp_type].to is To.QUEUE
        self._cap = cap
        self._pd = pd
        self._cqs = cqs
        #: The windows of type 2 that were bound by it.
        self._windows: weakref.WeakSet[KernelMW] | None = None
        self._needs = needs
        #: Takes inline data beyond what the device does; None where it does.
        self.copies: InlineCopies | None = None
        #: The functions of an extended queue pair; None of another one.
        self.extended: ExtendedPosting | None = None
        #: Arrays that no call uses. Nothing is locked: a thread that finds none makes its own.
        self._sends: list[SendArray] = []
        self._recvs: list[RecvArray] = []
        #: The address handles of the last requests, which may still be in the queue.
        self._ahs: deque[Handle] = deque(maxlen=max(cap.max_send_wr, 1))
        self._post_send: Any = opened.operations.post_send
        self._post_recv: Any = opened.operations.post_recv
        opened.elements[address] = self
        opened.hold(self, Rank.QP, opened.library.ibv_destroy_qp, address)
        opened.queue_pairs[self.qp_num] = self

    # -- states ---------------------------------------------------------------------------------------

    @property
    def state(self) -> QPState:
        """See :class:`rdmacm.verbs.backend.QPBackend`."""
        if self._state is QPState.INIT and self._opened.is_iwarp:
            with suppress(RdmaError):  # the device has been removed
                self.query()
        return self._state

    @state.setter
    def state(self, state: QPState) -> None:
        self._state = state

    def modify(self, attr: QPAttr, mask: QPAttrMask) -> None:
        opened, bits = self._opened, int(mask)
        if opened.is_iwarp and bits & QP_STATE and attr.qp_state in _BY_CONNECTION:
            opened.check("modify_qp")
            self.state = QPState(attr.qp_state)
            return
        given = ibv_qp_attr()
        fill_qp_attr(given, attr, bits)
        given.retry_cnt = min(given.retry_cnt, opened.most_retries)
        with opened.call("modify_qp"):
            check(opened.library.ibv_modify_qp(self.address, byref(given), bits), "modify_qp", opened.name)
        if bits & QP_STATE:
            before, state = self._state, attr.qp_state
            self._state = state = state if type(state) is QPState else QPState(state)
            if before is QPState.SQD and state is QPState.RTS:
                self._ring()
            if state is QPState.RESET:
                with opened.runtime.lock:
                    for cq in self._cqs:
                        cq.drop(self.qp_num)

    def _ring(self) -> None:
        """Make rdma_rxe look at the send queue.

        It does not when the queue leaves SQD, only when something is posted. Its library tells it also of a post that
        is refused, which this one is by every driver: it has more elements than a queue pair may have.
        """
        elements, bad = (ibv_sge * (self._opened.max_sge + 1))(), c_void_p()
        request = ibv_send_wr(sg_list=addressof(elements), num_sge=len(elements), opcode=WROpcode.SEND)
        self._post_send(self.address, byref(request), bad)

    def _flush(self) -> None:
        """Make rdma_rxe complete the receives that were posted in ERR: its library does not tell it of them."""
        error = ibv_qp_attr(qp_state=int(QPState.ERR))
        with suppress(RdmaError), self._opened.call("post_recv"):
            self._opened.library.ibv_modify_qp(self.address, byref(error), QP_STATE)

    def ask_peer(self) -> None:
        """Ask nothing: what an adapter sends is its own affair."""

    def sent_again(self) -> int:
        return 0

    def query(self) -> QPAttr:
        opened = self._opened
        found, init = ibv_qp_attr(), ibv_qp_init_attr()
        with opened.call("query_qp"):
            code = opened.library.ibv_query_qp(self.address, byref(found), _EVERYTHING, byref(init))
            check(code, "query_qp", opened.name)
        cap = self._cap
        sizes = QPCap(cap.max_send_wr, cap.max_recv_wr, cap.max_send_sge, cap.max_recv_sge, cap.max_inline_data)
        attr = qp_attr_of(found, sizes)
        self.state = attr.qp_state
        return attr

    def failed(self, opcode: WCOpcode) -> None:
        """A request has completed with an error."""
        if self.state is not QPState.RESET:
            if opcode & _RECEIVES:
                self.state = QPState.ERR
            elif self.state is not QPState.ERR:
                self.state = RULES[self._qp_type].after_failed_send

    def happened(self, event: EventType) -> None:
        if event in _FATAL:
            self.state = QPState.ERR
        if self.async_events is not None:
            self.async_events.post(event)

    def lost(self) -> None:
        self._post_send = self._post_recv = _refuse_post
        self.extended = None
        self.state = QPState.ERR

    # -- work requests --------------------------------------------------------------------------------

    def _handles(self, wrs: list[SendWR]) -> list[int]:
        """The addresses of the library's address handles of requests to send datagrams."""
        assert self._pd is not None
        found = [self._opened.ah(self._pd, wr.ah) for wr in wrs if wr.ah is not None]
        self._ahs.extend(found)
        return [handle.address for handle in found]

    @property
    def has_sent(self) -> bool:
        """Whether requests were posted to its send queue."""
        return bool(self._sends)

    def _has_ended(self) -> bool:
        """Whether the connection of a queue pair of iWARP has ended."""
        before = self._state
        if not self._opened.is_iwarp or before in (QPState.RESET, QPState.INIT):
            return False
        with suppress(RdmaError):  # the device has been removed
            self.query()
        if self._state is QPState.ERR:
            return True
        self._state = before  # the driver may still call it INIT
        return False

    def post_send(self, wrs: list[SendWR]) -> None:
        if self._has_ended():
            self._cqs[0].add(flushed(wrs, self.qp_num))
        elif self.extended is None:
            self._post_list(wrs, self._post)
        elif any(wr.opcode in EXTENDED_ONLY for wr in wrs):
            for wr in wrs:
                self.post_send_all([wr])
        else:
            with self.extended.turn():
                self._post_list(wrs, self._post)

    def _post_list(self, wrs: list[SendWR], post: Callable[[list[SendWR], list[SendWR]], None]) -> None:
        if self.copies is None:
            post(wrs, wrs)
        else:
            self.copies.post(wrs, post)

    def _post(self, wrs: list[SendWR], originals: list[SendWR]) -> None:
        """Post requests. ``originals``: the program's, for errors."""
        handles = self._handles(wrs) if self.is_datagram else ()
        try:
            sends = self._sends.pop()
        except IndexError:
            sends = SendArray(self._qp_type, self._cap.max_send_sge, self._cap.max_inline_data)
        bad = c_void_p()
        while wrs:
            count = sends.fill(wrs, self._is_xrc, handles)
            if count:
                # No other thread runs between the look-up of these attributes and the call.
                code = self._post_send(self.address, sends.address, bad)
                if code:
                    index = sends.index_of(bad.value)
                    self._note_binds(wrs[:index])
                    raise self._refusal(code, originals[index - len(wrs)], "post_send")
                if sends.has_binds:
                    self._note_binds(wrs[:count])
            if count < len(wrs):
                self._bind(originals[count - len(wrs)])
                count += 1
            wrs = wrs[count:]
        self._sends.append(sends)

    def post_send_all(self, wrs: list[SendWR]) -> None:
        """As :meth:`post_send`, but if one request is refused, none is queued.

        Only an extended queue pair that has a function for each of them can do that where the queue has room for some:
        ibv_post_send(3) does not take them back.
        """
        extended = self.extended
        for wr in wrs:
            if wr.opcode in EXTENDED_ONLY and (extended is None or not extended.takes(wr)):
                raise refused(wr, "post_send", self._opened.name)
        if extended is None:
            self.post_send(wrs)
            return
        for has_functions, run in groupby(wrs, extended.takes):
            alike = list(run)
            if not has_functions:
                self.post_send(alike)
                continue
            most = self._cap.max_send_wr
            if len(alike) > most:
                raise self._refusal(errno.ENOMEM, alike[most], "post_send")
            self._post_list(alike, self._post_extended)

    def _post_extended(self, wrs: list[SendWR], originals: list[SendWR]) -> None:
        """Post requests by the functions of an extended queue pair."""
        handles = self._handles(wrs) if self.is_datagram else ()
        extended, code = self.extended, errno.EBADF
        with self._opened.call("post_send"):  # the device is not closed meanwhile
            if extended is not None:
                with extended.turn():
                    if self.extended is not None:
                        code = extended.post(wrs, handles)
        if code:  # which request is refused, the library does not tell
            raise self._refusal(code, originals[0], "post_send")
        self._note_binds(originals)

    def post_recv(self, wrs: list[RecvWR]) -> None:
        if self._has_ended():
            self._cqs[-1].add(flushed(wrs, self.qp_num))
            return
        try:
            recvs = self._recvs.pop()
        except IndexError:
            recvs = RecvArray(self._cap.max_recv_sge)
        bad = c_void_p()
        count = recvs.fill(wrs)
        if count:
            code = self._post_recv(self.address, recvs.address, bad)
            if code:
                raise self._refusal(code, wrs[recvs.index_of(bad.value)], "post_recv")
            if self._state is QPState.ERR:
                self._flush()
        self._recvs.append(recvs)
        if count < len(wrs):
            raise refused(wrs[count], "post_recv", self._opened.name)

    def _refusal(self, code: int, wr: SendWR | RecvWR, step: str) -> RdmaError:
        try:
            self._opened.check(step)
            error = refusal(code_of(code), step, self._opened.name)
        except RdmaError as gone:
            error = gone
        error.bad_wr = wr
        return error

    def _note_binds(self, wrs: list[SendWR]) -> None:
        """Remember which windows are bound to which region, of requests that are posted."""
        for wr in wrs:
            if wr.opcode == WROpcode.BIND_MW:
                mw, info = wr.mw, wr.bind_info
                window = mw.backend if mw is not None else None
                if isinstance(window, KernelMW) and window.type is MWType.TYPE_2 and info is not None:
                    region = None if info.mr is None else info.mr.backend
                    self._windows = self._windows or weakref.WeakSet()
                    self._windows.add(window)
                    window.bind_posted(wr.rkey, region if isinstance(region, KernelMR) else None, info.mr)

    def _bind(self, wr: SendWR) -> None:
        """Post the bind of a window of type 1, by the call that ibv_bind_mw(3) makes."""
        opened, bind = self._opened, self._opened.operations.bind_mw
        mw, info = wr.mw, wr.bind_info
        window = mw.backend if mw is not None else None
        if wr.opcode != WROpcode.BIND_MW or not isinstance(window, KernelMW) or info is None or bind is None:
            raise refused(wr, "post_send", opened.name)
        region = None if info.mr is None else info.mr.backend
        request = ibv_mw_bind(wr.wr_id, int(wr.send_flags))
        request.bind_info.mr = region.address if isinstance(region, KernelMR) else None
        request.bind_info.addr, request.bind_info.length = info.addr, info.length
        request.bind_info.mw_access_flags = int(info.mw_access_flags)
        with opened.call("post_send"):
            code = bind(self.address, window.address, byref(request))
            if code:
                raise self._refusal(code, wr, "post_send")
        rkey = ibv_mw.from_address(window.address).rkey
        is_bound = info.length and isinstance(region, KernelMR)
        window.bind_posted(rkey, region if is_bound else None, info.mr if is_bound else None)

    # -- multicast ------------------------------------------------------------------------------------

    def attach_mcast(self, gid: Gid, lid: int) -> None:
        with self._opened.call("attach_mcast"):
            code = self._opened.library.ibv_attach_mcast(self.address, bytes(gid), lid)
            check(code, "attach_mcast", self._opened.name)

    def detach_mcast(self, gid: Gid, lid: int) -> None:
        with self._opened.call("detach_mcast"):
            code = self._opened.library.ibv_detach_mcast(self.address, bytes(gid), lid)
            check(code, "detach_mcast", self._opened.name)

    # -- the end --------------------------------------------------------------------------------------

    def destroy(self) -> None:
        opened = self._opened
        self._post_send = self._post_recv = _refuse_post
        extended, self.extended = self.extended, None
        if extended is not None and not opened.abandoned:
            with extended.turn():
                pass  # a post of another thread has ended
        with opened.runtime.lock:
            opened.elements.pop(self.address, None)
            if opened.queue_pairs.get(self.qp_num) is self:
                del opened.queue_pairs[self.qp_num]
            if not opened.abandoned:
                for window in self._windows or ():
                    window.renew()
                opened.discard(self)  # the kernel drops its events that are not read
                for cq in self._cqs:
                    cq.drop(self.qp_num)
            if self.copies is not None:
                self.copies.close()
        self._ahs.clear()

    def close_opened(self, events: AsyncEvents) -> None:  # noqa: ARG002 (each handle is an object of its own)
        """See :class:`rdmacm.verbs.backend.XrcTargetBackend`."""
        self.destroy()

    def abandon(self) -> None:
        self._post_send = self._post_recv = _refuse_post
        self.extended = None


class KernelSRQ:
    """See :class:`rdmacm.verbs.backend.SRQBackend`, and with ``srq_num`` ``XrcSRQBackend``."""

    core: ReceiveTaker | None = None

    def __init__(
        self, opened: OpenedDevice, address: int, attr: SrqAttr, needs: tuple[object, ...], srq_num: int = 0
    ) -> None:
        self._opened = opened
        self.address = address
        self._needs = needs
        #: Its number, of type XRC.
        self.srq_num = srq_num
        #: Takes its asynchronous events.
        self.async_events: AsyncEvents | None = None
        #: The sizes that were asked for, which the device may have enlarged, and the limit.
        self._max_wr, self._max_sge, self._limit = attr.max_wr, attr.max_sge, 0
        #: Arrays that no call uses.
        self._recvs: list[RecvArray] = []
        self._post: Any = opened.operations.post_srq_recv or _refuse_post
        opened.elements[address] = self
        opened.hold(self, Rank.SRQ, opened.library.ibv_destroy_srq, address)

    def post_recv(self, wrs: list[RecvWR]) -> None:
        try:
            recvs = self._recvs.pop()
        except IndexError:
            recvs = RecvArray(self._max_sge)
        bad = c_void_p()
        count = recvs.fill(wrs)
        if count:
            code = self._post(self.address, recvs.address, bad)
            if code:
                self._opened.check("post_srq_recv")
                error = refusal(code_of(code), "post_srq_recv", self._opened.name)
                error.bad_wr = wrs[recvs.index_of(bad.value)]
                raise error
        self._recvs.append(recvs)
        if count < len(wrs):
            raise refused(wrs[count], "post_srq_recv", self._opened.name)

    def modify(self, attr: SrqAttr, mask: SrqAttrMask) -> None:
        opened = self._opened
        given = ibv_srq_attr(attr.max_wr, attr.max_sge, attr.srq_limit)
        with opened.call("modify_srq"):
            check(opened.library.ibv_modify_srq(self.address, byref(given), int(mask)), "modify_srq", opened.name)
        if mask & SrqAttrMask.MAX_WR:
            self._max_wr = attr.max_wr
        if mask & SrqAttrMask.LIMIT:
            self._limit = attr.srq_limit

    def query(self) -> SrqAttr:
        opened = self._opened
        found = ibv_srq_attr()
        with opened.call("query_srq"):
            code = code_of(opened.library.ibv_query_srq(self.address, byref(found)))
            if code in (errno.EOPNOTSUPP, errno.ENOSYS):  # siw's driver
                return SrqAttr(self._max_wr, self._max_sge, self._limit)
            check(code, "query_srq", opened.name)
        return SrqAttr(found.max_wr, found.max_sge, found.srq_limit)

    def happened(self, event: EventType) -> None:
        if event is EventType.SRQ_LIMIT_REACHED:
            self._limit = 0
        if self.async_events is not None:
            self.async_events.post(event)

    def lost(self) -> None:
        self._post = _refuse_post

    def destroy(self) -> None:
        opened = self._opened
        self._post = _refuse_post
        with opened.runtime.lock:
            opened.elements.pop(self.address, None)
            if not opened.abandoned:
                opened.read_events()
                opened.discard(self)

    def abandon(self) -> None:
        self._post = _refuse_post


def _refuse_post(address: int, wrs: int, bad: Any) -> int:  # noqa: ARG001
    """Posts to a queue that is destroyed, or the parent's."""
    return errno.EBADF
