"""Listeners and server loops of tools, and the server process that a tool starts for itself."""

from __future__ import annotations

import errno
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from socket import AF_INET, inet_aton
from types import TracebackType

from rdmacm.address import InetAddr, SockAddr, format_address
from rdmacm.cmid import CmId
from rdmacm.errors import RdmaError, cm_error
from rdmacm.net import open_network
from rdmacm.provider import get_provider
from rdmacm.tools.connection import DISCONNECT_TIMEOUT, PORT_SPACES, ToolConnection
from rdmacm.tools.names import looking_up
from rdmacm.tools.output import ReaderGoneError, write_error
from rdmacm.tools.waiting import PeerWait
from rdmacm.verbs.enums import PortState, QPType

#: Connections that one server serves at a time; further requests are rejected.
_MAX_CLIENTS = 64
#: Seconds that a server process may take to end.
_EXIT_TIMEOUT = 10.0


def own_host(provider: str | None, default: str = "127.0.0.1") -> str:
    """An address of this machine that a device of the provider has: ``default`` where the loopback interface has one.

    Adapters have none there.
    """
    found = get_provider(provider)
    if found.owner_of(InetAddr(AF_INET, inet_aton("127.0.0.1"))) is not None:
        return default
    ports = (port for device in found.devices() for port in device.ports if port.state is PortState.ACTIVE)
    interfaces = {row.ndev_name for port in ports for row in port.gids}
    network = open_network()
    try:
        indices = {interface.index for interface in network.interfaces() if interface.name in interfaces}
        usable = [each for each in network.addresses() if each.usable and each.ifindex in indices]
    finally:
        network.close()
    addresses = [InetAddr(each.family, each.ip) for each in usable]
    return next((each.host for each in addresses if not each.is_link_local), default)


# -- listeners -----------------------------------------------------------------------------------------------


def bind(cmid: CmId, address: str | None, port: int) -> None:
    """Bind an id that is going to listen; without an address to the wildcard address of IPv6 and IPv4."""
    if address is not None:
        with looking_up(address, port):
            cmid.bind_addr((address, port))
        return
    try:
        cmid.bind_addr(("::", port))
    except RdmaError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        cmid.bind_addr(("0.0.0.0", port))  # a host without IPv6


def announce(listener: CmId) -> None:
    """Write a line about the address of a listener to standard error, where librdmacm's tools print nothing."""
    announce_address(listener.local_addr, listener.verbs.name if listener.is_bound else None)


def announce_address(address: SockAddr, device: str | None) -> None:
    """The same, of an address; None for all devices."""
    where = "all devices" if device is None else f"device {device}"
    write_error(f"listening on {format_address(address)}, {where}")


@contextmanager
def listening(
    address: str | None, port: int, backlog: int = 0, provider: str | None = None, qp_type: QPType = QPType.RC
) -> Iterator[CmId]:
    """A synchronous listener, bound as by :func:`bind`, and announced."""
    with CmId(None, PORT_SPACES[qp_type], qp_type=qp_type, provider=provider) as cmid:
        bind(cmid, address, port)
        cmid.listen(backlog)
        announce(cmid)
        yield cmid


def serve(listener: CmId, work: Callable[[CmId], None], *, persistent: bool) -> None:
    """Call ``work`` for one client; with ``persistent`` for each client in a thread of its own, until Ctrl-C.

    ``work`` gets the id of a request, which it must destroy. The error of a single client is raised. With
    ``persistent`` it is one line on standard error instead, and the other clients are still served.
    """
    if not persistent:
        work(listener.get_request())
        return
    clients: set[threading.Thread] = set()
    try:
        while True:
            cmid = listener.get_request()
            clients = {thread for thread in clients if thread.is_alive()}
            if len(clients) >= _MAX_CLIENTS:
                with cmid, suppress(RdmaError):
                    cmid.reject(b"busy")
                continue
            thread = threading.Thread(target=_serve_client, args=(work, cmid), name="rdmacm-client", daemon=True)
            clients.add(thread)
            thread.start()
    finally:
        for connection in list(ToolConnection.open_connections):
            connection.stop()
        limit = time.monotonic() + 2 * DISCONNECT_TIMEOUT
        for thread in clients:
            thread.join(max(0.0, limit - time.monotonic()))


