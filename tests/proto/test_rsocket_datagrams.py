"""The datagram protocol of rsocket(7): its headers, every cell of the table of a peer, and its limits."""

from __future__ import annotations

import itertools

import pytest

from rdmacm.proto.rsocket.headers import ServiceHeader, ServiceOperation, SourceHeader
from rdmacm.proto.rsocket.peers import (
    CONFIRM_SECONDS,
    MAX_PEERS,
    MAX_RESOLVING,
    TRANSITIONS,
    PeerAction,
    PeerKey,
    PeerState,
    PeerTable,
    PeerTrigger,
)
from rdmacm.proto.wire import WireError
from support.rows import for_each

IPV4, IPV6 = bytes((10, 0, 0, 1)), bytes.fromhex("fd000000000000010000000000000001")
DATA, CONTROL = ServiceOperation.DATA, ServiceOperation.CONTROL
KEY: PeerKey = (IPV4, 7174, 0)


def service(operation: ServiceOperation, qpn: int, data: bytes = b"", address: bytes = IPV4) -> memoryview:
    return memoryview(ServiceHeader(operation, qpn, address).pack() + data)


# -- headers ---------------------------------------------------------------------------------------------------


@for_each(
    "header, version, golden",
    [
        (ServiceHeader(DATA, 0x123456, IPV4), 4, "55555555 04 00 10 00 00123456 0a000001"),
        (ServiceHeader(CONTROL, 17, IPV6), 6, "55555555 06 07 1c 00 00000011 fd000000000000010000000000000001"),
    ],
)
def test_service_headers(header: ServiceHeader, version: int, golden: str) -> None:
    assert header.pack() == bytes.fromhex(golden)
    assert ServiceHeader.unpack(bytes.fromhex(golden) + b"data", version) == header


@for_each(
    "header, version, golden",
    [
        (SourceHeader(IPV4, 7174), 4, "04 08 1c06 0a000001"),
        (SourceHeader(IPV6, 7174, 5), 6, "06 18 1c06 00000005 fd000000000000010000000000000001"),
    ],
)
def test_source_headers(header: SourceHeader, version: int, golden: str) -> None:
    assert header.pack() == bytes.fromhex(golden)
    assert SourceHeader.unpack(bytes.fromhex(golden) + b"data", version) == header


def test_the_upper_bits_of_a_number_count_for_nothing() -> None:
    packed = bytearray(ServiceHeader(DATA, 17, IPV4).pack())
    packed[8] = 0xFF
    assert ServiceHeader.unpack(packed, 4).qpn == 17


@for_each("version", [4, 6])
def test_what_is_no_header_is_refused(version: int) -> None:
    address = IPV4 if version == 4 else IPV6
    for good, unpack in (
        (ServiceHeader(DATA, 1, address).pack(), ServiceHeader.unpack),
        (SourceHeader(address, 1).pack(), SourceHeader.unpack),
    ):
        for length in range(len(good)):
            with pytest.raises(WireError):
                unpack(good[:length], version)
        with pytest.raises(WireError):
            unpack(good, 10 - version)
    for at, byte in ((0, 0), (4, 5), (5, 1), (6, 17)):
        damaged = bytearray(ServiceHeader(DATA, 1, address).pack())
        damaged[at] = byte
        with pytest.raises(WireError):
            ServiceHeader.unpack(damaged, version)


# -- the table -------------------------------------------------------------------------------------------------


@for_each("state, trigger", list(itertools.product(PeerState, PeerTrigger)))
def test_each_cell(state: PeerState, trigger: PeerTrigger) -> None:
    """A peer is known if and only if its number and its address are."""
    after, action = TRANSITIONS.get((state, trigger), (state, None))
    assert (action is PeerAction.RESOLVE) == (after is PeerState.RESOLVING and state is not PeerState.RESOLVING)
    if trigger is PeerTrigger.NUMBER:
        assert after is PeerState.RESOLVING
    elif state is PeerState.RESOLVING:
        expected = {PeerTrigger.RESOLVED: PeerState.KNOWN, PeerTrigger.UNREACHABLE: PeerState.ASKED}
        assert after is expected.get(trigger, state)
    elif trigger is PeerTrigger.SEND:
        assert after is (PeerState.ASKED if state is PeerState.UNKNOWN else state)
    else:
        lost = trigger is PeerTrigger.UNREACHABLE and state is PeerState.KNOWN
        assert after is (PeerState.ASKED if lost else state)


