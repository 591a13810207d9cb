"""The packets from one end of a connection to a queue pair of the other.

A half sees requests of its own end, numbered by PSN, and the responses to requests of the other end, which have the
PSNs of those. What is missing, repeated, outstanding and acknowledged follows from the order of the PSNs.

A PSN that a capture lacks was lost before the place of the capture, unless it comes later. A PSN that comes a second
time was lost behind that place, or its acknowledgement was; so it is with a PSN whose acknowledgement is asked for.
"""

from __future__ import annotations

from collections import Counter, deque

from rdmacm.proto.constants import PSN_HALF, PSN_MASK
from rdmacm.trace.opcodes import FIRST, MIDDLE, ONLY, OPERATION_NAMES, QUERY, RESPONSE_END, RESPONSE_MIDDLE
from rdmacm.trace.statistics import Durations, Series

#: Messages without acknowledgement, gaps and finished messages that are kept.
_MOST_OUTSTANDING, _MOST_GAPS, MOST_SPANS = 1024, 64, 256
#: A PSN further ahead than this belongs to another connection, or the capture has a hole.
_LONGEST_GAP = 1 << 14
_LARGEST_PAYLOAD = 4096
#: Nanoseconds within which the same packet is taken for a copy of it: one captured at two interfaces, say.
_COPY = 1_000_000


class Span:
    """A message: from its first packet to its acknowledgement, or to its last packet where nothing is acknowledged."""

    __slots__ = ("end", "first", "last", "octets", "operation", "repeats", "start", "wire")

    first: int
    last: int

    def __init__(self, operation: str, psn: int, start: int, octets: int, wire: int) -> None:
        self.operation: str = operation
        self.first = self.last = psn
        self.start: int = start
        #: None as long as it is not finished.
        self.end: int | None = None
        self.octets: int = octets
        #: Bytes of its longest packet of IP.
        self.wire: int = wire
        self.repeats: int = 0


class Operations:
    """What one kind of operation has moved."""

    __slots__ = ("count", "durations", "octets")

    count: int
    octets: int

    def __init__(self) -> None:
        self.count = self.octets = 0
        self.durations: Durations = Durations()


class _Gap:
    """PSNs that are missing, and how often the other end had sent a NAK before."""

    __slots__ = ("first", "last", "naks")

    def __init__(self, first: int, last: int, naks: int) -> None:
        self.first, self.last, self.naks = first, last, naks


