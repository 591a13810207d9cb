"""The subnet administrator in memory answers as OpenSM does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacm.address import Gid
from rdmacm.ib.transport import IbPort
from rdmacm.proto.mad import MadAddress
from rdmacm.proto.sa.attributes import Attribute, Selector
from rdmacm.proto.sa.mad import SaMad, SaMethod, SaStatus
from rdmacm.proto.sa.records import PathRecord
from rdmacm.proto.sa.subnet import ClassPortInfo, JoinState, MCMemberRecord, NodeRecord, ServiceRecord
from rdmacm.testing import MemorySubnet, SaFault, SubnetAdministrator, TableMode
from rdmacm.testing.sa import BROADCAST
from rdmacm.verbs.enums import PortState
from support import sa_vectors
from support.rows import for_each
from support.sa import Asker, run

GET, SET, TABLE, DELETE = SaMethod.GET, SaMethod.SET, SaMethod.GET_TABLE, SaMethod.DELETE


def opensm_port(name: str, lid: int, guid: int) -> IbPort:
    """A port of the fabric from which the vectors are."""
    gid = Gid(f"fe80::{guid >> 16:x}:{guid & 0xFFFF:x}")
    return IbPort(name, 1, guid - 1, guid, (gid,), (0xFFFF,), PortState.ACTIVE, lid, sm_lid=1, rate=3)


@pytest.fixture
def opensm() -> SubnetAdministrator:
    sa = SubnetAdministrator(table_mode=TableMode.CUT)
    sa.add_port(opensm_port("HostA", 4, 0x100003))
    sa.add_port(opensm_port("HostB", 5, 0x100005))
    return sa


def exchange(sa: SubnetAdministrator, mad: bytes, lid: int = 4, stamp: int = 1) -> bytes:
    """Send a request as ibsim delivers it, with the client's number in the transaction id; returns the answer."""
    sa.mad_received(MadAddress(lid), mad[:8] + stamp.to_bytes(2, "big") + mad[10:], 0.0)
    [(address, answer)] = sa.mads_to_send()
    assert address.lid == lid
    return answer


class TestByteForByte:
    def test_path_record_equals_opensms(self, opensm: SubnetAdministrator) -> None:
        assert exchange(opensm, sa_vectors.PATH_REQUEST) == sa_vectors.PATH_ANSWER

    def test_service_records_equal_opensms(self, opensm: SubnetAdministrator) -> None:
        # The last number of the data does not reach OpenSM.
        lost = slice(-8, None)
        answer = exchange(opensm, sa_vectors.SERVICE_REQUEST)
        assert answer[:-8] == sa_vectors.SERVICE_ANSWER[:-8]
        assert answer[lost] == sa_vectors.SERVICE_REQUEST[224:232]
        table = exchange(opensm, sa_vectors.TABLE_REQUEST, 5, 2)
        assert table[:-8] == sa_vectors.TABLE_ANSWER[:-8]
        gone = SaMad.unpack(exchange(opensm, sa_vectors.DELETE_REQUEST))
        assert (gone.method, gone.status, gone.data) == (0x95, 0, answer[56:])
        again = SaMad.unpack(exchange(opensm, sa_vectors.DELETE_REQUEST))
        assert (again.method, again.status) == (0x95, SaStatus.NO_RECORDS)

    def test_joining_the_broadcast_group_is_answered_as_by_opensm(self, opensm: SubnetAdministrator) -> None:
        record = MCMemberRecord(mgid=BROADCAST, port_gid=Gid("fe80::10:3"), join_state=1)
        request = SaMad(SET, Attribute.MC_MEMBER_RECORD, 9, 0x10003, record.pack())
        assert exchange(opensm, request.pack()) == sa_vectors.JOIN_ANSWER

    def test_empty_table_is_answered_as_by_opensm(self, opensm: SubnetAdministrator) -> None:
        answer = exchange(opensm, sa_vectors.TABLE_REQUEST)
        assert (len(answer), SaMad.unpack(answer).attribute_offset, SaMad.unpack(answer).status) == (56, 0, 0)

    def test_class_port_info_equals_opensms(self, opensm: SubnetAdministrator) -> None:
        answer = exchange(opensm, sa_vectors.CLASS_PORT_INFO_REQUEST)
        assert answer[56:64].hex() == "010226020016bd10"

    def test_table_is_truncated_to_one_datagram(self, opensm: SubnetAdministrator) -> None:
        for lid in range(10, 20):
            opensm.add_port(opensm_port(f"Host{lid}", lid, 0x100000 + 2 * lid + 1))
        request = SaMad(TABLE, Attribute.PATH_RECORD, 1)
        assert len(exchange(opensm, request.pack())) == 256


