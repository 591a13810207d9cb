"""Queue pair attributes of the verbs: which a mask names, and what an engine gets of them."""

from __future__ import annotations

from functools import lru_cache

from rdmacm.enums import AccessFlag
from rdmacm.proto import plainints as bits
from rdmacm.proto.engine import RtrAttributes, RtsAttributes
from rdmacm.proto.sa import PathRecord
from rdmacm.verbs.attr import AHAttr, GlobalRoute, QPAttr

#: That of a path that has none.
DEFAULT_HOP_LIMIT = 64

_FIELDS: tuple[tuple[int, str], ...] = (
    (bits.QP_EN_SQD_ASYNC_NOTIFY, "en_sqd_async_notify"),
    (bits.QP_ACCESS_FLAGS, "qp_access_flags"),
    (bits.QP_PKEY_INDEX, "pkey_index"),
    (bits.QP_PORT, "port_num"),
    (bits.QP_QKEY, "qkey"),
    (bits.QP_PATH_MTU, "path_mtu"),
    (bits.QP_TIMEOUT, "timeout"),
    (bits.QP_RETRY_CNT, "retry_cnt"),
    (bits.QP_RNR_RETRY, "rnr_retry"),
    (bits.QP_RQ_PSN, "rq_psn"),
    (bits.QP_MAX_QP_RD_ATOMIC, "max_rd_atomic"),
    (bits.QP_MIN_RNR_TIMER, "min_rnr_timer"),
    (bits.QP_SQ_PSN, "sq_psn"),
    (bits.QP_MAX_DEST_RD_ATOMIC, "max_dest_rd_atomic"),
    (bits.QP_DEST_QPN, "dest_qp_num"),
    (bits.QP_PATH_MIG_STATE, "path_mig_state"),
)
#: The attributes of :func:`rts_attributes`, as a mask, that may change in SQD.
SEND_ATTRIBUTES = bits.QP_TIMEOUT | bits.QP_RETRY_CNT | bits.QP_RNR_RETRY | bits.QP_MAX_QP_RD_ATOMIC


@lru_cache(256)
def named_fields(mask: int) -> tuple[str, ...]:
    """The fields of a QPAttr that a mask names, without the state and the address vectors."""
    return tuple(name for bit, name in _FIELDS if mask & bit)


def copy_path(path: AHAttr) -> AHAttr:
    """A copy of an address vector. (``copy.copy()`` takes ten times as long.)"""
    gr = path.gr
    route = GlobalRoute(gr.dgid, gr.sgid_index, gr.flow_label, gr.hop_limit, gr.traffic_class)
    return AHAttr(path.dlid, path.sl, path.src_path_bits, path.static_rate, path.is_global, path.port_num, route)


def vector_of(path: PathRecord, sgid_index: int, port_num: int) -> AHAttr:
    """The address vector of a path that begins at a row of the GID table of a port."""
    route = GlobalRoute(path.dgid, sgid_index, path.flow_label, path.hop_limit or DEFAULT_HOP_LIMIT, path.traffic_class)
    return AHAttr(is_global=True, port_num=port_num, sl=path.sl, gr=route)


def rtr_attributes(attr: QPAttr) -> RtrAttributes:
    """What an engine needs to become ready to receive."""
    return RtrAttributes(
        dest_qp_num=attr.dest_qp_num,
        rq_psn=attr.rq_psn,
        path_mtu=128 << attr.path_mtu,
        max_dest_rd_atomic=attr.max_dest_rd_atomic,
        min_rnr_timer=attr.min_rnr_timer,
        access=AccessFlag(attr.qp_access_flags),
    )


def rts_attributes(attr: QPAttr) -> RtsAttributes:
    """What an engine needs to become ready to send. A timeout code t is 4.096 us * 2^t, 0 is for ever."""
    return RtsAttributes(
        sq_psn=attr.sq_psn,
        timeout=4.096e-6 * (1 << attr.timeout) if attr.timeout else 0,
        retry_cnt=attr.retry_cnt,
        rnr_retry=attr.rnr_retry,
        max_rd_atomic=attr.max_rd_atomic,
    )
