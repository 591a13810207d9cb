"""Events and channels as the manual pages describe them, on a network in memory and virtual time."""

from __future__ import annotations

import errno
import gc
import logging
import os
import select
import socket
import threading

import pytest

import rdmacm
from rdmacm import AddrInfo, CmEvent, CmEventType, CmId, EventChannel, PortSpace, RaiFlag, State
from rdmacm.cmid import acks
from rdmacm.testing import MemoryNetwork, memory_provider
from support.world import World

# -- names ----------------------------------------------------------------------------------------------


def test_resolve_addrinfo_reports_by_event(world: World) -> None:
    with CmId(world.channel) as cmid:
        with pytest.raises(OSError, match="no resolved list") as failed:
            cmid.query_addrinfo()
        assert failed.value.errno == errno.ENOENT
        cmid.resolve_addrinfo("10.0.0.2", "7471", port_space=PortSpace.TCP)
        with pytest.raises(OSError, match="not over") as failed:
            cmid.resolve_addrinfo("10.0.0.2", "7471")
        assert failed.value.errno == errno.EBUSY
        world.one(CmEventType.ADDRINFO_RESOLVED)
        found = cmid.query_addrinfo()
        assert found == rdmacm.getaddrinfo("10.0.0.2", "7471", port_space=PortSpace.TCP, provider=world.provider)
        assert found[0].device == "soft_eth0"
        with pytest.raises(OSError, match="no resolved list") as failed:
            cmid.query_addrinfo()
        assert failed.value.errno == errno.ENOENT


