"""Alternate paths on RoCE, which has none: each call is refused by name, and a peer's offer is answered so."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from rdmacm import CmEventType, CmId, IbOption, OptionLevel, PathFlag
from rdmacm.proto.cm.codes import ApStatus, FailoverAccepted
from rdmacm.proto.cm.messages import APR, REP, REQ
from rdmacm.proto.sa import PATH_FLAGS, PathData
from rdmacm.provider.cmstate import State
from rdmacm.soft.ids.ib_cm import IbCmConnector
from rdmacm.verbs import QPAttrMask, QPState
from rdmacm.verbs.enums import EventType
from support.cm import PATH
from support.pair import ADDRESSES, Ends, ends, refused

LISTENER = ADDRESSES["ipv4"][1]


@pytest.fixture
def both() -> Iterator[Ends]:
    with ends() as both:
        yield both


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The REPs and APRs that the engines have passed on."""
    found: list[Any] = []
    for name in ("replied", "path_answered"):
        report = getattr(IbCmConnector, name)

        def reported(connector: IbCmConnector, connection: Any, message: Any, report: Any = report) -> None:
            found.append(message)
            report(connector, connection, message)

        monkeypatch.setattr(IbCmConnector, name, reported)
    return found


def test_route_with_an_alternate_is_refused_and_one_without_follows(both: Ends) -> None:
    cmid = both.a.id()
    cmid.resolve_addr((LISTENER, 7471))
    both.a.event(CmEventType.ADDR_RESOLVED)
    error = refused(lambda: cmid.resolve_route(alternate=True), errno.EOPNOTSUPP)
    assert "RoCE has no alternate paths" in str(error)
    assert cmid.state is State.ADDR_RESOLVED
    cmid.resolve_route()
    both.a.event(CmEventType.ROUTE_RESOLVED)
    assert cmid.route.num_paths == 1


def test_path_option_with_an_alternate_is_refused(both: Ends) -> None:
    path = both.a.resolve(LISTENER).route.path_rec[0]
    cmid = both.a.id()
    cmid.resolve_addr((LISTENER, 7471))
    both.a.event(CmEventType.ADDR_RESOLVED)
    alternate = PathData(path, PathFlag.ALTERNATE | PathFlag.BIDIRECTIONAL).pack()
    given = PathData(path, PATH_FLAGS).pack()
    error = refused(lambda: cmid.set_option(OptionLevel.IB, IbOption.PATH, given + alternate), errno.EOPNOTSUPP)
    assert "RoCE has no alternate paths" in str(error)
    cmid.set_option(OptionLevel.IB, IbOption.PATH, given)
    both.a.event(CmEventType.ROUTE_RESOLVED)


def test_calls_of_a_connection_are_refused(both: Ends) -> None:
    for cmid in both.connect():
        calls: tuple[Callable[[], object], ...] = (
            lambda cmid=cmid: cmid.load_alternate_path(cmid.route.path_rec[0]),  # type: ignore[misc]
            cmid.allow_alternate_paths,
            cmid.answer_alternate_path,
            lambda cmid=cmid: cmid.offered_path,  # type: ignore[misc]
        )
        for call in calls:
            assert "RoCE has no alternate paths" in str(refused(call, errno.EOPNOTSUPP))
        assert "no alternate path" in str(refused(lambda cmid=cmid: cmid.notify(EventType.PATH_MIG)))  # type: ignore[misc]


def test_request_with_an_alternate_path_connects_without_it(
    both: Ends, answers: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = IbCmConnector._request
    monkeypatch.setattr(IbCmConnector, "_request", lambda *args: replace(request(*args), alternate=PATH))
    active, passive = both.connect()
    (reply,) = answers
    assert isinstance(reply, REP)
    assert reply.failover_accepted == FailoverAccepted.UNSUPPORTED
    assert passive.route.num_paths == active.route.num_paths == 1
    assert not passive.init_qp_attr(QPState.RTR)[1] & QPAttrMask.ALT_PATH


def test_offer_of_the_peer_is_answered_and_the_connection_stays(both: Ends, answers: list[Any]) -> None:
    active, passive = both.connect()
    cm = both.a.provider.host.cm
    comm_id = connection_of(active)
    cm.agent.load_path(comm_id, PATH, both.fabric.now)
    both.fabric.run(lambda: len(answers) == 2, seconds=1)
    assert isinstance(answers[1], APR)
    assert answers[1].ap_status == ApStatus.UNSUPPORTED
    assert both.b.quiet()
    active.disconnect()
    both.b.event(CmEventType.DISCONNECTED)
    passive.disconnect()
    both.a.event(CmEventType.DISCONNECTED)


def connection_of(cmid: CmId) -> int:
    backend: Any = cmid._backend
    request = backend.connector._open().request
    assert isinstance(request, REQ)
    return request.local_comm_id
