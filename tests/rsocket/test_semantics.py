"""What Python's sockets do, rsockets do: each test runs with both."""

from __future__ import annotations

import errno
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import pytest

from rdmacm import rsocket

#: Seconds after which a test that hangs fails.
_PATIENCE = 20


class Ends:
    """A listener, and connections to it, of one of the two modules."""

    def __init__(self, module: ModuleType, stack: ExitStack) -> None:
        self.module = module
        self._stack = stack
        self.listener = self.keep(module.create_server(("127.0.0.1", 0)))
        self.address = self.listener.getsockname()

    def keep(self, made: Any) -> Any:
        self._stack.callback(made.close)
        made.settimeout(_PATIENCE)
        return made

    def new(self) -> Any:
        return self.keep(self.module.socket(socket.AF_INET, socket.SOCK_STREAM))

    def pair(self) -> tuple[Any, Any]:
        client = self.new()
        client.connect(self.address)  # TCP's connection is there before accept(), too
        server, address = self.listener.accept()
        assert address == client.getsockname()
        return client, self.keep(server)


@pytest.fixture(params=[socket, rsocket], ids=["TCP", "rsocket"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with ExitStack() as stack:
        yield Ends(request.param, stack)


def receive(end: Any, size: int) -> bytes:
    """So many bytes. With a timeout, TCP's sockets do not know MSG_WAITALL."""
    found = b""
    while len(found) < size:
        part = end.recv(size - len(found))
        assert part
        found += part
    return found


def select_of(ends: Ends) -> Any:
    return select.select if ends.module is socket else rsocket.select


def test_names_of_both_ends(ends: Ends) -> None:
    client, server = ends.pair()
    assert client.getpeername() == server.getsockname() == ends.address
    assert server.getpeername() == client.getsockname()
    assert client.family == socket.AF_INET
    assert client.type == socket.SOCK_STREAM


def test_bytes_are_a_stream(ends: Ends) -> None:
    client, server = ends.pair()
    client.sendall(b"one")
    client.sendall(b"two")
    assert receive(server, 6) == b"onetwo"
    server.sendall(bytes(1000))
    assert len(client.recv(400)) == 400
    assert receive(client, 600) == bytes(600)


def test_more_than_the_buffers_hold(ends: Ends) -> None:
    client, server = ends.pair()
    data = bytes(range(256)) * 12_000
    sender = threading.Thread(target=client.sendall, args=(data,))
    sender.start()
    assert receive(server, len(data)) == data
    sender.join()


def test_the_end_of_the_stream(ends: Ends) -> None:
    client, server = ends.pair()
    client.sendall(b"last")
    client.close()
    assert server.recv(100) == b"last"
    assert server.recv(100) == b""
    assert server.recv(100) == b""


def test_half_closed(ends: Ends) -> None:
    client, server = ends.pair()
    client.sendall(b"question")
    client.shutdown(socket.SHUT_WR)
    assert receive(server, 8) == b"question"
    server.sendall(b"answer")
    server.close()
    assert receive(client, 6) == b"answer"
    with pytest.raises(BrokenPipeError):
        client.send(b"x")


def test_shut_for_reading(ends: Ends) -> None:
    client, server = ends.pair()
    client.shutdown(socket.SHUT_RD)
    assert client.recv(1) == b""
    client.sendall(b"still")
    assert receive(server, 5) == b"still"


def test_a_socket_that_does_not_block(ends: Ends) -> None:
    client, server = ends.pair()
    client.setblocking(False)
    with pytest.raises(BlockingIOError) as caught:
        client.recv(1)
    assert caught.value.errno == errno.EAGAIN
    with pytest.raises(BlockingIOError):
        while client.send(bytes(65536)):
            pass
    assert server.recv(10)
    ends.listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        ends.listener.accept()


def test_one_call_that_does_not_block(ends: Ends) -> None:
    client, server = ends.pair()
    client.setblocking(True)
    with pytest.raises(BlockingIOError):
        client.recv(1, socket.MSG_DONTWAIT)
    server.send(b"x")
    assert client.recv(1) == b"x"


def test_a_timeout(ends: Ends) -> None:
    client, _ = ends.pair()
    client.settimeout(0.01)
    assert client.gettimeout() == 0.01
    with pytest.raises(TimeoutError):
        client.recv(1)
    with pytest.raises(TimeoutError):
        while True:
            client.sendall(bytes(1 << 20))


def test_peek(ends: Ends) -> None:
    client, server = ends.pair()
    client.sendall(b"abc")
    assert server.recv(3, socket.MSG_PEEK) == b"abc"
    assert server.recv(2) == b"ab"
    assert server.recv(2) == b"c"


def test_many_buffers(ends: Ends) -> None:
    """Also for reading, where librdmacm's rsockets fill the first only."""
    client, server = ends.pair()
    assert client.sendmsg([b"abc", b"", bytearray(b"defg")]) == 7
    assert server.recv(7, socket.MSG_PEEK) == b"abcdefg"
    parts = [bytearray(2), bytearray(0), bytearray(4), bytearray(9)]
    assert server.recvmsg_into(parts)[0] == 7
    assert parts == [b"ab", b"", b"cdef", b"g" + bytes(8)]
    client.sendall(b"x")
    assert server.recvmsg(10)[:3] == (b"x", [], 0)


def test_files(ends: Ends) -> None:
    client, server = ends.pair()
    with client.makefile("rwb") as binary, server.makefile("rw", encoding="utf-8", newline="\n") as text:
        binary.write("grüße\nend\n".encode())
        binary.flush()
        assert text.readline() == "grüße\n"
        assert text.readline() == "end\n"
        text.write("answer\n")
        text.flush()
        assert binary.readline() == b"answer\n"
        client.close()  # the file keeps it
        binary.write(b"more\n")
        binary.flush()
        assert text.readline() == "more\n"
    assert server.recv(1) == b""


def test_nobody_listens(ends: Ends) -> None:
    ends.listener.close()
    with pytest.raises(ConnectionRefusedError):
        ends.new().connect(ends.address)
    assert ends.new().connect_ex(ends.address) == errno.ECONNREFUSED


def test_a_connection_that_is_not_waited_for(ends: Ends) -> None:
    client = ends.new()
    client.setblocking(False)
    assert client.connect_ex(ends.address) == errno.EINPROGRESS
    _, writable, _ = select_of(ends)([], [client], [], _PATIENCE)
    assert writable == [client]
    assert client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    server = ends.keep(ends.listener.accept()[0])
    server.sendall(b"x")
    assert select_of(ends)([client], [], [], _PATIENCE)[0] == [client]
    assert client.recv(1) == b"x"
    client.connect_ex(ends.address)  # TCP's first call finds that it has connected
    assert client.connect_ex(ends.address) == errno.EISCONN


def test_a_refusal_that_is_not_waited_for(ends: Ends) -> None:
    ends.listener.close()
    client = ends.new()
    client.setblocking(False)
    if client.connect_ex(ends.address) == errno.EINPROGRESS:  # TCP on loopback may know at once
        select_of(ends)([], [client], [], _PATIENCE)
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNREFUSED


@pytest.mark.parametrize("call", ["recv", "send", "getpeername", "shutdown"])
def test_calls_without_a_connection(ends: Ends, call: str) -> None:
    arguments = {"recv": (1,), "send": (b"x",), "getpeername": (), "shutdown": (socket.SHUT_WR,)}[call]
    with pytest.raises(OSError) as caught:
        getattr(ends.new(), call)(*arguments)
    assert caught.value.errno in (errno.ENOTCONN, errno.EPIPE)  # TCP's send() has the latter


def test_a_closed_socket(ends: Ends) -> None:
    client, _ = ends.pair()
    client.close()
    client.close()
    assert client.fileno() == -1
    with pytest.raises(OSError) as caught:
        client.recv(1)
    assert caught.value.errno == errno.EBADF


def test_a_port_that_is_in_use(ends: Ends) -> None:
    with pytest.raises(OSError) as caught:
        ends.new().bind(ends.address)
    assert caught.value.errno == errno.EADDRINUSE


def test_many_connections_wait_to_be_accepted(ends: Ends) -> None:
    clients = [ends.new() for _ in range(10)]
    for number, client in enumerate(clients):
        client.connect(ends.address)
        client.sendall(bytes((number,)))
    assert [ends.keep(ends.listener.accept()[0]).recv(1) for _ in clients] == [bytes((n,)) for n in range(10)]


def test_a_thread_that_reads_and_one_that_writes(ends: Ends) -> None:
    client, server = ends.pair()
    data = bytes(300_000)
    threads = [threading.Thread(target=end.sendall, args=(data,)) for end in (client, server)]
    for thread in threads:
        thread.start()
    assert receive(client, len(data)) == receive(server, len(data)) == data
    for thread in threads:
        thread.join()


def test_create_connection(ends: Ends) -> None:
    with ends.module.create_connection(ends.address, _PATIENCE) as client:
        assert client.gettimeout() == _PATIENCE
        server = ends.keep(ends.listener.accept()[0])
        client.sendall(b"x")
        assert server.recv(1) == b"x"


def test_shutdown_wakes_a_thread_that_reads(ends: Ends) -> None:
    client, _ = ends.pair()
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(client.recv(1)))
    reader.start()
    client.shutdown(socket.SHUT_RDWR)
    reader.join()
    assert found == [b""]
