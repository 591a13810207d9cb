"""The UDP sockets of simulated hosts.

Their datagrams are packets of the fabric, with its faults. A damaged one is lost, as its checksum tells.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from random import Random
from socket import AF_INET, SO_REUSEADDR, SOL_SOCKET
from typing import Any, Protocol

from rdmacm.address import InetAddr, is_link_local, lookup_address
from rdmacm.proto.wire import Buffer
from rdmacm.provider import RouteChoice
from rdmacm.testing.faults import FabricPacket
from rdmacm.testing.network import MemoryNetwork

#: Datagrams that wait in a socket; more are lost, as by a full socket buffer.
_MAX_INBOX = 256
#: Ports of sockets that are bound to none.
_FIRST_PORT, _LAST_PORT = 32768, 60999


class UdpHost(Protocol):
    """What a socket needs of its host."""

    network: MemoryNetwork
    random: Random
    #: The sockets of this process.
    _udp: list[SimUdp]

    @property
    def processes(self) -> Sequence[UdpHost]:
        """The processes of the host."""

    def _find_source(self, destination: InetAddr) -> RouteChoice | None:
        """The route to a destination."""

    def _send_udp(self, source: InetAddr, destination: InetAddr, data: bytes) -> bool:
        """Send a datagram; False when it cannot leave the host."""


class SimUdp:
    """A UDP socket of one process of a host; see :class:`rdmacm.provider.udp.UdpSocket`.

    ``on_readable()`` is called by the host's progress after a datagram has arrived.
    """

    def __init__(self, host: UdpHost, family: int, on_readable: Callable[[], None]) -> None:
        self._host = host
        self._bound = InetAddr.any(family)
        self._is_shared = False
        self._inbox: deque[tuple[bytes, Any]] = deque()
        self.on_readable = on_readable
        #: Whether :attr:`on_readable` is to be called.
        self.is_due: bool = False

    def setsockopt(self, level: int, optname: int, value: int) -> None:
        if (level, optname) == (SOL_SOCKET, SO_REUSEADDR):
            self._is_shared = bool(value)

    def bind(self, address: Any) -> None:
        wanted = lookup_address(address)
        assert isinstance(wanted, InetAddr)
        if not wanted.is_any and self._host.network.interface_of(wanted.ip) is None:
            raise _error(errno.EADDRNOTAVAIL)
        others = [each for process in self._host.processes for each in process._udp]
        if wanted.port:
            if any(each._blocks(wanted) and not (each._is_shared and self._is_shared) for each in others):
                raise _error(errno.EADDRINUSE)
        else:
            wanted = wanted._replace(port=self._free_port(wanted, others))
        self._bound = wanted
        self._host._udp.append(self)

    def _free_port(self, wanted: InetAddr, others: Sequence[SimUdp]) -> int:
        first = int(self._host.random.random() * (_LAST_PORT - _FIRST_PORT + 1))
        for step in range(_LAST_PORT - _FIRST_PORT + 1):
            port = _FIRST_PORT + (first + step) % (_LAST_PORT - _FIRST_PORT + 1)
            if not any(each._blocks(wanted._replace(port=port)) for each in others):
                return port
        raise _error(errno.EADDRINUSE)

    def _blocks(self, wanted: InetAddr) -> bool:
        """Whether another socket cannot have an address beside this one."""
        own = self._bound
        if (own.port, own.family) != (wanted.port, wanted.family):
            return False
        return own.is_any or wanted.is_any or own.ip == wanted.ip

    def connect(self, address: Any) -> None:
        """Choose the local address for a destination."""
        destination = lookup_address(address)
        assert isinstance(destination, InetAddr)
        self._bound = self._source_for(destination)._replace(port=self._bound.port)

    def _source_for(self, destination: InetAddr) -> InetAddr:
        if not self._bound.is_any:
            return self._bound
        found = self._host._find_source(destination)
        if found is None or not isinstance(found.source, InetAddr):
            raise _error(errno.ENETUNREACH)
        return found.source._replace(port=self._bound.port)

    def getsockname(self) -> Any:
        return self._bound.sockaddr

    def fileno(self) -> int:
        return -1

    def sendmsg(self, buffers: Iterable[Buffer], ancdata: Iterable[Any], flags: int, address: Any) -> int:  # noqa: ARG002
        destination = lookup_address(address)
        assert isinstance(destination, InetAddr)
        data = b"".join(buffers)
        source = self._source_for(destination)
        if not self._host._send_udp(source, destination, data):
            raise _error(errno.EMSGSIZE if self._host.network.interface_of(source.ip) else errno.ENETUNREACH)
        return len(data)

    def takes(self, packet: FabricPacket) -> bool:
        """Whether a packet is for this socket."""
        own = self._bound
        is_v4 = len(packet.remote) == 4
        return own.port == packet.port and is_v4 is (own.family == AF_INET) and (own.is_any or own.ip == packet.remote)

    def arrive(self, packet: FabricPacket, data: bytes) -> bool:
        """Queue a datagram; return False if there is no room."""
        if len(self._inbox) >= _MAX_INBOX:
            return False
        interface = self._host.network.interface_of(packet.remote)
        scope = interface.index if interface is not None and is_link_local(packet.local) else 0
        source = InetAddr(self._bound.family, packet.local, packet.source_port, 0, scope)
        self._inbox.append((data, source.sockaddr))
        self.is_due = True
        return True

    def recvfrom_into(self, buffer: memoryview) -> tuple[int, Any]:
        if not self._inbox:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        data, source = self._inbox.popleft()
        size = min(len(data), len(buffer))
        buffer[:size] = data[:size]
        return size, source

    def close(self) -> None:
        if self in self._host._udp:
            self._host._udp.remove(self)
        self._inbox.clear()
        self.is_due = False


def _error(code: int) -> OSError:
    return OSError(code, os.strerror(code))
