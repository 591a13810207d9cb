"""An asyncio event loop in virtual time.

It is the standard library's, but for two things: its clock is that of a fabric, and where it would sleep in its
selector, the fabric runs until a descriptor is ready or the next timer is due. The descriptors are real; those of
channels become ready as the fabric delivers packets.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")

#: As many turns in a row with something to call take no time. Each further one takes some: a task may poll.
_FREE_TURNS = 1000
#: Maximum virtual time of such a turn, in seconds.
_TURN_SECONDS = 0.001

_Ready = list[tuple[selectors.SelectorKey, int]]


class _Task(asyncio.Task[T]):
    """A task whose place in a set is the same in each run: asyncio cancels tasks in the order of sets."""

    _numbers = itertools.count()

    def __init__(self, coro: Coroutine[Any, Any, T], *, number: int, **options: Any) -> None:
        self._number = number  # before super(), which adds the task to a set
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class _Selector(selectors.DefaultSelector):
    """A selector that sleeps in virtual time. ``called`` is set when the loop has got something to call meanwhile."""

    def __init__(self, block: Callable[[Callable[[], bool], float | None], object]) -> None:
        super().__init__()
        self.called = self.sleeps = False
        self._run = block
        self._turns = 0

    def _block(self, is_over: Callable[[], bool], seconds: float | None) -> None:
        self.sleeps = True
        try:
            self._run(is_over, seconds)
        finally:
            self.sleeps = False

    def select(self, timeout: float | None = None) -> _Ready:
        self.called = False
        ready = super().select(0)
        if timeout is not None and timeout <= 0:
            self._turns += 1
            if self._turns > _FREE_TURNS:
                self._block(bool, _TURN_SECONDS)
            return ready
        if not ready:
            self._turns = 0
            look = super().select

            def is_over() -> bool:
                if not self.called:
                    ready.extend(look(0))
                return self.called or bool(ready)

            self._block(is_over, timeout)
        return ready


class FabricLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is ``clock()``, and which sleeps by ``block(ready, seconds)``.

    ``run`` runs a function beside it, as an executor's thread would.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        block: Callable[[Callable[[], bool], float | None], object],
        run: Callable[[Callable[[], None]], object],
    ) -> None:
        self._clock = clock
        self._run_beside = run
        self._fabric_selector = _Selector(block)
        numbers = itertools.count()
        super().__init__(self._fabric_selector)
        self.set_task_factory(lambda loop, coro, **options: _Task(coro, loop=loop, number=next(numbers), **options))

    @property
    def sleeps(self) -> bool:
        """Whether it has nothing to call, so that the fabric runs."""
        return self._fabric_selector.sleeps

    def time(self) -> float:
        return self._clock()

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        self._fabric_selector.called = True
        return super().call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self,
        executor: Executor | None,  # noqa: ARG002
        func: Callable[..., T],
        *args: Any,
    ) -> asyncio.Future[T]:
        """Run a function beside the loop, whatever the executor: its threads would run in real time."""
        future: asyncio.Future[T] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except BaseException as error:
                self.call_soon_threadsafe(_settle, future, None, error)
            else:
                self.call_soon_threadsafe(_settle, future, result, None)

        self._run_beside(work)
        return future


def _settle(future: asyncio.Future[Any], result: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def tasks_text() -> str:
    """The tasks of the running event loop and where they wait, for error messages."""
    tasks = sorted(asyncio.all_tasks(asyncio._get_running_loop()), key=hash)
    return f"; tasks: {', '.join(f'{task.get_name()} in {_place(task)}' for task in tasks)}" if tasks else ""


def _place(task: asyncio.Task[Any]) -> str:
    stack = task.get_stack()
    return f"{stack[-1].f_code.co_filename}:{stack[-1].f_lineno}" if stack else "its first line"
