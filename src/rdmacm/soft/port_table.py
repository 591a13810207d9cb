"""Port numbers of a network namespace, shared by every process in it.

The kernel keeps one table of ports per port space and network namespace (librdmacm's ids share it, sockets have
nothing to do with it), lets ids share a port under some conditions, and frees a port when its owner dies. Here the
table is a file nobody reads: a port is taken by locking byte ranges of it (fcntl(2) record locks, which the
kernel drops when a process ends, however it ends).

Who conflicts with whom, rdma_bind_addr(3) and rdma_set_option(3):

- two ids that both set REUSEADDR never do, until one of them listens;
- two ids of different families that are both AFONLY never do;
- otherwise a wildcard address conflicts with every address, and a specific one with itself.

As byte ranges: each (port space, family, port) has a block. The first half of a block (A) has a byte for each
address of the family; the second half (G) is the gate by which ids of other families meet the family's wildcard,
again with a byte for each of *their* addresses. An id locks, exclusively, or shared if it sets REUSEADDR,

- wildcard, not AFONLY: the port's block in every family;
- wildcard, AFONLY: the block in its family;
- specific, AFONLY: its byte of A in its family's block;
- specific, not AFONLY: that, and its byte of G in the blocks of the other families.

Two ranges overlap, one of them exclusive, exactly where the rules say conflict. IPv4 addresses map to bytes one to
one, longer ones by a hash of 40 bits. Blocks of neighbouring ports lie side by side, and free ports are handed out
in short runs, because the kernel keeps adjoining locks of a process as one and walks the list of all at each call.

A process never conflicts with its own locks, so within the process the rules are applied to a dictionary.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import stat
import struct
from dataclasses import dataclass, replace
from socket import AF_INET, AF_INET6

from rdmacm.address import AF_IB
from rdmacm.constants import PortSpace
from rdmacm.errors import cm_error

_FAMILIES = (AF_INET, AF_INET6, AF_IB)
_SPACES = {PortSpace.TCP: 0, PortSpace.UDP: 1, PortSpace.IPOIB: 2, PortSpace.IB: 3}

_HALF = 1 << 41
_BLOCK = 2 * _HALF
_FAMILY = _BLOCK << 16
_SPACE = len(_FAMILIES) * _FAMILY

#: How many ports in a row are handed out before jumping to another random place.
_RUN = 64

#: A byte every process that has the file open locks, shared: who can lock it alone is the last.
_MEMBERS = 1 << 62

#: The last member needs a moment to remove the file; who holds that byte longer means ill.
_OPEN_TRIES = 1000

#: Where the file may be: the first that can be written to, so that all processes find the same one.
_DIRECTORIES = ("/dev/shm", "/tmp")

#: Ports below this need CAP_NET_BIND_SERVICE (bit 10 of the capability sets).
_PRIVILEGED = 1024
_CAP_NET_BIND_SERVICE = 10

_FLOCK = struct.Struct("hhqqi4x")

Range = tuple[int, int]


def _locate(family: int, ip: bytes, scope_id: int) -> int:
    """The byte of an address within a half block."""
    if family == AF_INET:
        return int.from_bytes(ip, "big")
    digest = hashlib.blake2b(ip + scope_id.to_bytes(4, "big"), digest_size=5).digest()
    return int.from_bytes(digest, "big")


@dataclass(slots=True, eq=False)
class PortOwner:
    """One id's hold on a port."""

    space: PortSpace
    port: int
    family: int
    ip: bytes
    scope_id: int
    is_any: bool
    reuseaddr: bool
    afonly: bool

    def ranges(self) -> list[Range]:
        """(start, length) of what this owner locks."""
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
        """The errno of sharing the port with another owner, 0 where both can have it."""
        if self.reuseaddr and other.reuseaddr:
            return 0
        if self.afonly and other.afonly and self.family != other.family:
            return 0
        if self.is_any or other.is_any:
            return errno.EADDRNOTAVAIL
        same = self.family == other.family and self.ip == other.ip and self.scope_id == other.scope_id
        return errno.EADDRINUSE if same else 0


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


