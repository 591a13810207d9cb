"""The attribute structures of ``infiniband/verbs.h``; fields are spelled as C and pyverbs spell them."""

from __future__ import annotations

from dataclasses import dataclass, field

from rdmacm.address import Gid
from rdmacm.verbs.enums import Mtu, QPState

__all__ = [
    "AHAttr",
    "DeviceAttr",
    "GlobalRoute",
    "QPAttr",
    "QPCap",
    "SrqAttr",
    "SrqInitAttr",
]


@dataclass(frozen=True, slots=True)
class DeviceAttr:
    """``struct ibv_device_attr``: what a device can do at most.

    ``max_mr_size``, ``max_inline_data`` and ``max_msg_sz`` are bytes; ``max_qp_rd_atom`` and ``max_qp_init_rd_atom``
    are READs and atomics under way at a time that a queue pair serves and asks for; ``local_ca_ack_delay`` is an
    exponent of 4.096 µs; the others count objects, work requests, elements, completions.
    """

    max_mr_size: int
    max_qp: int
    max_qp_wr: int
    max_sge: int
    max_cq: int
    max_cqe: int
    max_mr: int
    max_pd: int
    max_qp_rd_atom: int
    max_qp_init_rd_atom: int
    max_srq: int
    max_srq_wr: int
    max_srq_sge: int
    max_inline_data: int
    local_ca_ack_delay: int
    max_msg_sz: int


@dataclass(slots=True)
class QPCap:
    """``struct ibv_qp_cap``: sizes of the queues, in work requests, scatter/gather elements and bytes."""

    max_send_wr: int = 1
    max_recv_wr: int = 10
    max_send_sge: int = 1
    max_recv_sge: int = 1
    max_inline_data: int = 0


@dataclass(slots=True)
class GlobalRoute:
    """``struct ibv_global_route``: the part of an address vector that becomes the IP header.

    ``sgid_index``: the row of the port's GID table to send from; ``flow_label`` has 20 bits, ``hop_limit`` and
    ``traffic_class`` 8. The software devices leave flow label and hop limit to the system.
    """

    dgid: Gid = Gid()  # noqa: RUF009 (immutable)
    sgid_index: int = 0
    flow_label: int = 0
    hop_limit: int = 1
    traffic_class: int = 0


@dataclass(slots=True)
class AHAttr:
    """``struct ibv_ah_attr``: an address vector.

    On Ethernet ``is_global`` has to be true and ``gr`` says where to; ``dlid`` and ``src_path_bits`` are InfiniBand's,
    ``sl`` (0..15) and ``static_rate`` are kept and not used there.
    """

    dlid: int = 0
    sl: int = 0
    src_path_bits: int = 0
    static_rate: int = 0
    is_global: bool = False
    port_num: int = 1
    gr: GlobalRoute = field(default_factory=GlobalRoute)


@dataclass(slots=True)
class QPAttr:
    """``struct ibv_qp_attr``: what ``modify`` changes and ``query`` tells. ``timeout`` is an exponent of 4.096 µs,
    ``min_rnr_timer`` a code of the RNR timer table; which fields count is said by a :class:`QPAttrMask`."""

    qp_state: QPState = QPState.RESET
    cur_qp_state: QPState = QPState.RESET
    path_mtu: Mtu = Mtu.MTU_1024
    path_mig_state: int = 0
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
    """``struct ibv_srq_attr``: sizes in work requests and elements; with fewer than ``srq_limit`` receives it warns."""

    max_wr: int = 100
    max_sge: int = 1
    srq_limit: int = 0


@dataclass(slots=True)
class SrqInitAttr:
    """``struct ibv_srq_init_attr``: what a shared receive queue is made of; ``srq_context`` is the user's own."""

    attr: SrqAttr = field(default_factory=SrqAttr)
    srq_context: object = None
