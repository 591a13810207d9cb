"""Sockets in one call, as the module :mod:`socket` has them."""

from __future__ import annotations

import errno
import socket as _socket
from typing import Any, Final

from rdmacm.address import SockAddr
from rdmacm.errors import cm_error
from rdmacm.provider import Provider
from rdmacm.rsocket.sockets import socket
from rdmacm.rsocket.stream import faults

#: What http.client and others pass if they were given no timeout.
_DEFAULT: Final[Any] = getattr(_socket, "_GLOBAL_DEFAULT_TIMEOUT", None) or object()


def create_connection(
    address: tuple[str | None, int],
    timeout: float | None = _DEFAULT,
    source_address: SockAddr | None = None,
    *,
    all_errors: bool = False,
    provider: str | Provider | None = None,
) -> socket:
    """Connect to the first address of a host that answers, and return the socket, with ``timeout`` as its timeout.

    ``timeout`` is in seconds, for each address; without it :func:`socket.getdefaulttimeout` counts. ``source_address``:
    the address to bind to. If no address answers, the last error is raised; with ``all_errors`` all of them, in an
    ExceptionGroup.
    """
    host, port = address
    errors: list[OSError] = []
    for family, _, _, _, found in _socket.getaddrinfo(host, port, 0, _socket.SOCK_STREAM):
        if family not in (_socket.AF_INET, _socket.AF_INET6):
            continue
        new = socket(family, provider=provider)
        try:
            if timeout is not _DEFAULT:
                new.settimeout(timeout)
            if source_address is not None:
                new.bind(source_address)
            new.connect((str(found[0]), *found[1:]))
        except OSError as error:
            errors.append(error)
            new.close()
        except BaseException:
            new.close()
            raise
        else:
            return new
    if not errors:
        raise cm_error(errno.ENOENT, "the host has no address", "create_connection", f"{host}:{port}")
    if all_errors:
        raise ExceptionGroup("create_connection failed", errors)
    raise errors[-1]


def create_server(
    address: SockAddr,
    *,
    family: int = _socket.AF_INET,
    backlog: int = 128,
    reuse_port: bool = False,
    dualstack_ipv6: bool = False,
    provider: str | Provider | None = None,
) -> socket:
    """A socket that is bound to an address and listens. ``dualstack_ipv6``: an IPv6 socket that takes IPv4 as well.

    ``reuse_port``: ValueError, as where the system does not have SO_REUSEPORT.
    """
    if reuse_port:
        raise ValueError("SO_REUSEPORT not supported on this platform")
    if dualstack_ipv6 and family != _socket.AF_INET6:
        raise ValueError("dualstack_ipv6 requires AF_INET6 family")
    new = socket(family, provider=provider)
    try:
        if family == _socket.AF_INET6:
            new.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, int(not dualstack_ipv6))
        new.bind(address)
        new.listen(backlog)
    except BaseException:
        new.close()
        raise
    return new


def query_faults() -> dict[str, int]:
    """How often a peer has broken the protocol, by the name of the fault. Each has ended its connection.

    NO_RSOCKET: a request for a connection was no rsocket's, or one of another version, and was rejected.
    """
    return dict(faults)