def test_resolve_addrinfo_failure_is_an_event(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.resolve_addrinfo("300.1.1.1", "7471", flags=RaiFlag.NUMERICHOST)
        with world.channel.get_event(0) as event:
            assert (event.type, event.status) == (CmEventType.ADDRINFO_ERROR, rdmacm.EAI.NONAME)
            assert isinstance(event.error, rdmacm.GaiError)
            assert "300.1.1.1" in str(event.error)
        cmid.resolve_addrinfo("10.0.0.2", "7471")  # another lookup may follow
        world.one(CmEventType.ADDRINFO_RESOLVED)


def test_lookups_run_in_another_thread(world: World) -> None:
    asked, answer = threading.Event(), threading.Event()

    def slow(*_: object) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
        asked.set()
        assert answer.wait(10)
        return [(socket.AF_INET, 1, 6, "", ("10.0.0.2", 7471))]

    with CmId(world.channel) as cmid:
        cmid.resolve_addrinfo("storage-7", "7471", resolver=slow)
        assert asked.wait(10)
        assert world.events() == [], "the call has returned while the resolver waits"
        answer.set()
        with world.channel.get_event(10) as event:
            assert event.type is CmEventType.ADDRINFO_RESOLVED
        assert cmid.query_addrinfo()[0].dst_addr == ("10.0.0.2", 7471)


def test_destroy_cancels_a_lookup(world: World) -> None:
    asked, answer, done = threading.Event(), threading.Event(), threading.Event()

    def slow(*_: object) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
        asked.set()
        answer.wait(10)
        done.set()
        return []

    cmid = CmId(world.channel)
    cmid.resolve_addrinfo("storage-7", "7471", resolver=slow)
    assert asked.wait(10)
    cmid.destroy()
    answer.set()
    assert done.wait(10)
    for thread in threading.enumerate():
        if thread.name == "rdmacm-lookup":
            thread.join(10)
    assert world.events() == []


def test_resolver_exception_becomes_an_event(world: World) -> None:
    def broken(*_: object) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
        raise KeyError("oops")

    with CmId(world.channel) as cmid:
        cmid.resolve_addrinfo("storage-7", "7471", resolver=broken)
        with world.channel.get_event(10) as event:
            assert event.type is CmEventType.ADDRINFO_ERROR
            assert "oops" in str(event.error)


@pytest.mark.parametrize(
    ("node", "service", "flags", "bound", "code"),
    [
        ("10.0.0.2", "1", RaiFlag.SA, True, errno.EOPNOTSUPP),
        (None, "1", RaiFlag.SA | RaiFlag.DNS, True, errno.EOPNOTSUPP),
        (None, None, RaiFlag.SA, True, errno.EINVAL),
        (None, "1", RaiFlag.SA, False, errno.EINVAL),
        (None, "1", RaiFlag.SA, True, errno.EOPNOTSUPP),
    ],
)
def test_impossible_sa_resolution_raises_at_once(
    world: World, node: str | None, service: str | None, flags: RaiFlag, bound: bool, code: int
) -> None:
    with CmId(world.channel) as cmid:
        if bound:
            cmid.bind_addr(("10.0.0.1", 0))
        with pytest.raises(OSError) as failed:
            cmid.resolve_addrinfo(node, service, flags=flags)
        assert failed.value.errno == code
        assert world.events() == []
        cmid.resolve_addrinfo("10.0.0.2", "1")  # no lookup had started
        world.one(CmEventType.ADDRINFO_RESOLVED)


# -- events, acknowledgements, destruction ------------------------------------------------------------------


def test_user_event_is_delivered_with_its_values(world: World) -> None:
    with CmId(world.channel, context="mine") as cmid:
        cmid.write_cm_event(CmEventType.USER, -5, 77)
        with world.channel.get_event(0) as event:
            assert (event.id, event.type, event.status, event.arg) == (cmid, CmEventType.USER, -5, 77)
            assert event.id.context == "mine"
        with pytest.raises(OSError, match="USER") as failed:
            cmid.write_cm_event(CmEventType.ESTABLISHED)
        assert failed.value.errno == errno.EINVAL


def test_event_str_gives_cs_names() -> None:
    assert rdmacm.event_str(0) == "RDMA_CM_EVENT_ADDR_RESOLVED"
    assert rdmacm.event_str(CmEventType.USER) == "RDMA_CM_EVENT_USER"
    assert rdmacm.event_str(99) == "UNKNOWN EVENT"


def test_destroy_waits_for_unacknowledged_events(world: World) -> None:
    cmid = CmId(world.channel)
    cmid.write_cm_event()
    held, release, destroyed = threading.Event(), threading.Event(), threading.Event()

    def reader() -> None:
        with world.channel.get_event(0):
            held.set()
            release.wait(10)
            assert not destroyed.is_set()

    def destroyer() -> None:
        cmid.destroy()
        destroyed.set()

    threads = [threading.Thread(target=reader)]
    threads[0].start()
    assert held.wait(10)
    threads.append(threading.Thread(target=destroyer))
    threads[1].start()
    assert not destroyed.wait(0.05)
    release.set()
    assert destroyed.wait(10)
    for thread in threads:
        thread.join()


def test_wait_for_an_event_that_is_forgotten_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acks, "_LATENCY", 0.001)
    cmid = CmId(world.channel)
    cmid.write_cm_event()
    events: list[CmEvent] = []
    thread = threading.Thread(target=lambda: events.append(world.channel.get_event(0)))
    thread.start()
    thread.join()
    # The thread has ended, and its event is acknowledged once the warning is there.
    told = caplog.handler.emit

    def tell(record: logging.LogRecord) -> None:
        told(record)
        events[0].ack()

    monkeypatch.setattr(caplog.handler, "emit", tell)
    cmid.destroy()
    assert [record.getMessage() for record in caplog.records] == [
        "destroy_id waits for another thread to ack() an event that it has fetched (rdmacm doctor C4)"
    ]


def test_destroy_detects_a_self_deadlock(world: World) -> None:
    cmid = CmId(world.channel)
    cmid.write_cm_event()
    event = world.channel.get_event(0)
    with pytest.raises(OSError, match="holds an event") as failed:
        cmid.destroy()
    assert failed.value.errno == errno.EDEADLK
    assert cmid.state is State.IDLE, "the id is unchanged"
    event.ack()
    event.ack()
    cmid.destroy()
    cmid.destroy()
    assert (cmid._holders, cmid._events_completed) == ([], 1)


def test_unreferenced_event_is_acknowledged(world: World) -> None:
    cmid = CmId(world.channel)
    cmid.write_cm_event()
    world.channel.get_event(0)
    gc.collect()
    cmid.destroy()


