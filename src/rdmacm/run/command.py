"""``rdmacm run``: start a program with the library in front of it, and serve it until it has ended."""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from rdmacm.errors import cm_error
from rdmacm.provider.choice import ENVIRONMENT as PROVIDER_VARIABLE
from rdmacm.run.launching import Launcher, NoNamespaceError
from rdmacm.run.options import Options
from rdmacm.run.programs import CannotRun, find_program
from rdmacm.run.server import NO_OPTIONS, Server
from rdmacm.run.tree import DEVICES, NODES, tree_of

#: The library, beside this module.
_LIBRARY = os.path.join(os.path.dirname(__file__), "librdmacm_run.so.1")
#: Another library, for development.
LIBRARY_VARIABLE = "RDMACM_RUN_LIBRARY"
#: Where programs find the server.
SOCKET_VARIABLE = "RDMACM_RUN_SOCKET"
#: The names that programs ask the dynamic linker for.
_NAMES = ("libibverbs.so.1", "librdmacm.so.1")
#: What moves sockets onto RDMA, beside the library.
_SOCKETS = "librdmacm_sockets.so.1"
#: How the directory of a server begins, in ``$TMPDIR``, and its socket there.
_PREFIX, _SOCKET = "rdmacm-run-", "socket"
#: ``rdma`` for programs (:mod:`rdmacm.run.rdma`), by the Python and the package of the server.
_RDMA = """
import sys
sys.path.insert(0, {place!r})
from rdmacm.run.rdma import main
sys.exit(main({socket!r}, sys.argv[1:]))
"""
#: Signals that end or notify a process: the program gets those that are sent to this one.
_PASSED_ON = frozenset(
    {
        signal.SIGHUP,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGALRM,
        signal.SIGWINCH,
    }
)
#: ``si_code`` of a signal that the terminal has sent, to the whole process group.
_SI_KERNEL = 0x80


def _library_path() -> str:
    """The path of the library; ENOENT if this package was installed without it."""
    path = os.path.abspath(os.environ.get(LIBRARY_VARIABLE) or _LIBRARY)
    if not os.path.isfile(path):
        hint = "a wheel with the compiled core, or a C compiler when the package is built"
        raise cm_error(errno.ENOENT, "the library for programs is not here", "run", path, hint)
    return path


def environment_of(directory: str, socket_path: str, options: Options = NO_OPTIONS) -> dict[str, str]:
    """The variables that put the libraries of a directory in front of a program."""
    before = os.environ.get("LD_LIBRARY_PATH")
    preloaded = os.environ.get("LD_PRELOAD")
    sockets = {"LD_PRELOAD": f"{_SOCKETS}:{preloaded}" if preloaded else _SOCKETS}
    return {
        SOCKET_VARIABLE: socket_path,
        "NCCL_IBVERBS_LIB": os.path.join(directory, _NAMES[0]),
        # This package would find the devices twice, through the library as those of a kernel.
        PROVIDER_VARIABLE: os.environ.get(PROVIDER_VARIABLE) or "soft",
        "LD_LIBRARY_PATH": f"{directory}:{before}" if before else directory,
        **(sockets if options.moves_sockets else {}),
    }


def run_program(argv: Sequence[str], options: Options = NO_OPTIONS) -> int:
    """Run a program and return its exit status, or 128 and the number of the signal that has ended it.

    It has a mount namespace, in which ``/dev/infiniband`` and ``/sys/class/infiniband`` show the devices. Where that is
    not possible, it is told on standard error.

    CannotRun: it is not there, cannot be executed, or would take no library.
    """
    with _directory(_library_path()) as directory:
        search = f"{directory}:{os.environ.get('PATH', os.defpath)}"
        path = find_program(argv[0], os.path.join(directory, _NAMES[0]), search)
        # Before any thread is made. One takes these signals, as only sigwaitinfo(2) tells who has sent them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        launcher = Launcher(path, argv, before, _ignored_by_python())
        with launcher, _served(directory, options) as server:
            environment = {**os.environ, **environment_of(directory, server.path, options), "PATH": search}
            try:
                pid = _launch(launcher, environment, server)
                if pid is None:
                    defaults = _ignored_by_python()
                    pid = os.posix_spawn(path, list(argv), environment, setsigmask=before, setsigdef=defaults)
            except OSError as error:
                text = error.strerror or "cannot be executed"
                raise CannotRun(cm_error(error.errno or errno.EIO, text, "run", path)) from error
            return _Child(server, pid).serve()


