"""Exceptions of signal handlers end a call where it waits, and never in the midst of its work."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from weakref import WeakSet

import pytest

import rdmacm
from rdmacm import CmDisconnectedError, CmTimeoutError, Connection, EventChannel, Listener
from rdmacm.interrupts import handlers
from rdmacm.interrupts.protection import is_at_work
from rdmacm.soft import open_provider
from rdmacm.soft.wire.udp import UdpWire
from rdmacm.testing import Fabric, MemoryNetwork, VirtualClock, memory_provider
from rdmacm.testing.host import Host
from support.clock import eventually, pause
from support.descriptors import held_for_others
from support.endpoints import in_thread

SIGNAL = signal.SIGUSR1
PACKAGE = Path(rdmacm.__file__).parent
#: The files of signal handlers, which are called within the code that is interrupted.
HANDLERS = {__file__, handlers.__file__}


class Interrupted(Exception):
    """What the handlers raise here."""


class Handler:
    """A handler that raises while it is armed; it is disarmed by that. Records the functions it has interrupted."""

    def __init__(self) -> None:
        self.armed = True
        self.calls = 0
        self.within: list[str] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.calls += 1
        if self.armed:
            self.armed = False
            assert frame is not None
            self.within.append(frame.f_code.co_qualname)
            raise Interrupted


@pytest.fixture
def handler() -> Iterator[Handler]:
    made = Handler()
    before = signal.signal(SIGNAL, made)
    yield made
    signal.signal(SIGNAL, before)


def interrupt_in_receive(monkeypatch: pytest.MonkeyPatch, number: int = SIGNAL) -> list[object]:
    """The next receive() of a UDP wire is interrupted before and after its work. Returns what it has returned."""
    receive = UdpWire.receive
    found: list[object] = []

    def interrupted(self: UdpWire, skip_poll: bool = False) -> object:
        signal.raise_signal(number)
        monkeypatch.undo()
        found.append(receive(self, skip_poll))
        return found[-1]

    monkeypatch.setattr(UdpWire, "receive", interrupted)
    return found


# -- when a handler runs -----------------------------------------------------------------------------


def test_a_handler_runs_after_the_work_is_done(handler: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    with rdmacm.listen(("127.0.0.1", 0)):
        found = interrupt_in_receive(monkeypatch)
        ended = False
        try:
            ended = open_provider().drive(lambda: len(found) == 1, 0)
            len(found)  # a call: Python looks for signals after it
        except Interrupted:
            handler.within.append("caught")
    assert ended
    assert handler.calls == 1
    assert handler.within == ["test_a_handler_runs_after_the_work_is_done", "caught"]


def test_a_handler_ends_a_wait(handler: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    with rdmacm.listen(("127.0.0.1", 0)) as listener:
        interrupt_in_receive(monkeypatch)
        with pytest.raises(Interrupted):
            listener.accept(timeout=30)
    assert handler.within == ["Waiter.wait"]


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    with rdmacm.listen(("127.0.0.1", 0)) as listener:
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        found = interrupt_in_receive(monkeypatch, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            listener.accept(timeout=30)
        assert len(found) == 1


def test_ctrl_c_is_not_lost_in_a_finalizer() -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    item = Finalized()
    with rdmacm.listen(("127.0.0.1", 0)), pytest.raises(KeyboardInterrupt):
        del item
        gc.get_count()  # a call: Python looks for signals after it


def test_ctrl_c_is_not_lost_in_a_callback_of_the_garbage_collector() -> None:
    def interrupt(phase: str, _: object) -> None:
        if phase == "start":
            signal.raise_signal(signal.SIGINT)

    with rdmacm.listen(("127.0.0.1", 0)):
        gc.callbacks.append(interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                gc.collect()
        finally:
            gc.callbacks.remove(interrupt)


def test_ctrl_c_is_not_lost_as_a_weak_set_loses_its_object() -> None:
    class Item:
        pass

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "_remove":
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    item = Item()
    items = WeakSet([item])
    before = sys.getprofile()
    try:
        with rdmacm.listen(("127.0.0.1", 0)), pytest.raises(KeyboardInterrupt):
            sys.setprofile(interrupt)
            del item
            len(items)  # a call: Python looks for signals after it
    finally:
        sys.setprofile(before)


def test_a_second_signal_in_a_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def handler(number: int, frame: FrameType | None) -> None:
        calls.append(number)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)  # it is not deferred until this handler is done
            calls.append(0)

    before = signal.signal(SIGNAL, handler)
    try:
        with rdmacm.listen(("127.0.0.1", 0)) as listener:
            interrupt_in_receive(monkeypatch)
            with pytest.raises(KeyboardInterrupt):
                listener.accept(timeout=30)
    finally:
        signal.signal(SIGNAL, before)
    assert calls == [SIGNAL]


def in_each_decision(patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Call ``act`` whenever the wrapper of a handler looks at what the thread is doing."""

    def look(frame: FrameType | None) -> bool:
        act()
        return is_at_work(frame)

    patch.setattr(handlers, "is_at_work", look)


