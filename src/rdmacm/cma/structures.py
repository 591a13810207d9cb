"""The structures of ``rdma/rdma_cma.h`` and ``infiniband/verbs.h`` under C's names.

A structure that a program fills in is a subclass of the package's own class: its fields are 0 at first, as after
memset(3), it may be changed, and it has C's field names beside the others. Both names are of one field. A structure
that only the package makes (an id, an event, a completion) is the package's class.

Where C has a union or a structure inside the structure (``wr.rdma``, ``param.conn``, ``route.addr``), the attribute is
the object itself, which has the fields. A length (``private_data_len``) is read-only: it is that of the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, overload

from rdmacm.address import Gid, SockAddr, SockAddrIB
from rdmacm.addrinfo import AddrInfo
from rdmacm.cma.names import is_c_name
from rdmacm.cmid import CmEvent, CmId, EventChannel, Route
from rdmacm.errors import CmStateError
from rdmacm.proto.roce.grh import GRH
from rdmacm.proto.sa import PathData, PathRecord
from rdmacm.provider.connparam import ConnParam, Ece, UdParam
from rdmacm.verbs.ah import AH
from rdmacm.verbs.async_event import AsyncEvent
from rdmacm.verbs.attr import AHAttr, DeviceAttr, GlobalRoute, QPAttr, QPCap, SrqAttr, SrqInitAttr
from rdmacm.verbs.attrex import (
    CQModerationCaps,
    DeviceAttrEx,
    ODPCaps,
    PacketPacingCaps,
    PCIAtomicCaps,
    RSSCaps,
    TMCaps,
    TSOCaps,
)
from rdmacm.verbs.buffers import Buffer
from rdmacm.verbs.cq import CQ, CompChannel
from rdmacm.verbs.cqex import CQEX, CqInitAttrEx, PollCqAttr
from rdmacm.verbs.device import Context, Device, GidEntry, Port
from rdmacm.verbs.enums import WC, QPType, WROpcode
from rdmacm.verbs.mw import MW
from rdmacm.verbs.pd import MR, PD
from rdmacm.verbs.qp import QP, QPInitAttr, QPInitAttrEx
from rdmacm.verbs.qpex import DataBuffer, QPEx
from rdmacm.verbs.qpopen import QPOpenAttr
from rdmacm.verbs.srq import SRQ, SrqInitAttrEx
from rdmacm.verbs.wr import SGE, AddressHandle, MemoryRegion, MemoryWindow, MWBind, MWBindInfo, RecvWR, SendWR
from rdmacm.verbs.xrcd import XRCD, XRCDInitAttr

T = TypeVar("T")


class Alias(Generic[T]):
    """Another name of the field ``name``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.__doc__ = f"C's name of ``{name}``."

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object, owner: type) -> Self | T:
        if instance is None:
            return self
        found: T = getattr(instance, self._name)
        return found

    def __set__(self, instance: object, value: T) -> None:
        setattr(instance, self._name, value)


def fill(structure: T, found: object) -> T:
    """Copy the fields of ``found`` to a structure of its kind, and those of the structures inside; return it."""
    for each in fields(found):  # type: ignore[arg-type]
        value, inner = getattr(found, each.name), getattr(structure, each.name)
        if is_dataclass(inner):
            fill(inner, value)
        else:
            setattr(structure, each.name, value)
    return structure


# -- structures that the package makes ------------------------------------------------------------------

rdma_event_channel = EventChannel
rdma_cm_event = CmEvent
rdma_route = Route
rdma_ud_param = UdParam
sockaddr_ib = SockAddrIB
ibv_ece = Ece
ibv_gid = Gid
ibv_gid_entry = GidEntry
ibv_path_data = PathData
ibv_path_record = PathRecord
ibv_sa_path_rec = PathRecord
ibv_device = Device
ibv_context = Context
ibv_device_attr = DeviceAttr
ibv_device_attr_ex = DeviceAttrEx
ibv_odp_caps = ODPCaps
ibv_tso_caps = TSOCaps
ibv_rss_caps = RSSCaps
ibv_packet_pacing_caps = PacketPacingCaps
ibv_tm_caps = TMCaps
ibv_cq_moderation_caps = CQModerationCaps
ibv_pci_atomic_caps = PCIAtomicCaps
ibv_port_attr = Port
ibv_pd = PD
ibv_mr = MR
ibv_mw = MW
ibv_comp_channel = CompChannel
ibv_cq = CQ
ibv_cq_ex = CQEX
ibv_poll_cq_attr = PollCqAttr
ibv_qp = QP
ibv_qp_ex = QPEx
ibv_data_buf = DataBuffer
ibv_srq = SRQ
ibv_xrcd = XRCD
ibv_qp_open_attr = QPOpenAttr
ibv_ah = AH
ibv_grh = GRH
ibv_async_event = AsyncEvent
ibv_wc = WC


