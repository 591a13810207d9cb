"""rdma-core's libibverbs and librdmacm through ctypes: the structures and calls that ``verbs_peer`` needs.

pyverbs has neither the status of an event nor its parameters. The C interface of the libraries is stable. Names, fields
and order are those of ``infiniband/verbs.h`` and ``rdma/rdma_cma.h``.
"""

from __future__ import annotations

import ctypes as c
import os
from typing import Any

__all__ = [
    "AddrInfo",
    "BindMw",
    "CmEvent",
    "CmId",
    "CompChannel",
    "ConnParam",
    "Context",
    "EventChannel",
    "Mr",
    "Mw",
    "MwBind",
    "MwBindInfo",
    "Qp",
    "QpAttr",
    "QpCap",
    "QpInitAttr",
    "RecvWr",
    "SendWr",
    "Sge",
    "SockAddrIn",
    "SockAddrIn6",
    "Wc",
    "operation",
    "rdma",
    "verbs",
]

_u8, _u16, _u32, _u64, _int, _ptr = c.c_uint8, c.c_uint16, c.c_uint32, c.c_uint64, c.c_int, c.c_void_p


class Context(c.Structure):
    """The start of ``struct ibv_context``, which has the operations that are inline functions in C."""

    _fields_ = (("device", _ptr), ("ops", _ptr * 32), ("cmd_fd", _int))


#: Indices into ``struct ibv_context_ops``.
_ALLOC_MW, _BIND_MW, _DEALLOC_MW, _POLL_CQ, _REQ_NOTIFY_CQ, _POST_SEND, _POST_RECV = 7, 8, 9, 11, 12, 25, 26


class EventChannel(c.Structure):
    _fields_ = (("fd", _int),)


class CompChannel(c.Structure):
    _fields_ = (("context", _ptr), ("fd", _int), ("refcnt", _int))


class QpCap(c.Structure):
    _fields_ = (
        ("max_send_wr", _u32),
        ("max_recv_wr", _u32),
        ("max_send_sge", _u32),
        ("max_recv_sge", _u32),
        ("max_inline_data", _u32),
    )


class QpInitAttr(c.Structure):
    _fields_ = (
        ("qp_context", _ptr),
        ("send_cq", _ptr),
        ("recv_cq", _ptr),
        ("srq", _ptr),
        ("cap", QpCap),
        ("qp_type", _int),
        ("sq_sig_all", _int),
    )


class Qp(c.Structure):
    """The start of ``struct ibv_qp``."""

    _fields_ = (
        ("context", c.POINTER(Context)),
        ("qp_context", _ptr),
        ("pd", _ptr),
        ("send_cq", _ptr),
        ("recv_cq", _ptr),
        ("srq", _ptr),
        ("handle", _u32),
        ("qp_num", _u32),
    )


class _GlobalRoute(c.Structure):
    _fields_ = (
        ("dgid", _u64 * 2),
        ("flow_label", _u32),
        ("sgid_index", _u8),
        ("hop_limit", _u8),
        ("traffic_class", _u8),
    )


class _AhAttr(c.Structure):
    _fields_ = (
        ("grh", _GlobalRoute),
        ("dlid", _u16),
        ("sl", _u8),
        ("src_path_bits", _u8),
        ("static_rate", _u8),
        ("is_global", _u8),
        ("port_num", _u8),
    )


class QpAttr(c.Structure):
    _fields_ = (
        ("qp_state", _int),
        ("cur_qp_state", _int),
        ("path_mtu", _int),
        ("path_mig_state", _int),
        ("qkey", _u32),
        ("rq_psn", _u32),
        ("sq_psn", _u32),
        ("dest_qp_num", _u32),
        ("qp_access_flags", _u32),
        ("cap", QpCap),
        ("ah_attr", _AhAttr),
        ("alt_ah_attr", _AhAttr),
        ("pkey_index", _u16),
        ("alt_pkey_index", _u16),
        ("en_sqd_async_notify", _u8),
        ("sq_draining", _u8),
        ("max_rd_atomic", _u8),
        ("max_dest_rd_atomic", _u8),
        ("min_rnr_timer", _u8),
        ("port_num", _u8),
        ("timeout", _u8),
        ("retry_cnt", _u8),
        ("rnr_retry", _u8),
        ("alt_port_num", _u8),
        ("alt_timeout", _u8),
        ("rate_limit", _u32),
    )


class Mr(c.Structure):
    _fields_ = (
        ("context", _ptr),
        ("pd", _ptr),
        ("addr", _ptr),
        ("length", c.c_size_t),
        ("handle", _u32),
        ("lkey", _u32),
        ("rkey", _u32),
    )


