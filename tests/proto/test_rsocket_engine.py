"""The engine of a stream against itself, and against peers that break the protocol."""

from __future__ import annotations

import random
import sys

import pytest

from rdmacm.proto.rsocket import engine as module
from rdmacm.proto.rsocket.engine import CONTROL_SLOTS, Fault, StreamEngine
from rdmacm.proto.rsocket.messages import (
    MAPPING_LENGTH,
    TARGET_LENGTH,
    TARGETS,
    Control,
    Mapping,
    Operation,
    Target,
    immediate,
)
from rdmacm.proto.rsocket.states import State, Trigger
from support.rows import for_each
from support.rsocket import OTHER_FLAGS, OTHER_ORDER, Memory, Pair

forms = pytest.mark.parametrize("has_immediates", [True, False], ids=["immediate", "send"])


def data(length: int, start: int = 0) -> bytes:
    return bytes((start + number) * 7 & 0xFF for number in range(length))


# -- sending and receiving -------------------------------------------------------------------------------------


@forms
def test_every_size_of_message_around_the_buffers(has_immediates: bool) -> None:
    """A ring of 64 bytes: each size ends at another place of it, and of the peer's halves."""
    for size in range(1, 140):
        pair = Pair(Memory(1, size=64), Memory(2, size=64), has_immediates=has_immediates)
        sent, got = data(3 * size), b""
        at = 0
        while len(got) < len(sent):
            at += pair.engines[0].write(memoryview(sent)[at : at + size])
            pair.settle()
            got += pair.take(1)
            pair.settle()
        assert got == sent


@forms
@for_each("seed", range(40))
def test_random_exchanges_in_both_directions(seed: int, has_immediates: bool) -> None:
    """Whatever the order of arrivals, completions and reads: all bytes, in order, and no end sees a fault."""
    draw = random.Random(seed)
    sizes = [draw.choice((2, 64, 1000, 4096)) for _ in range(2)]
    pair = Pair(
        Memory(1, size=sizes[0], credits=draw.choice((1, 2, 16))),
        Memory(2, size=sizes[1], credits=draw.choice((1, 3, 40))),
        slots=draw.choice((6, 8, 20)),
        has_immediates=has_immediates,
        starts=False,
    )
    sent = [data(draw.randrange(12 * min(sizes)), seed + end) for end in (0, 1)]
    at, got = [0, 0], [b"", b""]
    for _ in range(20_000):
        if all(len(got[1 - end]) == len(sent[end]) for end in (0, 1)):
            break
        end = draw.randrange(2)
        step = draw.randrange(4)
        if step == 0:
            at[end] += pair.engines[end].write(memoryview(sent[end])[at[end] : at[end] + draw.randrange(1, 3000)])
        elif step == 1:
            pair.arrive(end, draw.randrange(1, 4))
        elif step == 2:
            pair.complete(end, draw.randrange(1, 4))
        else:
            got[end] += pair.take(end, draw.randrange(1, 3000))
    assert list(map(len, got)) == [len(sent[1]), len(sent[0])]
    assert got == [sent[1], sent[0]]
    assert [engine.fault for engine in pair.engines] == [None, None]


def test_a_message_is_at_most_64_KiB() -> None:
    pair = Pair(Memory(1, size=1 << 20), Memory(2, size=1 << 20))
    assert pair.engines[0].write(memoryview(bytes(200_000))) == 200_000
    assert [work.imm for work in pair.engines[0].work] == [65536, 65536, 65536, 200_000 - 3 * 65536]


def test_what_is_sent_is_copied() -> None:
    pair = Pair()
    given = bytearray(b"before")
    pair.engines[0].write(memoryview(given))
    given[:] = b"behind"
    pair.settle()
    assert pair.take(1) == b"before"


def test_the_second_half_is_given_at_once() -> None:
    pair = Pair(starts=False)
    (work,) = pair.engines[0].work
    buffer = pair.memories[0].data.buffer
    assert work.inline == Target(buffer.address + 2048, buffer.key, 2048).pack(sys.byteorder)
    assert work.remote_addr == pair.memories[1].data.control.address + TARGET_LENGTH
    assert work.imm == immediate(Operation.SGL, 32)


