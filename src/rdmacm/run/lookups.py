"""rdma_getaddrinfo(3) for programs: a lookup may ask a name server, so each has a thread."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple

from rdmacm.address import SockAddr, format_address, parse_address
from rdmacm.addrinfo import getaddrinfo
from rdmacm.addrinfo.info import AddrInfo, sockaddr
from rdmacm.constants import EAI
from rdmacm.errors import cm_error
from rdmacm.run import protocol
from rdmacm.run.packing import address_of, pack_list
from rdmacm.soft.provider import SoftProvider

#: Lookups at a time, of all programs.
_MOST_THREADS = 64


class Outcome(NamedTuple):
    """What a lookup has found."""

    #: 0, an errno, or a code of getaddrinfo(3).
    error: int
    #: The body of the reply.
    results: bytes
    #: Both in words.
    text: str


class Lookups:
    """The lookups in progress. ``call`` makes a call in the server's thread."""

    def __init__(self, provider: SoftProvider, call: Callable[[Callable[[], None]], None]) -> None:
        self._provider = provider
        self._call = call
        self._count = 0

    def start(self, body: bytes, done: Callable[[Outcome], None]) -> None:
        """Begin a lookup; ``done`` gets the outcome later. EINVAL for a body that is no request.

        EAGAIN: too many are in progress.
        """
        node, service, hints = unpack_request(body)
        if self._count >= _MOST_THREADS:
            raise cm_error(errno.EAGAIN, f"{_MOST_THREADS} lookups are in progress", "getaddrinfo")

        def finish(outcome: Outcome) -> None:
            self._count -= 1
            done(outcome)

        def run() -> None:
            outcome = self._look(node, service, hints)
            self._call(lambda: finish(outcome))

        self._count += 1
        # A thread that waits for a name server must not keep the process from ending.
        threading.Thread(target=run, name="rdmacm-getaddrinfo", daemon=True).start()

    def _look(self, node: str | None, service: str | None, hints: AddrInfo | None) -> Outcome:
        try:
            found = getaddrinfo(node, service, hints, provider=self._provider)
            text = ", ".join(format_address(info.dst_addr or info.src_addr) for info in found)
            return Outcome(0, pack_results(found), f"{node or ''}:{service or ''} is {text}")
        except socket.gaierror as error:
            return Outcome(error.errno or int(EAI.FAIL), b"", str(error))
        except OSError as error:
            return Outcome(error.errno or errno.EIO, b"", str(error))
        except (ValueError, TypeError) as error:
            return Outcome(errno.EINVAL, b"", str(error))


def unpack_request(body: bytes) -> tuple[str | None, str | None, AddrInfo | None]:
    """Node, service and hints of ``struct run_addrinfo``, which two strings follow; EINVAL if it is none."""
    texts = body[protocol.ADDRINFO.size :].split(b"\0")
    if len(body) < protocol.ADDRINFO.size or len(texts) != 3 or texts[2]:
        raise cm_error(errno.EINVAL, "the request is not complete", "getaddrinfo")
    node, service = (text.decode("utf-8", "surrogateescape") or None for text in texts[:2])
    has_hints, flags, family, qp_type, space, source_size, size, source, destination = protocol.ADDRINFO.unpack_from(
        body
    )
    if not has_hints:
        return node, service, None
    hints = AddrInfo(
        flags,
        family,
        qp_type,
        space,
        _given_address(source, source_size),
        _given_address(destination, size),
    )
    return node, service, hints


def _given_address(data: bytes, size: int) -> SockAddr | None:
    return sockaddr(address_of(data)) if size else None


def pack_results(found: list[AddrInfo]) -> bytes:
    """``struct run_addrinfos`` and the results, as many as there is room for."""
    return pack_list(protocol.ADDRINFOS, map(_pack_result, found))


def _pack_result(info: AddrInfo) -> bytes:
    parts = [
        *(b"" if each is None else parse_address(each).pack() for each in (info.src_addr, info.dst_addr)),
        *(b"" if each is None else each.encode() + b"\0" for each in (info.src_canonname, info.dst_canonname)),
        b"".join(path.pack() for path in info.route),
        info.connect,
    ]
    head = protocol.RESULT.pack(info.flags, info.family, info.qp_type, info.port_space, *map(len, parts))
    return head + b"".join(part + bytes(-len(part) % 8) for part in parts)
