"""SA queries of one port, and invalid responses to them."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdmacm.proto.mad import MadAddress
from rdmacm.proto.sa.attributes import Attribute
from rdmacm.proto.sa.client import SaClient, SaResponse
from rdmacm.proto.sa.mad import SaMad, SaMethod, SaStatus
from rdmacm.proto.sa.rmpp import SEGMENT_SIZE, RmppFlag, RmppHeader, RmppType, Sender
from support import sa_vectors
from support.examples import MANY_EXAMPLES
from support.rows import for_each

SM = MadAddress(lid=1)
SINGLE = RmppHeader(1, RmppType.DATA, 31, 7, 0, 1, 20 + 64)


def query(client: SaClient, now: float = 0.0, **options: Any) -> int:
    """Send a path record query."""
    options = {"method": SaMethod.GET, "attribute": Attribute.PATH_RECORD, "timeout": 2.0} | options
    method, attribute = options.pop("method"), options.pop("attribute")
    return client.query(method, attribute, 0x180C, sa_vectors.PATH_REQUEST[56:120], SM, now, **options)


def sent(client: SaClient) -> list[SaMad]:
    mads = client.mads_to_send()
    assert all(address == SM and len(mad) == 256 for address, mad in mads)
    return [SaMad.unpack(mad) for _, mad in mads]


def response(request: SaMad, **changes: Any) -> SaMad:
    """A valid response with one path record."""
    plain = replace(
        request,
        method=SaMethod(request.method).response,
        data=sa_vectors.PATH_ANSWER[56:],
        attribute_offset=8,
        # The kernel puts its own number into the upper half.
        transaction_id=request.transaction_id | 0x0001_0002 << 32,
    )
    return replace(plain, **changes)


def receive(client: SaClient, mad: SaMad, now: float = 0.1, source: MadAddress = SM) -> list[SaResponse]:
    client.mad_received(source, mad.pack(fill=False), now)
    return client.events()


class TestQueries:
    def test_query_returns_the_records(self) -> None:
        client = SaClient(Random(1))
        number = query(client)
        [request] = sent(client)
        assert request.transaction_id >> 32 == 0
        assert request.component_mask == 0x180C
        assert receive(client, response(request)) == [SaResponse(number, 0, (sa_vectors.PATH_ANSWER[56:],))]
        assert len(client) == 0
        assert client.next_deadline() is None

    def test_captured_opensm_response_completes_the_query(self) -> None:
        client = SaClient(GivenNumbers(0x42))
        number = query(client)
        assert client.mads_to_send() == [(SM, sa_vectors.PATH_REQUEST)]
        client.mad_received(SM, sa_vectors.PATH_ANSWER, 0.1)
        assert client.events() == [SaResponse(number, 0, (sa_vectors.PATH_ANSWER[56:],))]

    def test_opensm_table_in_one_mad_completes_the_query(self) -> None:
        client = SaClient(GivenNumbers(0x104))
        number = client.query(SaMethod.GET_TABLE, Attribute.SERVICE_RECORD, 0x40, b"", SM, 0.0, timeout=1.0)
        client.mad_received(SM, sa_vectors.TABLE_ANSWER, 0.1)
        assert client.events() == [SaResponse(number, 0, (sa_vectors.TABLE_ANSWER[56:],))]

    @pytest.mark.parametrize(("size", "whole"), [(64, 3), (176, 1), (112, 1), (56, 3)])
    def test_truncated_opensm_table_returns_the_whole_records(self, size: int, whole: int) -> None:
        client = SaClient(Random(1))
        query(client, method=SaMethod.GET_TABLE)
        [request] = sent(client)
        rmpp = RmppHeader(flags=RmppFlag.ACTIVE)
        [found] = receive(client, response(request, attribute_offset=size // 8, data=bytes(range(200)), rmpp=rmpp))
        assert found.truncated
        assert [len(record) for record in found.records] == [size] * whole
        assert b"".join(found.records) == bytes(range(200))[: size * whole]

    def test_empty_table_returns_no_records(self) -> None:
        client = SaClient(Random(1))
        number = query(client, method=SaMethod.GET_TABLE)
        [request] = sent(client)
        assert receive(client, response(request, attribute_offset=0, data=b"")) == [SaResponse(number, 0)]

    @pytest.mark.parametrize("fill", [False, True])
    def test_response_without_record_length_is_one_record(self, fill: bool) -> None:
        client = SaClient(Random(1))
        number = query(client, attribute=Attribute.CLASS_PORT_INFO)
        [request] = sent(client)
        info = b"\1\2" + bytes(70)
        client.mad_received(SM, response(request, attribute_offset=0, data=info).pack(fill=fill), 0.1)
        assert client.events() == [SaResponse(number, 0, (info,))]

    def test_partial_record_is_reported_as_truncated(self) -> None:
        client = SaClient(Random(1))
        number = query(client)
        [request] = sent(client)
        assert receive(client, response(request, data=bytes(63))) == [SaResponse(number, 0, truncated=True)]

    @pytest.mark.parametrize("status", [SaStatus.NO_RECORDS, SaStatus.TOO_MANY_RECORDS, 0x000C, 0x0002])
    def test_error_status_completes_the_query(self, status: int) -> None:
        client = SaClient(Random(1))
        number = query(client)
        [request] = sent(client)
        assert receive(client, response(request, status=status)) == [SaResponse(number, status)]

    def test_responses_match_queries_by_transaction_id(self) -> None:
        client = SaClient(Random(1))
        numbers = [query(client) for _ in range(100)]
        requests = sent(client)
        assert len({request.transaction_id for request in requests}) == 100
        pairs = list(zip(numbers, requests, strict=True))
        Random(2).shuffle(pairs)
        for number, request in pairs:
            [found] = receive(client, response(request))
            assert found.query == number
        assert not client.dropped

    def test_transaction_ids_are_unique(self) -> None:
        client = SaClient(GivenNumbers(7, 7, 0, 7, 8))
        query(client)
        query(client)
        assert [request.transaction_id for request in sent(client)] == [7, 8]

    def test_response_to_a_cancelled_query_is_dropped(self) -> None:
        client = SaClient(Random(1))
        number = query(client)
        [request] = sent(client)
        client.cancel(number)
        client.cancel(number)
        assert receive(client, response(request)) == []
        assert client.dropped == {"transaction": 1}
        assert client.next_deadline() is None
        client.timer(100.0)
        assert client.events() == []

    def test_outstanding_queries_are_limited(self) -> None:
        client = SaClient(Random(1), max_queries=2)
        number = query(client)
        query(client)
        with pytest.raises(OSError, match="2 queries"):
            query(client)
        client.cancel(number)
        query(client)

    @pytest.mark.parametrize("options", [{"timeout": 0.0}, {"tries": 0}, {"timeout": -1.0}, {"timeout": float("nan")}])
    def test_timeout_must_be_positive(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError):
            query(SaClient(Random(1)), **options)

    def test_too_long_query_data_raises_value_error(self) -> None:
        with pytest.raises(ValueError, match="200 bytes"):
            SaClient(Random(1)).query(1, 0x35, 0, bytes(201), SM, 0.0, timeout=1.0)


class TestTimers:
    def test_query_is_retransmitted_until_the_timeout(self) -> None:
        client = SaClient(Random(1))
        number = query(client, 10.0, timeout=2.0, tries=4)
        times, mads = [10.0], client.mads_to_send()
        while (deadline := client.next_deadline()) is not None:
            client.timer(deadline)
            more = client.mads_to_send()
            times += [deadline] * len(more)
            mads += more
            events = client.events()
        assert times == [10.0, 10.5, 11.0, 11.5]
        assert len(set(mads)) == 1
        assert (deadline, events) == (None, [SaResponse(number, 0, error="timeout")])

    def test_query_ends_at_its_timeout(self) -> None:
        client = SaClient(Random(1))
        query(client, 10.0, timeout=2.0)
        client.timer(11.999)
        assert client.events() == []
        client.timer(12.0)
        assert [found.error for found in client.events()] == ["timeout"]

    def test_late_timer_sends_one_retransmission(self) -> None:
        client = SaClient(Random(1))
        query(client, 0.0, timeout=10.0, tries=10)
        client.mads_to_send()
        client.timer(7.5)
        assert len(client.mads_to_send()) == 1
        assert client.next_deadline() == 8.5

    def test_query_with_one_try_is_not_retransmitted(self) -> None:
        client = SaClient(Random(1))
        query(client, 0.0, timeout=3.0, tries=1)
        client.mads_to_send()
        assert client.next_deadline() == 3.0
        client.timer(3.0)
        assert client.mads_to_send() == []
        assert len(client.events()) == 1

    def test_late_response_is_dropped(self) -> None:
        client = SaClient(Random(1))
        query(client, 0.0, timeout=1.0)
        [request] = sent(client)
        assert receive(client, response(request), now=1.0) == []
        assert client.dropped == {"late": 1}

    def test_completed_query_leaves_no_timer(self) -> None:
        client = SaClient(Random(1))
        for _ in range(5000):
            query(client, timeout=3600.0)
            [request] = sent(client)
            receive(client, response(request))
        # Stale timers have no effect except memory.
        assert len(client._timers) < 200

    def test_busy_status_is_retried(self) -> None:
        client = SaClient(Random(1))
        number = query(client, 0.0, timeout=1.0, tries=4)
        [request] = sent(client)
        assert receive(client, response(request, status=SaStatus.BUSY)) == []
        assert client.next_deadline() == 0.25
        client.timer(0.25)
        [again] = sent(client)
        assert again == request
        assert [found.status for found in receive(client, response(request), 0.3)] == [0]
        assert number == 1

    def test_busy_status_until_the_timeout_fails_the_query(self) -> None:
        client = SaClient(Random(1))
        number = query(client, 0.0, timeout=1.0)
        while client.next_deadline() is not None:
            for request in sent(client):
                receive(client, response(request, status=SaStatus.BUSY), 0.0)
            client.timer(client.next_deadline() or 0.0)
        assert client.events() == [SaResponse(number, SaStatus.BUSY, error="timeout")]


class TestInvalidResponses:
    @pytest.mark.parametrize(
        ("reason", "changes"),
        [
            ("method", {"method": SaMethod.GET_TABLE_RESP}),
            ("not a response", {"method": SaMethod.GET}),
            ("attribute", {"attribute_id": Attribute.NODE_RECORD}),
            ("transaction", {"transaction_id": 0x12345678_00000001}),
        ],
    )
    def test_mismatched_response_is_dropped_and_counted(self, reason: str, changes: dict[str, Any]) -> None:
        client = SaClient(Random(1))
        query(client)
        [request] = sent(client)
        assert receive(client, response(request, **changes)) == []
        assert client.dropped == {reason: 1}
        assert len(receive(client, response(request))) == 1

    @pytest.mark.parametrize(
        ("reason", "at", "value"), [("class", 1, 4), ("version", 0, 2), ("version", 2, 1), ("class", 1, 7)]
    )
    def test_response_of_a_wrong_class_or_version_is_dropped(self, reason: str, at: int, value: int) -> None:
        client = SaClient(Random(1))
        query(client)
        [request] = sent(client)
        mad = bytearray(response(request).pack())
        mad[at] = value
        client.mad_received(SM, mad, 0.1)
        assert (client.events(), client.dropped) == ([], {reason: 1})

    @for_each("size", [0, 1, 24, 55, 257, 5000])
    def test_response_of_a_wrong_length_is_dropped(self, size: int) -> None:
        client = SaClient(Random(1))
        query(client)
        [request] = sent(client)
        client.mad_received(SM, response(request).pack().ljust(size, b"\0")[:size], 0.1)
        assert (client.events(), client.dropped) == ([], {"length": 1})

    def test_response_from_a_wrong_source_is_dropped(self) -> None:
        client = SaClient(Random(1))
        query(client)
        [request] = sent(client)
        assert receive(client, response(request), source=MadAddress(lid=2)) == []
        assert client.dropped == {"source": 1}

    def test_rmpp_ack_before_any_segment_is_dropped(self) -> None:
        client = SaClient(Random(1))
        query(client, method=SaMethod.GET_TABLE)
        [request] = sent(client)
        assert receive(client, response(request, rmpp=RmppHeader(1, RmppType.ACK, 31, 1, 0, 1, 2))) == []
        assert client.dropped == {"rmpp": 1}


class TestRmppResponses:
    def table(self, client: SaClient, count: int, now: float = 0.0) -> tuple[SaMad, Sender, bytes]:
        query(client, now, method=SaMethod.GET_TABLE, timeout=5.0)
        [request] = sent(client)
        data = Random(count).randbytes(count * 64)
        return request, Sender(data, now), data

    def run(self, client: SaClient, request: SaMad, sender: Sender, now: float = 0.1) -> None:
        for _ in range(1000):
            parts = sender.to_send()
            if not parts:
                return
            for rmpp, part in parts:
                client.mad_received(SM, response(request, rmpp=rmpp, data=part).pack(), now)
            for reply in sent(client):
                # Sent with the method of the request, from which the kernel knows the direction.
                assert reply.method == SaMethod.GET_TABLE
                assert reply.transaction_id == response(request).transaction_id
                sender.received(reply.rmpp, now)

    @for_each("count", [0, 1, 3, 4, 500])
    def test_segments_are_reassembled(self, count: int) -> None:
        client = SaClient(Random(1))
        request, sender, data = self.table(client, count)
        self.run(client, request, sender)
        [found] = client.events()
        assert sender.is_complete
        assert (found.status, found.error, found.truncated) == (0, None, False)
        assert found.records == tuple(data[at : at + 64] for at in range(0, len(data), 64))

    def test_final_ack_is_repeated_for_a_duplicate_segment(self) -> None:
        client = SaClient(Random(1))
        request, sender, _ = self.table(client, 1)
        [(rmpp, part)] = sender.to_send()
        last = response(request, rmpp=rmpp, data=part)
        assert len(receive(client, last)) == 1
        [first] = sent(client)
        assert receive(client, last) == []
        assert sent(client) == [first]
        assert client.dropped == {"duplicate": 1}
        receive(client, last, now=60.0)
        assert sent(client) == []

    def test_query_is_not_retransmitted_during_reassembly(self) -> None:
        client = SaClient(Random(1))
        request, sender, _ = self.table(client, 10)
        [(rmpp, part)] = sender.to_send()
        receive(client, response(request, rmpp=rmpp, data=part))
        client.mads_to_send()
        assert client.next_deadline() == 5.0
        client.timer(5.0)
        [stop] = sent(client)
        assert (stop.method, stop.rmpp.type, stop.rmpp.status) == (SaMethod.GET_TABLE, RmppType.ABORT, 118)
        assert [found.error for found in client.events()] == ["timeout"]

    def test_rmpp_abort_from_the_sa_fails_the_query(self) -> None:
        client = SaClient(Random(1))
        request, sender, _ = self.table(client, 10)
        [(rmpp, part)] = sender.to_send()
        receive(client, response(request, rmpp=rmpp, data=part))
        [found] = receive(client, response(request, rmpp=RmppHeader(1, RmppType.ABORT, 31, 1, 126)))
        assert found.error == "rmpp too many retries"
        assert found.records == ()

    def test_table_beyond_the_size_limit_is_aborted(self) -> None:
        client = SaClient(Random(1), max_size=1000)
        request, sender, _ = self.table(client, 100)
        self.run(client, request, sender)
        [found] = client.events()
        assert found.error == "rmpp resources exhausted"
        assert sender.error == 1

    def test_cancelled_query_aborts_the_transfer(self) -> None:
        client = SaClient(Random(1))
        request, sender, _ = self.table(client, 10)
        [(rmpp, part)] = sender.to_send()
        receive(client, response(request, rmpp=rmpp, data=part))
        client.mads_to_send()
        client.cancel(1)
        [stop] = sent(client)
        assert stop.rmpp.type == RmppType.ABORT
        assert client.events() == []

    def test_response_reassembled_by_the_kernel_completes_the_query(self) -> None:
        client = SaClient(Random(1), reassembles=True)
        query(client, method=SaMethod.GET_TABLE)
        [request] = sent(client)
        data = Random(1).randbytes(500 * 64)
        first = RmppHeader(1, RmppType.DATA, 31, RmppFlag.ACTIVE | RmppFlag.FIRST, 0, 1, 0)
        [found] = receive(client, response(request, rmpp=first, data=data))
        assert b"".join(found.records) == data
        assert sent(client) == []

    @pytest.mark.parametrize("reassembles", [False, True])
    def test_padding_of_a_single_segment_is_removed(self, reassembles: bool) -> None:
        client = SaClient(Random(1), reassembles=reassembles)
        query(client, method=SaMethod.GET_TABLE)
        [request] = sent(client)
        client.mad_received(SM, response(request, rmpp=SINGLE).pack(), 0.1)
        [found] = client.events()
        assert (found.records, found.truncated) == ((sa_vectors.PATH_ANSWER[56:],), False)


class GivenNumbers:
    """A random source with given numbers."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)

    def getrandbits(self, k: int) -> int:
        return self.numbers.pop(0)


