"""Operations between two devices, each on a connection of its own, with every byte checked at both ends.

An operation has two functions, one for each end: who *requests* posts the work, who *responds* has the memory and the
receives. Either may be the end that connects. ``peer`` says how they are run.
"""

from __future__ import annotations

import errno
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from interop.ends import (
    QUEUE,
    Access,
    Completion,
    End,
    EventKind,
    Flag,
    Opcode,
    Param,
    Region,
    Status,
    WcFlag,
    WcOpcode,
    Work,
    pattern,
)

__all__ = ["OPERATIONS", "Operation"]

#: What memory is filled with where nothing should be written.
_BLANK = b"\xa5"
#: Bytes around what is written.
_GAP = 8
_EVERYTHING = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC
#: Seconds that a receive comes too late, a fraction of the RNR timer that connections have.
_LATE = 0.2


def _sizes(mtu: int) -> tuple[int, ...]:
    return (0, 1, mtu - 1, mtu, mtu + 1, 3 * mtu + 5, 100_000)


def _places(sizes: Sequence[int]) -> list[int]:
    """Where things of these sizes start, with a gap around each."""
    places = [_GAP]
    for size in sizes:
        places.append(places[-1] + size + _GAP)
    return places[:-1]


def _filled(sizes: Sequence[int], salt: int = 0) -> bytes:
    """Memory with a pattern in each of these places."""
    memory = bytearray(_blank(sizes))
    for place, size in zip(_places(sizes), sizes, strict=True):
        memory[place : place + size] = pattern(size, salt + size)
    return bytes(memory)


def _blank(sizes: Sequence[int]) -> bytes:
    return _BLANK * (sum(sizes) + _GAP * (len(sizes) + 1))


def _check(region: Region, expected: bytes, what: str) -> None:
    found = region.read()
    if found != expected:
        wrong = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
        raise AssertionError(f"{what}: {len(wrong)} of {len(expected)} bytes are wrong, from {wrong[0]} to {wrong[-1]}")


def _check_opcodes(completions: Sequence[Completion], opcode: WcOpcode) -> None:
    assert {wc.opcode for wc in completions} == {opcode}, completions


# -- messages -------------------------------------------------------------------------------------------------


def _sends(opcode: Opcode) -> Callable[[End], None]:
    def request(end: End) -> None:
        sizes = _sizes(end.device.mtu)
        region = end.region(_filled(sizes))
        end.connect()
        numbers = range(len(sizes))
        end.post(
            *(
                Work(opcode, [region.piece(place, size)] if size else [], i, imm=_immediate(i))
                for i, place, size in zip(numbers, _places(sizes), sizes, strict=True)
            )
        )
        _check_opcodes(end.sent(*numbers), WcOpcode.SEND)
        end.finish(first=True)

    return request


def _receives(with_immediate: bool) -> Callable[[End], None]:
    def respond(end: End) -> None:
        sizes = _sizes(end.device.mtu)
        region = end.region(_blank(sizes))
        numbers = range(len(sizes))
        for i, place, size in zip(numbers, _places(sizes), sizes, strict=True):
            # With room for what should not come.
            end.post_receive(i, [region.piece(place, size + _GAP)])
        end.connect()
        completions = end.received(*numbers)
        _check_opcodes(completions, WcOpcode.RECV)
        _check_lengths(completions, sizes)
        _check_immediates(completions, with_immediate)
        end.finish(first=False)
        _check(region, _filled(sizes), "received")

    return respond


def _immediate(i: int) -> int:
    return 0xDEAD0000 + i


def _check_lengths(completions: Sequence[Completion], sizes: Sequence[int]) -> None:
    lengths = [wc.byte_len for wc in completions]
    assert lengths == list(sizes), f"lengths {lengths}, not {sizes}"


def _check_immediates(completions: Sequence[Completion], expected: bool) -> None:
    found = [wc.extra if wc.flags & WcFlag.WITH_IMM else None for wc in completions]
    assert found == [_immediate(i) if expected else None for i in range(len(found))], found


# -- RDMA -----------------------------------------------------------------------------------------------------


