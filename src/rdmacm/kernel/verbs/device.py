"""An open device of the kernel: :class:`rdmacm.verbs.backend.DeviceBackend`."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from ctypes import byref, c_uint32, sizeof
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rdmacm.capabilities import KERNEL, Feature, absent
from rdmacm.errors import RdmaError, cm_error
from rdmacm.kernel.differences import RULES
from rdmacm.kernel.sysfs import Sysfs
from rdmacm.kernel.verbs.async_events import KernelAsyncQueue
from rdmacm.kernel.verbs.attributes import device_attr, device_attr_ex, guid_of, known
from rdmacm.kernel.verbs.completion import KernelChannel, KernelCQ
from rdmacm.kernel.verbs.extended import EXTENDED_ONLY, ExtendedPosting, operations_to_try
from rdmacm.kernel.verbs.inline import MAX_INLINE, InlineCopies, sizes_to_try
from rdmacm.kernel.verbs.layouts import (
    ibv_context,
    ibv_device,
    ibv_device_attr_ex,
    ibv_port_attr,
    ibv_qp_cap,
    ibv_qp_init_attr,
    ibv_qp_init_attr_ex,
    ibv_qp_open_attr,
    ibv_srq_attr,
    ibv_srq_init_attr,
    ibv_srq_init_attr_ex,
    ibv_xrcd_init_attr,
)
from rdmacm.kernel.verbs.library import last_error
from rdmacm.kernel.verbs.memory import KernelDmaBufMR, KernelMR, KernelMW
from rdmacm.kernel.verbs.opened import Handle, OpenedDevice, Rank
from rdmacm.kernel.verbs.queue_pair import KernelQP, KernelSRQ
from rdmacm.kernel.verbs.refusals import check, made
from rdmacm.verbs.attr import DeviceAttr, QPCap, SrqAttr
from rdmacm.verbs.attrex import DeviceAttrEx
from rdmacm.verbs.enums import (
    AccessFlag,
    DeviceCapFlag,
    MWType,
    NodeType,
    QPInitAttrMask,
    QPOpenAttrMask,
    QPType,
    SendOpsFlag,
    SrqInitAttrMask,
    SRQType,
    TransportType,
    XRCDInitAttrMask,
)

if TYPE_CHECKING:
    from rdmacm.verbs.backend import AsyncEvents, ChannelBackend, CQBackend, SRQBackend
    from rdmacm.verbs.wr import AddressHandle

_CHECKSUMS = int(DeviceCapFlag.UD_IP_CSUM | DeviceCapFlag.RC_IP_CSUM | DeviceCapFlag.RAW_IP_CSUM)
_XRC = QPInitAttrMask.XRCD
_EXTENDED = QPInitAttrMask.PD | QPInitAttrMask.SEND_OPS_FLAGS
_HANDLE = QPOpenAttrMask.NUM | QPOpenAttrMask.XRCD | QPOpenAttrMask.TYPE


class KernelDevice:
    """See :class:`rdmacm.verbs.backend.DeviceBackend`."""

    capabilities = KERNEL

    def __init__(self, opened: OpenedDevice, index: int) -> None:
        self.opened = opened
        self.name: str = opened.name
        #: The kernel's number of the device.
        self.index = index
        self.default_pds: list[Any] = []
        self.default_xrcds: list[Any] = []
        context = ibv_context.from_address(opened.context)
        self.num_comp_vectors: int = max(1, context.num_comp_vectors)
        device = ibv_device.from_address(context.device)
        self.node_type: NodeType = known(NodeType, device.node_type, NodeType.CA)
        self.transport_type: TransportType = known(TransportType, device.transport_type, TransportType.IB)
        #: The channel of completion queues that have none of the program's.
        self._channel: KernelChannel | None = None
        self._attr: DeviceAttr | None = None
        self._found = self._query()
        opened.max_sge = self._found.orig_attr.max_sge
        opened.checks_sums = bool(self._found.orig_attr.device_cap_flags & _CHECKSUMS)

    # -- attributes -----------------------------------------------------------------------------------

    @property
    def attr(self) -> DeviceAttr:
        """The limits."""
        if self._attr is None:
            found = self._found
            self._attr = device_attr(
                found.orig_attr, found.device_cap_flags_ex, MAX_INLINE, self.query_port(1).max_msg_sz
            )
        return self._attr

    @attr.setter
    def attr(self, attr: DeviceAttr) -> None:
        self._attr = attr

    @cached_property
    def attr_ex(self) -> DeviceAttrEx:
        """The extended attributes, ibv_query_device_ex(3)."""
        return device_attr_ex(self._found, self.attr)

    @property
    def phys_port_cnt(self) -> int:
        """How many ports it has."""
        return int(self._found.phys_port_cnt_ex or self._found.orig_attr.phys_port_cnt)

    @property
    def node_guid(self) -> int:
        """Its GUID, 64 bits."""
        return guid_of(self._found.orig_attr.node_guid)

    def _query(self) -> ibv_device_attr_ex:
        opened, found = self.opened, ibv_device_attr_ex()
        query = opened.operations.query_device_ex
        code = errno.EOPNOTSUPP
        if query is not None:
            code = query(opened.context, None, byref(found), sizeof(found))
        if code:
            found = ibv_device_attr_ex()
            code = opened.library.ibv_query_device(opened.context, byref(found))
        check(code, "query_device", self.name)
        return found

    def query_port(self, port_num: int) -> ibv_port_attr:
        """The attributes of a port, ibv_query_port(3)."""
        opened, found = self.opened, ibv_port_attr()
        query = opened.operations.query_port
        with opened.call("query_port"):
            if query is not None:
                code = query(opened.context, port_num, byref(found), sizeof(found))
            else:
                code = opened.library.ibv_query_port(opened.context, port_num, byref(found))
            check(code, "query_port", self.name)
        return found

    def query_counters(self) -> dict[str, int]:
        """What the kernel counts for all processes, with the ports added up."""
        return Sysfs().counters(self.name)

    # -- memory ---------------------------------------------------------------------------------------

    def reg_mr(self, pd: object, view: memoryview, access: AccessFlag) -> KernelMR:
        return KernelMR(self.opened, self.opened.pd(pd), view, int(access))

    def reg_dmabuf_mr(
        self, pd: object, offset: int, length: int, iova: int, fd: int, access: AccessFlag
    ) -> KernelDmaBufMR:
        return KernelDmaBufMR(self.opened, self.opened.pd(pd), offset, length, iova, fd, int(access))

    def create_ah(self, pd: object, ah: AddressHandle) -> None:
        self.opened.ah(self.opened.pd(pd), ah)

    def alloc_mw(self, pd: object, mw_type: MWType) -> KernelMW:
        return KernelMW(self.opened, self.opened.pd(pd), mw_type)

    # -- queues ---------------------------------------------------------------------------------------

    def create_channel(self) -> KernelChannel:
        return KernelChannel(self.opened)

    def create_async_queue(self, keep_open: bool) -> KernelAsyncQueue:  # noqa: ARG002 (the kernel keeps the events)
        self.opened.check("open_device")
        return KernelAsyncQueue(self.opened)

    def create_cq(self, cqe: int, channel: ChannelBackend | None, owner: object, comp_vector: int) -> KernelCQ:
        if channel is not None:
            assert isinstance(channel, KernelChannel)
            return KernelCQ(self.opened, cqe, channel, True, owner, comp_vector)
        with self.opened.runtime.lock:
            if self._channel is None:
                self._channel = KernelChannel(self.opened)
        return KernelCQ(self.opened, cqe, self._channel, False, owner, comp_vector)

    def create_srq(self, pd: object, attr: SrqAttr) -> KernelSRQ:
        opened = self.opened
        domain = opened.pd(pd)
        init = ibv_srq_init_attr(None, ibv_srq_attr(attr.max_wr, attr.max_sge, 0))
        with opened.runtime.lock, opened.call("create_srq"):
            address = made(opened.library.ibv_create_srq(domain.address, byref(init)), "create_srq", self.name)
            return KernelSRQ(opened, address, attr, (domain,))

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
    ) -> KernelQP:
        opened = self.opened
        assert send_cq is None or isinstance(send_cq, KernelCQ)
        assert recv_cq is None or isinstance(recv_cq, KernelCQ)
        assert srq is None or isinstance(srq, KernelSRQ)
        init = ibv_qp_init_attr_ex(
            None,
            *[None if queue is None else queue.address for queue in (send_cq, recv_cq, srq)],
            ibv_qp_cap(cap.max_send_wr, cap.max_recv_wr, cap.max_send_sge, cap.max_recv_sge, cap.max_inline_data),
            int(qp_type),
            int(sq_sig_all),
        )
        cqs = tuple(dict.fromkeys([cq for cq in (send_cq, recv_cq) if cq is not None]))
        with opened.runtime.lock, opened.call("create_qp"):
            if RULES[qp_type].in_xrc_domain:
                assert isinstance(pd, XrcDomain)
                init.comp_mask, init.xrcd = int(_XRC), pd.address
                create = opened.operations.create_qp_ex
                if create is None:
                    raise self._lacks(Feature.of_type(qp_type), "create_qp")
                address = made(create(opened.context, byref(init)), "create_qp", self.name)
                return KernelQP(opened, address, qp_type, cap, None, cqs, (pd,))
            domain = opened.pd(pd)
            address, operations = 0, SendOpsFlag(0)
            if send_ops is not None:
                address, operations = self._create_extended(init, domain, qp_type, send_ops)
            if not address:
                address = self._create_ordinary(init, domain, qp_type)
            asked, granted = cap.max_inline_data, init.cap
            limit = granted.max_inline_data
            for name in QPCap.__slots__:
                setattr(cap, name, max(getattr(granted, name), getattr(cap, name)))
            if srq is not None:
                cap.max_recv_wr = cap.max_recv_sge = 0
            qp = KernelQP(opened, address, qp_type, cap, domain, cqs, (domain, srq))
            try:
                if limit < asked:
                    qp.copies = InlineCopies(opened, domain, limit, max(cap.max_send_wr, 1), asked)
                if operations:
                    qp.extended = ExtendedPosting(address, qp_type, operations)
            except BaseException:
                qp.destroy()
                raise
            return qp

    def _create_ordinary(self, init: ibv_qp_init_attr_ex, domain: Handle, qp_type: QPType) -> int:
        """The address of a queue pair; ``init.cap`` is what the device has granted."""
        opened, found, sizes = self.opened, 0, bytes(init.cap)
        for size in sizes_to_try(init.cap.max_inline_data):
            basic = ibv_qp_init_attr.from_buffer_copy(init)
            basic.cap = ibv_qp_cap.from_buffer_copy(sizes)
            basic.cap.max_inline_data = size
            found = opened.library.ibv_create_qp(domain.address, byref(basic))
            if found:
                init.cap = basic.cap
                break
            if last_error() == errno.EOPNOTSUPP:
                break  # drivers refuse more inline data than they take by various other errors
        if not found and last_error() == errno.EOPNOTSUPP:
            raise self._lacks(Feature.of_type(qp_type), "create_qp")
        return made(found, "create_qp", self.name)

    def _create_extended(
        self, init: ibv_qp_init_attr_ex, domain: Handle, qp_type: QPType, asked: SendOpsFlag
    ) -> tuple[int, SendOpsFlag]:
        """The address of an extended queue pair and its operations; ``init.cap`` is what the device has granted.

        0: the device has no extended queue pairs, and ibv_post_send(3) does what is asked for. EOPNOTSUPP: it does not.
        """
        opened, sizes = self.opened, bytes(init.cap)
        create, convert = opened.operations.create_qp_ex, opened.library.ibv_qp_to_qp_ex
        if create is not None and convert is not None:
            init.comp_mask, init.pd = int(_EXTENDED), domain.address
            for operations in operations_to_try(qp_type, asked, self._found.device_cap_flags_ex):
                init.send_ops_flags = int(operations)
                for size in sizes_to_try(ibv_qp_cap.from_buffer_copy(sizes).max_inline_data):
                    init.cap = ibv_qp_cap.from_buffer_copy(sizes)
                    init.cap.max_inline_data = size
                    address = create(opened.context, byref(init))
                    if address and convert(address):
                        return address, operations
                    if address:
                        opened.library.ibv_destroy_qp(address)
                        break
                    if last_error() == errno.EOPNOTSUPP:
                        break
            init.cap = ibv_qp_cap.from_buffer_copy(sizes)
        for name in sorted(op.name for op in EXTENDED_ONLY if asked & SendOpsFlag[op.name]):
            raise self._lacks(Feature[name], "create_qp")
        return 0, SendOpsFlag(0)

    # -- XRC ------------------------------------------------------------------------------------------

    def open_xrcd(self, inode: tuple[int, int] | None, create: bool, exclusive: bool) -> XrcDomain:
        opened = self.opened
        open_domain, close_domain = opened.operations.open_xrcd, opened.operations.close_xrcd
        if open_domain is None or close_domain is None:
            raise self._lacks(Feature.XRC, "open_xrcd")
        init = ibv_xrcd_init_attr(int(XRCDInitAttrMask.FD | XRCDInitAttrMask.OFLAGS), _descriptor_of(inode))
        init.oflags = (os.O_CREAT if create else 0) | (os.O_EXCL if exclusive else 0)
        with opened.call("open_xrcd"):
            address = made(open_domain(opened.context, byref(init)), "open_xrcd", self.name)
            return XrcDomain(opened, Rank.DOMAIN, close_domain, address)

    def create_xrc_srq(self, pd: object, attr: SrqAttr, domain: object, cq: CQBackend) -> KernelSRQ:
        opened = self.opened
        assert isinstance(domain, XrcDomain)
        assert isinstance(cq, KernelCQ)
        create, number_of = opened.operations.create_srq_ex, opened.operations.get_srq_num
        if create is None or number_of is None:
            raise self._lacks(Feature.XRC, "create_srq")
        handle, number = opened.pd(pd), c_uint32()
        mask = SrqInitAttrMask.TYPE | SrqInitAttrMask.PD | SrqInitAttrMask.XRCD | SrqInitAttrMask.CQ
        init = ibv_srq_init_attr_ex(
            None,
            ibv_srq_attr(attr.max_wr, attr.max_sge, 0),
            int(mask),
            int(SRQType.XRC),
            handle.address,
            domain.address,
            cq.address,
        )
        with opened.runtime.lock, opened.call("create_srq"):
            address = made(create(opened.context, byref(init)), "create_srq", self.name)
            code = number_of(address, byref(number))
            if code:
                opened.library.ibv_destroy_srq(address)
                check(code, "create_srq", self.name)
            return KernelSRQ(opened, address, attr, (handle, domain, cq), number.value)

    def open_qp(self, domain: object, qp_num: int, events: AsyncEvents) -> KernelQP:
        opened = self.opened
        assert isinstance(domain, XrcDomain)
        open_handle = opened.operations.open_qp
        if open_handle is None:
            raise self._lacks(Feature.QP_XRC_RECV, "open_qp")
        attr = ibv_qp_open_attr(int(_HANDLE), qp_num, domain.address, None, int(QPType.XRC_RECV))
        with opened.runtime.lock, opened.call("open_qp"):
            address = made(open_handle(opened.context, byref(attr)), "open_qp", self.name)
            qp = KernelQP(opened, address, QPType.XRC_RECV, QPCap(0, 0, 0, 0, 0), None, (), (domain,))
        qp.async_events = events
        qp.query()  # its state
        return qp

    def _lacks(self, feature: Feature, step: str) -> RdmaError:
        return absent(feature, step, self.name, "the device")


class XrcDomain(Handle):
    """An XRC domain, which lives as long as something refers to it."""

    __slots__ = ()


def _descriptor_of(inode: tuple[int, int] | None) -> int:
    """A descriptor of the file with this device and inode, which the caller has open; -1 for None."""
    if inode is None:
        return -1
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found = os.fstat(int(name))
            if (found.st_dev, found.st_ino) == inode:
                return int(name)
    raise cm_error(errno.EBADF, "the file is not open any more", "open_xrcd")
