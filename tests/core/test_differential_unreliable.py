"""The same for unreliable connections: no packet is answered, and a message that lacks one is dropped."""

from __future__ import annotations

from typing import ClassVar, cast

import pytest

from core.test_differential import OPCODES, SEEDS, Run, compare_seed, mischief_of
from rdmacm.enums import WROpcode
from rdmacm.proto.core_choice import compiled, description
from rdmacm.proto.roce.rc.engine import RcEngine
from rdmacm.proto.roce.uc import UnreliableEngine
from support.rc import UC_ENGINES
from support.rows import for_each

pytestmark = pytest.mark.skipif(compiled is None, reason=f"runs {description()}")

_DATA = (WROpcode.SEND, WROpcode.SEND_WITH_IMM, WROpcode.RDMA_WRITE, WROpcode.RDMA_WRITE_WITH_IMM)


class UnreliableRun(Run):
    opcodes: ClassVar[tuple[WROpcode, ...]] = (
        *(opcode for opcode in OPCODES if opcode in _DATA),
        *(WROpcode.BIND_MW, WROpcode.LOCAL_INV),
    )
    fields: ClassVar[list[tuple[str, str]]] = [
        *((name, name) for name in ("qp_num", "failed", "send_failed", "can_send", "drained", "deadline")),
        *(("_identification", "identification"), ("_is_paused", "paused")),
        *(("_state", "operation"), ("_expected_psn", "expected_psn")),
    ]

    def make(self, index: int) -> RcEngine:
        engine = UC_ENGINES["c" if self.with_core else "python"]
        return cast("RcEngine", engine(index + 1, self.memory[index], self.queues[index], self.counters[index]))

    def post(self, end: RcEngine, number: int) -> None:
        """Requests may fail, and the send queue be in SQD or SQE."""
        if self.often(0.05):
            end.pause()
        if self.random.random() < 0.3 and (not cast("UnreliableEngine", end).send_failed or self.random.random() < 0.5):
            end.resume()
        super().post(end, number)


@for_each("seed", range(SEEDS))
def test_core_and_python_agree(seed: int) -> None:
    compare_seed(seed, mischief_of(seed), UnreliableRun)


@for_each("seed", range(SEEDS // 3))
def test_both_agree_without_faults(seed: int) -> None:
    compare_seed(seed, 0.0, UnreliableRun)