class PortTable:
    """The ports of one network namespace. Its owner serialises the calls.

    ``namespace`` names the file; ``directory`` is where it is, for tests. ``ephemeral`` is where free ports come from.
    """

    def __init__(
        self, namespace: str, ephemeral: tuple[int, int] = (32768, 60999), directory: str | None = None
    ) -> None:
        self._name = "rdmacm-ports-" + ("".join(c for c in namespace if c.isalnum()) or "host")
        self._directories = (directory,) if directory else _DIRECTORIES
        self._directory: str | None = None
        self._ephemeral = ephemeral
        self._owners: dict[tuple[PortSpace, int], list[PortOwner]] = {}
        self._next = self._run = 0
        self._fd = -1

    @property
    def path(self) -> str | None:
        """Where the file is; None before it is needed, and where no directory can be written to."""
        return None if self._directory is None else os.path.join(self._directory, self._name)

    def _file(self) -> int:
        if self._fd >= 0:
            return self._fd
        self._directory = next((d for d in self._directories if os.access(d, os.W_OK | os.X_OK)), None)
        if self._directory is None:
            return self._private()
        try:
            for _ in range(_OPEN_TRIES):
                if (fd := self._open()) >= 0:
                    break
                os.sched_yield()
            else:
                raise OSError(errno.EBUSY, "another process keeps it locked")
        except OSError as error:
            raise cm_error(
                error.errno or errno.EIO,
                f"the port table {self.path} cannot be opened ({error.strerror})",
                "bind_addr",
                hint="remove the file if nobody uses it",
            ) from error
        self._fd = fd
        return fd

    def _private(self) -> int:
        import logging
        import tempfile

        where = ", ".join(self._directories)
        logging.getLogger("rdmacm").warning("none of %s can be written to: other processes' ports are not seen", where)
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create(self._name)
        else:
            with tempfile.TemporaryFile() as file:
                self._fd = os.dup(file.fileno())
        return self._fd

    def _open(self) -> int:
        """Open the table and become a member; -1 where its last member is just removing it."""
        flags, path = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, str(self.path)
        try:
            # Not O_CREAT first: in a sticky directory the kernel refuses to "create" another user's file.
            fd = os.open(path, flags)
        except FileNotFoundError:
            try:
                fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                return -1
            os.fchmod(fd, 0o666)  # the namespace's ports are every user's, whatever the umask
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
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

    # -- taking ---------------------------------------------------------------------------------------

    def bind(self, owner: PortOwner) -> None:
        """Take ``owner.port``, or a free port (written to ``owner.port``) where that is 0.

        EACCES for a privileged port; EADDRINUSE or EADDRNOTAVAIL for a conflict, as the kernel tells them apart
        (the latter where a wildcard is involved, or no ephemeral port is left).
        """
        if owner.port:
            if owner.port < _PRIVILEGED and not may_bind_privileged():
                raise cm_error(
                    errno.EACCES,
                    f"port {owner.port} is privileged",
                    "bind_addr",
                    hint=f"a port of {_PRIVILEGED} or above, or CAP_NET_BIND_SERVICE",
                )
            self._bind_port(owner)
            return
        low, high = self._ephemeral
        count = high - low + 1
        if self._run <= 0:
            self._next, self._run = secrets.randbelow(count), _RUN
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
            hint="destroy ids that are not needed, or widen net.ipv4.ip_local_port_range",
        )

    def _bind_port(self, owner: PortOwner) -> None:
        self._check_here(owner, owner, "bind_addr")
        blocked = self._lock(owner)
        if blocked is not None:
            raise self._refusal_elsewhere(owner, blocked, "bind_addr")
        self._owners.setdefault((owner.space, owner.port), []).append(owner)

    def _check_here(self, owner: PortOwner, wish: PortOwner, step: str) -> None:
        """Raise where what an owner wishes for is not to be had beside this process's other ids."""
        for other in self._owners.get((owner.space, owner.port), ()):
            if other is not owner and (code := wish.conflict(other)):
                raise self._refusal(code, owner, "an id of this process", step)

    def _refusal_elsewhere(self, owner: PortOwner, blocked: Range, step: str) -> OSError:
        code, pid = self._who(owner, blocked)
        return self._refusal(code, owner, f"process {pid}" if pid > 0 else "another process", step)

    @staticmethod
    def _refusal(code: int, owner: PortOwner, holder: str, step: str) -> OSError:
        detail = "address and port are" if code == errno.EADDRINUSE else "the port is"
        return cm_error(
            code,
            f"{detail} taken by {holder} (port space {owner.space.name}, port {owner.port})",
            step,
            hint="another port, port 0 for a free one, or REUSEADDR on every id that shares it",
        )

    def _lock(self, owner: PortOwner, *, is_held: bool = False) -> Range | None:
        """Lock an owner's ranges; the range another process holds, or None when all are ours.

        On failure nothing new stays locked; of ranges that ``is_held`` says are locked already, none is unlocked.
        """
        fd = self._file()
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
        """Unlock ranges, but for the parts other owners of this process hold (both then set REUSEADDR)."""
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

    def _who(self, owner: PortOwner, blocked: Range) -> tuple[int, int]:
        """The errno for a range that could not be locked, and the process that holds it (0: unknown)."""
        wildcard_code = errno.EADDRNOTAVAIL
        try:
            request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, *blocked, 0)
            answer = fcntl.fcntl(self._file(), fcntl.F_GETLK, request)
            kind, _, _, length, pid = _FLOCK.unpack(answer)
        except (OSError, struct.error):
            return wildcard_code, 0
        if kind == fcntl.F_UNLCK:
            return wildcard_code, 0
        # Bytes of neighbouring addresses may have been joined into one lock, but are never as many as a wildcard's.
        return errno.EADDRINUSE if 0 < length < _HALF and not owner.is_any else wildcard_code, pid

    # -- changing and giving back ---------------------------------------------------------------------

    def share(self, owner: PortOwner) -> None:
        """Let other owners that set REUSEADDR have the port too."""
        owner.reuseaddr = True
        self._lock(owner)  # from exclusive to shared: cannot fail

    def claim(self, owner: PortOwner) -> None:
        """End the sharing, as who listens has to; the errors of :meth:`bind`, and no change, while others share."""
        self._check_here(owner, replace(owner, reuseaddr=False), "listen")
        owner.reuseaddr = False
        blocked = self._lock(owner, is_held=True)
        if blocked is not None:
            refusal = self._refusal_elsewhere(owner, blocked, "listen")
            self.share(owner)
            raise refusal

    def set_afonly(self, owner: PortOwner, afonly: bool) -> None:
        """Change AFONLY of a bound owner; the errors of :meth:`bind`, and no change, where that conflicts."""
        changed = replace(owner, afonly=afonly)
        owners = self._owners[owner.space, owner.port]
        owners.remove(owner)
        try:
            self._bind_port(changed)
        except OSError:
            self._lock(owner)  # what the attempt unlocked on its way out was ours
            owners.append(owner)
            self._owners[owner.space, owner.port] = owners
            raise
        before = owner.ranges()
        owner.afonly = afonly
        current = self._owners[owner.space, owner.port]
        current[current.index(changed)] = owner
        # As seen by a stranger, so that what the owner itself still needs is kept.
        self._unlock(before, changed)

    def release(self, owner: PortOwner) -> None:
        """Give a port back; what other owners of this process still hold stays held."""
        key = (owner.space, owner.port)
        owners = self._owners.get(key)
        if owners is None or owner not in owners:
            return
        owners.remove(owner)
        if not owners:
            del self._owners[key]
        self._unlock(owner.ranges(), owner)

    def close(self) -> None:
        """Forget everything; the kernel drops the locks with the descriptor. The last member removes the file."""
        self._owners.clear()
        if self._fd < 0:
            return
        if self.path is not None:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _MEMBERS)
                os.unlink(self.path)
            except OSError:
                pass  # others use it, or another user owns it
        os.close(self._fd)
        self._fd = -1

    def abandon(self) -> None:
        """In a child of fork(2): record locks stayed with the parent, and so does the file."""
        self._owners.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