@pytest.fixture
def subnet() -> MemorySubnet:
    return MemorySubnet(1)


@pytest.fixture
def asker(subnet: MemorySubnet) -> Asker:
    port = subnet.add_port("a")
    for name in ("b", "c"):
        subnet.add_port(name)
    return Asker(subnet, port)


def gid(subnet: MemorySubnet, name: str) -> Gid:
    return subnet.ports[name].port().gids[0]


class TestPaths:
    def test_path_is_found_by_gid(self, asker: Asker, subnet: MemorySubnet) -> None:
        here, there = gid(subnet, "a"), gid(subnet, "b")
        [path] = asker.records(GET, PathRecord, sgid=here, dgid=there, numb_path=1)
        assert (path.slid, path.dlid, path.mtu, path.rate, path.pkey) == (2, 3, 4, 3, 0xFFFF)

    def test_table_of_all_paths_has_every_pair(self, asker: Asker) -> None:
        paths = asker.records(TABLE, PathRecord)
        assert sorted((path.slid, path.dlid) for path in paths) == [(s, d) for s in (2, 3, 4) for d in (2, 3, 4)]

    def test_unknown_destination_has_no_path(self, asker: Asker, subnet: MemorySubnet) -> None:
        answer = asker.find(GET, PathRecord, sgid=gid(subnet, "a"), dgid=Gid("fe80::dead"))
        assert (answer.status, answer.records) == (SaStatus.NO_RECORDS, ())
        assert asker.records(TABLE, PathRecord, dgid=Gid("fe80::dead")) == []

    def test_get_with_several_matches_is_an_error(self, asker: Asker) -> None:
        assert asker.find(GET, PathRecord, slid=2).status == SaStatus.TOO_MANY_RECORDS

    def test_several_paths_of_one_pair_are_returned_in_order(self, asker: Asker, subnet: MemorySubnet) -> None:
        here, there = gid(subnet, "a"), gid(subnet, "b")
        path = subnet.sa.path(here, there)
        subnet.sa.set_paths(here, there, path.replace(sl=1), path.replace(sl=2), path.replace(sl=3))
        assert [found.sl for found in asker.records(TABLE, PathRecord, sgid=here, dgid=there)] == [1, 2, 3]
        assert [found.sl for found in asker.records(TABLE, PathRecord, sgid=here, dgid=there, numb_path=2)] == [1, 2]
        assert [found.sl for found in asker.records(GET, PathRecord, sgid=here, dgid=there)] == [1]
        assert [found.sl for found in asker.records(GET, PathRecord, sgid=here, dgid=there, sl=3)] == [3]

    def test_irreversible_path_is_not_returned_as_reversible(self, asker: Asker, subnet: MemorySubnet) -> None:
        here, there = gid(subnet, "a"), gid(subnet, "b")
        subnet.sa.set_paths(there, here)
        subnet.sa.set_paths(here, there, subnet.sa.path(here, there).replace(reversible=False))
        assert len(asker.records(GET, PathRecord, sgid=here, dgid=there)) == 1
        assert asker.find(GET, PathRecord, sgid=here, dgid=there, reversible=True).status == SaStatus.NO_RECORDS
        assert asker.find(GET, PathRecord, sgid=there, dgid=here).status == SaStatus.NO_RECORDS
        subnet.sa.reset_paths()
        assert len(asker.records(GET, PathRecord, sgid=there, dgid=here, reversible=True)) == 1

    def test_path_is_found_for_a_service_id(self, asker: Asker, subnet: MemorySubnet) -> None:
        here, there = gid(subnet, "a"), gid(subnet, "b")
        path = subnet.sa.path(here, there)
        subnet.sa.set_paths(here, there, path.replace(service_id=7, sl=5), path)
        assert [it.sl for it in asker.records(GET, PathRecord, sgid=here, dgid=there)] == [0]
        assert [it.sl for it in asker.records(GET, PathRecord, sgid=here, dgid=there, service_id=7)] == [5]
        assert [it.sl for it in asker.records(GET, PathRecord, sgid=here, dgid=there, service_id=8)] == [0]

    @pytest.mark.parametrize(
        ("selector", "asked", "mtu"),
        [
            (Selector.EXACTLY, 4, 4),
            (Selector.EXACTLY, 2, 2),
            (Selector.EXACTLY, 5, None),
            (Selector.LESS, 4, 3),
            (Selector.LESS, 5, 4),
            (Selector.LESS, 1, None),
            (Selector.GREATER, 3, 4),
            (Selector.GREATER, 4, None),
            (Selector.LARGEST, 5, 4),
        ],
    )
    def test_mtu_selector_limits_the_mtu(
        self, asker: Asker, subnet: MemorySubnet, selector: Selector, asked: int, mtu: int | None
    ) -> None:
        found = asker.records(TABLE, PathRecord, slid=2, dlid=3, mtu=asked, mtu_selector=selector)
        assert [path.mtu for path in found] == ([] if mtu is None else [mtu])

    def test_path_has_the_lowest_rate_of_its_ports(self, asker: Asker, subnet: MemorySubnet) -> None:
        subnet.change_port("b", rate=5)  # 5 Gb/s, less than the 10 Gb/s of a, although its code is higher
        subnet.change_port("a", rate=3)
        [path] = asker.records(TABLE, PathRecord, slid=2, dlid=3)
        assert path.rate == 5
        assert asker.records(TABLE, PathRecord, slid=2, dlid=3, rate=3) == []
        assert asker.records(TABLE, PathRecord, slid=2, dlid=3, packet_life_time=19) == []
        [path] = asker.records(TABLE, PathRecord, slid=2, dlid=3, packet_life_time=17)
        assert path.packet_life_time == 17

    def test_path_is_found_in_a_partition(self, asker: Asker, subnet: MemorySubnet) -> None:
        subnet.change_port("a", pkeys=(0xFFFF, 0x0123))
        subnet.change_port("b", pkeys=(0xFFFF, 0x8123))
        subnet.change_port("c", pkeys=(0x7FFF, 0x0123))
        assert [it.pkey for it in asker.records(TABLE, PathRecord, slid=2, dlid=3, pkey=0x8123)] == [0x8123]
        # Two limited members cannot communicate.
        assert asker.records(TABLE, PathRecord, slid=2, dlid=4, pkey=0x8123) == []
        assert [it.pkey for it in asker.records(TABLE, PathRecord, slid=2, dlid=4)] == [0xFFFF]

    def test_path_to_a_group_needs_a_member(self, asker: Asker) -> None:
        assert asker.find(GET, PathRecord, slid=2, dgid=BROADCAST).status == SaStatus.NO_RECORDS
        here = asker.transport.port().gids[0]
        asker.records(SET, MCMemberRecord, mgid=BROADCAST, port_gid=here, join_state=1)
        [path] = asker.records(GET, PathRecord, slid=2, dgid=BROADCAST)
        assert (path.dlid, path.slid, path.reversible) == (0xC000, 0, False)
        assert asker.find(GET, PathRecord, dgid=Gid("ff12::1")).status == SaStatus.NO_RECORDS

    def test_port_that_is_down_has_no_path(self, asker: Asker, subnet: MemorySubnet) -> None:
        there = gid(subnet, "b")
        subnet.change_port("b", state=PortState.DOWN)
        assert asker.find(GET, PathRecord, dgid=there, slid=2).status == SaStatus.NO_RECORDS
        subnet.change_port("b", state=PortState.ACTIVE)
        assert asker.find(GET, PathRecord, dgid=there, slid=2).status == 0


