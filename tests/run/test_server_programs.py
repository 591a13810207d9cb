"""Programs at the control server: what they own, hostile ones, and those that end at any moment."""

from __future__ import annotations

import array
import errno
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from rdmacm.address import unpack_address
from rdmacm.constants import CmEventType, PortSpace
from rdmacm.proto.constants import QPN_BITS
from rdmacm.provider.connparam import ConnParam
from rdmacm.run import protocol
from rdmacm.run.protocol import Request
from rdmacm.run.server import Server
from rdmacm.soft.wire.udp import UdpWire
from support.clock import eventually
from support.run_client import Channel, Client, Id, inet

HOST = "127.0.0.1"

#: A program that does what its first argument says, then reports, and waits for its end.
_PROGRAM = """
import sys
from support.run_client import *
client = Client(sys.argv[1])
{body}
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def program(served: Server, body: str) -> Iterator[subprocess.Popen[str]]:
    """Another process, which has done what ``body`` says."""
    path = os.pathsep.join(each for each in sys.path if each)
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM.format(body=body), served.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def own_slots(served: Server) -> list[int]:
    """The slots that the server owns, its own among them."""
    wire = served.provider.host.mux.wire
    assert isinstance(wire, UdpWire)
    return [] if wire._group is None else [owned.slot for owned in wire._group.slots]


# -- what a program gets --------------------------------------------------------------------------------------


def test_the_devices(client: Client) -> None:
    assert [name for name, (_, rows) in client.devices().items() if rows] == ["soft_lo"]


def test_the_loopback_device_is_not_the_first_of_several(served: Server, client: Client) -> None:
    names = list(client.devices())
    assert set(names) == {device.name for device in served.provider.devices()}


def test_a_slot_is_the_programs_to_read_and_free_when_it_ends(served: Server) -> None:
    with Client(served.path) as client:
        (first, count, port, families), sockets = client.slot()
        assert (port, families, len(sockets)) == (4791, 3, 2)
        assert count >= 4095
        assert first >> QPN_BITS in own_slots(served)
        (second, *_), _ = client.slot()
        assert second != first
        # A packet for a queue pair of the slot arrives at the program's socket, and the server does not read it.
        bth = bytes((4, 0, 0xFF, 0xFF)) + first.to_bytes(4, "big") + bytes(20)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(bth, (HOST, port))
        sockets[0].settimeout(10)
        assert sockets[0].recv(100) == bth
    eventually(lambda: not {first >> QPN_BITS, second >> QPN_BITS} & set(own_slots(served)))
    with Client(served.path) as client:
        assert client.slot()[0][0] in (first, second)


def test_a_group_is_received_from_while_the_program_has_its_socket(client: Client) -> None:
    loopback = socket.if_nametoindex("lo")
    gid = bytes(10) + b"\xff\xff" + socket.inet_aton("239.1.2.3")
    error, _, fds = client.ask_all(Request.GROUP, protocol.GROUP.pack(gid, loopback))
    assert not error
    with socket.socket(fileno=fds[0]) as member, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(HOST))
        sender.sendto(b"to the group", ("239.1.2.3", 4791))
        member.settimeout(10)
        assert member.recv(100) == b"to the group"
    error, _, _ = client.ask_all(Request.GROUP, protocol.GROUP.pack(bytes(15) + b"\x01", loopback))
    assert error == errno.EINVAL


def test_a_context_follows_the_device(client: Client) -> None:
    ((index, _),) = [found for name, found in client.devices().items() if name == "soft_lo"]
    reading, writing = os.pipe()
    with open(reading, "rb") as mine:
        error, body, _ = client.ask_all(Request.CONTEXT_OPEN, protocol.NUMBER.pack(index), fds=(writing,))
        assert not error
        assert client.ask(Request.CONTEXT_CLOSE, body) == b""
        os.close(writing)
        assert mine.read() == b""  # closed at the server too
    with open(os.devnull, "wb") as file:
        error, _, _ = client.ask_all(Request.CONTEXT_OPEN, protocol.NUMBER.pack(index), fds=(file.fileno(),))
        assert error == errno.EINVAL
    for code, request in ((errno.EINVAL, Request.CONTEXT_OPEN), (errno.ENOENT, Request.CONTEXT_CLOSE)):
        with pytest.raises(OSError) as caught:
            client.ask(request, protocol.NUMBER.pack(12345))
        assert caught.value.errno == code


def addrinfo(node: str, service: str, space: int = 0, flags: int = 0) -> bytes:
    """A request for rdma_getaddrinfo(3)."""
    hints = protocol.ADDRINFO.pack(1, flags, 0, 0, space, 0, 0, b"", b"")
    return hints + node.encode() + b"\0" + service.encode() + b"\0"


def test_addrinfo(client: Client) -> None:
    body = client.ask(Request.ADDRINFO, addrinfo(HOST, "7471", PortSpace.TCP))
    (count,) = protocol.ADDRINFOS.unpack_from(body)
    assert count == 1
    result = protocol.RESULT.unpack_from(body, protocol.ADDRINFOS.size)
    _, family, qp_type, space, source_size, size, *_ = result
    assert (family, qp_type, space, size) == (socket.AF_INET, 2, PortSpace.TCP, 16)
    at = protocol.ADDRINFOS.size + protocol.RESULT.size + -(-source_size // 8) * 8
    assert unpack_address(body[at : at + size]) == inet(HOST, 7471)
    assert client.ask_all(Request.ADDRINFO, addrinfo("256.1.1.1", "7471", flags=2))[0] == socket.EAI_NONAME
    assert client.ask_all(Request.ADDRINFO, addrinfo(HOST, "abc"))[0] == socket.EAI_NONAME
    assert client.ask_all(Request.ADDRINFO, b"short")[0] == errno.EINVAL
    assert client.devices()


# -- programs that end ----------------------------------------------------------------------------------------


def test_a_killed_program_leaves_nothing_behind(served: Server, client: Client) -> None:
    channel = Channel(client)
    listener = Id(channel, 1)
    port = listener.listen(HOST)
    body = f"""
