"""The attribute structures of ``infiniband/verbs.h``. A field has C's name unless its description gives another."""

from __future__ import annotations

from dataclasses import dataclass, field

from rdmacm.address import Gid
from rdmacm.verbs.enums import AtomicCap, DeviceCapFlag, MigState, Mtu, QPState

#: In a limit: only memory limits the number. It is the greatest of C's ``int``.
UNLIMITED = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAttr:
    """``struct ibv_device_attr``, ibv_query_device(3): what a device is, and its limits.

    A limit is the greatest number that the device accepts; 0 where it has nothing of the kind. :data:`UNLIMITED` stands
    for a number that nothing but memory limits.

    - ``fw_ver``: the version of the firmware.
    - ``node_guid``, ``sys_image_guid``: the GUIDs of the device and of the system that it is part of, 64 bits each, as
      numbers; 0 if unknown.
    - ``max_mr_size``: the longest memory region, in bytes.
    - ``page_size_cap``: the sizes of memory pages that the device can map: bit n stands for 2**n bytes.
    - ``vendor_id``, ``vendor_part_id``, ``hw_ver``: the vendor (an IEEE OUI, 24 bits), and the vendor's numbers of the
      part and of the hardware's version.
    - ``max_qp``: queue pairs.
    - ``max_qp_wr``: work requests in a send queue or a receive queue.
    - ``device_cap_flags``: what the device can do; ``device_cap_flags_ex`` has the flags beyond 32 bits as well.
    - ``max_sge``, ``max_sge_rd``: scatter/gather elements in a work request, and in that of a READ.
    - ``max_cq``: completion queues.
    - ``max_cqe``: completions in a completion queue.
    - ``max_mr``: memory regions.
    - ``max_pd``: protection domains.
    - ``max_qp_rd_atom``, ``max_ee_rd_atom``, ``max_res_rd_atom``: READs and atomics of the peer that a queue pair
      serves at a time, an end-to-end context, and all queue pairs together.
    - ``max_qp_init_rd_atom``, ``max_ee_init_rd_atom``: READs and atomics that a queue pair, or an end-to-end context,
      may have outstanding.
    - ``atomic_cap``: between which accesses atomics are atomic.
    - ``max_ee``, ``max_rdd``: end-to-end contexts and reliable datagram domains.
    - ``max_mw``: memory windows.
    - ``max_raw_ipv6_qp``, ``max_raw_ethy_qp``: raw queue pairs for IPv6 and for Ethertype packets.
    - ``max_mcast_grp``, ``max_mcast_qp_attach``, ``max_total_mcast_qp_attach``: multicast groups, queue pairs in one
      group, and queue pairs in all groups together.
    - ``max_ah``: address handles.
    - ``max_fmr``, ``max_map_per_fmr``: fast memory regions, and how often one is mapped before it is unmapped.
    - ``max_srq``: shared receive queues.
    - ``max_srq_wr``: work requests in a shared receive queue.
    - ``max_srq_sge``: scatter/gather elements in a work request of a shared receive queue.
    - ``max_pkeys``: entries of a port's P_Key table.
    - ``local_ca_ack_delay``: how long the device may take to acknowledge: exponent of 4.096 µs.
    - ``phys_port_cnt``: ports.
    - ``max_inline_data``: inline data of a work request, in bytes. (C has it in ``struct ibv_qp_cap`` only.)
    - ``max_msg_sz``: the longest message, in bytes. (C has it in ``struct ibv_port_attr``.)
    """

    fw_ver: str = ""
    node_guid: int = 0
    sys_image_guid: int = 0
    max_mr_size: int
    page_size_cap: int = 0
    vendor_id: int = 0
    vendor_part_id: int = 0
    hw_ver: int = 0
    max_qp: int
    max_qp_wr: int
    device_cap_flags: DeviceCapFlag = DeviceCapFlag(0)  # noqa: RUF009 (immutable)
    max_sge: int
    max_sge_rd: int = 0
    max_cq: int
    max_cqe: int
    max_mr: int
    max_pd: int
    max_qp_rd_atom: int
    max_ee_rd_atom: int = 0
    max_res_rd_atom: int = 0
    max_qp_init_rd_atom: int
    max_ee_init_rd_atom: int = 0
    atomic_cap: AtomicCap = AtomicCap.NONE
    max_ee: int = 0
    max_rdd: int = 0
    max_mw: int = 0
    max_raw_ipv6_qp: int = 0
    max_raw_ethy_qp: int = 0
    max_mcast_grp: int = 0
    max_mcast_qp_attach: int = 0
    max_total_mcast_qp_attach: int = 0
    max_ah: int = 0
    max_fmr: int = 0
    max_map_per_fmr: int = 0
    max_srq: int
    max_srq_wr: int
    max_srq_sge: int
    max_pkeys: int = 0
    local_ca_ack_delay: int
    phys_port_cnt: int = 1
    max_inline_data: int
    max_msg_sz: int
    device_cap_flags_ex: DeviceCapFlag = DeviceCapFlag(0)  # noqa: RUF009 (immutable)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device_cap_flags_ex", self.device_cap_flags_ex | self.device_cap_flags)


