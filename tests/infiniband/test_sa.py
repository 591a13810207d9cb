"""OpenSM's answers to our queries, and the same answers of the subnet administrator in memory."""

from __future__ import annotations

import dataclasses
import select
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

from infiniband.fabric import SimulatedFabric
from rdmacm.address import Gid
from rdmacm.ib.ibsim import IbsimTransport
from rdmacm.ib.transport import MadTransport
from rdmacm.proto.mad import MadAddress
from rdmacm.proto.sa.attributes import Attribute, Selector
from rdmacm.proto.sa.client import SaClient, SaResponse
from rdmacm.proto.sa.mad import SaMethod, SaStatus
from rdmacm.proto.sa.query import query_for
from rdmacm.proto.sa.records import PathRecord
from rdmacm.proto.sa.subnet import ClassPortInfo, MCMemberRecord, NodeRecord, ServiceRecord
from rdmacm.testing import MemorySubnet, SubnetAdministrator, TableMode
from rdmacm.testing.sa import BROADCAST
from support.clock import REAL

GET, SET, TABLE, DELETE = SaMethod.GET, SaMethod.SET, SaMethod.GET_TABLE, SaMethod.DELETE


class Port:
    """An open port that sends queries and waits in real time."""

    def __init__(self, transport: MadTransport) -> None:
        self.transport = transport
        self.client = SaClient(Random(), reassembles=transport.reassembles)

    @property
    def gid(self) -> Gid:
        return self.transport.port().gids[0]

    def find(self, method: SaMethod, kind: Any, **fields: Any) -> SaResponse:
        mask, record = query_for(kind, **fields)
        return self.ask(method, kind.ATTRIBUTE, mask, record.pack())

    def ask(
        self,
        method: int,
        attribute: int,
        mask: int = 0,
        data: bytes = b"",
        *,
        timeout: float = 10.0,
        lid: int | None = None,
        beside: SubnetAdministrator | None = None,
        at: MadTransport | None = None,
    ) -> SaResponse:
        client = self.client
        destination = MadAddress(self.transport.port().sm_lid if lid is None else lid)
        client.query(method, attribute, mask, data, destination, REAL(), timeout=timeout, tries=4)
        poll = select.poll()
        poll.register(self.transport.fileno(), select.POLLIN)
        if at is not None:
            poll.register(at.fileno(), select.POLLIN)
        while True:
            now = REAL()
            client.timer(now)
            for address, mad in client.mads_to_send():
                self.transport.send(address, mad)
            if answers := client.events():
                return answers[0]
            poll.poll(20)
            for source, mad in self.transport.receive():
                client.mad_received(source, mad, REAL())
            if at is not None and beside is not None:
                for source, mad in at.receive():
                    beside.mad_received(source, mad, now)
                beside.timer(now)
                for address, mad in beside.mads_to_send():
                    at.send(address, mad.ljust(256, b"\0"))


@contextmanager
def opened(transport: MadTransport) -> Iterator[Port]:
    transport.open()
    try:
        yield Port(transport)
    finally:
        transport.close()


@pytest.fixture
def opensm(fabric: SimulatedFabric) -> Iterator[Port]:
    with opened(IbsimTransport("HostA", fabric.base)) as port:
        yield port


@pytest.fixture
def ours(opensm: Port, fabric: SimulatedFabric) -> Iterator[Port]:
    """A port of a subnet in memory with the attributes of the simulated one."""
    subnet = MemorySubnet(clock=REAL)
    subnet.sa.lid = opensm.transport.port().sm_lid
    subnet.sa.table_mode = TableMode.CUT
    hosts = [opensm.transport.port()]
    with opened(IbsimTransport("HostB", fabric.base)) as b:
        hosts.append(b.transport.port())
    for name, host in zip(("HostA", "HostB"), hosts, strict=True):
        facts = {field.name: getattr(host, field.name) for field in dataclasses.fields(host)}
        subnet.add_port(name, **facts | {"device": name})
    with opened(subnet.ports["HostA"]) as port:
        yield port


def other_gid(port: Port, fabric: SimulatedFabric) -> Gid:
    """The GID of HostB."""
    [node] = [
        node
        for lid in range(1, 10)
        for node in (NodeRecord.unpack(record) for record in port.find(GET, NodeRecord, lid=lid).records)
        if node.description == "HostB"
    ]
    prefix = int.to_bytes(port.gid.subnet_prefix, 8, "big")
    return Gid(prefix + node.port_guid.to_bytes(8, "big"))


def test_path_record_matches_opensm(opensm: Port, ours: Port, fabric: SimulatedFabric) -> None:
    there = other_gid(opensm, fabric)
    paths = [
        port.find(GET, PathRecord, sgid=opensm.gid, dgid=there, reversible=True, numb_path=1) for port in (opensm, ours)
    ]
    [theirs], [mine] = (answer.records for answer in paths)
    found = PathRecord.unpack(theirs)
    assert (found.slid, found.dgid) == (opensm.transport.port().lid, there)
    assert PathRecord.unpack(mine) == found


