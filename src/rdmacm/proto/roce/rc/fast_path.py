"""Shortcuts for the most common packets: all code here is for speed alone.

The protocol is complete without this module. Each function handles one case exactly as the other modules do, in a
fraction of the time, or does nothing and reports that, so that the caller uses the general code. A test checks that
both have the same result. A compiled core would replace these functions.

There are two cases: messages of one packet that are exchanged one by one, where calls cost most, and the middle
packets of a long message, which carry nearly all bytes of a transfer.
"""

from __future__ import annotations

from rdmacm.enums import AccessFlag, WCOpcode, WCStatus
from rdmacm.plainints import ACCESS_REMOTE_WRITE
from rdmacm.proto.roce.buffers import LocalProtectionError, located
from rdmacm.proto.roce.headers import RETH_STRUCT
from rdmacm.proto.roce.icrc import ICRC_LENGTH, ICRC_STRUCT, RESIDUE, SHORTEST_PACKET, crc32
from rdmacm.proto.roce.opcodes import BTH_LENGTH, IS_END, IS_RESPONSE, Operation
from rdmacm.proto.roce.psn import PSN_MASK
from rdmacm.proto.roce.rc import responder, responses
from rdmacm.proto.roce.rc.codes import (
    ACK_REQUEST,
    ACK_SYNDROME,
    ACKNOWLEDGE,
    BTH_HALVES,
    READ_RESPONSE_MIDDLE,
    SEND_MIDDLE,
    SEND_ONLY,
    SOLICITED_EVENT,
    SYNDROME_KIND,
    WRITE_MIDDLE,
    WRITE_ONLY,
)
from rdmacm.proto.roce.rc.request_types import REQUEST_TYPES
from rdmacm.proto.roce.rc.requester import read_part_end
from rdmacm.proto.roce.rc.responder import FLAG_ACK_REQUEST, FLAG_SOLICITED
from rdmacm.proto.roce.rc.state import RcState
from rdmacm.proto.wire import Buffer
from rdmacm.work import WC, SendWork

#: The first half of a BTH without the opcode, SE, M, PadCnt, FECN, BECN and the reserved bits that follow these.
FIXED_BTH_BITS = 0x000FFFFF00FFFFFF
#: The longest packet, in bytes: all headers and the largest path MTU.
LONGEST_PACKET = 40 + 4096 + ICRC_LENGTH

_SUCCESS = WCStatus.SUCCESS
_RECV = WCOpcode.RECV
_REMOTE_WRITE = AccessFlag.REMOTE_WRITE
_WRITE = int(Operation.RDMA_WRITE)
_PADDING = tuple(bytes(count) for count in range(4))
_MIDDLES = frozenset({SEND_MIDDLE, WRITE_MIDDLE, READ_RESPONSE_MIDDLE})


# -- messages of one packet -----------------------------------------------------------------------------------


def try_single_packet(rc: RcState, work: SendWork, now: float) -> list[Buffer] | None:
    """Begin with a SEND or WRITE of one packet from one buffer, if nothing has to be sent before it.

    Return the pieces of the packet, sealed, or None.
    """
    psn = rc.next_psn
    if psn != rc.end_psn or rc.paused or rc.rnr_waiting:
        return None
    kind, segments = REQUEST_TYPES[work.opcode], work.segments
    if not kind.is_plain or work.fence or len(segments) != 1:
        return None
    piece = segments[0]
    try:
        size = len(piece)
    except ValueError:  # released
        return None
    if not 0 < size <= rc.path_mtu or rc.window <= psn - rc.unacked_psn & PSN_MASK:
        return None
    work.length = size
    work.first_psn = work.last_psn = psn
    rc.send_index = len(rc.outstanding)
    rc.outstanding.append(work)
    rc.next_psn = rc.end_psn = psn + 1 & PSN_MASK
    if rc.deadline is None and rc.timeout:
        rc.deadline = now + rc.timeout
    pad = -size & 3
    bth = kind.only << 56 | pad << 52 | rc.send_bth
    if work.solicited:
        bth |= SOLICITED_EVENT << 48
    headers = BTH_HALVES.pack(bth, psn | ACK_REQUEST)
    if kind.is_write:
        headers += RETH_STRUCT.pack(work.remote_addr, work.rkey, size)
    icrc = rc.icrc_out
    crc = crc32(piece, crc32(headers, icrc.base ^ icrc.lengths[len(headers) + size + pad + ICRC_LENGTH]))
    if not pad:
        return [headers, piece, ICRC_STRUCT.pack(crc)]
    padding = _PADDING[pad]
    return [headers, piece, padding + ICRC_STRUCT.pack(crc32(padding, crc))]