class Mw(c.Structure):
    _fields_ = (("context", _ptr), ("pd", _ptr), ("rkey", _u32), ("handle", _u32), ("type", _int))


class Sge(c.Structure):
    _fields_ = (("addr", _u64), ("length", _u32), ("lkey", _u32))


class _Rdma(c.Structure):
    _fields_ = (("remote_addr", _u64), ("rkey", _u32))


class _Atomic(c.Structure):
    _fields_ = (("remote_addr", _u64), ("compare_add", _u64), ("swap", _u64), ("rkey", _u32))


class _Remote(c.Union):
    _fields_ = (("rdma", _Rdma), ("atomic", _Atomic))


class MwBindInfo(c.Structure):
    _fields_ = (("mr", c.POINTER(Mr)), ("addr", _u64), ("length", _u64), ("mw_access_flags", _u32))


class MwBind(c.Structure):
    _fields_ = (("wr_id", _u64), ("send_flags", _u32), ("bind_info", MwBindInfo))


class BindMw(c.Structure):
    """``bind_mw`` of ``struct ibv_send_wr``."""

    _fields_ = (("mw", c.POINTER(Mw)), ("rkey", _u32), ("bind_info", MwBindInfo))


class SendWr(c.Structure):
    _fields_ = (
        ("wr_id", _u64),
        ("next", _ptr),
        ("sg_list", c.POINTER(Sge)),
        ("num_sge", _int),
        ("opcode", _int),
        ("send_flags", _u32),
        ("imm_data", c.c_uint32.__ctype_be__),
        ("wr", _Remote),
        ("remote_srqn", _u32),
        ("bind_mw", BindMw),
    )


class RecvWr(c.Structure):
    _fields_ = (("wr_id", _u64), ("next", _ptr), ("sg_list", c.POINTER(Sge)), ("num_sge", _int))


class Wc(c.Structure):
    _fields_ = (
        ("wr_id", _u64),
        ("status", _int),
        ("opcode", _int),
        ("vendor_err", _u32),
        ("byte_len", _u32),
        ("imm_data", c.c_uint32.__ctype_be__),
        ("qp_num", _u32),
        ("src_qp", _u32),
        ("wc_flags", _u32),
        ("pkey_index", _u16),
        ("slid", _u16),
        ("sl", _u8),
        ("dlid_path_bits", _u8),
    )


class CmId(c.Structure):
    """The start of ``struct rdma_cm_id``."""

    _fields_ = (
        ("verbs", c.POINTER(Context)),
        ("channel", c.POINTER(EventChannel)),
        ("context", _ptr),
        ("qp", c.POINTER(Qp)),
    )


class ConnParam(c.Structure):
    _fields_ = (
        ("private_data", _ptr),
        ("private_data_len", _u8),
        ("responder_resources", _u8),
        ("initiator_depth", _u8),
        ("flow_control", _u8),
        ("retry_count", _u8),
        ("rnr_retry_count", _u8),
        ("srq", _u8),
        ("qp_num", _u32),
    )


class CmEvent(c.Structure):
    _fields_ = (
        ("id", c.POINTER(CmId)),
        ("listen_id", c.POINTER(CmId)),
        ("event", _int),
        ("status", _int),
        ("conn", ConnParam),
    )


class AddrInfo(c.Structure):
    _fields_ = (
        ("flags", _int),
        ("family", _int),
        ("qp_type", _int),
        ("port_space", _int),
        ("src_len", c.c_uint32),
        ("dst_len", c.c_uint32),
        ("src_addr", _ptr),
        ("dst_addr", _ptr),
        ("src_canonname", c.c_char_p),
        ("dst_canonname", c.c_char_p),
        ("route_len", c.c_size_t),
        ("route", _ptr),
        ("connect_len", c.c_size_t),
        ("connect", _ptr),
        ("next", _ptr),
    )


class SockAddrIn(c.Structure):
    _fields_ = (("family", _u16), ("port", c.c_uint16.__ctype_be__), ("addr", _u8 * 4), ("zero", _u8 * 8))


class SockAddrIn6(c.Structure):
    _fields_ = (
        ("family", _u16),
        ("port", c.c_uint16.__ctype_be__),
        ("flowinfo", _u32),
        ("addr", _u8 * 16),
        ("scope_id", _u32),
    )


# -- the calls --------------------------------------------------------------------------------------------


def _sets_errno(result: int, function: Any, arguments: Any) -> int:
    if result:
        raise OSError(c.get_errno(), f"{function.__name__}: {os.strerror(c.get_errno())}")
    return result


def _returns_errno(result: int, function: Any, arguments: Any) -> int:
    if result:
        raise OSError(abs(result), f"{function.__name__}: {os.strerror(abs(result))}")
    return result


