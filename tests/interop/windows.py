"""Operations through memory windows, and on them.

Each has two functions, as ``operations`` describes. The end that responds binds the windows; the other end uses them.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable
from typing import Any

from interop.ends import Access, End, Flag, Opcode, Remote, Status, WcFlag, Work, pattern
from interop.memory import BLANK, GAP, check, words_as_bytes

__all__ = [
    "beyond_window",
    "foreign_invalidate_request",
    "foreign_invalidate_respond",
    "invalidate_request",
    "invalidate_respond",
    "refused_bind_request",
    "refused_bind_respond",
    "uc_refused_invalidate",
    "uc_send_with_invalidate",
    "uc_window_request",
    "uc_window_respond",
    "window_request",
    "window_respond",
    "window_unharmed",
]

_LOCAL, _READ, _WRITE, _ATOMIC = Access.LOCAL_WRITE, Access.REMOTE_READ, Access.REMOTE_WRITE, Access.REMOTE_ATOMIC
#: A region with windows needs no remote access of its own.
_BINDABLE = Access.LOCAL_WRITE | Access.MW_BIND
_EVERY = _READ | _WRITE | _ATOMIC
_FENCED = Flag.SIGNALED | Flag.FENCE
_SIZE = 5000
_TOLD = struct.Struct("!QQ")


def _connect_and_hear(end: End, receives: int = 1) -> Remote:
    """Connect, and return what the other end tells with :func:`_tell`; ``receives``: how many are posted, for all."""
    told = end.region(bytes(_TOLD.size))
    end.post_receive(0, [told.piece(0, _TOLD.size)])
    for number in range(1, receives):
        end.post_receive(number, [])
    end.connect()
    end.received(0)
    addr, key = _TOLD.unpack(told.read())
    return Remote(addr, key, _SIZE)


def _tell(end: End, addr: int, key: int) -> None:
    message = end.region(_TOLD.pack(addr, key))
    # Not signaled: a request of the peer that is refused may overtake the ACK, and flushes it then.
    end.post(Work(Opcode.SEND, [message.piece(0, _TOLD.size)], 1, 0))


# -- through a window -----------------------------------------------------------------------------------------


def window_request(end: End) -> None:
    """Write, read and count through a window; the same is refused once it is closed."""
    local, read, word = end.region(pattern(_SIZE)), end.region(bytes(_SIZE)), end.region(bytes(8))
    remote = _connect_and_hear(end, receives=2)
    target: dict[str, Any] = {"addr": remote.addr, "rkey": remote.rkey}
    end.post(
        Work(Opcode.RDMA_WRITE, [local.piece(0, _SIZE)], 0, **target),
        Work(Opcode.RDMA_READ, [read.piece(0, _SIZE)], 1, **target),
        Work(Opcode.ATOMIC_FETCH_AND_ADD, [word.piece(0, 8)], 2, _FENCED, compare_add=7, **target),
    )
    end.sent(0, 1, 2)
    check(read, pattern(_SIZE), "read")
    check(word, pattern(8), "what was there")
    end.post(Work(Opcode.SEND, [], 3))
    end.sent(3)
    end.received(1)
    end.post(Work(Opcode.RDMA_WRITE, [local.piece(1, 8)], 4, **target))
    end.sent(4, status=Status.REM_ACCESS_ERR)
    end.finish(first=True)


def window_respond(mw_type: int, *, zero_based: bool = False) -> Callable[[End], None]:
    """Bind a window, twice, for two rounds of nothing and of everything; then take its region away."""

    def respond(end: End) -> None:
        region = end.region(BLANK * (_SIZE + 2 * GAP), _BINDABLE)
        end.post_receive(0, [])
        end.connect()
        window = end.window(mw_type)
        first = end.bind(window, region, 0, 1, _READ)
        if mw_type == 2:
            end.post(Work(Opcode.LOCAL_INV, [], 0, invalidate=first))
            end.sent(0)
        key = end.bind(window, region, GAP, _SIZE, _EVERY | (Access.ZERO_BASED if zero_based else Access(0)))
        assert (key ^ first) & ~0xFF == 0, f"{first:#x} and {key:#x}"
        _tell(end, 0 if zero_based else region.addr + GAP, key)
        end.received(0)
        if mw_type == 2:
            end.post(Work(Opcode.LOCAL_INV, [], 0, invalidate=key))
            end.sent(0)
        else:
            end.bind(window, region, 0, 0, 0)
        end.post(Work(Opcode.SEND, [], 2))  # its ACK may be overtaken, as in _tell
        end.finish(first=False)
        (before,) = struct.unpack("=Q", pattern(8))
        gap = BLANK * GAP
        check(region, gap + words_as_bytes(before + 7) + pattern(_SIZE)[8:] + gap, "written through the window")

    return respond


def beyond_window(opcode: Opcode, *, offset: int = 0, key: int = 0) -> Callable[[End], None]:
    """Access memory beyond a window, or with a key that differs; a SEND after that is flushed."""

    def request(end: End) -> None:
        local = end.region(BLANK * 8)
        remote = _connect_and_hear(end)
        target: dict[str, Any] = {"addr": remote.addr + offset, "rkey": remote.rkey ^ key}
        end.post(Work(opcode, [local.piece(0, 8)], 0, **target), Work(Opcode.SEND, [], 1))
        end.sent(0, status=Status.REM_ACCESS_ERR)
        end.sent(1, status=Status.WR_FLUSH_ERR)
        end.finish(first=True)
        check(local, BLANK * 8, "after the refused request")

    return request


def window_unharmed(mw_type: int, access: Access = _EVERY) -> Callable[[End], None]:
    """The window is the whole region: rdma_rxe compares a range with the region's end only."""

    def respond(end: End) -> None:
        region = end.region(pattern(_SIZE), _BINDABLE)
        end.connect()
        key = end.bind(end.window(mw_type), region, 0, _SIZE, access)
        _tell(end, region.addr, key)
        end.finish(first=False)
        check(region, pattern(_SIZE), "after the refused request")

    return respond