class TestServices:
    def test_services_match_the_queried_fields(self, asker: Asker, subnet: MemorySubnet) -> None:
        for number, name in enumerate((b"one", b"two", b"two")):
            record = {"service_id": number, "service_gid": gid(subnet, "a"), "service_name": name}
            asker.records(SET, ServiceRecord, service_data16=(number, 5) + (0,) * 6, **record)
        assert [it.service_id for it in asker.records(TABLE, ServiceRecord)] == [0, 1, 2]
        assert [it.service_id for it in asker.records(TABLE, ServiceRecord, service_name=b"two")] == [1, 2]
        assert asker.records(TABLE, ServiceRecord, service_name=b"TWO") == []
        assert asker.find(GET, ServiceRecord, service_name=b"two").status == SaStatus.TOO_MANY_RECORDS
        assert [it.service_id for it in asker.records(GET, ServiceRecord, service_id=1)] == [1]
        # The mask selects the second 16-bit number only.
        asked = ServiceRecord(service_data16=(9, 5, 0, 0, 0, 0, 0, 0)).pack()
        answer = asker.wait(asker.ask_raw(TABLE, Attribute.SERVICE_RECORD, 1 << 24, asked))
        assert len(answer.records) == 3

    def test_services_expire(self, asker: Asker, subnet: MemorySubnet) -> None:
        asker.records(SET, ServiceRecord, service_id=1, service_gid=gid(subnet, "a"), service_lease=10)
        asker.records(SET, ServiceRecord, service_id=2, service_gid=gid(subnet, "a"))
        subnet.clock.advance(9.9)  # type: ignore[attr-defined]
        assert len(asker.records(TABLE, ServiceRecord)) == 2
        subnet.clock.advance(0.1)  # type: ignore[attr-defined]
        assert [it.service_id for it in asker.records(TABLE, ServiceRecord)] == [2]

    def test_registering_again_renews_a_service(self, asker: Asker, subnet: MemorySubnet) -> None:
        for _ in range(5):
            asker.records(SET, ServiceRecord, service_id=1, service_gid=gid(subnet, "a"), service_lease=10)
            subnet.clock.advance(9.0)  # type: ignore[attr-defined]
        assert len(asker.records(TABLE, ServiceRecord)) == 1

    def test_services_need_an_id_and_a_gid(self, asker: Asker, subnet: MemorySubnet) -> None:
        assert asker.find(SET, ServiceRecord, service_id=1).status == SaStatus.REQ_INVALID
        assert asker.find(SET, ServiceRecord, service_gid=gid(subnet, "a")).status == SaStatus.REQ_INVALID

    def test_service_with_a_pkey_needs_membership(self, asker: Asker, subnet: MemorySubnet) -> None:
        fields = {"service_id": 1, "service_gid": gid(subnet, "b")}
        assert asker.find(SET, ServiceRecord, service_pkey=0x8001, **fields).status == SaStatus.REQ_INVALID
        assert asker.find(SET, ServiceRecord, service_pkey=0xFFFF, **fields).status == 0
        elsewhere = {"service_id": 1, "service_gid": Gid("fe80::dead")}
        assert asker.find(SET, ServiceRecord, service_pkey=0xFFFF, **elsewhere).status == SaStatus.REQ_INVALID

    def test_service_without_a_pkey_is_deleted_without_one(self, asker: Asker, subnet: MemorySubnet) -> None:
        fields = {"service_id": 1, "service_gid": gid(subnet, "a")}
        [told] = asker.records(SET, ServiceRecord, **fields)
        assert told.service_pkey == 0xFFFF
        assert asker.find(DELETE, ServiceRecord, service_pkey=0xFFFF, **fields).status == SaStatus.NO_RECORDS
        assert asker.find(DELETE, ServiceRecord, service_pkey=0, **fields).status == 0

    def test_service_keys_are_hidden(self, asker: Asker, subnet: MemorySubnet) -> None:
        fields = {"service_id": 1, "service_gid": gid(subnet, "a"), "service_key": b"s" * 16}
        [told] = asker.records(SET, ServiceRecord, **fields)
        assert told.service_key == bytes(16)


