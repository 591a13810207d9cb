"""The kernel's filter and the library assign each packet to the same slot."""

from __future__ import annotations

import random
import select
import socket
import struct
from collections.abc import Iterator

import pytest

from rdmacm.proto.cm.codes import AttributeId
from rdmacm.proto.constants import MAX_SLOT
from rdmacm.soft.wire import sockets
from rdmacm.soft.wire.slot_filter import attach, is_request, position_of, slot_at, slot_of
from support.processes import linux_only
from support.wires import free_port, packet

pytestmark = linux_only

SLOTS = 4
#: The sockets of slots 0 to 3 are at their own positions: this shift is none.
UNSHIFTED = MAX_SLOT - 1


def mad(attribute: int, local_id: int = 0, remote_id: int = 0, service_id: int = 0, mgmt_class: int = 7) -> bytes:
    """A MAD with the fields that decide its slot."""
    header = struct.pack("!BBBBHHQHHI", 1, mgmt_class, 2, 3, 0, 0, 0, attribute, 0, 0)
    ids = struct.pack("!IIQ", local_id, remote_id, service_id)
    return packet(1, bytes(8) + (header + ids).ljust(256, b"\0"))


@pytest.fixture
def group() -> Iterator[list[socket.socket]]:
    """Sockets of one port, in slots 0 to 3."""
    port = free_port()
    opened = []
    for _ in range(SLOTS):
        sock = sockets.open_socket(socket.AF_INET, port, shared=True)
        assert sock is not None
        opened.append(sock)
    attach(opened[0], UNSHIFTED)
    yield opened
    for sock in opened:
        sock.close()


def receiving_slot(group: list[socket.socket], data: bytes) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(data, ("127.0.0.1", group[0].getsockname()[1]))
    (ready,), _, _ = select.select(group, [], [], 5)
    assert ready.recv(4096) == data
    return group.index(ready)


ATTRIBUTES = [*AttributeId, 0x0F, 0x1B, 0x0110, 0x1100, 0]


@pytest.mark.parametrize("shift", [0, 1, 100, UNSHIFTED])
def test_each_position_has_a_slot_of_its_own(shift: int) -> None:
    slots = [slot_at(position, shift) for position in range(MAX_SLOT + 1)]
    assert slots[0] == 0
    assert sorted(slots) == list(range(MAX_SLOT + 1))
    assert [position_of(slot, shift) for slot in slots] == list(range(MAX_SLOT + 1))


class TestSlots:
    @pytest.mark.parametrize("slot", range(1, SLOTS))
    def test_data_is_assigned_by_destination_qpn(self, group: list[socket.socket], slot: int) -> None:
        data = packet(slot << 12 | 0x234)
        assert slot_of(data) == slot
        assert receiving_slot(group, data) == slot

    def test_reserved_bits_before_the_qpn_are_ignored(self, group: list[socket.socket]) -> None:
        data = bytearray(packet(3 << 12 | 9))
        data[4] = 0xFF
        assert slot_of(data) == receiving_slot(group, bytes(data)) == 3

    @pytest.mark.parametrize("attribute", ATTRIBUTES)
    def test_mads_are_assigned_by_communication_id(self, group: list[socket.socket], attribute: int) -> None:
        data = mad(attribute, local_id=0x002_00001, remote_id=0x003_00001)
        if attribute in (AttributeId.REQ, AttributeId.SIDR_REQ) or attribute not in list(AttributeId):
            expected = 0
        else:
            expected = 2 if attribute == AttributeId.SIDR_REP else 3
        assert slot_of(data) == receiving_slot(group, data) == expected
        assert is_request(data) == (attribute in (AttributeId.REQ, AttributeId.SIDR_REQ))

    def test_rej_of_an_unknown_req_has_no_slot(self, group: list[socket.socket]) -> None:
        data = mad(AttributeId.REJ, local_id=0x002_00001)
        assert slot_of(data) == receiving_slot(group, data) == 0

    def test_other_mad_classes_have_no_slot(self, group: list[socket.socket]) -> None:
        data = mad(AttributeId.REP, 0x002_00001, 0x003_00001, mgmt_class=3)
        assert slot_of(data) == receiving_slot(group, data) == 0

    def test_short_and_random_packets_are_assigned_to_the_same_slot(self, group: list[socket.socket]) -> None:
        dice = random.Random(4791)
        whole = mad(AttributeId.REP, 0x002_00001, 0x003_00001)
        for size in range(16, len(whole)):
            data = whole[:size]
            assert slot_of(data) == receiving_slot(group, data)
        for _ in range(300):
            changed = bytearray(whole)
            for _ in range(3):
                place = dice.choice((6, 7, 21, 36, 37, 45, 49))
                changed[place] = dice.randrange(SLOTS) << (4 if place in (6, 45, 49) else 0)
            assert slot_of(changed) == receiving_slot(group, bytes(changed))

    @pytest.mark.parametrize("shift", [0, 1, 100, 4093])
    def test_shifted_slots_arrive_at_their_positions(self, group: list[socket.socket], shift: int) -> None:
        attach(group[0], shift)
        for position in range(SLOTS):
            slot = slot_at(position, shift)
            for data in (packet(slot << 12 | 9), mad(AttributeId.REP, remote_id=slot << 20 | 9)):
                assert slot_of(data) == slot
                assert receiving_slot(group, data) == position
        assert receiving_slot(group, mad(AttributeId.REQ)) == 0
