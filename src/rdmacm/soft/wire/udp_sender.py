"""The sending half of the wire of a host: packets and trains leave through two UDP sockets."""

from __future__ import annotations

import errno
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence

from rdmacm.errors import errno_name
from rdmacm.proto.constants import LONGEST_TRAIN, MOST_IN_TRAIN, NO_TRAIN, SEND_AGAIN, SEND_WAIT
from rdmacm.proto.wire import Buffer
from rdmacm.provider import Tap
from rdmacm.soft.wire import sockets
from rdmacm.soft.wire.base import Undelivered, WireRoute
from rdmacm.soft.wire.slot_filter import is_request
from rdmacm.soft.wire.udp_route import UdpRoute

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
    """Sends packets and trains along routes, and repeats what a report of an earlier packet has made fail."""

    def __init__(
        self, port: int, counters: Counter[str], traffic: Counter[str], report: Callable[[Undelivered], None]
    ) -> None:
        self._port = port
        #: Those of the wire.
        self._counters = counters
        self._traffic = traffic
        #: Gives a report to the process that has sent the packet.
        self._report = report
        #: Sees what was sent.
        self.tap: Tap | None = None
        #: How many bytes a train may have; 0 if the system cannot send them.
        self.train_bytes = 0
        #: The IPv4 and the IPv6 socket of this process's first slot, to send and receive.
        self.sockets: list[socket.socket | None] = [None, None]

    def send(self, route: WireRoute, buffers: Sequence[Buffer], segment: int = 0) -> bool:
        """See :meth:`rdmacm.soft.wire.base.Wire.send`."""
        assert isinstance(route, UdpRoute)
        sock = self.sockets[route.is_ipv6]
        if sock is None:
            self._counters["EAFNOSUPPORT"] += 1
            return False
        if segment:
            if route.no_trains or not self.train_bytes:
                return self._send_singly(route, buffers, segment)
            control = route.with_segment(segment)
        else:
            control = route.control
        try:
            sock.sendmsg(buffers, control, 0, route.address)
        except OSError as error:
            code = self._send_again(error.errno or 0, sock, route, buffers, control)
            if code:
                if segment and code in NO_TRAIN:
                    return self._send_cut(code, route, buffers, segment)
                return self._lost(code, buffers, route, segment)
        size, traffic = sum(map(len, buffers)), self._traffic
        packets = -(-size // segment) if segment else 1
        traffic["sent_pkts"] += packets
        traffic["sent_bytes"] += size
        if route.is_multicast:
            traffic["multicast_xmit_packets"] += packets
        if self.tap is not None:
            path = route.path
            self.tap(True, path.local, path.remote, route.source_port, self._port, buffers, segment)
        return True

    def _lost(self, code: int, buffers: Sequence[Buffer], route: UdpRoute, segment: int = 0) -> bool:
        """Count a packet or train that was not sent, and report the requests in it."""
        whole = b"".join(buffers)
        step = segment or len(whole)
        starts = range(0, len(whole), step)
        self._traffic["send_err"] += len(starts)
        self._counters["no_room" if code in (errno.EAGAIN, errno.ENOBUFS) else errno_name(code)] += 1
        if sockets.REPORTS_ERRORS and code in UNREACHABLE:
            for start in starts:
                packet = whole[start : start + step]
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

    def _send_cut(self, code: int, route: UdpRoute, buffers: Sequence[Buffer], segment: int) -> bool:
        """Send the packets of a train that the system refused; remember it if the path was the reason."""
        sent = self._send_singly(route, buffers, segment)
        # A train that was too long, or packets too long for the path, mean nothing for the next train.
        too_much = sum(map(len, buffers)) > min(LONGEST_TRAIN, MOST_IN_TRAIN * segment)
        if sent and code != errno.EMSGSIZE and not too_much:
            route.no_trains = True
        return sent

    def _send_singly(self, route: UdpRoute, buffers: Sequence[Buffer], segment: int) -> bool:
        self._counters["trains_cut"] += 1
        train = memoryview(b"".join(buffers))
        sent = True
        for index, start in enumerate(range(0, len(train), segment)):
            sent &= self.send(route, route.resealed(train[start : start + segment], index))
        return sent
