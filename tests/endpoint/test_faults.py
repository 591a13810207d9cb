"""An endpoint that raises as it handles an event or a completion ends, and no other does."""

from __future__ import annotations

from typing import Any

import pytest

import rdmacm
from rdmacm import CmDisconnectedError, CmEventType, RdmaError
from rdmacm.endpoint.connection_state import ConnectionState
from rdmacm.endpoint.race import _Attempt
from support.endpoints import accepting, connected

pytestmark = pytest.mark.usefixtures("faults_expected")


class Bug(Exception):
    """What endpoints raise here."""


def test_raising_for_a_completion(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    received = ConnectionState._received
    with rdmacm.listen(("127.0.0.1", 0)) as listener:
        ends = []
        for _ in range(2):
            with accepting(listener) as accepted:
                ends.append(rdmacm.connect(("127.0.0.1", listener.port), timeout=20))
            ends.append(accepted[0])
        active, passive, other_active, other_passive = ends
        assert passive._state.dispatcher is other_passive._state.dispatcher

        def raising(self: ConnectionState, wc: Any) -> None:
            if self is passive._state and self.close_reason is None:
                raise Bug
            received(self, wc)

        monkeypatch.setattr(ConnectionState, "_received", raising)
        active.send(b"bad")
        other_active.send(b"good")
        assert other_passive.recv(timeout=20) == b"good"
        with pytest.raises(CmDisconnectedError, match="internal error"):
            passive.recv(timeout=20)
        with pytest.raises(CmDisconnectedError):
            active.recv(timeout=20)
        assert passive._state.dispatcher.errors.counts == {"endpoint": 1}
        assert caplog.records[0].exc_info
        for each in ends:
            each.close()


def test_raising_for_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(self: ConnectionState, event: Any) -> None:
        assert event.type is CmEventType.DISCONNECTED
        raise Bug

    with connected() as (active, passive):
        monkeypatch.setattr(ConnectionState, "handle", raising)
        active.disconnect()
        with pytest.raises(CmDisconnectedError):
            passive.recv(timeout=20)


def test_raising_as_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(self: _Attempt, cmid: Any) -> None:
        raise Bug

    monkeypatch.setattr(_Attempt, "_resolve_route", raising)
    with pytest.raises(RdmaError, match="internal error"):
        rdmacm.connect(("127.0.0.1", 7471), timeout=20)
