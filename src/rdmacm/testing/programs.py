"""Programs of a fabric: functions and scripts that wait, each in a thread of its own, of which one runs at a time.

The thread that runs the fabric lets the programs run in turns. A turn ends where the program waits: in a call of the
package, in ``time.sleep``, for a lock or a thread (:mod:`rdmacm.testing.blocking`). So nothing but the seed decides on
their order, and time passes only while all of them wait.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextvars import Context, copy_context
from io import StringIO
from math import inf
from random import Random
from typing import Any, Generic, Protocol, TypeVar

from rdmacm.errors import CmTimeoutError
from rdmacm.interrupts.protection import run_finalizers
from rdmacm.testing.blocking import Blockable, blocking_calls, calling, calls_blockable
from rdmacm.testing.clock import HostClock, SimulationError, VirtualClock
from rdmacm.testing.loop import FabricLoop

T = TypeVar("T")
S = TypeVar("S")

#: As many calls in a row that find nothing take no time. Each further one takes some: a program may poll.
_FREE_POLLS = 64
#: Maximum virtual time of such a call, in seconds. It ends earlier if something happens on the fabric.
_POLL_SECONDS = 0.001

# The originals, which the functions of rdmacm.testing.blocking stand in for.
_new_lock = threading.Lock
_Thread = threading.Thread


class ProgramKilled(BaseException):
    """Raised where a program waits when its host crashes or the fabric is closed. It is no error: do not catch it."""


class Machine(Protocol):
    """The host of a program; :class:`rdmacm.testing.Host` is one."""

    name: str
    clock: HostClock
    _busy_until: float

    @property
    def runs(self) -> bool:
        """Whether the host makes progress."""

    @property
    def _is_ready(self) -> bool:
        """Whether it can do something now: it runs, and is not busy until ``_busy_until`` (of the fabric's clock)."""

    def _worked(self) -> None:
        """Count that it has done something."""


class Script:
    """What all threads of a script share, which ends as a process does: with the last of them that is no daemon.

    ``variables``: those of its module. ``at_exit`` is called at its end.
    """

    def __init__(self, variables: dict[str, object]) -> None:
        self.at_exit: list[Callable[[], object]] = []
        #: What has ended its threads.
        self.errors: list[BaseException | None] = []
        self._variables = variables

    def end(self) -> None:
        """Destroy what it has not closed. As at the end of a process, nothing warns of that."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            for call in self.at_exit:
                call()
            self.at_exit.clear()
            seen: set[BaseException | None] = {None}
            while self.errors:
                error = self.errors.pop()
                if error is not None and error not in seen:
                    seen.add(error)
                    traceback.clear_frames(error.__traceback__)
                    self.errors += error.__cause__, error.__context__
            self._variables.clear()
            if len(seen) > 1:
                gc.collect()
            run_finalizers()


class Strand(Blockable, Generic[T]):
    """A thread of a program, and its turns."""

    looks: bool
    until: float

    def __init__(
        self,
        programs: Programs,
        host: Machine | None,
        target: Callable[[], T],
        name: str,
        *,
        arguments: list[str] | None = None,
        thread: threading.Thread | None = None,
        script: Script | None = None,
    ) -> None:
        """``arguments``: its sys.argv. ``thread``: one that the program has made, and starts itself."""
        self.name = name
        self.script = script
        self.is_daemon: bool = thread is not None and thread.daemon
        self.done: bool = False
        self.host = host
        #: Whether it is to end where it waits.
        self.killed = False
        #: When it goes on at the latest, in seconds of the fabric's clock; and whether it has to look before.
        self.until, self.looks = -inf, True
        #: Whether its turn has done more than look.
        self.ran: bool = False
        self.programs = programs
        self._target = target
        self._arguments = arguments
        self._context: Context = copy_context()
        self.value: T | None = None
        self.error: BaseException | None = None
        self._is_own_thread = thread is None
        #: Calls that found nothing since it has waited.
        self._polls = 0
        self._go = _new_lock()
        self._go.acquire()
        self.thread: threading.Thread = thread or _Thread(target=self.run, name=f"rdmacm program {name}", daemon=True)

    # -- in the thread of the fabric ------------------------------------------------------------------

    def turn(self, back: threading.Lock) -> bool:
        """Let it run until it waits; return whether it has done more than look whether its wait is over."""
        self.ran = False
        before = sys.argv, sys.stdout, sys.stderr
        if self._arguments is not None:
            sys.argv = self._arguments
        if self.killed:  # it says nothing any more
            sys.stdout = sys.stderr = StringIO()
        try:
            self._go.release()
            back.acquire()
        finally:
            sys.argv, sys.stdout, sys.stderr = before
        return self.ran

    def where(self) -> str:
        """The line at which it waits, for messages."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        lines = [] if frame is None else traceback.extract_stack(frame)
        for line in reversed(lines):
            if "/rdmacm/" not in line.filename.replace("\\", "/") and line.filename != threading.__file__:
                return f"{line.filename}:{line.lineno}"
        return "its first line"

    # -- in its own thread ----------------------------------------------------------------------------

    def run(self) -> None:
        """The body of the thread."""
        # All are daemons for the interpreter. A thread that this one makes is none, unless it says so.
        threading.current_thread()._daemonic = self.is_daemon  # type: ignore[attr-defined]
        self._go.acquire()
        try:
            with calling(self):
                self.ran = True
                if not self.killed:
                    self.value = self._context.run(self._target)
        except ProgramKilled as error:
            if self.script is not None:
                self.script.errors.append(error)
        except SystemExit as error:
            self.error = error if error.code else None
            if self.script is not None:
                self.script.errors.append(error)
        except BaseException as error:
            self.error = error
            if self.script is not None:
                self.script.errors.append(error)
            if isinstance(error, CmTimeoutError) and (others := self.programs.waiting_text(self)):
                error.add_note(f"on the fabric, at {self.programs.clock.now:.9f} s{others}")
            if not self._is_own_thread:
                raise  # threading.excepthook reports it
        finally:
            self.done = True
            self.programs.back.release()

    def now(self) -> float:
        return self.programs.clock.now if self.host is None else self.host.clock()

    def wait(self, ready: Callable[[], S] | None, until: float = inf) -> S | None:
        """Let others run until ``ready()`` returns something true, which is returned; its last value at ``until``.

        ``until`` is in seconds of the fabric's clock. Without ``ready`` it only sleeps.
        """
        while True:
            before, self.ran = self.ran, True
            found = None if ready is None else ready()
            if found:
                return found
            if self.killed:
                raise ProgramKilled
            if self.programs.clock.now >= until:
                return found
            self.ran = before
            self.until, self.looks = until, ready is not None
            self.programs.back.release()
            self._go.acquire()

    def block(self, ready: Callable[[], S] | None, seconds: float | None) -> S | None:
        self._polls = 0
        return self.wait(ready, self.limit(seconds))

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        name = f"executor of {self.name}"
        return FabricLoop(
            self.now, self.block, lambda work: self.programs.start(self.host, work, name, script=self.script)
        )

    def limit(self, seconds: float | None) -> float:
        """The fabric's time after so many seconds of the host's clock; infinity for None."""
        if seconds is None:
            return inf
        now = self.programs.clock.now
        return now + max(0.0, seconds) if self.host is None else self.host.clock.after(seconds)

    def polled(self) -> None:
        """Count a call that found nothing; after many in a row, let time pass."""
        self._polls += 1
        if self._polls > _FREE_POLLS:
            clock = self.programs.clock
            now = clock.now
            self.wait(lambda: clock.now > now, now + _POLL_SECONDS)

    def adopt(self, thread: threading.Thread) -> Callable[[], bool]:
        """A thread that this program has made and is about to start is a program, too."""
        program = Strand(self.programs, self.host, thread.run, thread.name, thread=thread, script=self.script)
        thread.run = program.run  # type: ignore[method-assign]
        thread.daemon = True
        self.programs.add(program)
        return lambda: program.done

    def __str__(self) -> str:
        return f"program {self.name}" if self.host is None else f"program {self.name} on host {self.host.name}"


class Programs:
    """The programs of a fabric, and whose turn it is."""

    def __init__(self, seed: int | str, clock: VirtualClock, run: Callable[[Callable[[], bool]], bool]) -> None:
        """``run`` runs the fabric until a condition holds, and returns whether it does."""
        self.clock = clock
        self._run = run
        self._random = Random(f"{seed}/programs")
        #: Those that have not ended.
        self._all: list[Strand[Any]] = []
        #: Released by the program whose turn ends.
        self.back: threading.Lock = _new_lock()
        self.back.acquire()

    def start(
        self,
        host: Machine | None,
        target: Callable[[], T],
        name: str,
        arguments: list[str] | None = None,
        script: Script | None = None,
    ) -> Program[T]:
        """Start a program, whose first turn comes when the fabric runs."""
        strand = Strand(self, host, target, name, arguments=arguments, script=script)
        self.add(strand)
        with calling(None):  # the start of a thread waits for it
            _Thread.start(strand.thread)
        return Program(strand)

    def add(self, program: Strand[Any]) -> None:
        self._all.append(program)

    def run_ready(self) -> bool:
        """Give each program a turn that may go on, in random order; return whether any has done something."""
        ran = False
        if self._all:
            with blocking_calls():
                ran = self._give_turns(self._all)
                if not ran:  # one that only looks may do so for another one of its host, which has looked before
                    looking = Counter(program.host for program in self._all if program.looks)
                    ran = self._give_turns([program for program in self._all if looking[program.host] > 1])
            ended = [program for program in self._all if program.done]
            if ended:
                self._all = [program for program in self._all if not program.done]
                for program in ended:
                    if program.script is not None:
                        program.thread.join()  # it holds what it has used until it is over
                        self._end(program.script, was_killed=program.killed)
        return ran

    def _end(self, script: Script, *, was_killed: bool) -> None:
        """A thread of a script has ended, perhaps the last one."""
        left = [program for program in self._all if program.script is script]
        if not was_killed and all(program.is_daemon for program in left):
            for program in left:
                program.killed = True
        if not left:
            script.end()

    def _give_turns(self, programs: list[Strand[Any]]) -> bool:
        ran = False
        for program in self._random.sample(programs, len(programs)):
            if not program.killed:
                if not (program.looks or program.until <= self.clock.now):
                    continue
                if program.host is not None and not program.host._is_ready:
                    continue
            if program.turn(self.back):
                ran = True
                if program.host is not None:
                    program.host._worked()
        return ran

    def next_deadline(self) -> float:
        """When a program goes on at the latest, in seconds of the fabric's clock; infinity for never."""
        return min(
            (
                program.until if program.host is None else max(program.until, program.host._busy_until)
                for program in self._all
                if program.until < inf and (program.host is None or program.host.runs)
            ),
            default=inf,
        )

    def finish(self, program: Strand[Any]) -> None:
        """Run the fabric until a program has ended."""
        if not program.done and not self._run(lambda: program.done):
            raise SimulationError(f"{program} waits for ever in {program.where()}{self.waiting_text()}")

    def waiting_text(self, but: Strand[Any] | None = None) -> str:
        """The programs that wait, and where, for error messages; all but one."""
        waiting = [
            f"{program.name}{'' if program.host is None else f' on host {program.host.name}'} in {program.where()}"
            for program in self._all
            if not program.done and program is not but
        ]
        return f"; programs that wait: {', '.join(waiting)}" if waiting else ""

    def kill(self, host: Machine | None = None) -> None:
        """End the programs of a host, or all, where they wait; in their next turn."""
        for program in self._all:
            if not program.done and (host is None or program.host is host):
                program.killed = True

    def run_all(self) -> None:
        """Give killed programs turns until they have ended; a bounded number, as a program may refuse to."""
        for _ in range(100):
            if not self.run_ready():
                return


class Program(Generic[T]):
    """A function or a script that runs on a host, made by :meth:`Host.start` and :meth:`Host.script`."""

    def __init__(self, strand: Strand[T]) -> None:
        self._strand = strand

    @property
    def name(self) -> str:
        """The name, for messages."""
        return self._strand.name

    @property
    def done(self) -> bool:
        """Whether the program has ended."""
        return self._strand.done

    @property
    def where(self) -> str:
        """The line at which it waits, for messages."""
        return self._strand.where()

    def result(self) -> T:
        """Run the fabric until the program has ended; return what it returned, or raise what it raised.

        SimulationError if it waits for something that cannot happen, or was killed with its host.
        """
        strand = self._strand
        strand.programs.finish(strand)
        if strand.error is not None:
            raise strand.error
        if strand.killed:
            raise SimulationError(f"{strand} was killed")
        return strand.value  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"<{self._strand}{' done' if self.done else ''}>"


def current_program() -> Strand[Any] | None:
    """The program whose turn it is, if the calling thread is one of its threads."""
    found = calls_blockable()
    return found if isinstance(found, Strand) else None
