"""The sending half of a reliable connection.

Work requests wait in ``_waiting`` until they are given packet sequence numbers and move to ``_sent``, oldest first;
they leave it from the left, in order, as completions. Every request packet takes one PSN; a READ takes as many as
its answer has packets. ``_next`` is the PSN to be sent next: it runs ahead to ``_end`` as the window allows, and
jumps back to resend (go-back-N: what follows a lost packet is sent again, with its old PSNs).

What an answer says:

- an ACK for PSN p acknowledges every SEND and WRITE up to p. A READ or atomic is over only with its own answer: an
  ACK that passes one means its answer was lost, and it is asked again.
- a READ's answer comes in order or not at all: a gap means the rest is asked for again, from the gap on.
- NAK "PSN sequence error" at p: all before p arrived, resend from p. RNR NAK: the same, after the time it names.
- the other NAKs end it: the oldest request fails with what they say, everything else is flushed.

Retries: ``retry_cnt`` counts timeouts and sequence errors in a row, ``rnr_retry`` RNR NAKs; progress resets both. Seven
RNR retries mean for ever (InfiniBand Architecture 9.7.5.2.8); seven of the others mean seven.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable

from rdmacm.proto.roce.buffers import padded, scatter, slices, total
from rdmacm.proto.roce.headers import RNR_TIMER_SECONDS
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
    SEND_FIRST,
    SEND_LAST,
    SEND_LAST_INV,
    SEND_MIDDLE,
    SEND_ONLY,
    SEND_ONLY_INV,
    WORD,
    WRITE_FIRST,
    WRITE_LAST,
    WRITE_MIDDLE,
    WRITE_ONLY,
)
from rdmacm.proto.roce.work import WC, Packet, SendWork, WCOpcode, WCStatus, WROpcode

_ACK_REQUEST = 0x80000000
_SOLICITED = 0x80


_SENDS = frozenset({WROpcode.SEND, WROpcode.SEND_WITH_IMM, WROpcode.SEND_WITH_INV})
_WRITES = frozenset({WROpcode.RDMA_WRITE, WROpcode.RDMA_WRITE_WITH_IMM})
_ATOMICS = frozenset({WROpcode.ATOMIC_CMP_AND_SWP, WROpcode.ATOMIC_FETCH_AND_ADD})
_COMPLETES_AS = {
    WROpcode.RDMA_WRITE: WCOpcode.RDMA_WRITE,
    WROpcode.RDMA_WRITE_WITH_IMM: WCOpcode.RDMA_WRITE,
    WROpcode.SEND: WCOpcode.SEND,
    WROpcode.SEND_WITH_IMM: WCOpcode.SEND,
    WROpcode.SEND_WITH_INV: WCOpcode.SEND,
    WROpcode.RDMA_READ: WCOpcode.RDMA_READ,
    WROpcode.ATOMIC_CMP_AND_SWP: WCOpcode.COMP_SWAP,
    WROpcode.ATOMIC_FETCH_AND_ADD: WCOpcode.FETCH_ADD,
}
_NAK_STATUS = {0x61: WCStatus.REM_INV_REQ_ERR, 0x62: WCStatus.REM_ACCESS_ERR, 0x63: WCStatus.REM_OP_ERR}

#: Packets under way at most, and how often an acknowledgement is asked for within a message.
WINDOW = 128
_ACK_EVERY = 32


class _Sent:
    """A work request that has its PSNs. ``answered``: bytes of a READ's answer that have arrived."""

    __slots__ = ("answered", "first", "is_atomic", "is_read", "last", "length", "work")

    def __init__(self, work: SendWork, length: int, first: int, packets: int) -> None:
        self.work = work
        self.length = length
        self.first = first
        self.last = (first + packets - 1) & PSN_MASK
        self.is_read = work.opcode is WROpcode.RDMA_READ
        self.is_atomic = work.opcode in _ATOMICS
        self.answered = 0


