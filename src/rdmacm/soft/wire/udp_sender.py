"""The sending half of the wire of a host: packets and trains leave through two UDP sockets."""

from __future__ import annotations

import errno
import select
import socket
import time
from collections import Counter
from collections.abc import Sequence
from socket import AF_INET, AF_INET6
from typing import TYPE_CHECKING

from rdmacm.errors import errno_name
from rdmacm.proto.constants import LONGEST_TRAIN, MOST_IN_TRAIN, NO_TRAIN, SEND_AGAIN, SEND_WAIT
from rdmacm.proto.wire import Buffer
from rdmacm.provider import Tap
from rdmacm.soft.wire import sockets
from rdmacm.soft.wire.base import Undelivered, WirePath, WireRoute, group_of
from rdmacm.soft.wire.slot_filter import is_request
from rdmacm.soft.wire.udp_route import UdpRoute

if TYPE_CHECKING:
    from rdmacm.proto._core import Wire as CoreWire

__all__ = ["UNREACHABLE", "UdpSender"]

#: Errors of a packet that say that no copy of it would be delivered, either.
UNREACHABLE = frozenset(
    (
        errno.ECONNREFUSED,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.EACCES,
        errno.EPERM,
        errno.EHOSTDOWN,
        errno.ENOPROTOOPT,
    )
)


class UdpSender:
    """See :class:`rdmacm.soft.wire.udp.UdpWire`, which documents the public attributes."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._tap: Tap | None = None
        #: Reads the sockets of queue pairs, with the compiled core; set before :meth:`open`.
        self.core_wire: CoreWire | None = None
        self.counters: Counter[str] = Counter()
        #: How many bytes a train may have; 0 if the system cannot send them.
        self._train_bytes = 0
        #: The IPv4 and the IPv6 socket of this process's first slot, to send and receive.
        self._sockets: list[socket.socket | None] = [None, None]

    @property
    def tap(self) -> Tap | None:
        """See :class:`rdmacm.soft.wire.base.Wire`. It sees everything, so the compiled core does nothing meanwhile."""
        return self._tap

    @tap.setter
    def tap(self, tap: Tap | None) -> None:
        self._tap = tap
        if self.core_wire is not None:
            self.core_wire.is_enabled = tap is None

    def _report(self, report: Undelivered) -> None:
        """Give a report to the process that has sent the packet."""
        raise NotImplementedError

    def route(self, path: WirePath, traffic_class: int = 0, hop_limit: int = 0) -> UdpRoute:
        """See :meth:`Wire.route`."""
        return UdpRoute(path, traffic_class, self.port, hop_limit)

    def fileno_for(self, route: UdpRoute) -> int:
        """The descriptor of the socket that packets along a route leave from, -1 if there is none."""
        return self.own_filenos()[route.is_ipv6]

    def own_filenos(self) -> tuple[int, int]:
        """The descriptors of the sockets that IPv4 and IPv6 packets leave from, -1 where there is none."""
        first, second = (-1 if sock is None else sock.fileno() for sock in self._sockets)
        return first, second

    def can_segment(self) -> int:
        """See :meth:`Wire.can_segment`; a train also has at most 64 packets (``MOST_IN_TRAIN``)."""
        return self._train_bytes

    def send(self, route: WireRoute, buffers: Sequence[Buffer], segment: int = 0) -> bool:
        assert isinstance(route, UdpRoute)
        sock = self._sockets[route.is_ipv6]
        if sock is None:
            self.counters["EAFNOSUPPORT"] += 1
            return False
        if segment:
            if route.no_trains or not self._train_bytes:
                return self._send_singly(sock, route, buffers, segment)
            control = route.with_segment(segment)
        else:
            control = route.control
        try:
            sock.sendmsg(buffers, control, 0, route.address)
        except OSError as error:
            code = self._send_again(error.errno or 0, sock, route, buffers, control)
            if code:
                if segment and code in NO_TRAIN:
                    return self._send_cut(code, sock, route, buffers, segment)
                return self._lost(code, None if segment else buffers, route)
        if self._tap is not None:
            path = route.path
            self._tap(True, path.local, path.remote, route.source_port, self.port, buffers, segment)
        return True

    def _lost(self, code: int, buffers: Sequence[Buffer] | None, route: UdpRoute) -> bool:
        """Count a packet or train that was not sent. ``buffers`` are those of a packet, None for a train."""
        self.counters["no_room" if code in (errno.EAGAIN, errno.ENOBUFS) else errno_name(code)] += 1
        if sockets.REPORTS_ERRORS and code in UNREACHABLE and buffers is not None:
            packet = b"".join(buffers)
            if is_request(packet):
                self._report(Undelivered(packet, route.path.remote, code, b""))
        return False

    def _send_again(
        self, code: int, sock: socket.socket, route: UdpRoute, buffers: Sequence[Buffer], control: sockets.Control
    ) -> int:
        """Repeat a sendmsg() that failed with ``code``; return 0, or the errno of the packet itself.

        The error may have been one of an earlier packet (``sockets.REPORTS_ERRORS``). Then the next call has another
        result.
        """
        before = 0
        for _ in range(SEND_AGAIN):
            if code == before or not (sockets.REPORTS_ERRORS or code == errno.EAGAIN):
                break
            before = code
            if code == errno.EAGAIN:
                poll = select.poll()
                poll.register(sock.fileno(), select.POLLOUT)
                ready = poll.poll(SEND_WAIT)
                if ready and not ready[0][1] & select.POLLOUT:  # a report, which ends every poll(2) at once
                    time.sleep(SEND_WAIT / 1000)
            try:
                sock.sendmsg(buffers, control, 0, route.address)
            except OSError as error:
                code = error.errno or 0
            else:
                return 0
        return code

    def _send_cut(
        self, code: int, sock: socket.socket, route: UdpRoute, buffers: Sequence[Buffer], segment: int
    ) -> bool:
        """Send the packets of a train that the system refused; remember it if the path was the reason."""
        sent = self._send_singly(sock, route, buffers, segment)
        # A train that was too long, or packets too long for the path, mean nothing for the next train.
        too_much = sum(map(len, buffers)) > min(LONGEST_TRAIN, MOST_IN_TRAIN * segment)
        if sent and code != errno.EMSGSIZE and not too_much:
            route.no_trains = True
        return sent

    def _send_singly(self, sock: socket.socket, route: UdpRoute, buffers: Sequence[Buffer], segment: int) -> bool:
        self.counters["trains_cut"] += 1
        train = memoryview(b"".join(buffers))
        sent = True
        for index, start in enumerate(range(0, len(train), segment)):
            sent &= self._send_alone(sock, route, route.resealed(train[start : start + segment], index))
        return sent

    def _send_alone(self, sock: socket.socket, route: UdpRoute, buffers: Sequence[Buffer]) -> bool:
        try:
            sock.sendmsg(buffers, route.control, 0, route.address)
        except OSError as error:
            code = self._send_again(error.errno or 0, sock, route, buffers, route.control)
            if code:
                return self._lost(code, buffers, route)
        if self._tap is not None:
            path = route.path
            self._tap(True, path.local, path.remote, route.source_port, self.port, buffers, 0)
        return True

    def _tap_incoming(self, data: memoryview, segment: int, remote: tuple[str | int, ...], local: bytes) -> None:
        host, port = remote[:2]
        assert self._tap is not None and isinstance(host, str) and isinstance(port, int)
        local = group_of(local)
        family = AF_INET if len(local) == 4 else AF_INET6
        self._tap(False, local, socket.inet_pton(family, host), port, self.port, (data,), segment)
