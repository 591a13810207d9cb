"""Both ends of a connection in one thread, step by step, on a simulated fabric or in real time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rdmacm import AddrInfo, Connection, Listener, connect, listen
from rdmacm.endpoint.connection_state import ConnectionOptions, ConnectionState
from rdmacm.endpoint.dispatcher import Dispatcher, Expired, Routine
from rdmacm.endpoint.listening import ListenerState
from rdmacm.endpoint.race import connect_routine
from rdmacm.testing import Fabric


class Part:
    """One end's routine, resumed when its condition holds; ``result`` or ``error`` once it is ``done``."""

    def __init__(self, dispatcher: Dispatcher, routine: Routine[Any], timeout: float | None = None) -> None:
        self.dispatcher = dispatcher
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._routine = routine
        self._timeout = timeout
        self._limit = None if timeout is None else dispatcher.clock() + timeout
        self._go(lambda: next(routine))

    def _go(self, resume: Callable[[], Any]) -> None:
        try:
            self._wait = resume()
        except StopIteration as stop:
            self.result, self.done = stop.value, True
        except Exception as error:
            self.error, self.done = error, True

    def cancel(self) -> None:
        """End the routine at the step for which it waits."""
        self._routine.close()

    def turn(self) -> None:
        """Resume the routine as long as its conditions hold."""
        while not self.done:
            self.dispatcher.drive_once(self.dispatcher.dispatch)
            try:
                found = self.dispatcher.drive_once(self._wait.ready)
            except Exception as error:
                self._routine.close()
                self.error, self.done = error, True
                return
            now = self.dispatcher.clock()
            if found or (self._wait.until is not None and now >= self._wait.until):
                self._go(partial(self._routine.send, found or None))
            elif self._limit is not None and now >= self._limit:
                assert self._timeout is not None
                self._go(lambda: self._routine.throw(Expired(self._timeout or 0)))
            else:
                return

    def deadline(self) -> float | None:
        ends = [end for end in (self._limit, self._wait.until) if end is not None]
        return min(ends) if ends and not self.done else None


def play(fabric: Fabric, *parts: Part) -> list[Any]:
    """Let virtual time pass until every part is done; returns their results, or raises the first error."""

    def turn() -> bool:
        for part in parts:
            part.turn()
        return all(part.done for part in parts)

    while not turn():
        ends = [end for part in parts if (end := part.deadline()) is not None]
        fabric.run(turn, seconds=max(0.0, min(ends) - fabric.now) if ends else 300)
        assert ends or all(part.done for part in parts), "the parts wait, and no event is left"
    for part in parts:
        if part.error is not None:
            raise part.error
    return [part.result for part in parts]


@contextmanager
def connected(host: str = "127.0.0.1", **options: Any) -> Iterator[tuple[Connection, Connection]]:
    """A connection on loopback: (active side, passive side)."""
    with listen((host, 0), **options) as listener:
        with accepting(listener) as accepted:
            active = connect((host, listener.port), timeout=20)
        with active, accepted[0] as passive:
            yield active, passive


@contextmanager
def accepting(listener: Listener, **options: Any) -> Iterator[list[Connection]]:
    """Accept one connection in a thread; the list has it at the end of the block."""
    accepted: list[Connection] = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept(20, **options)))
    thread.start()
    try:
        yield accepted
    finally:
        thread.join()


@contextmanager
def in_thread(work: Callable[[], object]) -> Iterator[None]:
    """Call a function in a thread during the block; the end of the block raises its exception."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    if failures:
        raise failures[0]


class Ends:
    """Hosts a and b; b listens on port 7471."""

    def __init__(self, fabric: Fabric, *addresses: str, **options: Any) -> None:
        self.fabric = fabric
        self.a = fabric.host("a", "10.0.0.1", "fd00::1")
        self.b = fabric.host("b", *(addresses or ("10.0.0.2", "fd00::2")))
        self.options = ConnectionOptions(**options)
        self.a_dispatcher, self.b_dispatcher = Dispatcher(self.a.provider), Dispatcher(self.b.provider)
        self.listener = ListenerState(self.b_dispatcher, ("", 7471), 0, self.options)

    def connecting(self, *hosts: str, timeout: float | None = None) -> Part:
        infos = [AddrInfo(family=10 if ":" in host else 2, port_space=0x106, dst_addr=(host, 7471)) for host in hosts]
        return Part(self.a_dispatcher, connect_routine(self.a_dispatcher, infos, self.options, None, 0), timeout)

    def accepting(self) -> Part:
        return Part(self.b_dispatcher, self.listener.accept(b""))

    def connect(self) -> tuple[ConnectionState, ConnectionState]:
        active, passive = play(self.fabric, self.connecting("10.0.0.2"), self.accepting())
        return active, passive

    def close(self, *cores: ConnectionState) -> None:
        for core in cores:
            core.release()
        self.listener.close()
        self.a_dispatcher.release()
        self.b_dispatcher.release()
        for host in (self.a, self.b):
            assert not host.provider.runtime.in_use
            assert len(host.provider.host.mux) == 0


def send(core: ConnectionState, data: bytes, timeout: float | None = None) -> Part:
    return Part(core.dispatcher, core.send(data, None), timeout)


def receive(core: ConnectionState, timeout: float | None = None) -> Part:
    return Part(core.dispatcher, core.receive(), timeout)