def single_ack(rc: RcState) -> list[Buffer]:
    """The pieces of the ACK or NAK of ``ack_psn``, sealed: no other packet has to be sent."""
    packet = responder.take_ack(rc)
    icrc = rc.icrc_out
    return [packet, ICRC_STRUCT.pack(crc32(packet, icrc.base ^ icrc.lengths[len(packet) + ICRC_LENGTH]))]


def try_receive(rc: RcState, data: memoryview, now: float) -> int:
    """Process a packet that was sent alone, with IPv4 identification 0, and passes all checks of its headers.

    Return 1 if it was accepted, 0 if it was not, -1 if nothing was done.
    """
    length = len(data)
    if not SHORTEST_PACKET <= length <= LONGEST_PACKET:
        return -1
    half, word = BTH_HALVES.unpack_from(data)
    opcode, end = half >> 56, length - ICRC_LENGTH - (half >> 52 & 3)
    header_length, icrc = rc.header_lengths[opcode], rc.icrc_in
    if (
        not header_length
        or end < header_length
        or half & FIXED_BTH_BITS != rc.receive_bth
        or crc32(data, icrc.base ^ icrc.lengths[length]) != RESIDUE
    ):
        return -1
    psn, body = word & PSN_MASK, data[BTH_LENGTH:end]
    if IS_RESPONSE[opcode]:
        if opcode == ACKNOWLEDGE and try_acknowledge_all(rc, psn, body[0]):
            return 1
        return responses.received(rc, opcode, psn, body, now)
    flags = half >> 48 & 0x80 | word >> 31
    if opcode == SEND_ONLY:
        if try_send_only(rc, psn, flags, body):
            return 1
    elif opcode == WRITE_ONLY and try_write_only(rc, psn, flags, body):
        return 1
    accepted = responder.received(rc, opcode, psn, flags, body)
    if not IS_END[opcode]:
        rc.write_view = None
    return accepted


def try_acknowledge_all(rc: RcState, psn: int, syndrome: int) -> bool:
    """Process an ACK of the only request that is outstanding, a SEND or WRITE."""
    if len(rc.outstanding) != 1 or syndrome & SYNDROME_KIND or rc.next_psn != rc.end_psn or rc.rnr_waiting:
        return False
    work = rc.outstanding[0]
    kind = REQUEST_TYPES[work.opcode]
    if psn != work.last_psn or not kind.is_data:
        return False
    rc.outstanding.clear()
    rc.send_index = 0
    rc.unacked_psn = rc.next_psn
    rc.retransmitting = False
    rc.retries_left = rc.retry_cnt
    rc.rnr_retries_left = rc.rnr_retry
    rc.deadline = None
    if work.signaled:
        rc.completed.append(WC(work.wr_id, _SUCCESS, kind.completes, work.length, None, None, False, rc.qp_num))
    return True


def try_send_only(rc: RcState, psn: int, flags: int, data: memoryview) -> bool:
    """Process a SEND of one packet into a receive of one buffer."""
    recv_queue, size = rc.recv_queue, len(data)
    if psn != rc.expected_psn or rc.operation or not recv_queue or size > rc.path_mtu:
        return False
    recv = recv_queue[0]
    segments = recv.segments
    if len(segments) != 1:
        return False
    try:
        segments[0][:size] = data
    except (ValueError, TypeError):  # too short, released, read-only
        return False
    recv_queue.popleft()
    rc.completed.append(WC(recv.wr_id, _SUCCESS, _RECV, size, None, None, flags & FLAG_SOLICITED != 0, rc.qp_num))
    _executed_only(rc, psn, flags)
    return True


def try_write_only(rc: RcState, psn: int, flags: int, body: memoryview) -> bool:
    """Process a WRITE of one packet."""
    address, rkey, length = RETH_STRUCT.unpack_from(body)
    if (
        psn != rc.expected_psn
        or rc.operation
        or not rc.access & ACCESS_REMOTE_WRITE
        or length != len(body) - 16
        or not 0 < length <= rc.path_mtu
    ):
        return False
    target = rc.memory.remote(rkey, address, length, _REMOTE_WRITE)
    if target is None:
        return False
    target[:] = body[16:]
    _executed_only(rc, psn, flags)
    return True


def _executed_only(rc: RcState, psn: int, flags: int) -> None:
    """A message of one packet was executed."""
    rc.nak_sent = False
    rc.expected_psn = rc.executed_psn = psn + 1 & PSN_MASK
    rc.msn = msn = rc.msn + 1 & PSN_MASK
    if flags & FLAG_ACK_REQUEST:
        if rc.responses:
            responder.respond(rc, psn, ACK_SYNDROME)
        else:  # replaces an ACK that is still to be sent
            rc.ack_psn = psn
            rc.ack_aeth = ACK_SYNDROME << 24 | msn