# -- on a window ----------------------------------------------------------------------------------------------


def invalidate_request(end: End) -> None:
    region = end.region(pattern(100))
    remote = _connect_and_hear(end, receives=2)
    target: dict[str, Any] = {"addr": remote.addr, "rkey": remote.rkey}
    end.post(
        Work(Opcode.RDMA_WRITE, [region.piece(0, 100)], 0, **target),
        Work(Opcode.SEND_WITH_INV, [region.piece(0, 7)], 1, invalidate=remote.rkey),
    )
    end.sent(0, 1)
    # rdma_rxe may handle the refused WRITE before an earlier ACK, and then flushes what the ACK completes.
    end.received(1)
    end.post(Work(Opcode.RDMA_WRITE, [region.piece(1, 99)], 2, **target))
    end.sent(2, status=Status.REM_ACCESS_ERR)
    end.finish(first=True)


def invalidate_respond(end: End) -> None:
    region = end.region(BLANK * 100, _BINDABLE)
    received = end.region(BLANK * 7)
    end.post_receive(0, [received.piece(0, 7)])
    end.connect()
    key = end.bind(end.window(2), region, 0, 100, _WRITE)
    _tell(end, region.addr, key)
    (completion,) = end.received(0)
    assert completion.flags & WcFlag.WITH_INV, completion
    assert completion.extra == key, f"{completion}, and the key is {key:#x}"
    end.post(Work(Opcode.SEND, [], 2))
    end.finish(first=False)
    check(region, pattern(100), "written before the key was invalid")
    check(received, pattern(7), "received")


def foreign_invalidate_request(end: End) -> None:
    """Invalidate a key that may not be invalidated. rdma_rxe acknowledges the SEND, and ends its queue pair."""
    remote = _connect_and_hear(end)
    end.post(Work(Opcode.SEND_WITH_INV, [], 0, invalidate=remote.rkey))
    (failed,) = end.completions(True, 1)
    assert failed.status in (Status.REM_ACCESS_ERR, Status.SUCCESS), failed
    end.finish(first=True)


def foreign_invalidate_respond(mw_type: int) -> Callable[[End], None]:
    """The key is that of a region, or of a window of type 1."""

    def respond(end: End) -> None:
        region = end.region(BLANK * 100, _BINDABLE | _READ)
        end.post_receive(0, [])
        end.connect()
        key = end.bind(end.window(mw_type), region, 0, 100, _READ) if mw_type else region.rkey
        _tell(end, region.addr, key)
        end.received(0, status=Status.REM_INV_REQ_ERR)
        end.finish(first=False)

    return respond


def refused_bind_request(end: End) -> None:
    end.connect()
    end.finish(first=False)


def refused_bind_respond(mw_type: int, access: Access, *, length: int = 100) -> Callable[[End], None]:
    """A bind that is not allowed fails, and what follows is flushed. rdma_rxe reports the bind as flushed, too."""

    def respond(end: End) -> None:
        region = end.region(BLANK * 100, access)
        end.connect()
        end.post_bind(end.window(mw_type), region, 0, length, _WRITE)
        end.post(Work(Opcode.SEND, [], 1))
        (failed,) = end.completions(True, 1)
        possible = (Status.MW_BIND_ERR,) if end.device.name == "soft" else (Status.MW_BIND_ERR, Status.WR_FLUSH_ERR)
        assert failed.wr_id == 0, failed
        assert failed.status in possible, failed
        end.sent(1, status=Status.WR_FLUSH_ERR)
        end.finish(first=True)

    return respond


