"""Connections in asyncio, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rdmacm import (
    CmDisconnectedError,
    CmPermissionError,
    CmRejectedError,
    CmTimeoutError,
    GaiError,
    RdmaError,
    RemoteRegion,
    aio,
    connect,
)
from rdmacm.aio import AsyncConnection, AsyncListener
from rdmacm.provider import get_provider
from support.clock import eventually
from support.netns import python_environment


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    gc.collect()
    check_nothing_is_left()
    # A remaining driver would keep its loop alive; no public attribute shows it.
    assert not aio._Driver._all


@pytest.fixture(autouse=True, scope="module")
def _no_descriptors_left() -> Iterator[None]:
    before = descriptors()
    yield
    eventually(lambda: descriptors() <= before, "the helper thread closes its descriptors itself")


def check_nothing_is_left() -> None:
    provider = get_provider("soft")
    assert not provider.runtime.in_use  # type: ignore[attr-defined]
    assert len(provider.host.mux) == 0  # type: ignore[attr-defined]
    assert not provider.host.bound_ids  # type: ignore[attr-defined]


def run(main: Coroutine[Any, Any, None]) -> None:
    async def patiently() -> None:
        async with asyncio.timeout(40):
            await main

    asyncio.run(patiently())


@asynccontextmanager
async def connected(host: str = "127.0.0.1", **options: Any) -> AsyncIterator[tuple[AsyncConnection, AsyncConnection]]:
    async with await aio.listen((host, 0), **options) as listener:
        active, passive = await asyncio.gather(aio.connect((host, listener.port)), listener.accept())
        async with active, passive:
            yield active, passive


async def echo(listener: AsyncListener) -> None:
    """Serve every connection until cancelled."""

    async def serve(conn: AsyncConnection) -> None:
        async with conn:
            async for message in conn:
                await conn.send(message)

    async with asyncio.TaskGroup() as group:
        async for conn in listener:
            group.create_task(serve(conn))


# -- connections --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_every_operation_transfers_its_data(host: str) -> None:
    async def main() -> None:
        async with connected(host) as (active, passive):
            await active.send(b"hello")
            assert await passive.recv() == b"hello"
            await passive.send(b"number", 7)
            assert await active.recv_message() == (b"number", 7)
            memory = bytearray(1 << 20)
            region = passive.register(memory, remote_read=True, remote_write=True, remote_atomic=True)
            await passive.send(region.remote.pack())
            remote = RemoteRegion.unpack(await active.recv())
            data = os.urandom(1 << 20)
            await active.write(remote, data)
            assert memory == data
            assert await active.read(remote) == data
            into = bytearray(100)
            assert await active.read(remote[:100], into) is None
            assert into == data[:100]
            await active.write(remote[:3], b"imm", 9)
            assert await passive.recv_message() == (b"", 9)
            skip = -remote.addr % 8
            word = remote[skip : skip + 8]
            await active.write(word, bytes(8))
            assert await active.fetch_add(word, 3) == 0
            assert await active.compare_swap(word, 3, 5) == 3
            assert await active.fetch_add(word, 0) == 5
            assert active.steps[-1].name == "connect"
            assert active.explain().ok

    run(main())


def test_disconnecting_ends_pending_operations() -> None:
    async def main() -> None:
        async with connected() as (active, passive):
            await passive.send(b"one")
            await passive.send(b"two")
            await passive.disconnect()
            assert [message async for message in active] == [b"one", b"two"]
            with pytest.raises(CmDisconnectedError, match="the peer has disconnected"):
                await active.send(b"x")
            with pytest.raises(CmDisconnectedError):
                await passive.recv()
            await passive.close()
            await passive.close()
            assert passive.closed
        async with connected() as (active, passive):
            receiving = asyncio.create_task(active.recv())
            await asyncio.sleep(0)
            await active.close()
            with pytest.raises(CmDisconnectedError, match="closed locally"):
                await receiving
        for method in ("destroy", "destroy_qp"):
            async with connected() as (active, passive):
                waiting = [asyncio.create_task(active.recv()), asyncio.create_task(active.send(bytes(9)))]
                await asyncio.sleep(0)
                getattr(active.id, method)()
                for task in waiting:
                    with pytest.raises(CmDisconnectedError, match="the id or its queue pair was destroyed"):
                        await task

    run(main())


def test_one_descriptor_per_loop_while_connections_are_open() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with connected(), connected():
            # asyncio has no public list of a loop's readers.
            (driver,) = aio._Driver._all.values()
            fd = driver._fd
        assert not aio._Driver._all
        assert not loop.remove_reader(fd), "the driver has removed its reader"
        async with connected() as (active, passive):
            await active.send(b"and again")
            assert await passive.recv() == b"and again"

    run(main())


def test_rejection_and_refused_access_raise() -> None:
    async def main() -> None:
        async with await aio.listen(("", 0)) as listener:
            connecting = asyncio.create_task(aio.connect(("127.0.0.1", listener.port), private_data=b"me"))
            request = await listener.get_request()
            assert request.private_data.rstrip(b"\0") == b"me"
            request.reject(b"no")
            with pytest.raises(CmRejectedError) as caught:
                await connecting
            assert caught.value.private_data.rstrip(b"\0") == b"no"
            connecting = asyncio.create_task(aio.connect(("127.0.0.1", listener.port)))
            request = await listener.get_request()
            async with await request.accept(b"yes"), await connecting as conn:
                assert conn.private_data.rstrip(b"\0") == b"yes"
        with pytest.raises(CmRejectedError, match="nobody listens"):
            await aio.connect(("127.0.0.1", conn.id.dst_port))
        async with connected() as (active, passive):
            remote = passive.register(bytearray(8)).remote
            with pytest.raises(CmPermissionError, match="wrong key, range or permission"):
                await active.write(remote, b"x")

    run(main())


def waiting_requests(listener: aio.AsyncListener) -> int:
    """How many requests wait to be accepted; no public attribute shows that."""
    core: Any = listener._state
    ((_, backlog),) = core.cmid._backend.connector._listeners
    return len(backlog.requests) + (core._request is not None)


def test_requests_beyond_the_backlog_get_no_answer() -> None:
    """The listener holds the next request to accept, beside three in the backlog. Others try again later."""

    async def main() -> None:
        async with await aio.listen(("127.0.0.1", 0), backlog=3) as listener:
            waiting = []
            for _ in range(4):
                waiting.append(asyncio.create_task(aio.connect(("127.0.0.1", listener.port))))
                while waiting_requests(listener) < len(waiting):
                    await asyncio.sleep(0.001)
            for _ in range(3):
                with pytest.raises(CmTimeoutError, match="still in"):  # connect, unless the machine is busy
                    await aio.connect(("127.0.0.1", listener.port), timeout=0.05)
            for client in waiting:
                conn, other = await asyncio.gather(client, listener.accept())
                await conn.close()
                await other.close()

    run(main())


def test_timeouts_raise_and_lose_no_message() -> None:
    async def main() -> None:
        async with await aio.listen(("127.0.0.1", 0)) as listener:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await listener.accept()
            with pytest.raises(CmTimeoutError, match="still in"):
                await aio.connect(("127.0.0.1", listener.port), timeout=0.05)
        async with connected() as (active, passive):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await active.recv()
            await passive.send(b"no message was lost")
            assert await active.recv() == b"no message was lost"

    run(main())


def test_lookups_do_not_block_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def resolve(host: str, port: object, *more: int, **options: int) -> list[object]:
        asked.set()
        go_on.wait(20)
        if host == "unknown":
            raise socket.gaierror(socket.EAI_NONAME, "no")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", int(str(port))))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)

    async def main() -> None:
        listening = asyncio.create_task(aio.listen(("storage", 0)))
        while not asked.is_set():
            await asyncio.sleep(0.001)
        go_on.set()
        async with await listening as listener:
            for name in ("storage", "unknown"):
                asked.clear()
                go_on.clear()
                connecting = asyncio.create_task(aio.connect((name, listener.port)))
                while not asked.is_set():
                    await asyncio.sleep(0.001)
                go_on.set()
                if name == "unknown":
                    with pytest.raises(GaiError):
                        await connecting
                else:
                    conn, other = await asyncio.gather(connecting, listener.accept())
                    async with conn, other:
                        assert conn.steps[0].name == "name"

    run(main())


def test_two_hundred_connections_work_at_once() -> None:
    async def client(port: int, number: int) -> None:
        async with await aio.connect(("127.0.0.1", port), depth=2, max_message=100) as conn:
            for turn in range(3):
                await conn.send(b"%d %d" % (number, turn))
                assert await conn.recv() == b"%d %d" % (number, turn)

    async def main() -> None:
        async with await aio.listen(("127.0.0.1", 0), depth=2, max_message=100) as listener:
            serving = asyncio.create_task(echo(listener))
            await asyncio.gather(*(client(listener.port, number) for number in range(200)))
            listener.close()
            await serving

    run(main())


def test_busy_connection_yields_to_other_tasks() -> None:
    async def main() -> None:
        async with connected(depth=64) as (active, passive):

            async def flood() -> None:
                while True:
                    await active.send(b"x" * 100)

            async def drain() -> None:
                async for _ in passive:
                    pass

            busy = [asyncio.create_task(work()) for work in (flood, flood, flood, drain)]
            for _ in range(200):
                await asyncio.sleep(0)  # without yields it would be for ever
            assert not any(task.done() for task in busy)
            for task in busy:
                task.cancel()
            await asyncio.gather(*busy, return_exceptions=True)

    run(main())


def test_concurrent_operations_are_queued() -> None:
    async def main() -> None:
        async with connected() as (active, passive):
            region = passive.register(bytearray(64), remote_atomic=True)
            skip = -region.remote.addr % 8
            word = region.remote[skip : skip + 8]
            before = await asyncio.gather(*(active.fetch_add(word, 1) for _ in range(100)))
            assert sorted(before) == list(range(100))

    run(main())


def test_connections_work_across_threads_and_loops() -> None:
    """The progress of one thread wakes the loops and calls of other threads."""
    ports: list[int] = []
    ready, done = threading.Event(), threading.Event()

    def serve() -> None:
        async def main() -> None:
            async with await aio.listen(("127.0.0.1", 0)) as listener:
                serving = asyncio.create_task(echo(listener))
                ports.append(listener.port)
                ready.set()
                while not done.is_set():
                    await asyncio.sleep(0.01)
                listener.close()
                await serving

        asyncio.run(main())

    def talk() -> None:
        with connect(("127.0.0.1", ports[0]), timeout=20) as conn:
            for number in range(100):
                conn.send(b"%d" % number, timeout=20)
                assert conn.recv(20) == b"%d" % number

    server = threading.Thread(target=serve)
    server.start()
    ready.wait()
    clients = [threading.Thread(target=talk) for _ in range(3)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    done.set()
    server.join()


CHILD = """
import asyncio, sys
from rdmacm import aio
async def main():
    async with await aio.connect(("127.0.0.1", int(sys.argv[1]))) as conn:
        async for message in conn:
            await conn.send(message)
