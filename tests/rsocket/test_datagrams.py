"""Datagram rsockets on the software device: how they find each other, what Python's have, and what strangers send."""

from __future__ import annotations

import errno
import gc
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from rdmacm import CmId, PortSpace, rsocket
from rdmacm.proto.rsocket.headers import ServiceHeader, ServiceOperation, SourceHeader
from rdmacm.proto.rsocket.peers import PeerState
from rdmacm.rsocket.datagram_socket import DatagramSocket
from support.rows import for_each

LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
#: The longest datagram on a device with an MTU of 4,096 bytes.
LONGEST = {socket.AF_INET: 2040, socket.AF_INET6: 2024}
both_families = pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def make(stack: ExitStack, family: int = socket.AF_INET, *, bound: bool = True) -> DatagramSocket:
    made = stack.enter_context(rsocket.socket(family, socket.SOCK_DGRAM))
    assert isinstance(made, DatagramSocket)
    made.settimeout(20)
    if bound:
        made.bind((LOOPBACK[socket.AddressFamily(family)], 0))
    return made


def pair(stack: ExitStack, family: int = socket.AF_INET) -> tuple[DatagramSocket, DatagramSocket]:
    """Two sockets that know each other's queue pairs."""
    a, b = make(stack, family), make(stack, family)
    exchange(a, b)
    exchange(b, a)
    exchange(a, b)
    assert states(a) == states(b) == [PeerState.KNOWN]
    return a, b


def exchange(a: DatagramSocket, b: DatagramSocket, data: bytes = b"x") -> None:
    assert a.sendto(data, b.getsockname()) == len(data)
    assert b.recvfrom(4096) == (data, a.getsockname())


def states(each: DatagramSocket) -> list[PeerState]:
    assert each._end is not None
    each._serve()
    return [peer.state for peer in each._end._table._peers.values()]


# -- the way to a peer -----------------------------------------------------------------------------------------


@both_families
def test_two_sockets_find_each_other(stack: ExitStack, family: int) -> None:
    server, client = make(stack, family), make(stack, family, bound=False)
    client.connect(server.getsockname())
    assert client.send(b"first") == 5
    assert states(client) == [PeerState.ASKED]
    data, source = server.recvfrom(100)
    assert (data, source) == (b"first", client.getsockname())
    assert server.sendto(b"answer", source) == 6
    assert client.recv(100) == b"answer"
    assert client.send(b"second") == 6
    assert server.recv(100) == b"second"
    assert states(client) == states(server) == [PeerState.KNOWN]
    assert client.getpeername() == server.getsockname()


@both_families
def test_datagrams_of_every_length(stack: ExitStack, family: int) -> None:
    a, b = pair(stack, family)
    data = bytes(range(256)) * 8
    for size in range(LONGEST[socket.AddressFamily(family)] + 1):
        assert a.sendto(data[:size], b.getsockname()) == size
        assert b.recv(4096) == data[:size]
    with pytest.raises(OSError, match="is the most") as caught:
        a.sendto(data[: size + 1], b.getsockname())
    assert caught.value.errno == errno.EMSGSIZE


@both_families
def test_the_longest_datagram_through_udp(stack: ExitStack, family: int) -> None:
    a, b = make(stack, family), make(stack, family)
    longest = bytes(LONGEST[socket.AddressFamily(family)])
    exchange(a, b, longest)
    exchange(make(stack, family), b, b"")
    with pytest.raises(OSError, match="is the most"):
        make(stack, family).sendto(longest + b"x", b.getsockname())


def test_first_datagrams_may_be_lost(stack: ExitStack) -> None:
    """The peer is an ordinary UDP socket, which does not answer: each datagram asks again."""
    a = make(stack)
    peer = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    peer.bind(("127.0.0.1", 0))
    for number in range(3):
        a.sendto(b"%d" % number, peer.getsockname())
        datagram = peer.recv(100)
        assert datagram[16:] == b"%d" % number
        header = ServiceHeader.unpack(datagram, 4)
    assert (header.operation, header.address) == (ServiceOperation.DATA, bytes((127, 0, 0, 1)))
    assert a.id is not None
    assert header.qpn == a.id.qp.qp_num


def test_a_peer_that_was_started_again_is_found(stack: ExitStack) -> None:
    a, b = pair(stack)
    address = b.getsockname()
    b.close()
    again = make(stack, bound=False)
    again.bind(address)
    exchange(again, a)
    exchange(a, again)


