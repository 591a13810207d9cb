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

_DEFAULT: Final[Any] = object()


def create_connection(
    address: tuple[str | None, int],
    timeout: float | None = _DEFAULT,
    source_address: SockAddr | None = None,
    *,
    provider: str | Provider | None = None,
) -> socket:
    """Connect to the first address of a host that answers, and return the socket, with ``timeout`` as its timeout.

    ``timeout`` is in seconds, for each address; without it :func:`socket.getdefaulttimeout` counts. ``source_address``:
    the address to bind to. If no address answers, the last error is raised.
    """
    host, port = address
    last: OSError | None = None
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
            last = error
            new.close()
        except BaseException:
            new.close()
            raise
        else:
            return new
    raise last or cm_error(errno.ENOENT, "the host has no address", "create_connection", f"{host}:{port}")


def create_server(
    address: SockAddr,
    *,
    family: int = _socket.AF_INET,
    backlog: int = 128,
    dualstack_ipv6: bool = False,
    provider: str | Provider | None = None,
) -> socket:
    """A socket that is bound to an address and listens. ``dualstack_ipv6``: an IPv6 socket that takes IPv4 as well."""
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
    """How often a peer has broken the protocol, by the name of the fault. Each has ended its connection."""
    return dict(faults)
