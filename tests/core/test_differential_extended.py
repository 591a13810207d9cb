"""The same for extended reliable connections: an initiator, and a target whose domain has two shared receive queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

import pytest

from core.test_differential import OPCODES, SEEDS, Memory, Run, compare_seed, mischief_of
from rdmacm.enums import WROpcode
from rdmacm.proto.core_choice import compiled, description
from rdmacm.proto.roce.engines import make_xrc_initiator, make_xrc_target
from rdmacm.proto.roce.rc.engine import RcEngine
from rdmacm.proto.roce.xrc import (
    SharedQueue,
    TargetEngine,
    XrcInitiator,
    XrcTarget,
)
from rdmacm.proto.work import WC, RecvWork
from rdmacm.soft.device.memory import RemoteMemory
from rdmacm.soft.device.memory_window import SoftMW
from rdmacm.soft.device.shared_receive_queue import PythonReceives
from support.compiled import Receiver
from support.rows import for_each

if TYPE_CHECKING:
    from rdmacm.proto._core import XrcDomain

pytestmark = pytest.mark.skipif(compiled is None, reason=f"runs {description()}")

#: The queues of the domain.
NUMBERS = (1, 0xABCDEF)


class ExtendedRun(Run):
    opcodes: ClassVar[tuple[WROpcode, ...]] = tuple(
        opcode for opcode in OPCODES if opcode not in (WROpcode.FLUSH, WROpcode.ATOMIC_WRITE)
    )
    # Those of type 2 are for the queue pair that has bound them, and a target binds nothing.
    windows: ClassVar[int] = 1

    def make_memory(self) -> tuple[Memory, ...]:
        """That of the initiator, and those of the queues, which are on one device."""
        first, second = (Memory(index, self.size, with_core=self.with_core) for index in range(2))
        return first, second, Memory(2, self.size, with_core=self.with_core, table=second.table)

    def make_queues(self) -> tuple[PythonReceives | None, ...]:
        self.domain: XrcDomain | None = None
        self.open = dict(zip(NUMBERS, self.memory[1:], strict=True))
        if not self.with_core:
            self.receives = {number: PythonReceives(48) for number in NUMBERS}
            self.touched = {number: RemoteMemory(memory.table, memory.pd) for number, memory in self.open.items()}
            return tuple(self.receives.values())
        assert compiled is not None
        self.domain = compiled.XrcDomain(self.memory[1].regions)
        queues = []
        for number, memory in self.open.items():
            queues.append(compiled.SharedReceives(48, 32, memory.regions, memory.pd, None))
            self.domain.add(number, queues[-1], None)
        return tuple(queues)

    def make(self, index: int) -> RcEngine:
        counters = self.counters[index]
        if index == 0:
            make = make_xrc_initiator if self.with_core else XrcInitiator
            return cast("RcEngine", make(1, self.memory[0], None, counters))
        memory = RemoteMemory(self.memory[1].table, self)
        if not self.with_core:
            return XrcTarget(2, memory, None, counters, find_queue=self.find)
        return cast("RcEngine", make_xrc_target(2, memory, counters, self.find, self.domain))

    def find(self, number: int) -> SharedQueue | None:
        return (self.touched[number], self.receives[number]) if number in self.open else None

    def post(self, end: RcEngine, number: int) -> None:
        if end is self.ends[0]:
            self.post_sends(end, number)
            return
        self.post_receives(end, number)
        for memory in self.memory[1:]:
            bind = self.bound(memory) if self.random.random() < 0.2 else None
            if bind is not None:
                self.observed.append(memory.bind(bind))
        if len(self.open) > 1 and self.often(0.01):
            del self.open[NUMBERS[1]]
            if self.domain is not None:
                self.domain.remove(NUMBERS[1])

    def receive(self, end: Receiver, work: RecvWork) -> None:
        queue = self.random.choice(self.queues)
        assert queue is not None
        self.observed.append(queue.post_work(work))

    def target(self, end: RcEngine) -> tuple[Memory, int]:
        number = self.random.choice(NUMBERS)
        return self.memory[1 + NUMBERS.index(number)], number ^ self.often(0.01)

    def invalidated(self, memory: Memory, window: SoftMW) -> int:
        """No window of the target's can be invalidated."""
        if memory is self.memory[0]:
            return super().invalidated(memory, window)
        return window.rkey if self.often(0.02) else 0

    def changed(self, sender: int, packet: bytes) -> bytes:
        """Also packets that name another queue."""
        if sender or len(packet) < 20 or self.random.random() < 0.9:
            return super().changed(sender, packet)
        changed = packet[:12] + self.random.choice(NUMBERS).to_bytes(4, "big") + packet[16:-4]
        return changed + self.flows[sender].seal([changed])

    def completed(self, end: RcEngine) -> list[WC]:
        if end is self.ends[0]:
            return super().completed(end)
        target = cast("TargetEngine", end)
        found = target.take_completed()
        self.observed += [target.srqn, [number for number, _ in found], len(end.completed)]
        return [wc for _, wc in found]


@for_each("seed", range(SEEDS))
def test_core_and_python_agree(seed: int) -> None:
    compare_seed(seed, mischief_of(seed), ExtendedRun)


@for_each("seed", range(SEEDS // 3))
def test_both_agree_without_faults(seed: int) -> None:
    compare_seed(seed, 0.0, ExtendedRun)
