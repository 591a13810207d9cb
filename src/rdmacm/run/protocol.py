"""The requests of a program's library, and the replies: the structures of ``core/library/protocol.h``.

A request is one packet: :data:`REQUEST` and a body. So is its reply: :data:`REPLY` and a body. Numbers are in native
byte order but for GUIDs. The bodies of rdma_cm commands are those of the kernel: most are in
:mod:`rdmacm.proto.user_cm`, and here are the older ones that a library may use.
"""

from __future__ import annotations

import struct
from enum import IntEnum

__all__ = [
    "ADDRINFO",
    "ADDRINFOS",
    "ASYNC_EVENT",
    "BIND_IP",
    "DEVICE",
    "DEVICES",
    "GID",
    "GROUP",
    "HELLO",
    "HOLE",
    "JOIN_IP_MCAST",
    "MOST",
    "NUMBER",
    "QUERY_ROUTE_RESP",
    "REPLY",
    "REQUEST",
    "RESOLVE_IP",
    "RESULT",
    "SLOT",
    "TAPPED",
    "VERSION",
    "WELCOME",
    "Request",
]

VERSION = 1
#: Bytes of a packet at most.
MOST = 65536


class Request(IntEnum):
    """The type of a request; below 0x100 it is a command of the kernel's rdma_cm."""

    HELLO = 0x100
    DEVICES = 0x101
    SLOT = 0x102
    GROUP = 0x103
    CHANNEL_OPEN = 0x104
    CHANNEL_CLOSE = 0x105
    ADDRINFO = 0x106
    CONTEXT_OPEN = 0x107
    CONTEXT_CLOSE = 0x108
    TAP = 0x109
    COUNTERS = 0x10A
    HOLE = 0x10B


#: ``struct run_request``: type, channel.
REQUEST = struct.Struct("=II")
#: ``struct run_reply``: error.
REPLY = struct.Struct("=i4x")
#: ``struct run_hello``: version, pid.
HELLO = struct.Struct("=II")
#: ``struct run_welcome``: version, is_captured, loss, delay, seed.
WELCOME = struct.Struct("=IIddQ")
#: ``struct run_tapped``: nanoseconds, local, remote, address_length, local_port, remote_port, is_out, segment.
TAPPED = struct.Struct("=Q16s16sIHHII")
#: ``struct run_number``: number.
NUMBER = struct.Struct("=I4x")
#: ``struct run_devices``: count.
DEVICES = struct.Struct("=I4x")
#: ``struct run_device``: name, node_guid, system_image_guid, index, ifindex, state, phys_state, max_mtu, active_mtu,
#: gids_count, gid_table_length.
DEVICE = struct.Struct("=64s8s8s8I")
#: ``struct run_gid``: gid, index, type, ifindex.
GID = struct.Struct("=16sIII4x")
#: ``struct run_slot``: first_qpn, count, port, families.
SLOT = struct.Struct("=4I")
#: ``struct run_group``: gid, ifindex.
GROUP = struct.Struct("=16sI4x")
#: ``struct run_hole``: remote, address_length, qp_num, arrived, lost.
HOLE = struct.Struct("=16s4I")
#: ``struct run_addrinfo``: has_hints, flags, family, qp_type, port_space, source_length, destination_length, source,
#: destination.
ADDRINFO = struct.Struct("=I4iII4x128s128s")
#: ``struct run_addrinfos``: count.
ADDRINFOS = struct.Struct("=I4x")
#: ``struct run_result``: flags, family, qp_type, port_space, source_length, destination_length, source_name_length,
#: destination_name_length, route_length, connect_length.
RESULT = struct.Struct("=4i6I")
#: ``struct ibv_async_event`` of a device or its port: port_num, event_type. The former is in a union with pointers.
ASYNC_EVENT = struct.Struct("=I{0}xI{0}x".format(struct.calcsize("P") - 4))

#: ``struct rdma_ucm_bind_ip``: addr, id.
BIND_IP = struct.Struct("=8x28sI")
#: ``struct rdma_ucm_resolve_ip``: src_addr, dst_addr, id, timeout_ms.
RESOLVE_IP = struct.Struct("=28s28sII")
#: ``struct rdma_ucm_query_route_resp``: node_guid, ib_route (two), src_addr, dst_addr, num_paths, port_num,
#: ibdev_index.
QUERY_ROUTE_RESP = struct.Struct("=8s64s64s28s28sIB3xI4x")
#: ``struct rdma_ucm_join_ip_mcast``: uid, addr, id.
JOIN_IP_MCAST = struct.Struct("=8xQ28sI")
