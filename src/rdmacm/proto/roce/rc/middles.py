"""The middle packets of a long message, which carry nearly all bytes of a transfer, a run of them at a time.

They have no header but the BTH, the same for all of them except the PSN; they have one size, and go to one buffer. A
loop that relies on this takes half a microsecond a packet. It handles a run exactly as the other modules handle its
packets, or does nothing and reports that; a test checks that both have the same result.
"""

from __future__ import annotations

from rdmacm.enums import AccessFlag
from rdmacm.proto.constants import (
    ACK_SYNDROME,
    BTH_LENGTH,
    ICRC_LENGTH,
    PSN_MASK,
    READ_RESPONSE_MIDDLE,
    RESIDUE,
    SEND_MIDDLE,
    SHORTEST_PACKET,
    WRITE_MIDDLE,
)
from rdmacm.proto.roce.buffers import LocalProtectionError, located
from rdmacm.proto.roce.headers import BTH_HALVES
from rdmacm.proto.roce.icrc import crc32
from rdmacm.proto.roce.opcodes import Operation
from rdmacm.proto.roce.rc import responder, responses
from rdmacm.proto.roce.rc.request_types import REQUEST_TYPES
from rdmacm.proto.roce.rc.requester import read_part_end
from rdmacm.proto.roce.rc.state import RcState

_REMOTE_WRITE = AccessFlag.REMOTE_WRITE
_WRITE = int(Operation.RDMA_WRITE)
_MIDDLES = frozenset({SEND_MIDDLE, WRITE_MIDDLE, READ_RESPONSE_MIDDLE})


def receive(rc: RcState, data: memoryview, at: int, now: float) -> int:
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
