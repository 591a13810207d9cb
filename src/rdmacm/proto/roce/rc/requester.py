"""The requester of a reliable connection: how work requests become packets (InfiniBand Architecture 9.7).

Posted requests wait in ``pending_sends``. A request that begins gets packet sequence numbers and moves to
``outstanding``, which it leaves from the left, in order, as a completion. Every request packet takes one PSN; a READ
takes as many as its response has packets. ``next_psn`` is the PSN to be sent next: it runs ahead to ``end_psn`` as the
window allows, and returns to retransmit. Retransmission is go-back-N: everything from the lost packet on is sent again,
with the same PSNs.

BIND_MW and LOCAL_INV send no packet. Each is executed when all requests before it are complete, as InfiniBand
Architecture 10.6.5.1 requires of LOCAL_INV, and completes at once.

:mod:`~rdmacm.proto.roce.rc.responses` processes the peer's acknowledgements and responses.
"""

from __future__ import annotations

from rdmacm.address import ALL_BITS_64
from rdmacm.enums import WCStatus, WROpcode
from rdmacm.proto.constants import (
    ACK_REQUEST,
    ATOMIC_WRITE,
    COMPARE_SWAP,
    FETCH_ADD,
    FLUSH,
    ICRC_LENGTH,
    LOSS_WINDOW_BYTES,
    PSN_MASK,
    READ_REQUEST,
    WINDOW,
    WRITE_ONLY,
)
from rdmacm.proto.roce.buffers import LocalProtectionError, slices, total
from rdmacm.proto.roce.headers import ATOMIC_ETH_STRUCT, BTH_HALVES, FETH_STRUCT, RETH_STRUCT
from rdmacm.proto.roce.icrc import ICRC_STRUCT, crc32
from rdmacm.proto.roce.rc.failure import fail
from rdmacm.proto.roce.rc.request_types import REQUEST_TYPES, RequestType
from rdmacm.proto.roce.rc.state import RcState
from rdmacm.proto.roce.rc.trains import Trains
from rdmacm.proto.wire import Buffer
from rdmacm.proto.work import WC, Memory, SendWork