# -- middle packets of a long message -------------------------------------------------------------------------
#
# They have no header but the BTH, the same for all of them except the PSN; they have one size, and go to one buffer. A
# loop that relies on this takes half a microsecond a packet.


def receive_middles(rc: RcState, data: memoryview, at: int, now: float) -> int:
    """Process middle packets from byte ``at`` of a train on, up to the first that is not as expected.

    The packets of the train have the size of middle packets. Return how many were accepted.
    """
    opcode = data[at]
    if opcode not in _MIDDLES or rc.failed:
        return 0
    try:
        run = _peek_response_middles(rc) if opcode == READ_RESPONSE_MIDDLE else _peek_request_middles(rc)
    except LocalProtectionError:
        run = None  # the general code reports it
    if run is None or run[0] != opcode:
        return 0
    _, psn, view, offset, limit = run
    accepted, ack_requested = _copy_middles(rc, data, at, opcode, psn, view, offset, limit)
    if accepted:
        if opcode == READ_RESPONSE_MIDDLE:
            _commit_response_middles(rc, accepted, now)
        else:
            _commit_request_middles(rc, accepted, ack_requested)
    return accepted


def _copy_middles(
    rc: RcState, data: memoryview, at: int, opcode: int, psn: int, view: memoryview, offset: int, limit: int
) -> tuple[int, int]:
    """Check up to ``limit`` middle packets from byte ``at`` on, and copy their payload to ``view`` from ``offset`` on.

    Return how many there were, and the index of the last that requested an acknowledgement (-1: none).
    """
    mtu = rc.path_mtu
    size = mtu + SHORTEST_PACKET
    bth = opcode << 56 | rc.receive_bth
    limit = min(limit, (len(data) - at) // size, (len(view) - offset) // mtu)
    unpack = BTH_HALVES.unpack_from
    accepted, ack_requested = 0, -1
    for start in rc.icrc_in.starts(size, rc.identification, limit):
        half, word = unpack(data, at)
        if half != bth or word & PSN_MASK != psn:
            break
        end = at + size
        if crc32(data[at:end], start) != RESIDUE:
            break
        try:
            view[offset : offset + mtu] = data[at + BTH_LENGTH : end - ICRC_LENGTH]
        except (ValueError, TypeError):  # released, or read-only
            break
        if word > 0x7FFFFFFF:
            ack_requested = accepted
        accepted += 1
        offset += mtu
        psn = psn + 1 & PSN_MASK
        at = end
    return accepted, ack_requested


def _peek_request_middles(rc: RcState) -> tuple[int, int, memoryview, int, int] | None:
    """The middle packets that may come next of the message in progress: opcode, PSN, buffer, offset, and how many."""
    if rc.operation == _WRITE:
        rkey, address, length = rc.write_target
        if rc.write_view is None:
            rc.write_view = rc.memory.remote(rkey, address, length, _REMOTE_WRITE)
            if rc.write_view is None:
                return None
        # The last byte belongs to the last packet.
        count = (length - rc.message_offset - 1) // rc.path_mtu
        return WRITE_MIDDLE, rc.expected_psn, rc.write_view, rc.message_offset, count
    recv = rc.current_recv
    if recv is None or rc.message_offset >= rc.recv_capacity:
        return None
    view, offset = located(recv.segments, rc.message_offset)
    return SEND_MIDDLE, rc.expected_psn, view, offset, PSN_MASK


def _commit_request_middles(rc: RcState, count: int, ack_requested: int) -> None:
    """``count`` middle packets of a request have arrived; ``ack_requested`` is the last with AckReq (-1: none)."""
    psn = rc.expected_psn
    rc.nak_sent = False
    rc.message_offset += count * rc.path_mtu
    rc.expected_psn = (psn + count) & PSN_MASK
    if ack_requested >= 0:
        responder.respond(rc, (psn + ack_requested) & PSN_MASK, ACK_SYNDROME)


def _peek_response_middles(rc: RcState) -> tuple[int, int, memoryview, int, int] | None:
    """The same for the READ response in progress."""
    if not rc.outstanding:
        return None
    work = rc.outstanding[0]
    if not REQUEST_TYPES[work.opcode].is_read:
        return None
    index = work.received_bytes // rc.path_mtu
    count = min(work.requested_packets, read_part_end(rc, index)) - 1 - index
    if count <= 0:
        return None
    view, offset = located(work.segments, work.received_bytes)
    return READ_RESPONSE_MIDDLE, (work.first_psn + index) & PSN_MASK, view, offset, count


def _commit_response_middles(rc: RcState, count: int, now: float) -> None:
    """``count`` middle packets of a READ response have arrived."""
    work = rc.outstanding[0]
    work.received_bytes += count * rc.path_mtu
    responses.acknowledged(rc, (work.first_psn + work.received_bytes // rc.path_mtu - 1) & PSN_MASK)
    responses.progressed(rc, now)
