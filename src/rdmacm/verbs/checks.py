"""What attributes may be: the checks that are made once, when something is created or modified. All raise EINVAL."""

from __future__ import annotations

import errno
from collections.abc import Iterable

from rdmacm.address import Gid
from rdmacm.errors import RdmaError, cm_error
from rdmacm.verbs.attr import AHAttr, DeviceAttr, QPAttr, QPInitAttr, SrqAttr
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import AccessFlag, LinkLayer, Mtu, QPAttrMask

__all__ = ["check_av", "check_caps", "check_srq", "check_values"]

_M = QPAttrMask
_ACCESS = sum(AccessFlag)


def _within(step: str, limits: Iterable[tuple[str, int, int]]) -> None:
    for name, value, most in limits:
        if not 0 <= value <= most:
            raise cm_error(errno.EINVAL, f"{name} is {value}, and may be 0 to {most}", step)


def check_caps(attr: QPInitAttr, device: DeviceAttr) -> None:
    """The sizes a queue pair asks for."""
    cap = attr.cap
    limits = [
        ("max_send_wr", cap.max_send_wr, device.max_qp_wr),
        ("max_send_sge", cap.max_send_sge, device.max_sge),
        ("max_inline_data", cap.max_inline_data, device.max_inline_data),
    ]
    if attr.srq is None:
        limits += [
            ("max_recv_wr", cap.max_recv_wr, device.max_qp_wr),
            ("max_recv_sge", cap.max_recv_sge, device.max_sge),
        ]
    _within("create_qp", limits)


def check_srq(attr: SrqAttr, device: DeviceAttr) -> None:
    """The sizes a shared receive queue asks for; it has to have room for something."""
    _within("create_srq", [("max_wr", attr.max_wr, device.max_srq_wr), ("max_sge", attr.max_sge, device.max_srq_sge)])
    if not attr.max_wr:
        raise cm_error(errno.EINVAL, "max_wr is 0", "create_srq")


def check_av(context: Context, attr: AHAttr, step: str) -> None:
    """An address vector, which on Ethernet is a GID and a row of the GID table it is sent from."""
    route = attr.gr
    _within(
        step,
        [
            ("sl", attr.sl, 15),
            ("dlid", attr.dlid, 0xFFFF),
            ("src_path_bits", attr.src_path_bits, 0x7F),
            ("static_rate", attr.static_rate, 0xFF),
            ("flow_label", route.flow_label, 0xFFFFF),
            ("hop_limit", route.hop_limit, 0xFF),
            ("traffic_class", route.traffic_class, 0xFF),
        ],
    )
    port = context.query_port(attr.port_num)
    if not attr.is_global:
        if port.link_layer is LinkLayer.ETHERNET:
            raise cm_error(errno.EINVAL, "an address on Ethernet needs a GID", step, hint="is_global=True and gr")
        return
    if route.dgid == Gid():
        raise cm_error(errno.EINVAL, "the destination GID is zero", step)
    try:
        context.query_gid(attr.port_num, route.sgid_index)
    except RdmaError as error:
        if error.errno != errno.ENODATA:
            raise
        raise cm_error(
            errno.EINVAL,
            f"port {attr.port_num} has no GID at index {route.sgid_index}",
            step,
            hint="context.query_gid_table()",
        ) from None


def check_values(context: Context, attr: QPAttr, mask: QPAttrMask) -> None:
    """The attributes of a queue pair that a mask names."""
    device = context.backend.attr
    limits = (
        (_M.QKEY, "qkey", attr.qkey, 0xFFFFFFFF),
        (_M.RQ_PSN, "rq_psn", attr.rq_psn, 0xFFFFFF),
        (_M.SQ_PSN, "sq_psn", attr.sq_psn, 0xFFFFFF),
        (_M.DEST_QPN, "dest_qp_num", attr.dest_qp_num, 0xFFFFFF),
        (_M.TIMEOUT, "timeout", attr.timeout, 31),
        (_M.RETRY_CNT, "retry_cnt", attr.retry_cnt, 7),
        (_M.RNR_RETRY, "rnr_retry", attr.rnr_retry, 7),
        (_M.MIN_RNR_TIMER, "min_rnr_timer", attr.min_rnr_timer, 31),
        (_M.MAX_QP_RD_ATOMIC, "max_rd_atomic", attr.max_rd_atomic, device.max_qp_init_rd_atom),
        (_M.MAX_DEST_RD_ATOMIC, "max_dest_rd_atomic", attr.max_dest_rd_atomic, device.max_qp_rd_atom),
    )
    _within("modify_qp", ((name, value, most) for bit, name, value, most in limits if mask & bit))
    if mask & _M.PATH_MTU and attr.path_mtu not in set(Mtu):
        raise cm_error(errno.EINVAL, f"path_mtu is {attr.path_mtu}, which is no Mtu", "modify_qp")
    if mask & _M.ACCESS_FLAGS and int(attr.qp_access_flags) & ~_ACCESS:
        raise cm_error(errno.EINVAL, f"unknown qp_access_flags {int(attr.qp_access_flags):#x}", "modify_qp")
    if mask & _M.PORT:
        context.query_port(attr.port_num)
    if mask & _M.PKEY_INDEX:
        context.query_pkey(attr.port_num, attr.pkey_index)
    if mask & _M.AV:
        check_av(context, attr.ah_attr, "modify_qp")
    if mask & _M.ALT_PATH:
        check_av(context, attr.alt_ah_attr, "modify_qp")
