"""One rdma_cm_id of the kernel.

:class:`KernelId` implements :class:`rdmacm.provider.IdBackend`. Each call is one command, or a few, on the file of the
id's event queue. The kernel decides what its state allows; the table of :mod:`rdmacm.provider.cmstate` explains a
refusal, and tells the application the state. :mod:`rdmacm.kernel.arrivals` has what is done about events.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import struct
import weakref
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter_ns, sleep
from typing import TYPE_CHECKING

from rdmacm.address import AF_IB, Address, InetAddr, SockAddrIB
from rdmacm.capabilities import KERNEL, Feature, absent
from rdmacm.constants import IbOption, IdOption, OptionLevel
from rdmacm.errors import RdmaError, cm_error
from rdmacm.explanation import Explanation
from rdmacm.kernel import abi
from rdmacm.kernel.abi import Command, Query, Response
from rdmacm.kernel.event_queue import KernelQueue
from rdmacm.kernel.host import KernelHost
from rdmacm.kernel.id_state import IdState
from rdmacm.kernel.prediction import Choice, explain_choice, explain_failure, predict
from rdmacm.kernel.reasons import address_of_device, inactive_port, loopback_listener, no_group, not_local
from rdmacm.proto.cm.private_data import user_capacity
from rdmacm.proto.plainints import QP_MAX_DEST_RD_ATOMIC, QP_MAX_QP_RD_ATOMIC
from rdmacm.proto.sa import PATH_FLAGS, PathData
from rdmacm.proto.sa.restriction import why_unusable
from rdmacm.proto.sa.subnet import service_name_bytes, service_number
from rdmacm.provider import EventQueue, IdOptions, Owner, QueuedEvent
from rdmacm.provider.cmstate import State, Trigger
from rdmacm.provider.connparam import ConnParam, Ece
from rdmacm.provider.multicast import GroupJoin
from rdmacm.resolution.path import shown_path
from rdmacm.verbs.attr import QPAttr
from rdmacm.verbs.enums import EventType, QPAttrMask, QPState, QPType

if TYPE_CHECKING:
    from rdmacm.errors import Failure
    from rdmacm.proto.cm.codes import RejectReason
    from rdmacm.proto.sa.subnet import ServiceRecord
    from rdmacm.provider import AlternatePathBackend, ServiceBackend, ServiceDone
    from rdmacm.resolution.lookup import Lookup
    from rdmacm.verbs.backend import AsyncEvents
    from rdmacm.verbs.qp import QP

#: IBV_EVENT_COMM_EST, the only event that rdma_notify(3) takes here.
_EVENT_COMM_EST = 4
#: The sizes and greatest values of options.
_OPTIONS = {
    IdOption.TOS: ("=B", 0xFF),
    IdOption.REUSEADDR: ("=i", 0x7FFFFFFF),
    IdOption.AFONLY: ("=i", 0x7FFFFFFF),
    IdOption.ACK_TIMEOUT: ("=B", 0xFF),
}
#: The largest backlog, which is the kernel's by default (net.rdma_ucm.max_backlog).
_MOST_HELD = 1024
_TO_RTS = (QPState.RTR, QPState.RTS)
_TO_ERROR = QPAttr(qp_state=QPState.ERR)
#: How long the queue pair stays usable after the peer's DREQ if `disconnect` follows at once. The last ACK came before,
#: but rdma_rxe handles the two packets in different threads: a send that the peer has received would be flushed.
_LATE_ACK_SECONDS = 0.001


def create_id(host: KernelHost, queue: KernelQueue, owner: Owner, port_space: int, qp_type: int) -> KernelId:
    """A new id."""
    made = KernelId(host, queue, owner, port_space, qp_type, 0)
    try:
        data = queue.ucma.ask(
            Command.CREATE_ID,
            lambda address: abi.create_id(address, made.cookie, port_space, qp_type),
            Response.CREATE_ID,
        )
    except OSError as error:
        raise cm_error(error.errno or errno.EIO, error.strerror or "", "create_id") from None
    made.number = abi.unpack_number(data)
    host.ids[made.cookie] = made
    queue.ids[made] = None
    return made


class KernelId(IdState):
    """See the module."""

    origin: str

    @property
    def is_iwarp(self) -> bool:
        """Whether the id is bound to a device of the iWARP transport."""
        return self.verbs is not None and self.host.is_iwarp(self.verbs.name)

    # -- addresses ------------------------------------------------------------------------------------

    def bind_addr(self, address: Address) -> None:
        with self.runtime.lock:
            self.begin("bind_addr")
            self.started: int = perf_counter_ns()
            try:
                self.tell(Command.BIND, abi.bind(self.number, address), "bind_addr", Trigger.BIND_ADDR)
            except RdmaError as error:
                error.address = str(address)
                self._name_absence(address, error)
                self.step_done("bind", error.strerror)
                error.explanation = Explanation(
                    node=address.host if isinstance(address, InetAddr) else str(address.addr),
                    service=str(address.port),
                    provider=self.host.provider_name,
                    steps=self.steps,
                    error="bind",
                    errno=error.errno or 0,
                    errno_name=error.code_name,
                    message=str(error.strerror),
                    hint=error.hint,
                )
                raise
            self.enter(State.ADDR_BOUND)
            self.bound_at: Address | None = address
            self.refresh("bind_addr")
            self.step_done("bind", self.local_addr)

    def _name_absence(self, address: Address, error: RdmaError) -> None:
        """Say so where the address is no address of this host: the kernel has the same errno for other reasons."""
        if error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL) and isinstance(address, InetAddr):
            is_local = any(known.ip == address.ip for known in self.host.network.addresses())
            if not (is_local or address.is_any or address.is_loopback):
                error.strerror, error.hint = not_local(self.host, address)

    def resolve_addr(self, source: Address | None, destination: Address, timeout_ms: int) -> None:
        with self.runtime.lock:
            self.begin("resolve_addr")
            if timeout_ms < 0:
                raise cm_error(errno.EINVAL, f"timeout {timeout_ms} ms is negative", "resolve_addr")
            if self.state is not State.IDLE:
                self._check_bound(source, destination)
            elif source is not None:
                self.bound_at, self.origin = source, "given"
            self.started = perf_counter_ns()
            payload = abi.resolve_addr(self.number, source, destination, timeout_ms)
            try:
                self.tell(Command.RESOLVE_ADDR, payload, "resolve_addr", Trigger.RESOLVE_ADDR)
            except RdmaError as error:
                self._not_resolved(destination, error)
                raise
            self.peer_addr: Address | None = destination
            self.enter(State.ADDR_QUERY)

    def _check_bound(self, source: Address | None, destination: Address) -> None:
        """Refuse another source than the one the id is bound to, which the kernel would ignore."""
        local = self.local_addr
        if source is None or local is None or _family(local) != _family(destination):
            return
        if _host(source) != _host(local) or source.port not in (0, local.port):
            text = f"source {source} was given, but the id is bound to {local}"
            raise cm_error(errno.EINVAL, text, "resolve_addr", str(destination), "no source, or a new id")

    def _not_resolved(self, destination: Address, error: RdmaError) -> None:
        """Explain a refusal. The kernel has bound an id that was not, where only the destination is at fault."""
        error.address = str(destination)
        if self.state is State.IDLE:
            with contextlib.suppress(RdmaError):
                self.refresh("resolve_addr")
            if self.local_addr is not None and self.local_addr.port:
                self.enter(State.ADDR_BOUND)
        lookup, expected = self.expectation(destination)
        if expected is not None and expected.errno == error.errno:
            error.strerror, error.hint = expected.message, expected.hint
        elif isinstance(destination, InetAddr) and destination.is_loopback and error.errno == errno.EINVAL:
            error.strerror = (
                f"the kernel does not resolve {destination.host}: no active port is one of RoCE or InfiniBand"
            )
            error.hint = address_of_device(self.host, destination) or error.hint
        self.step_done("address", error.strerror)
        code, text = error.errno or 0, str(error.strerror)
        explanation = explain_failure(lookup, expected, code, "resolve_addr", text, self.steps)
        error.explanation = explanation.replace(hint=error.hint)

    def resolve_route(self, timeout_ms: int, alternate: bool = False) -> None:
        with self.runtime.lock:
            self.begin("resolve_route")
            if timeout_ms <= 0:
                raise cm_error(errno.EINVAL, f"timeout {timeout_ms} ms is not positive", "resolve_route")
            if alternate:
                raise absent(Feature.ALTERNATE_PATHS, "resolve_route", str(self.peer_addr or "-"), KERNEL)
            self.started = perf_counter_ns()
            payload = abi.pair(self.number, timeout_ms)
            try:
                self.tell(Command.RESOLVE_ROUTE, payload, "resolve_route", Trigger.RESOLVE_ROUTE)
            except RdmaError as error:
                self._no_route(error)
                raise
            self.enter(State.ROUTE_QUERY)

    def _no_route(self, error: RdmaError) -> None:
        """Explain a refusal of the kernel to make a path."""
        known = self.explain()
        destination = self.peer_addr
        if isinstance(destination, InetAddr) and destination.is_loopback and error.errno == errno.ENODEV:
            error.strerror = f"the kernel makes no path to {destination.host}"
            other = address_of_device(self.host, destination)
            error.hint = "the provider soft" if other is None else f"{other}, or the provider soft at both ends"
        error.explanation = known.replace(
            candidates=tuple(replace(c, chosen=False) for c in known.candidates),
            error="resolve_route",
            errno=error.errno or 0,
            errno_name=error.code_name,
            message=str(error.strerror),
            hint=error.hint,
        )

    def explain(self) -> Explanation:
        with self.runtime.lock:
            destination = self.peer_addr
            if not isinstance(destination, InetAddr) or self.is_passive or self.verbs is None:
                path = shown_path(self.paths[0]) if self.paths else None
                node = None if destination is None else str(destination)
                return Explanation(node, None, self.host.provider_name, steps=self.steps, path=path)
            lookup, expected = self.expectation(destination)
            if lookup is None:
                return Explanation(str(destination), None, self.host.provider_name, steps=self.steps)
            choice = Choice(self.verbs.name, self.port_num, self.sgid)
            return explain_choice(lookup, expected, choice, self.steps, self.paths)

    def expectation(self, destination: Address) -> tuple[Lookup | None, Failure | None]:
        """What the rules find for a destination; None where they have no answer."""
        source = self.bound_at if isinstance(self.bound_at, InetAddr) else None
        if not isinstance(destination, InetAddr) or (source is not None and source.family != destination.family):
            return None, None
        return predict(self.host, destination, source, self.origin, self.options.tos or 0)

    # -- services -------------------------------------------------------------------------------------

    def resolve_service(self, service: str) -> None:
        with self.runtime.lock:
            self.begin("resolve_addrinfo")
            number = service_number(service)
            name = b"" if number is not None else service_name_bytes(service)[:63]
            payload = abi.resolve_ib_service(self.number, number, name)
            self.started = perf_counter_ns()
            try:
                self.tell(Command.RESOLVE_IB_SERVICE, payload, "resolve_addrinfo", Trigger.RESOLVE_IB_SERVICE)
            except RdmaError as error:
                raise self.no_services(error) from None
            self.enter(State.ADDRINFO_QUERY)

    def read_services(self) -> None:
        """Read the service records that the kernel has found."""
        answer = self.query(Query.IB_SERVICE, Response.SERVICE, "resolve_addrinfo")
        self.services: tuple[ServiceRecord, ...] = abi.unpack_services(answer)

    def register_service(self, name: bytes, lease: int, data: bytes, done: ServiceDone) -> ServiceBackend:
        raise absent(Feature.SERVICE_REGISTRATION, "register_service", who=KERNEL)

    def alternate_paths(self, call: str) -> AlternatePathBackend:
        raise absent(Feature.ALTERNATE_PATHS, call, str(self.peer_addr or "-"), KERNEL)

    # -- options --------------------------------------------------------------------------------------

    def set_option(self, level: int, name: int, value: int | bytes) -> None:
        with self.runtime.lock:
            self.begin("set_option")
            if level == OptionLevel.ID and name in _OPTIONS:
                option = IdOption(name)
                data = _encoded(option, value)
                self._pass_option(level, name, data, None)
                number = struct.unpack(_OPTIONS[option][0], data)[0]
                known = number if option in (IdOption.TOS, IdOption.ACK_TIMEOUT) else bool(number)
                self.options: IdOptions = replace(self.options, **{option.name.lower(): known})
            elif level == OptionLevel.IB and name == IbOption.PATH:
                if not isinstance(value, bytes | bytearray | memoryview):
                    raise cm_error(errno.EINVAL, "IB_PATH takes an array of ibv_path_data", "set_option")
                self._check_path(bytes(value))
                self.started = perf_counter_ns()
                self._pass_option(level, name, bytes(value), Trigger.SET_PATH)
                self.enter(State.ROUTE_RESOLVED)
            else:
                raise cm_error(errno.ENOSYS, f"no option {name} at level {level}", "set_option")

    def _check_path(self, value: bytes) -> None:
        """Refuse a path that the kernel takes, and that its peer would refuse."""
        size = PathData.SIZE
        records = [PathData.unpack(value[at : at + size]) for at in range(0, len(value) - size + 1, size)]
        path = next((data.path for data in records if data.flags == PATH_FLAGS), None)
        has_lids = self.verbs is not None and not self.is_ethernet
        reason = None if path is None else why_unusable(path, has_lids=has_lids)
        if reason is not None:
            raise cm_error(errno.EINVAL, reason, "set_option", hint="a path of getaddrinfo()")

    def _pass_option(self, level: int, name: int, data: bytes, trigger: Trigger | None) -> None:
        from array import array

        kept = array("B", data)  # at an address of its own, until the command has returned
        payload = abi.set_option(kept.buffer_info()[0], len(data), self.number, level, name)
        self.tell(Command.SET_OPTION, payload, "set_option", trigger)

    def migrate(self, queue: EventQueue) -> None:
        with self.runtime.lock:
            self.begin("migrate_id")
            assert isinstance(queue, KernelQueue)
            old, owner = self.queue, self.owner()
            try:
                queue.ucma.ask(
                    Command.MIGRATE_ID,
                    lambda address: abi.migrate_id(address, self.number, old.ucma.fd),
                    Response.COUNT,
                )
            except OSError as error:
                raise self.refused(error, "migrate_id", Trigger.MIGRATE) from None
            old.ids.pop(self, None)
            queue.ids[self] = None
            self.queue = queue
            queue.receive_moved([] if owner is None else old.take(owner))

    # -- listening ------------------------------------------------------------------------------------

    def listen(self, backlog: int) -> None:
        if isinstance(self.local_addr, InetAddr) and self.local_addr.is_loopback:
            with self.runtime.lock:
                warning = loopback_listener(self.host, self.local_addr)
            logging.getLogger("rdmacm").warning("%s", warning)
        with self.runtime.lock:
            self.begin("listen")
            payload = abi.pair(self.number, max(0, min(backlog, 0x7FFFFFFF)))
            self.tell(Command.LISTEN, payload, "listen", Trigger.LISTEN)
            self.most_held: int = backlog if 0 < backlog < _MOST_HELD else _MOST_HELD
            self.enter(State.LISTEN)
            self.refresh("listen")

    def allow_requests(self, count: int) -> None:
        with self.runtime.lock:
            self.requests_allowed: int | None = (self.requests_allowed or 0) + count
            while self.held_requests and self.requests_allowed > 0:
                event = self.held_requests.pop(0)
                assert isinstance(event, QueuedEvent)
                self.requests_allowed -= 1
                self.queue.post(event)

    def child(self, queue: KernelQueue, raw: abi.Event) -> KernelId | None:
        """The id that a request to this listener has made in the kernel; None where it is gone already."""
        made = KernelId(self.host, queue, None, self.port_space, self.qp_type, raw.id)
        made.state, made.is_passive, made.is_answered = State.CONNECT, True, False
        made.peer_ece = raw.ece
        made.options = self.options
        self.host.ids[made.cookie] = made
        queue.ids[made] = None
        try:
            made.refresh("get_cm_event")
            made.read_paths("get_cm_event")
        except RdmaError:
            made.destroy()
            return None
        return made

    def adopt(self, owner: Owner) -> None:
        self.owner: Callable[[], Owner | None] = weakref.ref(owner)

    # -- connecting -----------------------------------------------------------------------------------

    def _check_room(self, data: bytes, call: str) -> None:
        """Raise EINVAL for private data that do not fit, before the kernel rejects a request because of them."""
        if self.is_iwarp:
            room = abi.MAX_PRIVATE_DATA
        else:
            family = AF_IB if self.peer_addr is None else _family(self.peer_addr)
            room = user_capacity(self.rules.messages[call], family)
        if len(data) > room:
            text = f"{len(data)} bytes of private data, and there is room for {room}"
            raise cm_error(errno.EINVAL, text, call, str(self.peer_addr))

    def _named(self, param: ConnParam) -> ConnParam:
        """The parameters with the number of the attached queue pair."""
        qp = self.qp
        return param if qp is None or param.qp_num == qp.qp_num else replace(param, qp_num=qp.qp_num)

    def connect(self, param: ConnParam) -> None:
        with self.runtime.lock:
            self.begin("connect")
            self._check_room(param.private_data, "connect")
            self._check_port()
            payload = abi.connect(self.number, self._named(param), self.local_ece)
            self.tell(Command.CONNECT, payload, "connect", Trigger.CONNECT)
            self.enter(State.CONNECT)

    def _check_port(self) -> None:
        """Raise ENETDOWN for a port that sends nothing: the kernel would repeat the request for 10 s and more."""
        if self.verbs is None or self.is_iwarp:
            return
        reason = inactive_port(self.host, self.verbs.name, self.port_num)
        if reason is not None:
            raise cm_error(errno.ENETDOWN, reason.text, "connect", str(self.peer_addr), reason.hint)

    def confirm(self, call: str) -> None:
        """Confirm the peer's reply."""
        payload = abi.accept(self.number, self.cookie, None, self.local_ece)
        self.tell(Command.ACCEPT, payload, call, Trigger.ACCEPT)

    def establish(self) -> None:
        with self.runtime.lock:
            self.begin("establish")
            self.confirm("establish")
            self.is_established = True

    def accept(self, param: ConnParam) -> None:
        with self.runtime.lock:
            self.begin("accept")
            if self.is_answered and self.is_passive:
                raise self.refuse("accept")
            self._check_room(param.private_data, "accept")
            try:
                if self.qp is not None and self.rules.is_connected:
                    self.make_ready(self.qp, param)
            except RdmaError:
                self.fail_qp()
                with contextlib.suppress(OSError):
                    self.queue.ucma.tell(Command.REJECT, abi.reject(self.number, b"", 0))
                raise
            payload = abi.accept(self.number, self.cookie, self._named(param), self.local_ece)
            try:
                self.tell(Command.ACCEPT, payload, "accept", Trigger.ACCEPT)
            except RdmaError:
                self.fail_qp()
                raise
            self.is_answered = True

    def reject(self, private_data: bytes, reason: int | RejectReason) -> None:
        with self.runtime.lock:
            self.begin("reject")
            self._check_room(private_data, "reject")
            payload = abi.reject(self.number, private_data, int(reason))
            self.tell(Command.REJECT, payload, "reject", Trigger.REJECT)

    def notify(self, event: int) -> None:
        with self.runtime.lock:
            self.begin("notify")
            if event != _EVENT_COMM_EST and self.may(Trigger.NOTIFY):
                text = f"rdma_notify() takes IBV_EVENT_COMM_EST (4), not event {event}"
                raise cm_error(errno.EINVAL, text, "notify")
            self.tell(Command.NOTIFY, abi.pair(self.number, event), "notify", Trigger.NOTIFY)

    def disconnect(self) -> bool:
        with self.runtime.lock:
            self.begin("disconnect")
            if not self.is_established and self.rules.is_connected:
                self.queue.drain()  # it may be, by an event that is not fetched
            if self.is_disconnected:
                self._await_last_ack()
            self.fail_qp()
            self.tell(Command.DISCONNECT, abi.only_id(self.number), "disconnect", Trigger.DISCONNECT)
            return self.is_established and not self.is_disconnected and self.rules.is_connected

    def _await_last_ack(self) -> None:
        qp = self.qp
        if qp is None or qp.qp_type is QPType.UC or qp.backend.state is not QPState.RTS:
            return  # there are no ACKs, or nothing would use them
        if getattr(qp.backend, "has_sent", False):
            sleep(_LATE_ACK_SECONDS)

    def answer_disconnection(self) -> None:
        """Confirm the peer's end of the connection, for which it waits; nothing where this side has ended it."""
        if self.is_answered:
            with contextlib.suppress(OSError):
                self.queue.ucma.tell(Command.DISCONNECT, abi.only_id(self.number))

    def set_local_ece(self, ece: Ece) -> None:
        self.local_ece = ece

    def remote_ece(self) -> Ece:
        with self.runtime.lock:
            if self.state is State.DESTROYING:
                raise self.refuse("get_remote_ece")
            return self.peer_ece

    # -- queue pairs ----------------------------------------------------------------------------------

    def init_qp_attr(self, state: QPState) -> tuple[QPAttr, QPAttrMask]:
        attr = QPAttr()
        return attr, self._fill_attr(attr, state)

    def _fill_attr(self, attr: QPAttr, state: QPState) -> QPAttrMask:
        """Set the attributes of :meth:`init_qp_attr`, and return which of them count."""
        with self.runtime.lock:
            self.begin("init_qp_attr")
            data = self.ask(
                Command.INIT_QP_ATTR,
                lambda address: abi.init_qp_attr(address, self.number, state),
                Response.QP_ATTR,
                "init_qp_attr",
            )
            mask = abi.unpack_qp_attr(data, attr)
            attr.qp_state = state
            return mask  # none for RTS on iWARP, where the connection takes the queue pair there

    def attach_qp(self, qp: QP | None) -> None:
        with self.runtime.lock:
            if qp is None:
                if self.qp is not None and isinstance(self.qp.backend.async_events, _ArrivalOfData):
                    self.qp.backend.async_events = self.qp.backend.async_events.others
                self.qp = None
                return
            initial = self.init_qp_attr(QPState.INIT)
            if self.rules.is_connected:
                qp.backend.modify(*initial)
                qp.backend.async_events = _ArrivalOfData(self, qp.backend.async_events)
            else:
                qp.modify(*initial)  # the API's object learns the port's MTU
                qp.backend.modify(QPAttr(qp_state=QPState.RTR), QPAttrMask.STATE)
                qp.backend.modify(QPAttr(qp_state=QPState.RTS), QPAttrMask.STATE | QPAttrMask.SQ_PSN)
            self.qp = qp

    def make_ready(self, qp: QP, param: ConnParam | None = None) -> None:
        """Take the queue pair from INIT to RTS; ``param`` has the limits that the passive side accepts with."""
        attr, mask = self.init_qp_attr(QPState.INIT)
        qp.backend.modify(attr, mask)  # the access flags depend on what the peer asks for
        for state in _TO_RTS:
            mask = self._fill_attr(attr, state)
            bits = mask.value
            if param is not None and bits & QP_MAX_DEST_RD_ATOMIC:
                attr.max_dest_rd_atomic = param.responder_resources
            if param is not None and bits & QP_MAX_QP_RD_ATOMIC:
                attr.max_rd_atomic = param.initiator_depth
            if bits:
                qp.backend.modify(attr, mask)

    def fail_qp(self) -> None:
        """The queue pair of a connection goes to ERR with it. One of datagrams has no connection."""
        qp = self.qp
        if qp is not None and not qp.closed and self.rules.is_connected and qp.backend.state is not QPState.ERR:
            with contextlib.suppress(RdmaError):  # the device may be gone
                qp.backend.modify(_TO_ERROR, QPAttrMask.STATE)

    # -- multicast ------------------------------------------------------------------------------------

    def join_multicast(self, join: GroupJoin, group: Address, send_only: bool) -> None:
        with self.runtime.lock:
            self.begin("join_multicast")
            cookie = next(self.host.cookies)
            self.host.joins[cookie] = self, join
            try:
                data = self.ask(
                    Command.JOIN_MCAST,
                    lambda address: abi.join_multicast(address, cookie, self.number, group, 1 if send_only else 0),
                    Response.CREATE_ID,
                    "join_multicast",
                )
            except RdmaError as error:
                del self.host.joins[cookie]
                error.address = str(group)
                if error.errno == errno.EOPNOTSUPP:
                    error.strerror, error.hint = no_group(self.is_ethernet, group, send_only)
                raise
            self._joins[join] = abi.unpack_number(data), cookie

    def leave_multicast(self, join: GroupJoin) -> None:
        with self.runtime.lock:
            self.queue.drop_join(join)
            number, cookie = self._joins.pop(join, (0, 0))
            if self.host.joins.pop(cookie, None) is not None and self.state is not State.DESTROYING:
                with contextlib.suppress(OSError):  # the group is left with the device
                    self.queue.ucma.ask(
                        Command.LEAVE_MCAST, lambda address: abi.destroy_id(address, number), Response.COUNT
                    )

    # -- the end --------------------------------------------------------------------------------------

    def destroy(self) -> None:
        with self.runtime.lock:
            if self.state is State.DESTROYING:
                return
            self.fail_qp()
            self.enter(State.DESTROYING)
            self.host.ids.pop(self.cookie, None)
            self.queue.ids.pop(self, None)
            for _, cookie in self._joins.values():
                self.host.joins.pop(cookie, None)
            self._joins.clear()
            self.qp = None
            for event in self.held_requests:
                if isinstance(event, QueuedEvent) and event.new_id is not None:
                    event.new_id.destroy()
            self.held_requests.clear()
            if not self.runtime.abandoned and self.queue.ucma.fd >= 0:
                with contextlib.suppress(OSError):
                    self.queue.ucma.ask(
                        Command.DESTROY_ID, lambda address: abi.destroy_id(address, self.number), Response.COUNT
                    )


