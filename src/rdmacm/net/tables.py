"""The whole tables of Linux's routing, as ``ip route`` and ``ip rule`` list them."""

from __future__ import annotations

import socket
from typing import NamedTuple

from rdmacm.net.netlink import (
    _GETROUTE,
    _INT,
    _NEWROUTE,
    _NEWRULE,
    _ROUTE_KINDS,
    _RTA_DST,
    _RTA_GATEWAY,
    _RTA_OIF,
    _RTA_PREFSRC,
    _RTA_TABLE,
    _RTMSG,
    _UINT,
    NetlinkNetwork,
    _attributes,
    _ip,
)

_GETRULE = 34
_FRA_PRIORITY = 6
#: The tables that every host has: local, main and default.
STANDARD_TABLES = frozenset((253, 254, 255))


class Route(NamedTuple):
    """A line of a routing table. ``destination`` is text, ``default`` or ``10.0.0.0/8``; the others are packed."""

    family: int
    kind: str
    destination: str
    ifindex: int
    gateway: bytes | None
    source: bytes | None
    table: int


class RoutingRule(NamedTuple):
    """A rule that chooses a table, ip-rule(8)."""

    family: int
    priority: int
    table: int


class Tables(NetlinkNetwork):
    """The tables of the network namespace in which it is opened."""

    def routes(self, most: int = 1000) -> list[Route]:
        """Routes but those of the local table, and no more than ``most``: a router has a million.

        The socket is of no use any more if there are more.
        """
        found: list[Route] = []
        for kind, body in self._dump(_GETROUTE, _RTMSG.pack(0, 0, 0, 0, 0, 0, 0, 0, 0)):
            if kind == _NEWROUTE and len(body) >= _RTMSG.size:
                route = _route(body)
                if route.table != 255 and route.kind not in ("multicast", "broadcast", "anycast"):
                    found.append(route)
            if len(found) >= most:
                break
        return found

    def rules(self) -> list[RoutingRule]:
        """Every rule of both families."""
        found = []
        for kind, body in self._dump(_GETRULE, _RTMSG.pack(0, 0, 0, 0, 0, 0, 0, 0, 0)):
            # Rules of multicast routing have families of their own.
            if kind == _NEWRULE and len(body) >= _RTMSG.size and body[0] in (socket.AF_INET, socket.AF_INET6):
                family, table, priority = body[0], body[4], 0
                for what, value in _attributes(body, _RTMSG.size):
                    if what == _RTA_TABLE and len(value) >= 4:
                        table = _UINT.unpack_from(value)[0]
                    elif what == _FRA_PRIORITY and len(value) >= 4:
                        priority = _UINT.unpack_from(value)[0]
                found.append(RoutingRule(family, priority, table))
        return found


def _route(body: memoryview) -> Route:
    family, bits, _, _, table, _, _, kind, _ = _RTMSG.unpack_from(body)
    ifindex, gateway, source, destination = 0, None, None, "default"
    for what, value in _attributes(body, _RTMSG.size):
        if what == _RTA_OIF and len(value) >= 4:
            ifindex = _INT.unpack_from(value)[0]
        elif what == _RTA_GATEWAY:
            gateway = _ip(value)
        elif what == _RTA_PREFSRC:
            source = _ip(value)
        elif what == _RTA_TABLE and len(value) >= 4:
            table = _UINT.unpack_from(value)[0]
        elif what == _RTA_DST and (ip := _ip(value)) is not None:
            destination = f"{socket.inet_ntop(family, ip)}/{bits}"
    return Route(family, _ROUTE_KINDS.get(kind, "unicast"), destination, ifindex, gateway, source, table)
