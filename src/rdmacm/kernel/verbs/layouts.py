"""The structures of ``infiniband/verbs.h`` as C lays them out, with C's names.

Only what this package reads or writes is here: the structures that the library makes (``ibv_cq``, ``ibv_qp``) end
before their mutex. Work requests and completions are read and written many at a time, so they have formats of
:mod:`struct` as well.
"""

from __future__ import annotations

import platform
import struct
from ctypes import (
    Structure,
    Union,
    c_char,
    c_int,
    c_int32,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)
from typing import Any

__all__ = [
    "ATOMIC_WR",
    "BIND_WR",
    "DATAGRAM_WR",
    "ONE_RECV",
    "RDMA_WR",
    "RECV_WR",
    "SGE",
    "STRUCTURES",
    "WC",
    "XRC_SRQN",
    "ibv_ah_attr",
    "ibv_async_event",
    "ibv_context",
    "ibv_cq",
    "ibv_device",
    "ibv_device_attr",
    "ibv_device_attr_ex",
    "ibv_gid_entry",
    "ibv_mr",
    "ibv_mw",
    "ibv_mw_bind",
    "ibv_mw_bind_info",
    "ibv_port_attr",
    "ibv_qp",
    "ibv_qp_attr",
    "ibv_qp_cap",
    "ibv_qp_ex",
    "ibv_qp_init_attr",
    "ibv_qp_init_attr_ex",
    "ibv_qp_open_attr",
    "ibv_recv_wr",
    "ibv_send_wr",
    "ibv_sge",
    "ibv_srq_attr",
    "ibv_srq_init_attr",
    "ibv_srq_init_attr_ex",
    "ibv_wc",
    "ibv_xrcd_init_attr",
    "verbs_context",
]

_Fields = list[tuple[str, Any]]

#: Bytes of pthread_mutex_t, which is in the midst of ``ibv_context``.
_MUTEX = {"aarch64": 48, "i686": 24, "armv7l": 24}.get(platform.machine(), 40)


def _all(kind: Any, names: str) -> _Fields:
    return [(name, kind) for name in names.split()]


# -- devices and ports --------------------------------------------------------------------------------


class ibv_device(Structure):
    """``struct ibv_device``."""

    _fields_ = [
        *_all(c_void_p, "_dummy1 _dummy2"),
        *_all(c_int, "node_type transport_type"),
        ("name", c_char * 64),
        ("dev_name", c_char * 64),
        ("dev_path", c_char * 256),
        ("ibdev_path", c_char * 256),
    ]


class ibv_context_ops(Structure):
    """``struct ibv_context_ops``: the functions that the header calls through a context."""

    _fields_ = _all(
        c_void_p,
        "_query_device _query_port _alloc_pd _dealloc_pd _reg_mr _rereg_mr _dereg_mr alloc_mw bind_mw dealloc_mw "
        "_create_cq poll_cq req_notify_cq _cq_event _resize_cq _destroy_cq _create_srq _modify_srq _query_srq "
        "_destroy_srq post_srq_recv _create_qp _query_qp _modify_qp _destroy_qp post_send post_recv _create_ah "
        "_destroy_ah _attach_mcast _detach_mcast _async_event",
    )


