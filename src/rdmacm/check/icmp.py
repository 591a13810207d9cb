"""Packets of this host's own sockets, and what ICMP says of them: refusals of a UDP port, and answers to long packets.

No privilege is needed for UDP. Echo requests need one, or the sysctl net.ipv4.ping_group_range.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from typing import NamedTuple

from rdmacm.check.measured import Refusal, Sizes
from rdmacm.proto.constants import ROCE_PORT
from rdmacm.proto.frames import word_sum

# Numbers of Linux, which the socket module lacks.
_IP_RECVERR, _IPV6_RECVERR, _MSG_ERRQUEUE = 11, 25, 0x2000
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE = 10, 23, 3
_ICMP, _ICMP6 = 2, 3
#: struct sock_extended_err: errno, origin, type, code, info.
_EXTENDED_ERROR = struct.Struct("=IBBBxI4x")
_REPORTER = {_ICMP: slice(20, 24), _ICMP6: slice(24, 40)}
#: By origin: type and code of each refusal.
_REFUSALS = {
    **{(_ICMP, 3, code): Refusal.NETWORK for code in (0, 6, 11)},
    **{(_ICMP, 3, code): Refusal.HOST for code in (1, 7, 12)},
    **{(_ICMP, 3, code): Refusal.PROHIBITED for code in (9, 10, 13)},
    (_ICMP, 3, 3): Refusal.CLOSED,
    (_ICMP6, 1, 0): Refusal.NETWORK,
    **{(_ICMP6, 1, code): Refusal.PROHIBITED for code in (1, 5, 6)},
    (_ICMP6, 1, 3): Refusal.HOST,
    (_ICMP6, 1, 4): Refusal.CLOSED,
}
_LOCAL_REFUSALS = {
    errno.EPERM: Refusal.PROHIBITED,
    errno.EACCES: Refusal.PROHIBITED,
    errno.EHOSTUNREACH: Refusal.HOST,
    errno.ENETUNREACH: Refusal.NETWORK,
}
#: A BTH for a queue pair that nobody has, and an ICRC that is wrong: every device drops it without an answer.
_HARMLESS = bytes([0x64, 0, 0xFF, 0xFF, 0, 0xFF, 0xFF, 0xFE]) + bytes(16)
#: Type of an echo request and of its answer.
_ECHO = {socket.AF_INET: (8, 0), socket.AF_INET6: (128, 129)}
_ECHO_HEADER = struct.Struct("!BBHHH")
#: A port of a host that nobody has: datagrams to it are answered by an ICMP error.
_CLOSED_PORT = 33434
_TRIES = 2


class Report(NamedTuple):
    """An ICMP error."""

    refusal: Refusal | None
    reporter: str
    #: Of "packet too big": the MTU.
    mtu: int


def _is_ipv6(host: str) -> bool:
    return ":" in host


def _address(host: str, port: int) -> tuple[str, int]:
    return host, port


def _open(host: str, source: str, kind: int, protocol: int = 0) -> socket.socket:
    family = socket.AF_INET6 if _is_ipv6(host) else socket.AF_INET
    sock = socket.socket(family, kind, protocol)
    try:
        if family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
            sock.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PMTUDISC_PROBE)
        else:
            sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVERR, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE)
        if source:
            sock.bind(_address(source, 0))
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _read_report(sock: socket.socket) -> Report | None:
    try:
        _, control, _, _ = sock.recvmsg(512, 512, _MSG_ERRQUEUE)
    except OSError:
        return None
    for _, kind, value in control:
        if kind in (_IP_RECVERR, _IPV6_RECVERR) and len(value) >= _EXTENDED_ERROR.size:
            _, origin, icmp_type, code, info = _EXTENDED_ERROR.unpack_from(value)
            if origin in _REPORTER:
                packed = value[_REPORTER[origin]]
                reporter = socket.inet_ntop(sock.family, packed) if len(packed) in (4, 16) else ""
                is_too_big = (origin, icmp_type, code) in ((_ICMP, 3, 4), (_ICMP6, 2, 0))
                refusal = _REFUSALS.get((origin, icmp_type, code))
                return Report(refusal, reporter, info if is_too_big else 0)
    return Report(None, "", 0)


class PortProbe:
    """Packets to UDP port 4791 of a host. Nothing there answers them, but ICMP may."""

    def __init__(self, host: str, source: str) -> None:
        self._sock = _open(host, source, socket.SOCK_DGRAM)
        self._to = _address(host, ROCE_PORT)

    def send(self) -> Report | None:
        """Send one; return why this host refuses to."""
        try:
            self._sock.sendto(_HARMLESS, self._to)
        except OSError as error:
            if error.errno in _LOCAL_REFUSALS and (report := _read_report(self._sock)) is None:
                return Report(_LOCAL_REFUSALS[error.errno], "", 0)
            return report if error.errno in _LOCAL_REFUSALS else None
        return None

    def report(self) -> Report | None:
        """What ICMP has reported; None if nothing."""
        while (report := _read_report(self._sock)) is not None:
            if report.refusal is not None:
                return report
        return None

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


class _Prober:
    """A socket whose packets a host answers, of any length."""

    def __init__(self, sock: socket.socket, host: str, headers: int) -> None:
        self._sock = sock
        self._host = host
        self._headers = headers
        self.mtu = 0

    def close(self) -> None:
        self._sock.close()

    def ask(self, length: int, number: int, seconds: float) -> bool:
        """Send a packet of ``length`` bytes; return whether it is answered."""
        until = time.monotonic() + seconds
        try:
            self._send(max(8, length - self._headers), number)
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                return False
            if error.errno not in (errno.ECONNREFUSED, errno.EHOSTUNREACH):
                raise
        poll = select.poll()
        poll.register(self._sock.fileno(), select.POLLIN)
        while (left := until - time.monotonic()) > 0:
            poll.poll(left * 1000)
            found = self._receive(number)
            if found is not None:
                return found
        return False

    def _send(self, payload: int, number: int) -> None:
        raise NotImplementedError

    def _receive(self, number: int) -> bool | None:
        """Whether the packet was answered; None if that is not known yet."""
        raise NotImplementedError


class _Echo(_Prober):
    def __init__(self, host: str, source: str) -> None:
        family = socket.AF_INET6 if _is_ipv6(host) else socket.AF_INET
        protocol = socket.IPPROTO_ICMPV6 if family == socket.AF_INET6 else socket.IPPROTO_ICMP
        try:
            sock = _open(host, source, socket.SOCK_DGRAM, protocol)
            self._is_raw = False
        except PermissionError:
            sock = _open(host, source, socket.SOCK_RAW, protocol)
            self._is_raw = True
        super().__init__(sock, host, (40 if family == socket.AF_INET6 else 20) + _ECHO_HEADER.size)
        self._kinds = _ECHO[socket.AddressFamily(family)]
        self._id = os.getpid() & 0xFFFF

    def _send(self, payload: int, number: int) -> None:
        header = _ECHO_HEADER.pack(self._kinds[0], 0, 0, self._id, number)
        data = header + bytes(payload)
        if self._is_raw and self._sock.family == socket.AF_INET:
            data = data[:2] + struct.pack("!H", -word_sum(data) % 0xFFFF) + data[4:]
        self._sock.sendto(data, _address(self._host, 0))

    def _receive(self, number: int) -> bool | None:
        report = _read_report(self._sock)
        if report is not None:
            self.mtu = report.mtu or self.mtu
            return False if report.mtu else None
        try:
            data = self._sock.recv(65536)
        except OSError:
            return None
        if self._is_raw and self._sock.family == socket.AF_INET:
            data = data[(data[0] & 15) * 4 :]
        if len(data) < _ECHO_HEADER.size:
            return None
        kind, _, _, ident, sequence = _ECHO_HEADER.unpack_from(data)
        if kind != self._kinds[1] or sequence != number or (self._is_raw and ident != self._id):
            return None
        return True


class _ClosedPort(_Prober):
    def __init__(self, host: str, source: str) -> None:
        super().__init__(_open(host, source, socket.SOCK_DGRAM), host, (40 if _is_ipv6(host) else 20) + 8)

    def _send(self, payload: int, number: int) -> None:
        self._sock.sendto(bytes(payload), _address(self._host, _CLOSED_PORT + number % 64))

    def _receive(self, number: int) -> bool | None:
        del number
        report = _read_report(self._sock)
        if report is None:
            return None
        self.mtu = report.mtu or self.mtu
        return report.refusal is Refusal.CLOSED


def answers_echo(host: str, source: str, seconds: float) -> bool | None:
    """Whether a host answers an ICMP echo request; None if none can be sent."""
    try:
        prober = _Echo(host, source)
    except OSError:
        return None
    try:
        return prober.ask(84, 1, seconds)
    except OSError:
        return None
    finally:
        prober.close()


def measure_sizes(host: str, source: str, lengths: list[int], seconds: float) -> Sizes:
    """Send packets of these lengths that may not be fragmented, and see which the host answers."""
    error = "the host answers no probe"
    for kind in (_Echo, _ClosedPort):
        try:
            prober = kind(host, source)
        except OSError as failure:
            error = failure.strerror or str(failure)
            continue
        try:
            answered: dict[int, bool] = {}
            for index, length in enumerate(sorted(lengths)):
                answered[length] = any(
                    prober.ask(length, _TRIES * index + attempt + 1, seconds) for attempt in range(_TRIES)
                )
                if not answered[length] and index == 0:
                    break
            else:
                return Sizes(answered, prober.mtu)
        except OSError as failure:
            error = failure.strerror or str(failure)
        finally:
            prober.close()
    return Sizes(error=error)
