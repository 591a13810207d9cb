"""Memory windows of the software device: their states, the rules of a bind, and what a peer can do with their keys."""

from __future__ import annotations

import dataclasses
import errno
import random
import weakref

import pytest

from rdmacm import RdmaError
from rdmacm.progress.runtime import Runtime
from rdmacm.soft.device.memory import MemoryTable, RemoteMemory, SoftMR
from rdmacm.soft.device.memory_window import Bind, SoftMW, WindowState
from rdmacm.soft.device.queue_pair import SoftQP
from rdmacm.verbs.attr import QPAttr
from rdmacm.verbs.enums import AccessFlag, MWType, QPAttrMask, QPState, QPType, WROpcode
from rdmacm.verbs.wr import MWBindInfo, RecvWR, SendWR, inc_rkey
from support.softdev import ALL, Connected, Host, Pair, sge, told

LOCAL, READ, WRITE, ATOMIC = (
    *(AccessFlag.LOCAL_WRITE, AccessFlag.REMOTE_READ, AccessFlag.REMOTE_WRITE),
    AccessFlag.REMOTE_ATOMIC,
)
BINDABLE = LOCAL | AccessFlag.MW_BIND
ZERO_BASED = AccessFlag.ZERO_BASED
TOP = 1 << 64
PD, OTHER = object(), object()
FREE, VALID, INVALID = WindowState
ONE, TWO = MWType


class Rig:
    """A table with a region of 100 bytes, and two queue pairs of one domain."""

    def __init__(self) -> None:
        self.table = MemoryTable(random.Random(1), Runtime())
        self.region = self.table.register(PD, memoryview(bytearray(range(100))), BINDABLE)
        self.qp, self.second = RemoteMemory(self.table, PD), RemoteMemory(self.table, PD)

    def bind(self, window: SoftMW, /, offset: int = 0, length: int = 100, access: int = READ, **more: object) -> bool:
        """Bind to the region, with its next key; ``more`` replaces fields of the bind."""
        addr = self.region.addr + offset
        bind = Bind(window, inc_rkey(window.rkey), self.region, None, addr, length, int(access))
        bind = dataclasses.replace(bind, **more)  # type: ignore[arg-type]
        done = self.qp.bind(bind)
        if done and bind.window is window:
            window.rkey = bind.rkey
        return done

    def reads(self, rkey: int, offset: int, length: int, qp: RemoteMemory | None = None) -> bytes | None:
        view = (qp or self.qp).remote(rkey, self.region.addr + offset, length, READ)
        return None if view is None else bytes(view)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def both(rig: Rig) -> tuple[SoftMW, SoftMW]:
    return rig.table.allocate(PD, ONE), rig.table.allocate(PD, TWO)


# -- states -----------------------------------------------------------------------------------------------------


def test_states_of_a_window_of_type_1(rig: Rig) -> None:
    window = rig.table.allocate(PD, ONE)
    first = window.rkey
    assert (window.state, rig.reads(first, 0, 1)) == (VALID, None)
    assert rig.bind(window, 10, 20)
    assert (window.state, window.rkey, rig.region.windows) == (VALID, inc_rkey(first), 1)
    assert rig.reads(window.rkey, 10, 20) == bytes(range(10, 30))
    assert rig.reads(window.rkey, 10, 20, rig.second) == bytes(range(10, 30)), "any queue pair of its domain"
    assert RemoteMemory(rig.table, OTHER).remote(window.rkey, rig.region.addr + 10, 1, READ) is None
    assert rig.reads(first, 10, 20) is None
    before = window.rkey
    assert not rig.qp.invalidate(before), "type 1 is not invalidated"
    assert rig.bind(window, 50, 10)
    assert (rig.reads(before, 10, 1), rig.reads(window.rkey, 10, 1)) == (None, None)
    assert (rig.reads(window.rkey, 50, 10), rig.region.windows) == (bytes(range(50, 60)), 1)
    assert rig.bind(window, length=0, region=None, addr=0)
    assert (window.state, rig.reads(window.rkey, 50, 1), rig.region.windows) == (VALID, None, 0)
    window.dealloc()
    assert (window.state, rig.table.windows) == (INVALID, 0)
    assert not rig.bind(window)
    window.dealloc()


