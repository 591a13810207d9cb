"""Descriptors that a process has for others."""

from __future__ import annotations

from rdmacm.soft.wire.udp import UdpWire

__all__ = ["held_for_others"]


def held_for_others(wire: UdpWire) -> int:
    """How many sockets a wire has for other processes that share its UDP port: connections to them, inherited slots.

    Processes come and go on the port while tests run beside each other, so they are no leak.
    """
    # Copies, because another thread may change them meanwhile.
    listening = [each.receiver for each in [*wire._listeners.by_key.values()]]
    receivers = [*wire._receivers, *(receiver for receiver in listening if receiver is not None)]
    connections = len(wire._sender._connections) + sum(len(receiver._senders) for receiver in receivers)
    return connections + sum(len(slot.sockets) for slot in [*wire._inheritance._slots])
