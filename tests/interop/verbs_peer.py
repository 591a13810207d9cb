"""An end on the kernel's device, through rdma-core's libraries; ``peer`` runs it."""

from __future__ import annotations

import ctypes as c
import os
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

from interop.ends import (
    PATIENCE,
    QUEUE,
    Access,
    Attributes,
    Completion,
    Device,
    End,
    Event,
    EventKind,
    Flag,
    Opcode,
    Param,
    Piece,
    Region,
    WcFlag,
    Window,
    Work,
)
from interop.peer import main
from interop.rdma_core import (
    AddrInfo,
    BindMw,
    CmEvent,
    CmId,
    ConnParam,
    MwBind,
    MwBindInfo,
    QpAttr,
    QpCap,
    QpInitAttr,
    RecvWr,
    SendWr,
    Sge,
    SockAddrIn,
    SockAddrIn6,
    Wc,
    operation,
    rdma,
    verbs,
)
from interop.rxe_ring import SendRing, queue_maps

_PS_TCP, _PS_IB, _QPT_RC, _QPT_UC, _MW_TYPE_1, _RAI_PASSIVE = 0x0106, 0x013F, 2, 3, 1, 1
#: IBV_QP_PATH_MTU, TIMEOUT, RETRY_CNT, RNR_RETRY, MAX_QP_RD_ATOMIC, MIN_RNR_TIMER, MAX_DEST_RD_ATOMIC.
_ASKED = 1 << 8 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 15 | 1 << 17
#: rdma_rxe reports WITH_INV by the kernel's number for it, which is IBV_WC_IP_CSUM_OK in user space.
_KERNEL_WITH_INV = 4
_ATOMICS = (Opcode.ATOMIC_CMP_AND_SWP, Opcode.ATOMIC_FETCH_AND_ADD)
#: Written into the send queue itself.
_RING = (Opcode.FLUSH, Opcode.ATOMIC_WRITE)


def _address(host: str, port: int) -> Any:
    if ":" in host:
        return SockAddrIn6(socket.AF_INET6, port, 0, (c.c_uint8 * 16)(*socket.inet_pton(socket.AF_INET6, host)), 0)
    return SockAddrIn(socket.AF_INET, port, (c.c_uint8 * 4)(*socket.inet_aton(host)))


def _readable(fd: int, seconds: float, what: str) -> None:
    if not select.select([fd], [], [], seconds)[0]:
        raise TimeoutError(f"no {what}")


def _elements(pieces: Sequence[Piece]) -> Any:
    return (Sge * len(pieces))(*(Sge(*piece) for piece in pieces))


def _completion(wc: Wc) -> Completion:
    flags, extra = wc.wc_flags, wc.imm_data
    if flags & _KERNEL_WITH_INV:
        flags = flags & ~_KERNEL_WITH_INV | WcFlag.WITH_INV
    if flags & WcFlag.WITH_INV:
        # A key is in host byte order.
        extra = socket.ntohl(extra)
    return Completion(wc.wr_id, wc.status, wc.opcode, wc.byte_len, extra, flags)


class VerbsRegion(Region):
    def __init__(self, pd: int, content: bytes, access: int) -> None:
        self._buffer = c.create_string_buffer(content, len(content))
        self.mr = verbs.ibv_reg_mr(pd, c.addressof(self._buffer), len(content), access)
        self.addr, self.length = c.addressof(self._buffer), len(content)
        self.lkey, self.rkey = self.mr.contents.lkey, self.mr.contents.rkey

    def read(self, offset: int = 0, length: int | None = None) -> bytes:
        return c.string_at(self.addr + offset, self.length - offset if length is None else length)

    def write(self, data: bytes, offset: int = 0) -> None:
        assert offset + len(data) <= self.length
        c.memmove(self.addr + offset, data, len(data))


