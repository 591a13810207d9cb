"""A device backend that records the calls of the verbs objects and transfers no data."""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, cast

from rdmacm.address import Gid
from rdmacm.capabilities import SOFT
from rdmacm.errors import cm_error
from rdmacm.verbs import (
    AccessFlag,
    AddressHandle,
    Context,
    Device,
    DeviceAttr,
    EventType,
    GidEntry,
    GidType,
    LinkLayer,
    Mtu,
    MWType,
    NodeType,
    Port,
    PortState,
    QPAttr,
    QPAttrMask,
    QPCap,
    QPState,
    QPType,
    RecvWR,
    SendOpsFlag,
    SendWR,
    SrqAttr,
    SrqAttrMask,
    TransportType,
    WCOpcode,
    WCStatus,
)
from rdmacm.verbs.attrex import DeviceAttrEx
from rdmacm.verbs.backend import AsyncEvents, ChannelBackend, CQBackend, SRQBackend, XrcSRQBackend, XrcTargetBackend
from rdmacm.verbs.enums import WC

LIMITS = DeviceAttr(
    max_mr_size=1 << 20,
    max_qp=64,
    max_qp_wr=64,
    max_sge=8,
    max_cq=64,
    max_cqe=128,
    max_mr=64,
    max_pd=64,
    max_qp_rd_atom=16,
    max_qp_init_rd_atom=8,
    max_srq=64,
    max_srq_wr=128,
    max_srq_sge=4,
    max_inline_data=256,
    local_ca_ack_delay=15,
    max_msg_sz=1 << 16,
)
GIDS = (Gid("::ffff:10.0.0.1"), Gid("fe80::1"))


def wc(wr_id: int, status: WCStatus = WCStatus.SUCCESS) -> WC:
    return WC(wr_id, status, WCOpcode.SEND)


class RecordingMR:
    def __init__(self, device: RecordingDevice, pd: object, buffer: memoryview, access: AccessFlag) -> None:
        self.lkey = self.rkey = next(device.numbers)
        self.addr = 0x10000 * self.lkey
        self.length = len(buffer)
        self.pd, self.buffer, self.access = pd, buffer, access
        self._device = device

    def rereg(self, pd: object | None, view: memoryview | None, access: AccessFlag | None) -> None:
        if self._device.refuses is not None:
            raise self._device.refuses
        if view is not None:
            self.buffer, self.length = view, len(view)
        self.pd = self.pd if pd is None else pd
        self.access = self.access if access is None else access

    def dereg(self) -> None:
        self._device.gone(self)


class RecordingMW:
    def __init__(self, device: RecordingDevice, pd: object, mw_type: MWType) -> None:
        self.rkey = next(device.numbers) << 8
        self.pd, self.type = pd, mw_type
        self._device = device

    def dealloc(self) -> None:
        self._device.gone(self)


class RecordingChannel:
    def __init__(self, device: RecordingDevice) -> None:
        self._device = device
        self._events: deque[object] = deque()
        self._changed = threading.Condition()
        self._readable, self._wake = os.pipe()

    def fileno(self) -> int:
        return self._readable

    def post(self, owner: object) -> None:
        with self._changed:
            self._events.append(owner)
            self._changed.notify()
        os.write(self._wake, b"!")

    def get(self, timeout: float | None) -> object | None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._events, timeout):
                return None
            os.read(self._readable, 1)
            return self._events.popleft()

    def close(self) -> None:
        self._device.gone(self)
        os.close(self._readable)
        os.close(self._wake)


class RecordingAsyncQueue:
    def __init__(self) -> None:
        self.events: deque[tuple[EventType, object]] = deque()
        self.closed = False

    def post(self, owner: object, event: EventType) -> None:
        self.events.append((event, owner))

    def forget(self, owner: object) -> None:
        self.events = deque(each for each in self.events if each[1] is not owner)

    def get(self, timeout: float | None) -> tuple[EventType, object] | None:
        return self.events.popleft() if self.events else None

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self.closed = True