def _returns_pointer(result: Any, function: Any, arguments: Any) -> Any:
    if not result:
        raise OSError(c.get_errno(), f"{function.__name__}: {os.strerror(c.get_errno())}")
    return result


rdma = c.CDLL("librdmacm.so.1", use_errno=True)
verbs = c.CDLL("libibverbs.so.1", use_errno=True)

_Id, _Channel = c.POINTER(CmId), c.POINTER(EventChannel)

_arguments: tuple[Any, ...]
for _name, _arguments in {
    "rdma_create_ep": (c.POINTER(_Id), c.POINTER(AddrInfo), _ptr, _ptr),
    "rdma_migrate_id": (_Id, _Channel),
    "rdma_create_id": (_Channel, c.POINTER(_Id), _ptr, _int),
    "rdma_destroy_id": (_Id,),
    "rdma_bind_addr": (_Id, _ptr),
    "rdma_resolve_addr": (_Id, _ptr, _ptr, _int),
    "rdma_resolve_route": (_Id, _int),
    "rdma_create_qp": (_Id, _ptr, c.POINTER(QpInitAttr)),
    "rdma_connect": (_Id, c.POINTER(ConnParam)),
    "rdma_listen": (_Id, _int),
    "rdma_accept": (_Id, c.POINTER(ConnParam)),
    "rdma_reject": (_Id, _ptr, _u8),
    "rdma_disconnect": (_Id,),
    "rdma_get_cm_event": (_Channel, c.POINTER(c.POINTER(CmEvent))),
    "rdma_ack_cm_event": (c.POINTER(CmEvent),),
}.items():
    _call = getattr(rdma, _name)
    _call.argtypes, _call.restype, _call.errcheck = _arguments, _int, _sets_errno
rdma.rdma_create_event_channel.restype = _Channel
rdma.rdma_create_event_channel.errcheck = _returns_pointer
rdma.rdma_destroy_qp.argtypes, rdma.rdma_destroy_qp.restype = (_Id,), None

for _name, _arguments in {
    "ibv_dealloc_pd": (_ptr,),
    "ibv_dereg_mr": (c.POINTER(Mr),),
    "ibv_destroy_cq": (_ptr,),
    "ibv_destroy_comp_channel": (c.POINTER(CompChannel),),
    "ibv_get_cq_event": (c.POINTER(CompChannel), c.POINTER(_ptr), c.POINTER(_ptr)),
    "ibv_query_qp": (c.POINTER(Qp), c.POINTER(QpAttr), _int, c.POINTER(QpInitAttr)),
}.items():
    _call = getattr(verbs, _name)
    _call.argtypes, _call.restype, _call.errcheck = _arguments, _int, _returns_errno
for _name, _arguments, _result in (
    ("ibv_alloc_pd", (c.POINTER(Context),), _ptr),
    ("ibv_reg_mr", (_ptr, _ptr, c.c_size_t, _int), c.POINTER(Mr)),
    ("ibv_create_comp_channel", (c.POINTER(Context),), c.POINTER(CompChannel)),
    ("ibv_create_cq", (c.POINTER(Context), _int, _ptr, c.POINTER(CompChannel), _int), _ptr),
):
    _call = getattr(verbs, _name)
    _call.argtypes, _call.restype, _call.errcheck = _arguments, _result, _returns_pointer
verbs.ibv_ack_cq_events.argtypes, verbs.ibv_ack_cq_events.restype = (_ptr, c.c_uint), None

_PROTOTYPES = {
    "alloc_mw": (_ALLOC_MW, c.CFUNCTYPE(c.POINTER(Mw), _ptr, _int)),
    "bind_mw": (_BIND_MW, c.CFUNCTYPE(_int, c.POINTER(Qp), c.POINTER(Mw), c.POINTER(MwBind))),
    "dealloc_mw": (_DEALLOC_MW, c.CFUNCTYPE(_int, c.POINTER(Mw))),
    "poll_cq": (_POLL_CQ, c.CFUNCTYPE(_int, _ptr, _int, c.POINTER(Wc))),
    "req_notify_cq": (_REQ_NOTIFY_CQ, c.CFUNCTYPE(_int, _ptr, _int)),
    "post_send": (_POST_SEND, c.CFUNCTYPE(_int, c.POINTER(Qp), c.POINTER(SendWr), c.POINTER(_ptr))),
    "post_recv": (_POST_RECV, c.CFUNCTYPE(_int, c.POINTER(Qp), c.POINTER(RecvWr), c.POINTER(_ptr))),
}


def operation(context: Any, name: str) -> Any:
    """An operation of an open device that C programs call by an inline function."""
    place, prototype = _PROTOTYPES[name]
    return prototype(context.contents.ops[place])