class TestMulticastGroups:
    FIELDS = {"q_key": 7, "pkey": 0xFFFF, "traffic_class": 0, "sl": 0, "flow_label": 0}

    def test_groups_are_created_joined_and_left(self, asker: Asker, subnet: MemorySubnet) -> None:
        mgid = Gid("ff15:a01b::1")
        fields = {"mgid": mgid, "port_gid": gid(subnet, "a"), "join_state": JoinState.FULL_MEMBER}
        [made] = asker.records(SET, MCMemberRecord, **fields, **self.FIELDS)
        assert (made.mlid, made.q_key) == (0xC001, 7)
        [joined] = asker.records(SET, MCMemberRecord, **fields | {"port_gid": gid(subnet, "b")})
        assert joined.mlid == made.mlid
        assert subnet.sa.members(mgid) == {gid(subnet, name): JoinState.FULL_MEMBER for name in "ab"}
        asker.records(DELETE, MCMemberRecord, **fields)
        assert list(subnet.sa.members(mgid)) == [gid(subnet, "b")]
        assert asker.find(DELETE, MCMemberRecord, **fields).status == SaStatus.REQ_INVALID
        asker.records(DELETE, MCMemberRecord, **fields | {"port_gid": gid(subnet, "b")})
        assert asker.find(GET, MCMemberRecord, mgid=mgid).status == SaStatus.NO_RECORDS

    def test_join_states_accumulate(self, asker: Asker, subnet: MemorySubnet) -> None:
        fields = {"mgid": BROADCAST, "port_gid": gid(subnet, "a")}
        asker.records(SET, MCMemberRecord, join_state=JoinState.FULL_MEMBER, **fields)
        [record] = asker.records(SET, MCMemberRecord, join_state=JoinState.SEND_ONLY_NON_MEMBER, **fields)
        assert record.join_state == JoinState.FULL_MEMBER | JoinState.SEND_ONLY_NON_MEMBER
        asker.records(DELETE, MCMemberRecord, join_state=JoinState.FULL_MEMBER, **fields)
        assert subnet.sa.members(BROADCAST)[gid(subnet, "a")] == JoinState.SEND_ONLY_NON_MEMBER
        assert asker.find(GET, MCMemberRecord, mgid=BROADCAST, port_gid=gid(subnet, "b")).status == SaStatus.NO_RECORDS
        assert asker.find(GET, MCMemberRecord, **fields).status == 0
        [group] = asker.records(TABLE, MCMemberRecord, mgid=BROADCAST)
        assert (group.port_gid, group.join_state) == (Gid(), 0)

    @pytest.mark.parametrize(
        ("mgid", "fields", "status"),
        [
            ("ff15:a01b::1", {"q_key": 7}, SaStatus.REQ_INSUFFICIENT_COMPONENTS),
            ("ff12:a01b::1", FIELDS, SaStatus.REQ_INVALID),
            ("ff12:601b::1", FIELDS, SaStatus.REQ_INVALID),
            ("fe80::1", FIELDS, SaStatus.REQ_INVALID),
            ("ff12:601b::1", FIELDS | {"q_key": 0xB1B}, 0),
            (str(BROADCAST), {"q_key": 7}, SaStatus.REQ_INVALID),
            (str(BROADCAST), {"q_key": 0xB1B}, 0),
        ],
    )
    def test_group_parameters_are_checked(
        self, asker: Asker, subnet: MemorySubnet, mgid: str, fields: dict[str, int], status: int
    ) -> None:
        joins = {"mgid": Gid(mgid), "port_gid": gid(subnet, "a"), "join_state": 1}
        assert asker.find(SET, MCMemberRecord, **joins, **fields).status == status


