"""Unreliable connections (UC) over RoCEv2 (InfiniBand Architecture 9.8.2): SEND and RDMA WRITE, not acknowledged.

A message is cut into packets as on a reliable connection, and completes at the sender when its last packet is given to
the owner. Nothing is repeated. BIND_MW and LOCAL_INV send nothing, and complete in their turn. The service has no SEND
that invalidates a key. The receiver drops a message of which it misses a packet, and goes on with the next one;
:mod:`rdmacm.proto.roce.uc_states` has the rules.

A packet that is not accepted is counted by reason:

- ``length``, ``opcode``, ``version``, ``qpn``, ``state``, ``pkey``, ``icrc``: not a packet for this queue pair.
- ``sequence``: of a message of which another packet is missing.
- ``no receive``: a message that needs a receive, and none is posted.
- ``receive too short``: for the message. The receive stays posted, so a peer cannot end the queue pair.
- ``refused``: of a wrong size, or a WRITE to memory that the peer may not write.

A request whose memory cannot be read, or a bind or invalidation that is not allowed, flushes the requests after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from rdmacm.enums import AccessFlag, WCOpcode, WCStatus
from rdmacm.proto.constants import (
    BTH_LENGTH,
    ICRC_LENGTH,
    LONGEST_MESSAGE,
    LONGEST_PACKET,
    PKEY_BITS,
    PSN_MASK,
    QPN_MASK,
    RESIDUE,
    SHORTEST_PACKET,
    SOLICITED_EVENT,
)
from rdmacm.proto.engine import NOTHING, PACKETS, Datagram, QPEngine, RtrAttributes, RtsAttributes
from rdmacm.proto.plainints import ACCESS_REMOTE_WRITE
from rdmacm.proto.roce.buffers import LocalProtectionError, scatter, total
from rdmacm.proto.roce.headers import BTH_HALVES, RETH_STRUCT, WORD
from rdmacm.proto.roce.icrc import Icrc, crc32, icrc_between
from rdmacm.proto.roce.opcodes import (
    EXTENDED_HEADERS,
    HEADER_LENGTH,
    IS_END,
    IS_START,
    OPERATION,
    TRANSPORT_MASK,
    ExtendedHeader,
    Operation,
    TransportService,
)
from rdmacm.proto.roce.rc.request_types import REQUEST_TYPES
from rdmacm.proto.roce.rc.requester import execute_locally
from rdmacm.proto.roce.rc.trains import Trains
from rdmacm.proto.roce.uc_states import TRANSITIONS, Arrival, Step, UcState
from rdmacm.proto.roce.ud import NO_RECEIVE, TOO_SHORT
from rdmacm.proto.work import WC, Memory, RecvWork, SendWork

if TYPE_CHECKING:
    from rdmacm.proto.engine import EngineCounters, SharedReceives
    from rdmacm.proto.wire import Buffer

_SEND = int(Operation.SEND)
#: By opcode: bytes of its headers, 0 for opcodes of other services.
_HEADER_LENGTHS = bytes(
    HEADER_LENGTH[opcode] if opcode & TRANSPORT_MASK == TransportService.UC else 0 for opcode in range(256)
)
_NO_HEADERS = bytes(256)
_WITH_IMMEDIATE = frozenset(o for o in range(256) if EXTENDED_HEADERS[o] & ExtendedHeader.IMM_DT)
_SUCCESS, _FLUSHED = WCStatus.SUCCESS, WCStatus.WR_FLUSH_ERR
_RECV, _RECV_WITH_IMM = WCOpcode.RECV, WCOpcode.RECV_RDMA_WITH_IMM
_NO_BYTES = memoryview(b"")
_NO_ICRC = Icrc(bytes(4), bytes(4), 0)
_BETWEEN, _IN_SEND, _IN_WRITE = UcState


class _DroppedError(Exception):
    """A message that cannot be taken: the reason for the counters."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class UnreliableEngine(QPEngine, Protocol):
    """What the engines of unreliable connections have."""

    @property
    def send_failed(self) -> bool:
        """Whether requests are flushed, because one has failed; undone by :meth:`resume`."""