# -- an id ----------------------------------------------------------------------------------------------

if TYPE_CHECKING:  # as in C, the type of a member does not say that it may be NULL
    rdma_cm_id = CmId
else:

    class OrNull:
        """A member of a CmId, or None where that raises CmStateError."""

        def __set_name__(self, owner: type[CmId], name: str) -> None:
            self._member = getattr(CmId, name)
            self.__doc__ = f"As of a CmId, but None where that raises. {self._member.__doc__}"

        def __get__(self, instance: CmId | None, owner: type[CmId]) -> object:
            if instance is None:
                return self
            try:
                return self._member.__get__(instance)
            except CmStateError:
                return None

        def __set__(self, instance: CmId, value: object) -> None:
            self._member.__set__(instance, value)

    class rdma_cm_id(CmId):
        """``struct rdma_cm_id``: a CmId whose members are None where those of C are NULL, before the id has them."""

        __slots__ = ()

        verbs = OrNull()
        pd = OrNull()
        qp = OrNull()
        srq = OrNull()
        send_cq = OrNull()
        recv_cq = OrNull()
        send_cq_channel = OrNull()
        recv_cq_channel = OrNull()
        event = OrNull()


# -- structures of rdma/rdma_cma.h that the program fills in --------------------------------------------


class rdma_conn_param(ConnParam):
    """``struct rdma_conn_param``, rdma_connect(3) and rdma_accept(3).

    Without it, or in C with NULL, there are as many retries and resources as possible; here they are 0 at first.
    """

    __slots__ = ()
    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__
    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # it may change

    def __init__(
        self,
        private_data: bytes = b"",
        responder_resources: int = 0,
        initiator_depth: int = 0,
        flow_control: int = 0,
        retry_count: int = 0,
        rnr_retry_count: int = 0,
        srq: int = 0,
        qp_num: int = 0,
        qkey: int = 0,
    ) -> None:
        self.private_data: bytes = private_data
        self.responder_resources: int = responder_resources
        self.initiator_depth: int = initiator_depth
        self.flow_control: int = flow_control
        self.retry_count: int = retry_count
        self.rnr_retry_count: int = rnr_retry_count
        self.srq: int = srq
        self.qp_num: int = qp_num
        self.qkey: int = qkey


@dataclass(slots=True)
class rdma_cm_join_mc_attr_ex:
    """``struct rdma_cm_join_mc_attr_ex``, rdma_join_multicast_ex(3).

    - ``comp_mask``: the fields that are set, ``RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS``.
    - ``join_flags``: ``RDMA_MC_JOIN_FLAG_FULLMEMBER``, or ``RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER`` to send only.
    - ``addr``: the address of the group.
    """

    comp_mask: int = 0
    join_flags: int = 0
    addr: SockAddr | None = None