def test_states_of_a_window_of_type_2(rig: Rig) -> None:
    window = rig.table.allocate(PD, TWO)
    assert (window.state, rig.reads(window.rkey, 0, 1), rig.qp.invalidate(window.rkey)) == (FREE, None, False)
    assert rig.bind(window, 10, 20)
    rkey = window.rkey
    assert (window.state, rig.reads(rkey, 10, 20), rig.region.windows) == (VALID, bytes(range(10, 30)), 1)
    assert rig.reads(rkey, 10, 20, rig.second) is None, "bound to the other queue pair"
    assert not rig.bind(window), "it has to be free"
    assert window.rkey == rkey
    assert not rig.second.invalidate(rkey)
    assert not RemoteMemory(rig.table, OTHER).invalidate(rkey)
    assert not rig.qp.invalidate(rkey ^ 1)
    assert not rig.qp.invalidate(rkey ^ 0x100)
    assert rig.qp.invalidate(rkey)
    assert (window.state, rig.reads(rkey, 10, 1), rig.region.windows) == (FREE, None, 0)
    assert not rig.qp.invalidate(rkey), "only once"
    assert rig.bind(window, 0, 100)
    assert (rig.reads(rkey, 10, 1), rig.reads(window.rkey, 10, 1)) == (None, b"\x0a")
    rig.qp.close()
    assert (window.state, rig.region.windows) == (FREE, 0), "its queue pair was reset"
    assert rig.bind(window)
    window.dealloc()
    assert (window.state, rig.reads(window.rkey, 0, 1), rig.region.windows) == (INVALID, None, 0)


def test_owner_of_a_region_lives_while_a_bind_waits_or_is_in_force(rig: Rig) -> None:
    class Owner:
        pass

    owner, window = Owner(), rig.table.allocate(PD, TWO)
    found = weakref.ref(owner)
    bind = Bind(window, inc_rkey(window.rkey), rig.region, owner, rig.region.addr, 1, int(READ))
    window.posted(bind)
    del owner
    rig.qp.close()
    assert found() is not None, "it waits"
    assert rig.qp.bind(bind)
    del bind
    window.let_go()
    assert found() is not None, "it is in force"
    rig.table.bindings.invalidate(PD, rig.qp.number, window.rkey)  # as by the thread of the core, which knows no owner
    assert window.state is FREE
    window.let_go()
    assert found() is None


def test_region_that_has_the_key_of_another_is_not_bound(rig: Rig) -> None:
    """A request names a region that is deregistered, and its key is given again before it is executed."""
    window, key = rig.table.allocate(PD, TWO), rig.region.rkey
    before, memory = rig.region, memoryview(bytearray(100))
    before.dereg()
    rig.table._freed.clear()
    rig.table._random.getrandbits = lambda bits: key  # type: ignore[method-assign]
    rig.region = rig.table.register(PD, memory, BINDABLE)
    assert rig.region.rkey == key
    assert not rig.bind(window, region=before)
    assert rig.bind(window)


def test_bind_and_access_of_a_region_without_bytes(rig: Rig) -> None:
    empty, window = rig.table.register(PD, memoryview(b""), BINDABLE | READ), rig.table.allocate(PD, ONE)
    assert not rig.bind(window, region=empty, addr=empty.addr, length=1)
    assert rig.bind(window, region=empty, addr=empty.addr, length=0)
    empty.dereg()
    assert not rig.bind(window, region=empty, addr=empty.addr, length=0)


def test_region_stays_while_a_window_is_bound(rig: Rig) -> None:
    for window in both(rig):
        assert rig.bind(window, 1, 1)
        for change in (rig.region.dereg, lambda: rig.region.rereg(OTHER, None, None)):
            with pytest.raises(RdmaError, match="memory windows are bound to it: 1") as caught:
                change()
            assert caught.value.errno == errno.EBUSY
        assert rig.reads(window.rkey, 1, 1) == b"\1"
        window.dealloc()
    rig.region.dereg()
    assert len(rig.table) == 0