class RecordingCQ:
    def __init__(self, device: RecordingDevice, cqe: int, channel: RecordingChannel | None, owner: object) -> None:
        self.cqe = cqe + 1  # a device may create a larger queue than was requested
        self.notify: Callable[[], None] | None = None
        self.async_events: AsyncEvents | None = None
        self.channel, self.owner = channel, owner
        self.armed: list[bool] = []
        self._device = device
        self._queue: deque[WC] = deque()
        self._added = threading.Condition()

    def add(self, completion: WC) -> None:
        with self._added:
            self._queue.append(completion)
            self._added.notify_all()
        if self.armed and self.channel is not None:
            self.armed.clear()
            self.channel.post(self.owner)

    def poll(self, num_entries: int) -> list[WC]:
        return [self._queue.popleft() for _ in range(min(num_entries, len(self._queue)))]

    def wait(self, timeout: float | None) -> bool:
        with self._added:
            return self._added.wait_for(lambda: bool(self._queue), timeout)

    def req_notify(self, solicited_only: bool) -> None:
        self.armed.append(solicited_only)

    def resize(self, cqe: int) -> None:
        self.cqe = cqe + 1

    def destroy(self) -> None:
        self._device.gone(self)


class RecordingSRQ:
    core = None

    def __init__(self, device: RecordingDevice, pd: object, attr: SrqAttr) -> None:
        self.pd, self.attr = pd, attr
        self.async_events: AsyncEvents | None = None
        self.received: list[RecvWR] = []
        self._device = device

    def post_recv(self, wrs: list[RecvWR]) -> None:
        self.received += wrs

    def modify(self, attr: SrqAttr, mask: SrqAttrMask) -> None:
        if mask & SrqAttrMask.LIMIT:
            self.attr = replace(self.attr, srq_limit=attr.srq_limit)
        if mask & SrqAttrMask.MAX_WR:
            self.attr = replace(self.attr, max_wr=attr.max_wr)

    def query(self) -> SrqAttr:
        return replace(self.attr)

    def destroy(self) -> None:
        self._device.gone(self)


class RecordingQP:
    core = None

    def __init__(self, device: RecordingDevice, pd: object, cap: QPCap, parts: tuple[object, ...]) -> None:
        self.qp_num = next(device.numbers)
        self.state = QPState.RESET
        self.async_events: AsyncEvents | None = None
        self.pd, self.cap, self.parts = pd, cap, parts
        self.modified: list[tuple[QPState, QPAttrMask]] = []
        self.sent: list[SendWR] = []
        self.received: list[RecvWR] = []
        self.groups: list[tuple[Gid, int]] = []
        self._device = device

    def modify(self, attr: QPAttr, mask: QPAttrMask) -> None:
        self.modified.append((attr.qp_state, mask))
        if mask & QPAttrMask.STATE:
            self.state = attr.qp_state

    def ask_peer(self) -> None:
        return None

    def sent_again(self) -> int:
        return 0

    def query(self) -> QPAttr:
        return QPAttr(qp_state=self.state, cap=self.cap)

    def post_send(self, wrs: list[SendWR]) -> None:
        for wr in wrs:
            if len(self.sent) >= self.cap.max_send_wr:
                error = cm_error(errno.ENOMEM, "the send queue is full", "post_send")
                error.bad_wr = wr
                raise error
            self.sent.append(wr)

    def post_send_all(self, wrs: list[SendWR]) -> None:
        self.post_send(wrs)

    def post_recv(self, wrs: list[RecvWR]) -> None:
        self.received += wrs

    def attach_mcast(self, gid: Gid, lid: int) -> None:
        self.groups.append((gid, lid))

    def detach_mcast(self, gid: Gid, lid: int) -> None:
        self.groups.remove((gid, lid))

    def destroy(self) -> None:
        self._device.gone(self)


