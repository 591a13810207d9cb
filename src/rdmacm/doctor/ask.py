"""Ask the network about a destination, or bind a port: the part of an examination that sends packets."""

from __future__ import annotations

import errno

from rdmacm.address import parse_address
from rdmacm.addrinfo import getaddrinfo
from rdmacm.constants import RaiFlag
from rdmacm.diagnosis.explain import explain
from rdmacm.doctor.view import Attempt, Target, packed
from rdmacm.endpoint import connect, listen
from rdmacm.errors import CmRejectedError, GaiError, RdmaError

#: Milliseconds for the next hop, and for the peer's answer.
TIMEOUT_MS = 2000


def ask(
    node: str, source: str = "", port: int = 0, provider: str | None = None, timeout_ms: int = TIMEOUT_MS
) -> Target:
    """Resolve a destination and, with a port, connect to it; without a destination, bind the port here.

    A connection that is accepted is closed at once. No error is raised for what fails: it is in the target.
    """
    if not node:
        return Target("", source, port, attempt=_bind(source, port, provider) if port else None)
    is_name = not packed(node)
    service = str(port) if port else None
    addresses = _addresses(node, service, provider)
    hints = {"src_addr": (source, 0)} if source and packed(source) else {}
    explanation = explain(node, service, timeout_ms=timeout_ms, provider=provider, **hints)  # type: ignore[arg-type]
    attempt = _connect(node, source, port, provider, timeout_ms) if port and explanation.ok else None
    return Target(node, source, port, addresses, is_name, explanation, attempt)


def _addresses(node: str, service: str | None, provider: str | None) -> tuple[bytes, ...]:
    """The addresses of a node, packed, in order."""
    try:
        found = getaddrinfo(node, service, flags=RaiFlag.NOROUTE, provider=provider)
    except RdmaError:
        ip = packed(node)
        return (ip,) if ip else ()
    ips = [getattr(parse_address(each.dst_addr), "ip", b"") for each in found if each.dst_addr is not None]
    return tuple(dict.fromkeys(ip for ip in ips if ip))


def _failed(error: RdmaError) -> Attempt:
    reason = error.reason if isinstance(error, CmRejectedError) else 0
    code = errno.EINVAL if isinstance(error, GaiError) else error.errno or 0
    return Attempt(False, error.step, code, reason, str(error.strerror))


def _bind(source: str, port: int, provider: str | None) -> Attempt:
    """Listen on a port of this host, and free it."""
    try:
        listen((source, port), provider=provider).close()
    except RdmaError as error:
        return _failed(error)
    return Attempt(True)


def _connect(node: str, source: str, port: int, provider: str | None, timeout_ms: int) -> Attempt:
    """Connect to a port, and disconnect."""
    try:
        connect(
            (node, port), timeout=timeout_ms / 1000, source=(source, 0) if source else None, provider=provider
        ).close()
    except RdmaError as error:
        return _failed(error)
    return Attempt(True)