# -- the rules of a bind ----------------------------------------------------------------------------------------


def test_binds_that_no_window_allows(rig: Rig) -> None:
    foreign = rig.table.register(OTHER, memoryview(bytearray(100)), BINDABLE)
    elsewhere = MemoryTable(random.Random(1), Runtime())
    twin = elsewhere.register(PD, memoryview(bytearray(100)), BINDABLE)
    assert twin.lkey == rig.region.lkey
    gone = rig.table.register(PD, memoryview(bytearray(100)), BINDABLE)
    gone.dereg()
    closed = rig.table.register(PD, memoryview(bytearray(100)), LOCAL | READ)
    constant = rig.table.register(PD, memoryview(bytes(100)), AccessFlag.MW_BIND)
    for window in both(rig):
        assert not rig.bind(window, window=None)
        assert not rig.bind(window, window=elsewhere.allocate(PD, window.type))
        assert not rig.bind(window, window=rig.table.allocate(OTHER, window.type))
        assert not rig.bind(window, region=None)
        for region in (foreign, twin, gone, closed):
            assert not rig.bind(window, region=region, addr=region.addr)
        assert not RemoteMemory(rig.table, OTHER).bind(Bind(window, window.rkey, foreign, None, foreign.addr, 1, 0))
        for access in (WRITE, ATOMIC, READ | WRITE):
            assert not rig.bind(window, region=constant, addr=constant.addr, access=access)
        for offset, length in ((-1, 1), (0, 101), (99, 2), (100, 1), (-1, TOP - 1), (0, TOP - 1)):
            assert not rig.bind(window, offset, length)
        for addr, length in ((0, TOP - 1), (TOP - 1, 1), (TOP - 1, TOP - 1), (TOP - rig.region.addr, 1)):
            assert not rig.bind(window, addr=addr, length=length)
        assert rig.bind(window, 99, 1, READ | WRITE | ATOMIC | LOCAL)
        assert (constant.windows, foreign.windows) == (0, 0)


def test_binds_that_depend_on_the_type(rig: Rig) -> None:
    one, two = both(rig)
    assert not rig.bind(one, access=READ | ZERO_BASED)
    assert not rig.bind(two, length=0)
    assert not rig.bind(two, length=0, region=None)
    assert rig.bind(two, access=READ | ZERO_BASED)


def test_permission_and_range_are_the_windows(rig: Rig) -> None:
    """Not those of its region, which allows no remote access."""
    window = rig.table.allocate(PD, TWO)
    assert rig.bind(window, 40, 20, READ)
    rkey, start = window.rkey, rig.region.addr + 40
    assert rig.qp.remote(rkey, start, 20, READ) is not None
    assert rig.qp.remote(rkey, start, 1, WRITE) is None
    assert rig.qp.remote(rkey, start, 8, ATOMIC) is None
    for address, length in ((start - 1, 1), (start, 21), (start + 19, 2), (start + 20, 1), (TOP - 1, 2), (0, 1)):
        assert rig.qp.remote(rkey, address, length, READ) is None
    assert rig.qp.remote(rkey, start - TOP, 1, READ) is None
    assert rig.qp.remote(rig.region.rkey, start, 1, READ) is None
    assert rig.table.local(PD, rkey, start, 1, False) is None, "it is no lkey"


def test_addresses_of_a_zero_based_window_count_from_its_start(rig: Rig) -> None:
    window = rig.table.allocate(PD, TWO)
    assert rig.bind(window, 40, 20, READ | ZERO_BASED)

    def read(address: int, length: int) -> bytes | None:
        view = rig.qp.remote(window.rkey, address, length, READ)
        return None if view is None else bytes(view)

    assert (read(0, 20), read(19, 1)) == (bytes(range(40, 60)), b"\x3b")
    for address, length in ((0, 21), (19, 2), (20, 1), (TOP - 1, 1), (TOP - 1, 2), (rig.region.addr + 40, 1)):
        assert read(address, length) is None