client.slot()
channel = Channel(client)
cmid = Id(channel, 7)
cmid.resolve("{HOST}", {port})
cmid.connect(ConnParam(qp_num=5))
assert channel.get_event().type == CmEventType.CONNECT_RESPONSE
cmid.accept(None)
"""
    path = os.pathsep.join(each for each in sys.path if each)
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM.format(body=body), served.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as process:
        made = Id(channel, 0, number=channel.expect(CmEventType.CONNECT_REQUEST).id)
        made.accept(ConnParam(qp_num=6), 2)
        channel.expect(CmEventType.ESTABLISHED)
        assert len(own_slots(served)) == 2
        process.kill()
    channel.expect(CmEventType.DISCONNECTED)
    eventually(lambda: len(own_slots(served)) == 1)


def test_a_program_of_several_connections_ends_with_the_last(served: Server, client: Client) -> None:
    other = Client(served.path)
    channel = Channel(other)
    cmid = Id(channel, 1)
    other.sock.close()
    cmid.channel.client = client  # any connection of the process will do
    cmid.bind(HOST, 7473)
    other.close()
    client.close()
    eventually(lambda: served.is_idle)
    with Client(served.path) as again:
        Id(Channel(again), 1).bind(HOST, 7473)


def test_an_id_of_another_program_is_unknown(served: Server, client: Client) -> None:
    channel = Channel(client)
    cmid = Id(channel, 1)
    body = f"""
channel = Channel(client)
for number, where in (({cmid.number}, channel.number), ({cmid.number}, {channel.number})):
    error, _, _ = client.ask_all(Command.LISTEN, abi.pair(number, 0), where)
    assert error, (number, where)
"""
    with program(served, body):
        cmid.bind(HOST)


# -- hostile programs -----------------------------------------------------------------------------------------


def test_a_connection_begins_with_hello(served: Server) -> None:
    for kind, body in ((Request.DEVICES, b""), (Request.HELLO, b"short")):
        with Client(served.path, hello=False) as client:
            client.sock.send(protocol.REQUEST.pack(kind, 0) + body)
            assert client.sock.recv(100) == b""
    with Client(served.path, hello=False) as client:
        assert client.ask_all(Request.HELLO, protocol.HELLO.pack(99, 0))[0] == errno.EPROTO


def test_random_requests_harm_nobody(served: Server, client: Client) -> None:
    dice = random.Random(1)
    channel = Channel(client)
    cmid = Id(channel, 1)
    kinds = [*range(-1 & 0x1F), *Request, 0x1FF, 0xFFFFFFFF]
    with Client(served.path) as hostile, open(os.devnull) as file:
        for _ in range(3000):
            kind = dice.choice(kinds)
            size = dice.choice((0, 4, 8, 16, 24, 136, 272, 288, 296, 320, 4000))
            body = bytes(dice.choices((0, 0, 0, 1, 2, cmid.number, 255), k=size))
            if kind == Request.CHANNEL_CLOSE and channel.number in body[:4]:
                continue
            number = dice.choice((0, channel.number, 99))
            if kind in (Request.CHANNEL_CLOSE, Request.SLOT):
                number = 99
            for fd in hostile.ask_all(kind, body, number, fds=(file.fileno(),) * dice.choice((0, 0, 1, 3)))[2]:
                os.close(fd)
    assert client.devices()


def test_a_program_that_reads_no_answers_loses_its_connection(served: Server, client: Client) -> None:
    with Client(served.path) as deaf:
        deaf.sock.setblocking(False)
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while True:
                deaf.sock.send(protocol.REQUEST.pack(Request.DEVICES, 0))
        assert client.devices()


def test_descriptors_that_nobody_wants_are_closed(served: Server, client: Client) -> None:
    reading, writing = os.pipe()
    try:
        client.ask_all(Request.DEVICES, fds=(writing, writing))
        with Client(served.path, hello=False) as stranger:
            stranger.sock.sendmsg(
                [protocol.REQUEST.pack(Request.DEVICES, 0)],
                [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", (writing,)))],
            )
            assert stranger.sock.recv(100) == b""
    finally:
        os.close(writing)
    assert os.read(reading, 1) == b""
    os.close(reading)
