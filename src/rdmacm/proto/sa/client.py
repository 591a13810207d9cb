"""The client of the subnet administrator (SA): the queries of one port and the responses to them.

An :class:`SaClient` is driven by :meth:`SaClient.query`, :meth:`SaClient.mad_received` and :meth:`SaClient.timer`. Each
takes the time in seconds, of any clock that only goes forward. After each of them, the caller fetches the output from
:meth:`SaClient.mads_to_send`, :meth:`SaClient.events` and :meth:`SaClient.next_deadline`. No received MAD raises an
exception; MADs that are ignored are counted in ``dropped``.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from rdmacm.errors import cm_error
from rdmacm.proto.entropy import RandomSource
from rdmacm.proto.mad import BASE_VERSION, MAD_SIZE, RESPONSE, MadAddress, MgmtClass
from rdmacm.proto.sa.attributes import Attribute
from rdmacm.proto.sa.mad import CLASS_VERSION, HEADER_LENGTH, SaMad, SaMethod, SaStatus
from rdmacm.proto.sa.rmpp import (
    SA_HEADER_SIZE,
    SEGMENT_SIZE,
    Receiver,
    RmppFlag,
    RmppHeader,
    RmppStatus,
    RmppType,
    describe_rmpp,
)
from rdmacm.proto.timerheap import LazyTimerHeap
from rdmacm.proto.wire import Buffer, WireError

#: Record sizes in bytes, for responses that leave AttributeOffset 0, as responses to Get, Set and Delete may.
_RECORD_SIZES: dict[int, int] = {
    Attribute.CLASS_PORT_INFO: 72,
    Attribute.NODE_RECORD: 112,
    Attribute.SERVICE_RECORD: 176,
    Attribute.PATH_RECORD: 64,
    Attribute.MC_MEMBER_RECORD: 56,
}

#: After a segmented response is complete, its repeated segments are acknowledged for this many seconds, because the
#: last ACK may have been lost. This many responses are remembered at most.
_LINGER = 5.0
_MAX_LINGERING = 64

_LOWER_HALF = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SaResponse:
    """The outcome of a query.

    ``query`` is the number of the query and ``status`` the SA's status (:class:`~rdmacm.proto.sa.mad.SaStatus`).
    ``records`` are whole records, each with its padding to a multiple of 8 bytes. ``error`` is None if there was a
    response, else ``"timeout"`` (``status`` is then the last BUSY status, if any) or ``"rmpp ..."``. ``truncated``: the
    SA had more records than the response holds.
    """

    query: int
    status: int
    records: tuple[bytes, ...] = ()
    error: str | None = None
    truncated: bool = False


@dataclass(slots=True)
class _Query:
    """A query without a response; times are in seconds on the caller's clock."""

    number: int
    #: The lower half of the request's transaction id.
    tid: int
    destination: MadAddress
    #: The request, and the same as a MAD.
    request: SaMad
    packed: bytes
    #: Seconds from one copy of the request to the next.
    interval: float
    #: When the next copy is due, and how many copies may still be sent.
    next_send: float
    sends_left: int
    #: When the query is given up.
    deadline: float
    #: The last BUSY status.
    status: int = 0
    #: Reassembles a segmented response, from its first segment on.
    receiver: Receiver | None = None
    #: The last segment, whose transaction id has the upper half that the system has set.
    segment: SaMad | None = None
    #: AttributeOffset of the first segment.
    attribute_offset: int = 0


