"""What rsockets have that Python's sockets have not, and what they refuse."""

from __future__ import annotations

import errno
import gc
import io
import mmap
import os
import pickle
import selectors
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from rdmacm import CmId, rsocket
from rdmacm.proto.rsocket.messages import ConnectionData, Operation, Target, immediate
from rdmacm.proto.rsocket.states import State
from rdmacm.provider.connparam import ConnParam
from rdmacm.rsocket.options import StreamOptions
from rdmacm.testing import LOSE, Fabric
from rdmacm.verbs import QP, RecvWR, SendFlag, SendWR, WROpcode
from support.rows import for_each


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def pair(stack: ExitStack, **options: int) -> tuple[rsocket.socket, rsocket.socket]:
    """A client and the server's end; the options are those of SOL_RDMA and SOL_SOCKET at both ends."""
    listener, client = stack.enter_context(rsocket.socket()), stack.enter_context(rsocket.socket())
    for name, value in options.items():
        level = rsocket.SOL_RDMA if name.startswith("RDMA") else socket.SOL_SOCKET
        for each in (listener, client):
            each.setsockopt(level, getattr(rsocket if level == rsocket.SOL_RDMA else socket, name), value)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    client.connect(listener.getsockname())
    return client, stack.enter_context(listener.accept()[0])


# -- options ---------------------------------------------------------------------------------------------------


@for_each(
    "level, name, given, kept",
    [
        (socket.SOL_SOCKET, socket.SO_RCVBUF, 4001, 4002),
        (socket.SOL_SOCKET, socket.SO_RCVBUF, 1, 32),
        (socket.SOL_SOCKET, socket.SO_SNDBUF, 4001, 4001),
        (socket.SOL_SOCKET, socket.SO_SNDBUF, (1 << 31) - 1, 1 << 30),
        (socket.SOL_SOCKET, socket.SO_REUSEADDR, 5, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1, 1),
        (socket.SOL_SOCKET, socket.SO_OOBINLINE, 1, 1),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 0, 0),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30, 30),
        (rsocket.SOL_RDMA, rsocket.RDMA_SQSIZE, 3, 16),
        (rsocket.SOL_RDMA, rsocket.RDMA_RQSIZE, 1 << 20, 0xFFFE),
        (rsocket.SOL_RDMA, rsocket.RDMA_INLINE, 0, 0),
        (rsocket.SOL_RDMA, rsocket.RDMA_IOMAPSIZE, 300, 256),
        (rsocket.SOL_RDMA, rsocket.RDMA_IOMAPSIZE, 1 << 20, 32512),
    ],
)
def test_options_are_kept(level: int, name: int, given: int, kept: int) -> None:
    with rsocket.socket() as made:
        made.setsockopt(level, name, given)
        assert made.getsockopt(level, name) == kept
        made.setsockopt(level, name, struct.pack("i", given))
        assert made.getsockopt(level, name, 4) == struct.pack("i", kept)


def test_the_defaults_are_librdmacms() -> None:
    assert StreamOptions() == StreamOptions(1 << 17, 1 << 17, 384, 384, 64, 0)


def test_linger_is_a_structure() -> None:
    with rsocket.socket() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 5))
        assert made.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8) == struct.pack("ii", 1, 5)


@for_each(
    "level, name, value, code",
    [
        (socket.SOL_SOCKET, 9999, 1, errno.ENOPROTOOPT),
        (rsocket.SOL_RDMA, 99, 1, errno.ENOPROTOOPT),
        (socket.SOL_SOCKET, socket.SO_SNDBUF, -1, errno.EINVAL),
        (socket.SOL_SOCKET, socket.SO_SNDBUF, b"x", errno.EINVAL),
        (socket.SOL_SOCKET, socket.SO_LINGER, 1, errno.EINVAL),
        (rsocket.SOL_RDMA, rsocket.RDMA_ROUTE, 1, errno.EINVAL),
    ],
)
def test_other_options_are_refused(level: int, name: int, value: int | bytes, code: int) -> None:
    with rsocket.socket() as made, pytest.raises(OSError) as caught:
        made.setsockopt(level, name, value)
    assert caught.value.errno == code


def test_sizes_are_set_before_the_connection(stack: ExitStack) -> None:
    client, server = pair(stack, SO_SNDBUF=5000, SO_RCVBUF=3000, RDMA_SQSIZE=16, RDMA_RQSIZE=20)
    assert server.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 3000
    data = bytes(range(256)) * 100
    client.setblocking(False)
    sent, found = 0, b""
    while len(found) < len(data):
        entry = rsocket.poll([(client, 4 if sent < len(data) else 0), (server, 1)], 10)
        for ready, _ in entry:
            if ready is client:
                sent += client.send(data[sent:])
            else:
                found += server.recv(10_000)
    assert found == data
    with pytest.raises(OSError) as caught:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    assert caught.value.errno == errno.EINVAL


