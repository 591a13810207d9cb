"""Ports of a subnet in memory: their attributes, the delivery of MADs, and faults."""

from __future__ import annotations

import errno
import os
import select
import threading
from random import Random
from typing import Any

import pytest

from rdmacm.address import Gid
from rdmacm.ib.transport import MadTransport
from rdmacm.proto.cm.codes import AttributeId
from rdmacm.proto.mad import Mad, MadAddress, MgmtClass
from rdmacm.proto.sa.mad import SaMethod
from rdmacm.proto.sa.query import query_for
from rdmacm.proto.sa.records import PathRecord
from rdmacm.proto.sa.subnet import NodeRecord, ServiceRecord
from rdmacm.testing import DUPLICATE, LOSE, Fabric, MemoryPort, MemorySubnet, Verdict, VirtualClock, nth
from rdmacm.verbs.enums import PortState
from support.clock import LONGEST, REAL
from support.sa import Asker, run

TID = 0x1122334455667788


def message(attribute: int = AttributeId.REQ, method: int = 3, mgmt_class: int = MgmtClass.COM_MGT) -> bytes:
    return Mad(mgmt_class, 2, method, attribute, TID, data=Random(1).randbytes(232)).pack()


def two(subnet: MemorySubnet, **facts: Any) -> tuple[MemoryPort, MemoryPort]:
    a, b = subnet.add_port("a", **facts), subnet.add_port("b", **facts)
    a.open()
    b.open()
    return a, b


class TestPorts:
    def test_ports_implement_the_transport_protocol(self) -> None:
        subnet = MemorySubnet()
        transport: MadTransport = subnet.add_port("HostA", rate=7, active_mtu=5, pkeys=(0xFFFF, 0x8001))
        port = transport.port()
        assert (transport.name, transport.reassembles, transport.carries_cm) == ("HostA", False, True)
        assert (port.lid, port.sm_lid, port.state, port.rate, port.active_mtu) == (2, 1, PortState.ACTIVE, 7, 5)
        assert port.gids == (Gid((0xFE80 << 112 | port.port_guid).to_bytes(16, "big")),)

    def test_ports_have_unique_names_lids_and_gids(self) -> None:
        subnet = MemorySubnet()
        port = subnet.add_port("a", lid=8, lmc=2).port()
        taken: dict[str, dict[str, Any]] = {
            "a": {},
            "sa": {},
            "b": {"lid": 9},
            "c": {"lid": 1},
            "d": {"gids": port.gids},
        }
        for name, facts in taken.items():
            with pytest.raises(ValueError):
                subnet.add_port(name, **facts)
        assert [subnet.add_port(name).port().lid for name in "efgh"] == [2, 3, 4, 5]

    def test_port_is_opened_once(self) -> None:
        a, _ = two(MemorySubnet())
        with pytest.raises(OSError) as caught:
            a.open()
        assert caught.value.errno == errno.EBUSY
        a.close()
        a.close()
        a.open()

    def test_removed_port_raises_and_receives_nothing(self) -> None:
        subnet = MemorySubnet()
        a, b = two(subnet)
        lid = b.port().lid
        subnet.remove_port("b")
        for call in (b.port, b.open):
            with pytest.raises(OSError) as caught:
                call()
            assert caught.value.errno == errno.ENODEV
        a.send(MadAddress(lid), message())
        b.send(MadAddress(a.port().lid), message())
        assert (a.dropped, b.dropped) == ({"undeliverable": 1}, {"no such port": 1})
        assert subnet.add_port("b").port().lid == lid

    def test_changed_port_has_its_new_lid_and_state(self) -> None:
        subnet = MemorySubnet()
        a, b = two(subnet)
        subnet.change_port("b", lid=77)
        a.send(MadAddress(77), message())
        assert len(b.receive()) == 1
        with pytest.raises(ValueError, match="in use"):
            subnet.change_port("b", lid=a.port().lid)
        assert b.port().lid == 77
        subnet.change_port("b", state=PortState.DOWN)
        a.send(MadAddress(77), message())
        b.send(MadAddress(a.port().lid), message())
        assert (b.receive(), a.receive()) == ([], [])
        assert b.dropped == {"port not active": 1}


