"""InfiniBand ports: what they are and how management datagrams pass them.

A port is chosen by a name:

``ibsim:NODE`` or ``ibsim:NODE@BASE``
    the first port of a node that ibsim(1) simulates; BASE is its IBSIM_SOCKNAME, by default this process's
``umad:DEVICE/PORT`` or ``umad:DEVICE``
    a port of a real device, by default the first
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from string import ascii_letters, digits
from typing import TYPE_CHECKING

from rdmacm.errors import RdmaError, cm_error

if TYPE_CHECKING:
    from rdmacm.ib.transport import MadTransport

__all__ = ["ENVIRONMENT_VARIABLE", "open_transport", "ports_wanted", "transport_of"]

#: Names of the InfiniBand ports to use, with commas between them.
ENVIRONMENT_VARIABLE = "RDMACM_IB"

_DEVICE_LETTERS = set(ascii_letters + digits + "_-.")


def transport_of(name: str) -> MadTransport:
    """The port of that name, not open; RdmaError EINVAL where it is no name of a port."""
    kind, _, rest = name.partition(":")
    if kind == "ibsim":
        node, at, base = rest.partition("@")
        if node and (base or not at):
            from rdmacm.ib.ibsim import IbsimTransport

            return IbsimTransport(node, base or None)
    elif kind == "umad":
        device, slash, port = rest.partition("/")
        if _is_device(device) and (not slash or (port.isascii() and port.isdecimal() and 1 <= int(port) <= 254)):
            from rdmacm.ib.umad import UmadTransport

            return UmadTransport(device, int(port or 1))
    raise _no_name(name)


def open_transport(name: str) -> MadTransport:
    """The port of that name, open; RdmaError where it cannot be."""
    transport = transport_of(name)
    transport.open()
    return transport


def ports_wanted(environ: Mapping[str, str]) -> list[str]:
    """The names in ``RDMACM_IB``, each once; RdmaError EINVAL where one is no name of a port."""
    names = [name.strip() for name in environ.get(ENVIRONMENT_VARIABLE, "").split(",")]
    wanted = list(dict.fromkeys(name for name in names if name))
    for name in wanted:
        transport_of(name)
    return wanted


def _is_device(name: str) -> bool:
    # It becomes part of a path.
    return bool(name) and not name.startswith(".") and set(name) <= _DEVICE_LETTERS


def _no_name(name: str) -> RdmaError:
    return cm_error(
        errno.EINVAL,
        "this is no InfiniBand port",
        "open_device",
        repr(name),
        f"a name such as umad:mlx5_0/1 or ibsim:HostA; {ENVIRONMENT_VARIABLE} takes several, with commas between them",
    )
