"""The calls of ``infiniband/verbs.h`` that need what no device here has: each raises EOPNOTSUPP, as on rdma_rxe.

A program that tries such a call and goes on without it works here as well. Their structures and constants are not
there: ``attr`` and its like may be anything.
"""

# ruff: noqa: ARG001 (C's arguments)
from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import NoReturn

from rdmacm.errors import RdmaError, cm_error
from rdmacm.provider.connparam import Ece
from rdmacm.verbs.cq import CQ
from rdmacm.verbs.device import Context
from rdmacm.verbs.pd import PD
from rdmacm.verbs.qp import QP
from rdmacm.verbs.srq import SRQ
from rdmacm.verbs.wr import SGE

__all__ = [
    "ibv_advise_mr",
    "ibv_alloc_dm",
    "ibv_alloc_null_mr",
    "ibv_alloc_parent_domain",
    "ibv_alloc_td",
    "ibv_create_counters",
    "ibv_create_flow",
    "ibv_create_rwq_ind_table",
    "ibv_create_wq",
    "ibv_import_device",
    "ibv_import_dm",
    "ibv_import_mr",
    "ibv_import_pd",
    "ibv_modify_cq",
    "ibv_modify_qp_rate_limit",
    "ibv_post_srq_ops",
    "ibv_query_ece",
    "ibv_reg_dm_mr",
    "ibv_set_ece",
]


def _refused(step: str, why: str, device: str | None) -> RdmaError:
    return cm_error(errno.EOPNOTSUPP, why, step, device)


def ibv_advise_mr(pd: PD, advice: int, flags: int, sg_list: Sequence[SGE], num_sge: int) -> NoReturn:
    """ibv_advise_mr(3)."""
    raise _refused("advise_mr", "memory regions are not paged on demand", pd.context.name)


def ibv_alloc_dm(context: Context, attr: object) -> NoReturn:
    """ibv_alloc_dm(3)."""
    raise _refused("alloc_dm", "the device has no memory of its own", context.name)


def ibv_alloc_null_mr(pd: PD) -> NoReturn:
    """ibv_alloc_null_mr(3)."""
    raise _refused("alloc_null_mr", "there are no regions without memory", pd.context.name)


def ibv_alloc_parent_domain(context: Context, attr: object) -> NoReturn:
    """ibv_alloc_parent_domain(3)."""
    raise _refused("alloc_parent_domain", "there are no parent domains", context.name)


def ibv_alloc_td(context: Context, init_attr: object) -> NoReturn:
    """ibv_alloc_td(3)."""
    raise _refused("alloc_td", "there are no thread domains", context.name)


def ibv_create_counters(context: Context, init_attr: object) -> NoReturn:
    """ibv_create_counters(3)."""
    raise _refused("create_counters", "there are no counters of flows", context.name)


def ibv_create_flow(qp: QP, flow: object) -> NoReturn:
    """ibv_create_flow(3)."""
    raise _refused("create_flow", "there is no flow steering", qp.context.name)


def ibv_create_rwq_ind_table(context: Context, init_attr: object) -> NoReturn:
    """ibv_create_rwq_ind_table(3)."""
    raise _refused("create_rwq_ind_table", "there is no receive-side scaling", context.name)


def ibv_create_wq(context: Context, wq_init_attr: object) -> NoReturn:
    """ibv_create_wq(3)."""
    raise _refused("create_wq", "there is no receive-side scaling", context.name)


def ibv_import_device(cmd_fd: int) -> NoReturn:
    """ibv_import_device(3)."""
    raise _refused("import_device", "processes share no devices", None)


def ibv_import_dm(context: Context, dm_handle: int) -> NoReturn:
    """ibv_import_dm(3)."""
    raise _refused("import_dm", "the device has no memory of its own", context.name)


def ibv_import_mr(pd: PD, mr_handle: int) -> NoReturn:
    """ibv_import_mr(3)."""
    raise _refused("import_mr", "processes share no memory regions", pd.context.name)


def ibv_import_pd(context: Context, pd_handle: int) -> NoReturn:
    """ibv_import_pd(3)."""
    raise _refused("import_pd", "processes share no protection domains", context.name)


def ibv_modify_cq(cq: CQ, attr: object) -> NoReturn:
    """ibv_modify_cq(3)."""
    raise _refused("modify_cq", "the events of completion queues are not moderated", cq.context.name)


def ibv_modify_qp_rate_limit(qp: QP, attr: object) -> NoReturn:
    """ibv_modify_qp_rate_limit(3)."""
    raise _refused("modify_qp_rate_limit", "no device limits the rate of a queue pair", qp.context.name)


def ibv_post_srq_ops(srq: SRQ, op: object) -> NoReturn:
    """ibv_post_srq_ops(3)."""
    raise _refused("post_srq_ops", "there is no tag matching", srq.context.name)


def ibv_query_ece(qp: QP) -> NoReturn:
    """ibv_query_ece(3)."""
    qp.query_ece()


def ibv_reg_dm_mr(pd: PD, dm: object, dm_offset: int, length: int, access: int) -> NoReturn:
    """ibv_reg_dm_mr(3)."""
    raise _refused("reg_dm_mr", "the device has no memory of its own", pd.context.name)


def ibv_set_ece(qp: QP, ece: Ece) -> NoReturn:
    """ibv_set_ece(3)."""
    qp.set_ece(ece)
