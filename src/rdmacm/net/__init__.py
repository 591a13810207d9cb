"""The host's network: interfaces, addresses, routes, neighbours, and notifications of changes.

:class:`Network` is the interface. :mod:`rdmacm.net.netlink` implements it with Linux's rtnetlink,
:mod:`rdmacm.net.portable` as far as plain sockets allow, and :mod:`rdmacm.testing` from a script.
"""

from __future__ import annotations

import sys

from rdmacm.net.boot import boot_key, namespace_key
from rdmacm.net.types import (
    Change,
    Interface,
    InterfaceAddress,
    InterfaceFlag,
    Neighbour,
    NeighbourState,
    Network,
    RouteEntry,
)

__all__ = [
    "Change",
    "Interface",
    "InterfaceAddress",
    "InterfaceFlag",
    "Neighbour",
    "NeighbourState",
    "Network",
    "RouteEntry",
    "boot_key",
    "namespace_key",
    "open_network",
]


def open_network() -> Network:
    """The network of the calling thread's namespace."""
    if sys.platform == "linux":
        from rdmacm.net.netlink import NetlinkNetwork

        try:
            return NetlinkNetwork()
        except OSError:  # some sandboxes forbid netlink
            pass
    from rdmacm.net.portable import PortableNetwork

    return PortableNetwork()
