"""The two sides of one connection of a simulation, whatever happens to it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from rdmacm import CmEvent, CmEventType, CmId, EventChannel
from rdmacm.constants import PortSpace
from rdmacm.errors import RdmaError
from rdmacm.provider.connparam import ConnParam
from rdmacm.testing import Host
from rdmacm.verbs import WC, QPAttr, QPAttrMask, QPState, SendFlag, SendWR, WCOpcode, WCStatus, WROpcode
from support.life_cycles import MEMORY, ROOM, SOURCE, TARGET, End, WorkPlan

if TYPE_CHECKING:
    from swarm.world import World

__all__ = ["Life", "Side", "Violation", "reset_arena"]

E = CmEventType
#: What the errors of calls may be when a resource has run out, or the peer was faster.
EXPECTED = {errno.ENOMEM, errno.EINVAL, errno.ENODEV, errno.EMFILE, errno.ENXIO, errno.EADDRNOTAVAIL, errno.ENETUNREACH}
#: Events that end a connection before it is established.
FAILURES = (E.ADDR_ERROR, E.ROUTE_ERROR, E.CONNECT_ERROR, E.UNREACHABLE, E.REJECTED)

#: IBV_EVENT_COMM_EST.
_COMM_EST = 4
#: What changes in SQD only; and the completions by which a queue grows meanwhile.
_IN_SQD = (
    QPAttrMask.TIMEOUT
    | QPAttrMask.RETRY_CNT
    | QPAttrMask.RNR_RETRY
    | QPAttrMask.MAX_QP_RD_ATOMIC
    | QPAttrMask.MAX_DEST_RD_ATOMIC
)
_MORE = 7

#: Registered memory comes from here, so that addresses in packets are the same in each process.
_ARENA_ADDRESS, _ARENA_SIZE = 0x2000_0000_0000, 64 << 20
_MAP_FIXED_NOREPLACE = 0x100000


class Violation(AssertionError):
    """A promise of the package that a simulation has found broken."""


class _Arena:
    """Memory at a fixed address, which is given out from the beginning to the end."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
        at = libc.mmap(_ARENA_ADDRESS, _ARENA_SIZE, 3, 0x22 | _MAP_FIXED_NOREPLACE, -1, 0)
        if at != _ARENA_ADDRESS:
            raise OSError(ctypes.get_errno(), "no memory at the fixed address of simulations")
        self.view = memoryview((ctypes.c_char * _ARENA_SIZE).from_address(at)).cast("B")
        self.used = 0

    def take(self, content: bytes | bytearray) -> memoryview:
        start = self.used
        self.used = start + (len(content) + 63 & ~63)
        if self.used > _ARENA_SIZE:
            raise OSError(errno.ENOMEM, "a simulation takes more memory than its arena has")
        found = self.view[start : start + len(content)]
        found[:] = content
        return found


_arena: list[_Arena] = []


def reset_arena() -> None:
    """Give the memory of the last simulation out again."""
    if not _arena:
        _arena.append(_Arena())
    _arena[0].used = 0


