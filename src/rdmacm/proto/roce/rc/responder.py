"""The receiving half of a reliable connection.

Requests are executed strictly in PSN order. One that comes too early gets a single NAK and is dropped, with all that
follow, until the expected one arrives; one that comes again is not executed again: a SEND or WRITE is acknowledged once
more, a READ or atomic answered from what was kept of it. The order of the checks is InfiniBand Architecture 9.7.4
and rxe's: opcode sequence, permission, resources, lengths, then the memory key; only then is memory touched.

Answers leave in the order of their requests. A READ's answer is cut into packets as they are sent, from the memory as
it is then; acknowledgements that follow each other are one. What is kept is bounded: ``max_dest_rd_atomic`` READs and
atomics, and a list of answers no longer than that allows.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable

from rdmacm.proto.roce.buffers import padded, scatter, total
from rdmacm.proto.roce.opcodes import (
    EXTENDED_HEADERS,
    IS_END,
    IS_START,
    OPERATION,
    TRANSPORT_MASK,
    ExtendedHeader,
    Opcode,
    Operation,
    Transport,
)
from rdmacm.proto.roce.psn import PSN_MASK, difference
from rdmacm.proto.roce.rc.codes import (
    ACKNOWLEDGE,
    ATOMIC_ACKNOWLEDGE,
    ATOMIC_ETH,
    BTH,
    COMPARE_SWAP,
    FETCH_ADD,
    LONG,
    READ_FIRST,
    READ_LAST,
    READ_MIDDLE,
    READ_ONLY,
    READ_REQUEST,
    RETH,
    WORD,
)
from rdmacm.proto.roce.work import (
    WC,
    AccessFlag,
    Memory,
    Packet,
    RecvWork,
    WCOpcode,
    WCStatus,
)

_U64 = 0xFFFFFFFFFFFFFFFF


_IMMEDIATE = frozenset(o for o in range(256) if EXTENDED_HEADERS[o] & ExtendedHeader.IMM_DT)
_INVALIDATE = frozenset(o for o in range(256) if EXTENDED_HEADERS[o] & ExtendedHeader.IETH)
_SEND, _WRITE = int(Operation.SEND), int(Operation.RDMA_WRITE)
_REQUESTS = frozenset(
    o
    for o in Opcode
    if o & TRANSPORT_MASK == Transport.RC
    and OPERATION[o] in (Operation.SEND, Operation.RDMA_WRITE, Operation.RDMA_READ, Operation.ATOMIC)
)

_ACK = 0x1F  # no credits are counted
_RNR_NAK, _NAK_SEQUENCE, _NAK_INVALID, _NAK_ACCESS, _NAK_OPERATION = 0x20, 0x60, 0x61, 0x62, 0x63
_LONGEST = 1 << 31


class _Refused(Exception):
    """A request that cannot be executed: the NAK to send."""

    def __init__(self, syndrome: int, status: WCStatus | None = None) -> None:
        self.syndrome = syndrome
        self.status = status


class _Kept:
    """What is kept of a READ or atomic, to answer it again."""

    __slots__ = ("address", "first", "last", "length", "original", "rkey")

    def __init__(self, first: int, packets: int, rkey: int, address: int, length: int, original: int | None) -> None:
        self.first = first
        self.last = (first + packets - 1) & PSN_MASK
        self.rkey = rkey
        self.address = address
        self.length = length
        self.original = original


class _Answer:
    """Packets to send: an ACK, a NAK, an atomic's value, or (with ``data``) the rest of a READ's answer."""

    __slots__ = ("data", "first", "last", "msn", "offset", "original", "psn", "syndrome")

    def __init__(
        self, psn: int, syndrome: int, msn: int, original: int | None = None, data: memoryview | None = None
    ) -> None:
        self.psn = self.first = self.last = psn
        self.syndrome = syndrome
        self.msn = msn
        self.original = original
        self.data = data
        self.offset = 0

    @property
    def is_plain_ack(self) -> bool:
        return self.syndrome == _ACK and self.original is None and self.data is None


class Responder:
    """See the module. ``complete`` takes completions of receives; ``receive`` gives the next receive, or None."""

    def __init__(
        self,
        *,
        dest_qp_num: int,
        rq_psn: int,
        mtu: int,
        access: AccessFlag,
        memory: Memory,
        receive: Callable[[], RecvWork | None],
        complete: Callable[[WC], None],
        max_dest_rd_atomic: int = 16,
        min_rnr_timer: int = 12,
        pkey: int = 0xFFFF,
    ) -> None:
        self._dest = dest_qp_num
        self._pkey = pkey
        self._expected = rq_psn & PSN_MASK
        self._completed = rq_psn & PSN_MASK  # one past the last request that was executed as a whole
        self._mtu = mtu
        self._access = access
        self._memory = memory
        self._receive = receive
        self._complete = complete
        self._min_rnr_timer = min_rnr_timer
        self._kept: deque[_Kept] = deque(maxlen=max_dest_rd_atomic)
        self._max_kept = max_dest_rd_atomic
        self._answers: deque[_Answer] = deque()
        self._msn = 0
        self._nak_sent = False
        self._inside = 0  # the operation, between a first packet and its last
        self._recv: RecvWork | None = None
        self._offset = 0
        self._target: memoryview | None = None
        self._write_length = 0
        self.failed = False
        #: What was received and ignored.
        self.dropped = 0

    def fail(self, status: WCStatus) -> None:
        """The connection is over: the receive in progress has ``status``. (Posted ones are their owner's to flush.)"""
        if self.failed:
            return
        self.failed = True
        if self._recv is not None:
            self._complete(WC(self._recv.wr_id, status, WCOpcode.RECV))
            self._recv = None

    # -- requests -------------------------------------------------------------------------------------

    def received(self, opcode: int, psn: int, flags: int, body: memoryview) -> WCStatus | None:
        """A request: opcode, PSN, the BTH's flag bits (bit 7 solicited, bit 0 acknowledge), and what follows the BTH.

        Padding is removed from ``body``. Returns the status with which the connection fails, None while it lives.
        """
        if self.failed or opcode not in _REQUESTS:
            self.dropped += 1
            return None
        ahead = difference(psn, self._expected)
        if ahead > 0:
            if not self._nak_sent:
                self._nak_sent = True
                self._answer(self._expected, _NAK_SEQUENCE)
            self.dropped += 1
            return None
        if ahead < 0:
            self._again(opcode, psn, body)
            return None
        self._nak_sent = False
        try:
            self._execute(opcode, psn, flags, body)
        except _Refused as refused:
            self._answer(psn, refused.syndrome)
            self._nak_sent = True  # what follows is dropped without another word until this one comes again
            if refused.syndrome & 0x60 != _RNR_NAK:
                status = refused.status or _STATUS_OF[refused.syndrome]
                self.fail(status)
                return status
        return None

    def _execute(self, opcode: int, psn: int, flags: int, body: memoryview) -> None:
        family = OPERATION[opcode]
        if family in (_SEND, _WRITE):
            if IS_START[opcode] == bool(self._inside) or (self._inside and self._inside != family):
                raise _Refused(_NAK_INVALID)
            if family == _SEND:
                self._send(opcode, flags, body)
            else:
                self._write(opcode, flags, body)
            self._expected = (psn + 1) & PSN_MASK
            if IS_END[opcode]:
                self._inside = 0
                self._msn = (self._msn + 1) & PSN_MASK
                self._completed = self._expected
            else:
                self._inside = family
            if flags & 1:
                self._answer(psn, _ACK)
            return
        if self._inside:
            raise _Refused(_NAK_INVALID)
        if opcode == READ_REQUEST:
            self._read(psn, body)
        else:
            self._atomic(opcode, psn, body)

    def _payload(self, opcode: int, data: memoryview) -> None:
        """First and middle packets are one MTU, last ones hold something, none more than an MTU."""
        size = len(data)
        if IS_END[opcode]:
            fits = size <= self._mtu and (size > 0 or IS_START[opcode])
        else:
            fits = size == self._mtu
        if not fits:
            raise _Refused(_NAK_INVALID)

    def _trailer(self, opcode: int, body: memoryview) -> tuple[int | None, memoryview]:
        """The immediate or key ahead of the payload, and the payload."""
        if opcode not in _IMMEDIATE and opcode not in _INVALIDATE:
            return None, body
        if len(body) < 4:
            raise _Refused(_NAK_INVALID)
        return WORD.unpack_from(body)[0], body[4:]

    def _take(self) -> RecvWork:
        work = self._receive()
        if work is None:
            raise _Refused(_RNR_NAK | self._min_rnr_timer)
        return work

    def _send(self, opcode: int, flags: int, body: memoryview) -> None:
        word, data = self._trailer(opcode, body)
        self._payload(opcode, data)
        if IS_START[opcode]:
            self._recv, self._offset = self._take(), 0
        recv = self._recv
        assert recv is not None
        if self._offset + len(data) > total(recv.segments):
            raise _Refused(_NAK_INVALID, WCStatus.LOC_LEN_ERR)
        if opcode in _INVALIDATE and not self._memory.invalidate(word or 0):
            raise _Refused(_NAK_ACCESS, WCStatus.REM_INV_REQ_ERR)
        scatter(recv.segments, self._offset, data)
        self._offset += len(data)
        if IS_END[opcode]:
            self._recv = None
            self._complete(
                WC(
                    recv.wr_id,
                    WCStatus.SUCCESS,
                    WCOpcode.RECV,
                    self._offset,
                    word if opcode in _IMMEDIATE else None,
                    word if opcode in _INVALIDATE else None,
                    bool(flags & 0x80),
                )
            )

    def _write(self, opcode: int, flags: int, body: memoryview) -> None:
        if IS_START[opcode]:
            if len(body) < 16:
                raise _Refused(_NAK_INVALID)
            address, rkey, length = RETH.unpack_from(body)
            body = body[16:]
            if not self._access & AccessFlag.REMOTE_WRITE or length > _LONGEST:
                raise _Refused(_NAK_INVALID)
        word, data = self._trailer(opcode, body)
        self._payload(opcode, data)
        if IS_START[opcode]:
            target = self._memory.remote(rkey, address, length, AccessFlag.REMOTE_WRITE) if length else memoryview(b"")
            if target is None:
                raise _Refused(_NAK_ACCESS)
        else:
            target, length = self._target, self._write_length
        offset = 0 if IS_START[opcode] else self._offset
        assert target is not None
        left = length - offset
        if len(data) > left or (IS_END[opcode] and len(data) != left):
            raise _Refused(_NAK_INVALID)
        recv = self._take() if opcode in _IMMEDIATE else None
        if data:
            target[offset : offset + len(data)] = data
        self._target, self._write_length, self._offset = target, length, offset + len(data)
        if IS_END[opcode]:
            self._target = None
        if recv is not None:
            self._complete(
                WC(
                    recv.wr_id,
                    WCStatus.SUCCESS,
                    WCOpcode.RECV_RDMA_WITH_IMM,
                    length,
                    word,
                    None,
                    bool(flags & 0x80),
                )
            )

    def _read(self, psn: int, body: memoryview) -> None:
        if len(body) < 16 or not self._access & AccessFlag.REMOTE_READ or not self._max_kept:
            raise _Refused(_NAK_INVALID)
        address, rkey, length = RETH.unpack_from(body)
        if length > _LONGEST or self._reading() >= self._max_kept:
            raise _Refused(_NAK_INVALID)
        source = self._memory.remote(rkey, address, length, AccessFlag.REMOTE_READ) if length else memoryview(b"")
        if source is None:
            raise _Refused(_NAK_ACCESS)
        packets = max(1, -(-length // self._mtu))
        self._kept.append(_Kept(psn, packets, rkey, address, length, None))
        self._expected = self._completed = (psn + packets) & PSN_MASK
        self._msn = (self._msn + 1) & PSN_MASK
        self._answer_read(psn, packets, psn, source)

    def _atomic(self, opcode: int, psn: int, body: memoryview) -> None:
        if len(body) < 28 or not self._access & AccessFlag.REMOTE_ATOMIC or not self._max_kept:
            raise _Refused(_NAK_INVALID)
        address, rkey, first, second = ATOMIC_ETH.unpack_from(body)
        if address % 8:
            raise _Refused(_NAK_INVALID)
        target = self._memory.remote(rkey, address, 8, AccessFlag.REMOTE_ATOMIC)
        if target is None:
            raise _Refused(_NAK_ACCESS)
        original = int.from_bytes(target, sys.byteorder)
        if opcode == FETCH_ADD:
            target[:] = ((original + first) & _U64).to_bytes(8, sys.byteorder)
        elif original == second:
            target[:] = first.to_bytes(8, sys.byteorder)
        self._kept.append(_Kept(psn, 1, rkey, address, 8, original))
        self._expected = self._completed = (psn + 1) & PSN_MASK
        self._msn = (self._msn + 1) & PSN_MASK
        self._answers.append(_Answer(psn, _ACK, self._msn, original))

    def _again(self, opcode: int, psn: int, body: memoryview) -> None:
        """A request that was executed before."""
        if opcode not in (READ_REQUEST, COMPARE_SWAP, FETCH_ADD):
            self._answer((self._completed - 1) & PSN_MASK, _ACK)
            return
        kept = next((k for k in self._kept if difference(psn, k.first) >= 0 and difference(psn, k.last) <= 0), None)
        if kept is None or len(self._answers) > 2 * self._max_kept:
            self.dropped += 1
        elif kept.original is not None:
            if opcode != READ_REQUEST and psn == kept.first:
                self._answers.append(_Answer(psn, _ACK, self._msn, kept.original))
        elif opcode == READ_REQUEST and len(body) >= 16:
            address, rkey, length = RETH.unpack_from(body)
            inside = kept.address <= address and address + length <= kept.address + kept.length
            source = self._memory.remote(rkey, address, length, AccessFlag.REMOTE_READ) if length else memoryview(b"")
            packets = max(1, -(-length // self._mtu))
            fits = difference((psn + packets - 1) & PSN_MASK, kept.last) <= 0
            if rkey == kept.rkey and inside and fits and source is not None:
                self._answer_read(psn, packets, kept.first, source)
            else:
                self.dropped += 1

    # -- answers --------------------------------------------------------------------------------------

    def _reading(self) -> int:
        return sum(1 for answer in self._answers if answer.data is not None)

    def _answer(self, psn: int, syndrome: int) -> None:
        if syndrome == _ACK and self._answers and self._answers[-1].is_plain_ack:
            last = self._answers[-1]
            if difference(psn, last.psn) > 0:
                last.psn = psn
            last.msn = self._msn
            return
        self._answers.append(_Answer(psn, syndrome, self._msn))

    def _answer_read(self, psn: int, packets: int, original: int, source: memoryview) -> None:
        answer = _Answer(psn, _ACK, self._msn, data=source)
        answer.first, answer.last = original, (psn + packets - 1) & PSN_MASK
        self._answers.append(answer)

    @property
    def has_packets(self) -> bool:
        """Whether :meth:`packets` has something."""
        return bool(self._answers)

    def packets(self, limit: int = 128) -> list[Packet]:
        """Up to ``limit`` packets to send."""
        out: list[Packet] = []
        while self._answers and len(out) < limit:
            answer = self._answers[0]
            if answer.data is not None:
                out.append(self._read_packet(answer))
                if answer.data is not None:
                    continue
            elif answer.original is not None:
                aeth = WORD.pack(answer.syndrome << 24 | answer.msn)
                out.append((self._header(ATOMIC_ACKNOWLEDGE, answer.psn) + aeth + LONG.pack(answer.original), []))
            else:
                aeth = WORD.pack(answer.syndrome << 24 | answer.msn)
                out.append((self._header(ACKNOWLEDGE, answer.psn) + aeth, []))
            self._answers.popleft()
        return out

    def _read_packet(self, answer: _Answer) -> Packet:
        data, psn = answer.data, answer.psn
        assert data is not None
        size = min(self._mtu, len(data) - answer.offset)
        piece = data[answer.offset : answer.offset + size]
        first, last = psn == answer.first, psn == answer.last
        opcode = (READ_ONLY if last else READ_FIRST) if first else (READ_LAST if last else READ_MIDDLE)
        pieces, pad = padded([piece] if size else [], size)
        aeth = b"" if opcode == READ_MIDDLE else WORD.pack(_ACK << 24 | answer.msn)
        answer.offset += size
        answer.psn = (psn + 1) & PSN_MASK
        if last:
            answer.data = None
        return self._header(opcode, psn, pad) + aeth, pieces

    def _header(self, opcode: int, psn: int, pad: int = 0) -> bytes:
        return BTH.pack(opcode, pad << 4, self._pkey, self._dest, psn)


_STATUS_OF = {
    _NAK_INVALID: WCStatus.REM_INV_REQ_ERR,
    _NAK_ACCESS: WCStatus.REM_ACCESS_ERR,
    _NAK_OPERATION: WCStatus.LOC_QP_OP_ERR,
}