class TestOthers:
    def test_nodes_are_found_by_lid(self, asker: Asker, subnet: MemorySubnet) -> None:
        assert [it.description for it in asker.records(TABLE, NodeRecord)] == ["a", "b", "c"]
        [node] = asker.records(GET, NodeRecord, lid=3)
        assert (node.port_guid, node.description) == (subnet.ports["b"].port().port_guid, "b")

    def test_class_port_info_has_the_capabilities(self, asker: Asker) -> None:
        answer = asker.wait(asker.ask_raw(GET, Attribute.CLASS_PORT_INFO))
        assert ClassPortInfo.unpack(answer.records[0]).capability_mask == 0x2602

    def test_unsupported_method_is_an_error_or_unanswered(self, asker: Asker) -> None:
        assert asker.wait(asker.ask_raw(SaMethod.GET_MULTI, Attribute.PATH_RECORD)).status == 0x000C
        assert asker.find(SET, PathRecord, slid=2).error == "timeout"

    def test_unknown_attribute_is_not_answered(self, asker: Asker, subnet: MemorySubnet) -> None:
        number = asker.ask_raw(GET, Attribute.SERVICE_ASSOCIATION_RECORD, timeout=3.0)
        began = subnet.clock()
        assert asker.wait(number).error == "timeout"
        assert subnet.clock() - began == pytest.approx(3.0)
        assert len(subnet.sa.requests) == 10


