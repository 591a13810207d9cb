"""The client of ibacm(8), a daemon that resolves InfiniBand paths and caches the subnet administrator's responses.

The daemon is found as librdmacm finds it, by the files in its run directory: ``ibacm.port`` holds the number of a TCP
port on this host, else ``ibacm.sock`` is a Unix socket. The environment variable ``RDMACM_ACM_RUNDIR`` replaces the
directory ``/run``; if it is empty, no daemon is used.

ibacm is optional, so no function here raises an exception for what the daemon does, and every request has a deadline.
After a failed request (timeout, broken connection, invalid reply) the daemon is not asked for some seconds.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from rdmacm.address import Address, InetAddr, SockAddrIB
from rdmacm.interrupts.protection import interruptible
from rdmacm.proto.acm import HEADER_SIZE, AcmReply, decode_reply, reply_size, resolve_request
from rdmacm.proto.sa import PATH_FLAGS, PathData, PathRecord
from rdmacm.proto.wire import WireError

ENVIRONMENT = "RDMACM_ACM_RUNDIR"
_RUNDIR = "/run"

#: The timeout of a request in seconds. The daemon replies from its cache within a millisecond, and after a query to the
#: subnet administrator of a large subnet within tens of milliseconds. It repeats a lost query only after 2 s, when
#: asking the subnet administrator directly is faster.
DEADLINE = 0.5
#: A timeout counts as a failure of the daemon only if the request had at least this many seconds left. The last of many
#: requests that share a deadline may have less.
_MIN_WAIT = 0.1

#: A route: paths, best first.
Paths: TypeAlias = "tuple[PathData, ...]"


class _Broken(Exception):
    """The connection ended before a reply began."""


class AcmClient:
    """A connection to the daemon, opened when first needed and reopened when it breaks. Thread-safe.

    ``rundir``: the daemon's run directory; None to follow the environment. ``rest``: seconds without requests after a
    failure. ``look``: seconds between two checks whether the daemon's files exist.
    """

    def __init__(self, rundir: str | None = None, *, rest: float = 5.0, look: float = 1.0) -> None:
        self._rundir = rundir
        self._rest = rest
        self._look = look
        self._socket: socket.socket | None = None
        #: The transaction id of the last request.
        self._tid = 0
        #: Whether the daemon's files existed at the last check, and no request has failed since.
        self._is_there = False
        #: When the files are checked again, on the monotonic clock.
        self._next_look = 0.0
        self._reset_threads()
        _clients.add(self)

    def _reset_threads(self) -> None:
        #: Held during a request.
        self._lock = threading.Lock()
        #: Guards the next two.
        self._waiting_lock = threading.Lock()
        #: Work for the background thread, and whether that thread runs.
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_working = False

    def is_there(self) -> bool:
        """Whether a daemon may be running. Cheap, and never waits."""
        now = time.monotonic()
        if now >= self._next_look:
            rundir = self._directory()
            self._is_there = bool(rundir) and any(map(os.path.exists, _files(rundir)))
            self._next_look = now + self._look
        return self._is_there

    def _directory(self) -> str:
        return os.environ.get(ENVIRONMENT, _RUNDIR) if self._rundir is None else self._rundir

    def resolve(
        self,
        *,
        source: InetAddr | None = None,
        destination: InetAddr | None = None,
        path: PathRecord | None = None,
        nodelay: bool = False,
        timeout: float = DEADLINE,
    ) -> AcmReply | None:
        """Request paths (:func:`rdmacm.proto.acm.resolve_request`); None if there is no reply within ``timeout`` s."""
        limit = time.monotonic() + timeout
        if not self.is_there() or not self._lock.acquire(timeout=max(0.0, timeout)):
            return None
        begun = time.monotonic()
        try:
            if not self.is_there():  # the request of another thread has failed in the meantime
                return None
            self._tid += 1
            request = resolve_request(self._tid, source=source, destination=destination, path=path, nodelay=nodelay)
            return self._ask(request, limit)
        except (_Broken, OSError, WireError) as error:
            self._disconnect()
            if not isinstance(error, TimeoutError) or limit - begun >= _MIN_WAIT:
                self._is_there, self._next_look = False, time.monotonic() + self._rest
            return None
        except BaseException:  # such as KeyboardInterrupt: the reply would be read by the next request
            self._disconnect()
            raise
        finally:
            self._lock.release()

    def _ask(self, request: bytes, limit: float) -> AcmReply:
        if self._socket is not None:
            try:
                return self._exchange(self._socket, request, limit)
            except _Broken:  # the daemon may have been restarted
                self._disconnect()
        self._socket = _connect(self._directory(), self._left(limit))
        return self._exchange(self._socket, request, limit)

    def _exchange(self, connection: socket.socket, request: bytes, limit: float) -> AcmReply:
        try:
            connection.settimeout(self._left(limit))
            connection.sendall(request)
            data = self._receive(connection, b"", HEADER_SIZE, limit)
        except (ConnectionError, EOFError) as error:
            raise _Broken from error
        try:
            data = self._receive(connection, data, reply_size(data, self._tid), limit)
        except EOFError:
            raise WireError(f"an ibacm message ends after {len(data)} bytes") from None
        return decode_reply(data, self._tid)

    @interruptible  # resolve() gives up the connection then
    def _receive(self, connection: socket.socket, data: bytes, size: int, limit: float) -> bytes:
        while len(data) < size:
            connection.settimeout(self._left(limit))
            more = connection.recv(size - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def _left(self, limit: float) -> float:
        left = limit - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _disconnect(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def in_background(self, work: Callable[[], None]) -> bool:
        """Run ``work`` in a background thread, after the work queued before. The thread ends when the queue is empty.

        False, and the work is not run, if the system cannot start a thread.
        """
        with self._waiting_lock:
            if not self._is_working:
                try:
                    threading.Thread(target=self._work, name="rdmacm-acm", daemon=True).start()
                except RuntimeError:
                    return False
                self._is_working = True
            self._waiting.append(work)
        return True

    def _work(self) -> None:
        while True:
            with self._waiting_lock:
                self._is_working = bool(self._waiting)
                if not self._waiting:
                    return
                work = self._waiting.popleft()
            work()

    def close(self) -> None:
        """Close the connection. The next request opens another."""
        with self._lock:
            self._disconnect()

    def abandon(self) -> None:
        """In a child of fork(2): drop the parent's connection, thread and locks."""
        self._reset_threads()
        self._disconnect()


