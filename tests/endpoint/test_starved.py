"""A process that has no descriptor left keeps its connections."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rdmacm import CmTimeoutError
from rdmacm.soft import open_provider
from support.endpoints import connected, in_thread


@contextmanager
def no_descriptors() -> Iterator[None]:
    """No descriptor can be opened during the block."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 8
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                held.append(os.dup(0))
        yield
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_connection_works_without_a_free_descriptor() -> None:
    with connected() as (active, passive):
        runtime = open_provider().runtime
        with runtime.lock:
            runtime.waiters.close()  # waits have to make the descriptors that they need
        with no_descriptors():
            timer = threading.Timer(0.03, lambda: passive.send(b"late"))
            with in_thread(timer.run):
                assert active.recv(timeout=20) == b"late"
            with pytest.raises(CmTimeoutError):
                active.recv(timeout=0.01)
        active.send(b"more")
        assert passive.recv(timeout=20) == b"more"
        assert not runtime.errors.counts
