"""The extended attributes of a device: ibv_query_device_ex(3). Classes have pyverbs' names, fields C's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rdmacm.verbs.attr import DeviceAttr


@dataclass(frozen=True, slots=True)
class ODPCaps:
    """``struct ibv_odp_caps``: memory regions whose pages are fetched when they are used.

    - ``general_caps``: a mask; 0: there are none.
    - ``rc_odp_caps``, ``uc_odp_caps``, ``ud_odp_caps``, ``xrc_odp_caps``: the operations that may use them, a mask for
      each type of queue pair. (C has the last in ``struct ibv_device_attr_ex``.)
    """

    general_caps: int = 0
    rc_odp_caps: int = 0
    uc_odp_caps: int = 0
    ud_odp_caps: int = 0
    xrc_odp_caps: int = 0


@dataclass(frozen=True, slots=True)
class TSOCaps:
    """``struct ibv_tso_caps``: TCP segmentation by the device.

    - ``max_tso``: the longest message, in bytes; 0: there is none.
    - ``supported_qpts``: the types of queue pairs, a mask.
    """

    max_tso: int = 0
    supported_qpts: int = 0


@dataclass(frozen=True, slots=True)
class RSSCaps:
    """``struct ibv_rss_caps``: receive-side scaling.

    - ``supported_qpts``: the types of queue pairs, a mask; 0: there is none.
    - ``max_rwq_indirection_tables``, ``max_rwq_indirection_table_size``: tables, and entries of one.
    - ``rx_hash_fields_mask``, ``rx_hash_function``: what is hashed, and how, as masks.
    """

    supported_qpts: int = 0
    max_rwq_indirection_tables: int = 0
    max_rwq_indirection_table_size: int = 0
    rx_hash_fields_mask: int = 0
    rx_hash_function: int = 0


@dataclass(frozen=True, slots=True)
class PacketPacingCaps:
    """``struct ibv_packet_pacing_caps``: limits of a queue pair's rate.

    - ``qp_rate_limit_min``, ``qp_rate_limit_max``: in kbit/s; 0: there are none.
    - ``supported_qpts``: the types of queue pairs, a mask.
    """

    qp_rate_limit_min: int = 0
    qp_rate_limit_max: int = 0
    supported_qpts: int = 0


@dataclass(frozen=True, slots=True)
class TMCaps:
    """``struct ibv_tm_caps``: tag matching.

    - ``max_rndv_hdr_size``: the longest header of a rendezvous, in bytes.
    - ``max_num_tags``: tags in a list; 0: there is no tag matching.
    - ``flags``: a mask.
    - ``max_ops``: operations on a list that may be outstanding.
    - ``max_sge``: scatter/gather elements of a tagged receive.
    """

    max_rndv_hdr_size: int = 0
    max_num_tags: int = 0
    flags: int = 0
    max_ops: int = 0
    max_sge: int = 0


@dataclass(frozen=True, slots=True)
class CQModerationCaps:
    """``struct ibv_cq_moderation_caps``: fewer events than completions.

    - ``max_cq_count``: completions for one event; 0: there is no moderation.
    - ``max_cq_period``: how long an event may be late, in µs.
    """

    max_cq_count: int = 0
    max_cq_period: int = 0


@dataclass(frozen=True, slots=True)
class PCIAtomicCaps:
    """``struct ibv_pci_atomic_caps``: atomics on the PCI bus.

    - ``fetch_add``, ``swap``, ``compare_swap``: the sizes of operands, a mask each; 0: there is no such operation.
    """

    fetch_add: int = 0
    swap: int = 0
    compare_swap: int = 0


@dataclass(frozen=True, slots=True)
class DeviceAttrEx:
    """``struct ibv_device_attr_ex``, ibv_query_device_ex(3). What a device lacks is 0.

    - ``orig_attr``: the attributes of ibv_query_device(3).
    - ``device_cap_flags_ex``: ``orig_attr.device_cap_flags``, and those beyond 32 bits.
    - ``phys_port_cnt_ex``: ports.
    - ``comp_mask``: 0.
    - ``completion_timestamp_mask``, ``hca_core_clock``: the bits of time stamps, and their frequency in kHz.
    - ``max_wq_type_rq``: work queues without a queue pair.
    - ``raw_packet_caps``: what raw packets may have, a mask.
    - ``max_dm_size``: memory of the device, in bytes.
    - ``odp_caps``, ``tso_caps``, ``rss_caps``, ``packet_pacing_caps``, ``tm_caps``, ``cq_mod_caps``,
      ``pci_atomic_caps``: see their classes.
    """

    orig_attr: DeviceAttr
    device_cap_flags_ex: int = 0
    phys_port_cnt_ex: int = 1
    comp_mask: int = 0
    completion_timestamp_mask: int = 0
    hca_core_clock: int = 0
    max_wq_type_rq: int = 0
    raw_packet_caps: int = 0
    max_dm_size: int = 0
    odp_caps: ODPCaps = ODPCaps()
    tso_caps: TSOCaps = TSOCaps()
    rss_caps: RSSCaps = RSSCaps()
    packet_pacing_caps: PacketPacingCaps = PacketPacingCaps()
    tm_caps: TMCaps = TMCaps()
    cq_mod_caps: CQModerationCaps = CQModerationCaps()
    pci_atomic_caps: PCIAtomicCaps = PCIAtomicCaps()

    @classmethod
    def of(cls, attr: DeviceAttr) -> Self:
        """The attributes of a device that has no others than ``attr``."""
        return cls(attr, int(attr.device_cap_flags_ex), attr.phys_port_cnt)

    @property
    def xrc_odp_caps(self) -> int:
        """``odp_caps.xrc_odp_caps``, where C has it."""
        return self.odp_caps.xrc_odp_caps
