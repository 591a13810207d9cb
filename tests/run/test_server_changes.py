"""What programs learn of changes of the network: asynchronous events, and events of rdma_cm."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rdmacm.constants import CmEventType
from rdmacm.run import protocol
from rdmacm.run.protocol import Request
from rdmacm.run.server import Server
from rdmacm.verbs.enums import EventType
from support.netns import TwoHosts, needs_netns, two_hosts
from support.run_client import Channel, Client, Id

pytestmark = needs_netns


@pytest.fixture
def net() -> Iterator[TwoHosts]:
    """Two hosts; the server runs in ``a``."""
    with two_hosts() as net, net.a.enter():
        yield net


@contextmanager
def opened(client: Client, name: str) -> Iterator[int]:
    """A pipe that gets the events of a device."""
    index, _ = client.devices()[name]
    reading, writing = os.pipe()
    try:
        error, _, _ = client.ask_all(Request.CONTEXT_OPEN, protocol.NUMBER.pack(index), fds=(writing,))
        assert not error
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def await_event(pipe: int, wanted: EventType) -> int:
    """Wait for an event of this type; returns its port."""
    while True:
        assert select.select([pipe], [], [], 10)[0], f"no {wanted.name}"
        port, event = protocol.ASYNC_EVENT.unpack(os.read(pipe, protocol.ASYNC_EVENT.size))
        if event == wanted:
            return int(port)


def await_cm_event(channel: Channel, wanted: CmEventType) -> tuple[int, int]:
    """Wait for an event of this type; returns its id and status."""
    while True:
        event = channel.get_event()
        if event.type is wanted:
            return event.uid, event.status


def test_a_program_learns_of_the_link_and_of_the_end_of_the_device(net: TwoHosts, served: Server) -> None:
    with Client(served.path) as client, opened(client, "soft_va") as pipe:
        net.b.ip("link", "set", "vb", "down")
        assert await_event(pipe, EventType.PORT_ERR) == 1
        net.b.ip("link", "set", "vb", "up")
        assert await_event(pipe, EventType.PORT_ACTIVE) == 1
        net.a.ip("address", "add", "10.7.0.77/24", "dev", "va")
        assert await_event(pipe, EventType.GID_CHANGE) == 1
        net.a.ip("link", "del", "va")
        assert await_event(pipe, EventType.DEVICE_FATAL) == 0


def test_ids_learn_of_their_address_and_of_the_end_of_the_device(net: TwoHosts, served: Server) -> None:
    with Client(served.path) as client:
        channel = Channel(client)
        Id(channel, 7).bind("10.7.0.1")
        net.a.ip("address", "del", "10.7.0.1/24", "dev", "va")
        assert await_cm_event(channel, CmEventType.ADDR_CHANGE) == (7, -errno.EADDRNOTAVAIL)
        net.a.ip("link", "del", "va")
        assert await_cm_event(channel, CmEventType.DEVICE_REMOVAL) == (7, 0)


def test_a_pipe_that_nobody_reads_holds_up_nobody(net: TwoHosts, served: Server) -> None:
    with Client(served.path) as client, opened(client, "soft_va") as full, opened(client, "soft_va") as pipe:
        writing = os.open(f"/proc/self/fd/{full}", os.O_WRONLY | os.O_NONBLOCK)
        with open(writing, "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        net.b.ip("link", "set", "vb", "down")
        assert await_event(pipe, EventType.PORT_ERR) == 1
        assert client.devices()
