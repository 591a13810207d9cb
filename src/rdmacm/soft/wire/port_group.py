"""Several processes of one user that share UDP port 4791 of a network namespace.

The kernel has the sockets of a port in the order they were bound, and a program chooses among them by *slot*
(:mod:`rdmacm.soft.wire.slot_filter`). Slot 0's sockets belong to all processes together,
each of the others' to one process.
No process is special, and each may end at any moment in any way, which decides how it works:

- When a socket is closed the kernel moves the last one to its place. So no slot's sockets may ever be closed while
  anybody lives: they are *parked* in the queue of a socket pair, the **vault**, of which every process holds both ends.
  Message n holds the sockets of slot n; the queue only grows, and is looked into with SO_PEEK_OFF.
- A process owns a slot by having bound its mailbox, a name the kernel frees however the process ends. A slot whose
  name can be bound is nobody's, and its sockets are taken from the vault.
- New processes come to the **door**, a listening socket all hold; whoever makes progress lets them in, which is to say
  sends them what everybody holds. Nobody behind the door: the newcomer is the first. Binding its name settles who.
- Slots are claimed under a record lock, which the kernel drops when a process ends. One that ends between binding a
  slot's sockets and parking them leaves nothing behind, and theirs were the last.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from socket import AF_INET6

from rdmacm.errors import cm_error
from rdmacm.soft.wire import sockets
from rdmacm.soft.wire.forwarding import Credentials, bound, credentials
from rdmacm.soft.wire.slot_filter import attach

__all__ = ["MAX_SLOT", "CannotShare", "Membership"]

MAX_SLOT = 255

#: How long a newcomer waits to be let in.
JOIN_SECONDS = 5.0
#: After that long a newcomer knocks again: who was about to let it in may have been stopped.
_KNOCK_SECONDS = 0.5

#: What the processes of a group have to agree on; another value, another version of this module.
_VERSION = 1
_GREETING = struct.Struct("=B8sB")
_BACKLOG = 128
#: Room for the 255 messages of the vault, which take less than a kilobyte each.
_VAULT_BYTES = 256 << 10
#: Stale packets taken out of a slot's sockets. More than that fit no queue.
_STALE = 1 << 15

_SO_PEEK_OFF = 42
_FLOCK = struct.Struct("hhqqi4x")
_INT = array.array("i").itemsize

Sockets = list[socket.socket | None]


class CannotShare(Exception):
    """This system has not what sharing a port takes."""


class _Handed:
    """What every process of a group holds."""

    def __init__(self, group: bytes, door: socket.socket, vault: Sequence[socket.socket], lock: int, gsi: Sockets):
        self.group = group.hex()
        self.door = door
        self.vault_in, self.vault_out = vault
        self.lock = lock
        self.gsi = gsi
        for sock in (door, *vault, *gsi):
            if sock is not None:
                sock.setblocking(False)

    def greet(self, newcomer: socket.socket) -> None:
        present = [sock for sock in self.gsi if sock is not None]
        fds = [sock.fileno() for sock in (self.door, self.vault_in, self.vault_out)] + [self.lock]
        fds += [sock.fileno() for sock in present]
        greeting = _GREETING.pack(_VERSION, bytes.fromhex(self.group), len(present))
        newcomer.sendmsg([greeting], _rights(fds), socket.MSG_NOSIGNAL)

    def close(self) -> None:
        for sock in (self.door, self.vault_in, self.vault_out, *self.gsi):
            if sock is not None:
                sock.close()
        os.close(self.lock)


def _rights(fds: Sequence[int]) -> list[tuple[int, int, bytes]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())]


def _receive_rights(sock: socket.socket, size: int, count: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """A message and the descriptors that came with it (socket.recv_fds() of Python 3.11 ignores its flags)."""
    message, control, _, _ = sock.recvmsg(size, socket.CMSG_SPACE(count * _INT), flags | socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % _INT])
    return message, list(fds)


def _by_family(opened: Sequence[socket.socket]) -> Sockets:
    """IPv4 first, then IPv6 or None."""
    found: Sockets = [None, None]
    for sock in opened:
        sock.setblocking(False)
        found[sock.family == AF_INET6] = sock
    return found


def _nap(attempt: int) -> None:
    # For what the kernel announces to nobody: a lock or a name given up, the last of a dead process's sockets gone.
    time.sleep(min(0.001 * 2 ** min(attempt, 6), 0.05))


class Membership:
    """A process's part in a group; made by :meth:`join`.

    ``data`` and ``gsi`` are [IPv4 socket, IPv6 socket or None]: this slot's, and slot 0's, which are everybody's.
    ``mailbox`` is a socket bound to the :meth:`mailbox_name` of ``slot`` that does not listen yet.
    """

    def __init__(self, port: int, handed: _Handed, deadline: float) -> None:
        self.port = port
        self.slot = 0
        self.data: Sockets = [None, None]
        self.gsi = handed.gsi
        self._handed = handed
        with _locked(handed.lock, deadline):
            self.mailbox = self._claim(deadline)
        # Whom newcomers name who get no answer is the last one that listened.
        handed.door.listen(_BACKLOG)

    @property
    def door(self) -> socket.socket:
        """Polls readable when somebody wants to be let in: call :meth:`admit`."""
        return self._handed.door

    def mailbox_name(self, slot: int) -> str:
        """The name of the mailbox of a slot's owner."""
        return f"rdmacm-{self.port}-{self._handed.group}-slot-{slot}"

    def service_name(self, service_id: int, local: bytes | None) -> str:
        """The name of the mailbox of who listens on a service id at an address (zeros: any of its family) or any."""
        where = "any" if local is None else local.hex()
        return f"rdmacm-{self.port}-{self._handed.group}-service-{service_id:016x}-{where}"

    @classmethod
    def join(cls, port: int) -> Membership:
        """Take a slot among the processes that share a port, or be the first of them.

        EACCES where the port is another user's, EADDRINUSE where somebody has it who does not share it, EBUSY where
        nobody lets us in. CannotShare where the system cannot.
        """
        if sys.platform != "linux":
            raise CannotShare
        deadline = time.monotonic() + JOIN_SECONDS
        holder: Credentials | None = None
        for attempt in itertools.count():
            try:
                handed, holder = _knock(port, deadline)
            except ConnectionRefusedError:
                handed = _found(port, deadline)
            if handed is not None:
                try:
                    return cls(port, handed, deadline)
                except BaseException:
                    handed.close()
                    raise
            if time.monotonic() > deadline:
                break
            _nap(attempt)
        raise cm_error(
            errno.EBUSY,
            f"{_who(holder)}, which shares the port, lets nobody in",
            "open_device",
            f"UDP port {port}",
            hint="continue or end that process: one that has a device open has to make progress",
        )

    def _claim(self, deadline: float) -> socket.socket:
        """Become the owner of a slot: fills ``slot`` and ``data``; returns the bound mailbox."""
        handed = self._handed
        handed.vault_out.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, 0)
        for slot in range(1, MAX_SLOT + 1):
            mailbox = self._bound(slot)
            try:
                # Each look goes one message on. The descriptors of a slot that lives are not asked for.
                message, fds = _receive_rights(handed.vault_out, 1, 2 if mailbox else 0, socket.MSG_PEEK)
            except BlockingIOError:
                return self._new(slot, mailbox, deadline)
            if mailbox is None:
                continue
            self.data = _by_family([socket.socket(fileno=fd) for fd in fds])
            if message != bytes((slot,)) or [s is None for s in self.data] != [s is None for s in self.gsi]:
                mailbox.close()
                self._close_data()
                raise cm_error(errno.EMFILE, "the descriptors of a slot did not arrive", "open_device")
            self.slot = slot
            self._drain()
            return mailbox
        raise cm_error(
            errno.EUSERS, f"{MAX_SLOT} processes share the port already", "open_device", f"UDP port {self.port}"
        )

    def _bound(self, slot: int) -> socket.socket | None:
        try:
            return bound(self.mailbox_name(slot))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return None

    def _new(self, slot: int, mailbox: socket.socket | None, deadline: float) -> socket.socket:
        """A slot nobody had before."""
        attempt = 0
        while mailbox is None:  # somebody died who had just come as far as here, and the name goes with the rest of it
            _check(deadline, self.port, "the name of a new slot is taken")
            _nap(attempt)
            attempt += 1
            mailbox = self._bound(slot)
        try:
            for index, gsi in enumerate(self.gsi):
                if gsi is not None:
                    self.data[index] = _open(gsi.family, self.port)
            _await_order(self.data, self.port, slot + 1, deadline)
            fds = [sock.fileno() for sock in self.data if sock is not None]
            try:
                self._handed.vault_in.sendmsg([bytes((slot,))], _rights(fds))
            except OSError as error:
                raise cm_error(
                    error.errno or errno.EIO,
                    f"the sockets of slot {slot} cannot be kept ({error.strerror})",
                    "open_device",
                    hint="raise the limit of open files (RLIMIT_NOFILE), which also bounds descriptors under way",
                ) from error
        except BaseException:
            self._close_data()
            mailbox.close()
            raise
        self.slot = slot
        return mailbox

    def _drain(self) -> None:
        """Throw away what came for the slot's last owner."""
        for sock in self.data:
            if sock is not None:
                with contextlib.suppress(OSError):
                    for _ in range(_STALE):
                        sock.recv(1)

    # -- living in it ---------------------------------------------------------------------------------

    def admit(self) -> None:
        """Let in who is at the door."""
        for _ in range(_BACKLOG):
            try:
                newcomer, _ = self.door.accept()
            except OSError:  # nobody, or another process was quicker
                return
            # One that is another user's, or gave up, learns it by being hung up on.
            with newcomer, contextlib.suppress(OSError):
                if credentials(newcomer).uid == os.geteuid():
                    self._handed.greet(newcomer)

    def _close_data(self) -> None:
        for sock in self.data:
            if sock is not None:
                sock.close()

    def close(self) -> None:
        """Leave. In a child after fork(2) this lets go of the child's copies, and the parent stays a member."""
        self.mailbox.close()
        self._close_data()
        self._handed.close()