def _launch(launcher: Launcher, environment: Mapping[str, str], server: Server) -> int | None:
    """Start the program where it sees the devices in files; None if that is not possible here."""
    tree = tree_of(server.devices(), socket.gethostname())
    place = os.path.join(os.path.dirname(server.path), "mount")
    os.mkdir(place)
    try:
        return launcher.start(environment, tree, place)
    except NoNamespaceError as error:
        text = f"{NODES} and {DEVICES} do not show the devices ({error}): programs that look there find none"
        print(f"rdmacm run: {text}", file=sys.stderr, flush=True)
        return None


def serve(options: Options = NO_OPTIONS) -> int:
    """Serve programs that are started by other means, until a signal comes."""
    with _directory(_library_path()) as directory:
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
        with _served(directory, options) as server:
            for name, value in environment_of(directory, server.path, options).items():
                print(f"{name}={shlex.quote(value)}", flush=True)
            stopped: list[int] = []

            def wait() -> None:
                stopped.append(signal.sigwait({signal.SIGINT, signal.SIGTERM, signal.SIGHUP}))
                server.wake()

            threading.Thread(target=wait, name="rdmacm-signals", daemon=True).start()
            server.serve(lambda: bool(stopped))
    return 0


@contextmanager
def _served(directory: str, options: Options) -> Iterator[Server]:
    server = Server(os.path.join(directory, _SOCKET), options)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def _directory(library: str) -> Iterator[str]:
    """A directory for a server, with what programs take from it."""
    _remove_abandoned(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as directory, ExitStack() as kept:  # of mode 0700
        with suppress(OSError):  # a file system without locks: nobody removes it
            kept.enter_context(_locked(directory))
        for name in _NAMES:
            os.symlink(library, os.path.join(directory, name))
        os.symlink(os.path.join(os.path.dirname(library), _SOCKETS), os.path.join(directory, _SOCKETS))
        _write_rdma(directory)
        yield directory


def _write_rdma(directory: str) -> None:
    path, place = os.path.join(directory, "rdma"), os.path.abspath(__file__).removesuffix("/rdmacm/run/command.py")
    code = _RDMA.format(place=place, socket=os.path.join(directory, _SOCKET))
    with open(path, "w") as file:
        file.write(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -c {shlex.quote(code)} "$@"\n')
    os.chmod(path, 0o700)


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Lock a directory, as long as this process lives. BlockingIOError if another one has it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def _remove_abandoned(place: str) -> None:
    """Remove the directories of this user's servers that were killed: they have a socket, and no lock."""
    with suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and os.path.exists(os.path.join(entry.path, _SOCKET)):
                with suppress(OSError), _locked(entry.path):
                    if os.stat(entry.path).st_uid == os.geteuid():
                        shutil.rmtree(entry.path, ignore_errors=True)


class _Child:
    """The program."""

    def __init__(self, server: Server, pid: int) -> None:
        self._server = server
        self._pid = pid
        #: Its exit status, once it has ended.
        self._status: int | None = None
        #: Whether a signal has come after that: then nothing is waited for any more.
        self._is_stopped = False
        threading.Thread(target=self._pass_on_signals, name="rdmacm-signals", daemon=True).start()
        self._pidfd = os.pidfd_open(pid)
        server.watch(self._pidfd, self._ended)

    def serve(self) -> int:
        """Serve the program, and the processes that it leaves behind; returns its exit status."""
        self._server.serve(lambda: self._status is not None and (self._server.is_idle or self._is_stopped))
        assert self._status is not None
        return self._status

    def _ended(self) -> None:
        _, code = os.waitpid(self._pid, 0)
        status = os.waitstatus_to_exitcode(code)
        self._status = status if status >= 0 else 128 - status
        self._server.unwatch(self._pidfd)
        os.close(self._pidfd)

    def _pass_on_signals(self) -> None:
        while True:
            info = signal.sigwaitinfo(_PASSED_ON)
            if self._status is not None:
                self._is_stopped = True
                self._server.wake()
            elif info.si_code != _SI_KERNEL:
                # The server has not collected the program, so the number is still its own.
                os.kill(self._pid, info.si_signo)


def _ignored_by_python() -> list[int]:
    """Signals that Python ignores, and a program expects to find as usual."""
    return [number for number in (signal.SIGPIPE, signal.SIGXFSZ) if signal.getsignal(number) == signal.SIG_IGN]
