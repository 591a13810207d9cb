"""SA records: bytes from OpenSM, bytes checked with a dissector, and arbitrary bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacm.address import Gid
from rdmacm.proto.sa.attributes import Attribute, Selector
from rdmacm.proto.sa.mad import HEADER_LENGTH, SaMad
from rdmacm.proto.sa.query import MASKS, MemberMask, NodeMask, PathMask, ServiceMask, query_for
from rdmacm.proto.sa.records import PathRecord
from rdmacm.proto.sa.subnet import (
    LEASE_FOREVER,
    ClassPortInfo,
    JoinState,
    MCMemberRecord,
    NodeInfoType,
    NodeRecord,
    ServiceRecord,
)
from rdmacm.proto.wire import WireError
from support import sa_vectors
from support.rows import for_each

KINDS: list[Any] = [PathRecord, ServiceRecord, MCMemberRecord, NodeRecord, ClassPortInfo]
HOST_A, HOST_B = Gid("fe80::10:3"), Gid("fe80::10:5")

SERVICE = ServiceRecord(
    service_id=0x10001,
    service_gid=HOST_A,
    service_pkey=0xFFFF,
    service_lease=LEASE_FOREVER,
    service_name=b"demo.service",
    service_data8=bytes(range(1, 17)),
    service_data16=(0x1112, 0x1314, 0x1516, 0x1718, 0x191A, 0x1B1C, 0x1D1E, 0x1F20),
    service_data32=(0x21222324, 0x25262728, 0x292A2B2C, 0x2D2E2F30),
    service_data64=(0x3132333435363738, 0x393A3B3C3D3E3F40),
)


def data_of(vector: bytes) -> bytes:
    return vector[HEADER_LENGTH:]


class TestOpenSM:
    def test_path_record_query_packs_to_the_captured_bytes(self) -> None:
        mask, record = query_for(PathRecord, dgid=HOST_B, sgid=HOST_A, reversible=True, numb_path=1)
        assert mask == 0x180C
        asked = SaMad(0x01, Attribute.PATH_RECORD, 0x42, mask, record.pack())
        assert asked.pack() == sa_vectors.PATH_REQUEST

    def test_path_record_response_unpacks_to_its_fields(self) -> None:
        path = PathRecord.unpack(data_of(sa_vectors.PATH_ANSWER))
        assert (path.dgid, path.sgid, path.dlid, path.slid, path.pkey) == (HOST_B, HOST_A, 5, 4, 0xFFFF)
        assert (path.mtu_selector, path.mtu, path.mtu_bytes) == (Selector.EXACTLY, 4, 2048)
        assert (path.rate, path.packet_life_time, path.reversible) == (3, 18, True)

    def test_service_record_round_trips(self) -> None:
        asked = SaMad.unpack(sa_vectors.SERVICE_REQUEST)
        assert ServiceRecord.unpack(asked.data[:176]) == SERVICE
        assert SERVICE.pack() == asked.data[:176]
        assert SERVICE.name == "demo.service"
        given = [field.name for field in dataclasses.fields(SERVICE) if field.name != "service_key"]
        fields = {name: getattr(SERVICE, name) for name in given}
        mask, record = query_for(ServiceRecord, **fields)
        assert (mask, record) == (asked.component_mask, SERVICE)
        answer = ServiceRecord.unpack(data_of(sa_vectors.SERVICE_ANSWER))
        assert answer == SERVICE.replace(service_data64=(0x3132333435363738, 0x3001000000000000))

    def test_service_record_query_by_name_packs_to_the_captured_bytes(self) -> None:
        mask, record = query_for(ServiceRecord, service_name=b"demo.service")
        assert SaMad(0x12, Attribute.SERVICE_RECORD, 0x104, mask, record.pack()).pack() == sa_vectors.TABLE_REQUEST

    def test_service_record_deletion_packs_to_the_captured_bytes(self) -> None:
        mask, record = query_for(ServiceRecord, service_id=0x10001, service_gid=HOST_A, service_pkey=0xFFFF)
        assert SaMad(0x15, Attribute.SERVICE_RECORD, 0x110, mask, record.pack()).pack() == sa_vectors.DELETE_REQUEST

    def test_broadcast_group_member_record_round_trips(self) -> None:
        record = MCMemberRecord.unpack(data_of(sa_vectors.JOIN_ANSWER))  # with its padding
        assert record.mgid == Gid("ff12:401b:ffff::ffff:ffff")
        assert (record.port_gid, record.q_key, record.mlid, record.pkey) == (HOST_A, 0x0B1B, 0xC000, 0xFFFF)
        assert (record.mtu, record.rate, record.packet_life_time) == (4, 3, 18)
        assert (record.scope, record.join_state) == (2, JoinState.FULL_MEMBER)
        assert record.pack() == data_of(sa_vectors.JOIN_ANSWER)[:52]


class TestDissected:
    def test_path_query_of_rdma_resolve_route_unpacks_to_its_fields(self) -> None:
        asked = SaMad.unpack(sa_vectors.CM_PATH_REQUEST)
        fields = PathMask.SERVICE_ID | PathMask.DGID | PathMask.SGID | PathMask.REVERSIBLE | PathMask.NUMB_PATH
        assert asked.component_mask == fields | PathMask.PKEY | PathMask.QOS_CLASS
        assert PathRecord.unpack(asked.data[:64]).service_id == 0x1061D2F
        path = PathRecord.unpack(data_of(sa_vectors.CM_PATH_ANSWER)[:64])
        assert (path.dlid, path.slid, path.flow_label, path.hop_limit) == (4, 2, 0xABC, 1)
        assert (path.mtu, path.rate, path.packet_life_time) == (5, 7, 18)

    def test_mcmember_query_of_rdma_join_multicast_can_be_built(self) -> None:
        mask, record = query_for(
            MCMemberRecord,
            mgid=Gid("ff12:401b:ffff::ffff:ffff"),
            port_gid=Gid("fe80::2:c903:0:1"),
            q_key=0x0B1B,
            traffic_class=0,
            pkey=0xFFFF,
            sl=0,
            flow_label=0,
            join_state=JoinState.FULL_MEMBER,
        )
        assert mask == 0x130C7
        asked = SaMad.unpack(sa_vectors.CM_JOIN_REQUEST)
        given = MCMemberRecord.unpack(asked.data[:52])
        asked_for = {
            name.lower(): getattr(given, name.lower()) for name, bit in MemberMask.__members__.items() if bit & mask
        }
        assert query_for(MCMemberRecord, **asked_for) == (mask, record)
        assert (given.mlid, given.mtu, given.rate, given.packet_life_time, given.scope) == (0xC000, 4, 3, 18, 2)

    def test_service_query_by_id_and_name_packs_to_the_dissected_bytes(self) -> None:
        mask, record = query_for(ServiceRecord, service_id=0x1000000000000001, service_name=b"pyrdma-test")
        assert SaMad(0x12, 0x31, 0x900000003, mask, record.pack()).pack() == sa_vectors.CM_SERVICE_REQUEST

    def test_node_record_round_trips(self) -> None:
        mask, record = query_for(NodeRecord, lid=2)
        assert SaMad(0x12, 0x11, 0x900000004, mask, record.pack()).pack() == sa_vectors.NODE_REQUEST
        node = NodeRecord.unpack(data_of(sa_vectors.NODE_ANSWER)[:112])
        assert (node.lid, node.node_type, node.num_ports) == (2, NodeInfoType.CHANNEL_ADAPTER, 1)
        assert (node.node_guid, node.port_guid) == (0x2C90300000001, 0x2C90300000002)
        assert (node.device_id, node.local_port_num, node.vendor_id) == (0x1013, 1, 0x2C9)
        assert (node.node_description, node.description) == (b"node one", "node one")
        assert node.pack() == data_of(sa_vectors.NODE_ANSWER)[:108]

    def test_class_port_info_unpacks_to_its_fields(self) -> None:
        info = ClassPortInfo.unpack(data_of(sa_vectors.CLASS_PORT_INFO_ANSWER)[:72])
        assert (info.base_version, info.class_version, info.capability_mask) == (1, 2, 0x200)
        assert (info.capability_mask2, info.resp_time_value) == (0, 16)

    def test_class_port_info_of_opensm_unpacks_to_its_fields(self) -> None:
        info = ClassPortInfo.unpack(bytes.fromhex("010226020016bd10").ljust(72, b"\0"))
        assert (info.capability_mask, info.capability_mask2, info.resp_time_value) == (0x2602, 0x16BD10 >> 5, 16)


@pytest.mark.parametrize("kind", KINDS)
class TestArbitraryBytes:
    @given(data=st.binary(max_size=200))
    def test_arbitrary_bytes_unpack_or_raise_wire_error(self, kind: Any, data: bytes) -> None:
        try:
            record = kind.unpack(data)
        except WireError:
            assert not kind.SIZE <= len(data) <= kind.SIZE + 7
        else:
            assert kind.unpack(record.pack()) == record

    @given(data=st.data())
    def test_any_bytes_of_the_record_length_unpack(self, kind: Any, data: st.DataObject) -> None:
        raw = data.draw(st.binary(min_size=kind.SIZE, max_size=kind.SIZE))
        record = kind.unpack(memoryview(raw))
        assert kind.unpack(record.pack()) == record
        assert len(record.pack()) == kind.SIZE

    def test_wrong_length_names_the_expected_one(self, kind: Any) -> None:
        for size in (0, kind.SIZE - 1, kind.SIZE + 8):
            with pytest.raises(WireError, match=f"{kind.SIZE} bytes, not {size}"):
                kind.unpack(bytes(size))

    def test_table_padding_is_ignored(self, kind: Any) -> None:
        size = -(-kind.SIZE // 8) * 8
        assert kind.unpack(bytes(kind.SIZE) + b"\xff" * (size - kind.SIZE)) == kind.unpack(bytes(kind.SIZE))


class TestFieldsOutOfRange:
    @for_each(
        "record",
        [
            ServiceRecord(service_name=b"x" * 65),
            ServiceRecord(service_key=b"short"),
            ServiceRecord(service_id=1 << 64),
            ServiceRecord(service_data16=(1,)),
            MCMemberRecord(sl=16),
            MCMemberRecord(mtu=64),
            NodeRecord(node_description=b"x" * 65),
            ClassPortInfo(capability_mask2=1 << 27),
        ],
    )
    def test_fields_out_of_range_raise_value_error(self, record: Any) -> None:
        with pytest.raises(ValueError):
            record.pack()


class TestServiceNames:
    def test_name_of_maximum_length_round_trips(self) -> None:
        record = ServiceRecord(service_name=b"x" * 64)
        assert ServiceRecord.unpack(record.pack()) == record

    def test_undecodable_name_is_escaped(self) -> None:
        assert ServiceRecord(service_name=b"caf\xe9").name == "caf\\xe9"


class TestComponentMasks:
    @pytest.mark.parametrize("kind", MASKS)
    def test_component_bits_follow_field_order(self, kind: Any) -> None:
        names = {name.lower() for name in MASKS[kind].__members__} - {"raw_traffic"}
        assert names == {field.name for field in dataclasses.fields(kind)}

    def test_value_without_selector_means_exactly(self) -> None:
        mask, record = query_for(PathRecord, mtu=4)
        assert mask == PathMask.MTU | PathMask.MTU_SELECTOR
        assert (record.mtu, record.mtu_selector) == (4, Selector.EXACTLY)
        mask, record = query_for(PathRecord, rate=3, rate_selector=Selector.LESS)
        assert mask == PathMask.RATE | PathMask.RATE_SELECTOR
        assert record.rate_selector == Selector.LESS

    def test_empty_mask_selects_the_whole_table(self) -> None:
        mask, record = query_for(NodeRecord)
        assert (mask, record.pack()) == (NodeMask(0), bytes(108))

    def test_each_service_data_element_has_a_component_bit(self) -> None:
        assert int(ServiceMask.SERVICE_DATA8 | ServiceMask.SERVICE_DATA64) == 0x18007FFF80

    def test_unknown_component_raises_type_error(self) -> None:
        with pytest.raises(TypeError, match="PathRecord has no component 'lid'"):
            query_for(PathRecord, lid=1)
