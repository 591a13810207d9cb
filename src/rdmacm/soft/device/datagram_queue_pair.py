"""Datagram (UD) queue pairs of the software device.

The wire protocol is an engine's (:class:`rdmacm.proto.roce.ud.UdEngine`). A request completes when its packet is given
to the system; whether that is carried, nobody knows. What arrives is accepted from every address, if it has the Q_Key
and was sent to an address of the queue pair's own device.
"""

from __future__ import annotations

import errno
import weakref
from ipaddress import ip_address
from typing import TYPE_CHECKING

from rdmacm.address import is_link_local, is_multicast
from rdmacm.enums import QPState
from rdmacm.errors import RdmaError, cm_error
from rdmacm.proto.constants import ACCEPTS_ANY, ACCEPTS_NONE, PSN_MASK
from rdmacm.proto.core_choice import compiled
from rdmacm.proto.plainints import QP_QKEY, QP_STATE
from rdmacm.proto.roce.buffers import LocalProtectionError, total
from rdmacm.proto.roce.icrc import Icrc, icrc_between
from rdmacm.proto.roce.ud import UdEngine, UdFlow, UdSend, flow_between
from rdmacm.provider import log
from rdmacm.soft.device.memory import RemoteMemory
from rdmacm.soft.device.requests import refused, send_work
from rdmacm.soft.device.work_queues import DeviceParts, WorkQueues
from rdmacm.soft.wire.base import IpFields, WirePath, WireRoute, group_of
from rdmacm.soft.wire.udp import UdpWire
from rdmacm.soft.wire.udp_route import UdpRoute
from rdmacm.verbs.ah import AH
from rdmacm.verbs.enums import EventType
from rdmacm.verbs.wr import AddressHandle

if TYPE_CHECKING:
    from rdmacm.address import Gid
    from rdmacm.proto._core import Datagrams, Route
    from rdmacm.proto._core import Wire as CoreWire
    from rdmacm.soft.wire.base import SocketAddress
    from rdmacm.verbs.attr import QPAttr
    from rdmacm.verbs.enums import QPAttrMask
    from rdmacm.verbs.wr import RecvWR, SendWR

    #: What the engine sends a packet with: with the compiled core's wire a route of the core.
    Way = WireRoute | Route

_RESET, _INIT, _RTR, _RTS, _SQD, _SQE, _ERR = QPState
#: Of a packet whose header the wire does not know.
_NO_IP_FIELDS = IpFields()
#: Senders whose flows are kept.
_MAX_FLOWS = 256


def _scope_of(source: SocketAddress, destination: bytes) -> int:
    """The interface index of a sender to a link-local address; else 0."""
    return source[3] if len(source) == 4 and is_link_local(destination) else 0