def test_a_half_is_given_back_when_it_was_read() -> None:
    pair = Pair()
    pair.engines[0].write(memoryview(data(4096)))
    pair.settle()
    assert not pair.engines[0].is_writable
    pair.take(1, 2047)
    assert not pair.engines[1].work
    pair.take(1, 1)
    assert len(pair.engines[1].work) == 1
    pair.settle()
    assert pair.engines[0].is_writable


def test_credits_do_not_wait_for_the_application() -> None:
    pair = Pair(Memory(1, credits=4), Memory(2, credits=4))
    for number in range(20):
        assert pair.engines[0].write(memoryview(bytes((number,)))) == 1
        pair.settle()
    assert pair.take(1) == bytes(range(20))


def test_a_sender_without_credit_waits() -> None:
    pair = Pair(second=Memory(2, credits=4))
    for _ in range(4):
        assert pair.engines[0].write(memoryview(b"x")) == 1
    assert not pair.engines[0].is_writable
    assert pair.engines[0].write(memoryview(b"x")) == 0


def test_the_sequence_of_credits_wraps() -> None:
    pair = Pair(second=Memory(2, credits=0xFFFE))
    pair.engines[0]._sent = pair.engines[1]._messages = 0xFFF0
    pair.engines[1]._message_limit = 0xFFF0 + 0xFFFE
    pair.engines[0]._credit_limit = pair.engines[1]._message_limit & 0xFFFF
    for _ in range(100):
        assert pair.engines[0].write(memoryview(b"x")) == 1
        pair.settle()
        pair.take(1)
    assert pair.engines[0].fault is None


def test_a_full_send_queue_leaves_room_for_control_messages() -> None:
    pair = Pair(slots=8)
    first = pair.engines[0]
    while first.write(memoryview(b"x")):
        pass
    assert len(first.work) == 8 - CONTROL_SLOTS
    first.shut(Trigger.SHUT_WRITING)
    assert len(first.work) == 8 - CONTROL_SLOTS + 1
    pair.settle()
    assert pair.take(1) == b"x" * (8 - CONTROL_SLOTS)


def test_a_control_message_waits_for_a_free_entry() -> None:
    pair = Pair(Memory(1, size=2), Memory(2, size=64), starts=False)
    second = pair.engines[0]
    for _ in range(CONTROL_SLOTS + 1):
        second.keepalive()
        second._outstanding.clear()
    second._control_slots = 0
    second.shut(Trigger.SHUT_BOTH)
    assert not second.is_idle
    assert second.state is State.CLOSING
    second._outstanding.append(module._Sent(is_control=True))
    second.completed()
    assert second.work[-1].imm == immediate(Operation.CONTROL, Control.DISCONNECT)


def test_peeking_takes_nothing() -> None:
    pair = Pair(Memory(1, size=16), Memory(2, size=16))
    pair.engines[0].write(memoryview(data(12)))
    pair.settle()
    pair.take(1, 8)
    pair.settle()
    pair.engines[0].write(memoryview(data(10, 12)))
    pair.settle()
    whole = data(22)[8:]
    assert b"".join(pair.engines[1].pieces(100)) == whole
    assert len(pair.engines[1].pieces(100)) == 2
    assert b"".join(pair.engines[1].pieces(5, 6)) == whole[6:11]
    assert pair.take(1) == whole


# -- byte orders -----------------------------------------------------------------------------------------------


def test_entries_are_swapped_for_a_peer_of_the_other_order() -> None:
    other = Memory(2, mappings=1, flags=OTHER_FLAGS)
    pair = Pair(second=other, starts=False)
    assert Target.unpack(pair.engines[0].work[0].inline, 0, OTHER_ORDER).length == 2048
    pair.engines[0].map(0, Mapping(1, 2, 3, 4))
    pair.arrive(0)
    assert Mapping.unpack(other.control[32:], 0, OTHER_ORDER) == Mapping(1, 2, 3, 4)


def test_messages_by_send_are_in_the_order_of_the_sender() -> None:
    pair = Pair(second=Memory(2, flags=OTHER_FLAGS), has_immediates=False, starts=False)
    pair.engines[0].received_send(immediate(Operation.DATA, 3).to_bytes(4, "big" if OTHER_ORDER == "big" else "little"))
    assert pair.engines[0].unread == 3


# -- the end ---------------------------------------------------------------------------------------------------


