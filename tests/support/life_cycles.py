"""One connection on a simulated network from connecting to its end, with every byte and every completion checked.

:func:`live` connects two hosts, lets both send, write, read, flush and do atomics at the same time, disconnects, and
checks what is left. The seed decides the work requests, how many are posted at once, which side disconnects, and the
packets' faults.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from rdmacm import CmEvent, CmEventType, CmId, EventChannel
from rdmacm.provider.connparam import ConnParam
from rdmacm.soft.connection_manager import ConnectionManager
from rdmacm.testing import Fabric, Host
from rdmacm.verbs import (
    CQ,
    MR,
    WC,
    AccessFlag,
    PlacementType,
    QPCap,
    QPInitAttr,
    QPState,
    RecvWR,
    SendFlag,
    SendWR,
    WCOpcode,
    WCStatus,
)
from rdmacm.verbs import WROpcode as Op

__all__ = ["MEMORY", "ROOM", "SOURCE", "TARGET", "End", "Work", "WorkPlan", "check_empty", "live"]

E = CmEventType
PORT = 7471
ADDRESSES = (("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2"))
#: Virtual seconds that connecting, transferring and disconnecting may each take on the worst network.
PATIENCE = 300.0

#: The longest message, and the parts of the memory that the peer accesses: a counter, what it reads, what it writes.
ROOM = 3200
SOURCE, TARGET = 64, 64 + ROOM
_EVERYTHING = (
    AccessFlag.LOCAL_WRITE
    | AccessFlag.REMOTE_READ
    | AccessFlag.REMOTE_WRITE
    | AccessFlag.REMOTE_ATOMIC
    | AccessFlag.FLUSH_GLOBAL
)
MEMORY = struct.Struct("!QI")
_KINDS = (
    *(Op.SEND, Op.SEND, Op.SEND_WITH_IMM, Op.RDMA_WRITE, Op.RDMA_WRITE_WITH_IMM),
    *(Op.RDMA_READ, Op.RDMA_READ, Op.ATOMIC_FETCH_AND_ADD, Op.ATOMIC_CMP_AND_SWP),
    *(Op.FLUSH, Op.ATOMIC_WRITE),
)
_COMPLETES_AS = {
    Op.SEND: WCOpcode.SEND,
    Op.SEND_WITH_IMM: WCOpcode.SEND,
    Op.RDMA_WRITE: WCOpcode.RDMA_WRITE,
    Op.RDMA_WRITE_WITH_IMM: WCOpcode.RDMA_WRITE,
    Op.RDMA_READ: WCOpcode.RDMA_READ,
    Op.ATOMIC_FETCH_AND_ADD: WCOpcode.FETCH_ADD,
    Op.ATOMIC_CMP_AND_SWP: WCOpcode.COMP_SWAP,
    Op.FLUSH: WCOpcode.FLUSH,
    Op.ATOMIC_WRITE: WCOpcode.ATOMIC_WRITE,
}
_RECEIVED = (Op.SEND, Op.SEND_WITH_IMM, Op.RDMA_WRITE_WITH_IMM)
_IMMEDIATE = (Op.SEND_WITH_IMM, Op.RDMA_WRITE_WITH_IMM)
_WRITES = (Op.RDMA_WRITE, Op.RDMA_WRITE_WITH_IMM)
_ATOMICS = (Op.ATOMIC_FETCH_AND_ADD, Op.ATOMIC_CMP_AND_SWP)
_MASK = (1 << 64) - 1


def _bytes(name: str, size: int) -> bytes:
    return hashlib.shake_128(name.encode()).digest(size)


@dataclass(slots=True)
class Work:
    """One work request: its local bytes are ``size`` at ``local``, the peer's at ``remote``."""

    opcode: Op
    size: int
    flags: int
    local: int
    remote: int = 0
    imm: int = 0
    operands: tuple[int, int] = (0, 0)
    #: The content of local memory after a READ or an atomic has completed.
    fetched: bytes = b""


