"""Enumerations of ``infiniband/verbs.h``; values equal C's."""

from __future__ import annotations

from enum import IntEnum, IntFlag

from rdmacm.proto.roce.work import WC, AccessFlag, WCFlag, WCOpcode, WCStatus, WROpcode

__all__ = [
    "WC",
    "AccessFlag",
    "GidType",
    "LinkLayer",
    "Mtu",
    "NodeType",
    "PortState",
    "QPAttrMask",
    "QPState",
    "QPType",
    "SendFlag",
    "TransportType",
    "WCFlag",
    "WCOpcode",
    "WCStatus",
    "WROpcode",
]


class QPType(IntEnum):
    """``enum ibv_qp_type``. The software devices have queue pairs of type RC."""

    RC = 2
    UC = 3
    UD = 4
    RAW_PACKET = 8
    XRC_SEND = 9
    XRC_RECV = 10
    DRIVER = 0xFF


class PortState(IntEnum):
    """``enum ibv_port_state``."""

    NOP = 0
    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4
    ACTIVE_DEFER = 5


class LinkLayer(IntEnum):
    """``IBV_LINK_LAYER_*``."""

    UNSPECIFIED = 0
    INFINIBAND = 1
    ETHERNET = 2


class NodeType(IntEnum):
    """``enum ibv_node_type``."""

    CA = 1
    SWITCH = 2
    ROUTER = 3
    RNIC = 4


class TransportType(IntEnum):
    """``enum ibv_transport_type``; RoCE is the InfiniBand transport."""

    IB = 0
    IWARP = 1


class GidType(IntEnum):
    """``enum ibv_gid_type``."""

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
        """Payload bytes of one packet."""
        return 128 << self


class QPState(IntEnum):
    """``enum ibv_qp_state``."""

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6


class QPAttrMask(IntFlag):
    """``enum ibv_qp_attr_mask``."""

    STATE = 1 << 0
    CUR_STATE = 1 << 1
    EN_SQD_ASYNC_NOTIFY = 1 << 2
    ACCESS_FLAGS = 1 << 3
    PKEY_INDEX = 1 << 4
    PORT = 1 << 5
    QKEY = 1 << 6
    AV = 1 << 7
    PATH_MTU = 1 << 8
    TIMEOUT = 1 << 9
    RETRY_CNT = 1 << 10
    RNR_RETRY = 1 << 11
    RQ_PSN = 1 << 12
    MAX_QP_RD_ATOMIC = 1 << 13
    ALT_PATH = 1 << 14
    MIN_RNR_TIMER = 1 << 15
    SQ_PSN = 1 << 16
    MAX_DEST_RD_ATOMIC = 1 << 17
    PATH_MIG_STATE = 1 << 18
    CAP = 1 << 19
    DEST_QPN = 1 << 20
    RATE_LIMIT = 1 << 25


class SendFlag(IntFlag):
    """``enum ibv_send_flags``.

    FENCE: not before READs and atomics posted earlier are over. SIGNALED: a completion also for success. SOLICITED:
    wake a receiver that armed its queue for that. INLINE: the data is copied at once and needs no region.
    """

    FENCE = 1
    SIGNALED = 1 << 1
    SOLICITED = 1 << 2
    INLINE = 1 << 3
    IP_CSUM = 1 << 4