def serve_in_turn(listener: CmId, work: Callable[[CmId], None]) -> None:
    """Call ``work`` for one client after the other, in the calling thread, until Ctrl-C.

    Measurements need this: a thread that polls and one that waits for requests would share the interpreter, which costs
    milliseconds per round trip.
    """
    while True:
        cmid = listener.get_request()
        try:
            work(cmid)
        except RdmaError as error:
            write_error(str(error))


def _serve_client(work: Callable[[CmId], None], cmid: CmId) -> None:
    try:
        work(cmid)
    except RdmaError as error:
        write_error(str(error))
    except ReaderGoneError:
        os.kill(os.getpid(), signal.SIGINT)  # nobody reads the server's output: end the main thread


# -- a server process of our own -----------------------------------------------------------------------------

#: Finds the port in the line of :func:`announce`.
_LISTENING = re.compile(r"listening on \S+:(\d+),")


class ServerProcess(AbstractContextManager["ServerProcess"]):
    """A child process that runs the server of a tool on this machine, for as long as the ``with`` block lasts.

    ``argv`` is the command line without ``rdmacm``. The error of a server that does not start is raised; CmTimeoutError
    when it takes longer than ``timeout`` seconds.
    """

    def __init__(self, *argv: str, timeout: float, provider: str | None = None) -> None:
        if provider:
            argv = (*argv, "--provider", provider)
        sources = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [sources, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from rdmacm.tools.serving import run_server_process; run_server_process()", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=dict(os.environ, PYTHONPATH=path),
            text=True,
            process_group=0,  # Ctrl-C is for the tool, which asks its server for figures before it ends
        )
        waits = PeerWait(f"the second process ({self._process.pid})", timeout, has_notice=False)
        waits.step, waits.hint = "start", "a longer --timeout"
        waits.progress = lambda: "it was started and does not listen yet"
        try:
            #: The port that the server listens on.
            self.port: int = self._await_port(waits)
        except BaseException:
            self._process.kill()
            self._process.communicate()
            raise

    def _await_port(self, waits: PeerWait) -> int:
        assert self._process.stderr is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stderr, selectors.EVENT_READ)
            waits.until(selector.select)
        line = self._process.stderr.readline()
        found = _LISTENING.search(line)
        if found is None:
            raise _parsed_error(line + self._end())
        return int(found[1])

    def _end(self) -> str:
        try:
            return self._process.communicate(timeout=_EXIT_TIMEOUT)[1]
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.communicate()[1]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()


def _parsed_error(text: str) -> RdmaError:
    """Return the error that a server process has written to its standard error."""
    line = text.partition("\n")[0].removeprefix("rdmacm: ")
    found = re.fullmatch(r"(.*) \[(\w+)\](?:; try: (.*))?", line)
    if found is None:
        return cm_error(errno.ECHILD, line or "the server process ended without a message", "second process")
    return cm_error(getattr(errno, found[2], errno.ECHILD), found[1], "second process", hint=found[3])


def run_server_process() -> None:
    """Run the command line in ``sys.argv`` until standard input ends. The entry point of a :class:`ServerProcess`."""
    from rdmacm.tools.main import main

    threading.Thread(target=_interrupt_at_end, name="rdmacm-parent", daemon=True).start()
    sys.exit(main())


def _interrupt_at_end() -> None:
    # Not sys.stdin: a daemon thread that holds its lock would block the interpreter's shutdown.
    while os.read(0, 4096):
        pass
    # A real signal, because that interrupts poll(2) in the main thread.
    os.kill(os.getpid(), signal.SIGINT)