class WorkPlan:
    """The work requests of one side, and the memory contents that they produce."""

    def __init__(self, name: str, random: Random) -> None:
        self.out = _bytes(f"{name} sends", ROOM)
        self.source = _bytes(f"{name} shows", ROOM)
        #: The peer's memory at the end; writes do not overlap and are in order.
        self.work: list[Work] = []
        self.written = bytearray()
        self.counter = 0
        self.depth = random.choice((1, 2, 5, 16))
        self.receives = random.choice((1, 2, 40))
        self.slots = 0

    def fill(self, random: Random, shown: bytes) -> None:
        """Choose the work requests; ``shown`` is the content of the memory that the peer lets this side read."""
        silent = 0
        count = random.randint(3, 9)
        for index in range(count):
            opcode = random.choice(_KINDS)
            size = random.choice((0, 1, 3, 64, 200, 1023, 1024, 1025, random.randint(0, ROOM)))
            silent += 1
            quiet = silent < self.depth and index < count - 1 and random.random() < 0.4
            flags = 0 if quiet else SendFlag.SIGNALED
            silent *= quiet
            if random.random() < 0.2:
                flags |= SendFlag.FENCE
            imm = random.getrandbits(32) if opcode in _IMMEDIATE else 0
            if opcode in _ATOMICS:
                self.work.append(self._atomic(opcode, flags, random))
            elif opcode is Op.RDMA_READ:
                self.work.append(self._read(size, flags, random, shown))
            elif opcode is Op.ATOMIC_WRITE:
                local = random.randint(0, ROOM - 8)
                self.counter = int.from_bytes(self.out[local : local + 8], "little")
                flags |= random.choice((0, SendFlag.INLINE))
                self.work.append(Work(opcode, 8, flags, local))
            elif opcode is Op.FLUSH:
                self.work.append(Work(opcode, size, flags, 0, TARGET, operands=(PlacementType.GLOBAL, size & 1)))
            else:
                size = min(size, ROOM - len(self.written)) if opcode in _WRITES else size
                local = random.randint(0, ROOM - size)
                remote = 0
                if opcode in _WRITES:
                    remote = TARGET + len(self.written)
                    self.written += self.out[local : local + size]
                if size <= 64:
                    flags |= SendFlag.INLINE
                self.work.append(Work(opcode, size, flags, local, remote, imm))

    def _read(self, size: int, flags: int, random: Random, shown: bytes) -> Work:
        local, self.slots = self.slots, self.slots + size
        if self.written and random.random() < 0.5:  # reads back the last WRITE
            size = min(size, len(self.written))
            start = random.randint(0, len(self.written) - size)
            remote, fetched = TARGET + start, bytes(self.written[start : start + size])
        else:
            start = random.randint(0, ROOM - size)
            remote, fetched = SOURCE + start, shown[start : start + size]
        return Work(Op.RDMA_READ, size, flags, local, remote, fetched=fetched)

    def _atomic(self, opcode: Op, flags: int, random: Random) -> Work:
        local, self.slots = self.slots, self.slots + 8
        before = self.counter
        if opcode is Op.ATOMIC_FETCH_AND_ADD:
            operands = random.getrandbits(64), 0
            self.counter = before + operands[0] & _MASK
        else:
            operands = random.choice((before, before ^ 1)), random.getrandbits(64)
            if operands[0] == before:
                self.counter = operands[1]
        fetched = before.to_bytes(8, "little")
        return Work(opcode, 8, flags, local, 0, operands=operands, fetched=fetched)