_clients: weakref.WeakSet[AcmClient] = weakref.WeakSet()


def _forget() -> None:
    for client in _clients:
        client.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _files(rundir: str) -> tuple[str, str]:
    return os.path.join(rundir, "ibacm.port"), os.path.join(rundir, "ibacm.sock")


def _connect(rundir: str, timeout: float) -> socket.socket:
    """A connection to the daemon; OSError if it does not accept one."""
    port_file, unix = _files(rundir)
    port = _port(port_file)
    if port:
        return socket.create_connection(("127.0.0.1", port), timeout)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout)
        connection.connect(unix)
    except BaseException:
        connection.close()
        raise
    return connection


def _port(path: str) -> int:
    """The port number in the port file, 0 if there is none."""
    with suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            text = os.read(descriptor, 16)
        finally:
            os.close(descriptor)
        port = int(text)
        return port if 0 < port <= 0xFFFF else 0
    return 0


#: The client that this process uses.
CLIENT = AcmClient()
atexit.register(CLIENT.close)


# -- routes ---------------------------------------------------------------------------------------------


def path_template(source: SockAddrIB, destination: SockAddrIB) -> PathRecord:
    """A path record that gives the ports and the partition of a path; zero in the other fields means any."""
    return PathRecord(
        destination.addr,
        source.addr,
        pkey=destination.pkey,
        mtu_selector=0,
        rate_selector=0,
        packet_life_time_selector=0,
    )


def paths_from_acm(
    source: Address, destination: Address, *, timeout: float = DEADLINE, client: AcmClient | None = None
) -> Paths | None:
    """The paths that ibacm knows from one address to another of the same family, best first.

    Only paths with the flags that connections need (:data:`~rdmacm.proto.sa.PATH_FLAGS`), and for AF_IB addresses only
    paths between their GIDs. None if ibacm knows none, does not run, or does not reply within ``timeout`` seconds; the
    calling thread waits until then. Never raises.
    """
    client = client or CLIENT
    if isinstance(source, SockAddrIB) and isinstance(destination, SockAddrIB):
        reply = client.resolve(path=path_template(source, destination), timeout=timeout)
    elif isinstance(source, InetAddr) and isinstance(destination, InetAddr):
        reply = client.resolve(source=source, destination=destination, timeout=timeout)
    else:
        return None
    if reply is None:
        return None
    usable = [data for data in reply.paths if data.flags == PATH_FLAGS and _joins(data.path, source, destination)]
    return tuple(usable) or None


def _joins(path: PathRecord, source: Address, destination: Address) -> bool:
    return all(
        not isinstance(address, SockAddrIB) or address.addr == gid
        for address, gid in ((source, path.sgid), (destination, path.dgid))
    )


def paths_in_background(
    source: Address,
    destination: Address,
    done: Callable[[Paths | None], None],
    *,
    timeout: float = DEADLINE,
    client: AcmClient | None = None,
) -> bool:
    """As :func:`paths_from_acm`, but without waiting: another thread calls ``done(paths)`` once.

    Returns False, and does not call ``done``, if ibacm does not run. ``timeout`` counts from now, however many requests
    are queued. ``done`` must not raise.
    """
    client = client or CLIENT
    if not client.is_there():
        return False
    limit = time.monotonic() + timeout

    def ask() -> None:
        left = limit - time.monotonic()
        done(paths_from_acm(source, destination, timeout=left, client=client) if left > 0 else None)

    return client.in_background(ask)
