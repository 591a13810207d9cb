"""Devices, events, addresses and queue pair attributes as the structures of C."""

from __future__ import annotations

import errno
import os
import struct
import sys
from collections.abc import Iterable
from socket import AF_INET, AF_INET6
from typing import TYPE_CHECKING

from rdmacm.address import AF_IB, Address, unpack_address
from rdmacm.constants import CmEventType
from rdmacm.proto import user_cm
from rdmacm.provider import QueuedEvent
from rdmacm.provider.connparam import ConnParam, Ece, UdParam
from rdmacm.run import protocol
from rdmacm.verbs.attr import AHAttr, QPAttr
from rdmacm.verbs.device import Device
from rdmacm.verbs.enums import GidType, QPAttrMask

if TYPE_CHECKING:
    from rdmacm.proto.sa import PathRecord

#: ``struct ib_user_path_rec``, with the fields in network byte order as bytes.
_USER_PATH = struct.Struct("=16s16s2s2sI4sII2s10B")
_ARG = struct.Struct("=Q")
_FAMILY = struct.Struct("=H")
#: Bytes of a socket address, by family.
_ADDRESS_SIZES = {AF_INET: 16, AF_INET6: 28, AF_IB: 48}
#: The type of a RoCEv2 GID in ``struct ibv_gid_entry``.
_ROCE_V2 = int(GidType.ROCE_V2)


def swapped(value: int, size: int) -> int:
    """A number as a native field shows it whose bytes are in network byte order."""
    return int.from_bytes(value.to_bytes(size, "big"), sys.byteorder)


def pack_list(head: struct.Struct, items: Iterable[bytes]) -> bytes:
    """A structure with the number of items, and these, as many as there is room for in a reply."""
    body, count = b"", 0
    for item in items:
        if protocol.REPLY.size + head.size + len(body) + len(item) > protocol.MOST:
            break
        body, count = body + item, count + 1
    return head.pack(count) + body


# -- devices --------------------------------------------------------------------------------------------------


def pack_devices(devices: Iterable[Device]) -> bytes:
    """``struct run_devices`` and the devices, with their GID tables as far as there is room."""
    return pack_list(protocol.DEVICES, map(_pack_device, devices))


def _pack_device(device: Device) -> bytes:
    port, guid = device.ports[0], device.node_guid.to_bytes(8, "big")
    return protocol.DEVICE.pack(
        os.fsencode(device.name)[:63],
        guid,
        guid,
        device.index,
        device.index,
        port.state,
        port.phys_state,
        port.max_mtu,
        port.active_mtu or 0,
        len(port.gids),
        port.gid_tbl_len,
    ) + b"".join(protocol.GID.pack(row.gid, row.gid_index, _ROCE_V2, row.ndev_ifindex) for row in port.gids)


# -- addresses and paths --------------------------------------------------------------------------------------


def address_of(data: bytes, size: int | None = None) -> Address:
    """The address in a socket address structure; EINVAL unless it has the size of its family."""
    expected = _ADDRESS_SIZES.get(_FAMILY.unpack_from(data)[0], 0)
    address = unpack_address(data)
    if address is None or size not in (None, expected):
        raise OSError(errno.EINVAL, "not a socket address")
    return address


def packed_or_empty(address: Address | None) -> bytes:
    """The structure of a socket address; no bytes for None."""
    return b"" if address is None else address.pack()


def pack_user_path(path: PathRecord) -> bytes:
    """``struct ib_user_path_rec``, 64 bytes."""
    return _USER_PATH.pack(
        path.dgid,
        path.sgid,
        path.dlid.to_bytes(2, "big"),
        path.slid.to_bytes(2, "big"),
        0,
        path.flow_label.to_bytes(4, "big"),
        path.reversible,
        path.mtu,
        path.pkey.to_bytes(2, "big"),
        path.hop_limit,
        path.traffic_class,
        path.numb_path,
        path.sl,
        path.mtu_selector,
        path.rate_selector,
        path.rate,
        path.packet_life_time_selector,
        path.packet_life_time,
        path.preference,
    )


# -- events ---------------------------------------------------------------------------------------------------


def pack_event(uid: int, number: int, event: QueuedEvent, ece: Ece) -> bytes:
    """``struct rdma_ucm_event_resp``."""
    return user_cm.EVENT_RESP.pack(
        uid, number, event.type, event.status, _pack_param(event), ece.vendor_id, ece.options
    )


def _pack_param(event: QueuedEvent) -> bytes:
    param = event.param
    if isinstance(param, UdParam):
        return user_cm.UD_PARAM.pack(
            param.qp_num, param.qkey, _pack_vector(param.ah_attr), param.private_data, len(param.private_data)
        )
    if isinstance(param, ConnParam):
        return user_cm.CONN_PARAM.pack(
            param.qp_num,
            param.qkey,
            param.private_data,
            len(param.private_data),
            bool(param.srq),
            param.responder_resources,
            param.initiator_depth,
            param.flow_control,
            param.retry_count,
            param.rnr_retry_count,
            0,
        )
    # The library's own event INTERNAL has a number that the enumeration lacks.
    return _ARG.pack(event.arg) if event.type >= CmEventType.USER else b""


# -- attributes of queue pairs --------------------------------------------------------------------------------


def pack_qp_attr(attr: QPAttr, mask: QPAttrMask) -> bytes:
    """``struct ib_uverbs_qp_attr``. The sizes of the queues are the program's."""
    return user_cm.QP_ATTR.pack(
        mask,
        attr.qp_state,
        attr.cur_qp_state,
        attr.path_mtu,
        attr.path_mig_state,
        attr.qkey,
        attr.rq_psn,
        attr.sq_psn,
        attr.dest_qp_num,
        attr.qp_access_flags,
        _pack_vector(attr.ah_attr),
        _pack_vector(attr.alt_ah_attr),
        *(0, 0, 0, 0, 0),
        attr.pkey_index,
        attr.alt_pkey_index,
        attr.en_sqd_async_notify,
        attr.sq_draining,
        attr.max_rd_atomic,
        attr.max_dest_rd_atomic,
        attr.min_rnr_timer,
        attr.port_num,
        attr.timeout,
        attr.retry_cnt,
        attr.rnr_retry,
        attr.alt_port_num,
        attr.alt_timeout,
    )


def _pack_vector(vector: AHAttr) -> bytes:
    route = vector.gr
    return user_cm.AH_ATTR.pack(
        route.dgid,
        route.flow_label,
        route.sgid_index,
        route.hop_limit,
        route.traffic_class,
        vector.dlid,
        vector.sl,
        vector.src_path_bits,
        vector.static_rate,
        vector.is_global,
        vector.port_num,
    )
