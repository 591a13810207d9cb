"""What happened on a simulated network, packet by packet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

from rdmacm.testing.faults import Fate, Packet

__all__ = ["FabricLog", "LogEntry"]

#: What an entry costs beside its packet, roughly.
_ENTRY = 300


@dataclass(frozen=True, slots=True)
class LogEntry:
    """At ``time`` (virtual seconds) this became of ``packet``; ``data`` are its bytes as they are then."""

    time: float
    fate: Fate
    packet: Packet
    data: bytes

    def __str__(self) -> str:
        # Not a CRC-32: over a packet that ends with its own, that is the same whatever the packet says.
        digest = blake2b(self.data, digest_size=4).hexdigest()
        return f"{self.time:.9f} {self.packet} sum {digest} {self.fate.value}"


class FabricLog:
    """Entries in order of time. Runs with the same seed and the same calls have equal logs.

    Of a long run the last ``limit`` bytes are kept; ``forgotten`` counts the entries before them.
    """

    def __init__(self, limit: int = 64 << 20) -> None:
        self.limit = limit
        self.forgotten = 0
        self._entries: deque[LogEntry] = deque()
        self._size = 0

    def append(self, entry: LogEntry) -> None:
        """Add an entry, and forget old ones where there is no room."""
        self._entries.append(entry)
        self._size += _ENTRY + len(entry.data)
        while self._size > self.limit:
            self._size -= _ENTRY + len(self._entries.popleft().data)
            self.forgotten += 1

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[LogEntry]:
        return iter(self._entries)

    def __getitem__(self, index: int) -> LogEntry:
        return self._entries[index]

    def select(self, fate: Fate | None = None, kind: str | None = None) -> list[LogEntry]:
        """The entries of one fate, of packets of one :attr:`Packet.kind`, or both."""
        return [
            entry
            for entry in self._entries
            if (fate is None or entry.fate is fate) and (kind is None or entry.packet.kind == kind)
        ]

    def count(self, fate: Fate | None = None, kind: str | None = None) -> int:
        """How many :meth:`select` finds."""
        return len(self.select(fate, kind))

    def to_text(self) -> str:
        """A line for each entry: time, hosts, packet, a checksum of its bytes, fate. Equal for equal runs."""
        head = [f"... {self.forgotten} earlier entries are forgotten"] if self.forgotten else []
        return "\n".join([*head, *map(str, self._entries)])

    def __repr__(self) -> str:
        return f"<FabricLog {len(self)} entries>"
