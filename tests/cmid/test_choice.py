"""Errors say why the provider auto has not chosen the kernel's devices, once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import rdmacm
from rdmacm import CmEventType, CmId, EventChannel, RdmaError
from rdmacm.provider import choice

REASON = "port 1 of rxe0 is DOWN"
NOTE = f"provider soft, because {REASON}"


@pytest.fixture(autouse=True)
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose devices of the kernel cannot be used."""
    monkeypatch.delenv(choice.ENVIRONMENT, raising=False)
    monkeypatch.setattr(choice, "_automatic", lambda: choice.Choice("soft", REASON))


def bind() -> None:
    with CmId() as cmid:
        cmid.bind_addr(("192.0.2.1", 7471))


def resolve() -> None:
    with CmId() as cmid:
        cmid.resolve_addr(("127.0.0.1", 7471), ("192.0.2.1", 0))


def refused() -> None:
    with CmId() as cmid:
        cmid.resolve_addr(("127.0.0.1", 9))
        cmid.resolve_route()
        cmid.create_qp()
        cmid.connect()


def listen_in_state_of_connecting() -> None:
    with CmId() as cmid:
        cmid.resolve_addr(("127.0.0.1", 9))
        cmid.listen()


def connect() -> None:
    rdmacm.connect(("127.0.0.1", 9), source=("192.0.2.1", 0))


@pytest.mark.parametrize("call", [bind, resolve, refused, listen_in_state_of_connecting, connect])
def test_first_error_has_the_reason_once(call: Callable[[], None]) -> None:
    with pytest.raises(RdmaError) as caught:
        call()
    assert [note for note in caught.value.__notes__ if "provider soft" in note] == [NOTE]


def test_error_of_an_event_has_the_reason() -> None:
    with EventChannel() as channel, CmId(channel) as cmid:
        cmid.resolve_addr(("127.0.0.1", 9))
        with channel.get_event(timeout=30) as event:
            assert event.type is CmEventType.ADDR_RESOLVED
        cmid.resolve_route()
        with channel.get_event(timeout=30) as event:
            assert event.type is CmEventType.ROUTE_RESOLVED
        cmid.create_qp()
        cmid.connect()
        with channel.get_event(timeout=30) as event:
            assert event.type is CmEventType.REJECTED
            assert event.error is not None
            assert event.error.__notes__ == [NOTE]


def test_named_provider_has_no_reason() -> None:
    with CmId(provider="soft") as cmid, pytest.raises(RdmaError) as caught:
        cmid.bind_addr(("192.0.2.1", 7471))
    assert getattr(caught.value, "__notes__", []) == []