# -- what is refused -------------------------------------------------------------------------------------------


@for_each(
    "arguments, code",
    [
        ((socket.AF_UNIX,), errno.EAFNOSUPPORT),
        ((socket.AF_INET, socket.SOCK_RAW), errno.EPROTONOSUPPORT),
        ((socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_TCP), errno.EPROTONOSUPPORT),
        ((socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_UDP), errno.EPROTONOSUPPORT),
    ],
)
def test_other_sockets_are_refused(arguments: tuple[int, ...], code: int) -> None:
    with pytest.raises(OSError) as caught:
        rsocket.socket(*arguments)
    assert caught.value.errno == code


def test_the_connection_is_not_in_the_descriptor(stack: ExitStack) -> None:
    client, _ = pair(stack)
    for call in (client.detach, client.dup):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EOPNOTSUPP
    with pytest.raises(OSError):
        client.recv(1, socket.MSG_OOB)
    with pytest.raises(OSError):
        client.sendmsg([b"x"], [(1, 1, b"")])


def test_texts_name_the_ends() -> None:
    """Of each kind of socket, also of one that is being connected."""
    with rsocket.create_server(("127.0.0.1", 0)) as listener, rsocket.socket() as client:
        assert repr(client) == "<rsocket new>"
        assert client.getsockname() == ("0.0.0.0", 0)
        port = listener.getsockname()[1]
        assert repr(listener) == f"<rsocket listening 127.0.0.1:{port} -> ->"
        client.setblocking(False)
        client.connect_ex(("127.0.0.1", port))
        assert repr(client).startswith("<rsocket stream ")
        assert len(client.getsockname()) == 2
        listener.accept()[0].close()
    assert repr(client) == repr(listener) == "<rsocket closed>"


