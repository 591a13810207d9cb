"""A switch that forwards a group only to ports with a member, and loses the first membership reports."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest

from netns.test_multicast import GROUPS, PATIENCE, SOURCES, joined, members, packed, send
from rdmacm import EventChannel
from support.clock import eventually
from support.netns import Host, Topology, needs_netns

pytestmark = [*needs_netns, pytest.mark.slow]

_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_OUTGOING = 263, 15, 4
#: Bytes before a frame: what the receiver needs of checksums that the sending kernel has left to its hardware.
_VNET_HEADER = 10


class Switch:
    """Forwards frames between two interfaces of a host; those to a group only where a report has passed.

    It loses the first ``losses`` reports that come from the second interface.
    """

    def __init__(self, host: Host, names: tuple[str, str], group: str, losses: int) -> None:
        self._join = b"\x04\0\0\0" + packed(group)
        self._group = packed(group)
        #: How many reports are still to be lost, were lost, and have passed.
        self._losses = losses
        self.lost = self.passed = 0
        self._ports: list[socket.socket] = []
        with host.enter():
            for name in names:
                port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
                port.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
                port.bind((name, 3))
                self._ports.append(port)
        #: The ports with a member.
        self._members: set[socket.socket] = set()
        self._wake, self._end = socket.socketpair()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            readable = select.select([*self._ports, self._wake], [], [])[0]
            if self._wake in readable:
                return
            for port in readable:
                data, source = port.recvfrom(1 << 17)
                if source[2] != _PACKET_OUTGOING:
                    self._forward(port, data)

    def _forward(self, port: socket.socket, data: bytes) -> None:
        other = next(each for each in self._ports if each is not port)
        frame = data[_VNET_HEADER:]
        if self._join in frame:
            if self._losses and port is self._ports[1]:
                self._losses -= 1
                self.lost += 1
                return
            self.passed += 1
            self._members.add(port)
        start, end = (30, 34) if len(self._group) == 4 else (38, 54)
        if frame[start:end] != self._group or other in self._members:
            other.send(data)

    def close(self) -> None:
        self._end.send(b"x")
        self._thread.join()
        for each in (*self._ports, self._wake, self._end):
            each.close()


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host, Host]]:
    """Two hosts, and the switch between them, which has no address."""
    with Topology() as topology:
        a, switch, b = topology.host(), topology.host(), topology.host()
        topology.link(a, "va", switch, "sa", addresses_a=("10.7.0.1/24", "fd07::1/64"))
        topology.link(b, "vb", switch, "sb", addresses_a=("10.7.0.2/24", "fd07::2/64"))
        with a.enter():
            yield a, switch, b


@GROUPS
def test_group_is_received_after_its_first_report_is_lost(hosts: tuple[Host, Host, Host], group: str) -> None:
    """The kernel repeats the report, as the robustness variable of IGMP and MLD says (2)."""
    a, between, b = hosts
    switch = Switch(between, ("sa", "sb"), group, 1)
    try:
        before = [host.ip("maddr", "show") for host in (a, b)]
        here, there = SOURCES[group]
        with members(b, group, there, 1) as (process,), EventChannel() as channel:
            cmid, param = joined(group, here, channel)
            output = process.stdout
            assert output is not None

            def received() -> bool:
                send(cmid, param, b"to all")
                cmid.get_send_comp(PATIENCE)
                return bool(select.select([output], [], [], 0.02)[0])

            eventually(received, vars(switch))
            assert output.readline() == "to all\n"
            assert (switch.lost, switch.passed > 0) == (1, True)
            cmid.destroy()
        assert [host.ip("maddr", "show") for host in (a, b)] == before
    finally:
        switch.close()