class Side(End):
    """One side of a connection. It expects every outcome that is documented, and no other."""

    def __init__(self, life: Life, host: Host, is_active: bool, channel: EventChannel) -> None:
        plans = life.plans if is_active else life.plans[::-1]
        super().__init__(host, plans[0], plans[1], life.one_cq, channel)
        self.life, self.world, self.is_active = life, life.world, is_active
        self.is_over = self.is_closed = False
        #: Whether a late copy of the request has made it, after the connection that the request had made was over:
        #: packets may be delayed for longer than TIMEWAIT lasts. Nobody is there to answer its REP.
        self.is_ghost = not is_active and any(side.seen[E.ESTABLISHED] for side in life.passive)
        #: The status of the first request that failed.
        self.error: WCStatus | None = None
        #: The lowest wr_id of a send that has not completed, and whether one has failed.
        self.next_send = 0
        self.send_failed = False
        #: Of a slow reader: the seconds from one look at its completions to the next, when that is due, and whether a
        #: call is requested for it.
        self.look = float(life.given.get("look", "0"))
        self.look_due = 0.0
        self.will_look = False

    def memory(self, content: bytes | bytearray) -> memoryview:
        return _arena[0].take(content)

    def fault(self, text: str) -> Violation:
        side = "active" if self.is_active else "passive"
        return Violation(f"connection {self.life.number}, {side} side on {self.host.name}: {text}")

    # -- the connection -------------------------------------------------------------------------------

    def attempt(self, call: Callable[[], object]) -> bool:
        """Make a call that may fail for want of a resource, or because the connection is over."""
        try:
            call()
        except RdmaError as error:
            if error.errno not in EXPECTED:
                raise self.fault(f"{type(error).__name__} {error}") from error
            self.is_over = True
            return False
        return True

    def begin(self) -> None:
        """Resolve the destination, which begins the connection."""
        self.cmid = CmId(self.channel, PortSpace[self.life.given["space"]])
        self.world.sides[self.cmid] = self
        target = self.world.address(self.life.given["host"])
        port = int(self.life.given["port"])
        self.attempt(lambda: self._id.resolve_addr((target, port), timeout_ms=2000))

    @property
    def _id(self) -> CmId:
        assert self.cmid is not None
        return self.cmid

    def handle(self, event: CmEvent) -> None:
        self.seen[event.type] += 1
        if self.is_closed:
            raise self.fault(f"{event!r} after the id was destroyed")
        if self.seen[event.type] > 1 and event.type is not E.ADDR_CHANGE:
            raise self.fault(f"a second {event!r}")
        match event.type:
            case E.ADDR_RESOLVED:
                self.go_on(lambda: self._id.resolve_route(2000))
            case E.ROUTE_RESOLVED:
                self.go_on(self._connect)
            case E.CONNECT_REQUEST:
                self.answer(event)
            case E.ESTABLISHED:
                if event.private_data and self.is_active and not self.is_datagram:
                    self.remote = MEMORY.unpack_from(event.private_data)
                self.is_over |= self.is_datagram or self.cmid is None or not self._id.has_qp
                if self.hung_up:  # too early, when there was nothing to disconnect
                    self.disconnect(again=True)
            case E.CONNECT_RESPONSE if "own" in self.life.given:
                self.respond()
            case E.DISCONNECTED:
                if "linger" in self.life.given:
                    self.world.later(float(self.life.given["linger"]), self.disconnect)
                else:
                    self.disconnect()
                self.is_over = True
            case E.TIMEWAIT_EXIT:
                self.is_over = True
            case E.ADDR_CHANGE:
                pass
            case E.DEVICE_REMOVAL:
                self.world.later(0.0, self.close)
            case kind if kind in FAILURES:
                self.is_over = True
            case _:
                raise self.fault(f"unexpected {event!r}")

    def go_on(self, call: Callable[[], object]) -> None:
        """Make the next call of resolving and connecting, at once or after a while."""
        if "hesitate" not in self.life.given:
            self.attempt(call)
            return

        def later() -> None:
            if not self.host.alive or self.is_closed:
                return
            if self.host.paused:
                self.world.later(0.5, later)
            else:
                self.attempt(call)

        self.world.later(float(self.life.given["hesitate"]), later)

    @property
    def is_datagram(self) -> bool:
        return self.life.given["space"] == "UDP"

    def _connect(self) -> None:
        number = self.life.number.to_bytes(4, "big")
        if self.is_datagram:
            self._id.connect(ConnParam(bytes(MEMORY.size) + number))
        elif "own" in self.life.given:
            self._id.connect(ConnParam(bytes(MEMORY.size) + number, qp_num=0x010033, retry_count=7))
        else:
            self._id.connect(ConnParam(self.prepare(self._id) + number, rnr_retry_count=7, retry_count=7))

    def respond(self) -> None:
        """Answer a REP, for a queue pair that is not the id's."""
        own = self.life.given["own"]
        if own == "reject":
            self.attempt(lambda: self._id.reject(b"no"))
            self.is_over = True
        elif own == "leave":
            self.world.later(self.life.random.random() * self.life.random.choice((1, 20, 90)), self.close)
        else:
            self.world.later(0.0 if own == "establish" else self.life.random.choice((0.01, 3.0, 20.0)), self.establish)

    def establish(self) -> None:
        """Confirm a REP."""
        if self.is_closed or self.is_over or not self.host.alive:
            return
        if self.host.paused:
            self.world.later(1.0, self.establish)
        else:
            self.attempt(self._id.establish)
            self.is_over = True

    def answer(self, event: CmEvent) -> None:
        """Answer a request as the script says."""
        self.cmid = event.id
        self.remote = MEMORY.unpack_from(event.private_data)
        self.world.sides[event.id] = self
        server = self.life.given["server"]
        if server in ("accept", "noqp"):
            self.accept()
        elif server == "late":
            self.world.later(self.life.random.choice((0.01, 3.0, 20.0)), self.accept)
        elif server == "reject":
            self.attempt(lambda: self._id.reject(b"no"))
            self.is_over = True
        else:  # no answer; the id is destroyed at some time
            self.world.later(0.0 if server == "leave" else self.life.random.random() * 20, self.close)

    def accept(self) -> None:
        if self.is_closed or self.is_over or not self.host.alive:
            return
        if self.host.paused:
            self.world.later(1.0, self.accept)
        elif self.is_datagram:
            self.is_over = self.attempt(lambda: self._id.accept(ConnParam(qp_num=17)))
        elif self.life.given["server"] == "noqp":
            self.attempt(lambda: self._id.accept(ConnParam(qp_num=0x010022)))
        elif not self.attempt(lambda: self._id.accept(ConnParam(self.prepare(self._id), rnr_retry_count=7))):
            self.attempt(self._id.reject)

    def disconnect(self, again: bool = False) -> None:
        """Disconnect once; ``again``: once more if that was done before."""
        if self.hung_up and again and not self.is_closed:
            self.attempt(self._id.disconnect)
        if not self.hung_up and not self.is_closed and self.cmid is not None:
            self.poll()
            self.hung_up = True
            self.attempt(self._id.disconnect)

    # -- the transfer ---------------------------------------------------------------------------------

    @property
    def has_completions(self) -> bool:
        """Whether there are completions to take."""
        return any(cq.backend.queue for cq in self.cqs)  # type: ignore[attr-defined]

    def step(self) -> None:
        """Take completions and post, as :meth:`turn` does, if this side is there to do so."""
        if self.is_closed or not self.host.runs or not self.cqs:
            return
        if self.look and not self.is_over:
            now = self.world.fabric.now
            if now < self.look_due:
                if not self.will_look:
                    self.will_look = True
                    self.world.fabric.call_at(self.look_due, self.life.tell)
                return
            self.look_due, self.will_look = now + self.look, False
        self.poll()
        if self.error is not None:
            self.disconnect()
        elif not self.hung_up and not self.is_over and self.seen[E.ESTABLISHED]:
            room = self.plan.depth - (self.posted - self.finished)
            if room and self.posted < len(self.plan.work):
                self.post(self.plan.work[self.posted : self.posted + room])

    def poll(self) -> None:
        for cq in self.cqs:
            while cq.backend.queue:  # type: ignore[attr-defined]
                for wc in cq.poll(100):
                    self.completed(wc)

    def completed(self, wc: WC) -> None:
        is_receive = bool(wc.opcode & WCOpcode.RECV)
        if is_receive and wc.wr_id != self.received + self.flushed:
            raise self.fault(f"receive {self.received + self.flushed} completes as {wc}")
        if not is_receive and not self.next_send <= wc.wr_id < self.posted:
            raise self.fault(f"send {self.next_send} of {self.posted} completes as {wc}")
        if wc.status is not WCStatus.SUCCESS:
            self._failed(wc, is_receive)
            return
        if self.flushed if is_receive else self.send_failed:
            raise self.fault(f"success after an error: {wc}")
        try:
            if is_receive:
                self.got(wc)
            else:
                self.next_send = wc.wr_id + 1
                self.sent(wc)
        except AssertionError as error:
            raise self.fault(str(error)) from error

    def give(self, cmid: CmId, count: int) -> None:
        if not self.hung_up:
            super().give(cmid, count)

    def _failed(self, wc: WC, is_receive: bool) -> None:
        if is_receive:
            self.flushed += 1
        else:
            skipped = range(self.next_send, wc.wr_id)
            if self.send_failed and skipped:
                raise self.fault(f"sends {skipped} never completed: {wc}")
            if any(number in self.signaled for number in skipped):
                raise self.fault(f"sends {skipped} were signaled and never completed: {wc}")
            self.next_send = wc.wr_id + 1
            self.send_failed = True
        if self.error is None:
            self.error = wc.status

    def spoil(self) -> None:
        """Write to memory of the peer with a wrong key: this connection ends, and no other."""
        if self.cmid is None or not self._id.has_qp or self.hung_up or self.error or not self.seen[E.ESTABLISHED]:
            return
        wr = SendWR(self.posted, WROpcode.RDMA_WRITE, [self.regions[0].sge(0, 8)], SendFlag.SIGNALED)
        wr.set_wr_rdma(0x1234, 0)
        self.plan.work.append(self.plan.work[0])
        self.signaled.append(self.posted)
        self.posted += 1
        self.attempt(lambda: self._id.qp.post_send([wr]))

    def fail(self) -> None:
        """Move the queue pair to the error state, as an application may at any time."""
        if self.cmid is not None and not self.is_closed and self._id.has_qp and self.host.runs:
            qp = self._id.qp
            if qp.state is not QPState.RESET:
                qp.modify(QPAttr(qp_state=QPState.ERR), QPAttrMask.STATE)
                self.life.is_certain = False
                self.disconnect()

    @property
    def _state(self) -> QPState | None:
        """The state of the queue pair, if there is one that may be changed."""
        if self.cmid is None or self.is_closed or not self.host.runs or not self._id.has_qp:
            return None
        return self._id.qp.state

    def drain(self) -> None:
        """Halt the queue pair for a while, as an application may at any time. No request fails because of that."""
        if self._state is QPState.RTS and self.seen[E.ESTABLISHED] and not self.hung_up:
            attr = QPAttr(qp_state=QPState.SQD)
            attr.min_rnr_timer = 5
            self._modify(attr, QPAttrMask.MIN_RNR_TIMER)
            self._modify(attr, QPAttrMask.STATE)
            self._modify(attr, QPAttrMask.MIN_RNR_TIMER)
            self._modify(self._id.qp.query()[0], _IN_SQD)
            self._resize(_MORE)
            self.world.later(self.life.random.choice((0.0, 0.001, 1.0)), self.resume)

    def resume(self) -> None:
        """End :meth:`drain`."""
        if self._state is QPState.SQD and self._id.qp.query()[0].sq_draining:
            self.world.later(0.1, self.resume)
        elif self._state is QPState.SQD:
            self._modify(QPAttr(qp_state=QPState.RTS), QPAttrMask.STATE)
            self._resize(-_MORE)
        elif self.host.paused and self.host.alive:
            self.world.later(1.0, self.resume)

    def _resize(self, more: int) -> None:
        """Change the size of the completion queues, with whatever is in them."""
        for cq in (self._id.send_cq, self._id.recv_cq):
            assert cq is not None
            cq.resize(cq.cqe + more)

    def _modify(self, attr: QPAttr, mask: QPAttrMask) -> None:
        assert self._id.has_qp
        self._id.qp.modify(attr, mask)

    def reset(self) -> None:
        """Reset the queue pair: what was posted is dropped without completions."""
        if self._state not in (None, QPState.RESET):
            self.poll()
            self._modify(QPAttr(qp_state=QPState.RESET), QPAttrMask.STATE)
            self.signaled.clear()
            self.given = self.received + self.flushed
            self.error = self.error or WCStatus.WR_FLUSH_ERR
            if self.seen[E.ESTABLISHED]:
                self.disconnect()
            else:
                self.world.later(0.5, self.close)

    def reject(self) -> None:
        """Reject at any time; in most states that is refused."""
        if self.cmid is not None and not self.is_closed:
            with contextlib.suppress(RdmaError):
                self._id.reject(b"late")
                self.is_over = True

    def notify(self) -> None:
        """Tell the connection manager late that data have arrived. It believes that, so it must be true."""
        if self.seen[E.ESTABLISHED] and not self.is_closed:
            with contextlib.suppress(RdmaError):
                self._id.notify(_COMM_EST)

    def migrate(self, channel: EventChannel) -> None:
        """Let the events of the id come on another channel."""
        if self.cmid is not None and not self.is_closed:
            self.attempt(lambda: self._id.migrate(channel))

    # -- the end --------------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        return self.finished >= len(self.plan.work) and self.received == len(self.expected)

    @property
    def has_sent(self) -> bool:
        """Whether all its requests have completed."""
        return bool(self.seen[E.ESTABLISHED]) and self.finished >= len(self.plan.work)

    def check_memory(self) -> None:
        """No byte is wrong: what the peer wrote is there from the beginning, up to where it came."""
        if len(self.regions) < 4 or not self.host.alive:
            return
        shared = self.regions[3].read(self.regions[3].length)
        target, written = shared[TARGET:], bytes(self.theirs.written)
        came = next((at for at, pair in enumerate(zip(target, written, strict=False)) if pair[0] != pair[1]), None)
        came = len(written) if came is None else came
        if any(target[came:]) or shared[SOURCE : SOURCE + ROOM] != self.plan.source:
            raise self.fault(f"wrong bytes in memory after {came} of {len(written)}")
        if self.seen[E.DISCONNECTED] and self.cmid is not None and self._id.has_qp:
            if self._id.qp.state is QPState.ERR and self.received + self.flushed != self.given:
                raise self.fault(f"{self.given - self.received - self.flushed} receives never completed")
            lost = [number for number in self.signaled if self.next_send <= number < self.posted]
            if self._id.qp.state is QPState.ERR and lost:
                raise self.fault(f"sends {lost} never completed")

    def close(self) -> None:
        """Destroy the id and what belongs to it."""
        if not self.is_closed:
            if self.host.alive and self.cmid is not None:
                self.poll()
                self.check_memory()
            self.is_closed = self.is_over = True
            self.release()

    def release(self) -> None:
        if self.cmid is not None:
            self.cmid.destroy()
        for part in (*self.cqs, *self.regions):
            part.close()


