"""Waiting for InfiniBand: in event loops, in threads, and while another thread destroys what a thread waits on."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import threading
from collections.abc import Callable
from typing import Self

import pytest

from infiniband.fabric import SimulatedFabric
from infiniband.hosts import ALL_BITS, SID, IbHost, param
from infiniband.sites import Embedded, OpenSM, Site
from rdmacm import CmEvent, CmEventType, CmId, EventChannel, RaiFlag, RdmaError, aio, getaddrinfo
from rdmacm.address import SockAddrIB
from rdmacm.provider.cmstate import State
from support.clock import REAL, Stopwatch, eventually


class Reader:
    """A channel's events in asyncio."""

    def __init__(self, channel: EventChannel) -> None:
        self.channel = channel
        self.events: asyncio.Queue[CmEvent] = asyncio.Queue()

    def look(self) -> None:
        with contextlib.suppress(BlockingIOError):  # progress without an event
            self.events.put_nowait(self.channel.get_event(timeout=0))

    async def next(self) -> CmEvent:
        return await asyncio.wait_for(self.events.get(), 10)

    def __enter__(self) -> Self:
        asyncio.get_running_loop().add_reader(self.channel.fileno(), self.look)
        self.look()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self.channel.fileno())


def test_asyncio_loop_resolves_and_connects(site: Site, a: IbHost, b: IbHost, offered: CmId) -> None:
    """Service lookup, route and connection, with both sides in one loop."""
    site.needs_real_time()

    async def serve(reader: Reader) -> CmId:
        with await reader.next() as request:
            server: CmId = request.id
            server.accept(param())
        with await reader.next() as established:
            assert established.type is CmEventType.ESTABLISHED
        return server

    async def main() -> None:
        with EventChannel(a.provider) as channel, a.id(channel) as cmid, Reader(channel) as client:
            with Reader(offered.channel) as listening:
                serving = asyncio.create_task(serve(listening))
                cmid.bind_addr(a.source)
                cmid.resolve_addrinfo(None, "storage", flags=RaiFlag.SA)
                with await client.next() as found:
                    assert found.type is CmEventType.ADDRINFO_RESOLVED
                (info,) = cmid.query_addrinfo()
                assert info.dst_addr == b.at()
                cmid.resolve_route()
                with await client.next() as found:
                    assert found.type is CmEventType.ROUTE_RESOLVED
                cmid.connect(param())
                with await client.next() as reply:
                    assert reply.type is CmEventType.CONNECT_RESPONSE
                cmid.establish()
                (await asyncio.wait_for(serving, 10)).destroy()

    asyncio.run(main())


@pytest.mark.wallclock
def test_timeout_wakes_the_event_loop() -> None:
    async def main() -> None:
        site = Embedded()
        with site.host("HostA") as a, EventChannel(a.provider) as channel, a.id(channel) as cmid:
            with Reader(channel) as reader:
                cmid.resolve_addr(a.at())
                (await reader.next()).ack()
                site.subnet.sa.silence = 1.0
                watch = Stopwatch()
                cmid.resolve_route(200)
                with await reader.next() as failed:
                    assert (failed.type, failed.status) == (CmEventType.ROUTE_ERROR, -errno.ETIMEDOUT)
                assert 0.199 <= watch.seconds < 5

    asyncio.run(main())


def test_aio_connections_need_queue_pairs(site: Site, a: IbHost, b: IbHost) -> None:
    """Messages need an adapter's queue pairs. Ids without them work in a loop, as above."""
    site.needs_real_time()

    async def main() -> None:
        with pytest.raises(RdmaError) as refused:
            await aio.connect(b.at(), provider=a.provider)
        assert refused.value.errno == errno.EOPNOTSUPP

    asyncio.run(main())


def test_open_channel_uses_a_restarted_fabric(own_fabric: SimulatedFabric) -> None:
    """The port of an open channel is opened again when needed, and the channel polls its new descriptor."""
    site = OpenSM(own_fabric)
    with site.host("HostA") as a, EventChannel(a.provider) as channel, a.id(channel) as cmid:
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN)
        own_gid = a.gid
        own_fabric.start_anew()
        cmid.resolve_addr(SockAddrIB(own_gid, SID, ALL_BITS))
        channel.get_event().ack()
        cmid.resolve_route(10_000)
        while cmid.state is State.ROUTE_QUERY:
            assert poll.poll(5000)
            with contextlib.suppress(BlockingIOError), channel.get_event(timeout=0) as found:
                assert found.type is CmEventType.ROUTE_RESOLVED


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    outcome: list[object] = []

    def work() -> None:
        try:
            outcome.append(call())
        except RdmaError as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, outcome


class TestThreads:
    """Threads wait because the administrator does not answer."""

    @pytest.fixture
    def site(self) -> Embedded:
        return Embedded()

    def test_destroying_the_id_cancels_a_registration(self, site: Embedded, b: IbHost) -> None:
        site.subnet.sa.silence = 1.0
        with EventChannel(b.provider), b.listening() as listener:
            thread, outcome = in_thread(lambda: listener.register_service("storage"))
            eventually(lambda: site.subnet.sa.requests)
            listener.destroy()
            thread.join(10)
        (error,) = outcome
        assert isinstance(error, RdmaError)
        assert error.errno == errno.ECANCELED

    def test_closing_the_last_channel_cancels_a_withdrawal(self, site: Embedded, b: IbHost) -> None:
        with b.listening() as listener:
            service = listener.register_service("storage")
            site.subnet.sa.silence = 1.0
            before = len(site.subnet.sa.requests)
            thread, outcome = in_thread(service.withdraw)
            eventually(lambda: len(site.subnet.sa.requests) > before)
            listener.channel.close()
            thread.join(1)
            assert not thread.is_alive()
            assert isinstance(outcome[0], RdmaError)

    def test_forked_child_does_not_withdraw_its_parents_services(self, site: Embedded, b: IbHost) -> None:
        listening = b.listening()
        listener = listening.__enter__()
        service, asked = listener.register_service("storage"), len(site.subnet.sa.requests)
        child = os.fork()
        if not child:
            status = 1
            try:
                b.provider.abandon()
                service.withdraw()
                listener.destroy()
                opened = any(port.is_open for port in site.subnet.ports.values())
                status = 2 if opened or len(site.subnet.sa.requests) != asked else 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert site.subnet.sa.services(REAL())
        listening.__exit__(None, None, None)

    def test_many_threads_query_at_once(self, site: Embedded, a: IbHost, b: IbHost, offered: CmId) -> None:
        site.subnet.sa.delay = 0.001

        def ask() -> bool:
            for _ in range(10):
                with a.resolved(b.at()) as cmid:
                    assert cmid.route.path_rec
                assert getaddrinfo(None, "storage", flags=RaiFlag.SA, provider=a.provider)
            return True

        threads = [in_thread(ask) for _ in range(8)]
        for thread, _ in threads:
            thread.join(20)
        assert [outcome for _, outcome in threads] == [[True]] * 8