asyncio.run(main())
"""


def test_connection_to_another_process_works() -> None:
    async def main() -> None:
        async with await aio.listen(("127.0.0.1", 0)) as listener:
            argv = (sys.executable, "-c", CHILD, str(listener.port))
            with subprocess.Popen(argv, env=python_environment()) as child:
                async with await listener.accept() as conn:
                    for number in range(20):
                        await conn.send(b"%d" % number)
                        assert await conn.recv() == b"%d" % number
                assert await asyncio.to_thread(child.wait, 20) == 0

    run(main())


# -- cancellation -------------------------------------------------------------------------------------------


async def cancelled_at_every_turn(make: Callable[[], Awaitable[Callable[[], Coroutine[Any, Any, Any]]]]) -> int:
    """Cancel the operation that ``make()`` returns after 0, 1, 2 ... turns of the loop, until it is done earlier."""
    for turns in range(10_000):
        task = asyncio.create_task((await make())())
        for _ in range(turns):
            await asyncio.sleep(0)
        if task.done():
            result = await task
            if hasattr(result, "close"):
                await result.close()
            return turns
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    raise AssertionError("the operation never ends")


def test_connect_can_be_cancelled_at_any_step() -> None:
    async def main() -> None:
        async with await aio.listen(("127.0.0.1", 0), depth=1, max_message=100) as listener:
            serving = asyncio.create_task(echo(listener))

            async def make() -> Callable[[], Coroutine[Any, Any, Any]]:
                return lambda: aio.connect(("127.0.0.1", listener.port), depth=1, max_message=100)

            assert await cancelled_at_every_turn(make) > 3
            async with await aio.connect(("127.0.0.1", listener.port)) as conn:  # the listener still works
                await conn.send(b"x")
                assert await conn.recv() == b"x"
            listener.close()
            await serving
        check_nothing_is_left()

    run(main())


def test_lookup_can_be_cancelled() -> None:
    async def main() -> None:
        connecting = asyncio.create_task(aio.connect(("localhost", 1)))
        await asyncio.sleep(0)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        check_nothing_is_left()

    run(main())


def test_accept_can_be_cancelled_at_any_step() -> None:
    async def main() -> None:
        async with await aio.listen(("127.0.0.1", 0)) as listener:
            clients: list[asyncio.Task[AsyncConnection]] = []

            async def make() -> Callable[[], Coroutine[Any, Any, Any]]:
                if not clients:
                    clients.append(asyncio.create_task(aio.connect(("127.0.0.1", listener.port))))
                return listener.accept

            assert await cancelled_at_every_turn(make) > 1
            await (await clients[0]).close()

            clients.clear()
            turns = 0
            while True:  # the same for a request: cancelling rejects it, and the client connects again
                client = asyncio.create_task(aio.connect(("127.0.0.1", listener.port)))
                request = await listener.get_request()
                accepting = asyncio.create_task(request.accept())
                for _ in range(turns):
                    await asyncio.sleep(0)
                if accepting.done():
                    break
                accepting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await accepting
                del request
                with contextlib.suppress(RdmaError):
                    await (await client).close()
                turns += 1
            async with await accepting, await client:
                assert turns > 0
        check_nothing_is_left()

    run(main())


@pytest.mark.parametrize("name", ["recv", "send", "send own memory", "write", "read", "read into", "fetch_add"])
def test_operations_can_be_cancelled_at_any_step(name: str) -> None:
    async def main() -> None:
        async with await aio.listen(("127.0.0.1", 0), depth=4) as listener:
            open_ones: list[AsyncConnection] = []
            own = bytearray(50_000)

            async def make() -> Callable[[], Coroutine[Any, Any, Any]]:
                own.extend(b"x")  # raises BufferError if an operation still exports the memory
                for conn in open_ones:
                    await conn.close()
                active, passive = await asyncio.gather(aio.connect(("127.0.0.1", listener.port)), listener.accept())
                open_ones[:] = active, passive
                flags = {"remote_read": True, "remote_write": True, "remote_atomic": True}
                region = passive.register(bytearray(60_000), **flags)
                remote = region.remote[-region.remote.addr % 8 :][:55_000]
                if name == "recv":
                    await passive.send(b"message")
                return {
                    "recv": active.recv,
                    "send": lambda: active.send(bytes(50_000)),
                    "send own memory": lambda: active.send(own),
                    "write": lambda: active.write(remote, own),
                    "read": lambda: active.read(remote),
                    "read into": lambda: active.read(remote[:50_000], own),
                    "fetch_add": lambda: active.fetch_add(remote[:8], 1),
                }[name]

            assert await cancelled_at_every_turn(make) > 0
            for conn in open_ones:
                await conn.close()
            gc.collect()
        check_nothing_is_left()

    run(main())


def test_cancelled_send_completes_unless_its_memory_can_change() -> None:
    async def main() -> None:
        async with connected(depth=1) as (active, passive):
            await active.send(b"the only buffer is full")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await active.send(bytes(1000))
            assert await passive.recv() == b"the only buffer is full"
            assert await passive.recv() == bytes(1000), "bytes are immutable, so the send has completed"
            await active.send(b"full again")
            own = bytearray(1000)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await active.send(own)
            own.clear()
            with pytest.raises(CmDisconnectedError, match="a send was abandoned"):
                await active.send(b"x")
            assert [message async for message in passive] == [b"full again"]

    run(main())


def test_queued_operations_can_be_cancelled() -> None:
    async def main() -> None:
        async with connected(depth=1) as (active, passive):
            own = [bytearray(b"%4d" % number * 100) for number in range(40)]
            sends = [asyncio.create_task(active.send(data)) for data in own]
            await asyncio.sleep(0.01)
            for task in sends[20:]:
                task.cancel()
            await asyncio.gather(*sends[20:], return_exceptions=True)
            for data in own[20:]:
                data.clear()
            got = [int((await passive.recv())[:4]) for _ in range(20)]
            assert got == list(range(20))
            await asyncio.gather(*sends[:20])

    run(main())


def test_unclosed_objects_warn_and_are_released() -> None:
    async def main() -> None:
        async with connected() as (_, passive):
            async with await aio.listen(("127.0.0.1", 0)) as listener:
                active, other = await asyncio.gather(aio.connect(("127.0.0.1", listener.port)), listener.accept())
                await asyncio.sleep(0)  # the finished task drops its reference
                with pytest.warns(ResourceWarning, match="unclosed connection"):
                    del active
                    gc.collect()
                assert [message async for message in other] == []
                await other.close()
            assert not passive.closed

    run(main())
