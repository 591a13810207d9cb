"""Counters of drops, errors and connection management messages, as ``rdma statistic`` has them for a kernel device.

A software device lives in its process, and so do its counters: they begin at 0 with the process and end with it. The
kernel counts for all processes together, since a device was added.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Counters:
    """What a provider has counted, at one moment. ``docs/debugging.md`` describes each counter."""

    #: By name of the device, for each that was used and for each of the kernel's: what
    #: :meth:`rdmacm.Context.query_counters` returns.
    devices: dict[str, dict[str, int]]
    #: The connection managers of all devices: messages sent (``tx_req``) and received (``rx_req``) by type, repetitions
    #: among those sent (``tx_retries``), and received messages without effect by reason (``dropped_backlog``).
    cm: dict[str, int]
    #: UDP port 4791: packets that no queue pair got, packets that could not be sent, and ICMP errors. It has only what
    #: has happened.
    udp: dict[str, int]
    #: Exceptions that are faults of this package, by part (``queue_pair``). Empty if all is well.
    errors: dict[str, int]
    #: UDP port 4791: packets and bytes that this process has sent and received (``sent_pkts``, ``sent_bytes``,
    #: ``rcvd_pkts``, ``rcvd_bytes``), headers from BTH on included, packets that the system has refused to send
    #: (``send_err``), and those of multicast groups (``multicast_xmit_packets``, ``multicast_rcv_packets``). Empty for
    #: the kernel's devices: these count each.
    traffic: dict[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """One line of text for each device and part, with the counters that are not 0."""
        parts = (*self.devices.items(), ("connection managers", self.cm), ("UDP", self.udp), ("packets", self.traffic))
        texts = [(name, ", ".join(f"{each} {count}" for each, count in part.items() if count)) for name, part in parts]
        return [f"counters of {name}: {text or 'all 0'}" for name, text in texts]
