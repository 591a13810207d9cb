"""What the host knows about its network: interfaces, addresses, routes, neighbours, and how they change.

:class:`Network` is the seam. :mod:`rdmacm.net.netlink` answers from Linux's rtnetlink,
:mod:`rdmacm.net.portable` answers what it can anywhere else, :mod:`rdmacm.testing` answers from a script.
"""

from __future__ import annotations

import os
import sys

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
    "namespace_key",
    "open_network",
]


def open_network() -> Network:
    """The network of the calling thread's namespace."""
    if sys.platform == "linux":
        from rdmacm.net.netlink import NetlinkNetwork

        try:
            return NetlinkNetwork()
        except OSError:  # netlink forbidden (some sandboxes): answer what can be answered without it
            pass
    from rdmacm.net.portable import PortableNetwork

    return PortableNetwork()


def namespace_key() -> str:
    """What tells the calling thread's network namespace from another: ``net:[INODE]``, or nothing."""
    try:
        return os.readlink("/proc/thread-self/ns/net")
    except OSError:
        return ""
