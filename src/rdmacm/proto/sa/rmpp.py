"""Segmented responses: the reliable multi-packet transaction protocol, RMPP (InfiniBand Architecture 13.6).

Only the form that the subnet administrator uses, where each segment carries 200 bytes of records and the payload length
counts its 20 bytes of header too. A :class:`Sender` segments a response, a :class:`Receiver` reassembles it. They have
no clock and no socket, do not grow without bounds, and raise no exception for what the other end sends.
"""

from collections import Counter
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Annotated

from rdmacm.proto.layout import Packed, bits, laid_out
from rdmacm.proto.wire import Buffer

#: Bytes of records in a segment.
SEGMENT_SIZE = 200
#: Bytes of the SA header, which the payload length of a segment includes.
SA_HEADER_SIZE = 20

HEADER_SIZE = 12
VERSION = 1

#: The most segments that are sent without an ACK, whatever window the receiver announces. Linux's value.
WINDOW = 64

#: "No response time given" (InfiniBand Architecture 13.6.2.1).
_NO_RESPONSE_TIME = 0x1F


class RmppType(IntEnum):
    """The type of a MAD in this protocol."""

    NONE = 0
    DATA = 1
    ACK = 2
    STOP = 3
    ABORT = 4


class RmppFlag(IntFlag):
    """The flags of an :class:`RmppHeader`."""

    ACTIVE = 1
    FIRST = 2
    LAST = 4


class RmppStatus(IntEnum):
    """Why a transfer was stopped or aborted (InfiniBand Architecture 13.6.2.1, RMPPStatus)."""

    OK = 0
    NO_RESOURCES = 1
    TOTAL_TIME_TOO_LONG = 118
    BAD_LENGTH = 119
    BAD_SEGMENT = 120
    BAD_TYPE = 121
    WINDOW_TOO_SMALL = 122
    SEGMENT_TOO_BIG = 123
    ILLEGAL_STATUS = 124
    UNSUPPORTED_VERSION = 125
    TOO_MANY_RETRIES = 126
    UNSPECIFIED = 127


_WORDS: dict[int, str] = {
    RmppStatus.OK: "no reason given",
    RmppStatus.NO_RESOURCES: "resources exhausted",
    RmppStatus.TOTAL_TIME_TOO_LONG: "total transaction time too long",
    RmppStatus.BAD_LENGTH: "inconsistent last segment and payload length",
    RmppStatus.BAD_SEGMENT: "inconsistent first and segment number",
    RmppStatus.BAD_TYPE: "bad RMPP type",
    RmppStatus.WINDOW_TOO_SMALL: "new window last too small",
    RmppStatus.SEGMENT_TOO_BIG: "segment number too big",
    RmppStatus.ILLEGAL_STATUS: "illegal status",
    RmppStatus.UNSUPPORTED_VERSION: "unsupported version",
    RmppStatus.TOO_MANY_RETRIES: "too many retries",
    RmppStatus.UNSPECIFIED: "unspecified",
}


def describe_rmpp(status: int) -> str:
    """The meaning of an RMPP status."""
    return _WORDS.get(status, f"status {status}")


@dataclass(frozen=True, slots=True)
@laid_out(HEADER_SIZE)
class RmppHeader(Packed):
    """The 12 bytes after the header of a MAD.

    ``version`` is 1, or 0 without RMPP. ``type`` (:class:`RmppType`), ``flags`` (:class:`RmppFlag`) and ``status``
    (:class:`RmppStatus`) are plain numbers.
    ``response_time`` is an exponent, 4.096 µs · 2^n. ``segment`` is the number of a DATA segment, from 1, or in an ACK
    the last segment received in order. ``length`` is the payload length of a DATA segment (in the first segment that of
    all segments, or 0), or in an ACK the last segment of the new window.
    """

    version: Annotated[int, bits(0, 8)] = 0
    type: Annotated[int, bits(1, 8)] = RmppType.NONE
    response_time: Annotated[int, bits(2, 5)] = 0
    flags: Annotated[int, bits(2, 3, before=5)] = 0
    status: Annotated[int, bits(3, 8)] = 0
    segment: Annotated[int, bits(4, 32)] = 0
    length: Annotated[int, bits(8, 32)] = 0

    @property
    def is_active(self) -> bool:
        """Whether the MAD is part of a transfer. Without RMPP, OpenSM sets the flag but leaves the type 0."""
        return bool(self.flags & RmppFlag.ACTIVE) and self.type != RmppType.NONE


NO_RMPP = RmppHeader()


def _control_header(kind: RmppType, status: int = 0, segment: int = 0, length: int = 0) -> RmppHeader:
    return RmppHeader(VERSION, kind, _NO_RESPONSE_TIME, RmppFlag.ACTIVE, status, segment, length)


def _stop_or_abort(status: RmppStatus) -> RmppHeader:
    """A STOP or ABORT, whichever the status belongs to."""
    return _control_header(RmppType.STOP if status == RmppStatus.NO_RESOURCES else RmppType.ABORT, status)