def _writes(opcode: Opcode) -> Callable[[End], None]:
    def request(end: End) -> None:
        sizes = _sizes(end.device.mtu)
        region = end.region(_filled(sizes))
        remote = end.connect()
        numbers = range(len(sizes))
        end.post(
            *(
                Work(
                    opcode,
                    [region.piece(place, size)] if size else [],
                    i,
                    imm=_immediate(i),
                    addr=remote.addr + place,
                    rkey=remote.rkey,
                )
                for i, place, size in zip(numbers, _places(sizes), sizes, strict=True)
            )
        )
        _check_opcodes(end.sent(*numbers), WcOpcode.RDMA_WRITE)
        end.finish(first=True)

    return request


def _written(with_immediate: bool) -> Callable[[End], None]:
    def respond(end: End) -> None:
        sizes = _sizes(end.device.mtu)
        region = end.region(_blank(sizes), Access.LOCAL_WRITE | Access.REMOTE_WRITE)
        numbers = range(len(sizes)) if with_immediate else ()
        for i in numbers:
            end.post_receive(i, [])
        end.connect(region)
        if with_immediate:
            completions = end.received(*numbers)
            _check_opcodes(completions, WcOpcode.RECV_RDMA_WITH_IMM)
            _check_lengths(completions, sizes)
            _check_immediates(completions, True)
        end.finish(first=False)
        _check(region, _filled(sizes), "written")

    return respond


def _read_request(end: End) -> None:
    sizes = _sizes(end.device.mtu)
    region = end.region(_blank(sizes))
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
            for i, place, size in zip(numbers, _places(sizes), sizes, strict=True)
        )
    )
    completions = end.sent(*numbers)
    _check_opcodes(completions, WcOpcode.RDMA_READ)
    _check(region, _filled(sizes), "read")
    end.finish(first=True)


def _read_respond(end: End) -> None:
    sizes = _sizes(end.device.mtu)
    region = end.region(_filled(sizes), Access.LOCAL_WRITE | Access.REMOTE_READ)
    end.connect(region)
    end.finish(first=False)
    _check(region, _filled(sizes), "what was read")


# -- atomics --------------------------------------------------------------------------------------------------

_WORD = struct.Struct("=Q")
_WORDS = (7, 1 << 63, (1 << 64) - 1, 0x0123456789ABCDEF)


def _memory(*words: int) -> bytes:
    return b"".join(map(_WORD.pack, words))


def _atomic(opcode: Opcode, wc_opcode: WcOpcode, operands: Sequence[tuple[int, int]]) -> Callable[[End], None]:
    """Do one on each word; operands are (compare or add, swap)."""

    def request(end: End) -> None:
        region = end.region(_memory(*[0] * 4))
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
        _check_opcodes(end.sent(*range(4)), wc_opcode)
        _check(region, _memory(*_WORDS), "what was there")
        end.finish(first=True)

    return request


def _atomic_target(*after: int) -> Callable[[End], None]:
    def respond(end: End) -> None:
        region = end.region(_memory(*_WORDS), Access.LOCAL_WRITE | Access.REMOTE_ATOMIC)
        end.connect(region)
        end.finish(first=False)
        _check(region, _memory(*after), "after the atomics")

    return respond


# -- scatter and gather ---------------------------------------------------------------------------------------

_GATHERED = (13, 1000, 1, 2049)
_SCATTERED = (7, 2048, 500, 508)


def _scatter_gather_request(end: End) -> None:
    source = end.region(_filled(_GATHERED))
    target = end.region(_blank(_SCATTERED))
    remote = end.connect()
    gathered = [source.piece(*part) for part in zip(_places(_GATHERED), _GATHERED, strict=True)]
    scattered = [target.piece(*part) for part in zip(_places(_SCATTERED), _SCATTERED, strict=True)]
    end.post(
        Work(Opcode.SEND, gathered, 0),
        Work(Opcode.RDMA_WRITE, gathered, 1, addr=remote.addr, rkey=remote.rkey),
        Work(Opcode.RDMA_READ, scattered, 2, addr=remote.addr, rkey=remote.rkey),
    )
    end.sent(0, 1, 2)
    _check_scattered(target, "read back")
    end.finish(first=True)


def _scatter_gather_respond(end: End) -> None:
    region = end.region(_BLANK * sum(_GATHERED), _EVERYTHING)
    received = end.region(_blank(_SCATTERED))
    end.post_receive(0, [received.piece(*part) for part in zip(_places(_SCATTERED), _SCATTERED, strict=True)])
    end.connect(region)
    end.received(0)
    end.finish(first=False)
    _check_scattered(received, "received")
    _check(region, _gathered(), "written")


