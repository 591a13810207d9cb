"""Attributes of the verbs, between the package's classes and C's structures."""

from __future__ import annotations

import sys
from ctypes import addressof, memmove, string_at
from typing import Any, TypeVar

from rdmacm.address import Gid
from rdmacm.kernel.verbs.layouts import ibv_ah_attr, ibv_device_attr, ibv_device_attr_ex, ibv_qp_attr
from rdmacm.proto import plainints
from rdmacm.proto.plainints import QP_ALT_PATH, QP_AV, QP_STATE
from rdmacm.verbs.attr import AHAttr, DeviceAttr, GlobalRoute, QPAttr, QPCap
from rdmacm.verbs.attrex import (
    CQModerationCaps,
    DeviceAttrEx,
    ODPCaps,
    PacketPacingCaps,
    PCIAtomicCaps,
    RSSCaps,
    TMCaps,
    TSOCaps,
)
from rdmacm.verbs.enums import AtomicCap, DeviceCapFlag, MigState, Mtu, QPState

E = TypeVar("E", bound=int)

#: The fields of DeviceAttr that have C's name and are numbers.
_DEVICE_FIELDS = tuple(
    name
    for name, *_ in ibv_device_attr._fields_
    if name not in ("fw_ver", "node_guid", "sys_image_guid", "device_cap_flags", "atomic_cap")
)
_ROUTE = ("flow_label", "sgid_index", "hop_limit", "traffic_class")
_AH = ("dlid", "sl", "src_path_bits", "static_rate", "port_num")
_QP = tuple(
    name
    for name, *_ in ibv_qp_attr._fields_
    if name not in ("qp_state", "cur_qp_state", "cap", "ah_attr", "alt_ah_attr")
)
#: Each attribute that a bit of the mask stands for alone.
_BY_MASK = (
    (QP_STATE, "qp_state"),
    (plainints.QP_CUR_STATE, "cur_qp_state"),
    (plainints.QP_EN_SQD_ASYNC_NOTIFY, "en_sqd_async_notify"),
    (plainints.QP_ACCESS_FLAGS, "qp_access_flags"),
    (plainints.QP_PKEY_INDEX, "pkey_index"),
    (plainints.QP_PORT, "port_num"),
    (plainints.QP_QKEY, "qkey"),
    (plainints.QP_PATH_MTU, "path_mtu"),
    (plainints.QP_TIMEOUT, "timeout"),
    (plainints.QP_RETRY_CNT, "retry_cnt"),
    (plainints.QP_RNR_RETRY, "rnr_retry"),
    (plainints.QP_RQ_PSN, "rq_psn"),
    (plainints.QP_MAX_QP_RD_ATOMIC, "max_rd_atomic"),
    (plainints.QP_MIN_RNR_TIMER, "min_rnr_timer"),
    (plainints.QP_SQ_PSN, "sq_psn"),
    (plainints.QP_MAX_DEST_RD_ATOMIC, "max_dest_rd_atomic"),
    (plainints.QP_PATH_MIG_STATE, "path_mig_state"),
    (plainints.QP_DEST_QPN, "dest_qp_num"),
    (plainints.QP_RATE_LIMIT, "rate_limit"),
)
_ALTERNATE = ("alt_pkey_index", "alt_port_num", "alt_timeout")


def known(kind: type[E], value: int, other: E) -> E:
    """The member of an enumeration that the kernel's number stands for; ``other`` for a number of a newer kernel."""
    try:
        return kind(value)
    except ValueError:
        return other


def guid_of(found: int) -> int:
    """A GUID as a number, from one in network byte order."""
    return int.from_bytes(found.to_bytes(8, sys.byteorder), "big")


def device_attr(found: ibv_device_attr, flags_ex: int, max_inline_data: int, max_msg_sz: int) -> DeviceAttr:
    """``found`` as the package's class. ``flags_ex``: ``device_cap_flags_ex``."""
    numbers: dict[str, Any] = {name: getattr(found, name) for name in _DEVICE_FIELDS}
    return DeviceAttr(
        **numbers,
        fw_ver=found.fw_ver.decode(errors="replace"),
        node_guid=guid_of(found.node_guid),
        sys_image_guid=guid_of(found.sys_image_guid),
        device_cap_flags=DeviceCapFlag(found.device_cap_flags),
        device_cap_flags_ex=DeviceCapFlag(flags_ex),
        atomic_cap=known(AtomicCap, found.atomic_cap, AtomicCap.NONE),
        max_inline_data=max_inline_data,
        max_msg_sz=max_msg_sz,
    )


