"""A host on a network in memory in virtual time, with an event channel."""

from __future__ import annotations

from dataclasses import dataclass

from rdmacm import CmEventType, EventChannel
from rdmacm.soft.provider import SoftProvider
from rdmacm.testing import MemoryNetwork, VirtualClock


@dataclass
class World:
    """A host on 10.0.0.0/24 whose neighbour 10.0.0.2 answers and whose gateway is 10.0.0.254."""

    network: MemoryNetwork
    eth0: int
    clock: VirtualClock
    provider: SoftProvider
    channel: EventChannel

    def events(self) -> list[tuple[CmEventType, int]]:
        """All waiting events, acknowledged."""
        found = []
        while True:
            try:
                with self.channel.get_event(0) as event:
                    found.append((event.type, event.status))
            except BlockingIOError:
                return found

    def one(self, kind: CmEventType, status: int = 0) -> None:
        assert self.events() == [(kind, status)]