def _end_status(header: RmppHeader) -> int:
    """The status of a STOP or ABORT; ILLEGAL_STATUS for one that does not belong to it."""
    if header.type == RmppType.STOP:
        return header.status if header.status == RmppStatus.NO_RESOURCES else RmppStatus.ILLEGAL_STATUS
    is_legal = RmppStatus.TOTAL_TIME_TOO_LONG <= header.status <= RmppStatus.UNSPECIFIED
    return header.status if is_legal else RmppStatus.ILLEGAL_STATUS


class Receiver:
    """Reassembles one response.

    ``deadline`` is when it must be complete, in seconds on the clock of ``now``; ``max_size`` bounds its records, in
    bytes; ``window`` is the number of segments the sender may send without an ACK. ``error`` is the status of a
    transfer that failed, else None. ``data`` is the response once ``is_complete``.
    """

    def __init__(self, deadline: float, *, max_size: int = 8 << 20, window: int = WINDOW) -> None:
        self.deadline = deadline
        self.max_size = max_size
        self.error: int | None = None
        #: MADs that were ignored, by reason.
        self.dropped: Counter[str] = Counter()
        self._window = window
        #: Records by segment number.
        self._parts: dict[int, bytes] = {}
        #: The last segment received in order; 0 for none.
        self._in_order = 0
        #: The last segment the sender may send without an ACK. It starts with a window of one segment.
        self._window_end = 1
        #: The number of the last segment; 0 while it is unknown.
        self._last = 0

    @property
    def is_complete(self) -> bool:
        """Whether every segment has been received."""
        return self.error is None and self._in_order > 0 and self._in_order == self._last

    @property
    def is_done(self) -> bool:
        """Whether the transfer is complete or has failed."""
        return self.error is not None or self.is_complete

    @property
    def data(self) -> bytes:
        """The records received in order so far."""
        return b"".join(self._parts[number] for number in range(1, self._in_order + 1))

    def received(self, header: RmppHeader, data: Buffer, now: float) -> RmppHeader | None:
        """Handle a MAD from the sender, with its 200 bytes of data; returns the header to reply with, or None."""
        if self.error is not None:
            self.dropped["after the end"] += 1
            return None
        if now >= self.deadline and not self.is_complete:
            return self.abort(RmppStatus.TOTAL_TIME_TOO_LONG)
        if header.version != VERSION:
            return self._fail(RmppStatus.UNSUPPORTED_VERSION)
        if header.type == RmppType.DATA:
            return self._data_received(header, data)
        if header.type in (RmppType.STOP, RmppType.ABORT):
            if self.is_complete:
                self.dropped["after the end"] += 1
            else:
                self.error = _end_status(header)
            return None
        return self._fail(RmppStatus.BAD_TYPE)

    def abort(self, status: RmppStatus = RmppStatus.UNSPECIFIED) -> RmppHeader:
        """Give up the transfer; returns the STOP or ABORT to send."""
        self.error = status
        self._parts.clear()
        self._in_order = 0
        return _stop_or_abort(status)

    def _fail(self, status: RmppStatus) -> RmppHeader | None:
        """Fail because of an invalid MAD. A complete response is kept."""
        if self.is_complete:
            self.dropped["after the end"] += 1
            return None
        return self.abort(status)

    def _data_received(self, header: RmppHeader, data: Buffer) -> RmppHeader | None:
        """Handle a DATA segment; returns the header to reply with, or None."""
        number = header.segment
        if 0 < number <= self._in_order:
            self.dropped["duplicate"] += 1
            return self._ack()  # the last ACK was lost or is still on its way
        if number == 0 or (number == 1) is not bool(header.flags & RmppFlag.FIRST):
            return self._fail(RmppStatus.BAD_SEGMENT)
        if number in self._parts:
            self.dropped["duplicate"] += 1
            return None
        is_last = bool(header.flags & RmppFlag.LAST)
        if (problem := self._objection(header, data, is_last)) is not None:
            return self._fail(problem)
        if number > self._in_order + self._window:
            self.dropped["beyond the window"] += 1
            return None
        size = header.length - SA_HEADER_SIZE if is_last else SEGMENT_SIZE
        if is_last:
            self._last = number
        self._parts[number] = bytes(data[:size])
        if number != self._in_order + 1:
            return None
        while self._in_order + 1 in self._parts:
            self._in_order += 1
        return self._ack() if self._in_order >= self._window_end or self.is_complete else None

    def _objection(self, header: RmppHeader, data: Buffer, is_last: bool) -> RmppStatus | None:
        """Why a new segment ends the transfer; None if it is valid."""
        number = header.segment
        needed = SEGMENT_SIZE
        if is_last:
            if not SA_HEADER_SIZE <= header.length <= SA_HEADER_SIZE + SEGMENT_SIZE:
                return RmppStatus.BAD_LENGTH
            needed = header.length - SA_HEADER_SIZE
            if self._last or any(held > number for held in self._parts):
                return RmppStatus.BAD_SEGMENT
        elif self._last and number > self._last:
            return RmppStatus.BAD_SEGMENT
        if len(data) < needed:
            return RmppStatus.BAD_LENGTH
        announced = header.length if number == 1 and not is_last else 0
        if (number - 1) * SEGMENT_SIZE + needed > self.max_size or announced > self._max_payload_length():
            return RmppStatus.NO_RESOURCES
        return None

    def _max_payload_length(self) -> int:
        """The payload length of a response of ``max_size`` bytes, which includes the header of each segment."""
        return self.max_size + SA_HEADER_SIZE * -(-self.max_size // SEGMENT_SIZE)

    def _ack(self) -> RmppHeader:
        self._window_end = self._in_order + self._window
        return _control_header(RmppType.ACK, segment=self._in_order, length=self._window_end)


class Sender:
    """Sends one response in segments.

    Segments that are not acknowledged within ``timeout`` seconds are sent again, at most ``retries`` times in a row.
    After ``total_time`` seconds the transfer fails. ``error`` is the status of a transfer that failed, else None.
    """

    def __init__(
        self, data: Buffer, now: float, *, timeout: float = 0.5, retries: int = 7, total_time: float = 30.0
    ) -> None:
        self.error: int | None = None
        #: MADs that were ignored, by reason.
        self.dropped: Counter[str] = Counter()
        self._data = bytes(data)
        #: The number of segments.
        self._count = max(1, -(-len(self._data) // SEGMENT_SIZE))
        self._timeout = timeout
        self._retries = retries
        self._retries_left = retries
        #: When the transfer fails, and when segments are sent again.
        self._deadline = now + total_time
        self._resend_at = now + timeout
        #: The last segment acknowledged, the last of the receiver's window, and the next to send.
        self._acked = 0
        self._window_end = 1
        self._next = 1
        #: The highest segment ever sent. After a loss, ``_next`` goes back and this does not.
        self._sent = 0
        self._outbox: list[tuple[RmppHeader, bytes]] = []
        self._send_window(now)

    @property
    def is_complete(self) -> bool:
        """Whether every segment has been acknowledged."""
        return self.error is None and self._acked == self._count

    @property
    def is_done(self) -> bool:
        """Whether the transfer is complete or has failed."""
        return self.error is not None or self.is_complete

    def next_deadline(self) -> float | None:
        """When :meth:`timer` has something to do."""
        return None if self.is_done else min(self._resend_at, self._deadline)

    def to_send(self) -> list[tuple[RmppHeader, bytes]]:
        """The (header, records) pairs to send, in order. Each is returned once."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def received(self, header: RmppHeader, now: float) -> None:
        """Handle a MAD from the receiver."""
        if self.is_done:
            self.dropped["after the end"] += 1
        elif header.version != VERSION:
            self._fail(RmppStatus.UNSUPPORTED_VERSION)
        elif header.type == RmppType.ACK:
            self._acknowledged(header, now)
        elif header.type in (RmppType.STOP, RmppType.ABORT):
            self.error = _end_status(header)
            self._outbox.clear()
        else:
            self._fail(RmppStatus.BAD_TYPE)

    def timer(self, now: float) -> None:
        """Send unacknowledged segments again, or give up."""
        if self.is_done:
            return
        if now >= self._deadline:
            self._fail(RmppStatus.TOTAL_TIME_TOO_LONG)
        elif now >= self._resend_at:
            if not self._retries_left:
                self._fail(RmppStatus.TOO_MANY_RETRIES)
                return
            self._retries_left -= 1
            self._next = self._acked + 1
            self._send_window(now)

    def _acknowledged(self, header: RmppHeader, now: float) -> None:
        if header.segment > self._sent:
            self._fail(RmppStatus.SEGMENT_TOO_BIG)
        elif header.length < header.segment:
            self._fail(RmppStatus.WINDOW_TOO_SMALL)
        elif header.segment < self._acked:
            self.dropped["old acknowledgement"] += 1
        else:
            if header.segment > self._acked:
                self._retries_left = self._retries
                self._resend_at = now + self._timeout
            self._acked = header.segment
            self._next = max(self._next, self._acked + 1)
            self._window_end = max(self._window_end, header.length)
            self._send_window(now)

    def _send_window(self, now: float) -> None:
        """Send the segments that the window allows."""
        end = min(self._window_end, self._count, self._acked + WINDOW)
        if self._next <= end:
            self._resend_at = now + self._timeout
        for number in range(self._next, end + 1):
            self._outbox.append(self._segment(number))
        self._next = max(self._next, end + 1)
        self._sent = max(self._sent, end)

    def _segment(self, number: int) -> tuple[RmppHeader, bytes]:
        data = self._data[(number - 1) * SEGMENT_SIZE : number * SEGMENT_SIZE]
        flags, length = RmppFlag.ACTIVE, 0
        if number == 1:
            flags |= RmppFlag.FIRST
            length = self._count * SA_HEADER_SIZE + len(self._data)
        if number == self._count:
            flags |= RmppFlag.LAST
            length = SA_HEADER_SIZE + len(data)
        return RmppHeader(VERSION, RmppType.DATA, _NO_RESPONSE_TIME, flags, 0, number, length), data

    def _fail(self, status: RmppStatus) -> None:
        self.error = status
        self._outbox = [(_stop_or_abort(status), b"")]