class TestTables:
    @pytest.mark.parametrize("count", [0, 1, 3, 500])
    @pytest.mark.parametrize("tables", [TableMode.SEGMENTS, TableMode.WHOLE])
    def test_tables_of_any_length_arrive_whole(self, subnet: MemorySubnet, tables: TableMode, count: int) -> None:
        subnet.sa.table_mode = tables
        asker = Asker(subnet, subnet.add_port("a"))
        for number in range(count):
            subnet.sa.add_service(ServiceRecord(number, gid(subnet, "a"), service_name=b"%d" % number))
        found = asker.records(TABLE, ServiceRecord)
        assert [it.name for it in found] == [str(number) for number in range(count)]

    def test_table_without_segments_is_truncated(self, subnet: MemorySubnet) -> None:
        subnet.sa.table_mode = TableMode.CUT
        asker = Asker(subnet, subnet.add_port("a"))
        for number in range(3):
            subnet.sa.add_service(ServiceRecord(number, gid(subnet, "a")))
        answer = asker.find(TABLE, ServiceRecord)
        assert (len(answer.records), answer.truncated) == (1, True)

    @for_each("seed", range(20))
    def test_tables_arrive_whole_over_a_lossy_network(self, seed: int) -> None:
        subnet = MemorySubnet(seed, latency=10e-6, loss=0.1, duplicate=0.1, reorder=0.2, reorder_delay=1e-3)
        asker = Asker(subnet, subnet.add_port("a"), seed)
        for number in range(500):
            subnet.sa.add_service(ServiceRecord(number, gid(subnet, "a")))
        found = asker.records(TABLE, ServiceRecord, timeout=60.0, tries=60)
        assert [it.service_id for it in found] == list(range(500))

    def test_same_seed_replays_the_same_run(self) -> None:
        def once() -> tuple[float, dict[str, int], list[float]]:
            subnet = MemorySubnet(7, latency=10e-6, loss=0.2, duplicate=0.1, reorder=0.2)
            subnet.sa.jitter = 1e-3
            asker = Asker(subnet, subnet.add_port("a"))
            for number in range(300):
                subnet.sa.add_service(ServiceRecord(number, gid(subnet, "a")))
            asker.find(TABLE, ServiceRecord, timeout=30.0)
            return subnet.clock(), dict(asker.client.dropped), [when for when, _, _ in subnet.sa.requests]

        assert once() == once()


def first(count: int, fault: SaFault) -> Callable[[SaMad], SaFault | None]:
    """Apply a fault to the first ``count`` requests."""
    left = count

    def script(_: SaMad) -> SaFault | None:
        nonlocal left
        left -= 1
        return fault if left >= 0 else None

    return script


