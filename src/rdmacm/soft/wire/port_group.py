"""Several processes of one user that share UDP port 4791 of a network namespace.

The kernel keeps the sockets of a port in the order in which they were bound, and a program chooses among them by *slot*
(:mod:`rdmacm.soft.wire.slot_filter`). The sockets of slot 0 belong to all processes together, those of each other slot
to one process. No process is special, and each may end at any moment in any way:

- When a socket is closed the kernel moves the last one to its place. So the sockets of a slot must not be closed while
  any process lives: they are *parked* in the queue of a socket pair, of which every process holds both ends. Message n
  of the queue holds the sockets at position n. The queue only grows, and is read with SO_PEEK_OFF.
- A process owns a slot because it has bound the slot's name, which the kernel frees however the process ends. A slot
  whose name can be bound has no owner, and its sockets are taken from the queue.
- A new process asks for *admission* at a listening socket that all processes hold. Any of them that makes progress
  sends it the descriptors that everybody holds. If no process listens there, the new one is the first: binding the name
  of the admission socket decides which of several it is.
- Slots are claimed under a record lock, which the kernel releases when a process ends. A process that ends between
  binding a slot's sockets and parking them leaves nothing behind, because theirs were the last sockets.
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
from collections.abc import Callable, Iterator, Sequence
from socket import AF_INET6

from rdmacm.errors import RdmaError, cm_error
from rdmacm.soft.wire import sockets
from rdmacm.soft.wire.forwarding import Credentials, bind_name, credentials
from rdmacm.soft.wire.group_names import GroupNames, users_of_names
from rdmacm.soft.wire.slot_filter import MAX_SLOT, attach, shift_of, slot_at

__all__ = ["MAX_SLOT", "CannotShare", "PortGroup"]

#: How long a new process waits for admission, in seconds.
JOIN_SECONDS = 5.0
#: After that many seconds it asks again: the process that was about to answer may have been stopped.
_ADMISSION_RETRY_SECONDS = 0.5

#: The processes of a group have the same version of this module.
_VERSION = 4
#: What goes with the descriptors of a group: version, secret of the group, number of address families.
_GREETING = struct.Struct("=B8sB")
_BACKLOG = 128
#: Room for 255 messages of parked sockets, which take less than a kilobyte each.
_PARKING_BYTES = 256 << 10
#: Stale packets that are taken out of a slot's sockets. No receive queue holds more.
_STALE_PACKETS = 1 << 15

_SO_PEEK_OFF = 42
_FLOCK = struct.Struct("hhqqi4x")
_INT = array.array("i").itemsize

#: The IPv4 socket, and the IPv6 socket or None.
Sockets = list[socket.socket | None]


class CannotShare(Exception):
    """This system lacks what sharing a port takes."""


class _GroupHandles:
    """The descriptors that every process of a group holds."""

    def __init__(
        self,
        port: int,
        secret: bytes,
        admission: socket.socket,
        parking: Sequence[socket.socket],
        lock: int,
        gsi: Sockets,
    ) -> None:
        #: Random bytes that only the processes of the group know.
        self.secret = secret
        #: The names of the group's sockets.
        self.names = GroupNames(port, secret, lock)
        #: How its slots are shifted (:mod:`rdmacm.soft.wire.slot_filter`).
        self.shift = shift_of(secret)
        #: Where new processes connect.
        self.admission = admission
        #: The ends of the queue of parked sockets.
        self.parking_in, self.parking_out = parking
        #: A file in memory, for its record lock and for ``names``.
        self.lock = lock
        #: The sockets of slot 0, where management datagrams arrive.
        self.gsi = gsi
        for sock in (admission, *parking, *gsi):
            if sock is not None:
                sock.setblocking(False)

    def send_to(self, newcomer: socket.socket) -> None:
        """Admit a process: give it copies of all descriptors."""
        present = [sock for sock in self.gsi if sock is not None]
        fds = [sock.fileno() for sock in (self.admission, self.parking_in, self.parking_out)] + [self.lock]
        fds += [sock.fileno() for sock in present]
        greeting = _GREETING.pack(_VERSION, self.secret, len(present))
        newcomer.sendmsg([greeting], _rights(fds), socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Close this process's copies."""
        for sock in (self.admission, self.parking_in, self.parking_out, *self.gsi):
            if sock is not None:
                sock.close()
        os.close(self.lock)


