"""Management datagrams leave in trains: which of them, in what order, and that none waits for a caller that is gone."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from rdmacm import CmEventType, CmId, ConnParam, EventChannel
from rdmacm.proto.cm.messages import REQ, RTU, Message, pack_message
from rdmacm.proto.roce.icrc import Icrc
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.soft import open_provider
from rdmacm.soft.provider import SoftProvider
from rdmacm.soft.wire.base import Undelivered, WirePath
from rdmacm.verbs.enums import WROpcode
from rdmacm.verbs.wr import SendWR
from support.clock import LONGEST
from support.cm import request
from support.netns import python_environment
from support.processes import linux_only
from support.softdev import Connected, Pair, sge

A, B = bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2])
TO_B, TO_A = WirePath(A, B), WirePath(B, A)
#: Bytes of a packet.
SIZE = 280


def mad(message: Message) -> bytes:
    return pack_message(message, 7)


def rtus(count: int, slot: int = 2) -> list[bytes]:
    """Messages for connections of the process in a slot."""
    return [mad(RTU(1, slot << 20 | number)) for number in range(count)]


def requests(count: int) -> list[bytes]:
    return [mad(request(local_comm_id=1 << 20 | number)) for number in range(count)]


def sent_by(pair: Pair, path: WirePath = TO_B) -> list[list[bytes]]:
    """The MADs of each datagram or train that was sent on a path since the last call; each has its ICRC."""
    found = []
    for one, data, segment in pair.net.sent:
        if one == path:
            step = segment or len(data)
            assert step == SIZE
            packets = [data[at : at + step] for at in range(0, len(data), step)]
            assert bool(segment) is (len(packets) > 1), "a packet that is alone is no train"
            flow = Icrc(path.local, path.remote, 50_000)
            assert all(flow.check([packet], place) for place, packet in enumerate(packets))
            found.append([packet[20:276] for packet in packets])
    pair.net.sent.clear()
    return found


def send(pair: Pair, mads: Sequence[bytes]) -> None:
    for each in mads:
        pair.a.mux.gsi.send_mad(TO_B, each)


def answer(pair: Pair, answers: Sequence[bytes]) -> None:
    """Host a sends these in the turn in which something arrives."""
    pair.a.mux.open()
    pair.a.mux.gsi.on_mad = lambda data, path, now: send(pair, answers)
    pair.b.mux.gsi.send_mad(TO_A, bytes(256))
    pair.a.mux.progress()


@pytest.fixture
def deferring(pair: Pair) -> Pair:
    """Host a has more events to fetch, and may defer what it sends."""
    pair.a.mux.gsi.outbox.may_wait = pair.a.provider.runtime.has_more_events = True
    return pair


# -- what is in a train ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [TO_A, WirePath(b"\xfd" + bytes(14) + b"\x02", b"\xfd" + bytes(14) + b"\x01")])
def test_a_turn_sends_one_train(pair: Pair, path: WirePath) -> None:
    heard: list[bytes] = []
    pair.b.mux.open()
    pair.a.mux.open()
    back = WirePath(path.remote, path.local)
    pair.a.mux.gsi.on_mad = lambda data, _, now: pair.a.mux.gsi.send_mad(back, bytes(data))
    pair.b.mux.gsi.on_mad = lambda data, _, now: heard.append(bytes(data))
    for each in rtus(5):
        pair.b.mux.gsi.send_mad(path, each)
    pair.net.sent.clear()
    pair.a.mux.progress()
    assert sent_by(pair, back) == [rtus(5)]
    pair.b.mux.progress()
    assert heard == rtus(5)
    assert not pair.b.mux.dropped


def test_what_a_turn_sends_leaves_before_its_data(pair: Pair) -> None:
    ends = Connected(pair)
    work = SendWR(1, WROpcode.SEND, [sge(pair.a.region(b"data"))])

    def begin(data: memoryview, path: WirePath, now: float) -> None:
        send(pair, rtus(2))
        ends.left.post_send([work])

    pair.a.mux.gsi.on_mad = begin
    pair.b.mux.gsi.send_mad(TO_A, bytes(256))
    pair.net.sent.clear()
    pair.a.mux.progress()
    assert [data[0] for _, data, _ in pair.net.sent] == [Opcode.UD_SEND_ONLY, Opcode.RC_SEND_ONLY]


def test_one_datagram_is_no_train(pair: Pair) -> None:
    answer(pair, rtus(1))
    assert sent_by(pair) == [rtus(1)]


def test_a_train_is_for_one_process_of_the_peer(pair: Pair) -> None:
    both = [each for two in zip(rtus(3, 2), rtus(3, 5), strict=True) for each in two]
    answer(pair, both)
    assert sent_by(pair) == [rtus(3, 2), rtus(3, 5)]


def test_a_train_has_its_most_packets(pair: Pair) -> None:
    answer(pair, rtus(130))
    assert list(map(len, sent_by(pair))) == [64, 64, 2]


@pytest.mark.parametrize("how", ["system", "path"])
def test_without_trains_each_leaves_alone(pair: Pair, how: str) -> None:
    pair.a.mux.open()
    if how == "system":
        pair.a.mux.train = 0
    else:
        pair.a.mux.route(TO_B, 0).no_trains = True
    answer(pair, rtus(3))
    assert sent_by(pair) == [[each] for each in rtus(3)]


def test_requests_to_a_peer_that_has_not_answered_leave_alone(pair: Pair) -> None:
    """Each of them needs its own report if the peer does not listen."""
    pair.a.mux.open()
    gsi = pair.a.mux.gsi
    gsi.on_mad = lambda data, path, now: send(pair, requests(3))
    gsi.outbox.is_held = True
    for each in requests(3):
        gsi.send_mad(TO_B, each)
    gsi.outbox.is_held = False
    gsi.outbox.send()
    assert sent_by(pair) == [[each] for each in requests(3)]
    answer(pair, requests(3))
    assert sent_by(pair) == [requests(3)]
    send(pair, requests(1))
    gsi._undelivered(Undelivered(pair.net.sent.pop()[1], B, errno.ECONNREFUSED, B))
    gsi.outbox.is_held = True
    for each in requests(2):
        gsi.send_mad(TO_B, each)
    gsi.outbox.send()
    assert sent_by(pair) == [[each] for each in requests(2)]


@pytest.mark.usefixtures("faults_expected")
def test_one_that_raises_loses_no_other(pair: Pair) -> None:
    wire = pair.a.wire
    before, wire.send = wire.send, lambda *_: 1 // 0  # type: ignore[method-assign, assignment]
    send(pair, rtus(1))
    wire.send = before  # type: ignore[method-assign]
    assert pair.a.provider.runtime.errors.counts.pop("gsi") == 1
    send(pair, rtus(2))
    assert sent_by(pair) == [[each] for each in rtus(2)]


# -- when it leaves -------------------------------------------------------------------------------------------


def test_what_a_caller_sends_leaves_at_once(pair: Pair) -> None:
    send(pair, rtus(2))
    assert sent_by(pair) == [[each] for each in rtus(2)]
    assert pair.a.mux.gsi.outbox.wishes == 0


def test_a_caller_with_more_events_waits_for_its_next_progress(deferring: Pair) -> None:
    send(deferring, rtus(3))
    assert sent_by(deferring) == []
    deferring.a.mux.progress()
    assert sent_by(deferring) == [rtus(3)]
    assert deferring.a.mux.gsi.outbox.wishes == 3


def test_the_last_of_the_events_sends_all(deferring: Pair) -> None:
    send(deferring, rtus(2))
    deferring.a.provider.runtime.has_more_events = False
    send(deferring, rtus(3)[2:])
    assert sent_by(deferring) == [rtus(3)]


def test_without_a_thread_that_looks_nothing_waits(deferring: Pair) -> None:
    deferring.a.mux.gsi.outbox.may_wait = False
    send(deferring, rtus(2))
    assert sent_by(deferring) == [[each] for each in rtus(2)]
    assert deferring.a.mux.gsi.outbox.wishes == 2, "what could have waited is counted"


def test_closing_sends_what_waits(deferring: Pair) -> None:
    send(deferring, rtus(2))
    deferring.a.mux.close()
    assert sent_by(deferring) == [rtus(2)]


def test_a_child_of_fork_sends_nothing(deferring: Pair) -> None:
    send(deferring, rtus(2))
    deferring.a.mux.abandon()
    assert not deferring.a.mux.gsi.outbox.count
    deferring.a.mux.gsi.outbox.send()
    assert sent_by(deferring) == []


def next_event(channel: EventChannel, kind: CmEventType) -> CmId:
    with channel.get_event(LONGEST) as event:
        assert event.type is kind, event
        return event.id


def test_an_event_says_whether_there_are_more() -> None:
    provider = open_provider()
    assert isinstance(provider, SoftProvider)
    with EventChannel() as channel, CmId(channel) as listener:
        listener.bind_addr(("127.0.0.1", 0))
        listener.listen()
        ids = [CmId(channel) for _ in range(2)]
        for cmid in ids:
            cmid.resolve_addr(("127.0.0.1", listener.src_port))
        more = []
        for _ in ids:
            next_event(channel, CmEventType.ADDR_RESOLVED)
            more.append(provider.runtime.has_more_events)
        for cmid in ids:
            cmid.destroy()
        assert more == [True, False]


@linux_only
def test_a_request_that_waits_survives_fork_once() -> None:
    provider = open_provider()
    assert isinstance(provider, SoftProvider)
    with EventChannel() as channel, EventChannel() as other, CmId(other) as listener, CmId(channel) as cmid:
        listener.bind_addr(("127.0.0.1", 0))
        listener.listen()
        cmid.resolve_addr(("127.0.0.1", listener.src_port))
        next_event(channel, CmEventType.ADDR_RESOLVED)
        cmid.resolve_route()
        next_event(channel, CmEventType.ROUTE_RESOLVED)
        runtime, mux = provider.runtime, provider.host.mux
        received = provider.host.cm.received
        with runtime.lock:
            mux.gsi.outbox.may_wait = runtime.has_more_events = True
            before = received[REQ.ATTRIBUTE]
            cmid.connect(ConnParam(qp_num=5))
            assert mux.gsi.outbox.count == 1
            pid = os.fork()
            if not pid:
                os._exit(mux.gsi.outbox.count)
            assert os.waitpid(pid, 0)[1] == 0
            mux.gsi.outbox.may_wait = False
        next_event(other, CmEventType.CONNECT_REQUEST).destroy()
        assert received[REQ.ATTRIBUTE] == before + 1


_COMPUTES = """
import sys
from rdmacm import CmEventType, CmId, ConnParam, EventChannel
from rdmacm.soft import open_provider

