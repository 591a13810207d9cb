"""The end of a reliable connection."""

from __future__ import annotations

from rdmacm.enums import WCOpcode, WCStatus
from rdmacm.proto.roce.rc.request_types import REQUEST_TYPES
from rdmacm.proto.roce.rc.state import RcState
from rdmacm.proto.work import WC

_FLUSHED = WCStatus.WR_FLUSH_ERR


def fail(rc: RcState, status: WCStatus = _FLUSHED) -> None:
    """End the connection: everything posted completes, the oldest send with ``status``, all others as flushed."""
    if rc.failed:
        return
    rc.failed = True
    if status is not _FLUSHED:
        rc.failure = status.name
    rc.rnr_waiting = False
    rc.deadline = None
    rc.next_psn = rc.end_psn
    for works in (rc.outstanding, rc.pending_sends):
        while works:
            work = works.popleft()
            rc.completed.append(WC(work.wr_id, status, REQUEST_TYPES[work.opcode].completes, qp_num=rc.qp_num))
            status = _FLUSHED
    _complete_current_recv(rc, _FLUSHED)
    while rc.recv_queue:
        flush_recv(rc, rc.recv_queue.popleft().wr_id)


def fail_receive(rc: RcState, status: WCStatus) -> None:
    """End the connection because of a request of the peer: the receive in progress completes with ``status``."""
    if not rc.failed:
        rc.failure = f"{status.name} of a request of the peer"
        _complete_current_recv(rc, status)
        fail(rc)


def flush_recv(rc: RcState, wr_id: int, status: WCStatus = _FLUSHED) -> None:
    """Complete a receive without a message."""
    rc.completed.append(WC(wr_id, status, WCOpcode.RECV, qp_num=rc.qp_num))


def _complete_current_recv(rc: RcState, status: WCStatus) -> None:
    if rc.current_recv is not None:
        flush_recv(rc, rc.current_recv.wr_id, status)
        rc.current_recv = None