class UcEngine:
    """The protocol of one queue pair; implements :class:`UnreliableEngine`. ``QPEngine`` describes the methods."""

    __slots__ = (
        *("_access", "_counters", "_expected_psn", "_header_lengths", "_icrc_in", "_icrc_out", "_identification"),
        *("_is_paused", "_local", "_memory", "_mtu", "_offset", "_pending", "_recv", "_recv_capacity", "_remote"),
        *("_send_bth", "_sent_packets", "_shared", "_state", "_write_target", "can_send"),
        *("completed", "failed", "failure", "psn", "qp_num", "recv_queue", "send_failed"),
    )

    def __init__(
        self,
        qp_num: int,
        memory: Memory,
        shared: SharedReceives | None,
        counters: EngineCounters,
    ) -> None:
        self.qp_num = qp_num
        #: The memory that the peer may write.
        self._memory = memory
        self._shared = shared
        self._counters = counters
        self.completed: list[WC] = []
        self.failed: bool = False
        self.failure: str = ""
        self.send_failed: bool = False
        # -- the path
        self._local = self._remote = b""
        self._icrc_out = self._icrc_in = _NO_ICRC
        #: Payload bytes of a packet.
        self._mtu = 0
        #: The first half of the BTH of packets sent, without the operation and flags.
        self._send_bth = 0
        # -- sending
        self.can_send: bool = False
        #: The requests, oldest first, and how many packets of the oldest were sent.
        self._pending: deque[SendWork] = deque()
        self._sent_packets = 0
        #: The PSN of the next packet.
        self.psn: int = 0
        self._is_paused = False
        # -- receiving
        #: By opcode: bytes of its headers, 0 for those that are not accepted in the present state.
        self._header_lengths = _NO_HEADERS
        #: What the peer may do: bits of ``AccessFlag``.
        self._access = 0
        #: The IPv4 identification that the next packet probably has.
        self._identification = 0
        #: The receives, oldest first, unless there is a shared receive queue.
        self.recv_queue: deque[RecvWork] = deque()
        #: The message in progress, the PSN of its next packet, and its bytes that have arrived.
        self._state = _BETWEEN
        self._expected_psn = 0
        self._offset = 0
        #: The receive that was taken last, until it completes, and its room in bytes.
        self._recv: RecvWork | None = None
        self._recv_capacity = 0
        #: WRITE in progress: R_Key, address and length.
        self._write_target = (0, 0, 0)

    # -- the user -------------------------------------------------------------------------------------

    def set_route(self, local: bytes, remote: bytes, source_port: int) -> None:
        self._local, self._remote = local, remote
        self._icrc_out = icrc_between(local, remote, source_port)

    def set_peer_port(self, port: int) -> None:
        self._icrc_in = icrc_between(self._remote, self._local, port)

    def ready_to_receive(self, attributes: RtrAttributes) -> None:
        self._mtu = attributes.path_mtu
        self._send_bth = TransportService.UC << 56 | attributes.pkey << 32 | attributes.dest_qp_num
        self._access = int(attributes.access)
        self._expected_psn = attributes.rq_psn & PSN_MASK
        self._header_lengths = _HEADER_LENGTHS

    def ready_to_send(self, attributes: RtsAttributes) -> None:
        if not self._mtu:
            raise ValueError("a queue pair has to be ready to receive before it is ready to send")
        self.psn = attributes.sq_psn & PSN_MASK
        self.can_send = True

    def set_access(self, access: AccessFlag) -> None:
        self._access = int(access)

    def set_min_rnr_timer(self, code: int) -> None:
        """Do nothing: nobody is told that no receive is posted."""

    def set_max_dest_rd_atomic(self, count: int) -> None:
        """Do nothing: the peer cannot read."""

    def set_send_attributes(self, attributes: RtsAttributes, now: float) -> None:
        """Do nothing: nothing is repeated, and nothing is read."""

    def post_send(self, work: SendWork) -> None:
        """See :meth:`QPEngine.post_send`. ValueError also for an opcode that the service does not have."""
        kind = REQUEST_TYPES[work.opcode]
        if not (kind.is_data or kind.is_local) or kind.with_invalidate:
            raise ValueError(f"{work.opcode!r} cannot be sent on an unreliable connection")
        if self.failed or self.send_failed:
            self._complete_send(work, _FLUSHED)
        elif not self.can_send:
            raise ValueError("the queue pair is not ready to send")
        else:
            self._pending.append(work)

    def look_up_again(self, _lkey: int, look_up: Callable[[Iterable[RecvWork]], None]) -> None:
        look_up(self.recv_queue)

    def post_recv(self, work: RecvWork) -> None:
        if self.failed:
            self._complete_recv(work.wr_id, _FLUSHED)
        else:
            self.recv_queue.append(work)

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        """SQD or SQE to RTS."""
        self._is_paused = self.send_failed = False

    @property
    def drained(self) -> bool:
        return not self._sent_packets

    def flush(self) -> None:
        self.failed = True
        self._header_lengths = _NO_HEADERS
        self._state = _BETWEEN
        self._flush_sends()
        if self._recv is not None:
            recv, self._recv = self._recv, None
            self._complete_recv(recv.wr_id, _FLUSHED)
        while self.recv_queue:
            self._complete_recv(self.recv_queue.popleft().wr_id, _FLUSHED)

    @property
    def deadline(self) -> None:
        """None: nothing is waited for."""
        return None

    def timer(self, now: float) -> None:
        """Do nothing: there is no timer."""

    def probe(self) -> tuple[Buffer, ...]:
        """Return nothing: the peer answers no packet."""
        return ()

    @property
    def peer_activity(self) -> int:
        return self._expected_psn

    @property
    def sent_again(self) -> int:
        """Never: nothing is acknowledged."""
        return 0

    # -- sending --------------------------------------------------------------------------------------

    @property
    def to_send(self) -> int:
        return PACKETS if self._pending and (self._sent_packets or not self._is_paused) else NOTHING

    def datagrams(self, _now: float, limit: int, train: int) -> list[Datagram]:
        """See :meth:`QPEngine.datagrams`. A request completes with its last packet."""
        out = Trains(self._icrc_out, train)
        left = limit
        while left > 0 and self.to_send:
            work = self._pending[0]
            if REQUEST_TYPES[work.opcode].is_local:
                self._execute_locally(work)
                continue
            try:
                self._add_packet(out, work)
                left -= 1
            except LocalProtectionError:
                self._fail_send(work, WCStatus.LOC_PROT_ERR)
        return out.close()

    def _execute_locally(self, work: SendWork) -> None:
        """Execute the oldest request, a BIND_MW or LOCAL_INV: all requests before it are complete."""
        status = execute_locally(self._memory, work)
        work.length = 0
        if status is _SUCCESS:
            self._pending.popleft()
            self._complete_send(work, status)
        else:
            self._fail_send(work, status)

    def _fail_send(self, work: SendWork, status: WCStatus) -> None:
        """The oldest request has failed: those after it are flushed."""
        self._pending.popleft()
        self._complete_send(work, status)
        self.send_failed = True
        self._flush_sends()

    def _add_packet(self, out: Trains, work: SendWork) -> None:
        """Append the next packet of a message."""
        index = self._sent_packets
        if not index:
            work.length = total(work.segments)
        out.add_part(work, REQUEST_TYPES[work.opcode], index, self._mtu, self._send_bth, self.psn)
        self.psn = self.psn + 1 & PSN_MASK
        self._sent_packets = index + 1
        if self._sent_packets * self._mtu >= work.length:
            self._sent_packets = 0
            self._pending.popleft()
            self._complete_send(work, _SUCCESS)

    def _complete_send(self, work: SendWork, status: WCStatus) -> None:
        length = work.length if status is _SUCCESS else 0
        completes = REQUEST_TYPES[work.opcode].completes
        if work.signaled or status is not _SUCCESS:
            self.completed.append(WC(work.wr_id, status, completes, length, qp_num=self.qp_num))

    def _flush_sends(self) -> None:
        self._sent_packets = 0
        while self._pending:
            self._complete_send(self._pending.popleft(), _FLUSHED)

    # -- packets received -----------------------------------------------------------------------------

    def received(self, data: memoryview, segment: int, _now: float) -> int:
        step = segment or len(data) or 1
        accepted = 0
        first_identification = -1
        for start in range(0, len(data), step):
            reason = self._accept(data[start : start + step])
            if reason:
                self._counters.dropped[reason] += 1
            else:
                accepted += 1
            if first_identification < 0:
                first_identification = self._identification
            self._identification = self._identification + 1 & 0xFFFF
        # A peer whose first packet had 0 sends trains that count from 0, or packets that all have 0.
        if first_identification <= 0:
            self._identification = 0
        return accepted

    def _accept(self, packet: memoryview) -> str:
        """Check and execute a packet. Return why it is dropped; an empty text if it is not."""
        size = len(packet)
        if not SHORTEST_PACKET <= size <= LONGEST_PACKET:
            return "length"
        half, word = BTH_HALVES.unpack_from(packet)
        opcode, pad = half >> 56, half >> 52 & 3
        if not _HEADER_LENGTHS[opcode]:
            return "opcode"
        if size & 3 or size < _HEADER_LENGTHS[opcode] + pad + ICRC_LENGTH:
            return "length"
        if half >> 48 & 0xF:
            return "version"
        if half & QPN_MASK != self.qp_num:
            return "qpn"
        if not self._header_lengths[opcode]:
            return "state"
        if half >> 32 & PKEY_BITS != PKEY_BITS:  # this side is a full member
            return "pkey"
        if crc32(packet, self._icrc_in.start(size, self._identification)) != RESIDUE:
            found = self._icrc_in.solve((packet,), self._identification)
            if found is None:
                return "icrc"
            self._identification = found
        return self._respond(opcode, word & PSN_MASK, half >> 48, packet[BTH_LENGTH : size - ICRC_LENGTH - pad])

    def _respond(self, opcode: int, psn: int, flags: int, body: memoryview) -> str:
        """Execute a packet whose headers are right; ``body`` is what follows the BTH, without padding."""
        is_send, is_start = OPERATION[opcode] == _SEND, IS_START[opcode]
        if is_start:
            arrival = Arrival.SEND_START if is_send else Arrival.WRITE_START
        elif psn != self._expected_psn:
            arrival = Arrival.GAP
        else:
            arrival = Arrival.SEND_REST if is_send else Arrival.WRITE_REST
        step = TRANSITIONS[self._state][arrival]
        if step is Step.DROP:
            return "sequence"
        if step is not Step.CONTINUE:
            self._state = _BETWEEN
            if step is Step.ABANDON:
                return "sequence"
        try:
            if is_send:
                self._execute_send(opcode, flags, body)
            else:
                self._execute_write(opcode, flags, body)
        except _DroppedError as dropped:
            self._state = _BETWEEN
            return dropped.reason
        except LocalProtectionError:
            self._fail_recv()
            return ""
        self._expected_psn = psn + 1 & PSN_MASK
        self._state = _BETWEEN if IS_END[opcode] else _IN_SEND if is_send else _IN_WRITE
        return ""

    def _check_size(self, opcode: int, size: int) -> None:
        """First and middle packets have one MTU of payload, last packets at least a byte, only packets any number."""
        mtu = self._mtu
        if not ((0 if IS_START[opcode] else 1) <= size <= mtu if IS_END[opcode] else size == mtu):
            raise _DroppedError("refused")

    def _next_recv(self) -> RecvWork:
        """The receive for a message: that of an abandoned one, or the next."""
        if self._recv is None:
            if self._shared is not None:
                self._recv = self._shared.take()
            elif self.recv_queue:
                self._recv = self.recv_queue.popleft()
            if self._recv is None:
                raise _DroppedError(NO_RECEIVE)
        return self._recv

    def _execute_send(self, opcode: int, flags: int, data: memoryview) -> None:
        immediate = None
        if opcode in _WITH_IMMEDIATE:
            (immediate,) = WORD.unpack_from(data)
            data = data[4:]
        size = len(data)
        self._check_size(opcode, size)
        if IS_START[opcode]:
            recv, offset = self._next_recv(), 0
            self._recv_capacity = total(recv.segments)
        else:
            assert self._recv is not None
            recv, offset = self._recv, self._offset
        self._offset = end = offset + size
        if end > self._recv_capacity:
            raise _DroppedError(TOO_SHORT)
        if size:
            scatter(recv.segments, offset, data)
        if IS_END[opcode]:
            self._recv = None
            is_solicited = flags & SOLICITED_EVENT != 0
            self.completed.append(WC(recv.wr_id, _SUCCESS, _RECV, end, immediate, None, is_solicited, self.qp_num))

    def _execute_write(self, opcode: int, flags: int, data: memoryview) -> None:
        if IS_START[opcode]:
            address, rkey, length = RETH_STRUCT.unpack_from(data)
            data = data[RETH_STRUCT.size :]
            if length > LONGEST_MESSAGE:
                raise _DroppedError("refused")
            offset = 0
        else:
            rkey, address, length = self._write_target
            offset = self._offset
        if not self._access & ACCESS_REMOTE_WRITE:
            raise _DroppedError("refused")
        immediate = None
        if opcode in _WITH_IMMEDIATE:
            (immediate,) = WORD.unpack_from(data)
            data = data[4:]
        size, is_end = len(data), IS_END[opcode]
        self._check_size(opcode, size)
        view: memoryview | None = _NO_BYTES
        if length:
            view = self._memory.remote(rkey, address, length, AccessFlag.REMOTE_WRITE)
        end = offset + size
        if view is None or (end != length if is_end else end >= length):
            raise _DroppedError("refused")
        recv = self._next_recv() if immediate is not None else None
        if size:
            view[offset:end] = data
        self._write_target, self._offset = (rkey, address, length), end
        if recv is not None:
            self._recv = None
            is_solicited = flags & SOLICITED_EVENT != 0
            wc = WC(recv.wr_id, _SUCCESS, _RECV_WITH_IMM, length, immediate, None, is_solicited, self.qp_num)
            self.completed.append(wc)

    def _fail_recv(self) -> None:
        """The memory of the receive in progress cannot be written: everything is flushed after it."""
        recv, self._recv = self._recv, None
        if recv is not None:
            self._complete_recv(recv.wr_id, WCStatus.LOC_QP_OP_ERR)
        self.failure = "LOC_QP_OP_ERR of a receive"
        self.flush()

    def _complete_recv(self, wr_id: int, status: WCStatus) -> None:
        self.completed.append(WC(wr_id, status, _RECV, qp_num=self.qp_num))