def test_destroy_discards_queued_events(world: World) -> None:
    cmid, other = CmId(world.channel), CmId(world.channel)
    cmid.write_cm_event()
    other.write_cm_event(arg=1)
    cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=10)
    cmid.destroy()
    world.clock.advance(1)
    world.one(CmEventType.USER)
    assert cmid.state is State.DESTROYING
    other.destroy()


def test_leaked_objects_warn_and_are_released(world: World) -> None:
    cmid = CmId(world.channel)
    cmid.bind_addr(("", 7471))
    with pytest.warns(ResourceWarning, match="undestroyed id"):
        del cmid
        gc.collect()
    with CmId(world.channel) as again:
        again.bind_addr(("", 7471))  # the port is free again
    channel = EventChannel(world.provider)
    with pytest.warns(ResourceWarning, match="unclosed event channel"):
        del channel
        gc.collect()


def test_migrate_id_moves_queued_events(world: World) -> None:
    with EventChannel(world.provider) as second, CmId(world.channel) as cmid:
        cmid.write_cm_event(arg=1)
        cmid.write_cm_event(arg=2)
        world.channel.get_event(0).ack()
        cmid.migrate(second)
        assert cmid.channel is second
        assert world.events() == []
        cmid.resolve_addr(("10.0.0.2", 1))
        with second.get_event(0) as event:
            assert event.arg == 2
        with second.get_event(0) as event:
            assert event.type is CmEventType.ADDR_RESOLVED


def test_id_migrates_to_and_from_synchronous_mode(world: World) -> None:
    with CmId(world.channel) as cmid:
        cmid.migrate(None)
        assert cmid.is_synchronous
        with pytest.raises(OSError, match="already") as failed:
            cmid.migrate(None)
        assert failed.value.errno == errno.EINVAL
        cmid.resolve_addr(("10.0.0.2", 1))
        assert cmid.event.type is CmEventType.ADDR_RESOLVED
        cmid.migrate(world.channel)
        assert not cmid.is_synchronous
        cmid.resolve_route()
        world.one(CmEventType.ROUTE_RESOLVED)
        with EventChannel(memory_provider(MemoryNetwork())) as stranger, pytest.raises(OSError, match="provider"):
            cmid.migrate(stranger)


# -- synchronous mode -----------------------------------------------------------------------------------


def test_synchronous_calls_wait_and_raise() -> None:
    network = MemoryNetwork()
    eth0 = network.add_interface("eth0", "10.0.0.1/24")
    network.add_neighbour(eth0, "10.0.0.2")
    with CmId(provider=memory_provider(network)) as cmid:
        with pytest.raises(TimeoutError) as failed:
            cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=30)
        assert isinstance(failed.value, rdmacm.RdmaError)
        assert failed.value.explanation is not None
        assert failed.value.explanation.neighbour is not None
        cmid.resolve_addr(("10.0.0.2", 1))
        cmid.resolve_route()
        assert cmid.state is State.ROUTE_RESOLVED
        with pytest.raises(rdmacm.GaiError):
            cmid.resolve_addrinfo("300.1.1.1", "1", AddrInfo(flags=RaiFlag.NUMERICHOST))
        cmid.resolve_addrinfo("10.0.0.2", "1")
        assert cmid.query_addrinfo()[0].dst_addr == ("10.0.0.2", 1)


def test_synchronous_calls_ignore_other_events(world: World) -> None:
    with CmId(provider=world.provider) as cmid:
        cmid.write_cm_event(arg=5)
        cmid.resolve_addr(("10.0.0.2", 1))
        assert cmid.event.type is CmEventType.ADDR_RESOLVED


# -- channels -------------------------------------------------------------------------------------------


def test_get_event_waits_until_its_timeout(world: World) -> None:
    with pytest.raises(BlockingIOError) as nothing:
        world.channel.get_event(0)
    assert nothing.value.errno == errno.EAGAIN
    with pytest.raises(TimeoutError):
        world.channel.get_event(0.01)
    world.channel.blocking = False
    with pytest.raises(BlockingIOError):
        world.channel.get_event()


