"""The enumerations of verbs have the values of C."""

from __future__ import annotations

from enum import IntEnum

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
from rdmacm.verbs.enums import (
    DeviceCapFlag,
    GidType,
    LinkLayer,
    MigState,
    Mtu,
    NodeType,
    PortState,
    QPType,
    SrqAttrMask,
    TransportType,
)


def test_work_completion_values_are_those_of_c() -> None:
    assert [status.value for status in WCStatus] == list(range(24))
    assert (WCStatus.WR_FLUSH_ERR, WCStatus.REM_ACCESS_ERR, WCStatus.RNR_RETRY_EXC_ERR) == (5, 10, 13)
    assert [opcode.value for opcode in WCOpcode] == [*range(10), 128, 129]
    assert (WCOpcode.COMP_SWAP, WCOpcode.ATOMIC_WRITE, WCOpcode.RECV) == (3, 9, 128)
    assert {flag.name: flag.value for flag in WCFlag} == {"GRH": 1, "WITH_IMM": 2, "IP_CSUM_OK": 4, "WITH_INV": 8}


def test_work_request_values_are_those_of_c() -> None:
    assert [opcode.value for opcode in WROpcode] == [*range(11), 14, 15]
    assert (WROpcode.SEND, WROpcode.ATOMIC_FETCH_AND_ADD, WROpcode.SEND_WITH_INV) == (2, 6, 9)
    assert [flag.value for flag in SendFlag] == [1, 2, 4, 8, 16]
    assert {flag.name: flag.value for flag in PlacementType} == {"GLOBAL": 1, "PERSISTENT": 2}
    assert {level.name: level.value for level in SelectivityLevel} == {"RANGE": 0, "MR": 1}


def test_queue_pair_values_are_those_of_c() -> None:
    assert [state.name for state in QPState] == ["RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"]
    assert [state.value for state in QPState] == list(range(7))
    assert [mask.value for mask in QPAttrMask] == [*[1 << bit for bit in range(21)], 1 << 25]
    assert (QPAttrMask.AV, QPAttrMask.MIN_RNR_TIMER, QPAttrMask.DEST_QPN) == (1 << 7, 1 << 15, 1 << 20)


def test_access_flag_values_are_those_of_c() -> None:
    assert [flag.value for flag in AccessFlag] == [*[1 << bit for bit in range(10)], 1 << 20]
    assert (AccessFlag.REMOTE_ATOMIC, AccessFlag.ZERO_BASED, AccessFlag.HUGETLB) == (8, 32, 128)


def test_device_and_port_values_are_those_of_c() -> None:
    def values(kind: type[IntEnum]) -> dict[str, int]:
        return {name: int(member) for name, member in kind.__members__.items()}

    assert values(NodeType) == {"CA": 1, "SWITCH": 2, "ROUTER": 3, "RNIC": 4, "UNSPECIFIED": 7}
    assert values(TransportType) == {"IB": 0, "IWARP": 1, "UNSPECIFIED": 4}
    assert values(GidType) == {"IB": 0, "ROCE_V1": 1, "ROCE_V2": 2}
    assert values(LinkLayer) == {"UNSPECIFIED": 0, "INFINIBAND": 1, "ETHERNET": 2}
    assert list(values(PortState).items()) == [
        *[("NOP", 0), ("DOWN", 1), ("INIT", 2), ("ARMED", 3), ("ACTIVE", 4), ("ACTIVE_DEFER", 5)],
    ]
    assert values(Mtu) == {f"MTU_{128 << code}": code for code in range(1, 6)}
    assert values(MigState) == {"MIGRATED": 0, "REARM": 1, "ARMED": 2}
    assert {flag.name: flag.value for flag in SrqAttrMask} == {"MAX_WR": 1, "LIMIT": 2}
    beyond = {flag.name: flag.value.bit_length() - 1 for flag in DeviceCapFlag if flag.value >> 32}
    assert list(beyond.items()) == [("FLUSH_GLOBAL", 38), ("FLUSH_PERSISTENT", 39), ("ATOMIC_WRITE", 40)]
    types = {"RC": 2, "UC": 3, "UD": 4, "RAW_PACKET": 8, "XRC_SEND": 9, "XRC_RECV": 10, "DRIVER": 255}
    assert values(QPType) == types


def test_access_flags_are_named_in_order() -> None:
    names = ["LOCAL_WRITE", "REMOTE_WRITE", "REMOTE_READ", "REMOTE_ATOMIC", "MW_BIND", "ZERO_BASED", "ON_DEMAND"]
    assert [flag.name for flag in AccessFlag] == [
        *names,
        "HUGETLB",
        "FLUSH_GLOBAL",
        "FLUSH_PERSISTENT",
        "RELAXED_ORDERING",
    ]