def test_keys_of_regions_and_windows_never_collide() -> None:
    numbers = random.Random(1)
    table = MemoryTable(numbers, Runtime())
    region = table.register(PD, memoryview(bytearray(8)), BINDABLE)
    draws = iter([0, region.rkey >> 8, 0x123456, 0x42])
    drawn, numbers.getrandbits = numbers.getrandbits, lambda bits: next(draws)  # type: ignore[method-assign]
    window = table.allocate(PD, TWO)
    assert window.rkey == 0x12345642
    draws = iter([0x12345699, 0x77])
    assert table.register(PD, memoryview(bytearray(8)), ALL).rkey == 0x77
    window.dealloc()
    draws = iter([0x12345611, 0x78])
    assert table.register(PD, memoryview(bytearray(8)), ALL).rkey == 0x78
    draws = iter([0x123456, 0x654321, 1])
    assert table.allocate(PD, ONE).rkey == 0x65432101, "a freed key does not come back soon"
    numbers.getrandbits = drawn  # type: ignore[method-assign]
    for _ in range(1024):
        table.allocate(PD, ONE).dealloc()
    numbers.getrandbits = lambda bits: 0x123456 & (1 << bits) - 1  # type: ignore[method-assign]
    assert table.allocate(PD, ONE).rkey == 0x12345656


# -- queue pairs ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Window:
    """What the API gives a device for a window or a region."""

    backend: SoftMW | SoftMR

    @property
    def rkey(self) -> int:
        return self.backend.rkey


def window_of(host: Host, mw_type: MWType = TWO) -> Window:
    return Window(host.device.alloc_mw(host.pd, mw_type))


def bind(window: Window, region: SoftMR, access: int = ALL, wr_id: int = 1, **more: int) -> SendWR:
    wr = SendWR(wr_id, WROpcode.BIND_MW)
    info = MWBindInfo(Window(region), more.get("addr", region.addr), more.get("length", region.length), access)
    wr.set_bind_wr(window, info)
    return wr


def set_state(qp: SoftQP, state: QPState) -> None:
    qp.modify(QPAttr(qp_state=state), QPAttrMask.STATE)


def bound(ends: Connected, window: Window, region: SoftMR, access: int = ALL) -> int:
    """Bind at the right end; return the key."""
    ends.right.post_send([bind(window, region, access)])
    assert told(ends.at_right()) == [(1, "SUCCESS")]
    return window.rkey


def write(region: SoftMR, target: SoftMR, rkey: int, wr_id: int = 1) -> SendWR:
    return SendWR(wr_id, WROpcode.RDMA_WRITE, [sge(region)], remote_addr=target.addr, rkey=rkey)


def test_every_operation_through_a_window(pair: Pair) -> None:
    ends = Connected(pair)
    for mw_type in MWType:
        target, local = pair.b.region(16, BINDABLE), pair.a.region(b"sixteen bytes in")
        rkey = bound(ends, window_of(pair.b, mw_type), target)
        ends.left.post_send([write(local, target, rkey)])
        assert told(ends.at_left()) == [(1, "SUCCESS")]
        assert target.view == local.view
        for opcode in (WROpcode.RDMA_READ, WROpcode.ATOMIC_FETCH_AND_ADD, WROpcode.ATOMIC_CMP_AND_SWP):
            wr = SendWR(2, opcode, [sge(local, 0, 8)], remote_addr=target.addr, rkey=rkey, compare_add=1)
            ends.left.post_send([wr])
            assert told(ends.at_left()) == [(2, "SUCCESS")]
        assert bytes(target.view) == b"tixteen bytes in"
        ends.left.post_send([write(local, target, target.rkey, 3)])
        assert told(ends.at_left()) == [(3, "REM_ACCESS_ERR")], "the region itself is closed"
        ends = Connected(pair)