def test_what_cannot_be_an_argument(stack: ExitStack, tmp_path: Path) -> None:
    client, _ = pair(stack)
    (tmp_path / "text").write_text("text")
    with (tmp_path / "text").open() as text, pytest.raises(ValueError, match="binary mode"):
        client.sendfile(text)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="positive integer"):
        client.sendfile(io.BytesIO(), count=0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        pickle.dumps(client)
    with pytest.raises(OSError) as caught:
        client.set_inheritable(True)
    assert caught.value.errno == errno.EOPNOTSUPP


class _Recorder:
    """A queue pair that keeps what is posted."""

    def __init__(self, qp: QP) -> None:
        self._qp = qp
        self.posted: list[SendWR] = []

    def post_send(self, requests: list[SendWR]) -> None:
        self.posted += requests
        self._qp.post_send(requests)

    def post_recv(self, requests: list[RecvWR]) -> None:
        self._qp.post_recv(requests)


def test_few_requests_report_their_completion(stack: ExitStack) -> None:
    client, server = pair(stack)
    state = client._state
    assert state is not None
    assert state._qp is not None
    recorder: Any = _Recorder(state._qp)
    state._qp = recorder
    for _ in range(160):
        client.send(b"x")
        assert server.recv(1) == b"x"
    data = [wr for wr in recorder.posted if wr.sg]
    assert len(data) == 160
    assert sum(bool(wr.send_flags & SendFlag.SIGNALED) for wr in data) == 10
    for _ in range(200):  # four times the ring: each part of it is used again
        client.sendall(bytes(2600))
        assert len(server.recv(2600, socket.MSG_WAITALL)) == 2600


def test_close_waits_for_requests_that_report_nothing(stack: ExitStack) -> None:
    """The peer has closed both halves and keeps its connection, so no message of ours completes after the data."""
    client, server = pair(stack)
    client.send(b"x")
    server.shutdown(socket.SHUT_RDWR)
    assert client.recv(1) == b""
    client.close()
    assert server.id is not None
    assert server.id.qp is not None


def test_a_forgotten_socket_warns_and_ends_its_connection(stack: ExitStack) -> None:
    with rsocket.create_server(("127.0.0.1", 0)) as listener:
        client = rsocket.create_connection(listener.getsockname())
        server = stack.enter_context(listener.accept()[0])
        with pytest.warns(ResourceWarning, match="unclosed rsocket"):
            del client
            gc.collect()
        with pytest.raises(ConnectionResetError):
            server.recv(1)


# -- waiting for several ---------------------------------------------------------------------------------------


def test_a_selector_takes_both_kinds_of_sockets(stack: ExitStack) -> None:
    client, server = pair(stack)
    here, there = socket.socketpair()
    with rsocket.Selector() as selector, here, there:
        selector.register(server, selectors.EVENT_READ, "rsocket")
        selector.register(here, selectors.EVENT_READ, "socket")
        assert selector.select(0) == []
        there.send(b"x")
        assert [(key.data, events) for key, events in selector.select(10)] == [("socket", selectors.EVENT_READ)]
        here.recv(1)
        client.sendall(b"y")
        assert [(key.data, events) for key, events in selector.select(10)] == [("rsocket", selectors.EVENT_READ)]
        selector.modify(server, selectors.EVENT_READ | selectors.EVENT_WRITE)
        ((key, events),) = selector.select(10)
        assert (key.fileobj, events) == (server, selectors.EVENT_READ | selectors.EVENT_WRITE)
        selector.unregister(server)
        assert selector.select(0) == []
        with pytest.raises(KeyError):
            selector.unregister(server)


def test_the_descriptor_is_readable_when_there_is_something(stack: ExitStack) -> None:
    client, server = pair(stack)
    with selectors.DefaultSelector() as selector:
        selector.register(server.fileno(), selectors.EVENT_READ)
        client.sendall(b"abc")
        server.setblocking(False)
        found = b""
        while not found:
            assert selector.select(10)
            try:
                found = server.recv(1)
            except BlockingIOError:
                continue
        assert selector.select(10), "two bytes are left"
        assert found + server.recv(2) == b"abc"


# -- I/O mappings ----------------------------------------------------------------------------------------------


def test_mapped_memory(stack: ExitStack) -> None:
    client, server = pair(stack, RDMA_IOMAPSIZE=2)
    memory = bytearray(1000)
    offset = server.riomap(memory, mmap.PROT_WRITE, 0, 5000)
    assert offset == 5000
    server.sendall(b"mapped")
    assert client.recv(10) == b"mapped"
    assert client.riowrite(b"abc", 5010) == 3
    client.sendall(b"written")
    assert server.recv(10) == b"written"
    assert memory[8:15] == b"\0\0abc\0\0"
    with pytest.raises(OSError) as caught:
        client.riowrite(b"x", 6000)
    assert caught.value.errno == errno.EFAULT
    server.riomap(bytearray(1))
    with pytest.raises(OSError) as caught:
        server.riomap(bytearray(1))
    assert caught.value.errno == errno.ENOSPC
    server.riounmap(offset)
    server.sendall(b"x")
    assert client.recv(1) == b"x"
    with pytest.raises(OSError):
        client.riowrite(b"x", 5010)


# -- peers -----------------------------------------------------------------------------------------------------


def _stranger(port: int, private_data: bytes) -> CmId:
    cmid = CmId()
    try:
        cmid.resolve_addr(("127.0.0.1", port))
        cmid.resolve_route()
        cmid.create_qp()
        cmid.connect(ConnParam(private_data=private_data))
    except BaseException:
        cmid.destroy()
        raise
    return cmid


@for_each("private_data", [b"", b"\x02" + bytes(55), b"hello"])
def test_a_peer_that_is_no_rsocket_is_rejected(private_data: bytes) -> None:
    before = rsocket.query_faults().get("NO_RSOCKET", 0)
    with rsocket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(ConnectionRefusedError):
            _stranger(listener.getsockname()[1], private_data)
    assert rsocket.query_faults()["NO_RSOCKET"] == before + 1


def test_a_listener_that_is_no_rsocket() -> None:
    with CmId() as listener:
        listener.bind_addr(("127.0.0.1", 0))
        listener.listen()
        client = rsocket.socket()
        client.setblocking(False)
        client.connect_ex(("127.0.0.1", listener.src_port))
        request = listener.get_request(10)
        request.create_qp()
        request.accept(ConnParam(private_data=b"no rsocket"))
        rsocket.poll([(client, 4)], 10)
        with pytest.raises(OSError, match=r"no rsocket of this version.*create_server") as caught:
            client.connect(("127.0.0.1", listener.src_port))
        assert caught.value.errno == errno.EOPNOTSUPP
        client.close()
        request.destroy()


def test_a_peer_that_breaks_the_protocol_is_disconnected_and_counted() -> None:
    with rsocket.create_server(("127.0.0.1", 0)) as listener:
        data = ConnectionData(16, 0, Target(0, 0, 2), Target(0, 0, 0), 0).pack()
        stranger = _stranger(listener.getsockname()[1], data)
        before = rsocket.query_faults().get("MORE_BYTES", 0)
        with listener.accept()[0] as server:
            assert stranger.qp is not None
            message = SendWR(opcode=WROpcode.RDMA_WRITE_WITH_IMM, imm_data=immediate(Operation.DATA, 1 << 20))
            stranger.qp.post_send(message)
            with pytest.raises(ConnectionResetError, match="more bytes"):
                server.recv(1)
        assert rsocket.query_faults()["MORE_BYTES"] == before + 1
        stranger.destroy()


def test_a_mapping_at_the_end_of_the_address_space() -> None:
    """An address that would have 65 bits begins again at 0, where the peer's device refuses it."""
    with rsocket.create_server(("127.0.0.1", 0)) as listener:
        data = ConnectionData(16, 0, Target(0, 0, 2), Target((1 << 64) - 10, 0, 100), 0).pack()
        stranger = _stranger(listener.getsockname()[1], data)
        with listener.accept()[0] as server:
            assert server.send(bytes(15)) + server.send(bytes(15)) == 30
            with pytest.raises(ConnectionResetError, match="access"):
                server.recv(1)
        stranger.destroy()


def test_a_peer_that_disconnects_within_the_stream(stack: ExitStack) -> None:
    client, server = pair(stack)
    client.sendall(b"some")
    assert server.id is not None
    server.id.disconnect()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    with pytest.raises(ConnectionResetError):
        client.send(b"x")


# -- simulation ------------------------------------------------------------------------------------------------


def test_two_hosts_of_a_fabric_with_loss() -> None:
    """Single-threaded, in virtual time: the listener's host answers while the client waits."""
    fabric = Fabric(3, loss=0.02)
    a, b = fabric.host("a", "10.0.0.1"), fabric.host("b", "10.0.0.2")
    with rsocket.create_server(("10.0.0.2", 7471), provider=b.provider) as listener:
        with rsocket.create_connection(("10.0.0.2", 7471), provider=a.provider) as client:
            server = listener.accept()[0]
            data = bytes(range(256)) * 300
            client.sendall(data)
            assert server.recv(len(data), socket.MSG_WAITALL) == data
            server.close()
            assert client.recv(1) == b""
            assert client._state is not None
            assert client._state.engine is not None
            assert client._state.engine.state is State.CLOSED


@for_each("sends", [True, False])
def test_a_peer_that_dies(sends: bool) -> None:
    """It is noticed because data are not acknowledged, or a probe of SO_KEEPALIVE is not."""
    fabric = Fabric(5)
    a, b = fabric.host("a", "10.0.0.1"), fabric.host("b", "10.0.0.2")
    with rsocket.create_server(("10.0.0.2", 7471), provider=b.provider) as listener:
        with (
            rsocket.create_connection(("10.0.0.2", 7471), provider=a.provider) as client,
            listener.accept()[0] as server,
        ):
            server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, not sends)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
            fabric.crash("b")
            if sends:
                client.send(b"x")
            with pytest.raises(ConnectionResetError, match=r"the peer does not answer.*rdmacm check"):
                client.recv(1)


