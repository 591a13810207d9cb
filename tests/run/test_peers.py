"""Headers and peers of datagram sockets for C programs, compared with those in Python: both are told the same."""

from __future__ import annotations

import ctypes
import random

import pytest

from rdmacm.proto.rsocket.headers import (
    SERVICE_LENGTHS,
    SOURCE_LENGTHS,
    ServiceHeader,
    ServiceOperation,
    SourceHeader,
)
from rdmacm.proto.rsocket.peers import MAX_PEERS, PeerAction, PeerKey, PeerState, PeerTable
from rdmacm.proto.wire import WireError
from support.run_programs import engine_of, needs_headers

pytestmark = needs_headers

STATES = list(PeerState)
DATA, CONTROL = ServiceOperation.DATA, ServiceOperation.CONTROL


class CKey(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint8 * 16),
        ("scope", ctypes.c_uint32),
        ("port", ctypes.c_uint16),
        ("version", ctypes.c_uint16),
    ]

    @classmethod
    def of(cls, key: PeerKey) -> CKey:
        ip, port, scope = key
        return cls((ctypes.c_uint8 * 16)(*ip), scope, port, 4 if len(ip) == 4 else 6)

    def key(self) -> PeerKey:
        return bytes(self.address)[: 4 if self.version == 4 else 16], self.port, self.scope


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The functions of ``peers.c``."""
    library = engine_of("peers", tmp_path_factory)
    library.make.restype = ctypes.c_void_p
    library.sends.restype = ctypes.c_int64
    for name in ("rs_pack_service", "rs_pack_source"):
        getattr(library, name).restype = ctypes.c_size_t
    library.rs_unpack_source.restype = ctypes.c_bool
    return library


class Both:
    """The peers of one socket in both tables. Peers that are to be resolved wait in ``resolving``."""

    def __init__(self, library: ctypes.CDLL, version: int) -> None:
        self.library = library
        self.version = version
        self.forgotten = CKey()
        self.ours = PeerTable(version)
        self.theirs = ctypes.c_void_p(library.make(ctypes.byref(self.forgotten)))
        self.resolving: list[PeerKey] = []
        self.keys: set[PeerKey] = set()

    def close(self) -> None:
        self.library.destroy(self.theirs)

    def state(self, key: PeerKey) -> int:
        return int(self.library.state_of(self.theirs, ctypes.byref(CKey.of(key))))

    def work(self) -> list[PeerAction]:
        """What Python's table wants; a peer that it forgets is the one that C's has forgotten."""
        done: list[PeerAction] = []
        while self.ours.work:
            action, key = self.ours.work.popleft()
            if action is PeerAction.FORGET:
                assert self.forgotten.key() == key
            else:
                done.append(action)
            if action is PeerAction.RESOLVE:
                self.resolving.append(key)
        return done

    def send(self, key: PeerKey, now: float) -> None:
        self.keys.add(key)
        ours = self.ours.send(key, now)
        theirs = self.library.sends(self.theirs, ctypes.byref(CKey.of(key)), ctypes.c_double(now))
        assert theirs == (-1 if ours is None else ours)
        assert self.work() == []

    def serve(self, key: PeerKey, datagram: bytes, now: float) -> None:
        self.keys.add(key)
        data = self.ours.service_received(memoryview(datagram), key, now)
        found = self.library.serves(
            self.theirs,
            *(ctypes.byref(CKey.of(key)), datagram, ctypes.c_size_t(len(datagram)), ctypes.c_double(now)),
        )
        done = self.work()
        if found < 0:
            assert (data, done) == (None, [])
            return
        assert bool(found & 1) is (data is not None) is (PeerAction.ANSWER in done)
        assert bool(found & 2) is (PeerAction.RESOLVE in done)

    def resolved(self, key: PeerKey, is_reachable: bool) -> None:
        (self.ours.resolved if is_reachable else self.ours.unreachable)(key)
        self.library.resolves(self.theirs, ctypes.byref(CKey.of(key)), ctypes.c_bool(is_reachable))

    def compare(self) -> None:
        assert {key: STATES.index(self.ours.state(key)) for key in self.keys} == {
            key: self.state(key) for key in self.keys
        }


def key_of(number: int, version: int) -> PeerKey:
    ip = number.to_bytes(4 if version == 4 else 16, "big")
    return ip, 7000 + number % 7, number % 2 if version == 6 else 0


def draw(source: random.Random, version: int, own: PeerKey) -> bytes:
    """A datagram on the UDP socket, mostly one of the protocol."""
    made = ServiceHeader(source.choice((DATA, CONTROL)), source.randrange(4), own[0]).pack() + b"data"
    if source.random() < 0.2:
        at = source.randrange(len(made))
        made = made[:at] + bytes((source.randrange(256),)) + made[at + 1 :]
    return made[: source.randrange(len(made))] if source.random() < 0.1 else made


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("peers", [3, 40, 2 * MAX_PEERS])
def test_tables_do_the_same(table: ctypes.CDLL, peers: int, version: int) -> None:
    source = random.Random(peers * version)
    both = Both(table, version)
    now = 0.0
    seen = set()
    for _ in range(4000):
        key = key_of(source.randrange(peers), version)
        now += source.choice((0.001, 0.5, 11.0))
        step = source.randrange(3)
        if step == 0:
            both.send(key, now)
        elif step == 1:
            both.serve(key, draw(source, version, key), now)
        elif both.resolving:
            both.resolved(both.resolving.pop(0), source.random() < 0.7)
        seen.add(both.ours.state(key))
        assert STATES.index(both.ours.state(key)) == both.state(key)
    both.compare()
    assert seen == set(STATES)
    both.close()


@pytest.mark.parametrize("version", [4, 6])
def test_headers_are_the_same(table: ctypes.CDLL, version: int) -> None:
    source = random.Random(version)
    for number in range(2000):
        key = key_of(number, version)
        own, room = CKey.of(key), ctypes.create_string_buffer(64)
        for operation in ServiceOperation:
            size = table.rs_pack_service(room, int(operation), ctypes.c_uint32(number), ctypes.byref(own))
            assert room.raw[:size] == ServiceHeader(operation, number, key[0]).pack()
            assert size == SERVICE_LENGTHS[version]
        flow = source.getrandbits(20) if version == 6 else 0
        size = table.rs_pack_source(room, ctypes.byref(own), ctypes.c_uint32(flow))
        packed = SourceHeader(key[0], key[1], flow).pack()
        assert room.raw[:size] == packed
        assert size == SOURCE_LENGTHS[version]
        given = bytearray(packed + b"data")
        if number % 2:
            given[source.randrange(len(given))] = source.randrange(256)
        given = given[: source.randrange(len(given))] if number % 5 == 0 else given
        found, flow_found = CKey(), ctypes.c_uint32()
        is_one = table.rs_unpack_source(
            bytes(given), ctypes.c_size_t(len(given)), version, ctypes.byref(found), ctypes.byref(flow_found)
        )
        try:
            header = SourceHeader.unpack(given, version)
        except WireError:
            assert not is_one
        else:
            assert is_one
            assert (found.key(), flow_found.value) == ((header.address, header.port, 0), header.flow)