@pytest.mark.parametrize("fault", [None, "range", "permission", "whole region"])
def test_flush_through_a_window(pair: Pair, fault: str | None) -> None:
    """It is checked as a WRITE is. A window's key does not stand for the whole region."""
    flush = AccessFlag.FLUSH_GLOBAL
    ends = Connected(pair)
    ends.right.modify(QPAttr(qp_access_flags=ALL | flush), QPAttrMask.ACCESS_FLAGS)
    region = pair.b.region(100, BINDABLE | flush)
    rkey = bound(ends, window_of(pair.b), region, ALL if fault == "permission" else ALL | flush)
    wr = SendWR(1, WROpcode.FLUSH)
    wr.set_wr_flush(rkey, region.addr, 101 if fault == "range" else 100, 1, fault == "whole region")
    ends.left.post_send([wr])
    assert told(ends.at_left()) == [(1, "REM_ACCESS_ERR" if fault else "SUCCESS")]


def test_bind_and_the_message_with_its_key_are_posted_at_once(pair: Pair) -> None:
    """ibv_bind_mw(3): a SEND after the bind may have the key in it."""
    ends = Connected(pair)
    inbox, target, outbox = pair.a.region(4), pair.b.region(8, BINDABLE), pair.b.region(4)
    ends.left.post_recv([RecvWR(1, [sge(inbox)])])
    window = window_of(pair.b)
    wr = bind(window, target)
    outbox.view[:] = wr.rkey.to_bytes(4, "big")
    ends.right.post_send([SendWR(7, sg=[sge(outbox, 0, 0)]), wr, SendWR(2, sg=[sge(outbox)])])
    ends.left.post_recv([RecvWR(2, [sge(inbox)])])
    assert told(ends.at_right(3)) == [(7, "SUCCESS"), (1, "SUCCESS"), (2, "SUCCESS")]
    assert told(ends.at_left(2)) == [(1, "SUCCESS"), (2, "SUCCESS")]
    assert int.from_bytes(inbox.view, "big") == wr.rkey
    ends.left.post_send([write(pair.a.region(b"by a key"), target, wr.rkey)])
    assert told(ends.at_left()) == [(1, "SUCCESS")]
    assert bytes(target.view) == b"by a key"


@pytest.mark.parametrize("by_peer", [False, True], ids=["LOCAL_INV", "SEND_WITH_INV"])
def test_invalidated_key_is_refused(pair: Pair, by_peer: bool) -> None:
    ends = Connected(pair)
    target, window = pair.b.region(8, BINDABLE), window_of(pair.b)
    rkey = bound(ends, window, target)
    if by_peer:
        ends.right.post_recv([RecvWR(1)])
        ends.left.post_send([SendWR(2, WROpcode.SEND_WITH_INV, invalidate_rkey=rkey)])
        assert [wc.invalidated_rkey for wc in ends.at_right()] == [rkey]
        assert told(ends.at_left()) == [(2, "SUCCESS")]
    else:
        ends.right.post_send([SendWR(2, WROpcode.LOCAL_INV, invalidate_rkey=rkey)])
        (wc,) = ends.at_right()
        assert (wc.wr_id, wc.status.name, wc.opcode.name) == (2, "SUCCESS", "LOCAL_INV")
    target.rereg(None, None, BINDABLE)  # nothing is bound to it any more
    assert bound(ends, window, target) == inc_rkey(rkey)
    ends.left.post_send([write(pair.a.region(8), target, rkey, 3)])
    assert told(ends.at_left()) == [(3, "REM_ACCESS_ERR")]


def test_bind_that_is_refused_ends_the_queue_pair(pair: Pair) -> None:
    for mw_type in MWType:
        ends = Connected(pair)
        window, target = window_of(pair.b, mw_type), pair.b.region(8)
        ends.right.post_send([SendWR(1, WROpcode.RDMA_WRITE), bind(window, target, wr_id=2), SendWR(3)])
        found = ends.at_right(3)
        assert told(found) == [(1, "SUCCESS"), (2, "MW_BIND_ERR"), (3, "WR_FLUSH_ERR")]
        assert found[1].opcode.name == "BIND_MW"
        assert ends.right.state is QPState.ERR
        ends.right.post_send([bind(window, target, wr_id=4)])
        assert told(ends.at_right()) == [(4, "WR_FLUSH_ERR")]


