"""Tests of engines run with each engine, but those of connections whose memory no device has."""

from __future__ import annotations

import pytest

from support import rc, ud

#: Tests whose memory no device has.
_PYTHON_ALONE = ("test_messages_of_rxe_are_received", "test_send_with_invalidate_and_local_requests")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.module.__name__.rpartition(".")[2]
    is_of_both = name.startswith("test_rc") and name not in ("test_rc_captures", "test_rc_local")
    if is_of_both or (name in ("test_uc", "test_xrc") and metafunc.function.__name__ not in _PYTHON_ALONE):
        metafunc.parametrize("rc_engine", rc.ENGINES, indirect=True)
    if name.startswith("test_ud"):
        metafunc.parametrize("ud_engine", ud.ENGINES, indirect=True)


@pytest.fixture(autouse=True)
def rc_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine that :func:`support.rc.make_rc` and the others make."""
    chosen: str = getattr(request, "param", "python")
    monkeypatch.setattr(rc, "chosen", chosen)
    return chosen


@pytest.fixture(autouse=True)
def ud_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine that :func:`support.ud.make_ud` makes."""
    chosen: str = getattr(request, "param", "python")
    monkeypatch.setattr(ud, "chosen", chosen)
    return chosen
