"""Memory windows in the compiled core: by random calls they do what those in Python do."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from rdmacm import RdmaError
from rdmacm.progress.runtime import Runtime
from rdmacm.proto.core_choice import compiled
from rdmacm.soft.device.memory import MemoryTable, SoftMR
from rdmacm.soft.device.memory_window import Bind
from rdmacm.verbs.enums import AccessFlag, MWType
from support.rows import for_each

pytestmark = pytest.mark.skipif(compiled is None, reason="the compiled core is not built (python3 dev.py core)")

BASE, SIZE = 0x1000, 64
READ, WRITE, ATOMIC = AccessFlag.REMOTE_READ, AccessFlag.REMOTE_WRITE, AccessFlag.REMOTE_ATOMIC
LOCAL, BIND, ZERO_BASED = AccessFlag.LOCAL_WRITE, AccessFlag.MW_BIND, AccessFlag.ZERO_BASED
PDS = object(), object()


class Side:
    """Regions and windows of a device."""

    def __init__(self, *, with_core: bool) -> None:
        self.table = MemoryTable(random.Random(7), Runtime(), with_core=with_core)
        self.regions = [
            self._register(PDS[0], LOCAL | WRITE | READ | ATOMIC | BIND),
            self._register(PDS[0], READ | BIND),
            self._register(PDS[0], LOCAL | WRITE | READ),
            self._register(PDS[1], LOCAL | WRITE | READ | BIND),
        ]
        self.windows = [self.table.allocate(PDS[0], kind) for kind in (*MWType, *MWType)]
        self.windows.append(self.table.allocate(PDS[1], MWType.TYPE_2))

    def _register(self, pd: object, access: AccessFlag) -> SoftMR:
        region = self.table.register(pd, memoryview(bytearray(range(SIZE))), access)
        region.addr = BASE  # the same in both tables
        region.rereg(None, None, None)
        return region

    def bind(self, pd: object, qp: int, window: int, low: int, region: int | None, *range_: int) -> bool:
        bound = self.windows[window]
        chosen = None if region is None else self.regions[region]
        rkey = low if low > 0xFF else bound.rkey & ~0xFF | low
        bind = Bind(bound, rkey, chosen, None, *range_)
        done = self.table.bindings.bind(pd, qp, bind)
        if done:
            bound.posted(bind)
        return done

    def find(self, pd: object, qp: int, window: int, change: int, *range_: int) -> bytes | None:
        view = self.table.bindings.find_window(pd, qp, self.windows[window].rkey ^ change, *range_)
        return None if view is None else bytes(view)

    def invalidate(self, pd: object, qp: int, window: int, change: int) -> bool:
        return self.table.bindings.invalidate(pd, qp, self.windows[window].rkey ^ change)

    def deregister(self, region: int) -> int | None:
        """The errno, if it is bound."""
        try:
            self.regions[region].dereg()
        except RdmaError as error:
            return error.errno
        return None

    @property
    def state(self) -> object:
        numbers = [bool(window.binding.number) for window in self.windows]
        return numbers, [self.table.bindings.bound(region.lkey) for region in self.regions]


def call_of(source: random.Random) -> Callable[[Side], object]:
    """The same call for both, mostly one that is allowed."""
    window = source.randrange(5)
    pd = PDS[(window == 4) ^ (source.random() < 0.05)]
    qp = 1 + (source.random() < 0.1)
    change = 0 if source.random() < 0.95 else 1 << source.randrange(32)
    start = (
        source.choice((0, 0, 0, 1, 1, 5)) if source.random() < 0.9 else source.choice((-1, SIZE - 1, SIZE, SIZE + 1))
    )
    length = source.choice((1, 4, SIZE - 5)) if source.random() < 0.7 else source.choice((0, SIZE - 1, SIZE, 1 << 63))
    access = source.choice((0, READ, WRITE)) if source.random() < 0.8 else source.choice((READ | WRITE, ATOMIC, LOCAL))
    kind = source.random()
    if kind < 0.3:
        if source.random() < 0.6:
            access |= READ | WRITE
        if source.random() < 0.2:
            access |= ZERO_BASED
        region = source.choice((0, 0, 0, 1, 2, 3, None)) if window < 4 else 3
        low = source.randrange(256) if source.random() < 0.95 else source.getrandbits(31) | 0x100
        return lambda side: side.bind(pd, qp, window, low, region, BASE + start, length, int(access))
    if kind < 0.8:
        address = (BASE * (source.random() < 0.7) + start) % (1 << 64)
        return lambda side: side.find(pd, qp, window, change, address, length, int(access))
    if kind < 0.97:
        return lambda side: side.invalidate(pd, qp, window, change)
    return lambda side: side.table.bindings.free_windows(qp)


@for_each("seed", range(4))
def test_core_and_python_agree(seed: int) -> None:
    source = random.Random(seed)
    sides = [Side(with_core=with_core) for with_core in (True, False)]
    outcomes = set()
    for step in range(3000):
        call = call_of(source)
        core, python = (call(side) for side in sides)
        assert core == python, step
        assert sides[0].state == sides[1].state, step
        outcomes.add(str(core)[:4])
    assert {"True", "Fals", "None"} <= outcomes
    for index in range(4):
        assert sides[0].deregister(index) == sides[1].deregister(index)
    for side in sides:
        for window in side.windows:
            window.dealloc()
    assert sides[0].state == sides[1].state
    assert [side.bind(PDS[0], 1, 0, 5, 2, BASE, 1, int(READ)) for side in sides] == [False, False]
