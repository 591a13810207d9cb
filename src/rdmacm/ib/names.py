"""The names of InfiniBand ports, as in the environment variable RDMACM_IB:

``ibsim:NODE`` or ``ibsim:NODE@BASE``
    the first port of a node that ibsim(1) simulates; BASE is ibsim's IBSIM_SOCKNAME, by default that of this process
``umad:DEVICE/PORT`` or ``umad:DEVICE``
    a port of a real device, by default the first
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from string import ascii_letters, digits
from typing import TYPE_CHECKING

from rdmacm.errors import cm_error

if TYPE_CHECKING:
    from rdmacm.ib.transport import MadTransport

#: The environment variable with the names of the InfiniBand ports to use, separated by commas.
ENVIRONMENT_VARIABLE = "RDMACM_IB"

_DEVICE_LETTERS = set(ascii_letters + digits + "_-.")


def transport_of(name: str) -> MadTransport:
    """The port with a name, not opened; RdmaError EINVAL for an invalid name."""
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
    raise cm_error(
        errno.EINVAL,
        "not the name of an InfiniBand port",
        "open_device",
        repr(name),
        f"a name such as umad:mlx5_0/1 or ibsim:HostA; {ENVIRONMENT_VARIABLE} takes several, separated by commas",
    )


def port_names_in(environ: Mapping[str, str]) -> list[str]:
    """The port names in ``RDMACM_IB``, each once; RdmaError EINVAL for an invalid name."""
    words = [word.strip() for word in environ.get(ENVIRONMENT_VARIABLE, "").split(",")]
    names = list(dict.fromkeys(word for word in words if word))
    for name in names:
        transport_of(name)  # refuses an invalid name
    return names


def _is_device(name: str) -> bool:
    # The name becomes part of a file name in sysfs.
    return bool(name) and not name.startswith(".") and set(name) <= _DEVICE_LETTERS
