"""The engines of both ends of a reliable connection, on a simulated network in virtual time."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import cast

from rdmacm.enums import AccessFlag, WROpcode
from rdmacm.proto.core_choice import compiled
from rdmacm.proto.engine import Datagram, EngineCounters, RtrAttributes, RtsAttributes, SharedReceives
from rdmacm.proto.roce.engines import make_uc_engine, make_xrc_initiator, make_xrc_target
from rdmacm.proto.roce.icrc import Icrc
from rdmacm.proto.roce.rc.engine import RcEngine
from rdmacm.proto.roce.uc import UcEngine, UnreliableEngine
from rdmacm.proto.roce.xrc import SharedQueue, TargetEngine, XrcInitiator
from rdmacm.proto.work import WC, Memory, RecvWork, SendWork
from rdmacm.soft.device.shared_receive_queue import PythonReceives

#: The engines that do the same: that in Python, and the compiled core's where it is.
ENGINES: dict[str, type[RcEngine]] = {"python": RcEngine}
if compiled is not None:
    ENGINES["c"] = cast("type[RcEngine]", compiled.ConnectedEngine)
#: The same of unreliable connections.
UC_ENGINES: dict[str, Callable[..., UnreliableEngine]] = {"python": UcEngine}
if compiled is not None:
    UC_ENGINES["c"] = make_uc_engine

BASE = 0x1000
RKEY = 0x0A41
ALL = (
    AccessFlag.LOCAL_WRITE
    | AccessFlag.REMOTE_WRITE
    | AccessFlag.REMOTE_READ
    | AccessFlag.REMOTE_ATOMIC
    | AccessFlag.FLUSH_GLOBAL
)
#: The limit of a UDP socket.
TRAIN = 65507

_HOSTS = (bytes([192, 0, 2, 1]), bytes([192, 0, 2, 2])), (b"\xfd" + bytes(14) + b"\1", b"\xfd" + bytes(14) + b"\2")
_RTS = frozenset({"timeout", "retry_cnt", "rnr_retry", "max_rd_atomic"})


def flows(*, ipv6: bool = False) -> tuple[Icrc, Icrc]:
    """The flows from end 0 and from end 1."""
    a, b = _HOSTS[ipv6]
    return Icrc(a, b, 50000), Icrc(b, a, 50001)


def connect(engine: RcEngine, index: int, *, ipv6: bool = False) -> None:
    """Give an engine the addresses and ports of end ``index``."""
    hosts = _HOSTS[ipv6]
    engine.set_route(hosts[index], hosts[1 - index], 50000 + index)
    engine.set_peer_port(50001 - index)


def packets(datagram: Datagram) -> list[bytes]:
    """The packets of a datagram or train with their ICRCs, as the kernel would segment them."""
    buffers, segment = datagram
    data = b"".join(buffers)
    assert segment == 0 or segment < len(data), "a single packet must not be sent as a train"
    assert len(data) <= TRAIN or not segment
    step = segment or len(data)
    return [data[at : at + step] for at in range(0, len(data), step)]


def view(data: bytes | bytearray) -> memoryview:
    return memoryview(bytearray(data) if isinstance(data, bytes) else data)


def send(wr_id: int, data: bytes, opcode: WROpcode = WROpcode.SEND, **more: int) -> SendWork:
    return SendWork(wr_id, opcode, [view(data)] if data else [], **more)  # type: ignore[arg-type]


def statuses(found: Iterable[WC]) -> list[tuple[int, str]]:
    return [(c.wr_id, c.status.name) for c in found]


def ack(qp_num: int, psn: int, syndrome: int = 0x1F) -> bytes:
    """An acknowledgement, without its ICRC."""
    return struct.pack("!BBHIII", 0x11, 0, 0xFFFF, qp_num, psn & 0xFFFFFF, syndrome << 24 | 1)


class Region:
    """One registered region of a host, perhaps in another protection domain ``beside`` a region of its device."""

    def __init__(
        self, size: int = 1 << 16, access: AccessFlag = ALL, *, key: int = RKEY, beside: Region | None = None
    ) -> None:
        self.bytes = bytearray(size)
        self.access = access
        self.key = key
        self.keys: set[int] = set()
        #: The same for the engine of the compiled core.
        self.pd, self.number = object(), id(self)
        self.regions = compiled.Regions() if compiled is not None else None
        if beside is not None:
            self.regions = beside.regions
        self.add(key)

    def add(self, key: int) -> None:
        self.keys.add(key)
        if self.regions is not None:
            self.regions.add(key, BASE, memoryview(self.bytes), int(self.access), self.pd)

    def remove(self, key: int) -> None:
        self.keys.discard(key)
        if self.regions is not None:
            self.regions.remove(key)

    def remote(self, rkey: int, address: int, length: int, access: AccessFlag) -> memoryview | None:
        if rkey not in self.keys or access not in self.access:
            return None
        if address < BASE or address + length > BASE + len(self.bytes):
            return None
        return memoryview(self.bytes)[address - BASE : address - BASE + length]

    def permits(self, rkey: int, access: AccessFlag) -> bool:
        return rkey in self.keys and access in self.access

    def invalidate(self, rkey: int) -> bool:
        if rkey not in self.keys:
            return False
        self.remove(rkey)
        return True

    def bind(self, bind: object) -> bool:
        """Bind a key, which stands for the whole region."""
        assert isinstance(bind, int)
        if bind in self.keys:
            return False
        self.add(bind)
        return True


#: The engine that tests make; a fixture of their folder sets it (``rc_engine``).
chosen = "python"


def make_shared(region: Region | None = None) -> PythonReceives:
    """A shared receive queue for such engines, for the protection domain of a region."""
    if chosen == "python":
        return PythonReceives(128)
    assert compiled is not None
    regions, pd = (compiled.Regions(), None) if region is None else (region.regions, region.pd)
    return cast("PythonReceives", compiled.SharedReceives(128, 32, regions, pd, None))


def make_uc(
    qp_num: int, memory: Memory, shared: SharedReceives | None = None, counters: EngineCounters | None = None
) -> UnreliableEngine:
    """The same of an unreliable connection."""
    return UC_ENGINES[chosen](qp_num, memory, shared, EngineCounters() if counters is None else counters)


class XrcQueue:
    """A shared receive queue, and the memory of its protection domain on the device of another region."""

    def __init__(self, key: int, beside: Region, size: int = 1 << 16, access: AccessFlag = ALL) -> None:
        self.region = Region(size, access, key=key, beside=beside)
        self.receives = make_shared(self.region)
        self.done: list[WC] = []

    def post(self, wr_id: int, size: int = 2048) -> memoryview:
        buffer = view(bytes(size))
        assert self.receives.post_work(RecvWork(wr_id, [buffer]))
        return buffer


class XrcQueues(dict[int, XrcQueue]):
    """An XRC domain: its queues, by number."""

    def __init__(self, memory: Region, numbers: Iterable[int], size: int = 1 << 16, access: AccessFlag = ALL) -> None:
        #: That of the domain's targets, which no request may touch.
        self.memory = memory
        self.core = None if chosen == "python" else cast("ModuleType", compiled).XrcDomain(memory.regions)
        for key, number in enumerate(numbers, RKEY + 1):
            self.open(number, XrcQueue(key, memory, size, access))

    def open(self, number: int, queue: XrcQueue) -> None:
        self[number] = queue
        if self.core is not None:
            self.core.add(number, queue.receives, None)

    def close(self, number: int) -> XrcQueue:
        if self.core is not None:
            self.core.remove(number)
        return self.pop(number)

    def find(self, number: int) -> SharedQueue | None:
        queue = self.get(number)
        return None if queue is None else (queue.region, queue.receives)

    def take(self, target: TargetEngine) -> None:
        """Give the completions of a target to their queues."""
        for number, wc in target.take_completed():
            if number in self:
                self[number].done.append(wc)

    def make_target(self, qp_num: int, counters: EngineCounters) -> TargetEngine:
        return make_xrc_target(qp_num, self.memory, counters, self.find, self.core)


def make_initiator(qp_num: int, memory: Memory, counters: EngineCounters) -> RcEngine:
    """The initiator of an XRC connection."""
    if chosen == "python":
        return XrcInitiator(qp_num, memory, counters=counters)
    return cast("RcEngine", make_xrc_initiator(qp_num, memory, None, counters))


def make_rc(qp_num: int, memory: Memory, shared: SharedReceives | None = None) -> RcEngine:
    """An engine in INIT."""
    return ENGINES[chosen](qp_num, memory, shared, EngineCounters())


class Pair:
    """Two connected engines, and the faults of the network between them.

    Each packet is lost or duplicated by itself. Packets of a train that arrive in order are received as one, as with
    GRO.
    """

    def __init__(
        self,
        seed: int = 0,
        loss: float = 0.0,
        twice: float = 0.0,
        late: float = 0.0,
        *,
        train: int = 0,
        ipv6: bool = False,
        size: int = 1 << 16,
        **changes: float,
    ) -> None:
        self.random = random.Random(seed)
        self.loss, self.twice, self.late, self.train = loss, twice, late, train
        self.now = 0.0
        self.memory = (Region(size), Region(size))
        self.flows = flows(ipv6=ipv6)
        self.starts = (self.random.getrandbits(24), 0xFFFFF0 + self.random.randrange(16))  # one PSN is about to wrap
        rts = {"timeout": 0.01} | {name: value for name, value in changes.items() if name in _RTS}
        rtr = {"path_mtu": 256} | {name: value for name, value in changes.items() if name not in _RTS}
        self.ends = (make_rc(0x11, self.memory[0]), make_rc(0x12, self.memory[1]))
        for index, end in enumerate(self.ends):
            connect(end, index, ipv6=ipv6)
            end.ready_to_receive(RtrAttributes(0x12 - index, self.starts[1 - index], **rtr))  # type: ignore[arg-type]
            end.ready_to_send(RtsAttributes(self.starts[index], **rts))  # type: ignore[arg-type]
        self.done: tuple[list[WC], list[WC]] = ([], [])
        self.flying: list[tuple[float, int, int, bytes, int]] = []
        #: The end that sent each packet, and the packet without its ICRC.
        self.sent: list[tuple[int, bytes]] = []
        self.posted: list[int] = []
        #: The numbers of packets that never arrive, counted from the first packet that was sent.
        self.lost: set[int] = set()
        self._count = 0

    def wanted(self, index: int, limit: int = 1000) -> list[bytes]:
        """The packets an end wants to send, without their ICRCs."""
        found = self.ends[index].datagrams(self.now, limit, self.train)
        return [packet[:-4] for datagram in found for packet in packets(datagram)]

    def deliver(self, index: int, packet: bytes, identification: int = 0) -> int:
        """Give an end a packet, with its ICRC added."""
        data = packet + self.flows[1 - index].seal([packet], identification)
        return self.ends[index].received(memoryview(data), 0, self.now)

    def _fly(self, target: int, data: bytes, segment: int) -> None:
        delay = self.random.uniform(0, 0.003) if self.random.random() < self.late else 0.0001
        self._count += 1
        self.flying.append((self.now + delay, self._count, target, data, segment))

    def transmit(self, source: int, datagram: Datagram) -> None:
        together: list[bytes] = []
        for identification, packet in enumerate(packets(datagram)):
            assert len(packet) % 4 == 0
            flow = self.flows[source]
            is_sealed_twice = packet[0] == 0x1C and packet[-4:] == flow.seal_twice(packet[:-4], identification)
            assert is_sealed_twice or flow.check([packet], identification)
            self.sent.append((source, packet[:-4]))
            if len(self.sent) - 1 in self.lost or self.random.random() < self.loss:
                continue
            together.append(packet)
            if self.random.random() < self.twice:
                self._fly(1 - source, packet, 0)
        if self.random.random() < self.late:
            self.random.shuffle(together)
        while together:
            segment = len(together[0])
            count = next((n for n, packet in enumerate(together) if len(packet) != segment), len(together))
            if count < len(together) and len(together[count]) < segment:
                count += 1
            self._fly(1 - source, b"".join(together[:count]), segment if count > 1 else 0)
            del together[:count]

    def completed(self, index: int) -> list[WC]:
        """Take the completions of an end."""
        return self.ends[index].completions()

    def step(self) -> bool:
        """Send the engines' packets, then process the next arrival or timer; False if there is none."""
        for index, end in enumerate(self.ends):
            for datagram in end.datagrams(self.now, 128, self.train):
                self.transmit(index, datagram)
            self.done[index].extend(self.completed(index))
        deadlines = [end.deadline for end in self.ends if end.deadline is not None]
        if self.flying:
            self.flying.sort()
            when, _, where, data, segment = self.flying[0]
            if not deadlines or when <= min(deadlines):
                self.now = max(self.now, when)
                self.flying.pop(0)
                self.ends[where].received(memoryview(data), segment, self.now)
                self.done[where].extend(self.completed(where))
                return True
        if deadlines:
            self.now = max(self.now, min(deadlines))
            for end in self.ends:
                if end.deadline is not None and end.deadline <= self.now:
                    end.timer(self.now)
            return True
        return False

    def run(self, steps: int = 200_000) -> None:
        for _ in range(steps):
            if not self.step():
                return
        raise AssertionError("the connection does not come to rest")