def _gathered() -> bytes:
    return b"".join(pattern(size, size) for size in _GATHERED)


def _check_scattered(region: Region, what: str) -> None:
    memory, data = bytearray(_blank(_SCATTERED)), _gathered()
    for place, size in zip(_places(_SCATTERED), _SCATTERED, strict=True):
        memory[place : place + size], data = data[:size], data[size:]
    _check(region, bytes(memory), what)


def _fence_request(end: End) -> None:
    """Send what has just been read. (A fenced READ is nothing to try: rdma_rxe never sends one again, as it then
    waits for itself.)"""
    region = end.region(_BLANK * 5000)
    remote = end.connect()
    pieces = [region.piece(0, 5000)]
    end.post(
        Work(Opcode.RDMA_READ, pieces, 0, addr=remote.addr, rkey=remote.rkey),
        Work(Opcode.SEND, pieces, 1, Flag.SIGNALED | Flag.FENCE),
    )
    end.sent(0, 1)
    end.finish(first=True)


def _fence_respond(end: End) -> None:
    region = end.region(pattern(5000), Access.LOCAL_WRITE | Access.REMOTE_READ)
    received = end.region(_BLANK * 5000)
    end.post_receive(0, [received.piece(0, 5000)])
    end.connect(region)
    end.received(0)
    end.finish(first=False)
    _check(received, pattern(5000), "received")


# -- inline ---------------------------------------------------------------------------------------------------

_INLINE = (0, 1, 3, 64, 200)


def _inline_request(end: End) -> None:
    region = end.region(_filled(_INLINE))
    remote = end.connect()
    for i, (place, size) in enumerate(zip(_places(_INLINE), _INLINE, strict=True)):
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
    # It may be used again at once.
    region.write(bytes(region.length))
    end.sent(*range(2 * len(_INLINE)))
    end.finish(first=True)


def _inline_respond(end: End) -> None:
    received, written = end.region(_blank(_INLINE)), end.region(_blank(_INLINE), _EVERYTHING)
    for i, (place, size) in enumerate(zip(_places(_INLINE), _INLINE, strict=True)):
        end.post_receive(i, [received.piece(place, size)])
    end.connect(written)
    _check_lengths(end.received(*range(len(_INLINE))), _INLINE)
    end.finish(first=False)
    _check(received, _filled(_INLINE), "received")
    _check(written, _filled(_INLINE), "written")


# -- much at a time -------------------------------------------------------------------------------------------

_PART = 300


def _many_request(end: End) -> None:
    """A full queue of each operation, of which every sixteenth completes."""
    region = end.region(pattern(QUEUE * _PART))
    target = end.region(_BLANK * (QUEUE * _PART))
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
    _check(target, pattern(QUEUE * _PART), "read back")
    end.finish(first=True)


def _many_respond(end: End) -> None:
    received = end.region(_BLANK * (QUEUE * _PART))
    written = end.region(_BLANK * (QUEUE * _PART), _EVERYTHING)
    for i in range(QUEUE):
        end.post_receive(i, [received.piece(i * _PART, _PART)])
    end.connect(written)
    end.received(*range(QUEUE))
    end.finish(first=False)
    _check(received, pattern(QUEUE * _PART), "received")
    _check(written, pattern(QUEUE * _PART), "written")


_FEW = Param(responder_resources=2, initiator_depth=2)
_READS = 32


def _queued_reads_request(end: End) -> None:
    """More READs, and atomics between them, than there may be under way."""
    size = 2 * end.device.mtu + 100
    region = end.region(_BLANK * (_READS * size))
    before = end.region(_memory(*[0] * _READS))
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
    _check(region, pattern(_READS * size), "read")
    _check(before, _memory(*range(_READS)), "counted")
    end.finish(first=True)


def _queued_reads_respond(end: End) -> None:
    size = 2 * end.device.mtu + 100
    region = end.region(_memory(0) + pattern(_READS * size), _EVERYTHING)
    end.connect(region, param=_FEW)
    end.finish(first=False)
    _check(region, _memory(_READS) + pattern(_READS * size), "read and counted")


