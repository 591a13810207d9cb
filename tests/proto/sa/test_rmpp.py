"""RMPP transfers over networks with loss, duplication and reordering, and with invalid peers."""

from __future__ import annotations

import heapq
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmacm.proto.sa.rmpp import (
    SA_HEADER_SIZE,
    SEGMENT_SIZE,
    WINDOW,
    Receiver,
    RmppFlag,
    RmppHeader,
    RmppStatus,
    RmppType,
    Sender,
    describe_rmpp,
)
from support.examples import MANY_EXAMPLES
from support.rows import for_each

ACTIVE, FIRST, LAST = RmppFlag


def segment(number: int, data: bytes = b"", *, first: bool = False, last: bool = False, length: int = 0) -> RmppHeader:
    flags = ACTIVE | (FIRST if first else 0) | (LAST if last else 0)
    return RmppHeader(1, RmppType.DATA, 31, flags, 0, number, length or (SA_HEADER_SIZE + len(data) if last else 0))


def ack(number: int, window_end: int, version: int = 1) -> RmppHeader:
    return RmppHeader(version, RmppType.ACK, 31, ACTIVE, 0, number, window_end)


def transfer(
    data: bytes, seed: int, loss: float = 0.0, duplicate: float = 0.0, jitter: float = 0.0
) -> tuple[Sender, Receiver]:
    """Run a transfer on a network in virtual time until neither end has anything to do."""
    random = Random(seed)
    now = 0.0
    sender, receiver = Sender(data, now, timeout=0.1, retries=20), Receiver(60.0)
    flying: list[tuple[float, int, bool, RmppHeader, bytes]] = []
    count = 0

    def fly(to_receiver: bool, header: RmppHeader, part: bytes = b"") -> None:
        nonlocal count
        for _ in range(0 if random.random() < loss else 2 if random.random() < duplicate else 1):
            count += 1
            heapq.heappush(flying, (now + 0.001 + random.random() * jitter, count, to_receiver, header, part))

    for _ in range(100_000):
        for header, part in sender.to_send():
            fly(True, header, part.ljust(SEGMENT_SIZE, b"\xee"))
        due = [sender.next_deadline(), flying[0][0] if flying else None]
        times = [time for time in due if time is not None]
        if not times:
            break
        now = max(now, min(times))
        if flying and flying[0][0] <= now:
            _, _, to_receiver, header, part = heapq.heappop(flying)
            # Packed and unpacked, as on the wire.
            header = RmppHeader.unpack(header.pack())
            if to_receiver:
                if (reply := receiver.received(header, part, now)) is not None:
                    fly(False, reply)
            else:
                sender.received(header, now)
        else:
            sender.timer(now)
    return sender, receiver


class TestTransfers:
    @for_each("size", [0, 1, 199, 200, 201, 400, 64 * 200, 65 * 200, 500 * 64, 500 * 64 + 1])
    def test_transfer_completes(self, size: int) -> None:
        data = Random(size).randbytes(size)
        sender, receiver = transfer(data, 1)
        assert (receiver.data, receiver.error, sender.error) == (data, None, None)
        assert sender.is_complete
        assert receiver.is_complete

    @for_each("seed", range(30))
    def test_transfer_completes_despite_loss_and_reordering(self, seed: int) -> None:
        data = Random(seed).randbytes(500 * 56)
        sender, receiver = transfer(data, seed, loss=0.15, duplicate=0.1, jitter=0.01)
        assert receiver.is_complete
        assert receiver.data == data
        assert sender.is_complete

    def test_initial_window_is_one_segment(self) -> None:
        sender = Sender(bytes(1000), 0.0)
        assert [header.segment for header, _ in sender.to_send()] == [1]
        sender.received(ack(1, 3), 0.1)
        assert [header.segment for header, _ in sender.to_send()] == [2, 3]

    def test_segment_headers_carry_flags_and_lengths(self) -> None:
        sender = Sender(bytes(450), 0.0)
        sender.received(ack(0, 64), 0.0)
        headers = [header for header, _ in sender.to_send()]
        assert [header.flags for header in headers] == [ACTIVE | FIRST, ACTIVE, ACTIVE | LAST]
        # The first segment announces the length of all segments with their SA headers, the last its own length.
        assert [header.length for header in headers] == [450 + 3 * 20, 0, 70]

    def test_receiver_acks_windows_last_segment_and_duplicates(self) -> None:
        receiver = Receiver(10.0, window=2)
        full = bytes(200)
        assert receiver.received(segment(1, first=True), full, 0.0) == ack(1, 3)
        assert receiver.received(segment(2), full, 0.0) is None
        assert receiver.received(segment(3), full, 0.0) == ack(3, 5)
        assert receiver.received(segment(1, first=True), full, 0.0) == ack(3, 5)
        assert receiver.received(segment(4, b"end", last=True), full, 0.0) == ack(4, 6)
        assert receiver.is_complete
        assert len(receiver.data) == 603
        # The last acknowledgement may have been lost.
        assert receiver.received(segment(4, b"end", last=True), full, 99.0) == ack(4, 6)

    def test_segments_out_of_order_are_reassembled(self) -> None:
        receiver = Receiver(10.0)
        receiver.received(segment(3, b"c", last=True), b"c", 0.0)
        receiver.received(segment(2), b"b" * 200, 0.0)
        assert not receiver.is_done
        assert receiver.received(segment(1, first=True), b"a" * 200, 0.0) == ack(3, 3 + WINDOW)
        assert receiver.data == b"a" * 200 + b"b" * 200 + b"c"