class Life:
    """One connection, as one step of the script asks for it."""

    def __init__(self, world: World, given: dict[str, str], is_certain: bool) -> None:
        self.world, self.given, self.number = world, given, int(given["n"])
        #: Whether nothing may keep it from succeeding.
        self.is_certain = is_certain
        self.random = Random(f"{world.script.seed} {self.number}")
        self.plans = [WorkPlan(f"{world.script.seed}/{self.number}/{name}", self.random) for name in "ap"]
        for plan, other in (self.plans, self.plans[::-1]):
            plan.fill(self.random, other.source)
        self.one_cq = self.random.random() < 0.3
        self.active: Side | None = None
        #: One, or several if the passive host was restarted meanwhile.
        self.passive: list[Side] = []
        self.is_spoiled = False
        #: Whether an event has come since the last step.
        self.is_told = True

    @property
    def sides(self) -> list[Side]:
        return [*([self.active] if self.active else []), *self.passive]

    @property
    def is_over(self) -> bool:
        return all(side.is_over or not side.host.alive for side in self.sides)

    def tell(self) -> None:
        """Let the next moment be a step of this connection."""
        self.is_told = True

    @property
    def has_news(self) -> bool:
        """Whether there is something to do: an event has come, or completions."""
        return self.is_told or any(side.has_completions for side in self.sides)

    def step(self) -> None:
        """What the application of both sides does at one moment."""
        self.is_told = False
        sides = self.sides
        for side in sides:
            side.step()
        if self.given.get("spoil") and not self.is_spoiled and self.active is not None and self.active.has_sent:
            self.is_spoiled = True
            self.active.spoil()
        if len(sides) > 1 and all(side.is_done for side in (sides[0], sides[-1])):
            closer = self.given["closer"]
            for side in sides:
                if side.is_over or not side.host.runs:
                    continue
                if closer == "destroy" and side.is_active:
                    side.close()
                elif closer in ("both", "destroy") or (closer == "active") == side.is_active:
                    side.disconnect()

    def give_up(self) -> None:
        """End what waits for a peer that is not there any more, as an application's own timeout does.

        Nothing else may be under way: the network has been whole for long.
        """
        sides = self.sides
        for side in sides:
            if not side.is_over and side.host.runs:
                peers = [other for other in sides if other.is_active is not side.is_active]
                if not side.seen[E.ESTABLISHED] or any(not peer.is_over and peer.host.alive for peer in peers):
                    others = [(peer.is_over, peer.host.alive, dict(peer.seen)) for peer in peers]
                    raise side.fault(
                        f"no end: {dict(side.seen)}, {side.finished} of {len(side.plan.work)} sent, {side.received} of "
                        f"{len(side.expected)} received, {side.error}, peer {others}"
                    )
                if side.signaled and side.signaled[0] < side.posted and side.error is None:
                    raise side.fault(f"no end of sends {side.signaled} of {side.posted}")
                side.disconnect() if side.seen[E.ESTABLISHED] else side.close()

    def check(self) -> None:
        """At the end: nothing may have kept a certain connection from succeeding."""
        ghosts = [side for side in self.passive if side.is_ghost]
        for side in ghosts:
            if side.seen[E.ESTABLISHED]:
                raise side.fault(f"a late copy of a request was established: {dict(side.seen)}")
        if not self.is_certain or self.given.get("spoil"):
            return
        sides = [side for side in self.sides if not side.is_ghost]
        for side in sides:
            if not side.seen[E.ESTABLISHED] or not side.is_done or side.error not in (None, WCStatus.WR_FLUSH_ERR):
                raise side.fault(
                    f"nothing disturbed it, but {side.finished} of {len(side.plan.work)} were sent, {side.received} of "
                    f"{len(side.expected)} received, {side.error}, {dict(side.seen)}"
                )
        if len(sides) != 2:
            raise Violation(f"connection {self.number}: nothing disturbed it, but {len(sides)} sides exist")
