"""Operations of unreliable connections: messages that are dropped, and those after them.

Each has two functions, as ``operations`` describes.
"""

from __future__ import annotations

from interop.ends import QUEUE, Access, End, Opcode, Status, Work, pattern
from interop.memory import BLANK, GAP, check, immediate

__all__ = [
    "uc_both_at_once",
    "uc_loss_request",
    "uc_loss_respond",
    "uc_refused_request",
    "uc_refused_respond",
    "uc_small_receive_request",
    "uc_small_receive_respond",
    "without_receive_request",
    "without_receive_respond",
]


def uc_both_at_once(end: End) -> None:
    """Both ends send at the same time, and find the MTU of the path."""
    count, size = 24, 3000
    region, received = end.region(pattern(count * size)), end.region(BLANK * (count * size))
    for i in range(count):
        end.post_receive(i, [received.piece(i * size, size)])
    end.connect()
    assert 128 << end.attributes().path_mtu == end.device.mtu, end.attributes()
    end.post(*(Work(Opcode.SEND, [region.piece(i * size, size)], i) for i in range(count)))
    end.sent(*range(count))
    end.received(*range(count))
    check(received, pattern(count * size), "received")
    end.finish(first=end.request is None)


def without_receive_request(end: End) -> None:
    """Send until the responder, which posts its receive late, answers."""
    region = end.region(pattern(5000))
    end.post_receive(0, [])
    end.connect()
    for i in range(2):
        end.post(Work(Opcode.SEND, [region.piece(0, 5000)], i))
        end.sent(i)
    end.post(Work(Opcode.RDMA_WRITE, [], 2))
    end.sent(2)
    end.received(0)
    end.post(Work(Opcode.SEND_WITH_IMM, [region.piece(0, 5000)], 3, imm=immediate(3)))
    end.sent(3)
    end.finish(first=True)


def without_receive_respond(end: End) -> None:
    region = end.region(BLANK * 5000)
    end.connect()
    end.post_receive(0, [region.piece(0, 5000)])
    end.post(Work(Opcode.SEND, []))
    end.sent(0)
    # The last message, or one of the first two if it was late.
    (wc,) = end.received(0)
    end.finish(first=False)
    assert (wc.byte_len, wc.extra) in ((5000, immediate(3)), (5000, 0)), wc
    check(region, pattern(5000), "received")


def uc_small_receive_request(end: End) -> None:
    """A message of three packets for a receive of less than two, then short ones."""
    size = 2 * end.device.mtu + 100
    region = end.region(pattern(size))
    end.connect()
    end.post(Work(Opcode.SEND, [region.piece(0, size)], 0))
    end.post(*(Work(Opcode.SEND_WITH_IMM, [region.piece(0, 100)], i, imm=immediate(i)) for i in (1, 2)))
    end.sent(0, 1, 2)
    end.finish(first=True)


def uc_small_receive_respond(end: End) -> None:
    room = end.device.mtu + 100
    region = end.region(BLANK * (2 * room + GAP))
    end.post_receive(0, [region.piece(0, room)])
    end.post_receive(1, [region.piece(room, room)])
    end.connect()
    if end.device.name == "soft":
        found = end.received(0, 1)
        assert [(wc.byte_len, wc.extra) for wc in found] == [(100, immediate(i)) for i in (1, 2)], found
        assert region.read(0, 100) == region.read(room, 100) == pattern(100), "received"
    else:  # rdma_rxe ends the queue pair
        end.received(0, status=Status.LOC_QP_OP_ERR)
        end.received(1, status=Status.WR_FLUSH_ERR)
    end.finish(first=False)
    assert region.read(2 * room) == BLANK * GAP, "written beyond the receive"


#: Messages of seven packets on a link that loses some, and empty ones, of which at least one arrives.
_MESSAGES = 150
_LAST = 20


def uc_loss_request(end: End) -> None:
    size = 6 * end.device.mtu + 100
    region = end.region(pattern(size + _MESSAGES))
    end.connect()
    for i in range(_MESSAGES + _LAST):
        length = size if i < _MESSAGES else 0
        end.post(Work(Opcode.SEND_WITH_IMM, [region.piece(i % _MESSAGES, length)], i, imm=immediate(i)))
        end.sent(i)
    end.finish(first=False)


def uc_loss_respond(end: End) -> None:
    """Whatever arrives is whole, and arrives once, in order. The empty messages end it."""
    size = 6 * end.device.mtu + 100
    region = end.region(BLANK * (QUEUE * size))
    for slot in range(QUEUE):
        end.post_receive(slot, [region.piece(slot * size, size)])
    end.connect()
    numbers: list[int] = []
    while not numbers or numbers[-1] < _MESSAGES:
        slot = len(numbers) % QUEUE
        (wc,) = end.received(slot)
        numbers.append(wc.extra - immediate(0))
        if numbers[-1] < _MESSAGES:
            assert wc.byte_len == size, wc
            expected = pattern(size + _MESSAGES)[numbers[-1] : numbers[-1] + size]
            assert region.read(slot * size, size) == expected, wc
        end.post_receive(slot, [region.piece(slot * size, size)])
    arrived = numbers[:-1]
    assert arrived == sorted(set(arrived)), arrived
    # rdma_rxe drops the message after an incomplete one as well, and a busy machine loses more than the link.
    least = 0.2 if end.device.name == "soft" else 0
    assert least * _MESSAGES < len(arrived) < _MESSAGES, len(arrived)
    end.finish(first=True)


_ROOM = 16_384  # bytes: more than two packets of the largest MTU


def uc_refused_request(end: End) -> None:
    """WRITEs without the right to: they complete, and are dropped."""
    size = 2 * end.device.mtu
    region = end.region(pattern(_ROOM + 1))
    remote = end.connect()
    pieces = [region.piece(0, size)]
    end.post(
        Work(Opcode.RDMA_WRITE, pieces, 0, addr=remote.addr, rkey=remote.rkey ^ 0x100),
        Work(Opcode.RDMA_WRITE, pieces, 1, addr=remote.addr + _ROOM - size + 1, rkey=remote.rkey),
        Work(Opcode.RDMA_WRITE, pieces, 2, addr=remote.addr - 1, rkey=remote.rkey),
        Work(Opcode.RDMA_WRITE, [region.piece(0, _ROOM + 1)], 3, addr=remote.addr, rkey=remote.rkey),
        Work(Opcode.RDMA_WRITE, pieces, 4, addr=(1 << 64) - 8, rkey=remote.rkey),
        Work(Opcode.SEND, [region.piece(0, 7)], 5),
    )
    end.sent(*range(6))
    end.finish(first=True)


def uc_refused_respond(end: End) -> None:
    content = BLANK * _ROOM
    region = end.region(content, Access.LOCAL_WRITE | Access.REMOTE_WRITE)
    received = end.region(BLANK * 100)
    end.post_receive(0, [received.piece(0, 100)])
    end.connect(region)
    (wc,) = end.received(0)
    assert wc.byte_len == 7, wc
    end.finish(first=False)
    check(region, content, "after the refused requests")
