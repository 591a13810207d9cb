"""Connected queue pairs of the software device.

The wire protocol is an engine's (:class:`rdmacm.proto.engine.QPEngine`). A queue pair has what is around it: the states
and attributes of the verbs, the depths of the queues, scatter/gather elements as buffers, completions for their queues
(:mod:`rdmacm.soft.device.work_queues`), and the address vector, which decides whose packets are accepted.

A work request with an element that is not registered memory of its protection domain is queued like others and fails in
its turn, as in hardware: the engine gets a buffer that cannot be accessed.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, cast

from rdmacm.address import is_link_local
from rdmacm.enums import AccessFlag, QPState
from rdmacm.errors import cm_error
from rdmacm.proto.constants import ACCEPTS_NONE, ACCEPTS_PEER
from rdmacm.proto.core_choice import compiled
from rdmacm.proto.engine import ACK_ONLY, NOTHING
from rdmacm.proto.plainints import (
    QP_ACCESS_FLAGS,
    QP_AV,
    QP_MAX_DEST_RD_ATOMIC,
    QP_MIN_RNR_TIMER,
)
from rdmacm.proto.work import SendWork
from rdmacm.provider import log
from rdmacm.soft.device.attributes import SEND_ATTRIBUTES, copy_path, rtr_attributes, rts_attributes, vector_of
from rdmacm.soft.device.memory import RemoteMemory
from rdmacm.soft.device.requests import refused, send_work
from rdmacm.soft.device.work_queues import DeviceParts, WorkQueues
from rdmacm.soft.wire.base import WirePath
from rdmacm.soft.wire.udp import UdpWire
from rdmacm.soft.wire.udp_route import UdpRoute
from rdmacm.verbs.attr import QPAttr
from rdmacm.verbs.enums import EventType

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from rdmacm.proto._core import CompletionQueue, Connection
    from rdmacm.proto.engine import EngineFactory, QPEngine
    from rdmacm.proto.sa import PathRecord
    from rdmacm.soft.wire.base import SocketAddress, WireRoute
    from rdmacm.verbs.wr import SendWR

_RESET, _INIT, _RTR, _RTS, _SQD, _SQE, _ERR = QPState


class SoftQP(WorkQueues["QPEngine"]):
    """A reliable connected queue pair; implements :class:`rdmacm.verbs.backend.QPBackend`.

    :class:`rdmacm.soft.device.unreliable_queue_pair.SoftUcQP` is what an unreliable one has of its own, and
    :mod:`rdmacm.soft.device.extended_queue_pair` what those of XRC have.
    """

    core: Connection | None
    __slots__ = (
        "_destination",
        "_drain_reported",
        "_established",
        "_memory",
        "_route",
        "_source",
        "_vector",
        "on_comm_est",
    )

    def _set_up(self, _parts: DeviceParts) -> None:
        #: Called with the first packet that is accepted, for the id that it is attached to.
        self.on_comm_est: Callable[[], None] | None = None
        #: What the peer may touch; None without an engine.
        self._memory: RemoteMemory | None = None
        self._mux.attach(self, ACCEPTS_NONE)

    def _enter_reset(self) -> None:
        super()._enter_reset()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        #: What the address vector is made of when it is asked for, where an id has set the peer.
        self._vector: tuple[PathRecord, int, int] | None = None
        #: The way to the peer, from RTR on.
        self._route: WireRoute | None = None
        #: Socket address and local address of the last packet that was accepted: others from there need no check.
        self._source: SocketAddress | None = None
        self._destination = b""
        #: Whether a packet was accepted; None while requests also wait for that (:meth:`hold_sends`).
        self._established: bool | None = False
        #: Whether SQ_DRAINED was reported, in SQD.
        self._drain_reported = False

    # -- states and attributes ------------------------------------------------------------------------

    def _take_attributes(self, attr: QPAttr, bits: int) -> None:
        route = self._route_to(attr) if bits & QP_AV else None
        super()._take_attributes(attr, bits)
        if route is not None:
            self.attr.ah_attr = copy_path(attr.ah_attr)
            self._vector = None
            self._use_route(route)
        if self._engine is not None:
            self._change_engine(self._engine, bits, self.attr)

    def _change_engine(self, engine: QPEngine, bits: int, attr: QPAttr) -> None:
        """Change what an engine has of the attributes that a mask names."""
        if bits & QP_ACCESS_FLAGS:
            engine.set_access(AccessFlag(attr.qp_access_flags))
        if bits & QP_MIN_RNR_TIMER:
            engine.set_min_rnr_timer(attr.min_rnr_timer)
        if self.state is _SQD:  # on the way to RTS the engine takes them with the transition
            if bits & QP_MAX_DEST_RD_ATOMIC:
                engine.set_max_dest_rd_atomic(attr.max_dest_rd_atomic)
            if bits & SEND_ATTRIBUTES:
                engine.set_send_attributes(rts_attributes(attr), self._mux.runtime.clock())
                deadline = engine.deadline
                if deadline is not None:
                    self._mux.schedule(self, deadline)

    def query(self) -> QPAttr:
        found = super().query()
        if self._vector is not None:
            found.ah_attr = vector_of(*self._vector)
        return found

    def advance(
        self, state: QPState, path: WirePath | None = None, vector: tuple[PathRecord, int, int] | None = None
    ) -> None:
        """To INIT, or to RTS through the states before it, with the values of :attr:`attr`.

        ``path`` and ``vector``, for RTS, are those of the address vector: the latter is the path record, the index of
        the source GID, and the number of the port. This is how an id takes its queue pair along; it has checked the
        values. EINVAL if the state is not ahead.
        """
        with self._mux.runtime.lock:
            if self._closed:
                raise cm_error(errno.EBADF, "the queue pair is closed", "modify_qp")
            if self.state is not _RESET and (self.state is not _INIT or state is _INIT):
                raise cm_error(errno.EINVAL, f"no way from {self.state.name} to {state.name}", "modify_qp")
            attr = self._attr or self.attr
            if path is not None and vector is not None:
                self._vector = vector
                self._use_route(self._mux.route(path, vector[0].traffic_class))
            if log.enabled:
                self._log_change(self.state, "its id", state)
            self.state = state
            if state is _RTS:  # in INIT it still accepts nobody
                self._tell_core_wire()
            if self._engine is not None and state is _RTS:
                self._engine.ready_to_receive(rtr_attributes(attr))
                self._engine.ready_to_send(rts_attributes(attr))

    def hold_sends(self) -> None:
        """In RTS: send no request until the peer has sent a packet, or :meth:`release_sends`.

        On the passive side of a connection. Until then, the address of the peer is only what a REQ claims.
        """
        self._established = None
        if self._engine is not None:
            self._engine.pause()

    def release_sends(self) -> None:
        """Undo :meth:`hold_sends`: the peer has answered."""
        if self._established is None:
            self._established = False
            if self._engine is not None and self.state is _RTS:
                self._engine.resume()
                self._mux.send_now(self, self._mux.runtime.clock())

    def _enter(self, state: QPState, before: QPState, attr: QPAttr) -> None:
        """Take the engine from one state to another."""
        if state is _ERR:
            self._fail("modify_qp")
        elif state is _SQD:
            engine = self._start_engine()
            engine.pause()
            self._drain_reported = False
            self._after(engine)
        elif self._engine is None:
            return
        elif state is _RTR:
            self._engine.ready_to_receive(rtr_attributes(attr))
        elif state is _RTS and before is _RTR:
            self._engine.ready_to_send(rts_attributes(attr))
        elif state is _RTS and self._established is not None:
            self._engine.resume()
            self._mux.send_now(self, self._mux.runtime.clock())

    def _start_engine(self) -> QPEngine:
        """Return the engine. It is made when first needed, so that an idle queue pair costs little."""
        engine = self._engine
        if engine is None:
            # That of an engine that was aborted may have windows.
            memory = self._memory = self._memory or RemoteMemory(self._table, self._pd)
            engine = self._engine = self._make_engine()(self.qp_num, memory, self._srq, self._counters)
            if self._route is not None:
                self._set_engine_route(engine, self._route)
            state = self.state
            if state is _ERR:
                engine.flush()
            elif state >= _RTR:
                engine.ready_to_receive(rtr_attributes(self.attr))
                if state is not _RTR:
                    engine.ready_to_send(rts_attributes(self.attr))
                if state is _SQD or self._established is None:
                    engine.pause()
        return engine

    def _make_engine(self) -> EngineFactory:
        """What makes its engine."""
        return self._mux.make_engine

    def _route_to(self, attr: QPAttr) -> WireRoute:
        vector = attr.ah_attr
        if not vector.is_global:
            raise cm_error(errno.EINVAL, "an address vector needs a destination GID here", "modify_qp")
        local, ifindex = self._find_source(vector.gr.sgid_index)
        remote = vector.gr.dgid.ip
        if len(local) != len(remote):
            raise cm_error(errno.EINVAL, "one GID is of IPv4, the other of IPv6", "modify_qp", str(vector.gr.dgid))
        scope_id = ifindex if is_link_local(remote) else 0
        return self._mux.route(WirePath(local, remote, scope_id), vector.gr.traffic_class)

    def _use_route(self, route: WireRoute) -> None:
        self._route = route
        if self.core is not None:
            self._leave_core()
        if self._engine is not None:
            self._set_engine_route(self._engine, route)

    @staticmethod
    def _set_engine_route(engine: QPEngine, route: WireRoute) -> None:
        engine.set_route(route.path.local, route.path.remote, route.source_port)

    @property
    def _is_draining(self) -> bool:
        return self._engine is not None and not self._engine.drained

    # -- work requests --------------------------------------------------------------------------------

    def post_send(self, wrs: list[SendWR]) -> None:
        mux = self._mux
        with mux.runtime.lock:
            mux.runtime.check_fork("post_send", "queue pair")
            if self.core is not None:
                self._settle()
            if self._sends + len(wrs) > self._cap.max_send_wr:
                mux.progress()  # an ACK that has arrived may make room
                self._settle()
            if self.state < _RTS:  # another thread has moved it since QP.post_send() has looked
                raise refused(wrs[0], errno.EINVAL, f"a queue pair in {self.state.name} does not send", "post_send")
            engine = self._start_engine()
            try:
                for wr in wrs:
                    work = self._work(wr)
                    try:
                        engine.post_send(work)
                    except BaseException as error:
                        raise self._post_raised(wr, error, "post_send") from error
                    self._sends += 1
            finally:
                if self.state is _ERR:
                    self._after(engine)
                else:
                    mux.send_now(self, mux.runtime.clock())

    def _work(self, wr: SendWR) -> SendWork:
        """Make the engine's request from the user's."""
        if self._sends >= self._cap.max_send_wr:
            raise refused(wr, errno.ENOMEM, f"the send queue holds {self._cap.max_send_wr} requests", "post_send")
        return send_work(wr, self._table, self._pd, self._signal_all)

    # -- completions ----------------------------------------------------------------------------------

    def _after(self, engine: QPEngine) -> None:
        """After a call of the engine: pass its completions on, and see whether it failed or is drained."""
        if engine.completed:
            self._complete(engine.completed)
        if self.state is _ERR:
            return
        if engine.failed:
            self._fail(engine.failure)
            self._report(EventType.QP_FATAL)
        elif self.state is _SQD and not self._drain_reported and engine.drained:
            self._drain_reported = True
            if self._attr is not None and self._attr.en_sqd_async_notify:
                self._report(EventType.SQ_DRAINED)

    # -- packets --------------------------------------------------------------------------------------

    def received(self, data: memoryview, segment: int, source: SocketAddress, destination: bytes, now: float) -> None:
        """Process a packet or train that has this queue pair's number, if it comes from the peer."""
        if (source != self._source or destination != self._destination) and not self._accept_from(source, destination):
            return
        engine = self._engine
        assert engine is not None
        accepted = engine.received(data, segment, now)
        self.core_reached_limit()
        if not accepted:
            self._mux.dropped["packet"] += 1
        elif not self._established:
            self.release_sends()
            self._established = True
            if self.on_comm_est is not None:
                self.on_comm_est()
            if self.state is _RTR:  # InfiniBand Architecture 11.6.3.1
                self._report(EventType.COMM_EST)
        if engine.completed:
            self._complete(engine.completed)
        if engine.failed or self.state is not _RTS:
            self._after(engine)
        # A packet that was not accepted may have to be answered as well.
        to_send = engine.to_send
        if to_send == NOTHING:
            deadline = engine.deadline
            if deadline is not None:
                self._schedule(deadline)
        elif to_send == ACK_ONLY:
            self._mux.defer_ack(self)
        else:
            self._mux.ready(self)
        if self.core is None and self._established:
            self._join_core()

    def _join_core(self) -> None:
        """Let the compiled core have the connection, from its sockets to the completion queues, if it may."""
        core_wire, engine, route, wire = self._mux.core_wire, self._engine, self._route, self._mux.wire
        if self.core is not None or core_wire is None or self.state is not _RTS or not core_wire.is_enabled:
            return
        assert compiled is not None
        if engine is None or type(engine) is not compiled.ConnectedEngine:
            return
        assert isinstance(wire, UdpWire)
        assert isinstance(route, UdpRoute)
        fd = wire.fileno_for(route)
        if fd < 0:
            return
        path = route.path
        train = 0 if route.no_trains else self._mux.train
        self.core = compiled.Connection(
            *(core_wire, engine, self, *self._core_queues),
            (path.remote, path.scope_id, path.local),
            (fd, wire.port, path.scope_id, [*route.control], train),
            self._core_limits(),
        )
        if engine.deadline is not None:
            self._schedule(engine.deadline)
        self._serve(core_wire)

    @property
    def _core_queues(self) -> tuple[CompletionQueue | None, CompletionQueue | None]:
        """Where the compiled core adds its completions."""
        return cast("CompletionQueue", self._send_cq.queue), cast("CompletionQueue", self._recv_cq.queue)

    def core_failed(self) -> None:
        if self._engine is not None:
            self._after(self._engine)

    def _tell_core_wire(self) -> None:
        self._source = None
        core_wire, route = self._mux.core_wire, self._route
        if core_wire is None or self._closed or not self._mux.opened:
            return
        if route is None or not _RTR <= self.state <= _SQE:
            core_wire.accept(self.qp_num, ACCEPTS_NONE)
        else:
            core_wire.accept(self.qp_num, ACCEPTS_PEER, route.path.remote, route.path.local, route.path.scope_id)

    def _accept_from(self, source: SocketAddress, destination: bytes) -> bool:
        """Whether packets between these addresses may be the peer's; if so, the engine expects them."""
        route = self._route
        if route is None or not _RTR <= self.state <= _SQE:
            self._mux.dropped["state"] += 1
            return False
        path = route.path
        is_other_link = path.scope_id and path.scope_id != source[-1]
        if source[0] != route.remote_host or destination != path.local or is_other_link:
            self._mux.dropped["address"] += 1
            return False
        self._source, self._destination = source, destination
        self._start_engine().set_peer_port(source[1])
        return True

    def transmit(self, now: float, limit: int) -> int:
        engine, route = self._engine, self._route
        if engine is None or route is None:
            return 0
        mux, core = self._mux, self.core
        # Once the queue pair has joined the core's wire, the core's thread sends too, and must not overtake this call.
        transmitted = core.transmit(now, limit) if core is not None else None
        sent = transmitted or 0
        if transmitted is None:
            send = mux.wire.send
            for pieces, segment in engine.datagrams(now, limit, 0 if route.no_trains else mux.train):
                send(route, pieces, segment)
                sent += -(-sum(map(len, pieces)) // segment) if segment else 1
        if engine.completed or (engine.failed and self.state is not _ERR):
            self._after(engine)
        deadline = engine.deadline
        if deadline is not None:
            self._schedule(deadline)
        return sent

    def _schedule(self, deadline: float) -> None:
        self._mux.schedule(self, deadline)
        if self.core is not None:
            self.core.arm_timer()

    def ask_peer(self) -> Hashable:
        route = self._route
        if route is None or not _RTR <= self.state <= _SQE:
            return None
        engine = self._start_engine()
        activity = engine.peer_activity
        if self.state is not _RTR:
            self._mux.wire.send(route, engine.probe())
        return activity

    def sent_again(self) -> int:
        return self._engine.sent_again if self._engine is not None else 0

    @property
    def deadline(self) -> float | None:
        if self.core is not None:
            return self.core.take_deadline()
        return self._engine.deadline if self._engine is not None else None

    def timer(self, now: float) -> None:
        if self._engine is not None:
            self._engine.timer(now)
            self._after(self._engine)
