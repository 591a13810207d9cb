"""The connection of a tool that moves data: an id with one queue pair and one completion queue.

The peer may run any program: the tool checks what it receives, and every failure ends in an :class:`rdmacm.RdmaError`.
"""

from __future__ import annotations

import errno
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import ClassVar

from rdmacm.addrinfo import AddrInfo
from rdmacm.cmid import CmId, EventChannel
from rdmacm.constants import CmEventType, PortSpace, RaiFlag
from rdmacm.diagnosis.explain import resolve
from rdmacm.endpoint.silence import ASK_SECONDS, MANAGER_INTERVAL, PacketSizes, PeerWatch, manager_answers
from rdmacm.errors import CmWouldBlockError, RdmaError, cm_error
from rdmacm.explanation import Explanation
from rdmacm.provider.connparam import ConnParam, UdParam
from rdmacm.tools.explain import error_of
from rdmacm.tools.names import looking_up
from rdmacm.tools.waiting import PeerWait, next_event, notice
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.buffers import Buffer, byte_view
from rdmacm.verbs.cq import CQ
from rdmacm.verbs.enums import WC, AccessFlag, QPState, QPType, WCStatus
from rdmacm.verbs.pd import MR
from rdmacm.verbs.qp import QP, QPInitAttr

#: The port space of the ids of each type.
PORT_SPACES = {QPType.RC: PortSpace.TCP, QPType.UC: PortSpace.IB, QPType.UD: PortSpace.UDP}
#: Seconds that a peer may take to confirm the end of a connection.
DISCONNECT_TIMEOUT = 2.0
#: Questions to a peer while a completion is late: for longer than a device with usual timeouts sends a packet again.
_MOST_QUESTIONS = 20


class ToolConnection(AbstractContextManager["ToolConnection"]):
    """A connection of a tool; of a datagram id, the queue pair that it has found.

    The connection owns ``cmid``, which is bound to a device, and destroys it. ``cap`` has the sizes of the queues. With
    ``own_qp`` the queue pair is created apart from the id and taken through its states here.

    Tools wait for completions, but the end of a connection is an event. Therefore any event after the connection is
    established moves the queue pair to the error state: posted work requests are flushed, and the waiting thread wakes.
    """

    #: All connections that are open.
    open_connections: ClassVar[set[ToolConnection]] = set()

    def __init__(self, cmid: CmId, cap: QPCap, *, own_qp: bool = False) -> None:
        self.cmid = cmid
        #: The peer's address as text.
        self.peer: str = cmid.peer_addr_text
        #: Completions that :meth:`wait_for` has taken while it waited for another, by wr_id.
        self._completed: dict[int, WC] = {}
        #: The queue pair, if it was created apart from the id.
        self._own_qp: QP | None = None
        #: The limits of waiting for the peer; None for a server, which waits without limit.
        self.waits: PeerWait | None = None
        #: The parameters of the server's answer, once connected.
        self.answer: ConnParam | UdParam | None = None
        #: Whether the connection is established: since connect() or accept(), until an event reports its end.
        self._is_connected = False
        context = cmid.verbs
        with ExitStack() as stack:
            stack.callback(cmid.destroy)
            self.cq: CQ = stack.enter_context(CQ(context, cap.max_send_wr + cap.max_recv_wr))
            attr = QPInitAttr(cmid.qp_type, scq=self.cq, rcq=self.cq, cap=cap)
            if own_qp:
                self.qp: QP = stack.enter_context(QP(cmid.pd, attr))
                self._own_qp = self.qp
                self.qp.modify(*cmid.init_qp_attr(QPState.INIT))
            else:
                self.qp = cmid.create_qp(attr)
                stack.callback(cmid.destroy_qp)
            self._resources = stack.pop_all()
        #: How often it was asked in this wait.
        self._questions = 0
        #: Whether the peer answers while a completion is late; None until one is.
        self._watch: PeerWatch | None = None
        #: Bytes of the longest memory region: no message is longer.
        self._longest = 0
        self.open_connections.add(self)

    def register(self, buffer: Buffer, access: AccessFlag = AccessFlag.LOCAL_WRITE) -> MR:
        """Register memory until the connection is closed."""
        self._longest = max(self._longest, byte_view(buffer).nbytes)
        return self._resources.enter_context(MR(self.cmid.pd, buffer, access))

    def connect(self, param: ConnParam, waits: PeerWait) -> bytes:
        """Connect; return the private data of the server's answer. ``waits`` limits this wait and all later ones."""
        self.waits = waits
        if self._own_qp is not None:
            param = replace(param, qp_num=self._own_qp.qp_num)
        # An id with a channel does not wait in connect().
        with EventChannel(self.cmid.channel.provider) as channel:
            self.cmid.migrate(channel)
            try:
                with waits.connecting(self.cmid):
                    self.cmid.connect(param)
                    answer, self.answer = _answer(channel, waits)
            finally:
                self.cmid.migrate(None)
        if self._own_qp is not None:
            self._make_ready(self._own_qp)
            self.cmid.establish()
        self._watch_events()
        return answer

    def accept(self, param: ConnParam | None = None) -> None:
        """Accept the connection request that the id stands for."""
        if self._own_qp is not None:
            param = replace(param or ConnParam(), qp_num=self._own_qp.qp_num)
            self._make_ready(self._own_qp)
        self.cmid.accept(param)
        self._watch_events()

    def _make_ready(self, qp: QP) -> None:
        for state in (QPState.INIT, QPState.RTR, QPState.RTS):
            qp.modify(*self.cmid.init_qp_attr(state))

    def _watch_events(self) -> None:
        self._is_connected = True
        self.cmid.channel._queue.notify = self._ended
        with suppress(CmWouldBlockError):  # an event that was posted before notify was set
            self.cmid.channel.get_event(0).ack()
            self._ended()

    def _ended(self) -> None:
        self._is_connected = False
        self.qp.to_error()

    def wait(self) -> None:
        """Wait until there is a completion to poll; the error of ``waits`` when the peer takes too long."""
        self._questions = 0
        if self.waits is None:
            while self._questions < _MOST_QUESTIONS and self.cmid.qp_type is QPType.RC:
                if self._wait(ASK_SECONDS):
                    return
            self.cq.wait(None)
        else:
            self.waits.briefly(self._wait)

    def _wait(self, seconds: float) -> bool:
        """Wait for a completion. If none comes, ask the peer whether it is there, until the device has given up."""
        if self._questions >= _MOST_QUESTIONS or self.cmid.qp_type is not QPType.RC:
            return self.cq.wait(seconds)
        found = self.cq.wait(min(seconds, ASK_SECONDS))
        if not found and seconds >= ASK_SECONDS:
            self._questions += 1
            provider = self.cmid.channel.provider
            self._watch = watch = self._watch or PeerWatch(self.qp)
            provider.drive(lambda: (watch.ask(),), 0)
            watch.warn(lambda: PacketSizes(self.cmid), self._longest, "transfer", self.cmid)
            is_due = self._questions % MANAGER_INTERVAL == 1
            # Once the connection has ended, the peer's program may end, too.
            if is_due and not watch.can_ask and self._is_connected and manager_answers(self.cmid):
                watch.answered()
        return found

    def next(self) -> WC:
        """Return the next completion; raise the error of a failed one."""
        while not (found := self.cq.poll(1)):
            self.wait()
        if found[0].status is not WCStatus.SUCCESS:
            raise self.failure(found[0])
        return found[0]

    def failure(self, wc: WC) -> RdmaError:
        """Return the error of a failed completion."""
        if wc.status is WCStatus.RETRY_EXC_ERR and self._watch is not None and self._watch.answers:
            sizes = PacketSizes(self.cmid)
            if sizes.of(self._longest) > sizes.arrived:
                return sizes.error(self._longest, "transfer", self.cmid)
        return completion_failure(wc, self.peer)

    def wait_for(self, wr_id: int) -> WC:
        """Return the completion of the only outstanding work request with this wr_id."""
        while wr_id not in self._completed:
            wc = self.next()
            self._completed[wc.wr_id] = wc
        return self._completed.pop(wr_id)

    def stop(self) -> None:
        """End the connection: posted work requests are flushed. May be called from any thread."""
        with suppress(RdmaError):
            self.qp.to_error()

    def close(self) -> None:
        """Disconnect and release everything."""
        self.open_connections.discard(self)
        self.cmid.channel._queue.notify = None
        with suppress(RdmaError):
            self._disconnect()
        self._resources.close()

    def _disconnect(self) -> None:
        if not self._is_connected or self.cmid.qp_type is QPType.UD:
            self.cmid.disconnect()
            return
        # Wait for the confirmation, so that the peer learns of the end, but not for ever: its program may never
        # confirm.
        with EventChannel(self.cmid.channel.provider) as channel:
            self.cmid.migrate(channel)
            try:
                self.cmid.disconnect()
                channel.get_event(DISCONNECT_TIMEOUT).ack()
            finally:
                self.cmid.migrate(None)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _answer(channel: EventChannel, waits: PeerWait) -> tuple[bytes, ConnParam | UdParam]:
    """Return the answer to a connection request, its private data first; raise the error of a request that failed."""
    while True:
        with waits.until(partial(next_event, channel)) as event:
            if event.error is not None:
                raise event.error
            if event.type in (CmEventType.ESTABLISHED, CmEventType.CONNECT_RESPONSE):
                return event.private_data, event.param
            if event.type is CmEventType.DEVICE_REMOVAL:
                raise cm_error(errno.ENODEV, "the device was removed", "connect", event.id.peer_addr_text)