provider, channel, ids = open_provider(), EventChannel(), set()
outbox = provider.host.mux.gsi.outbox

def begin():
    cmid = CmId(channel)
    ids.add(cmid)
    cmid.resolve_addr(("127.0.0.1", int(sys.argv[1])))

for _ in range(32):
    begin()
while True:
    with channel.get_event(20) as event:
        cmid, kind = event.id, event.type
        if kind is CmEventType.ADDR_RESOLVED:
            cmid.resolve_route()
        elif kind is CmEventType.ROUTE_RESOLVED:
            with provider.runtime.lock:
                may = outbox.may_wait and provider.runtime.has_more_events
                cmid.connect(ConnParam(b"last" if may else b"", qp_num=5))
                assert not may or outbox.count
            while may:  # the application computes without calling the library
                sum(range(1000))
        else:
            assert kind is CmEventType.REJECTED, event
    if kind is CmEventType.REJECTED:
        cmid.destroy()
        ids.discard(cmid)
        begin()
"""


@linux_only
def test_a_request_leaves_while_the_application_computes() -> None:
    with EventChannel() as channel, CmId(channel) as listener:
        listener.bind_addr(("127.0.0.1", 0))
        listener.listen(64)
        command = [sys.executable, "-c", _COMPUTES, str(listener.src_port)]
        with subprocess.Popen(command, env=python_environment()) as client:
            try:
                last = False
                while not last:
                    with channel.get_event(LONGEST) as event:
                        assert event.type is CmEventType.CONNECT_REQUEST, event
                        last = event.private_data.startswith(b"last")
                        cmid = event.id
                    cmid.reject()
                    cmid.destroy()
            finally:
                client.kill()
