"""Rsockets with asyncio's readers and writers."""

from __future__ import annotations

import asyncio

import pytest

from rdmacm import aio, rsocket
from support.aio import in_loop


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()
    await writer.wait_closed()


@in_loop
async def test_many_clients_at_a_time() -> None:
    async def client(port: int, number: int) -> None:
        reader, writer = await aio.open_rsocket_connection("127.0.0.1", port)
        assert writer.get_extra_info("peername") == ("127.0.0.1", port)
        for turn in range(3):
            line = f"{number} {turn}\n".encode()
            writer.write(line)
            assert await reader.readline() == line
        writer.close()
        await writer.wait_closed()

    async with await aio.start_rsocket_server(echo, "127.0.0.1") as server:
        assert server.is_serving()
        await asyncio.gather(*(client(server.port, number) for number in range(5)))
    assert not server.is_serving()


@in_loop
async def test_more_than_all_buffers_hold() -> None:
    data = bytes(range(256)) * 8000
    async with await aio.start_rsocket_server(echo, "127.0.0.1") as server:
        reader, writer = await aio.open_rsocket_connection("127.0.0.1", server.port)
        transport = writer.transport
        writer.write(data)
        assert transport.get_write_buffer_size() > 0
        writer.write_eof()
        assert await reader.read() == data
        writer.close()
        await writer.wait_closed()


@in_loop
async def test_a_reader_that_does_not_read_pauses_the_peer() -> None:
    release = asyncio.Event()
    found: list[int] = []

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await release.wait()
        found.append(len(await reader.read()))
        writer.close()

    async with await aio.start_rsocket_server(slow, "127.0.0.1", limit=1000) as server:
        reader, writer = await aio.open_rsocket_connection("127.0.0.1", server.port)
        writer.write(bytes(1 << 20))
        drained = asyncio.ensure_future(writer.drain())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not drained.done()
        release.set()
        await drained
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
    assert found == [1 << 20]


@in_loop
async def test_nobody_listens() -> None:
    with rsocket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    with pytest.raises(ConnectionRefusedError):
        await aio.open_rsocket_connection(*address)


@in_loop
async def test_a_connection_that_is_aborted() -> None:
    ended = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with pytest.raises(ConnectionResetError):
            await reader.read()
        ended.set()
        writer.close()

    async with await aio.start_rsocket_server(handler, "127.0.0.1") as server:
        _, writer = await aio.open_rsocket_connection("127.0.0.1", server.port)
        writer.transport.abort()
        await ended.wait()


@in_loop
async def test_a_socket_of_a_thread_and_a_server_of_a_loop() -> None:
    def client(port: int) -> bytes:
        with rsocket.create_connection(("127.0.0.1", port)) as stream:
            stream.sendall(b"from a thread")
            return stream.recv(100)

    async with await aio.start_rsocket_server(echo, "127.0.0.1") as server:
        assert await asyncio.to_thread(client, server.port) == b"from a thread"