class _ArrivalOfData:
    """Takes the asynchronous events of an attached queue pair, and passes them on to ``others``.

    Data that arrive before the peer's confirmation establish the connection, for the confirmation may be lost.
    """

    __slots__ = ("_id", "others")

    def __init__(self, core: KernelId, others: AsyncEvents | None) -> None:
        self._id = weakref.ref(core)
        self.others = others

    def post(self, event: EventType) -> None:
        core = self._id()
        if event is EventType.COMM_EST and core is not None and core.state is State.CONNECT:
            with contextlib.suppress(OSError):  # the confirmation has come
                core.queue.ucma.tell(Command.NOTIFY, abi.pair(core.number, _EVENT_COMM_EST))
        if self.others is not None:
            self.others.post(event)


def _family(address: Address) -> int:
    return AF_IB if isinstance(address, SockAddrIB) else address.family


def _host(address: Address) -> bytes:
    return bytes(address.addr) if isinstance(address, SockAddrIB) else address.ip


def _encoded(option: IdOption, value: int | bytes) -> bytes:
    """An option's value in C's representation; ``value`` may be that already."""
    layout, limit = _OPTIONS[option]
    size = struct.calcsize(layout)
    if isinstance(value, bytes | bytearray):
        if len(value) != size:
            raise cm_error(errno.EINVAL, f"the option has {size} bytes, not {len(value)}", "set_option")
        return bytes(value)
    if isinstance(value, float) or not isinstance(value, int) or not 0 <= value <= limit:
        raise cm_error(errno.EINVAL, f"the option takes 0..{limit}, not {value!r}", "set_option")
    return struct.pack(layout, value)