class VerbsDevice(Device):
    name = "rdma-core"
    #: Bytes that its queue pairs take inline.
    max_inline = 256

    def __init__(self) -> None:
        super().__init__()
        self.channel = rdma.rdma_create_event_channel()
        #: The listener of type UC, and the addresses of the ids of its requests.
        self._uc_listener: Any = None
        self._uc_requests: set[int] = set()

    def _make_id(self) -> Any:
        cmid = c.POINTER(CmId)()
        rdma.rdma_create_id(self.channel, c.byref(cmid), None, _PS_TCP)
        return cmid

    def _make_endpoint(self, address: str, port: int, flags: int) -> Any:
        """An id of type UC, bound to the address or with a route to it: rdma_create_id makes ids of type RC only."""
        there = _address(address, port)
        info = AddrInfo(flags, there.family, _QPT_UC, _PS_IB)
        if flags & _RAI_PASSIVE:
            info.src_len, info.src_addr = c.sizeof(there), c.addressof(there)
        else:
            info.dst_len, info.dst_addr = c.sizeof(there), c.addressof(there)
        cmid = c.POINTER(CmId)()
        rdma.rdma_create_ep(c.byref(cmid), c.byref(info), None, None)
        rdma.rdma_migrate_id(cmid, self.channel)
        return cmid

    def listen(self, address: str, port: int) -> None:
        listener = self._make_id()
        rdma.rdma_bind_addr(listener, c.byref(_address(address, port)))
        self._uc_listener = self._make_endpoint(address, port, _RAI_PASSIVE)
        for each in (listener, self._uc_listener):
            rdma.rdma_listen(each, 8)

    def answer(self, request: Event) -> End:
        is_uc = c.addressof(request.id.contents) in self._uc_requests
        return VerbsEnd(self, request, request.id, _QPT_UC if is_uc else _QPT_RC)

    def call(self, address: str, port: int, unreliable: bool = False) -> End:
        if unreliable:
            return VerbsEnd(self, None, self._make_endpoint(address, port, 0), _QPT_UC)
        cmid = self._make_id()
        rdma.rdma_resolve_addr(cmid, None, c.byref(_address(address, port)), 2000)
        self.event(EventKind.ADDR_RESOLVED)
        rdma.rdma_resolve_route(cmid, 2000)
        self.event(EventKind.ROUTE_RESOLVED)
        return VerbsEnd(self, None, cmid, _QPT_RC)

    def next_event(self, seconds: float) -> Event:
        _readable(self.channel.contents.fd, seconds, "event")
        event = c.POINTER(CmEvent)()
        rdma.rdma_get_cm_event(self.channel, c.byref(event))
        happened, conn = event.contents, event.contents.conn
        data = c.string_at(conn.private_data, conn.private_data_len) if conn.private_data else b""
        param = Param(
            conn.responder_resources,
            conn.initiator_depth,
            conn.flow_control,
            conn.retry_count,
            conn.rnr_retry_count,
            data,
        )
        # A copy of the pointer: the acknowledgement frees the structure.
        cmid = c.cast(happened.id, c.POINTER(CmId))
        listeners = (happened.listen_id, self._uc_listener)
        if all(listeners) and c.addressof(listeners[0].contents) == c.addressof(listeners[1].contents):
            self._uc_requests.add(c.addressof(cmid.contents))
        result = Event(happened.event, happened.status, cmid, param)
        rdma.rdma_ack_cm_event(event)
        return result