class Direction:
    """One direction of a connection, of which it asks for the MTU, and whether its requests are acknowledged."""

    last: int
    macs: bytes
    macs_before: bytes
    missing: int
    missing_responses: int
    reordered: int
    repeated: int
    repeated_responses: int
    resends: int
    unseen: int

    def __init__(self, pair: bytes, qpn: int, now: int) -> None:
        self.pair = pair
        self.qpn = qpn
        self.reverse: Direction | None = None
        #: The longest payload of a packet; what has more is a train of several.
        self.limit = _LARGEST_PAYLOAD
        self.packets = self.octets = 0
        self.first = self.last = now
        #: Congestion: packets marked by switches, packets that can be marked, packets that report marks.
        self.marked = self.markable = self.congestion_notices = 0
        self.tos = 0
        #: The MAC addresses of its frames, to and from; those before them, and how often they changed.
        self.macs = self.macs_before = b""
        self.mac_changes: int = 0
        self.series: Series = Series(now)
        #: P_Keys of the packets, without the bit of full members.
        self.pkey = -1
        #: The PSN of the last packet.
        self.latest: int = -1
        self._previous = (-1, -1, -1, -1)
        # Requests.
        self.next_psn: int = -1
        self.next_response: int = -1
        #: Payload bytes of the message that is being sent, and those that a WRITE has announced.
        self.message_octets: int = 0
        self.announced = 0
        self.current: Span | None = None
        self.outstanding: deque[Span] = deque()
        self.spans: list[Span] = []
        self.operations: dict[str, Operations] = {}
        self.unwatched: int = 0
        # Losses.
        self.gaps: list[_Gap] = []
        self.missing = self.unseen = self.reordered = self.repeated = self.resends = 0
        self.missing_responses = self.repeated_responses = 0
        self._rnr_before = 0
        self._highest_response = -1
        #: Since the other end has acknowledged something: how often requests were sent again, and the first of them.
        self.rounds: int = 0
        self.stuck_wire: int = 0
        self._repeat = -1
        #: The last PSN whose acknowledgement was asked for, and lacking.
        self._probed = -1
        #: How often, up to now, the same responses to a READ were asked for again, though the capture has had them.
        self.asked_again: int = 0
        self._asked = -1
        self.longest_acknowledged: int = 0
        self.longest_payload = 0
        # Answers of this end.
        self.naks: Counter[int] = Counter()
        self.rnr: int = 0
        self.acknowledgements: int = 0
        # Round trips of requests of this end.
        self.round_trips: Durations = Durations()
        self._sample = -1
        self._sampled = 0

    def take_macs(self, macs: bytes) -> None:
        """The frames have other MAC addresses from here on."""
        self.mac_changes += bool(self.macs)
        self.macs, self.macs_before = macs, self.macs

    @property
    def mtu(self) -> int:
        """Payload bytes of a packet; 0 if that is not known."""
        raise NotImplementedError

    @property
    def is_acknowledged(self) -> bool:
        """Whether the transport has acknowledgements."""
        raise NotImplementedError

    # -- copies ------------------------------------------------------------------------------------------------

    def remember(self, opcode: int, psn: int) -> None:
        """Keep in mind which packet was the last one."""
        self._previous = opcode, psn, self.next_psn, self.next_response
        self.latest = psn

    def is_copy(self, kind: int, opcode: int, psn: int, now: int) -> bool:
        """Whether this is the last packet once more, and nobody can have asked for it."""
        if now - self.last >= _COPY or (self.reverse is not None and self.reverse.last >= self.last):
            return False
        if kind in (MIDDLE, RESPONSE_MIDDLE):  # of which nothing but the PSN is remembered
            following = self.next_psn if kind == MIDDLE else self.next_response
            return psn == self.latest and (psn + 1 & PSN_MASK) == following
        return self._previous == (opcode, psn, self.next_psn, self.next_response)

    # -- requests ----------------------------------------------------------------------------------------------

    def request(self, kind: int, opcode: int, psn: int, size: int, wire: int, now: int) -> None:
        """A packet of a request; ``size`` is that of its payload, of a READ what it asks for, ``wire`` that of IP."""
        steps = 1
        if kind == QUERY and OPERATION_NAMES[opcode] == "READ":
            steps = max(1, -(-size // self.mtu)) if self.mtu else 0
        expected = self.next_psn
        if psn != expected and expected >= 0:
            ahead = psn - expected & PSN_MASK
            if ahead >= PSN_HALF:
                if not size and kind == ONLY and not self._is_waited_for(psn):
                    self._probe(psn)
                    return
                if self._is_repeat(psn, wire):
                    self._repeated(psn)
                    if kind == QUERY and OPERATION_NAMES[opcode] == "READ":
                        self.asked_again = self.asked_again + 1 if psn == self._asked else 1
                        self._asked = psn
                    return
            else:
                if ahead <= _LONGEST_GAP:
                    self._miss(expected, psn - 1 & PSN_MASK, ahead)
                self._advance(psn, steps)
        else:
            self._advance(psn, steps)
        self._message(kind, opcode, psn, size, wire, now, steps)

    def _is_waited_for(self, psn: int) -> bool:
        """Whether a request is one of those without an acknowledgement."""
        oldest = self.outstanding[0] if self.outstanding else self.current
        return oldest is not None and (psn - oldest.first & PSN_MASK) < PSN_HALF

    def _probe(self, psn: int) -> None:
        """A request that only asks for an acknowledgement. The next PSN is the first that its sender has none for."""
        lacks = psn + 1 & PSN_MASK
        rnr = self.reverse.rnr if self.reverse else 0
        # One with the last PSN asks whether the other end is still there.
        if rnr == self._rnr_before and lacks not in (self.next_psn, self._probed):
            self.resends += 1
            self._probed = lacks

    def _advance(self, psn: int, steps: int) -> None:
        # Without an MTU, the number of responses of a READ is not known, nor the PSN that follows.
        self.next_psn = psn + steps & PSN_MASK if steps else -1
        self.asked_again = 0

    def _message(self, kind: int, opcode: int, psn: int, size: int, wire: int, now: int, steps: int) -> None:
        if kind in (FIRST, ONLY, QUERY):
            span = Span(OPERATION_NAMES[opcode], psn, now, size, wire)
            if kind == FIRST:
                self.current, self.message_octets = span, size
                span.octets = self.announced
                return
            span.last = psn + max(steps, 1) - 1 & PSN_MASK
        elif kind == MIDDLE:
            self.message_octets += size
            return
        else:
            current, self.current = self.current, None
            span = current or Span(OPERATION_NAMES[opcode], psn, now, 0, wire)
            span.last = psn
            if current is None or not span.octets:
                span.octets = self.message_octets + size if current else size
        if not self.is_acknowledged:
            self.finish(span, now)
            return
        if len(self.outstanding) == _MOST_OUTSTANDING:
            self.outstanding.popleft()
            self.unwatched += 1
        self.outstanding.append(span)
        if self._sample < 0:
            self._sample, self._sampled = psn, now

    def finish(self, span: Span, now: int) -> None:
        """Count a message as done."""
        span.end = now
        operation = self.operations.get(span.operation)
        if operation is None:
            operation = self.operations[span.operation] = Operations()
        operation.count += 1
        operation.octets += span.octets
        operation.durations.add(now - span.start)
        if len(self.spans) < MOST_SPANS:
            self.spans.append(span)

    def _miss(self, first: int, last: int, count: int) -> None:
        self.missing += count
        naks = self.reverse.naks[0] if self.reverse else 0
        if len(self.gaps) == _MOST_GAPS:
            del self.gaps[0]
        self.gaps.append(_Gap(first, last, naks))

    def _is_repeat(self, psn: int, wire: int) -> bool:
        """Whether the capture has had this PSN already; if not, it is no longer missing."""
        for at, gap in enumerate(self.gaps):
            behind = psn - gap.first & PSN_MASK
            length = gap.last - gap.first & PSN_MASK
            if behind > length:
                continue
            rest = []
            if behind:
                rest.append(_Gap(gap.first, psn - 1 & PSN_MASK, gap.naks))
            if behind < length:
                rest.append(_Gap(psn + 1 & PSN_MASK, gap.last, gap.naks))
            self.gaps[at : at + 1] = rest
            if self.rounds or (self.reverse is not None and gap.naks != self.reverse.naks[0]):
                self._round(psn, wire, seen=False)
            else:
                # Nobody has asked for it: it came late.
                self.reordered += 1
            return False
        self._round(psn, wire, seen=True)
        return True

    def _round(self, psn: int, wire: int, *, seen: bool) -> None:
        """A PSN behind the expected one. The sender begins again with the first that is not acknowledged."""
        if self._repeat < 0 or psn != (self._repeat + 1) & PSN_MASK:
            if self._is_waited_for(psn):
                self.rounds += 1
                self.stuck_wire = wire
            rnr = self.reverse.rnr if self.reverse else 0
            # What a receiver was not ready for was not lost, and a probe has counted what it asked for.
            if seen and rnr == self._rnr_before and psn != self._probed:
                self.resends += 1
            self._rnr_before = rnr
        self._repeat = psn

    def _repeated(self, psn: int) -> None:
        self.repeated += 1
        # Whether the answer is to the first packet or to its repetition, it does not say.
        self._sample = -1
        for span in self.outstanding:
            if psn - span.first & PSN_MASK <= span.last - span.first & PSN_MASK:
                span.repeats += 1
                break

    # -- responses to requests of this half ----------------------------------------------------------------------

    def awaits(self, psn: int) -> bool:
        """Whether a response with this PSN may be to a request of this half."""
        if self.next_psn < 0:
            return bool(self.outstanding)
        return (self.next_psn - 1 - psn & PSN_MASK) <= _LONGEST_GAP

    def acknowledge(self, psn: int, now: int) -> None:
        """All requests up to this PSN have been executed."""
        outstanding = self.outstanding
        progress = False
        while outstanding and (psn - outstanding[0].last & PSN_MASK) < PSN_HALF:
            span = outstanding.popleft()
            self.finish(span, now)
            self._reached(span)
            progress = True
        while self.gaps and (psn - self.gaps[0].last & PSN_MASK) < PSN_HALF:
            # They have arrived, though the capture has never had them.
            gap = self.gaps.pop(0)
            self.unseen += (gap.last - gap.first & PSN_MASK) + 1
            progress = True
        for begun in (outstanding[0] if outstanding else None, self.current):
            if begun is not None and (psn - begun.first & PSN_MASK) < PSN_HALF:
                self._reached(begun)
                progress = True
        if progress:
            self.rounds = 0
            self._repeat = -1
        if self._sample >= 0 and (psn - self._sample & PSN_MASK) < PSN_HALF:
            self.round_trips.add(now - self._sampled)
            self._sample = -1

    def _reached(self, span: Span) -> None:
        if span.wire > self.longest_acknowledged:  # noqa: PLR1730 (a call takes longer)
            self.longest_acknowledged = span.wire

    def response(self, psn: int, syndrome: int) -> int | None:
        """Count a response that this end sends; returns the PSN up to which it acknowledges, or None."""
        self.acknowledgements += 1
        type = syndrome >> 5 & 3
        if type == 0:
            return psn
        if type == 1:
            self.rnr += 1
        else:
            self.naks[syndrome & 0x1F] += 1
        return psn - 1 & PSN_MASK

    def read_response(self, kind: int, psn: int) -> None:
        """Follow the PSNs of the responses to READs, which this end sends."""
        expected, highest = self.next_response, self._highest_response
        if expected >= 0 and psn != expected:
            ahead = psn - expected & PSN_MASK
            if ahead >= PSN_HALF:
                self.repeated_responses += 1
            elif ahead <= _LONGEST_GAP:
                self.missing_responses += ahead
        elif expected < 0 <= highest and (highest - psn & PSN_MASK) < PSN_HALF:
            self.repeated_responses += 1
        if highest < 0 or (psn - highest & PSN_MASK) < PSN_HALF:
            self._highest_response = psn
        # Behind the end of a message, the next response may be to any request.
        self.next_response = -1 if kind == RESPONSE_END else psn + 1 & PSN_MASK

    # -- sums --------------------------------------------------------------------------------------------------

    @property
    def lost(self) -> int:
        """Packets of this end that were lost at least: before the place of the capture, or behind it."""
        # Who lacks a response asks for it again, which counts as a resend at the other end.
        return self.missing - self.unseen - self.reordered + self.resends
