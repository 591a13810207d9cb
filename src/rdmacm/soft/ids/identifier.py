"""One rdma_cm_id of the soft provider.

:class:`SoftId` implements :class:`rdmacm.provider.IdBackend`. It checks the state and leaves the work to its parts: the
resolver and the link resolve, the connector connects. Each call runs to its end with the runtime's lock held; a result
that takes time is an event.

The id moves an attached queue pair through its states: the passive side to RTS before it sends the reply, the active
side when the reply arrives, so that data may flow at once.
"""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable
from socket import AF_INET
from time import perf_counter_ns
from typing import TYPE_CHECKING

from rdmacm.address import DEFAULT_PKEY, Address, Gid, InetAddr, SockAddrIB, is_link_local
from rdmacm.capabilities import Feature
from rdmacm.constants import CmEventType, PortSpace
from rdmacm.errors import Failure, RdmaError, cm_error
from rdmacm.explanation import Explanation, Step
from rdmacm.proto.cm.codes import RejectReason
from rdmacm.provider import EventQueue, Owner, QueuedEvent
from rdmacm.provider.cmstate import TRANSITIONS, State, Trigger
from rdmacm.provider.connparam import ConnParam, Ece, UdParam
from rdmacm.provider.idstate import no_owner
from rdmacm.resolution.hosts import IpoibInterface, PortView, RocePortView
from rdmacm.resolution.ipoib import IpoibPortView
from rdmacm.resolution.path import shown_path
from rdmacm.soft.device.datagram_queue_pair import SoftUdQP
from rdmacm.soft.device.queue_pair import SoftQP
from rdmacm.soft.event_queue import SoftQueue
from rdmacm.soft.host import SoftHost
from rdmacm.soft.ids.changes import ipoib_change, roce_change
from rdmacm.soft.ids.connector import Connector
from rdmacm.soft.ids.ib_cm import NO_ECE, IbCmConnector
from rdmacm.soft.ids.id_state import IdState, family_of, host_of, steps_of, wildcard_of
from rdmacm.soft.ids.ip_resolver import IpResolver
from rdmacm.soft.ids.link import Link, Refusal, Resolver
from rdmacm.soft.ids.options import set_option
from rdmacm.soft.ids.qp_attributes import accepted_qkey, attributes_of, fill_initial
from rdmacm.soft.ids.roce_link import RoceLink
from rdmacm.soft.port_table import PortOwner
from rdmacm.soft.wire.base import WirePath
from rdmacm.verbs.attr import QPAttr
from rdmacm.verbs.device import Context, GidEntry
from rdmacm.verbs.enums import LinkLayer, QPAttrMask, QPState, QPType

if TYPE_CHECKING:
    from rdmacm.net.types import Neighbour
    from rdmacm.proto.cm.connection import CmConnection
    from rdmacm.provider import AlternatePathBackend, ServiceBackend
    from rdmacm.provider.multicast import GroupJoin
    from rdmacm.soft.connection_manager import ConnectionManager
    from rdmacm.verbs.qp import QP

#: The longest backlog of a listener, as net.rdma_ucm.max_backlog.
_MAX_BACKLOG = 1024
#: IBV_EVENT_COMM_EST and IBV_EVENT_PATH_MIG, the events that rdma_notify(3) takes.
_EVENT_COMM_EST, _EVENT_PATH_MIG = 4, 6