class TestMads:
    def test_mads_arrive_with_a_kernel_transaction_id(self) -> None:
        subnet = MemorySubnet()
        a, b = two(subnet)
        a.send(MadAddress(b.port().lid, sl=3), memoryview(message()))
        [(source, mad)] = b.receive()
        assert source == MadAddress(a.port().lid, qpn=1, sl=3)
        arrived = Mad.unpack(mad)
        assert arrived.transaction_id & 0xFFFFFFFF == TID & 0xFFFFFFFF
        assert arrived.transaction_id >> 32 != TID >> 32
        assert arrived.data == Mad.unpack(message()).data
        assert b.receive() == []

    def test_port_receives_its_own_mads(self) -> None:
        a, _ = two(MemorySubnet())
        a.send(MadAddress(a.port().lid), message())
        assert len(a.receive()) == 1

    def test_mad_with_a_grh_has_the_source_gid(self) -> None:
        a, b = two(MemorySubnet())
        address = MadAddress(b.port().lid, gid=b.port().gids[0], flow_label=5, hop_limit=9)
        a.send(address, message())
        [(source, _)] = b.receive()
        assert (source.gid, source.flow_label, source.hop_limit) == (a.port().gids[0], 5, 9)

    def test_mad_arrives_in_its_partition(self) -> None:
        subnet = MemorySubnet()
        a, b = two(subnet)
        subnet.change_port("a", pkeys=(0xFFFF, 0x0001, 0x8002))
        subnet.change_port("b", pkeys=(0x8001, 0xFFFF, 0x0003))
        for index in (0, 1, 2, 3):
            a.send(MadAddress(b.port().lid, pkey_index=index), message())
        assert [source.pkey_index for source, _ in b.receive()] == [1, 0]
        assert a.dropped == {"undeliverable": 1, "pkey index": 1}

    def test_cm_mads_do_not_reach_a_port_of_the_kernels_cm(self) -> None:
        subnet = MemorySubnet()
        a, b = subnet.add_port("a"), subnet.add_port("b", carries_cm=False)
        a.open()
        b.open()
        a.send(MadAddress(b.port().lid), message())
        b.send(MadAddress(a.port().lid), message())
        a.send(MadAddress(b.port().lid), message(mgmt_class=MgmtClass.PERF))
        assert (len(a.receive()), len(b.receive())) == (0, 1)
        assert b.dropped == {"connection management": 2}

    def test_unsendable_mads_are_counted(self) -> None:
        subnet = MemorySubnet()
        a, b = two(subnet)
        a.send(MadAddress(999), message())
        a.send(MadAddress(b.port().lid), message()[:-1])
        a.close()
        a.send(MadAddress(b.port().lid), message())
        assert a.dropped == {"undeliverable": 1, "length": 1, "not open": 1}

    def test_unread_mads_are_dropped_beyond_the_limit(self) -> None:
        a, b = two(MemorySubnet())
        for _ in range(5000):
            a.send(MadAddress(b.port().lid), message())
        assert b.dropped["overrun"] == 5000 - 4096
        got = 0
        while arrived := b.receive():
            assert len(arrived) <= 64
            got += len(arrived)
        assert got == 4096


class TestFaults:
    def test_script_loses_duplicates_and_delays_mads(self) -> None:
        subnet = MemorySubnet(latency=1.0)
        assert isinstance(subnet.clock, VirtualClock)
        a, b = two(subnet)
        to_b = MadAddress(b.port().lid)
        subnet.faults = nth("REP", 2)
        for attribute in (AttributeId.REQ, AttributeId.REP, AttributeId.REP, AttributeId.REP):
            a.send(to_b, message(attribute))
        subnet.faults = lambda mad: DUPLICATE if (mad.source, mad.destination) == ("a", "b") else None
        a.send(to_b, message(AttributeId.RTU))
        subnet.faults = lambda mad: Verdict(delay=5.0, data=b"other")
        a.send(to_b, message(AttributeId.DREQ))
        subnet.faults = None
        assert b.receive() == []
        subnet.clock.advance(1.0)
        kinds = [Mad.unpack(mad).attribute_id for _, mad in b.receive()]
        assert kinds == [AttributeId.REQ, AttributeId.REP, AttributeId.REP, AttributeId.RTU, AttributeId.RTU]
        assert subnet.next_deadline() == subnet.clock.now + 5.0
        subnet.clock.advance(5.0)
        assert [mad for _, mad in b.receive()] == [b"other"]

    def test_sa_mads_are_classified(self) -> None:
        subnet = MemorySubnet()
        kinds: list[str] = []
        subnet.faults = lambda mad: kinds.append(f"{mad.source} > {mad.destination} {mad.kind}")
        asker = Asker(subnet, subnet.add_port("a"))
        asker.records(SaMethod.GET_TABLE, NodeRecord)
        assert kinds == [
            "a > sa GET_TABLE NODE_RECORD",
            "sa > a GET_TABLE_RESP NODE_RECORD",
            "a > sa GET_TABLE NODE_RECORD",
        ]

    def test_lost_query_is_retransmitted(self) -> None:
        subnet = MemorySubnet(latency=1e-3)
        subnet.faults = nth("GET NODE_RECORD", 1, LOSE)
        asker = Asker(subnet, subnet.add_port("a"))
        began = subnet.clock()
        assert len(asker.records(SaMethod.GET, NodeRecord, lid=2, timeout=2.0, tries=10)) == 1
        assert subnet.clock() - began == pytest.approx(0.202)

    def test_fault_rates_are_met_and_repeatable(self) -> None:
        def arrived(seed: int, **chances: Any) -> list[int]:
            subnet = MemorySubnet(seed, latency=1e-3, **chances)
            a, b = two(subnet)
            for number in range(1000):
                a.send(MadAddress(b.port().lid), message(number))
            subnet.clock.advance(1.0)  # type: ignore[attr-defined]
            found = []
            while mads := b.receive():
                found += [Mad.unpack(mad).attribute_id for _, mad in mads]
            return found

        assert arrived(1) == list(range(1000))
        assert 700 < len(arrived(1, loss=0.2)) < 900
        assert 1100 < len(arrived(1, duplicate=0.2)) < 1300
        shuffled = arrived(1, reorder=0.5)
        assert shuffled != list(range(1000))
        assert sorted(shuffled) == list(range(1000))
        assert arrived(1, loss=0.5) == arrived(1, loss=0.5) != arrived(2, loss=0.5)

    @pytest.mark.parametrize("options", [{"loss": 2.0}, {"duplicate": -1.0}, {"latency": -1.0}, {"latency": 1e999}])
    def test_invalid_fault_rates_raise(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError):
            MemorySubnet(**options)


