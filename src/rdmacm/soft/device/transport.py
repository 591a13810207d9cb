"""Between the queue pairs of a host and its wire: who gets which packet, whose turn it is to send, whose timer is due.

Nothing runs by itself. :meth:`Transport.progress` takes in what has arrived, lets timers fire and sends what follows,
a bounded amount each time; whoever polls or waits calls it. Queue pairs that have more to send than fits a turn wait in
line, so that one with a lot to say holds up neither the others nor what arrives.

What arrives is hostile until proven otherwise. A packet counts when its queue pair exists and its ICRC is right, and
for a connected one when it also comes from the peer's address; everything else is dropped, and counted in
:attr:`Transport.dropped`.
"""

from __future__ import annotations

import errno
import random
import struct
import threading
from collections import Counter, OrderedDict
from socket import AF_INET, AF_INET6, inet_pton
from typing import TYPE_CHECKING, Protocol, TypeAlias

from rdmacm.address import DEFAULT_PKEY
from rdmacm.errors import cm_error
from rdmacm.proto.mad import GSI_Q_KEY, MAD_SIZE
from rdmacm.proto.roce.icrc import ICRC_LENGTH, RESIDUE, Icrc, crc32, icrc_between
from rdmacm.proto.roce.opcodes import BTH_LENGTH, Opcode
from rdmacm.proto.roce.rc import RcEngine
from rdmacm.soft.wire.base import Received, Wire, WirePath, WireRoute
from rdmacm.timerheap import LazyTimerHeap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Sized

    from rdmacm.proto.engine import EngineFactory
    from rdmacm.proto.wire import Buffer

__all__ = ["GSI_QPN", "Endpoint", "Remote", "Transport"]

GSI_QPN = 1
#: Queue pair numbers of one wire: its slot has 65,536, and to find a free one must not take long.
MAX_QP = 65_000
#: Packets a queue pair may send in its turn: one train.
_TURN = 64
#: Packets of one progress(); a turn in which nothing is sent counts as one.
_SENT = 256
#: Timers that may fire in one progress().
_FIRED = 256
#: Routes to peers that are kept, and as many of where messages of their connection managers come from.
_KEPT = 256

_GSI_HEADERS = struct.Struct("!BBHIIII")
_GSI_LENGTH = BTH_LENGTH + 8 + MAD_SIZE + ICRC_LENGTH
_UD_SEND_ONLY = int(Opcode.UD_SEND_ONLY)
_SHORTEST = BTH_LENGTH + ICRC_LENGTH
_WORD = struct.Struct("!I")
_ICRC = struct.Struct("<I")
_QPN_MASK = 0xFFFFFF


#: A socket address that a packet came from.
Remote: TypeAlias = "tuple[str, int] | tuple[str, int, int, int]"


class Endpoint(Protocol):
    """A queue pair as the transport sees it. All of it is called under the provider's lock."""

    qp_num: int

    def received(self, data: memoryview, segment: int, remote: Remote, local: bytes, now: float) -> None: ...

    def transmit(self, now: float, limit: int) -> int:
        """Send up to ``limit`` packets, and :meth:`Transport.schedule` the deadline that follows.

        Returns how many packets there were: so many or more where it may have others left.
        """

    @property
    def deadline(self) -> float | None:
        """When :meth:`timer` wants to be called."""

    def timer(self, now: float) -> None: ...

    def cq_failed(self, cq: object) -> None:
        """A completion queue has overflowed; to the error state where it is one of this queue pair's."""