class rdma_addrinfo(AddrInfo):
    """``struct rdma_addrinfo``, rdma_getaddrinfo(3). Addresses are Python socket addresses, or SockAddrIB."""

    __slots__ = ("ai_next",)
    __setattr__ = object.__setattr__
    __delattr__ = object.__delattr__
    __hash__: ClassVar[None] = None  # type: ignore[assignment]  # it may change

    ai_flags: Alias[int] = Alias("flags")
    ai_family: Alias[int] = Alias("family")
    ai_qp_type: Alias[int] = Alias("qp_type")
    ai_port_space: Alias[int] = Alias("port_space")
    ai_src_len: Alias[int] = Alias("src_len")
    ai_dst_len: Alias[int] = Alias("dst_len")
    ai_src_addr: Alias[SockAddr | None] = Alias("src_addr")
    ai_dst_addr: Alias[SockAddr | None] = Alias("dst_addr")
    ai_src_canonname: Alias[str | None] = Alias("src_canonname")
    ai_dst_canonname: Alias[str | None] = Alias("dst_canonname")
    ai_route_len: Alias[int] = Alias("route_len")
    ai_route: Alias[tuple[PathData, ...]] = Alias("route")
    ai_connect_len: Alias[int] = Alias("connect_len")
    ai_connect: Alias[bytes] = Alias("connect")

    def __init__(
        self,
        *,
        ai_flags: int = 0,
        ai_family: int = 0,
        ai_qp_type: int = 0,
        ai_port_space: int = 0,
        ai_src_addr: SockAddr | None = None,
        ai_dst_addr: SockAddr | None = None,
        ai_route: tuple[PathData, ...] = (),
        ai_connect: bytes = b"",
        **other: Any,
    ) -> None:
        names = {
            "flags": ai_flags,
            "family": ai_family,
            "qp_type": ai_qp_type,
            "port_space": ai_port_space,
            "src_addr": ai_src_addr,
            "dst_addr": ai_dst_addr,
            "route": ai_route,
            "connect": ai_connect,
        }
        super().__init__(**{**names, **other})
        #: The next entry of the list.
        self.ai_next: rdma_addrinfo | None = None

    @classmethod
    def linked(cls, found: list[AddrInfo]) -> list[rdma_addrinfo]:
        """The entries of a list under C's names, each with the next in ``ai_next``."""
        entries = [cls(**{name: getattr(info, name) for name in AddrInfo.__slots__}) for info in found]
        for entry, following in pairwise(entries):
            entry.ai_next = following
        return entries


# -- structures of infiniband/verbs.h that the program fills in -----------------------------------------


@dataclass(slots=True)
class ibv_qp_cap(QPCap):
    """``struct ibv_qp_cap``, ibv_create_qp(3)."""

    max_send_wr: int = 0
    max_recv_wr: int = 0
    max_send_sge: int = 0
    max_recv_sge: int = 0
    max_inline_data: int = 0


class ibv_qp_init_attr(QPInitAttr):
    """``struct ibv_qp_init_attr``, ibv_create_qp(3) and rdma_create_qp(3). The type is RC at first."""

    __slots__ = ()

    send_cq: Alias[CQ | None] = Alias("scq")
    recv_cq: Alias[CQ | None] = Alias("rcq")

    def __init__(
        self,
        *,
        qp_context: object = None,
        send_cq: CQ | None = None,
        recv_cq: CQ | None = None,
        srq: SRQ | None = None,
        cap: QPCap | None = None,
        qp_type: QPType = QPType.RC,
        sq_sig_all: int = 0,
    ) -> None:
        super().__init__(qp_type, qp_context, send_cq, recv_cq, srq, cap or ibv_qp_cap(), bool(sq_sig_all))


class ibv_qp_init_attr_ex(QPInitAttrEx):
    """``struct ibv_qp_init_attr_ex``, ibv_create_qp_ex(3) and rdma_create_qp_ex(3). The type is RC at first."""

    __slots__ = ()

    send_cq: Alias[CQ | None] = Alias("scq")
    recv_cq: Alias[CQ | None] = Alias("rcq")

    def __init__(
        self,
        *,
        qp_context: object = None,
        send_cq: CQ | None = None,
        recv_cq: CQ | None = None,
        srq: SRQ | None = None,
        cap: QPCap | None = None,
        qp_type: QPType = QPType.RC,
        sq_sig_all: int = 0,
        comp_mask: int = 0,
        pd: PD | None = None,
        create_flags: int = 0,
        max_tso_header: int = 0,
        source_qpn: int = 0,
        send_ops_flags: int = 0,
        xrcd: XRCD | None = None,
    ) -> None:
        super().__init__(
            *(qp_type, qp_context, send_cq, recv_cq, srq, cap or ibv_qp_cap(), bool(sq_sig_all)),
            *(comp_mask, pd, create_flags, max_tso_header, source_qpn, send_ops_flags, xrcd),
        )


