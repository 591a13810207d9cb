"""The receiving half of a reliable connection.

Requests are executed strictly in PSN order. One that comes too early gets a single NAK and is dropped, with all that
follow, until the expected one arrives; one that comes again is not executed again: a SEND or WRITE is acknowledged once
more, a READ or atomic answered from what was kept of it. The order of the checks is InfiniBand Architecture 9.7.4
and rxe's: opcode sequence, permission, resources, lengths, then the memory key; only then is memory touched.

Answers leave in the order of their requests. A READ's answer is cut into packets as they are sent, from the memory as
it is then; acknowledgements that follow each other are one. What is kept is bounded: ``max_dest_rd_atomic`` READs and
atomics, at most two answers for each of them, and an acknowledgement between one and the next.

Memory may be deregistered at any time between two turns, so a view of it is kept for one turn only and then asked for
again by its key.
"""

from __future__ import annotations

import struct
import sys
from collections import Counter, deque
from collections.abc import Callable

from rdmacm.enums import AccessFlag, WCOpcode, WCStatus
from rdmacm.proto.roce.buffers import LocalProtectionError, located, padded, scatter, total
from rdmacm.proto.roce.opcodes import (
    EXTENDED_HEADERS,
    IS_END,
    IS_START,
    OPERATION,
    ExtendedHeader,
    Operation,
)
from rdmacm.proto.roce.psn import PSN_MASK, difference
from rdmacm.proto.roce.rc.codes import (
    ACKNOWLEDGE,
    ATOMIC_ACKNOWLEDGE,
    ATOMIC_ETH,
    COMPARE_SWAP,
    FETCH_ADD,
    HALVES,
    LONG,
    READ_FIRST,
    READ_LAST,
    READ_MIDDLE,
    READ_ONLY,
    READ_REQUEST,
    RETH,
    SEND_MIDDLE,
    WORD,
    WRITE_MIDDLE,
    prefix,
)
from rdmacm.proto.roce.rc.runs import Run
from rdmacm.proto.roce.rc.trains import Trains
from rdmacm.work import WC, Memory, RecvWork

_U64 = 0xFFFFFFFFFFFFFFFF
_NOTHING = memoryview(b"")

_IMMEDIATE = frozenset(o for o in range(256) if EXTENDED_HEADERS[o] & ExtendedHeader.IMM_DT)
_INVALIDATE = frozenset(o for o in range(256) if EXTENDED_HEADERS[o] & ExtendedHeader.IETH)
_SEND, _WRITE = int(Operation.SEND), int(Operation.RDMA_WRITE)
_TRAILED = _IMMEDIATE | _INVALIDATE
# Plain, as flags are slow.
_MAY_WRITE, _MAY_READ = int(AccessFlag.REMOTE_WRITE), int(AccessFlag.REMOTE_READ)
_MAY_ATOMIC = int(AccessFlag.REMOTE_ATOMIC)
_REMOTE_WRITE = AccessFlag.REMOTE_WRITE
_SUCCESS = WCStatus.SUCCESS
_RECV, _RECV_WITH_IMM = WCOpcode.RECV, WCOpcode.RECV_RDMA_WITH_IMM
_ACK = 0x1F  # no credits are counted
#: The least AETH of a NAK: what the upper three bits of the syndrome say is not 0 there.
NAKS = 0x20000000
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
    """Packets to send: an ACK, a NAK, or (with ``kept``) an atomic's value or the rest of a READ's answer.

    A READ's answer goes from ``psn`` to ``last``, out of ``length`` bytes at ``address``, of which ``offset`` are sent.
    """

    __slots__ = ("address", "again", "kept", "last", "length", "msn", "offset", "psn", "syndrome")

    def __init__(self, psn: int, syndrome: int, msn: int, kept: _Kept | None = None, *, again: bool = False) -> None:
        self.psn = self.last = psn
        self.syndrome = syndrome
        self.msn = msn
        self.kept = kept
        self.again = again
        self.address = self.length = self.offset = 0


