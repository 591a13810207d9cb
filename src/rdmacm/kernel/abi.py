"""The commands and events of ``/dev/infiniband/rdma_cm`` as bytes, ``rdma/rdma_user_cm.h`` of Linux.

A command is a header and a payload, which write(2) passes to the kernel. A command that has a response carries the
address of a buffer, and the kernel fills that before write(2) returns. Everything is in native byte order but what the
layouts name otherwise. This module makes and reads the bytes, and opens nothing.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

from rdmacm.address import Address, Gid, unpack_address
from rdmacm.proto import user_cm
from rdmacm.proto.plainints import QP_ALT_PATH, QP_AV
from rdmacm.proto.sa import PathData
from rdmacm.proto.sa.subnet import ServiceRecord
from rdmacm.proto.user_cm import DEVICE_INDEX_OFFSET, Command, Query, ServiceFlag
from rdmacm.proto.wire import WireError
from rdmacm.provider.connparam import MIN_RNR_TIMER, ConnParam, Ece, UdParam
from rdmacm.verbs.attr import AHAttr, GlobalRoute, QPAttr, QPCap
from rdmacm.verbs.enums import MigState, Mtu, QPAttrMask, QPState

__all__ = [
    "ABI_VERSIONS",
    "DEVICE_INDEX_OFFSET",
    "MAX_PRIVATE_DATA",
    "Addresses",
    "Command",
    "Event",
    "Query",
    "Response",
]

#: The options of a peer that has sent none.
NO_ECE = Ece(0)
#: The versions of the interface that this module speaks.
ABI_VERSIONS = (4,)
#: Bytes of private data that a command or an event has room for; the length is in one byte.
MAX_PRIVATE_DATA = 255


class Response(IntEnum):
    """The size of a response, in bytes."""

    CREATE_ID = user_cm.CREATE_ID_RESP.size
    COUNT = user_cm.CREATE_ID_RESP.size
    ADDR = user_cm.QUERY_ADDR_RESP.size
    # The kernel wants room for one path more than the six that it has.
    PATH = user_cm.QUERY_PATH_RESP.size + 7 * PathData.SIZE
    SERVICE = user_cm.QUERY_PATH_RESP.size + 64 * ServiceRecord.SIZE
    QP_ATTR = user_cm.QP_ATTR.size
    EVENT = user_cm.EVENT_RESP.size


class Addresses(NamedTuple):
    """The response to a QUERY of addresses or GIDs."""

    #: The GUID of the device, 64 bits; 0 while the id is bound to none.
    node_guid: int
    #: The kernel's index of the device; None where the kernel does not tell it, or the id is bound to none.
    device_index: int | None
    #: The port's number, from 1; 0 while the id is bound to no device.
    port_num: int
    #: The P_Key, 16 bits.
    pkey: int
    #: The source and the destination; None where unset.
    source: Address | None
    destination: Address | None


class Event(NamedTuple):
    """An event as the kernel reports it; its parameters are read by :func:`unpack_conn` or :func:`unpack_ud`."""

    #: The number that the id, or the join of a group, was made with.
    uid: int
    #: The kernel's number of the id; of a CONNECT_REQUEST that of the new one, of a group that of the join.
    id: int
    #: ``enum rdma_cm_event_type``.
    type: int
    #: 0, a negative errno, or a positive code of the transport.
    status: int
    #: The parameters, 304 bytes.
    param: bytes
    #: The ECE options of the peer.
    ece: Ece


# -- commands: the payload, which follows the header ------------------------------------------------------


def frame(command: Command, payload: bytes, response_size: int) -> bytes:
    """A whole command, for write(2)."""
    return user_cm.CMD_HDR.pack(command, len(payload), response_size) + payload


def create_id(response: int, uid: int, port_space: int, qp_type: int) -> bytes:
    """CREATE_ID: ``uid`` comes back in each event of the id. Response: :func:`unpack_number`, the new id's."""
    return user_cm.CREATE_ID.pack(uid, response, port_space, qp_type)


def destroy_id(response: int, number: int) -> bytes:
    """DESTROY_ID and LEAVE_MCAST. Response: :func:`unpack_number`, how many of its events were fetched."""
    return user_cm.DESTROY_ID.pack(response, number)


def bind(number: int, address: Address) -> bytes:
    """BIND: the address may be of any family."""
    packed = address.pack()
    return user_cm.BIND.pack(number, len(packed), packed)


def resolve_addr(number: int, source: Address | None, destination: Address, timeout_ms: int) -> bytes:
    """RESOLVE_ADDR; the timeout is in milliseconds."""
    first = b"" if source is None else source.pack()
    second = destination.pack()
    return user_cm.RESOLVE_ADDR.pack(number, timeout_ms, len(first), len(second), first, second)