@forms
def test_a_closed_half_is_the_end_of_the_stream_after_the_data(has_immediates: bool) -> None:
    pair = Pair(has_immediates=has_immediates)
    first, second = pair.engines
    first.write(memoryview(b"last"))
    first.shut(Trigger.SHUT_WRITING)
    pair.settle()
    assert second.is_at_end
    assert pair.take(1) == b"last"
    second.write(memoryview(b"answer"))
    second.shut(Trigger.SHUT_WRITING)
    pair.settle()
    assert pair.take(0) == b"answer"
    assert (first.state, second.state) == (State.CLOSED, State.CLOSED)
    assert first.is_idle


def test_both_ends_may_close_at_the_same_time() -> None:
    pair = Pair()
    for engine in pair.engines:
        engine.shut(Trigger.SHUT_BOTH)
    pair.settle()
    assert [engine.state for engine in pair.engines] == [State.CLOSED, State.CLOSED]


def test_both_halves_closed_at_the_same_time_say_so_to_both() -> None:
    """The SHUTDOWN that waits goes out although the peer's has arrived meanwhile."""
    pair = Pair()
    pair.engines[0]._control_slots = 0
    for engine in pair.engines:
        engine.shut(Trigger.SHUT_WRITING)
    pair.arrive(1)
    assert pair.engines[0].state is State.CLOSED
    pair.engines[0]._outstanding.append(module._Sent(is_control=True))
    pair.engines[0].completed()
    pair.settle()
    assert pair.engines[1].state is State.CLOSED


def test_a_closed_stream_sends_nothing() -> None:
    pair = Pair()
    pair.engines[0].shut(Trigger.SHUT_BOTH)
    assert pair.engines[0].write(memoryview(b"x")) == 0
    pair.settle()
    assert pair.engines[1].write(memoryview(b"x")) == 0


def test_a_lost_connection_fails_the_stream_and_keeps_what_has_arrived() -> None:
    pair = Pair()
    pair.engines[0].write(memoryview(b"arrived"))
    pair.settle()
    pair.engines[1].lost("the cable")
    assert (pair.engines[1].state, pair.engines[1].failure) == (State.FAILED, "the cable")
    assert pair.take(1) == b"arrived"


def test_a_connection_that_is_lost_after_the_end_is_no_failure() -> None:
    pair = Pair()
    pair.engines[0].shut(Trigger.SHUT_BOTH)
    pair.settle()
    for engine in pair.engines:
        engine.lost("disconnected")
        assert (engine.state, engine.failure) == (State.CLOSED, None)


def test_a_probe_is_sent_only_if_nothing_else_tells() -> None:
    pair = Pair()
    pair.engines[0].keepalive()
    pair.engines[0].keepalive()
    (probe,) = pair.engines[0].work
    assert (probe.imm, probe.local, probe.inline) == (None, (), b"")


# -- I/O mappings ----------------------------------------------------------------------------------------------


@forms
def test_mapped_memory_is_written_before_later_data(has_immediates: bool) -> None:
    pair = Pair(first=Memory(1, mappings=2), has_immediates=has_immediates)
    writer, mapper = pair.engines
    memory = bytearray(3000)
    pair.memories[1].regions[0x99] = (0x5000, memory)
    mapper.map(1, Mapping(100, 0x5000, 0x99, 3000))
    mapper.write(memoryview(b"mapped"))
    pair.settle()
    assert pair.take(0) == b"mapped"
    assert writer.mapping_at(100) == Mapping(100, 0x5000, 0x99, 3000)
    assert writer.mapping_at(99) is None
    assert writer.mapping_at(3100) is None
    assert writer.write_mapped(memoryview(data(3000)), 200) == 2900  # up to the end of the mapping
    pair.settle()
    assert memory == bytes(100) + data(2900)
    mapper.unmap(1)
    pair.settle()
    assert writer.write_mapped(memoryview(b"x"), 100) == 0


def test_one_write_goes_through_several_mappings() -> None:
    pair = Pair(first=Memory(1, mappings=2))
    memory = bytearray(20)
    pair.memories[1].regions[0x99] = (0x5000, memory)
    pair.engines[1].map(0, Mapping(0, 0x5000, 0x99, 8))
    pair.engines[1].map(1, Mapping(8, 0x5008, 0x99, 12))
    pair.settle()
    assert pair.engines[0].write_mapped(memoryview(data(30)), 2) == 18
    pair.settle()
    assert memory == bytes(2) + data(18)