def test_signals_that_come_before_their_handler_is_called(handler: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    with rdmacm.listen(("127.0.0.1", 0)) as listener, pytest.MonkeyPatch.context() as patch:
        in_each_decision(patch, lambda: signal.raise_signal(SIGNAL))
        interrupt_in_receive(monkeypatch)
        with pytest.raises(Interrupted):
            listener.accept(timeout=30)
    assert handler.calls == 1
    assert handler.within == ["Waiter.wait"]


def test_a_signal_is_not_lost_to_the_exception_of_another(handler: Handler) -> None:
    def interrupt() -> None:
        patch.undo()
        signal.raise_signal(signal.SIGINT)

    with rdmacm.listen(("127.0.0.1", 0)), pytest.MonkeyPatch.context() as patch:
        in_each_decision(patch, interrupt)
        with pytest.raises(Interrupted) as caught, suppress(KeyboardInterrupt):
            signal.raise_signal(SIGNAL)
    assert isinstance(caught.value.__context__, KeyboardInterrupt)
    assert handler.calls == 1


def test_a_child_that_is_forked_before_a_handler_is_called_gets_signals(handler: Handler) -> None:
    children: list[int] = []

    def fork() -> None:
        children.append(os.fork())
        if not children[0]:
            try:
                signal.raise_signal(SIGNAL)
            except Interrupted:
                os._exit(0)
            finally:
                os._exit(1)

    def fork_in_thread() -> None:
        patch.undo()
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()

    with rdmacm.listen(("127.0.0.1", 0)), pytest.MonkeyPatch.context() as patch:
        in_each_decision(patch, fork_in_thread)
        with pytest.raises(Interrupted):
            signal.raise_signal(SIGNAL)
    assert os.waitpid(children[0], 0)[1] == 0


def test_a_new_handler_is_found(handler: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    with rdmacm.listen(("127.0.0.1", 0)) as listener:
        signal.signal(SIGNAL, handler)
        pause(2 * handlers.INTERVAL, "the next call looks for new handlers")
        with pytest.raises(CmTimeoutError):
            listener.accept(timeout=0)
        assert signal.getsignal(SIGNAL) is not handler


def test_a_call_that_hangs_can_be_ended(handler: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_PATIENCE", 0.05)

    def receive(self: UdpWire, skip_poll: bool = False) -> object:
        signal.raise_signal(SIGNAL)
        while True:
            pass

    with rdmacm.listen(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(UdpWire, "receive", receive)
        handler.armed = False
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Handler, "__call__", _exit)
            with pytest.raises(SystemExit):
                listener.accept(timeout=0)
        monkeypatch.undo()


def _exit(*_: object) -> None:
    raise SystemExit


def test_handlers_are_as_before_without_a_provider(handler: Handler) -> None:
    provider = memory_provider(MemoryNetwork(), VirtualClock())
    users, handlers._users = handlers._users, set()
    try:
        signal.signal(SIGNAL, handler)
        with EventChannel(provider):
            assert signal.getsignal(SIGNAL) is not handler
        assert signal.getsignal(SIGNAL) is handler
    finally:
        handlers._users = users


def test_the_handlers_of_asyncio_stay() -> None:
    async def main() -> None:
        before = signal.getsignal(signal.SIGINT)
        async with await rdmacm.aio.listen(("127.0.0.1", 0)):
            handlers.refresh()
            assert signal.getsignal(signal.SIGINT) is before

    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.run(main())


def test_a_simulation_can_be_interrupted(handler: Handler) -> None:
    fabric = Fabric()
    host = fabric.host("a", "10.0.0.1/24")
    with rdmacm.listen(("10.0.0.1", 7), provider=host.provider) as listener:
        progress = Host._progress

        def interrupted(self: object) -> bool:
            signal.raise_signal(SIGNAL)
            return progress(host)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Host, "_progress", interrupted)
            with pytest.raises(Interrupted):
                listener.accept(timeout=1)
    assert handler.within == ["checkpoint"]


# -- many interrupts ---------------------------------------------------------------------------------


class Interrupts:
    """A thread that interrupts this one at random moments; the handler raises while :attr:`armed`.

    An interrupt of a finalizer is lost, and Python reports it to ``sys.unraisablehook``. Finalizers of other packages
    may be interrupted, those of this one may not.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.raised = 0
        self.armed = False
        self.report = sys.unraisablehook
        self._main = threading.get_ident()
        self._random = random.Random(count)

    def handler(self, number: int, frame: FrameType | None) -> None:
        if self.armed:
            self.raised += 1
            raise Interrupted

    def unraisable(self, lost: sys.UnraisableHookArgs) -> None:
        armed, self.armed = self.armed, False
        files = {frame.f_code.co_filename for frame, _ in walk_tb(lost.exc_traceback)} - HANDLERS
        is_ours = not files or any(PACKAGE in Path(file).parents for file in files)
        if is_ours or lost.exc_type is not Interrupted:
            self.report(lost)
        self.armed = armed

    def run(self) -> None:
        while self.raised < self.count:
            signal.pthread_kill(self._main, SIGNAL)
            pause(
                self._random.random() * (0.01 if self._random.random() < 0.1 else 0.0005),
                "the next interrupt comes at another moment",
            )


def echo(connection: Connection) -> None:
    with connection:
        try:
            for message in connection:
                connection.send(message)
        except CmDisconnectedError:
            pass


def serve(listener: Listener) -> None:
    for connection in listener:
        threading.Thread(target=echo, args=(connection,), daemon=True).start()


class Client:
    """Talks to :func:`serve` on one connection, and makes and closes others now and then."""

    def __init__(self, port: int) -> None:
        self.address = "127.0.0.1", port
        self.connection = rdmacm.connect(self.address)
        #: The number of the last message that was sent, or was not because of an interrupt before the call.
        self.sent = 0
        #: The messages whose send() has returned, and those that have come back.
        self.completed: set[int] = set()
        self.received: set[int] = set()
        #: The last message that has come back. It is assigned before an interrupt can come.
        self.last = b"0"
        self.connected = 0

    def turn(self, turn: int) -> None:
        self.received.add(int(self.last))
        if turn % 20 == 0:
            with rdmacm.connect(self.address) as other:
                other.send(b"hello")
                assert other.recv() == b"hello"
                self.connected += 1
        elif self.sent - max(self.received) < 4:
            self.sent += 1
            self.connection.send(b"%d" % self.sent)
            self.completed.add(self.sent)
        else:
            self.receive()

    def receive(self, patience: float = 0.2) -> bool:
        """Receive a message; False if none comes within ``patience`` seconds."""
        self.received.add(int(self.last))  # an interrupt may have come before the last call has done this
        try:
            self.last = self.connection.recv(patience)
        except CmTimeoutError:
            self.sent = max(self.received)  # the others were never sent
            return False
        self.received.add(int(self.last))
        return True


#: For a longer run than CI's: 100,000 take five minutes.
MANY = int(os.environ.get("RDMACM_INTERRUPTS", "3000"))


def test_requests_that_wait_are_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client gives up while its request waits for a permit: the server never gets it."""
    monkeypatch.setattr("rdmacm.proto.cm.admission.PERMITS", 1)
    test_interrupts_at_random_moments(50, monkeypatch)


@pytest.mark.parametrize("count", [200, pytest.param(MANY, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_interrupts_at_random_moments(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = Interrupts(count)
    monkeypatch.setattr(sys, "unraisablehook", interrupts.unraisable)
    before = signal.signal(SIGNAL, interrupts.handler)
    listener = rdmacm.listen(("127.0.0.1", 0))
    try:
        with in_thread(lambda: serve(listener)), closing(listener):
            client = Client(listener.port)
            used = used_by()
            with in_thread(interrupts.run):
                take_turns(client, interrupts)
            while not client.completed <= client.received and client.receive(5.0):
                pass
            with client.connection:
                client.turn(20)
                assert client.completed <= client.received
                await_release(used)
            assert helper_threads() == 1
    finally:
        signal.signal(SIGNAL, before)
    assert not open_provider().runtime.errors.counts


def take_turns(client: Client, interrupts: Interrupts) -> None:
    turn = 0
    while interrupts.raised < interrupts.count:
        turn += 1
        try:
            interrupts.armed = True
            client.turn(turn)
            interrupts.armed = False
        except Interrupted:  # no interrupt comes between this and the assignment
            interrupts.armed = False
        except BaseException:
            interrupts.armed = False
            interrupts.raised = interrupts.count
            raise


def used_by() -> tuple[int, int, int]:
    """Queue pairs, ids and descriptors in use, without those for other processes that share the UDP port."""
    host = open_provider().host
    with host.runtime.lock:
        wire = host.mux.wire
        assert isinstance(wire, UdpWire)
        return len(host.mux), host.bound_ids, len(os.listdir("/proc/self/fd")) - held_for_others(wire)


def await_release(used: tuple[int, int, int]) -> None:
    """Wait until no more is in use than before, but descriptors that are kept for the next wait.

    A server whose client has given up and whose REJ was lost repeats its REP for a quarter of a minute.
    """

    def is_released() -> bool:
        gc.collect()
        now = used_by()
        return now[0] <= used[0] and now[1] <= used[1] and now[2] <= used[2] + 8

    try:
        eventually(is_released)
    except AssertionError:
        raise AssertionError(used, used_by(), describe()) from None


def describe() -> list[str]:
    """The connections of this process."""
    agent = open_provider().host.cm._agent
    assert agent is not None
    return [
        f"{connection.comm_id:#x} {connection.state.name} qp {connection.local_qpn:#x} peer {connection.remote_qpn:#x}"
        for connection in agent._connections.by_id.values()
    ]


def helper_threads() -> int:
    return sum(thread.name == "rdmacm-progress" for thread in threading.enumerate())
