"""Several processes of one user that share UDP port 4791 of a network namespace.

The kernel keeps the sockets of a port in the order in which they were bound, and a program chooses among them by *slot*
(:mod:`rdmacm.soft.wire.slot_filter`). The sockets of slot 0 belong to all processes together, those of each other slot
to one process. No process is special, and each may end at any moment in any way:

- The sockets of every slot stay open in a queue that all processes hold (:mod:`rdmacm.soft.wire.parking`).
- A process owns a slot because it has bound the slot's name, which the kernel frees however the process ends. A slot
  whose name can be bound has no owner, and its sockets are taken from the queue. A process owns one slot, and claims
  further ones when it needs more queue pair numbers.
- A new process asks for *admission* at a listening socket that all processes hold. Any of them that makes progress
  sends it the descriptors that everybody holds. If no process listens there, the new one is the first: binding the name
  of the admission socket decides which of several it is.
- A thousand processes must not wake up for each new one. So only those at the first positions watch that socket. A new
  process that gets no answer asks at a second one, which all watch.
- Slots are claimed under a record lock, which the kernel releases when a process ends. A process that ends between
  binding a slot's sockets and parking them leaves nothing behind, because theirs were the last sockets.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Container, Iterator, Sequence
from socket import AF_INET6
from typing import NamedTuple

from rdmacm.errors import RdmaError, cm_error
from rdmacm.proto.constants import MAX_SLOT
from rdmacm.soft.wire import sockets
from rdmacm.soft.wire.forwarding import Credentials, bind_name, credentials, give_slot
from rdmacm.soft.wire.group_names import GroupNames, bound_names, users_of_names
from rdmacm.soft.wire.parking import Parking, receive_rights, rights
from rdmacm.soft.wire.slot_filter import attach, shift_of, slot_at

#: How long a new process waits for admission, and how long for one other process that claims a slot, in seconds.
JOIN_SECONDS = 15.0
#: How long a process that claims a further slot waits for one other process that does, in seconds.
_CLAIM_SECONDS = 0.5
#: After that many seconds it asks again: the process that was about to answer may have been stopped.
_ADMISSION_RETRY_SECONDS = 0.5
#: After that many seconds without an answer it asks all processes, which wakes them, and again after a longer time.
_FEW_SECONDS, _ALL_SECONDS = 1.25, 2.0
#: The processes at so many positions admit others; one of them is enough.
_ADMITTERS = 8

#: The processes at so many positions are asked to answer for the slots of one that leaves.
_HEIRS = 64

#: The processes of a group have the same version of this module.
_VERSION = 5
#: What goes with the descriptors of a group: version, secret of the group, number of address families.
_GREETING = struct.Struct("=B8sB")
#: How many processes may wait for admission at a time; the system allows net.core.somaxconn.
_BACKLOG = 4096
#: How many are admitted at a time.
_ADMISSIONS = 64
#: Stale packets that are taken out of a slot's sockets. No receive queue holds more.
_STALE_PACKETS = 1 << 15

_FLOCK = struct.Struct("hhqqi4x")
#: In the lock's file: how often the lock was taken.
_COUNT = struct.Struct("=Q")

#: The IPv4 socket, and the IPv6 socket or None.
Sockets = list[socket.socket | None]


class CannotShare(Exception):
    """This system lacks what sharing a port takes."""


class OwnedSlot(NamedTuple):
    """A slot of this process."""

    slot: int
    #: Its sockets.
    data: Sockets
    #: A socket bound to the :meth:`PortGroup.slot_name`, which does not listen yet.
    name: socket.socket

    def close(self) -> None:
        """Leave the slot to others, or in a child of fork(2) to the parent."""
        for sock in (self.name, *self.data):
            if sock is not None:
                sock.close()


class _GroupHandles:
    """The descriptors that every process of a group holds."""

    def __init__(
        self,
        port: int,
        secret: bytes,
        admission: Sequence[socket.socket],
        parking: Parking,
        lock: int,
        gsi: Sockets,
    ) -> None:
        #: Random bytes that only the processes of the group know.
        self.secret = secret
        #: The names of the group's sockets.
        self.names: GroupNames = GroupNames(port, secret, lock)
        #: How its slots are shifted (:mod:`rdmacm.soft.wire.slot_filter`).
        self.shift: int = shift_of(secret)
        #: Where new processes connect: first to the one that few processes watch.
        self.admission = admission
        #: The queue with the sockets of all slots.
        self.parking = parking
        #: A file in memory, for its record lock, and for ``names``.
        self.lock = lock
        #: The sockets of slot 0, where management datagrams arrive.
        self.gsi = gsi
        for sock in (*admission, *gsi):
            if sock is not None:
                sock.setblocking(False)

    def send_to(self, newcomer: socket.socket) -> None:
        """Admit a process: give it copies of all descriptors."""
        present = [sock for sock in self.gsi if sock is not None]
        fds = [sock.fileno() for sock in (*self.admission, *self.parking.ends)] + [self.lock]
        fds += [sock.fileno() for sock in present]
        greeting = _GREETING.pack(_VERSION, self.secret, len(present))
        newcomer.sendmsg([greeting], rights(fds), socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Close this process's copies."""
        for sock in (*self.admission, *self.gsi):
            if sock is not None:
                sock.close()
        self.parking.close()
        os.close(self.lock)


