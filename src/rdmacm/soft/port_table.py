"""The port numbers of a network namespace, shared by every process in it.

For librdmacm, the kernel keeps one table of ports per port space and network namespace, apart from those of sockets. It
lets ids share a port under some conditions, and frees a port when the process ends. Here the table is a file that is
never read or written. A process takes a port by locking byte ranges of the file with fcntl(2) record locks, which the
kernel drops when the process ends for any reason. All users share the file. A user whom another one keeps from opening
it has a file alone.

Two ids on one port number conflict as follows (rdma_bind_addr(3), rdma_set_option(3)):

- Two ids that both set REUSEADDR do not conflict, until one of them listens.
- Two ids of different families that both set AFONLY do not conflict.
- Otherwise a wildcard address conflicts with every address, and a specific address with itself.

As byte ranges: each combination of port space, family and port number has a block. The first half (A) of a block has a
byte for each address of the family. The second half (G) is where the family's wildcard meets ids of the other families;
it has a byte for each address of *those* families. An id locks the following, exclusively, or shared if it sets
REUSEADDR:

- a wildcard without AFONLY: the port's block in every family;
- a wildcard with AFONLY: the block in its family;
- a specific address with AFONLY: its byte of A in its family's block;
- a specific address without AFONLY: that byte, and its byte of G in the blocks of the other families.

Two ids conflict exactly if two of their ranges overlap and one of the locks is exclusive. IPv4 addresses map to bytes
one to one, longer addresses by a hash of 40 bits. The kernel joins adjoining locks of a process and walks the list of
all its locks in each call. So the blocks of consecutive ports adjoin, and free ports are handed out in runs.

Locks of one process do not conflict with each other, so within a process a dictionary applies the rules.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import stat
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from socket import AF_INET, AF_INET6
from typing import TypeAlias

from rdmacm.address import AF_IB
from rdmacm.constants import PortSpace
from rdmacm.errors import cm_error
from rdmacm.soft.interpreter import check_main_interpreter
from rdmacm.soft.processes import process_text

_FAMILIES = (AF_INET, AF_INET6, AF_IB)
_SPACES = {PortSpace.TCP: 0, PortSpace.UDP: 1, PortSpace.IPOIB: 2, PortSpace.IB: 3}

_HALF = 1 << 41
_BLOCK = 2 * _HALF
_FAMILY = _BLOCK << 16
_SPACE = len(_FAMILIES) * _FAMILY

#: How many consecutive free ports are handed out from one random place.
_RUN = 64

#: Every process that has the file open, a member, holds a shared lock on this byte. The last can lock it exclusively.
_MEMBERS = 1 << 62

#: The last member holds the byte exclusively for the moment in which it removes the file. A process that holds it for
#: longer than this many attempts to open the file does not follow the protocol.
_OPEN_TRIES = 1000

#: Errors of a file system that another user may have filled.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

#: The paths of the files that this process has open. If it closed another descriptor of one, it would lose its locks.
_open_paths: list[str] = []
#: Held while files are opened or removed.
_files_lock = threading.Lock()


def _renew_lock() -> None:
    """In a child of fork(2), whose parent may have held the lock."""
    global _files_lock
    _files_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)

#: What the names of all files begin with.
_PREFIX = "rdmacm-ports-"

#: Where the file may be. The first directory that can be written to is used, so that all processes find the same file.
_DIRECTORIES = ("/dev/shm", "/tmp")

#: Ports below this need CAP_NET_BIND_SERVICE (bit 10 of the capability sets).
_PRIVILEGED = 1024
_CAP_NET_BIND_SERVICE = 10

#: struct flock: type, whence, start, length, process id.
_FLOCK = struct.Struct("hhqqi4x")

#: Start and length of a byte range.
Range: TypeAlias = tuple[int, int]


def _locate(family: int, ip: bytes, scope_id: int) -> int:
    """The byte of an address within a half block."""
    if family == AF_INET:
        return int.from_bytes(ip, "big")
    digest = hashlib.blake2b(ip + scope_id.to_bytes(4, "big"), digest_size=5).digest()
    return int.from_bytes(digest, "big")


@dataclass(slots=True, eq=False)
class PortOwner:
    """An id that has a port number, or asks for one."""

    space: PortSpace
    #: 0 asks for a free port.
    port: int
    family: int
    #: The address, packed.
    ip: bytes
    #: The interface index of a link-local address, else 0.
    scope_id: int
    #: Whether the address is a wildcard.
    is_any: bool
    reuseaddr: bool
    afonly: bool

    def ranges(self) -> list[Range]:
        """The byte ranges that this owner locks."""
        first = _SPACES[self.space] * _SPACE + self.port * _BLOCK
        if self.is_any and not self.afonly:
            return [(first + index * _FAMILY, _BLOCK) for index in range(len(_FAMILIES))]
        own = first + _FAMILIES.index(self.family) * _FAMILY
        if self.is_any:
            return [(own, _BLOCK)]
        byte = _locate(self.family, self.ip, self.scope_id)
        ranges = [(own + byte, 1)]
        if not self.afonly:
            for index, family in enumerate(_FAMILIES):
                if family != self.family:
                    ranges.append((first + index * _FAMILY + _HALF + byte, 1))
        return ranges

    def conflict(self, other: PortOwner) -> int:
        """The errno of the conflict with another owner of the same port; 0 if there is none."""
        if self.reuseaddr and other.reuseaddr:
            return 0
        if self.afonly and other.afonly and self.family != other.family:
            return 0
        if self.is_any or other.is_any:
            return errno.EADDRNOTAVAIL
        same = self.family == other.family and self.ip == other.ip and self.scope_id == other.scope_id
        return errno.EADDRINUSE if same else 0


class _DeniedError(Exception):
    """Another user keeps this one from using the file."""


def may_bind_privileged() -> bool:
    """Whether the process has CAP_NET_BIND_SERVICE."""
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("CapEff:"):
                    return bool(int(line.split()[1], 16) >> _CAP_NET_BIND_SERVICE & 1)
    except (OSError, ValueError):
        pass
    return os.geteuid() == 0


#: The directories where this process has looked for abandoned files.
_cleaned: set[str] = set()


def _remove_abandoned(directory: str) -> None:
    """Remove the files that have no members: their last processes were killed. Once in a process."""
    if directory in _cleaned:
        return
    _cleaned.add(directory)
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if not name.startswith(_PREFIX) or path in _open_paths:
            continue
        with suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _MEMBERS)
                    os.unlink(path)
            finally:
                os.close(fd)


#: Linux's range of free ports, both ends included.
EPHEMERAL = (32768, 60999)


class PortTable:
    """The ports of one network namespace. Used with the runtime's lock held.

    ``namespace`` names the file. ``ephemeral`` is the range of free ports, both ends included; ``read_range`` reads
    what it is now, each time that another part of it is drawn. ``directory`` replaces the usual directories, for tests.
    """

    def __init__(
        self,
        namespace: str,
        ephemeral: tuple[int, ...] = EPHEMERAL,
        directory: str | None = None,
        read_range: Callable[[], tuple[int, ...]] | None = None,
    ) -> None:
        #: The name of the file that all users share, and of the one in use, which differs if another user denies it.
        self._shared = self._name = _PREFIX + ("".join(c for c in namespace if c.isalnum()) or "host")
        #: The directories to try.
        self._directories = (directory,) if directory else _DIRECTORIES
        #: The directory in use; None before the file is needed, or if none can be written to.
        self._directory: str | None = None
        #: The range of free ports, both ends included.
        self._ephemeral = ephemeral
        self._read_range = read_range
        #: The owners in this process, by port space and port number.
        self._owners: dict[tuple[PortSpace, int], list[PortOwner]] = {}
        #: The next free port to try, as an offset in the range, and how many ports are left of the run.
        self._next = self._run = 0
        #: The open file; -1 while it is not needed.
        self._fd = -1

    @property
    def path(self) -> str | None:
        """The path of the file; None before it is needed, or if no directory can be written to."""
        return None if self._directory is None else os.path.join(self._directory, self._name)

    def _file(self) -> int:
        if self._fd >= 0:
            return self._fd
        check_main_interpreter("bind_addr")
        self._directory = next((d for d in self._directories if os.access(d, os.W_OK | os.X_OK)), None)
        if self._directory is None:
            return self._private()
        shared = self._shared
        for name in (shared, f"{shared}-{os.geteuid()}"):
            self._name = name
            try:
                with _files_lock:
                    self._fd = self._join(is_shared=name == shared)
                    _open_paths.append(str(self.path))
                    _remove_abandoned(self._directory)
                return self._fd
            except _DeniedError:
                continue
            except OSError as error:
                raise cm_error(
                    error.errno or errno.EIO,
                    f"the port table {self.path} cannot be opened ({error.strerror})",
                    "bind_addr",
                    hint="remove the file if no process uses it",
                ) from error
            finally:
                if self._fd < 0:
                    self._name = shared
        self._directory = None
        return self._private()

    def _join(self, *, is_shared: bool) -> int:
        """Open the file and become a member. _DeniedError if another user keeps this one from doing so."""
        try:
            for _ in range(_OPEN_TRIES):
                if (fd := self._open(is_shared)) >= 0:
                    return fd
                os.sched_yield()
            raise OSError(errno.EBUSY, "another process keeps it locked")
        except OSError as error:
            if error.errno in _NO_ROOM or self._is_denied(error.errno == errno.EBUSY):
                raise _DeniedError from error
            raise

    def _is_denied(self, is_locked: bool) -> bool:
        """Whether the file is another user's, or with ``is_locked`` locked by another user's process."""
        try:
            if not is_locked:
                return os.lstat(str(self.path)).st_uid != os.geteuid()
            fd = os.open(str(self.path), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _MEMBERS, 1, 0)
                pid = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, request))[4]
            finally:
                os.close(fd)
            return os.stat(f"/proc/{pid}").st_uid != os.geteuid()
        except (OSError, struct.error):
            return False

    def _private(self) -> int:
        """A file of this process alone."""
        import logging
        import tempfile

        where = ", ".join(self._directories)
        logging.getLogger("rdmacm").warning(
            "no file in any of %s can be used: port numbers are not shared with other processes", where
        )
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create(self._name)
        else:
            with tempfile.TemporaryFile() as file:
                self._fd = os.dup(file.fileno())
        return self._fd

    def _open(self, is_shared: bool) -> int:
        """Open the file and become a member; -1 if its last member is removing it at this moment."""
        flags, path = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, str(self.path)
        try:
            # First without O_CREAT, with which the kernel refuses to open another user's file in a sticky directory.
            fd = os.open(path, flags)
        except FileNotFoundError:
            try:
                fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                return -1
            # Regardless of the umask: all users share the ports of the namespace, unless one denies it to another.
            os.fchmod(fd, 0o666 if is_shared else 0o600)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            if not is_shared and found.st_uid != os.geteuid():
                raise PermissionError(errno.EACCES, "the file is another user's")
            fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _MEMBERS)
            if os.fstat(fd).st_nlink:
                return fd
        except BlockingIOError:
            pass
        except OSError:
            os.close(fd)
            raise
        os.close(fd)
        return -1

    # -- binding --------------------------------------------------------------------------------------

    def bind(self, owner: PortOwner) -> None:
        """Take ``owner.port``; if it is 0, take a free port and set it.

        EACCES for a privileged port. EADDRINUSE or, as in the kernel if a wildcard is involved, EADDRNOTAVAIL for a
        conflict; EADDRNOTAVAIL if no port is free.
        """
        if owner.port:
            if owner.port < _PRIVILEGED and not may_bind_privileged():
                hint = f"a port of {_PRIVILEGED} or above, or CAP_NET_BIND_SERVICE (rdmacm doctor A9)"
                raise cm_error(errno.EACCES, f"port {owner.port} is privileged", "bind_addr", hint=hint)
            self._bind_port(owner)
            return
        if self._run <= 0:
            if self._read_range is not None:
                self._ephemeral = self._read_range()
            low, high = self._ephemeral
            self._next, self._run = secrets.randbelow(high - low + 1), _RUN
        low, high = self._ephemeral
        count = high - low + 1
        for step in range(count):
            place = (self._next + step) % count
            port = low + place
            if (owner.space, port) in self._owners:
                continue
            owner.port = port
            if self._lock(owner) is None:
                self._owners[owner.space, port] = [owner]
                self._next, self._run = place + 1, self._run - 1
                return
        owner.port = 0
        raise cm_error(
            errno.EADDRNOTAVAIL,
            f"no port in {low}..{high} is free",
            "bind_addr",
            hint="destroy ids that are not needed, or widen net.ipv4.ip_local_port_range (rdmacm doctor A5)",
        )

    def _bind_port(self, owner: PortOwner) -> None:
        self._check_here(owner, owner, "bind_addr")
        blocked = self._lock(owner)
        if blocked is not None:
            raise self._refusal_elsewhere(owner, blocked, "bind_addr")
        self._owners.setdefault((owner.space, owner.port), []).append(owner)

    def _check_here(self, owner: PortOwner, wanted: PortOwner, step: str) -> None:
        """Raise an error if ``owner`` as ``wanted`` would conflict with another id of this process."""
        for other in self._owners.get((owner.space, owner.port), ()):
            if other is not owner and (code := wanted.conflict(other)):
                raise self._refusal(code, owner, "another id of this process", step)

    def _refusal_elsewhere(self, owner: PortOwner, blocked: Range, step: str) -> OSError:
        code, pid = self._find_holder(owner, blocked)
        return self._refusal(code, owner, process_text(pid) if pid > 0 else "another process", step)

    @staticmethod
    def _refusal(code: int, owner: PortOwner, holder: str, step: str) -> OSError:
        sharing = ", or REUSEADDR on every id that shares it" if owner.reuseaddr and step == "bind_addr" else ""
        return cm_error(
            code,
            f"port {owner.port} is in use by {holder} (port space {owner.space.name})",
            step,
            hint=f"ending what uses it, or another port (0 takes a free one){sharing}",
        )

    def _lock(self, owner: PortOwner, *, is_held: bool = False) -> Range | None:
        """Lock an owner's ranges. Returns the first range that another process has locked; None on success.

        On failure, the ranges are unlocked again, unless the owner had them locked before (``is_held``).
        """
        fd = self._fd if self._fd >= 0 else self._file()
        kind = (fcntl.LOCK_SH if owner.reuseaddr else fcntl.LOCK_EX) | fcntl.LOCK_NB
        ranges = owner.ranges()
        for count, (start, length) in enumerate(ranges):
            try:
                fcntl.lockf(fd, kind, length, start)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                if not is_held:
                    self._unlock(ranges[:count], owner)
                return start, length
        return None

    def _unlock(self, ranges: list[Range], owner: PortOwner) -> None:
        """Unlock ranges, except for the parts that other owners in this process have (they all set REUSEADDR)."""
        if self._fd < 0:
            return
        others = self._owners.get((owner.space, owner.port))
        if not others:
            for start, length in ranges:
                fcntl.lockf(self._fd, fcntl.LOCK_UN, length, start)
            return
        kept = sorted((b, b + size) for other in others if other is not owner for b, size in other.ranges())
        for start, length in ranges:
            end = start + length
            for low, high in [*kept, (end, end)]:
                if start < low:
                    fcntl.lockf(self._fd, fcntl.LOCK_UN, min(low, end) - start, start)
                start = max(start, high)
                if start >= end:
                    break

    def _find_holder(self, owner: PortOwner, blocked: Range) -> tuple[int, int]:
        """The errno for a range that could not be locked, and the id of the process that has it (0: unknown)."""
        wildcard_code = errno.EADDRNOTAVAIL
        try:
            request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, *blocked, 0)
            answer = fcntl.fcntl(self._file(), fcntl.F_GETLK, request)
            kind, _, _, length, pid = _FLOCK.unpack(answer)
        except (OSError, struct.error):
            return wildcard_code, 0
        if kind == fcntl.F_UNLCK:
            return wildcard_code, 0
        # The kernel may have joined locks of adjoining addresses, but never as many as the bytes of a wildcard.
        return errno.EADDRINUSE if 0 < length < _HALF and not owner.is_any else wildcard_code, pid

    # -- changing and releasing -----------------------------------------------------------------------

    def share(self, owner: PortOwner) -> None:
        """Share the port with other owners that set REUSEADDR."""
        owner.reuseaddr = True
        self._lock(owner)  # from exclusive to shared: cannot fail

    def claim(self, owner: PortOwner) -> None:
        """End the sharing, before the owner listens; the errors of :meth:`bind`, and no change, if others share."""
        self._check_here(owner, replace(owner, reuseaddr=False), "listen")
        owner.reuseaddr = False
        blocked = self._lock(owner, is_held=True)
        if blocked is not None:
            refusal = self._refusal_elsewhere(owner, blocked, "listen")
            self.share(owner)
            raise refusal

    def set_afonly(self, owner: PortOwner, afonly: bool) -> None:
        """Change AFONLY of an owner that has a port; the errors of :meth:`bind`, and no change, on a conflict."""
        changed = replace(owner, afonly=afonly)
        owners = self._owners[owner.space, owner.port]
        owners.remove(owner)
        try:
            self._bind_port(changed)
        except OSError:
            self._lock(owner)  # the failed attempt has unlocked ranges of the owner
            owners.append(owner)
            self._owners[owner.space, owner.port] = owners
            raise
        before = owner.ranges()
        owner.afonly = afonly
        current = self._owners[owner.space, owner.port]
        current[current.index(changed)] = owner
        # On behalf of another owner, so that the ranges that this one still needs stay locked.
        self._unlock(before, changed)

    def release(self, owner: PortOwner) -> None:
        """Give a port up; the ranges of other owners in this process stay locked."""
        key = (owner.space, owner.port)
        owners = self._owners.get(key)
        if owners is None or owner not in owners:
            return
        owners.remove(owner)
        if not owners:
            del self._owners[key]
        self._unlock(owner.ranges(), owner)

    def close(self) -> None:
        """Drop all owners; the kernel drops the locks with the descriptor. The last member removes the file."""
        self._owners.clear()
        if self._fd < 0:
            return
        with _files_lock:
            if self.path is not None:
                with suppress(OSError):  # there are other members, or another user owns the file
                    fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _MEMBERS)
                    os.unlink(self.path)
                _open_paths.remove(self.path)
            os.close(self._fd)
        self._fd = -1

    def abandon(self) -> None:
        """In a child of fork(2): the record locks belong to the parent."""
        self._owners.clear()
        if self._fd >= 0:
            if self.path is not None:
                _open_paths.remove(self.path)
            os.close(self._fd)
            self._fd = -1
