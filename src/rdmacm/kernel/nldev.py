"""RDMA devices by netlink(7): their indices, and the ports that a network namespace can use (``rdma_netlink.h``)."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ATTR = struct.Struct("=HH")
_UINT = struct.Struct("=I")

_NETLINK_RDMA = 20
_ERROR, _DONE = 2, 3
_REQUEST_DUMP = 0x301
#: RDMA_NL_NLDEV with RDMA_NLDEV_CMD_GET, and with RDMA_NLDEV_CMD_PORT_GET.
_GET_DEVICE, _GET_PORT = 5 << 10 | 1, 5 << 10 | 5
#: RDMA_NLDEV_ATTR_*.
_DEV_INDEX, _DEV_NAME, _PORT_INDEX, _PORT_STATE, _NDEV_INDEX = 1, 2, 3, 12, 50
_BUFFER = 65536


class PortSeen(NamedTuple):
    """A port as netlink shows it."""

    port_num: int
    #: ``enum ib_port_state``; 4 is ACTIVE.
    state: int
    #: The index of its network interface; 0 where that is in another network namespace, and on InfiniBand.
    ifindex: int


def device_indices() -> dict[str, int]:
    """Name → index of each device that the calling thread's network namespace has; empty where netlink has none."""
    found: dict[str, int] = {}
    try:
        for data in _dump(_GET_DEVICE, b""):
            parse_devices(data, found)
    except OSError:
        return {}
    return found


def port_states(device_index: int) -> list[PortSeen]:
    """The ports of a device; OSError where netlink does not show them."""
    found: list[PortSeen] = []
    attribute = _ATTR.pack(_ATTR.size + _UINT.size, _DEV_INDEX) + _UINT.pack(device_index)
    for data in _dump(_GET_PORT, attribute):
        parse_ports(data, found)
    return found


def _dump(kind: int, attributes: bytes) -> Iterator[bytes]:
    """The datagrams of the kernel's answer."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_RDMA) as link:
        link.send(_HEADER.pack(_HEADER.size + len(attributes), kind, _REQUEST_DUMP, 1, 0) + attributes)
        while True:
            data = link.recv(_BUFFER)
            yield data
            if _is_last(data):
                return


def _is_last(data: bytes) -> bool:
    """Whether a datagram ends the answer; OSError if it is the kernel's refusal."""
    is_last = True
    for kind, body in _messages(data):
        if kind == _ERROR and len(body) >= 4 and (code := -struct.unpack_from("=i", body)[0]) > 0:
            raise OSError(code, os.strerror(code))
        is_last = kind in (_DONE, _ERROR)
    return is_last


def parse_devices(data: bytes, found: dict[str, int]) -> None:
    """Add the devices in a datagram of the kernel's to ``found``."""
    for kind, body in _messages(data):
        if kind == _GET_DEVICE:
            values = dict(_attributes(body))
            name = values.get(_DEV_NAME, b"").partition(b"\0")[0]
            if name and _DEV_INDEX in values:
                found[name.decode(errors="replace")] = _number(values[_DEV_INDEX])


def parse_ports(data: bytes, found: list[PortSeen]) -> None:
    """Add the ports in a datagram of the kernel's to ``found``."""
    for kind, body in _messages(data):
        if kind == _GET_PORT:
            values = dict(_attributes(body))
            fields = (_number(values.get(each, b"")) for each in (_PORT_INDEX, _PORT_STATE, _NDEV_INDEX))
            found.append(PortSeen(*fields))


def _number(value: bytes) -> int:
    return int.from_bytes(value, "little" if _UINT.pack(1)[0] else "big")


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, _, _, _ = _HEADER.unpack_from(data, offset)
        if not _HEADER.size <= length <= len(data) - offset:
            raise OSError(errno.EPROTO, "a netlink message with an invalid length")
        yield kind, data[offset + _HEADER.size : offset + length]
        offset += (length + 3) & ~3


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + _ATTR.size <= len(data):
        length, kind = _ATTR.unpack_from(data, offset)
        if not _ATTR.size <= length <= len(data) - offset:
            return
        yield kind & 0x3FFF, data[offset + _ATTR.size : offset + length]
        offset += (length + 3) & ~3
