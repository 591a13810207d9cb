"""Multicast groups between hosts with kernels of their own: membership reports on the wire, and several processes."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rdmacm import CmEventType, CmId, EventChannel, PortSpace, UdParam
from rdmacm.proto.core_choice import compiled
from rdmacm.soft.device.datagram_queue_pair import SoftUdQP
from rdmacm.verbs import AH, GRH, SendFlag, SendWR, WROpcode
from support.clock import LONGEST, eventually
from support.netns import Host, TwoHosts, needs_netns, python_environment

pytestmark = needs_netns

PATIENCE = 20.0
ETH_P_ALL = 3
SOURCES = {"239.7.7.7": ("10.7.0.1", "10.7.0.2"), "ff1e::7:7": ("fd07::1", "fd07::2")}
GROUPS = pytest.mark.parametrize("group", SOURCES)
#: Joins the group of argument 1 from address 2, says so, and prints each message as it comes.
MEMBER = """
import sys
from rdmacm import CmId, PortSpace
group, source = sys.argv[1:]
cmid = CmId(None, PortSpace.UDP)
cmid.bind_addr((source, 0))
cmid.create_qp()
region = cmid.reg_msgs(bytearray(1000))
cmid.post_recv(1, region, 0, 1000)
cmid.join_multicast((group, 0))
print("joined", flush=True)
wc = cmid.get_recv_comp()
print(bytes(region.buf[40 : wc.byte_len]).decode(), flush=True)
sys.stdin.read()
"""


@contextmanager
def members(host: Host, group: str, source: str, count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of a host that have joined a group."""
    command = ["ip", "netns", "exec", host.name, sys.executable, "-c", MEMBER, group, source]
    environment, pipe = python_environment(), subprocess.PIPE
    made = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) for _ in range(count)]
    try:
        for process in made:
            assert process.stdout is not None
            assert process.stdout.readline() == "joined\n"
        yield made
    finally:
        for process in made:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            if sys.exc_info()[0] is not None:
                process.kill()
            process.wait(PATIENCE)
            process.stdout.close()


class Sniffer:
    """Sees every Ethernet frame at an interface of a host, also those it sends."""

    def __init__(self, host: Host, interface: str) -> None:
        with host.enter():
            self._sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
            self._sock.bind((interface, ETH_P_ALL))

    def find(self, *needles: bytes) -> bytes:
        """The next frame that has all of these bytes in it."""
        while True:
            assert select.select([self._sock], [], [], LONGEST)[0], "no such frame"
            frame = self._sock.recv(65536)
            if all(needle in frame for needle in needles):
                return frame

    def close(self) -> None:
        self._sock.close()


@pytest.fixture
def sniffer(net: TwoHosts) -> Iterator[Sniffer]:
    """At b's end of the link."""
    made = Sniffer(net.b, "vb")
    yield made
    made.close()


def joined(group: str, source: str, channel: EventChannel) -> tuple[CmId, UdParam]:
    cmid = CmId(channel, PortSpace.UDP)
    cmid.bind_addr((source, 0))
    cmid.create_qp()
    cmid.join_multicast((group, 0))
    with channel.get_event(PATIENCE) as event:
        assert event.type is CmEventType.MULTICAST_JOIN
        assert isinstance(event.param, UdParam)
        return cmid, event.param


def send(cmid: CmId, param: UdParam, message: bytes, **changes: int) -> None:
    for name, value in changes.items():
        setattr(param.ah_attr.gr, name, value)
    with AH(cmid.pd, param.ah_attr) as ah:
        wr = SendWR(1, WROpcode.SEND, [message], SendFlag.SIGNALED | SendFlag.INLINE)
        wr.set_wr_ud(ah, param.qp_num, param.qkey)
        cmid.qp.post_send(wr)


def packed(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)


