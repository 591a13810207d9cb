"""A fault inside the connection manager ends the connection it belongs to, with an event, and no other."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rdmacm import CmEventType, CmTimeoutError, RdmaError
from rdmacm.proto.cm.connection import CmConnection
from rdmacm.proto.cm.engine import Agent
from rdmacm.proto.cm.messages import REP
from rdmacm.proto.cm.registry import Connections
from rdmacm.soft.ids.ib_cm import IbCmConnector
from rdmacm.verbs.enums import QPState
from support.pair import Ends, ends

pytestmark = pytest.mark.usefixtures("faults_expected")


class Bug(Exception):
    """What the connection manager raises here."""


@pytest.fixture
def both() -> Iterator[Ends]:
    with ends() as made:
        yield made


def counts(both: Ends) -> list[dict[str, int]]:
    return [dict(end.host.provider.runtime.errors.counts) for end in (both.a, both.b)]


def break_agent(
    monkeypatch: pytest.MonkeyPatch,
    both: Ends,
    method: str,
    when: Callable[..., bool] = lambda *_: True,
    kind: type[Agent | Connections] = Agent,
) -> None:
    """From now on, this method of the active side's agent, or of its connections, raises after its work, where
    ``when(*args)`` is true.
    """
    agent = both.a.host.provider.host.cm.agent
    call = getattr(kind, method)

    def raising(self: object, *args: Any, **more: Any) -> object:
        found = call(self, *args, **more)
        if self in (agent, agent._connections) and when(*args):
            raise Bug(method)
        return found

    monkeypatch.setattr(kind, method, raising)


def still_connects(both: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    both.connect()


def test_as_a_reply_arrives(both: Ends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = both.connect()
    break_agent(monkeypatch, both, "add_remote", kind=Connections)
    active, request = both.request()
    request.id.create_qp()
    request.id.accept()
    with both.a.event(CmEventType.CONNECT_ERROR) as event:
        assert event.id is active
        assert event.status == -errno.EIO
        assert event.error is not None
    monkeypatch.undo()
    assert both.b.event(CmEventType.REJECTED).id is request.id
    assert active.qp.qp_state is QPState.ERR
    assert first.qp.qp_state is QPState.RTS
    assert counts(both) == [{"connection": 1}, {}]
    assert caplog.records[0].exc_info
    assert caplog.records[0].exc_info[0] is Bug
    still_connects(both, monkeypatch)


def test_before_a_reply_is_looked_at(both: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    both.connect()

    def raising(*_: object) -> None:
        raise Bug

    active, request = both.request()
    monkeypatch.setattr(both.a.host.provider.host.cm.agent, "mad_received", raising)
    request.id.create_qp()
    request.id.accept()
    with both.a.event(CmEventType.CONNECT_ERROR) as event:
        assert event.id is active
    monkeypatch.undo()
    assert both.b.event(CmEventType.REJECTED).id is request.id
    still_connects(both, monkeypatch)


def test_as_a_timer_fires(both: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    both.connect()
    active = both.a.resolve("10.0.0.2")
    active.create_qp()
    both.fabric.partition("a", "b")
    agent = both.a.host.provider.host.cm.agent
    break_agent(monkeypatch, both, "timer", lambda *_: agent.machine.stepping is not None)
    active.connect()
    with both.a.event(CmEventType.CONNECT_ERROR) as event:
        assert event.id is active
    assert counts(both) == [{"connection": 1}, {}]
    monkeypatch.undo()
    both.fabric.heal()
    still_connects(both, monkeypatch)


def test_as_an_established_connection_is_told(both: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    active, passive = both.connect()
    other, _ = both.connect()
    break_agent(monkeypatch, both, "of_message", kind=Connections)
    passive.disconnect()
    with both.a.event(CmEventType.DISCONNECTED) as event:
        assert event.id is active
        assert event.status == -errno.EIO
    monkeypatch.undo()
    assert both.b.event(CmEventType.DISCONNECTED).id is passive
    assert active.qp.qp_state is QPState.ERR
    assert other.qp.qp_state is QPState.RTS
    with pytest.raises(RdmaError):
        active.disconnect()
    still_connects(both, monkeypatch)


def test_in_an_event_of_the_connection(both: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(self: IbCmConnector, connection: CmConnection, reply: REP) -> None:
        raise Bug

    active, request = both.request()
    monkeypatch.setattr(IbCmConnector, "replied", raising)
    request.id.create_qp()
    request.id.accept()
    with both.a.event(CmEventType.CONNECT_ERROR) as event:
        assert event.id is active
    assert both.b.event(CmEventType.REJECTED).id is request.id
    still_connects(both, monkeypatch)
    assert counts(both) == [{"connection": 1}, {}]


def test_in_a_request(both: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(self: IbCmConnector, *_: object) -> None:
        raise Bug

    listener = both.b.listen("10.0.0.2")
    monkeypatch.setattr(IbCmConnector, "begin_passive", raising)
    active = both.a.resolve("10.0.0.2")
    active.create_qp()
    active.connect()
    with pytest.raises(CmTimeoutError):
        both.b.channel.get_event(1)  # the request gets its id as it is fetched
    with both.a.event(CmEventType.REJECTED) as event:
        assert event.id is active
    assert counts(both) == [{}, {"connection": 1}]
    assert list(both.b.host.provider.runtime.users()[0].ids) == [listener._backend]  # type: ignore[attr-defined]
    still_connects(both, monkeypatch)


def test_in_a_call_that_connects(both: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    both.connect()
    agent = both.a.host.provider.host.cm.agent
    before = len(agent)
    break_agent(monkeypatch, both, "connect")
    active = both.a.resolve("10.0.0.2")
    active.create_qp()
    with pytest.raises(Bug):
        active.connect()
    assert len(agent) == before
    monkeypatch.undo()
    active.connect()
    both.b.event(CmEventType.CONNECT_REQUEST).id.destroy()
    both.a.event(CmEventType.REJECTED)