@pytest.mark.parametrize("case", ["unknown", "region", "type 1", "free", "other queue pair", "other domain", "twice"])
@pytest.mark.parametrize("by_peer", [False, True], ids=["LOCAL_INV", "SEND_WITH_INV"])
def test_keys_that_are_not_invalidated(pair: Pair, case: str, by_peer: bool) -> None:
    ends, others = Connected(pair), Connected(pair)
    target = pair.b.region(8, BINDABLE | WRITE)
    window = window_of(pair.b, ONE if case == "type 1" else TWO)
    rkey = window.rkey
    if case in ("type 1", "twice"):
        rkey = bound(ends, window, target)
    elif case == "other queue pair":
        rkey = bound(others, window, target)
    elif case == "unknown":
        rkey ^= 0x8000
    elif case == "region":
        rkey = target.rkey
    elif case == "other domain":
        pd, pair.b.pd = pair.b.pd, object()
        rkey = bound(Connected(pair), window_of(pair.b), pair.b.region(8, BINDABLE))
        pair.b.pd = pd
    for last in (False, True)[case != "twice" :]:
        if by_peer:
            ends.right.post_recv([RecvWR(3, [sge(pair.b.region(8))])])
            ends.left.post_send([SendWR(4, WROpcode.SEND_WITH_INV, [sge(pair.a.region(8))], invalidate_rkey=rkey)])
            assert told(ends.at_left()) == [(4, "REM_ACCESS_ERR" if last else "SUCCESS")]
            assert told(ends.at_right()) == [(3, "REM_INV_REQ_ERR" if last else "SUCCESS")]
        else:
            ends.right.post_send([SendWR(5, WROpcode.LOCAL_INV, invalidate_rkey=rkey)])
            assert told(ends.at_right()) == [(5, "LOC_QP_OP_ERR" if last else "SUCCESS")]
    if case == "region":
        others.left.post_send([write(pair.a.region(b"it stays"), target, rkey)])
        assert told(others.at_left()) == [(1, "SUCCESS")]


def test_window_of_type_2_serves_the_peer_of_its_queue_pair_only(pair: Pair) -> None:
    ends, others = Connected(pair), Connected(pair)
    target, local = pair.b.region(8, BINDABLE), pair.a.region(8)
    rkey = bound(ends, window_of(pair.b), target)
    others.left.post_send([write(local, target, rkey)])
    assert told(others.at_left()) == [(1, "REM_ACCESS_ERR")]
    ends.left.post_send([write(local, target, rkey)])
    assert told(ends.at_left()) == [(1, "SUCCESS")]


def test_windows_of_an_aborted_queue_pair_are_free_after_it(pair: Pair) -> None:
    """A fault of the engine ends the queue pair; receives are flushed by a new engine."""
    ends = Connected(pair)
    target = pair.b.region(8, BINDABLE)
    bound(ends, window_of(pair.b), target)
    ends.right.abort()
    ends.right.post_recv([RecvWR(2)])
    assert told(ends.at_right()) == [(2, "WR_FLUSH_ERR")]
    assert target.windows == 1
    ends.right.destroy()
    target.dereg()


@pytest.mark.parametrize("destroy", [False, True], ids=["reset", "destroyed"])
def test_windows_of_a_queue_pair_are_free_after_it(pair: Pair, destroy: bool) -> None:
    ends = Connected(pair)
    target, window = pair.b.region(8, BINDABLE), window_of(pair.b)
    rkey = bound(ends, window, target)
    if destroy:
        ends.right.destroy()
    else:
        for qp in (ends.left, ends.right):
            set_state(qp, QPState.RESET)
        pair.connect(ends.left, ends.right)
        ends.left.post_send([write(pair.a.region(8), target, rkey)])
        assert told(ends.at_left()) == [(1, "REM_ACCESS_ERR")]
    target.dereg()
    window.backend.dealloc()  # type: ignore[union-attr]


