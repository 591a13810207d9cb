"""What a program of ``rdmacm run`` may have at most, and what happens beyond it: docs/limits.md."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from rdmacm.constants import PortSpace
from rdmacm.proto.constants import QPN_BITS
from rdmacm.proto.user_cm import Command
from rdmacm.run import lookups, packing, protocol, server, sessions, slots
from rdmacm.run.lookups import Lookups
from rdmacm.run.protocol import Request
from rdmacm.run.server import Server
from rdmacm.soft.device.device import SOFT_DEVICE_ATTR as ATTR
from support.clock import eventually
from support.run_client import Channel, Client, Id, inet
from support.run_programs import Runs, needs_headers


@needs_headers[0]
@needs_headers[1]
def test_sizes_are_those_of_the_software_devices(runs: Runs) -> None:
    sizes = ATTR.max_qp_wr, ATTR.max_sge, ATTR.max_inline_data, ATTR.max_cqe, ATTR.max_qp_rd_atom
    queue_pairs = slots._MOST_SLOTS << QPN_BITS
    assert runs("bounds", *map(str, (*sizes, queue_pairs))) == "done\n"


@needs_headers[0]
@needs_headers[1]
def test_what_is_missing_fails_with_one_error(runs: Runs) -> None:
    assert runs("missing") == "done\n"


def fails(code: int, call: Callable[[], object]) -> None:
    with pytest.raises(OSError) as caught:
        call()
    assert caught.value.errno == code


def test_ranges_of_a_program_are_limited(served: Server, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_MOST_SLOTS", 3)
    for _ in range(3):
        client.slot()
    fails(errno.ENOMEM, client.slot)
    with Client(served.path) as another:  # the same program
        fails(errno.ENOMEM, another.slot)


def test_channels_and_contexts_of_a_program_are_limited(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_MOST_CHANNELS", 3)
    channel, _ = Channel(client), Channel(client)
    ((index, _),) = [found for name, found in client.devices().items() if name == "soft_lo"]
    codes = []
    for _ in range(2):
        reading, writing = os.pipe()
        codes.append(client.ask_all(Request.CONTEXT_OPEN, protocol.NUMBER.pack(index), fds=(writing,))[0])
        os.close(reading)
        os.close(writing)
    assert codes == [0, errno.EMFILE]
    fails(errno.EMFILE, lambda: client.ask(Request.CHANNEL_OPEN))
    channel.close()
    Channel(client)


def test_ids_and_memberships_of_a_program_are_limited(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_MOST_TARGETS", 3)
    channel = Channel(client)
    first, *_ = [Id(channel, number) for number in range(3)]
    fails(errno.ENOMEM, lambda: Id(channel, 3))
    first.destroy()
    member = Id(channel, 4, PortSpace.UDP)
    member.bind("127.0.0.1")
    group = inet("239.1.2.3", 0).pack().ljust(28, b"\0")
    fails(
        errno.ENOMEM,
        lambda: channel.command(Command.JOIN_IP_MCAST, protocol.JOIN_IP_MCAST.pack(5, group, member.number)),
    )


def test_connections_are_limited(served: Server, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_OF_ONE", 2)
    with Client(served.path) as second:
        with Client(served.path, hello=False) as refused, pytest.raises(AssertionError, match="closed"):
            refused.ask(Request.HELLO, protocol.HELLO.pack(protocol.VERSION, os.getpid()))
        monkeypatch.setattr(server, "_MOST_CONNECTIONS", 2)
        with Client(served.path, hello=False) as third:
            assert third.sock.recv(1) == b""
        second.devices()
    eventually(lambda: len(next(iter(served._programs.values())).connections) == 1)
    with Client(served.path):
        client.devices()


def test_requests_are_of_limited_size(served: Server, client: Client) -> None:
    with Client(served.path) as another:
        another.sock.send(protocol.REQUEST.pack(Request.DEVICES, 0) + bytes(protocol.MOST))
        assert another.sock.recv(1) == b""
    client.devices()


def test_devices_of_a_reply_are_as_many_as_it_holds(served: Server) -> None:
    (device,) = (each for each in served.devices() if each.name == "soft_lo")
    body = packing.pack_devices([device] * 1000)
    size = protocol.DEVICE.size + len(device.ports[0].gids) * protocol.GID.size
    (count,) = protocol.DEVICES.unpack_from(body)
    assert len(body) == protocol.DEVICES.size + count * size
    assert 0 <= protocol.MOST - protocol.REPLY.size - len(body) < size


def test_lookups_at_a_time_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    go, ended = threading.Event(), threading.Semaphore(0)

    def look(*_: object, **__: object) -> list[object]:
        go.wait(20)
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(lookups, "getaddrinfo", look)
    made = Lookups(SimpleNamespace(), lambda call: call())  # type: ignore[arg-type]
    body = protocol.ADDRINFO.pack(*[0] * 7, b"", b"") + b"\0\0"
    for _ in range(lookups._MOST_THREADS):
        made.start(body, lambda _: ended.release())
    fails(errno.EAGAIN, lambda: made.start(body, lambda _: None))
    go.set()
    for _ in range(lookups._MOST_THREADS):
        assert ended.acquire(timeout=20)
