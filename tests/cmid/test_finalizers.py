"""Forgotten objects are released, but not in the midst of a call that may hold any lock."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rdmacm import CmEvent, CmId, EventChannel, PortSpace, capture
from rdmacm.cmid import acks
from rdmacm.diagnosis.captures import Capture
from rdmacm.interrupts.protection import run_finalizers
from rdmacm.provider.cmstate import State
from rdmacm.testing import MemoryNetwork, VirtualClock, memory_provider
from support.pair import ends


@pytest.fixture(autouse=True)
def forgetting() -> Iterator[None]:
    """The objects are forgotten on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        run_finalizers()  # a thread of another test may have deferred some


class Forgotten:
    """An id that only the garbage collector destroys."""

    def __init__(self, channel: EventChannel) -> None:
        cmid = CmId(channel, PortSpace.TCP)
        self.backend: Any = cmid._backend
        self._cycle: list[object] = [cmid]
        self._cycle.append(self._cycle)

    def collect(self) -> None:
        self._cycle = []
        gc.collect()

    @property
    def is_destroyed(self) -> bool:
        return self.backend.state is State.DESTROYING


def test_at_once_outside_of_the_package() -> None:
    with EventChannel(memory_provider(MemoryNetwork(), VirtualClock())) as channel:
        forgotten = Forgotten(channel)
        forgotten.collect()
        assert forgotten.is_destroyed


def test_later_in_a_capture(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Destroying an id may send a packet, which the capture would record with its lock held already."""
    blocks = Capture._blocks
    with ends() as both, capture(tmp_path / "x.pcapng", both.a.host.provider):
        forgotten = Forgotten(both.a.channel)
        seen: list[bool] = []

        def collecting(self: Capture, *args: Any) -> list[bytes]:
            if not seen:
                forgotten.collect()
                seen.append(forgotten.is_destroyed)
            return blocks(self, *args)

        monkeypatch.setattr(Capture, "_blocks", collecting)
        both.connect()
        assert seen == [False]
        assert forgotten.is_destroyed


def test_two_threads_that_hold_the_locks_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One acknowledges an event and finalizes an id, the other has the runtime's lock and acknowledges an event."""
    provider: Any = memory_provider(MemoryNetwork(), VirtualClock())
    acknowledging, locked = threading.Event(), threading.Event()
    with EventChannel(provider) as channel, CmId(channel) as cmid:
        forgotten = Forgotten(channel)
        for _ in range(2):
            cmid.write_cm_event()
        events: list[CmEvent] = [channel.get_event(1) for _ in range(2)]

        def collecting() -> None:
            if threading.current_thread() is first:
                acknowledging.set()
                assert locked.wait(20)
                forgotten.collect()

        def ack_with_lock() -> None:
            assert acknowledging.wait(20)
            with provider.runtime.lock:
                locked.set()
                events[1].ack()

        monkeypatch.setattr(acks, "waiters", 1)
        monkeypatch.setattr(acks, "wake_waiters", collecting)  # called with ACK_LOCK held
        first = threading.Thread(target=events[0].ack, daemon=True)
        second = threading.Thread(target=ack_with_lock, daemon=True)
        for thread in (first, second):
            thread.start()
        for thread in (first, second):
            thread.join(20)
            assert not thread.is_alive(), "the threads wait for each other"
        assert not forgotten.is_destroyed
        provider.drive(lambda: True, 0)
        assert forgotten.is_destroyed


def test_objects_that_outlive_the_modules_are_only_reported(tmp_path: Path) -> None:
    """A daemon thread keeps the modules, so at exit the interpreter sets their names to None, the last module first."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import sys, threading, types
            holder = sys.modules["holder"] = types.ModuleType("holder")
            import rdmacm.verbs

            def keep(modules):
                threading.Event().wait()

            listener = holder.listener = rdmacm.listen(("127.0.0.1", 0))
            accepting = threading.Thread(target=lambda: listener.accept().close(), daemon=True)
            accepting.start()
            holder.connection = rdmacm.connect(("127.0.0.1", listener.port))
            accepting.join()
            holder.channel = rdmacm.EventChannel()
            holder.id = rdmacm.CmId(holder.channel)
            holder.context = rdmacm.open_device("soft_lo")
            holder.cq = rdmacm.verbs.CQ(holder.context, 1)
            threading.Thread(target=keep, args=[list(sys.modules.values())], daemon=True).start()
        """)
    )
    command = [sys.executable, "-W", "always::ResourceWarning", str(program)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    unclosed = ("listener", "connection", "event channel", "")
    assert sorted(
        line.split(" <")[0].removeprefix("sys:1: ResourceWarning: ") for line in shown.splitlines()
    ) == sorted(["undestroyed id", *(f"unclosed {what}".rstrip() for what in unclosed)])