class TestFaults:
    @pytest.mark.parametrize(
        ("fault", "reason"),
        [
            (SaFault.SILENCE, None),
            (SaFault.BUSY, None),
            (SaFault.WRONG_METHOD, "method"),
            (SaFault.WRONG_ATTRIBUTE, "attribute"),
            (SaFault.WRONG_TRANSACTION, "transaction"),
            (SaFault.WRONG_VERSION, "version"),
            (SaFault.TRUNCATED, "length"),
        ],
    )
    def test_faulty_answers_are_dropped_and_the_query_repeated(
        self, asker: Asker, subnet: MemorySubnet, fault: SaFault, reason: str | None
    ) -> None:
        subnet.sa.faults = first(3, fault)
        began = subnet.clock()
        assert len(asker.records(GET, NodeRecord, lid=2, timeout=2.0, tries=10)) == 1
        assert subnet.clock() - began == pytest.approx(0.6)
        assert asker.client.dropped == ({reason: 3} if reason else {})

    def test_unsolicited_answer_is_dropped(self, asker: Asker, subnet: MemorySubnet) -> None:
        subnet.sa.faults = first(1, SaFault.UNSOLICITED)
        assert len(asker.records(GET, NodeRecord, lid=2)) == 1
        assert asker.client.dropped == {"transaction": 1}
        assert len(subnet.sa.requests) == 1

    @pytest.mark.parametrize(("name", "status"), [("silence", 0), ("busy", 1)])
    def test_lasting_fault_ends_in_a_timeout(self, asker: Asker, subnet: MemorySubnet, name: str, status: int) -> None:
        setattr(subnet.sa, name, 1.0)
        began = subnet.clock()
        answer = asker.find(GET, NodeRecord, lid=2, timeout=5.0)
        assert (answer.error, answer.status) == ("timeout", status)
        assert subnet.clock() - began == pytest.approx(5.0)

    def test_delayed_answer_arrives_or_times_out(self, asker: Asker, subnet: MemorySubnet) -> None:
        subnet.sa.delay = 0.5
        numbers = [asker.ask(GET, NodeRecord, lid=2, timeout=1.0), asker.ask(GET, NodeRecord, lid=2, timeout=0.4)]
        began = subnet.clock()
        run(subnet, asker)
        assert [asker.answers[number].error for number in numbers] == [None, "timeout"]
        assert [asker.times[number] - began for number in numbers] == pytest.approx([0.5, 0.4])

    @for_each("seed", range(10))
    def test_queries_survive_random_faults(self, seed: int) -> None:
        random = Random(seed)
        subnet = MemorySubnet(seed, latency=1e-4, loss=0.05, duplicate=0.1, reorder=0.3)
        subnet.sa.silence, subnet.sa.busy, subnet.sa.jitter = 0.1, 0.1, 0.01
        subnet.sa.faults = lambda _: random.choice(list(SaFault)) if random.random() < 0.3 else None
        askers = [Asker(subnet, subnet.add_port(name), seed) for name in "abcd"]
        for asker in askers:
            numbers = [asker.ask(TABLE, PathRecord, timeout=20.0, tries=40) for _ in range(10)]
            numbers += [asker.ask(GET, NodeRecord, lid=3, timeout=20.0, tries=40) for _ in range(10)]
        run(subnet, *askers)
        for asker in askers:
            assert len(asker.answers) == 20
            assert all(answer.error is None and answer.status == 0 for answer in asker.answers.values())
            assert [len(asker.answers[number].records) for number in numbers] == [16] * 10 + [1] * 10


@given(st.lists(st.binary(max_size=300), max_size=10), st.sampled_from(list(TableMode)))
def test_arbitrary_mads_do_not_raise(mads: list[bytes], tables: TableMode) -> None:
    sa = SubnetAdministrator(table_mode=tables)
    sa.add_port(opensm_port("HostA", 4, 0x100003))
    attributes = [Attribute.PATH_RECORD, Attribute.SERVICE_RECORD, Attribute.MC_MEMBER_RECORD, Attribute.NODE_RECORD]
    for number, mad in enumerate(mads):
        sa.mad_received(MadAddress(4), mad, number)
        for attribute in attributes:
            for method in (GET, SET, TABLE, DELETE):
                head = SaMad(method, attribute, number).pack()[:48]
                sa.mad_received(MadAddress(4), (head + mad).ljust(256, b"\0")[:256], number)
                sa.mad_received(MadAddress(4), (head[:24] + mad).ljust(256, b"\0")[:256], number)
    for _, mad in sa.mads_to_send():
        SaMad.unpack(mad)


def test_port_without_a_lid_is_refused() -> None:
    with pytest.raises(ValueError, match="no LID"):
        SubnetAdministrator().add_port(replace(opensm_port("HostA", 4, 0x100003), lid=0))