def _both_at_once(end: End) -> None:
    """Each end sends and reads as fast as it can, and neither waits for the other."""
    count, size = 48, 3000
    memory, numbers = pattern(count * size), range(count)
    source = end.region(memory, Access.LOCAL_WRITE | Access.REMOTE_READ)
    received, read = end.region(_BLANK * len(memory)), end.region(_BLANK * len(memory))
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
    _check(received, memory, "received")
    _check(read, memory, "read")
    # The peer may still be at it.
    end.post(Work(Opcode.SEND, [], 2 * count))
    end.sent(2 * count)
    end.received(count)
    end.finish(first=end.request is None)


def _last_word_request(end: End) -> None:
    region = end.region(pattern(5000))
    end.connect()
    end.post(Work(Opcode.SEND, [region.piece(0, 5000)]))
    end.sent(0)
    end.finish(first=False)


def _last_word_respond(end: End) -> None:
    """Disconnect at the last message: it is acknowledged all the same."""
    region = end.region(_BLANK * 5000)
    end.post_receive(0, [region.piece(0, 5000)])
    end.connect()
    end.received(0)
    end.finish(first=True)
    _check(region, pattern(5000), "received")


# -- receives that are not there ------------------------------------------------------------------------------


def _late_receive_request(end: End) -> None:
    region = end.region(pattern(5000))
    end.connect()
    end.post(Work(Opcode.SEND, [region.piece(0, 5000)]), Work(Opcode.SEND, [region.piece(10, 10)], 1))
    end.sent(0, 1)
    end.finish(first=True)


def _late_receive_respond(end: End) -> None:
    region = end.region(_blank((5000, 10)))
    end.connect()
    time.sleep(_LATE)
    end.post_receive(0, [region.piece(_GAP, 5000)])
    end.post_receive(1, [region.piece(5000 + 2 * _GAP, 10)])
    end.received(0, 1)
    end.finish(first=False)
    gap, data = _BLANK * _GAP, pattern(5000)
    _check(region, gap + data + gap + data[10:20] + gap, "received")


_IMPATIENT = Param(rnr_retry_count=1)


def _no_receive_request(end: End) -> None:
    region = end.region(pattern(100))
    end.connect(param=_IMPATIENT)
    end.post(Work(Opcode.SEND, [region.piece(0, 100)]), Work(Opcode.SEND, [region.piece(0, 100)], 1, flags=0))
    end.sent(0, status=Status.RNR_RETRY_EXC_ERR)
    end.sent(1, status=Status.WR_FLUSH_ERR)
    end.finish(first=True)


def _no_receive_respond(end: End) -> None:
    end.connect(param=_IMPATIENT)
    end.finish(first=False)


def _check_one_of(failed: Completion, status: Status, of_rxe: Status) -> None:
    """InfiniBand has a NAK of an invalid request for it; rdma_rxe sends one of an operational error."""
    assert failed.wr_id == 0, failed
    assert failed.status in (status, of_rxe), failed


def _small_receive_request(parts: int) -> Callable[[End], None]:
    def request(end: End) -> None:
        size = (parts - 1) * end.device.mtu + 101
        region = end.region(pattern(size))
        end.connect()
        end.post(Work(Opcode.SEND, [region.piece(0, size)]))
        (failed,) = end.completions(True, 1)
        _check_one_of(failed, Status.REM_INV_REQ_ERR, Status.REM_OP_ERR)
        end.finish(first=True)

    return request


def _small_receive_respond(parts: int) -> Callable[[End], None]:
    def respond(end: End) -> None:
        size = (parts - 1) * end.device.mtu + 100
        region = end.region(_BLANK * (size + _GAP))
        end.post_receive(0, [region.piece(0, size)])
        end.post_receive(1, [region.piece(0, size)])
        end.connect()
        (failed,) = end.completions(False, 1)
        _check_one_of(failed, Status.LOC_LEN_ERR, Status.LOC_QP_OP_ERR)
        end.finish(first=False)
        end.received(1, status=Status.WR_FLUSH_ERR)
        assert region.read(size) == _BLANK * _GAP, "written beyond the receive"

    return respond


# -- refused --------------------------------------------------------------------------------------------------

_ROOM = 4096


def _refused(opcode: Opcode, *, offset: int = 0, key: int = 0, size: int = 8) -> Callable[[End], None]:
    """Touch memory in a way that is not allowed; what comes after it is flushed."""

    def request(end: End) -> None:
        region = end.region(_BLANK * size)
        remote = end.connect()
        # Not signaled: an error completes all the same.
        work = Work(
            opcode, [region.piece(0, size)], 0, 0, addr=remote.addr + offset, rkey=remote.rkey ^ key, compare_add=1
        )
        end.post(work, Work(Opcode.SEND, [region.piece(0, size)], 1))
        end.sent(0, status=Status.REM_ACCESS_ERR)
        end.sent(1, status=Status.WR_FLUSH_ERR)
        end.finish(first=True)
        _check(region, _BLANK * size, "after what was refused")

    return request