def test_deallocated_and_rebound_windows_during_a_write(pair: Pair) -> None:
    """The key is looked up again for each train of packets."""
    for mw_type in MWType:
        ends = Connected(pair)
        target, window = pair.b.region(64 * 1024, BINDABLE), window_of(pair.b, mw_type)
        rkey = bound(ends, window, target)
        sent: list[bytes] = []
        pair.net.lost = lambda datagram, sent=sent: sent.append(datagram) or len(sent) > 1  # type: ignore[misc]
        ends.left.post_send([write(pair.a.region(64 * 1024), target, rkey, 9)])
        pair.settle()
        assert len(sent) > 1
        assert ends.left_cq.poll(1) == []
        if mw_type is ONE:
            ends.right.post_send([bind(window, target, length=1)])
        else:
            window.backend.dealloc()  # type: ignore[union-attr]
        pair.net.lost = lambda datagram: False
        assert told(ends.at_left()) == [(9, "REM_ACCESS_ERR")]


def test_windows_are_limited(pair: Pair) -> None:
    device = pair.a.device
    device.attr = dataclasses.replace(device.attr, max_mw=2)
    windows = [device.alloc_mw(pair.a.pd, mw_type) for mw_type in MWType]
    with pytest.raises(RdmaError, match="2 windows are allocated") as caught:
        device.alloc_mw(pair.a.pd, ONE)
    assert caught.value.errno == errno.ENOMEM
    windows[0].dealloc()
    device.alloc_mw(pair.a.pd, ONE)


def test_zero_based_region_is_refused(pair: Pair) -> None:
    with pytest.raises(RdmaError, match="a region has the addresses of its buffer") as caught:
        pair.a.region(8, ALL | ZERO_BASED)
    assert caught.value.errno == errno.EOPNOTSUPP


def test_binds_wait_in_sqd(pair: Pair) -> None:
    ends = Connected(pair)
    window, target = window_of(pair.b), pair.b.region(8, BINDABLE)
    set_state(ends.right, QPState.SQD)
    ends.right.post_send([bind(window, target)])
    pair.settle()
    assert ends.right_cq.poll(1) == []
    assert window.backend.state is FREE  # type: ignore[union-attr]
    set_state(ends.right, QPState.RTS)
    assert told(ends.at_right()) == [(1, "SUCCESS")]


# -- unreliable connections ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mw_type", MWType)
def test_write_of_an_unreliable_connection_through_a_window(pair: Pair, mw_type: MWType) -> None:
    ends = Connected(pair, qp_type=QPType.UC)
    target, local = pair.b.region(5000, BINDABLE), pair.a.region(random.Random(1).randbytes(5000))
    window = window_of(pair.b, mw_type)
    rkey = bound(ends, window, target)
    ends.left.post_send([write(local, target, rkey)])
    assert told(ends.at_left()) == [(1, "SUCCESS")]
    pair.settle()
    assert target.view == local.view
    if mw_type is ONE:
        ends.right.post_send([bind(window, target, length=0)])
        opcode = "BIND_MW"
    else:
        ends.right.post_send([SendWR(1, WROpcode.LOCAL_INV, invalidate_rkey=rkey)])
        opcode = "LOCAL_INV"
    assert [(wc.status.name, wc.opcode.name) for wc in ends.at_right()] == [("SUCCESS", opcode)]
    target.view[:] = bytes(5000)
    ends.left.post_send([write(local, target, rkey)])
    assert told(ends.at_left()) == [(1, "SUCCESS")], "nobody tells the sender"
    pair.settle()
    assert bytes(target.view) == bytes(5000)
    target.dereg()