class Requester:
    """See the module. ``timeout`` is in seconds, 0 for never; ``complete`` takes the completions."""

    def __init__(
        self,
        *,
        dest_qp_num: int,
        sq_psn: int,
        mtu: int,
        complete: Callable[[WC], None],
        timeout: float = 0.067,
        retry_cnt: int = 7,
        rnr_retry: int = 7,
        max_rd_atomic: int = 16,
        pkey: int = 0xFFFF,
    ) -> None:
        self._dest = dest_qp_num
        self._mtu = mtu
        self._pkey = pkey
        self._complete = complete
        self._timeout = timeout
        self._retry_cnt = retry_cnt
        self._rnr_retry = rnr_retry
        self._max_rd_atomic = max_rd_atomic
        self._waiting: deque[SendWork] = deque()
        self._sent: deque[_Sent] = deque()
        self._next = self._end = self._acked = sq_psn & PSN_MASK
        self._at = 0  # index in _sent of the request that _next belongs to
        self._outstanding_reads = 0
        self._retries = retry_cnt
        self._rnr_retries = rnr_retry
        self._retrying = False
        self._deadline: float | None = None
        self._rnr_until: float | None = None
        self.failed = False
        #: What was received and ignored.
        self.dropped = 0

    # -- the user -------------------------------------------------------------------------------------

    def post(self, work: SendWork) -> None:
        """Queue a work request; flushed at once where the connection has failed. ValueError for what RC cannot do."""
        if work.opcode not in _COMPLETES_AS:
            raise ValueError(f"{work.opcode!r} cannot be sent on a reliable connection")
        if self.failed:
            self._complete(WC(work.wr_id, WCStatus.WR_FLUSH_ERR, _COMPLETES_AS[work.opcode]))
            return
        self._waiting.append(work)

    @property
    def idle(self) -> bool:
        """Whether nothing waits for an answer or to be sent."""
        return not self._sent and not self._waiting

    def fail(self, status: WCStatus) -> None:
        """The connection is over: the oldest request has ``status``, the others are flushed."""
        if self.failed:
            return
        self.failed = True
        self._deadline = self._rnr_until = None
        works = [sent.work for sent in self._sent] + list(self._waiting)
        self._sent.clear()
        self._waiting.clear()
        for work in works:
            self._complete(WC(work.wr_id, status, _COMPLETES_AS[work.opcode]))
            status = WCStatus.WR_FLUSH_ERR

    # -- time -----------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """When :meth:`timer` wants to be called."""
        return self._rnr_until if self._rnr_until is not None else self._deadline

    def timer(self, now: float) -> None:
        """A deadline has passed: resend, or give up."""
        if self._rnr_until is not None:
            if now >= self._rnr_until:
                self._rnr_until = None
                self._arm(now)
        elif self._deadline is not None and now >= self._deadline:
            self._retrying = False
            self._retry(self._acked, now)

    def _arm(self, now: float) -> None:
        outstanding = bool(self._sent) and difference(self._next, self._acked) > 0
        self._deadline = now + self._timeout if self._timeout and outstanding else None

    def _retry(self, psn: int, now: float) -> None:
        """Send again from ``psn`` on. Once is enough until there is progress or a timeout: more complaints about the
        same loss are on their way."""
        if self._retrying:
            return
        self._retrying = True
        if self._retries <= 0:
            self.fail(WCStatus.RETRY_EXC_ERR)
            return
        self._retries -= 1
        self._go_back(psn)
        self._deadline = now + self._timeout if self._timeout else None

    def _go_back(self, psn: int) -> None:
        self._next = psn
        self._at = 0

    # -- sending --------------------------------------------------------------------------------------

    def packets(self, now: float, limit: int = WINDOW) -> list[Packet]:
        """Up to ``limit`` packets that may be sent now."""
        out: list[Packet] = []
        while len(out) < limit and not self.failed and self._rnr_until is None:
            if difference(self._next, self._end) >= 0 and not self._start():
                break
            if difference(self._next, self._acked) >= WINDOW:
                break
            while difference(self._next, self._sent[self._at].last) > 0:
                self._at += 1
            sent = self._sent[self._at]
            if sent.is_read:
                out.append(self._read_request(sent))
            elif sent.is_atomic:
                out.append(self._atomic_request(sent))
            else:
                out.append(self._data(sent))
        if out and self._deadline is None:
            self._arm(now)
        return out

    def _start(self) -> bool:
        """Give the next waiting request its PSNs; False where there is none, or it has to wait."""
        if not self._waiting:
            return False
        work = self._waiting[0]
        answers = work.opcode is WROpcode.RDMA_READ or work.opcode in _ATOMICS
        if answers and self._outstanding_reads >= self._max_rd_atomic:
            return False
        if work.fence and self._outstanding_reads:
            return False
        self._waiting.popleft()
        length = total(work.segments)
        packets = 1 if work.opcode in _ATOMICS else max(1, -(-length // self._mtu))
        self._sent.append(_Sent(work, length, self._end, packets))
        self._end = (self._end + packets) & PSN_MASK
        self._outstanding_reads += answers
        return True

    def _header(self, opcode: int, psn: int, *, pad: int = 0, ack: bool = False, solicited: bool = False) -> bytes:
        flags = (_SOLICITED if solicited else 0) | pad << 4
        return BTH.pack(opcode, flags, self._pkey, self._dest, psn | (_ACK_REQUEST if ack else 0))

    def _data(self, sent: _Sent) -> Packet:
        work, psn = sent.work, self._next
        index = difference(psn, sent.first)
        offset = index * self._mtu
        size = min(self._mtu, sent.length - offset)
        first, last = index == 0, psn == sent.last
        pieces, pad = padded(slices(work.segments, offset, size), size)
        extra = b""
        if work.opcode in _SENDS:
            opcode = (SEND_ONLY if last else SEND_FIRST) if first else (SEND_LAST if last else SEND_MIDDLE)
            if last and work.opcode is WROpcode.SEND_WITH_INV:
                opcode = SEND_ONLY_INV if first else SEND_LAST_INV
                extra = WORD.pack(work.invalidate_rkey)
        else:
            opcode = (WRITE_ONLY if last else WRITE_FIRST) if first else (WRITE_LAST if last else WRITE_MIDDLE)
            if first:
                extra = RETH.pack(work.remote_addr, work.rkey, sent.length)
        if last and work.opcode in (WROpcode.SEND_WITH_IMM, WROpcode.RDMA_WRITE_WITH_IMM):
            opcode += 1
            extra += WORD.pack(work.imm)
        self._next = (psn + 1) & PSN_MASK
        ack = last or index % _ACK_EVERY == _ACK_EVERY - 1 or difference(self._next, self._acked) >= WINDOW
        return self._header(opcode, psn, pad=pad, ack=ack, solicited=last and work.solicited) + extra, pieces

    def _read_request(self, sent: _Sent) -> Packet:
        psn = (sent.first + sent.answered // self._mtu) & PSN_MASK if sent.answered else sent.first
        reth = RETH.pack(sent.work.remote_addr + sent.answered, sent.work.rkey, sent.length - sent.answered)
        self._next = (sent.last + 1) & PSN_MASK
        return self._header(READ_REQUEST, psn, ack=True) + reth, []

    def _atomic_request(self, sent: _Sent) -> Packet:
        work = sent.work
        swap = work.opcode is WROpcode.ATOMIC_CMP_AND_SWP
        operands = (work.swap, work.compare_add) if swap else (work.compare_add, 0)
        self._next = (sent.last + 1) & PSN_MASK
        header = self._header(COMPARE_SWAP if swap else FETCH_ADD, sent.first, ack=True)
        return header + ATOMIC_ETH.pack(work.remote_addr, work.rkey, *operands), []

    # -- answers --------------------------------------------------------------------------------------

    def received(self, opcode: int, psn: int, body: memoryview, now: float) -> None:
        """An answer: its opcode and PSN, and what follows the BTH, padding removed."""
        if self.failed or not self._sent or not 0 <= difference(psn, self._acked) < difference(self._end, self._acked):
            self.dropped += 1  # a duplicate, or an answer to what was never asked
            return
        if opcode == ACKNOWLEDGE:
            if len(body) >= 4:
                self._acknowledge(body[0], psn, now)
                return
        elif opcode == ATOMIC_ACKNOWLEDGE:
            if len(body) >= 12:
                self._atomic_answer(psn, body, now)
                return
        elif READ_FIRST <= opcode <= READ_ONLY:
            self._read_answer(opcode, psn, body, now)
            return
        self.dropped += 1

    def _acknowledge(self, syndrome: int, psn: int, now: float) -> None:
        kind = syndrome >> 5
        if kind == 0:
            self._advance(psn, now)
        elif kind == 1:
            self._advance((psn - 1) & PSN_MASK, now)
            self._not_ready(syndrome & 0x1F, psn, now)
        elif syndrome == 0x60:
            self._advance((psn - 1) & PSN_MASK, now)
            if not self.failed and self._sent:
                self._retry(psn, now)
        elif syndrome in _NAK_STATUS:
            self._advance((psn - 1) & PSN_MASK, now)
            self.fail(_NAK_STATUS[syndrome])
        else:
            self.dropped += 1

    def _not_ready(self, code: int, psn: int, now: float) -> None:
        if self.failed or not self._sent or self._rnr_until is not None:
            return
        if self._rnr_retries <= 0:
            self.fail(WCStatus.RNR_RETRY_EXC_ERR)
            return
        if self._rnr_retry < 7:
            self._rnr_retries -= 1
        self._go_back(psn)
        self._rnr_until = now + RNR_TIMER_SECONDS[code]
        self._deadline = None

    def _advance(self, psn: int, now: float) -> None:
        """Every SEND and WRITE up to ``psn`` has arrived."""
        progress = False
        while self._sent:
            sent = self._sent[0]
            if difference(psn, sent.first) < 0:
                break
            if sent.is_read or sent.is_atomic:
                # Passed by, unanswered: the answer is lost. (Until asked again, later ACKs say the same.)
                if difference(psn, sent.last) > 0 and difference(self._next, sent.first) > 0:
                    self._ask_again(sent, now)
                break
            if difference(psn, sent.last) < 0:
                if difference(psn, self._acked) >= 0:
                    self._acknowledged(psn)
                    progress = True
                break
            self._finish(sent, sent.length)
            progress = True
        if progress:
            self._progressed(now)

    def _ask_again(self, sent: _Sent, now: float) -> None:
        psn = (sent.first + sent.answered // self._mtu) & PSN_MASK
        if difference(self._next, psn) > 0:
            self._retry(psn, now)

    def _finish(self, sent: _Sent, byte_len: int) -> None:
        self._sent.popleft()
        self._at = max(0, self._at - 1)
        self._acknowledged(sent.last)
        if sent.is_read or sent.is_atomic:
            self._outstanding_reads -= 1
        if sent.work.signaled:
            self._complete(WC(sent.work.wr_id, WCStatus.SUCCESS, _COMPLETES_AS[sent.work.opcode], byte_len))

    def _acknowledged(self, psn: int) -> None:
        self._acked = (psn + 1) & PSN_MASK
        if difference(self._next, self._acked) < 0:  # it was about to be sent again for nothing
            self._next = self._acked

    def _progressed(self, now: float) -> None:
        self._retrying = False
        self._retries = self._retry_cnt
        self._rnr_retries = self._rnr_retry
        self._arm(now)

    def _answered(self, psn: int, now: float) -> _Sent | None:
        """The READ or atomic an answer belongs to, everything before it acknowledged; None where it cannot be."""
        owner = next((s for s in self._sent if difference(psn, s.first) >= 0 and difference(psn, s.last) <= 0), None)
        if owner is None or not (owner.is_read or owner.is_atomic):
            self.dropped += 1
            return None
        self._advance((owner.first - 1) & PSN_MASK, now)
        return owner if not self.failed and self._sent and self._sent[0] is owner else None

    def _atomic_answer(self, psn: int, body: memoryview, now: float) -> None:
        sent = self._answered(psn, now)
        if sent is None or not sent.is_atomic:
            return
        value = LONG.unpack_from(body, 4)[0]
        scatter(sent.work.segments, 0, memoryview(value.to_bytes(8, sys.byteorder))[: sent.length])
        self._finish(sent, 8)
        self._progressed(now)

    def _read_answer(self, opcode: int, psn: int, body: memoryview, now: float) -> None:
        sent = self._answered(psn, now)
        if sent is None or not sent.is_read:
            return
        expected = (sent.first + sent.answered // self._mtu) & PSN_MASK
        ahead = difference(psn, expected)
        if ahead != 0:
            if ahead > 0:
                self._ask_again(sent, now)
            else:
                self.dropped += 1
            return
        data = body if opcode == READ_MIDDLE else body[4:]
        if opcode != READ_MIDDLE and len(body) < 4:
            self.dropped += 1
            return
        left = sent.length - sent.answered
        last = psn == sent.last
        if len(data) != min(left, self._mtu) or last != (opcode in (READ_LAST, READ_ONLY)):
            self.fail(WCStatus.BAD_RESP_ERR)
            return
        scatter(sent.work.segments, sent.answered, data)
        sent.answered += len(data)
        if last:
            self._finish(sent, sent.length)
        else:
            self._acknowledged(psn)
        self._progressed(now)