def device_attr_ex(found: ibv_device_attr_ex, attr: DeviceAttr) -> DeviceAttrEx:
    """The extended attributes; ``attr``: what :func:`device_attr` made of ``orig_attr``."""

    def same(kind: Any, part: Any) -> Any:
        return kind(**{name: getattr(part, name) for name, *_ in part._fields_})

    odp = found.odp_caps.per_transport_caps
    return DeviceAttrEx(
        attr,
        int(attr.device_cap_flags_ex),
        found.phys_port_cnt_ex or attr.phys_port_cnt,
        found.comp_mask,
        found.completion_timestamp_mask,
        found.hca_core_clock,
        found.max_wq_type_rq,
        found.raw_packet_caps,
        found.max_dm_size,
        ODPCaps(found.odp_caps.general_caps, odp.rc_odp_caps, odp.uc_odp_caps, odp.ud_odp_caps, found.xrc_odp_caps),
        same(TSOCaps, found.tso_caps),
        same(RSSCaps, found.rss_caps),
        same(PacketPacingCaps, found.packet_pacing_caps),
        same(TMCaps, found.tm_caps),
        same(CQModerationCaps, found.cq_mod_caps),
        same(PCIAtomicCaps, found.pci_atomic_caps),
    )


def fill_ah_attr(into: ibv_ah_attr, attr: AHAttr) -> None:
    """Copy an address vector."""
    for name in _AH:
        setattr(into, name, getattr(attr, name))
    into.is_global = bool(attr.is_global)
    if attr.is_global:
        route = attr.gr
        for name in _ROUTE:
            setattr(into.grh, name, getattr(route, name))
        memmove(into.grh.dgid, bytes(route.dgid), 16)


def _ah_attr_of(found: ibv_ah_attr) -> AHAttr:
    dgid = Gid(string_at(addressof(found.grh.dgid), 16))
    route = GlobalRoute(dgid, **{name: getattr(found.grh, name) for name in _ROUTE})
    return AHAttr(**{name: getattr(found, name) for name in _AH}, is_global=bool(found.is_global), gr=route)


def fill_qp_attr(into: ibv_qp_attr, attr: QPAttr, mask: int) -> None:
    """Copy the attributes that ``mask`` names."""
    if mask == QP_STATE:  # as at each connection's end
        into.qp_state = attr.qp_state
        return
    for bit, name in _BY_MASK:
        if mask & bit:
            setattr(into, name, getattr(attr, name))
    if mask & plainints.QP_CAP:
        for name in QPCap.__slots__:
            setattr(into.cap, name, getattr(attr.cap, name))
    if mask & QP_AV:
        fill_ah_attr(into.ah_attr, attr.ah_attr)
    if mask & QP_ALT_PATH:
        fill_ah_attr(into.alt_ah_attr, attr.alt_ah_attr)
        for name in _ALTERNATE:
            setattr(into, name, getattr(attr, name))


def qp_attr_of(found: ibv_qp_attr, cap: QPCap) -> QPAttr:
    """What ibv_query_qp(3) has found; ``cap``: the sizes of its queues."""
    numbers: dict[str, Any] = {name: getattr(found, name) for name in _QP}
    numbers["path_mtu"] = known(Mtu, found.path_mtu, Mtu.MTU_256)
    numbers["path_mig_state"] = known(MigState, found.path_mig_state, MigState.MIGRATED)
    return QPAttr(
        **numbers,
        qp_state=known(QPState, found.qp_state, QPState.ERR),
        cur_qp_state=known(QPState, found.cur_qp_state, QPState.ERR),
        cap=cap,
        ah_attr=_ah_attr_of(found.ah_attr),
        alt_ah_attr=_ah_attr_of(found.alt_ah_attr),
    )