def taken(table: PeerTable, datagram: memoryview, key: PeerKey = KEY) -> bytes | None:
    """The application's part of a datagram on the UDP socket."""
    found = table.service_received(datagram, key, 0)
    return None if found is None else bytes(found)


def known(table: PeerTable, key: PeerKey = KEY, qpn: int = 17, now: float = 0.0) -> None:
    table.service_received(service(CONTROL, qpn), key, now)
    table.resolved(key)
    table.work.clear()


def test_a_datagram_goes_through_udp_until_the_peer_is_known() -> None:
    table = PeerTable(4)
    assert table.send(KEY, 0) is None
    assert table.send(KEY, 1) is None, "the first one, or its answer, was lost: each asks again"
    assert table.service_received(service(CONTROL, 17), KEY, 2) is None
    assert list(table.work) == [(PeerAction.RESOLVE, KEY)]
    assert table.send(KEY, 2) is None
    table.resolved(KEY)
    assert table.send(KEY, 2) == 17


def test_a_datagram_of_an_unknown_peer_is_delivered_and_answered() -> None:
    table = PeerTable(4)
    assert taken(table, service(DATA, 17, b"hello")) == b"hello"
    assert list(table.work) == [(PeerAction.ANSWER, KEY), (PeerAction.RESOLVE, KEY)]
    table.work.clear()
    assert taken(table, service(DATA, 17, b"again")) == b"again"
    assert list(table.work) == [(PeerAction.ANSWER, KEY)]


def test_a_peer_that_was_started_again_is_resolved_again() -> None:
    table = PeerTable(4)
    known(table)
    table.service_received(service(DATA, 17), KEY, 0)
    assert list(table.work) == [(PeerAction.ANSWER, KEY)], "the same number"
    table.service_received(service(DATA, 18), KEY, 0)
    assert table.work[-1] == (PeerAction.RESOLVE, KEY)
    assert table.send(KEY, 0) is None
    table.resolved(KEY)
    assert table.send(KEY, 0) == 18


def test_a_silent_peer_is_asked_again_now_and_then() -> None:
    table = PeerTable(4)
    known(table)
    assert table.send(KEY, CONFIRM_SECONDS) == 17
    assert table.send(KEY, CONFIRM_SECONDS + 1) is None
    assert table.send(KEY, CONFIRM_SECONDS + 2) == 17
    message = memoryview(SourceHeader(IPV4, 7174).pack() + b"x")
    found = table.message_received(message, 0, 2 * CONFIRM_SECONDS)
    assert found is not None
    assert (found[0], found[1], bytes(found[2])) == (KEY, 0, b"x")
    assert table.send(KEY, 3 * CONFIRM_SECONDS) == 17, "it was heard of"


def test_an_address_that_cannot_be_resolved_is_tried_again_with_the_next_answer() -> None:
    table = PeerTable(4)
    table.service_received(service(CONTROL, 17), KEY, 0)
    table.unreachable(KEY)
    assert table.state(KEY) is PeerState.ASKED
    table.work.clear()
    table.service_received(service(CONTROL, 17), KEY, 0)
    assert list(table.work) == [(PeerAction.RESOLVE, KEY)]
    table.resolved(KEY)
    table.unreachable(KEY)
    assert table.send(KEY, 0) is None, "its device is gone"


def test_a_flood_of_senders_is_bounded() -> None:
    table = PeerTable(4)
    keys = [(IPV4, port, 0) for port in range(1, 2 * MAX_PEERS)]
    for key in keys:
        assert taken(table, service(DATA, 17, b"x"), key) == b"x"
    assert len(table._peers) == MAX_PEERS
    resolving = [key for action, key in table.work if action is PeerAction.RESOLVE]
    assert resolving == keys[:MAX_RESOLVING]
    forgotten = [key for action, key in table.work if action is PeerAction.FORGET]
    assert len(forgotten) == len(keys) - MAX_PEERS
    assert not set(forgotten) & set(resolving)
    for key in resolving:
        table.resolved(key)
    table.service_received(service(DATA, 17), keys[-1], 0)
    assert table.work[-1] == (PeerAction.RESOLVE, keys[-1]), "there is room again"


def test_what_is_no_message_is_counted() -> None:
    table = PeerTable(4)
    assert table.service_received(memoryview(b"no header"), KEY, 0) is None
    assert table.service_received(service(DATA, 1, address=IPV6), KEY, 0) is None
    assert table.message_received(memoryview(bytes(100)), 0, 0) is None
    assert table.faults == {"service": 2, "message": 1}
    assert not table.work
    assert table.state(KEY) is PeerState.UNKNOWN
