"""Enumerations of ``infiniband/verbs.h``; values equal C's."""

from __future__ import annotations

from enum import IntEnum, IntFlag

from rdmacm.enums import (
    AccessFlag,
    PlacementType,
    QPAttrMask,
    QPState,
    SelectivityLevel,
    SendFlag,
    WCFlag,
    WCOpcode,
    WCStatus,
    WROpcode,
)
from rdmacm.proto.work import WC

__all__ = [
    "WC",
    "AccessFlag",
    "AtomicCap",
    "CqAttrFlag",
    "CqInitAttrMask",
    "CqWcFlag",
    "DeviceCapFlag",
    "EventType",
    "GidType",
    "LinkLayer",
    "MWType",
    "MigState",
    "Mtu",
    "NodeType",
    "PlacementType",
    "PortCapFlag",
    "PortCapFlag2",
    "PortFlag",
    "PortState",
    "QPAttrMask",
    "QPInitAttrMask",
    "QPOpenAttrMask",
    "QPState",
    "QPType",
    "ReregMRFlag",
    "SelectivityLevel",
    "SendFlag",
    "SendOpsFlag",
    "SRQType",
    "SrqAttrMask",
    "SrqInitAttrMask",
    "TransportType",
    "WCFlag",
    "WCOpcode",
    "WCStatus",
    "WROpcode",
    "XRCDInitAttrMask",
]


class QPType(IntEnum):
    """``enum ibv_qp_type``, ibv_create_qp(3). The software devices have all but RAW_PACKET and DRIVER."""

    RC = 2
    UC = 3
    UD = 4
    RAW_PACKET = 8
    XRC_SEND = 9
    XRC_RECV = 10
    DRIVER = 0xFF


class MigState(IntEnum):
    """``enum ibv_mig_state``, ibv_modify_qp(3): the state of path migration."""

    MIGRATED = 0
    REARM = 1
    ARMED = 2


class SrqAttrMask(IntFlag):
    """``enum ibv_srq_attr_mask``, ibv_modify_srq(3)."""

    MAX_WR = 1
    LIMIT = 1 << 1


class SRQType(IntEnum):
    """``enum ibv_srq_type``, ibv_create_srq_ex(3). There is no tag matching here (TM)."""

    BASIC = 0
    XRC = 1
    TM = 2


class SrqInitAttrMask(IntFlag):
    """``enum ibv_srq_init_attr_mask``, ibv_create_srq_ex(3): fields of a :class:`SrqInitAttrEx`."""

    TYPE = 1
    PD = 1 << 1
    XRCD = 1 << 2
    CQ = 1 << 3
    TM = 1 << 4


class XRCDInitAttrMask(IntFlag):
    """``enum ibv_xrcd_init_attr_mask``, ibv_open_xrcd(3): fields of a :class:`XRCDInitAttr`."""

    FD = 1
    OFLAGS = 1 << 1


class QPInitAttrMask(IntFlag):
    """``enum ibv_qp_init_attr_mask``, ibv_create_qp_ex(3): fields of a :class:`QPInitAttrEx`."""

    PD = 1
    XRCD = 1 << 1
    CREATE_FLAGS = 1 << 2
    MAX_TSO_HEADER = 1 << 3
    IND_TABLE = 1 << 4
    RX_HASH = 1 << 5
    SEND_OPS_FLAGS = 1 << 6


class QPOpenAttrMask(IntFlag):
    """``enum ibv_qp_open_attr_mask``, ibv_open_qp(3): fields of a :class:`QPOpenAttr`."""

    NUM = 1
    XRCD = 1 << 1
    CONTEXT = 1 << 2
    TYPE = 1 << 3


class SendOpsFlag(IntFlag):
    """``enum ibv_qp_create_send_ops_flags``, ibv_create_qp_ex(3): operations that an extended queue pair is for."""

    RDMA_WRITE = 1
    RDMA_WRITE_WITH_IMM = 1 << 1
    SEND = 1 << 2
    SEND_WITH_IMM = 1 << 3
    RDMA_READ = 1 << 4
    ATOMIC_CMP_AND_SWP = 1 << 5
    ATOMIC_FETCH_AND_ADD = 1 << 6
    LOCAL_INV = 1 << 7
    BIND_MW = 1 << 8
    SEND_WITH_INV = 1 << 9
    TSO = 1 << 10
    FLUSH = 1 << 11
    ATOMIC_WRITE = 1 << 12