class TestRealTime:
    def wait(self, port: MemoryPort, seconds: float = LONGEST) -> bool:
        poll = select.poll()
        poll.register(port.fileno(), select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def test_descriptor_is_readable_while_a_mad_waits(self) -> None:
        a, b = two(MemorySubnet(clock=REAL))
        assert not self.wait(b, 0)
        for _ in range(65):
            a.send(MadAddress(b.port().lid), message())
        assert self.wait(b)
        assert len(b.receive()) == 64
        assert self.wait(b, 0)
        assert len(b.receive()) == 1
        assert not self.wait(b, 0)
        for port in (a, b):
            fd = port.fileno()
            port.close()
            assert port.fileno() == -1
            with pytest.raises(OSError):
                os.fstat(fd)

    def test_descriptor_wakes_for_delayed_mads(self) -> None:
        subnet = MemorySubnet(clock=REAL, latency=0.02)
        subnet.sa.delay = 0.02
        asker = Asker(subnet, subnet.add_port("a"))
        assert isinstance(asker.transport, MemoryPort)
        for number in range(100):
            subnet.sa.add_service(ServiceRecord(number))
        number = asker.ask(SaMethod.GET_TABLE, ServiceRecord, timeout=20.0)
        while number not in asker.answers:
            assert self.wait(asker.transport)
            asker.progress()
        assert len(asker.answers[number].records) == 100
        asker.transport.close()

    def test_ports_work_in_several_threads(self) -> None:
        subnet = MemorySubnet(clock=REAL)
        a, b = two(subnet)
        seen: list[int] = []

        def answer() -> None:
            while len(seen) < 200 and self.wait(b):
                for source, mad in b.receive():
                    seen.append(Mad.unpack(mad).attribute_id)
                    b.send(MadAddress(source.lid), mad)

        thread = threading.Thread(target=answer)
        thread.start()
        got: list[int] = []
        for number in range(200):
            a.send(MadAddress(b.port().lid), message(number))
        while len(got) < 200 and self.wait(a):
            got += [Mad.unpack(mad).attribute_id for _, mad in a.receive()]
        thread.join(20)
        assert got == seen == list(range(200))
        a.close()
        b.close()


class TestVirtualTime:
    def test_virtual_time_has_no_descriptor(self) -> None:
        a, _ = two(MemorySubnet())
        assert a.fileno() == -1

    def test_subnet_uses_the_fabrics_clock(self) -> None:
        fabric = Fabric()
        subnet = MemorySubnet(clock=fabric.clock, latency=0.5)
        fabric.attach(subnet)
        a, b = two(subnet)
        a.send(MadAddress(b.port().lid), message())
        assert fabric.run(lambda: bool(b.receive()))
        assert fabric.now == 0.5
        mask, record = query_for(PathRecord, slid=2, dlid=3)
        a.close()
        asker = Asker(subnet, a)
        asker.ask_raw(SaMethod.GET, PathRecord.ATTRIBUTE, int(mask), record.pack())
        fabric.run()
        assert fabric.now == 1.5
        asker.progress()
        assert len(asker.answers) == 1

    def test_subnet_with_another_clock_is_refused(self) -> None:
        with pytest.raises(ValueError, match="clock"):
            Fabric().attach(MemorySubnet())

    def test_hour_long_timeout_takes_no_real_time(self) -> None:
        subnet = MemorySubnet()
        subnet.sa.silence = 1.0
        asker = Asker(subnet, subnet.add_port("a"))
        asker.ask(SaMethod.GET, NodeRecord, timeout=3600.0, lid=2)
        run(subnet, asker)
        assert asker.answers[1].error == "timeout"
