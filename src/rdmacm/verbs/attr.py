"""The attribute structures of ``infiniband/verbs.h``. A field has C's name unless its comment gives another."""

from __future__ import annotations

from dataclasses import dataclass, field

from rdmacm.address import Gid
from rdmacm.verbs.enums import AtomicCap, DeviceCapFlag, MigState, Mtu, QPState

__all__ = [
    "AHAttr",
    "DeviceAttr",
    "GlobalRoute",
    "UNLIMITED",
    "QPAttr",
    "QPCap",
    "SrqAttr",
    "SrqInitAttr",
]

#: In a limit: only memory limits the number. It is the greatest of C's ``int``.
UNLIMITED = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAttr:
    """``struct ibv_device_attr``, ibv_query_device(3): what a device is, and its limits.

    A limit is the greatest number that the device accepts; 0 where it has nothing of the kind. :data:`UNLIMITED` stands
    for a number that nothing but memory limits.
    """

    #: The version of the firmware.
    fw_ver: str = ""
    #: The GUIDs of the device and of the system that it is part of, 64 bits each, as numbers; 0 if unknown.
    node_guid: int = 0
    sys_image_guid: int = 0
    #: The longest memory region, in bytes.
    max_mr_size: int
    #: The sizes of memory pages that the device can map: bit n stands for 2**n bytes.
    page_size_cap: int = 0
    #: The vendor (an IEEE OUI, 24 bits), and the vendor's numbers of the part and of the hardware's version.
    vendor_id: int = 0
    vendor_part_id: int = 0
    hw_ver: int = 0
    #: Queue pairs.
    max_qp: int
    #: Work requests in a send queue or a receive queue.
    max_qp_wr: int
    device_cap_flags: DeviceCapFlag = DeviceCapFlag(0)  # noqa: RUF009 (immutable)
    #: Scatter/gather elements in a work request, and in that of a READ.
    max_sge: int
    max_sge_rd: int = 0
    #: Completion queues.
    max_cq: int
    #: Completions in a completion queue.
    max_cqe: int
    #: Memory regions.
    max_mr: int
    #: Protection domains.
    max_pd: int
    #: READs and atomics of the peer that a queue pair serves at a time, an end-to-end context, and all queue pairs
    #: together.
    max_qp_rd_atom: int
    max_ee_rd_atom: int = 0
    max_res_rd_atom: int = 0
    #: READs and atomics that a queue pair, or an end-to-end context, may have outstanding.
    max_qp_init_rd_atom: int
    max_ee_init_rd_atom: int = 0
    atomic_cap: AtomicCap = AtomicCap.NONE
    #: End-to-end contexts and reliable datagram domains.
    max_ee: int = 0
    max_rdd: int = 0
    #: Memory windows.
    max_mw: int = 0
    #: Raw queue pairs for IPv6 and for Ethertype packets.
    max_raw_ipv6_qp: int = 0
    max_raw_ethy_qp: int = 0
    #: Multicast groups, queue pairs in one group, and queue pairs in all groups together.
    max_mcast_grp: int = 0
    max_mcast_qp_attach: int = 0
    max_total_mcast_qp_attach: int = 0
    #: Address handles.
    max_ah: int = 0
    #: Fast memory regions, and how often one is mapped before it is unmapped.
    max_fmr: int = 0
    max_map_per_fmr: int = 0
    #: Shared receive queues.
    max_srq: int
    #: Work requests in a shared receive queue.
    max_srq_wr: int
    #: Scatter/gather elements in a work request of a shared receive queue.
    max_srq_sge: int
    #: Entries of a port's P_Key table.
    max_pkeys: int = 0
    #: How long the device may take to acknowledge: exponent of 4.096 µs.
    local_ca_ack_delay: int
    #: Ports.
    phys_port_cnt: int = 1
    #: Inline data of a work request, in bytes. (C has it in ``struct ibv_qp_cap`` only.)
    max_inline_data: int
    #: The longest message, in bytes. (C has it in ``struct ibv_port_attr``.)
    max_msg_sz: int


@dataclass(slots=True)
class QPCap:
    """``struct ibv_qp_cap``: the sizes of a queue pair's queues."""

    #: Work requests in the send queue and in the receive queue.
    max_send_wr: int = 1
    max_recv_wr: int = 10
    #: Scatter/gather elements in one work request of each.
    max_send_sge: int = 1
    max_recv_sge: int = 1
    #: Inline data of one work request, in bytes.
    max_inline_data: int = 0


