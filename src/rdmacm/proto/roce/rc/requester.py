"""The sending half of a reliable connection.

Work requests wait in ``waiting`` until they are given packet sequence numbers and move to ``_sent``, oldest first;
they leave it from the left, in order, as completions. Every request packet takes one PSN; a READ takes as many as
its answer has packets. ``next_psn`` is the PSN to be sent next: it runs ahead to ``end_psn`` as the window allows, and
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
from collections import Counter, deque
from collections.abc import Callable

from rdmacm.enums import WCOpcode, WCStatus, WROpcode
from rdmacm.proto.roce.buffers import LocalProtectionError, located, padded, scatter, slices, total
from rdmacm.proto.roce.headers import RNR_TIMER_SECONDS
from rdmacm.proto.roce.icrc import ICRC_LENGTH, Icrc, crc32
from rdmacm.proto.roce.psn import PSN_MASK, difference
from rdmacm.proto.roce.rc.codes import (
    ACK_REQUEST,
    ACKNOWLEDGE,
    ATOMIC_ACKNOWLEDGE,
    ATOMIC_ETH,
    BTH,
    COMPARE_SWAP,
    FETCH_ADD,
    HALVES,
    LITTLE,
    LONG,
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
    SOLICITED,
    WORD,
    WRITE_FIRST,
    WRITE_LAST,
    WRITE_MIDDLE,
    WRITE_ONLY,
    prefix,
)
from rdmacm.proto.roce.rc.runs import Run
from rdmacm.proto.roce.rc.trains import Trains
from rdmacm.proto.wire import Buffer
from rdmacm.work import WC, SendWork


class _Kind:
    """What an opcode of work requests comes to.

    ``opcodes`` are those of a message's packets: middle, last, first, only (a READ or atomic request is an only one).
    """

    __slots__ = ("completes", "is_atomic", "is_read", "is_write", "only", "opcodes", "with_imm", "with_inv")

    def __init__(self, completes: WCOpcode, *opcodes: int, with_imm: bool = False, with_inv: bool = False) -> None:
        self.completes = completes
        self.opcodes = opcodes
        self.only = opcodes[3] if opcodes else 0
        self.is_write = completes is WCOpcode.RDMA_WRITE
        self.is_read = completes is WCOpcode.RDMA_READ
        self.is_atomic = completes in {WCOpcode.COMP_SWAP, WCOpcode.FETCH_ADD}
        self.with_imm = with_imm
        self.with_inv = with_inv


_NO_KIND = _Kind(WCOpcode.BIND_MW)
_BY_OPCODE = {
    WROpcode.RDMA_WRITE: _Kind(WCOpcode.RDMA_WRITE, WRITE_MIDDLE, WRITE_LAST, WRITE_FIRST, WRITE_ONLY),
    WROpcode.RDMA_WRITE_WITH_IMM: _Kind(
        WCOpcode.RDMA_WRITE, WRITE_MIDDLE, WRITE_LAST + 1, WRITE_FIRST, WRITE_ONLY + 1, with_imm=True
    ),
    WROpcode.SEND: _Kind(WCOpcode.SEND, SEND_MIDDLE, SEND_LAST, SEND_FIRST, SEND_ONLY),
    WROpcode.SEND_WITH_IMM: _Kind(WCOpcode.SEND, SEND_MIDDLE, SEND_LAST + 1, SEND_FIRST, SEND_ONLY + 1, with_imm=True),
    WROpcode.SEND_WITH_INV: _Kind(WCOpcode.SEND, SEND_MIDDLE, SEND_LAST_INV, SEND_FIRST, SEND_ONLY_INV, with_inv=True),
    WROpcode.RDMA_READ: _Kind(WCOpcode.RDMA_READ),
    WROpcode.ATOMIC_CMP_AND_SWP: _Kind(WCOpcode.COMP_SWAP),
    WROpcode.ATOMIC_FETCH_AND_ADD: _Kind(WCOpcode.FETCH_ADD),
}
# With opcodes as indices: to hash a member of an enumeration takes longer than what is done with what it finds.
#: The kind of each opcode, and of those that cannot be sent one that nothing is asked about.
_BY_CODE = [_NO_KIND] * (max(WROpcode) + 1)
for _opcode, _kind in _BY_OPCODE.items():
    _BY_CODE[_opcode] = _kind
#: The kinds of single packets that carry data and nothing else; None for the others.
_DATA = [kind if kind.opcodes and not (kind.with_imm or kind.with_inv) else None for kind in _BY_CODE]
#: What can be sent, and what it completes as, with opcodes as indices.
COMPLETES_AS = [None if kind is _NO_KIND else kind.completes for kind in _BY_CODE]
_NAK_STATUS = {0x61: WCStatus.REM_INV_REQ_ERR, 0x62: WCStatus.REM_ACCESS_ERR, 0x63: WCStatus.REM_OP_ERR}
_SUCCESS = WCStatus.SUCCESS
_PADDING = tuple(bytes(count) for count in range(4))
_HALF = 1 << 23
_U64 = 0xFFFFFFFFFFFFFFFF

#: Packets under way at most. So many PSNs are what rxe allows itself.
WINDOW = 128
#: Bytes under way at most, once a packet has been lost. A UDP socket that has asked for all a Linux gives by default
#: (net.core.rmem_max, 212992, which the kernel doubles, for its own overhead) holds somewhat more than this in packets
#: of 4 KiB and drops the rest; and a lost packet costs more than a window that is closed for a moment. Until then
#: there may be more: a peer may have asked for more, and is mostly quick enough to need none of it.
WINDOW_BYTES = 256 * 1024


def window(mtu: int) -> int:
    """How many packets may be under way with this path MTU, once a packet has been lost."""
    return min(WINDOW, WINDOW_BYTES // mtu)


class Requester:
    """See the module. ``timeout`` is in seconds, 0 for never; ``complete`` takes the completions."""

    def __init__(
        self,
        *,
        qp_num: int,
        dest_qp_num: int,
        sq_psn: int,
        mtu: int,
        complete: Callable[[WC], None],
        dropped: Counter[str],
        timeout: float,
        retry_cnt: int,
        rnr_retry: int,
        max_rd_atomic: int,
        pkey: int,
    ) -> None:
        self._qp_num = qp_num
        self._dest = dest_qp_num
        self._mtu = mtu
        self._pkey = pkey
        self._complete = complete
        self._dropped = dropped
        self._timeout = timeout
        self._retry_cnt = retry_cnt
        self._rnr_retry = rnr_retry
        self._max_rd_atomic = max_rd_atomic
        self._window = WINDOW
        self._small_window = window(mtu)
        # Two requests of this many packets of answer fill the small window.
        self._read_packets = self._ack_every = self._small_window // 2
        #: Work requests that were posted and have no PSNs yet.
        self.waiting: deque[SendWork] = deque()
        self._sent: deque[SendWork] = deque()
        self.next_psn = self.end_psn = self._acked = sq_psn & PSN_MASK
        self._at = 0  # index in _sent of the request that next_psn belongs to
        self._unanswered = 0  # READ and atomic requests
        self._retries = retry_cnt
        self._rnr_retries = rnr_retry
        self._retrying = False
        self._resting = False  # the peer is not ready: nothing is sent before the deadline
        self._send_middle = prefix(SEND_MIDDLE, pkey, dest_qp_num)
        self._write_middle = prefix(WRITE_MIDDLE, pkey, dest_qp_num)
        self._common = pkey << 32 | dest_qp_num  # the first two words of a packet's BTH, but for opcode and flags
        #: When :meth:`timer` wants to be called.
        self.deadline: float | None = None
        #: Whether no new request is begun (SQD).
        self.paused = False
        self.failed = False

    # -- the user -------------------------------------------------------------------------------------

    @property
    def drained(self) -> bool:
        """Whether nothing that was begun waits for an answer."""
        return not self._sent

    def fail(self, status: WCStatus) -> None:
        """The connection is over: the oldest request has ``status``, the others are flushed."""
        if self.failed:
            return
        self.failed = True
        self._resting = False
        self.deadline = None
        self.next_psn = self.end_psn
        works = [*self._sent, *self.waiting]
        self._sent.clear()
        self.waiting.clear()
        for work in works:
            self._complete(WC(work.wr_id, status, _BY_CODE[work.opcode].completes, qp_num=self._qp_num))
            status = WCStatus.WR_FLUSH_ERR

    # -- time -----------------------------------------------------------------------------------------

    def timer(self, now: float) -> None:
        """A deadline has passed: resend, or give up."""
        if self.deadline is None or now < self.deadline:
            return
        if self._resting:
            self._resting = False
            self._arm(now)
        else:
            self._retrying = False
            self._retry(self._acked, now)

    def _arm(self, now: float) -> None:
        if not self._resting:
            outstanding = self._sent and self.next_psn != self._acked
            self.deadline = now + self._timeout if self._timeout and outstanding else None

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
        self._window = self._small_window
        self._go_back(psn)
        if not self._resting:
            self.deadline = now + self._timeout if self._timeout else None

    def _go_back(self, psn: int) -> None:
        self.next_psn = psn
        self._at = 0

    # -- sending --------------------------------------------------------------------------------------

    @property
    def wants_to_send(self) -> bool:
        """Whether :meth:`packets` may have something."""
        if self._resting:
            return False
        return self.next_psn != self.end_psn or (bool(self.waiting) and not self.paused)

    def packets(self, out: Trains, now: float, limit: int) -> None:
        """Up to ``limit`` packets that may be sent now."""
        before = self.next_psn
        try:
            while limit > 0 and not self.failed:
                if self.next_psn == self.end_psn and not self._start():
                    break
                room = self._window - (self.next_psn - self._acked & PSN_MASK)
                if room <= 0:
                    break
                sent = self._sent[self._at]
                while self.next_psn - sent.first_psn & PSN_MASK > sent.last_psn - sent.first_psn & PSN_MASK:
                    self._at += 1
                    sent = self._sent[self._at]
                kind = _BY_CODE[sent.opcode]
                if kind.is_read:
                    count = self._read_request(out, sent, room - self._window + self._small_window)
                elif kind.is_atomic:
                    count = self._atomic_request(out, sent)
                else:
                    count = self._data(out, sent, kind, room, limit)
                if not count:
                    break
                limit -= count
        except LocalProtectionError:
            # Those before it did nothing wrong: it waits until it is the oldest.
            if self.next_psn == self._acked:
                self.fail(WCStatus.LOC_PROT_ERR)
        if self.deadline is None and self.next_psn != before:
            self._arm(now)

    def lone(self, work: SendWork, flow: Icrc, now: float) -> list[Buffer] | None:
        """Begin with a request that nothing waits before, where it takes one packet: what :meth:`packets` would.

        The packet's pieces, sealed; None where it is for :meth:`packets` to say, and nothing has happened.
        """
        psn = self.next_psn
        if psn != self.end_psn or self.paused or self._resting:
            return None
        kind, segments = _DATA[work.opcode], work.segments
        if kind is None or work.fence or len(segments) != 1:
            return None
        piece = segments[0]
        try:
            size = len(piece)
        except ValueError:
            return None
        if not 0 < size <= self._mtu or self._window <= psn - self._acked & PSN_MASK:
            return None
        work.length = size
        work.first_psn = work.last_psn = psn
        self._at = len(self._sent)
        self._sent.append(work)
        self.next_psn = self.end_psn = psn + 1 & PSN_MASK
        if self.deadline is None and self._timeout:
            self.deadline = now + self._timeout
        pad = -size & 3
        half = kind.only << 56 | pad << 52 | self._common
        if work.solicited:
            half |= SOLICITED << 48
        header = HALVES.pack(half, psn | ACK_REQUEST)
        if kind.is_write:
            header += RETH.pack(work.remote_addr, work.rkey, size)
        crc = crc32(piece, crc32(header, flow.base ^ flow.lengths[len(header) + size + pad + ICRC_LENGTH]))
        if not pad:
            return [header, piece, LITTLE.pack(crc)]
        padding = _PADDING[pad]
        return [header, piece, padding + LITTLE.pack(crc32(padding, crc))]

    def _start(self) -> bool:
        """Give the next waiting request its PSNs; False where there is none, or it has to wait."""
        if not self.waiting or self.paused:
            return False
        work = self.waiting[0]
        if work.fence and self._unanswered:
            return False
        length = total(work.segments)
        packets = 1 if length <= self._mtu or _BY_CODE[work.opcode].is_atomic else -(-length // self._mtu)
        self.waiting.popleft()
        work.length = length
        work.first_psn = self.end_psn
        work.last_psn = (self.end_psn + packets - 1) & PSN_MASK
        work.received_bytes = work.requested_packets = 0
        self._sent.append(work)
        self.end_psn = (self.end_psn + packets) & PSN_MASK
        return True

    def _data(self, out: Trains, work: SendWork, kind: _Kind, room: int, limit: int) -> int:
        """The next packet of a SEND or WRITE, or several from its middle; returns how many."""
        psn, mtu = self.next_psn, self._mtu
        index = psn - work.first_psn & PSN_MASK
        first, last = not index, psn == work.last_psn
        if not first and not last:
            return self._middle(out, work, kind, index, min(room, limit))
        offset = index * mtu
        size = work.length - offset if last else mtu
        pieces, pad = padded(slices(work.segments, offset, size), size)
        extra = RETH.pack(work.remote_addr, work.rkey, work.length) if first and kind.is_write else b""
        flags, word = pad << 4, psn
        if last:
            word |= ACK_REQUEST
            if work.solicited:
                flags |= SOLICITED
            if kind.with_imm:
                extra += WORD.pack(work.imm)
            elif kind.with_inv:
                extra += WORD.pack(work.invalidate_rkey)
        elif room == 1:
            word |= ACK_REQUEST
        self.next_psn = (psn + 1) & PSN_MASK
        header = BTH.pack(kind.opcodes[2 * first + last], flags, self._pkey, self._dest, word) + extra
        out.add(header, pieces, len(header) + size + pad + 4)
        return 1

    def _middle(self, out: Trains, sent: SendWork, kind: _Kind, index: int, room: int) -> int:
        """Packets of the middle up to where an acknowledgement is asked for, or a buffer ends."""
        psn, mtu = self.next_psn, self._mtu
        count = min(
            room,
            sent.last_psn - psn & PSN_MASK,
            self._ack_every - index % self._ack_every,
            PSN_MASK + 1 - psn,
        )
        middle = self._write_middle if kind.is_write else self._send_middle
        view, offset = located(sent.segments, index * mtu)
        whole = (len(view) - offset) // mtu
        count = max(1, min(count, whole))
        full = self._window - (psn + count - self._acked & PSN_MASK) <= 0
        ack = full or (index + count) % self._ack_every == 0
        if whole:
            out.add_run(middle, psn, view, offset, mtu, count, ack=ack)
        else:
            header = middle + WORD.pack(psn | (ACK_REQUEST if ack else 0))
            out.add(header, slices(sent.segments, index * mtu, mtu), 16 + mtu)
        self.next_psn = (psn + count) & PSN_MASK
        return count

    def _may_ask(self) -> bool:
        """Whether the peer keeps one more READ or atomic. A request fails, as the oldest, where it keeps none."""
        if not self._max_rd_atomic and self.next_psn == self._acked:
            self.fail(WCStatus.LOC_QP_OP_ERR)
        return self._unanswered < self._max_rd_atomic

    def _read_request(self, out: Trains, sent: SendWork, room: int) -> int:
        """Ask for the next part of a READ; returns the number of packets, 0 where that has to wait.

        A READ's answer comes all at once, with no window of its own, so a long one is asked for in parts. What is asked
        for again is never more than one part, for the responder may keep each of them apart.
        """
        psn, mtu = self.next_psn, self._mtu
        index = psn - sent.first_psn & PSN_MASK
        stop = min(self._part_end(index), (sent.last_psn - sent.first_psn & PSN_MASK) + 1)
        if stop - index > room and psn != self._acked:
            return 0
        if stop > sent.requested_packets:
            if not self._may_ask():
                return 0
            self._unanswered += 1
            sent.requested_packets = stop
        offset = index * mtu
        self.next_psn = (sent.first_psn + stop) & PSN_MASK
        header = BTH.pack(READ_REQUEST, 0, self._pkey, self._dest, psn | ACK_REQUEST)
        length = min(sent.length, stop * mtu) - offset
        out.add(header + RETH.pack(sent.remote_addr + offset & _U64, sent.rkey, length), (), 32)
        return 1

    def _part_end(self, index: int) -> int:
        """One past the last packet of the part of a READ's answer that packet ``index`` is in."""
        return (index // self._read_packets + 1) * self._read_packets

    def _atomic_request(self, out: Trains, work: SendWork) -> int:
        """Ask for an atomic; returns the number of packets, 0 where that has to wait."""
        if not work.requested_packets:
            if not self._may_ask():
                return 0
            self._unanswered += 1
            work.requested_packets = 1
        psn = self.next_psn
        swap = work.opcode is WROpcode.ATOMIC_CMP_AND_SWP
        operands = (work.swap, work.compare_add) if swap else (work.compare_add, 0)
        self.next_psn = (psn + 1) & PSN_MASK
        header = BTH.pack(COMPARE_SWAP if swap else FETCH_ADD, 0, self._pkey, self._dest, psn | ACK_REQUEST)
        out.add(header + ATOMIC_ETH.pack(work.remote_addr, work.rkey, *operands), (), 44)
        return 1

    # -- answers --------------------------------------------------------------------------------------

    def received(self, opcode: int, psn: int, body: memoryview, now: float) -> bool:
        """An answer: its opcode and PSN, and what follows the BTH, padding removed; False where it is ignored."""
        if self._ours(psn):
            if opcode == ACKNOWLEDGE:
                return self._acknowledge(body[0], psn, now)
            owner = self._owner(psn)
            if opcode == ATOMIC_ACKNOWLEDGE:
                if owner and _BY_CODE[owner.opcode].is_atomic:
                    return self._atomic_answer(owner, body, now)
            elif owner and _BY_CODE[owner.opcode].is_read:
                return self._read_answer(owner, opcode, psn, body, now)
        self._dropped["answer"] += 1  # a duplicate, or an answer to what was never asked
        return False

    def all_arrived(self, psn: int, syndrome: int) -> bool:
        """An acknowledgement, where it is of the only SEND or WRITE there is: what :meth:`received` does with it.

        False where it is of something else, and nothing has happened.
        """
        if len(self._sent) != 1 or syndrome >= 0x20 or self.next_psn != self.end_psn or self._resting:
            return False
        work = self._sent[0]
        kind = _BY_CODE[work.opcode]
        if psn != work.last_psn or not kind.opcodes:
            return False
        self._sent.clear()
        self._at = 0
        self._acked = self.next_psn
        self._retrying = False
        self._retries = self._retry_cnt
        self._rnr_retries = self._rnr_retry
        self.deadline = None
        if work.signaled:
            self._complete(WC(work.wr_id, _SUCCESS, kind.completes, work.length, None, None, False, self._qp_num))
        return True

    def _ours(self, psn: int) -> bool:
        return bool(self._sent) and psn - self._acked & PSN_MASK < self.end_psn - self._acked & PSN_MASK

    def _owner(self, psn: int) -> SendWork | None:
        return next(
            (s for s in self._sent if psn - s.first_psn & PSN_MASK <= s.last_psn - s.first_psn & PSN_MASK), None
        )

    def _acknowledge(self, syndrome: int, psn: int, now: float) -> bool:
        kind = syndrome >> 5
        if kind == 0:
            self._advance(psn, now)
            return True
        if kind != 1 and syndrome != 0x60 and syndrome not in _NAK_STATUS:
            self._dropped["answer"] += 1
            return False
        self._advance((psn - 1) & PSN_MASK, now)
        if self.failed or not self._sent:
            return True
        if kind == 1:
            self._not_ready(syndrome & 0x1F, psn, now)
        elif syndrome == 0x60:
            self._retry(psn, now)
        else:
            self.fail(_NAK_STATUS[syndrome])
        return True

    def _not_ready(self, code: int, psn: int, now: float) -> None:
        if self._resting:
            return
        if self._rnr_retries <= 0:
            self.fail(WCStatus.RNR_RETRY_EXC_ERR)
            return
        if self._rnr_retry < 7:
            self._rnr_retries -= 1
        self._go_back(psn)
        self._resting = True
        self.deadline = now + RNR_TIMER_SECONDS[code]

    def _advance(self, psn: int, now: float) -> None:
        """Every SEND and WRITE up to ``psn`` has arrived."""
        progress = False
        while self._sent:
            sent = self._sent[0]
            behind = psn - sent.last_psn & _HALF
            kind = _BY_CODE[sent.opcode]
            if not kind.opcodes:
                # Passed by, unanswered: the answer is lost. (Until asked again, later ACKs say the same.)
                if not behind and psn != sent.last_psn and difference(self.next_psn, sent.first_psn) > 0:
                    self._ask_again(sent, now)
                break
            if behind:
                if difference(psn, self._acked) >= 0:
                    self._acknowledged(psn)
                    progress = True
                break
            self._finish(sent, kind, sent.length)
            progress = True
        if progress:
            self._progressed(now)

    def _ask_again(self, sent: SendWork, now: float) -> None:
        psn = (sent.first_psn + sent.received_bytes // self._mtu) & PSN_MASK
        if difference(self.next_psn, psn) > 0:
            self._retry(psn, now)

    def _finish(self, work: SendWork, kind: _Kind, byte_len: int) -> None:
        self._sent.popleft()
        if self._at:
            self._at -= 1
        self._acknowledged(work.last_psn)
        if work.signaled:
            self._complete(WC(work.wr_id, _SUCCESS, kind.completes, byte_len, None, None, False, self._qp_num))

    def _acknowledged(self, psn: int) -> None:
        self._acked = acked = (psn + 1) & PSN_MASK
        if self.next_psn - acked & _HALF:  # it was about to be sent again for nothing
            self.next_psn = acked

    def _progressed(self, now: float) -> None:
        self._retrying = False
        self._retries = self._retry_cnt
        self._rnr_retries = self._rnr_retry
        self._arm(now)

    def _passed(self, sent: SendWork, now: float) -> bool:
        """An answer to ``sent`` acknowledges what was before it; False where that lacks answers of its own."""
        if self._sent[0] is not sent:
            self._advance((sent.first_psn - 1) & PSN_MASK, now)
        return not self.failed and bool(self._sent) and self._sent[0] is sent

    def _scatter(self, sent: SendWork, offset: int, data: memoryview) -> bool:
        try:
            scatter(sent.segments, offset, data)
        except LocalProtectionError:
            self.fail(WCStatus.LOC_PROT_ERR)
            return False
        return True

    def _atomic_answer(self, sent: SendWork, body: memoryview, now: float) -> bool:
        if not self._passed(sent, now):
            return True
        value = LONG.unpack_from(body, 4)[0]
        if self._scatter(sent, 0, memoryview(value.to_bytes(8, sys.byteorder))[: sent.length]):
            self._unanswered -= 1
            self._finish(sent, _BY_CODE[sent.opcode], 8)
            self._progressed(now)
        return True

    def _read_answer(self, sent: SendWork, opcode: int, psn: int, body: memoryview, now: float) -> bool:
        if not self._passed(sent, now):
            return True
        index = sent.received_bytes // self._mtu
        ahead = difference(psn, (sent.first_psn + index) & PSN_MASK)
        if ahead > 0:
            self._ask_again(sent, now)
        if ahead or index >= sent.requested_packets:
            self._dropped["sequence"] += 1
            return False
        data = body if opcode == READ_MIDDLE else body[4:]
        last = psn == sent.last_psn
        ends = last or index + 1 == self._part_end(index)
        if len(data) != min(sent.length - sent.received_bytes, self._mtu) or ends != (opcode in (READ_LAST, READ_ONLY)):
            self.fail(WCStatus.BAD_RESP_ERR)
            return True
        if not self._scatter(sent, sent.received_bytes, data):
            return True
        sent.received_bytes += len(data)
        self._unanswered -= ends
        if last:
            self._finish(sent, _BY_CODE[sent.opcode], sent.length)
        else:
            self._acknowledged(psn)
        self._progressed(now)
        return True

    def run(self) -> Run | None:
        """Where packets of the middle of a READ's answer would go now."""
        if not self._sent or not _BY_CODE[(sent := self._sent[0]).opcode].is_read:
            return None
        index = sent.received_bytes // self._mtu
        count = min(sent.requested_packets, self._part_end(index)) - 1 - index
        if count <= 0:
            return None
        psn = (sent.first_psn + index) & PSN_MASK
        view, offset = located(sent.segments, sent.received_bytes)
        return Run(READ_MIDDLE, psn, view, offset, count)

    def ran(self, count: int, now: float) -> None:
        """So many packets of :meth:`run` have arrived and are in their place."""
        sent = self._sent[0]
        sent.received_bytes += count * self._mtu
        self._acknowledged((sent.first_psn + sent.received_bytes // self._mtu - 1) & PSN_MASK)
        self._progressed(now)