# One end alone, for a test that plays its peer.

THERE, BACK = flows()
QPN, PEER, PSN = 0x12, 0x11, 0xFFFFFE


def receiver(memory: Region | None = None, **attributes: int) -> RcEngine:
    """An engine in RTR, at the destination of :data:`THERE`."""
    engine = make_rc(QPN, memory or Region())
    connect(engine, 1)
    engine.ready_to_receive(RtrAttributes(PEER, PSN, path_mtu=256, **attributes))  # type: ignore[arg-type]
    return engine


def packet(opcode: int, body: bytes = b"", *, psn: int = PSN, ask: bool = True, pkey: int = 0xFFFF) -> bytes:
    pad = -len(body) & 3
    word = psn & 0xFFFFFF | ask << 31
    return struct.pack("!BBHII", opcode, pad << 4, pkey, QPN, word) + body + bytes(pad)


def give(engine: RcEngine, data: bytes, now: float = 0.0) -> int:
    return engine.received(memoryview(data + THERE.seal([data])), 0, now)


def answers(engine: RcEngine, limit: int = 1000) -> list[bytes]:
    return [p[:-4] for d in engine.datagrams(0.0, limit, 0) for p in packets(d)]


def syndromes(engine: RcEngine) -> list[tuple[int, int]]:
    """The opcode and AETH syndrome of each packet that an engine answers."""
    return [(p[0], p[12]) for p in answers(engine)]


SEND_ONLY, WRITE_FIRST, WRITE_MIDDLE, WRITE_ONLY, READ, ACK, FETCH_ADD = 0x04, 0x06, 0x07, 0x0A, 0x0C, 0x11, 0x14


def reth(length: int, address: int = BASE, rkey: int = RKEY) -> bytes:
    return struct.pack("!QII", address, rkey, length)
