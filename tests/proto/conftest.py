"""Tests of reliable connections run with each engine, but those whose memory no device has."""

from __future__ import annotations

import pytest

from support import rc


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.module.__name__.rpartition(".")[2]
    if name.startswith("test_rc") and name not in ("test_rc_captures", "test_rc_local"):
        metafunc.parametrize("rc_engine", rc.ENGINES, indirect=True)


@pytest.fixture(autouse=True)
def rc_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine that :func:`support.rc.make_rc` makes."""
    chosen: str = getattr(request, "param", "python")
    monkeypatch.setattr(rc, "chosen", chosen)
    return chosen
