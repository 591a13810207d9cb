"""A scripted name server, and a process that has no other.

:class:`DnsServer` answers on 127.0.0.1:53 of a host from a script; :func:`resolve` runs a program text on that host
which asks only that server.

What getaddrinfo() of glibc 2.36 returns for each answer, with one server, one attempt and no search list:

==============================================  ================================================
the server says                                 the caller gets
==============================================  ================================================
records of the family asked for                 them
NXDOMAIN                                        EAI_NONAME
NOERROR without records                         EAI_NODATA
records of the other family only                EAI_NODATA; asked for AF_UNSPEC, those records
an alias without records of the family          EAI_NONAME
SERVFAIL, NOTIMP, REFUSED                       EAI_AGAIN
FORMERR, NOTAUTH, every other code              EAI_NONAME
nothing                                         EAI_AGAIN, after the timeout
(there is no server)                            EAI_AGAIN, at once
A records, but SERVFAIL for AAAA                EAI_AGAIN for AF_INET6; for AF_UNSPEC the A records
==============================================  ================================================

EAI_FAIL is in no row.  The resolver reports FORMERR and similar codes as unrecoverable, but getaddrinfo()
distinguishes only "try again" and "no data", and gives EAI_NONAME for the rest.  A test of EAI_FAIL has to
replace getaddrinfo().
"""

from __future__ import annotations

import contextlib
import enum
import heapq
import ipaddress
import itertools
import json
import platform
import select
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support import netns
from support.clock import REAL

__all__ = ["Answer", "DnsServer", "Rcode", "requirement", "resolve"]

_A, _CNAME, _AAAA = 1, 5, 28
_CLASS_IN = 1
_TYPES = {_A: "A", _CNAME: "CNAME", _AAAA: "AAAA"}
_TTL = 0
_HEADER = struct.Struct("!6H")
_QUESTION = struct.Struct("!HH")
_RECORD = struct.Struct("!HHIH")


class Rcode(enum.IntEnum):
    """The response code of an answer (RFC 1035 section 4.1.1, RFC 2136 section 2.2)."""

    NOERROR = 0
    FORMERR = 1
    SERVFAIL = 2
    NXDOMAIN = 3
    NOTIMP = 4
    REFUSED = 5
    NOTAUTH = 9


@dataclass(frozen=True)
class Answer:
    """The answer for a name.

    A name with ``a`` alone has no data for AAAA; the name of ``Answer()`` exists without any records.  ``cname``
    makes the name an alias, and the records those of the canonical name.  ``silent`` sends no answer; ``delay``
    is in seconds.
    """

    a: Sequence[str] = ()
    aaaa: Sequence[str] = ()
    cname: str | None = None
    rcode: Rcode = Rcode.NOERROR
    silent: bool = False
    delay: float = 0.0


def _encode_name(name: str) -> bytes:
    labels = [label.encode("ascii") for label in name.rstrip(".").split(".") if label]
    return b"".join(bytes([len(label)]) + label for label in labels) + b"\0"


def _record(owner: str, kind: int, data: bytes) -> bytes:
    return _encode_name(owner) + _RECORD.pack(kind, _CLASS_IN, _TTL, len(data)) + data


def _parse_question(query: bytes) -> tuple[str, int, bytes]:
    """The name in lower case, its type, and the bytes of the question section."""
    position, labels = _HEADER.size, []
    while length := query[position]:
        labels.append(query[position + 1 : position + 1 + length].decode("ascii"))
        position += 1 + length
    end = position + 1 + _QUESTION.size
    kind, _ = _QUESTION.unpack(query[position + 1 : end])
    return ".".join(labels).lower(), kind, query[_HEADER.size : end]


def _response(query: bytes, name: str, kind: int, question: bytes, answer: Answer) -> bytes:
    records, owner = [], name
    if answer.rcode is Rcode.NOERROR:
        if answer.cname is not None:
            records.append(_record(owner, _CNAME, _encode_name(answer.cname)))
            owner = answer.cname
        addresses = {_A: answer.a, _AAAA: answer.aaaa}.get(kind, ())
        records += [_record(owner, kind, ipaddress.ip_address(each).packed) for each in addresses]
    identity, flags, *_ = _HEADER.unpack_from(query)
    # QR and RA, with the question's RD.  Without RA (or AA), glibc takes an empty answer for one from a server
    # that does not know the zone, and asks the next.
    flags = 0x8080 | (flags & 0x0100) | answer.rcode
    return _HEADER.pack(identity, flags, 1, len(records), 0, 0) + question + b"".join(records)


