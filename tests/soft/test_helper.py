"""The helper thread: it outlives its own faults, and says why it cannot be started."""

from __future__ import annotations

import errno
import gc
import subprocess
import sys
import threading
from typing import Any

import pytest

import rdmacm
from rdmacm import CmId, RdmaError
from rdmacm.cmstate import State
from rdmacm.progress.wake import Waiter
from rdmacm.soft import open_provider
from rdmacm.soft.helper import HELPER_THREAD
from support.endpoints import connected

pytestmark = pytest.mark.usefixtures("faults_expected")


class Bug(Exception):
    """What raises here."""


def test_it_outlives_an_exception(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with connected() as (active, passive):
        runtime = open_provider().runtime
        before = runtime.errors.counts["helper"]
        happened, recovered = threading.Event(), threading.Event()
        prepare, forget = Waiter.prepare, Waiter.forget

        def raising(self: Waiter, *args: object) -> None:
            if threading.current_thread().name == HELPER_THREAD and not happened.is_set():
                happened.set()
                raise Bug
            prepare(self, *args)  # type: ignore[arg-type]

        def recovering(self: Waiter) -> None:
            forget(self)
            recovered.set()

        monkeypatch.setattr(Waiter, "prepare", raising)
        monkeypatch.setattr(Waiter, "forget", recovering)
        with runtime.lock:
            runtime.driver.deadlines_changed()
        assert recovered.wait(20)
        region = passive.register(bytearray(8), remote_write=True)
        active.write(region.remote, b"one side")  # the helper acknowledges what no caller waits for
        assert runtime.errors.counts["helper"] == before + 1
        runtime.errors.counts.clear()
        assert any(thread.name == HELPER_THREAD for thread in threading.enumerate())
    assert caplog.records[0].exc_info


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_id_is_collected_in_it_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that starts it holds the lock, and waits until it begins."""
    set_ident = threading.Thread._set_ident  # type: ignore[attr-defined]
    cmid: Any = CmId()
    backend = cmid._backend
    cycle: list[object] = [cmid]
    cycle.append(cycle)
    forgotten = [cycle]
    del cmid, cycle

    def collecting(self: threading.Thread) -> None:
        set_ident(self)
        if self.name == HELPER_THREAD and forgotten:
            forgotten.clear()
            gc.collect()

    def listen() -> None:
        with rdmacm.listen(("127.0.0.1", 0)):
            pass

    monkeypatch.setattr(threading.Thread, "_set_ident", collecting)
    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "the threads wait for each other"
    assert not forgotten
    open_provider().drive(lambda: True, 0)
    assert backend.state is State.DESTROYING


def test_it_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    host = open_provider().host
    assert not host.mux.opened

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RdmaError) as caught:
            rdmacm.listen(("127.0.0.1", 0))
        assert caught.value.errno == errno.EAGAIN
        assert not host.mux.opened
        assert not host.mux.wire.filenos()
    with connected() as (active, passive):
        active.send(b"hello")
        assert passive.recv() == b"hello"


ISOLATED = """
import {module} as interpreters
made = interpreters.create()
interpreters.run_string(made, '''
import errno, rdmacm
assert rdmacm.getaddrinfo("127.0.0.1", "7471")
try:
    rdmacm.listen(("127.0.0.1", 0))
except rdmacm.RdmaError as error:
    assert error.errno == errno.ENOTSUP, error
    assert "main interpreter" in str(error), error
else:
    raise AssertionError("it listens")
''')
interpreters.destroy(made)
"""


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="other interpreters refuse the import of single-phase modules")
def test_an_isolated_sub_interpreter_gets_a_clear_error() -> None:
    code = ISOLATED.format(module="_xxsubinterpreters")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