def _rights(fds: Sequence[int]) -> list[tuple[int, int, bytes]]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds).tobytes())]


def _receive_rights(sock: socket.socket, size: int, count: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """A message and the descriptors that came with it. (socket.recv_fds() of Python 3.11 ignores its flags.)"""
    message, control, _, _ = sock.recvmsg(size, socket.CMSG_SPACE(count * _INT), flags | socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in control:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % _INT])
    return message, list(fds)


def _by_family(opened: Sequence[socket.socket]) -> Sockets:
    found: Sockets = [None, None]
    for sock in opened:
        sock.setblocking(False)
        found[sock.family == AF_INET6] = sock
    return found


def _pause(attempt: int) -> None:
    # The kernel does not report that a lock or a name is free, or that the sockets of a killed process are gone.
    time.sleep(min(0.001 * 2 ** min(attempt, 6), 0.05))


class PortGroup:
    """The processes that share a port, and the slot this process has among them. Made by :meth:`join`."""

    def __init__(self, port: int, handles: _GroupHandles, deadline: float) -> None:
        self.port = port
        #: This process's slot, 1 to 255, and its sockets.
        self.slot = 0
        self.data: Sockets = [None, None]
        #: The sockets of slot 0, which all processes read.
        self.gsi = handles.gsi
        self._handles = handles
        with _locked(handles.lock, deadline):
            #: A socket bound to the :meth:`slot_name` of ``slot``, which does not listen yet.
            self.slot_socket = self._claim(deadline)
        # SO_PEERCRED names the last process that called listen(2), to newcomers that get no answer.
        handles.admission.listen(_BACKLOG)

    @property
    def admission(self) -> socket.socket:
        """Polls readable when a process wants to join: call :meth:`admit`."""
        return self._handles.admission

    def slot_name(self, slot: int) -> str:
        """The name where the owner of a slot receives forwarded packets."""
        return self._handles.names.slot(slot)

    def service_name(self, service_id: int, local: bytes | None) -> str:
        """The name where the process that listens on a service id receives forwarded requests.

        ``local`` is the address it listens on: zeros for any address of the family, None for any at all.
        """
        return self._handles.names.service(service_id, local)

    def bind_service(self, service_id: int, local: bytes | None) -> socket.socket:
        """Return a socket bound to :meth:`service_name`. EADDRINUSE if a process of the group has the name."""
        try:
            return bind_name(self.service_name(service_id, local))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        with _locked(self._handles.lock, time.monotonic() + JOIN_SECONDS):
            return self._handles.names.regain_service(service_id, local)

    @classmethod
    def join(cls, port: int) -> PortGroup:
        """Take a slot among the processes that share a port, or be the first of them.

        EACCES: the port is another user's. EADDRINUSE: a process has the port and does not share it. EBUSY: no process
        admits this one. CannotShare: this system cannot share a port.
        """
        if sys.platform != "linux":
            raise CannotShare
        deadline = time.monotonic() + JOIN_SECONDS
        holder: Credentials | None = None
        for attempt in itertools.count():
            try:
                handles, holder = _request_admission(port, deadline)
            except ConnectionRefusedError:
                handles = _create_group(port, deadline)
            if handles is not None:
                try:
                    return cls(port, handles, deadline)
                except BaseException:
                    handles.close()
                    raise
            if time.monotonic() > deadline:
                break
            _pause(attempt)
        _check_user(port)
        raise cm_error(
            errno.EBUSY,
            f"{_describe(holder)}, which shares the port, does not admit this process",
            "open_device",
            f"UDP port {port}",
            hint="continue or end that process: one that has a device open has to make progress",
        )

    def _claim(self, deadline: float) -> socket.socket:
        """Become the owner of a slot: set ``slot`` and ``data``, return the socket bound to its name."""
        names = self._handles.names
        # A slot whose name another user has bound is used only if there is no other. To find it takes long.
        slot_socket = self._claim_any(lambda slot: bind_name(names.slot(slot)), deadline)
        if slot_socket is None:
            users = users_of_names()
            slot_socket = self._claim_any(lambda slot: names.regain_slot(slot, users), deadline)
        if slot_socket is not None:
            return slot_socket
        raise cm_error(
            errno.EUSERS, f"{MAX_SLOT} processes share the port already", "open_device", f"UDP port {self.port}"
        )

    def _claim_any(self, bind: Callable[[int], socket.socket], deadline: float) -> socket.socket | None:
        """As :meth:`_claim`, with a function that binds the name of a slot; None if it cannot bind any."""
        handles = self._handles
        handles.parking_out.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, 0)
        for position in range(1, MAX_SLOT + 1):
            slot = slot_at(position, handles.shift)
            slot_socket = _unless_taken(bind, slot)
            try:
                # Each call reads the next message. The descriptors of a slot with an owner are left out.
                message, fds = _receive_rights(handles.parking_out, 1, 2 if slot_socket else 0, socket.MSG_PEEK)
            except BlockingIOError:
                return self._create_slot(slot, position, slot_socket, deadline)
            if slot_socket is None:
                continue
            self.data = _by_family([socket.socket(fileno=fd) for fd in fds])
            if message != bytes((position,)) or [s is None for s in self.data] != [s is None for s in self.gsi]:
                slot_socket.close()
                self._close_data()
                raise cm_error(errno.EMFILE, "the descriptors of a slot did not arrive", "open_device")
            self.slot = slot
            self._discard_stale()
            return slot_socket
        return None

    def _create_slot(
        self, slot: int, position: int, slot_socket: socket.socket | None, deadline: float
    ) -> socket.socket:
        """Claim a slot that no process had before: bind its sockets and park them."""
        attempt = 0
        while slot_socket is None:  # a process was killed between binding this name and parking; its name goes last
            _check(deadline, self.port, "the name of a new slot is taken")
            _pause(attempt)
            attempt += 1
            users = users_of_names()
            slot_socket = _unless_taken(lambda slot: self._handles.names.regain_slot(slot, users), slot)  # noqa: B023
        try:
            for index, gsi in enumerate(self.gsi):
                if gsi is not None:
                    self.data[index] = _open(gsi.family, self.port)
            _await_order(self.data, self.port, position + 1, deadline)
            fds = [sock.fileno() for sock in self.data if sock is not None]
            try:
                self._handles.parking_in.sendmsg([bytes((position,))], _rights(fds))
            except OSError as error:
                raise cm_error(
                    error.errno or errno.EIO,
                    f"the sockets of slot {slot} cannot be kept ({error.strerror})",
                    "open_device",
                    hint="raise the limit of open files (RLIMIT_NOFILE), which also bounds descriptors under way",
                ) from error
        except BaseException:
            self._close_data()
            slot_socket.close()
            raise
        self.slot = slot
        return slot_socket

    def _discard_stale(self) -> None:
        """Discard packets that came for the slot's last owner, and reports of packets that were not delivered."""
        for sock in self.data:
            if sock is not None:
                sockets.discard_errors(sock)
                with contextlib.suppress(OSError):
                    for _ in range(_STALE_PACKETS):
                        sock.recv(1)

    def admit(self) -> None:
        """Admit the processes that ask for it."""
        for _ in range(_BACKLOG):
            try:
                newcomer, _ = self.admission.accept()
            except OSError:  # none is left, or another process admitted it
                return
            # The connection of another user's process, or of one that gave up, is closed without an answer.
            with newcomer, contextlib.suppress(OSError):
                if credentials(newcomer).uid == os.geteuid():
                    self._handles.send_to(newcomer)

    def _close_data(self) -> None:
        for sock in self.data:
            if sock is not None:
                sock.close()

    def close(self) -> None:
        """Leave the group. In a child of fork(2) this closes the child's copies, and the parent stays a member."""
        self.slot_socket.close()
        self._close_data()
        self._handles.close()


