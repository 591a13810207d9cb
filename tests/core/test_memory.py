"""What the compiled core holds in memory: regions by key, buffers under way, and objects that are part of cycles."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Callable

import pytest

from rdmacm.enums import AccessFlag, WCOpcode, WROpcode
from rdmacm.progress.runtime import Runtime
from rdmacm.proto.core_choice import compiled, description
from rdmacm.proto.engine import EngineCounters, RtrAttributes, RtsAttributes
from rdmacm.proto.roce.rc.engine import RcEngine
from rdmacm.proto.work import RecvWork, SendWork
from rdmacm.soft.device.memory import MemoryTable, RemoteMemory
from rdmacm.soft.device.memory_window import Bind
from rdmacm.verbs.enums import MWType
from support.compiled import assert_collected, is_held
from support.netns import python_environment
from support.rc import ALL, BASE, ENGINES, RKEY, Region, connect

pytestmark = pytest.mark.skipif(compiled is None, reason=f"runs {description()}")


def engine_with(qp_num: int, memory: Region) -> RcEngine:
    return ENGINES["c"](qp_num, memory, None, EngineCounters())


def engines(*memory: Region) -> tuple[RcEngine, RcEngine]:
    ends = tuple(engine_with(index + 1, region) for index, region in enumerate(memory or (Region(), Region())))
    for index, end in enumerate(ends):
        connect(end, index)
        end.ready_to_receive(RtrAttributes(2 - index, 5, path_mtu=256, access=ALL))
        end.ready_to_send(RtsAttributes(5))
    return ends[0], ends[1]


def exchange(ends: tuple[RcEngine, RcEngine], limit: int = 64) -> None:
    """Deliver what each end has to send, once."""
    for sender, receiver in (ends, ends[::-1]):
        for pieces, segment in sender.datagrams(0.0, limit, 0):
            receiver.received(memoryview(b"".join(pieces)), segment, 0.0)


@pytest.mark.parametrize("opcode", [WROpcode.SEND, WROpcode.RDMA_WRITE, WROpcode.RDMA_READ])
def test_buffers_are_held_until_they_complete(opcode: WROpcode) -> None:
    ends = engines()
    local, inbox = bytearray(600), bytearray(600)
    view = memoryview(inbox)
    ends[1].post_recv(RecvWork(1, (view,)))
    with pytest.raises(BufferError):
        view.release()
    ends[0].post_send(SendWork(2, opcode, (memoryview(local),), remote_addr=BASE, rkey=RKEY))
    del view
    assert is_held(local)
    assert is_held(inbox)
    for _ in range(3):
        exchange(ends)
    assert [wc.status.name for end in ends for wc in end.completions()][:1] == ["SUCCESS"]
    assert not is_held(local)
    assert is_held(inbox) is (opcode is not WROpcode.SEND)


def test_engine_that_is_deleted_lets_go_of_buffers() -> None:
    ends = engines()
    buffers = [bytearray(1000) for _ in range(3)]
    ends[0].post_recv(RecvWork(1, (memoryview(buffers[0]),)))
    ends[0].post_send(SendWork(2, WROpcode.SEND, (memoryview(buffers[1]),)))
    ends[1].post_recv(RecvWork(3, (memoryview(buffers[2]),)))
    for pieces, segment in ends[0].datagrams(0.0, 2, 0):  # a message in progress
        ends[1].received(memoryview(b"".join(pieces)), segment, 0.0)
    del ends
    assert not any(map(is_held, buffers))


def test_regions_are_collected() -> None:
    class Domain:
        regions: object

    assert compiled is not None
    domain = Domain()
    domain.regions = regions = compiled.Regions()
    regions.add(7, 0, memoryview(bytearray(8)), 0, domain)
    found = weakref.ref(domain)
    del domain, regions
    gc.collect()
    assert found() is None


@pytest.mark.parametrize("opcode", [WROpcode.RDMA_WRITE, WROpcode.RDMA_READ])
def test_region_deregistered_between_two_packets(opcode: WROpcode) -> None:
    memory = Region()
    ends = engines(Region(), memory)
    ends[0].post_send(SendWork(2, opcode, (memoryview(bytearray(b"x" * 2000)),), remote_addr=BASE, rkey=RKEY))
    exchange(ends, 3)
    memory.remove(RKEY)
    assert not is_held(memory.bytes)
    before = bytes(memory.bytes)
    exchange(ends)
    exchange(ends)
    assert [wc.status.name for wc in ends[0].completions()] == ["REM_ACCESS_ERR"]
    assert bytes(memory.bytes) == before


def test_region_table_is_a_dictionary() -> None:
    """Random keys, many of which are added and removed, are found as in a dictionary."""
    assert compiled is not None
    source = random.Random(1)
    keys = [source.getrandbits(32) | 1 for _ in range(300)]
    regions = compiled.Regions()
    known: dict[int, bytearray] = {}
    for step in range(4000):
        key = source.choice(keys)
        if key in known:
            regions.remove(key)
            assert not is_held(known.pop(key))
        else:
            known[key] = bytearray(8)
            regions.add(key, 0, memoryview(known[key]), int(AccessFlag.REMOTE_READ), regions)
        assert len(regions) == len(known)
        if step % 100 == 0:
            assert all(map(is_held, known.values()))
    assert regions.remove(2) == regions.bound(2) == 0, "there is none"
    with pytest.raises(ValueError, match="in use"):
        regions.add(next(iter(known)), 0, memoryview(b""), 0, None)
    with pytest.raises(ValueError, match="in use"):
        regions.add(0, 0, memoryview(b""), 0, None)
    with pytest.raises(BufferError):
        regions.add(2, 0, memoryview(b"read-only"), int(AccessFlag.REMOTE_WRITE), None)


def test_range_of_a_region() -> None:
    """The last byte can be written, one after it and ranges past 2^64 cannot."""
    for address, length, expected in (
        (BASE, 1 << 16, "SUCCESS"),
        (BASE + (1 << 16) - 1, 1, "SUCCESS"),
        (BASE + (1 << 16) - 1, 2, "REM_ACCESS_ERR"),
        (BASE - 1, 1, "REM_ACCESS_ERR"),
        (2**64 - 1, 1, "REM_ACCESS_ERR"),
        (2**64 - 1, 4096, "REM_ACCESS_ERR"),
        (BASE, (1 << 16) + 1, "REM_ACCESS_ERR"),
        (2**64 - 1, 0, "SUCCESS"),  # a request for no bytes names no memory
    ):
        ends = engines()
        ends[0].post_send(
            SendWork(1, WROpcode.RDMA_WRITE, (memoryview(bytearray(length)),), remote_addr=address, rkey=RKEY)
        )
        for _ in range(8):
            exchange(ends)
        assert [wc.status.name for wc in ends[0].completions()] == [expected], (address, length)


def test_engines_and_buffers_in_a_cycle_are_collected() -> None:
    def post(sent: memoryview, received: memoryview) -> object:
        ends = engines()
        ends[0].post_send(SendWork(1, WROpcode.SEND, (sent,)))
        ends[1].post_recv(RecvWork(2, (received,)))
        return ends

    assert_collected(post)


def test_binds_under_way_in_a_cycle_are_collected() -> None:
    table = MemoryTable(random.Random(1), Runtime())

    class Owner:
        bind: Bind

    owner, memory = Owner(), RemoteMemory(table, object())
    end = ENGINES["c"](1, memory, None, EngineCounters())
    connect(end, 0)
    end.ready_to_receive(RtrAttributes(2, 5, path_mtu=256, access=ALL))
    end.ready_to_send(RtsAttributes(5))
    region = table.register(memory.pd, memoryview(bytearray(8)), ALL | AccessFlag.MW_BIND)
    window = table.allocate(memory.pd, MWType.TYPE_2)
    end.post_send(SendWork(1, WROpcode.SEND, (memoryview(b"before it"),)))
    for number in (2, 3):
        bind = Bind(window, window.rkey + number, region, owner, region.addr, 8, 0)
        window.posted(bind)
        owner.bind = bind
        end.post_send(SendWork(number, WROpcode.BIND_MW, bind=bind))
    found = weakref.ref(owner)
    window.dealloc()
    del owner, bind, window, table, memory, region
    gc.collect()
    assert found() is not None, "requests refer to it"
    end.datagrams(0.0, 1, 0)
    end.flush()
    assert [wc.opcode for wc in end.completions()] == [WCOpcode.SEND, WCOpcode.BIND_MW, WCOpcode.BIND_MW]
    gc.collect()
    assert found() is None


def test_wrong_arguments_are_refused() -> None:
    """The glue checks what it is given, and nothing has happened then."""
    end = engines()[0]
    for call in (
        lambda: end.received(None, 0, 0.0),  # type: ignore[arg-type]
        lambda: end.post_send(object()),  # type: ignore[arg-type]
        lambda: end.post_recv(object()),  # type: ignore[arg-type]
        lambda: end.ready_to_receive(object()),  # type: ignore[arg-type]
        lambda: end.ready_to_send(object()),  # type: ignore[arg-type]
        lambda: ENGINES["c"](1, object(), None, EngineCounters()),  # type: ignore[arg-type]
    ):
        with pytest.raises((TypeError, AttributeError)):
            call()
    many = [memoryview(bytearray(8))] * 33
    for call in (
        lambda: end.post_send(SendWork(1, WROpcode.SEND, many)),
        lambda: end.post_recv(RecvWork(1, many)),
        lambda: end.post_send(SendWork(1, WROpcode.SEND_WITH_IMM, imm=1 << 32)),
        lambda: end.set_access(-1),  # type: ignore[arg-type]
        lambda: end.set_min_rnr_timer(32),
        lambda: end.set_max_dest_rd_atomic(1 << 20),
        lambda: end.set_route(bytes(4), bytes(16), 1),
        lambda: end.ready_to_receive(RtrAttributes(1, 1, path_mtu=100)),
    ):
        with pytest.raises(ValueError):
            call()
    end.flush()
    assert end.completions() == []


class _Mallinfo2(ctypes.Structure):
    """What glibc says of its memory: see mallinfo(3)."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks",
                                                     "fsmblks", "uordblks", "fordblks", "keepcost")]  # fmt: skip


