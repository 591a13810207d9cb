"""Many queue pairs on one wire: which queue pair a packet is for, whose turn it is to send, and whose timer is due.

Nothing runs by itself. :meth:`QPMultiplexer.progress` receives, calls timers and sends, a bounded amount each time; a
caller that polls or waits calls it. Queue pairs that have more to send than one turn allows wait for the next turn in a
queue, so that one of them delays neither the others nor what arrives.

Packets are hostile until proven otherwise. A packet is accepted if its queue pair exists, it comes from the address of
the queue pair's peer, and its engine finds the ICRC right. All others are dropped, and counted in
:attr:`QPMultiplexer.dropped`.

This module knows the framing of RoCEv2: the destination queue pair number is in the BTH, and queue pair 1 receives
management datagrams. What another wire has to provide is in :mod:`rdmacm.proto.engine`.
"""

from __future__ import annotations

import errno
import struct
from collections import Counter, OrderedDict
from math import inf
from typing import TYPE_CHECKING, cast

from rdmacm.errors import RdmaError, cm_error, errno_name
from rdmacm.proto.constants import (
    ACCEPTS_ANY,
    COUNT_DROPPED,
    COUNT_NO_ROOM,
    COUNT_TRAINS_CUT,
    EVENT_FAILED,
    EVENT_SRQ_LIMIT,
    GSI_QPN,
    MAX_SLOT,
    MOST_SENT,
    MOST_TIMERS,
    MULTICAST_QPN,
    QPN_BITS,
    QPN_MASK,
    SHORTEST_PACKET,
    TURN,
)
from rdmacm.proto.core_choice import compiled
from rdmacm.proto.freed import FreedNumbers
from rdmacm.proto.roce.engines import UdEngineFactory, make_rc_engine, make_ud_engine
from rdmacm.proto.timerheap import LazyTimerHeap
from rdmacm.provider import UndeliveredTap, log
from rdmacm.soft.device.groups import Groups
from rdmacm.soft.device.gsi import RoceGsi
from rdmacm.soft.device.mixed_trains import parts_of_train
from rdmacm.soft.device.multiplexed import GroupQP, MultiplexedQP
from rdmacm.soft.wire.base import TRAFFIC, Received, SocketAddress, Wire, WirePath, WireRoute
from rdmacm.soft.wire.udp import UdpWire

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence, Sized
    from random import Random

    from rdmacm.progress.runtime import Runtime
    from rdmacm.proto._core import Lock, Strays
    from rdmacm.proto._core import Wire as CoreWire
    from rdmacm.proto.engine import EngineFactory

#: Numbers of closed queue pairs that are not given again yet.
_FREED_QPNS = 512
#: How many of the 4,096 numbers of a slot may be in use or held: finding a free one must not take long.
_SLOT_QPNS = 3840
#: Queue pairs of one wire that owns all slots.
MAX_QP = MAX_SLOT * _SLOT_QPNS - _FREED_QPNS
#: When the numbers have run out, and less than one in so many is found to be free again, there are too few: the search
#: through all that are held would soon be repeated.
_SPARE = 8
#: The least number of held queue pair numbers that are looked through for those whose time is over.
_LEAST_SWEEP = 256
#: Routes to peers that are kept.
_MAX_ROUTES = 256

#: What the compiled core counts beside errnos (``Wire.take_counts``).
_COUNTS = {COUNT_NO_ROOM: "no_room", COUNT_TRAINS_CUT: "trains_cut"}

_WORD = struct.Struct("!I")