# -- on an unreliable connection -------------------------------------------------------------------------------


def uc_window_request(end: End) -> None:
    """Write through a window; what is written once it is closed, or beside it, completes and is dropped."""
    local = end.region(pattern(_SIZE + 1))
    remote = _connect_and_hear(end, receives=2)
    target: dict[str, Any] = {"addr": remote.addr, "rkey": remote.rkey}
    end.post(
        Work(Opcode.RDMA_WRITE, [local.piece(1, 8)], 0, addr=remote.addr, rkey=remote.rkey ^ 1),
        Work(Opcode.RDMA_WRITE, [local.piece(1, _SIZE)], 1, addr=remote.addr + _SIZE + GAP, rkey=remote.rkey),
        Work(Opcode.RDMA_WRITE, [local.piece(1, 8)], 2, addr=1 << 63, rkey=remote.rkey),
        Work(Opcode.RDMA_WRITE, [local.piece(0, _SIZE)], 3, **target),
        Work(Opcode.SEND, [], 4),
    )
    end.sent(*range(5))
    end.received(1)
    end.post(Work(Opcode.RDMA_WRITE, [local.piece(1, _SIZE)], 5, **target), Work(Opcode.SEND, [], 6))
    end.sent(5, 6)
    end.finish(first=True)


def uc_window_respond(mw_type: int, *, zero_based: bool = False) -> Callable[[End], None]:
    """Bind a window, twice, to the middle of a region; then take its region away.

    rdma_rxe has no LOCAL_INV on these connections: its window of type 2 is bound once, and stays bound.
    """

    def respond(end: End) -> None:
        region = end.region(BLANK * (_SIZE + 2 * GAP), _BINDABLE)
        for i in range(2):
            end.post_receive(i, [])
        end.connect()
        window = end.window(mw_type)
        stays_bound = mw_type == 2 and end.device.name != "soft"
        if not stays_bound:
            first = end.bind(window, region, 0, 1, _READ)
            if mw_type == 2:
                end.post(Work(Opcode.LOCAL_INV, [], 0, invalidate=first))
                end.sent(0)
        key = end.bind(window, region, GAP, _SIZE, _WRITE | (Access.ZERO_BASED if zero_based else Access(0)))
        _tell(end, 0 if zero_based else region.addr + GAP, key)
        end.received(0)
        gap = BLANK * GAP
        check(region, gap + pattern(_SIZE) + gap, "written through the window")
        if mw_type == 1:
            end.bind(window, region, 0, 0, 0)
        elif not stays_bound:
            end.post(Work(Opcode.LOCAL_INV, [], 0, invalidate=key))
            end.sent(0)
        end.post(Work(Opcode.SEND, [], 1))
        end.sent(1)
        end.received(1)
        end.finish(first=False)
        last = pattern(_SIZE + 1)[1:] if stays_bound else pattern(_SIZE)
        check(region, gap + last + gap, "after the last WRITE")

    return respond


def uc_refused_invalidate(end: End) -> None:
    """A region's key is not invalidated, and what follows is flushed."""
    region = end.region(BLANK * 100, _BINDABLE)
    end.connect()
    end.post(Work(Opcode.LOCAL_INV, [], 0, invalidate=region.rkey), Work(Opcode.SEND, [], 1))
    (failed,) = end.completions(True, 1)
    possible = (Status.LOC_QP_OP_ERR,) if end.device.name == "soft" else (Status.LOC_QP_OP_ERR, Status.WR_FLUSH_ERR)
    assert failed.wr_id == 0, failed
    assert failed.status in possible, failed
    end.sent(1, status=Status.WR_FLUSH_ERR)
    end.finish(first=True)


def uc_send_with_invalidate(end: End) -> None:
    """The service has no such message. rdma_rxe takes the request, and ends its queue pair."""
    end.connect()
    request = Work(Opcode.SEND_WITH_INV, [], 0, invalidate=1)
    if end.device.name == "soft":
        code = 0
        try:
            end.post(request)
        except OSError as error:
            code = error.errno or 0
        assert code == errno.EINVAL, f"SEND_WITH_INV is posted: {code}"
    else:
        end.post(request)
        (failed,) = end.completions(True, 1)
        assert failed.status in (Status.LOC_QP_OP_ERR, Status.WR_FLUSH_ERR), failed
    end.finish(first=True)
