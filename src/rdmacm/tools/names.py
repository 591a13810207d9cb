"""Name lookups of the tools that use sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from rdmacm.addrinfo.checks import resolver_error
from rdmacm.errors import RdmaError


@contextmanager
def looking_up(node: str | None, port: int) -> Iterator[None]:
    """Raise the error of a lookup in the block as a GaiError, which says what to try."""
    try:
        yield
    except RdmaError:
        raise
    except socket.gaierror as error:
        raise resolver_error(error, node, str(port), 0) from error
