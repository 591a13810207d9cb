"""The names of AF_UNIX sockets that the processes of a port group use among themselves.

Every user of the network namespace can see the names that are bound (``/proc/net/unix``), and can bind any name that is
free. So the names of a group are keyed hashes, and nobody outside the group can tell one before it is bound. A name
that was released is known, and another user may have bound it by the time it is needed again. Then the group abandons
it: a file that all its processes hold counts, for each *purpose*, how many names were abandoned, and the number is part
of what is hashed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache

from rdmacm.soft.wire.forwarding import bind_name

#: Names that a group may abandon, so that its file stays small.
MAX_ABANDONED = 8192

#: What the file has for each abandoned name, from the second on: a hash of its purpose.
_ENTRY_BYTES = 8
_NAME_BYTES = 16

# linux/sock_diag.h, linux/unix_diag.h: a dump of the UNIX sockets of the namespace, with their names and users.
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _DUMP = 4, 20, 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_SHOW_NAME, _SHOW_UID = 0x01, 0x40
_UNIX_DIAG_NAME, _UNIX_DIAG_UID = 0, 7
_NLMSGHDR, _REQUEST, _ATTRIBUTE, _UID = (struct.Struct(form) for form in ("=IHHII", "=BBHIII8s", "=HH", "=I"))
_UNIX_DIAG_MSG_BYTES = 16
_DUMP_BYTES = 1 << 16


class GroupNames:
    """The names of one group. ``key`` is its secret, ``fd`` its file, which is empty at first."""

    def __init__(self, port: int, key: bytes, fd: int) -> None:
        self._port = port
        self._key = key
        self._fd = fd
        #: The file's size when it was read last, and how many names were abandoned, by hash of the purpose.
        self._size = 0
        self._abandoned: Counter[bytes] = Counter()

    def slot(self, slot: int) -> str:
        """The name where the owner of a slot receives forwarded packets."""
        return self._name(b"slot %d" % slot)

    def service(self, service_id: int, local: bytes | None) -> str:
        """The name where the process that listens on a service id and address receives forwarded requests."""
        return self._name(_service(service_id, local))

    def regain_slot(self, slot: int, users: Mapping[str, int]) -> socket.socket:
        """Bind the name of a slot, or another one if a socket of another user has it; EADDRINUSE if one of ours has.

        ``users`` is :func:`users_of_names`. The caller holds the group's lock, here and in :meth:`regain_service`.
        """
        return self._regain(b"slot %d" % slot, users)

    def regain_service(self, service_id: int, local: bytes | None) -> socket.socket:
        """As :meth:`regain_slot`, for the name of a service id and address."""
        return self._regain(_service(service_id, local), users_of_names())

    def _name(self, purpose: bytes) -> str:
        size = os.fstat(self._fd).st_size
        if size != self._size:
            entries = os.pread(self._fd, size, _ENTRY_BYTES)
            places = range(0, len(entries), _ENTRY_BYTES)
            self._abandoned = Counter(entries[place : place + _ENTRY_BYTES] for place in places)
            self._size = size
        count = self._abandoned[self._entry(purpose)] if self._abandoned else 0
        digest = hashlib.blake2b(b"%d %s" % (count, purpose), key=self._key, digest_size=_NAME_BYTES)
        return f"rdmacm-{self._port}-{digest.hexdigest()}"

    def _entry(self, purpose: bytes) -> bytes:
        return hashlib.blake2b(purpose, key=self._key, digest_size=_ENTRY_BYTES).digest()

    def _regain(self, purpose: bytes, users: Mapping[str, int]) -> socket.socket:
        name = self._name(purpose)
        try:
            return bind_name(name)
        except OSError as error:
            is_foreign = users.get(name, os.geteuid()) != os.geteuid()
            if error.errno != errno.EADDRINUSE or not is_foreign or self._size > MAX_ABANDONED * _ENTRY_BYTES:
                raise
        os.pwrite(self._fd, self._entry(purpose), max(self._size, _ENTRY_BYTES))
        return bind_name(self._name(purpose))


@lru_cache(256)  # each request that is forwarded needs one of the same
def _service(service_id: int, local: bytes | None) -> bytes:
    return b"service %016x %s" % (service_id, b"any" if local is None else local.hex().encode())


def bound_names() -> set[str]:
    """The abstract AF_UNIX names that are bound in this thread's network namespace; empty without ``/proc``."""
    try:
        with open("/proc/thread-self/net/unix", encoding="utf-8", errors="backslashreplace") as file:
            return {name.rstrip() for line in file if (name := line.rpartition(" @")[2]) != line}
    except OSError:
        return set()


def users_of_names() -> dict[str, int]:
    """The user of each abstract AF_UNIX name that is bound in this thread's network namespace.

    Empty if the system does not report them (Linux before 5.3, or without unix_diag).
    """
    try:
        return dict(_dump())
    except (OSError, struct.error):
        return {}


def _dump() -> Iterator[tuple[str, int]]:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as sock:
        request = _REQUEST.pack(socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _SHOW_NAME | _SHOW_UID, b"\xff" * 8)
        sock.send(_NLMSGHDR.pack(_NLMSGHDR.size + len(request), _SOCK_DIAG_BY_FAMILY, _DUMP, 1, 0) + request)
        while True:
            data = sock.recv(_DUMP_BYTES)
            while data:
                length, kind, _, _, _ = _NLMSGHDR.unpack_from(data)
                if kind in (_NLMSG_ERROR, _NLMSG_DONE) or length < _NLMSGHDR.size:
                    return
                name, user = _parse(data[_NLMSGHDR.size + _UNIX_DIAG_MSG_BYTES : length])
                if name[:1] == b"\0" and user is not None:
                    yield name[1:].decode("utf-8", "backslashreplace"), user
                data = data[length + 3 & ~3 :]


def _parse(attributes: bytes) -> tuple[bytes, int | None]:
    """The name and the user of a socket."""
    name, user = b"", None
    while len(attributes) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(attributes)
        value = attributes[_ATTRIBUTE.size : length]
        if kind == _UNIX_DIAG_NAME:
            name = value
        elif kind == _UNIX_DIAG_UID:
            (user,) = _UID.unpack(value)
        attributes = attributes[max(length, _ATTRIBUTE.size) + 3 & ~3 :]
    return name, user
