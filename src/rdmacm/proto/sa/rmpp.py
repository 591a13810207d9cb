"""Answers of several datagrams: the reliable multi-packet transaction protocol (InfiniBand Architecture 13.6).

Only that of the subnet administrator, where each segment carries 200 bytes of records and 20 bytes of header count
as data too. A :class:`Sender` cuts an answer up, a :class:`Receiver` puts one together. Neither has a clock or a
socket, neither grows with what the other end says, and neither raises for it.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from rdmacm.proto.wire import Buffer, WireError

__all__ = [
    "NO_RMPP",
    "SA_HEADER",
    "SEGMENT_SIZE",
    "Receiver",
    "RmppFlag",
    "RmppHeader",
    "RmppStatus",
    "RmppType",
    "Sender",
    "describe_rmpp",
]

#: Bytes of records in a segment.
SEGMENT_SIZE = 200
#: What of a segment's payload length is the subnet administrator's header.
SA_HEADER = 20

HEADER_SIZE = 12
VERSION = 1
_HEADER = struct.Struct("!BBBBII")

#: Segments under way at a time, whatever the other end would allow: Linux's number.
WINDOW = 64

#: "No response time given" (InfiniBand Architecture 13.6.2.1).
_NO_RESPONSE_TIME = 0x1F


class RmppType(IntEnum):
    """What a datagram is to this protocol."""

    NONE = 0
    DATA = 1
    ACK = 2
    STOP = 3
    ABORT = 4


class RmppFlag(IntFlag):
    """``flags`` of a :class:`RmppHeader`."""

    ACTIVE = 1
    FIRST = 2
    LAST = 4


class RmppStatus(IntEnum):
    """Why a transfer ended early (InfiniBand Architecture 13.6.2.1, table of RMPPStatus)."""

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
    RmppStatus.OK: "without a reason",
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
    """An RMPP status in words."""
    return _WORDS.get(status, f"status {status}")


@dataclass(frozen=True, slots=True)
class RmppHeader:
    """The 12 bytes behind the header of a MAD.

    ``segment`` is the number of a DATA segment, from 1, or the last one that an ACK has in order. ``length`` is a DATA
    segment's payload length (of all segments in the first one, or 0), or the last segment of an ACK's new window.
    """

    version: int = 0
    type: int = RmppType.NONE
    response_time: int = 0
    flags: int = 0
    status: int = 0
    segment: int = 0
    length: int = 0

    def pack(self) -> bytes:
        """The bytes on the wire; ValueError for a field that does not fit."""
        if not (0 <= self.response_time < 32 and 0 <= self.flags < 8):
            raise ValueError("response time or flags of the RMPP header do not fit")
        try:
            return _HEADER.pack(
                self.version, self.type, self.response_time << 3 | self.flags, self.status, self.segment, self.length
            )
        except struct.error as problem:
            raise ValueError(f"a field of the RMPP header is out of range: {problem}") from None

    @classmethod
    def unpack(cls, data: Buffer) -> RmppHeader:
        """The header in 12 bytes; WireError for another length."""
        if len(data) != HEADER_SIZE:
            raise WireError(f"an RMPP header has {HEADER_SIZE} bytes, not {len(data)}")
        version, kind, flags, status, segment, length = _HEADER.unpack(data)
        return cls(version, kind, flags >> 3, flags & 7, status, segment, length)

    @property
    def is_active(self) -> bool:
        """Whether the datagram is one of this protocol. OpenSM sets the flag alone where nobody cuts its answers up."""
        return bool(self.flags & RmppFlag.ACTIVE) and self.type != RmppType.NONE


NO_RMPP = RmppHeader()


def _control(kind: RmppType, status: int = 0, segment: int = 0, length: int = 0) -> RmppHeader:
    return RmppHeader(VERSION, kind, _NO_RESPONSE_TIME, RmppFlag.ACTIVE, status, segment, length)


def _end(status: RmppStatus) -> RmppHeader:
    """STOP or ABORT, as the status demands."""
    return _control(RmppType.STOP if status == RmppStatus.NO_RESOURCES else RmppType.ABORT, status)


def _ended_by(header: RmppHeader) -> int:
    """The status of a STOP or an ABORT; one that it cannot have is an illegal one."""
    if header.type == RmppType.STOP:
        return header.status if header.status == RmppStatus.NO_RESOURCES else RmppStatus.ILLEGAL_STATUS
    is_legal = RmppStatus.TOTAL_TIME_TOO_LONG <= header.status <= RmppStatus.UNSPECIFIED
    return header.status if is_legal else RmppStatus.ILLEGAL_STATUS


class Receiver:
    """Puts one answer together.

    ``deadline`` is when all of it has to be there, on the clock of ``now``; ``max_size`` is the most bytes of records.
    ``error`` is why the transfer has ended early, or None; ``data`` the answer once ``is_complete``. ``dropped`` counts
    what was of no use.
    """

    __slots__ = (
        "_in_order",
        "_last",
        "_parts",
        "_size_of_last",
        "_window_end",
        "_window",
        "deadline",
        "dropped",
        "error",
        "max_size",
    )

    def __init__(self, deadline: float, *, max_size: int = 8 << 20, window: int = WINDOW) -> None:
        self.deadline = deadline
        self.max_size = max_size
        self.error: int | None = None
        self.dropped: Counter[str] = Counter()
        self._window = window
        self._parts: dict[int, bytes] = {}
        self._in_order = 0
        #: The sender begins with a window of one segment.
        self._window_end = 1
        self._last = 0
        self._size_of_last = 0

    @property
    def is_complete(self) -> bool:
        """Whether all of the answer is there."""
        return self.error is None and self._in_order > 0 and self._in_order == self._last

    @property
    def is_done(self) -> bool:
        """Whether the answer is there, or will never be."""
        return self.error is not None or self.is_complete

    @property
    def data(self) -> bytes:
        """The records, as far as they are there in order."""
        return b"".join(self._parts[number] for number in range(1, self._in_order + 1))

    def received(self, header: RmppHeader, data: Buffer, now: float) -> RmppHeader | None:
        """A datagram of the sender's, with its 200 bytes of data; the header of an answer to it, if there is one."""
        if self.error is not None:
            self.dropped["after the end"] += 1
            return None
        if now >= self.deadline and not self.is_complete:
            return self.abort(RmppStatus.TOTAL_TIME_TOO_LONG)
        if header.version != VERSION:
            return self._fail(RmppStatus.UNSUPPORTED_VERSION)
        if header.type == RmppType.DATA:
            return self._take(header, data)
        if header.type in (RmppType.STOP, RmppType.ABORT):
            if self.is_complete:
                self.dropped["after the end"] += 1
            else:
                self.error = _ended_by(header)
            return None
        return self._fail(RmppStatus.BAD_TYPE)

    def timer(self, now: float) -> RmppHeader | None:
        """An ABORT to be sent, if all the time has passed."""
        return self.abort(RmppStatus.TOTAL_TIME_TOO_LONG) if now >= self.deadline and not self.is_done else None

    def abort(self, status: RmppStatus = RmppStatus.UNSPECIFIED) -> RmppHeader:
        """Give up; what to tell the sender."""
        self.error = status
        self._parts.clear()
        self._in_order = 0
        return _end(status)

    def _fail(self, status: RmppStatus) -> RmppHeader | None:
        """The sender contradicts itself. An answer that is there stays as it is."""
        if self.is_complete:
            self.dropped["after the end"] += 1
            return None
        return self.abort(status)

    def _take(self, header: RmppHeader, data: Buffer) -> RmppHeader | None:
        number = header.segment
        if 0 < number <= self._in_order:
            self.dropped["duplicate"] += 1
            return self._ack()  # the last one was lost, or is on its way
        if number == 0 or (number == 1) is not bool(header.flags & RmppFlag.FIRST):
            return self._fail(RmppStatus.BAD_SEGMENT)
        if number in self._parts:
            self.dropped["duplicate"] += 1
            return None
        is_last = bool(header.flags & RmppFlag.LAST)
        if (problem := self._problem(header, data, is_last)) is not None:
            return self._fail(problem)
        if number > self._in_order + self._window:
            self.dropped["beyond the window"] += 1
            return None
        size = header.length - SA_HEADER if is_last else SEGMENT_SIZE
        if is_last:
            self._last = number
        self._parts[number] = bytes(data[:size])
        if number != self._in_order + 1:
            return None
        while self._in_order + 1 in self._parts:
            self._in_order += 1
        return self._ack() if self._in_order >= self._window_end or self.is_complete else None

    def _problem(self, header: RmppHeader, data: Buffer, is_last: bool) -> RmppStatus | None:
        """What is wrong with a new segment."""
        number = header.segment
        needed = SEGMENT_SIZE
        if is_last:
            if not SA_HEADER <= header.length <= SA_HEADER + SEGMENT_SIZE:
                return RmppStatus.BAD_LENGTH
            needed = header.length - SA_HEADER
            if self._last or any(held > number for held in self._parts):
                return RmppStatus.BAD_SEGMENT
        elif self._last and number > self._last:
            return RmppStatus.BAD_SEGMENT
        if len(data) < needed:
            return RmppStatus.BAD_LENGTH
        announced = header.length if number == 1 and not is_last else 0
        if (number - 1) * SEGMENT_SIZE + needed > self.max_size or announced > self._most_announced():
            return RmppStatus.NO_RESOURCES
        return None

    def _most_announced(self) -> int:
        """The largest payload length of a whole answer that there is room for: each segment's header counts."""
        return self.max_size + SA_HEADER * -(-self.max_size // SEGMENT_SIZE)

    def _ack(self) -> RmppHeader:
        self._window_end = self._in_order + self._window
        return _control(RmppType.ACK, segment=self._in_order, length=self._window_end)


class Sender:
    """Sends one answer in segments.

    What is not acknowledged within ``timeout`` seconds is sent again, ``retries`` times in a row at most;
    after ``total_time`` it is over in any case. ``error`` is why the transfer has failed, or None.
    """

    __slots__ = (
        "_acked",
        "_count",
        "_data",
        "_ends",
        "_next",
        "_outbox",
        "_resend",
        "_retries",
        "_sent",
        "_timeout",
        "_tries",
        "_window_end",
        "dropped",
        "error",
    )

    def __init__(
        self, data: Buffer, now: float, *, timeout: float = 0.5, retries: int = 7, total_time: float = 30.0
    ) -> None:
        self.error: int | None = None
        self.dropped: Counter[str] = Counter()
        self._data = bytes(data)
        self._count = max(1, -(-len(self._data) // SEGMENT_SIZE))
        self._timeout = timeout
        self._retries = self._tries = retries
        self._ends = now + total_time
        self._acked = 0
        self._window_end = 1
        self._next = 1
        #: The highest segment that has been sent; what comes after a loss is sent again from an earlier one on.
        self._sent = 0
        self._resend = now + timeout
        self._outbox: list[tuple[RmppHeader, bytes]] = []
        self._fill(now)

    @property
    def is_complete(self) -> bool:
        """Whether all segments have been acknowledged."""
        return self.error is None and self._acked == self._count

    @property
    def is_done(self) -> bool:
        """Whether the transfer is over, one way or the other."""
        return self.error is not None or self.is_complete

    def next_deadline(self) -> float | None:
        """When :meth:`timer` has something to do."""
        return None if self.is_done else min(self._resend, self._ends)

    def to_send(self) -> list[tuple[RmppHeader, bytes]]:
        """(header, records) to be sent, in order; they are handed out once."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def received(self, header: RmppHeader, now: float) -> None:
        """A datagram of the receiver's."""
        if self.is_done:
            self.dropped["after the end"] += 1
        elif header.version != VERSION:
            self._fail(RmppStatus.UNSUPPORTED_VERSION)
        elif header.type == RmppType.ACK:
            self._acknowledged(header, now)
        elif header.type in (RmppType.STOP, RmppType.ABORT):
            self.error = _ended_by(header)
            self._outbox.clear()
        else:
            self._fail(RmppStatus.BAD_TYPE)

    def timer(self, now: float) -> None:
        """Send again what has not been acknowledged, or give up."""
        if self.is_done:
            return
        if now >= self._ends:
            self._fail(RmppStatus.TOTAL_TIME_TOO_LONG)
        elif now >= self._resend:
            if not self._tries:
                self._fail(RmppStatus.TOO_MANY_RETRIES)
                return
            self._tries -= 1
            self._next = self._acked + 1
            self._fill(now)

    def _acknowledged(self, header: RmppHeader, now: float) -> None:
        if header.segment > self._sent:
            self._fail(RmppStatus.SEGMENT_TOO_BIG)
        elif header.length < header.segment:
            self._fail(RmppStatus.WINDOW_TOO_SMALL)
        elif header.segment < self._acked:
            self.dropped["old acknowledgement"] += 1
        else:
            if header.segment > self._acked:
                self._tries = self._retries
                self._resend = now + self._timeout
            self._acked = header.segment
            self._next = max(self._next, self._acked + 1)
            self._window_end = max(self._window_end, header.length)
            self._fill(now)

    def _fill(self, now: float) -> None:
        """Send what the window has room for."""
        end = min(self._window_end, self._count, self._acked + WINDOW)
        if self._next <= end:
            self._resend = now + self._timeout
        for number in range(self._next, end + 1):
            self._outbox.append(self._segment(number))
        self._next = max(self._next, end + 1)
        self._sent = max(self._sent, end)

    def _segment(self, number: int) -> tuple[RmppHeader, bytes]:
        data = self._data[(number - 1) * SEGMENT_SIZE : number * SEGMENT_SIZE]
        flags, length = RmppFlag.ACTIVE, 0
        if number == 1:
            flags |= RmppFlag.FIRST
            length = self._count * SA_HEADER + len(self._data)
        if number == self._count:
            flags |= RmppFlag.LAST
            length = SA_HEADER + len(data)
        return RmppHeader(VERSION, RmppType.DATA, _NO_RESPONSE_TIME, flags, 0, number, length), data

    def _fail(self, status: RmppStatus) -> None:
        self.error = status
        self._outbox = [(_end(status), b"")]