class SaClient:
    """The queries of one port to the SA. Sans-IO: time, MADs and randomness are passed in by the caller.

    ``reassembles``: the transport reassembles segmented responses (RMPP). ``max_queries`` bounds the queries without a
    response, ``max_size`` the bytes of a response's records.
    """

    def __init__(
        self, random: RandomSource, *, reassembles: bool = False, max_queries: int = 4096, max_size: int = 8 << 20
    ) -> None:
        self.reassembles = reassembles
        self.max_queries = max_queries
        self.max_size = max_size
        #: MADs that were ignored, by reason.
        self.dropped: Counter[str] = Counter()
        self._random = random
        #: Queries without a response, by number.
        self._queries: dict[int, _Query] = {}
        #: The same, by the lower half of the transaction id.
        self._by_tid: dict[int, _Query] = {}
        #: Queries whose segmented response is complete: (query, when to forget it), by the same half.
        self._lingering: dict[int, tuple[_Query, float]] = {}
        #: When each query is sent again or given up.
        self._timers: LazyTimerHeap[int] = LazyTimerHeap(self._deadline_of)
        self._last_number = 0
        self._outbox: list[tuple[MadAddress, bytes]] = []
        self._pending_events: list[SaResponse] = []
        #: When :meth:`timer` has something to do, or None.
        self.next_deadline: Callable[[], float | None] = self._timers.next_deadline

    def __len__(self) -> int:
        """The number of queries without a response."""
        return len(self._queries)

    # -- output -----------------------------------------------------------------------------------------------

    def mads_to_send(self) -> list[tuple[MadAddress, bytes]]:
        """The (address, MAD) pairs to send, in order. Each is returned once."""
        mads, self._outbox = self._outbox, []
        return mads

    def events(self) -> list[SaResponse]:
        """The outcomes since the last call."""
        events, self._pending_events = self._pending_events, []
        return events

    # -- calls ------------------------------------------------------------------------------------------------

    def query(
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
        """Query the SA at ``destination``; returns the number of the query, which its :class:`SaResponse` carries.

        ``data`` is a packed record of up to 200 bytes, and ``component_mask`` selects the fields that count. The
        request is sent up to ``tries`` times, ``timeout / tries`` seconds apart, until there is a response. ValueError
        for an argument out of range, ENOBUFS if too many queries are without a response.
        """
        if len(data) > SEGMENT_SIZE:
            raise ValueError(f"a query has up to {SEGMENT_SIZE} bytes of data, not {len(data)}")
        if not (timeout > 0 and tries > 0):
            raise ValueError(f"timeout and tries are more than 0, not {timeout} and {tries}")
        if len(self._queries) >= self.max_queries:
            raise cm_error(errno.ENOBUFS, f"{self.max_queries} queries are waiting for a response", "sa_query")
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
        """Drop a query: no response is reported for it. An unknown number is ignored."""
        found = self._queries.get(query)
        if found is not None:
            self._abort(found, RmppStatus.UNSPECIFIED)
            self._forget(found)

    def timer(self, now: float) -> None:
        """Send again what is due, and give up the queries whose timeout is over."""
        while (number := self._timers.pop_due(now)) is not None:
            query = self._queries[number]
            if query.deadline <= now:
                self._abort(query, RmppStatus.TOTAL_TIME_TOO_LONG)
                self._finish(query, SaResponse(query.number, query.status, error="timeout"))
                continue
            query.sends_left -= 1
            query.next_send += query.interval
            if query.next_send <= now:  # a late timer does not catch up in a burst
                query.next_send = now + query.interval
            self._outbox.append((query.destination, query.packed))
            self._schedule(query)

    def _deadline_of(self, number: int) -> float | None:
        """When a query is sent again or given up; None if it is complete."""
        query = self._queries.get(number)
        if query is None:
            return None
        # While a response is being reassembled, a copy of the request would start another one.
        is_sent_again = query.sends_left > 0 and query.receiver is None
        return min(query.next_send, query.deadline) if is_sent_again else query.deadline

    def _schedule(self, query: _Query) -> None:
        deadline = self._deadline_of(query.number)
        assert deadline is not None
        self._timers.schedule(query.number, deadline)

    def _new_tid(self) -> int:
        """The lower half of a transaction id; the upper half belongs to the system."""
        tid = 0
        while not tid or tid in self._by_tid or tid in self._lingering:
            tid = self._random.getrandbits(32)
        return tid

    # -- input ------------------------------------------------------------------------------------------------

    def mad_received(self, source: MadAddress, mad: Buffer, now: float) -> None:
        """Handle a received MAD. One that is no response to a query is dropped and counted."""
        reason = self._handle(source, mad, now)
        if reason:
            self.dropped[reason] += 1

    def _handle(self, source: MadAddress, mad: Buffer, now: float) -> str | None:
        """Handle a MAD, or return why it is dropped."""
        if len(mad) < HEADER_LENGTH or (len(mad) > MAD_SIZE and not self.reassembles):
            return "length"
        if mad[1] != MgmtClass.SUBN_ADM:
            return "class"
        if mad[0] != BASE_VERSION or mad[2] != CLASS_VERSION:
            return "version"
        if not mad[3] & RESPONSE:
            return "not a response"
        try:
            response = SaMad.unpack(mad)
        except WireError:
            return "malformed"
        tid = response.transaction_id & _LOWER_HALF
        query = self._by_tid.get(tid)
        if query is None:
            return self._handle_late(tid, source, response, now)
        if source.lid != query.destination.lid:
            return "source"
        if response.method != _response_method(query.request.method):
            return "method"
        if response.attribute_id != query.request.attribute_id:
            return "attribute"
        if now >= query.deadline:
            return "late"
        if response.status & SaStatus.BUSY:
            query.status = response.status
            return None
        if response.rmpp.is_active and not self.reassembles:
            return self._handle_segment(query, response, now)
        self._complete(query, response, _payload(response), response.attribute_offset)
        return None

    def _handle_segment(self, query: _Query, segment: SaMad, now: float) -> str | None:
        """Handle a segment of a response."""
        receiver = query.receiver
        if receiver is None:
            if segment.rmpp.type == RmppType.ACK:
                return "rmpp"
            receiver = query.receiver = Receiver(query.deadline, max_size=self.max_size)
        if segment.rmpp.type == RmppType.DATA and segment.rmpp.segment == 1:
            query.attribute_offset = segment.attribute_offset
        query.segment = segment
        reply = receiver.received(segment.rmpp, segment.data, now)
        if reply is not None:
            self._send_rmpp(query, segment, reply)
        if receiver.error is not None:
            error = f"rmpp {describe_rmpp(receiver.error)}"
            self._finish(query, SaResponse(query.number, segment.status, error=error))
        elif receiver.is_complete:
            self._linger(query, now)
            self._complete(query, segment, receiver.data, query.attribute_offset)
        return None

    def _handle_late(self, tid: int, source: MadAddress, segment: SaMad, now: float) -> str | None:
        """Handle a MAD without a query: a repeated segment if the last ACK of a response was lost."""
        query, until = self._lingering.get(tid, (None, 0.0))
        if query is None or query.receiver is None or now >= until:
            return "transaction"
        if source.lid != query.destination.lid or not segment.rmpp.is_active:
            return "transaction"
        reply = query.receiver.received(segment.rmpp, segment.data, now)
        if reply is not None:
            self._send_rmpp(query, segment, reply)
        return "duplicate"

    def _send_rmpp(self, query: _Query, segment: SaMad, header: RmppHeader) -> None:
        """Send an ACK, STOP or ABORT for a segment: the header of the response, with the method of the request."""
        reply = replace(segment, method=segment.method & ~RESPONSE, rmpp=header, status=0, data=b"")
        self._outbox.append((query.destination, reply.pack()))

    def _abort(self, query: _Query, status: RmppStatus) -> None:
        """Abort the response that is being reassembled, if any."""
        if query.receiver is not None and not query.receiver.is_done:
            assert query.segment is not None
            self._send_rmpp(query, query.segment, query.receiver.abort(status))

    def _linger(self, query: _Query, now: float) -> None:
        """Keep a query whose segmented response is complete, to acknowledge repeated segments."""
        for tid in [tid for tid, (_, until) in self._lingering.items() if until <= now]:
            del self._lingering[tid]
        while len(self._lingering) >= _MAX_LINGERING:
            del self._lingering[next(iter(self._lingering))]
        self._lingering[query.tid] = (query, now + _LINGER)

    def _complete(self, query: _Query, response: SaMad, data: bytes, attribute_offset: int) -> None:
        records: tuple[bytes, ...] = ()
        truncated = False
        if response.status == 0:
            records, truncated = _split(query.request, data, attribute_offset)
        self._finish(query, SaResponse(query.number, response.status, records, None, truncated))

    def _finish(self, query: _Query, response: SaResponse) -> None:
        self._forget(query)
        self._pending_events.append(response)

    def _forget(self, query: _Query) -> None:
        del self._queries[query.number], self._by_tid[query.tid]
        self._timers.discard(query.number)


def _response_method(method: int) -> int:
    """The method of the response to a request."""
    return SaMethod(method).response if method in _METHODS else method | RESPONSE


_METHODS = frozenset(SaMethod)


def _payload(response: SaMad) -> bytes:
    """The records of a response in one piece, without padding if its RMPP header gives the length."""
    header = response.rmpp
    only = RmppFlag.FIRST | RmppFlag.LAST
    if header.is_active and header.flags & only == only and header.length >= SA_HEADER_SIZE:
        return response.data[: header.length - SA_HEADER_SIZE]
    return response.data


def _split(request: SaMad, data: bytes, attribute_offset: int) -> tuple[tuple[bytes, ...], bool]:
    """The whole records in the data, and whether a part of another record follows them."""
    size = attribute_offset * 8
    if request.method in (SaMethod.GET_TABLE, SaMethod.GET_TRACE_TABLE, SaMethod.GET_MULTI):
        if not size:
            return (), False  # an empty table
        whole = len(data) // size * size
        return tuple(data[at : at + size] for at in range(0, whole, size)), whole < len(data)
    size = size or _RECORD_SIZES.get(request.attribute_id, len(data))
    return ((data[:size],), False) if size <= len(data) else ((), True)