class DnsServer:
    """Answers UDP questions on 127.0.0.1:53 of a host until closed.

    The script's keys are names, or pairs of a name and ``"A"`` or ``"AAAA"``, which take precedence.  Other names
    do not exist (NXDOMAIN).  ``queries`` lists the (name, type) pairs asked for, as they arrived.
    """

    def __init__(self, host: netns.Host, script: Mapping[str | tuple[str, str], Answer]) -> None:
        self._script = dict(script)
        self.queries: list[tuple[str, str]] = []
        # Sockets stay in the namespace in which they were made, so the thread may be in another.
        self._socket = host.open_socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.bind(("127.0.0.1", 53))
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise
        self._wake, self._stop = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="dns", daemon=True)
        self._thread.start()

    def _lookup(self, name: str, kind: int) -> Answer:
        nobody = Answer(rcode=Rcode.NXDOMAIN)
        return self._script.get((name, _TYPES.get(kind, str(kind)))) or self._script.get(name, nobody)

    def _serve(self) -> None:
        order = itertools.count()
        due: list[tuple[float, int, bytes, Any]] = []  # pending answers: time, sequence number, datagram, client
        while True:
            wait = max(0.0, due[0][0] - REAL()) if due else None
            ready, _, _ = select.select([self._socket, self._wake], [], [], wait)
            if self._wake in ready:
                return
            if self._socket in ready:
                try:
                    query, client = self._socket.recvfrom(4096)
                    name, kind, question = _parse_question(query)
                except (OSError, IndexError, UnicodeDecodeError, struct.error):
                    continue  # a client that left (its ICMP error arrives here), or not a question
                self.queries.append((name, _TYPES.get(kind, str(kind))))
                answer = self._lookup(name, kind)
                if not answer.silent:
                    response = _response(query, name, kind, question, answer)
                    heapq.heappush(due, (REAL() + answer.delay, next(order), response, client))
            while due and due[0][0] <= REAL():
                _, _, response, client = heapq.heappop(due)
                with contextlib.suppress(OSError):  # the client left
                    self._socket.sendto(response, client)

    def close(self) -> None:
        """Stop answering."""
        if self._thread.is_alive():
            self._stop.send(b"\0")
            self._thread.join()
        for each in (self._socket, self._wake, self._stop):
            each.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def requirement() -> str | None:
    """Why :func:`resolve` cannot be used here, or None where it can."""
    if (reason := netns.requirement()) is not None:
        return reason
    for program in ("unshare", "mount"):
        if shutil.which(program) is None:
            return f"a private resolver configuration needs {program}"
    for path in _CONFIGURATION:
        if not Path(path).exists():
            return f"a private resolver configuration needs a {path} to cover"
    if platform.libc_ver()[0] != "glibc":
        return "resolver results differ without glibc"
    return None


_CONFIGURATION = {
    "/etc/resolv.conf": "nameserver 127.0.0.1\noptions {options}\n",
    "/etc/nsswitch.conf": "hosts: files dns\n",
}

# $1 is a directory with files named as in /etc; the rest is the command.  A running nscd would answer from
# outside the namespace, so its socket is covered too.
_COVER = """
set -e
for file in resolv.conf nsswitch.conf; do mount --bind "$1/$file" "/etc/$file"; done
if [ -d /run/nscd ]; then mount -t tmpfs none /run/nscd; fi
shift
exec "$@"
"""


def resolve(
    host: netns.Host,
    code: str,
    *args: str,
    options: str = "timeout:1 attempts:1",
    timeout: float = 30.0,
    env: Mapping[str, str] | None = None,
) -> Any:
    """Run a program text on a host, in a mount namespace whose only resolver is 127.0.0.1.

    The program has ``args`` in ``sys.argv[1:]`` and prints JSON, which is returned parsed.  Nothing outside
    the process sees the configuration.  ``options`` are those of resolv.conf(5).
    """
    environment = netns.python_environment(env)
    for variable in ("RES_OPTIONS", "LOCALDOMAIN", "HOSTALIASES"):  # which overrule resolv.conf
        environment.pop(variable, None)
    with tempfile.TemporaryDirectory(prefix=netns.PREFIX) as directory:
        for path, text in _CONFIGURATION.items():
            Path(directory, Path(path).name).write_text(text.format(options=options))
        cover = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _COVER, "sh", directory]
        program = host.python_argv(["-c", code, *args])
        done = host.run([*cover, *program], env=environment, timeout=timeout)
    return json.loads(done.stdout)
