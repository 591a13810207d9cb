"""Times as the messages encode them: 5-bit exponents of 4.096 µs."""

from __future__ import annotations

__all__ = ["LONGEST", "ack_timeout", "seconds"]

#: The greatest exponent that counts, 65 seconds. The wire could ask for hours, and a stranger would.
LONGEST = 24

_SECONDS = [(1 << max(exponent - 8, 0)) / 1000 for exponent in range(LONGEST + 1)]


def seconds(exponent: int) -> float:
    """What an exponent means, rounded the way Linux rounds it: to a power of two of milliseconds."""
    return _SECONDS[min(LONGEST, exponent)]


def ack_timeout(ca_ack_delay: int, packet_life_time: int) -> int:
    """Local ACK timeout of a path with that packet life time to a peer with that ack delay: all are exponents."""
    timeout = packet_life_time + 1
    if timeout >= ca_ack_delay:
        timeout += ca_ack_delay >= timeout - 1
    else:
        timeout = ca_ack_delay + (timeout >= ca_ack_delay - 1)
    return min(timeout, 31)