def _allocated(libc: ctypes.CDLL) -> int:
    """Bytes that malloc(3) has given out."""
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def _use_engine() -> None:
    end, _ = engines()
    for number in range(3000):
        end.post_recv(RecvWork(number, (memoryview(bytearray(1)),)))
        end.post_send(SendWork(number, WROpcode.RDMA_READ, (memoryview(bytearray(1)),), remote_addr=BASE, rkey=RKEY))


def _use_wire() -> None:
    assert compiled is not None
    wire = compiled.Wire(compiled.Lock(), lambda: None, ())
    for number in range(3000):
        wire.accept(number, 0)
    for index in range(8):
        key = bytes((239, 0, 0, index)) + bytes(4)
        wire.add_group(index, key)
        wire.set_members(key, tuple(range(30_000)))
    for index in range(4):
        wire.remove_group(index)


@pytest.mark.parametrize("use", [_use_engine, _use_wire])
def test_what_is_deleted_gives_its_memory_back(use: Callable[[], None]) -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("needs glibc 2.33")
    libc.mallinfo2.restype = _Mallinfo2
    use()
    gc.collect()
    before = _allocated(libc)
    for _ in range(8):
        use()
    gc.collect()
    assert _allocated(libc) - before < 1 << 20


#: An engine whose queue of completions cannot grow: prints how many requests it has taken then, and all completions.
_WITHOUT_MEMORY = """
import resource
from rdmacm.enums import WROpcode
from rdmacm.proto.engine import EngineCounters, RtrAttributes, RtsAttributes
from rdmacm.proto.work import RecvWork, SendWork
from support.rc import ENGINES, Region, connect
end, view = ENGINES["c"](1, Region(), None, EngineCounters()), memoryview(bytearray(8))
connect(end, 0)
end.ready_to_receive(RtrAttributes(2, 5))
end.ready_to_send(RtsAttributes(5))
for number in range((1 << 16) - 1):
    end.post_recv(RecvWork(number, (view,)))
work, taken = SendWork(1, WROpcode.SEND, (view,)), 0
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), before[1]))
try:
    for _ in range(64):
        end.post_send(work)
        taken += 1
except ValueError:
    pass
resource.setrlimit(resource.RLIMIT_AS, before)
end.post_send(work)
end.flush()
print(taken, len(end.completions()))
"""


@pytest.mark.skipif("san.so" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer needs memory of its own")
def test_request_without_memory_is_refused() -> None:
    environment = python_environment({"MALLOC_MMAP_THRESHOLD_": "65536"})
    command = [sys.executable, "-c", _WITHOUT_MEMORY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
    taken, completed = map(int, done.stdout.split())
    assert taken < 64, "it has had memory for all"
    assert completed == (1 << 16) - 1 + taken + 1
