"""resolve_route with ibacm: ibacm is asked first, and the subnet administrator if ibacm has no path in time."""

from __future__ import annotations

import contextlib
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infiniband.hosts import IbHost, event
from infiniband.sites import Embedded
from rdmacm import CmEventType, CmId, EventChannel, RdmaError
from rdmacm.proto.sa import PathRecord
from rdmacm.provider.cmstate import State
from rdmacm.resolution import acm
from rdmacm.resolution.acm import AcmClient
from support.acm import Asked, Daemon, path_endpoint
from support.clock import Stopwatch


@pytest.fixture
def site() -> Embedded:
    return Embedded()


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    client = AcmClient(str(tmp_path), look=0, rest=0)
    monkeypatch.setattr(acm, "CLIENT", client)
    yield tmp_path
    client.close()


def path_between(site: Embedded, a: IbHost, b: IbHost) -> PathRecord:
    """A path that differs from the administrator's."""
    return site.subnet.sa.path(a.gid, b.gid).replace(sl=7)


def resolved(a: IbHost, b: IbHost, channel: EventChannel | None = None) -> CmId:
    cmid = a.id(channel)
    cmid.resolve_addr(b.at())
    if channel is not None:
        event(channel).ack()
    return cmid


def never_answers(_: Asked) -> None: ...


def test_acm_path_is_used_without_an_sa_query(site: Embedded, a: IbHost, b: IbHost, rundir: Path) -> None:
    path = path_between(site, a, b)
    with Daemon(rundir, lambda asked: asked.answer(path_endpoint(path))) as daemon, resolved(a, b) as cmid:
        cmid.resolve_route()
        assert cmid.route.path_rec == (path,)
        assert len(daemon.asked) == 1
        assert not site.subnet.sa.requests
        assert "ibacm" in cmid.steps[-1].detail


def test_sa_is_queried_when_acm_has_no_path(site: Embedded, a: IbHost, b: IbHost, rundir: Path) -> None:
    with Daemon(rundir, lambda asked: asked.answer(status=2)) as daemon, resolved(a, b) as cmid:
        cmid.resolve_route()
        assert cmid.route.path_rec[0].sl == 0
        assert len(daemon.asked) == len(site.subnet.sa.requests) == 1


def test_acm_path_for_other_gids_is_rejected(site: Embedded, a: IbHost, b: IbHost, rundir: Path) -> None:
    wrong = path_between(site, b, a)
    with Daemon(rundir, lambda asked: asked.answer(path_endpoint(wrong))), resolved(a, b) as cmid:
        cmid.resolve_route()
        assert cmid.route.path_rec[0].sl == 0


def test_alternate_path_comes_from_the_sa(site: Embedded, a: IbHost, b: IbHost, rundir: Path) -> None:
    with Daemon(rundir, never_answers) as daemon, resolved(a, b) as cmid:
        cmid.resolve_route(alternate=True)
        assert not daemon.asked


@pytest.mark.wallclock
def test_silent_acm_leaves_half_the_timeout_to_the_sa(site: Embedded, a: IbHost, b: IbHost, rundir: Path) -> None:
    with Daemon(rundir, never_answers) as daemon, resolved(a, b) as cmid:
        watch = Stopwatch()
        cmid.resolve_route(1000)
        assert watch.seconds >= 0.499
        assert (len(daemon.asked), len(site.subnet.sa.requests)) == (1, 1)


@pytest.mark.wallclock
def test_silent_acm_and_sa_time_out(site: Embedded, a: IbHost, b: IbHost, rundir: Path) -> None:
    site.subnet.sa.silence = 1.0
    with Daemon(rundir, never_answers), resolved(a, b) as cmid:
        watch = Stopwatch()
        with pytest.raises(TimeoutError):
            cmid.resolve_route(300)
        assert 0.299 <= watch.seconds < 5


def test_short_timeout_does_not_wait_for_earlier_requests(site: Embedded, a: IbHost, b: IbHost, rundir: Path) -> None:
    """The daemon gets one request after the other, but each request has its own deadline."""
    with Daemon(rundir, never_answers), EventChannel(a.provider) as channel:
        patient, hurried = resolved(a, b, channel), resolved(a, b, channel)
        patient.resolve_route(10_000)
        hurried.resolve_route(400)
        with event(channel) as found:
            assert (found.type, found.id) == (CmEventType.ROUTE_RESOLVED, hurried)
        patient.destroy()
        hurried.destroy()


@pytest.mark.parametrize("end", ["answer", "silence"])
def test_destroy_during_the_request_suppresses_the_event(
    site: Embedded, a: IbHost, b: IbHost, rundir: Path, end: str
) -> None:
    asked, go_on = threading.Event(), threading.Event()
    path = path_between(site, a, b)

    def behave(question: Asked) -> None:
        asked.set()
        go_on.wait(10)
        if end == "answer":
            question.answer(path_endpoint(path))

    with Daemon(rundir, behave), EventChannel(a.provider) as channel:
        cmid = resolved(a, b, channel)
        cmid.resolve_route(2000)  # the subnet administrator would be asked after half a second
        assert asked.wait(10)
        cmid.destroy()
        go_on.set()
        with pytest.raises(TimeoutError):
            channel.get_event(0.8)
        assert not site.subnet.sa.requests


def test_failed_sa_query_after_acm_is_an_event(site: Embedded, a: IbHost, b: IbHost, rundir: Path) -> None:
    """The port is removed while the daemon has the request: an event, as the call has returned."""
    go_on = threading.Event()

    def behave(question: Asked) -> None:
        go_on.wait(10)
        question.answer(status=2)

    with Daemon(rundir, behave), EventChannel(a.provider) as channel, resolved(a, b, channel) as cmid:
        cmid.resolve_route()
        site.subnet.change_port("HostA", sm_lid=0)
        go_on.set()
        with event(channel) as failed:
            assert failed.type is CmEventType.ROUTE_ERROR
            assert isinstance(failed.error, RdmaError)
            assert "no subnet manager" in failed.message
        assert cmid.state is State.ADDR_RESOLVED


def test_channel_descriptor_becomes_readable(site: Embedded, a: IbHost, b: IbHost, rundir: Path) -> None:
    path = path_between(site, a, b)
    behaviours: list[Callable[[Asked], None]] = [lambda asked: asked.answer(path_endpoint(path)), never_answers]
    for behave in behaviours:
        with Daemon(rundir, behave), EventChannel(a.provider) as channel, resolved(a, b, channel) as cmid:
            poll = select.poll()
            poll.register(channel.fileno(), select.POLLIN)
            cmid.resolve_route(1000)
            while cmid.state is State.ROUTE_QUERY:
                assert poll.poll(5000)
                with contextlib.suppress(BlockingIOError), channel.get_event(timeout=0):
                    pass
            assert cmid.route.path_rec
