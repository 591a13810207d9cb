"""A port, and other processes that open a wire on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.processes import MakeWorker, workers
from support.wires import free_port


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def worker(port: int) -> Iterator[MakeWorker]:
    """Makes processes."""
    with workers(port) as make:
        yield make
