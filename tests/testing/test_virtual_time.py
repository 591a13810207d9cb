"""Waits on a VirtualClock: they advance it, leave it to other threads, or raise; they never hang."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from rdmacm import CmEventType, CmId, CmTimeoutError, EventChannel, PortSpace, SockAddrIB
from rdmacm.testing import MemoryNetwork, MemorySubnet, SaFault, SimulationError, VirtualClock, memory_provider
from support.clock import pause
from support.world import World

NEIGHBOUR, SILENT = ("10.0.0.2", 7471), ("10.0.0.3", 7471)


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


def test_synchronous_call_takes_virtual_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rdmacm.testing.clock._GRACE", 3600.0)  # it does not wait for other threads: there are none
    started = world.clock.now
    with CmId(provider=world.provider) as cmid, pytest.raises(CmTimeoutError, match=r"10\.0\.0\.3"):
        cmid.resolve_addr(SILENT, timeout_ms=5000)
    assert world.clock.now == started + 5


def test_answer_takes_no_time(world: World) -> None:
    started = world.clock.now
    with CmId(provider=world.provider) as cmid:
        cmid.resolve_addr(NEIGHBOUR)
        cmid.resolve_route()
    assert world.clock.now == started


def test_waiting_for_an_event_takes_virtual_time(world: World) -> None:
    started = world.clock.now
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(SILENT, timeout_ms=3000)
        with world.channel.get_event() as event:
            assert event.type is CmEventType.ADDR_ERROR
    assert world.clock.now == started + 3


def test_timeout_is_real_time(world: World) -> None:
    started = world.clock.now
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(SILENT, timeout_ms=3000)
        with pytest.raises(CmTimeoutError):
            world.channel.get_event(0.05)
    assert world.clock.now == started


def test_endless_wait_raises(world: World) -> None:
    with pytest.raises(SimulationError, match=r"would wait for ever: no timer is set at 1000\.0+ s .*; try: a timeout"):
        world.channel.get_event()
    with CmId(provider=world.provider) as cmid:
        cmid.bind_addr(("10.0.0.1", 7471))
        cmid.listen()
        with pytest.raises(SimulationError):
            cmid.get_request()


@pytest.mark.wallclock
def test_another_thread_may_advance_the_clock(world: World) -> None:
    cmid = CmId(provider=world.provider)
    thread, raised = in_thread(lambda: cmid.resolve_addr(SILENT, timeout_ms=60_000))
    started = world.clock.now
    for _ in range(30):
        assert thread.is_alive()
        pause(0.05, "the thread would advance the clock after a second without a change")
        world.clock.advance(1)
    assert (thread.is_alive(), world.clock.now) == (True, started + 30), "the clock was this thread's"
    world.clock.advance(30)
    thread.join(10)
    assert [type(error) for error in raised] == [CmTimeoutError]
    assert world.clock.now == started + 60
    cmid.destroy()


def test_thread_does_not_wait_for_ever_for_another(world: World) -> None:
    cmid = CmId(provider=world.provider)
    started = world.clock.now
    thread, raised = in_thread(lambda: cmid.resolve_addr(SILENT, timeout_ms=2000))
    thread.join(30)
    assert [type(error) for error in raised] == [CmTimeoutError]
    assert world.clock.now == started + 2
    cmid.destroy()


def test_another_thread_may_post_the_event(world: World) -> None:
    thread, raised = in_thread(lambda: world.channel.get_event().ack())
    pause(0.1, "the thread begins to wait, and goes on")
    assert thread.is_alive()
    with CmId(world.channel) as cmid:
        cmid.write_cm_event()
        thread.join(10)
    assert (thread.is_alive(), raised) == (False, [])


def test_name_lookup_ends_the_wait(world: World) -> None:
    def resolver(*question: object) -> list[object]:
        pause(0.1, "the call waits meanwhile")
        return []

    with CmId(provider=world.provider) as cmid, pytest.raises(OSError, match="no address"):
        cmid.resolve_addrinfo("name.test", 7471, resolver=resolver)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_silent", [False, True])
def test_subnet_shares_the_clock(is_silent: bool) -> None:
    clock = VirtualClock(0)
    subnet = MemorySubnet(clock=clock, latency=10e-3)
    one, two = subnet.add_port("one"), subnet.add_port("two")
    there = two.port().gids[0]
    if is_silent:
        subnet.sa.faults = lambda request: SaFault.SILENCE
    provider = memory_provider(MemoryNetwork(), clock, infiniband=[one])
    with CmId(None, PortSpace.IB, provider=provider) as cmid:
        cmid.resolve_addr(SockAddrIB(there, 0x13F0001))
        if is_silent:
            with pytest.raises(CmTimeoutError):
                cmid.resolve_route(4000)
            assert clock.now == 4
        else:
            cmid.resolve_route(4000)
            assert clock.now == pytest.approx(20e-3)


def test_clock_is_shared_by_providers(world: World) -> None:
    """A deadline of another provider on the same clock is met when that provider makes progress."""
    other = memory_provider(world.network, world.clock)
    with EventChannel(other) as channel, CmId(channel) as waiting, CmId(provider=world.provider) as cmid:
        waiting.resolve_addr(SILENT, timeout_ms=1000)
        with pytest.raises(CmTimeoutError):
            cmid.resolve_addr(SILENT, timeout_ms=2000)
        with channel.get_event(0) as event:
            assert event.type is CmEventType.ADDR_ERROR