def pair(number: int, value: int) -> bytes:
    """RESOLVE_ROUTE (milliseconds), LISTEN (backlog) and NOTIFY (event)."""
    return user_cm.LISTEN.pack(number, value)


def only_id(number: int) -> bytes:
    """DISCONNECT."""
    return user_cm.DISCONNECT.pack(number)


def query(response: int, number: int, option: Query) -> bytes:
    """QUERY. Response: :func:`unpack_addresses`, :func:`unpack_paths` or :func:`unpack_services`."""
    return user_cm.QUERY.pack(response, number, option)


def conn_param(param: ConnParam | None) -> bytes:
    """``struct rdma_ucm_conn_param``, 272 bytes; None, which is not valid, in an ACCEPT that confirms a reply.

    The private data are at most :data:`MAX_PRIVATE_DATA` bytes.
    """
    if param is None:
        return bytes(user_cm.CONN_PARAM.size)
    return user_cm.CONN_PARAM.pack(
        param.qp_num,
        param.qkey,
        param.private_data,
        len(param.private_data),
        int(bool(param.srq)),
        param.responder_resources,
        param.initiator_depth,
        param.flow_control & 0xFF,
        min(param.retry_count, 7),
        min(param.rnr_retry_count, 7),
        1,
    )


def connect(number: int, param: ConnParam, ece: Ece) -> bytes:
    """CONNECT."""
    return user_cm.CONNECT.pack(conn_param(param), number, ece.vendor_id, ece.options)


def accept(number: int, uid: int, param: ConnParam | None, ece: Ece) -> bytes:
    """ACCEPT: ``uid`` comes back in the events from now on. Without ``param`` it confirms the peer's reply."""
    return user_cm.ACCEPT.pack(uid, conn_param(param), number, ece.vendor_id, ece.options)


def reject(number: int, private_data: bytes, reason: int) -> bytes:
    """REJECT."""
    return user_cm.REJECT.pack(number, len(private_data), reason, private_data)


def init_qp_attr(response: int, number: int, state: QPState) -> bytes:
    """INIT_QP_ATTR. Response: :func:`unpack_qp_attr`."""
    return user_cm.INIT_QP_ATTR.pack(response, number, state)


def get_event(response: int) -> bytes:
    """GET_EVENT. Response: :func:`unpack_event`."""
    return user_cm.GET_EVENT.pack(response)


def set_option(value: int, size: int, number: int, level: int, name: int) -> bytes:
    """SET_OPTION: ``value`` is the address of the option's value, ``size`` its length in bytes."""
    return user_cm.SET_OPTION.pack(value, number, level, name, size)


def join_multicast(response: int, uid: int, number: int, group: Address, flags: int) -> bytes:
    """JOIN_MCAST: ``uid`` comes back in the events of the join. Response: :func:`unpack_number`, that of the join."""
    packed = group.pack()
    return user_cm.JOIN_MCAST.pack(response, uid, number, len(packed), flags, packed)


def migrate_id(response: int, number: int, descriptor: int) -> bytes:
    """MIGRATE_ID, written to the new descriptor; ``descriptor`` is the old one. Response: :func:`unpack_number`."""
    return user_cm.MIGRATE_ID.pack(response, number, descriptor)


def resolve_ib_service(number: int, service_id: int | None, name: bytes) -> bytes:
    """RESOLVE_IB_SERVICE: by the number of the service, or by its name of up to 63 bytes."""
    flags = ServiceFlag.NAME if service_id is None else ServiceFlag.ID
    return user_cm.RESOLVE_IB_SERVICE.pack(number, service_id or 0, name, flags)


def write_cm_event(number: int, event: int, status: int, arg: int) -> bytes:
    """WRITE_CM_EVENT."""
    return user_cm.WRITE_CM_EVENT.pack(number, event, status, struct.pack("=Q", arg))


# -- responses --------------------------------------------------------------------------------------------


def unpack_number(data: bytes) -> int:
    """The 32-bit number in a response."""
    found: int = user_cm.CREATE_ID_RESP.unpack_from(data)[0]
    return found


def unpack_addresses(data: bytes) -> Addresses:
    """The addresses or GIDs of an id."""
    guid, port, _, source_size, destination_size, source, destination, index = user_cm.QUERY_ADDR_RESP.unpack(data)
    return Addresses(
        int.from_bytes(data[_NODE_GUID], "big"),
        None if index == UNKNOWN_DEVICE or not guid else index,
        port,
        int.from_bytes(data[_PKEY], "big"),
        unpack_address(source[:source_size]),
        unpack_address(destination[:destination_size]),
    )


#: What the index of a device is set to before a query: an older kernel leaves it as it is.
UNKNOWN_DEVICE = 0xFFFFFFFF
#: The fields of addresses that are in network byte order.
_NODE_GUID, _PKEY = slice(0, 8), slice(10, 12)