def test_a_socket_sends_to_itself(stack: ExitStack) -> None:
    a = make(stack)
    for _ in range(3):
        exchange(a, a)
    assert states(a) == [PeerState.KNOWN]


def test_a_wildcard_has_a_queue_pair_for_each_address(stack: ExitStack) -> None:
    server = make(stack, bound=False)
    server.bind(("", 0))
    port = server.getsockname()[1]
    assert server.id is None
    for _ in range(2):
        client = make(stack)
        client.sendto(b"x", ("127.0.0.1", port))
        server.sendto(b"y", server.recvfrom(10)[1])
        assert client.recvfrom(10) == (b"y", ("127.0.0.1", port))
    assert server._end is not None
    assert len(server._end._ends) == 1


# -- as Python's sockets ---------------------------------------------------------------------------------------


def test_a_connected_socket_hears_its_peer_only(stack: ExitStack) -> None:
    a, b = pair(stack)
    stranger = make(stack)
    a.connect(b.getsockname())
    stranger.sendto(b"stranger", a.getsockname())
    b.sendto(b"peer", a.getsockname())
    assert a.recv(100) == b"peer"
    with pytest.raises(BlockingIOError):
        a.recv(100, socket.MSG_DONTWAIT)


def test_a_datagram_is_cut_to_the_buffer(stack: ExitStack) -> None:
    a, b = pair(stack)
    for _ in range(5):
        a.sendto(b"datagram", b.getsockname())
    assert b.recv(4, socket.MSG_PEEK) == b"data"
    assert b.recv(4) == b"data"
    assert b.recvmsg(4) == (b"data", [], socket.MSG_TRUNC, a.getsockname())
    parts = bytearray(4), bytearray(10)
    assert b.recvmsg_into(parts) == (8, [], 0, a.getsockname())
    assert bytes(parts[0]) + bytes(parts[1][:4]) == b"datagram"
    into = bytearray(4)
    assert b.recvfrom_into(into) == (4, a.getsockname())
    assert b.recv_into(into, 2) == 2


def test_a_message_of_several_buffers_is_one_datagram(stack: ExitStack) -> None:
    a, b = pair(stack)
    assert a.sendmsg([b"one", b"", b"two"], [], 0, b.getsockname()) == 6
    assert b.recv(100) == b"onetwo"
    a.connect(b.getsockname())
    a.sendall(b"three")
    assert b.recv(100) == b"three"


def test_timeouts(stack: ExitStack) -> None:
    a = make(stack)
    a.settimeout(0.01)
    with pytest.raises(TimeoutError):
        a.recv(1)
    a.setblocking(False)
    with pytest.raises(BlockingIOError):
        a.recv(1)


def test_poll_select_and_selectors(stack: ExitStack) -> None:
    a, b = make(stack), make(stack)
    assert rsocket.select([b], [a], [], 0) == ([], [a], [])
    selector = rsocket.Selector()
    key = selector.register(b, selectors.EVENT_READ)
    for _ in range(3):  # through UDP, then by a queue pair
        a.sendto(b"x", b.getsockname())
        assert selector.select(20) == [(key, selectors.EVENT_READ)]
        b.sendto(b.recv(1), a.getsockname())
        assert rsocket.select([a, b], [], [], 20) == ([a], [], [])
        a.recv(1)


def test_the_descriptor_is_readable(stack: ExitStack) -> None:
    a, b = make(stack), make(stack)
    with selectors.DefaultSelector() as selector:
        selector.register(b.fileno(), selectors.EVENT_READ)
        for _ in range(3):
            a.sendto(b"x", b.getsockname())
            data = None
            while data is None:
                assert selector.select(20)
                try:
                    data = b.recv(1, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
            b.sendto(b"y", a.getsockname())
            assert a.recv(1) == b"y"


def test_another_threads_datagram_wakes_a_receiver(stack: ExitStack) -> None:
    a, b = pair(stack)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(b.recv(10)))
    thread.start()
    a.sendto(b"x", b.getsockname())
    thread.join(20)
    assert found == [b"x"]


def test_shutdown(stack: ExitStack) -> None:
    a, b = pair(stack)
    with pytest.raises(OSError, match="not connected"):
        a.shutdown(socket.SHUT_RD)
    a.connect(b.getsockname())
    a.shutdown(socket.SHUT_RDWR)
    assert a.recv(10) == b""
    with pytest.raises(BrokenPipeError):
        a.send(b"x")


