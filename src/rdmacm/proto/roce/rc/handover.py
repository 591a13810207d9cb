"""The queues of a connection pass between the compiled core and the engine in Python (docs/core.md).

Exactly one of them has the queues: the core while ``core_owns_queues``, else the deques of :class:`RcState`. All other
fields live in one object that both use.
"""

from __future__ import annotations

from rdmacm.enums import WCOpcode, WCStatus
from rdmacm.proto.constants import PSN_MASK
from rdmacm.proto.core_choice import compiled
from rdmacm.proto.roce.rc.request_types import REQUEST_TYPES
from rdmacm.proto.roce.rc.state import NO_HEADERS, RcState, Resource, Response
from rdmacm.proto.work import WC

__all__ = ["begin", "end", "see"]

#: Calls that receive packets before the core is tried again: at first, and at most. To pass the queues takes time in
#: proportion to what is posted, so the number doubles until the core has taken some packets in a row.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 4, 1024
_MANY_PACKETS = 256

if compiled is not None:
    compiled.configure_wc(
        *(WC, tuple(WCStatus), tuple(kind.completes for kind in REQUEST_TYPES)),
        *(WCOpcode.RECV, WCOpcode.RECV_RDMA_WITH_IMM),
    )


def begin(rc: RcState) -> None:
    """Give the queues to the core, if it knows all that the connection has to do: no message is in progress."""
    if not rc.may_use_core or rc.responses or rc.current_recv is not None:
        return
    if rc.take_shared_receive is not None:
        return
    if rc.core_pause > 0:
        rc.core_pause -= 1
        return
    regions = getattr(rc.memory, "regions", None)
    if regions is not None:
        rc.core_set_memory(regions, rc.memory.pd, rc.memory.number)  # type: ignore[attr-defined]
    if not rc.core_begin(rc.send_index):
        return
    is_known = all(map(rc.core_adopt_send, rc.outstanding)) and all(map(rc.core_post_send, rc.pending_sends))
    if is_known and all(map(rc.core_post_recv, rc.recv_queue)):
        rc.outstanding.clear()
        rc.pending_sends.clear()
        rc.recv_queue.clear()
        rc.core_filled()
        rc.core_since = rc.expected_psn, rc.unacked_psn
    else:
        rc.core_end()
        _wait_longer(rc)


def _wait_longer(rc: RcState) -> None:
    rc.core_pause = pause = rc.core_next_pause or _SHORTEST_PAUSE
    rc.core_next_pause = min(2 * pause, _LONGEST_PAUSE)


def end(rc: RcState) -> None:
    """Take the queues back."""
    sends, begun, send_index, recvs, current_recv, resources, responses = rc.core_end()
    take_counts(rc)
    expected, unacked = rc.core_since
    if (rc.expected_psn - expected & PSN_MASK) + (rc.unacked_psn - unacked & PSN_MASK) >= _MANY_PACKETS:
        rc.core_next_pause = 0
    _wait_longer(rc)
    rc.outstanding.extend(sends[:begun])
    rc.pending_sends.extend(sends[begun:])
    rc.send_index = send_index
    rc.recv_queue.extend(recvs)
    rc.current_recv = current_recv
    kept = [_resource(rc, fields) for fields in resources]
    rc.resources.extend(kept)
    for psn, last_psn, offset, syndrome, msn, is_repeated, fields in responses:
        response = Response(psn, syndrome, msn, repeated=is_repeated)
        response.last_psn, response.offset = last_psn, offset
        if fields is not None:
            answered = _resource(rc, fields)
            response.address, response.length = answered.address, answered.length
            response.resource = next((other for other in kept if other.first_psn == answered.first_psn), answered)
        rc.responses.append(response)


def _resource(rc: RcState, fields: tuple[int, int, int, int, int, int, int]) -> Resource:
    resource = Resource(*fields)
    resource.memory = rc.memory
    return resource


def see(rc: RcState) -> None:
    """Take what the core has counted, and the queues of a connection that has failed."""
    if rc.has_counts:
        take_counts(rc)
    if rc.failed and rc.core_owns_queues:
        rc.core_take_completed(rc.completed)
        end(rc)
        rc.failure = WCStatus(rc.failure_status).name
        if rc.has_failed_peer:
            rc.failure += " of a request of the peer"
        rc.header_lengths = NO_HEADERS
        rc.may_use_core = False


def take_counts(rc: RcState) -> None:
    """Add what the core has counted to the counters."""
    if rc.has_counts:
        rc.counters.add(rc.core_take_counts())