@dataclass(slots=True)
class QPCap:
    """``struct ibv_qp_cap``: the sizes of a queue pair's queues.

    - ``max_send_wr``, ``max_recv_wr``: work requests in the send queue and in the receive queue.
    - ``max_send_sge``, ``max_recv_sge``: scatter/gather elements in one work request of each.
    - ``max_inline_data``: inline data of one work request, in bytes.
    """

    max_send_wr: int = 1
    max_recv_wr: int = 10
    max_send_sge: int = 1
    max_recv_sge: int = 1
    max_inline_data: int = 0


@dataclass(slots=True)
class GlobalRoute:
    """``struct ibv_global_route``: the part of an address vector that becomes the GRH, or on RoCEv2 the IP header.

    The software devices leave the flow label to the operating system, and the hop limit as well: that of connections,
    and hop limits 0 and 1 of datagrams.

    - ``dgid``: the destination.
    - ``sgid_index``: the row of the port's GID table to send from.
    - ``flow_label``: 20 bits.
    - ``hop_limit``: 8 bits.
    - ``traffic_class``: 8 bits.
    """

    dgid: Gid = Gid()  # noqa: RUF009 (immutable)
    sgid_index: int = 0
    flow_label: int = 0
    hop_limit: int = 1
    traffic_class: int = 0


@dataclass(slots=True)
class AHAttr:
    """``struct ibv_ah_attr``: an address vector.

    On Ethernet ``is_global`` has to be true, ``gr`` is the destination, and ``dlid``, ``sl``, ``src_path_bits`` and
    ``static_rate`` are kept without effect.

    - ``dlid``: the destination's LID, 16 bits.
    - ``sl``: the service level, 0 to 15.
    - ``src_path_bits``: the source LID's low bits, 7 bits.
    - ``static_rate``: ``enum ibv_rate``: the highest rate to send at; 0 for no limit.
    - ``is_global``: whether :attr:`gr` is used.
    - ``port_num``: the port to send from; ports count from 1.
    - ``gr``: the global route (GRH).
    """

    dlid: int = 0
    sl: int = 0
    src_path_bits: int = 0
    static_rate: int = 0
    is_global: bool | int = False
    port_num: int = 1
    gr: GlobalRoute = field(default_factory=GlobalRoute)

    @property
    def grh(self) -> GlobalRoute:
        """C's name of :attr:`gr`."""
        return self.gr

    @grh.setter
    def grh(self, route: GlobalRoute) -> None:
        self.gr = route