# -- joining ------------------------------------------------------------------------------------------------


def _admission_name(port: int) -> str:
    return f"rdmacm-{port}-admission"


def _describe(holder: Credentials | None) -> str:
    if holder is None or holder.pid <= 0 or not os.path.exists(f"/proc/{holder.pid}"):
        return "a process"
    return f"process {holder.pid}"


def _other_user(holder: Credentials, port: int) -> RdmaError:
    return cm_error(
        errno.EACCES,
        f"{_describe(holder)} of user {holder.uid} has the port, and only one user's processes can share it",
        "open_device",
        f"UDP port {port}",
        hint=f"run as user {holder.uid}, or in a network namespace of your own",
    )


def _check_user(port: int) -> None:
    """Raise EACCES if a socket of another user has the name of the admission socket: it need not answer."""
    user = users_of_names().get(_admission_name(port))
    if user is not None and user != os.geteuid():
        raise _other_user(Credentials(0, user, 0), port)


def _unless_taken(bind: Callable[[int], socket.socket], slot: int) -> socket.socket | None:
    try:
        return bind(slot)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None


def _check(deadline: float, port: int, why: str) -> None:
    if time.monotonic() > deadline:
        raise cm_error(errno.EADDRINUSE, why, "open_device", f"UDP port {port}", hint="`ss -uanp` shows who has it")


