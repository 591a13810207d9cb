"""The requester of a reliable connection: how acknowledgements and responses are processed (InfiniBand Architecture
9.7.5).

- An ACK for PSN p acknowledges every SEND, WRITE, FLUSH and ATOMIC WRITE up to p. A READ or atomic is complete only
  with its own response: an ACK that passes one means that the response was lost, and it is requested again.
- FLUSH and ATOMIC WRITE have a response of their own, a READ response without bytes. Responses leave in the order of
  the requests, so one for a later PSN shows that theirs was sent, that is, that they were executed. rxe completes them
  in the same way. Where no later response comes, they are requested again, like READs.
- A READ response arrives in order or not at all: after a gap the rest is requested again, from the gap on.
- NAK "PSN sequence error" at p: everything before p arrived, retransmit from p. RNR NAK: the same, after the time that
  its timer code stands for.
- The other NAKs end the connection: the oldest request fails with the status they stand for, all others are flushed.

A lost ACK costs nothing if a later one arrives, which acknowledges the same requests. Otherwise the retransmission
timer expires (``requester.timer``), and every packet from the oldest unacknowledged one on is sent again. To the
responder these packets are duplicates: it does not execute them again, and acknowledges everything that it has executed
(``responder.received``). After ``retry_cnt`` retransmissions without progress the oldest request completes with
RETRY_EXC_ERR, and the connection ends.

Retries: ``retry_cnt`` counts timeouts and sequence errors in a row, ``rnr_retry`` counts RNR NAKs. Progress resets both
counts.
"""

from __future__ import annotations

import sys

from rdmacm.enums import WCStatus
from rdmacm.proto.constants import (
    ACKNOWLEDGE,
    ATOMIC_ACKNOWLEDGE,
    NAK_INVALID_REQUEST,
    NAK_PSN_SEQUENCE_ERROR,
    NAK_REMOTE_ACCESS_ERROR,
    NAK_REMOTE_OPERATIONAL_ERROR,
    PSN_HALF,
    PSN_MASK,
    READ_RESPONSE_LAST,
    READ_RESPONSE_MIDDLE,
    READ_RESPONSE_ONLY,
    RNR_NAK,
    RNR_TIMER_SECONDS,
    SYNDROME_KIND,
)
from rdmacm.proto.roce.buffers import LocalProtectionError, scatter
from rdmacm.proto.roce.headers import ATOMIC_ACK_ETH_STRUCT
from rdmacm.proto.roce.psn import difference
from rdmacm.proto.roce.rc.failure import fail
from rdmacm.proto.roce.rc.request_types import REQUEST_TYPES
from rdmacm.proto.roce.rc.requester import go_back, read_part_end, retransmit, start_timer
from rdmacm.proto.roce.rc.state import RcState
from rdmacm.proto.work import WC, SendWork

_SUCCESS = WCStatus.SUCCESS
_STATUS_OF_NAK = {
    NAK_INVALID_REQUEST: WCStatus.REM_INV_REQ_ERR,
    NAK_REMOTE_ACCESS_ERROR: WCStatus.REM_ACCESS_ERR,
    NAK_REMOTE_OPERATIONAL_ERROR: WCStatus.REM_OP_ERR,
}


def received(rc: RcState, opcode: int, psn: int, body: memoryview, now: float) -> bool:
    """Process a response: ``body`` follows its BTH, without padding. False if it is ignored."""
    if rc.outstanding and psn - rc.unacked_psn & PSN_MASK < rc.end_psn - rc.unacked_psn & PSN_MASK:
        if opcode == ACKNOWLEDGE:
            return _acknowledge(rc, body[0], psn, now)
        work = _request_of(rc, psn)
        if work is not None:
            kind = REQUEST_TYPES[work.opcode]
            if kind.is_atomic and opcode == ATOMIC_ACKNOWLEDGE:
                return _atomic_response(rc, work, body, now)
            if kind.is_read and opcode != ATOMIC_ACKNOWLEDGE:
                return _read_response(rc, work, opcode, psn, body, now)
            if kind.has_empty_response and opcode != ATOMIC_ACKNOWLEDGE:
                return _empty_response(rc, work, opcode, body, now)
    rc.counters.dropped["answer"] += 1  # a duplicate, or an answer to no request
    rc.stray_answers += 1
    return False


