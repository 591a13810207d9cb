"""Checks of attributes, made when an object is created or modified. All raise EINVAL."""

from __future__ import annotations

import errno
from collections.abc import Iterable

from rdmacm.address import Gid
from rdmacm.errors import cm_error
from rdmacm.plainints import (
    QP_ACCESS_FLAGS,
    QP_ALT_PATH,
    QP_AV,
    QP_DEST_QPN,
    QP_MAX_DEST_RD_ATOMIC,
    QP_MAX_QP_RD_ATOMIC,
    QP_MIN_RNR_TIMER,
    QP_PATH_MTU,
    QP_PKEY_INDEX,
    QP_PORT,
    QP_QKEY,
    QP_RETRY_CNT,
    QP_RNR_RETRY,
    QP_RQ_PSN,
    QP_SQ_PSN,
    QP_STATE,
    QP_TIMEOUT,
)
from rdmacm.verbs.attr import AHAttr, DeviceAttr, QPAttr, QPCap, SrqAttr
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import AccessFlag, LinkLayer, Mtu, QPAttrMask

__all__ = ["ALL_ACCESS", "check_av", "check_caps", "check_srq", "check_values"]

#: Every :class:`AccessFlag`.
ALL_ACCESS = int(sum(AccessFlag))
_MTUS = frozenset(map(int, Mtu))
_NO_GID = Gid()
#: Bit of the mask, attribute, and its greatest value: a number, or the name of the device attribute that limits it.
_LIMITS: tuple[tuple[int, str, int | str], ...] = (
    (QP_QKEY, "qkey", 0xFFFFFFFF),
    (QP_RQ_PSN, "rq_psn", 0xFFFFFF),
    (QP_SQ_PSN, "sq_psn", 0xFFFFFF),
    (QP_DEST_QPN, "dest_qp_num", 0xFFFFFF),
    (QP_TIMEOUT, "timeout", 31),
    (QP_RETRY_CNT, "retry_cnt", 7),
    (QP_RNR_RETRY, "rnr_retry", 7),
    (QP_MIN_RNR_TIMER, "min_rnr_timer", 31),
    (QP_MAX_QP_RD_ATOMIC, "max_rd_atomic", "max_qp_init_rd_atom"),
    (QP_MAX_DEST_RD_ATOMIC, "max_dest_rd_atomic", "max_qp_rd_atom"),
)
_LIMITED = sum(bit for bit, _, _ in _LIMITS)


def _within(step: str, limits: Iterable[tuple[str, int, int]]) -> None:
    for name, value, greatest in limits:
        if not 0 <= value <= greatest:
            raise cm_error(errno.EINVAL, f"{name} is {value}, and may be 0 to {greatest}", step)


def check_caps(cap: QPCap, device: DeviceAttr, with_receives: bool) -> None:
    """Check the sizes of a queue pair; those of its receive queue only ``with_receives``."""
    wrs, sges = device.max_qp_wr, device.max_sge
    # Each connection makes a queue pair, so the list below is made only for the error.
    if (
        0 <= cap.max_send_wr <= wrs
        and 0 <= cap.max_send_sge <= sges
        and 0 <= cap.max_inline_data <= device.max_inline_data
        and (not with_receives or (0 <= cap.max_recv_wr <= wrs and 0 <= cap.max_recv_sge <= sges))
    ):
        return
    limits = [
        ("max_send_wr", cap.max_send_wr, wrs),
        ("max_send_sge", cap.max_send_sge, sges),
        ("max_inline_data", cap.max_inline_data, device.max_inline_data),
        ("max_recv_wr", cap.max_recv_wr, wrs),
        ("max_recv_sge", cap.max_recv_sge, sges),
    ]
    _within("create_qp", limits if with_receives else limits[:3])


def check_srq(attr: SrqAttr, device: DeviceAttr) -> None:
    """Check the sizes of a shared receive queue; it needs room for one receive at least."""
    _within("create_srq", [("max_wr", attr.max_wr, device.max_srq_wr), ("max_sge", attr.max_sge, device.max_srq_sge)])
    if not attr.max_wr:
        raise cm_error(errno.EINVAL, "max_wr is 0", "create_srq", hint=f"1 to {device.max_srq_wr}")


def check_av(context: Context, attr: AHAttr, step: str) -> None:
    """Check an address vector. On Ethernet it needs a GID, and a row of the GID table to send from."""
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
    if route.dgid == _NO_GID:
        raise cm_error(errno.EINVAL, "the destination GID is zero", step, hint="the peer's GID in gr.dgid")
    for entry in port.gids:
        if entry.gid_index == route.sgid_index:
            return
    raise cm_error(
        errno.EINVAL,
        f"port {attr.port_num} has no GID at index {route.sgid_index}",
        step,
        hint="context.query_gid_table()",
    )


def check_values(context: Context, attr: QPAttr, mask: QPAttrMask) -> None:
    """Check the attributes of a queue pair that ``mask`` names."""
    bits = mask.value
    if not bits & ~QP_STATE:
        return
    if bits & _LIMITED:
        device = context.backend.attr
        for bit, name, limit in _LIMITS:
            if bits & bit:
                value, greatest = getattr(attr, name), getattr(device, limit) if isinstance(limit, str) else limit
                if not 0 <= value <= greatest:
                    raise cm_error(errno.EINVAL, f"{name} is {value}, and may be 0 to {greatest}", "modify_qp")
    if bits & QP_PATH_MTU and attr.path_mtu not in _MTUS:
        raise cm_error(
            errno.EINVAL, f"path_mtu is {attr.path_mtu}, not a code of Mtu", "modify_qp", hint="a member of Mtu"
        )
    if bits & QP_ACCESS_FLAGS and int(attr.qp_access_flags) & ~ALL_ACCESS:
        raise cm_error(errno.EINVAL, f"unknown qp_access_flags {int(attr.qp_access_flags):#x}", "modify_qp")
    if bits & QP_PKEY_INDEX:
        context.query_pkey(attr.port_num, attr.pkey_index)
    elif bits & QP_PORT:
        context.query_port(attr.port_num)
    if bits & QP_AV:
        check_av(context, attr.ah_attr, "modify_qp")
    if bits & QP_ALT_PATH:
        check_av(context, attr.alt_ah_attr, "modify_qp")