class Responder:
    """See the module. ``complete`` takes completions of receives.

    These come from ``recvs``, or where ``receive`` is given from there: the next one, or None.
    """

    def __init__(
        self,
        *,
        qp_num: int,
        dest_qp_num: int,
        rq_psn: int,
        mtu: int,
        access: AccessFlag,
        memory: Memory,
        recvs: deque[RecvWork],
        receive: Callable[[], RecvWork | None] | None,
        complete: Callable[[WC], None],
        dropped: Counter[str],
        max_dest_rd_atomic: int,
        min_rnr_timer: int,
        pkey: int,
    ) -> None:
        self._qp_num = qp_num
        self._dest = dest_qp_num
        self._pkey = pkey
        self._expected = rq_psn & PSN_MASK
        self._completed = rq_psn & PSN_MASK  # one past the last request that was executed as a whole
        self._mtu = mtu
        self._memory = memory
        self._recvs = recvs
        self._receive = receive
        self._complete = complete
        self._dropped = dropped
        self._kept: deque[_Kept] = deque(maxlen=max_dest_rd_atomic)
        self._max_kept = max_dest_rd_atomic
        #: The PSN of an ACK or NAK to be sent before all other answers, -1 where there is none; and its AETH.
        self.owed = -1
        self.owed_aeth = 0
        #: The other answers.
        self.answers: deque[_Answer] = deque()
        self._msn = 0
        self._nak_sent = False
        self._inside = 0  # the operation, between a first packet and its last
        self._recv: RecvWork | None = None
        self._room = 0  # bytes of its buffers
        self._offset = 0
        self._target: memoryview | None = None  # where a WRITE goes, as far as it has been looked up
        self._write = (0, 0, 0)  # its rkey, address and length
        self._ack = HALVES.unpack(self._prefix(ACKNOWLEDGE) + bytes(4))[0]
        self._read_middle = self._prefix(READ_MIDDLE)
        #: What the peer may do, and how long it is told to wait for a receive (the code of an RNR NAK).
        self.access = int(access)
        self.min_rnr_timer = min_rnr_timer
        self.failed = False

    def fail(self, status: WCStatus) -> None:
        """The connection is over: the receive in progress has ``status``. (Posted ones are their owner's to flush.)"""
        if self.failed:
            return
        self.failed = True
        if self._recv is not None:
            self._complete(WC(self._recv.wr_id, status, WCOpcode.RECV, qp_num=self._qp_num))
            self._recv = None

    def forget(self) -> None:
        """Send nothing of what was still to be answered."""
        self.answers.clear()
        self.owed = -1

    # -- requests -------------------------------------------------------------------------------------

    def turned(self) -> None:
        """What was received together is done with: memory may be deregistered before there is more."""
        self._target = None

    def received(self, opcode: int, psn: int, flags: int, body: memoryview) -> bool:
        """A SEND, WRITE, READ or atomic: opcode, PSN, the BTH's flag bits, and what follows the BTH.

        Of ``flags``, bit 7 is a solicited event and bit 0 asks for an acknowledgement. ``body`` has the extended
        headers of the opcode, and no padding. False where the packet is not executed.
        """
        if psn != self._expected:
            return self._out_of_order(opcode, psn, body)
        self._nak_sent = False
        try:
            self._execute(opcode, psn, flags, body)
        except _Refused as refused:
            self._answer(psn, refused.syndrome)
            self._nak_sent = True  # what follows is dropped without another word until this one comes again
            if refused.syndrome & 0x60 == _RNR_NAK:
                self._dropped["not ready"] += 1
            else:
                self._dropped["refused"] += 1
                self.fail(refused.status or _STATUS_OF[refused.syndrome])
            return False
        return True

    def _out_of_order(self, opcode: int, psn: int, body: memoryview) -> bool:
        if difference(psn, self._expected) > 0:
            if not self._nak_sent:
                self._nak_sent = True
                self._answer(self._expected, _NAK_SEQUENCE)
            self._dropped["sequence"] += 1
            return False
        self._dropped["duplicate"] += 1
        self._again(opcode, psn, body)
        return False

    def _execute(self, opcode: int, psn: int, flags: int, body: memoryview) -> None:
        family = OPERATION[opcode]
        if family not in (_SEND, _WRITE):
            if self._inside:
                raise _Refused(_NAK_INVALID)
            if opcode == READ_REQUEST:
                self._take_read(psn, body)
            else:
                self._take_atomic(opcode, psn, body)
            return
        start, end = IS_START[opcode], IS_END[opcode]
        if self._inside != (0 if start else family):
            raise _Refused(_NAK_INVALID)
        if family == _SEND:
            self._take_send(opcode, start, end, flags, body)
        else:
            self._take_write(opcode, start, end, flags, body)
        self._expected = expected = (psn + 1) & PSN_MASK
        if end:
            self._inside = 0
            self._msn = (self._msn + 1) & PSN_MASK
            self._completed = expected
        else:
            self._inside = family
        if flags & 1:
            self._answer(psn, _ACK)

    def send_only(self, psn: int, flags: int, data: memoryview) -> bool:
        """A message of one packet for a receive of one buffer: what :meth:`received` does where nothing is wrong.

        False where something is, or the case is another; nothing has happened then.
        """
        recvs, size = self._recvs, len(data)
        if psn != self._expected or self._inside or not recvs or size > self._mtu:
            return False
        recv = recvs[0]
        segments = recv.segments
        if len(segments) != 1:
            return False
        try:
            segments[0][:size] = data
        except (ValueError, TypeError):  # too short, released, read-only
            return False
        recvs.popleft()
        self._complete(WC(recv.wr_id, _SUCCESS, _RECV, size, None, None, flags & 0x80 != 0, self._qp_num))
        self._executed(psn, flags)
        return True

    def write_only(self, psn: int, flags: int, body: memoryview) -> bool:
        """A WRITE of one packet, as :meth:`send_only` takes a message of one."""
        address, rkey, length = RETH.unpack_from(body)
        if (
            psn != self._expected
            or self._inside
            or not self.access & _MAY_WRITE
            or length != len(body) - 16
            or not 0 < length <= self._mtu
        ):
            return False
        target = self._memory.remote(rkey, address, length, _REMOTE_WRITE)
        if target is None:
            return False
        target[:] = body[16:]
        self._executed(psn, flags)
        return True

    def _executed(self, psn: int, flags: int) -> None:
        """A message of one packet has been taken in."""
        self._nak_sent = False
        self._expected = self._completed = psn + 1 & PSN_MASK
        self._msn = msn = self._msn + 1 & PSN_MASK
        if flags & 1:
            if self.answers:
                self._answer(psn, _ACK)
            else:  # whatever was owed before, this says it too
                self.owed = psn
                self.owed_aeth = _ACK << 24 | msn

    def _check_size(self, start: int, end: int, size: int) -> None:
        """First and middle packets are one MTU, last ones hold something, none more than an MTU."""
        if not ((0 if start else 1) <= size <= self._mtu if end else size == self._mtu):
            raise _Refused(_NAK_INVALID)

    def _take(self) -> RecvWork:
        work = None
        if self._receive is not None:
            work = self._receive()
        elif self._recvs:
            work = self._recvs.popleft()
        if work is None:
            raise _Refused(_RNR_NAK | self.min_rnr_timer & 0x1F)
        return work

    def _take_send(self, opcode: int, start: int, end: int, flags: int, data: memoryview) -> None:
        immediate = key = None
        if opcode in _TRAILED:
            (word,) = WORD.unpack_from(data)
            data = data[4:]
            if opcode in _IMMEDIATE:
                immediate = word
            else:
                key = word
        size = len(data)
        self._check_size(start, end, size)
        if start:
            self._recv = self._take()
            self._offset = 0
        recv = self._recv
        assert recv is not None
        try:
            if start:
                self._room = total(recv.segments)
            offset = self._offset
            self._offset = offset + size
            if self._offset > self._room:
                raise _Refused(_NAK_INVALID, WCStatus.LOC_LEN_ERR)
            if key is not None and not self._memory.invalidate(key):
                raise _Refused(_NAK_ACCESS, WCStatus.REM_INV_REQ_ERR)
            if size:
                scatter(recv.segments, offset, data)
        except LocalProtectionError:
            raise _Refused(_NAK_OPERATION) from None
        if end:
            self._recv = None
            solicited = flags & 0x80 != 0
            self._complete(WC(recv.wr_id, _SUCCESS, _RECV, self._offset, immediate, key, solicited, self._qp_num))

    def _find(self, rkey: int, address: int, length: int, access: AccessFlag) -> memoryview:
        """Registered memory; none is needed for no bytes."""
        if not length:
            return _NOTHING
        found = self._memory.remote(rkey, address, length, access)
        if found is None:
            raise _Refused(_NAK_ACCESS)
        return found

    def _take_write(self, opcode: int, start: int, end: int, flags: int, data: memoryview) -> None:
        if start:
            address, rkey, length = RETH.unpack_from(data)
            data = data[16:]
            if not self.access & _MAY_WRITE or length > _LONGEST:
                raise _Refused(_NAK_INVALID)
            offset, target = 0, None
        else:
            rkey, address, length = self._write
            offset, target = self._offset, self._target
        immediate = None
        if opcode in _IMMEDIATE:
            (immediate,) = WORD.unpack_from(data)
            data = data[4:]
        size = len(data)
        self._check_size(start, end, size)
        if target is None:
            target = self._find(rkey, address, length, AccessFlag.REMOTE_WRITE)
        done = offset + size
        if done != length if end else done >= length:
            raise _Refused(_NAK_INVALID)
        recv = self._take() if immediate is not None else None
        if size:
            target[offset:done] = data
        self._write, self._target, self._offset = (rkey, address, length), None if end else target, done
        if recv is not None:
            solicited = flags & 0x80 != 0
            self._complete(WC(recv.wr_id, _SUCCESS, _RECV_WITH_IMM, length, immediate, None, solicited, self._qp_num))

    def run(self) -> Run | None:
        """Where packets of the middle of the message in progress would go now."""
        if self._inside == _WRITE:
            rkey, address, length = self._write
            if self._target is None:
                self._target = self._memory.remote(rkey, address, length, AccessFlag.REMOTE_WRITE)
                if self._target is None:
                    return None
            # The last byte is the last packet's.
            count = (length - self._offset - 1) // self._mtu
            return Run(WRITE_MIDDLE, self._expected, self._target, self._offset, count)
        recv = self._recv
        if recv is None or self._offset >= self._room:
            return None
        view, offset = located(recv.segments, self._offset)
        return Run(SEND_MIDDLE, self._expected, view, offset, PSN_MASK)

    def ran(self, count: int, asked: int) -> None:
        """So many packets of :meth:`run` have arrived and are in their place; ``asked`` wants an acknowledgement."""
        psn = self._expected
        self._nak_sent = False
        self._offset += count * self._mtu
        self._expected = (psn + count) & PSN_MASK
        if asked >= 0:
            self._answer((psn + asked) & PSN_MASK, _ACK)

    def _pending(self) -> int:
        """READs and atomics that have not been answered even once."""
        return sum(1 for answer in self.answers if answer.kept and not answer.again)

    def _keep(self, psn: int, packets: int, rkey: int, address: int, length: int, original: int | None) -> None:
        kept = _Kept(psn, packets, rkey, address, length, original)
        self._kept.append(kept)
        self._expected = self._completed = (psn + packets) & PSN_MASK
        self._msn = (self._msn + 1) & PSN_MASK
        answer = _Answer(psn, _ACK, self._msn, kept)
        answer.last, answer.address, answer.length = kept.last, address, length
        self.answers.append(answer)

    def _take_read(self, psn: int, body: memoryview) -> None:
        address, rkey, length = RETH.unpack_from(body)
        if not self.access & _MAY_READ or length > _LONGEST or self._pending() >= self._max_kept:
            raise _Refused(_NAK_INVALID)
        self._find(rkey, address, length, AccessFlag.REMOTE_READ)
        self._keep(psn, max(1, -(-length // self._mtu)), rkey, address, length, None)

    def _take_atomic(self, opcode: int, psn: int, body: memoryview) -> None:
        address, rkey, first, second = ATOMIC_ETH.unpack_from(body)
        if not self.access & _MAY_ATOMIC or address % 8 or self._pending() >= self._max_kept:
            raise _Refused(_NAK_INVALID)
        target = self._find(rkey, address, 8, AccessFlag.REMOTE_ATOMIC)
        original = int.from_bytes(target, sys.byteorder)
        if opcode == FETCH_ADD:
            target[:] = ((original + first) & _U64).to_bytes(8, sys.byteorder)
        elif original == second:
            target[:] = first.to_bytes(8, sys.byteorder)
        self._keep(psn, 1, rkey, address, 8, original)

    def _again(self, opcode: int, psn: int, body: memoryview) -> None:
        """A request that was executed before."""
        if opcode not in (READ_REQUEST, COMPARE_SWAP, FETCH_ADD):
            # A NAK that is still to be sent says as much.
            last = self.answers[-1].syndrome if self.answers else self.owed_aeth >> 24 if self.owed >= 0 else _ACK
            if last == _ACK:
                self._answer((self._completed - 1) & PSN_MASK, _ACK)
            return
        kept = next((k for k in self._kept if psn - k.first & PSN_MASK <= k.last - k.first & PSN_MASK), None)
        if kept is None:
            return
        last, address, length = psn, 0, 0
        if opcode == READ_REQUEST:
            address, rkey, length = RETH.unpack_from(body)
            packets = max(1, -(-length // self._mtu))
            if (
                kept.original is not None
                or rkey != kept.rkey
                or address < kept.address
                or address + length > kept.address + kept.length
                or packets > (kept.last - psn & PSN_MASK) + 1
            ):
                return
            last = (psn + packets - 1) & PSN_MASK
        elif kept.original is None:
            return
        # Whoever asks again has no use for what is left of an earlier repetition: it gets that one's place.
        answer = next((other for other in self.answers if other.kept is kept and other.again), None)
        if answer is None:
            answer = _Answer(psn, _ACK, self._msn, kept, again=True)
            self.answers.append(answer)
        answer.psn, answer.last, answer.address, answer.length, answer.offset = psn, last, address, length, 0

    # -- answers --------------------------------------------------------------------------------------

    def _answer(self, psn: int, syndrome: int) -> None:
        """An ACK or NAK. It says all that one still to be sent right before it would say."""
        if not self.answers:
            if self.owed < 0 or syndrome != _ACK or difference(psn, self.owed) > 0:
                self.owed = psn
            self.owed_aeth = syndrome << 24 | self._msn
            return
        last = self.answers[-1]
        if last.kept is None:
            if difference(psn, last.psn) > 0 or syndrome != _ACK:
                last.psn = psn
            last.syndrome = syndrome
            last.msn = self._msn
            return
        self.answers.append(_Answer(psn, syndrome, self._msn))

    @property
    def wants_to_send(self) -> bool:
        """Whether :meth:`packets` has something."""
        return self.owed >= 0 or bool(self.answers)

    def acknowledgement(self) -> bytes:
        """What is owed, but for its ICRC."""
        psn, self.owed = self.owed, -1
        return _ACK_HEADERS.pack(self._ack, psn, self.owed_aeth)

    def packets(self, out: Trains, limit: int) -> int:
        """Up to ``limit`` packets to send; returns how many."""
        left = limit
        answers = self.answers
        if self.owed >= 0 and left > 0:
            out.add(self.acknowledgement(), (), 20)
            left -= 1
        while answers and left > 0:
            answer = answers[0]
            if answer.kept is None:
                aeth = answer.syndrome << 24 | answer.msn
                out.add(_ACK_HEADERS.pack(self._ack, answer.psn, aeth), (), 20)
            elif answer.kept.original is not None:
                header = self._prefix(ATOMIC_ACKNOWLEDGE) + _TWO_WORDS.pack(answer.psn, _ACK << 24 | answer.msn)
                out.add(header + LONG.pack(answer.kept.original), (), 28)
            else:
                left -= self._read_packets(out, answer, left)
                continue
            left -= 1
            answers.popleft()
        return limit - left

    def _read_packets(self, out: Trains, answer: _Answer, limit: int) -> int:
        """More of a READ's answer; returns how many packets. The answer leaves the list where it is at its end."""
        kept = answer.kept
        assert kept is not None
        try:
            data = self._find(kept.rkey, answer.address, answer.length, AccessFlag.REMOTE_READ)
        except _Refused as refused:
            self.answers.clear()
            self._answer(answer.psn, refused.syndrome)
            self.fail(WCStatus.REM_ACCESS_ERR)
            return 0
        mtu, count = self._mtu, 0
        while count < limit:
            psn, offset = answer.psn, answer.offset
            first, last = psn == kept.first, psn == answer.last
            if not first and not last:
                more = min(limit - count, answer.last - psn & PSN_MASK, PSN_MASK + 1 - psn)
                out.add_run(self._read_middle, psn, data, offset, mtu, more)
                answer.offset += more * mtu
            else:
                more = 1
                size = min(mtu, len(data) - offset)
                opcode = (READ_ONLY if last else READ_FIRST) if first else READ_LAST
                pieces, pad = padded([data[offset : offset + size]] if size else [], size)
                header = self._prefix(opcode, pad) + _TWO_WORDS.pack(psn, _ACK << 24 | answer.msn)
                out.add(header, pieces, 20 + size + pad)
                answer.offset += size
            answer.psn = (psn + more) & PSN_MASK
            count += more
            if last:
                self.answers.popleft()
                break
        return count

    def _prefix(self, opcode: int, pad: int = 0) -> bytes:
        return prefix(opcode, self._pkey, self._dest, pad << 4)


_TWO_WORDS = struct.Struct("!II")
_ACK_HEADERS = struct.Struct("!QII")

_STATUS_OF = {
    _NAK_INVALID: WCStatus.REM_INV_REQ_ERR,
    _NAK_ACCESS: WCStatus.REM_ACCESS_ERR,
    _NAK_OPERATION: WCStatus.LOC_QP_OP_ERR,
}
