"""Operations between two devices, each on a connection of its own. Both ends check every byte.

An operation has two functions, one for each end: the end that *requests* posts the work, the end that *responds* has
the memory and the receives. Either end may be the one that connects; ``peer`` describes how two programs run them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from interop.ends import Access, End, EventKind, Opcode, Param, Placement, Selectivity, Status, WcOpcode
from interop.failures import (
    ROOM,
    late_receive_request,
    late_receive_respond,
    no_receive_request,
    no_receive_respond,
    refused,
    small_receive_request,
    small_receive_respond,
    unaligned,
    unharmed,
)
from interop.flushing import (
    FLUSH_ACCESS,
    atomic_write_request,
    atomic_write_respond,
    counted_request,
    counted_respond,
    flush_request,
    flush_respond,
    never_persistent,
    refused_atomic_write,
    refused_flush,
)
from interop.memory import EVERY_ACCESS
from interop.transfers import (
    atomic,
    atomic_target,
    both_at_once,
    fence_request,
    fence_respond,
    inline_request,
    inline_respond,
    last_word_request,
    last_word_respond,
    many_request,
    many_respond,
    queued_reads_request,
    queued_reads_respond,
    read_request,
    read_respond,
    receives,
    scatter_gather_request,
    scatter_gather_respond,
    sends,
    writes,
    written,
)
from interop.unreliable import (
    uc_both_at_once,
    uc_loss_request,
    uc_loss_respond,
    uc_refused_request,
    uc_refused_respond,
    uc_small_receive_request,
    uc_small_receive_respond,
    without_receive_request,
    without_receive_respond,
)
from interop.windows import (
    beyond_window,
    foreign_invalidate_request,
    foreign_invalidate_respond,
    invalidate_request,
    invalidate_respond,
    refused_bind_request,
    refused_bind_respond,
    uc_refused_invalidate,
    uc_send_with_invalidate,
    uc_window_request,
    uc_window_respond,
    window_request,
    window_respond,
    window_unharmed,
)

__all__ = ["OPERATIONS", "Operation"]

# -- connecting -----------------------------------------------------------------------------------------------

_ASKS = Param(responder_resources=3, initiator_depth=5, flow_control=1, retry_count=4, rnr_retry_count=5)
_ANSWERS = Param(responder_resources=4, initiator_depth=2, flow_control=1, rnr_retry_count=3)


def _negotiate(end: End) -> None:
    """Each end reports and uses the parameters that the two agreed on."""
    passive = end.request is not None
    end.connect(param=_ANSWERS if passive else _ASKS)
    attributes = end.attributes()
    assert end.established
    assert 128 << attributes.path_mtu == end.device.mtu, attributes
    came = (end.request or end.established).param
    told = (came.responder_resources, came.initiator_depth, came.rnr_retry_count)
    has = (attributes.max_dest_rd_atomic, attributes.max_rd_atomic, attributes.rnr_retry)
    if passive:
        assert (*told, came.retry_count) == (5, 3, 5, 4), came
        assert has == (4, 2, 5), attributes
    else:
        assert told == (2, 4, 3), came
        assert has == (2, 4, 3), attributes
    assert attributes.retry_cnt == 4, attributes
    end.finish(first=not passive)


def _reject(end: End) -> None:
    """A rejection arrives with all of its private data."""
    if end.request is not None:
        end.reject(end.private_data("reject"))
        return
    end.connect_or_accept(Param(private_data=end.private_data("request")))
    event = end.device.event(EventKind.REJECTED)
    assert event.status == 28, event
    assert event.param.private_data == end.private_data("reject"), event


# -- all operations -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    name: str
    request: Callable[[End], None]
    #: The same as ``request`` where both ends do the same.
    respond: Callable[[End], None]
    #: Its row of the table in docs/interop.md.
    row: str
    #: The first Linux whose rdma_rxe has it, if that is not the oldest of these tests. Runs if it is named.
    since: tuple[int, int] | None = None
    #: Whether its connection is of type UC.
    unreliable: bool = False
    #: Whether it runs only if it is named: it needs a link that loses packets.
    needs_loss: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that an end can have in it."""
        return ("request", "respond") if self.respond is not self.request else ("both",)


