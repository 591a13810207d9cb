"""Ports of a simulated fabric: their attributes, their datagrams, and a fabric that fails."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from infiniband.datagrams import (
    NODE_RECORD,
    PATH_RECORD,
    PORT_INFO_RECORD,
    arrivals,
    asked,
    message,
)
from infiniband.fabric import SimulatedFabric
from rdmacm.ib.ibsim import IbsimTransport
from rdmacm.proto.mad import Mad, MadAddress
from rdmacm.proto.sa import PathRecord
from rdmacm.verbs.enums import PortState

CONTROL = struct.Struct("=4I64s")
PACKET = struct.Struct("!HxxHxxIII4xQ256s")


@contextmanager
def opened(node: str, fabric: SimulatedFabric) -> Iterator[IbsimTransport]:
    transport = IbsimTransport(node, fabric.base)
    transport.open()
    try:
        yield transport
    finally:
        transport.close()


@pytest.fixture
def host_a(fabric: SimulatedFabric) -> Iterator[IbsimTransport]:
    with opened("HostA", fabric) as transport:
        yield transport


@pytest.fixture
def host_b(fabric: SimulatedFabric) -> Iterator[IbsimTransport]:
    with opened("HostB", fabric) as transport:
        yield transport


# -- the port -------------------------------------------------------------------------------------------------


def test_port_attributes_match_the_sa(host_a: IbsimTransport) -> None:
    port = host_a.port()
    lid = port.lid.to_bytes(2, "big")
    status, node = asked(host_a, NODE_RECORD, 1 << 0, lid)
    assert status == 0
    assert int.from_bytes(node[16:24], "big") == port.node_guid
    assert int.from_bytes(node[24:32], "big") == port.port_guid
    status, record = asked(host_a, PORT_INFO_RECORD, 1 << 0, lid)
    assert status == 0
    info = record[4:68]
    assert info[8:16] == port.gids[0][:8]
    assert port.gids[0].interface_id == port.port_guid
    assert int.from_bytes(info[16:18], "big") == port.lid
    assert int.from_bytes(info[18:20], "big") == port.sm_lid
    assert info[28] == port.port_num == 1
    assert info[32] & 15 == port.state == PortState.ACTIVE
    assert info[36] >> 4 == port.active_mtu
    assert (port.lmc, port.sm_sl, port.pkeys, port.device) == (0, 0, (0xFFFF,), "HostA")


def test_port_rate_equals_the_rate_of_the_path_to_itself(host_a: IbsimTransport) -> None:
    port = host_a.port()
    wanted = PathRecord(port.gids[0], port.gids[0])
    status, record = asked(host_a, PATH_RECORD, 0x180C, wanted.pack())
    assert status == 0
    assert PathRecord.unpack(record[:64]).rate == port.rate


def test_switch_has_one_guid(fabric: SimulatedFabric) -> None:
    with opened("SwitchA", fabric) as transport:
        port = transport.port()
        assert port.port_guid == port.node_guid
        status, node = asked(transport, NODE_RECORD, 1 << 0, port.lid.to_bytes(2, "big"))
        assert status == 0
        assert int.from_bytes(node[24:32], "big") == port.port_guid


def test_port_attributes_are_read_each_time(own_fabric: SimulatedFabric) -> None:
    with opened("HostC", own_fabric) as transport:
        before = transport.port()
        own_fabric.unlink("HostC")
        assert transport.port().state is PortState.DOWN
        own_fabric.relink("HostC")
        assert transport.port() == before


# -- datagrams ------------------------------------------------------------------------------------------------


def test_path_record_query_is_answered(host_a: IbsimTransport, host_b: IbsimTransport) -> None:
    here, there = host_a.port(), host_b.port()
    wanted = PathRecord(there.gids[0], here.gids[0])
    status, record = asked(host_a, PATH_RECORD, 0x180C, wanted.pack())
    path = PathRecord.unpack(record[:64])
    assert status == 0
    assert (path.dgid, path.sgid) == (there.gids[0], here.gids[0])
    assert (path.dlid, path.slid, path.pkey, path.mtu) == (there.lid, here.lid, 0xFFFF, 4)


def test_cm_mads_arrive_unchanged(host_a: IbsimTransport, host_b: IbsimTransport) -> None:
    body = bytes(range(232))
    for here, there in ((host_a, host_b), (host_b, host_a)):
        sent = message(0xAABBCCDD00000001, body)
        there.send(MadAddress(here.port().lid), sent)
        ((source, mad),) = arrivals(here)
        assert source == MadAddress(there.port().lid, qpn=1)
        assert mad[24:] == body
        # The system sets the upper half of the transaction id.
        assert (mad[:8], mad[12:24]) == (sent[:8], sent[12:24])


def test_node_reaches_itself(host_a: IbsimTransport) -> None:
    host_a.send(MadAddress(host_a.port().lid), message(7))
    ((source, mad),) = arrivals(host_a)
    assert source.lid == host_a.port().lid
    assert Mad.unpack(mad).transaction_id & 0xFFFFFFFF == 7


@pytest.mark.parametrize("address", [MadAddress(0x2FFF), MadAddress(0), MadAddress(1, qpn=7)])
def test_undeliverable_mads_are_counted(fabric: SimulatedFabric, host_a: IbsimTransport, address: MadAddress) -> None:
    host_a.send(address, message(1))
    host_a.send(MadAddress(host_a.port().lid), message(2))
    ((_, mad),) = arrivals(host_a)
    assert Mad.unpack(mad).transaction_id & 0xFFFFFFFF == 2
    assert host_a.dropped == {"undeliverable": 1}


def test_mads_keep_their_order(host_a: IbsimTransport, host_b: IbsimTransport) -> None:
    to_a = MadAddress(host_a.port().lid)
    for number in range(100):
        host_b.send(to_a, message(number))
    found = arrivals(host_a, 100)
    assert [Mad.unpack(mad).transaction_id & 0xFFFFFFFF for _, mad in found] == list(range(100))


def test_full_receive_queue_does_not_block_the_port(host_a: IbsimTransport, host_b: IbsimTransport) -> None:
    """ibsim waits for a client that does not read; port() then reads and drops datagrams."""
    to_a = MadAddress(host_a.port().lid)
    for number in range(2000):
        host_b.send(to_a, message(number))
    assert host_a.port().lid == to_a.lid  # a call that waits for ibsim ends with TimeoutError
    left = 2000 - host_a.dropped["not read"] - host_b.dropped["send queue full"]
    assert len(arrivals(host_a, left)) == left
    assert host_b.port().lid


def test_wrong_mad_size_raises(host_a: IbsimTransport) -> None:
    with pytest.raises(ValueError, match="256"):
        host_a.send(MadAddress(1), bytes(255))


# -- opening and closing --------------------------------------------------------------------------------------


def test_closing_frees_the_node(fabric: SimulatedFabric) -> None:
    for _ in range(30):  # more often than ibsim has client slots
        with opened("HostC", fabric) as transport:
            assert transport.fileno() >= 0
        assert transport.fileno() == -1
        transport.close()


def test_mads_sent_before_close_arrive(fabric: SimulatedFabric, host_a: IbsimTransport) -> None:
    to_a = MadAddress(host_a.port().lid)
    for number in range(50):
        with opened("HostC", fabric) as transport:
            transport.send(to_a, message(number))
    assert len(arrivals(host_a, 50)) == 50


def test_closed_port_drops_datagrams(fabric: SimulatedFabric) -> None:
    with opened("HostC", fabric) as transport:
        pass
    transport.send(MadAddress(1), message(1))
    assert transport.receive() == []
    assert transport.dropped == {"closed": 1}
    with pytest.raises(OSError) as raised:
        transport.port()
    assert raised.value.errno == errno.ENOTCONN


def refused(transport: IbsimTransport) -> OSError:
    with pytest.raises(OSError) as raised:
        transport.open()
    assert transport.fileno() == -1
    return raised.value


def test_node_shared_with_another_process_receives_responses_only(
    fabric: SimulatedFabric, host_a: IbsimTransport, host_b: IbsimTransport
) -> None:
    with opened("HostA", fabric) as second:
        assert (host_a.carries_cm, second.carries_cm) == (True, False)
        gid = host_b.port().gids[0]
        record = PathRecord(gid, second.port().gids[0]).pack()
        status, found = asked(second, PATH_RECORD, 0xC, record)
        assert (status, PathRecord.unpack(found[:64]).dlid) == (0, host_b.port().lid)
        host_b.send(MadAddress(second.port().lid), message(5))
        assert len(arrivals(host_a)) == 1
        assert second.receive() == []
    with opened("HostC", fabric) as first:
        assert first.carries_cm


@pytest.mark.parametrize("name", ["HostX", "", "x" * 32, "Host\0A", "hosta"])
def test_opening_an_unknown_node_raises(fabric: SimulatedFabric, name: str) -> None:
    assert refused(IbsimTransport(name, fabric.base)).errno == errno.ENODEV


def test_opening_without_a_fabric_raises() -> None:
    error = refused(IbsimTransport("HostA", "rdmacm-none"))
    assert error.errno == errno.ECONNREFUSED
    assert "IBSIM_SOCKNAME=rdmacm-none" in str(error)


def test_opening_with_a_too_long_fabric_name_raises() -> None:
    assert refused(IbsimTransport("HostA", "x" * 200)).errno == errno.EINVAL


def test_opening_beyond_the_fabrics_clients_raises(own_fabric: SimulatedFabric) -> None:
    switches = ("SwitchA", "SwitchB")
    taken = [IbsimTransport(node, own_fabric.base) for node in ("HostA", "HostB", "HostC", *switches)]
    for transport in taken:
        transport.open()
    others = [Silent(own_fabric.base, "HostB") for _ in range(4)]
    try:
        assert refused(IbsimTransport("HostM", own_fabric.base)).errno == errno.EUSERS
    finally:
        for transport in taken:
            transport.close()
        for other in others:
            other.close()
    with opened("HostA", own_fabric) as transport:
        assert transport.port().lid


class Silent:
    """A client that receives no requests; a node may have several."""

    def __init__(self, base: str, node: str) -> None:
        self._sockets = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
        number = int.from_bytes(os.urandom(3), "big")
        for one, name in zip(self._sockets, (f"ctl{number}", f"in{number}"), strict=True):
            one.bind(f"\0{base}:{name}\0")
        self._sockets[0].connect(f"\0{base}:ctl\0")
        self._ask(0, 1, struct.pack("=3I32s", number, 0, 0, node.encode()))

    def _ask(self, client: int, kind: int, data: bytes = b"") -> None:
        self._sockets[0].send(CONTROL.pack(0xDEADBEEF, client, kind, len(data), data))
        _, _, answered, _, found = CONTROL.unpack(self._sockets[0].recv(80))
        assert answered == kind
        self._client = struct.unpack_from("=I", found)[0]

    def close(self) -> None:
        self._ask(self._client, 2)
        for one in self._sockets:
            one.close()


def test_fabric_is_named_by_the_environment(fabric: SimulatedFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IBSIM_SOCKNAME", fabric.base)
    transport = IbsimTransport("HostC")
    transport.open()
    assert transport.name == "ibsim:HostC"
    transport.close()


# The parent's threads read the output of ibsim and OpenSM; the child does not need them.
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_fork_leaves_the_port_to_the_parent(fabric: SimulatedFabric, host_a: IbsimTransport) -> None:
    to_a = MadAddress(host_a.port().lid)
    child = os.fork()
    if not child:
        try:
            host_a.abandon()
            with opened("HostB", fabric) as other:
                other.send(to_a, message(5))
            os._exit(0)
        finally:
            os._exit(1)
    ((_, mad),) = arrivals(host_a)
    assert os.waitpid(child, 0)[1] == 0
    assert Mad.unpack(mad).transaction_id & 0xFFFFFFFF == 5
    assert host_a.port().lid


# -- an ibsim that fails --------------------------------------------------------------------------------------


def test_calls_after_ibsim_died_raise_or_are_counted(own_fabric: SimulatedFabric) -> None:
    with opened("HostA", own_fabric) as transport:
        own_fabric.kill_ibsim()
        for _ in range(2):
            with pytest.raises(OSError) as raised:
                transport.port()
            assert raised.value.errno == errno.ECONNREFUSED
        transport.send(MadAddress(1), message(1))
        transport.send(MadAddress(1), message(1))
        assert transport.receive() == []
        assert transport.dropped == {"send": 2}
    assert refused(IbsimTransport("HostA", own_fabric.base)).errno == errno.ECONNREFUSED


def test_calls_time_out_while_ibsim_is_suspended(own_fabric: SimulatedFabric) -> None:
    with opened("HostA", own_fabric) as transport:
        before = transport.port()
        own_fabric.stop_ibsim()
        try:
            with pytest.raises(TimeoutError):
                transport.port()
            for number in range(1000):
                transport.send(MadAddress(before.lid), message(number))
            assert transport.dropped["send queue full"]
        finally:
            own_fabric.continue_ibsim()
        # The late answer to the first request is not mistaken for the next answer.
        assert transport.port() == before


@contextmanager
def impostor(base: str, answers: list[bytes]) -> Iterator[socket.socket]:
    """A fake ibsim that answers each request with the next of these, which may be several datagrams joined by b"||"."""
    control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    control.bind(f"\0{base}:ctl\0")
    out = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    out.bind(f"\0{base}:out0\0")

    def serve() -> None:
        for answer in answers:
            asked, source = control.recvfrom(100)
            if CONTROL.unpack(asked)[2] == 1:
                number = struct.unpack_from("=I", asked, 16)[0]
                out.connect(f"\0{base}:in{number}\0")
            for one in answer.split(b"||"):
                control.sendto(one, source)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield out
    finally:
        thread.join()
        control.close()
        out.close()


def answer(kind: int, data: bytes = b"", magic: int = 0xDEADBEEF) -> bytes:
    return CONTROL.pack(magic, 0, kind, len(data), data)


def test_malformed_datagrams_of_ibsim_are_dropped() -> None:
    base = f"rdmacm-{os.urandom(6).hex()}"
    garbage = b"||".join(
        [b"x", bytes(79), bytes(81), bytes(80), answer(1, magic=1), answer(99), answer(10, b"\xff" * 64)]
    )
    whole = PACKET.pack(1, 2, 1, 1, 0, 256, message(3))
    rounds = [
        garbage + b"||" + answer(1),
        garbage + b"||" + answer(7),
        answer(8, b"\xff" * 64),
        answer(10),
        answer(2),
    ]
    with impostor(base, rounds) as out:
        transport = IbsimTransport("HostA", base)
        transport.open()
        try:
            port = transport.port()
            assert (port.state, port.pkeys, port.rate) == (PortState.NOP, (), 0)
            for packet in (
                b"",
                b"x",
                whole[:-1],
                whole + b"x",
                PACKET.pack(1, 2, 1, 1, 0, 257, bytes(256)),
                PACKET.pack(1, 2, 1, 1, 0, 23, bytes(256)),
                PACKET.pack(1, 2, 1, 1, 0, 1 << 63, bytes(256)),
                PACKET.pack(1, 2, 0, 0, 0, 256, bytes(256)),
                PACKET.pack(1, 2, 1, 1, 110, 256, bytes(256)),
                PACKET.pack(1, 2, 1, 1, 0, 30, message(3)),
                whole,
            ):
                out.send(packet)
            found = arrivals(transport, 2)
        finally:
            transport.close()
    assert found == [(MadAddress(2), message(3)[:30]), (MadAddress(2), message(3))]
    assert transport.dropped == {"malformed": 7, "queue pair": 1, "undeliverable": 1}