@dataclass(slots=True)
class GlobalRoute:
    """``struct ibv_global_route``: the part of an address vector that becomes the GRH, or on RoCEv2 the IP header.

    The software devices leave flow label and hop limit to the operating system.
    """

    #: The destination.
    dgid: Gid = Gid()  # noqa: RUF009 (immutable)
    #: The row of the port's GID table to send from.
    sgid_index: int = 0
    #: 20 bits.
    flow_label: int = 0
    #: 8 bits.
    hop_limit: int = 1
    #: 8 bits.
    traffic_class: int = 0


@dataclass(slots=True)
class AHAttr:
    """``struct ibv_ah_attr``: an address vector.

    On Ethernet ``is_global`` has to be true, ``gr`` is the destination, and ``dlid``, ``sl``, ``src_path_bits`` and
    ``static_rate`` are kept without effect.
    """

    #: The destination's LID, 16 bits.
    dlid: int = 0
    #: The service level, 0 to 15.
    sl: int = 0
    #: The source LID's low bits, 7 bits.
    src_path_bits: int = 0
    #: ``enum ibv_rate``: the highest rate to send at; 0 for no limit.
    static_rate: int = 0
    #: Whether :attr:`gr` is used.
    is_global: bool = False
    #: The port to send from; ports count from 1.
    port_num: int = 1
    #: C's ``grh``.
    gr: GlobalRoute = field(default_factory=GlobalRoute)


@dataclass(slots=True)
class QPAttr:
    """``struct ibv_qp_attr``, ibv_modify_qp(3) and ibv_query_qp(3).

    A :class:`QPAttrMask` names the fields that ``modify`` takes. Enumerations may be set as plain ints; a query returns
    members.
    """

    #: The state to move to; in a query, the state.
    qp_state: QPState = QPState.RESET
    #: The state that the caller believes the queue pair to be in.
    cur_qp_state: QPState = QPState.RESET
    path_mtu: Mtu = Mtu.MTU_1024
    path_mig_state: MigState = MigState.MIGRATED
    #: The Q_Key of a datagram queue pair, 32 bits.
    qkey: int = 0
    #: The PSN of the first packet to receive, 24 bits.
    rq_psn: int = 0
    #: The PSN of the first packet to send, 24 bits.
    sq_psn: int = 0
    #: The peer's queue pair, 24 bits.
    dest_qp_num: int = 0
    #: What the peer may do: an :class:`AccessFlag`.
    qp_access_flags: int = 0
    #: The sizes of its queues.
    cap: QPCap = field(default_factory=QPCap)
    #: The primary path.
    ah_attr: AHAttr = field(default_factory=AHAttr)
    #: The alternate path.
    alt_ah_attr: AHAttr = field(default_factory=AHAttr)
    #: Rows of the port's P_Key table, for the primary and the alternate path.
    pkey_index: int = 0
    alt_pkey_index: int = 0
    #: Whether to raise SQ_DRAINED when the send queue has drained in SQD.
    en_sqd_async_notify: int = 0
    #: Query only: whether the send queue still drains in SQD.
    sq_draining: int = 0
    #: READs and atomics that may be outstanding.
    max_rd_atomic: int = 0
    #: READs and atomics of the peer that are served at a time.
    max_dest_rd_atomic: int = 0
    #: How long the peer waits after an RNR NAK (no receive was posted): a code of the RNR timer table, 0 to 31 (0 is
    #: 655.36 ms, 1 is 10 µs; InfiniBand Architecture 9.7.5.2.8).
    min_rnr_timer: int = 0
    #: The port; ports count from 1.
    port_num: int = 1
    #: How long to wait for an acknowledgement: exponent of 4.096 µs, 0 to 31; 0 is for ever.
    timeout: int = 0
    #: Retries after a timeout, 0 to 7.
    retry_cnt: int = 0
    #: Retries after an RNR NAK, 0 to 7; 7 is without end.
    rnr_retry: int = 0
    #: As :attr:`port_num` and :attr:`timeout`, for the alternate path.
    alt_port_num: int = 0
    alt_timeout: int = 0
    #: The packet pacing rate, in kbit/s.
    rate_limit: int = 0


@dataclass(slots=True)
class SrqAttr:
    """``struct ibv_srq_attr``: the sizes of a shared receive queue, and its limit event."""

    #: Work requests in the queue.
    max_wr: int = 100
    #: Scatter/gather elements in one work request.
    max_sge: int = 1
    #: SRQ_LIMIT_REACHED is raised once when fewer receives than this are queued; 0 is never.
    srq_limit: int = 0


@dataclass(slots=True)
class SrqInitAttr:
    """``struct ibv_srq_init_attr``, ibv_create_srq(3)."""

    #: The sizes and the limit.
    attr: SrqAttr = field(default_factory=SrqAttr)
    #: The user's own object.
    srq_context: object = None
