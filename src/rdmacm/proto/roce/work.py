"""Work requests and completions, as the engines see them: buffers are memoryviews, keys and addresses are numbers.

Checking lkeys and finding local memory is the business of whoever posts; checking rkeys is asked of
:class:`Memory` at each remote touch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Protocol


class AccessFlag(IntFlag):
    """``enum ibv_access_flags``: who may do what with a region; reading it locally is always allowed.

    REMOTE_WRITE and REMOTE_ATOMIC take LOCAL_WRITE as well.
    """

    LOCAL_WRITE = 1
    REMOTE_WRITE = 1 << 1
    REMOTE_READ = 1 << 2
    REMOTE_ATOMIC = 1 << 3
    MW_BIND = 1 << 4
    ZERO_BASED = 1 << 5
    ON_DEMAND = 1 << 6
    HUGETLB = 1 << 7
    FLUSH_GLOBAL = 1 << 8
    FLUSH_PERSISTENT = 1 << 9
    RELAXED_ORDERING = 1 << 20


class WROpcode(IntEnum):
    """``enum ibv_wr_opcode``: what a work request asks for."""

    RDMA_WRITE = 0
    RDMA_WRITE_WITH_IMM = 1
    SEND = 2
    SEND_WITH_IMM = 3
    RDMA_READ = 4
    ATOMIC_CMP_AND_SWP = 5
    ATOMIC_FETCH_AND_ADD = 6
    LOCAL_INV = 7
    BIND_MW = 8
    SEND_WITH_INV = 9
    TSO = 10
    FLUSH = 14
    ATOMIC_WRITE = 15


class WCStatus(IntEnum):
    """``enum ibv_wc_status``: how a work request ended."""

    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    LOC_RDD_VIOL_ERR = 14
    REM_INV_RD_REQ_ERR = 15
    REM_ABORT_ERR = 16
    INV_EECN_ERR = 17
    INV_EEC_STATE_ERR = 18
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21
    TM_ERR = 22
    TM_RNDV_INCOMPLETE = 23


class WCOpcode(IntEnum):
    """``enum ibv_wc_opcode``: what a completed work request was. Those with bit 7 set were receives."""

    SEND = 0
    RDMA_WRITE = 1
    RDMA_READ = 2
    COMP_SWAP = 3
    FETCH_ADD = 4
    BIND_MW = 5
    LOCAL_INV = 6
    TSO = 7
    FLUSH = 8
    ATOMIC_WRITE = 9
    RECV = 1 << 7
    RECV_RDMA_WITH_IMM = 129


class WCFlag(IntFlag):
    """``enum ibv_wc_flags``."""

    GRH = 1
    WITH_IMM = 1 << 1
    IP_CSUM_OK = 1 << 2
    WITH_INV = 1 << 3


class Memory(Protocol):
    """Registered memory, as remote peers may touch it."""

    def remote(self, rkey: int, address: int, length: int, access: AccessFlag) -> memoryview | None:
        """The bytes at ``address``, None where the key, the range or the permission is wrong."""

    def invalidate(self, rkey: int) -> bool:
        """Revoke a key (SEND with invalidate); False where there is none that may be."""


@dataclass(slots=True)
class SendWork:
    """A send work request. ``segments`` are gathered from, or for READ and atomics scattered to.

    ``imm`` is the immediate's four bytes as a number in network order; ``compare_add`` and ``swap`` are the operands
    of atomics; ``invalidate_rkey`` is for SEND_WITH_INV.

    ``length`` (bytes), ``first`` and ``last`` (PSNs), ``answered`` (bytes of a READ that have arrived) and ``asked``
    (packets of a READ or atomic that have been asked for) are the requester's, from when it begins with the request:
    each object is posted once.
    """

    wr_id: int
    opcode: WROpcode
    segments: Sequence[memoryview] = ()
    signaled: bool = True
    solicited: bool = False
    fence: bool = False
    remote_addr: int = 0
    rkey: int = 0
    imm: int = 0
    compare_add: int = 0
    swap: int = 0
    invalidate_rkey: int = 0
    length: int = field(init=False, repr=False, compare=False)
    first: int = field(init=False, repr=False, compare=False)
    last: int = field(init=False, repr=False, compare=False)
    answered: int = field(init=False, repr=False, compare=False)
    asked: int = field(init=False, repr=False, compare=False)


@dataclass(slots=True)
class RecvWork:
    """A receive work request: where a message is scattered to."""

    wr_id: int
    segments: Sequence[memoryview] = ()


@dataclass(slots=True)
class WC:
    """A work completion, ``struct ibv_wc``.

    ``imm_data`` (a number, from network order) and ``invalidated_rkey`` are None where there was none. After an error
    only ``wr_id``, ``status``, ``qp_num`` and ``vendor_err`` mean anything. ``byte_len`` of a datagram includes the
    40 bytes of its GRH.
    """

    wr_id: int
    status: WCStatus
    opcode: WCOpcode
    byte_len: int = 0
    imm_data: int | None = None
    invalidated_rkey: int | None = None
    solicited: bool = False
    qp_num: int = 0
    src_qp: int = 0
    has_grh: bool = False
    vendor_err: int = 0

    @property
    def wc_flags(self) -> WCFlag:
        """What else the completion carries."""
        return (
            (WCFlag.GRH if self.has_grh else WCFlag(0))
            | (WCFlag.WITH_IMM if self.imm_data is not None else WCFlag(0))
            | (WCFlag.WITH_INV if self.invalidated_rkey is not None else WCFlag(0))
        )
