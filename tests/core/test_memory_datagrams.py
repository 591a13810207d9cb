"""The memory of datagrams in the compiled core: held no longer than needed, and collected with its queue pair."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from rdmacm.enums import WROpcode
from rdmacm.proto.core_choice import compiled
from rdmacm.proto.roce.icrc import icrc_between
from rdmacm.proto.roce.ud import UdEngine, UdSend, flow_between
from rdmacm.proto.work import RecvWork, SendWork
from rdmacm.soft.device.memory import INACCESSIBLE
from support.compiled import assert_collected, is_held
from support.rc import Region
from support.ud import make_ud

pytestmark = pytest.mark.skipif(compiled is None, reason="the compiled core is not built (python3 dev.py core)")

WAY = bytes((10, 0, 0, 1)), bytes((10, 0, 0, 2)), 50_000
QKEY = 0x01234567


def engines() -> tuple[UdEngine[str], UdEngine[str]]:
    made: tuple[UdEngine[str], UdEngine[str]] = make_ud(1, name="c"), make_ud(2, name="c")
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


def test_datagrams_that_fail_let_go_of_buffers() -> None:
    ends = engines()
    buffers = [bytearray(64) for _ in range(3)]
    for number, buffer in enumerate(buffers):
        one = send(memoryview(buffer))
        if number == 1:
            one.work.segments = INACCESSIBLE
        ends[0].post_send(one)
    del one
    assert list(map(is_held, buffers)) == [True, False, True]
    assert len(ends[0].datagrams(64, 0)) == 1
    assert [wc.status.name for wc in ends[0].completed] == ["SUCCESS", "LOC_PROT_ERR", "WR_FLUSH_ERR"]
    assert not any(map(is_held, buffers))


def test_wrong_types_are_refused() -> None:
    """The glue checks the types of what it is given."""
    assert compiled is not None
    end, flow = engines()[0], flow_between(*WAY)
    port = compiled.Wire(compiled.Lock(), lambda: None, ())
    queue, addresses = compiled.CompletionQueue(port, 4), compiled.Addresses(1)
    sizes = 1, 1, 1, True, True, True
    ill_flow = SimpleNamespace(source=b"123", destination=b"123", icrc=flow.icrc)
    no_icrc = SimpleNamespace(source=bytes(4), destination=bytes(4), icrc=SimpleNamespace(base="x"))
    for call in (
        lambda: compiled.UdEngine(1, object(), None, None),
        lambda: compiled.UdEngine(1, SimpleNamespace(regions=None, pd=None), None, None),
        lambda: compiled.UdEngine(1, Region(), object(), None),
        lambda: end.received(memoryview(b""), 0, None),  # type: ignore[arg-type]
        lambda: end.received(memoryview(b""), 0, ill_flow),  # type: ignore[arg-type]
        lambda: end.received(memoryview(b""), 0, no_icrc),  # type: ignore[arg-type]
        lambda: end.received(memoryview(b""), 0, flow, (0, 256)),
        lambda: end.datagrams(1, None),  # type: ignore[arg-type]
        lambda: end.ready_to_send(1 << 24),
        lambda: end.post_send(object()),  # type: ignore[arg-type]
        lambda: end.post_send(replace(send(memoryview(b"")), dest_qpn=1 << 32)),
        lambda: end.post_send(UdSend(SendWork(1, WROpcode.RDMA_READ), "way", flow.icrc, 2, QKEY)),
        lambda: end.post_send(send(memoryview(bytes(4097)))),
        lambda: end.post_recv(object()),  # type: ignore[arg-type]
        lambda: end.post_recv(RecvWork(1, [memoryview(bytearray(1))] * 33)),
        lambda: compiled.Route(port, None, 0, b"123", 4791, 0, [], 0),
        lambda: compiled.Route(port, None, 0, bytes(4), 4791, 0, [(0, 0, bytes(200))], 0),
        lambda: compiled.Route(port, None, 0, bytes(4), 4791, 0, [5], 0),
        lambda: compiled.Datagrams(port, object(), None, queue, queue, addresses, (3, 3), sizes),
        lambda: compiled.Datagrams(port, end, None, queue, queue, None, (3, 3), sizes),
        lambda: compiled.Addresses(None),
        lambda: addresses.set(None),
        lambda: addresses.set([bytes(4), b"123"]),
        lambda: addresses.set([bytes(4), None]),
        lambda: port.add_group(3, bytes(4)),
        lambda: port.set_members(bytes(8), [1]),
        lambda: port.set_members(bytes(8), (1, "x")),
        lambda: port.remove_group(None),
    ):
        with pytest.raises((TypeError, ValueError, AttributeError, OverflowError)):
            call()
    with pytest.raises(AttributeError):
        end.has_pending = True  # type: ignore[misc]
    other = engines()[0]
    other.post_send(send(memoryview(b"x")))
    with pytest.raises(ValueError, match="other routes"):
        compiled.Datagrams(port, other, None, queue, queue, addresses, (-1, -1), sizes)
    datagrams = compiled.Datagrams(port, end, None, queue, queue, addresses, (-1, -1), sizes)
    with pytest.raises(ValueError, match="on a wire"):
        compiled.Datagrams(port, end, None, queue, queue, addresses, (-1, -1), sizes)
    with pytest.raises(ValueError, match="is wrong"):  # a wire needs a Route
        end.post_send(send(memoryview(b"x")))
    assert datagrams.transmit(1) == 0
    datagrams.detach()
    assert datagrams.transmit(1) is None
    requests = [object()]
    assert datagrams.post_send(requests) is requests
    assert datagrams.post_recv(requests) is requests