@st.composite
def damaged(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    rmpp = RmppHeader(
        draw(st.sampled_from([1, 1, 1, 0])),
        draw(st.integers(0, 5)),
        0,
        draw(st.integers(0, 7)),
        draw(st.integers(0, 255)),
        draw(st.integers(0, 5)),
        draw(st.integers(0, 300)),
    )
    changes: dict[str, Any] = {
        "rmpp": rmpp,
        "attribute_offset": draw(st.one_of(st.integers(0, 30), st.integers(0, 0xFFFF))),
        "status": draw(st.sampled_from([0, 0, 0, 1, 0x300, 0xFFFF])),
        "method": draw(st.sampled_from([0x92, 0x92, 0x92, 0x81, 0x12])),
    }
    return changes, draw(st.binary(max_size=SEGMENT_SIZE + 10))


@settings(max_examples=MANY_EXAMPLES)
@given(st.booleans(), st.lists(st.one_of(damaged(), st.binary(max_size=400)), max_size=20))
def test_arbitrary_mads_do_not_raise(reassembles: bool, arriving: list[Any]) -> None:
    client = SaClient(Random(1), reassembles=reassembles, max_size=2000)
    number = query(client, method=SaMethod.GET_TABLE)
    other = query(client)
    request, untouched = sent(client)
    events = []
    for step, mad in enumerate(arriving):
        if isinstance(mad, bytes):
            client.mad_received(SM, b"\1\3\2" + mad, step / 20)
            client.mad_received(SM, mad, step / 20)
        else:
            client.mad_received(SM, response(request, data=mad[1], **mad[0]).pack(fill=False), step / 20)
        events += client.events()
        assert len(client.mads_to_send()) <= 2
    client.mad_received(SM, response(untouched).pack(), 1.5)
    events += client.events()
    client.timer(2.0)
    events += client.events()
    assert sorted(found.query for found in events) == [number, other]
    assert next(found for found in events if found.query == other).records == (sa_vectors.PATH_ANSWER[56:],)
    assert client.next_deadline() is None