def test_a_receiver_that_does_not_read_loses_datagrams(stack: ExitStack) -> None:
    a, b = make(stack), make(stack, bound=False)
    b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * 2048)
    b.bind(("127.0.0.1", 0))
    for number in range(20):
        a.sendto(b"%d" % number, b.getsockname())
    assert [b.recv(10) for _ in range(4)] == [b"0", b"1", b"2", b"3"]


def test_a_port_is_one_of_udp_and_of_rdma_cm(stack: ExitStack) -> None:
    taken = make(stack)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other, pytest.raises(OSError, match="in use"):
        other.bind(taken.getsockname())
    with CmId(None, PortSpace.UDP, provider="soft") as cmid:
        cmid.bind_addr(("127.0.0.1", 0))
        with pytest.raises(OSError, match="EADDRINUSE"):
            make(stack, bound=False).bind(cmid.local_addr)
        address = cmid.local_addr
    make(stack, bound=False).bind(address)


def test_an_unclosed_socket_warns() -> None:
    made = rsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("127.0.0.1", 0))
    with pytest.warns(ResourceWarning, match="unclosed"):
        del made
        gc.collect()


@for_each(
    "name, arguments, code",
    [
        ("listen", (), errno.EOPNOTSUPP),
        ("accept", (), errno.EOPNOTSUPP),
        ("riomap", (bytearray(8),), errno.EOPNOTSUPP),
        ("riowrite", (b"x", 0), errno.EOPNOTSUPP),
        ("send", (b"x",), errno.EDESTADDRREQ),
        ("sendto", (b"x", socket.MSG_OOB, ("127.0.0.1", 1)), errno.EOPNOTSUPP),
        ("sendto", (b"x", ("224.0.0.1", 1)), errno.EOPNOTSUPP),
        ("sendmsg", ([b"x"], [(1, 1, b"")]), errno.EOPNOTSUPP),
        ("recv", (1, socket.MSG_OOB), errno.EOPNOTSUPP),
        ("getpeername", (), errno.ENOTCONN),
        ("bind", (("127.0.0.1", 0),), errno.EINVAL),
        ("setsockopt", (socket.SOL_SOCKET, socket.SO_RCVBUF, 4096), errno.EINVAL),
    ],
)
def test_refusals(name: str, arguments: tuple[object, ...], code: int) -> None:
    with ExitStack() as stack:
        made = make(stack)
        with pytest.raises(OSError, match=name) as caught:
            getattr(made, name)(*arguments)
        assert caught.value.errno == code


def test_a_subclass_is_one_of_streams() -> None:
    class Own(rsocket.socket):
        pass

    with Own() as made:
        assert made.type == socket.SOCK_STREAM
    with pytest.raises(OSError, match="EPROTONOSUPPORT"):
        Own(socket.AF_INET, socket.SOCK_DGRAM)


# -- strangers -------------------------------------------------------------------------------------------------


def test_strangers_on_the_udp_socket(stack: ExitStack) -> None:
    a, b = pair(stack)
    stranger = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    stranger.bind(("127.0.0.1", 0))
    good = ServiceHeader(ServiceOperation.DATA, 1, bytes(4)).pack()
    for datagram in (b"", b"x" * 2000, good[:-1], good[:5] + b"\1" + good[6:], bytes(16)):
        stranger.sendto(datagram, a.getsockname())
    exchange(b, a)
    a._serve()
    assert a._end is not None
    assert a._end._table.faults["service"] == 5
    stranger.sendto(good + b"data", a.getsockname())  # a queue pair that is not there
    assert a.recvfrom(100) == (b"data", stranger.getsockname())
    a.sendto(b"lost", stranger.getsockname())
    exchange(a, b)


def test_strangers_on_the_queue_pair(stack: ExitStack) -> None:
    """They have a queue pair of their own, and know the number of ours."""
    a, b = pair(stack)
    assert a._end is not None
    assert b._end is not None
    (found,) = b._end._handles.values()
    end, handle = found
    assert a.id is not None
    end._header = b""
    for message in (b"", b"short", bytes(100), SourceHeader(bytes(16), 1).pack()):
        assert end.send([memoryview(message)], handle, a.id.qp.qp_num)
    end._header = SourceHeader(bytes((10, 9, 9, 9)), 5).pack()
    assert end.send([memoryview(b"as UDP, it says who it is")], handle, a.id.qp.qp_num)
    assert a.recvfrom(100) == (b"as UDP, it says who it is", ("10.9.9.9", 5))
    assert a._end._table.faults["message"] == 4
