"""The commands of the kernel's rdma_cm: each takes and returns the bytes that the kernel would, and has its errors.

A command names an id by its number, which has to belong to the channel of the request: ENOENT for an unknown number,
EINVAL for another channel's.

Two commands have an argument that is no number or structure in the kernel. SET_OPTION has a pointer there: here the
value follows the structure. MIGRATE_ID has the descriptor of the old channel: here its number.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from typing import Any, TypeAlias, cast

from rdmacm.address import Address, InetAddr, SockAddrIB, service_id
from rdmacm.constants import CmEventType, McJoinFlag, OptionLevel, PortSpace
from rdmacm.errors import cm_error
from rdmacm.proto import user_cm
from rdmacm.proto.cm.codes import RejectReason
from rdmacm.proto.sa import PathData
from rdmacm.proto.user_cm import Command, Query
from rdmacm.provider import QueuedEvent
from rdmacm.provider.cmstate import State
from rdmacm.provider.connparam import ConnParam, Ece
from rdmacm.run import protocol
from rdmacm.run.channels import Channel, Identifier
from rdmacm.run.packing import address_of, pack_qp_attr, pack_user_path, packed_or_empty, swapped
from rdmacm.run.sessions import Session
from rdmacm.verbs.device import Device
from rdmacm.verbs.enums import QPState, QPType

#: Executes a command: session, channel and structure of the request; returns the response.
_Execute: TypeAlias = Callable[[Session, Channel, bytes], bytes]

#: The library's own event, which completes rdma_resolve_addrinfo(3); only WRITE_CM_EVENT knows it.
_INTERNAL = 19
#: Bytes of the ECE options at the end of CONNECT and ACCEPT, which older libraries do not send.
_ECE_BYTES = 8
#: Types of queue pairs that ids of the port space IB may have.
_QP_TYPES = frozenset({QPType.RC, QPType.UC, QPType.UD, QPType.XRC_SEND, QPType.XRC_RECV})
_QPN_MASK = 0xFFFFFF
_COUNT = user_cm.CREATE_ID_RESP


def execute(session: Session, command: int, channel: int, body: bytes) -> bytes:
    """Execute a command on an event channel. OSError with the errno; EINVAL for an unknown command."""
    found = _COMMANDS.get(command)
    if found is None:
        if not 0 <= command <= max(Command):
            raise cm_error(errno.EINVAL, f"no command {command}", "rdma_cm")
        raise cm_error(errno.ENOSYS, f"command {command} is not implemented", "rdma_cm")
    return found(session, session.channel(channel), body)


def _fields(layout: struct.Struct, body: bytes) -> tuple[Any, ...]:
    if len(body) < layout.size:
        raise cm_error(errno.EINVAL, f"the structure has {layout.size} bytes, not {len(body)}", "rdma_cm")
    return layout.unpack_from(body)


def _find(session: Session, channel: Channel, number: int) -> Identifier:
    identifier = session.ids.get(number)
    if identifier is None:
        raise cm_error(errno.ENOENT, f"no id {number}", "rdma_cm")
    if identifier.channel is not channel:
        raise cm_error(errno.EINVAL, f"id {number} belongs to another channel", "rdma_cm")
    return identifier


# -- ids ------------------------------------------------------------------------------------------------------


def _create_id(session: Session, channel: Channel, body: bytes) -> bytes:
    uid, _, port_space, qp_type = _fields(user_cm.CREATE_ID, body)
    if port_space == PortSpace.TCP:
        qp_type = QPType.RC
    elif port_space in (PortSpace.UDP, PortSpace.IPOIB):
        qp_type = QPType.UD
    elif port_space != PortSpace.IB or qp_type not in _QP_TYPES:
        raise cm_error(errno.EINVAL, f"port space 0x{port_space:x}, QP type {qp_type}", "create_id")
    return _COUNT.pack(session.create_id(channel, uid, port_space, qp_type).number)


def _destroy_id(session: Session, channel: Channel, body: bytes) -> bytes:
    _, number = _fields(user_cm.DESTROY_ID, body)
    identifier = _find(session, channel, number)
    session.destroy_id(identifier)
    return _COUNT.pack(identifier.reported)


def _migrate_id(session: Session, channel: Channel, body: bytes) -> bytes:
    _, number, old_number = _fields(user_cm.MIGRATE_ID, body)
    old = session.channel(old_number)
    identifier = _find(session, old, number)
    identifier.backend.migrate(channel.queue)
    old.move(identifier, channel)
    identifier.channel = channel
    old.pump()
    channel.pump()
    return _COUNT.pack(identifier.reported)


# -- addresses ------------------------------------------------------------------------------------------------


def _bind_ip(session: Session, channel: Channel, body: bytes) -> bytes:
    address, number = _fields(protocol.BIND_IP, body)
    _find(session, channel, number).backend.bind_addr(address_of(address))
    return b""


def _bind(session: Session, channel: Channel, body: bytes) -> bytes:
    number, size, address = _fields(user_cm.BIND, body)
    _find(session, channel, number).backend.bind_addr(address_of(address, size))
    return b""


def _resolve_ip(session: Session, channel: Channel, body: bytes) -> bytes:
    source, destination, number, timeout_ms = _fields(protocol.RESOLVE_IP, body)
    given = address_of(source) if any(source[:2]) else None
    return _resolve(_find(session, channel, number), given, address_of(destination), timeout_ms)


def _resolve_addr(session: Session, channel: Channel, body: bytes) -> bytes:
    number, timeout_ms, source_size, size, source, destination = _fields(user_cm.RESOLVE_ADDR, body)
    given = address_of(source, source_size) if source_size else None
    return _resolve(_find(session, channel, number), given, address_of(destination, size), timeout_ms)


def _resolve(identifier: Identifier, source: Address | None, destination: Address, timeout_ms: int) -> bytes:
    backend = identifier.backend
    if backend.state is not State.IDLE:  # the kernel ignores the source of an id that is bound
        source = None
    backend.resolve_addr(source, destination, timeout_ms)
    return b""


def _resolve_route(session: Session, channel: Channel, body: bytes) -> bytes:
    number, timeout_ms = _fields(user_cm.LISTEN, body)
    _find(session, channel, number).backend.resolve_route(timeout_ms)
    return b""


def _resolve_ib_service(session: Session, channel: Channel, body: bytes) -> bytes:
    number, service, name, flags = _fields(user_cm.RESOLVE_IB_SERVICE, body)
    text = str(service) if flags & user_cm.ServiceFlag.ID else name.partition(b"\0")[0].decode("latin-1")
    _find(session, channel, number).backend.resolve_service(text)
    return b""


# -- queries --------------------------------------------------------------------------------------------------


def _device_of(identifier: Identifier) -> Device | None:
    """The device that an id is bound to.

    As in the kernel, binding to a loopback address does not bind to a device. A program that asks which device has
    "localhost" would else use no other.
    """
    backend = identifier.backend
    local = backend.local_addr
    is_bound_only = backend.state in (State.ADDR_BOUND, State.LISTEN)
    if backend.verbs is None or (is_bound_only and isinstance(local, InetAddr) and local.is_loopback):
        return None
    return backend.verbs.device


def _query(session: Session, channel: Channel, body: bytes) -> bytes:
    _, number, option = _fields(user_cm.QUERY, body)
    identifier = _find(session, channel, number)
    backend = identifier.backend
    if option == Query.ADDR:
        return _pack_addresses(identifier, backend.local_addr, backend.peer_addr)
    if option == Query.PATH:
        return user_cm.QUERY_PATH_RESP.pack(len(backend.paths)) + b"".join(
            PathData(path).pack() for path in backend.paths
        )
    if option == Query.GID:
        return _pack_addresses(identifier, *_as_gids(identifier))
    if option == Query.IB_SERVICE:
        return user_cm.QUERY_PATH_RESP.pack(len(backend.services)) + b"".join(
            record.pack() for record in backend.services
        )
    raise cm_error(errno.ENOSYS, f"no query {option}", "query")


def _as_gids(identifier: Identifier) -> list[Address]:
    """Both addresses in the form of InfiniBand."""
    backend, found = identifier.backend, []
    for address, gid in ((backend.local_addr, backend.sgid), (backend.peer_addr, backend.dgid)):
        if not isinstance(address, SockAddrIB):
            space = int(getattr(backend, "port_space", PortSpace.TCP))
            sid = 0 if address is None else service_id(space, address.port)
            address = SockAddrIB(gid, sid, 0, backend.pkey)
        found.append(address)
    return cast("list[Address]", found)


def _pack_addresses(identifier: Identifier, source: Address | None, destination: Address | None) -> bytes:
    device, first, second = _device_of(identifier), packed_or_empty(source), packed_or_empty(destination)
    guid, index, port, pkey = 0, 0, 0, 0
    if device is not None:
        backend = identifier.backend
        guid, index, port, pkey = swapped(device.node_guid, 8), device.index, backend.port_num, backend.pkey
    return user_cm.QUERY_ADDR_RESP.pack(
        guid, port, swapped(pkey, 2), len(first), len(second), first, second, index & 0xFFFFFFFF
    )


def _query_route(session: Session, channel: Channel, body: bytes) -> bytes:
    _, number, _ = _fields(user_cm.QUERY, body)
    identifier = _find(session, channel, number)
    backend = identifier.backend
    first, second = (
        b"" if isinstance(each, SockAddrIB) else packed_or_empty(each)
        for each in (backend.local_addr, backend.peer_addr)
    )
    device = _device_of(identifier)
    if device is None:
        return protocol.QUERY_ROUTE_RESP.pack(bytes(8), b"", b"", first, second, 0, 0, 0)
    paths = [pack_user_path(path) for path in backend.paths[:2]]
    count = len(paths)
    if not paths:  # what is known before there is a path
        paths.append(bytes(backend.dgid) + bytes(backend.sgid) + bytes(20) + b"\xff\xff")
    return protocol.QUERY_ROUTE_RESP.pack(
        device.node_guid.to_bytes(8, "big"),
        paths[0],
        paths[1] if count > 1 else b"",
        first,
        second,
        count,
        backend.port_num,
        device.index & 0xFFFFFFFF,
    )


def _init_qp_attr(session: Session, channel: Channel, body: bytes) -> bytes:
    _, number, state = _fields(user_cm.INIT_QP_ATTR, body)
    identifier = _find(session, channel, number)
    if state > QPState.ERR:
        raise cm_error(errno.EINVAL, f"no state {state} of a queue pair", "init_qp_attr")
    return pack_qp_attr(*identifier.backend.init_qp_attr(QPState(state)))


# -- options --------------------------------------------------------------------------------------------------


def _set_option(session: Session, channel: Channel, body: bytes) -> bytes:
    _, number, level, name, size = _fields(user_cm.SET_OPTION, body)
    value = body[user_cm.SET_OPTION.size :]
    if size > len(value):
        raise cm_error(errno.EINVAL, f"the value has {size} bytes, and {len(value)} are here", "set_option")
    if level not in tuple(OptionLevel):
        raise cm_error(errno.ENOSYS, f"no option level {level}", "set_option")
    _find(session, channel, number).backend.set_option(level, name, value[:size])
    return b""


# -- connections ----------------------------------------------------------------------------------------------


def _conn_param(packed: bytes) -> ConnParam | None:
    """The parameters of CONNECT or ACCEPT; None if they are not valid."""
    qp_num, qkey, data, size, srq, resources, depth, flow_control, retries, rnr_retries, is_valid = (
        user_cm.CONN_PARAM.unpack(packed)
    )
    if not is_valid:
        return None
    return ConnParam(data[:size], resources, depth, flow_control, retries, rnr_retries, srq, qp_num & _QPN_MASK, qkey)


def _with_ece(layout: struct.Struct, body: bytes) -> bytes:
    """The structure with ECE options, none if it is that of an older library."""
    return body + bytes(_ECE_BYTES) if len(body) == layout.size - _ECE_BYTES else body


def _connect(session: Session, channel: Channel, body: bytes) -> bytes:
    packed, number, vendor, options = _fields(user_cm.CONNECT, _with_ece(user_cm.CONNECT, body))
    backend = _find(session, channel, number).backend
    param = _conn_param(packed)
    if param is None:
        raise cm_error(errno.EINVAL, "the parameters are not valid", "connect")
    backend.set_local_ece(Ece(vendor, options))
    backend.connect(param)
    return b""


def _listen(session: Session, channel: Channel, body: bytes) -> bytes:
    number, backlog = _fields(user_cm.LISTEN, body)
    _find(session, channel, number).backend.listen(backlog)
    return b""


def _accept(session: Session, channel: Channel, body: bytes) -> bytes:
    uid, packed, number, vendor, options = _fields(user_cm.ACCEPT, _with_ece(user_cm.ACCEPT, body))
    identifier = _find(session, channel, number)
    param = _conn_param(packed)
    if param is None:  # of the active side: the queue pair is ready
        identifier.backend.establish()
        return b""
    identifier.backend.set_local_ece(Ece(vendor, options))
    identifier.backend.accept(param)
    identifier.uid = uid
    return b""


def _reject(session: Session, channel: Channel, body: bytes) -> bytes:
    number, size, reason, data = _fields(user_cm.REJECT, body)
    backend = _find(session, channel, number).backend
    backend.reject(data[:size], reason or RejectReason.CONSUMER_DEFINED)
    return b""


def _disconnect(session: Session, channel: Channel, body: bytes) -> bytes:
    (number,) = _fields(user_cm.DISCONNECT, body)
    _find(session, channel, number).backend.disconnect()
    return b""


def _notify(session: Session, channel: Channel, body: bytes) -> bytes:
    number, event = _fields(user_cm.LISTEN, body)
    _find(session, channel, number).backend.notify(event)
    return b""


def _write_cm_event(session: Session, channel: Channel, body: bytes) -> bytes:
    number, event, status, param = _fields(user_cm.WRITE_CM_EVENT, body)
    identifier = _find(session, channel, number)
    if event not in (CmEventType.USER, _INTERNAL):
        raise cm_error(errno.EINVAL, f"event {event} cannot be written", "write_cm_event")
    (arg,) = struct.unpack_from("=Q", param)
    channel.queue.post(QueuedEvent(identifier, cast("CmEventType", event), status, arg))
    return b""


# -- multicast ------------------------------------------------------------------------------------------------


def _join_ip_mcast(session: Session, channel: Channel, body: bytes) -> bytes:
    uid, address, number = _fields(protocol.JOIN_IP_MCAST, body)
    return _join(session, _find(session, channel, number), uid, address_of(address))


def _join_mcast(session: Session, channel: Channel, body: bytes) -> bytes:
    _, uid, number, size, flags, address = _fields(user_cm.JOIN_MCAST, body)
    if flags not in tuple(McJoinFlag):
        raise cm_error(errno.EINVAL, f"flags 0x{flags:x}", "join_multicast")
    return _join(session, _find(session, channel, number), uid, address_of(address, size))


def _join(session: Session, identifier: Identifier, uid: int, group: Address) -> bytes:
    join = session.new_join(identifier, uid)
    # The program has the sockets that receive from the group (RUN_GROUP), so nothing is received here.
    identifier.backend.join_multicast(join, group, True)
    session.joins[join.number] = join
    identifier.joins.append(join)
    return _COUNT.pack(join.number)


def _leave_mcast(session: Session, channel: Channel, body: bytes) -> bytes:
    _, number = _fields(user_cm.DESTROY_ID, body)
    join = session.joins.get(number)
    if join is None:
        raise cm_error(errno.ENOENT, f"no join {number}", "leave_multicast")
    identifier = join.identifier
    if identifier.channel is not channel:
        raise cm_error(errno.EINVAL, f"join {number} belongs to another channel", "leave_multicast")
    identifier.backend.leave_multicast(join)
    channel.drop(join)
    del session.joins[number]
    identifier.joins.remove(join)
    channel.pump()
    return _COUNT.pack(join.reported)


_COMMANDS: dict[int, _Execute] = {
    Command.CREATE_ID: _create_id,
    Command.DESTROY_ID: _destroy_id,
    Command.BIND_IP: _bind_ip,
    Command.RESOLVE_IP: _resolve_ip,
    Command.RESOLVE_ROUTE: _resolve_route,
    Command.QUERY_ROUTE: _query_route,
    Command.CONNECT: _connect,
    Command.LISTEN: _listen,
    Command.ACCEPT: _accept,
    Command.REJECT: _reject,
    Command.DISCONNECT: _disconnect,
    Command.INIT_QP_ATTR: _init_qp_attr,
    Command.SET_OPTION: _set_option,
    Command.NOTIFY: _notify,
    Command.JOIN_IP_MCAST: _join_ip_mcast,
    Command.LEAVE_MCAST: _leave_mcast,
    Command.MIGRATE_ID: _migrate_id,
    Command.QUERY: _query,
    Command.BIND: _bind,
    Command.RESOLVE_ADDR: _resolve_addr,
    Command.JOIN_MCAST: _join_mcast,
    Command.RESOLVE_IB_SERVICE: _resolve_ib_service,
    Command.WRITE_CM_EVENT: _write_cm_event,
}