def _request_of(rc: RcState, psn: int) -> SendWork | None:
    """The outstanding request that has a PSN."""
    for work in rc.outstanding:
        if psn - work.first_psn & PSN_MASK <= work.last_psn - work.first_psn & PSN_MASK:
            return work
    return None


def _acknowledge(rc: RcState, syndrome: int, psn: int, now: float) -> bool:
    """Process an ACK or NAK; False if its syndrome is reserved."""
    kind = syndrome & SYNDROME_KIND
    if kind == 0:
        _acknowledge_up_to(rc, psn, now)
        return True
    if kind != RNR_NAK and syndrome != NAK_PSN_SEQUENCE_ERROR and syndrome not in _STATUS_OF_NAK:
        rc.counters.dropped["answer"] += 1
        return False
    _acknowledge_up_to(rc, (psn - 1) & PSN_MASK, now)
    if rc.failed or not rc.outstanding:
        return True
    if kind == RNR_NAK:
        _receiver_not_ready(rc, syndrome & 0x1F, psn, now)
    elif syndrome == NAK_PSN_SEQUENCE_ERROR:
        rc.counters.errors["rcvd_seq_err"] += 1
        retransmit(rc, psn, now)
    else:
        fail(rc, _STATUS_OF_NAK[syndrome])
    return True


def _receiver_not_ready(rc: RcState, timer_code: int, psn: int, now: float) -> None:
    rc.counters.errors["rcvd_rnr_err"] += 1
    if rc.rnr_waiting:
        return
    if rc.rnr_retries_left <= 0:
        rc.counters.errors["retry_rnr_exceeded_err"] += 1
        fail(rc, WCStatus.RNR_RETRY_EXC_ERR)
        return
    if rc.rnr_retry < 7:
        rc.rnr_retries_left -= 1
    go_back(rc, psn)
    rc.rnr_waiting = True
    rc.deadline = now + RNR_TIMER_SECONDS[timer_code]


def _acknowledge_up_to(rc: RcState, psn: int, now: float) -> None:
    """Complete the requests up to ``psn`` that an ACK completes, as far as no READ or atomic is before them."""
    progress = False
    while rc.outstanding:
        work = rc.outstanding[0]
        is_later = psn - work.last_psn & PSN_HALF  # whether the request ends after psn
        kind = REQUEST_TYPES[work.opcode]
        if not kind.is_acknowledged:
            rc.stray_answers += 1  # the peer is there, though its response does not arrive
            # The ACK is for a later request, so the response to this one was lost. Every ACK shows that until
            # the request is sent again; then next_psn is after its first PSN.
            if not is_later and psn != work.last_psn and difference(rc.next_psn, work.first_psn) > 0:
                _request_again(rc, work, now)
            break
        if is_later:
            if difference(psn, rc.unacked_psn) >= 0:
                acknowledged(rc, psn)
                progress = True
            break
        if kind.has_empty_response and work.requested_packets:
            rc.outstanding_reads -= 1
        _complete(rc, work, work.length)
        progress = True
    if progress:
        progressed(rc, now)