def completion_failure(wc: WC, peer: str) -> RdmaError:
    """Return the error for a failed completion."""
    if wc.status is WCStatus.WR_FLUSH_ERR:
        return connection_ended(peer)
    if wc.status in (WCStatus.RETRY_EXC_ERR, WCStatus.RNR_RETRY_EXC_ERR):
        return cm_error(errno.ETIMEDOUT, "the peer no longer answers", "transfer", peer)
    return cm_error(errno.EIO, f"a work request failed: {wc.status.name}", "transfer", peer)


def connection_ended(peer: str) -> RdmaError:
    """Return the error for a connection that the peer has ended too early."""
    return cm_error(errno.ECONNRESET, "the peer has ended the connection", "transfer", peer)


def find_server(
    host: str,
    port: int,
    *,
    source: str | None = None,
    timeout_ms: int = 2000,
    retries: int = 0,
    provider: str | None = None,
    qp_type: QPType = QPType.RC,
) -> tuple[CmId, Explanation]:
    """Resolve a server; return a synchronous id with its route, and the explanation.

    A resolution that takes longer than ``timeout_ms`` is repeated up to ``retries`` times.
    """
    where = None if source is None else (source, 0)
    hints = AddrInfo(flags=RaiFlag(0), qp_type=qp_type, port_space=PORT_SPACES[qp_type], src_addr=where)
    with notice(f"the resolution of {host}"), looking_up(source, 0):  # what fails for the host is in the explanation
        for _ in range(1 + retries):
            cmid, explanation = resolve(host, port, hints, timeout_ms=timeout_ms, provider=provider)
            if explanation.errno != errno.ETIMEDOUT:
                break
    if cmid is None:
        raise error_of(explanation, None)
    return cmid, explanation
