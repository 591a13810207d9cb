"""Packets for wires: with ICRCs as senders add them, checked as receivers check them."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rdmacm.proto.roce.icrc import Icrc
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.soft.wire.base import WirePath, WireRoute
from rdmacm.soft.wire.udp import UdpWire
from support.clock import LONGEST
from support.roce_packets import BTH

#: Seconds to wait; only a failing test waits that long.
PATIENCE = LONGEST


def packed(text: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in text else socket.AF_INET, text)


def path(local: str, remote: str, scope_id: int = 0) -> WirePath:
    return WirePath(packed(local), packed(remote), scope_id)


#: The service id of port 7471 in port space TCP.
SERVICE = 0x0000_0000_0106_1D2F


def packet(qpn: int, payload: bytes = b"", psn: int = 0) -> bytes:
    """A packet without its ICRC."""
    return BTH(Opcode.RC_SEND_ONLY, qpn, psn).pack() + payload


def mad(attribute: int, service_id: int = SERVICE, *, remote_id: int = 0, tail: bytes = b"") -> bytes:
    """A connection manager's packet for queue pair 1, without its ICRC."""
    header = struct.pack("!BBBBHHQHHI", 1, 7, 2, 3, 0, 0, 0, attribute, 0, 0)
    return packet(1, bytes(8) + (header + struct.pack("!IIQ", 0, remote_id, service_id) + tail).ljust(256, b"\0"))


def flow(wire: UdpWire, way: WirePath) -> Icrc:
    """The flow that computes the ICRCs of a wire's packets along a path."""
    return Icrc(way.local, way.remote, wire.port, wire.port)


def sealed(wire: UdpWire, route: WireRoute, bodies: Iterable[bytes]) -> list[bytes]:
    """Packets with their ICRCs: in a train, number i is sealed for IPv4 identification i."""
    seal = flow(wire, route.path).seal
    return [body + seal([body], index) for index, body in enumerate(bodies)]


class Packet(NamedTuple):
    """One received packet."""

    data: bytes
    #: The packet's index in its train.
    place: int
    remote: tuple[str, int] | tuple[str, int, int, int]
    local: bytes

    @property
    def body(self) -> bytes:
        return self.data[:-4]

    @property
    def identification(self) -> int | None:
        """The IPv4 identification for which its ICRC was computed; None if the ICRC is wrong."""
        family = socket.AF_INET if len(self.local) == 4 else socket.AF_INET6
        remote = socket.inet_pton(family, self.remote[0])
        return Icrc(remote, self.local, self.remote[1], self.remote[1]).solve([self.data])


def taken(wire: UdpWire) -> list[Packet]:
    """The packets that have arrived, copied and one by one, and the requests left to other processes."""
    wire.resume_requests()
    found = []
    for data, segment, remote, local in wire.receive():
        step = segment or len(data)
        pieces = [bytes(data[at : at + step]) for at in range(0, len(data), step)]
        found += [Packet(piece, index, remote, local) for index, piece in enumerate(pieces)]
    return found


def wait(wires: Sequence[UdpWire], timeout: float = PATIENCE) -> None:
    """Wait until one of the wires is readable."""
    fds = [fd for wire in wires for fd in (*wire.filenos(), *wire.unread_request_fds())]
    assert select.select(fds, [], [], timeout)[0], "nothing arrived"


def collect(wire: UdpWire, count: int, timeout: float = PATIENCE) -> list[Packet]:
    """The next ``count`` packets."""
    found: list[Packet] = []
    while len(found) < count:
        wait([wire], timeout)
        found += taken(wire)
    return found


def free_port() -> int:
    """A UDP port that is free in both families."""
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        probe.bind(("::", 0))
        port: int = probe.getsockname()[1]
        return port
