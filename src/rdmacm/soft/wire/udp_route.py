"""A path prepared for sending over UDP sockets: the address and the ancillary data of its packets and trains."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from socket import AF_INET, AF_INET6
from typing import TYPE_CHECKING

from rdmacm.proto.constants import ICRC_LENGTH, SHORTEST_PACKET
from rdmacm.proto.roce.icrc import Icrc
from rdmacm.proto.wire import Buffer
from rdmacm.soft.wire import sockets
from rdmacm.soft.wire.base import SocketAddress, WirePath

if TYPE_CHECKING:
    from rdmacm.proto._core import Route


class UdpRoute:
    """Implements :class:`rdmacm.soft.wire.base.WireRoute`."""

    __slots__ = ("address", "control", "core", "_icrc", "is_ipv6", "is_multicast", "no_trains", "_segment",
                 "_train_control", "path", "remote_host", "source_port", "traffic_class")  # fmt: skip

    def __init__(self, path: WirePath, traffic_class: int, port: int, hop_limit: int = 0) -> None:
        if len(path.local) != len(path.remote) or len(path.local) not in (4, 16):
            raise ValueError(f"a path has two addresses of 4 or 16 bytes, not {len(path.local)} and {len(path.remote)}")
        #: The path, the type of service or traffic class of its packets, and the UDP port they leave from.
        self.path: WirePath = path
        self.traffic_class: int = traffic_class
        self.source_port: int = port
        self.is_ipv6: bool = len(path.remote) == 16
        self.is_multicast: bool = path.remote[0] == 0xFF if self.is_ipv6 else path.remote[0] >> 4 == 0xE
        self.remote_host: str = socket.inet_ntop(AF_INET6 if self.is_ipv6 else AF_INET, path.remote)
        host = self.remote_host
        self.address: SocketAddress = (host, port, 0, path.scope_id) if self.is_ipv6 else (host, port)
        #: The ancillary data of a packet, and of a train of packets of ``_segment`` bytes.
        self.control: sockets.Control = sockets.control(path.local, path.scope_id, traffic_class, hop_limit)
        self._segment = 0
        self._train_control = self.control
        #: Whether the system has refused a train on this path.
        self.no_trains: bool = False
        #: The same as the compiled core has it for datagrams; None before the first.
        self.core: Route | None = None
        #: Made when first needed.
        self._icrc: Icrc | None = None

    def with_segment(self, segment: int) -> sockets.Control:
        """The ancillary data of a train. Nearly all trains of a path have one packet size."""
        if segment != self._segment:
            self._train_control = [*self.control, sockets.segment_control(segment)]
            self._segment = segment
        return self._train_control

    def resealed(self, packet: memoryview, index: int) -> Sequence[Buffer]:
        """Packet ``index`` of a train, with the ICRC for the IPv4 identification 0 of a packet that is sent alone."""
        if self.is_ipv6 or not index or len(packet) < SHORTEST_PACKET:
            return (packet,)
        if self._icrc is None:
            self._icrc = Icrc(self.path.local, self.path.remote, self.source_port, self.address[1])
        body = packet[:-ICRC_LENGTH]
        return body, self._icrc.seal((body,))
