"""The enumerations of verbs have C's values."""

from __future__ import annotations

from rdmacm.verbs import AccessFlag, QPAttrMask, QPState, SendFlag, WCFlag, WCOpcode, WCStatus, WROpcode


def test_work_completions() -> None:
    assert [status.value for status in WCStatus] == list(range(24))
    assert (WCStatus.WR_FLUSH_ERR, WCStatus.REM_ACCESS_ERR, WCStatus.RNR_RETRY_EXC_ERR) == (5, 10, 13)
    assert [opcode.value for opcode in WCOpcode] == [*range(10), 128, 129]
    assert (WCOpcode.COMP_SWAP, WCOpcode.ATOMIC_WRITE, WCOpcode.RECV) == (3, 9, 128)
    assert {flag.name: flag.value for flag in WCFlag} == {"GRH": 1, "WITH_IMM": 2, "IP_CSUM_OK": 4, "WITH_INV": 8}


def test_work_requests() -> None:
    assert [opcode.value for opcode in WROpcode] == [*range(11), 14, 15]
    assert (WROpcode.SEND, WROpcode.ATOMIC_FETCH_AND_ADD, WROpcode.SEND_WITH_INV) == (2, 6, 9)
    assert [flag.value for flag in SendFlag] == [1, 2, 4, 8, 16]


def test_queue_pairs() -> None:
    assert [state.name for state in QPState] == ["RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"]
    assert [state.value for state in QPState] == list(range(7))
    assert [mask.value for mask in QPAttrMask] == [*[1 << bit for bit in range(21)], 1 << 25]
    assert (QPAttrMask.AV, QPAttrMask.MIN_RNR_TIMER, QPAttrMask.DEST_QPN) == (1 << 7, 1 << 15, 1 << 20)


def test_memory() -> None:
    assert [flag.value for flag in AccessFlag] == [*[1 << bit for bit in range(10)], 1 << 20]
    assert (AccessFlag.REMOTE_ATOMIC, AccessFlag.ZERO_BASED, AccessFlag.HUGETLB) == (8, 32, 128)