@pytest.mark.parametrize("fault", ["key", "before", "beyond", "over the top", "permission", "other queue pair"])
def test_write_of_an_unreliable_connection_that_a_window_refuses(pair: Pair, fault: str) -> None:
    ends, others = Connected(pair, qp_type=QPType.UC), Connected(pair, qp_type=QPType.UC)
    target, local = pair.b.region(3000, BINDABLE), pair.a.region(b"x" * 2000)
    window, access = window_of(pair.b), LOCAL | READ if fault == "permission" else ALL
    ends.right.post_send([bind(window, target, access, addr=target.addr + 500, length=2000)])
    assert told(ends.at_right()) == [(1, "SUCCESS")]
    offset = {"before": 499, "beyond": 501, "over the top": TOP - 1000 - target.addr}.get(fault, 500)
    key = window.rkey ^ (fault == "key")
    wr = SendWR(1, WROpcode.RDMA_WRITE, [sge(local)], remote_addr=target.addr + offset, rkey=key)
    sender = (others if fault == "other queue pair" else ends).left
    sender.post_send([wr])
    pair.settle()
    assert bytes(target.view) == bytes(3000)
    assert ends.right.state is others.right.state is QPState.RTS, "the peer cannot end the queue pair"


@pytest.mark.parametrize(
    "fault", ["no MW_BIND", "beyond", "other domain", "free", "other queue pair", "region", "unknown"]
)
def test_refused_bind_or_invalidation_of_an_unreliable_connection_leads_to_sqe(pair: Pair, fault: str) -> None:
    """The requests before it are complete, those after it are flushed; receives go on, and RTS resumes."""
    ends = Connected(pair, qp_type=QPType.UC)
    target, window = pair.b.region(100, BINDABLE), window_of(pair.b)
    status = "MW_BIND_ERR"
    if fault == "no MW_BIND":
        wr = bind(window, pair.b.region(100), wr_id=2)
    elif fault == "beyond":
        wr = bind(window, target, wr_id=2, length=101)
    elif fault == "other domain":
        foreign = pair.b.device.reg_mr(OTHER, memoryview(bytearray(100)), BINDABLE)
        wr = bind(window, foreign, wr_id=2)
    else:
        status, rkey = "LOC_QP_OP_ERR", window.rkey
        if fault == "other queue pair":
            rkey = bound(Connected(pair, qp_type=QPType.UC), window, target)
        elif fault == "region":
            rkey = target.rkey
        elif fault == "unknown":
            rkey ^= 0x100
        wr = SendWR(2, WROpcode.LOCAL_INV, invalidate_rkey=rkey)
    ends.right.post_recv([RecvWR(9)])
    ends.right.post_send([SendWR(1), wr, SendWR(3)])
    assert told(ends.at_right(3)) == [(1, "SUCCESS"), (2, status), (3, "WR_FLUSH_ERR")]
    assert ends.right.state is QPState.SQE
    assert target.windows == (fault == "other queue pair")
    ends.left.post_send([SendWR(1)])
    assert told(ends.at_right()) == [(9, "SUCCESS")]
    set_state(ends.right, QPState.RTS)
    other = pair.b.region(8, BINDABLE)
    assert bound(ends, window_of(pair.b), other)


@pytest.mark.parametrize("destroy", [False, True], ids=["reset", "destroyed"])
def test_windows_of_an_unreliable_queue_pair_are_free_after_it(pair: Pair, destroy: bool) -> None:
    ends = Connected(pair, qp_type=QPType.UC)
    target, window = pair.b.region(8, BINDABLE), window_of(pair.b)
    bound(ends, window, target)
    if destroy:
        ends.right.destroy()
    else:
        set_state(ends.right, QPState.RESET)
    target.dereg()


def test_bind_of_an_unreliable_connection_waits_in_sqd(pair: Pair) -> None:
    ends = Connected(pair, qp_type=QPType.UC)
    window, target = window_of(pair.b), pair.b.region(8, BINDABLE)
    set_state(ends.right, QPState.SQD)
    ends.right.post_send([bind(window, target)])
    pair.settle()
    assert (ends.right_cq.poll(1), window.backend.state) == ([], FREE)  # type: ignore[union-attr]
    set_state(ends.right, QPState.RTS)
    assert told(ends.at_right()) == [(1, "SUCCESS")]
