"""Members of the verbs' enumerations as plain ints, for hot paths.

Combining two members of an IntFlag takes 650 to 940 ns in Python 3.11, two ints 20 ns; reading a member from its class
takes 100 ns, a name of a module 9 ns. A SEND of one packet takes about 20 us and tests half a dozen flags. (To hash or
compare members of an IntEnum costs no more than ints.) Elsewhere use the enumerations: their members print their
names.

The names are C's without ``IBV_``.
"""

from __future__ import annotations

from rdmacm.enums import AccessFlag, QPAttrMask, SendFlag, WCOpcode

# enum ibv_access_flags
ACCESS_LOCAL_WRITE = int(AccessFlag.LOCAL_WRITE)
ACCESS_REMOTE_WRITE = int(AccessFlag.REMOTE_WRITE)
ACCESS_REMOTE_READ = int(AccessFlag.REMOTE_READ)
ACCESS_REMOTE_ATOMIC = int(AccessFlag.REMOTE_ATOMIC)
ACCESS_MW_BIND = int(AccessFlag.MW_BIND)
ACCESS_ZERO_BASED = int(AccessFlag.ZERO_BASED)
ACCESS_ON_DEMAND = int(AccessFlag.ON_DEMAND)
ACCESS_HUGETLB = int(AccessFlag.HUGETLB)
ACCESS_FLUSH_GLOBAL = int(AccessFlag.FLUSH_GLOBAL)
ACCESS_FLUSH_PERSISTENT = int(AccessFlag.FLUSH_PERSISTENT)

# enum ibv_send_flags
SEND_FENCE = int(SendFlag.FENCE)
SEND_SIGNALED = int(SendFlag.SIGNALED)
SEND_SOLICITED = int(SendFlag.SOLICITED)
SEND_INLINE = int(SendFlag.INLINE)

# enum ibv_wc_opcode
#: Set in the opcode of every completion of a receive.
WC_RECV = int(WCOpcode.RECV)

# enum ibv_qp_attr_mask
QP_STATE = int(QPAttrMask.STATE)
QP_CUR_STATE = int(QPAttrMask.CUR_STATE)
QP_EN_SQD_ASYNC_NOTIFY = int(QPAttrMask.EN_SQD_ASYNC_NOTIFY)
QP_ACCESS_FLAGS = int(QPAttrMask.ACCESS_FLAGS)
QP_PKEY_INDEX = int(QPAttrMask.PKEY_INDEX)
QP_PORT = int(QPAttrMask.PORT)
QP_QKEY = int(QPAttrMask.QKEY)
QP_AV = int(QPAttrMask.AV)
QP_PATH_MIG_STATE = int(QPAttrMask.PATH_MIG_STATE)
QP_PATH_MTU = int(QPAttrMask.PATH_MTU)
QP_TIMEOUT = int(QPAttrMask.TIMEOUT)
QP_RETRY_CNT = int(QPAttrMask.RETRY_CNT)
QP_RNR_RETRY = int(QPAttrMask.RNR_RETRY)
QP_RQ_PSN = int(QPAttrMask.RQ_PSN)
QP_MAX_QP_RD_ATOMIC = int(QPAttrMask.MAX_QP_RD_ATOMIC)
QP_ALT_PATH = int(QPAttrMask.ALT_PATH)
QP_MIN_RNR_TIMER = int(QPAttrMask.MIN_RNR_TIMER)
QP_SQ_PSN = int(QPAttrMask.SQ_PSN)
QP_MAX_DEST_RD_ATOMIC = int(QPAttrMask.MAX_DEST_RD_ATOMIC)
QP_DEST_QPN = int(QPAttrMask.DEST_QPN)
