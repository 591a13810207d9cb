"""Enumerations of ``infiniband/verbs.h``; values equal C's."""

from __future__ import annotations

from enum import IntEnum

from rdmacm.enums import AccessFlag, QPAttrMask, QPState, SendFlag, WCFlag, WCOpcode, WCStatus, WROpcode
from rdmacm.work import WC

__all__ = [
    "WC",
    "AccessFlag",
    "GidType",
    "LinkLayer",
    "MigState",
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
    """``enum ibv_qp_type``, ibv_create_qp(3). The software devices have RC only."""

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


class TransportType(IntEnum):
    """``enum ibv_transport_type``; RoCE uses the InfiniBand transport."""

    IB = 0
    IWARP = 1


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
