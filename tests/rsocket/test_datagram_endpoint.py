"""Datagram rsockets with asyncio's transports and protocols."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

import pytest

from rdmacm import aio, rsocket
from support.aio import in_loop

ANY_PORT = ("127.0.0.1", 0)


class Protocol(asyncio.DatagramProtocol):
    """Keeps what it is told, and may answer."""

    def __init__(self, *, answers: bool = False) -> None:
        self.answers = answers
        self.transport: Any = None
        self.found: asyncio.Queue[tuple[bytes, Any]] = asyncio.Queue()
        self.errors: list[Exception] = []
        self.flow: list[str] = []
        self.resumed = asyncio.Event()
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.found.put_nowait((data, addr))
        if self.answers:
            self.transport.sendto(data.upper(), addr)

    def error_received(self, exc: Exception) -> None:
        self.errors.append(exc)

    def pause_writing(self) -> None:
        self.flow.append("pause")

    def resume_writing(self) -> None:
        self.flow.append("resume")
        self.resumed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)


async def endpoint(
    local: tuple[str, int] | None = ANY_PORT, remote: tuple[str, int] | None = None, *, answers: bool = False
) -> tuple[Any, Protocol]:
    return await aio.create_rsocket_datagram_endpoint(lambda: Protocol(answers=answers), local, remote)


async def closed(*transports: Any) -> None:
    for transport in transports:
        transport.close()
        assert transport.is_closing()
        assert await transport.get_protocol().lost is None


@in_loop
async def test_a_server_and_its_clients() -> None:
    server, _ = await endpoint(answers=True)
    address = server.get_extra_info("sockname")
    clients = [await endpoint(remote=address, local=None) for _ in range(3)]
    for turn in (b"one", b"two", b"three"):
        for transport, protocol in clients:
            assert protocol.transport is transport
            assert transport.get_extra_info("peername") == address
            transport.sendto(turn)
            assert await protocol.found.get() == (turn.upper(), address)
    await closed(server, *(transport for transport, _ in clients))


@in_loop
async def test_a_socket_of_a_thread() -> None:
    def client(address: Any) -> bytes:
        with rsocket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
            made.settimeout(20)
            made.connect(address)
            made.send(b"hello")
            return made.recv(100)

    server, _ = await endpoint(answers=True)
    assert await asyncio.to_thread(client, server.get_extra_info("sockname")) == b"HELLO"
    await closed(server)


@in_loop
async def test_addresses() -> None:
    """A remote address is the only one; without one, each datagram has its own."""
    server, found = await endpoint()
    connected, _ = await endpoint(remote=server.get_extra_info("sockname"))
    connected.sendto(b"x", server.get_extra_info("sockname"))
    assert (await found.found.get())[0] == b"x"
    with pytest.raises(ValueError, match="must be None or"):
        connected.sendto(b"x", ("127.0.0.1", 1))
    with pytest.raises(ValueError, match="an address is needed"):
        server.sendto(b"x")
    with pytest.raises(TypeError):
        server.sendto("text", ("127.0.0.1", 1))
    with pytest.raises(OSError, match="family"):
        server.sendto(b"x", ("::1", 1))
    with pytest.raises(ValueError, match="family"):
        await aio.create_rsocket_datagram_endpoint(Protocol)
    with pytest.raises(OSError, match="EADDRINUSE"):
        await endpoint(server.get_extra_info("sockname"))
    await closed(server, connected)


@in_loop
async def test_a_datagram_that_is_too_long_is_the_protocols() -> None:
    transport, protocol = await endpoint()
    transport.sendto(bytes(5000), ("127.0.0.1", 1))
    assert [getattr(error, "errno", None) for error in protocol.errors] == [errno.EMSGSIZE]
    await closed(transport)


@in_loop
async def test_a_protocol_that_sends_too_much_is_paused() -> None:
    server, found = await endpoint()
    client, protocol = await endpoint(remote=server.get_extra_info("sockname"))
    client._state.send = lambda _views, _key: False  # as if nothing had room
    for _ in range(200):
        client.sendto(bytes(500))
    assert protocol.flow == ["pause"]
    assert client.get_write_buffer_size() == 100_000
    del client._state.send
    await protocol.resumed.wait()
    assert protocol.flow == ["pause", "resume"]
    assert (await found.found.get())[0] == bytes(500)
    await closed(server, client)


@in_loop
async def test_what_was_sent_leaves_before_the_end() -> None:
    server, found = await endpoint()
    client, protocol = await endpoint(remote=server.get_extra_info("sockname"))
    client.sendto(b"last")
    client.close()
    client.sendto(b"nothing")
    assert await protocol.lost is None
    assert (await found.found.get())[0] == b"last"
    server.abort()
    server.abort()
    assert await server.get_protocol().lost is None