@dataclass(slots=True)
class QPAttr:
    """``struct ibv_qp_attr``, ibv_modify_qp(3) and ibv_query_qp(3).

    A :class:`QPAttrMask` names the fields that ``modify`` takes. Enumerations may be set as plain ints; a query returns
    members.

    - ``qp_state``: the state to move to; in a query, the state.
    - ``cur_qp_state``: the state that the caller believes the queue pair to be in.
    - ``path_mtu``: the path MTU, at most the port's ``active_mtu``.
    - ``path_mig_state``: which of the two paths is used.
    - ``qkey``: the Q_Key of a datagram queue pair, 32 bits.
    - ``rq_psn``: the PSN of the first packet to receive, 24 bits.
    - ``sq_psn``: the PSN of the first packet to send, 24 bits.
    - ``dest_qp_num``: the peer's queue pair, 24 bits.
    - ``qp_access_flags``: what the peer may do: an :class:`AccessFlag`.
    - ``cap``: the sizes of its queues.
    - ``ah_attr``: the primary path.
    - ``alt_ah_attr``: the alternate path.
    - ``pkey_index``, ``alt_pkey_index``: rows of the port's P_Key table, for the primary and the alternate path.
    - ``en_sqd_async_notify``: whether to raise SQ_DRAINED when the send queue has drained in SQD.
    - ``sq_draining``: query only: whether the send queue still drains in SQD.
    - ``max_rd_atomic``: READs and atomics that may be outstanding.
    - ``max_dest_rd_atomic``: READs and atomics of the peer that are served at a time.
    - ``min_rnr_timer``: how long the peer waits after an RNR NAK (no receive was posted): a code of the RNR timer
      table, 0 to 31 (0 is 655.36 ms, 1 is 10 µs; InfiniBand Architecture 9.7.5.2.8).
    - ``port_num``: the port; ports count from 1.
    - ``timeout``: how long to wait for an acknowledgement: exponent of 4.096 µs, 0 to 31; 0 is for ever.
    - ``retry_cnt``: retries after a timeout, 0 to 7.
    - ``rnr_retry``: retries after an RNR NAK, 0 to 7; 7 is without end.
    - ``alt_port_num``, ``alt_timeout``: as :attr:`port_num` and :attr:`timeout`, for the alternate path.
    - ``rate_limit``: the packet pacing rate, in kbit/s.
    """

    qp_state: QPState = QPState.RESET
    cur_qp_state: QPState = QPState.RESET
    path_mtu: Mtu = Mtu.MTU_1024
    path_mig_state: MigState = MigState.MIGRATED
    qkey: int = 0
    rq_psn: int = 0
    sq_psn: int = 0
    dest_qp_num: int = 0
    qp_access_flags: int = 0
    cap: QPCap = field(default_factory=QPCap)
    ah_attr: AHAttr = field(default_factory=AHAttr)
    alt_ah_attr: AHAttr = field(default_factory=AHAttr)
    pkey_index: int = 0
    alt_pkey_index: int = 0
    en_sqd_async_notify: int = 0
    sq_draining: int = 0
    max_rd_atomic: int = 0
    max_dest_rd_atomic: int = 0
    min_rnr_timer: int = 0
    port_num: int = 1
    timeout: int = 0
    retry_cnt: int = 0
    rnr_retry: int = 0
    alt_port_num: int = 0
    alt_timeout: int = 0
    rate_limit: int = 0


@dataclass(slots=True)
class SrqAttr:
    """``struct ibv_srq_attr``: the sizes of a shared receive queue, and its limit event.

    - ``max_wr``: work requests in the queue.
    - ``max_sge``: scatter/gather elements in one work request.
    - ``srq_limit``: SRQ_LIMIT_REACHED is raised once, by a message after which fewer receives than this are queued; 0
      is never. Only ``SRQ.modify`` sets it: it does not count when the queue is made.
    """

    max_wr: int = 100
    max_sge: int = 1
    srq_limit: int = 0


@dataclass(slots=True)
class SrqInitAttr:
    """``struct ibv_srq_init_attr``, ibv_create_srq(3).

    - ``attr``: the sizes and the limit.
    - ``srq_context``: the user's own object.
    """

    attr: SrqAttr = field(default_factory=SrqAttr)
    srq_context: object = None