class Transport:
    """See the module.

    ``lock`` is the provider's, and held for everything here; ``clock`` reads seconds; ``call_at(when, callback)`` has
    ``callback(now)`` called once ``when`` has come. ``source`` is where queue pair numbers come from: they are not to
    be guessed.

    ``on_mad(mad, path, now)`` is the connection manager's: a management datagram of 256 bytes, valid during the call.
    ``on_open()`` is the provider's: the wire has descriptors now.
    """

    def __init__(
        self,
        lock: threading.RLock,
        clock: Callable[[], float],
        call_at: Callable[[float, Callable[[float], None]], object],
        wire: Wire,
        source: random.Random | None = None,
    ) -> None:
        self.lock = lock
        self.clock = clock
        self.wire = wire
        self.random = source or random.SystemRandom()
        self.on_mad: Callable[[memoryview, WirePath, float], None] | None = None
        self.on_open: Callable[[], None] | None = None
        #: Packets that were not for anybody, by reason.
        self.dropped: Counter[str] = Counter()
        #: How many bytes of packets a train may have, 0 where there are none.
        self.train = 0
        #: Whether somebody sees to it soon that what is owed is sent, should the application not come back.
        self.may_defer_acks = False
        #: How often an ACK was left for later, or would have been but for that.
        self.deferrals = 0
        #: Makes the engines of queue pairs.
        self.make_engine: EngineFactory = RcEngine
        #: The queue pairs that have an ACK to send, and nothing else, which may wait for a moment.
        self.pending_acks: dict[Endpoint, None] = {}
        #: Whether packets come and go.
        self.opened = False
        self._call_at = call_at
        self._abandoned = False
        self._inside = False
        self._qps: dict[int, Endpoint] = {}
        self._held: dict[int, float] = {}
        #: The queue pairs that wait for their turn to send, in order.
        self._send_queue: OrderedDict[Endpoint, None] = OrderedDict()
        #: Deadlines of queue pairs, by number.
        self._timers = LazyTimerHeap(self._deadline_of)
        # What the provider was asked for and has not called yet, the next one last.
        self._calls: list[float] = []
        #: With what the ICRC of a management datagram begins with.
        self._routes: dict[tuple[WirePath, int], tuple[WireRoute, int]] = {}
        self._gsi_sources: dict[tuple[Remote, bytes], tuple[WirePath, Icrc, int]] = {}
        self._gsi_psn = self.random.getrandbits(24)

    # -- opening and closing --------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to receive, where that has not begun; raises what :meth:`Wire.open` does."""
        with self.lock:
            if self.opened:
                return
            self._check_fork()
            self.wire.open()
            self.opened = True
            self.train = self.wire.can_segment()
            if self.on_open is not None:
                self.on_open()

    def close(self) -> None:
        """Stop receiving. The queue pairs that are left hear and say nothing any more."""
        with self.lock:
            self.acknowledge()
            self.opened = False
            self._send_queue.clear()
            self._timers.clear()
            self._calls.clear()
            self._qps.clear()
            self._held.clear()
            self._routes.clear()
            self._gsi_sources.clear()
            self.wire.close()

    def abandon(self) -> None:
        """In a child of fork(2): let go of what is the parent's."""
        self.lock = threading.RLock()  # a thread that is not here may have held the other
        self._abandoned = True
        self.opened = False
        self.pending_acks.clear()
        self._qps.clear()
        self.wire.abandon()

    def _check_fork(self) -> None:
        if self._abandoned:
            raise cm_error(errno.EBADF, "the device was opened before fork(2)", hint="a device of this process")

    def filenos(self) -> Sequence[int]:
        """Descriptors that poll readable when there is something to receive."""
        return self.wire.filenos() if self.opened else ()

    # -- queue pairs ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._qps)

    def attach(self, qp: Endpoint) -> None:
        """Give a queue pair its number; ENOMEM where there are too many."""
        if not self.opened:
            self.open()
        now = self.clock()
        if len(self._qps) + len(self._held) >= MAX_QP:
            self._held = {qpn: until for qpn, until in self._held.items() if until > now}
            if len(self._qps) + len(self._held) >= MAX_QP:
                raise cm_error(errno.ENOMEM, f"{MAX_QP} queue pairs are in use, or were until just now", "create_qp")
        while True:
            qpn = self.wire.slot << 16 | self.random.getrandbits(16)
            if qpn not in self._qps and qpn != 0xFFFFFF and self._held.pop(qpn, now) <= now:
                break
        qp.qp_num = qpn
        self._qps[qpn] = qp

    def detach(self, qp: Endpoint) -> None:
        """The number is free, unless it is held."""
        if self._qps.get(qp.qp_num) is not qp:
            return
        del self._qps[qp.qp_num]
        self._send_queue.pop(qp, None)
        self.pending_acks.pop(qp, None)
        self._timers.discard(qp.qp_num)

    @property
    def id_prefix(self) -> int:
        """The upper byte of this process's queue pair numbers and communication ids."""
        return self.wire.slot

    def listen(self, service_id: int, local: bytes | None) -> object:
        """Have requests for a service id come here (:meth:`rdmacm.soft.wire.base.Wire.listen`)."""
        return self.wire.listen(service_id, local)

    def unlisten(self, token: object) -> None:
        self.wire.unlisten(token)

    def hold_qpn(self, qpn: int, until: float) -> None:
        """Give the number to no queue pair before ``until``: packets of its last connection may be under way."""
        with self.lock:
            self._held[qpn] = max(until, self._held.get(qpn, until))

    def cq_failed(self, cq: object) -> None:
        """A completion queue has overflowed."""
        for qp in list(self._qps.values()):
            qp.cq_failed(cq)

    # -- progress -------------------------------------------------------------------------------------

    def progress(self, wanted: Sized = (), skip_poll: bool = False) -> bool:
        """Receive, let timers fire and send, a bounded amount of each; whether there was anything to do.

        ``wanted`` is what the caller hopes to find filled. When it is, the caller is let go at once, and ACKs wait for
        what is called next: whoever sent the message is answered sooner.
        """
        with self.lock:
            if not self.opened or self._inside:
                return False
            if self.pending_acks:
                self.acknowledge()
            found = self.wire.receive(skip_poll)
            timers, line = self._timers, self._send_queue
            if not found and not timers and not line:
                return False
            now = self.clock()
            if found:
                self._take_in(found, now)
                if self.pending_acks:
                    if wanted:
                        self.deferrals += 1
                    if not (wanted and self.may_defer_acks):
                        self.acknowledge()
            elif not line and timers.earliest > now:
                return False
            if line or timers.earliest <= now:
                self._act(now)
            return True

    def _take_in(self, found: Sequence[Received], now: float) -> None:
        """What has been received, each packet to its queue pair."""
        qps = self._qps
        self._inside = True
        try:
            for data, segment, remote, local in found:
                if not segment and len(data) >= _SHORTEST:
                    qp = qps.get(_WORD.unpack_from(data, 4)[0] & _QPN_MASK)
                    if qp is not None:
                        qp.received(data, 0, remote, local, now)
                        continue
                    if data[7] == GSI_QPN and not (data[5] or data[6]):
                        self._management(data, remote, local, now)
                        continue
                self._dispatch(data, segment, remote, local, now)
                if self.pending_acks:
                    self.acknowledge()  # of a train: there is more, and the window is not to close
        finally:
            self._inside = False

    def _act(self, now: float) -> None:
        """Let timers fire, and those in line send."""
        self._inside = True
        try:
            self._fire(now)
            self._take_turns(now)
        finally:
            self._inside = False
        self._settle()

    def send_now(self, qp: Endpoint, now: float) -> None:
        """Send what a queue pair has just been given, after those in line before it."""
        if self._send_queue or self._inside or not self.opened:
            self.ready(qp)
            if not self.opened:
                self._check_fork()
            elif not self._inside:
                self._take_turns(now)
                self._settle()
            return
        if qp.transmit(now, _TURN) >= _TURN:
            self.ready(qp)
            self._take_turns(now)
            self._settle()
        if self.pending_acks:
            self.acknowledge()

    def defer_ack(self, qp: Endpoint) -> None:
        """A queue pair has an ACK to send, and nothing else."""
        self.pending_acks[qp] = None

    def acknowledge(self) -> None:
        """Send the ACKs that were deferred."""
        pending = self.pending_acks
        if pending:
            now = self.clock()
            while pending:
                pending.popitem()[0].transmit(now, _TURN)

    def ready(self, qp: Endpoint) -> None:
        """A queue pair may have something to send: it gets in line."""
        self._send_queue[qp] = None

    def is_send_queued(self, qp: Endpoint) -> bool:
        """Whether a queue pair waits for its turn to send."""
        return qp in self._send_queue

    def _take_turns(self, now: float) -> None:
        line, left = self._send_queue, _SENT
        while line and left > 0:
            qp, _ = line.popitem(last=False)
            sent = qp.transmit(now, _TURN)
            left -= sent or 1
            if sent >= _TURN:
                self.ready(qp)

    def schedule(self, qp: Endpoint, deadline: float) -> None:
        """Have :meth:`Endpoint.timer` called at the deadline of a queue pair, which was set or has moved."""
        timers = self._timers
        earliest = timers.earliest
        timers.schedule(qp.qp_num, deadline)
        if timers.earliest < earliest:
            self._settle()

    def _deadline_of(self, qpn: int) -> float | None:
        qp = self._qps.get(qpn)
        return qp.deadline if qp is not None else None

    def _fire(self, now: float) -> None:
        timers = self._timers
        for _ in range(_FIRED):
            qpn = timers.pop_due(now)
            if qpn is None:
                break
            qp = self._qps[qpn]
            qp.timer(now)
            self.ready(qp)

    def _settle(self) -> None:
        """Ask to be called again in time."""
        if self._send_queue:
            wanted = self.clock()
        elif self._timers:
            wanted = self._timers.earliest
        else:
            return
        calls = self._calls
        if not calls or calls[-1] > wanted:
            calls.append(wanted)
            self._call_at(wanted, self._due)

    def _due(self, now: float) -> None:
        while self._calls and self._calls[-1] <= now:
            self._calls.pop()
        self.progress()
        self._settle()

    # -- what arrives ---------------------------------------------------------------------------------

    def _dispatch(self, data: memoryview, segment: int, remote: Remote, local: bytes, now: float) -> None:
        size = len(data)
        if not segment or segment >= size:
            self._hand_over(data, 0, remote, local, now)
            return
        if segment < _SHORTEST:
            self.dropped["short"] += 1
            return
        # A train has the packets of one pair of ports, and so perhaps of several queue pairs.
        if _is_same(data[5::segment]) and _is_same(data[6::segment]) and _is_same(data[7::segment]):
            self._hand_over(data, segment, remote, local, now)
            return
        start, before = 0, data[5:8]
        for position in range(segment, size, segment):
            qpn = data[position + 5 : position + 8]
            if qpn != before:
                self._hand_over(data[start:position], segment, remote, local, now)
                start, before = position, qpn
        self._hand_over(data[start:], segment, remote, local, now)

    def _hand_over(self, data: memoryview, segment: int, remote: Remote, local: bytes, now: float) -> None:
        """A packet or a train for one queue pair."""
        if len(data) < _SHORTEST:
            self.dropped["short"] += 1
            return
        qpn = _WORD.unpack_from(data, 4)[0] & _QPN_MASK
        qp = self._qps.get(qpn)
        if qp is not None:
            qp.received(data, segment if segment < len(data) else 0, remote, local, now)
        elif qpn == GSI_QPN:
            for start in range(0, len(data), segment or len(data)):
                self._management(data[start : start + (segment or len(data))], remote, local, now)
        else:
            self.dropped["unknown_qp"] += 1

    def _management(self, data: memoryview, remote: Remote, local: bytes, now: float) -> None:
        if len(data) != _GSI_LENGTH:
            self.dropped["gsi_length"] += 1
            return
        opcode, flags, pkey, _, _, qkey, _ = _GSI_HEADERS.unpack_from(data)
        if opcode != _UD_SEND_ONLY or flags & 0x3F:  # no padding, version 0
            self.dropped["gsi_opcode"] += 1
        elif qkey != GSI_Q_KEY or pkey & 0x7FFF != DEFAULT_PKEY & 0x7FFF:
            self.dropped["gsi_key"] += 1
        else:
            found = self._gsi_sources.get((remote, local))
            if found is None:
                if len(self._gsi_sources) >= _KEPT:
                    self._gsi_sources.clear()
                path = WirePath(local, packed_host(remote[0], local), remote[3] if len(remote) == 4 else 0)
                flow = icrc_between(path.remote, local, remote[1])
                found = self._gsi_sources[remote, local] = path, flow, flow.start(_GSI_LENGTH)
            path, flow, start = found
            # Nearly every one is as our own are sent.
            if crc32(data, start) != RESIDUE and flow.solve((data,)) is None:
                self.dropped["icrc"] += 1
            elif self.on_mad is not None:
                self.on_mad(data[BTH_LENGTH + 8 : -ICRC_LENGTH], path, now)

    def route(self, path: WirePath, traffic_class: int) -> WireRoute:
        """How packets get to a peer; for all that is sent there together."""
        return (self._routes.get((path, traffic_class)) or self._new_route(path, traffic_class))[0]

    def _new_route(self, path: WirePath, traffic_class: int) -> tuple[WireRoute, int]:
        if len(self._routes) >= _KEPT:
            self._routes.clear()
        route = self.wire.route(path, traffic_class)
        flow = icrc_between(path.local, path.remote, route.source_port)
        found = self._routes[path, traffic_class] = route, flow.start(_GSI_LENGTH)
        return found

    def send_mad(self, path: WirePath, mad: Buffer, traffic_class: int = 0) -> bool:
        """Send a management datagram of 256 bytes to a peer's connection manager; False where it was lost at once."""
        with self.lock:
            if not self.opened:
                self.open()
            if self.pending_acks:
                self.acknowledge()  # before a peer is told that this is the end
            route, start = self._routes.get((path, traffic_class)) or self._new_route(path, traffic_class)
            self._gsi_psn = (self._gsi_psn + 1) & 0xFFFFFF
            headers = _GSI_HEADERS.pack(_UD_SEND_ONLY, 0, DEFAULT_PKEY, GSI_QPN, self._gsi_psn, GSI_Q_KEY, GSI_QPN)
            crc = crc32(mad, crc32(headers, start))
            return self.wire.send(route, (headers, mad, _ICRC.pack(crc)))


def _is_same(column: memoryview) -> bool:
    values = column.tobytes()
    return values.count(values[0]) == len(values)


def packed_host(host: str, local: bytes) -> bytes:
    """The packed form of the address a datagram for ``local`` came from."""
    if len(local) == 4:
        return inet_pton(AF_INET, host)
    return inet_pton(AF_INET6, host.partition("%")[0])