class VerbsEnd(End):
    #: Seconds that it waits for a completion.
    patience = PATIENCE

    def __init__(self, device: VerbsDevice, request: Event | None, cmid: Any, qp_type: int) -> None:
        super().__init__(device, request)
        self._id = cmid
        context = cmid.contents.verbs
        self._poll, self._notify = operation(context, "poll_cq"), operation(context, "req_notify_cq")
        self._post_send, self._post_recv = operation(context, "post_send"), operation(context, "post_recv")
        self._regions: list[VerbsRegion] = []
        self._windows: list[Any] = []
        self._pd = verbs.ibv_alloc_pd(context)
        # (channel, queue): each queue has its own channel.
        channels = [verbs.ibv_create_comp_channel(context) for _ in range(2)]
        self._cqs = [(channel, verbs.ibv_create_cq(context, 2 * QUEUE, None, channel, 0)) for channel in channels]
        attr = QpInitAttr(
            send_cq=self._cqs[1][1],
            recv_cq=self._cqs[0][1],
            cap=QpCap(QUEUE, QUEUE, 4, 4, device.max_inline),
            qp_type=qp_type,
        )
        before = queue_maps()
        rdma.rdma_create_qp(cmid, self._pd, c.byref(attr))
        self._qp = cmid.contents.qp
        self._ring = SendRing(queue_maps() - before, context.contents.cmd_fd, self._qp.contents.handle)

    def region(self, content: bytes, access: int = Access.LOCAL_WRITE) -> Region:
        region = VerbsRegion(self._pd, content, access)
        self._regions.append(region)
        return region

    def window(self, mw_type: int) -> Window:
        window = operation(self._id.contents.verbs, "alloc_mw")(self._pd, mw_type)
        assert window, "ibv_alloc_mw"
        self._windows.append(window)
        return Window(window, mw_type)

    def post_bind(self, window: Window, region: Region, offset: int, length: int, access: int) -> int:
        assert isinstance(region, VerbsRegion)
        mw = window.mw
        key: int = mw.contents.rkey & ~0xFF | mw.contents.rkey + 1 & 0xFF
        info = MwBindInfo(region.mr, region.addr + offset, length, access)
        if window.mw_type == _MW_TYPE_1:
            bind = MwBind(0, Flag.SIGNALED, info)
            failed = operation(self._id.contents.verbs, "bind_mw")(self._qp, mw, c.byref(bind))
            assert not failed, f"ibv_bind_mw: {failed}"
            assert mw.contents.rkey == key
        else:
            wr = SendWr(opcode=Opcode.BIND_MW, send_flags=Flag.SIGNALED)
            wr.bind_mw = BindMw(mw, key, info)
            self._send(wr)
            mw.contents.rkey = key
        return key

    def post_receive(self, wr_id: int, pieces: Sequence[Piece]) -> None:
        bad = c.c_void_p()
        wr = RecvWr(wr_id, None, _elements(pieces), len(pieces))
        failed = self._post_recv(self._qp, c.byref(wr), c.byref(bad))
        assert not failed, f"ibv_post_recv: {failed}"

    def post(self, *works: Work) -> None:
        for work in works:
            if work.opcode in _RING:
                self._post_to_ring(work)
                continue
            sges = _elements(work.pieces)
            wr = SendWr(work.wr_id, None, sges, len(work.pieces), work.opcode, work.flags, work.imm)
            if work.opcode in (Opcode.SEND_WITH_INV, Opcode.LOCAL_INV):
                # The key is in the field of immediate data, in host byte order.
                wr.imm_data = socket.htonl(work.invalidate)
            if work.opcode in _ATOMICS:
                atomic = wr.wr.atomic
                atomic.remote_addr, atomic.rkey, atomic.compare_add = work.addr, work.rkey, work.compare_add
                atomic.swap = work.swap
            else:
                wr.wr.rdma.remote_addr, wr.wr.rdma.rkey = work.addr, work.rkey
            self._send(wr)

    def _post_to_ring(self, work: Work) -> None:
        if work.opcode is Opcode.FLUSH:
            length = work.length
            operands = struct.pack("=QIIBB", work.addr, length, work.rkey, work.placement, work.selectivity)
        else:
            length = len(work.data)
            operands = struct.pack("=QI", work.addr, work.rkey)
        self._ring.post(work.wr_id, work.opcode, work.flags, work.addr, length, operands, work.data)

    def _send(self, wr: SendWr) -> None:
        failed = self._post_send(self._qp, c.byref(wr), c.byref(c.c_void_p()))
        if failed:
            raise OSError(failed, "ibv_post_send: " + os.strerror(failed))

    def completions(self, of_sends: bool, number: int) -> list[Completion]:
        channel, cq = self._cqs[of_sends]
        found: list[Completion] = []
        armed = False
        while len(found) < number:
            wcs = (Wc * (number - len(found)))()
            got = self._poll(cq, len(wcs), wcs)
            assert got >= 0, f"ibv_poll_cq: {got}"
            found += map(_completion, wcs[:got])
            if got:
                continue
            if not armed:
                # Poll again, for completions that preceded the request.
                self._notify(cq, 0)
                armed = True
                continue
            what = "send" if of_sends else "receive"
            _readable(channel.contents.fd, self.patience, f"completion of a {what}: {found}")
            verbs.ibv_get_cq_event(channel, c.byref(c.c_void_p()), c.byref(c.c_void_p()))
            verbs.ibv_ack_cq_events(cq, 1)
            armed = False
        return found

    def attributes(self) -> Attributes:
        attr = QpAttr()
        verbs.ibv_query_qp(self._qp, c.byref(attr), _ASKED, c.byref(QpInitAttr()))
        return Attributes.of(attr)

    def connect_or_accept(self, param: Param) -> None:
        data = c.create_string_buffer(param.private_data, len(param.private_data))
        conn = ConnParam(
            c.cast(data, c.c_void_p),
            len(param.private_data),
            param.responder_resources,
            param.initiator_depth,
            param.flow_control,
            param.retry_count,
            param.rnr_retry_count,
        )
        (rdma.rdma_accept if self.request else rdma.rdma_connect)(self._id, c.byref(conn))

    def reject(self, private_data: bytes) -> None:
        data = c.create_string_buffer(private_data, len(private_data))
        rdma.rdma_reject(self._id, c.cast(data, c.c_void_p), len(private_data))

    def disconnect(self) -> None:
        rdma.rdma_disconnect(self._id)

    def destroy(self) -> None:
        for window in self._windows:
            operation(self._id.contents.verbs, "dealloc_mw")(window)
        rdma.rdma_destroy_qp(self._id)
        for region in self._regions:
            verbs.ibv_dereg_mr(region.mr)
        for channel, cq in self._cqs:
            verbs.ibv_destroy_cq(cq)
            verbs.ibv_destroy_comp_channel(channel)
        verbs.ibv_dealloc_pd(self._pd)
        rdma.rdma_destroy_id(self._id)


if __name__ == "__main__":
    main(VerbsDevice)