class SoftUdQP(WorkQueues["UdEngine[Way]"]):
    """A datagram queue pair; implements :class:`rdmacm.verbs.backend.QPBackend`."""

    core: Datagrams | None
    __slots__ = ("_core_addresses", "_find_mtu", "_flows", "_groups", "_ifindex", "_is_own", "_routes")

    def _set_up(self, parts: DeviceParts) -> None:
        #: See :class:`DeviceParts`.
        self._find_mtu = parts.find_mtu
        self._is_own = parts.is_own
        self._core_addresses = parts.core_addresses
        #: The index of the device's interface, where its multicast groups are.
        self._ifindex = parts.ifindex
        #: The groups that it is attached to.
        self._groups: set[Gid] = set()
        #: The route and the ICRC to the destination of each address handle that was used.
        self._routes: weakref.WeakKeyDictionary[AddressHandle, tuple[Way, Icrc]] = weakref.WeakKeyDictionary()
        #: The flows by socket address of the sender and local address.
        self._flows: dict[tuple[SocketAddress, bytes], UdFlow] = {}
        self._mux.wire.report_ip_fields()
        self._mux.attach(self, ACCEPTS_NONE)

    # -- states and attributes ------------------------------------------------------------------------

    def modify(self, attr: QPAttr, mask: QPAttrMask) -> None:
        with self._mux.runtime.lock:
            super().modify(attr, mask)
            self._join_core()

    def _take_attributes(self, attr: QPAttr, bits: int) -> None:
        super()._take_attributes(attr, bits)
        engine = self._engine
        if engine is not None:
            if bits & QP_QKEY:
                engine.qkey = self.attr.qkey
            if engine.has_pending and not (bits & QP_STATE and attr.qp_state != self.state):  # it waited in the core
                self._mux.send_now(self, self._mux.runtime.clock())

    def advance(self, state: QPState) -> None:
        """From RESET to RTS through the states before it, or to one of these, with the values of :attr:`attr`.

        This is how an id takes its queue pair along; it has checked the values. EINVAL if the state is not ahead.
        """
        with self._mux.runtime.lock:
            if self._closed:
                raise cm_error(errno.EBADF, "the queue pair is closed", "modify_qp")
            if not self.state < state <= _RTS:
                raise cm_error(errno.EINVAL, f"no way from {self.state.name} to {state.name}", "modify_qp")
            if log.enabled:
                self._log_change(self.state, "its id", state)
            self._leave_core()
            self.state: QPState = state
            self._tell_core_wire()
            self._enter(state, _RESET, self.attr)
            self._join_core()

    def _enter(self, state: QPState, _before: QPState, attr: QPAttr) -> None:
        """Take the engine to a state."""
        engine = self._engine
        if state is _ERR:
            self._fail("modify_qp")
        elif state is _SQD:
            if engine is not None:
                engine.pause()
            if attr.en_sqd_async_notify:  # no request is in progress for longer than a call
                self._report(EventType.SQ_DRAINED)
        elif state is _RTS and engine is not None:
            engine.qkey = attr.qkey
            if not engine.is_ready:
                engine.ready_to_send(attr.sq_psn)
            engine.resume()
            if engine.has_pending:
                self._mux.send_now(self, self._mux.runtime.clock())

    def _start_engine(self) -> UdEngine[Way]:
        engine = self._engine
        if engine is None:
            memory = RemoteMemory(self._table, self._pd)
            engine = self._engine = self._mux.make_ud_engine(self.qp_num, memory, self._srq, self._counters)
            attr, state = self.attr, self.state
            engine.qkey = attr.qkey
            engine.max_payload = self._find_mtu()
            if state is _ERR:
                engine.flush()
            elif state >= _RTS:
                engine.ready_to_send(attr.sq_psn)
                if state is _SQD:
                    engine.pause()
        return engine

    # -- work requests --------------------------------------------------------------------------------

    def post_recv(self, wrs: list[RecvWR]) -> None:
        with self._mux.runtime.lock:
            super().post_recv(wrs)
            self._join_core()

    def post_send(self, wrs: list[SendWR]) -> None:
        mux = self._mux
        with mux.runtime.lock:
            mux.runtime.check_fork("post_send", "queue pair")
            if self.state < _RTS:  # another thread has moved it since QP.post_send() has looked
                raise refused(wrs[0], errno.EINVAL, f"a queue pair in {self.state.name} does not send", "post_send")
            if self.core is not None:
                self._settle()
            if self._sends + len(wrs) > self._cap.max_send_wr:
                mux.progress()  # what waits for its turn to be sent makes room
                self._settle()
            engine = self._engine or self._start_engine()
            try:
                for wr in wrs:
                    send = self._datagram(wr, engine)
                    try:
                        engine.post_send(send)
                    except BaseException as error:
                        raise self._post_raised(wr, error, "post_send") from error
                    self._sends += 1
            finally:
                if engine.completed:
                    self._complete(engine.completed)
                if engine.has_pending:
                    mux.send_now(self, mux.runtime.clock())
                self._join_core()

    def _check_send(self, wr: SendWR) -> None:
        self._datagram(wr, self._engine or self._start_engine())

    def _datagram(self, wr: SendWR, engine: UdEngine[Way]) -> UdSend[Way]:
        """Make the engine's request; the queue pair has the MTU of its port even where its id has moved it to INIT."""
        if self._sends >= self._cap.max_send_wr:
            raise refused(wr, errno.ENOMEM, f"the send queue holds {self._cap.max_send_wr} requests", "post_send")
        work = send_work(wr, self._table, self._pd, self._signal_all)
        try:
            length = total(work.segments)
        except LocalProtectionError:
            length = 0
        if length > engine.max_payload:
            why = f"{length} bytes, and the MTU of the port is {engine.max_payload}"
            raise refused(wr, errno.EINVAL, why, "post_send")
        assert wr.ah is not None
        route, icrc = self._routes.get(wr.ah) or self._new_route(wr, wr.ah)
        return UdSend(work, route, icrc, wr.remote_qpn, wr.remote_qkey)

    def _new_route(self, wr: SendWR, ah: AddressHandle) -> tuple[Way, Icrc]:
        gr = ah.attr.gr
        try:
            local, ifindex = self._find_source(gr.sgid_index)
        except RdmaError as error:
            raise refused(wr, error.errno or errno.EINVAL, str(error.strerror), "post_send") from None
        remote = gr.dgid.ip
        if len(local) != len(remote):
            raise refused(wr, errno.EINVAL, f"one GID is of IPv4, the other of IPv6: {gr.dgid}", "post_send")
        path = WirePath(local, remote, ifindex if is_link_local(remote) or is_multicast(remote) else 0)
        route = self._mux.route(path, gr.traffic_class, gr.hop_limit if gr.hop_limit > 1 else 0)
        icrc, core_wire = icrc_between(local, remote, route.source_port), self._mux.core_wire
        way: Way = route
        if core_wire is not None:
            assert isinstance(route, UdpRoute)
            if route.core is None:
                route.core = self._core_route(core_wire, route, icrc)
            way = route.core
            if isinstance(ah, AH):
                ah.core_route = way
        found = self._routes[ah] = way, icrc
        return found

    def _core_route(self, core_wire: CoreWire, route: UdpRoute, icrc: Icrc) -> Route:
        """A route as the compiled core has it."""
        assert compiled is not None
        path, train = route.path, 0 if route.no_trains else self._mux.train
        made: Route = compiled.Route(
            *(core_wire, route, icrc.base, path.remote, route.address[1], path.scope_id, [*route.control], train)
        )
        return made

    def transmit(self, _now: float, limit: int) -> int:
        engine, core = self._engine, self.core
        if engine is None:
            return 0
        # Once the queue pair has joined the core's wire, the core's thread sends too, and must not overtake this call.
        sent = core.transmit(limit) if core is not None else None
        if sent is None:
            mux = self._mux
            send, before, is_core_route = mux.wire.send, engine.psn, mux.core_wire is not None
            for way, pieces, segment in engine.datagrams(limit, mux.train):
                send(way.owner if is_core_route else way, pieces, segment)  # type: ignore[union-attr, arg-type]
            sent = engine.psn - before & PSN_MASK
        self._after(engine)
        return sent

    def _after(self, engine: UdEngine[Way]) -> None:
        """After a call of the engine: pass its completions on, and see whether it has failed."""
        if engine.completed:
            self._complete(engine.completed)
        if engine.failed:
            if self.state is not _ERR:
                self._fail("the memory of a receive is not registered")
                self._report(EventType.QP_FATAL)
        elif engine.send_failed and self.state in (_RTS, _SQD):
            if log.enabled:
                self._log_change(self.state, "the memory of a request is not registered", _SQE)
            self.state = _SQE

    def core_failed(self) -> None:
        if self._engine is not None:
            self._after(self._engine)

    # -- receiving ------------------------------------------------------------------------------------

    def received(self, data: memoryview, segment: int, source: SocketAddress, destination: bytes, _now: float) -> None:
        """Process a packet or train that has this queue pair's number."""
        flow = self._flows.get((source, destination)) or self._new_flow(source, destination)
        if flow is None:
            self._mux.dropped["address"] += 1
        else:
            self._take(data, segment, flow)

    def received_from_group(self, data: memoryview, source: SocketAddress, key: bytes) -> None:
        """Process a packet of a multicast group that it is attached to (:func:`rdmacm.soft.wire.base.group_key`)."""
        flow = self._flows.get((source, key)) or self._add_flow(source, key, group_of(key))
        self._take(data, 0, flow)

    def _take(self, data: memoryview, segment: int, flow: UdFlow) -> None:
        if not _RTR <= self.state <= _SQE:
            self._mux.dropped["state"] += 1
            return
        engine = self._engine or self._start_engine()
        fields: IpFields = getattr(data.obj, "ip_fields", _NO_IP_FIELDS)
        if not engine.received(data, segment, flow, fields):
            self._mux.dropped["packet"] += 1
        if self._srq is not None:
            self._srq.see_limit()  # the core may have taken from it
        self._after(engine)
        self._join_core()

    def _new_flow(self, source: SocketAddress, destination: bytes) -> UdFlow | None:
        """The flow of a sender; None if the destination is not an address of this device."""
        is_own = self._is_own(destination, _scope_of(source, destination))
        return self._add_flow(source, destination, destination) if is_own else None

    def addresses_changed(self) -> None:
        """A device has other addresses than before."""
        self._flows.clear()

    def _add_flow(self, source: SocketAddress, key: bytes, destination: bytes) -> UdFlow:
        if len(self._flows) >= _MAX_FLOWS:
            self._flows.clear()
        remote = ip_address(source[0].partition("%")[0]).packed
        flow = self._flows[source, key] = flow_between(remote, destination, source[1])
        return flow

    # -- the compiled core ----------------------------------------------------------------------------

    def _tell_core_wire(self) -> None:
        if self._mux.core_wire is not None and self._mux.opened and not self._closed:
            self._mux.core_wire.accept(self.qp_num, ACCEPTS_ANY if _RTR <= self.state <= _SQE else ACCEPTS_NONE)

    def _join_core(self) -> None:
        """Let the compiled core take the packets and the requests of an engine of its own, if it can."""
        engine, core_wire, wire = self._engine, self._mux.core_wire, self._mux.wire
        if self.core is not None or core_wire is None or engine is None or not _RTR <= self.state <= _SQE:
            return
        assert compiled is not None
        if self._closed or not (core_wire.is_enabled and self._mux.opened) or type(engine) is not compiled.UdEngine:
            return
        assert isinstance(wire, UdpWire)
        self.core = compiled.Datagrams(
            *(core_wire, engine, self, self._send_cq.queue, self._recv_cq.queue, self._core_addresses),
            *(wire.own_filenos(), self._core_limits()),
        )
        self._serve(core_wire)

    # -- multicast ------------------------------------------------------------------------------------

    def attach_mcast(self, gid: Gid, _lid: int) -> None:
        with self._mux.runtime.lock:
            if self._closed:
                raise cm_error(errno.EBADF, "the queue pair is closed", "attach_mcast")
            if gid not in self._groups:
                self._mux.groups.attach(self, gid.ip, self._ifindex)
                self._groups.add(gid)

    def detach_mcast(self, gid: Gid, _lid: int) -> None:
        with self._mux.runtime.lock:
            if gid not in self._groups:
                raise cm_error(errno.EINVAL, "the queue pair is not attached to the group", "detach_mcast", str(gid))
            self._groups.discard(gid)
            self._mux.groups.detach(self, gid.ip, self._ifindex)

    def destroy(self) -> None:
        with self._mux.runtime.lock:
            for gid in list(self._groups):
                self.detach_mcast(gid, 0)
            super().destroy()