@dataclass(slots=True)
class ibv_cq_init_attr_ex(CqInitAttrEx):
    """``struct ibv_cq_init_attr_ex``, ibv_create_cq_ex(3)."""

    cqe: int = 0


@dataclass(slots=True)
class ibv_global_route(GlobalRoute):
    """``struct ibv_global_route``, the ``grh`` of an ibv_ah_attr."""

    hop_limit: int = 0


class ibv_ah_attr(AHAttr):
    """``struct ibv_ah_attr``, ibv_create_ah(3)."""

    __slots__ = ()

    def __init__(
        self,
        dlid: int = 0,
        sl: int = 0,
        src_path_bits: int = 0,
        static_rate: int = 0,
        is_global: int = 0,
        port_num: int = 0,
        gr: GlobalRoute | None = None,
        *,
        grh: GlobalRoute | None = None,
    ) -> None:
        route = grh or gr or ibv_global_route()
        super().__init__(dlid, sl, src_path_bits, static_rate, bool(is_global), port_num, route)


@dataclass(slots=True)
class ibv_qp_attr(QPAttr):
    """``struct ibv_qp_attr``, ibv_modify_qp(3) and rdma_init_qp_attr(3)."""

    path_mtu: int = 0  # type: ignore[assignment]
    cap: QPCap = field(default_factory=ibv_qp_cap)
    ah_attr: AHAttr = field(default_factory=ibv_ah_attr)
    alt_ah_attr: AHAttr = field(default_factory=ibv_ah_attr)
    port_num: int = 0


@dataclass(slots=True)
class ibv_srq_attr(SrqAttr):
    """``struct ibv_srq_attr``, ibv_create_srq(3) and ibv_modify_srq(3)."""

    max_wr: int = 0
    max_sge: int = 0


@dataclass(slots=True)
class ibv_srq_init_attr(SrqInitAttr):
    """``struct ibv_srq_init_attr``, ibv_create_srq(3) and rdma_create_srq(3)."""

    attr: SrqAttr = field(default_factory=ibv_srq_attr)


@dataclass(slots=True)
class ibv_srq_init_attr_ex(SrqInitAttrEx):
    """``struct ibv_srq_init_attr_ex``, ibv_create_srq_ex(3) and rdma_create_srq_ex(3)."""

    attr: SrqAttr = field(default_factory=ibv_srq_attr)


@dataclass(slots=True)
class ibv_xrcd_init_attr(XRCDInitAttr):
    """``struct ibv_xrcd_init_attr``, ibv_open_xrcd(3)."""

    oflags: int = 0
    fd: int = 0


@dataclass(slots=True)
class ibv_mw_bind_info(MWBindInfo):
    """``struct ibv_mw_bind_info``, ibv_bind_mw(3)."""

    mr: MemoryRegion | None = None
    addr: int = 0
    length: int = 0
    mw_access_flags: int = 0


@dataclass(slots=True)
class ibv_mw_bind(MWBind):
    """``struct ibv_mw_bind``, ibv_bind_mw(3)."""

    bind_info: MWBindInfo = field(default_factory=ibv_mw_bind_info)


class ibv_sge(SGE):
    """``struct ibv_sge``: ``length`` bytes at ``addr``, a number (``mr.addr`` with or without an offset)."""

    __slots__ = ()

    def __init__(self, addr: int = 0, length: int = 0, lkey: int = 0) -> None:
        super().__init__(addr, length, lkey)