class QPMultiplexer:
    """See the module. The runtime's lock is held for everything here."""

    def __init__(self, runtime: Runtime, wire: Wire, random: Random) -> None:
        """``random`` makes the queue pair numbers, which must not be predictable."""
        #: The lock, the clock, and calls at a time.
        self.runtime = runtime
        self.wire = wire
        self.random = random
        #: Called when the wire has opened, and has descriptors.
        self.on_open: Callable[[], None] | None = None
        #: Makes the engines of queue pairs, and those of datagram queue pairs.
        self.make_engine: EngineFactory = make_rc_engine
        self.make_ud_engine: UdEngineFactory = make_ud_engine
        #: Queue pair 1.
        self.gsi: RoceGsi = RoceGsi(self)
        #: The multicast groups that queue pairs and ids have joined.
        self.groups: Groups[GroupQP] = Groups(wire, self.open, self._tell_members)
        #: Packets that were for no queue pair, by reason.
        self.dropped: Counter[str] = Counter()
        #: Whether packets are sent and received.
        self.opened: bool = False
        #: How many bytes of packets a train may have, 0 if trains cannot be sent.
        self.train: int = 0
        #: The wire's sockets as the compiled core reads them; None without it, and for other wires.
        self.core_wire: CoreWire | None = None
        if compiled is not None and runtime.is_real_time and isinstance(wire, UdpWire):
            lock = cast("Lock", runtime.lock)
            self.core_wire = wire.core_wire = compiled.Wire(lock, self.see_core_wire, runtime.waiters.polling)
        #: Sees the reports of requests that were not delivered.
        self.undelivered_tap: UndeliveredTap | None = None
        self._may_defer_acks = False
        self._deferrals = 0
        #: The queue pairs that have an ACK to send, and nothing else. It may wait for a moment.
        self.pending_acks: dict[MultiplexedQP, None] = {}
        #: Whether packets or timers are being processed: queue pairs and the GSI that want to send wait for their turn.
        self.is_processing: bool = False
        #: Whether packets have been received that are not processed yet.
        self._is_receiving = False
        #: The queue pairs of all devices, by number.
        self.qps: dict[int, MultiplexedQP] = {}
        #: Numbers that no queue pair gets before the time given.
        self._held: dict[int, float] = {}
        #: When there are as many, those whose time is over are removed.
        self._sweep_at = _LEAST_SWEEP
        #: The numbers of queue pairs that were closed last.
        self._freed = FreedNumbers(_FREED_QPNS)
        #: The queue pairs that wait for their turn to send, in order.
        self._send_queue: OrderedDict[MultiplexedQP, None] = OrderedDict()
        #: Deadlines of queue pairs, by number.
        self._timers = LazyTimerHeap(self._deadline_of)
        #: Calls that were requested of the runtime and have not come, the next one last.
        self._calls: list[float] = []
        #: By path, traffic class and hop limit.
        self._routes: dict[tuple[WirePath, int, int], WireRoute] = {}

    @property
    def may_defer_acks(self) -> bool:
        """Whether ACKs may be deferred: a thread sends them soon if the application does not call again."""
        return self._may_defer_acks

    @may_defer_acks.setter
    def may_defer_acks(self, may: bool) -> None:
        self._may_defer_acks = may
        if self.core_wire is not None:
            self.core_wire.may_defer_acks = may

    @property
    def deferrals(self) -> int:
        """How often an ACK was deferred, or would have been if it were allowed."""
        return self._deferrals if self.core_wire is None else self._deferrals + self.core_wire.deferrals

    @property
    def progress_count(self) -> int:
        """Counts the calls that have made progress."""
        return (
            self.runtime.progress_count
            if self.core_wire is None
            else self.runtime.progress_count + self.core_wire.calls
        )

    def progress_in_background(self) -> None:
        """Make the runtime's progress for the helper thread. The core's thread goes on serving peers meanwhile."""
        core_wire = self.core_wire
        if core_wire is None:
            self.runtime.progress()
            return
        core_wire.is_background = True
        try:
            self.runtime.progress()
        finally:
            core_wire.is_background = False

    # -- opening and closing --------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to receive, if that has not begun. Raises what :meth:`Wire.open` does."""
        if self.opened:
            return
        with self.runtime.lock:
            self.runtime.check_fork("open_device", "device")
            self.wire.open()
            self.opened = True
            self.train = self.wire.can_segment()
            if log.enabled:
                log.DEVICE.debug("UDP port 4791 is open: slot %d, trains of %d bytes", self.wire.slot, self.train)
            if self.on_open is not None:
                try:
                    self.on_open()
                except BaseException:
                    self.close()
                    raise

    def close(self) -> None:
        """Stop sending and receiving. Queue pairs that are left are without a wire."""
        with self.runtime.lock:
            self.gsi.outbox.send()
            self.opened = False
            if self.core_wire is not None:
                self.core_wire.acknowledge()
                self.count_traffic()
                self.core_wire.close()
            self.gsi.close()
            self.groups.clear()
            self._send_queue.clear()
            self._timers.clear()
            self._calls.clear()
            self.qps.clear()
            self._held.clear()
            self._freed.clear()
            self._routes.clear()
            self.wire.close()

    def abandon(self) -> None:
        """In a child of fork(2): let go of what is the parent's."""
        self.opened = False
        if self.core_wire is not None:
            self.core_wire.abandon()
        self.pending_acks.clear()
        self.qps.clear()
        self.gsi.close()
        self.groups.clear()
        self.wire.abandon()

    def filenos(self) -> Sequence[int]:
        """Descriptors that poll readable when there is something to receive."""
        return self.wire.filenos() if self.opened else ()

    def background_filenos(self, fds: Sequence[int]) -> Sequence[int]:
        """Of the provider's descriptors those for a background thread: without what the core's thread serves."""
        if self.core_wire is None or not self.core_wire.is_served or not isinstance(self.wire, UdpWire):
            return fds
        mine = self.wire.filenos()
        return *(fd for fd in fds if fd not in mine), *self.wire.background_filenos()

    # -- queue pairs ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.qps)

    def attach(self, qp: MultiplexedQP, accepts: int = ACCEPTS_ANY) -> None:
        """Give a queue pair its number, and say whose packets it accepts. ENOMEM if there are too many."""
        if not self.opened:
            self.open()
        now = self.runtime.clock()
        if self._numbers_left() <= 0:
            self._sweep(now)
            if self._numbers_left() <= _SLOT_QPNS // _SPARE:
                self._claim_slot()
        slots = self.wire.slots
        while True:
            slot = slots[0] if len(slots) == 1 else self.random.choice(slots)
            qpn = slot << QPN_BITS | self.random.getrandbits(QPN_BITS)
            if qpn in self.qps or qpn in self._freed or qpn == MULTICAST_QPN:
                continue
            if self._held.get(qpn, now) <= now:
                break
        qp.qp_num = qpn
        self.qps[qpn] = qp
        if self.core_wire is not None:
            self.core_wire.accept(qpn, accepts)

    def queue_pairs(self) -> list[MultiplexedQP]:
        """The queue pairs of all devices."""
        return list(self.qps.values())

    def find(self, qpn: int) -> MultiplexedQP | None:
        """The queue pair with a number."""
        return self.qps.get(qpn)

    def _numbers_left(self) -> int:
        """How many queue pairs may get a number without a further slot."""
        return len(self.wire.slots) * _SLOT_QPNS - len(self.qps) - len(self._held) - len(self._freed)

    def _claim_slot(self) -> None:
        try:
            self.wire.claim_slot()
        except RdmaError as error:
            if self._numbers_left() > 0:
                return
            text = f"{len(self.qps)} queue pairs are in use, {len(self._held)} were until just now, and there is no "
            text += f"number for another one: {error}"
            raise cm_error(errno.ENOMEM, text, "create_qp") from error
        if log.enabled:
            log.DEVICE.debug("the process owns %d slots of UDP port 4791", len(self.wire.slots))

    def detach(self, qp: MultiplexedQP) -> None:
        """Forget a queue pair. Its number is free after a number of others, unless it is held for longer."""
        qpn = qp.qp_num
        if self.qps.get(qpn) is not qp:
            return
        if self.core_wire is not None:
            strays = self.core_wire.forget(qpn)
            if strays is not None:
                self._add_strays(strays)
        del self.qps[qpn]
        self._freed.add(qpn)
        if self._send_queue:
            self._send_queue.pop(qp, None)
        if self.pending_acks:
            self.pending_acks.pop(qp, None)
        if self._timers.earliest != inf:
            self._timers.discard(qpn)

    def hold_qpn(self, qpn: int, until: float) -> None:
        """Give a number to no queue pair before ``until``: packets of its last connection may still arrive."""
        held = self._held
        if held.get(qpn, 0.0) < until:
            held[qpn] = until
            if len(held) >= self._sweep_at:
                self._sweep(self.runtime.clock())

    def _sweep(self, now: float) -> None:
        """Remove the held numbers whose time is over. At most half of them are examined without being removed."""
        self._held = {qpn: until for qpn, until in self._held.items() if until > now}
        self._sweep_at = max(_LEAST_SWEEP, 2 * len(self._held))

    def ask_peer(self, qpn: int) -> Hashable:
        """See :meth:`rdmacm.soft.connection_manager.Gsi.ask_peer`."""
        qp = self.qps.get(qpn)
        return None if qp is None else qp.ask_peer()

    def cq_failed(self, cq: object) -> None:
        """A completion queue has overflowed."""
        for qp in list(self.qps.values()):
            qp.cq_failed(cq)

    def route(self, path: WirePath, traffic_class: int, hop_limit: int = 0) -> WireRoute:
        """The route of a path, which all queue pairs share that send along it."""
        key = path, traffic_class, hop_limit
        route = self._routes.get(key)
        if route is None:
            if len(self._routes) >= _MAX_ROUTES:
                self._routes.clear()
            route = self._routes[key] = self.wire.route(path, traffic_class, hop_limit)
        return route

    # -- progress -------------------------------------------------------------------------------------

    def progress(self, result_queue: Sized = (), skip_poll: bool = False, now: float | None = None) -> bool:
        """Receive, call timers and send, a bounded amount of each. Return whether there was anything to do.

        ``result_queue`` is the caller's: once it is not empty, return and defer ACKs to the next call, so that the peer
        gets the answer to its message before the ACK. ``skip_poll`` is :meth:`Wire.receive`'s.
        ``now``: the time, if the caller has just read the clock.
        """
        with self.runtime.lock:
            if not self.opened or self.is_processing or self._is_receiving:
                return False
            self._is_receiving = True
            try:
                if self.gsi.outbox.count:
                    self.gsi.outbox.send()
                core_wire = self.core_wire
                if self.pending_acks:
                    self.acknowledge()
                taken = 0
                if core_wire is not None:
                    taken = core_wire.begin_turn()
                try:
                    found = self.wire.receive(skip_poll)
                except Exception as error:
                    self.runtime.errors.report("wire", "some packets are lost", error)
                    found = ()
                is_busy = False
                if core_wire is not None:
                    is_busy = core_wire.end_turn(result_queue, taken)
                    if core_wire.has_work or core_wire.has_more or self.runtime.waiters.polling:
                        self.see_core_wire()
                timers, send_queue = self._timers, self._send_queue
                if not found and timers.earliest == inf and not send_queue:
                    return is_busy
                if now is None:
                    now = self.runtime.clock()
                if found:
                    self._dispatch(found, now)
                    if self.pending_acks:
                        if result_queue:
                            self._deferrals += 1
                        if not (result_queue and self.may_defer_acks):
                            self.acknowledge()
                elif not send_queue and timers.earliest > now:
                    return is_busy
                if send_queue or timers.earliest <= now:
                    self._call_timers_and_send(now)
                return True
            finally:
                self._is_receiving = False

    def _dispatch(self, found: Sequence[Received], now: float) -> None:
        """Deliver what was received, each packet to its queue pair."""
        qps, core_wire = self.qps, self.core_wire
        self.is_processing = True
        if core_wire is not None:
            core_wire.is_processing = True
        try:
            for data, segment, source, destination in found:
                if not segment and len(data) >= SHORTEST_PACKET:
                    qp = qps.get(_WORD.unpack_from(data, 4)[0] & QPN_MASK)
                    if qp is not None:
                        try:
                            qp.received(data, 0, source, destination, now)
                        except BaseException as error:
                            self.engine_raised(qp, error)
                        continue
                    if data[7] == GSI_QPN and not (data[5] or data[6]):
                        self.gsi.received(data, source, destination, now)
                        continue
                self._dispatch_train(data, segment, source, destination, now)
                if self.pending_acks:
                    self.acknowledge()  # the sender of a train has more, and its window must not close
        finally:
            self._end_processing()
            if core_wire is not None:
                core_wire.end_arrivals()

    def _call_timers_and_send(self, now: float) -> None:
        core_wire = self.core_wire
        self.is_processing = True
        if core_wire is not None:
            core_wire.is_processing = True
        try:
            self._call_timers(now)
            self._take_turns(now)
        finally:
            self._end_processing()
        self._request_call()

    def _end_processing(self) -> None:
        self.is_processing = False
        if self.core_wire is not None:
            self.core_wire.is_processing = False
        if self.gsi.outbox.count:
            self.gsi.outbox.send()

    def see_core_wire(self) -> None:
        """Do what the compiled core leaves to Python."""
        core_wire = self.core_wire
        if core_wire is None:
            return
        if self.runtime.waiters.polling:
            self.runtime.waiters.wake()
        if core_wire.has_work:
            self._take_work(core_wire)
        if not self.is_processing:
            if not self._is_receiving and core_wire.has_arrivals:
                self.progress()
            if self._send_queue:
                self._take_turns(self.runtime.clock())
            if self._send_queue or core_wire.has_more:
                self._request_call()

    def _take_work(self, core_wire: CoreWire) -> None:
        """Take what the compiled core has counted, and the events of its queue pairs and completion queues."""
        self.count_strays()
        for reason, count in core_wire.take_counts():
            if reason == COUNT_DROPPED:
                self.dropped["packet"] += count
            else:
                self.wire.counters[_COUNTS.get(reason) or errno_name(reason)] += count
        for qp, events, deadline, counts in core_wire.take_events():
            if counts:
                qp.count(counts)
            if deadline is not None:
                self.schedule(qp, deadline)
            if events & EVENT_FAILED:
                qp.core_failed()
            if events & EVENT_SRQ_LIMIT:
                qp.core_reached_limit()
        for cq, solicited, overrun in core_wire.take_added():
            cq.added(solicited, overrun)

    def count_strays(self) -> None:
        """Count what the compiled core has dropped: no thread looks at once because of that."""
        strays = self.core_wire.take_strays() if self.core_wire is not None else None
        if strays is not None:
            self._add_strays(strays)

    def count_traffic(self) -> None:
        """Add what the compiled core has sent and received to what the wire has."""
        if self.core_wire is not None:
            for name, count in zip(TRAFFIC, self.core_wire.take_traffic(), strict=True):
                self.wire.traffic[name] += count

    def _add_strays(self, strays: Strays) -> None:
        for is_of_wire, reason, count in strays[0]:
            (self.wire.counters if is_of_wire else self.dropped)[reason] += count
        for qpn, reason, count in strays[1]:
            qp = self.qps.get(qpn)
            if qp is not None:
                qp.count([("dropped", reason, count)])

    def _tell_members(self, key: bytes, qps: Sequence[GroupQP]) -> None:
        """Tell the compiled core which queue pairs are attached to a group (:func:`group_key`)."""
        if self.core_wire is not None:
            self.core_wire.set_members(key, tuple(qp.qp_num for qp in qps))

    def engine_raised(self, qp: MultiplexedQP, error: BaseException) -> None:
        """End a queue pair whose engine has raised. Raises the error again unless it is an Exception."""
        self._send_queue.pop(qp, None)
        self.pending_acks.pop(qp, None)
        self._timers.discard(qp.qp_num)
        self.runtime.errors.report("queue_pair", f"queue pair 0x{qp.qp_num:06x} has ended", error)
        try:
            qp.abort()
        except Exception as second:
            self.runtime.errors.report("queue_pair", f"queue pair 0x{qp.qp_num:06x} was not flushed", second)
        if not isinstance(error, Exception):
            raise error

    # -- sending --------------------------------------------------------------------------------------

    def send_now(self, qp: MultiplexedQP, now: float) -> None:
        """Send what a queue pair was just given, after the queue pairs that wait for their turn."""
        if self._send_queue or self.is_processing or not self.opened:
            self.ready(qp)
            if not self.opened:
                self.runtime.check_fork("open_device", "device")
            elif not self.is_processing:
                self._take_turns(now)
                self._request_call()
            return
        self.pending_acks.pop(qp, None)  # it goes with the request
        try:
            sent = qp.transmit(now, TURN)
        except BaseException as error:
            self.engine_raised(qp, error)
            sent = 0
        if sent >= TURN:
            self.ready(qp)
            self._take_turns(now)
            self._request_call()
        self.acknowledge()

    def defer_ack(self, qp: MultiplexedQP) -> None:
        """A queue pair has an ACK to send, and nothing else."""
        self.pending_acks[qp] = None

    def acknowledge(self) -> None:
        """Send the ACKs that were deferred."""
        if self.core_wire is not None:
            self.core_wire.acknowledge()
        pending = self.pending_acks
        if pending:
            now = self.runtime.clock()
            while pending:
                qp, _ = pending.popitem()
                try:
                    qp.transmit(now, TURN)
                except BaseException as error:
                    self.engine_raised(qp, error)

    def ready(self, qp: MultiplexedQP) -> None:
        """A queue pair may have something to send: let it wait for its turn."""
        self._send_queue[qp] = None

    def _take_turns(self, now: float) -> None:
        send_queue, left = self._send_queue, MOST_SENT
        while send_queue and left > 0:
            qp, _ = send_queue.popitem(last=False)
            try:
                sent = qp.transmit(now, TURN)
            except BaseException as error:
                self.engine_raised(qp, error)
                sent = 0
            left -= sent or 1
            if sent >= TURN:
                self.ready(qp)

    # -- timers ---------------------------------------------------------------------------------------

    def schedule(self, qp: MultiplexedQP, deadline: float) -> None:
        """Have :meth:`MultiplexedQP.timer` called at the deadline of a queue pair, which was set or has moved."""
        timers = self._timers
        earliest = timers.earliest
        timers.schedule(qp.qp_num, deadline)
        if timers.earliest < earliest:
            self._request_call()

    def _deadline_of(self, qpn: int) -> float | None:
        qp = self.qps.get(qpn)
        return qp.deadline if qp is not None else None

    def _call_timers(self, now: float) -> None:
        for _ in range(MOST_TIMERS):
            qpn = self._timers.pop_due(now)
            if qpn is None:
                break
            qp = self.qps[qpn]
            try:
                qp.timer(now)
            except BaseException as error:
                self.engine_raised(qp, error)
            else:
                self.ready(qp)

    def _request_call(self) -> None:
        """Request a call in time for the next turn or timer."""
        if self._send_queue or (self.core_wire is not None and self.core_wire.has_more):
            when = self.runtime.clock()
        elif self._timers:
            when = self._timers.earliest
        else:
            return
        calls = self._calls
        if not calls or calls[-1] > when:
            calls.append(when)
            self.runtime.call_at(when, self._called)

    def _called(self, now: float) -> None:
        while self._calls and self._calls[-1] <= now:
            self._calls.pop()
        self.progress()
        self._request_call()

    # -- receiving ------------------------------------------------------------------------------------

    def _dispatch_train(
        self, data: memoryview, segment: int, source: SocketAddress, destination: bytes, now: float
    ) -> None:
        """Deliver a train, or a packet that is for no queue pair.

        A train has packets from one address and port to another, and so perhaps of several queue pairs.
        """
        size = len(data)
        if not segment or segment >= size:
            self._deliver(data, 0, source, destination, now)
            return
        if segment < SHORTEST_PACKET:
            self.dropped["short"] += 1
            return
        for part in parts_of_train(data, segment):
            self._deliver(part, segment, source, destination, now)

    def _deliver(self, data: memoryview, segment: int, source: SocketAddress, destination: bytes, now: float) -> None:
        """Deliver a packet or a train for one queue pair."""
        if len(data) < SHORTEST_PACKET:
            self.dropped["short"] += 1
            return
        qpn = _WORD.unpack_from(data, 4)[0] & QPN_MASK
        qp = self.qps.get(qpn)
        if qp is not None:
            try:
                qp.received(data, segment if segment < len(data) else 0, source, destination, now)
            except BaseException as error:
                self.engine_raised(qp, error)
        elif qpn == GSI_QPN:
            step = segment or len(data)
            for start in range(0, len(data), step):
                self.gsi.received(data[start : start + step], source, destination, now)
        elif qpn == MULTICAST_QPN:
            self._deliver_to_group(data, source, destination)
        else:
            self.dropped["unknown_qp"] += 1

    def _deliver_to_group(self, data: memoryview, source: SocketAddress, key: bytes) -> None:
        """Deliver a multicast packet to every queue pair that is attached to its group (:func:`group_key`)."""
        attached = self.groups.attached(key)
        if not attached:
            self.dropped["group"] += 1
        for qp in attached:
            try:
                qp.received_from_group(data, source, key)
            except BaseException as error:
                self.engine_raised(qp, error)
