"""Tests of engines run with each engine, but those of reliable connections whose memory no device has."""

from __future__ import annotations

import pytest

from support import rc, ud


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.module.__name__.rpartition(".")[2]
    if name.startswith("test_rc") and name not in ("test_rc_captures", "test_rc_local"):
        metafunc.parametrize("rc_engine", rc.ENGINES, indirect=True)
    if name.startswith("test_ud"):
        metafunc.parametrize("ud_engine", ud.ENGINES, indirect=True)


@pytest.fixture(autouse=True)
def rc_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine that :func:`support.rc.make_rc` makes."""
    chosen: str = getattr(request, "param", "python")
    monkeypatch.setattr(rc, "chosen", chosen)
    return chosen


@pytest.fixture(autouse=True)
def ud_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine that :func:`support.ud.make_ud` makes."""
    chosen: str = getattr(request, "param", "python")
    monkeypatch.setattr(ud, "chosen", chosen)
    return chosen