class CqWcFlag(IntFlag):
    """``enum ibv_create_cq_wc_flags``, ibv_create_cq_ex(3): fields of completions; C's names are ``IBV_WC_EX_WITH_*``.

    STANDARD is all that ibv_poll_cq(3) has.
    """

    BYTE_LEN = 1
    IMM = 1 << 1
    QP_NUM = 1 << 2
    SRC_QP = 1 << 3
    SLID = 1 << 4
    SL = 1 << 5
    DLID_PATH_BITS = 1 << 6
    COMPLETION_TIMESTAMP = 1 << 7
    CVLAN = 1 << 8
    FLOW_TAG = 1 << 9
    TM_INFO = 1 << 10
    COMPLETION_TIMESTAMP_WALLCLOCK = 1 << 11
    STANDARD = 0x7F


class CqInitAttrMask(IntFlag):
    """``enum ibv_cq_init_attr_mask``, ibv_create_cq_ex(3): fields of a :class:`CqInitAttrEx`."""

    FLAGS = 1
    PD = 1 << 1


class CqAttrFlag(IntFlag):
    """``enum ibv_create_cq_attr_flags``, ibv_create_cq_ex(3).

    SINGLE_THREADED: only one thread at a time uses the queue. IGNORE_OVERRUN: it may lose completions.
    """

    SINGLE_THREADED = 1
    IGNORE_OVERRUN = 1 << 1


class EventType(IntEnum):
    """``enum ibv_event_type``, ibv_get_async_event(3)."""

    CQ_ERR = 0
    QP_FATAL = 1
    QP_REQ_ERR = 2
    QP_ACCESS_ERR = 3
    COMM_EST = 4
    SQ_DRAINED = 5
    PATH_MIG = 6
    PATH_MIG_ERR = 7
    DEVICE_FATAL = 8
    PORT_ACTIVE = 9
    PORT_ERR = 10
    LID_CHANGE = 11
    PKEY_CHANGE = 12
    SM_CHANGE = 13
    SRQ_ERR = 14
    SRQ_LIMIT_REACHED = 15
    QP_LAST_WQE_REACHED = 16
    CLIENT_REREGISTER = 17
    GID_CHANGE = 18
    WQ_FATAL = 19
    DEVICE_SPEED_CHANGE = 20

    def __str__(self) -> str:
        return f"IBV_EVENT_{self.name}"


class AtomicCap(IntEnum):
    """``enum ibv_atomic_cap``, ibv_query_device(3): among whom atomics are atomic.

    NONE: the device has none. HCA: among the queue pairs of the device. GLOB: among them and the host's processors.
    """

    NONE = 0
    HCA = 1
    GLOB = 2


class DeviceCapFlag(IntFlag):
    """``enum ibv_device_cap_flags``, ibv_query_device(3).

    Those from FLUSH_GLOBAL on are in ``device_cap_flags_ex`` only (ibv_query_device_ex(3)). Their C names are in the
    kernel's ``ib_user_verbs.h``.
    """

    RESIZE_MAX_WR = 1
    BAD_PKEY_CNTR = 1 << 1
    BAD_QKEY_CNTR = 1 << 2
    RAW_MULTI = 1 << 3
    AUTO_PATH_MIG = 1 << 4
    CHANGE_PHY_PORT = 1 << 5
    UD_AV_PORT_ENFORCE = 1 << 6
    CURR_QP_STATE_MOD = 1 << 7
    SHUTDOWN_PORT = 1 << 8
    INIT_TYPE = 1 << 9
    PORT_ACTIVE_EVENT = 1 << 10
    SYS_IMAGE_GUID = 1 << 11
    RC_RNR_NAK_GEN = 1 << 12
    SRQ_RESIZE = 1 << 13
    N_NOTIFY_CQ = 1 << 14
    MEM_WINDOW = 1 << 17
    UD_IP_CSUM = 1 << 18
    XRC = 1 << 20
    MEM_MGT_EXTENSIONS = 1 << 21
    MEM_WINDOW_TYPE_2A = 1 << 23
    MEM_WINDOW_TYPE_2B = 1 << 24
    RC_IP_CSUM = 1 << 25
    RAW_IP_CSUM = 1 << 26
    MANAGED_FLOW_STEERING = 1 << 29
    FLUSH_GLOBAL = 1 << 38
    FLUSH_PERSISTENT = 1 << 39
    ATOMIC_WRITE = 1 << 40