class RecordingDevice:
    """See :class:`rdmacm.verbs.backend.DeviceBackend`. ``living`` has the objects that are not released.

    ``refuses``: an error for the next creation to raise.
    """

    def __init__(self, attr: DeviceAttr = LIMITS) -> None:
        self.name = "mem0"
        self.transport_type = TransportType.IB
        self.attr = attr
        self.num_comp_vectors = 4
        self.default_pds: list[Any] = []
        self.capabilities = SOFT
        #: Offset, length, address and descriptor of each dma-buf that was registered.
        self.dmabufs: list[tuple[int, int, int, int]] = []
        self.default_xrcds: list[Any] = []
        self.comp_vectors: list[int] = []
        self.numbers = count(0x11)
        self.living: list[object] = []
        self.refuses: Exception | None = None

    def _born(self, made: object) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.living.append(made)

    def gone(self, what: object) -> None:
        for other in self.living:
            assert not (isinstance(other, RecordingQP) and what in other.parts), "released before its queue pair"
            assert not (isinstance(other, RecordingCQ) and what is other.channel), "released before its queue"
        self.living.remove(what)

    @property
    def attr_ex(self) -> DeviceAttrEx:
        return DeviceAttrEx.of(self.attr)

    def query_counters(self) -> dict[str, int]:
        return {"out_of_sequence": len(self.living)}

    def reg_mr(self, pd: object, view: memoryview, access: AccessFlag) -> RecordingMR:
        made = RecordingMR(self, pd, view, access)
        self._born(made)
        return made

    def reg_dmabuf_mr(
        self, pd: object, offset: int, length: int, iova: int, fd: int, access: AccessFlag
    ) -> RecordingMR:
        self.dmabufs.append((offset, length, iova, fd))
        made = RecordingMR(self, pd, memoryview(bytes(length)), access)
        made.addr = iova
        self._born(made)
        return made

    def create_ah(self, pd: object, ah: AddressHandle) -> None:
        pass

    def alloc_mw(self, pd: object, mw_type: MWType) -> RecordingMW:
        made = RecordingMW(self, pd, mw_type)
        self._born(made)
        return made

    def create_channel(self) -> RecordingChannel:
        made = RecordingChannel(self)
        self._born(made)
        return made

    def create_async_queue(self, keep_open: bool) -> RecordingAsyncQueue:
        return RecordingAsyncQueue()

    def create_cq(self, cqe: int, channel: ChannelBackend | None, owner: object, comp_vector: int) -> RecordingCQ:
        self.comp_vectors.append(comp_vector)
        made = RecordingCQ(self, cqe, cast("RecordingChannel | None", channel), owner)
        self._born(made)
        return made

    def create_srq(self, pd: object, attr: SrqAttr) -> RecordingSRQ:
        made = RecordingSRQ(self, pd, attr)
        self._born(made)
        return made

    def open_xrcd(self, inode: tuple[int, int] | None, create: bool, exclusive: bool) -> object:
        raise NotImplementedError

    def open_qp(self, domain: object, qp_num: int, events: AsyncEvents) -> XrcTargetBackend:
        raise NotImplementedError

    def create_xrc_srq(self, pd: object, attr: SrqAttr, domain: object, cq: CQBackend) -> XrcSRQBackend:
        raise NotImplementedError

    def create_qp(
        self,
        pd: object,
        qp_type: QPType,
        cap: QPCap,
        sq_sig_all: bool,
        send_cq: CQBackend | None,
        recv_cq: CQBackend | None,
        srq: SRQBackend | None,
        send_ops: SendOpsFlag | None = None,
    ) -> RecordingQP:
        made = RecordingQP(self, pd, cap, (send_cq, recv_cq, srq))
        self._born(made)
        return made


def context_of(
    device: RecordingDevice, active_mtu: Mtu | None = Mtu.MTU_1024, pkeys: tuple[int, ...] = (0xFFFF,)
) -> Context:
    """An open context of the device: an Ethernet port with two GIDs in a table of four rows."""
    gids = tuple(GidEntry(gid, index, 1, GidType.ROCE_V2, "eth0", 2) for index, gid in enumerate(GIDS))
    mtu = Mtu.MTU_4096
    port = Port(1, PortState.ACTIVE, LinkLayer.ETHERNET, mtu, active_mtu, gids, pkeys, gid_tbl_len=4)
    seen = Device(device.name, 0, "memory", NodeType.CA, TransportType.IB, 1, (port,))
    return Context(device.name, lambda: seen, lambda: device)