class ibv_context(Structure):
    """``struct ibv_context``."""

    _fields_ = [
        ("device", c_void_p),
        ("ops", ibv_context_ops),
        *_all(c_int, "cmd_fd async_fd num_comp_vectors"),
        ("mutex", c_size_t * (_MUTEX // sizeof(c_size_t))),
        ("abi_compat", c_void_p),
    ]


class verbs_context(Structure):
    """``struct verbs_context``: what is in front of an ``ibv_context``. New functions come at its beginning."""

    _fields_ = [
        *_all(
            c_void_p,
            "query_port advise_mr alloc_null_mr read_counters attach_counters_point_flow create_counters "
            "destroy_counters reg_dm_mr alloc_dm free_dm modify_flow_action_esp destroy_flow_action "
            "create_flow_action_esp modify_qp_rate_limit alloc_parent_domain dealloc_td alloc_td modify_cq "
            "post_srq_ops destroy_rwq_ind_table create_rwq_ind_table destroy_wq modify_wq create_wq query_rt_values "
            "create_cq_ex priv query_device_ex ibv_destroy_flow ABI_placeholder2 ibv_create_flow ABI_placeholder1 "
            "open_qp create_qp_ex get_srq_num create_srq_ex open_xrcd close_xrcd",
        ),
        ("_ABI_placeholder3", c_uint64),
        ("sz", c_size_t),
        ("context", ibv_context),
    ]


class ibv_device_attr(Structure):
    """``struct ibv_device_attr``, ibv_query_device(3)."""

    _fields_ = [
        ("fw_ver", c_char * 64),
        # The two GUIDs are in network byte order.
        *_all(c_uint64, "node_guid sys_image_guid max_mr_size page_size_cap"),
        *_all(c_uint32, "vendor_id vendor_part_id hw_ver"),
        *_all(c_int, "max_qp max_qp_wr"),
        ("device_cap_flags", c_uint32),
        *_all(
            c_int,
            "max_sge max_sge_rd max_cq max_cqe max_mr max_pd max_qp_rd_atom max_ee_rd_atom max_res_rd_atom "
            "max_qp_init_rd_atom max_ee_init_rd_atom atomic_cap max_ee max_rdd max_mw max_raw_ipv6_qp max_raw_ethy_qp "
            "max_mcast_grp max_mcast_qp_attach max_total_mcast_qp_attach max_ah max_fmr max_map_per_fmr max_srq "
            "max_srq_wr max_srq_sge",
        ),
        ("max_pkeys", c_uint16),
        *_all(c_uint8, "local_ca_ack_delay phys_port_cnt"),
    ]


class per_transport_caps(Structure):
    """The structure in ``struct ibv_odp_caps``."""

    _fields_ = _all(c_uint32, "rc_odp_caps uc_odp_caps ud_odp_caps")


class ibv_odp_caps(Structure):
    """``struct ibv_odp_caps``."""

    _fields_ = [("general_caps", c_uint64), ("per_transport_caps", per_transport_caps)]


class ibv_tso_caps(Structure):
    """``struct ibv_tso_caps``."""

    _fields_ = _all(c_uint32, "max_tso supported_qpts")


class ibv_rss_caps(Structure):
    """``struct ibv_rss_caps``."""

    _fields_ = [
        *_all(c_uint32, "supported_qpts max_rwq_indirection_tables max_rwq_indirection_table_size"),
        ("rx_hash_fields_mask", c_uint64),
        ("rx_hash_function", c_uint8),
    ]


class ibv_packet_pacing_caps(Structure):
    """``struct ibv_packet_pacing_caps``."""

    _fields_ = _all(c_uint32, "qp_rate_limit_min qp_rate_limit_max supported_qpts")


class ibv_tm_caps(Structure):
    """``struct ibv_tm_caps``."""

    _fields_ = _all(c_uint32, "max_rndv_hdr_size max_num_tags flags max_ops max_sge")


class ibv_cq_moderation_caps(Structure):
    """``struct ibv_cq_moderation_caps``."""

    _fields_ = _all(c_uint16, "max_cq_count max_cq_period")


class ibv_pci_atomic_caps(Structure):
    """``struct ibv_pci_atomic_caps``."""

    _fields_ = _all(c_uint16, "fetch_add swap compare_swap")


class ibv_device_attr_ex(Structure):
    """``struct ibv_device_attr_ex``, ibv_query_device_ex(3)."""

    _fields_ = [
        ("orig_attr", ibv_device_attr),
        ("comp_mask", c_uint32),
        ("odp_caps", ibv_odp_caps),
        *_all(c_uint64, "completion_timestamp_mask hca_core_clock device_cap_flags_ex"),
        ("tso_caps", ibv_tso_caps),
        ("rss_caps", ibv_rss_caps),
        ("max_wq_type_rq", c_uint32),
        ("packet_pacing_caps", ibv_packet_pacing_caps),
        ("raw_packet_caps", c_uint32),
        ("tm_caps", ibv_tm_caps),
        ("cq_mod_caps", ibv_cq_moderation_caps),
        ("max_dm_size", c_uint64),
        ("pci_atomic_caps", ibv_pci_atomic_caps),
        *_all(c_uint32, "xrc_odp_caps phys_port_cnt_ex"),
    ]


class ibv_port_attr(Structure):
    """``struct ibv_port_attr``, ibv_query_port(3)."""

    _fields_ = [
        *_all(c_int, "state max_mtu active_mtu gid_tbl_len"),
        *_all(c_uint32, "port_cap_flags max_msg_sz bad_pkey_cntr qkey_viol_cntr"),
        *_all(c_uint16, "pkey_tbl_len lid sm_lid"),
        *_all(
            c_uint8,
            "lmc max_vl_num sm_sl subnet_timeout init_type_reply active_width active_speed phys_state link_layer flags",
        ),
        ("port_cap_flags2", c_uint16),
        ("active_speed_ex", c_uint32),
    ]


class ibv_gid_entry(Structure):
    """``struct ibv_gid_entry``, ibv_query_gid_ex(3)."""

    # Aligned as the two 64-bit numbers of C's union.
    _fields_ = [("gid", c_uint64 * 2), *_all(c_uint32, "gid_index port_num gid_type ndev_ifindex")]


class _Element(Union):
    _fields_ = [("pointer", c_void_p), ("port_num", c_int)]


class ibv_async_event(Structure):
    """``struct ibv_async_event``, ibv_get_async_event(3)."""

    _fields_ = [("element", _Element), ("event_type", c_int)]


# -- memory -------------------------------------------------------------------------------------------


class ibv_mr(Structure):
    """``struct ibv_mr``."""

    _fields_ = [
        *_all(c_void_p, "context pd addr"),
        ("length", c_size_t),
        *_all(c_uint32, "handle lkey rkey"),
    ]


class ibv_mw(Structure):
    """``struct ibv_mw``."""

    _fields_ = [*_all(c_void_p, "context pd"), *_all(c_uint32, "rkey handle"), ("type", c_int)]


class ibv_mw_bind_info(Structure):
    """``struct ibv_mw_bind_info``."""

    _fields_ = [("mr", c_void_p), *_all(c_uint64, "addr length"), ("mw_access_flags", c_uint32)]


class ibv_mw_bind(Structure):
    """``struct ibv_mw_bind``, ibv_bind_mw(3)."""

    _fields_ = [("wr_id", c_uint64), ("send_flags", c_uint32), ("bind_info", ibv_mw_bind_info)]


# -- queues -------------------------------------------------------------------------------------------


class ibv_comp_channel(Structure):
    """``struct ibv_comp_channel``."""

    _fields_ = [("context", c_void_p), *_all(c_int, "fd refcnt")]


class ibv_cq(Structure):
    """``struct ibv_cq``, up to its mutex."""

    _fields_ = [*_all(c_void_p, "context channel cq_context"), ("handle", c_uint32), ("cqe", c_int)]


class ibv_qp(Structure):
    """``struct ibv_qp``, up to its mutex."""

    _fields_ = [
        *_all(c_void_p, "context qp_context pd send_cq recv_cq srq"),
        *_all(c_uint32, "handle qp_num"),
        *_all(c_int, "state qp_type"),
    ]


class _WholeQp(ibv_qp):
    """``struct ibv_qp``, to its end."""

    _fields_ = [
        ("mutex", c_size_t * (_MUTEX // sizeof(c_size_t))),
        ("cond", c_uint64 * 6),  # pthread_cond_t
        ("events_completed", c_uint32),
    ]


class ibv_qp_ex(Structure):
    """``struct ibv_qp_ex``, ibv_wr_post(3). A function is there if the queue pair was made for its operation."""

    _fields_ = [
        ("qp_base", _WholeQp),
        *_all(c_uint64, "comp_mask wr_id"),
        ("wr_flags", c_uint32),
        *_all(
            c_void_p,
            "wr_atomic_cmp_swp wr_atomic_fetch_add wr_bind_mw wr_local_inv wr_rdma_read wr_rdma_write "
            "wr_rdma_write_imm wr_send wr_send_imm wr_send_inv wr_send_tso wr_set_ud_addr wr_set_xrc_srqn "
            "wr_set_inline_data wr_set_inline_data_list wr_set_sge wr_set_sge_list wr_start wr_complete wr_abort "
            "wr_atomic_write wr_flush",
        ),
    ]


class ibv_srq_attr(Structure):
    """``struct ibv_srq_attr``."""

    _fields_ = _all(c_uint32, "max_wr max_sge srq_limit")


class ibv_srq_init_attr(Structure):
    """``struct ibv_srq_init_attr``, ibv_create_srq(3)."""

    _fields_ = [("srq_context", c_void_p), ("attr", ibv_srq_attr)]


class ibv_tm_cap(Structure):
    """``struct ibv_tm_cap``."""

    _fields_ = _all(c_uint32, "max_num_tags max_ops")


class ibv_srq_init_attr_ex(Structure):
    """``struct ibv_srq_init_attr_ex``, ibv_create_srq_ex(3)."""

    _fields_ = [
        ("srq_context", c_void_p),
        ("attr", ibv_srq_attr),
        ("comp_mask", c_uint32),
        ("srq_type", c_int),
        *_all(c_void_p, "pd xrcd cq"),
        ("tm_cap", ibv_tm_cap),
    ]


class ibv_xrcd_init_attr(Structure):
    """``struct ibv_xrcd_init_attr``, ibv_open_xrcd(3)."""

    _fields_ = [("comp_mask", c_uint32), *_all(c_int, "fd oflags")]


class ibv_qp_cap(Structure):
    """``struct ibv_qp_cap``."""

    _fields_ = _all(c_uint32, "max_send_wr max_recv_wr max_send_sge max_recv_sge max_inline_data")


class ibv_qp_init_attr(Structure):
    """``struct ibv_qp_init_attr``, ibv_create_qp(3)."""

    _fields_ = [
        *_all(c_void_p, "qp_context send_cq recv_cq srq"),
        ("cap", ibv_qp_cap),
        *_all(c_int, "qp_type sq_sig_all"),
    ]


class ibv_rx_hash_conf(Structure):
    """``struct ibv_rx_hash_conf``."""

    _fields_ = [
        *_all(c_uint8, "rx_hash_function rx_hash_key_len"),
        ("rx_hash_key", c_void_p),
        ("rx_hash_fields_mask", c_uint64),
    ]


class ibv_qp_init_attr_ex(Structure):
    """``struct ibv_qp_init_attr_ex``, ibv_create_qp_ex(3)."""

    _fields_ = [
        *_all(c_void_p, "qp_context send_cq recv_cq srq"),
        ("cap", ibv_qp_cap),
        *_all(c_int, "qp_type sq_sig_all"),
        ("comp_mask", c_uint32),
        *_all(c_void_p, "pd xrcd"),
        ("create_flags", c_uint32),
        ("max_tso_header", c_uint16),
        ("rwq_ind_tbl", c_void_p),
        ("rx_hash_conf", ibv_rx_hash_conf),
        ("source_qpn", c_uint32),
        ("send_ops_flags", c_uint64),
    ]


class ibv_qp_open_attr(Structure):
    """``struct ibv_qp_open_attr``, ibv_open_qp(3)."""

    _fields_ = [*_all(c_uint32, "comp_mask qp_num"), *_all(c_void_p, "xrcd qp_context"), ("qp_type", c_int)]


class ibv_global_route(Structure):
    """``struct ibv_global_route``."""

    _fields_ = [
        ("dgid", c_uint64 * 2),
        ("flow_label", c_uint32),
        *_all(c_uint8, "sgid_index hop_limit traffic_class"),
    ]


class ibv_ah_attr(Structure):
    """``struct ibv_ah_attr``, ibv_create_ah(3)."""

    _fields_ = [
        ("grh", ibv_global_route),
        ("dlid", c_uint16),
        *_all(c_uint8, "sl src_path_bits static_rate is_global port_num"),
    ]


class ibv_qp_attr(Structure):
    """``struct ibv_qp_attr``, ibv_modify_qp(3)."""

    _fields_ = [
        *_all(c_int, "qp_state cur_qp_state path_mtu path_mig_state"),
        *_all(c_uint32, "qkey rq_psn sq_psn dest_qp_num qp_access_flags"),
        ("cap", ibv_qp_cap),
        ("ah_attr", ibv_ah_attr),
        ("alt_ah_attr", ibv_ah_attr),
        *_all(c_uint16, "pkey_index alt_pkey_index"),
        *_all(
            c_uint8,
            "en_sqd_async_notify sq_draining max_rd_atomic max_dest_rd_atomic min_rnr_timer port_num timeout retry_cnt "
            "rnr_retry alt_port_num alt_timeout",
        ),
        ("rate_limit", c_uint32),
    ]


# -- work requests and completions --------------------------------------------------------------------


class ibv_sge(Structure):
    """``struct ibv_sge``."""

    _fields_ = [("addr", c_uint64), *_all(c_uint32, "length lkey")]


class _Rdma(Structure):
    _fields_ = [("remote_addr", c_uint64), ("rkey", c_uint32)]


class _Atomic(Structure):
    _fields_ = [*_all(c_uint64, "remote_addr compare_add swap"), ("rkey", c_uint32)]


class _Datagram(Structure):
    _fields_ = [("ah", c_void_p), *_all(c_uint32, "remote_qpn remote_qkey")]


class _Wr(Union):
    _fields_ = [("rdma", _Rdma), ("atomic", _Atomic), ("ud", _Datagram)]


class _BindMw(Structure):
    _fields_ = [("mw", c_void_p), ("rkey", c_uint32), ("bind_info", ibv_mw_bind_info)]


class ibv_send_wr(Structure):
    """``struct ibv_send_wr``, ibv_post_send(3)."""

    _fields_ = [
        ("wr_id", c_uint64),
        *_all(c_void_p, "next sg_list"),
        *_all(c_int32, "num_sge opcode"),
        # In network byte order, unless it is a key to invalidate.
        *_all(c_uint32, "send_flags imm_data"),
        ("wr", _Wr),
        # Of qp_type.xrc; the union around it is aligned as a number of 32 bits.
        ("remote_srqn", c_uint32),
        ("bind_mw", _BindMw),
    ]


class ibv_recv_wr(Structure):
    """``struct ibv_recv_wr``, ibv_post_recv(3)."""

    _fields_ = [("wr_id", c_uint64), *_all(c_void_p, "next sg_list"), ("num_sge", c_int)]


class ibv_wc(Structure):
    """``struct ibv_wc``, ibv_poll_cq(3)."""

    _fields_ = [
        ("wr_id", c_uint64),
        *_all(c_int, "status opcode"),
        *_all(c_uint32, "vendor_err byte_len imm_data qp_num src_qp wc_flags"),
        *_all(c_uint16, "pkey_index slid"),
        *_all(c_uint8, "sl dlid_path_bits"),
    ]


#: The structures that a test compares with those of the C compiler.
STRUCTURES: tuple[type[Structure], ...] = (
    *(ibv_device, ibv_context_ops, ibv_context, verbs_context, ibv_device_attr, ibv_odp_caps, ibv_tso_caps),
    *(ibv_rss_caps, ibv_packet_pacing_caps, ibv_tm_caps, ibv_cq_moderation_caps, ibv_pci_atomic_caps),
    *(ibv_device_attr_ex, ibv_port_attr, ibv_gid_entry, ibv_async_event, ibv_mr, ibv_mw, ibv_mw_bind_info),
    *(ibv_mw_bind, ibv_comp_channel, ibv_cq, ibv_qp, ibv_qp_ex, ibv_srq_attr, ibv_srq_init_attr, ibv_tm_cap),
    *(ibv_srq_init_attr_ex, ibv_xrcd_init_attr, ibv_qp_cap, ibv_qp_init_attr, ibv_rx_hash_conf),
    *(
        ibv_qp_init_attr_ex,
        ibv_qp_open_attr,
        ibv_global_route,
        ibv_ah_attr,
        ibv_qp_attr,
        ibv_sge,
        ibv_send_wr,
        ibv_recv_wr,
        ibv_wc,
    ),
)

_HEADER = "@QPPiIII"

#: ``ibv_sge``: addr, length, lkey.
SGE = struct.Struct("@QII")
#: ``ibv_recv_wr``: wr_id, next, sg_list, num_sge.
RECV_WR = struct.Struct("@QPPi")
#: A receive and its one element behind it.
ONE_RECV = struct.Struct(f"@QPPi{sizeof(ibv_recv_wr) - RECV_WR.size}xQII")
#: The beginning of ``ibv_send_wr``: wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data; then, by the opcode,
#: remote_addr and rkey; or remote_addr, compare_add, swap, rkey; or ah, remote_qpn, remote_qkey.
RDMA_WR = struct.Struct(f"{_HEADER}QI")
ATOMIC_WR = struct.Struct(f"{_HEADER}QQQI")
DATAGRAM_WR = struct.Struct(f"{_HEADER}PII")
#: ``remote_srqn`` of ``ibv_send_wr``.
XRC_SRQN = struct.Struct("@I")
#: ``bind_mw`` of ``ibv_send_wr``: mw, rkey, mr, addr, length, mw_access_flags.
BIND_WR = struct.Struct("@PIPQQI")
#: ``ibv_wc``, all its fields.
WC = struct.Struct(f"@QIIIIIIIIHHBB{sizeof(ibv_wc) - 46}x")