def _unharmed(access: Access, size: int = _ROOM) -> Callable[[End], None]:
    def respond(end: End) -> None:
        content = pattern(size)
        region = end.region(content, access)
        received = end.region(_BLANK * 100)
        end.post_receive(0, [received.piece(0, 100)])
        end.connect(region)
        end.finish(first=False)
        end.received(0, status=Status.WR_FLUSH_ERR)
        _check(region, content, "after what was refused")
        _check(received, _BLANK * 100, "after what was refused")

    return respond


def _unaligned(end: End) -> None:
    """Refused before anything is sent: rdma-core checks that too."""
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


def _invalidate_request(end: End) -> None:
    told = end.region(bytes(16))
    region = end.region(pattern(100))
    end.post_receive(0, [told.piece(0, 16)])
    end.connect()
    end.received(0)
    addr, key = struct.unpack("!QQ", told.read())
    target = {"addr": addr, "rkey": key}
    end.post(
        Work(Opcode.RDMA_WRITE, [region.piece(0, 100)], 0, **target),
        Work(Opcode.SEND_WITH_INV, [region.piece(0, 7)], 1, invalidate=key),
    )
    end.sent(0, 1)
    end.post(Work(Opcode.RDMA_WRITE, [region.piece(1, 99)], 2, **target))
    end.sent(2, status=Status.REM_ACCESS_ERR)
    end.finish(first=True)


def _invalidate_respond(end: End) -> None:
    region = end.region(_BLANK * 100, Access.LOCAL_WRITE | Access.REMOTE_WRITE | end.device.window_access)
    received = end.region(_BLANK * 7)
    end.post_receive(0, [received.piece(0, 7)])
    end.connect()
    key = end.window(region)
    told = end.region(struct.pack("!QQ", region.addr, key))
    end.post(Work(Opcode.SEND, [told.piece(0, 16)], 1))
    end.sent(1)
    (completion,) = end.received(0)
    assert completion.flags & WcFlag.WITH_INV, completion
    assert completion.extra == key, f"{completion}, and the key is {key:#x}"
    end.finish(first=False)
    _check(region, pattern(100), "written before the key was invalid")
    _check(received, pattern(7), "received")


# -- connecting -----------------------------------------------------------------------------------------------

_ASKS = Param(responder_resources=3, initiator_depth=5, flow_control=1, retry_count=4, rnr_retry_count=5)
_ANSWERS = Param(responder_resources=4, initiator_depth=2, flow_control=1, rnr_retry_count=3)


def _negotiate(end: End) -> None:
    """Each end tells and does what the two have agreed on."""
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
    """A refusal arrives with all of its private data."""
    if end.request is not None:
        end.reject(end.private_data("reject"))
        return
    end.connect_or_accept(Param(private_data=end.private_data("request")))
    event = end.device.event(EventKind.REJECTED)
    assert event.status == 28, event
    assert event.param.private_data == end.private_data("reject"), event