def test_channel_is_readable_for_an_event(world: World) -> None:
    poll = select.poll()
    poll.register(world.channel, select.POLLIN)
    assert poll.poll(0) == []
    with CmId(world.channel) as cmid:
        cmid.write_cm_event()
        assert poll.poll(0)
        world.channel.get_event(0).ack()
        assert poll.poll(0) == []
        threading.Thread(target=cmid.write_cm_event).start()
        assert poll.poll(5000)
        assert world.events() == [(CmEventType.USER, 0)]
        cmid.write_cm_event()
        assert poll.poll(0)
    assert poll.poll(0) == [], "the event was discarded with its id"


def test_channel_is_readable_for_a_deadline() -> None:
    network = MemoryNetwork()
    network.add_interface("eth0", "10.0.0.1/24")
    with EventChannel(memory_provider(network)) as channel, CmId(channel) as cmid:
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=30)
        assert poll.poll(5000)
        with channel.get_event(1) as event:
            assert event.status == -errno.ETIMEDOUT
        assert poll.poll(0) == []


def test_event_posted_by_another_thread_wakes_a_reader(world: World) -> None:
    found: list[CmEventType] = []

    def reader() -> None:
        with world.channel.get_event(10) as event:
            found.append(event.type)

    thread = threading.Thread(target=reader)
    thread.start()
    with CmId(world.channel) as cmid:
        cmid.resolve_addr(("10.0.0.2", 1))
        thread.join(10)
        assert found == [CmEventType.ADDR_RESOLVED]


def test_deadline_set_by_another_thread_wakes_a_reader() -> None:
    network = MemoryNetwork()
    network.add_interface("eth0", "10.0.0.1/24")
    with EventChannel(memory_provider(network)) as channel, CmId(channel) as cmid:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(channel.get_event(10).status))
        thread.start()
        cmid.resolve_addr(("10.0.0.3", 1), timeout_ms=50)
        thread.join(5)
        assert found == [-errno.ETIMEDOUT]


def test_close_ends_a_wait_and_an_iteration(world: World) -> None:
    before = set(os.listdir("/proc/self/fd"))
    seen: list[CmEventType] = []
    started = threading.Event()

    def reader() -> None:
        for event in world.channel:
            with event:
                seen.append(event.type)
                started.set()

    thread = threading.Thread(target=reader)
    thread.start()
    cmid = CmId(world.channel)
    cmid.write_cm_event()
    assert started.wait(10)
    world.channel.close()
    thread.join(10)
    assert not thread.is_alive()
    assert seen == [CmEventType.USER]
    assert set(os.listdir("/proc/self/fd")) <= before, "the last reader closes the channel's descriptor"
    with pytest.raises(OSError, match="closed") as failed:
        world.channel.get_event(0)
    assert failed.value.errno == errno.EBADF
    assert world.channel.fileno() == -1
    cmid.destroy()


def test_close_destroys_the_channels_ids(world: World) -> None:
    waiting, bound = CmId(world.channel), CmId(world.channel)
    waiting.resolve_addr(("10.0.0.3", 1), timeout_ms=1000)
    bound.bind_addr(("", 4444))
    world.channel.close()
    assert (waiting.state, bound.state) == (State.DESTROYING, State.DESTROYING)
    with pytest.raises(OSError, match="has been destroyed") as failed:
        bound.resolve_addr(("10.0.0.2", 1))
    assert failed.value.errno == errno.ENXIO
    waiting.destroy()
    bound.destroy()
    with EventChannel(world.provider) as channel, CmId(channel) as cmid:
        cmid.bind_addr(("", 4444))
        # The resolution of the destroyed id does not disturb a new one.
        other = CmId(channel)
        other.resolve_addr(("10.0.0.3", 1), timeout_ms=1000)
        world.network.add_neighbour(world.eth0, "10.0.0.3")
        with channel.get_event(0) as event:
            assert event.type is CmEventType.ADDR_RESOLVED
        other.destroy()


def test_provider_is_chosen_by_argument_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RDMACM_PROVIDER", "quantum")
    with pytest.raises(OSError, match="environment variable RDMACM_PROVIDER") as failed:
        EventChannel()
    assert failed.value.errno == errno.ENODEV
    with pytest.raises(OSError, match="argument"):
        EventChannel("wormhole")
    with EventChannel("soft") as channel:
        assert channel.provider.name == "soft"
    monkeypatch.delenv("RDMACM_PROVIDER")
    with EventChannel() as channel:
        assert channel.provider.name == "soft"
