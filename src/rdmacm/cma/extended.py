"""Extended queue pairs, completion queues and queries of ``infiniband/verbs.h``: ibv_wr_post(3), ibv_create_cq_ex(3).

``ibv_start_poll`` and ``ibv_next_poll`` return 0 or ENOENT, as in C; other errors are raised.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from rdmacm.cma.names import is_c_name
from rdmacm.cma.structures import ibv_cq_init_attr_ex
from rdmacm.errors import cm_error
from rdmacm.verbs.ah import AH
from rdmacm.verbs.attrex import DeviceAttrEx
from rdmacm.verbs.buffers import Buffer
from rdmacm.verbs.cq import CQ
from rdmacm.verbs.cqex import CQEX, PollCqAttr
from rdmacm.verbs.device import Context
from rdmacm.verbs.mw import MW
from rdmacm.verbs.qp import QP, QPInitAttrEx
from rdmacm.verbs.qpex import DataBuffer, QPEx
from rdmacm.verbs.qpopen import OpenedQP, QPOpenAttr
from rdmacm.verbs.srq import SRQ, SrqInitAttrEx
from rdmacm.verbs.wr import SGE, MWBindInfo
from rdmacm.verbs.xrcd import XRCD, XRCDInitAttr

# -- devices --------------------------------------------------------------------------------------------


def ibv_query_device_ex(context: Context) -> DeviceAttrEx:
    """ibv_query_device_ex(3); C's input, ``struct ibv_query_device_ex_input``, has no field that counts."""
    return context.query_device_ex()


def ibv_is_qpt_supported(caps: int, qpt: int) -> int:
    """Whether ``supported_qpts`` of one of the capabilities has a type of queue pair: 1 or 0."""
    return caps >> qpt & 1


def ibv_query_rt_values_ex(context: Context, comp_mask: int) -> NoReturn:
    """ibv_query_rt_values_ex(3); ``comp_mask`` is that of C's structure."""
    context.query_rt_values_ex(comp_mask)


# -- queue pairs ----------------------------------------------------------------------------------------


def ibv_query_qp_data_in_order(qp: QP, op: int, flags: int) -> int:
    """ibv_query_qp_data_in_order(3)."""
    return qp.query_data_in_order(op, flags)


def ibv_create_qp_ex(context: Context, qp_init_attr: QPInitAttrEx) -> QPEx:
    """ibv_create_qp_ex(3)."""
    return QPEx(context, qp_init_attr)


def ibv_qp_to_qp_ex(qp: QP) -> QPEx:
    """ibv_qp_to_qp_ex(3); EOPNOTSUPP, where C returns NULL, for a queue pair of ibv_create_qp()."""
    if not isinstance(qp, QPEx):
        text = "the queue pair is not extended"
        raise cm_error(errno.EOPNOTSUPP, text, "qp_to_qp_ex", hint="ibv_create_qp_ex()")
    return qp


def ibv_wr_start(qp: QPEx) -> None:
    """ibv_wr_start(3)."""
    qp.wr_start()


def ibv_wr_complete(qp: QPEx) -> None:
    """ibv_wr_complete(3)."""
    qp.wr_complete()


def ibv_wr_abort(qp: QPEx) -> None:
    """ibv_wr_abort(3)."""
    qp.wr_abort()


def ibv_wr_send(qp: QPEx) -> None:
    """ibv_wr_send(3)."""
    qp.wr_send()


def ibv_wr_send_imm(qp: QPEx, imm_data: int) -> None:
    """ibv_wr_send_imm(3)."""
    qp.wr_send_imm(imm_data)


def ibv_wr_send_inv(qp: QPEx, invalidate_rkey: int) -> None:
    """ibv_wr_send_inv(3)."""
    qp.wr_send_inv(invalidate_rkey)


def ibv_wr_rdma_write(qp: QPEx, rkey: int, remote_addr: int) -> None:
    """ibv_wr_rdma_write(3)."""
    qp.wr_rdma_write(rkey, remote_addr)


def ibv_wr_rdma_write_imm(qp: QPEx, rkey: int, remote_addr: int, imm_data: int) -> None:
    """ibv_wr_rdma_write_imm(3)."""
    qp.wr_rdma_write_imm(rkey, remote_addr, imm_data)


def ibv_wr_rdma_read(qp: QPEx, rkey: int, remote_addr: int) -> None:
    """ibv_wr_rdma_read(3)."""
    qp.wr_rdma_read(rkey, remote_addr)


def ibv_wr_atomic_cmp_swp(qp: QPEx, rkey: int, remote_addr: int, compare: int, swap: int) -> None:
    """ibv_wr_atomic_cmp_swp(3)."""
    qp.wr_atomic_cmp_swp(rkey, remote_addr, compare, swap)


def ibv_wr_atomic_fetch_add(qp: QPEx, rkey: int, remote_addr: int, add: int) -> None:
    """ibv_wr_atomic_fetch_add(3)."""
    qp.wr_atomic_fetch_add(rkey, remote_addr, add)


def ibv_wr_bind_mw(qp: QPEx, mw: MW, rkey: int, bind_info: MWBindInfo) -> None:
    """ibv_wr_bind_mw(3)."""
    qp.wr_bind_mw(mw, rkey, bind_info)


def ibv_wr_local_inv(qp: QPEx, invalidate_rkey: int) -> None:
    """ibv_wr_local_inv(3)."""
    qp.wr_local_inv(invalidate_rkey)


