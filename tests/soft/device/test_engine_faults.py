"""An engine that raises, which only a fault of its own makes it do, ends its queue pair and nothing else."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator

import pytest

from rdmacm import RdmaError
from rdmacm.enums import QPState
from rdmacm.proto.roce.rc.engine import RcEngine
from rdmacm.verbs.enums import EventType
from rdmacm.verbs.wr import RecvWR, SendWR
from support.softdev import Connected, Pair, sge, told

pytestmark = pytest.mark.usefixtures("faults_expected")


class Bug(Exception):
    """What an engine raises here."""


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    for host in (made.a, made.b):
        host.mux.make_engine = RcEngine
    yield made
    made.close()


class Heard:
    """Takes the events of a queue pair (:class:`rdmacm.verbs.backend.AsyncEvents`)."""

    def __init__(self) -> None:
        self.events: list[EventType] = []

    def post(self, event: EventType) -> None:
        self.events.append(event)


class Two:
    """Two connections between the same hosts; the engine of ``bad``'s right end raises, once :meth:`break_` is called.

    Every queue pair has a receive posted, and can send.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.good, self.bad = Connected(pair), Connected(pair)
        heard = self.bad.right.async_events = Heard()
        self.events = heard.events
        self.buffers = [pair.a.region(64), pair.b.region(64)]
        for qp in (self.good.right, self.bad.right, self.good.left):
            qp.post_recv([RecvWR(7, [sge(self.buffers[qp is not self.good.left])])])

    def break_(self, monkeypatch: pytest.MonkeyPatch, method: str, error: type[BaseException] = Bug) -> None:
        call = getattr(RcEngine, method)

        def raising(engine: RcEngine, *args: object) -> object:
            if engine.qp_num == self.bad.right.qp_num:
                raise error(method)
            return call(engine, *args)

        monkeypatch.setattr(RcEngine, method, raising)

    def check(self, caplog: pytest.LogCaptureFixture, count: int = 1) -> None:
        """The bad queue pair has ended and said so; the good connection works; the log has the traceback."""
        assert self.bad.right.state is QPState.ERR
        assert self.events[0] is EventType.COMM_EST or self.events == [EventType.QP_FATAL]
        assert self.events.count(EventType.QP_FATAL) == 1
        assert self.pair.b.provider.query_counters().errors == {"queue_pair": count}
        assert not self.pair.a.provider.runtime.errors.counts
        records = [record for record in caplog.records if record.name == "rdmacm"]
        assert len(records) == count
        assert records[0].levelno == logging.ERROR
        assert f"0x{self.bad.right.qp_num:06x}" in records[0].getMessage()
        assert records[0].exc_info
        assert records[0].exc_info[0] is Bug
        self.good.left.post_send([SendWR(1, sg=[sge(self.buffers[0])])])
        assert told(self.good.at_left()) == [(1, "SUCCESS")]
        assert told(self.good.at_right()) == [(7, "SUCCESS")]
        self.good.right.post_send([SendWR(2, sg=[sge(self.buffers[1])])])
        assert told(self.good.at_right()) == [(2, "SUCCESS")]


