"""Unreliable datagrams (UD) over RoCEv2 (InfiniBand Architecture 9.8.3): messages of one packet, to anybody.

A queue pair sends each message to the address, queue pair and Q_Key that its request names, and forgets it: nothing is
acknowledged or repeated, and PSNs are counted but not checked. It receives from everybody who knows its Q_Key.

:class:`UdEngine` is the protocol of one queue pair, without a socket. A packet that is not accepted is dropped and
counted by reason:

- ``length``: shorter than its headers, or with more payload than the MTU of the port.
- ``opcode``, ``version``, ``pkey``, ``qkey``: not one of UD, of another version, partition or Q_Key.
- ``icrc``: damaged.
- ``state``: everything was flushed.
- ``no receive``: no receive is posted.
- ``receive too short``: for the message and the 40 bytes before it. As in rdma_rxe, the receive stays posted; the
  architecture has a completion with LOC_LEN_ERR instead, by which a stranger could use up all receives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Generic, TypeVar

from rdmacm.address import DEFAULT_PKEY
from rdmacm.enums import WCOpcode, WCStatus, WROpcode
from rdmacm.proto.constants import (
    GRH_LENGTH,
    ICRC_LENGTH,
    OWN_QKEY,
    PKEY_BITS,
    PSN_MASK,
    QPN_MASK,
    RESIDUE,
    SOLICITED_EVENT,
)
from rdmacm.proto.roce.buffers import LocalProtectionError, padded, scatter, total
from rdmacm.proto.roce.grh import DEFAULT_HOP_LIMIT, GRH
from rdmacm.proto.roce.headers import BTH_DETH_STRUCT, IMM_DT_STRUCT
from rdmacm.proto.roce.icrc import Icrc, crc32, icrc_between
from rdmacm.proto.roce.opcodes import HEADER_LENGTH, Opcode
from rdmacm.proto.roce.rc.trains import Trains
from rdmacm.proto.work import WC, RecvWork, SendWork

if TYPE_CHECKING:
    from rdmacm.proto.engine import EngineCounters, SharedReceives
    from rdmacm.proto.wire import Buffer
    from rdmacm.proto.work import Memory

R = TypeVar("R")

_SEND = int(Opcode.UD_SEND_ONLY)
_SEND_WITH_IMMEDIATE = int(Opcode.UD_SEND_ONLY_WITH_IMMEDIATE)
_WITH_IMMEDIATE = WROpcode.SEND_WITH_IMM
_SUCCESS, _FLUSHED = WCStatus.SUCCESS, WCStatus.WR_FLUSH_ERR
_SENT, _RECV = WCOpcode.SEND, WCOpcode.RECV
#: Reasons of drops.
NO_RECEIVE, TOO_SHORT = "no receive", "receive too short"
#: Bytes of the shortest packet.
_LEAST = BTH_DETH_STRUCT.size + ICRC_LENGTH


def _has_room(work: RecvWork, length: int) -> bool:
    """Whether a receive has room for so many bytes. True as well for one whose memory cannot be accessed."""
    try:
        return total(work.segments) >= length
    except LocalProtectionError:
        return True


@dataclass(frozen=True, slots=True)
class UdSend(Generic[R]):
    """A datagram to send: its request, the route and the :class:`Icrc` of its path, and whom it is for."""

    work: SendWork
    route: R
    icrc: Icrc
    dest_qpn: int
    qkey: int

    @property
    def wr_id(self) -> int:
        """That of its request."""
        return self.work.wr_id


@lru_cache(512)
def _grh(
    source: bytes, destination: bytes, length: int, identification: int, traffic_class: int, hop_limit: int
) -> memoryview:
    header = GRH.of_packet(source, destination, length, identification, traffic_class, hop_limit)
    return memoryview(header.pack())


class UdFlow:
    """Where datagrams come from and arrive: packed addresses and the sender's UDP port."""

    __slots__ = ("destination", "icrc", "source")

    def __init__(self, source: bytes, destination: bytes, sport: int) -> None:
        self.source: bytes = source
        self.destination: bytes = destination
        self.icrc: Icrc = icrc_between(source, destination, sport)

    def grh(self, length: int, identification: int, ip_fields: tuple[int, int]) -> memoryview:
        """The 40 bytes before the payload of a packet that has ``length`` bytes from BTH to ICRC.

        ``ip_fields``: its traffic class and hop limit.
        """
        return _grh(self.source, self.destination, length, identification, *ip_fields)


@lru_cache(512)
def flow_between(source: bytes, destination: bytes, sport: int) -> UdFlow:
    """The flow that all queue pairs share which receive from an address and port at an address."""
    return UdFlow(source, destination, sport)