class TestReceiver:
    @for_each(
        ("header", "status"),
        [
            (RmppHeader(2, RmppType.DATA, 31, ACTIVE | FIRST, 0, 1, 0), RmppStatus.UNSUPPORTED_VERSION),
            (RmppHeader(1, RmppType.ACK, 31, ACTIVE, 0, 1, 0), RmppStatus.BAD_TYPE),
            (RmppHeader(1, 77, 31, ACTIVE, 0, 1, 0), RmppStatus.BAD_TYPE),
            (segment(0), RmppStatus.BAD_SEGMENT),
            (segment(1), RmppStatus.BAD_SEGMENT),
            (segment(2, first=True), RmppStatus.BAD_SEGMENT),
            (segment(2, last=True, length=19), RmppStatus.BAD_LENGTH),
            (segment(2, last=True, length=221), RmppStatus.BAD_LENGTH),
            (segment(2, last=True, length=0xFFFFFFFF), RmppStatus.BAD_LENGTH),
        ],
    )
    def test_contradictory_headers_are_aborted(self, header: RmppHeader, status: RmppStatus) -> None:
        receiver = Receiver(10.0)
        reply = receiver.received(header, bytes(200), 0.0)
        assert reply is not None
        assert (reply.type, reply.status) == (RmppType.ABORT, status)
        assert receiver.error == status
        assert receiver.is_done
        assert not receiver.is_complete
        assert receiver.received(segment(1, first=True), bytes(200), 0.0) is None

    def test_second_last_segment_is_aborted(self) -> None:
        receiver = Receiver(10.0)
        receiver.received(segment(3, b"", last=True), b"", 0.0)
        receiver.received(segment(2, b"", last=True), b"", 0.0)
        assert receiver.error == RmppStatus.BAD_SEGMENT

    def test_last_segment_before_received_ones_is_aborted(self) -> None:
        receiver = Receiver(10.0)
        receiver.received(segment(3), bytes(200), 0.0)
        receiver.received(segment(2, b"", last=True), b"", 0.0)
        assert receiver.error == RmppStatus.BAD_SEGMENT

    def test_segment_after_the_last_one_is_aborted(self) -> None:
        receiver = Receiver(10.0)
        receiver.received(segment(2, b"", last=True), b"", 0.0)
        receiver.received(segment(3), bytes(200), 0.0)
        assert receiver.error == RmppStatus.BAD_SEGMENT

    def test_payload_shorter_than_announced_is_aborted(self) -> None:
        receiver = Receiver(10.0)
        receiver.received(segment(1, first=True), bytes(199), 0.0)
        assert receiver.error == RmppStatus.BAD_LENGTH

    def test_segment_beyond_the_window_is_dropped(self) -> None:
        receiver = Receiver(10.0)
        assert receiver.received(segment(WINDOW + 1), bytes(200), 0.0) is None
        assert receiver.dropped == {"beyond the window": 1}
        assert receiver.error is None

    def test_announced_length_beyond_the_limit_stops_the_transfer(self) -> None:
        receiver = Receiver(10.0, max_size=1000)
        reply = receiver.received(segment(1, first=True, length=6 * 220), bytes(200), 0.0)
        assert reply is not None
        assert (reply.type, reply.status) == (RmppType.STOP, RmppStatus.NO_RESOURCES)

    def test_transfer_beyond_the_limit_fails_without_announced_length(self) -> None:
        receiver = Receiver(10.0, max_size=1000)
        for number in range(1, 7):
            receiver.received(segment(number, first=number == 1), bytes(200), 0.0)
        assert receiver.error == RmppStatus.NO_RESOURCES
        assert receiver.data == b""

    def test_transfer_of_exactly_the_limit_completes(self) -> None:
        data = bytes(1000)
        sender, receiver = Sender(data, 0.0), Receiver(10.0, max_size=1000)
        for _ in range(9):
            for header, part in sender.to_send():
                if (reply := receiver.received(header, part, 0.0)) is not None:
                    sender.received(reply, 0.0)
        assert receiver.data == data

    def test_receiver_times_out(self) -> None:
        receiver = Receiver(10.0)
        receiver.received(segment(1, first=True), bytes(200), 0.0)
        assert receiver.received(segment(2), bytes(200), 9.9) is None
        reply = receiver.received(segment(3), bytes(200), 10.0)
        assert reply is not None
        assert (reply.type, reply.status) == (RmppType.ABORT, RmppStatus.TOTAL_TIME_TOO_LONG)
        assert receiver.received(segment(3), bytes(200), 11.0) is None

    @pytest.mark.parametrize(
        ("kind", "status", "error"),
        [
            (RmppType.STOP, 1, RmppStatus.NO_RESOURCES),
            (RmppType.STOP, 0, RmppStatus.ILLEGAL_STATUS),
            (RmppType.ABORT, 126, RmppStatus.TOO_MANY_RETRIES),
            (RmppType.ABORT, 5, RmppStatus.ILLEGAL_STATUS),
        ],
    )
    def test_stop_and_abort_end_both_sides(self, kind: RmppType, status: int, error: RmppStatus) -> None:
        header = RmppHeader(1, kind, 31, ACTIVE, status)
        receiver, sender = Receiver(10.0), Sender(bytes(1000), 0.0)
        assert receiver.received(header, bytes(200), 0.0) is None
        sender.received(header, 0.0)
        assert receiver.error == sender.error == error
        assert sender.to_send() == []
        assert sender.next_deadline() is None
        assert describe_rmpp(error)

    def test_completed_transfer_stays_complete(self) -> None:
        receiver = Receiver(10.0)
        receiver.received(segment(1, b"all", first=True, last=True), b"all", 0.0)
        for header in (RmppHeader(1, RmppType.ABORT, 31, ACTIVE, 126), segment(9), segment(0), RmppHeader(9, 9)):
            receiver.received(header, bytes(200), 20.0)
        assert receiver.is_complete
        assert receiver.data == b"all"


