"""The attribute ids of the subnet administration class, and the selectors of its records."""

from __future__ import annotations

from enum import IntEnum


class Attribute(IntEnum):
    """Attribute ids of the subnet administrator (InfiniBand Architecture 15.2.5)."""

    CLASS_PORT_INFO = 0x0001
    NOTICE = 0x0002
    INFORM_INFO = 0x0003
    NODE_RECORD = 0x0011
    PORT_INFO_RECORD = 0x0012
    SL_TO_VL_MAPPING_TABLE_RECORD = 0x0013
    SWITCH_INFO_RECORD = 0x0014
    LINEAR_FORWARDING_TABLE_RECORD = 0x0015
    RANDOM_FORWARDING_TABLE_RECORD = 0x0016
    MULTICAST_FORWARDING_TABLE_RECORD = 0x0017
    SM_INFO_RECORD = 0x0018
    LINK_RECORD = 0x0020
    GUID_INFO_RECORD = 0x0030
    SERVICE_RECORD = 0x0031
    PKEY_TABLE_RECORD = 0x0033
    PATH_RECORD = 0x0035
    VL_ARBITRATION_TABLE_RECORD = 0x0036
    MC_MEMBER_RECORD = 0x0038
    TRACE_RECORD = 0x0039
    MULTI_PATH_RECORD = 0x003A
    SERVICE_ASSOCIATION_RECORD = 0x003B
    INFORM_INFO_RECORD = 0x00F3


class Selector(IntEnum):
    """How a query compares the MTU, rate and packet life time of a record, each of which has a selector.

    InfiniBand Architecture 15.2.5.16.
    """

    GREATER = 0
    LESS = 1
    EXACTLY = 2
    #: The largest available; of the packet life time, the smallest.
    LARGEST = 3
