"""Queue pairs, endpoints, and the helpers of ``rdma/rdma_verbs.h``.

``addr`` is a number as in C, ``mr.addr`` with or without an offset; or the object that was registered, for its first
byte. Without ``mr``, which needs ``IBV_SEND_INLINE``, it is the data. ``context`` is the number that comes back as
``wc.wr_id``; None, for C's NULL, is 0.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rdmacm.addrinfo import AddrInfo
from rdmacm.cma.constants import RDMA_UDP_QKEY
from rdmacm.cma.names import is_c_name
from rdmacm.cma.structures import fill, rdma_cm_id
from rdmacm.cmid import CmId
from rdmacm.cmid.ep import make_ep
from rdmacm.errors import cm_error
from rdmacm.verbs.ah import AH
from rdmacm.verbs.attr import QPAttr, SrqInitAttr
from rdmacm.verbs.buffers import Buffer, byte_view
from rdmacm.verbs.enums import WC, QPAttrMask, SrqInitAttrMask
from rdmacm.verbs.pd import MR, PD
from rdmacm.verbs.qp import QPInitAttr
from rdmacm.verbs.srq import SrqInitAttrEx
from rdmacm.verbs.wr import SGE

# -- endpoints ------------------------------------------------------------------------------------------


def rdma_create_ep(
    res: AddrInfo | Sequence[AddrInfo], pd: PD | None = None, qp_init_attr: QPInitAttr | None = None
) -> rdma_cm_id:
    """rdma_create_ep(3); uses the first entry of a list, as C does."""
    return make_ep(rdma_cm_id, res if isinstance(res, AddrInfo) else res[0], pd, qp_init_attr)


def rdma_destroy_ep(id: CmId) -> None:
    """rdma_destroy_ep(3)."""
    id.destroy()


# -- queue pairs and shared receive queues --------------------------------------------------------------


def rdma_create_qp(id: CmId, pd: PD | None, qp_init_attr: QPInitAttr) -> None:
    """rdma_create_qp(3); the queue pair is ``id.qp``."""
    id.create_qp(qp_init_attr, pd)


def rdma_create_qp_ex(id: CmId, qp_init_attr: QPInitAttr, pd: PD | None = None) -> None:
    """rdma_create_qp_ex(3); ``pd`` is a field of C's structure."""
    id.create_qp(qp_init_attr, pd)


def rdma_destroy_qp(id: CmId) -> None:
    """rdma_destroy_qp(3)."""
    id.destroy_qp()


def rdma_init_qp_attr(id: CmId, qp_attr: QPAttr) -> QPAttrMask:
    """rdma_init_qp_attr(3): fill in what the state in ``qp_attr.qp_state`` needs; returns the mask."""
    found, mask = id.init_qp_attr(qp_attr.qp_state)
    fill(qp_attr, found)
    return mask


def rdma_create_srq(id: CmId, pd: PD | None, attr: SrqInitAttr) -> None:
    """rdma_create_srq(3); the queue is ``id.srq``."""
    id.create_srq(attr, pd)


def rdma_create_srq_ex(id: CmId, attr: SrqInitAttr, pd: PD | None = None) -> None:
    """rdma_create_srq_ex(3); ``pd`` is a field of C's structure. A basic ibv_srq_init_attr may be given as well."""
    if isinstance(attr, SrqInitAttrEx) and not attr.comp_mask & SrqInitAttrMask.TYPE:
        hint = "IBV_SRQ_INIT_ATTR_TYPE"
        raise cm_error(errno.EINVAL, "comp_mask does not name srq_type", "create_srq", hint=hint)
    id.create_srq(attr, pd)


def rdma_destroy_srq(id: CmId) -> None:
    """rdma_destroy_srq(3)."""
    id.destroy_srq()


# -- memory ---------------------------------------------------------------------------------------------


def rdma_reg_msgs(id: CmId, addr: Buffer, length: int | None = None) -> MR:
    """rdma_reg_msgs(3); without ``length`` the whole buffer."""
    return id.reg_msgs(leading_bytes(addr, length))


def rdma_reg_read(id: CmId, addr: Buffer, length: int | None = None) -> MR:
    """rdma_reg_read(3); without ``length`` the whole buffer."""
    return id.reg_read(leading_bytes(addr, length))


def rdma_reg_write(id: CmId, addr: Buffer, length: int | None = None) -> MR:
    """rdma_reg_write(3); without ``length`` the whole buffer."""
    return id.reg_write(leading_bytes(addr, length))