def _by_family(opened: Sequence[socket.socket]) -> Sockets:
    found: Sockets = [None, None]
    for sock in opened:
        sock.setblocking(False)
        found[sock.family == AF_INET6] = sock
    return found


class _Patience:
    """Waiting for other processes, for some seconds in all.

    Only the pauses count: on a busy system time passes in which no process has a chance.
    """

    def __init__(self, seconds: float) -> None:
        self.spent = 0.0
        self._limit = seconds
        # Of a thousand processes that wait for a lock, few must look at a time.
        self._longest = min(max(0.05, seconds / 10), 0.5)
        self._pauses = 0

    def pause(self) -> bool:
        """Pause, longer each time; False without a pause once the seconds are spent."""
        if self.spent >= self._limit:
            return False
        # The kernel does not report that a lock or a name is free, or that the sockets of a killed process are gone.
        seconds = min(0.001 * 2 ** min(self._pauses, 10), self._longest)
        time.sleep(seconds)
        self.spent += seconds
        self._pauses += 1
        return True


class PortGroup:
    """The processes that share a port, and the slots this process has among them. Made by :meth:`join`."""

    def __init__(self, port: int, handles: _GroupHandles) -> None:
        self.port = port
        #: The sockets of slot 0, which all processes read.
        self.gsi: Sockets = handles.gsi
        self._handles = handles
        self._families = sum(sock is not None for sock in handles.gsi)
        #: The slots of this process. Communication ids are in the first.
        self.slots: list[OwnedSlot] = []
        # If many processes start at once, those that wait get no processor time: so each admits the next ones.
        self.admit(handles.admission[0])
        #: Poll readable when a process wants to join: call :meth:`admit`.
        self.admission: Sequence[socket.socket] = handles.admission[self._claim(JOIN_SECONDS) > _ADMITTERS :]
        # SO_PEERCRED names the last process that called listen(2), to newcomers that get no answer.
        for sock in handles.admission:
            sock.listen(_BACKLOG)

    def slot_name(self, slot: int) -> str:
        """The name where the owner of a slot receives forwarded packets."""
        return self._handles.names.slot(slot)

    def other_names(self, own: Container[int]) -> list[str]:
        """:meth:`slot_name` of each slot that a process has now, without those in ``own``. It takes milliseconds."""
        bound = bound_names()
        names = ((slot, self.slot_name(slot)) for slot in range(1, MAX_SLOT + 1)) if bound else ()
        return [name for slot, name in names if name in bound and slot not in own]

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
        with _locked(self._handles.lock, JOIN_SECONDS):
            return self._handles.names.regain_service(service_id, local)

    @classmethod
    def join(cls, port: int) -> PortGroup:
        """Take a slot among the processes that share a port, or be the first of them.

        EACCES: the port is another user's. EADDRINUSE: a process has the port and does not share it. EBUSY: no process
        admits this one. CannotShare: this system cannot share a port.
        """
        if sys.platform != "linux":
            raise CannotShare
        patience = _Patience(JOIN_SECONDS)
        ask_all_at = _FEW_SECONDS
        with contextlib.ExitStack() as requested:
            requests = _Requests(port)
            requested.callback(requests.close)
            while True:
                try:
                    ask_all = patience.spent >= ask_all_at
                    if ask_all:
                        ask_all_at += _ALL_SECONDS
                    requests.ask(_ALL if ask_all else _FEW)
                    handles = requests.answer(patience)
                except ConnectionRefusedError:
                    handles = _create_group(port)
                if handles is not None:
                    try:
                        return cls(port, handles)
                    except BaseException:
                        handles.close()
                        raise
                if not patience.pause():
                    break
        _check_user(port)
        raise cm_error(
            errno.EBUSY,
            f"{_describe(requests.holder)}, which shares the port, does not admit this process",
            "open_device",
            f"UDP port {port}",
            hint="continue or end that process: one that has a device open has to make progress",
        )

    def claim(self) -> OwnedSlot:
        """Own one more slot. EUSERS if none is left, EBUSY if another process claims one and does not finish."""
        self._claim(_CLAIM_SECONDS)
        return self.slots[-1]

    def _claim(self, seconds: float) -> int:
        """Own one more slot, and return its position."""
        handles = self._handles
        with _locked(handles.lock, seconds):
            parking = handles.parking
            last = parking.last_position()
            name, position = self._first_without_owner(last)
            if name is None:
                name, position = self._create(parking, _Patience(seconds))
            try:
                data = _by_family(parking.copies(position))
            except BaseException:
                name.close()
                raise
        self._discard_stale(data)
        self.slots.append(OwnedSlot(slot_at(position, handles.shift), data, name))
        return position

    def _first_without_owner(self, last: int) -> tuple[socket.socket | None, int]:
        """The first position up to ``last`` whose slot has no owner, and a socket bound to its name; or None."""
        slot_name, shift = self.slot_name, self._handles.shift
        with contextlib.ExitStack() as failed:
            sock = failed.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.setblocking(False)
            for position in range(1, last + 1):
                try:
                    sock.bind("\0" + slot_name(slot_at(position, shift)))
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                else:
                    failed.pop_all()
                    return sock, position
        return None, 0

    def _regain(self, last: int) -> tuple[socket.socket, int] | None:
        """As :meth:`_first_without_owner`, for slots whose name another user has bound. To find one takes long."""
        users, shift = users_of_names(), self._handles.shift
        for position in range(1, last + 1):
            with contextlib.suppress(OSError):
                return self._handles.names.regain_slot(slot_at(position, shift), users), position
        return None

    def _create(self, parking: Parking, patience: _Patience) -> tuple[socket.socket, int]:
        """Bind and park the sockets of the next positions, and bind the name of the first one's slot."""
        positions = parking.next_positions()
        if not positions:
            regained = self._regain(parking.last_position())
            if regained is not None:
                return regained
            raise cm_error(
                errno.EUSERS,
                f"the processes that share the port own all {MAX_SLOT} slots",
                "open_device",
                f"UDP port {self.port}",
                hint="end one of them; a process with thousands of queue pairs has several slots",
            )
        slot = slot_at(positions[0], self._handles.shift)
        with contextlib.ExitStack() as failed:
            while True:  # a process was killed between binding this name and parking; its name goes last
                try:
                    name = self._bind_slot(slot)
                    break
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise
                if not patience.pause():
                    raise _in_use(self.port, "the name of a new slot is taken")
            failed.callback(name.close)
            with contextlib.ExitStack() as opened:  # the queue has copies then
                made = [
                    opened.enter_context(sock)
                    for _ in positions
                    for index, gsi in enumerate(self.gsi)
                    if gsi is not None and (sock := _open(sockets.FAMILIES[index], self.port)) is not None
                ]
                for sock in made:
                    sockets.set_queue_bytes(sock, 0)
                _await_order(made[: self._families], self.port, positions[-1] + 1, patience)
                self._park(parking, positions[0], [sock.fileno() for sock in made])
            failed.pop_all()
        return name, positions[0]

    def _bind_slot(self, slot: int) -> socket.socket:
        """Bind the name of a slot, or another one if a socket of another user has it; EADDRINUSE if one of ours has."""
        try:
            return bind_name(self.slot_name(slot))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        return self._handles.names.regain_slot(slot, users_of_names())  # takes long: the system lists all names

    def _park(self, parking: Parking, first: int, fds: Sequence[int]) -> None:
        try:
            parking.park(first, fds)
        except OSError as error:
            limit, hint = "", "a larger net.core.wmem_max"
            if error.errno == errno.ETOOMANYREFS:
                limit = f": more than the limit of open files, {resource.getrlimit(resource.RLIMIT_NOFILE)[1]},"
                limit += " are kept for this user's processes"
                hint = "raise the hard limit of open files (RLIMIT_NOFILE, `ulimit -Hn`)"
            text = f"the sockets of a further slot cannot be kept ({error.strerror}){limit}"
            raise cm_error(error.errno or errno.EIO, text, "open_device", f"UDP port {self.port}", hint=hint) from error

    def _discard_stale(self, data: Sockets) -> None:
        """Discard packets that came for a slot's last owner, and reports of packets that were not delivered."""
        for sock in data:
            if sock is not None:
                sockets.discard_errors(sock)
                with contextlib.suppress(OSError):
                    for _ in range(_STALE_PACKETS):
                        sock.recv(1)
                sockets.set_queue_bytes(sock)

    def admit(self, admission: socket.socket) -> None:
        """Admit processes that ask for it at one of ``admission``."""
        for _ in range(_ADMISSIONS):
            try:
                newcomer, _ = admission.accept()
            except OSError:  # none is left, or another process admitted it
                return
            # The connection of another user's process, or of one that gave up, is closed without an answer.
            with newcomer, contextlib.suppress(OSError):
                if credentials(newcomer).uid == os.geteuid():
                    self._handles.send_to(newcomer)

    def give_slots(self) -> None:
        """Give the slots of this process, which is about to leave, to one other process of the group, if there is one.

        It answers the peers that repeat their last message (:mod:`rdmacm.soft.wire.heirs`).
        """
        own = {owned.slot for owned in self.slots}
        for position in range(1, min(self._handles.parking.last_position(), _HEIRS) + 1):
            slot = slot_at(position, self._handles.shift)
            if slot not in own and self._give_to(self.slot_name(slot)):
                return

    def _give_to(self, heir: str) -> bool:
        for count, owned in enumerate(self.slots):
            fds = [sock.fileno() for sock in (owned.name, *owned.data) if sock is not None]
            if not give_slot(heir, fds):
                return count > 0
            with contextlib.suppress(OSError):
                owned.name.shutdown(socket.SHUT_RDWR)  # from now on nobody receives there
        return True

    def close(self) -> None:
        """Leave the group. In a child of fork(2) this closes the child's copies, and the parent stays a member."""
        for owned in self.slots:
            owned.close()
        self._handles.close()