# -- all of them ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    name: str
    request: Callable[[End], None]
    #: The same as ``request`` where the two ends differ only in who connects.
    respond: Callable[[End], None]
    #: What it counts as in README's table.
    row: str

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that an end has in it, one at a time."""
        return ("request", "respond") if self.respond is not self.request else ("both",)


_ADD, _SWAP = Opcode.ATOMIC_FETCH_AND_ADD, Opcode.ATOMIC_CMP_AND_SWP
_LOCAL, _READ, _WRITE, _ATOMIC = Access.LOCAL_WRITE, Access.REMOTE_READ, Access.REMOTE_WRITE, Access.REMOTE_ATOMIC

#: Rows of README's table.
_SENDS = "SEND, with immediate data, with invalidate: 0 to 100,000 bytes"
_RDMA = "RDMA WRITE, with immediate data, and READ: 0 to 100,000 bytes"
_ATOMICS = "atomics"
_QUEUES = "scatter/gather, inline data, fences, full queues"
_RECEIVES = "receives that come late, never, or are too small"
_REFUSALS = "wrong keys, ranges and permissions are refused"
_CONNECTING = "parameters and private data of a connection, and its refusal"

OPERATIONS = (
    Operation("send", _sends(Opcode.SEND), _receives(False), _SENDS),
    Operation("send_with_immediate", _sends(Opcode.SEND_WITH_IMM), _receives(True), _SENDS),
    Operation("send_with_invalidate", _invalidate_request, _invalidate_respond, _SENDS),
    Operation("write", _writes(Opcode.RDMA_WRITE), _written(False), _RDMA),
    Operation("write_with_immediate", _writes(Opcode.RDMA_WRITE_WITH_IMM), _written(True), _RDMA),
    Operation("read", _read_request, _read_respond, _RDMA),
    Operation(
        "compare_and_swap",
        _atomic(_SWAP, WcOpcode.COMP_SWAP, [(7, 8), (7, 8), ((1 << 64) - 1, 0), (0x0123456789ABCDEF, 1 << 40)]),
        _atomic_target(8, 1 << 63, 0, 1 << 40),
        _ATOMICS,
    ),
    Operation(
        "fetch_and_add",
        _atomic(_ADD, WcOpcode.FETCH_ADD, [(1, 0), (1 << 63, 0), (2, 0), ((1 << 64) - 0xEF, 0)]),
        _atomic_target(8, 0, 1, 0x0123456789ABCD00),
        _ATOMICS,
    ),
    Operation("scatter_gather", _scatter_gather_request, _scatter_gather_respond, _QUEUES),
    Operation("fence", _fence_request, _fence_respond, _QUEUES),
    Operation("inline", _inline_request, _inline_respond, _QUEUES),
    Operation("many_outstanding", _many_request, _many_respond, _QUEUES),
    Operation("more_reads_than_resources", _queued_reads_request, _queued_reads_respond, _QUEUES),
    Operation("both_at_once", _both_at_once, _both_at_once, _QUEUES),
    Operation("last_word", _last_word_request, _last_word_respond, _SENDS),
    Operation("late_receive", _late_receive_request, _late_receive_respond, _RECEIVES),
    Operation("no_receive", _no_receive_request, _no_receive_respond, _RECEIVES),
    Operation("small_receive", _small_receive_request(1), _small_receive_respond(1), _RECEIVES),
    Operation("small_receive_of_many_packets", _small_receive_request(3), _small_receive_respond(3), _RECEIVES),
    Operation("write_wrong_key", _refused(Opcode.RDMA_WRITE, key=0x100), _unharmed(_EVERYTHING), _REFUSALS),
    Operation("read_wrong_key", _refused(Opcode.RDMA_READ, key=0x100), _unharmed(_EVERYTHING), _REFUSALS),
    Operation("atomic_wrong_key", _refused(_ADD, key=0x100), _unharmed(_EVERYTHING), _REFUSALS),
    Operation("write_out_of_range", _refused(Opcode.RDMA_WRITE, offset=_ROOM - 7), _unharmed(_EVERYTHING), _REFUSALS),
    Operation("write_before_the_start", _refused(Opcode.RDMA_WRITE, offset=-1), _unharmed(_EVERYTHING), _REFUSALS),
    Operation(
        "long_write_out_of_range",
        _refused(Opcode.RDMA_WRITE, size=_ROOM + 1),
        _unharmed(_EVERYTHING),
        _REFUSALS,
    ),
    Operation("read_out_of_range", _refused(Opcode.RDMA_READ, offset=_ROOM - 7), _unharmed(_EVERYTHING), _REFUSALS),
    Operation("atomic_out_of_range", _refused(_ADD, offset=_ROOM), _unharmed(_EVERYTHING), _REFUSALS),
    Operation("write_not_permitted", _refused(Opcode.RDMA_WRITE), _unharmed(_LOCAL | _READ | _ATOMIC), _REFUSALS),
    Operation("read_not_permitted", _refused(Opcode.RDMA_READ), _unharmed(_LOCAL | _WRITE | _ATOMIC), _REFUSALS),
    Operation("atomic_not_permitted", _refused(_ADD), _unharmed(_LOCAL | _READ | _WRITE), _REFUSALS),
    Operation("atomic_not_aligned", _unaligned, _unharmed(_EVERYTHING), _ATOMICS),
    Operation("negotiate", _negotiate, _negotiate, _CONNECTING),
    Operation("reject", _reject, _reject, _CONNECTING),
)
