"""Two ends of the stream protocol of rsocket(7) and the memory between them."""

from __future__ import annotations

import sys
from collections import deque

from rdmacm.proto.rsocket.engine import StreamEngine, Work
from rdmacm.proto.rsocket.messages import (
    MAPPING_LENGTH,
    TARGET_LENGTH,
    TARGETS,
    ConnectionData,
    Target,
    own_flags,
)

#: Where the memory of an end begins.
_CONTROL, _RECEIVING = 0x1000, 0x100000


class Memory:
    """The memory of one end, and its connection data. ``number`` is in its addresses and keys."""

    def __init__(self, number: int, *, size: int = 4096, credits: int = 32, mappings: int = 0, flags: int = -1) -> None:
        self.control = bytearray(TARGETS * TARGET_LENGTH + mappings * MAPPING_LENGTH)
        self.receiving, self.sending = bytearray(size), bytearray(size)
        base = number << 32
        self.regions = {
            0x10 + number: (base + _CONTROL, self.control),
            0x20 + number: (base + _RECEIVING, self.receiving),
        }
        control, receiving = Target(base + _CONTROL, 0x10 + number, TARGETS), base + _RECEIVING
        self.data = ConnectionData(
            credits,
            mappings,
            control,
            Target(receiving, 0x20 + number, size // 2),
            own_flags() if flags < 0 else flags,
        )

    def write(self, address: int, key: int, data: bytes) -> None:
        """An RDMA WRITE of the peer; AssertionError where a device would refuse it."""
        if data:
            start, memory = self.regions[key]
            assert 0 <= address - start <= len(memory) - len(data), (hex(address), len(data))
            memory[address - start : address - start + len(data)] = data


class Pair:
    """Two engines. What one wants posted is executed at the other in order, when :meth:`deliver` says so."""

    def __init__(
        self,
        first: Memory | None = None,
        second: Memory | None = None,
        *,
        slots: int = 32,
        has_immediates: bool = True,
        starts: bool = True,
    ) -> None:
        self.memories = first or Memory(1), second or Memory(2)
        self.engines = tuple(
            StreamEngine(
                self.memories[here].data,
                self.memories[1 - here].data,
                memoryview(self.memories[here].control),
                memoryview(self.memories[here].sending),
                memoryview(self.memories[here].receiving),
                slots,
                has_immediates=has_immediates,
            )
            for here in (0, 1)
        )
        self._slots = slots
        #: Work of each end that has arrived at the other and is not completed.
        self._arrived: tuple[deque[Work], deque[Work]] = deque(), deque()
        if starts:
            self.settle()

    def arrive(self, sender: int, count: int = 1 << 30) -> int:
        """Execute work of one end at the other; return how many requests there were."""
        engine, peer, memory = self.engines[sender], self.engines[1 - sender], self.memories[1 - sender]
        done = 0
        while engine.work and done < count:
            work = engine.work.popleft()
            data = work.inline or b"".join(
                self.memories[sender].sending[offset : offset + length] for offset, length in work.local
            )
            if work.is_send:
                peer.received_send(data)
            else:
                memory.write(work.remote_addr, work.key, data)
                if work.imm is not None:
                    peer.received(work.imm)
            self._arrived[sender].append(work)
            assert len(self._arrived[sender]) <= self._slots  # the send queue has no room for more
            done += 1
        return done

    def complete(self, sender: int, count: int = 1 << 30) -> None:
        """Complete work that has arrived."""
        number = min(count, len(self._arrived[sender]))
        for _ in range(number):
            self._arrived[sender].popleft()
        self.engines[sender].completed(number)

    def settle(self) -> None:
        """Deliver everything, until nothing is left to do."""
        while any(engine.work for engine in self.engines) or any(self._arrived):
            for sender in (0, 1):
                self.arrive(sender)
                self.complete(sender)

    def take(self, end: int, size: int = 1 << 30) -> bytes:
        """What the application of one end reads."""
        engine = self.engines[end]
        found = b"".join(engine.pieces(size))
        engine.consume(len(found))
        return found


#: The other byte order than this host's.
OTHER_FLAGS = own_flags() ^ 1
OTHER_ORDER = "big" if sys.byteorder == "little" else "little"
