"""The client of ibacm(8), which knows InfiniBand paths and keeps what the subnet administrator has told it.

The daemon is found as librdmacm finds it, by the files in its run directory: ``ibacm.port`` with the number of a TCP
port on this host, else the Unix socket ``ibacm.sock``. The environment variable ``RDMACM_ACM_RUNDIR`` names another
directory than ``/run``; where it is set to nothing, no daemon is looked for.

Whether it answers must not matter to anybody who can do without, so nothing here raises, every question has a deadline,
and a daemon that fails one (silence, a broken connection, an answer that is none) is left alone for some seconds.
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

from rdmacm.address import InetAddr, SockAddrIB
from rdmacm.proto.acm import HEADER_SIZE, AcmReply, decode_reply, reply_size, resolve_request
from rdmacm.proto.sa import PATH_FLAGS, PathData, PathRecord
from rdmacm.proto.wire import WireError

__all__ = ["CLIENT", "DEADLINE", "AcmClient", "path_template", "paths_from_acm", "paths_in_background"]

ENVIRONMENT = "RDMACM_ACM_RUNDIR"
_RUNDIR = "/run"

#: Seconds a question may take. What the daemon has in its caches it says within a millisecond; where it has to ask the
#: subnet administrator, a large subnet takes tens of them. It repeats a question of its own only after two seconds, and
#: who has waited half of one is better off asking the subnet administrator.
DEADLINE = 0.5
#: Seconds of silence that make a daemon a sick one. Who has less left for it, as the last of many, learns nothing.
_SILENCE = 0.1

Paths: TypeAlias = "tuple[PathData, ...]"


class _Broken(Exception):
    """The connection ended before the answer began."""


class AcmClient:
    """One connection to the daemon, made when first needed and made anew when it has broken; for any thread.

    ``rundir``: where the daemon's files are; None for the environment's choice. ``rest``: seconds a daemon that has
    failed is left alone; ``look``: seconds between two looks for one that is not there.
    """

    def __init__(self, rundir: str | None = None, *, rest: float = 5.0, look: float = 1.0) -> None:
        self._rundir = rundir
        self._rest = rest
        self._look = look
        self._socket: socket.socket | None = None
        self._tid = 0
        self._is_there = False
        #: When the files are looked at again.
        self._next_look = 0.0
        self._begin()
        _clients.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._waiting_lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_working = False

    def is_there(self) -> bool:
        """Whether there may be a daemon to ask. Costs nothing to speak of, and never waits."""
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
        """Ask for paths (:func:`rdmacm.proto.acm.resolve_request`); None where there was no answer in ``timeout`` s."""
        limit = time.monotonic() + timeout
        if not self.is_there() or not self._lock.acquire(timeout=max(0.0, timeout)):
            return None
        begun = time.monotonic()
        try:
            if not self.is_there():  # any more, as somebody else has found meanwhile
                return None
            self._tid += 1
            request = resolve_request(self._tid, source=source, destination=destination, path=path, nodelay=nodelay)
            return self._ask(request, limit)
        except (_Broken, OSError, WireError) as error:
            self._disconnect()
            if not isinstance(error, TimeoutError) or limit - begun >= _SILENCE:
                self._is_there, self._next_look = False, time.monotonic() + self._rest
            return None
        except BaseException:  # such as KeyboardInterrupt: an answer may be under way that nobody will read
            self._disconnect()
            raise
        finally:
            self._lock.release()

    def _ask(self, request: bytes, limit: float) -> AcmReply:
        if self._socket is not None:
            try:
                return self._exchange(self._socket, request, limit)
            except _Broken:  # the daemon may have been started anew
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
        """Have ``work`` done by a thread that exists while there is such work, one after another.

        Returns whether it will be: the system may have no thread to give.
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
        """Let go of the connection; the next question makes another."""
        with self._lock:
            self._disconnect()

    def abandon(self) -> None:
        """In a child of fork(2): the connection, the threads and what they hold are the parent's."""
        self._begin()
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
    """A connection to the daemon; OSError where there is none to be had."""
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
    """The number in the port file, 0 where there is no port in it."""
    with suppress(OSError, ValueError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            text = os.read(descriptor, 16)
        finally:
            os.close(descriptor)
        port = int(text)
        return port if 0 < port <= 0xFFFF else 0
    return 0


#: The client of this process.
CLIENT = AcmClient()
atexit.register(CLIENT.close)


# -- routes ---------------------------------------------------------------------------------------------

Address: TypeAlias = InetAddr | SockAddrIB


def path_template(source: SockAddrIB, destination: SockAddrIB) -> PathRecord:
    """What says no more of a path than its two ports and partition: zero is "any" elsewhere."""
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
    """The paths ibacm knows from an address to another of the same family, those first that connections can be made on.

    None where it knows none, where there is no such daemon, and where it has not answered in ``timeout`` seconds; until
    then the calling thread waits. Never raises. Paths that do not lead between the GIDs of AF_IB addresses are not
    believed.
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
    """As :func:`paths_from_acm`, but the caller does not wait: ``done(paths)`` is called once, by another thread.

    Returns False, and ``done`` is not called, where there is nobody to ask. ``timeout`` counts from now, however many
    others wait. ``done`` must not raise.
    """
    client = client or CLIENT
    if not client.is_there():
        return False
    limit = time.monotonic() + timeout

    def ask() -> None:
        left = limit - time.monotonic()
        done(paths_from_acm(source, destination, timeout=left, client=client) if left > 0 else None)

    return client.in_background(ask)