class End:
    """One side."""

    def __init__(
        self, host: Host, plan: WorkPlan, theirs: WorkPlan, one_cq: bool, channel: EventChannel | None = None
    ) -> None:
        """``channel``: a channel whose events the caller passes on; None for one of its own."""
        self.host, self.plan, self.theirs, self.one_cq = host, plan, theirs, one_cq
        self.channel = channel or EventChannel(host.provider)
        self.seen: Counter[E] = Counter()
        self.cmid: CmId | None = None
        self.hung_up = False
        self.remote: tuple[int, int] | None = None
        self.posted = self.finished = self.received = self.given = self.flushed = 0
        self.signaled = [index for index, work in enumerate(plan.work) if work.flags & SendFlag.SIGNALED]
        self.expected = [work for work in theirs.work if work.opcode in _RECEIVED]
        self.cqs: list[CQ] = []
        self.regions: list[MR] = []
        if channel is None:
            host.on_event(self.channel, self.handle)

    # -- the connection -------------------------------------------------------------------------------

    def handle(self, event: CmEvent) -> None:
        self.seen[event.type] += 1
        assert event.status == 0, f"{self.host.name}: {event!r}"
        match event.type:
            case E.CONNECT_REQUEST:
                self.cmid = event.id
                self.remote = MEMORY.unpack_from(event.private_data)
                event.id.accept(ConnParam(self.prepare(event.id), rnr_retry_count=7))
            case E.ESTABLISHED:
                if event.private_data:
                    self.remote = MEMORY.unpack_from(event.private_data)
            case E.DISCONNECTED:
                self.disconnect()
            case E.TIMEWAIT_EXIT:
                pass
            case _:
                raise AssertionError(f"{self.host.name}: {event!r}")

    def prepare(self, cmid: CmId) -> bytes:
        """Create a queue pair, memory and the first receives; returns the region's address and key for the peer."""
        plan = self.plan
        cap = QPCap(max_send_wr=plan.depth, max_recv_wr=64, max_send_sge=1, max_recv_sge=1, max_inline_data=64)
        self.cqs = [CQ(cmid.verbs, 200) for _ in range(1 if self.one_cq else 2)]
        cmid.create_qp(QPInitAttr(scq=self.cqs[0], rcq=self.cqs[-1], cap=cap))
        shared = bytearray(64) + plan.source + bytes(ROOM)
        buffers = (plan.out, bytes(max(plan.slots, 1)), bytes(64 * ROOM))
        for buffer in buffers:
            self.regions.append(MR(cmid.pd, self.memory(buffer), AccessFlag.LOCAL_WRITE))
        self.regions.append(MR(cmid.pd, self.memory(shared), _EVERYTHING))
        self.give(cmid, plan.receives)
        return MEMORY.pack(self.regions[3].addr, self.regions[3].rkey)

    def memory(self, content: bytes | bytearray) -> memoryview:
        """A buffer with this content."""
        return memoryview(bytearray(content))

    def give(self, cmid: CmId, count: int) -> None:
        """Post receives, numbered one by one."""
        inbox = self.regions[2]
        numbers = range(self.given, self.given + count)
        cmid.qp.post_recv([RecvWR(number, [inbox.sge(number % 64 * ROOM, ROOM)]) for number in numbers])
        self.given += count

    def disconnect(self) -> None:
        if not self.hung_up:
            self.hung_up = True
            assert self.cmid is not None
            self.cmid.disconnect()

    # -- the transfer ---------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        return self.finished == len(self.plan.work) and self.received == len(self.expected)

    def turn(self) -> bool:
        """Take completions and post as much as the queues hold; returns whether all is done."""
        if not self.seen[E.ESTABLISHED]:
            return False
        for cq in self.cqs:
            for wc in cq.poll(100):
                self.completed(wc)
        room = self.plan.depth - (self.posted - self.finished)
        if room and self.posted < len(self.plan.work):
            self.post(self.plan.work[self.posted : self.posted + room])
        return self.is_done

    def post(self, works: list[Work]) -> None:
        assert self.cmid is not None
        assert self.remote is not None
        addr, rkey = self.remote
        wrs = []
        for number, work in enumerate(works, self.posted):
            region = self.regions[1 if work.opcode in _ATOMICS or work.opcode is Op.RDMA_READ else 0]
            sg = [region.sge(work.local, work.size)] if work.size else []
            if work.flags & SendFlag.INLINE:
                wr = SendWR(number, work.opcode, [region.read(work.size, work.local)], work.flags, imm_data=work.imm)
            else:
                wr = SendWR(number, work.opcode, sg, work.flags, imm_data=work.imm)
            if work.opcode in _ATOMICS:
                wr.set_wr_atomic(rkey, addr, *work.operands)
            elif work.opcode is Op.FLUSH:
                wr.sg = ()
                wr.set_wr_flush(rkey, addr + work.remote, work.size, *work.operands)
            elif work.opcode not in (Op.SEND, Op.SEND_WITH_IMM):
                wr.set_wr_rdma(rkey, addr + work.remote)
            wrs.append(wr)
        self.posted += len(wrs)
        self.cmid.qp.post_send(wrs)

    def completed(self, wc: WC) -> None:
        if self.hung_up:
            assert wc.status is WCStatus.WR_FLUSH_ERR, wc
            assert wc.wr_id == self.received + self.flushed, wc
            self.flushed += 1
            return
        assert wc.status is WCStatus.SUCCESS, f"{self.host.name}: {wc}"
        if wc.opcode & WCOpcode.RECV:
            self.got(wc)
        else:
            self.sent(wc)

    def sent(self, wc: WC) -> None:
        assert wc.wr_id == self.signaled.pop(0), f"{self.host.name}: {wc}"
        for work in self.plan.work[self.finished : wc.wr_id + 1]:
            if work.fetched:
                assert self.regions[1].read(work.size, work.local)[: len(work.fetched)] == work.fetched, work
        work = self.plan.work[wc.wr_id]
        assert wc.opcode is _COMPLETES_AS[work.opcode], wc
        self.finished = wc.wr_id + 1

    def got(self, wc: WC) -> None:
        assert wc.wr_id == self.received, f"{self.host.name}: {wc}"
        work = self.expected[self.received]
        self.received += 1
        assert wc.byte_len == work.size, wc
        assert wc.imm_data == (work.imm if work.opcode in _IMMEDIATE else None), wc
        if work.opcode in _WRITES:
            assert wc.opcode is WCOpcode.RECV_RDMA_WITH_IMM, wc
            data = self.regions[3].read(work.size, work.remote)
        else:
            assert wc.opcode is WCOpcode.RECV, wc
            data = self.regions[2].read(work.size, wc.wr_id % 64 * ROOM)
        assert data == self.theirs.out[work.local : work.local + work.size], (self.host.name, work)
        assert self.cmid is not None
        self.give(self.cmid, 1)

    # -- the end --------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the memory, the completions and the events of this side after the connection."""
        assert self.cmid is not None
        assert self.cmid.qp.state is QPState.ERR
        for cq in self.cqs:
            for wc in cq.poll(200):
                self.completed(wc)
            assert not cq.poll(1)
        assert not self.signaled
        assert self.received + self.flushed == self.given, "receives that never completed"
        assert self.seen[E.ESTABLISHED] == 1, self.seen
        assert self.seen[E.DISCONNECTED] == 1, self.seen
        shared = self.regions[3].read(self.regions[3].length)
        assert int.from_bytes(shared[:8], "little") == self.theirs.counter
        assert shared[SOURCE : SOURCE + ROOM] == self.plan.source
        assert shared[TARGET:] == bytes(self.theirs.written).ljust(ROOM, b"\0")

    def destroy(self) -> None:
        assert self.cmid is not None
        self.cmid.destroy()
        for part in (*self.cqs, *self.regions):
            part.close()


