"""What tools that move data have in common: a connection with its queues, a listener, a second process.

A :class:`Link` is an id with one queue pair and one completion queue for both directions. Its peer may be anybody's:
what comes from there is checked by the tool, and whatever happens ends in an :class:`rdmacm.RdmaError`.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from rdmacm.address import format_address
from rdmacm.addrinfo import AddrInfo
from rdmacm.cmid import CmId, EventChannel
from rdmacm.connparam import ConnParam
from rdmacm.constants import PortSpace, RaiFlag
from rdmacm.errors import CmWouldBlockError, RdmaError, cm_error
from rdmacm.explain import resolve
from rdmacm.explanation import Explanation
from rdmacm.tools.explain import error_of
from rdmacm.tools.output import Parser, ReaderGoneError, complain, write
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.cq import CQ
from rdmacm.verbs.enums import WC, AccessFlag, QPState, WCStatus
from rdmacm.verbs.pd import MR
from rdmacm.verbs.qp import QP, QPInitAttr
from rdmacm.verbs.wr import Buffer

__all__ = [
    "Link",
    "Twin",
    "add_provider",
    "add_roles",
    "bind",
    "ended_by",
    "failure_of",
    "find",
    "listening",
    "number",
    "port_number",
    "say_listening",
    "serve",
    "serve_in_turn",
    "twin",
]

#: Connections one server process works for at a time; more are rejected.
_MOST_CLIENTS = 64
#: Seconds a server process of our own may take to start, and connections to end.
_PATIENCE = 10.0
#: Seconds a peer may take to confirm the end of a connection.
_GOODBYE = 2.0


# -- arguments -----------------------------------------------------------------------------------------------


def number(least: int, most: int) -> Callable[[str], int]:
    """The type of an option that is a number in a range."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and least <= int(text[:20]) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return parse


#: 0 takes a free one, where it is the own.
port_number = number(0, 65535)


def add_roles(parser: Parser, *, host: bool) -> None:
    """``-s`` and ``-c``; with ``host``, the client's has the server's address as its value."""
    parser.add_argument("-s", "--server", action="store_true", help="Be the server: wait for clients.")
    if host:
        parser.add_argument("-c", "--client", metavar="HOST", help="Be the client of the server on this host.")
    else:
        parser.add_argument("-c", "--client", action="store_true", help="Be the client.")


def add_provider(parser: Parser) -> None:
    """``--provider``."""
    parser.add_argument("--provider", metavar="NAME", help="The provider to use, such as soft.")


# -- connections ---------------------------------------------------------------------------------------------


