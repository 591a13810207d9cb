"""The calls of ``infiniband/verbs.h`` that need what no provider has: each raises EOPNOTSUPP, as on rdma_rxe.

A program that tries such a call and goes on without it works here as well. Their structures and constants are not
there: ``attr`` and its like may be anything.
"""

# ruff: noqa: ARG001 (C's arguments)
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from rdmacm.capabilities import Feature, absent
from rdmacm.cma.names import is_c_name
from rdmacm.provider.connparam import Ece
from rdmacm.verbs.cq import CQ
from rdmacm.verbs.device import Context
from rdmacm.verbs.pd import PD
from rdmacm.verbs.qp import QP
from rdmacm.verbs.srq import SRQ
from rdmacm.verbs.wr import SGE


def ibv_advise_mr(pd: PD, advice: int, flags: int, sg_list: Sequence[SGE], num_sge: int) -> NoReturn:
    """ibv_advise_mr(3)."""
    raise absent(Feature.PAGING_ADVICE, "advise_mr", pd.context.name)


def ibv_alloc_dm(context: Context, attr: object) -> NoReturn:
    """ibv_alloc_dm(3)."""
    raise absent(Feature.DEVICE_MEMORY, "alloc_dm", context.name)


def ibv_alloc_null_mr(pd: PD) -> NoReturn:
    """ibv_alloc_null_mr(3)."""
    raise absent(Feature.EMPTY_REGIONS, "alloc_null_mr", pd.context.name)


def ibv_alloc_parent_domain(context: Context, attr: object) -> NoReturn:
    """ibv_alloc_parent_domain(3)."""
    raise absent(Feature.PARENT_DOMAINS, "alloc_parent_domain", context.name)


def ibv_alloc_td(context: Context, init_attr: object) -> NoReturn:
    """ibv_alloc_td(3)."""
    raise absent(Feature.THREAD_DOMAINS, "alloc_td", context.name)


def ibv_create_counters(context: Context, init_attr: object) -> NoReturn:
    """ibv_create_counters(3)."""
    raise absent(Feature.FLOW_COUNTERS, "create_counters", context.name)


def ibv_create_flow(qp: QP, flow: object) -> NoReturn:
    """ibv_create_flow(3)."""
    raise absent(Feature.FLOW_STEERING, "create_flow", qp.context.name)


def ibv_create_rwq_ind_table(context: Context, init_attr: object) -> NoReturn:
    """ibv_create_rwq_ind_table(3)."""
    raise absent(Feature.RECEIVE_SCALING, "create_rwq_ind_table", context.name)


def ibv_create_wq(context: Context, wq_init_attr: object) -> NoReturn:
    """ibv_create_wq(3)."""
    raise absent(Feature.RECEIVE_SCALING, "create_wq", context.name)


def ibv_import_device(cmd_fd: int) -> NoReturn:
    """ibv_import_device(3)."""
    raise absent(Feature.SHARED_OBJECTS, "import_device")


def ibv_import_dm(context: Context, dm_handle: int) -> NoReturn:
    """ibv_import_dm(3)."""
    raise absent(Feature.DEVICE_MEMORY, "import_dm", context.name)


def ibv_import_mr(pd: PD, mr_handle: int) -> NoReturn:
    """ibv_import_mr(3)."""
    raise absent(Feature.SHARED_OBJECTS, "import_mr", pd.context.name)


def ibv_import_pd(context: Context, pd_handle: int) -> NoReturn:
    """ibv_import_pd(3)."""
    raise absent(Feature.SHARED_OBJECTS, "import_pd", context.name)


def ibv_modify_cq(cq: CQ, attr: object) -> NoReturn:
    """ibv_modify_cq(3)."""
    raise absent(Feature.COMPLETION_MODERATION, "modify_cq", cq.context.name)


def ibv_modify_qp_rate_limit(qp: QP, attr: object) -> NoReturn:
    """ibv_modify_qp_rate_limit(3)."""
    raise absent(Feature.QP_RATE_LIMIT, "modify_qp_rate_limit", qp.context.name)


def ibv_post_srq_ops(srq: SRQ, op: object) -> NoReturn:
    """ibv_post_srq_ops(3)."""
    raise absent(Feature.TAG_MATCHING, "post_srq_ops", srq.context.name)


def ibv_query_ece(qp: QP) -> NoReturn:
    """ibv_query_ece(3)."""
    qp.query_ece()


def ibv_reg_dm_mr(pd: PD, dm: object, dm_offset: int, length: int, access: int) -> NoReturn:
    """ibv_reg_dm_mr(3)."""
    raise absent(Feature.DEVICE_MEMORY, "reg_dm_mr", pd.context.name)


def ibv_set_ece(qp: QP, ece: Ece) -> NoReturn:
    """ibv_set_ece(3)."""
    qp.set_ece(ece)


if not TYPE_CHECKING:
    __all__ = [name for name, value in sorted(globals().items()) if is_c_name(name, value, __name__)]