class TestSender:
    @for_each(
        ("header", "status"),
        [
            (ack(1, 2, version=3), RmppStatus.UNSUPPORTED_VERSION),
            (ack(2, 70), RmppStatus.SEGMENT_TOO_BIG),
            (ack(0xFFFFFFFF, 0xFFFFFFFF), RmppStatus.SEGMENT_TOO_BIG),
            (ack(1, 0), RmppStatus.WINDOW_TOO_SMALL),
            (segment(1, first=True), RmppStatus.BAD_TYPE),
            (RmppHeader(1, 200), RmppStatus.BAD_TYPE),
        ],
    )
    def test_contradictory_acks_abort_the_transfer(self, header: RmppHeader, status: RmppStatus) -> None:
        sender = Sender(bytes(100_000), 0.0)
        sender.to_send()
        sender.received(header, 0.0)
        assert sender.error == status
        [(abort, _)] = sender.to_send()
        assert (abort.type, abort.status) == (RmppType.ABORT, status)
        sender.received(ack(1, 65), 0.0)
        assert sender.to_send() == []

    def test_window_is_capped(self) -> None:
        sender = Sender(bytes(1_000_000), 0.0)
        sender.to_send()
        sender.received(ack(1, 0xFFFFFFFF), 0.0)
        assert len(sender.to_send()) == WINDOW

    def test_old_ack_is_ignored(self) -> None:
        sender = Sender(bytes(1000), 0.0)
        sender.received(ack(1, 5), 0.0)
        sender.received(ack(3, 5), 0.0)
        sender.to_send()
        sender.received(ack(2, 4), 0.0)
        assert sender.error is None
        assert sender.to_send() == []

    def test_sender_times_out(self) -> None:
        sender = Sender(bytes(1000), 0.0, timeout=0.5, retries=3)
        sent = 0
        now = 0.0
        while (deadline := sender.next_deadline()) is not None:
            sent += len(sender.to_send())
            now = deadline
            sender.timer(now)
        assert (sent, now, sender.error) == (4, 2.0, RmppStatus.TOO_MANY_RETRIES)

    def test_retries_end_when_acks_make_no_progress(self) -> None:
        sender = Sender(bytes(1_000_000), 0.0, timeout=0.5, retries=3, total_time=5.0)
        now, number = 0.0, 0
        while sender.next_deadline() is not None:
            number += 1
            sender.to_send()
            sender.received(ack(number, number + 1), now)
            now += 0.1
            sender.timer(now)
        assert sender.error == RmppStatus.TOTAL_TIME_TOO_LONG


headers = st.builds(
    RmppHeader,
    version=st.sampled_from([1, 1, 1, 1, 0, 2]),
    type=st.sampled_from([1, 1, 2, 2, 3, 4, 0, 255]),
    response_time=st.integers(0, 31),
    flags=st.integers(0, 7),
    status=st.integers(0, 255),
    segment=st.one_of(st.integers(0, 6), st.integers(0, 0xFFFFFFFF)),
    length=st.one_of(st.integers(0, 300), st.integers(0, 0xFFFFFFFF)),
)


@settings(max_examples=MANY_EXAMPLES)
@given(st.lists(st.tuples(headers, st.binary(max_size=210), st.floats(0, 12)), max_size=30))
def test_arbitrary_headers_do_not_raise(inputs: list[tuple[RmppHeader, bytes, float]]) -> None:
    sender, receiver = Sender(bytes(5000), 0.0), Receiver(10.0, max_size=2000)
    for header, data, now in inputs:
        reply = receiver.received(header, data, now)
        assert reply is None or len(reply.pack()) == 12
        assert len(receiver.data) <= 2000
        sender.received(header, now)
        sender.timer(now)
        assert len(sender.to_send()) <= WINDOW
    assert receiver.is_complete is (receiver.is_done and receiver.error is None)