class Link:
    """A reliable connection of a tool.

    ``cmid``: bound to a device, from now on the link's to destroy; ``cap``: the sizes of the queues; ``own_qp``: make
    the queue pair apart from the id, and take it through its states here.

    Tools wait for completions, while the end of a connection is an event. So once connected, any event fails the
    queue pair: what is posted then completes as flushed, and whoever waits has the news.
    """

    #: Those that are open.
    alive: ClassVar[set[Link]] = set()

    def __init__(self, cmid: CmId, cap: QPCap, *, own_qp: bool = False) -> None:
        self.cmid = cmid
        self.peer = cmid.peer_addr_text
        self._arrived: dict[int, WC] = {}
        self._own: QP | None = None
        self._is_connected = False
        context = cmid.verbs
        assert context is not None
        with ExitStack() as stack:
            stack.callback(cmid.destroy)
            self.cq = stack.enter_context(CQ(context, cap.max_send_wr + cap.max_recv_wr))
            attr = QPInitAttr(scq=self.cq, rcq=self.cq, cap=cap)
            if own_qp:
                self.qp = self._own = stack.enter_context(QP(cmid.pd, attr))
                self.qp.modify(*cmid.init_qp_attr(QPState.INIT))
            else:
                self.qp = cmid.create_qp(attr)
                stack.callback(cmid.destroy_qp)
            self._parts = stack.pop_all()
        self.alive.add(self)

    def register(self, buffer: Buffer, access: AccessFlag = AccessFlag.LOCAL_WRITE) -> MR:
        """Register memory until the link is closed."""
        return self._parts.enter_context(MR(self.cmid.pd, buffer, access))

    def connect(self, param: ConnParam) -> bytes:
        """Connect, and return the private data of the answer."""
        if self._own is not None:
            param = replace(param, qp_num=self._own.qp_num)
        self.cmid.connect(param)
        answer = b"" if self.cmid.event is None else self.cmid.event.private_data
        if self._own is not None:
            self._make_ready(self._own)
            self.cmid.establish()
        self._watch()
        return answer

    def accept(self, param: ConnParam | None = None) -> None:
        """Accept the request that made the id."""
        if self._own is not None:
            param = replace(param or ConnParam(), qp_num=self._own.qp_num)
            self._make_ready(self._own)
        self.cmid.accept(param)
        self._watch()

    def _make_ready(self, qp: QP) -> None:
        for state in (QPState.INIT, QPState.RTR, QPState.RTS):
            qp.modify(*self.cmid.init_qp_attr(state))

    def _watch(self) -> None:
        self._is_connected = True
        self.cmid.channel.queue.notify = self._ended
        with suppress(CmWouldBlockError):  # what came before there was anyone to notify
            self.cmid.channel.get_event(0).ack()
            self._ended()

    def _ended(self) -> None:
        self._is_connected = False
        self.qp.to_error()

    def next(self, timeout: float | None = None) -> WC | None:
        """The next completion, which is a successful one; None where none came in ``timeout`` seconds."""
        while True:
            found = self.cq.poll(1)
            if found:
                if found[0].status is not WCStatus.SUCCESS:
                    raise failure_of(found[0], self.peer)
                return found[0]
            if not self.cq.wait(timeout):
                return None

    def wait_for(self, wr_id: int) -> WC:
        """The completion of the work request with this number; the tool has one such under way."""
        while wr_id not in self._arrived:
            wc = self.next()
            assert wc is not None
            self._arrived[wc.wr_id] = wc
        return self._arrived.pop(wr_id)

    def stop(self) -> None:
        """End the connection; what is posted completes as flushed. From any thread."""
        with suppress(RdmaError):
            self.qp.to_error()

    def close(self) -> None:
        """Say goodbye and release everything."""
        self.alive.discard(self)
        self.cmid.channel.queue.notify = None
        with suppress(RdmaError):
            self._say_goodbye()
        self._parts.close()

    def _say_goodbye(self) -> None:
        if not self._is_connected:
            self.cmid.disconnect()
            return
        # The peer should know, but its application may never confirm.
        with EventChannel(self.cmid.channel.provider) as channel:
            self.cmid.migrate(channel)
            try:
                self.cmid.disconnect()
                channel.get_event(_GOODBYE).ack()
            finally:
                self.cmid.migrate(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def failure_of(wc: WC, peer: str) -> RdmaError:
    """The error that a failed completion stands for."""
    if wc.status is WCStatus.WR_FLUSH_ERR:
        return ended_by(peer)
    if wc.status in (WCStatus.RETRY_EXC_ERR, WCStatus.RNR_RETRY_EXC_ERR):
        return cm_error(errno.ETIMEDOUT, "the peer does not answer any more", "transfer", peer)
    return cm_error(errno.EIO, f"a work request failed: {wc.status.name}", "transfer", peer)


def ended_by(peer: str) -> RdmaError:
    """The error that a connection is over before its time."""
    return cm_error(errno.ECONNRESET, "the peer has ended the connection", "transfer", peer)


def find(
    host: str, port: int, *, source: str | None = None, timeout_ms: int = 2000, provider: str | None = None
) -> tuple[CmId, Explanation]:
    """The way to a server as a synchronous id with its route, and the reasons."""
    hints = AddrInfo(flags=RaiFlag(0), port_space=PortSpace.TCP, src_addr=None if source is None else (source, 0))
    cmid, explanation = resolve(host, port, hints, timeout_ms=timeout_ms, provider=provider)
    if cmid is None:
        raise error_of(explanation, None)
    return cmid, explanation


def bind(cmid: CmId, address: str | None, port: int) -> None:
    """Bind to listen; without an address to any, IPv4 or IPv6."""
    if address is not None:
        cmid.bind_addr((address, port))
        return
    try:
        cmid.bind_addr(("::", port))
    except RdmaError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        cmid.bind_addr(("0.0.0.0", port))  # a host without IPv6


@contextmanager
def listening(address: str | None, port: int, backlog: int = 0, provider: str | None = None) -> Iterator[CmId]:
    """A synchronous listener; without an address it takes requests to any, IPv4 or IPv6."""
    with CmId(None, PortSpace.TCP, provider=provider) as cmid:
        bind(cmid, address, port)
        cmid.listen(backlog)
        yield cmid


def serve(listener: CmId, work: Callable[[CmId], None], *, persistent: bool) -> None:
    """Have ``work`` done for one client, or with ``persistent`` for each one that comes, in threads, until Ctrl-C.

    ``work`` is given the id of a request, to destroy in the end. A client that fails is told of in one line on
    standard error; where there is one only, its failure is raised.
    """
    if not persistent:
        work(listener.get_request())
        return
    clients: set[threading.Thread] = set()
    try:
        while True:
            cmid = listener.get_request()
            clients = {thread for thread in clients if thread.is_alive()}
            if len(clients) >= _MOST_CLIENTS:
                with cmid, suppress(RdmaError):
                    cmid.reject(b"busy")
                continue
            thread = threading.Thread(target=_work, args=(work, cmid), name="rdmacm-client", daemon=True)
            clients.add(thread)
            thread.start()
    finally:
        for link in list(Link.alive):
            link.stop()
        limit = time.monotonic() + 2 * _GOODBYE
        for thread in clients:
            thread.join(max(0.0, limit - time.monotonic()))


def serve_in_turn(listener: CmId, work: Callable[[CmId], None]) -> None:
    """Have ``work`` done for one client after the other, in the calling thread, until Ctrl-C.

    A thread that polls does not share its interpreter with another that waits for requests: that would cost
    milliseconds a round trip.
    """
    while True:
        cmid = listener.get_request()
        try:
            work(cmid)
        except RdmaError as error:
            complain(str(error))


def _work(work: Callable[[CmId], None], cmid: CmId) -> None:
    try:
        work(cmid)
    except RdmaError as error:
        complain(str(error))
    except ReaderGoneError:
        os.kill(os.getpid(), signal.SIGINT)  # nobody sees what the server writes: the main thread is to end it


# -- a server of our own -------------------------------------------------------------------------------------

#: Begins the line a server says its address in.
LISTENING = "listening on "


def say_listening(listener: CmId) -> None:
    """Say where a listener is, in a line that a :class:`Twin` understands."""
    write(f"{LISTENING}{format_address(listener.local_addr)}\n")


class Twin:
    """A second process that runs a tool's server on this machine; ``port`` is where. It ends with this one."""

    def __init__(self, *argv: str) -> None:
        room = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [room, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from rdmacm.tools.link import twin; twin()", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(os.environ, PYTHONPATH=path),
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith(LISTENING):
            raise _told(self._end())
        self.port = int(line.rpartition(":")[2])

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def _end(self) -> str:
        try:
            return self._process.communicate(timeout=_PATIENCE)[1]
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.communicate()[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()


def _told(text: str) -> RdmaError:
    """What the second process has complained of, as an error of this one."""
    line = text.partition("\n")[0].removeprefix("rdmacm: ")
    found = re.fullmatch(r"(.*) \[(\w+)\](?:; try: (.*))?", line)
    if found is None:
        return cm_error(errno.ECHILD, line or "it ended without a word", "second process")
    return cm_error(getattr(errno, found[2], errno.ECHILD), found[1], "second process", hint=found[3])


def twin() -> None:
    """What the second process runs: the tool its arguments name, until its standard input ends."""
    from rdmacm.tools.main import main

    threading.Thread(target=_interrupt_at_end, name="rdmacm-parent", daemon=True).start()
    sys.exit(main())


def _interrupt_at_end() -> None:
    # Not sys.stdin: a thread that holds its lock is in the way when the interpreter ends.
    while os.read(0, 4096):
        pass
    # A real signal: it gets a main thread out of poll(2).
    os.kill(os.getpid(), signal.SIGINT)