def test_connections_beyond_the_backlog_wait() -> None:
    fabric = Fabric(5)
    a, b = fabric.host("a", "10.0.0.1"), fabric.host("b", "10.0.0.2")
    with ExitStack() as stack:
        listener = stack.enter_context(rsocket.socket(provider=b.provider))
        listener.bind(("10.0.0.2", 7471))
        listener.listen(2)
        clients = [stack.enter_context(rsocket.socket(provider=a.provider)) for _ in range(5)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(("10.0.0.2", 7471))
        fabric.run(seconds=2.0)
        assert sum(client._state is not None and client._state.is_established for client in clients) == 2
        listener.settimeout(60)
        for _ in clients:
            stack.enter_context(listener.accept()[0])


def test_what_a_peer_sent_before_its_rtu_was_lost_is_not_lost() -> None:
    """The peer connects, sends and closes while none of its RTUs arrives: its messages imply them."""
    fabric = Fabric(5)
    a, b = fabric.host("a", "10.0.0.1"), fabric.host("b", "10.0.0.2")
    fabric.faults = lambda packet: LOSE if packet.kind == "RTU" else None
    with rsocket.create_server(("10.0.0.2", 7471), provider=b.provider) as listener:
        with rsocket.create_connection(("10.0.0.2", 7471), provider=a.provider) as client:
            client.sendall(b"sent")
        with listener.accept()[0] as server:
            assert server.recv(10) == b"sent"
            assert server.recv(10) == b""


def test_in_a_child_of_fork_the_connection_is_the_parents(stack: ExitStack) -> None:
    client, server = pair(stack)

    child = os.fork()
    if not child:
        status = 1
        try:
            with suppress(BlockingIOError):
                client.send(b"x")
        except OSError as error:
            status = 0 if error.errno == errno.EBADF else 2
        try:
            client.close()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    client.sendall(b"of the parent")
    assert server.recv(100) == b"of the parent"