# -- joining ------------------------------------------------------------------------------------------------


#: The names of the admission sockets: the one that few processes watch, and the one that all watch.
_FEW, _ALL = "admission", "admission-by-all"


def _admission_name(port: int, name: str = _FEW) -> str:
    return f"rdmacm-{port}-{name}"


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
    """Raise EACCES if a socket of another user has the name of an admission socket: it need not answer."""
    users = users_of_names()
    for name in (_FEW, _ALL):
        user = users.get(_admission_name(port, name), os.geteuid())
        if user != os.geteuid():
            raise _other_user(Credentials(0, user, 0), port)


def _in_use(port: int, why: str) -> RdmaError:
    return cm_error(errno.EADDRINUSE, why, "open_device", f"UDP port {port}", hint="`ss -uanp` shows the process")


class _Requests:
    """The requests of a new process for admission. It keeps all of them until one is answered."""

    def __init__(self, port: int) -> None:
        self.port = port
        #: The connections that may be answered.
        self.open: list[socket.socket] = []
        #: The process that holds the name; None if that is not known.
        self.holder: Credentials | None = None

    def ask(self, name: str) -> None:
        """Send one more request. EACCES if another user's process has the name, ConnectionRefusedError if none has."""
        with contextlib.ExitStack() as failed:
            sock = failed.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.setblocking(False)
            try:
                sock.connect("\0" + _admission_name(self.port, name))
            except BlockingIOError:  # the backlog is full
                return
            self.holder = holder = credentials(sock)
            if holder.uid != os.geteuid():
                raise _other_user(holder, self.port)
            failed.pop_all()
        self.open.append(sock)

    def answer(self, patience: _Patience) -> _GroupHandles | None:
        """Wait for an answer until it is time to ask again, and return what it has; None without one."""
        if not self.open:
            return None
        poll = select.poll()
        for sock in self.open:
            poll.register(sock.fileno(), select.POLLIN)
        ready = {fd for fd, _ in poll.poll(_ADMISSION_RETRY_SECONDS * 1000)}
        if not ready:
            patience.spent += _ADMISSION_RETRY_SECONDS
        for sock in [each for each in self.open if each.fileno() in ready]:
            self.open.remove(sock)
            greeting = b""
            with sock, contextlib.suppress(OSError):  # of a process that was about to answer and has ended
                greeting, fds = receive_rights(sock, _GREETING.size, 7)
            if greeting:
                return self._unpack(greeting, fds)
        return None

    def _unpack(self, greeting: bytes, fds: list[int]) -> _GroupHandles:
        version, secret, families = _GREETING.unpack(greeting.ljust(_GREETING.size, b"\0"))
        if version == _VERSION and len(fds) == 5 + families:
            lock = fds.pop(4)
            opened = [socket.socket(fileno=fd) for fd in fds]
            parking, gsi = Parking(opened[2:4], families), _by_family(opened[4:])
            return _GroupHandles(self.port, secret, opened[:2], parking, lock, gsi)
        for fd in fds:
            os.close(fd)
        where = f"UDP port {self.port}"
        if version != _VERSION:
            why = f"{_describe(self.holder)} shares the port as another version of this library does"
            raise cm_error(errno.EADDRINUSE, why, "open_device", where, hint="one version for all")
        raise cm_error(errno.EMFILE, "not all descriptors of the group arrived", "open_device", where)

    def close(self) -> None:
        """Give up the requests that are not answered."""
        for sock in self.open:
            sock.close()