def test_a_mapping_waits_for_a_credit() -> None:
    pair = Pair(Memory(1, mappings=1, credits=1), Memory(2, credits=1))
    mapper = pair.engines[1]
    mapper.write(memoryview(b"x"))
    mapper.map(0, Mapping(0, 0, 0, 1))
    assert len(mapper.work) == 1
    assert mapper.write(memoryview(b"y")) == 0
    pair.settle()
    assert pair.engines[0].mapping_at(0) is not None


# -- hostile peers ---------------------------------------------------------------------------------------------


def received(engine: StreamEngine, *messages: tuple[int, int]) -> None:
    for operation, argument in messages:
        engine.received(immediate(operation, argument))


@for_each(
    "messages, fault",
    [
        ([(Operation.DATA, 4097)], Fault.MORE_BYTES),
        ([(Operation.DATA, 4096), (Operation.DATA, 1)], Fault.MORE_BYTES),
        ([(Operation.DATA, 0)] * 33, Fault.MORE_MESSAGES),
        ([(Operation.SGL, 33)], Fault.MORE_CREDITS),
        ([(Operation.SGL, 0xFFFF)], Fault.MORE_CREDITS),
        ([(Operation.IOMAP, 2)], Fault.NO_SUCH_MAPPING),
        ([(Operation.IOMAP, (1 << 29) - 1)], Fault.NO_SUCH_MAPPING),
        ([(Operation.IOMAP, 0)] * 33, Fault.MORE_MESSAGES),
        ([(Operation.CONTROL, 3)], Fault.UNKNOWN_CONTROL),
        ([(1, 0)], Fault.UNKNOWN_OPERATION),
        ([(2, 0)], Fault.UNKNOWN_OPERATION),
        ([(3, 0)], Fault.UNKNOWN_OPERATION),
        ([(5, 0)], Fault.UNKNOWN_OPERATION),
        ([(Operation.CONTROL, Control.SHUTDOWN), (Operation.DATA, 1)], Fault.AFTER_THE_END),
    ],
)
def test_a_peer_that_breaks_the_protocol_ends_the_stream(messages: list[tuple[int, int]], fault: Fault) -> None:
    """Renewed credits are posted and not sent, so the peer has 32 messages at most."""
    pair = Pair(first=Memory(1, mappings=2))
    engine = pair.engines[0]
    engine._control_slots = 0
    received(engine, *messages[:-1])
    before = engine.fault
    received(engine, messages[-1])
    assert (before, engine.fault, engine.state, engine.failure) == (None, fault, State.FAILED, fault.value)


@for_each("length", [0, 3, 5])
def test_a_message_by_send_of_another_length_ends_the_stream(length: int) -> None:
    engine = Pair(has_immediates=False).engines[0]
    engine.received_send(bytes(length))
    assert engine.fault is Fault.UNKNOWN_OPERATION


def test_a_target_is_read_once() -> None:
    """A peer that writes into the target SGL again without saying so changes nothing."""
    pair = Pair()
    memory = pair.memories[0]
    assert not any(memory.control)
    memory.control[:TARGET_LENGTH] = Target(0xBAD, 0xBAD, 100).pack(sys.byteorder)
    pair.engines[0].write(memoryview(bytes(5000)))
    assert {work.key for work in pair.engines[0].work} == {0x22}


def test_seventeen_bits_of_credits_are_taken_modulo_16() -> None:
    """librdmacm adds two numbers of 16 bits, and masks neither."""
    pair = Pair()
    received(pair.engines[0], (Operation.SGL, 0x10000 | 20))
    assert pair.engines[0].fault is None


def test_what_follows_a_fault_is_not_looked_at() -> None:
    engine = Pair().engines[0]
    received(engine, (1, 0), (Operation.DATA, 10), (Operation.CONTROL, Control.DISCONNECT))
    assert (engine.unread, engine.state) == (0, State.FAILED)


def test_the_layout_of_the_control_memory() -> None:
    assert (TARGET_LENGTH, MAPPING_LENGTH, TARGETS) == (16, 24, 2)