def ibv_wr_flush(qp: QPEx, rkey: int, remote_addr: int, len: int, type: int, level: int) -> None:
    """ibv_wr_flush(3)."""
    qp.wr_flush(rkey, remote_addr, len, type, level)


def ibv_wr_atomic_write(qp: QPEx, rkey: int, remote_addr: int, atomic_wr: Buffer) -> None:
    """ibv_wr_atomic_write(3)."""
    qp.wr_atomic_write(rkey, remote_addr, atomic_wr)


def ibv_wr_set_sge(qp: QPEx, lkey: int, addr: int, length: int) -> None:
    """ibv_wr_set_sge(3)."""
    qp.wr_set_sge(SGE(addr, length, lkey))


def ibv_wr_set_sge_list(qp: QPEx, num_sge: int, sg_list: Sequence[SGE]) -> None:
    """ibv_wr_set_sge_list(3)."""
    qp.wr_set_sge_list(num_sge, sg_list)


def ibv_wr_set_inline_data(qp: QPEx, addr: Buffer, length: int) -> None:
    """ibv_wr_set_inline_data(3)."""
    qp.wr_set_inline_data(addr, length)


def ibv_wr_set_inline_data_list(qp: QPEx, num_buf: int, buf_list: Sequence[DataBuffer]) -> None:
    """ibv_wr_set_inline_data_list(3)."""
    qp.wr_set_inline_data_list(num_buf, buf_list)


def ibv_wr_set_ud_addr(qp: QPEx, ah: AH, remote_qpn: int, remote_qkey: int) -> None:
    """ibv_wr_set_ud_addr(3)."""
    qp.wr_set_ud_addr(ah, remote_qpn, remote_qkey)


def ibv_wr_set_xrc_srqn(qp: QPEx, remote_srqn: int) -> None:
    """ibv_wr_set_xrc_srqn(3)."""
    qp.wr_set_xrc_srqn(remote_srqn)


# -- XRC domains and shared receive queues --------------------------------------------------------------


def ibv_open_xrcd(context: Context, xrcd_init_attr: XRCDInitAttr) -> XRCD:
    """ibv_open_xrcd(3)."""
    return XRCD(context, xrcd_init_attr)


def ibv_open_qp(context: Context, qp_open_attr: QPOpenAttr) -> OpenedQP:
    """ibv_open_qp(3)."""
    return OpenedQP(context, qp_open_attr)


def ibv_close_xrcd(xrcd: XRCD) -> None:
    """ibv_close_xrcd(3)."""
    xrcd.close()


def ibv_create_srq_ex(context: Context, srq_init_attr_ex: SrqInitAttrEx) -> SRQ:
    """ibv_create_srq_ex(3)."""
    return SRQ(context, srq_init_attr_ex)


def ibv_get_srq_num(srq: SRQ) -> int:
    """ibv_get_srq_num(3)."""
    return srq.get_srq_num()


# -- completion queues ----------------------------------------------------------------------------------


def ibv_create_cq_ex(context: Context, cq_attr: ibv_cq_init_attr_ex) -> CQEX:
    """ibv_create_cq_ex(3)."""
    return CQEX(context, cq_attr)


def ibv_cq_ex_to_cq(cq: CQEX) -> CQ:
    """ibv_cq_ex_to_cq(3); returns the queue itself."""
    return cq


def ibv_start_poll(cq: CQEX, attr: PollCqAttr | None = None) -> int:
    """ibv_start_poll(3)."""
    return cq.start_poll(attr)


def ibv_next_poll(cq: CQEX) -> int:
    """ibv_next_poll(3)."""
    return cq.next_poll()


def ibv_end_poll(cq: CQEX) -> None:
    """ibv_end_poll(3)."""
    cq.end_poll()


def ibv_wc_read_opcode(cq: CQEX) -> int:
    """ibv_wc_read_opcode(3)."""
    return cq.read_opcode()


def ibv_wc_read_vendor_err(cq: CQEX) -> int:
    """ibv_wc_read_vendor_err(3)."""
    return cq.read_vendor_err()


def ibv_wc_read_byte_len(cq: CQEX) -> int:
    """ibv_wc_read_byte_len(3)."""
    return cq.read_byte_len()


def ibv_wc_read_imm_data(cq: CQEX) -> int:
    """ibv_wc_read_imm_data(3), in host order."""
    return cq.read_imm_data()


def ibv_wc_read_invalidated_rkey(cq: CQEX) -> int:
    """ibv_wc_read_invalidated_rkey(3)."""
    return cq.read_invalidated_rkey()


def ibv_wc_read_qp_num(cq: CQEX) -> int:
    """ibv_wc_read_qp_num(3)."""
    return cq.read_qp_num()


def ibv_wc_read_src_qp(cq: CQEX) -> int:
    """ibv_wc_read_src_qp(3)."""
    return cq.read_src_qp()


def ibv_wc_read_wc_flags(cq: CQEX) -> int:
    """ibv_wc_read_wc_flags(3)."""
    return cq.read_wc_flags()


def ibv_wc_read_slid(cq: CQEX) -> int:
    """ibv_wc_read_slid(3)."""
    return cq.read_slid()


def ibv_wc_read_sl(cq: CQEX) -> int:
    """ibv_wc_read_sl(3)."""
    return cq.read_sl()


def ibv_wc_read_dlid_path_bits(cq: CQEX) -> int:
    """ibv_wc_read_dlid_path_bits(3)."""
    return cq.read_dlid_path_bits()


if not TYPE_CHECKING:
    __all__ = [name for name, value in sorted(globals().items()) if is_c_name(name, value, __name__)]