def _request_again(rc: RcState, work: SendWork, now: float) -> None:
    """Request what is missing of a response."""
    psn = (work.first_psn + work.received_bytes // rc.path_mtu) & PSN_MASK
    if difference(rc.next_psn, psn) > 0:
        rc.counters.errors["implied_nak_seq_err"] += 1
        retransmit(rc, psn, now)


def _complete(rc: RcState, work: SendWork, byte_len: int) -> None:
    """The oldest request is complete."""
    rc.outstanding.popleft()
    if rc.send_index:
        rc.send_index -= 1
    acknowledged(rc, work.last_psn)
    if work.signaled:
        completes = REQUEST_TYPES[work.opcode].completes
        rc.completed.append(WC(work.wr_id, _SUCCESS, completes, byte_len, None, None, False, rc.qp_num))


def acknowledged(rc: RcState, psn: int) -> None:
    """Everything up to ``psn`` needs no retransmission any more."""
    rc.unacked_psn = unacked = (psn + 1) & PSN_MASK
    if rc.next_psn - unacked & PSN_HALF:  # it was about to be retransmitted in vain
        rc.next_psn = unacked


def progressed(rc: RcState, now: float) -> None:
    """The peer has acknowledged something new: all retries are available again, and the timer restarts."""
    rc.retransmitting = False
    rc.retries_left = rc.retry_cnt
    rc.rnr_retries_left = rc.rnr_retry
    start_timer(rc, now)


def _becomes_oldest(rc: RcState, work: SendWork, now: float) -> bool:
    """Let a response to ``work`` acknowledge earlier requests. False if an earlier READ or atomic has no response."""
    if rc.outstanding[0] is not work:
        _acknowledge_up_to(rc, (work.first_psn - 1) & PSN_MASK, now)
    return not rc.failed and bool(rc.outstanding) and rc.outstanding[0] is work


def _scatter(rc: RcState, work: SendWork, offset: int, data: memoryview) -> bool:
    try:
        scatter(work.segments, offset, data)
    except LocalProtectionError:
        fail(rc, WCStatus.LOC_PROT_ERR)
        return False
    return True


def _atomic_response(rc: RcState, work: SendWork, body: memoryview, now: float) -> bool:
    if not _becomes_oldest(rc, work, now):
        return True
    (original,) = ATOMIC_ACK_ETH_STRUCT.unpack_from(body, 4)
    if _scatter(rc, work, 0, memoryview(original.to_bytes(8, sys.byteorder))[: work.length]):
        rc.outstanding_reads -= 1
        _complete(rc, work, 8)
        progressed(rc, now)
    return True


def _empty_response(rc: RcState, work: SendWork, opcode: int, body: memoryview, now: float) -> bool:
    """Process the response to a FLUSH or ATOMIC WRITE."""
    if opcode == READ_RESPONSE_ONLY and len(body) == 4 and not body[0] & SYNDROME_KIND:
        if REQUEST_TYPES[work.opcode].is_flush and work.requested_packets:
            rc.flush_icrc_twice = work.had_icrc_twice
        _acknowledge_up_to(rc, work.last_psn, now)
    elif _becomes_oldest(rc, work, now):
        fail(rc, WCStatus.BAD_RESP_ERR)
    return True


def _read_response(rc: RcState, work: SendWork, opcode: int, psn: int, body: memoryview, now: float) -> bool:
    if not _becomes_oldest(rc, work, now):
        return True
    index = work.received_bytes // rc.path_mtu
    ahead = difference(psn, (work.first_psn + index) & PSN_MASK)
    if ahead > 0:
        _request_again(rc, work, now)
    if ahead or index >= work.requested_packets:
        rc.counters.dropped["sequence"] += 1
        return False
    data = body if opcode == READ_RESPONSE_MIDDLE else body[4:]
    is_last = psn == work.last_psn
    ends_part = is_last or index + 1 == read_part_end(rc, index)
    expected = min(work.length - work.received_bytes, rc.path_mtu)
    if len(data) != expected or ends_part != (opcode in (READ_RESPONSE_LAST, READ_RESPONSE_ONLY)):
        fail(rc, WCStatus.BAD_RESP_ERR)
        return True
    if not _scatter(rc, work, work.received_bytes, data):
        return True
    work.received_bytes += len(data)
    rc.outstanding_reads -= ends_part
    if is_last:
        _complete(rc, work, work.length)
    else:
        acknowledged(rc, psn)
    progressed(rc, now)
    return True
