"""Packets that every process of a port group gets, because they name none."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence

from rdmacm.soft.wire.base import Received
from rdmacm.soft.wire.port_group import PortGroup

#: Packets that are announced at once, and how many more a second. The others reach the process that reads them alone.
_BURST, _RATE = 64, 16
#: Seconds after which the processes are looked for again.
_LASTS = 1.0


class Announcer:
    """Forwards packets to the other processes."""

    def __init__(self) -> None:
        self._left: float = _BURST
        #: When ``_left`` was counted, and when the names were found, in seconds of time.monotonic().
        self._counted_at = 0.0
        self._found_at = 0.0
        #: Where the others receive.
        self._names: list[str] = []

    def send(
        self,
        group: PortGroup,
        own: Container[int],
        packet: Received,
        forward: Callable[[Sequence[str], Received], bool],
    ) -> None:
        """Forward a packet to every process of the group but the one with the slots ``own``."""
        now = time.monotonic()
        self._left = min(_BURST, self._left + (now - self._counted_at) * _RATE)
        self._counted_at = now
        if self._left < 1:
            return
        self._left -= 1
        if now >= self._found_at + _LASTS:
            self._found_at = now
            self._names = group.other_names(own)
        for name in self._names:
            forward((name,), packet)
