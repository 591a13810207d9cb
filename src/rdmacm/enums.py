"""Enumerations of ``infiniband/verbs.h``, with C's values, that protocol engines use as well as the verbs.

They have a module of their own because an engine must not import the verbs. :mod:`rdmacm.verbs.enums` exports these and
all other enumerations of the verbs.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

__all__ = [
    "AccessFlag",
    "PlacementType",
    "QPAttrMask",
    "QPState",
    "SelectivityLevel",
    "SendFlag",
    "WCFlag",
    "WCOpcode",
    "WCStatus",
    "WROpcode",
]


class AccessFlag(IntFlag):
    """``enum ibv_access_flags``: the permitted accesses to a memory region. Local reads are always permitted.

    REMOTE_WRITE and REMOTE_ATOMIC require LOCAL_WRITE (ibv_reg_mr(3)).
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


class WROpcode(IntEnum):
    """``enum ibv_wr_opcode``: the operation of a work request (ibv_post_send(3))."""

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


class SendFlag(IntFlag):
    """``enum ibv_send_flags`` (ibv_post_send(3)).

    FENCE: start only after earlier READs, atomics, FLUSHes and ATOMIC WRITEs have completed. SIGNALED: generate a
    completion for success too. SOLICITED: the receive completes with a solicited event. INLINE: the data is copied at
    once and needs no memory region. IP_CSUM: the device computes the IP checksum.
    """

    FENCE = 1
    SIGNALED = 1 << 1
    SOLICITED = 1 << 2
    INLINE = 1 << 3
    IP_CSUM = 1 << 4


class PlacementType(IntFlag):
    """``enum ibv_placement_type``: what FLUSH does for memory that was written before (ibv_wr_post(3)).

    GLOBAL: every reader of the host sees it. PERSISTENT: it survives a loss of power.
    """

    GLOBAL = 1
    PERSISTENT = 1 << 1


class SelectivityLevel(IntEnum):
    """``enum ibv_selectivity_level``: which memory FLUSH is for: the named range, or the whole region of its key."""

    RANGE = 0
    MR = 1


class WCStatus(IntEnum):
    """``enum ibv_wc_status``: the result of a work request (ibv_poll_cq(3))."""

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
    """``enum ibv_wc_opcode``: the operation of a completed work request. Bit 7 is set for receives."""

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
    """``enum ibv_wc_flags`` (ibv_poll_cq(3))."""

    GRH = 1
    WITH_IMM = 1 << 1
    IP_CSUM_OK = 1 << 2
    WITH_INV = 1 << 3
