"""``rdmacm check --serve``: helps the checks of other hosts.

A client is anybody who can connect. It gets a queue pair, and datagrams to the address that its TCP connection comes
from, so that nobody can have them sent to another host. A client may name another address of its own: the server says
whether it has a route to that address, and sends no more bytes there than came from there. To forge it gains nothing.
Lines, datagrams, clients and time are bounded; nothing of what a client sends is executed, and no file is touched.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

from rdmacm.address import interface_text
from rdmacm.addrinfo import AddrInfo
from rdmacm.check.datagrams import DatagramEnd, error_text
from rdmacm.check.lines import (
    LONGEST_PAYLOAD,
    MOST_DATAGRAMS,
    LineError,
    Rows,
    address_of,
    number_of,
    rows_of,
)
from rdmacm.check.tcp import Lines
from rdmacm.cmid import CmId
from rdmacm.constants import PortSpace, RaiFlag
from rdmacm.diagnosis.explain import resolve
from rdmacm.errors import RdmaError
from rdmacm.explanation import Explanation
from rdmacm.net import Network, open_network
from rdmacm.verbs.enums import QPType

#: Clients at a time; seconds that one may take for a line, and for all; and lines that it may send.
_MOST_CLIENTS, _LINE_SECONDS, _SECONDS, _MOST_LINES = 8, 10.0, 120.0, 256
#: A port of a datagram service; nothing is sent to it.
_NO_PORT = 1
#: Milliseconds that the next hop to a client may take to answer.
_NEIGHBOUR_MS = 1000
_MOST_INTERFACES = 64


class CheckServer:
    """Listens at a TCP port and helps. ``log`` is called with a line about each client."""

    def __init__(
        self, address: str | None, port: int, provider: str | None, log: Callable[[str], None] = lambda _: None
    ) -> None:
        self._provider = provider
        self._log = log
        self._clients: set[threading.Thread] = set()
        self._is_closed = False
        family = socket.AF_INET if address is not None and ":" not in address else socket.AF_INET6
        both = address is None and socket.has_dualstack_ipv6()
        if address is None and not both:
            family = socket.AF_INET
        with ExitStack() as opened:
            self._sock = opened.enter_context(
                socket.create_server((address or "", port), family=family, dualstack_ipv6=both)
            )
            # Keeps the device open, so that its connection manager answers between the clients.
            self._device = opened.enter_context(CmId(port_space=PortSpace.UDP, qp_type=QPType.UD, provider=provider))
            self._device.bind_addr((address or ("::" if family == socket.AF_INET6 else "0.0.0.0"), 0))
            self._device.listen()
            opened.pop_all()
        #: The socket address that it listens at.
        self.where: tuple[str, int] = self._sock.getsockname()[:2]

    def run(self) -> None:
        """Serve clients until interrupted, or until :meth:`close` is called."""
        while True:
            try:
                sock, peer = self._sock.accept()
            except OSError:
                if self._is_closed:
                    return
                raise
            self._clients = {thread for thread in self._clients if thread.is_alive()}
            if len(self._clients) >= _MOST_CLIENTS:
                with sock, suppress(OSError):
                    Lines(sock, 1.0).send(error="too many clients")
                continue
            thread = threading.Thread(target=self._serve, args=(sock, peer[0]), name="rdmacm-check", daemon=True)
            self._clients.add(thread)
            thread.start()

    def close(self) -> None:
        """Stop to listen; a thread in :meth:`run` returns."""
        self._is_closed = True
        self._device.destroy()
        with suppress(OSError):  # some systems refuse it for a socket that listens
            self._sock.shutdown(socket.SHUT_RDWR)  # closing alone does not wake a thread in accept(2)
        self._sock.close()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        lines = Lines(sock, _LINE_SECONDS)
        host = peer.removeprefix("::ffff:")
        client = _Client(lines, host, sock.getsockname()[0].removeprefix("::ffff:"), self._provider)
        try:
            client.serve()
            self._log(f"checked by {host}")
        except (LineError, OSError) as error:
            text = error_text(error) if isinstance(error, OSError) else str(error)
            with suppress(OSError):
                lines.send(error=text)
            self._log(f"the check by {host} has ended: {text}")
        finally:
            client.close()
            lines.close()


class _Client:
    """One client, and the queue pair that it is helped with."""

    def __init__(self, lines: Lines, host: str, local: str, provider: str | None) -> None:
        self._lines = lines
        self._host = host
        self._local = local
        self._provider = provider
        self._end: DatagramEnd | None = None
        self._key = self._qpn = self._qkey = 0
        #: Whether the client's address is that of its TCP connection; else how many bytes may be sent there.
        self._is_proven = False
        self._credit = 0
        self._expected = 0

    def serve(self) -> None:
        until = time.monotonic() + _SECONDS
        for _ in range(_MOST_LINES):
            if time.monotonic() > until:
                raise LineError("the check has taken too long")
            line = self._lines.receive()
            if line is None:
                return
            if "hello" in line:
                self._greet(line)
            elif self._end is None:
                raise LineError("no hello")
            elif "receive" in line:
                self._expected = number_of(line, "receive", MOST_DATAGRAMS)
                self._end.expect(self._key)
                self._lines.send(ready=self._expected)
            elif "report" in line:
                self._report(self._end)
            elif "send" in line:
                self._send(self._end, line)
            else:
                raise LineError("an unknown line")
        raise LineError("too many lines")

    def _greet(self, line: dict[str, object]) -> None:
        if self._end is not None:
            raise LineError("a second hello")
        number_of(line, "hello", 1, 1)
        their, own = address_of(line, "from"), address_of(line, "to")
        self._key = number_of(line, "key", (1 << 63) - 1)
        self._qpn, self._qkey = number_of(line, "qpn", 0xFFFFFF), number_of(line, "qkey", 0xFFFFFFFF)
        number_of(line, "path_mtu", LONGEST_PAYLOAD)
        self._is_proven = their == self._host
        network = open_network()
        try:
            known = _interfaces(network, own)
        finally:
            network.close()
        # At first with the source that the host would choose: a given one takes routes of its interface only.
        cmid, explanation = self._resolve(their, None)
        if cmid is not None:
            cmid.destroy()
            cmid, explanation = self._resolve(their, own)
        if cmid is None:
            text = f"{explanation.message} [{explanation.errno_name}]"
            self._lines.send(hello=1, no_way_back=text, hint=explanation.hint or "", **known)
            return
        try:
            self._end = end = DatagramEnd(cmid)
        except RdmaError as error:
            cmid.destroy()
            self._lines.send(hello=1, no_way_back=error_text(error), hint=error.hint or "", **known)
            return
        end.expect(self._key)
        self._lines.send(hello=1, qpn=end.qpn, qkey=end.qkey, path_mtu=end.path_mtu, **known)

    def _resolve(self, their: str, own: str | None) -> tuple[CmId | None, Explanation]:
        source = None if own is None else (own, 0)
        hints = AddrInfo(flags=RaiFlag(0), qp_type=QPType.UD, port_space=PortSpace.UDP, src_addr=source)
        return resolve(their, _NO_PORT, hints, timeout_ms=_NEIGHBOUR_MS, provider=self._provider)

    def _report(self, end: DatagramEnd) -> None:
        end.collect(self._expected)
        if not end.other_source:
            self._credit += sum(payload * count for (payload, _), count in end.received.items())
        classes = [list(pair) for pair in end.classes.items()]
        self._lines.send(received=end.rows(), classes=classes, source=end.other_source)

    def _send(self, end: DatagramEnd, line: dict[str, object]) -> None:
        rows = rows_of(line, "send")
        if not self._is_proven:
            rows = self._affordable(rows)
        self._lines.send(sent=end.send(rows, self._qpn, self._qkey, self._key))

    def _affordable(self, rows: Rows) -> Rows:
        """As many of these datagrams as the client's address has credit for."""
        found: Rows = []
        for payload, traffic_class, count in rows:
            number = min(count, self._credit // max(1, payload))
            self._credit -= number * payload
            found.append((payload, traffic_class, number))
        return found

    def close(self) -> None:
        if self._end is not None:
            self._end.close()


def _interfaces(network: Network, own: str) -> dict[str, object]:
    """The interface that has an address of this host, and all interfaces by their hardware addresses."""
    try:
        packed = socket.inet_pton(socket.AF_INET6 if ":" in own else socket.AF_INET, own)
    except OSError:
        return {}
    interfaces = {each.index: each for each in network.interfaces()}
    index = next((each.ifindex for each in network.addresses() if each.ip == packed), 0)
    interface = interfaces.get(index)
    named = {each.address.hex(":"): each.name for each in interfaces.values() if any(each.address)}
    return {
        "hardware_address": interface.address.hex(":") if interface is not None and any(interface.address) else "",
        "interface": interface.name if interface is not None else interface_text(index) if index else "",
        "interfaces": dict(list(named.items())[:_MOST_INTERFACES]),
    }
