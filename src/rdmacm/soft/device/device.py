"""An open software device: :class:`rdmacm.verbs.backend.DeviceBackend`."""

from __future__ import annotations

import errno
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from rdmacm.capabilities import SOFT, Feature, absent
from rdmacm.errors import cm_error
from rdmacm.proto.constants import LONGEST_MESSAGE
from rdmacm.proto.core_choice import compiled
from rdmacm.proto.engine import EngineCounters
from rdmacm.provider import log
from rdmacm.soft.counters import hw_counters
from rdmacm.soft.device.async_events import SoftAsyncQueue
from rdmacm.soft.device.completion import SoftChannel, SoftCQ
from rdmacm.soft.device.datagram_queue_pair import SoftUdQP
from rdmacm.soft.device.extended_queue_pair import SoftXrcRecvQP, SoftXrcSendQP, SoftXrcSRQ, XrcDomain
from rdmacm.soft.device.groups import MAX_GROUP_QPS, MAX_GROUPS
from rdmacm.soft.device.memory import MemoryTable, SoftMR
from rdmacm.soft.device.memory_window import SoftMW
from rdmacm.soft.device.multiplexer import MAX_QP
from rdmacm.soft.device.queue_pair import SoftQP
from rdmacm.soft.device.shared_receive_queue import SoftSRQ
from rdmacm.soft.device.unreliable_queue_pair import SoftUcQP
from rdmacm.soft.device.work_queues import DeviceParts, WorkQueues
from rdmacm.verbs.attr import UNLIMITED, DeviceAttr, QPCap, SrqAttr
from rdmacm.verbs.attrex import DeviceAttrEx
from rdmacm.verbs.enums import (
    AccessFlag,
    AtomicCap,
    DeviceCapFlag,
    EventType,
    Mtu,
    MWType,
    PortState,
    QPType,
    SendOpsFlag,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from rdmacm.progress.runtime import Runtime
    from rdmacm.soft.device.multiplexer import QPMultiplexer
    from rdmacm.verbs.backend import AsyncEvents, ChannelBackend, CQBackend, SRQBackend
    from rdmacm.verbs.device import Device
    from rdmacm.verbs.enums import TransportType
    from rdmacm.verbs.wr import AddressHandle

#: What all software devices are, and their limits. What is no limit of the device's has the value of rdma_rxe.
SOFT_DEVICE_ATTR = DeviceAttr(
    fw_ver="0.0.0",
    max_mr_size=1 << 63,
    page_size_cap=0xFFFFF000,
    vendor_id=0xFFFFFF,  # "not assigned", InfiniBand Architecture A3.3.1
    max_qp=MAX_QP,
    max_qp_wr=1 << 16,
    device_cap_flags=(
        DeviceCapFlag.PORT_ACTIVE_EVENT
        | DeviceCapFlag.SYS_IMAGE_GUID
        | DeviceCapFlag.RC_RNR_NAK_GEN
        | DeviceCapFlag.SRQ_RESIZE
        | DeviceCapFlag.MEM_WINDOW
        | DeviceCapFlag.MEM_MGT_EXTENSIONS  # programs look here for LOCAL_INV and SEND_WITH_INV
        | DeviceCapFlag.XRC
        | DeviceCapFlag.MEM_WINDOW_TYPE_2B
    ),
    max_sge=32,
    max_sge_rd=32,
    max_cq=UNLIMITED,
    max_cqe=1 << 22,
    max_mr=1 << 20,
    max_pd=UNLIMITED,
    max_qp_rd_atom=128,
    max_res_rd_atom=MAX_QP * 128,
    max_qp_init_rd_atom=128,
    atomic_cap=AtomicCap.HCA,
    max_mcast_grp=MAX_GROUPS,
    max_mcast_qp_attach=MAX_GROUP_QPS,
    max_total_mcast_qp_attach=MAX_GROUPS * MAX_GROUP_QPS,
    max_mw=1 << 16,
    max_ah=UNLIMITED,
    max_srq=UNLIMITED,
    max_srq_wr=1 << 16,
    max_srq_sge=32,
    max_pkeys=1,
    max_inline_data=4096,
    local_ca_ack_delay=15,
    max_msg_sz=LONGEST_MESSAGE,
    # rdma_rxe has FLUSH_PERSISTENT too, for hosts with persistent memory; here no memory can be registered for it.
    device_cap_flags_ex=DeviceCapFlag.FLUSH_GLOBAL | DeviceCapFlag.ATOMIC_WRITE,
)

#: The queue pairs of each type.
_QUEUE_PAIRS: dict[QPType, type[SoftQP | SoftUdQP]] = {
    QPType.RC: SoftQP,
    QPType.UC: SoftUcQP,
    QPType.UD: SoftUdQP,
}


class SoftDevice:
    """See :class:`rdmacm.verbs.backend.DeviceBackend`.

    ``device`` is what it is now; ``find_device(ifindex)`` returns the device of an interface as it is then, if any.
    """

    capabilities = SOFT

    def __init__(
        self,
        runtime: Runtime,
        mux: QPMultiplexer,
        random: Random,
        device: Device,
        find_device: Callable[[int], Device | None],
        attr: DeviceAttr = SOFT_DEVICE_ATTR,
    ) -> None:
        #: The device's name when it was opened.
        self.name: str = device.name
        #: See :class:`rdmacm.verbs.backend.DeviceBackend`.
        self.transport_type: TransportType = device.transport_type
        #: There are no interrupts that could be spread.
        self.num_comp_vectors = 1
        #: See :class:`rdmacm.verbs.backend.DeviceBackend`.
        self.default_pds: list[Any] = []
        self.default_xrcds: list[Any] = []
        #: The limits, and the GUIDs.
        self.attr: DeviceAttr = attr
        self.identify(device)
        self._runtime = runtime
        self._mux = mux
        #: The index of its interface.
        self._ifindex = device.index
        self._find_device = find_device
        #: The queues of asynchronous events of its contexts.
        self._async_queues: weakref.WeakSet[SoftAsyncQueue] = weakref.WeakSet()
        #: The regions, by key.
        self._memory = MemoryTable(random, runtime)
        self._memory.changed = self._region_changed
        #: The shared receive queues.
        self._srqs: weakref.WeakSet[SoftSRQ] = weakref.WeakSet()
        #: What its queue pairs count.
        self._engine_counters = EngineCounters()
        #: Its packed addresses, and as the compiled core has them.
        self._addresses: list[bytes] = []
        self._core_addresses = compiled.Addresses(device.index) if compiled is not None else None
        self._parts = DeviceParts(
            mux,
            self._memory,
            self._engine_counters,
            self._find_source,
            self._find_mtu,
            self._is_own,
            self._ifindex,
            self._core_addresses,
        )
        self.look_at_addresses()
        #: The XRC shared receive queues, by number, and the XRC domains that stand for a file, by device and inode.
        self._xrc_queues: dict[int, SoftXrcSRQ] = {}
        self._xrc_domains: weakref.WeakValueDictionary[tuple[int, int], XrcDomain] = weakref.WeakValueDictionary()
        #: How often its port went down.
        self._link_downed = 0

    @property
    def attr_ex(self) -> DeviceAttrEx:
        """See :class:`rdmacm.verbs.backend.DeviceBackend`."""
        return DeviceAttrEx.of(self.attr)

    def changed(self, before: Device, now: Device | None) -> None:
        """The device has changed, or with None was removed: report that to every context. The lock is held."""
        if now is None:
            self._report(0, EventType.DEVICE_FATAL)
            return
        self.identify(now)
        for old, new in zip(before.ports, now.ports, strict=True):
            if old.state is not new.state:
                is_active = new.state is PortState.ACTIVE
                self._link_downed += not is_active
                self._report(new.port_num, EventType.PORT_ACTIVE if is_active else EventType.PORT_ERR)
            if [(row.gid_index, row.gid) for row in old.gids] != [(row.gid_index, row.gid) for row in new.gids]:
                self._report(new.port_num, EventType.GID_CHANGE)

    def look_at_addresses(self) -> None:
        """Tell the datagram queue pairs, and the compiled core, if the addresses of the device have changed."""
        device = self._find_device(self._ifindex)
        now = [row.gid.ip for row in device.ports[0].gids] if device is not None else []
        if now != self._addresses:
            self._addresses = now
            if self._core_addresses is not None:
                self._core_addresses.set(now)
            for qp in self._mux.queue_pairs():
                if isinstance(qp, SoftUdQP):
                    qp.addresses_changed()

    def _report(self, port_num: int, event: EventType) -> None:
        if log.enabled:
            log.DEVICE.debug("%s port %d: %s", self.name, port_num, event.name)
        for queue in list(self._async_queues):
            queue.post(port_num, event)

    def query_counters(self) -> dict[str, int]:
        """See :meth:`rdmacm.verbs.backend.DeviceBackend.query_counters`."""
        with self._runtime.lock:
            self._mux.see_core_wire()
            return hw_counters(self._engine_counters, self._link_downed)

    def identify(self, device: Device) -> None:
        """Take over the GUID, which changes with the interface's hardware address."""
        guid = device.node_guid
        if self.attr.node_guid != guid:
            self.attr = replace(self.attr, node_guid=guid, sys_image_guid=guid)

    def _find_source(self, sgid_index: int) -> tuple[bytes, int]:
        """The packed IP address and the interface index of a GID."""
        device = self._find_device(self._ifindex)
        if device is None:
            raise cm_error(errno.ENODEV, "the device has been removed", "modify_qp", self.name)
        for row in device.ports[0].gids:  # a software device has one port
            if row.gid_index == sgid_index:
                return row.gid.ip, self._ifindex
        raise cm_error(errno.EINVAL, f"no GID at index {sgid_index}", "modify_qp", self.name)

    def _find_mtu(self) -> int:
        """The MTU of the port in bytes, as it is now; the largest if the device has been removed."""
        device = self._find_device(self._ifindex)
        mtu = device.ports[0].active_mtu if device is not None else None
        return (mtu or Mtu.MTU_4096).bytes

    def _is_own(self, address: bytes, scope_id: int) -> bool:
        """Whether a packed address is the device's; ``scope_id`` is the interface of one that is link-local, else 0."""
        device = self._find_device(self._ifindex)
        if device is None or scope_id not in (0, self._ifindex):
            return False
        return any(row.gid.ip == address for row in device.ports[0].gids)

    def _check_fork(self, step: str) -> None:
        self._runtime.check_fork(step, "device")

    def reg_mr(self, pd: object, view: memoryview, access: AccessFlag) -> SoftMR:
        with self._runtime.lock:
            self._check_fork("reg_mr")
            if len(self._memory) >= self.attr.max_mr:
                raise cm_error(errno.ENOMEM, f"{self.attr.max_mr} regions are registered", "reg_mr", self.name)
            return self._memory.register(pd, view, access)

    def reg_dmabuf_mr(self, *_: object, **__: object) -> NoReturn:
        raise absent(Feature.DMA_BUFS, "reg_dmabuf_mr", self.name, SOFT)

    def create_ah(self, pd: object, ah: AddressHandle) -> None:
        pass

    def alloc_mw(self, pd: object, mw_type: MWType) -> SoftMW:
        with self._runtime.lock:
            self._check_fork("alloc_mw")
            if self._memory.windows >= self.attr.max_mw:
                raise cm_error(errno.ENOMEM, f"{self.attr.max_mw} windows are allocated", "alloc_mw", self.name)
            return self._memory.allocate(pd, mw_type)

    def create_channel(self) -> SoftChannel:
        self._check_fork("create_comp_channel")
        return SoftChannel(self._runtime)

    def create_async_queue(self, keep_open: bool) -> SoftAsyncQueue:
        self._check_fork("open_device")
        queue = SoftAsyncQueue(self._runtime, partial(self._find_device, self._ifindex), keep_open)
        with self._runtime.lock:
            self._async_queues.add(queue)
        return queue

    def create_cq(self, cqe: int, channel: ChannelBackend | None, owner: object, _comp_vector: int = 0) -> SoftCQ:
        self._check_fork("create_cq")
        assert channel is None or isinstance(channel, SoftChannel)
        return SoftCQ(self._runtime, self._mux, cqe, channel, owner)

    def create_srq(self, pd: object, attr: SrqAttr) -> SoftSRQ:
        self._check_fork("create_srq")
        made = SoftSRQ(self._mux, self._memory, pd, attr)
        with self._runtime.lock:
            self._srqs.add(made)
        return made

    def open_xrcd(self, inode: tuple[int, int] | None, create: bool, exclusive: bool) -> XrcDomain:
        with self._runtime.lock:
            self._check_fork("open_xrcd")
            domain = self._xrc_domains.get(inode) if inode is not None else None
            if domain is None:
                if not create:
                    text = "no domain stands for the file"
                    raise cm_error(errno.EAGAIN, text, "open_xrcd", self.name, "oflags=os.O_CREAT")
                domain = XrcDomain(self._xrc_queues, self._memory)
                if inode is not None:
                    self._xrc_domains[inode] = domain
            elif exclusive:
                raise cm_error(errno.EINVAL, "a domain stands for the file already", "open_xrcd", self.name)
            return domain

    def open_qp(self, domain: object, qp_num: int, events: AsyncEvents) -> SoftXrcRecvQP:
        assert isinstance(domain, XrcDomain)
        with self._runtime.lock:
            self._check_fork("open_qp")
            found = self._mux.find(qp_num)
            if not isinstance(found, SoftXrcRecvQP) or not found.open(domain, events):
                text = f"no queue pair 0x{qp_num:x} of type XRC_RECV is in the domain"
                raise cm_error(errno.EINVAL, text, "open_qp", self.name)
            return found

    def create_xrc_srq(self, pd: object, attr: SrqAttr, domain: object, cq: CQBackend) -> SoftXrcSRQ:
        assert isinstance(domain, XrcDomain)
        assert isinstance(cq, SoftCQ)
        with self._runtime.lock:
            self._check_fork("create_srq")
            made = SoftXrcSRQ(self._mux, self._memory, pd, attr, domain, cq)
            self._srqs.add(made)
            return made

    def _region_changed(self, pd: object, region: SoftMR) -> None:
        for qp in self._mux.queue_pairs():
            if isinstance(qp, WorkQueues):
                qp.region_changed(self._memory, pd, region)
        for srq in list(self._srqs):
            srq.region_changed(self._memory, pd, region)

    def create_qp(
        self,
        pd: object,
        qp_type: QPType,
        cap: QPCap,
        sq_sig_all: bool,
        send_cq: CQBackend | None,
        recv_cq: CQBackend | None,
        srq: SRQBackend | None,
        send_ops: SendOpsFlag | None = None,  # noqa: ARG002 (a queue pair has all operations of its type)
    ) -> SoftQP | SoftUdQP:
        """Make a queue pair; EOPNOTSUPP for a type that the device lacks, ENOMEM when there are too many."""
        kind = _QUEUE_PAIRS.get(qp_type)
        assert srq is None or isinstance(srq, SoftSRQ)
        with self._runtime.lock:
            if self._runtime.abandoned:
                self._check_fork("create_qp")
            if len(self._mux.qps) >= self.attr.max_qp:
                raise cm_error(errno.ENOMEM, f"{self.attr.max_qp} queue pairs are in use", "create_qp", self.name)
            if qp_type is QPType.XRC_RECV:
                assert isinstance(pd, XrcDomain)
                return SoftXrcRecvQP(self._parts, pd, cap)
            assert isinstance(send_cq, SoftCQ)
            if kind is None:
                self.capabilities.require(Feature.of_type(qp_type), "create_qp", self.name)
                return SoftXrcSendQP(self._parts, pd, cap, sq_sig_all, send_cq)
            assert isinstance(recv_cq, SoftCQ)
            return kind(self._parts, pd, cap, sq_sig_all, send_cq, recv_cq, srq)