# -- coming to the door -------------------------------------------------------------------------------------


def _door_name(port: int) -> str:
    return f"rdmacm-{port}-door"


def _who(holder: Credentials | None) -> str:
    if holder is None or holder.pid <= 0 or not os.path.exists(f"/proc/{holder.pid}"):
        return "a process"
    return f"process {holder.pid}"


def _check(deadline: float, port: int, why: str) -> None:
    if time.monotonic() > deadline:
        raise cm_error(errno.EADDRINUSE, why, "open_device", f"UDP port {port}", hint="`ss -uanp` shows who has it")


def _knock(port: int, deadline: float) -> tuple[_Handed | None, Credentials | None]:
    """What we are given at the door, if we are, and who is behind it; ConnectionRefusedError where nobody is."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)
        try:
            sock.connect("\0" + _door_name(port))
        except BlockingIOError:  # many before us
            return None, None
        holder = credentials(sock)
        if holder.uid != os.geteuid():
            raise cm_error(
                errno.EACCES,
                f"{_who(holder)} of user {holder.uid} has the port, and only one user's processes can share it",
                "open_device",
                f"UDP port {port}",
                hint=f"run as user {holder.uid}, or in a network namespace of your own",
            )
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLIN)
        poll.poll(max(0.0, min(_KNOCK_SECONDS, deadline - time.monotonic())) * 1000)
        try:
            greeting, fds = _receive_rights(sock, _GREETING.size, 6)
        except OSError:  # still nothing, or who was about to answer died
            return None, holder
    if not greeting:
        return None, holder
    version, group, families = _GREETING.unpack(greeting.ljust(_GREETING.size, b"\0"))
    if version != _VERSION or len(fds) != 4 + families:
        for fd in fds:
            os.close(fd)
        if version != _VERSION:
            why = f"{_who(holder)} shares the port as another version of this library does"
            raise cm_error(errno.EADDRINUSE, why, "open_device", f"UDP port {port}", hint="one version for all")
        raise cm_error(errno.EMFILE, "not all descriptors of the group arrived", "open_device", f"UDP port {port}")
    door, vault_in, vault_out, lock, *gsi = fds
    opened = [socket.socket(fileno=fd) for fd in (door, vault_in, vault_out)]
    return _Handed(group, opened[0], opened[1:], lock, _by_family([socket.socket(fileno=fd) for fd in gsi])), holder


def _found(port: int, deadline: float) -> _Handed | None:
    """Be the first; None where somebody else is just becoming that."""
    if not hasattr(os, "memfd_create"):
        raise CannotShare
    try:
        door = bound(_door_name(port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    with contextlib.ExitStack() as failed:
        failed.callback(door.close)
        opened = []
        for family in sockets.FAMILIES:
            if (sock := _open(family, port)) is not None:
                failed.callback(sock.close)
                opened.append(sock)
        gsi = _by_family(opened)
        _await_order(gsi, port, 1, deadline)
        for sock in opened:
            try:
                attach(sock)
            except OSError as error:
                raise CannotShare from error
        vault = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in vault:
            failed.callback(sock.close)
        vault[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _VAULT_BYTES)
        lock = os.memfd_create(_door_name(port))
        failed.callback(os.close, lock)
        door.listen(_BACKLOG)
        failed.pop_all()
    return _Handed(secrets.token_bytes(8), door, vault, lock, gsi)


def _open(family: int, port: int) -> socket.socket | None:
    try:
        return sockets.open_socket(family, port, shared=True)
    except OSError as error:
        raise sockets.bind_error(error.errno or errno.EIO, port) from error


def _await_order(opened: Sockets, port: int, count: int, deadline: float) -> None:
    """Wait until the kernel has no other sockets of the port than the parked ones and these, the last.

    Those of a process that was killed may be there for a moment longer than its lock was.
    """
    for sock in opened:
        attempt = 0
        while sock is not None and sockets.wildcard_sockets(sock.family, port) > count:
            _check(deadline, port, "a program of the same user has the port too, and does not share it with us")
            _nap(attempt)
            attempt += 1


@contextlib.contextmanager
def _locked(fd: int, deadline: float) -> Iterator[None]:
    """Claim slots alone."""
    for attempt in itertools.count():
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            if time.monotonic() > deadline:
                request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, request))[4]
                raise cm_error(
                    errno.EBUSY,
                    f"process {pid} is joining those that share the port, and does not get on",
                    "open_device",
                    hint="continue or end that process",
                ) from None
        _nap(attempt)
    try:
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)
