"""Timeouts as CM messages encode them: 5-bit exponents of 4.096 µs."""

from __future__ import annotations

from functools import lru_cache

#: The largest exponent that is honoured, 65 seconds. The 5 bits allow a peer to ask for hours.
MAX_EXPONENT = 24

#: Results of the functions that are kept: each connection asks for some of the same.
_MOST_KEPT = 64

_SECONDS = [(1 << max(exponent - 8, 0)) / 1000 for exponent in range(MAX_EXPONENT + 1)]


@lru_cache(_MOST_KEPT)
def seconds(exponent: int) -> float:
    """The seconds of an exponent, rounded as Linux does: to a power of two of milliseconds."""
    return _SECONDS[min(MAX_EXPONENT, exponent)]  # min() takes longer


@lru_cache(_MOST_KEPT)
def ack_timeout(ca_ack_delay: int, packet_life_time: int) -> int:
    """The local ACK timeout for a path with a packet life time, to a peer with a CA ACK delay; all are exponents.

    It is twice the packet life time plus the CA ACK delay. The sum of two powers of two is rounded as Linux does: up to
    twice the larger one, if the smaller one is at least half of it; else down to the larger one.
    """
    timeout = packet_life_time + 1
    if timeout >= ca_ack_delay:
        timeout += ca_ack_delay >= timeout - 1
    else:
        timeout = ca_ack_delay + (timeout >= ca_ack_delay - 1)
    return min(timeout, 31)
