"""aio.start_server: a handler for each client, on loopback."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rdmacm import CmDisconnectedError, CmRejectedError, aio
from rdmacm.aio import AsyncConnection, start_server
from support.aio import in_loop


async def echo(conn: AsyncConnection) -> None:
    async for message in conn:
        await conn.send(message)


@in_loop
async def test_server_serves_many_clients_at_a_time() -> None:
    async def client(port: int, number: int) -> None:
        async with await aio.connect(("127.0.0.1", port), timeout=5) as conn:
            for turn in range(3):
                message = f"{number} {turn}".encode()
                await conn.send(message)
                assert await conn.recv() == message

    async with await start_server(echo, "127.0.0.1") as server:
        assert server.is_serving()
        assert server.address == ("127.0.0.1", server.port)
        await asyncio.gather(*(client(server.port, number) for number in range(5)))
    assert not server.is_serving()
    assert server.connections == 0


@in_loop
async def test_cancelled_client_ends_its_own_connection_only() -> None:
    async with await start_server(echo, "127.0.0.1") as server:
        async with await aio.connect(("127.0.0.1", server.port), timeout=5) as other, asyncio.TaskGroup() as group:
            await other.send(b"before")

            async def client() -> None:
                async with await aio.connect(("127.0.0.1", server.port), timeout=5) as conn:
                    await conn.recv()

            task = group.create_task(client())
            while server.connections < 2:
                await asyncio.sleep(0)
            task.cancel()
            assert await other.recv() == b"before"
            await asyncio.wait([task])
            await other.send(b"after")
            assert await other.recv() == b"after"


@in_loop
async def test_failure_of_a_handler_is_reported_and_the_server_goes_on() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    async def handler(conn: AsyncConnection) -> None:
        if await conn.recv() == b"fail":
            raise LookupError("of the handler")
        await conn.send(b"served")

    async with await start_server(handler, "127.0.0.1") as server:
        async with await aio.connect(("127.0.0.1", server.port), timeout=5) as conn:
            await conn.send(b"fail")
            with pytest.raises(CmDisconnectedError):
                await conn.recv()
        async with await aio.connect(("127.0.0.1", server.port), timeout=5) as conn:
            await conn.send(b"go on")
            assert await conn.recv() == b"served"
    assert [str(context["exception"]) for context in reported] == ["of the handler"]


@in_loop
async def test_client_that_goes_away_is_not_reported() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    async def handler(conn: AsyncConnection) -> None:
        await conn.recv()

    async with await start_server(handler, "127.0.0.1") as server:
        async with await aio.connect(("127.0.0.1", server.port), timeout=5):
            pass
    assert not reported


@in_loop
async def test_leaving_a_server_by_an_exception_cancels_its_handlers() -> None:
    conn = None
    with pytest.raises(LookupError):
        async with await start_server(echo, "127.0.0.1") as server:
            conn = await aio.connect(("127.0.0.1", server.port), timeout=5)
            await conn.send(b"x")
            await conn.recv()
            raise LookupError
    assert server.connections == 0
    assert conn is not None
    with pytest.raises(CmDisconnectedError):
        await conn.recv()
    await conn.close()


@in_loop
async def test_closed_server_lets_its_handlers_finish() -> None:
    async with await start_server(echo, "127.0.0.1") as server:
        async with await aio.connect(("127.0.0.1", server.port), timeout=5) as conn:
            await conn.send(b"1")
            assert await conn.recv() == b"1"
            server.close()
            await conn.send(b"2")
            assert await conn.recv() == b"2"
            with pytest.raises(CmRejectedError):
                await aio.connect(("127.0.0.1", server.port), timeout=5)


@in_loop
async def test_serve_forever_ends_when_it_is_cancelled() -> None:
    server = await start_server(echo, "127.0.0.1")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await server.serve_forever()
    await server.wait_closed()
    assert server.listener.closed
