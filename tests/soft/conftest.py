"""Fixtures of the software device's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.softdev import Pair


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()