def _create_group(port: int) -> _GroupHandles | None:
    """Be the first process of a group. None if another one is just becoming that."""
    if not hasattr(os, "memfd_create"):
        raise CannotShare
    with contextlib.ExitStack() as failed:
        admission = []
        try:
            for name in (_FEW, _ALL):
                admission.append(bind_name(_admission_name(port, name)))
                failed.callback(admission[-1].close)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                _check_user(port)
                return None
            raise
        secret = secrets.token_bytes(8)
        opened = []
        for family in sockets.FAMILIES:
            if (sock := _open(family, port)) is not None:
                failed.callback(sock.close)
                opened.append(sock)
        gsi = _by_family(opened)
        _await_order(opened, port, 1, _Patience(JOIN_SECONDS))
        for sock in opened:
            try:
                attach(sock, shift_of(secret))
            except OSError as error:
                raise CannotShare from error
        parking = Parking.create(len(opened))
        failed.callback(parking.close)
        lock = os.memfd_create(_admission_name(port))
        failed.callback(os.close, lock)
        for sock in admission:
            sock.listen(_BACKLOG)
        failed.pop_all()
    return _GroupHandles(port, secret, admission, parking, lock, gsi)


def _open(family: int, port: int) -> socket.socket | None:
    try:
        return sockets.open_socket(family, port, shared=True)
    except OSError as error:
        raise sockets.bind_error(error.errno or errno.EIO, port) from error


def _await_order(opened: Sequence[socket.socket], port: int, count: int, patience: _Patience) -> None:
    """Wait until the kernel has ``count`` sockets of each family: the parked ones and these, which are the last.

    The sockets of a process that was killed may exist for a moment longer than its lock.
    """
    for sock in opened:
        while sockets.wildcard_sockets(sock.family, port) > count:
            if not patience.pause():
                raise _in_use(port, "a program of the same user has the port too, and does not share it with us")


@contextlib.contextmanager
def _locked(fd: int, seconds: float) -> Iterator[None]:
    """Hold the record lock of a group. Wait for any number of processes, but for none of them longer than that."""
    count, patience = b"", _Patience(seconds)
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        before, count = count, os.pread(fd, _COUNT.size, 0)
        if count != before:
            patience.spent = 0.0
        if not patience.pause():
            request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, request))[4]
            raise cm_error(
                errno.EBUSY,
                f"process {pid} is joining the processes that share the port, and does not finish",
                "open_device",
                hint="continue or end that process",
            )
    try:
        count = os.pread(fd, _COUNT.size, 0) or bytes(_COUNT.size)
        os.pwrite(fd, _COUNT.pack(_COUNT.unpack(count)[0] + 1), 0)
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)
