"""Memory windows beside a model of them: any sequence of binds, invalidations, resets and accesses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from random import Random

from fuzz.harness import Source, target
from rdmacm.errors import RdmaError
from rdmacm.progress.runtime import Runtime
from rdmacm.soft.device.memory import MemoryTable, RemoteMemory, SoftMR
from rdmacm.soft.device.memory_window import Bind, SoftMW
from rdmacm.verbs.enums import AccessFlag, MWType

_LOCAL, _WRITE, _READ, _ATOMIC, _BINDABLE, _ZERO = (AccessFlag(1 << bit) for bit in range(6))
_LENGTH = 64
_TOP = 1 << 64
_REGION_ACCESS = (_LOCAL | _BINDABLE, _BINDABLE, _LOCAL | _READ | _WRITE, _LOCAL | _BINDABLE | _READ)
_ACCESS = (_READ, _WRITE, _ATOMIC, _READ | _WRITE, AccessFlag(0), _READ | _ZERO, _READ | _WRITE | _ATOMIC | _ZERO)
_LENGTHS = (1, 8, 0, 63, 64, 65, _TOP - 1, 4)
#: Addresses relative to the region; the last ones are absolute.
_OFFSETS = (0, 0, 1, 56, 63, 64, -1)
_ABSOLUTE = (0, 1, 63, _TOP - 1)
_KINDS = ("bind", "invalidate", "access", "access", "reset", "deallocate", "allocate", "deregister", "bind", "access")


@dataclass
class _Model:
    """What is known of a window."""

    window: SoftMW
    domain: int
    key: int
    #: (region's number, queue pair's number, address, length, access); None while it is not bound.
    bound: tuple[int, int, int, int, AccessFlag] | None = None
    gone: bool = False

    @property
    def is_type_2(self) -> bool:
        return self.window.type is MWType.TYPE_2


class _World:
    """Two domains, three queue pairs (the third is of the second domain), four regions and some windows."""

    def __init__(self) -> None:
        self.table = MemoryTable(Random(1), Runtime())
        self.domains = (object(), object())
        self.qps = [RemoteMemory(self.table, self.domains[number == 2]) for number in range(3)]
        self.regions: list[SoftMR] = []
        self.buffers = [bytearray(range(number, number + _LENGTH)) for number in range(4)]
        self.registered = [True] * 4
        for number, access in enumerate(_REGION_ACCESS):
            domain = self.domains[number == 3]
            self.regions.append(self.table.register(domain, memoryview(self.buffers[number]), access))
        self.windows: list[_Model] = []
        for mw_type, domain in product(MWType, (0, 1)):
            self.allocate(mw_type, domain)

    def allocate(self, mw_type: MWType, domain: int) -> None:
        window = self.table.allocate(self.domains[domain], mw_type)
        self.windows.append(_Model(window, domain, window.rkey))

    def bind(self, number: int, model: _Model, region: int, addr: int, length: int, access: AccessFlag) -> bool:
        """Bind by a queue pair; compare the result with the rules."""
        domain, within = int(number == 2), self.regions[region]
        allowed = not model.gone and model.domain == domain
        if model.is_type_2:
            allowed = allowed and model.bound is None and length > 0
        else:
            allowed = allowed and not access & _ZERO
        if length:
            allowed = allowed and self.registered[region] and int(region == 3) == domain
            allowed = allowed and bool(_REGION_ACCESS[region] & _BINDABLE)
            allowed = allowed and not (access & (_WRITE | _ATOMIC) and not _REGION_ACCESS[region] & _LOCAL)
            allowed = allowed and addr >= within.addr and addr + length <= within.addr + _LENGTH
        key = model.key & ~0xFF | model.key + 1 & 0xFF
        bind = Bind(model.window, key, within if length else None, None, addr, length, int(access))
        done = self.qps[number].bind(bind)
        assert done == allowed, bind
        if done:
            model.key = key
            model.bound = (region, number, addr, length, access) if length else None
        return done

    def invalidate(self, number: int, model: _Model, error: int) -> None:
        owner = model.bound[1] if model.bound is not None and model.is_type_2 else None
        done = self.qps[number].invalidate(model.key ^ error)
        assert done == (owner == number and not error)
        if done:
            model.bound = None

    def access(self, number: int, model: _Model, addr: int, length: int, access: AccessFlag, error: int) -> None:
        view = self.qps[number].remote(model.key ^ error, addr, length, access)
        expected = None
        if model.bound is not None and not error and model.domain == int(number == 2):
            region, qp, start, size, allowed = model.bound
            offset = addr if allowed & _ZERO else addr - start
            if (qp == number or not model.is_type_2) and access & ~allowed == 0 and 0 <= offset <= size - length:
                begin = start - self.regions[region].addr + offset
                expected = bytes(self.buffers[region][begin : begin + length])
        assert (None if view is None else bytes(view)) == expected

    def reset(self, number: int) -> None:
        self.qps[number].close()
        for model in self.windows:
            if model.is_type_2 and model.bound is not None and model.bound[1] == number:
                model.bound = None

    def deregister(self, region: int) -> None:
        bound = sum(model.bound is not None and model.bound[0] == region for model in self.windows)
        assert self.regions[region].windows == bound
        try:
            self.regions[region].dereg()
        except RdmaError:
            assert bound
        else:
            assert not bound
            self.registered[region] = False


def window_steps() -> Iterator[bytes]:
    """Steps of :func:`memory_windows`: each window bound and used by each queue pair, in each region."""
    for number, window, region in product(range(3), range(4), range(4)):
        bind = bytes((0, number, window, region, 0, 0, 4, 3))
        used = b"".join(bytes((2, other, window, region, 0xC0, 0, 0, 1, 0, 0)) for other in range(3))
        yield bind + used + bytes((1, number, window, region, 0xC0, 0)) + used + bytes((5, number, window, region))


def _error(source: Source) -> int:
    """What to change in a key, mostly nothing."""
    number = source.number()
    return 0 if number < 0xE0 else 1 << number % 32


@target(window_steps, 240)
def memory_windows(data: bytes) -> None:
    """Binds are refused by the rules only, and a key opens exactly what the last bind says."""
    source, world = Source(data), _World()
    while not source.is_empty:
        kind, number = source.choice(_KINDS), source.number() % 3
        model, region = source.choice(world.windows), source.number() % 4
        bound = [each for each in world.windows if each.bound is not None]
        if kind in ("access", "invalidate") and bound and source.number() < 0xC0:
            model = source.choice(bound)
            assert model.bound is not None
            region, number, *_ = model.bound
        if kind in ("bind", "access"):
            absolute = source.number() > 0xE0
            addr = source.choice(_ABSOLUTE if absolute else _OFFSETS)
            addr = addr if absolute else world.regions[region].addr + addr
            length, access = source.choice(_LENGTHS), source.choice(_ACCESS)
        if kind == "bind":
            world.bind(number, model, region, addr, length, access)
        elif kind == "access":
            world.access(number, model, addr, length, access & ~_ZERO, _error(source))
        elif kind == "invalidate":
            world.invalidate(number, model, _error(source))
        elif kind == "reset":
            world.reset(number)
        elif kind == "deallocate":
            model.window.dealloc()
            model.gone, model.bound = True, None
        elif kind == "allocate" and len(world.windows) < 8:
            world.allocate(source.choice(list(MWType)), number % 2)
        elif kind == "deregister":
            world.deregister(region)