def _request_admission(port: int, deadline: float) -> tuple[_GroupHandles | None, Credentials | None]:
    """Ask for the group's descriptors. Return them, or None without an answer, and which process holds the name.

    ConnectionRefusedError if no process does.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)
        try:
            sock.connect("\0" + _admission_name(port))
        except BlockingIOError:  # the backlog is full
            return None, None
        holder = credentials(sock)
        if holder.uid != os.geteuid():
            raise _other_user(holder, port)
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLIN)
        poll.poll(max(0.0, min(_ADMISSION_RETRY_SECONDS, deadline - time.monotonic())) * 1000)
        try:
            greeting, fds = _receive_rights(sock, _GREETING.size, 6)
        except OSError:  # no answer yet, or the process that was about to answer ended
            return None, holder
    if not greeting:
        return None, holder
    version, secret, families = _GREETING.unpack(greeting.ljust(_GREETING.size, b"\0"))
    if version != _VERSION or len(fds) != 4 + families:
        for fd in fds:
            os.close(fd)
        if version != _VERSION:
            why = f"{_describe(holder)} shares the port as another version of this library does"
            raise cm_error(errno.EADDRINUSE, why, "open_device", f"UDP port {port}", hint="one version for all")
        raise cm_error(errno.EMFILE, "not all descriptors of the group arrived", "open_device", f"UDP port {port}")
    admission, parking_in, parking_out, lock, *gsi = fds
    opened = [socket.socket(fileno=fd) for fd in (admission, parking_in, parking_out)]
    gsi_sockets = _by_family([socket.socket(fileno=fd) for fd in gsi])
    return _GroupHandles(port, secret, opened[0], opened[1:], lock, gsi_sockets), holder


def _create_group(port: int, deadline: float) -> _GroupHandles | None:
    """Be the first process of a group. None if another one is just becoming that."""
    if not hasattr(os, "memfd_create"):
        raise CannotShare
    try:
        admission = bind_name(_admission_name(port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            _check_user(port)
            return None
        raise
    secret = secrets.token_bytes(8)
    with contextlib.ExitStack() as failed:
        failed.callback(admission.close)
        opened = []
        for family in sockets.FAMILIES:
            if (sock := _open(family, port)) is not None:
                failed.callback(sock.close)
                opened.append(sock)
        gsi = _by_family(opened)
        _await_order(gsi, port, 1, deadline)
        for sock in opened:
            try:
                attach(sock, shift_of(secret))
            except OSError as error:
                raise CannotShare from error
        parking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in parking:
            failed.callback(sock.close)
        parking[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PARKING_BYTES)
        lock = os.memfd_create(_admission_name(port))
        failed.callback(os.close, lock)
        admission.listen(_BACKLOG)
        failed.pop_all()
    return _GroupHandles(port, secret, admission, parking, lock, gsi)


def _open(family: int, port: int) -> socket.socket | None:
    try:
        return sockets.open_socket(family, port, shared=True)
    except OSError as error:
        raise sockets.bind_error(error.errno or errno.EIO, port) from error


def _await_order(opened: Sockets, port: int, count: int, deadline: float) -> None:
    """Wait until the kernel has ``count`` sockets of each family: the parked ones and these, which are the last.

    The sockets of a process that was killed may exist for a moment longer than its lock.
    """
    for sock in opened:
        attempt = 0
        while sock is not None and sockets.wildcard_sockets(sock.family, port) > count:
            _check(deadline, port, "a program of the same user has the port too, and does not share it with us")
            _pause(attempt)
            attempt += 1


@contextlib.contextmanager
def _locked(fd: int, deadline: float) -> Iterator[None]:
    """Hold the record lock of a group."""
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
                    f"process {pid} is joining the processes that share the port, and does not finish",
                    "open_device",
                    hint="continue or end that process",
                ) from None
        _pause(attempt)
    try:
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)
