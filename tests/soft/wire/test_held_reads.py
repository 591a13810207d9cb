"""A datagram that is read without giving up the interpreter has the fields that Python's ``recvmsg_into`` reports."""

from __future__ import annotations

import select
import socket
import sys

import pytest

from rdmacm.soft.wire import sockets
from rdmacm.soft.wire.held_reads import held_reader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="struct msghdr of Linux")

LOOPBACKS = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]


def _pair(family: socket.AddressFamily) -> tuple[socket.socket, socket.socket]:
    receiver = sockets.open_socket(family, 0)
    assert receiver is not None
    sockets.report_ip_fields(receiver)
    return receiver, socket.socket(family, socket.SOCK_DGRAM)


@pytest.mark.parametrize(("family", "host"), LOOPBACKS)
def test_fields_are_those_of_recvmsg_into(family: socket.AddressFamily, host: str) -> None:
    receiver, sender = _pair(family)
    with receiver, sender:
        held = held_reader(receiver)
        assert held is not None
        found = []
        for read in (receiver.recvmsg_into, held):
            sender.sendto(b"a datagram", (host, receiver.getsockname()[1]))
            assert select.select([receiver], [], [], 20)[0]
            memory = memoryview(bytearray(64))
            found.append((*read([memory], sockets.ANCILLARY_SPACE), bytes(memory)))
        assert found[0] == found[1]
        assert len(found[0][1]) == 3  # the destination, the traffic class and the hop limit


@pytest.mark.parametrize(("family", "host"), LOOPBACKS)
def test_train_has_its_segment_size(family: socket.AddressFamily, host: str) -> None:
    receiver, sender = _pair(family)
    with receiver, sender:
        held = held_reader(receiver)
        assert held is not None
        if not (sockets.set_trains(receiver, True) and sockets.try_option(sender, 17, sockets.UDP_SEGMENT, 64)):
            pytest.skip("this system has no UDP_SEGMENT")
        sender.sendto(bytes(200), (host, receiver.getsockname()[1]))
        assert select.select([receiver], [], [], 20)[0]
        size, control, _, _ = held([memoryview(bytearray(65536))], sockets.ANCILLARY_SPACE)
        assert size == 200
        assert [int.from_bytes(value[:4], sys.byteorder) for _, kind, value in control if kind == sockets.UDP_GRO] == [
            64
        ]


def test_empty_socket_raises_blocking_io_error() -> None:
    receiver, sender = _pair(socket.AF_INET)
    with receiver, sender, pytest.raises(BlockingIOError):
        held_reader(receiver)([memoryview(bytearray(64))], 128)  # type: ignore[misc]


def test_error_of_the_socket_is_raised() -> None:
    receiver, sender = _pair(socket.AF_INET)
    with sender:
        held = held_reader(receiver)
        assert held is not None
        receiver.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            held([memoryview(bytearray(64))], 128)