@GROUPS
def test_membership_reports_are_sent_and_nothing_is_left(net: TwoHosts, sniffer: Sniffer, group: str) -> None:
    """IGMPv3 and MLDv2 reports: one that changes to "exclude nothing" joins, to "include nothing" leaves."""
    before = net.a.ip("maddr", "show")
    reporters = {
        4: (packed("224.0.0.22"), b"\x04\0\0\0" + packed(group), b"\x03\0\0\0" + packed(group)),
        16: (packed("ff02::16"), b"\x04\0\0\0" + packed(group), b"\x03\0\0\0" + packed(group)),
    }
    everybody, joins, leaves = reporters[len(packed(group))]
    with EventChannel() as channel:
        cmid, _ = joined(group, SOURCES[group][0], channel)
        sniffer.find(everybody, joins)
        assert group in net.a.ip("maddr", "show", "dev", "va")
        cmid.leave_multicast((group, 0))
        sniffer.find(everybody, leaves)
        assert net.a.ip("maddr", "show") == before
        cmid.join_multicast((group, 0))
        cmid.destroy()
    assert net.a.ip("maddr", "show") == before


@pytest.mark.slow
@GROUPS
def test_every_process_of_both_hosts_gets_a_message(net: TwoHosts, sniffer: Sniffer, group: str) -> None:
    before = net.b.ip("maddr", "show")
    with (
        members(net.b, group, SOURCES[group][1], 2) as there,
        members(net.a, group, SOURCES[group][0], 2) as here,
        EventChannel() as channel,
    ):
        cmid, param = joined(group, SOURCES[group][0], channel)
        region = cmid.reg_msgs(bytearray(100))
        cmid.post_recv(1, region, 0, 100)
        send(cmid, param, b"to all", hop_limit=3, traffic_class=0x28)
        assert cmid.get_recv_comp().byte_len == 46, "the sender's own copy"
        grh = GRH.unpack(region.buf)
        assert (grh.traffic_class, grh.hop_limit) == (0x28, 3)
        for process in (*there, *here):
            assert process.stdout is not None
            assert process.stdout.readline() == "to all\n"
        frame = sniffer.find(b"to all")
        cmid.destroy()
        region.close()
    address = packed(group)
    if len(address) == 4:
        assert frame[:6] == b"\x01\x00\x5e" + bytes((address[1] & 0x7F,)) + address[2:]
        assert (frame[15], frame[22]) == (0x28, 3), "type of service and TTL"
    else:
        assert frame[:6] == b"\x33\x33" + address[12:]
        assert (frame[14] << 4 & 0xF0 | frame[15] >> 4, frame[21]) == (0x28, 3), "traffic class and hop limit"
    assert net.b.ip("maddr", "show") == before


@pytest.mark.skipif(compiled is None, reason="the compiled core is not built (python3 dev.py core)")
@GROUPS
def test_messages_to_and_from_a_group_are_the_cores(net: TwoHosts, group: str) -> None:
    with EventChannel() as channel:
        cmid, param = joined(group, SOURCES[group][0], channel)
        region = cmid.reg_msgs(bytearray(500))
        for number in range(5):
            cmid.post_recv(number, region, 100 * number, 100)
        backend = cmid.qp.backend
        assert isinstance(backend, SoftUdQP)
        core_wire = backend._mux.core_wire
        assert core_wire is not None
        before = core_wire.taken
        counted = channel.provider.query_counters().traffic
        for number in range(5):
            send(cmid, param, b"number %d" % number)
            assert cmid.get_recv_comp().wr_id == number
            assert bytes(region.buf[100 * number + 40 :][:8]) == b"number %d" % number
        assert backend.core is not None
        assert core_wire.taken == before + 5, "none was left to Python"
        now = channel.provider.query_counters().traffic
        names = ("sent_pkts", "multicast_xmit_packets", "rcvd_pkts", "multicast_rcv_packets")
        assert [now[name] - counted[name] for name in names] == [5, 5, 5, 5]
        cmid.leave_multicast((group, 0))
        cmid.destroy()
        region.close()


@pytest.mark.slow
def test_group_survives_a_link_that_goes_away(net: TwoHosts) -> None:
    """The kernel keeps the membership, and sends reports again once the link is back."""
    (group, (here, there)) = next(iter(SOURCES.items()))
    with members(net.b, group, there, 1) as (process,), EventChannel() as channel:
        net.b.ip("link", "set", "dev", "vb", "down")
        net.b.ip("link", "set", "dev", "vb", "up")
        net.a.settle("va")
        cmid, param = joined(group, here, channel)
        output = process.stdout
        assert output is not None

        def received() -> bool:
            send(cmid, param, b"to all")
            return bool(select.select([output], [], [], 0.01)[0])

        eventually(received, "the carrier is not back")
        assert output.readline() == "to all\n"
        cmid.destroy()