_ADD, _SWAP = Opcode.ATOMIC_FETCH_AND_ADD, Opcode.ATOMIC_CMP_AND_SWP
_INVALID = Status.REM_INV_REQ_ERR
_LOCAL, _READ, _WRITE, _ATOMIC = Access.LOCAL_WRITE, Access.REMOTE_READ, Access.REMOTE_WRITE, Access.REMOTE_ATOMIC

_BINDABLE = Access.LOCAL_WRITE | Access.MW_BIND

#: Rows of the table in docs/interop.md.
_SENDS = "SEND, with immediate data, with invalidate: 0 to 100,000 bytes"
_RDMA = "RDMA WRITE, with immediate data, and READ: 0 to 100,000 bytes"
_ATOMICS = "atomics"
_QUEUES = "scatter/gather, inline data, fences, full queues"
_RECEIVES = "receives that are late, missing or too small"
_REFUSALS = "wrong keys, ranges and permissions are refused"
_WINDOWS = "memory windows of types 1 and 2, also zero-based; binds and keys that are refused"
_CONNECTING = "connection parameters and private data, rejection"
_FLUSHES = "FLUSH and ATOMIC WRITE (Linux 6.2 and newer)"
_UC = "unreliable connections: SEND, WRITE, immediate and inline data, dropped messages"
_UC_WINDOWS = "unreliable connections: memory windows of types 1 and 2; binds and keys that are refused"
_UC_LOSS = "unreliable connections on a link that loses 10 % of the packets"

