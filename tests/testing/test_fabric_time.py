"""Virtual time on a fabric: running, waiting, event handlers, and ids that resolve."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable

import pytest

from rdmacm import CmEvent, CmEventType, CmId, EventChannel
from rdmacm.net.types import NeighbourState
from rdmacm.soft.provider import SoftProvider
from rdmacm.testing import Fabric, Host, MemoryNetwork, SimulationError, memory_provider
from support.fabric import ENDS, ENDS6, received, route, two

PORT = 7471


def ticking(host: Host, interval: float, times: list[float]) -> None:
    """Append the time to ``times`` every ``interval`` seconds on a host."""

    def tick(now: float) -> None:
        times.append(now)
        host.provider.runtime.call_at(now + interval, tick)

    host.provider.runtime.call_at(host.fabric.now + interval, tick)


# -- running ------------------------------------------------------------------------------------------------------


def test_time_advances_only_in_run() -> None:
    fabric = Fabric()
    a, b = two(fabric)
    a.wire.send(route(a, *ENDS), [bytes(16)])
    assert (fabric.now, a.provider.clock(), b.provider.clock()) == (0.0, 0.0, 0.0)
    assert fabric.run()
    assert fabric.now == a.provider.clock() == b.provider.clock() == 20e-6
    assert fabric.run(), "a run without events succeeds"
    assert fabric.now == 20e-6


def test_run_stops_at_the_given_time() -> None:
    fabric = Fabric()
    a, _ = two(fabric)
    times: list[float] = []
    ticking(a, 1.0, times)
    assert fabric.run(until=3.0)
    assert (fabric.now, times) == (3.0, [1.0, 2.0, 3.0]), "events at the end time itself happen"
    assert fabric.run(until=3.5)
    assert (fabric.now, len(times)) == (3.5, 3)
    assert fabric.run(until=1.0), "a time in the past"
    assert fabric.now == 3.5
    assert fabric.run(seconds=1.0)
    assert (fabric.now, len(times)) == (4.5, 4)
    assert fabric.run(seconds=-1.0)
    assert fabric.now == 4.5
    assert fabric.run(until=9.0, seconds=1.0)
    assert fabric.now == 5.5
    for wrong in (float("inf"), float("nan")):
        with pytest.raises(ValueError, match="seconds"):
            fabric.run(until=wrong)
        with pytest.raises(ValueError, match="seconds"):
            fabric.run(seconds=wrong)


def test_run_without_events_takes_no_real_time() -> None:
    fabric = Fabric()
    two(fabric)
    fabric.run(until=1e6)
    assert fabric.now == 1e6
    assert not fabric.run(lambda: False)
    assert fabric.now == 1e6


def test_run_stops_when_its_condition_holds() -> None:
    fabric = Fabric()
    a, _ = two(fabric)
    times: list[float] = []
    ticking(a, 1.0, times)
    assert fabric.run(lambda: True)
    assert fabric.now == 0.0, "the condition holds already"
    assert fabric.run(lambda: len(times) >= 3)
    assert fabric.now == 3.0
    assert not fabric.run(lambda: len(times) >= 10, seconds=2.5)
    assert fabric.now == 5.5
    assert fabric.run(lambda: fabric.now >= 6.25, seconds=0.75), "a condition on the time"
    assert fabric.now == 6.25


def test_time_never_goes_back() -> None:
    fabric = Fabric(seed=1, reorder=0.5, duplicate=0.5, jitter=1e-4)
    a, b = two(fabric)
    seen = [fabric.now]
    for _ in range(50):
        a.wire.send(route(a, *ENDS), [bytes(16)])
        b.provider.runtime.call_at(fabric.now - 1.0, seen.append)  # due in the past
        fabric.run(lambda: seen.append(fabric.now) or False, seconds=30e-6)  # type: ignore[func-returns-value]
    fabric.run()
    assert seen == sorted(seen)
    moments = [entry.time for entry in fabric.log]
    assert moments == sorted(moments)
    assert all(entry.time >= entry.packet.time for entry in fabric.log)


def test_run_is_bounded() -> None:
    fabric = Fabric(max_steps=100)
    a, _ = two(fabric)
    ticking(a, 1.0, [])
    with pytest.raises(SimulationError, match=r"no end after 100 steps, at 100\.0.*hosts with timers: a"):
        fabric.run()
    assert fabric.run(seconds=10), "the run can be continued"
    ticking(a, 1e-9, [])
    with pytest.raises(SimulationError, match="no end"):
        fabric.run(seconds=1)


def test_simultaneous_events_keep_their_order() -> None:
    fabric = Fabric()
    a, b = two(fabric)
    c = fabric.host("c", "10.0.0.3")
    c.wire.open()
    for i in range(4):
        a.wire.send(route(a, *ENDS), [bytes([i]) * 16])
        c.wire.send(route(c, "10.0.0.3", ENDS[1]), [bytes([i + 100]) * 16])
    fabric.run()
    assert [data[0] for data, *_ in received(b)] == [0, 100, 1, 101, 2, 102, 3, 103]


# -- waiting ------------------------------------------------------------------------------------------------------


def test_waiting_advances_virtual_time() -> None:
    fabric = Fabric()
    a, b = two(fabric)
    times: list[float] = []
    ticking(b, 1.0, times)
    assert a.provider.drive(lambda: len(times) >= 1000, None)
    assert fabric.now == 1000.0
    assert not a.provider.drive(lambda: False, 500.0)
    assert fabric.now == 1500.0
    assert not a.provider.drive(lambda: False, 0.0)
    assert fabric.now == 1500.0


def test_endless_wait_raises() -> None:
    fabric = Fabric()
    a, _ = two(fabric)
    with pytest.raises(SimulationError, match=r"host a waits for ever.*in flight: 0; hosts with timers: none"):
        a.provider.drive(lambda: False, None)
    assert not a.provider.drive(lambda: False, 3.0), "with a timeout it does not raise"
    assert fabric.now == 3.0


def test_crashed_host_cannot_wait() -> None:
    fabric = Fabric()
    two(fabric)
    host = fabric.hosts["b"]
    fabric.crash("b")
    for provider in (host.provider, memory_provider(MemoryNetwork())):
        assert isinstance(provider, SoftProvider)
        with pytest.raises(SimulationError, match="has crashed or is on another fabric"):
            fabric._drive(provider.runtime, lambda: True, None)


# -- ids and events -----------------------------------------------------------------------------------------------


def next_event(channel: EventChannel) -> CmEvent | None:
    try:
        return channel.get_event(timeout=0)
    except BlockingIOError:
        return None


def outcome(fabric: Fabric, channel: EventChannel) -> tuple[CmEventType, int]:
    """The next event of a channel, waited for in virtual time."""
    found: list[CmEvent] = []

    def done() -> bool:
        if (event := next_event(channel)) is not None:
            found.append(event)
        return bool(found)

    assert fabric.run(done, seconds=60)
    with found[0] as event:
        return event.type, event.status


@pytest.mark.parametrize("end", [*ENDS, *ENDS6, "127.0.0.1"])
def test_hosts_resolve_each_other(end: str) -> None:
    fabric = Fabric()
    a, b = two(fabric)
    for host in (a, b):
        with CmId(provider=host.provider) as cmid:
            cmid.resolve_addr((end, PORT))
            cmid.resolve_route()
            device = cmid.verbs
            assert device is not None
            assert device.name == ("soft_lo" if end == "127.0.0.1" else "soft_eth0")


def test_each_host_has_its_own_device() -> None:
    fabric = Fabric()
    guids = {host.provider.devices()[-1].node_guid for host in two(fabric)}
    assert len(guids) == 2


@pytest.mark.parametrize("missing", ["10.0.0.9", "10.9.9.9", "fd00::9"])
def test_missing_neighbour_times_out(missing: str) -> None:
    fabric = Fabric()
    a, _ = two(fabric)
    with EventChannel(a.provider) as channel, CmId(channel) as cmid:
        cmid.resolve_addr((missing, PORT), timeout_ms=2000)
        assert outcome(fabric, channel) == (CmEventType.ADDR_ERROR, -errno.ETIMEDOUT)
        assert fabric.now == 2.0


def test_scripted_neighbour_takes_precedence() -> None:
    fabric = Fabric()
    a, _ = two(fabric)
    a.network.add_neighbour(2, ENDS[1], NeighbourState.FAILED)
    with EventChannel(a.provider) as channel, CmId(channel) as cmid:
        cmid.resolve_addr((ENDS[1], PORT), timeout_ms=2000)
        assert outcome(fabric, channel) == (CmEventType.ADDR_ERROR, -errno.ETIMEDOUT)


def broken_by_a_crash(fabric: Fabric) -> Callable[[], object]:
    fabric.crash("b")
    return lambda: fabric.host("b", *ENDS[1:], *ENDS6[1:])


def broken_by_a_partition(fabric: Fabric) -> Callable[[], object]:
    fabric.partition("a", "b")
    return fabric.heal


def broken_one_way(fabric: Fabric) -> Callable[[], object]:
    fabric.partition("b", "a", one_way=True)
    return fabric.heal


@pytest.mark.parametrize("broken", [broken_by_a_crash, broken_by_a_partition, broken_one_way])
def test_neighbour_answers_after_a_repair(broken: Callable[[Fabric], Callable[[], object]]) -> None:
    fabric = Fabric()
    a, _ = two(fabric)
    repair = broken(fabric)
    with EventChannel(a.provider) as channel, CmId(channel) as cmid:
        cmid.resolve_addr((ENDS[1], PORT), timeout_ms=2000)
        assert outcome(fabric, channel) == (CmEventType.ADDR_ERROR, -errno.ETIMEDOUT)
    with EventChannel(a.provider) as channel, CmId(channel) as cmid:
        cmid.resolve_addr((ENDS[1], PORT), timeout_ms=10_000)
        fabric.run(seconds=2.5)
        assert next_event(channel) is None
        repair()
        assert outcome(fabric, channel) == (CmEventType.ADDR_RESOLVED, 0)
        assert fabric.now == 5.0, "at the next solicitation"


def test_free_ports_depend_on_the_seed() -> None:
    def ports(seed: int) -> list[int]:
        a, _ = two(Fabric(seed))
        found = []
        with EventChannel(a.provider) as channel:
            for _ in range(3):
                with CmId(channel) as cmid:
                    cmid.bind_addr((ENDS[0], 0))
                    found.append(cmid.src_port)
        return found

    assert ports(1) == ports(1)
    assert ports(1) != ports(2)
    assert all(32768 <= port <= 60999 for seed in range(20) for port in ports(seed))


# -- handlers -----------------------------------------------------------------------------------------------------


def test_handler_receives_the_events_of_its_channel() -> None:
    fabric = Fabric()
    a, _ = two(fabric)
    seen: list[tuple[float, CmEventType]] = []

    def handler(event: CmEvent) -> None:
        seen.append((fabric.now, event.type))
        if event.type is CmEventType.ADDR_RESOLVED:
            event.id.resolve_route(2000)

    with EventChannel(a.provider) as channel, CmId(channel) as here, CmId(channel) as nowhere:
        a.on_event(channel, handler)
        nowhere.resolve_addr(("10.0.0.9", PORT), timeout_ms=1500)
        here.resolve_addr((ENDS[1], PORT))
        assert not seen, "handlers run only while the fabric runs"
        fabric.run()
    fabric.run()
    assert seen == [
        (0.0, CmEventType.ADDR_RESOLVED),
        (0.0, CmEventType.ROUTE_RESOLVED),
        (1.5, CmEventType.ADDR_ERROR),
    ]


def test_handler_is_not_reentered_while_it_waits() -> None:
    fabric = Fabric()
    a, _ = two(fabric)
    seen: list[tuple[str, float]] = []

    def handler(event: CmEvent) -> None:
        seen.append(("begin", fabric.now))
        assert not a.provider.drive(lambda: False, 5.0)
        seen.append(("end", fabric.now))

    with EventChannel(a.provider) as channel, CmId(channel) as first, CmId(channel) as second:
        a.on_event(channel, handler)
        first.resolve_addr((ENDS[1], PORT))
        second.resolve_addr(("10.0.0.9", PORT), timeout_ms=1000)
        fabric.run()
    assert seen == [("begin", 0.0), ("end", 5.0), ("begin", 5.0), ("end", 10.0)]


def test_handler_exception_propagates_from_run() -> None:
    fabric = Fabric()
    a, b = two(fabric)

    def handler(event: CmEvent) -> None:
        raise KeyError(event.type)

    with EventChannel(a.provider) as channel, CmId(channel) as cmid:
        a.on_event(channel, handler)
        cmid.resolve_addr((ENDS[1], PORT))
        with pytest.raises(KeyError):
            b.provider.drive(lambda: False, 1.0)
        with pytest.raises(ValueError, match="does not belong to host b"):
            b.on_event(channel, handler)


def test_handler_may_crash_its_host() -> None:
    fabric = Fabric()
    a, _ = two(fabric)
    seen: list[str] = []

    def crash(event: CmEvent) -> None:
        seen.append("one")
        fabric.crash("a")

    with EventChannel(a.provider) as one, EventChannel(a.provider) as two_, CmId(one) as first, CmId(two_) as second:
        a.on_event(one, crash)
        a.on_event(two_, lambda _: seen.append("two"))
        for cmid in (first, second, first):
            cmid.write_cm_event()
        fabric.run()
    assert seen == ["one"]


def test_closed_fabrics_leave_no_descriptors() -> None:
    def open_files() -> int:
        gc.collect()
        with open(os.devnull) as file:
            return file.fileno()

    def look(seed: int) -> None:
        for host in two(Fabric(seed)):
            assert host.provider.devices()

    before = open_files()
    for seed in range(50):
        look(seed)
    assert open_files() == before


def test_endless_handlers_raise() -> None:
    fabric = Fabric(max_steps=50)
    a, _ = two(fabric)
    with EventChannel(a.provider) as channel, CmId(channel) as cmid:
        a.on_event(channel, lambda event: event.id.write_cm_event())
        cmid.write_cm_event()
        with pytest.raises(SimulationError, match=r"trigger each other without end at 0\.0"):
            fabric.run()
