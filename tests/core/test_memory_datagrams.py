"""The memory of datagrams in the compiled core: held no longer than needed, and collected with its queue pair."""

from __future__ import annotations

import pytest

from rdmacm.enums import WROpcode
from rdmacm.proto.core_choice import compiled
from rdmacm.proto.engine import EngineCounters
from rdmacm.proto.roce.icrc import icrc_between
from rdmacm.proto.roce.ud import UdEngine, UdSend, flow_between
from rdmacm.proto.work import RecvWork, SendWork
from support.compiled import assert_collected, is_held

pytestmark = pytest.mark.skipif(compiled is None, reason="the compiled core is not built (python3 dev.py core)")

WAY = bytes((10, 0, 0, 1)), bytes((10, 0, 0, 2)), 50_000
QKEY = 0x01234567


def engines() -> tuple[UdEngine[str], UdEngine[str]]:
    made = UdEngine[str](1, EngineCounters()), UdEngine[str](2, EngineCounters())
    for each in made:
        each.qkey = QKEY
    return made


def send(view: memoryview) -> UdSend[str]:
    return UdSend(SendWork(1, WROpcode.SEND, (view,)), "way", icrc_between(*WAY), 2, QKEY)


def exchange(ends: tuple[UdEngine[str], UdEngine[str]]) -> None:
    for _, pieces, segment in ends[0].datagrams(64, 0):
        ends[1].received(memoryview(b"".join(pieces)), segment, flow_between(*WAY))


def test_buffers_are_held_until_they_complete() -> None:
    ends = engines()
    buffers = [bytearray(64), bytearray(200), bytearray(200)]
    ends[0].post_send(send(memoryview(buffers[0])))
    for buffer in buffers[1:]:
        ends[1].post_recv(RecvWork(2, (memoryview(buffer),)))
    assert all(map(is_held, buffers))
    exchange(ends)
    assert ends[1].core_receives
    assert [wc.status.name for end in ends for wc in end.completed] == ["SUCCESS", "SUCCESS"]
    assert list(map(is_held, buffers)) == [False, False, True]
    ends[1].flush()
    assert not is_held(buffers[2])


def test_engine_that_is_deleted_lets_go_of_buffers() -> None:
    ends = engines()
    buffers = [bytearray(64), bytearray(200)]
    ends[0].post_send(send(memoryview(buffers[0])))
    ends[1].post_recv(RecvWork(2, (memoryview(buffers[1]),)))
    del ends
    assert not any(map(is_held, buffers))


def test_engines_and_buffers_in_a_cycle_are_collected() -> None:
    def post(sent: memoryview, received: memoryview) -> object:
        ends = engines()
        ends[0].post_send(send(sent))
        ends[1].post_recv(RecvWork(2, (received,)))
        return ends

    assert_collected(post)


def test_read_only_receive_is_not_written() -> None:
    ends = engines()
    text = b"constant" * 20
    ends[1].post_recv(RecvWork(2, (memoryview(text),)))
    ends[0].post_send(send(memoryview(b"x" * 64)))
    exchange(ends)
    assert [wc.status.name for wc in ends[1].completed] == ["LOC_PROT_ERR"]
    assert text == b"constant" * 20


def test_wrong_types_are_refused() -> None:
    """The glue checks the types of what it is given."""
    assert compiled is not None
    end, flow = engines()[0], flow_between(*WAY)
    port = compiled.Wire(compiled.Lock(), lambda: None, ())
    regions, queue = compiled.Regions(), compiled.CompletionQueue(port, 4)
    sizes = 1, 1, 1, True, True, True
    for call in (
        lambda: end.core_take(b"", 0, flow.source, flow.destination, 0, 0, 0, None),  # type: ignore[arg-type]
        lambda: end.core_take(b"", 0, b"123", b"123", 0, 0, 0, []),
        lambda: end.core_take(b"", 0, flow.source, flow.destination, 0, 256, 0, []),
        lambda: end.core_build(1, 0, None),  # type: ignore[arg-type]
        lambda: end.core_post_send(object()),
        lambda: end.core_post_recv(object()),  # type: ignore[arg-type]
        lambda: end.core_next_recv(-1),
        lambda: compiled.Route(port, None, 0, b"123", 4791, 0, [], 0),
        lambda: compiled.Route(port, None, 0, bytes(4), 4791, 0, [(0, 0, bytes(200))], 0),
        lambda: compiled.Route(port, None, 0, bytes(4), 4791, 0, [5], 0),
        lambda: compiled.Datagrams(port, object(), None, None, regions, queue, queue, (3, 3), sizes),
    ):
        with pytest.raises((TypeError, ValueError, AttributeError, OverflowError)):
            call()
    with pytest.raises(AttributeError):
        end.core_pending = 5  # type: ignore[misc]
    datagrams = compiled.Datagrams(port, end, None, None, regions, queue, queue, (-1, -1), sizes)
    with pytest.raises(ValueError, match="on a wire"):
        compiled.Datagrams(port, end, None, None, regions, queue, queue, (-1, -1), sizes)
    for address in (b"123", bytes(17)):
        with pytest.raises(ValueError, match="4 or 16 bytes"):
            datagrams.add_address(address, 0)
    datagrams.detach()
    requests = [object()]
    assert datagrams.post_send(requests) is requests
    assert datagrams.post_recv(requests) is requests