OPERATIONS = (
    Operation("send", sends(Opcode.SEND), receives(False), _SENDS),
    Operation("send_with_immediate", sends(Opcode.SEND_WITH_IMM), receives(True), _SENDS),
    Operation("send_with_invalidate", invalidate_request, invalidate_respond, _SENDS),
    Operation("write", writes(Opcode.RDMA_WRITE), written(False), _RDMA),
    Operation("write_with_immediate", writes(Opcode.RDMA_WRITE_WITH_IMM), written(True), _RDMA),
    Operation("read", read_request, read_respond, _RDMA),
    Operation(
        "compare_and_swap",
        atomic(_SWAP, WcOpcode.COMP_SWAP, [(7, 8), (7, 8), ((1 << 64) - 1, 0), (0x0123456789ABCDEF, 1 << 40)]),
        atomic_target(8, 1 << 63, 0, 1 << 40),
        _ATOMICS,
    ),
    Operation(
        "fetch_and_add",
        atomic(_ADD, WcOpcode.FETCH_ADD, [(1, 0), (1 << 63, 0), (2, 0), ((1 << 64) - 0xEF, 0)]),
        atomic_target(8, 0, 1, 0x0123456789ABCD00),
        _ATOMICS,
    ),
    Operation("scatter_gather", scatter_gather_request, scatter_gather_respond, _QUEUES),
    Operation("fence", fence_request, fence_respond, _QUEUES),
    Operation("inline", inline_request, inline_respond, _QUEUES),
    Operation("many_outstanding", many_request, many_respond, _QUEUES),
    Operation("more_reads_than_resources", queued_reads_request, queued_reads_respond, _QUEUES),
    Operation("both_at_once", both_at_once, both_at_once, _QUEUES),
    Operation("last_word", last_word_request, last_word_respond, _SENDS),
    Operation("late_receive", late_receive_request, late_receive_respond, _RECEIVES),
    Operation("no_receive", no_receive_request, no_receive_respond, _RECEIVES),
    Operation("small_receive", small_receive_request(1), small_receive_respond(1), _RECEIVES),
    Operation("small_receive_of_many_packets", small_receive_request(3), small_receive_respond(3), _RECEIVES),
    Operation("write_wrong_key", refused(Opcode.RDMA_WRITE, key=0x100), unharmed(EVERY_ACCESS), _REFUSALS),
    Operation("read_wrong_key", refused(Opcode.RDMA_READ, key=0x100), unharmed(EVERY_ACCESS), _REFUSALS),
    Operation("atomic_wrong_key", refused(_ADD, key=0x100), unharmed(EVERY_ACCESS), _REFUSALS),
    Operation("write_out_of_range", refused(Opcode.RDMA_WRITE, offset=ROOM - 7), unharmed(EVERY_ACCESS), _REFUSALS),
    Operation("write_before_the_start", refused(Opcode.RDMA_WRITE, offset=-1), unharmed(EVERY_ACCESS), _REFUSALS),
    Operation(
        "long_write_out_of_range",
        refused(Opcode.RDMA_WRITE, size=ROOM + 1),
        unharmed(EVERY_ACCESS),
        _REFUSALS,
    ),
    Operation("read_out_of_range", refused(Opcode.RDMA_READ, offset=ROOM - 7), unharmed(EVERY_ACCESS), _REFUSALS),
    Operation("atomic_out_of_range", refused(_ADD, offset=ROOM), unharmed(EVERY_ACCESS), _REFUSALS),
    Operation("write_not_permitted", refused(Opcode.RDMA_WRITE), unharmed(_LOCAL | _READ | _ATOMIC), _REFUSALS),
    Operation("read_not_permitted", refused(Opcode.RDMA_READ), unharmed(_LOCAL | _WRITE | _ATOMIC), _REFUSALS),
    Operation("atomic_not_permitted", refused(_ADD), unharmed(_LOCAL | _READ | _WRITE), _REFUSALS),
    Operation("atomic_not_aligned", unaligned, unharmed(EVERY_ACCESS), _ATOMICS),
    Operation("window_of_type_1", window_request, window_respond(1), _WINDOWS),
    Operation("window_of_type_2", window_request, window_respond(2), _WINDOWS),
    Operation("zero_based_window", window_request, window_respond(2, zero_based=True), _WINDOWS),
    Operation("beyond_window", beyond_window(Opcode.RDMA_WRITE, offset=5000 - 7), window_unharmed(2), _WINDOWS),
    Operation("before_window", beyond_window(Opcode.RDMA_READ, offset=-1), window_unharmed(1), _WINDOWS),
    Operation("window_wrong_key", beyond_window(Opcode.RDMA_WRITE, key=1), window_unharmed(2), _WINDOWS),
    Operation("window_not_for_writing", beyond_window(Opcode.RDMA_WRITE), window_unharmed(1, _READ), _WINDOWS),
    Operation("window_not_for_reading", beyond_window(Opcode.RDMA_READ), window_unharmed(2, _WRITE), _WINDOWS),
    Operation("invalidate_region", foreign_invalidate_request, foreign_invalidate_respond(0), _WINDOWS),
    Operation("invalidate_type_1", foreign_invalidate_request, foreign_invalidate_respond(1), _WINDOWS),
    Operation("bind_without_permission", refused_bind_request, refused_bind_respond(1, _LOCAL), _WINDOWS),
    Operation("bind_not_writable", refused_bind_request, refused_bind_respond(2, Access.MW_BIND), _WINDOWS),
    Operation("bind_beyond", refused_bind_request, refused_bind_respond(2, _BINDABLE, length=101), _WINDOWS),
    Operation("negotiate", _negotiate, _negotiate, _CONNECTING),
    Operation("reject", _reject, _reject, _CONNECTING),
    *(
        Operation(name, request, respond, _FLUSHES, (6, 2))
        for name, request, respond in (
            ("flush", flush_request, flush_respond),
            ("atomic_write", atomic_write_request, atomic_write_respond),
            ("flush_and_atomic_write", counted_request, counted_respond),
            ("never_persistent", never_persistent, never_persistent),
            ("flush_wrong_key", refused_flush(key=0x100), unharmed(FLUSH_ACCESS)),
            ("flush_of_nothing_wrong_key", refused_flush(key=0x100, length=0), unharmed(FLUSH_ACCESS)),
            ("flush_all_wrong_key", refused_flush(key=0x100, selectivity=Selectivity.MR), unharmed(FLUSH_ACCESS)),
            ("flush_out_of_range", refused_flush(offset=ROOM - 7), unharmed(FLUSH_ACCESS)),
            ("flush_before_the_start", refused_flush(offset=-1), unharmed(FLUSH_ACCESS)),
            ("flush_over_the_top", refused_flush(offset=1 << 63, length=1 << 31), unharmed(FLUSH_ACCESS)),
            ("flush_too_long", refused_flush(length=(1 << 31) + 1, status=_INVALID), unharmed(FLUSH_ACCESS)),
            ("flush_not_permitted", refused_flush(), unharmed(EVERY_ACCESS)),
            ("flush_not_persistent", refused_flush(placement=Placement.PERSISTENT), unharmed(FLUSH_ACCESS)),
            ("atomic_write_wrong_key", refused_atomic_write(key=0x100), unharmed(EVERY_ACCESS)),
            ("atomic_write_out_of_range", refused_atomic_write(offset=ROOM), unharmed(EVERY_ACCESS)),
            ("atomic_write_over_the_top", refused_atomic_write(offset=1 << 63), unharmed(EVERY_ACCESS)),
            ("atomic_write_not_permitted", refused_atomic_write(), unharmed(_LOCAL | _READ | _ATOMIC)),
            ("atomic_write_not_aligned", refused_atomic_write(offset=4, status=_INVALID), unharmed(EVERY_ACCESS)),
            ("atomic_write_of_nothing", refused_atomic_write(size=0, status=_INVALID), unharmed(EVERY_ACCESS)),
            ("atomic_write_too_short", refused_atomic_write(size=4, status=_INVALID), unharmed(EVERY_ACCESS)),
            ("atomic_write_too_long", refused_atomic_write(size=16, status=_INVALID), unharmed(EVERY_ACCESS)),
        )
    ),
    Operation("uc_send", sends(Opcode.SEND), receives(False), _UC, unreliable=True),
    Operation("uc_send_with_immediate", sends(Opcode.SEND_WITH_IMM), receives(True), _UC, unreliable=True),
    Operation("uc_write", writes(Opcode.RDMA_WRITE, True), written(False, True), _UC, unreliable=True),
    Operation("uc_write_with_immediate", writes(Opcode.RDMA_WRITE_WITH_IMM), written(True), _UC, unreliable=True),
    Operation("uc_inline", inline_request, inline_respond, _UC, unreliable=True),
    Operation("uc_both_at_once", uc_both_at_once, uc_both_at_once, _UC, unreliable=True),
    Operation("uc_without_receive", without_receive_request, without_receive_respond, _UC, unreliable=True),
    Operation("uc_small_receive", uc_small_receive_request, uc_small_receive_respond, _UC, unreliable=True),
    Operation("uc_loss", uc_loss_request, uc_loss_respond, _UC_LOSS, unreliable=True, needs_loss=True),
    Operation("uc_refused", uc_refused_request, uc_refused_respond, _UC, unreliable=True),
    *(
        Operation(name, request, respond, _UC_WINDOWS, unreliable=True)
        for name, request, respond in (
            ("uc_window_of_type_1", uc_window_request, uc_window_respond(1)),
            ("uc_window_of_type_2", uc_window_request, uc_window_respond(2)),
            ("uc_zero_based_window", uc_window_request, uc_window_respond(2, zero_based=True)),
            ("uc_bind_without_permission", refused_bind_request, refused_bind_respond(1, _LOCAL)),
            ("uc_bind_not_writable", refused_bind_request, refused_bind_respond(2, Access.MW_BIND)),
            ("uc_bind_beyond", refused_bind_request, refused_bind_respond(2, _BINDABLE, length=101)),
            ("uc_invalidate_region", uc_refused_invalidate, refused_bind_request),
            ("uc_send_with_invalidate", uc_send_with_invalidate, refused_bind_request),
        )
    ),
)
