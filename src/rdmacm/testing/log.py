"""The packet log of a simulated network."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

from rdmacm.testing.diagram import capture_of, diagram
from rdmacm.testing.faults import FabricPacket, Outcome

#: Approximate memory of an entry without the packet's bytes.
_ENTRY_BYTES = 300


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One outcome of one packet.

    - ``time``: in seconds of virtual time.
    - ``outcome``: what has happened to the packet.
    - ``packet``: the packet as it was sent.
    - ``data``: its bytes at this time; corruption changes them.
    """

    time: float
    outcome: Outcome
    packet: FabricPacket
    data: bytes

    def __str__(self) -> str:
        # Not a CRC-32: over data that ends with its own CRC-32 it is a constant.
        digest = blake2b(self.data, digest_size=4).hexdigest()
        return f"{self.time:.9f} {self.packet} sum {digest} {self.outcome.value}"


class FabricLog:
    """A sequence of entries in order of time. Runs with the same seed and the same calls have equal logs.

    Attributes:

    - ``limit``: maximum memory in bytes; the oldest entries are discarded.
    - ``discarded``: how many entries have been discarded.
    """

    def __init__(self, limit: int = 64 << 20) -> None:
        self.limit = limit
        self.discarded: int = 0
        self._entries: deque[LogEntry] = deque()
        self._size = 0

    def _append(self, entry: LogEntry) -> None:
        """Add an entry."""
        self._entries.append(entry)
        self._size += _ENTRY_BYTES + len(entry.data)
        while self._size > self.limit:
            self._size -= _ENTRY_BYTES + len(self._entries.popleft().data)
            self.discarded += 1

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[LogEntry]:
        return iter(self._entries)

    def __getitem__(self, index: int) -> LogEntry:
        return self._entries[index]

    def select(self, outcome: Outcome | None = None, kind: str | None = None) -> list[LogEntry]:
        """Return the entries of one outcome, of packets of one :attr:`FabricPacket.kind`, or both."""
        return [
            entry
            for entry in self._entries
            if (outcome is None or entry.outcome is outcome) and (kind is None or entry.packet.kind == kind)
        ]

    def count(self, outcome: Outcome | None = None, kind: str | None = None) -> int:
        """Return the number of entries that :meth:`select` returns."""
        return len(self.select(outcome, kind))

    def to_text(self) -> str:
        """Return one line for each entry: time, packet, a checksum of its bytes, outcome. Equal for equal runs."""
        head = [f"... {self.discarded} earlier entries were discarded"] if self.discarded else []
        return "\n".join([*head, *map(str, self._entries)])

    def to_diagram(self, limit: int | None = None) -> str:
        """Return a sequence diagram: a column for each host, an arrow for each entry; of the last ``limit`` entries."""
        return diagram(list(self._entries), limit, self.discarded)

    def write_pcapng(self, path: str | os.PathLike[str]) -> int:
        """Write the packets to a capture file for Wireshark, each when it arrived or was dropped; returns how many.

        A comment of each says from which host to which it went, and what happened to it. The times begin at 1970.
        """
        blocks = capture_of(self._entries)
        with open(path, "wb") as file:
            file.writelines(blocks)
        return len(blocks) - 1

    def __repr__(self) -> str:
        return f"<FabricLog {len(self)} entries>"