def test_raising_for_a_packet(pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    two = Two(pair)
    two.break_(monkeypatch, "received")
    two.bad.left.post_send([SendWR(1, sg=[sge(two.buffers[0])])])
    assert told(two.bad.at_right()) == [(7, "WR_FLUSH_ERR")]
    assert told(two.bad.at_left()) == [(1, "RETRY_EXC_ERR")]
    two.check(caplog)


def test_raising_for_a_train(pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    two = Two(pair)
    two.break_(monkeypatch, "received")
    region = pair.a.region(9000)
    two.bad.left.post_send([SendWR(1, sg=[sge(region)])])
    pair.settle()
    assert told(two.bad.at_right()) == [(7, "WR_FLUSH_ERR")]
    two.check(caplog)


@pytest.mark.parametrize("method", ["datagrams", "timer"])
def test_raising_as_it_sends(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    two = Two(pair)
    two.break_(monkeypatch, method)
    pair.net.lost = lambda datagram: method == "timer"
    two.bad.right.post_send([SendWR(1, sg=[sge(two.buffers[1])]), SendWR(2, sg=[sge(two.buffers[1])])])
    assert sorted(told(two.bad.at_right(3))) == [(1, "WR_FLUSH_ERR"), (2, "WR_FLUSH_ERR"), (7, "WR_FLUSH_ERR")]
    pair.net.lost = lambda datagram: False
    two.check(caplog)


@pytest.mark.parametrize("count", [1, 2])
def test_raising_for_an_ack(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    two = Two(pair)
    two.break_(monkeypatch, "datagrams")
    two.bad.left.post_send([SendWR(1, sg=[sge(two.buffers[0])]) for _ in range(count)])
    assert told(two.bad.at_right()) == [(7, "SUCCESS")]
    two.check(caplog)


@pytest.mark.parametrize("count", [1, 2])
def test_raising_for_a_send_request(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    two = Two(pair)
    two.break_(monkeypatch, "post_send")
    wrs = [SendWR(1, sg=[sge(two.buffers[1])]) for _ in range(count)]
    with pytest.raises(RdmaError) as caught:
        two.bad.right.post_send(wrs)
    assert caught.value.errno == errno.EIO
    assert caught.value.bad_wr is wrs[0]
    assert isinstance(caught.value.__cause__, Bug)
    assert told(two.bad.at_right()) == [(7, "WR_FLUSH_ERR")]
    two.check(caplog)


def test_raising_for_a_receive_request(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    two = Two(pair)
    two.break_(monkeypatch, "post_recv")
    with pytest.raises(RdmaError) as caught:
        two.bad.right.post_recv([RecvWR(8, [sge(two.buffers[1])])])
    assert caught.value.errno == errno.EIO
    assert told(two.bad.at_right()) == [(7, "WR_FLUSH_ERR")]
    two.check(caplog)


def test_posts_after_it_are_flushed_by_another_engine(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    two = Two(pair)
    two.break_(monkeypatch, "received")
    two.bad.left.post_send([SendWR(1, sg=[sge(two.buffers[0])])])
    assert told(two.bad.at_right()) == [(7, "WR_FLUSH_ERR")]
    monkeypatch.undo()
    two.bad.right.post_recv([RecvWR(3, [sge(two.buffers[1])])])
    two.bad.right.post_send([SendWR(4, sg=[sge(two.buffers[1])])])
    assert told(two.bad.at_right(2)) == [(3, "WR_FLUSH_ERR"), (4, "WR_FLUSH_ERR")]
    two.check(caplog)


def test_an_interrupt_in_an_engine_ends_its_queue_pair_and_is_raised(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(pair)
    two.break_(monkeypatch, "received", KeyboardInterrupt)
    two.bad.left.post_send([SendWR(1, sg=[sge(two.buffers[0])])])
    with pytest.raises(KeyboardInterrupt):
        pair.settle()
    assert two.bad.right.state is QPState.ERR
    assert told(two.bad.right_cq.poll(1)) == [(7, "WR_FLUSH_ERR")]


def test_a_wire_that_raises_loses_packets_only(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    two = Two(pair)
    receive, left = pair.b.wire.receive, [3]

    def raising(skip_poll: bool = False) -> object:
        if left[0]:
            left[0] -= 1
            raise Bug
        return receive(skip_poll)

    pair.b.wire.receive = raising  # type: ignore[method-assign,assignment]
    two.good.left.post_send([SendWR(1, sg=[sge(two.buffers[0])])])
    assert told(two.good.at_left()) == [(1, "SUCCESS")]
    assert pair.b.provider.runtime.errors.counts == {"wire": 3}


def test_a_timer_that_raises_delays_no_other(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    runtime = pair.a.provider.runtime
    called: list[float] = []

    def raising(now: float) -> None:
        raise Bug

    runtime.call_at(pair.clock.now, raising)
    runtime.call_at(pair.clock.now, called.append)
    runtime.fire_timers()
    assert called == [pair.clock.now]
    assert runtime.errors.counts == {"timer": 1}
    assert caplog.records[0].exc_info
