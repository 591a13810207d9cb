"""Checks of arguments and attributes, made when an object is created or modified. All raise EINVAL.

Enumerations may be given as plain ints, as in C: :func:`member` and :func:`flags` return their members.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from enum import IntEnum, IntFlag
from operator import index
from typing import TypeVar

from rdmacm.address import Gid
from rdmacm.errors import cm_error
from rdmacm.proto import plainints
from rdmacm.proto.plainints import QP_ACCESS_FLAGS, QP_ALT_PATH, QP_AV, QP_PATH_MTU, QP_PKEY_INDEX, QP_PORT, QP_STATE
from rdmacm.verbs.attr import AHAttr, DeviceAttr, GlobalRoute, QPAttr, QPCap, SrqAttr
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import AccessFlag, LinkLayer, MigState, Mtu, QPAttrMask

E = TypeVar("E", bound=IntEnum)
F = TypeVar("F", bound=IntFlag)

_NO_GID = Gid()
#: Bit of the mask, attribute, and its greatest value: a number, or the name of the device attribute that limits it.
_LIMITS: tuple[tuple[int, str, int | str], ...] = (
    (plainints.QP_PATH_MIG_STATE, "path_mig_state", int(max(MigState))),
    (plainints.QP_QKEY, "qkey", 0xFFFFFFFF),
    (plainints.QP_RQ_PSN, "rq_psn", 0xFFFFFF),
    (plainints.QP_SQ_PSN, "sq_psn", 0xFFFFFF),
    (plainints.QP_DEST_QPN, "dest_qp_num", 0xFFFFFF),
    (plainints.QP_TIMEOUT, "timeout", 31),
    (plainints.QP_RETRY_CNT, "retry_cnt", 7),
    (plainints.QP_RNR_RETRY, "rnr_retry", 7),
    (plainints.QP_MIN_RNR_TIMER, "min_rnr_timer", 31),
    (plainints.QP_MAX_QP_RD_ATOMIC, "max_rd_atomic", "max_qp_init_rd_atom"),
    (plainints.QP_MAX_DEST_RD_ATOMIC, "max_dest_rd_atomic", "max_qp_rd_atom"),
)
_LIMITED = sum(bit for bit, _, _ in _LIMITS)


def member(kind: type[E], value: int, name: str, step: str) -> E:
    """The member of an enumeration that a number stands for; EINVAL for a value that is no member's."""
    if type(value) is kind:
        return value
    try:
        return kind(index(value))
    except (TypeError, ValueError):
        pass
    members = ", ".join(f"{each.name} ({each.value})" for each in kind)
    raise cm_error(errno.EINVAL, f"{name} is {value!r}, not a {kind.__name__}", step, hint=members)


def flags(kind: type[F], value: int, name: str, step: str) -> F:
    """The flags that a number stands for; EINVAL for other bits, and for a value that is no number."""
    try:
        bits = index(value)
    except TypeError:
        raise cm_error(errno.EINVAL, f"{name} is {value!r}, not a {kind.__name__}", step) from None
    unknown = bits & ~int(sum(kind))
    if unknown:
        raise cm_error(errno.EINVAL, f"unknown {name} {unknown:#x}", step, hint=f"flags of {kind.__name__}")
    return kind(bits)


def check_number(name: str, value: int, least: int, greatest: int, step: str) -> None:
    """Check that a value is a whole number from ``least`` to ``greatest``."""
    try:
        index(value)
    except TypeError:
        raise cm_error(errno.EINVAL, f"{name} is {value!r}, not a whole number", step) from None
    if not least <= value <= greatest:
        raise cm_error(errno.EINVAL, f"{name} is {value}, and may be {least} to {greatest}", step)


def _within(step: str, limits: Iterable[tuple[str, int, int]]) -> None:
    for name, value, greatest in limits:
        check_number(name, value, 0, greatest, step)


def check_kind(name: str, value: object, kind: type, step: str) -> None:
    """Check the class of an argument whose attributes are used."""
    if not isinstance(value, kind):
        raise cm_error(errno.EINVAL, f"{name} is {value!r}, not of class {kind.__name__}", step)