def set_window(rc: RcState) -> None:
    """Set the window of a connection without losses, from its path MTU.

    A UDP socket with the largest buffer that Linux gives by default (net.core.rmem_max, 212992, which the kernel
    doubles for its own overhead) holds somewhat more than LOSS_WINDOW_BYTES in packets of 4 KiB and drops the rest, and
    a lost packet costs more than a window that is closed for a moment. Until a packet is lost there may be more: the
    peer may have a larger buffer, and is mostly quick enough to need none.
    """
    rc.window = WINDOW
    rc.loss_window = min(WINDOW, LOSS_WINDOW_BYTES // rc.path_mtu)
    # Two parts of a READ, or two messages up to the next ACK request, fill the small window.
    rc.ack_interval = rc.loss_window // 2


# -- time -----------------------------------------------------------------------------------------------------


def timer(rc: RcState, now: float) -> None:
    """Retransmit, or end the connection, if the deadline has come."""
    if rc.deadline is None or now < rc.deadline:
        return
    if rc.rnr_waiting:
        rc.rnr_waiting = False
        start_timer(rc, now)
    else:
        rc.retransmitting = False
        rc.counters.errors["local_ack_timeout_err"] += 1
        retransmit(rc, rc.unacked_psn, now)


def start_timer(rc: RcState, now: float) -> None:
    """Restart the retransmission timer if packets are outstanding, else stop it."""
    if not rc.rnr_waiting:
        is_waiting = rc.timeout and rc.outstanding and rc.next_psn != rc.unacked_psn
        rc.deadline = now + rc.timeout if is_waiting else None


def retransmit(rc: RcState, psn: int, now: float) -> None:
    """Send again from ``psn`` on, or fail if that was done too often.

    Nothing happens while packets are being retransmitted: more signs of the same loss are on their way.
    """
    if rc.retransmitting:
        return
    rc.retransmitting = True
    if rc.retries_left <= 0:
        rc.counters.errors["retry_exceeded_err"] += 1
        fail(rc, WCStatus.RETRY_EXC_ERR)
        return
    rc.counters.errors["completer_retry_err"] += 1
    rc.retries_left -= 1
    rc.window = rc.loss_window
    go_back(rc, psn)
    if not rc.rnr_waiting:
        rc.deadline = now + rc.timeout if rc.timeout else None


def go_back(rc: RcState, psn: int) -> None:
    """Send again from ``psn`` on, as soon as packets may be sent."""
    rc.next_psn = psn
    rc.send_index = 0


# -- sending --------------------------------------------------------------------------------------------------


def wants_to_send(rc: RcState) -> bool:
    """Whether :func:`packets` may have a packet."""
    if rc.rnr_waiting:
        return False
    return rc.next_psn != rc.end_psn or (bool(rc.pending_sends) and not rc.paused)


def packets(rc: RcState, out: Trains, now: float, limit: int) -> None:
    """Append up to ``limit`` packets that may be sent now."""
    before = rc.next_psn
    try:
        while limit > 0 and not rc.failed:
            if rc.next_psn == rc.end_psn and not (rc.pending_sends and _begin_request(rc)):
                break
            room = rc.window - (rc.next_psn - rc.unacked_psn & PSN_MASK)
            if room <= 0:
                break
            work = rc.outstanding[rc.send_index]
            while rc.next_psn - work.first_psn & PSN_MASK > work.last_psn - work.first_psn & PSN_MASK:
                rc.send_index += 1
                work = rc.outstanding[rc.send_index]
            kind = REQUEST_TYPES[work.opcode]
            if kind.is_read:
                count = _read_request(rc, out, work, room - rc.window + rc.loss_window)
            elif kind.is_atomic:
                count = _atomic_request(rc, out, work)
            elif kind.is_flush:
                count = _flush_request(rc, out, work, limit)
            elif kind.is_atomic_write:
                count = _atomic_write_request(rc, out, work)
            else:
                count = _data_packet(rc, out, work, kind, room)
            if not count:
                break
            limit -= count
    except LocalProtectionError:
        # Earlier requests are not affected: this one fails when it is the oldest.
        if rc.next_psn == rc.unacked_psn:
            fail(rc, WCStatus.LOC_PROT_ERR)
    if rc.deadline is None and rc.next_psn != before:
        start_timer(rc, now)


def _begin_request(rc: RcState) -> bool:
    """Give the next posted request, if it need not wait, its PSNs."""
    if rc.paused:
        return False
    work = rc.pending_sends[0]
    while REQUEST_TYPES[work.opcode].is_local:
        if rc.outstanding or not _complete_locally(rc, work):
            return False
        if not rc.pending_sends:
            return False
        work = rc.pending_sends[0]
    if work.fence and any(not REQUEST_TYPES[earlier.opcode].is_data for earlier in rc.outstanding):
        return False
    kind, mtu = REQUEST_TYPES[work.opcode], rc.path_mtu
    length = work.flush[0] if kind.is_flush else total(work.segments)
    count = -(-length // mtu) if length > mtu and (kind.is_data or kind.is_read) else 1
    rc.pending_sends.popleft()
    work.length = length
    work.first_psn = rc.end_psn
    work.last_psn = (rc.end_psn + count - 1) & PSN_MASK
    work.received_bytes = work.requested_packets = 0
    rc.outstanding.append(work)
    rc.end_psn = (rc.end_psn + count) & PSN_MASK
    return True


def execute_locally(memory: Memory, work: SendWork) -> WCStatus:
    """Execute a BIND_MW or LOCAL_INV. The status of its completion is another than SUCCESS if it is not allowed."""
    if work.opcode is WROpcode.BIND_MW:
        return WCStatus.SUCCESS if memory.bind(work.bind) else WCStatus.MW_BIND_ERR
    return WCStatus.SUCCESS if memory.invalidate(work.invalidate_rkey) else WCStatus.LOC_QP_OP_ERR


def _complete_locally(rc: RcState, work: SendWork) -> bool:
    """Execute the oldest request, a BIND_MW or LOCAL_INV. False if it is not allowed, which ends the connection."""
    status = execute_locally(rc.memory, work)
    if status is not WCStatus.SUCCESS:
        fail(rc, status)
        return False
    rc.pending_sends.popleft()
    if work.signaled:
        rc.completed.append(WC(work.wr_id, WCStatus.SUCCESS, REQUEST_TYPES[work.opcode].completes, qp_num=rc.qp_num))
    return True


def _data_packet(rc: RcState, out: Trains, work: SendWork, kind: RequestType, room: int) -> int:
    """Append the next packet of a SEND or WRITE; return 1, the number of packets."""
    psn = rc.next_psn
    index = psn - work.first_psn & PSN_MASK
    # An answer is requested at the end, where the window closes, and at intervals.
    asks = psn == work.last_psn or room == 1 or (index and (index + 1) % rc.ack_interval == 0)
    out.add_part(work, kind, index, rc.path_mtu, rc.send_bth, psn | ACK_REQUEST if asks else psn)
    rc.next_psn = (psn + 1) & PSN_MASK
    return 1


def _may_request(rc: RcState, work: SendWork, packets: int = 1) -> bool:
    """Whether the peer has a resource for the first ``packets`` of a READ, atomic, FLUSH or ATOMIC WRITE.

    If it has none at all, the oldest request fails.
    """
    if work.requested_packets >= packets:
        return True
    if not rc.max_rd_atomic and rc.next_psn == rc.unacked_psn:
        fail(rc, WCStatus.LOC_QP_OP_ERR)
    if rc.outstanding_reads >= rc.max_rd_atomic:
        return False
    rc.outstanding_reads += 1
    work.requested_packets = packets
    return True


def _read_request(rc: RcState, out: Trains, work: SendWork, room: int) -> int:
    """Append a request for the next part of a READ; return the number of packets, 0 if it has to wait.

    A READ response comes all at once, as no window limits it, so a long READ is requested in parts. A repeated
    request is never for more than one part: the responder may keep a resource for each part.
    """
    psn, mtu = rc.next_psn, rc.path_mtu
    index = psn - work.first_psn & PSN_MASK
    stop = min(read_part_end(rc, index), (work.last_psn - work.first_psn & PSN_MASK) + 1)
    if stop - index > room and psn != rc.unacked_psn:
        return 0
    if not _may_request(rc, work, stop):
        return 0
    offset = index * mtu
    rc.next_psn = (work.first_psn + stop) & PSN_MASK
    bth = BTH_HALVES.pack(READ_REQUEST << 56 | rc.send_bth, psn | ACK_REQUEST)
    length = min(work.length, stop * mtu) - offset
    out.add(bth + RETH_STRUCT.pack(work.remote_addr + offset & ALL_BITS_64, work.rkey, length), (), 32)
    return 1


def read_part_end(rc: RcState, index: int) -> int:
    """One past the last packet of the part of a READ response that packet ``index`` is in."""
    return (index // rc.ack_interval + 1) * rc.ack_interval


def _atomic_request(rc: RcState, out: Trains, work: SendWork) -> int:
    """Append the request of an atomic; return the number of packets, 0 if it has to wait."""
    if not _may_request(rc, work):
        return 0
    psn = rc.next_psn
    if work.opcode is WROpcode.ATOMIC_CMP_AND_SWP:
        opcode, first, second = COMPARE_SWAP, work.swap, work.compare_add
    else:
        opcode, first, second = FETCH_ADD, work.compare_add, 0
    rc.next_psn = (psn + 1) & PSN_MASK
    bth = BTH_HALVES.pack(opcode << 56 | rc.send_bth, psn | ACK_REQUEST)
    out.add(bth + ATOMIC_ETH_STRUCT.pack(work.remote_addr, work.rkey, first, second), (), 44)
    return 1


def _flush_request(rc: RcState, out: Trains, work: SendWork, limit: int) -> int:
    """Append the request of a FLUSH; return the number of packets, 0 if it has to wait.

    The ICRC is the one that the peer has answered last, and the other one each second time.

    rxe's responder uses a resource for a FLUSH, though its requester does not count it. Without the count, a FLUSH
    would displace the resource of an atomic whose response may have been lost. And rxe does not find that resource when
    the FLUSH comes again. But it answers any duplicate WRITE with an ACK of all that it has executed, so one precedes a
    FLUSH that is repeated.
    """
    psn, repeats, count = rc.next_psn, work.requested_packets, 1
    if not _may_request(rc, work):
        return 0
    if repeats and psn == rc.unacked_psn and limit > 1:
        out.add(_duplicate_headers(rc), (), 32)
        count = 2
    work.had_icrc_twice = not work.had_icrc_twice if repeats else rc.flush_icrc_twice
    length, placement, selectivity = work.flush
    rc.next_psn = (psn + 1) & PSN_MASK
    headers = BTH_HALVES.pack(FLUSH << 56 | rc.send_bth, psn | ACK_REQUEST)
    headers += FETH_STRUCT.pack(selectivity << 4 | placement)
    out.add(headers + RETH_STRUCT.pack(work.remote_addr, work.rkey, length), (), 36, twice=work.had_icrc_twice)
    return count


def _atomic_write_request(rc: RcState, out: Trains, work: SendWork) -> int:
    """Append the packet of an ATOMIC WRITE; return the number of packets, 0 if it has to wait."""
    value = b"".join(slices(work.segments, 0, 8))
    if not _may_request(rc, work):
        return 0
    psn = rc.next_psn
    rc.next_psn = (psn + 1) & PSN_MASK
    bth = BTH_HALVES.pack(ATOMIC_WRITE << 56 | rc.send_bth, psn | ACK_REQUEST)
    out.add(bth + RETH_STRUCT.pack(work.remote_addr, work.rkey, 8), (value,), 40)
    return 1


# -- asking whether the peer is there -------------------------------------------------------------------------


def duplicate(rc: RcState) -> list[Buffer]:
    """A WRITE of no bytes with the PSN before the oldest one that is not acknowledged, sealed."""
    headers = _duplicate_headers(rc)
    return [headers, ICRC_STRUCT.pack(crc32(headers, rc.icrc_out.start(len(headers) + ICRC_LENGTH)))]


def _duplicate_headers(rc: RcState) -> bytes:
    bth = BTH_HALVES.pack(WRITE_ONLY << 56 | rc.send_bth, rc.unacked_psn - 1 & PSN_MASK | ACK_REQUEST)
    return bth + RETH_STRUCT.pack(0, 0, 0)