class _Elements:
    """``sg_list`` and ``num_sge`` of a work request, whose ``sg`` has the elements that are posted.

    In C one is a pointer and the other the number of elements there, which are set in any order.
    """

    if not TYPE_CHECKING:  # the slots are those of the classes below
        __slots__ = ()

    sg: Any
    #: The list that was set; what ``sg`` was made of it; the number that was set.
    _given: Sequence[SGE | Buffer]
    _made: Sequence[SGE | Buffer]
    _count: int | None

    @property
    def sg_list(self) -> Sequence[SGE | Buffer]:
        """The elements: a list of them, or one by itself, which stands for C's pointer to it."""
        found: Sequence[SGE | Buffer] = self._given if self.sg is self._made else self.sg
        return found

    @sg_list.setter
    def sg_list(self, value: SGE | Sequence[SGE | Buffer]) -> None:
        if isinstance(value, SGE):
            value = [value]
        elif not isinstance(value, Sequence) or isinstance(value, bytes | bytearray | memoryview | str):
            raise TypeError(f"sg_list takes an ibv_sge or a list of them, not {type(value).__name__}")
        count = self._count
        self._set(value, None if count is not None and count > len(value) else count)

    @property
    def num_sge(self) -> int:
        """How many elements of ``sg_list`` are used: all, unless it is set. ValueError for more than there are."""
        return len(self.sg)

    @num_sge.setter
    def num_sge(self, count: int) -> None:
        given = self.sg_list
        if count < 0 or count > len(given) > 0:
            raise ValueError(f"num_sge cannot be {count}: sg_list has {len(given)}")
        self._set(given, count)

    def _set(self, given: Sequence[SGE | Buffer], count: int | None) -> None:
        self._given, self._count = given, count
        if count is None or count == len(given):
            self.sg = given
        else:
            # A request with a number and no list yet has elements that no post accepts.
            self.sg = given[:count] if given else [None] * count
        self._made = self.sg


class ibv_send_wr(_Elements, SendWR):
    """``struct ibv_send_wr``, ibv_post_send(3).

    ``wr.rdma``, ``wr.atomic``, ``wr.ud`` and ``bind_mw`` are the request itself.
    """

    __slots__ = ("_count", "_given", "_made", "next")

    def __init__(
        self,
        *,
        wr_id: int = 0,
        next: ibv_send_wr | None = None,
        sg_list: SGE | Sequence[SGE | Buffer] = (),
        opcode: WROpcode = WROpcode.RDMA_WRITE,
        send_flags: int = 0,
        imm_data: int = 0,
        remote_addr: int = 0,
        rkey: int = 0,
        compare_add: int = 0,
        swap: int = 0,
        invalidate_rkey: int = 0,
        flush_length: int = 0,
        flush_type: int = 0,
        flush_level: int = 0,
        ah: AddressHandle | None = None,
        remote_qpn: int = 0,
        remote_qkey: int = 0,
        mw: MemoryWindow | None = None,
        bind_info: MWBindInfo | None = None,
        remote_srqn: int = 0,
    ) -> None:
        SendWR.__init__(
            self,
            *(wr_id, opcode, (), send_flags),
            imm_data=imm_data,
            remote_addr=remote_addr,
            rkey=rkey,
            compare_add=compare_add,
            swap=swap,
            invalidate_rkey=invalidate_rkey,
            remote_qpn=remote_qpn,
            remote_qkey=remote_qkey,
            flush_length=flush_length,
            flush_type=flush_type,
            flush_level=flush_level,
            remote_srqn=remote_srqn,
            ah=ah,
            mw=mw,
            bind_info=bind_info,
        )
        self._count = None
        self.sg_list = sg_list
        #: The request to post after this one.
        self.next: ibv_send_wr | None = next

    @property
    def wr(self) -> Self:
        """C's unions of the operands: this object."""
        return self

    rdma = wr
    atomic = wr
    ud = wr
    qp_type = wr
    xrc = wr

    @property
    def bind_mw(self) -> Self:
        """C's structure of a bind's operands: this object, with a ``bind_info`` to fill in."""
        if self.bind_info is None:
            self.bind_info: MWBindInfo | None = ibv_mw_bind_info()
        return self


class ibv_recv_wr(_Elements, RecvWR):
    """``struct ibv_recv_wr``, ibv_post_recv(3) and ibv_post_srq_recv(3)."""

    __slots__ = ("_count", "_given", "_made", "next")

    def __init__(self, *, wr_id: int = 0, next: ibv_recv_wr | None = None, sg_list: SGE | Sequence[SGE] = ()) -> None:
        RecvWR.__init__(self, wr_id)
        self._count = None
        self.sg_list = sg_list
        #: The request to post after this one.
        self.next: ibv_recv_wr | None = next


if not TYPE_CHECKING:
    __all__ = [name for name, value in sorted(globals().items()) if is_c_name(name, value, __name__)]