def rdma_dereg_mr(mr: MR) -> None:
    """rdma_dereg_mr(3)."""
    mr.close()


# -- work requests --------------------------------------------------------------------------------------


def rdma_post_recvv(id: CmId, context: int | None, sgl: Sequence[SGE]) -> None:
    """rdma_post_recvv(3)."""
    id.post_recvv(context or 0, sgl)


def rdma_post_recv(id: CmId, context: int | None, addr: int | Buffer, length: int, mr: MR) -> None:
    """rdma_post_recv(3)."""
    id.post_recv(context or 0, mr, _offset(addr, mr), length)


def rdma_post_sendv(id: CmId, context: int | None, sgl: Sequence[SGE | Buffer], flags: int) -> None:
    """rdma_post_sendv(3)."""
    id.post_sendv(context or 0, sgl, flags)


def rdma_post_send(id: CmId, context: int | None, addr: int | Buffer, length: int, mr: MR | None, flags: int) -> None:
    """rdma_post_send(3); without ``mr``, inline."""
    data, offset = _data(addr, length, mr)
    id.post_send(context or 0, data, offset, length, flags)


def rdma_post_readv(id: CmId, context: int | None, sgl: Sequence[SGE], flags: int, remote_addr: int, rkey: int) -> None:
    """rdma_post_readv(3)."""
    id.post_readv(context or 0, sgl, remote_addr, rkey, flags)


def rdma_post_read(
    id: CmId, context: int | None, addr: int | Buffer, length: int, mr: MR, flags: int, remote_addr: int, rkey: int
) -> None:
    """rdma_post_read(3)."""
    id.post_read(context or 0, mr, remote_addr, rkey, _offset(addr, mr), length, flags)


def rdma_post_writev(
    id: CmId, context: int | None, sgl: Sequence[SGE | Buffer], flags: int, remote_addr: int, rkey: int
) -> None:
    """rdma_post_writev(3)."""
    id.post_writev(context or 0, sgl, remote_addr, rkey, flags)


def rdma_post_write(
    id: CmId,
    context: int | None,
    addr: int | Buffer,
    length: int,
    mr: MR | None,
    flags: int,
    remote_addr: int,
    rkey: int,
) -> None:
    """rdma_post_write(3); without ``mr``, inline."""
    data, offset = _data(addr, length, mr)
    id.post_write(context or 0, data, remote_addr, rkey, offset, length, flags)


def rdma_post_ud_send(
    id: CmId,
    context: int | None,
    addr: int | Buffer,
    length: int,
    mr: MR | None,
    flags: int,
    ah: AH,
    remote_qpn: int,
    remote_qkey: int = RDMA_UDP_QKEY,
) -> None:
    """rdma_post_ud_send(3); C has no ``remote_qkey`` and always uses this one."""
    data, offset = _data(addr, length, mr)
    id.post_ud_send(context or 0, data, ah, remote_qpn, remote_qkey, offset, length, flags)


# -- completions ----------------------------------------------------------------------------------------


def rdma_get_send_comp(id: CmId) -> WC:
    """rdma_get_send_comp(3)."""
    return id.get_send_comp()


def rdma_get_recv_comp(id: CmId) -> WC:
    """rdma_get_recv_comp(3)."""
    return id.get_recv_comp()


def leading_bytes(buffer: Buffer, length: int | None, step: str = "reg_mr") -> Buffer:
    """The first ``length`` bytes of a buffer; the buffer for None."""
    if length is None:
        return buffer
    view = byte_view(buffer)
    if not 0 <= length <= len(view):
        raise cm_error(errno.EINVAL, f"{length} bytes of a buffer of {len(view)}", step)
    return view[:length]


def _offset(addr: int | Buffer, mr: MR) -> int:
    """Where ``addr`` is in the region."""
    if isinstance(addr, int):
        return addr - mr.addr
    if not mr.closed and mr.buf.obj is not addr:
        raise cm_error(errno.EINVAL, "the region is of another buffer", "post", hint="mr.addr and an offset")
    return 0


def _data(addr: int | Buffer, length: int, mr: MR | None) -> tuple[MR | Buffer, int]:
    """What to send from, and the offset in it."""
    if mr is not None:
        return mr, _offset(addr, mr)
    if isinstance(addr, int):
        raise cm_error(errno.EINVAL, "an address without region", "post", hint="the bytes, with IBV_SEND_INLINE")
    return leading_bytes(addr, length, "post"), 0


if not TYPE_CHECKING:
    __all__ = [name for name, value in sorted(globals().items()) if is_c_name(name, value, __name__)]