class UdEngine(Generic[R]):
    """The protocol of one datagram queue pair, from INIT on. ``R`` is what the owner sends a packet with.

    Its owner serialises all calls. ``shared_receives`` is its shared receive queue, None for a queue pair with receives
    of its own. ``counters`` are the device's. An engine that looks up local keys by itself finds them in ``memory``.
    """

    __slots__ = (
        *("_pending", "_shared", "completed", "counters", "failed", "is_paused", "is_ready", "max_payload", "psn"),
        *("qkey", "qp_num", "recv_queue", "send_failed"),
    )

    def __init__(
        self,
        qp_num: int,
        memory: Memory,  # noqa: ARG002 (a request has its buffers)
        shared_receives: SharedReceives | None,
        counters: EngineCounters,
    ) -> None:
        self.qp_num = qp_num
        self._shared = shared_receives
        self.counters = counters
        #: Its Q_Key.
        self.qkey = 0
        #: Whether :meth:`ready_to_send` was called, and the PSN of the next packet.
        self.is_ready: bool = False
        self.psn: int = 0
        #: The longest payload of a packet, in bytes: the MTU of the port.
        self.max_payload = 4096
        #: Completions that the owner has not taken yet, oldest first. The owner clears the list.
        self.completed: list[WC] = []
        #: Whether everything is flushed: by :meth:`flush`, or by a receive whose memory cannot be written. Before the
        #: owner flushes an engine that has raised an exception, it sets this to False.
        self.failed: bool = False
        #: Whether requests are flushed, because one has failed; undone by :meth:`resume`.
        self.send_failed: bool = False
        #: The receives, oldest first, unless there is a shared receive queue.
        self.recv_queue: deque[RecvWork] = deque()
        #: The datagrams to send, oldest first.
        self._pending: deque[UdSend[R]] = deque()
        #: Whether datagrams wait (:meth:`pause`).
        self.is_paused: bool = False

    # -- sending --------------------------------------------------------------------------------------

    @property
    def has_pending(self) -> bool:
        """Whether :meth:`datagrams` may return something."""
        return not self.is_paused and bool(self._pending)

    def ready_to_send(self, psn: int) -> None:
        """RTR to RTS; ``psn``: that of the first packet."""
        self.is_ready = True
        self.psn = psn

    def post_send(self, send: UdSend[R]) -> None:
        """Queue a datagram, whose length the owner has checked. In the error states it completes as flushed."""
        if self.failed or self.send_failed:
            self._complete_send(send, _FLUSHED)
        else:
            self._pending.append(send)

    def datagrams(self, limit: int, train: int) -> list[tuple[R, list[Buffer], int]]:
        """Return up to ``limit`` packets, as datagrams with their routes; their requests complete.

        Packets of one length to one place are joined to trains of up to ``train`` bytes; 0: each is by itself. The
        last number of a datagram is the segment size of a train, 0 for a single packet. A request whose memory cannot
        be read flushes those after it (``send_failed``).
        """
        found: list[tuple[R, list[Buffer], int]] = []
        pending = self._pending
        route: R | None = None
        trains: Trains | None = None
        left = limit
        while pending and left and not self.is_paused:
            send = pending.popleft()
            try:
                length = send.work.length = total(send.work.segments)
            except LocalProtectionError:
                self._complete_send(send, WCStatus.LOC_PROT_ERR)
                self.send_failed = True
                self._flush_sends()
                break
            if trains is None or send.route is not route:
                if trains is not None and route is not None:
                    found += [(route, *datagram) for datagram in trains.close()]
                route, trains = send.route, Trains(send.icrc, train)
            pieces, pad = padded(list(send.work.segments), length)
            header = self._header(send, pad)
            trains.add(header, pieces, len(header) + length + pad + ICRC_LENGTH)
            left -= 1
            self._complete_send(send, _SUCCESS)
        if trains is not None and route is not None:
            found += [(route, *datagram) for datagram in trains.close()]
        return found

    def _header(self, send: UdSend[R], pad: int) -> bytes:
        work = send.work
        flags = pad << 4 | SOLICITED_EVENT if work.solicited else pad << 4
        has_immediate = work.opcode is _WITH_IMMEDIATE
        opcode = _SEND_WITH_IMMEDIATE if has_immediate else _SEND
        qkey = self.qkey if send.qkey & OWN_QKEY else send.qkey
        header = BTH_DETH_STRUCT.pack(opcode, flags, DEFAULT_PKEY, send.dest_qpn, self.psn, qkey, self.qp_num)
        self.psn = self.psn + 1 & PSN_MASK
        return header + IMM_DT_STRUCT.pack(work.imm) if has_immediate else header

    def _complete_send(self, send: UdSend[R], status: WCStatus) -> None:
        length = send.work.length if status is _SUCCESS else 0
        self.completed.append(WC(send.work.wr_id, status, _SENT, length, qp_num=self.qp_num))

    def _flush_sends(self) -> None:
        while self._pending:
            self._complete_send(self._pending.popleft(), _FLUSHED)

    def pause(self) -> None:
        """RTS to SQD: queue requests, and send none."""
        self.is_paused = True

    def resume(self) -> None:
        """SQD or SQE to RTS."""
        self.is_paused = self.send_failed = False

    # -- receiving ------------------------------------------------------------------------------------

    def post_recv(self, work: RecvWork) -> None:
        """Queue a receive. In the error state it completes as flushed."""
        if self.failed:
            self._complete_recv(work, _FLUSHED)
        else:
            self.recv_queue.append(work)

    def look_up_again(self, _lkey: int, look_up: Callable[[Iterable[RecvWork]], None]) -> None:
        """See :meth:`rdmacm.proto.engine.QPEngine.look_up_again`."""
        look_up(self.recv_queue)

    def received(
        self, data: memoryview, segment: int, flow: UdFlow, ip_fields: tuple[int, int] = (0, DEFAULT_HOP_LIMIT)
    ) -> int:
        """Process a packet for this queue pair, or with ``segment`` > 0 a train of packets of that many bytes.

        ``ip_fields``: traffic class and hop limit of the IP header. The owner has checked the queue pair number and the
        state. Return how many packets were accepted.
        """
        size, accepted = len(data), 0
        step = segment or size or 1
        for at in range(0, size or 1, step):
            accepted += self._take(data[at : at + step], flow, ip_fields)
        return accepted

    def _take(self, data: memoryview, flow: UdFlow, ip_fields: tuple[int, int]) -> int:
        reason = self._accept(data, flow, ip_fields)
        if reason:
            self.counters.dropped[reason] += 1
            return 0
        return 1

    def _accept(self, data: memoryview, flow: UdFlow, ip_fields: tuple[int, int]) -> str:
        """Execute a packet. Return why it is dropped; an empty text if it is not."""
        length = len(data)
        if length < _LEAST:
            return "length"
        opcode, flags, pkey, word, _, qkey, source = BTH_DETH_STRUCT.unpack_from(data)
        if opcode not in (_SEND, _SEND_WITH_IMMEDIATE):
            return "opcode"
        start = HEADER_LENGTH[opcode]
        end = length - ICRC_LENGTH - (flags >> 4 & 3)
        if end < start or length & 3:
            return "length"
        if flags & 0xF:
            return "version"
        if self.failed:
            return "state"
        if pkey & PKEY_BITS != PKEY_BITS:  # this side is a full member
            return "pkey"
        if qkey != self.qkey:
            return "qkey"
        if end - start > self.max_payload:
            return "length"
        identification = 0
        if word > QPN_MASK or crc32(data, flow.icrc.start(length)) != RESIDUE:  # nearly every sender has 0
            found = flow.icrc.solve((data,))
            if found is None:
                return "icrc"
            identification = found
        recv = self._next_recv(GRH_LENGTH + end - start)
        if isinstance(recv, str):
            return recv
        try:
            scatter(recv.segments, 0, flow.grh(length, identification, ip_fields))
            scatter(recv.segments, GRH_LENGTH, data[start:end])
        except LocalProtectionError:
            self._complete_recv(recv, WCStatus.LOC_PROT_ERR)
            self.flush()
            return ""
        immediate = IMM_DT_STRUCT.unpack_from(data, start - 4)[0] if opcode == _SEND_WITH_IMMEDIATE else None
        self.completed.append(
            WC(
                recv.wr_id, _SUCCESS, _RECV, GRH_LENGTH + end - start, immediate, None, flags & SOLICITED_EVENT != 0,
                self.qp_num, source & QPN_MASK, True,
            )
        )  # fmt: skip
        return ""

    def _next_recv(self, length: int) -> RecvWork | str:
        """Take the receive for a message of ``length`` bytes; the reason of the drop if there is none."""
        shared, queue = self._shared, self.recv_queue
        first = shared.first if shared is not None else queue[0] if queue else None
        if first is None:
            return NO_RECEIVE
        if not _has_room(first, length):
            return TOO_SHORT
        if shared is None:
            return queue.popleft()
        shared.take()
        return first

    def _complete_recv(self, work: RecvWork, status: WCStatus) -> None:
        self.completed.append(WC(work.wr_id, status, _RECV, qp_num=self.qp_num))

    # -- the end --------------------------------------------------------------------------------------

    def flush(self) -> None:
        """To the error state: everything posted completes as flushed."""
        self.failed = True
        self._flush_sends()
        while self.recv_queue:
            self._complete_recv(self.recv_queue.popleft(), _FLUSHED)
