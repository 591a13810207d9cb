"""FLUSH and ATOMIC WRITE: that they succeed, and what is refused.

Each operation has two functions, as ``operations`` describes. rdma_rxe permits a FLUSH on the queue pair of a
connection with responder resources, and so do we.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from interop.ends import Access, End, Opcode, Param, Placement, Selectivity, Status, WcOpcode, Work, pattern
from interop.memory import BLANK, EVERY_ACCESS, check, check_lengths, check_opcodes, words_as_bytes

__all__ = [
    "FLUSH_ACCESS",
    "atomic_write_request",
    "atomic_write_respond",
    "counted_request",
    "counted_respond",
    "flush_request",
    "flush_respond",
    "never_persistent",
    "refused_atomic_write",
    "refused_flush",
]

FLUSH_ACCESS = EVERY_ACCESS | Access.FLUSH_GLOBAL
_WRITTEN = 5000
_FEW = Param(responder_resources=2, initiator_depth=2)
_COUNT = 32


def flush_request(end: End) -> None:
    """A write, then FLUSHes of it, of a byte, of nothing, of the end of the region, and of all of it."""
    region = end.region(pattern(_WRITTEN))
    remote = end.connect()
    places = ((0, _WRITTEN), (1, 1), (0, 0), (_WRITTEN, 0), (_WRITTEN - 1, 1))
    end.post(
        Work(Opcode.RDMA_WRITE, [region.piece(0, _WRITTEN)], 0, addr=remote.addr, rkey=remote.rkey),
        *(
            Work(
                Opcode.FLUSH,
                wr_id=number,
                addr=remote.addr + place,
                rkey=remote.rkey,
                length=length,
                placement=Placement.GLOBAL,
            )
            for number, (place, length) in enumerate(places, 1)
        ),
        Work(
            Opcode.FLUSH,
            wr_id=6,
            rkey=remote.rkey,
            placement=Placement.GLOBAL,
            selectivity=Selectivity.MR,
        ),
    )
    completions = end.sent(*range(7))
    check_opcodes(completions[1:], WcOpcode.FLUSH)
    check_lengths(completions[1:], (*(length for _, length in places), 0))
    end.finish(first=True)


def flush_respond(end: End) -> None:
    region = end.region(BLANK * _WRITTEN, FLUSH_ACCESS)
    end.connect(region)
    end.finish(first=False)
    check(region, pattern(_WRITTEN), "after the FLUSHes")


_VALUES = (7, 1 << 63, (1 << 64) - 1, 0x0123456789ABCDEF)


def atomic_write_request(end: End) -> None:
    remote = end.connect()
    numbers = range(len(_VALUES))
    end.post(
        *(
            Work(Opcode.ATOMIC_WRITE, wr_id=i, addr=remote.addr + 16 * i, rkey=remote.rkey, data=words_as_bytes(value))
            for i, value in enumerate(_VALUES)
        )
    )
    completions = end.sent(*numbers)
    check_opcodes(completions, WcOpcode.ATOMIC_WRITE)
    check_lengths(completions, [8] * len(_VALUES))
    end.finish(first=True)


def atomic_write_respond(end: End) -> None:
    region = end.region(BLANK * 64, Access.LOCAL_WRITE | Access.REMOTE_WRITE)
    end.connect(region)
    end.finish(first=False)
    check(region, b"".join(words_as_bytes(value) + BLANK * 8 for value in _VALUES), "after the atomic writes")


def _word(number: int) -> int:
    """A value that does not begin like an Ethertype in memory, as with ``pattern``."""
    return number << 16 | 0xA5A5


def counted_request(end: End) -> None:
    """WRITE, FLUSH, ATOMIC WRITE and FETCH & ADD of one word in turn, more than the responder has resources for."""
    region = end.region(words_as_bytes(*map(_word, range(_COUNT))))
    found = end.region(words_as_bytes(*[0] * 2 * _COUNT))
    remote = end.connect(param=_FEW)
    at, key = remote.addr, remote.rkey
    for i in range(_COUNT):
        end.post(
            Work(Opcode.RDMA_WRITE, [region.piece(8 * i, 8)], 5 * i, addr=at, rkey=key),
            Work(Opcode.ATOMIC_FETCH_AND_ADD, [found.piece(16 * i, 8)], 5 * i + 1, addr=at, rkey=key),
            Work(Opcode.FLUSH, wr_id=5 * i + 2, length=8, placement=Placement.GLOBAL, addr=at, rkey=key),
            Work(Opcode.ATOMIC_WRITE, wr_id=5 * i + 3, data=words_as_bytes(_word(1000 + i)), addr=at, rkey=key),
            Work(Opcode.ATOMIC_FETCH_AND_ADD, [found.piece(16 * i + 8, 8)], 5 * i + 4, addr=at, rkey=key),
        )
        if i % 16 == 15:  # the queue has room for no more
            end.sent(*range(5 * (i - 15), 5 * (i + 1)))
    values = [_word(number) for i in range(_COUNT) for number in (i, 1000 + i)]
    check(found, words_as_bytes(*values), "what was there")
    end.finish(first=True)


def counted_respond(end: End) -> None:
    region = end.region(words_as_bytes(0), FLUSH_ACCESS)
    end.connect(region, param=_FEW)
    end.finish(first=False)
    check(region, words_as_bytes(_word(1000 + _COUNT - 1)), "after the last")


def never_persistent(end: End) -> None:
    """Ordinary memory cannot be registered for FLUSH_PERSISTENT."""
    refused = 0
    try:
        end.region(BLANK * 8, FLUSH_ACCESS | Access.FLUSH_PERSISTENT)
    except OSError as error:
        refused = error.errno or 0
    assert refused == errno.EINVAL, refused
    end.connect()
    end.finish(first=end.request is None)


# -- refusals -------------------------------------------------------------------------------------------------


def _refused(end: End, work: Work, *following: Work, status: Status) -> None:
    """Post it, unless our interface refuses that; its connection ends."""
    refused = 0
    try:
        end.post(work, *following)
    except OSError as error:
        refused = error.errno or 0
    if refused:
        assert (refused, status) == (errno.EINVAL, Status.REM_INV_REQ_ERR)
    else:
        end.sent(work.wr_id, status=status)
        end.sent(*(work.wr_id for work in following), status=Status.WR_FLUSH_ERR)
    end.finish(first=True)


def refused_flush(
    *,
    offset: int = 0,
    length: int = 8,
    key: int = 0,
    placement: int = Placement.GLOBAL,
    selectivity: int = Selectivity.RANGE,
    status: Status = Status.REM_ACCESS_ERR,
) -> Callable[[End], None]:
    def request(end: End) -> None:
        remote = end.connect()
        work = Work(
            Opcode.FLUSH,
            wr_id=0,
            flags=0,
            addr=remote.addr + offset & (1 << 64) - 1,
            rkey=remote.rkey ^ key,
            length=length,
            placement=placement,
            selectivity=selectivity,
        )
        _refused(end, work, Work(Opcode.SEND, [], 1), status=status)

    return request


def refused_atomic_write(
    *, offset: int = 0, key: int = 0, size: int = 8, status: Status = Status.REM_ACCESS_ERR
) -> Callable[[End], None]:
    def request(end: End) -> None:
        remote = end.connect()
        work = Work(
            Opcode.ATOMIC_WRITE,
            wr_id=0,
            flags=0,
            addr=remote.addr + offset & (1 << 64) - 1,
            rkey=remote.rkey ^ key,
            data=pattern(size),
        )
        _refused(end, work, Work(Opcode.SEND, [], 1), status=status)

    return request