class SoftId(IdState):
    """See the module. ``owner`` is the API object; None for an id that a request has made."""

    __slots__ = (
        "_datagram_qp",
        "_is_answered",
        "_is_disconnected",
        "_local_ece",
        "_resolver",
        "_soft_qp",
        "connector",
        "link",
        "qp",
    )

    def __init__(self, host: SoftHost, queue: SoftQueue, owner: Owner | None, port_space: int, qp_type: int) -> None:
        space = port_space if type(port_space) is PortSpace else PortSpace(port_space)
        known = no_owner if owner is None else weakref.ref(owner)
        super().__init__(host.runtime, known, space, qp_type, host=host, queue=queue)
        queue.ids[self] = None
        #: See :attr:`resolver`. An id that a request has made needs none.
        self._resolver: Resolver | None = None if owner is None else IpResolver(self)
        #: The way to the peer, by the kind of port that the id is bound to.
        self.link: Link = RoceLink(self)
        #: Connects this id.
        self.connector: Connector = IbCmConnector(self, self)
        #: The attached queue pair, which follows the states of the connection.
        self.qp: QP | None = None
        #: Its backend, by type: one that the connection moves through its states, or a datagram queue pair.
        self._soft_qp: SoftQP | None = None
        self._datagram_qp: SoftUdQP | None = None
        #: False from the request that made this id until the application accepts it: no events are posted.
        self._is_answered = True
        #: Whether DISCONNECTED has been posted.
        self._is_disconnected = False
        #: The ECE options to send with the next request or reply.
        self._local_ece = NO_ECE

    @property
    def resolver(self) -> Resolver:
        """Resolves addresses: IP addresses, until the id is bound to an AF_IB address."""
        if self._resolver is None:
            self._resolver = IpResolver(self)
        return self._resolver

    # -- binding --------------------------------------------------------------------------------------

    def bind_addr(self, address: Address) -> None:
        with self.runtime.lock:
            self.require(Trigger.BIND_ADDR)
            self._bind(address)
            self.move(Trigger.BIND_ADDR)

    def _bind(self, address: Address) -> None:
        """Bind device and port number; on failure the id is as it was."""
        started = perf_counter_ns()
        if isinstance(address, SockAddrIB):
            self.resolve_gids()
        try:
            bound = (self._resolver or self.resolver).bind(address)
        except RdmaError as error:  # of the port number
            error.address = str(address)
            self._bind_failed(address, error, started)
            raise
        except Failure as failure:  # of the device
            refused = cm_error(failure.errno, failure.message, "bind_addr", str(address), failure.hint)
            self._bind_failed(address, refused, started)
            raise refused from None
        self.local_addr: Address | None = bound
        self.taken_steps: list[tuple[str, int, object]] = [("bind", perf_counter_ns() - started, bound)]

    def resolve_gids(self) -> None:
        self._resolver = _gid_resolver(self)

    def _bind_failed(self, address: Address, error: RdmaError, started: int) -> None:
        self.detach()
        self._resolver = None
        message = str(error.strerror)
        error.explanation = Explanation(
            node=address.host if isinstance(address, InetAddr) else str(address.addr),
            service=str(address.port),
            provider=self.host.provider_name,
            steps=(Step("bind", (perf_counter_ns() - started) / 1000, message),),
            error="bind",
            errno=error.errno or 0,
            errno_name=error.code_name,
            message=message,
            hint=error.hint,
        )

    def attach(self, view: PortView | IpoibPortView, row: GidEntry, pkey: int = DEFAULT_PKEY) -> None:
        if isinstance(view, IpoibPortView):
            assert view.infiniband is not None  # the rules of resolution drop the others
            pkey, view = view.pkey, view.infiniband
        is_infiniband = view.port.link_layer is LinkLayer.INFINIBAND
        if is_infiniband is isinstance(self.link, RoceLink):
            self.link = _infiniband_link(self) if is_infiniband else RoceLink(self)
        if self.port_view is not view:
            if self.port_view is not None:
                self.host.detach(self, self.port_view)
            self.port_view = view
            self.verbs: Context | None = self.host.attach(self, view)
            self.port_num: int = view.port.port_num
        self.sgid: Gid = row.gid
        self.gid_index: int = row.gid_index
        self.pkey = pkey

    def detach(self) -> None:
        super().detach()
        if not isinstance(self.link, RoceLink):
            self.link = RoceLink(self)

    def _stop(self) -> None:
        """Cancel what the resolver and the link wait for."""
        if self._resolver is not None:
            self._resolver.stop()
        self.link.stop()

    # -- resolving ------------------------------------------------------------------------------------

    def resolve_addr(self, source: Address | None, destination: Address, timeout_ms: int) -> None:
        with self.runtime.lock:
            self.require(Trigger.RESOLVE_ADDR)
            if timeout_ms < 0:
                raise cm_error(errno.EINVAL, f"timeout {timeout_ms} ms is negative", "resolve_addr")
            if source is not None and family_of(source) != family_of(destination):
                raise cm_error(
                    errno.EINVAL,
                    f"source {source} is of another address family",
                    "resolve_addr",
                    str(destination),
                    "a source of the destination's family, or none",
                )
            origin = "bound"
            if self.state is State.IDLE:
                self._bind(source or wildcard_of(destination))
                self.move(Trigger.BIND_ADDR)
                origin = "given" if source is not None else "bound"
            else:
                self._check_bound(source, destination)
            (self._resolver or self.resolver).resolve_addr(destination, origin, timeout_ms)

    def _check_bound(self, source: Address | None, destination: Address) -> None:
        """Refuse another source than the one the id is bound to."""
        local = self.local_addr
        assert local is not None
        if family_of(local) != family_of(destination):
            message = f"the id is bound to {local}, of another address family"
            raise cm_error(errno.EINVAL, message, "resolve_addr", str(destination), "a new id")
        if source is not None and (host_of(source) != host_of(local) or source.port not in (0, local.port)):
            message = f"source {source} was given, but the id is bound to {local}"
            raise cm_error(errno.EINVAL, message, "resolve_addr", str(destination), "no source, or a new id")

    def resolve_route(self, timeout_ms: int, alternate: bool = False) -> None:
        with self.runtime.lock:
            self.require(Trigger.RESOLVE_ROUTE)
            if timeout_ms <= 0:
                raise cm_error(errno.EINVAL, f"timeout {timeout_ms} ms is not positive", "resolve_route")
            if alternate:
                self.require_feature(Feature.ALTERNATE_PATHS, "resolve_route")
            self.link.resolve_route(timeout_ms, alternate)

    def resolve_service(self, service: str) -> None:
        with self.runtime.lock:
            self.runtime.check_fork("resolve_addrinfo")
            if not self.may(Trigger.RESOLVE_IB_SERVICE):
                raise self.refuse("resolve_addrinfo")
            self.link.resolve_service(service)

    def register_service(
        self, name: bytes, lease: int, data: bytes, done: Callable[[RdmaError | None], None]
    ) -> ServiceBackend:
        with self.runtime.lock:
            self.runtime.check_fork("register_service")
            if self.state is State.DESTROYING:
                raise self.refuse("register_service")
            return self.link.register_service(name, lease, data, done)

    @property
    def steps(self) -> tuple[Step, ...]:
        return steps_of(self, self.lookup)

    @property
    def is_put_off(self) -> bool:
        return self.connector.is_put_off

    def explain(self) -> Explanation:
        with self.runtime.lock:
            lookup = self.lookup
            if lookup is None:
                return Explanation(node=None, service=None, provider=self.host.provider_name, steps=self.steps)
            path = self.paths[0] if self.paths else None
            if path is None:
                return lookup.explain(None, None).replace(steps=self.steps)
            return lookup.explain(None, None).replace(steps=self.steps, path=shown_path(path))

    # -- options, migration, changes of the device ----------------------------------------------------

    def set_option(self, level: int, name: int, value: int | bytes) -> None:
        with self.runtime.lock:
            set_option(self, level, name, value)

    def set_local_ece(self, ece: Ece) -> None:
        self._local_ece = ece

    def remote_ece(self) -> Ece:
        with self.runtime.lock:
            if self.state is State.DESTROYING:
                raise self.refuse("get_remote_ece")
            return self.connector.peer_ece

    def migrate(self, queue: EventQueue) -> None:
        with self.runtime.lock:
            self.require(Trigger.MIGRATE)
            owner, old = self.owner(), self.queue
            assert isinstance(queue, SoftQueue)
            old.ids.pop(self, None)
            queue.ids[self] = None
            self.queue = queue
            if owner is not None:
                for event in old.take_all(owner):
                    queue.add(event)

    def device_changed(self, before: RocePortView, after: RocePortView | None) -> None:
        if after is None:
            if self.may(Trigger.DEVICE_GONE):
                self._stop()
                self.move(Trigger.DEVICE_GONE)
                message = f"{before.device.name}: interface {before.interface.name} is gone"
                self.post(CmEventType.DEVICE_REMOVAL, 0, None, message)
            return
        self.port_view: PortView | None = after
        self._report_change(roce_change(self, before, after))

    def neighbour_changed(self, neighbour: Neighbour) -> None:
        if self.connector.is_established:
            self.resolver.neighbour_changed(neighbour)

    def ipoib_changed(self, before: IpoibInterface, after: IpoibInterface | None) -> None:
        self._report_change(ipoib_change(self, before, after))

    def _report_change(self, change: tuple[int, str] | None) -> None:
        if change is not None:
            self.post(CmEventType.ADDR_CHANGE, -change[0], None, change[1])

    # -- multicast ------------------------------------------------------------------------------------

    def join_multicast(self, join: GroupJoin, group: Address, send_only: bool) -> None:
        with self.runtime.lock:
            self.require(Trigger.JOIN_MULTICAST)
            if self.port_view is None or self.qp_type != QPType.UD:
                text = "the id is bound to no device" if self.port_view is None else "the id is not of type UD"
                raise cm_error(errno.EINVAL, text, "join_multicast", str(group), "PortSpace.UDP, and resolve_addr()")
            self.link.join_multicast(join, group, send_only)

    def leave_multicast(self, join: GroupJoin) -> None:
        with self.runtime.lock:
            self.queue.drop_join(join)
            if self.state is not State.DESTROYING:
                self.link.leave_multicast(join)

    # -- listening ------------------------------------------------------------------------------------

    def listen(self, backlog: int) -> None:
        with self.runtime.lock:
            self.require(Trigger.LISTEN)
            if self.state is State.IDLE:
                self.bind_addr(InetAddr.any(AF_INET))
            if not 0 < backlog <= _MAX_BACKLOG:
                backlog = _MAX_BACKLOG
            port = self.port_owner
            shared = port if port is not None and port.reuseaddr else None
            if shared is not None:
                self.host.ports.claim(shared)
            try:
                self.connector.listen(backlog)
            except BaseException:
                if shared is not None:
                    self.host.ports.share(shared)
                raise
            self.move(Trigger.LISTEN)

    def allow_requests(self, count: int) -> None:
        with self.runtime.lock:
            self.connector.allow_requests(count)

    def adopt(self, owner: Owner) -> None:
        self.owner: Callable[[], Owner | None] = weakref.ref(owner)

    # -- connecting -----------------------------------------------------------------------------------

    def _require_connection(self, trigger: Trigger) -> None:
        """As :meth:`require`, for a call that needs a connection."""
        if self.runtime.abandoned:
            self.runtime.check_fork(trigger.value)
        if trigger not in TRANSITIONS[self.state] or self.connector.connection is None:
            raise self.refuse(trigger.value)

    def connect(self, param: ConnParam) -> None:
        with self.runtime.lock:
            if self.runtime.abandoned:
                self.runtime.check_fork("connect")
            self.move(Trigger.CONNECT)
            try:
                self.connector.connect(param, self.qp.qp_num if self.qp else param.qp_num, self._local_ece)
            except BaseException:
                self.move(Trigger.CONNECT_REFUSED)
                raise

    def establish(self) -> None:
        with self.runtime.lock:
            self.runtime.check_fork("establish")
            if not self.may(Trigger.ACCEPT) or self.connector.connection is None:
                raise self.refuse("establish")
            self.connector.confirm()

    def accept(self, param: ConnParam) -> None:
        with self.runtime.lock:
            self._require_connection(Trigger.ACCEPT)
            if self._is_answered:
                raise self.refuse(Trigger.ACCEPT.value)
            self.connector.prepare_accept(param)
            if self.qp_type == QPType.UD:
                own = self._datagram_qp.attr.qkey if self._datagram_qp is not None else 0
                self.qkey: int = accepted_qkey(self, self.link, own, param)
                self.connector.accept_datagram(param, self.qp.qp_num if self.qp else param.qp_num, self.qkey)
            else:
                self._accept_connection(param)
            self._is_answered = True

    def _accept_connection(self, param: ConnParam) -> None:
        try:
            if self._soft_qp is not None:
                self._make_ready(self._soft_qp)
                self._soft_qp.hold_sends()
            self.connector.accept(param, self.qp.qp_num if self.qp else param.qp_num, self._local_ece)
        except BaseException:  # refuse, as the kernel does, so that the peer does not wait for a reply
            self._fail_qp()
            self.connector.refuse()
            raise

    def reject(self, private_data: bytes, reason: int) -> None:
        with self.runtime.lock:
            self._require_connection(Trigger.REJECT)
            self.connector.reject(private_data, reason)

    def notify(self, event: int) -> None:
        with self.runtime.lock:
            self._require_connection(Trigger.NOTIFY)
            if event == _EVENT_COMM_EST:
                self.connector.notify_established()
            elif event == _EVENT_PATH_MIG:
                self.connector.notify_migrated()
            else:
                text = f"rdma_notify() takes IBV_EVENT_COMM_EST (4) and IBV_EVENT_PATH_MIG (6), not event {event}"
                raise cm_error(errno.EINVAL, text, "notify")

    def alternate_paths(self, call: str) -> AlternatePathBackend:
        with self.runtime.lock:
            if self.state is State.DESTROYING or self.connector.connection is None:
                raise self.refuse(call)
            self.require_feature(Feature.ALTERNATE_PATHS, call)
            return self.connector.alternate_path()

    def disconnect(self) -> bool:
        with self.runtime.lock:
            self._require_connection(Trigger.DISCONNECT)
            qp = self._soft_qp or self._datagram_qp
            if qp is not None:
                qp.fail()
            was_disconnected = self._is_disconnected
            return self.connector.disconnect() and not was_disconnected

    # -- reports of the connector ---------------------------------------------------------------------

    def other_link(self) -> Link:
        """See :class:`rdmacm.soft.ids.ib_cm.IbCmUser`."""
        return _infiniband_link(self)

    def take_request(self, connection: CmConnection, cm: ConnectionManager) -> QueuedEvent | Refusal:
        """See :class:`rdmacm.soft.ids.ib_cm.IbCmUser`."""
        child = SoftId(self.host, self.queue, None, self.port_space, self.qp_type)
        try:
            if cm is not self.host.cm:
                child.link = _infiniband_link(child)
            refusal = child.link.accept_request(connection, isinstance(self.local_addr, InetAddr), cm)
            owner = self.owner()
            if refusal is not None or owner is None:
                child.destroy()
                return refusal or (RejectReason.CONSUMER_DEFINED, b"")
            connector = child.connector
            assert isinstance(connector, IbCmConnector)
            param = connector.begin_passive(connection, cm)
            child.enter_connect(self.options)
            child._is_answered = False
            return tuple.__new__(
                QueuedEvent, (owner, CmEventType.CONNECT_REQUEST, 0, 0, None, "", param, child, None)
            )  # as in post()
        except BaseException:
            child.destroy()
            raise

    def replied(self, param: ConnParam) -> None:
        if self._soft_qp is None:
            self._report(CmEventType.CONNECT_RESPONSE, 0, param)
            return
        try:
            self._make_ready(self._soft_qp)
        except RdmaError as error:
            self.connector.refuse()
            self._fail_qp()
            self._report(CmEventType.CONNECT_ERROR, -(error.errno or errno.EIO), None, str(error.strerror))
            return
        self.connector.confirm()
        self.post(CmEventType.ESTABLISHED, 0, None, "", param)

    def established(self) -> None:
        if self._soft_qp is not None:
            self._soft_qp.release_sends()
        if self._is_answered:
            self.post(CmEventType.ESTABLISHED)

    def rejected(self, reason: int, private_data: bytes, text: str) -> None:
        self._fail_qp()
        param = ConnParam(private_data, 0, 0, retry_count=0, rnr_retry_count=0)
        self._report(CmEventType.REJECTED, reason, param, text)

    def unreachable(self, status: int, text: str, param: UdParam | None = None) -> None:
        self._fail_qp()
        self._report(CmEventType.UNREACHABLE, status, param, text)

    def datagram_resolved(self, param: UdParam) -> None:
        self.qkey = param.qkey
        self._report(CmEventType.ESTABLISHED, 0, param)

    def disconnected(self, status: int, text: str) -> None:
        if not self._is_disconnected:
            self._is_disconnected = True
            if Trigger.DISCONNECTED in TRANSITIONS[self.state]:
                self.move(Trigger.DISCONNECTED)
            if self._is_answered:
                self.post(CmEventType.DISCONNECTED, status, None, text)

    def failed(self, was_established: bool, text: str) -> None:
        self._fail_qp()
        if was_established:
            self.disconnected(-errno.EIO, text)
        else:
            self._report(CmEventType.CONNECT_ERROR, -errno.EIO, None, text)

    def timewait_over(self) -> None:
        self._report(CmEventType.TIMEWAIT_EXIT)

    def _report(
        self, kind: CmEventType, status: int = 0, param: ConnParam | UdParam | None = None, text: str = ""
    ) -> None:
        """Post an event; none before the application has accepted the request that made this id."""
        if self._is_answered:
            self.post(kind, status, None, text, param)

    # -- the queue pair -------------------------------------------------------------------------------

    def attach_qp(self, qp: QP | None) -> None:
        with self.runtime.lock:
            if qp is None:
                self.qp = self._soft_qp = self._datagram_qp = None
                return
            backend = qp.backend
            if isinstance(backend, SoftUdQP):
                fill_initial(self, self.link, self.connector, backend.attr)
                backend.advance(QPState.RTS)
                self.qp, self._datagram_qp = qp, backend
                return
            assert isinstance(backend, SoftQP)
            fill_initial(self, self.link, self.connector, backend.attr)
            backend.advance(QPState.INIT)
            backend.on_comm_est = self._data_arrived
            self.qp, self._soft_qp = qp, backend

    def _data_arrived(self) -> None:
        if self.state is not State.DESTROYING:
            self.connector.data_arrived()

    def _fail_qp(self) -> None:
        """The queue pair of a connection goes to ERR with it. One of datagrams has no connection."""
        if self._soft_qp is not None:
            self._soft_qp.fail()

    def _make_ready(self, qp: SoftQP) -> None:
        """Take the queue pair from INIT to RTS."""
        attr = qp.attr
        path = self.connector.connected_attributes(attr)
        assert isinstance(path, WirePath)
        if path.scope_id or not self.sgid.endswith(path.local):
            # A scope counts for link-local addresses only, and 127.0.0.1 is the GID of other addresses in 127/8.
            remote, view = self.dgid.ip, self.port_view
            assert view is not None
            path = WirePath(self.sgid.ip, remote, view.device.index if is_link_local(remote) else 0)
        qp.advance(QPState.RTS, path, (self.paths[0], self.gid_index, self.port_num))

    def init_qp_attr(self, state: QPState) -> tuple[QPAttr, QPAttrMask]:
        with self.runtime.lock:
            return attributes_of(self, self.link, self.connector, state)

    # -- the end --------------------------------------------------------------------------------------

    def destroy(self) -> None:
        with self.runtime.lock:
            if self.state is State.DESTROYING:
                return
            self.connector.close()
            self._stop()
            self.move(Trigger.DESTROY)
            super().detach()
            if self.port_owner is not None:
                self.host.ports.release(self.port_owner)
                self.port_owner: PortOwner | None = None
            self.queue.ids.pop(self, None)
            # The parts refer to this id, which is freed without the garbage collector then.
            del self._resolver, self.link, self.connector
            self.qp = self._soft_qp = self._datagram_qp = None


# Imported late: most hosts have no InfiniBand port, and need none of the modules behind it.


def _infiniband_link(core: IdState) -> Link:
    from rdmacm.soft.ids.ib_link import IbLink

    return IbLink(core)


def _gid_resolver(core: IdState) -> Resolver:
    from rdmacm.soft.ids.gid_resolver import GidResolver

    return GidResolver(core)