def unpack_paths(data: bytes) -> tuple[PathData, ...]:
    """The path records of an id, with their flags."""
    return tuple(PathData.unpack(each) for each in _records(data, PathData.SIZE))


def unpack_services(data: bytes) -> tuple[ServiceRecord, ...]:
    """The service records that RESOLVE_IB_SERVICE has found."""
    return tuple(ServiceRecord.unpack(each) for each in _records(data, ServiceRecord.SIZE))


def _records(data: bytes, size: int) -> list[bytes]:
    (count,) = user_cm.QUERY_PATH_RESP.unpack_from(data)
    if 8 + count * size > len(data):
        raise WireError(f"{count} records do not fit into {len(data)} bytes")
    return [data[start : start + size] for start in range(8, 8 + count * size, size)]


def unpack_qp_attr(data: bytes, attr: QPAttr) -> QPAttrMask:
    """``struct ib_uverbs_qp_attr``: set the attributes of a queue pair, and return which of them count."""
    mask, *numbers = user_cm.QP_ATTR.unpack(data)
    found: dict[str, Any] = dict(zip(_QP_ATTR_FIELDS, numbers, strict=True))
    for name in QPCap.__slots__:  # the connection manager tells no sizes of queues
        del found[name]
    found["qp_state"], found["cur_qp_state"] = _state_of(found["qp_state"]), _state_of(found["cur_qp_state"])
    found["path_mtu"] = _mtu_of(found["path_mtu"] or Mtu.MTU_256)
    found["path_mig_state"] = _migration_of(found["path_mig_state"])
    found["min_rnr_timer"] = found["min_rnr_timer"] or MIN_RNR_TIMER
    for name, bit in (("ah_attr", QP_AV), ("alt_ah_attr", QP_ALT_PATH)):
        vector = found.pop(name)
        if mask & bit:
            found[name] = _unpack_address_vector(vector)
    for name, value in found.items():
        setattr(attr, name, value)
    return _mask_of(mask & _KNOWN_ATTRIBUTES)


# The members of enumerations: their classes take long to find one, and each connection has the same.
_state_of, _mtu_of = lru_cache(64)(QPState), lru_cache(64)(Mtu)
_migration_of, _mask_of = lru_cache(64)(MigState), lru_cache(64)(QPAttrMask)


#: The fields behind the mask, with their names in QPAttr.
_QP_ATTR_FIELDS = (
    *("qp_state", "cur_qp_state", "path_mtu", "path_mig_state", "qkey", "rq_psn", "sq_psn", "dest_qp_num"),
    *("qp_access_flags", "ah_attr", "alt_ah_attr", *QPCap.__slots__, "pkey_index", "alt_pkey_index"),
    *("en_sqd_async_notify", "sq_draining", "max_rd_atomic", "max_dest_rd_atomic", "min_rnr_timer", "port_num"),
    *("timeout", "retry_cnt", "rnr_retry", "alt_port_num", "alt_timeout"),
)
#: The kernel also sets bits of attributes of its own, for which ``ibv_modify_qp`` has none.
_KNOWN_ATTRIBUTES = 0x1FFFFF


def _unpack_address_vector(data: bytes) -> AHAttr:
    """``struct ib_uverbs_ah_attr``, 32 bytes."""
    dgid, flow_label, sgid_index, hop_limit, traffic_class, dlid, sl, path_bits, rate, is_global, port = (
        user_cm.AH_ATTR.unpack(data)
    )
    route = GlobalRoute(bytes.__new__(Gid, dgid), sgid_index, flow_label, hop_limit, traffic_class)
    return AHAttr(dlid, sl, path_bits, rate, bool(is_global), port, route)


def unpack_event(data: bytes) -> Event:
    """An event."""
    uid, number, kind, status, param, vendor, options = user_cm.EVENT_RESP.unpack(data)
    return Event(uid, number, kind, status, param, Ece(vendor, options) if vendor or options else NO_ECE)


def unpack_conn(param: bytes) -> ConnParam:
    """The parameters in an event of a connected id."""
    fields = user_cm.CONN_PARAM.unpack_from(param)
    qp_num, qkey, data, size, srq, resources, depth, flow_control, retries, rnr_retries, _ = fields
    return ConnParam(data[:size], resources, depth, flow_control, retries, rnr_retries, srq, qp_num, qkey)


def unpack_ud(param: bytes) -> UdParam:
    """The parameters in an event of a datagram id, or of a multicast group."""
    qp_num, qkey, vector, data, size = user_cm.UD_PARAM.unpack_from(param)
    return UdParam(data[:size], _unpack_address_vector(vector), qp_num, qkey)


def unpack_arg(param: bytes) -> int:
    """The number of an event that was written by WRITE_CM_EVENT."""
    found: int = struct.unpack_from("=Q", param)[0]
    return found