def check_context(context: Context, step: str) -> None:
    """Check the context that an object is made from; EBADF once it is closed."""
    check_kind("context", context, Context, step)
    if context.closed:
        raise cm_error(errno.EBADF, "the context is closed", step, context.name)


_ONLY_INT = {int}


def check_caps(cap: QPCap, device: DeviceAttr, with_receives: bool) -> None:
    """Check the sizes of a queue pair; those of its receive queue only ``with_receives``."""
    wrs, sges = device.max_qp_wr, device.max_sge
    # Each connection makes a queue pair, so the list below is made only for the error.
    send_wr, send_sge, inline = cap.max_send_wr, cap.max_send_sge, cap.max_inline_data
    recv_wr, recv_sge = (cap.max_recv_wr, cap.max_recv_sge) if with_receives else (0, 0)
    if set(map(type, (send_wr, send_sge, inline, recv_wr, recv_sge))) == _ONLY_INT:
        if 0 <= send_wr <= wrs and 0 <= send_sge <= sges and 0 <= inline <= device.max_inline_data:
            if 0 <= recv_wr <= wrs and 0 <= recv_sge <= sges:
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
    check_kind("attr", attr, SrqAttr, "create_srq")
    _within("create_srq", [("max_wr", attr.max_wr, device.max_srq_wr), ("max_sge", attr.max_sge, device.max_srq_sge)])
    if not attr.max_wr:
        raise cm_error(errno.EINVAL, "max_wr is 0", "create_srq", hint=f"1 to {device.max_srq_wr}")


def check_av(context: Context, attr: AHAttr, step: str) -> None:
    """Check an address vector. On Ethernet it needs a GID, and a row of the GID table to send from."""
    check_kind("the address vector", attr, AHAttr, step)
    route = attr.gr
    check_kind("gr", route, GlobalRoute, step)
    check_kind("dgid", route.dgid, Gid, step)
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
            ("sgid_index", route.sgid_index, 0xFFFF),
            ("port_num", attr.port_num, 0xFF),
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
    code = errno.ENODATA if route.sgid_index < port.gid_tbl_len else errno.EINVAL
    text = f"port {attr.port_num} has no GID at index {route.sgid_index}"
    raise cm_error(code, text, step, hint="context.query_gid_table()")


def check_values(context: Context, attr: QPAttr, mask: QPAttrMask) -> None:
    """Check the attributes of a queue pair that ``mask`` names, but for what the tables of a port decide."""
    bits = mask.value
    if not bits & ~QP_STATE:
        return
    if bits & _LIMITED:
        device = context.backend.attr
        for bit, name, limit in _LIMITS:
            if bits & bit:
                greatest = getattr(device, limit) if isinstance(limit, str) else limit
                check_number(name, getattr(attr, name), 0, greatest, "modify_qp")
    if bits & QP_PATH_MTU:
        member(Mtu, attr.path_mtu, "path_mtu", "modify_qp")
    if bits & QP_ACCESS_FLAGS:
        flags(AccessFlag, attr.qp_access_flags, "qp_access_flags", "modify_qp")
    if bits & (QP_PKEY_INDEX | QP_PORT):
        check_number("port_num", attr.port_num, 0, 0xFF, "modify_qp")
    if bits & QP_PKEY_INDEX:
        check_number("pkey_index", attr.pkey_index, 0, 0xFFFF, "modify_qp")


def check_tables(context: Context, attr: QPAttr, mask: QPAttrMask) -> None:
    """Check those attributes that the ports and their tables decide, in the order in which they are set."""
    bits = mask.value
    if bits & QP_PKEY_INDEX:
        context.query_pkey(attr.port_num, attr.pkey_index)
    elif bits & QP_PORT:
        context.query_port(attr.port_num)
    if bits & QP_AV:
        check_av(context, attr.ah_attr, "modify_qp")
    if bits & QP_ALT_PATH:
        check_av(context, attr.alt_ah_attr, "modify_qp")
