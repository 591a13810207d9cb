"""Operations that fail or wait at the responder: missing receives, and requests that it refuses.

Each has two functions, as ``operations`` describes.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from interop.ends import Access, Completion, End, Opcode, Param, Status, Work, pattern
from interop.memory import BLANK, GAP, blank, check
from support.clock import pause

__all__ = [
    "ROOM",
    "late_receive_request",
    "late_receive_respond",
    "no_receive_request",
    "no_receive_respond",
    "refused",
    "small_receive_request",
    "small_receive_respond",
    "unaligned",
    "unharmed",
]

#: Seconds by which a receive is late: a fraction of the RNR timer of the connections.
_LATE = 0.2


# -- missing receives -----------------------------------------------------------------------------------------


def late_receive_request(end: End) -> None:
    region = end.region(pattern(5000))
    end.connect()
    end.post(Work(Opcode.SEND, [region.piece(0, 5000)]), Work(Opcode.SEND, [region.piece(10, 10)], 1))
    end.sent(0, 1)
    end.finish(first=True)


def late_receive_respond(end: End) -> None:
    region = end.region(blank((5000, 10)))
    end.connect()
    pause(_LATE, "the request is sent again and again")
    end.post_receive(0, [region.piece(GAP, 5000)])
    end.post_receive(1, [region.piece(5000 + 2 * GAP, 10)])
    end.received(0, 1)
    end.finish(first=False)
    gap, data = BLANK * GAP, pattern(5000)
    check(region, gap + data + gap + data[10:20] + gap, "received")


_IMPATIENT = Param(rnr_retry_count=1)


def no_receive_request(end: End) -> None:
    region = end.region(pattern(100))
    end.connect(param=_IMPATIENT)
    end.post(Work(Opcode.SEND, [region.piece(0, 100)]), Work(Opcode.SEND, [region.piece(0, 100)], 1, flags=0))
    end.sent(0, status=Status.RNR_RETRY_EXC_ERR)
    end.sent(1, status=Status.WR_FLUSH_ERR)
    end.finish(first=True)


def no_receive_respond(end: End) -> None:
    end.connect(param=_IMPATIENT)
    end.finish(first=False)


def _check_one_of(failed: Completion, status: Status, of_rxe: Status) -> None:
    """InfiniBand requires the NAK "invalid request"; rdma_rxe sends "remote operational error"."""
    assert failed.wr_id == 0, failed
    assert failed.status in (status, of_rxe), failed


def small_receive_request(parts: int) -> Callable[[End], None]:
    def request(end: End) -> None:
        size = (parts - 1) * end.device.mtu + 101
        region = end.region(pattern(size))
        end.connect()
        end.post(Work(Opcode.SEND, [region.piece(0, size)]))
        (failed,) = end.completions(True, 1)
        _check_one_of(failed, Status.REM_INV_REQ_ERR, Status.REM_OP_ERR)
        end.finish(first=True)

    return request


def small_receive_respond(parts: int) -> Callable[[End], None]:
    def respond(end: End) -> None:
        size = (parts - 1) * end.device.mtu + 100
        region = end.region(BLANK * (size + GAP))
        end.post_receive(0, [region.piece(0, size)])
        end.post_receive(1, [region.piece(0, size)])
        end.connect()
        (failed,) = end.completions(False, 1)
        _check_one_of(failed, Status.LOC_LEN_ERR, Status.LOC_QP_OP_ERR)
        end.finish(first=False)
        end.received(1, status=Status.WR_FLUSH_ERR)
        assert region.read(size) == BLANK * GAP, "written beyond the receive"

    return respond


# -- refusals -------------------------------------------------------------------------------------------------

ROOM = 4096


def refused(opcode: Opcode, *, offset: int = 0, key: int = 0, size: int = 8) -> Callable[[End], None]:
    """Access memory without the right to; later requests are flushed."""

    def request(end: End) -> None:
        region = end.region(BLANK * size)
        remote = end.connect()
        # Not signaled: an error completes nevertheless.
        work = Work(
            opcode, [region.piece(0, size)], 0, 0, addr=remote.addr + offset, rkey=remote.rkey ^ key, compare_add=1
        )
        end.post(work, Work(Opcode.SEND, [region.piece(0, size)], 1))
        end.sent(0, status=Status.REM_ACCESS_ERR)
        end.sent(1, status=Status.WR_FLUSH_ERR)
        end.finish(first=True)
        check(region, BLANK * size, "after the refused request")

    return request


def unharmed(access: Access, size: int = ROOM) -> Callable[[End], None]:
    def respond(end: End) -> None:
        content = pattern(size)
        region = end.region(content, access)
        received = end.region(BLANK * 100)
        end.post_receive(0, [received.piece(0, 100)])
        end.connect(region)
        end.finish(first=False)
        end.received(0, status=Status.WR_FLUSH_ERR)
        check(region, content, "after the refused request")
        check(received, BLANK * 100, "after the refused request")

    return respond


def unaligned(end: End) -> None:
    """Posting it raises EINVAL, as in rdma-core."""
    region = end.region(bytes(8))
    remote = end.connect()
    work = Work(Opcode.ATOMIC_FETCH_AND_ADD, [region.piece(0, 8)], addr=remote.addr + 4, rkey=remote.rkey)
    refused = 0
    try:
        end.post(work)
    except OSError as error:
        refused = error.errno or 0
    assert refused == errno.EINVAL, refused
    end.finish(first=True)
