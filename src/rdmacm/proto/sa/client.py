"""Who asks the subnet administrator: the questions of one port and their answers.

A :class:`SaClient` is driven by :meth:`SaClient.ask`, :meth:`SaClient.mad_received` and :meth:`SaClient.timer`, each
with the time as seconds of any clock that only goes forward. What it wants comes out of
:meth:`SaClient.mads_to_send`, :meth:`SaClient.next_deadline` and :meth:`SaClient.events`, to be asked for after each
of them. Nothing that arrives raises; what is of no use is counted in ``dropped``.
"""

from __future__ import annotations

import errno
import heapq
from collections import Counter
from dataclasses import dataclass, replace
from typing import Protocol

from rdmacm.errors import cm_error
from rdmacm.proto.mad import MAD_SIZE, MadAddress, MgmtClass
from rdmacm.proto.sa.attributes import Attribute
from rdmacm.proto.sa.mad import CLASS_VERSION, HEADER_LENGTH, RESPONSE, SaMad, SaMethod, SaStatus
from rdmacm.proto.sa.rmpp import (
    SA_HEADER,
    SEGMENT_SIZE,
    Receiver,
    RmppFlag,
    RmppHeader,
    RmppStatus,
    RmppType,
    describe_rmpp,
)
from rdmacm.proto.wire import Buffer, WireError

__all__ = ["Answer", "SaClient"]

#: Bytes of a record, for answers that do not say: those to Get, Set and Delete need not.
_SIZES: dict[int, int] = {
    Attribute.CLASS_PORT_INFO: 72,
    Attribute.NODE_RECORD: 112,
    Attribute.SERVICE_RECORD: 176,
    Attribute.PATH_RECORD: 64,
    Attribute.MC_MEMBER_RECORD: 56,
}

#: How long segments that come again after a whole answer are acknowledged again, seconds, and of how many answers.
_LINGER = 5.0
_MOST_LINGERING = 64

_LOW = 0xFFFFFFFF


