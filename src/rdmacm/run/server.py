"""The control server: programs connect to its Unix socket, and it answers their requests in one thread.

The provider makes progress in this thread too, when its descriptors are readable. Its helper thread may post an event
as well; then it wakes this one.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from rdmacm.address import ALL_BITS_64
from rdmacm.errors import RdmaError, cm_error
from rdmacm.provider import log
from rdmacm.provider.statistics import ProcessCounters
from rdmacm.run import protocol
from rdmacm.run.channels import Channel
from rdmacm.run.connections import Connection, Gone, Packet
from rdmacm.run.contexts import Contexts
from rdmacm.run.counting import command_of
from rdmacm.run.explanations import Teller
from rdmacm.run.lookups import Lookups, Outcome
from rdmacm.run.options import Options
from rdmacm.run.protocol import Request
from rdmacm.run.requests import perform, shown_devices
from rdmacm.run.sessions import Common, Session
from rdmacm.run.tapping import Tapping
from rdmacm.soft import open_provider
from rdmacm.soft.provider import SoftProvider
from rdmacm.verbs.device import Device

NO_OPTIONS = Options()
_BACKLOG = 128
#: Connections of all programs, and of one.
_MOST_CONNECTIONS, _MOST_OF_ONE = 4096, 64
#: Asynchronous events are looked for at such intervals at most, in seconds, and only when there was something to do.
_LOOK_INTERVAL = 0.02
#: Errors of opening the devices' port that a user can do something about.
_PORT_TAKEN = frozenset({errno.EACCES, errno.EADDRINUSE, errno.EBUSY, errno.EUSERS})


class _Program:
    """A process that has connected."""

    def __init__(self, session: Session, pidfd: int, seed: int) -> None:
        self.session = session
        #: Decides which of its packets are lost.
        self.seed = seed
        #: Readable when the process has ended; -1 where the system has no such descriptors.
        self.pidfd = pidfd
        self.connections: set[Connection] = set()


class Server:
    """See the module. ``path``: of the socket, in a directory that nobody else may enter.

    ENODEV: there is no device of a name in ``options``. Also the errors of creating the capture file.
    """

    def __init__(self, path: str, options: Options = NO_OPTIONS) -> None:
        self.path = path
        self.options = options
        self.provider: SoftProvider = open_provider()
        _check_devices(self.provider, options)
        #: What to do when a descriptor is ready.
        self._readers: dict[int, Callable[[], None]] = {}
        #: The programs, by process id.
        self._programs: dict[int, _Program] = {}
        #: The connections that have not said hello.
        self._strangers: set[Connection] = set()
        #: Channels that may have an event to send.
        self._ready: dict[Channel, None] = {}
        #: Calls that other threads want made in this one.
        self._calls: deque[Callable[[], None]] = deque()
        self._thread = threading.get_ident()
        #: When to look for asynchronous events; None while there is no reason.
        self._look_at: float | None = None
        self._contexts = Contexts(self.provider)
        self._tapping = Tapping(options.pcap, self.provider) if options.pcap is not None else None
        self._common = Common(self.provider, options, self._contexts, self._tapping)
        #: How many programs there were.
        self._count = 0
        #: Whether it was told that the port is taken.
        self._has_told = False
        self._lookups = Lookups(self.provider, self._call_soon)
        self._poller = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(path)
        self._listener.listen(_BACKLOG)
        #: Keeps the provider's descriptors open, and makes its progress.
        self._progress = self.provider.open_queue()
        self.provider.host.statistics.others = self._counters_of_programs
        if self._tapping is not None:
            self.watch(self._tapping.fileno(), self._tapping.read)
        self.watch(self._wake, self._woken)
        self.watch(self._listener.fileno(), self._accept)
        self.watch(self._progress.fileno(), self._make_progress)

    def devices(self) -> list[Device]:
        """The devices that programs see."""
        return shown_devices(self.provider, self.options)

    # -- the loop -------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no program is connected."""
        return not self._programs and not self._strangers

    def serve(self, is_over: Callable[[], bool]) -> None:
        """Serve programs until ``is_over()``, which is asked each time that something has happened."""
        _raise_limit()
        self._thread = threading.get_ident()
        while not is_over():
            self.step(None)

    def step(self, timeout: float | None) -> None:
        """Wait for something to happen, and do what is to be done."""
        if self._look_at is not None:
            left = max(0.0, self._look_at - time.monotonic())
            timeout = left if timeout is None else min(timeout, left)
        for fd, _ in self._poller.poll(timeout):
            reader = self._readers.get(fd)
            if reader is not None:  # one before it may have closed it
                self._attempt(reader)
        if self._look_at is not None and time.monotonic() >= self._look_at:
            self._look_at = None
            self._contexts.look()
        self._pump()

    def _attempt(self, call: Callable[[], None]) -> None:
        """Make a call for one program; if it raises, the others notice nothing."""
        try:
            call()
        except Exception as error:
            self.provider.runtime.errors.report("server", "what a program asked for is incomplete", error)

    def watch(self, fd: int, reader: Callable[[], None], events: int = select.EPOLLIN) -> None:
        """Call ``reader`` when a descriptor is ready."""
        self._readers[fd] = reader
        self._poller.register(fd, events)

    def unwatch(self, fd: int) -> None:
        """Undo :meth:`watch`, before the descriptor is closed."""
        if self._readers.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def wake(self) -> None:
        """Have :meth:`step` return; from any thread, or a signal handler."""
        os.eventfd_write(self._wake, 1)

    def _call_soon(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self.wake()

    def _woken(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._calls:
            self._attempt(self._calls.popleft())

    def _make_progress(self) -> None:
        self._progress.get(0)
        if self._contexts.any and self._look_at is None:
            self._look_at = time.monotonic() + _LOOK_INTERVAL

    # -- channels -------------------------------------------------------------------------------------

    def _watch_channel(self, channel: Channel) -> None:
        # Edge-triggered: an end that is writable stays so.
        self.watch(channel.fileno(), channel.pump, select.EPOLLOUT | select.EPOLLET)
        channel.queue.notify = partial(self._notified, channel)

    def _notified(self, channel: Channel) -> None:
        """An event was posted, in any thread."""
        self._ready[channel] = None
        if threading.get_ident() != self._thread:
            self.wake()

    def _unwatch_channel(self, channel: Channel) -> None:
        channel.queue.notify = None
        self.unwatch(channel.fileno())
        self._ready.pop(channel, None)

    def _pump(self) -> None:
        while self._ready:
            channel, _ = self._ready.popitem()
            self._attempt(channel.pump)

    # -- connections ----------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # it has gone, or there is no descriptor left
            return
        connection = Connection(sock)
        if len(self._strangers) + sum(len(one.connections) for one in self._programs.values()) >= _MOST_CONNECTIONS:
            connection.close()
            return
        self._strangers.add(connection)
        self.watch(connection.fileno(), partial(self._greet, connection))

    def _greet(self, connection: Connection) -> None:
        """Take the first request of a connection."""
        try:
            packet = connection.receive()
            if packet is None:
                return
            packet.close()
            if packet.type != Request.HELLO or len(packet.body) < protocol.HELLO.size:
                raise Gone
            version, _ = protocol.HELLO.unpack_from(packet.body)
            if version != protocol.VERSION:
                connection.reply(errno.EPROTO)
                raise Gone
            program = self._program_of(connection)
            connection.reply(0, self._welcome(program))
        except Gone:
            self._close_stranger(connection)
            return
        self._strangers.remove(connection)
        self._readers[connection.fileno()] = partial(self._read, program, connection)

    def _welcome(self, program: _Program) -> bytes:
        options = self.options
        return protocol.WELCOME.pack(
            protocol.VERSION, self._tapping is not None, options.loss, options.delay, program.seed
        )

    def _close_stranger(self, connection: Connection) -> None:
        self._strangers.remove(connection)
        self.unwatch(connection.fileno())
        connection.close()

    def _program_of(self, connection: Connection) -> _Program:
        """The program that has connected; Gone if it has too many connections, or has ended."""
        pid = connection.peer_pid()
        program = self._programs.get(pid)
        if program is None:
            session = Session(self._common, Teller(pid), self._watch_channel, self._unwatch_channel)
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError as error:
                raise Gone from error
            except OSError:  # an old system, or a process of a namespace that cannot be seen from here
                pidfd = -1
            program = self._programs[pid] = _Program(session, pidfd, self.options.seed + self._count & ALL_BITS_64)
            self._count += 1
            if pidfd >= 0:
                self.watch(pidfd, partial(self._ended, pid, program))
        if len(program.connections) >= _MOST_OF_ONE:
            raise Gone
        program.connections.add(connection)
        return program

    def _read(self, program: _Program, connection: Connection) -> None:
        """Take a request and answer it."""
        try:
            packet = connection.receive()
            if connection.is_busy:  # it has gone, as nothing else is waited for
                raise Gone
            if packet is None:
                return
            try:
                self._perform(program, connection, packet)
            finally:
                packet.close()
        except Gone:
            self._disconnected(program, connection)

    def _perform(self, program: _Program, connection: Connection, packet: Packet) -> None:
        if packet.type == Request.ADDRINFO:
            self._look_up(program, connection, packet)
            return
        try:
            perform(program.session, packet, lambda body, fds: connection.reply(0, body, fds))
        except Exception as error:
            if program.session.explanations is not None:
                program.session.explanations.failed(error)
            connection.reply(self._errno_of(error, packet))

    def _look_up(self, program: _Program, connection: Connection, packet: Packet) -> None:
        try:
            self._lookups.start(packet.body, partial(self._looked_up, program, connection))
        except Exception as error:
            connection.reply(self._errno_of(error, packet))
            return
        connection.is_busy = True
        self._poller.modify(connection.fileno(), 0)

    def _looked_up(self, program: _Program, connection: Connection, outcome: Outcome) -> None:
        if connection not in program.connections:  # it has ended meanwhile
            return
        connection.is_busy = False
        if program.session.explanations is not None:
            program.session.explanations.looked_up(outcome.text)
        self._poller.modify(connection.fileno(), select.EPOLLIN)
        try:
            connection.reply(outcome.error, outcome.results)
        except Gone:
            self._disconnected(program, connection)

    def _errno_of(self, error: Exception, packet: Packet) -> int:
        """The errno of a failed request."""
        if isinstance(error, OSError):
            if log.enabled:
                log.ID.debug("request 0x%x: %s", packet.type, error)
            self._tell(error)
            return error.errno or errno.EIO
        if isinstance(error, Gone):
            raise error
        # A request that no check has caught: the program gets an error, and the others notice nothing.
        self.provider.runtime.errors.report("request", f"request 0x{packet.type:x} has failed", error)
        return errno.EINVAL

    def _tell(self, error: OSError) -> None:
        """Say once on standard error who has the port: programs say no more than that they cannot create a queue."""
        is_of_the_port = isinstance(error, RdmaError) and error.step == "open_device" and error.errno in _PORT_TAKEN
        if is_of_the_port and not self._has_told:
            self._has_told = True
            with suppress(OSError):
                print(f"rdmacm run: {error}", file=sys.stderr, flush=True)

    def _counters_of_programs(self) -> list[ProcessCounters]:
        """What the programs count. The thread that answers requests for counters calls it."""
        names = {device.index: device.name for device in self.provider.devices()}
        found = []
        for pid, program in list(self._programs.items()):
            counters = program.session.counters
            if counters is not None:
                with suppress(ValueError):  # it has ended meanwhile
                    found.append(ProcessCounters(pid, command_of(pid), counters.read(names)))
        return found

    # -- the end of programs --------------------------------------------------------------------------

    def _disconnected(self, program: _Program, connection: Connection) -> None:
        program.connections.discard(connection)
        self.unwatch(connection.fileno())
        connection.close()
        if not program.connections:
            self._end(next(pid for pid, one in self._programs.items() if one is program))

    def _ended(self, pid: int, program: _Program) -> None:
        # The descriptor may have the number of another one that was closed since poll(2).
        poll = select.poll()
        poll.register(program.pidfd, select.POLLIN)
        if poll.poll(0):
            self._end(pid)

    def _end(self, pid: int) -> None:
        """A program has ended: destroy what it had."""
        program = self._programs.pop(pid)
        if program.pidfd >= 0:
            self.unwatch(program.pidfd)
            os.close(program.pidfd)
        for connection in program.connections:
            self.unwatch(connection.fileno())
            connection.close()
        program.connections.clear()
        program.session.close()

    def close(self) -> None:
        """End all sessions, and remove the socket."""
        for pid in list(self._programs):
            self._end(pid)
        for connection in list(self._strangers):
            self._close_stranger(connection)
        self.provider.host.statistics.others = list
        self.unwatch(self._progress.fileno())
        self._progress.close()
        self._listener.close()
        if self._tapping is not None:
            self.unwatch(self._tapping.fileno())
            self._tapping.close()
        self._poller.close()
        os.close(self._wake)
        with suppress(OSError):
            os.unlink(self.path)


def _check_devices(provider: SoftProvider, options: Options) -> None:
    names = [device.name for device in provider.devices()]
    for name in options.devices.difference(names):
        raise cm_error(errno.ENODEV, "there is no such device", "run", name, f"one of {', '.join(names)}")


def _raise_limit() -> None:
    """A channel takes three descriptors here: allow as many as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
