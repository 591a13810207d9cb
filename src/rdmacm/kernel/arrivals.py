"""The kernel's events as events of the API, and what the id has to do about each.

An active side with a queue pair of its own completes the connection when the peer's reply is fetched, as librdmacm
does: the kernel leaves that to user space.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial

from rdmacm.constants import CmEventType
from rdmacm.errors import RdmaError
from rdmacm.explanation import Explanation
from rdmacm.kernel import abi
from rdmacm.kernel.event_queue import KernelQueue
from rdmacm.kernel.host import KernelHost
from rdmacm.kernel.identifier import KernelId
from rdmacm.kernel.prediction import explain_failure
from rdmacm.kernel.reasons import inactive_port, inactive_port_of, no_device, reason_of
from rdmacm.proto.cm.codes import RejectReason, rejection_text, sidr_text
from rdmacm.provider import QueuedEvent
from rdmacm.provider.cmstate import State, Trigger
from rdmacm.provider.connparam import ConnParam, UdParam
from rdmacm.provider.multicast import GroupJoin
from rdmacm.verbs.attr import AHAttr
from rdmacm.verbs.enums import QPState

_E = CmEventType
_KINDS = {int(kind): kind for kind in CmEventType}
_TEXTS = {
    _E.DEVICE_REMOVAL: "the device was removed",
    _E.ADDR_CHANGE: "the hardware address of the interface has changed",
}


def translate(host: KernelHost, queue: KernelQueue, raw: abi.Event) -> QueuedEvent | None:
    """The event for the API; None where there is none. The lock is held."""
    joined = host.joins.get(raw.uid)
    if joined is not None:
        member, join = joined
        return _group_event(member, join, raw) if isinstance(member, KernelId) else None
    core = host.ids.get(raw.uid)
    if not isinstance(core, KernelId) or core.state is State.DESTROYING:
        return None
    kind = _KINDS.get(raw.type)
    if kind is None:
        return None
    if kind is _E.CONNECT_REQUEST:
        return _request(core, queue, raw)
    owner = core.owner()
    if owner is None:
        return None
    handler = _HANDLERS.get(kind)
    event = QueuedEvent(owner, kind, raw.status)
    found = event if handler is None else handler(core, event, raw)
    if found is not None and not found.message and (text := _text(found)):
        return found._replace(message=text)
    return found


def _text(event: QueuedEvent) -> str:
    if event.type is _E.UNREACHABLE and event.status == -errno.ETIMEDOUT:
        return "the peer did not answer"
    if event.type in _TEXTS:
        return _TEXTS[event.type]
    return os.strerror(-event.status) if event.status < 0 else ""


# -- resolving --------------------------------------------------------------------------------------------


def _address_resolved(core: KernelId, event: QueuedEvent, _raw: abi.Event) -> QueuedEvent:
    try:
        core.refresh("resolve_addr")
    except RdmaError as error:  # the id has lost its device since
        return event._replace(type=_E.ADDR_ERROR, status=-(error.errno or errno.EIO), message=str(error.strerror))
    if core.verbs is None:  # the kernel still resolves with a device that it is removing
        return event._replace(type=_E.ADDR_ERROR, status=-errno.ENODEV, message="the device is being removed")
    core.step_done("address", core.verbs.name)
    core.move(Trigger.ADDR_DONE)
    return event


def _address_failed(core: KernelId, event: QueuedEvent, _raw: abi.Event) -> QueuedEvent:
    core.move(Trigger.ADDR_FAILED)
    return _failed(core, event, "resolve_addr", "address")


def _route_failed(core: KernelId, event: QueuedEvent, _raw: abi.Event) -> QueuedEvent:
    core.move(Trigger.ROUTE_FAILED)
    return _failed(core, event, "resolve_route", "path")


def _failed(core: KernelId, event: QueuedEvent, call: str, step: str) -> QueuedEvent:
    code = -event.status
    lookup, expected = core.expectation(core.peer_addr) if core.peer_addr is not None else (None, None)
    message = expected.message if expected is not None and expected.errno == code else _reason(core, code, call)
    if lookup is not None and lookup.route is not None and code == errno.ETIMEDOUT:
        inactive = inactive_port_of(core.host, lookup.host.interface_name(lookup.route.ifindex))
        if inactive is not None:
            message = f"{message}: {inactive.text}"
    core.step_done(step, message)
    explain: partial[Explanation] = partial(explain_failure, lookup, expected, code, call, message, core.steps)
    return event._replace(message=message, explain=explain)


def _reason(core: KernelId, code: int, call: str) -> str:
    if call == "resolve_addr" and code == errno.ETIMEDOUT:
        return "no neighbour has answered for the next hop"
    reason = (code == errno.ENODEV and no_device(core.host)) or reason_of(call, code)
    return reason.text


def _route_resolved(core: KernelId, event: QueuedEvent, _raw: abi.Event) -> QueuedEvent:
    try:
        core.read_paths("resolve_route")
    except RdmaError as error:
        return event._replace(type=_E.ROUTE_ERROR, status=-(error.errno or errno.EIO), message=str(error.strerror))
    path = core.paths[0] if core.paths else None
    core.step_done("path", f"MTU {path.mtu_bytes}" if path else "no path record")
    core.move(Trigger.ROUTE_DONE)
    return event


def _service_resolved(core: KernelId, event: QueuedEvent, _raw: abi.Event) -> QueuedEvent:
    try:
        core.read_services()
        core.refresh("resolve_addrinfo")
    except RdmaError as error:
        core.move(Trigger.SERVICE_FAILED)
        return event._replace(type=_E.ADDRINFO_ERROR, status=-(error.errno or errno.EIO), message=str(error.strerror))
    core.move(Trigger.SERVICE_DONE)
    return event


def _service_failed(core: KernelId, event: QueuedEvent, _raw: abi.Event) -> QueuedEvent:
    core.move(Trigger.SERVICE_FAILED)
    return event


# -- connecting -------------------------------------------------------------------------------------------


def _request(listener: KernelId, queue: KernelQueue, raw: abi.Event) -> QueuedEvent | None:
    """The new id of a request, which the kernel has made."""
    child = listener.child(queue, raw)
    owner = listener.owner()
    if owner is None or child is None:
        if child is not None:
            child.destroy()
        return None
    event = QueuedEvent(owner, _E.CONNECT_REQUEST, raw.status, param=_param(listener, raw, True), new_id=child)
    if listener.requests_allowed is not None:
        if listener.requests_allowed <= 0:
            if len(listener.held_requests) < listener.most_held:
                listener.held_requests.append(event)
            else:  # the kernel's own backlog has become free as the request was fetched
                child.destroy()
            return None
        listener.requests_allowed -= 1
    return event


def _param(core: KernelId, raw: abi.Event, is_request: bool = False) -> ConnParam | UdParam:
    if core.rules.is_connected:
        return abi.unpack_conn(raw.param)
    found = abi.unpack_ud(raw.param)
    return UdParam(found.private_data, AHAttr(), 0, 0) if is_request else found


def _replied(core: KernelId, event: QueuedEvent, raw: abi.Event) -> QueuedEvent:
    core.peer_ece = raw.ece
    param, qp = _param(core, raw), core.qp
    if qp is None:
        return event._replace(param=param)
    try:
        core.make_ready(qp)
        core.confirm("connect")
    except RdmaError as error:
        core.fail_qp()
        status = -(error.errno or errno.EIO)
        return event._replace(type=_E.CONNECT_ERROR, status=status, message=str(error.strerror))
    core.is_established = True
    return event._replace(type=_E.ESTABLISHED, status=0, param=param)


def _established(core: KernelId, event: QueuedEvent, raw: abi.Event) -> QueuedEvent:
    core.is_established = True
    if core.is_iwarp and core.qp is not None and core.qp.state in (QPState.INIT, QPState.RTR):
        core.qp.backend.state = QPState.RTS  # the connection has taken it there
    if core.is_passive:
        return event
    return event._replace(param=_param(core, raw))  # iWARP, and datagrams


def _rejected(core: KernelId, event: QueuedEvent, raw: abi.Event) -> QueuedEvent:
    core.fail_qp()
    data = _param(core, raw).private_data
    status, message = raw.status, ""
    if core.is_iwarp:
        # It has no reasons; the kernel tells a refusal by the application from the end of the TCP connection.
        if any(data) or raw.status == -errno.ECONNREFUSED:
            status = RejectReason.CONSUMER_DEFINED
        else:
            status = RejectReason.INVALID_SERVICE_ID
            message = "nobody listens on that port, or the peer has closed the connection before its answer arrived"
    param = ConnParam(data, 0, 0, retry_count=0, rnr_retry_count=0)
    mtu = core.paths[0].mtu if core.paths else 0  # the kernel passes no more of the REJ on
    message = message or rejection_text(status, path_mtu=mtu, is_passive=core.is_passive)
    return event._replace(status=status, param=param, message=message)


def _unreachable(core: KernelId, event: QueuedEvent, raw: abi.Event) -> QueuedEvent:
    if core.is_established:  # the peer has another hardware address
        return event._replace(message=f"{core.peer_addr} has another hardware address (rdmacm doctor C5)")
    core.fail_qp()
    if raw.status <= 0:
        inactive = inactive_port(core.host, core.verbs.name, core.port_num) if core.verbs is not None else None
        return event if inactive is None else event._replace(message=f"the peer did not answer: {inactive.text}")
    return event._replace(param=_param(core, raw, True), message=sidr_text(raw.status))


def _connect_failed(core: KernelId, event: QueuedEvent, _raw: abi.Event) -> QueuedEvent:
    core.fail_qp()
    return event


def _disconnected(core: KernelId, event: QueuedEvent, _raw: abi.Event) -> QueuedEvent | None:
    if core.is_iwarp:
        core.fail_qp()  # the connection that has ended is the queue pair's
    core.move(Trigger.DISCONNECTED)
    if core.is_disconnected:
        return None
    core.is_disconnected = True
    core.answer_disconnection()
    return event


def _device_removed(core: KernelId, event: QueuedEvent, _raw: abi.Event) -> QueuedEvent:
    name = core.verbs.name if core.verbs else "the device"
    core.move(Trigger.DEVICE_GONE)
    return event._replace(message=f"{name} was removed")


def _user(_core: KernelId, event: QueuedEvent, raw: abi.Event) -> QueuedEvent:
    return event._replace(arg=abi.unpack_arg(raw.param))


def _group_event(core: KernelId, join: GroupJoin, raw: abi.Event) -> QueuedEvent | None:
    owner = core.owner()
    if owner is None or core.state is State.DESTROYING:
        return None
    kind = CmEventType(raw.type)
    param = abi.unpack_ud(raw.param) if kind is _E.MULTICAST_JOIN else None
    message = os.strerror(-raw.status) if raw.status < 0 else ""
    return QueuedEvent(owner, kind, raw.status, param=param, message=message, join=join)


#: What is done about an event: with the id, the event for the API as far as it is known, and the kernel's.
_HANDLERS: dict[CmEventType, Callable[[KernelId, QueuedEvent, abi.Event], QueuedEvent | None]] = {
    _E.ADDR_RESOLVED: _address_resolved,
    _E.ADDR_ERROR: _address_failed,
    _E.ROUTE_RESOLVED: _route_resolved,
    _E.ROUTE_ERROR: _route_failed,
    _E.ADDRINFO_RESOLVED: _service_resolved,
    _E.ADDRINFO_ERROR: _service_failed,
    _E.CONNECT_RESPONSE: _replied,
    _E.ESTABLISHED: _established,
    _E.REJECTED: _rejected,
    _E.UNREACHABLE: _unreachable,
    _E.CONNECT_ERROR: _connect_failed,
    _E.DISCONNECTED: _disconnected,
    _E.DEVICE_REMOVAL: _device_removed,
    _E.USER: _user,
}