QUESTIONS: dict[str, tuple[SaMethod, Any, dict[str, Any]]] = {
    "path to an unknown gid": (GET, PathRecord, {"sgid": "here", "dgid": Gid("fe80::dead:beef")}),
    "path to another subnet": (GET, PathRecord, {"sgid": "here", "dgid": Gid("fec0::1")}),
    "path to an unknown gid, table": (TABLE, PathRecord, {"sgid": "here", "dgid": Gid("fe80::dead:beef")}),
    "path with a larger mtu": (GET, PathRecord, {"sgid": "here", "dgid": "there", "mtu": 5}),
    "path with a smaller mtu": (GET, PathRecord, {"sgid": "here", "dgid": "there", "mtu": 3}),
    "path with an mtu below": (
        GET,
        PathRecord,
        {"sgid": "here", "dgid": "there", "mtu": 4, "mtu_selector": Selector.LESS},
    ),
    "path with an mtu above": (
        GET,
        PathRecord,
        {"sgid": "here", "dgid": "there", "mtu": 3, "mtu_selector": Selector.GREATER},
    ),
    "path with a higher rate": (GET, PathRecord, {"sgid": "here", "dgid": "there", "rate": 7}),
    "path with a lower rate": (GET, PathRecord, {"sgid": "here", "dgid": "there", "rate": 2}),
    "path with a shorter life time": (GET, PathRecord, {"sgid": "here", "dgid": "there", "packet_life_time": 10}),
    "path of another partition": (GET, PathRecord, {"sgid": "here", "dgid": "there", "pkey": 0x8123}),
    "path to oneself": (GET, PathRecord, {"sgid": "here", "dgid": "here"}),
    "path for a service": (GET, PathRecord, {"sgid": "here", "dgid": "there", "service_id": 0x1061D2F}),
    "path of a traffic class": (GET, PathRecord, {"sgid": "here", "dgid": "there", "traffic_class": 0x20}),
    "path to a group": (GET, PathRecord, {"sgid": "here", "dgid": BROADCAST}),
    "service without a gid": (SET, ServiceRecord, {"service_id": 1}),
    "service of an unknown gid": (
        *(SET, ServiceRecord),
        {"service_id": 1, "service_gid": Gid("fe80::dead:beef"), "service_pkey": 0xFFFF},
    ),
    "service of a partition": (SET, ServiceRecord, {"service_id": 1, "service_gid": "here", "service_pkey": 0x8123}),
    "no service": (GET, ServiceRecord, {"service_name": b"nobody offers this"}),
    "no services": (TABLE, ServiceRecord, {"service_name": b"nobody offers this"}),
    "no service to delete": (DELETE, ServiceRecord, {"service_id": 77, "service_gid": "here", "service_pkey": 0xFFFF}),
    "join without a port": (SET, MCMemberRecord, {"mgid": BROADCAST, "join_state": 1}),
    "join an unknown group": (
        SET,
        MCMemberRecord,
        {"mgid": Gid("ff15:a01b::7"), "port_gid": "here", "join_state": 1},
    ),
    "leave without joining": (DELETE, MCMemberRecord, {"mgid": BROADCAST, "port_gid": "here", "join_state": 1}),
    "join with another q_key": (
        *(SET, MCMemberRecord),
        {"mgid": BROADCAST, "port_gid": "here", "join_state": 1, "q_key": 7},
    ),
    "the broadcast group": (GET, MCMemberRecord, {"mgid": BROADCAST}),
    "no group": (GET, MCMemberRecord, {"mgid": Gid("ff15:a01b::7")}),
    "path to any group": (GET, PathRecord, {"dgid": BROADCAST}),
    "no node": (GET, NodeRecord, {"lid": 999}),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_responses_match_opensm(opensm: Port, ours: Port, fabric: SimulatedFabric, name: str) -> None:
    method, kind, fields = QUESTIONS[name]
    places = {"here": opensm.gid, "there": other_gid(opensm, fabric)}
    fields = {key: places.get(value, value) if isinstance(value, str) else value for key, value in fields.items()}
    theirs, mine = (port.find(method, kind, **fields) for port in (opensm, ours))
    assert (mine.status, mine.error, mine.truncated) == (theirs.status, theirs.error, theirs.truncated)
    assert [kind.unpack(record) for record in mine.records] == [kind.unpack(record) for record in theirs.records]


VALUES = {"mtu": (0, 1, 3, 4, 5, 6, 63), "rate": (0, 1, 2, 3, 5, 7, 18, 40), "packet_life_time": (0, 2, 17, 18, 19, 63)}


@pytest.mark.parametrize("selector", Selector)
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("destination", ["here", "there"])
def test_path_selectors_match_opensm(
    opensm: Port, ours: Port, fabric: SimulatedFabric, selector: Selector, name: str, destination: str
) -> None:
    here = opensm.gid
    there = here if destination == "here" else other_gid(opensm, fabric)
    for value in VALUES[name]:
        fields: dict[str, Any] = {"sgid": here, "dgid": there, name: value, f"{name}_selector": selector}
        theirs, mine = (port.find(GET, PathRecord, **fields) for port in (opensm, ours))
        assert mine.status == theirs.status, value
        found, expected = ([PathRecord.unpack(record) for record in answer.records] for answer in (mine, theirs))
        assert found == expected


UNSUPPORTED = [
    (method, attribute)
    for method in (SET, DELETE, SaMethod.GET_MULTI, SaMethod.GET_TRACE_TABLE)
    for attribute in (Attribute.CLASS_PORT_INFO, Attribute.PATH_RECORD, Attribute.NODE_RECORD)
]


@pytest.mark.parametrize(
    ("method", "attribute"),
    [*UNSUPPORTED, (TABLE, Attribute.CLASS_PORT_INFO), (GET, Attribute.SERVICE_ASSOCIATION_RECORD)],
)
def test_errors_for_invalid_queries_match_opensm(
    opensm: Port, ours: Port, method: SaMethod, attribute: Attribute
) -> None:
    theirs, mine = (port.ask(method, attribute, timeout=0.2) for port in (opensm, ours))
    assert (mine.status, mine.error) == (theirs.status, theirs.error)


def test_multicast_group_records_match_opensm(opensm: Port, ours: Port) -> None:
    mgid, gid = Gid("ff15:a01b::4242"), opensm.gid
    port: dict[str, Any] = {"mgid": mgid, "port_gid": gid}
    create = {"q_key": 7, "pkey": 0xFFFF, "traffic_class": 0, "sl": 0, "flow_label": 0}
    said = []
    for asker in (opensm, ours):
        answers = [
            asker.find(SET, MCMemberRecord, **port, **create, join_state=4),
            asker.find(SET, MCMemberRecord, **port, **create, join_state=1),
            asker.find(GET, MCMemberRecord, mgid=mgid),
            asker.find(GET, MCMemberRecord, **port),
            asker.find(TABLE, MCMemberRecord, mgid=mgid),
            asker.find(SET, MCMemberRecord, **port, **create, join_state=4),
            asker.find(SET, MCMemberRecord, **port, **create | {"pkey": 0x8001}, join_state=4),
            asker.find(DELETE, MCMemberRecord, **port, join_state=1),
            asker.find(DELETE, MCMemberRecord, **port, join_state=4),
            asker.find(GET, MCMemberRecord, mgid=mgid),
        ]
        # The MLID of a group depends on earlier groups.
        said.append(
            [
                (answer.status, [MCMemberRecord.unpack(record).replace(mlid=0) for record in answer.records])
                for answer in answers
            ]
        )
    assert said[0] == said[1]


def test_service_records_match_opensm(opensm: Port, ours: Port, fabric: SimulatedFabric) -> None:
    fields: dict[str, Any] = {"service_gid": opensm.gid, "service_pkey": 0xFFFF}
    said: list[list[tuple[int, tuple[bytes, ...]]]] = []
    for port in (opensm, ours):
        answers = [
            port.find(SET, ServiceRecord, service_id=0x9001, service_name=b"nine", service_lease=60, **fields),
            port.find(SET, ServiceRecord, service_id=0x9002, service_name=b"nine", service_data8=b"x" * 16, **fields),
            port.find(GET, ServiceRecord, service_id=0x9001),
            port.find(GET, ServiceRecord, service_name=b"nine"),
            port.find(TABLE, ServiceRecord, service_name=b"nine", service_data8=b"x" * 16),
            port.find(DELETE, ServiceRecord, service_id=0x9001),
            port.find(SET, ServiceRecord, service_id=0x9001, service_name=b"ten", **fields),
            port.find(TABLE, ServiceRecord, service_name=b"ten"),
            port.find(DELETE, ServiceRecord, service_id=0x9001, **fields),
            port.find(DELETE, ServiceRecord, service_id=0x9002, **fields),
            port.find(DELETE, ServiceRecord, service_id=0x9002, **fields),
        ]
        # The last 8 bytes of a service record do not reach OpenSM.
        said.append([(answer.status, tuple(record[:168] for record in answer.records)) for answer in answers])
    assert said[0] == said[1]


def test_table_is_truncated_to_one_datagram(opensm: Port) -> None:
    answer = opensm.find(TABLE, NodeRecord)
    assert (answer.status, len(answer.records), answer.truncated) == (0, 1, True)


def test_class_port_info_has_version_and_capabilities(opensm: Port) -> None:
    [record] = opensm.ask(GET, Attribute.CLASS_PORT_INFO).records
    info = ClassPortInfo.unpack(record)
    assert (info.class_version, info.capability_mask & 0x200) == (2, 0x200)


def test_table_arrives_in_rmpp_segments(opensm: Port, fabric: SimulatedFabric) -> None:
    sa = SubnetAdministrator()
    for number in range(300):
        sa.add_service(ServiceRecord(number))
    with opened(IbsimTransport("HostB", fabric.base)) as b:
        lid = b.transport.port().lid
        answer = opensm.ask(TABLE, Attribute.SERVICE_RECORD, lid=lid, beside=sa, at=b.transport)
    assert answer.error is None
    assert [ServiceRecord.unpack(record).service_id for record in answer.records] == list(range(300))
    assert answer.status == SaStatus.OK