class RandomSource(Protocol):
    """Where unpredictable numbers come from: ``random.SystemRandom()`` is one."""

    def getrandbits(self, k: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """What has become of a question.

    ``status`` is the administrator's (:class:`~rdmacm.proto.sa.mad.SaStatus`). ``records`` are whole records, each
    with what fills it up to a multiple of 8 bytes. ``error`` is None where there was an answer, else ``"timeout"``
    (with the last status that said to wait, if any) or ``"rmpp ..."``. ``truncated``: the answer had more records than
    it had room for.
    """

    query: int
    status: int
    records: tuple[bytes, ...] = ()
    error: str | None = None
    truncated: bool = False


@dataclass(slots=True)
class _Query:
    number: int
    tid: int
    destination: MadAddress
    request: SaMad
    packed: bytes
    interval: float
    next_send: float
    sends_left: int
    deadline: float
    status: int = 0
    receiver: Receiver | None = None
    #: The datagram of an answer that came last, with the transaction id as the system has made it.
    segment: SaMad | None = None
    #: Of the first segment of an answer.
    attribute_offset: int = 0


class SaClient:
    """The questions of one port.

    ``reassembles``: an answer of several datagrams arrives as one. ``max_queries`` bounds the questions that are not
    answered yet, ``max_size`` the bytes of an answer's records.
    """

    def __init__(
        self, random: RandomSource, *, reassembles: bool = False, max_queries: int = 4096, max_size: int = 8 << 20
    ) -> None:
        self.reassembles = reassembles
        self.max_queries = max_queries
        self.max_size = max_size
        self.dropped: Counter[str] = Counter()
        self._random = random
        self._queries: dict[int, _Query] = {}
        self._by_tid: dict[int, _Query] = {}
        #: Those that have their answer in segments: (question, until when).
        self._lingering: dict[int, tuple[_Query, float]] = {}
        self._timers: list[tuple[float, int]] = []
        self._last_number = 0
        self._outbox: list[tuple[MadAddress, bytes]] = []
        self._news: list[Answer] = []

    def __len__(self) -> int:
        """How many questions wait for an answer."""
        return len(self._queries)

    # -- what comes out ---------------------------------------------------------------------------------------

    def mads_to_send(self) -> list[tuple[MadAddress, bytes]]:
        """(address, MAD) to be sent, in order; they are handed out once."""
        mads, self._outbox = self._outbox, []
        return mads

    def events(self) -> list[Answer]:
        """The answers since the last call."""
        events, self._news = self._news, []
        return events

    def next_deadline(self) -> float | None:
        """When :meth:`timer` has something to do, or None."""
        timers = self._timers
        while timers and self._due(timers[0][1]) != timers[0][0]:
            heapq.heappop(timers)
        return timers[0][0] if timers else None

    # -- calls ------------------------------------------------------------------------------------------------

    def ask(
        self,
        method: int,
        attribute: int,
        component_mask: int,
        data: Buffer,
        destination: MadAddress,
        now: float,
        *,
        timeout: float,
        tries: int = 10,
    ) -> int:
        """Ask the administrator at ``destination``; the number of the question, which its :class:`Answer` has too.

        ``data`` is a packed record, of which ``component_mask`` says what counts. The same datagram is sent ``tries``
        times, ``timeout / tries`` seconds apart, until there is an answer. ValueError for what does not fit, ENOBUFS
        where too many questions are open.
        """
        if len(data) > SEGMENT_SIZE:
            raise ValueError(f"a question has up to {SEGMENT_SIZE} bytes of data, not {len(data)}")
        if not (timeout > 0 and tries > 0):
            raise ValueError(f"timeout and tries are more than 0, not {timeout} and {tries}")
        if len(self._queries) >= self.max_queries:
            raise cm_error(errno.ENOBUFS, f"{self.max_queries} questions are not answered yet", "sa_query")
        tid = self._new_tid()
        request = SaMad(method, attribute, tid, component_mask, bytes(data))
        packed = request.pack()
        self._last_number += 1
        interval = timeout / tries
        query = _Query(
            self._last_number, tid, destination, request, packed, interval, now + interval, tries - 1, now + timeout
        )
        self._queries[query.number] = self._by_tid[tid] = query
        self._outbox.append((destination, packed))
        self._schedule(query)
        return query.number

    def cancel(self, query: int) -> None:
        """No answer is wanted any more; nothing happens where there is no such question."""
        found = self._queries.get(query)
        if found is not None:
            self._abort(found, RmppStatus.UNSPECIFIED)
            self._forget(found)

    def timer(self, now: float) -> None:
        """Send again what is due, and give up what has waited long enough."""
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            query = self._queries[heapq.heappop(self._timers)[1]]
            if query.deadline <= now:
                self._abort(query, RmppStatus.TOTAL_TIME_TOO_LONG)
                self._finish(query, Answer(query.number, query.status, error="timeout"))
                continue
            query.sends_left -= 1
            query.next_send += query.interval
            if query.next_send <= now:  # a late timer does not catch up in a burst
                query.next_send = now + query.interval
            self._outbox.append((query.destination, query.packed))
            self._schedule(query)

    def _due(self, number: int) -> float | None:
        """When something has to be done about a question; None where there is none of this number."""
        query = self._queries.get(number)
        if query is None:
            return None
        # While an answer comes in, a question asked again would begin another.
        is_sent_again = query.sends_left > 0 and query.receiver is None
        return min(query.next_send, query.deadline) if is_sent_again else query.deadline

    def _schedule(self, query: _Query) -> None:
        due = self._due(query.number)
        assert due is not None
        if len(self._timers) > 2 * len(self._queries) + 64:
            # Answered questions leave theirs behind, which can be far in the future.
            self._timers = [entry for entry in self._timers if self._due(entry[1]) == entry[0]]
            heapq.heapify(self._timers)
        heapq.heappush(self._timers, (due, query.number))

    def _new_tid(self) -> int:
        """The lower half of a transaction id; the upper one is the system's."""
        tid = 0
        while not tid or tid in self._by_tid or tid in self._lingering:
            tid = self._random.getrandbits(32)
        return tid

    # -- what arrives -----------------------------------------------------------------------------------------

    def mad_received(self, source: MadAddress, mad: Buffer, now: float) -> None:
        """A datagram has arrived; what is no answer to a question is dropped and counted."""
        reason = self._received(source, mad, now)
        if reason:
            self.dropped[reason] += 1

    def _received(self, source: MadAddress, mad: Buffer, now: float) -> str | None:
        """Take in a datagram, or say why not."""
        if len(mad) < HEADER_LENGTH or (len(mad) > MAD_SIZE and not self.reassembles):
            return "length"
        if mad[1] != MgmtClass.SUBN_ADM:
            return "class"
        if mad[0] != 1 or mad[2] != CLASS_VERSION:
            return "version"
        if not mad[3] & RESPONSE:
            return "not a response"
        try:
            answer = SaMad.unpack(mad)
        except WireError:
            return "malformed"
        tid = answer.transaction_id & _LOW
        query = self._by_tid.get(tid)
        if query is None:
            return self._after_the_end(tid, source, answer, now)
        if source.lid != query.destination.lid:
            return "source"
        if answer.method != _response(query.request.method):
            return "method"
        if answer.attribute_id != query.request.attribute_id:
            return "attribute"
        if now >= query.deadline:
            return "late"
        if answer.status & SaStatus.BUSY:
            query.status = answer.status
            return None
        if answer.rmpp.is_active and not self.reassembles:
            return self._segment(query, answer, now)
        self._answered(query, answer, _payload(answer), answer.attribute_offset)
        return None

    def _segment(self, query: _Query, answer: SaMad, now: float) -> str | None:
        """A datagram of an answer that comes in several."""
        receiver = query.receiver
        if receiver is None:
            if answer.rmpp.type == RmppType.ACK:
                return "rmpp"
            receiver = query.receiver = Receiver(query.deadline, max_size=self.max_size)
            self._schedule(query)
        if answer.rmpp.type == RmppType.DATA and answer.rmpp.segment == 1:
            query.attribute_offset = answer.attribute_offset
        query.segment = answer
        reply = receiver.received(answer.rmpp, answer.data, now)
        if reply is not None:
            self._reply(query, answer, reply)
        if receiver.error is not None:
            error = f"rmpp {describe_rmpp(receiver.error)}"
            self._finish(query, Answer(query.number, answer.status, error=error))
        elif receiver.is_complete:
            self._linger(query, now)
            self._answered(query, answer, receiver.data, query.attribute_offset)
        return None

    def _reply(self, query: _Query, answer: SaMad, header: RmppHeader) -> None:
        """Send what belongs to the transfer of an answer: in the answer's words, but as a request."""
        reply = replace(answer, method=answer.method & ~RESPONSE, rmpp=header, status=0, data=b"")
        self._outbox.append((query.destination, reply.pack()))

    def _abort(self, query: _Query, status: RmppStatus) -> None:
        """Stop an answer that is coming in."""
        if query.receiver is not None and not query.receiver.is_done:
            assert query.segment is not None
            self._reply(query, query.segment, query.receiver.abort(status))

    def _linger(self, query: _Query, now: float) -> None:
        for tid in [tid for tid, (_, until) in self._lingering.items() if until <= now]:
            del self._lingering[tid]
        while len(self._lingering) >= _MOST_LINGERING:
            del self._lingering[next(iter(self._lingering))]
        self._lingering[query.tid] = (query, now + _LINGER)

    def _after_the_end(self, tid: int, source: MadAddress, answer: SaMad, now: float) -> str | None:
        """A datagram nobody waits for: the last acknowledgement of an answer may have been lost."""
        query, until = self._lingering.get(tid, (None, 0.0))
        if query is None or query.receiver is None or now >= until:
            return "transaction"
        if source.lid != query.destination.lid or not answer.rmpp.is_active:
            return "transaction"
        reply = query.receiver.received(answer.rmpp, answer.data, now)
        if reply is not None:
            self._reply(query, answer, reply)
        return "duplicate"

    def _answered(self, query: _Query, answer: SaMad, data: bytes, attribute_offset: int) -> None:
        records: tuple[bytes, ...] = ()
        truncated = False
        if answer.status == 0:
            records, truncated = _cut(query.request, data, attribute_offset)
        self._finish(query, Answer(query.number, answer.status, records, None, truncated))

    def _finish(self, query: _Query, answer: Answer) -> None:
        self._forget(query)
        self._news.append(answer)

    def _forget(self, query: _Query) -> None:
        del self._queries[query.number], self._by_tid[query.tid]


def _response(method: int) -> int:
    """The method of an answer."""
    return SaMethod(method).response if method in _METHODS else method | RESPONSE


_METHODS = frozenset(SaMethod)


def _payload(answer: SaMad) -> bytes:
    """The records of an answer that has arrived whole, without what fills up a datagram that says so."""
    header = answer.rmpp
    only = RmppFlag.FIRST | RmppFlag.LAST
    if header.is_active and header.flags & only == only and header.length >= SA_HEADER:
        return answer.data[: header.length - SA_HEADER]
    return answer.data


def _cut(request: SaMad, data: bytes, attribute_offset: int) -> tuple[tuple[bytes, ...], bool]:
    """The whole records in the data, and whether there is a part of one behind them."""
    size = attribute_offset * 8
    if request.method in (SaMethod.GET_TABLE, SaMethod.GET_TRACE_TABLE, SaMethod.GET_MULTI):
        if not size:
            return (), False  # an empty table has records of no size
        whole = len(data) // size * size
        return tuple(data[at : at + size] for at in range(0, whole, size)), whole < len(data)
    size = size or _SIZES.get(request.attribute_id, len(data))
    return ((data[:size],), False) if size <= len(data) else ((), True)
