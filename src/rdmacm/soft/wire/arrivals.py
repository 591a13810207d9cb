"""What the compiled core has read from the sockets of a wire, and leaves to Python."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from socket import AF_INET, AF_INET6
from typing import TYPE_CHECKING

from rdmacm.soft.wire.base import IpFields, PacketBuffer, Received, SocketAddress, group_key

if TYPE_CHECKING:
    from rdmacm.proto._core import Wire as CoreWire


def arrivals(core_wire: CoreWire) -> Iterator[Received]:
    """Take it, oldest first. A local address that is not known is empty."""
    for data, segment, (host, number, flow, scope), local, group, traffic_class, hop_limit in core_wire.take_arrivals():
        buffer = PacketBuffer(data)
        if traffic_class >= 0 and hop_limit >= 0:
            buffer.ip_fields = IpFields(traffic_class, hop_limit)
        source: SocketAddress
        if len(host) == 4:
            source = socket.inet_ntop(AF_INET, host), number
        else:
            source = socket.inet_ntop(AF_INET6, host), number, flow, scope
        yield memoryview(buffer), segment, source, group_key(local, group) if group else local