def live(fabric: Fabric) -> None:
    """Run one connection from beginning to end with the fabric's seed. AssertionError for any fault."""
    random = Random(f"life {fabric.seed}")
    addresses = random.choice(ADDRESSES)
    hosts = [fabric.host(name, address) for name, address in zip(("passive", "active"), addresses, strict=True)]
    plans = [WorkPlan(f"{fabric.seed}/{host.name}", random) for host in hosts]
    for plan, other in (plans, plans[::-1]):
        plan.fill(random, other.source)
    one_cq = random.random() < 0.3
    ends = [End(hosts[i], plans[i], plans[1 - i], one_cq) for i in range(2)]
    passive, active = ends
    listener = CmId(passive.channel)
    listener.bind_addr((addresses[0], PORT))
    listener.listen()
    with CmId(provider=hosts[1].provider) as cmid:  # a synchronous id: the call waits until the route is known
        cmid.resolve_addr((addresses[0], PORT))
        cmid.resolve_route()
        cmid.migrate(active.channel)
        active.cmid = cmid
        cmid.connect(ConnParam(active.prepare(cmid)))
        _reach(fabric, "the transfer", lambda: active.turn() & passive.turn(), ends)
        for end in random.choice((ends, ends[:1], ends[1:])):
            end.disconnect()
        _reach(fabric, "disconnecting", lambda: all(end.seen[E.DISCONNECTED] for end in ends), ends)
        for end in ends:
            end.check()
        patient = random.random() < 0.5
        if patient:
            fabric.run()
        for end in ends:
            end.destroy()
            # One side may leave TIMEWAIT before the other has received the DREQ.
            assert patient <= end.seen[E.TIMEWAIT_EXIT] <= 1, end.seen
    listener.destroy()
    fabric.run()
    for end in ends:
        check_empty(end.host)
        assert end.seen[E.CONNECT_REQUEST] == (end is passive), end.seen
        end.channel.close()
        assert not end.host.provider.runtime.in_use


def _reach(fabric: Fabric, what: str, done: Callable[[], bool], ends: list[End]) -> None:
    if not fabric.run(done, seconds=PATIENCE):
        told = "; ".join(
            f"{end.host.name}: {end.finished} of {len(end.plan.work)} sent, "
            f"{end.received} of {len(end.expected)} received, {dict(end.seen)}"
            for end in ends
        )
        raise AssertionError(f"{what} has no end: {told}")


def check_empty(host: Host) -> None:
    """Check that the host has no queue pair, connection or timer left."""
    provider = host.provider
    manager: ConnectionManager = provider.host.cm
    assert len(manager.agent) == 0, f"{host.name} has connections left"
    assert len(provider.host.mux) == 0, f"{host.name} has queue pairs left"
    assert provider.runtime.next_deadline() is None, f"{host.name} has timers left"