class PortCapFlag(IntFlag):
    """``enum ibv_port_cap_flags``, ibv_query_port(3): the port's CapabilityMask (InfiniBand Architecture 14.2.5.6)."""

    SM = 1 << 1
    NOTICE_SUP = 1 << 2
    TRAP_SUP = 1 << 3
    OPT_IPD_SUP = 1 << 4
    AUTO_MIGR_SUP = 1 << 5
    SL_MAP_SUP = 1 << 6
    MKEY_NVRAM = 1 << 7
    PKEY_NVRAM = 1 << 8
    LED_INFO_SUP = 1 << 9
    SYS_IMAGE_GUID_SUP = 1 << 11
    PKEY_SW_EXT_PORT_TRAP_SUP = 1 << 12
    EXTENDED_SPEEDS_SUP = 1 << 14
    CAP_MASK2_SUP = 1 << 15
    CM_SUP = 1 << 16
    SNMP_TUNNEL_SUP = 1 << 17
    REINIT_SUP = 1 << 18
    DEVICE_MGMT_SUP = 1 << 19
    VENDOR_CLASS_SUP = 1 << 20
    DR_NOTICE_SUP = 1 << 21
    CAP_MASK_NOTICE_SUP = 1 << 22
    BOOT_MGMT_SUP = 1 << 23
    LINK_LATENCY_SUP = 1 << 24
    CLIENT_REG_SUP = 1 << 25
    IP_BASED_GIDS = 1 << 26


class PortCapFlag2(IntFlag):
    """``enum ibv_port_cap_flags2``, ibv_query_port(3): the port's CapabilityMask2."""

    SET_NODE_DESC_SUP = 1
    INFO_EXT_SUP = 1 << 1
    VIRT_SUP = 1 << 2
    SWITCH_PORT_STATE_TABLE_SUP = 1 << 3
    LINK_WIDTH_2X_SUP = 1 << 4
    LINK_SPEED_HDR_SUP = 1 << 5
    LINK_SPEED_NDR_SUP = 1 << 10


class PortFlag(IntFlag):
    """``flags`` of ``struct ibv_port_attr``, ibv_query_port(3); C's names begin with ``IBV_QPF_``."""

    GRH_REQUIRED = 1


class PortState(IntEnum):
    """``enum ibv_port_state``, ibv_query_port(3)."""

    NOP = 0
    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4
    ACTIVE_DEFER = 5


class LinkLayer(IntEnum):
    """``link_layer`` of ``struct ibv_port_attr``: ``IBV_LINK_LAYER_*``."""

    UNSPECIFIED = 0
    INFINIBAND = 1
    ETHERNET = 2


class NodeType(IntEnum):
    """``enum ibv_node_type``, ibv_get_device_list(3)."""

    CA = 1
    SWITCH = 2
    ROUTER = 3
    RNIC = 4
    UNSPECIFIED = 7


class TransportType(IntEnum):
    """``enum ibv_transport_type``; RoCE uses the InfiniBand transport. UNSPECIFIED is a vendor's own, as of EFA."""

    IB = 0
    IWARP = 1
    UNSPECIFIED = 4


class MWType(IntEnum):
    """``enum ibv_mw_type``, ibv_alloc_mw(3)."""

    TYPE_1 = 1
    TYPE_2 = 2


class ReregMRFlag(IntFlag):
    """``enum ibv_rereg_mr_flags``: what :meth:`MR.rereg` changes, ibv_rereg_mr(3)."""

    CHANGE_TRANSLATION = 1
    CHANGE_PD = 1 << 1
    CHANGE_ACCESS = 1 << 2


class GidType(IntEnum):
    """``enum ibv_gid_type``, ibv_query_gid_table(3)."""

    IB = 0
    ROCE_V1 = 1
    ROCE_V2 = 2


class Mtu(IntEnum):
    """``enum ibv_mtu``: the code of a path MTU."""

    MTU_256 = 1
    MTU_512 = 2
    MTU_1024 = 3
    MTU_2048 = 4
    MTU_4096 = 5

    @property
    def bytes(self) -> int:
        """The most payload of one packet, in bytes."""
        return 128 << self
