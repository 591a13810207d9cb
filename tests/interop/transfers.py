"""Operations that succeed: messages, RDMA, atomics, and many work requests at a time.

Each has two functions, as ``operations`` describes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from interop.ends import QUEUE, Access, End, Flag, Opcode, Param, Region, WcOpcode, Work, pattern
from interop.memory import (
    BLANK,
    EVERY_ACCESS,
    GAP,
    blank,
    check,
    check_immediates,
    check_lengths,
    check_opcodes,
    filled,
    immediate,
    message_sizes,
    places,
    words_as_bytes,
)

__all__ = [
    "atomic",
    "atomic_target",
    "both_at_once",
    "fence_request",
    "fence_respond",
    "inline_request",
    "inline_respond",
    "last_word_request",
    "last_word_respond",
    "many_request",
    "many_respond",
    "queued_reads_request",
    "queued_reads_respond",
    "read_request",
    "read_respond",
    "receives",
    "scatter_gather_request",
    "scatter_gather_respond",
    "sends",
    "writes",
    "written",
]

# -- messages -------------------------------------------------------------------------------------------------


def sends(opcode: Opcode) -> Callable[[End], None]:
    def request(end: End) -> None:
        sizes = message_sizes(end.device.mtu)
        region = end.region(filled(sizes))
        end.connect()
        numbers = range(len(sizes))
        end.post(
            *(
                Work(opcode, [region.piece(place, size)] if size else [], i, imm=immediate(i))
                for i, place, size in zip(numbers, places(sizes), sizes, strict=True)
            )
        )
        check_opcodes(end.sent(*numbers), WcOpcode.SEND)
        end.finish(first=True)

    return request


def receives(with_immediate: bool) -> Callable[[End], None]:
    def respond(end: End) -> None:
        sizes = message_sizes(end.device.mtu)
        region = end.region(blank(sizes))
        numbers = range(len(sizes))
        for i, place, size in zip(numbers, places(sizes), sizes, strict=True):
            # With room for bytes that should not arrive.
            end.post_receive(i, [region.piece(place, size + GAP)])
        end.connect()
        completions = end.received(*numbers)
        check_opcodes(completions, WcOpcode.RECV)
        check_lengths(completions, sizes)
        check_immediates(completions, with_immediate)
        end.finish(first=False)
        check(region, filled(sizes), "received")

    return respond


# -- RDMA -----------------------------------------------------------------------------------------------------


def writes(opcode: Opcode, then_send: bool = False) -> Callable[[End], None]:
    """WRITEs of all sizes; ``then_send``: and an empty message, which tells an unreliable responder that they came."""

    def request(end: End) -> None:
        sizes = message_sizes(end.device.mtu)
        region = end.region(filled(sizes))
        remote = end.connect()
        numbers = range(len(sizes))
        end.post(
            *(
                Work(
                    opcode,
                    [region.piece(place, size)] if size else [],
                    i,
                    imm=immediate(i),
                    addr=remote.addr + place,
                    rkey=remote.rkey,
                )
                for i, place, size in zip(numbers, places(sizes), sizes, strict=True)
            )
        )
        check_opcodes(end.sent(*numbers), WcOpcode.RDMA_WRITE)
        if then_send:
            end.post(Work(Opcode.SEND, [], len(sizes)))
            end.sent(len(sizes))
        end.finish(first=True)

    return request


def written(with_immediate: bool, then_send: bool = False) -> Callable[[End], None]:
    def respond(end: End) -> None:
        sizes = message_sizes(end.device.mtu)
        region = end.region(blank(sizes), Access.LOCAL_WRITE | Access.REMOTE_WRITE)
        numbers = range(len(sizes)) if with_immediate else ()
        for i in numbers:
            end.post_receive(i, [])
        if then_send:
            end.post_receive(len(sizes), [])
        end.connect(region)
        if with_immediate:
            completions = end.received(*numbers)
            check_opcodes(completions, WcOpcode.RECV_RDMA_WITH_IMM)
            check_lengths(completions, sizes)
            check_immediates(completions, True)
        if then_send:
            end.received(len(sizes))
        end.finish(first=False)
        check(region, filled(sizes), "written")

    return respond


def read_request(end: End) -> None:
    sizes = message_sizes(end.device.mtu)
    region = end.region(blank(sizes))
    remote = end.connect()
    numbers = range(len(sizes))
    end.post(
        *(
            Work(
                Opcode.RDMA_READ,
                [region.piece(place, size)] if size else [],
                i,
                addr=remote.addr + place,
                rkey=remote.rkey,
            )
            for i, place, size in zip(numbers, places(sizes), sizes, strict=True)
        )
    )
    completions = end.sent(*numbers)
    check_opcodes(completions, WcOpcode.RDMA_READ)
    check(region, filled(sizes), "read")
    end.finish(first=True)


def read_respond(end: End) -> None:
    sizes = message_sizes(end.device.mtu)
    region = end.region(filled(sizes), Access.LOCAL_WRITE | Access.REMOTE_READ)
    end.connect(region)
    end.finish(first=False)
    check(region, filled(sizes), "what was read")


# -- atomics --------------------------------------------------------------------------------------------------

_WORDS = (7, 1 << 63, (1 << 64) - 1, 0x0123456789ABCDEF)


def atomic(opcode: Opcode, wc_opcode: WcOpcode, operands: Sequence[tuple[int, int]]) -> Callable[[End], None]:
    """One atomic on each word; the operands are (compare or add, swap)."""

    def request(end: End) -> None:
        region = end.region(words_as_bytes(*[0] * 4))
        remote = end.connect()
        end.post(
            *(
                Work(
                    opcode,
                    [region.piece(8 * i, 8)],
                    i,
                    addr=remote.addr + 8 * i,
                    rkey=remote.rkey,
                    compare_add=compare_add,
                    swap=swap,
                )
                for i, (compare_add, swap) in enumerate(operands)
            )
        )
        check_opcodes(end.sent(*range(4)), wc_opcode)
        check(region, words_as_bytes(*_WORDS), "what was there")
        end.finish(first=True)

    return request


def atomic_target(*after: int) -> Callable[[End], None]:
    def respond(end: End) -> None:
        region = end.region(words_as_bytes(*_WORDS), Access.LOCAL_WRITE | Access.REMOTE_ATOMIC)
        end.connect(region)
        end.finish(first=False)
        check(region, words_as_bytes(*after), "after the atomics")

    return respond


# -- scatter and gather ---------------------------------------------------------------------------------------

_GATHERED = (13, 1000, 1, 2049)
_SCATTERED = (7, 2048, 500, 508)


def scatter_gather_request(end: End) -> None:
    source = end.region(filled(_GATHERED))
    target = end.region(blank(_SCATTERED))
    remote = end.connect()
    gathered = [source.piece(*part) for part in zip(places(_GATHERED), _GATHERED, strict=True)]
    scattered = [target.piece(*part) for part in zip(places(_SCATTERED), _SCATTERED, strict=True)]
    end.post(
        Work(Opcode.SEND, gathered, 0),
        Work(Opcode.RDMA_WRITE, gathered, 1, addr=remote.addr, rkey=remote.rkey),
        Work(Opcode.RDMA_READ, scattered, 2, addr=remote.addr, rkey=remote.rkey),
    )
    end.sent(0, 1, 2)
    _check_scattered(target, "read back")
    end.finish(first=True)


def scatter_gather_respond(end: End) -> None:
    region = end.region(BLANK * sum(_GATHERED), EVERY_ACCESS)
    received = end.region(blank(_SCATTERED))
    end.post_receive(0, [received.piece(*part) for part in zip(places(_SCATTERED), _SCATTERED, strict=True)])
    end.connect(region)
    end.received(0)
    end.finish(first=False)
    _check_scattered(received, "received")
    check(region, _gathered(), "written")


def _gathered() -> bytes:
    return b"".join(pattern(size, size) for size in _GATHERED)


def _check_scattered(region: Region, what: str) -> None:
    memory, data = bytearray(blank(_SCATTERED)), _gathered()
    for place, size in zip(places(_SCATTERED), _SCATTERED, strict=True):
        memory[place : place + size], data = data[:size], data[size:]
    check(region, bytes(memory), what)


def fence_request(end: End) -> None:
    """Send what has just been read.

    A fenced READ is not tested: when rdma_rxe has to retransmit one, it waits for that READ itself.
    """
    region = end.region(BLANK * 5000)
    remote = end.connect()
    pieces = [region.piece(0, 5000)]
    end.post(
        Work(Opcode.RDMA_READ, pieces, 0, addr=remote.addr, rkey=remote.rkey),
        Work(Opcode.SEND, pieces, 1, Flag.SIGNALED | Flag.FENCE),
    )
    end.sent(0, 1)
    end.finish(first=True)


def fence_respond(end: End) -> None:
    region = end.region(pattern(5000), Access.LOCAL_WRITE | Access.REMOTE_READ)
    received = end.region(BLANK * 5000)
    end.post_receive(0, [received.piece(0, 5000)])
    end.connect(region)
    end.received(0)
    end.finish(first=False)
    check(received, pattern(5000), "received")


# -- inline ---------------------------------------------------------------------------------------------------

_INLINE = (0, 1, 3, 64, 200)


def inline_request(end: End) -> None:
    region = end.region(filled(_INLINE))
    remote = end.connect()
    for i, (place, size) in enumerate(zip(places(_INLINE), _INLINE, strict=True)):
        pieces = [region.piece(place, size)] if size else []
        end.post(
            Work(Opcode.SEND, pieces, 2 * i, Flag.SIGNALED | Flag.INLINE),
            Work(
                Opcode.RDMA_WRITE,
                pieces,
                2 * i + 1,
                Flag.SIGNALED | Flag.INLINE,
                addr=remote.addr + place,
                rkey=remote.rkey,
            ),
        )
    # An inline request has copied it.
    region.write(bytes(region.length))
    end.sent(*range(2 * len(_INLINE)))
    end.finish(first=True)


def inline_respond(end: End) -> None:
    received, written = end.region(blank(_INLINE)), end.region(blank(_INLINE), EVERY_ACCESS)
    for i, (place, size) in enumerate(zip(places(_INLINE), _INLINE, strict=True)):
        end.post_receive(i, [received.piece(place, size)])
    end.connect(written)
    check_lengths(end.received(*range(len(_INLINE))), _INLINE)
    end.finish(first=False)
    check(received, filled(_INLINE), "received")
    check(written, filled(_INLINE), "written")


# -- full queues ----------------------------------------------------------------------------------------------

_PART = 300


def many_request(end: End) -> None:
    """A full queue of each operation; every sixteenth request is signaled."""
    region = end.region(pattern(QUEUE * _PART))
    target = end.region(BLANK * (QUEUE * _PART))
    remote = end.connect()
    signaled = range(15, QUEUE, 16)
    for opcode, memory in ((Opcode.SEND, region), (Opcode.RDMA_WRITE, region), (Opcode.RDMA_READ, target)):
        end.post(
            *(
                Work(
                    opcode,
                    [memory.piece(i * _PART, _PART)],
                    i,
                    Flag.SIGNALED if i in signaled else 0,
                    addr=remote.addr + i * _PART,
                    rkey=remote.rkey,
                )
                for i in range(QUEUE)
            )
        )
        end.sent(*signaled)
    check(target, pattern(QUEUE * _PART), "read back")
    end.finish(first=True)


def many_respond(end: End) -> None:
    received = end.region(BLANK * (QUEUE * _PART))
    written = end.region(BLANK * (QUEUE * _PART), EVERY_ACCESS)
    for i in range(QUEUE):
        end.post_receive(i, [received.piece(i * _PART, _PART)])
    end.connect(written)
    end.received(*range(QUEUE))
    end.finish(first=False)
    check(received, pattern(QUEUE * _PART), "received")
    check(written, pattern(QUEUE * _PART), "written")


_FEW = Param(responder_resources=2, initiator_depth=2)
_READS = 32


def queued_reads_request(end: End) -> None:
    """More READs, with atomics between them, than the responder has resources for."""
    size = 2 * end.device.mtu + 100
    region = end.region(BLANK * (_READS * size))
    before = end.region(words_as_bytes(*[0] * _READS))
    remote = end.connect(param=_FEW)
    works = []
    for i in range(_READS):
        works.append(
            Work(
                Opcode.RDMA_READ,
                [region.piece(i * size, size)],
                2 * i,
                addr=remote.addr + 8 + i * size,
                rkey=remote.rkey,
            )
        )
        works.append(
            Work(
                Opcode.ATOMIC_FETCH_AND_ADD,
                [before.piece(8 * i, 8)],
                2 * i + 1,
                addr=remote.addr,
                rkey=remote.rkey,
                compare_add=1,
            )
        )
    end.post(*works)
    end.sent(*range(2 * _READS))
    check(region, pattern(_READS * size), "read")
    check(before, words_as_bytes(*range(_READS)), "counted")
    end.finish(first=True)


def queued_reads_respond(end: End) -> None:
    size = 2 * end.device.mtu + 100
    region = end.region(words_as_bytes(0) + pattern(_READS * size), EVERY_ACCESS)
    end.connect(region, param=_FEW)
    end.finish(first=False)
    check(region, words_as_bytes(_READS) + pattern(_READS * size), "read and counted")


def both_at_once(end: End) -> None:
    """Both ends send and read at the same time."""
    count, size = 48, 3000
    memory, numbers = pattern(count * size), range(count)
    source = end.region(memory, Access.LOCAL_WRITE | Access.REMOTE_READ)
    received, read = end.region(BLANK * len(memory)), end.region(BLANK * len(memory))
    for i in numbers:
        end.post_receive(i, [received.piece(i * size, size)])
    end.post_receive(count, [])
    remote = end.connect(source)
    works = []
    for i in numbers:
        at = i * size
        works.append(Work(Opcode.SEND, [source.piece(at, size)], 2 * i))
        works.append(Work(Opcode.RDMA_READ, [read.piece(at, size)], 2 * i + 1, addr=remote.addr + at, rkey=remote.rkey))
    end.post(*works)
    end.sent(*range(2 * count))
    end.received(*numbers)
    check(received, memory, "received")
    check(read, memory, "read")
    # Tells the peer that this end has finished: the peer may still be reading.
    end.post(Work(Opcode.SEND, [], 2 * count))
    end.sent(2 * count)
    end.received(count)
    end.finish(first=end.request is None)


def last_word_request(end: End) -> None:
    region = end.region(pattern(5000))
    end.connect()
    end.post(Work(Opcode.SEND, [region.piece(0, 5000)]))
    end.sent(0)
    end.finish(first=False)


def last_word_respond(end: End) -> None:
    """Disconnect as soon as the last message has arrived: it must still be acknowledged."""
    region = end.region(BLANK * 5000)
    end.post_receive(0, [region.piece(0, 5000)])
    end.connect()
    end.received(0)
    end.finish(first=True)
    check(region, pattern(5000), "received")
