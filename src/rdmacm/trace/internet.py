"""IPv6's extension headers, and the ICMP errors that packets of connections have caused."""

from __future__ import annotations

from rdmacm.proto.constants import GSI_QPN, QPN_MASK, ROCE_PORT
from rdmacm.proto.roce.headers import BTH_STRUCT
from rdmacm.trace.connection import Connection, Pair, Unreachable, address_text, split
from rdmacm.trace.management import Managers
from rdmacm.trace.registry import Connections

_HOP_BY_HOP, _ROUTING, _FRAGMENT, _DESTINATION, _AUTHENTICATION = 0, 43, 44, 60, 51
_MOST_HEADERS = 8

#: Destination unreachable and "packet too big", by the version of IP.
_UNREACHABLE = {4: 3, 6: 1}
_TIME_EXCEEDED = {4: 11, 6: 3}
_TOO_BIG_V6 = 2
FRAGMENTATION_NEEDED = 4

#: Codes of "destination unreachable" (RFC 792, RFC 1812, RFC 4443).
CODES = {
    4: {
        0: "network unreachable",
        1: "host unreachable",
        2: "protocol unreachable",
        3: "port unreachable",
        4: "fragmentation needed",
        5: "source route failed",
        6: "network unknown",
        7: "host unknown",
        8: "source host isolated",
        9: "network administratively prohibited",
        10: "host administratively prohibited",
        11: "network unreachable for this type of service",
        12: "host unreachable for this type of service",
        13: "communication administratively prohibited",
        14: "host precedence violation",
        15: "precedence cutoff",
    },
    6: {
        0: "no route to the destination",
        1: "communication administratively prohibited",
        2: "beyond the scope of the source address",
        3: "address unreachable",
        4: "port unreachable",
        5: "source address failed the policy",
        6: "reject route to the destination",
    },
}


def extensions(data: bytes, protocol: int, at: int, end: int) -> tuple[int, int] | None:
    """The protocol behind IPv6's extension headers, and where it begins; None for a fragment, or no end of them."""
    for _ in range(_MOST_HEADERS):
        if protocol in (_HOP_BY_HOP, _ROUTING, _DESTINATION):
            if at + 8 > end:
                return None
            protocol, at = data[at], at + 8 * (data[at + 1] + 1)
        elif protocol == _AUTHENTICATION:
            if at + 8 > end:
                return None
            protocol, at = data[at], at + 4 * (data[at + 1] + 2)
        elif protocol == _FRAGMENT:
            # A whole packet may have the header, too.
            if at + 8 > end or data[at + 2] or data[at + 3]:
                return None
            protocol, at = data[at], at + 8
        else:
            return protocol, at
    return None


def is_too_big(found: Unreachable) -> bool:
    """Whether a packet was larger than the MTU of a link."""
    return found.type == _TOO_BIG_V6 if found.version == 6 else (found.type, found.code) == (3, FRAGMENTATION_NEEDED)


def describe(found: Unreachable) -> str:
    """An ICMP error in words."""
    if is_too_big(found):
        return f"packet too big, MTU {found.mtu}" if found.mtu else "packet too big"
    if found.type == _TIME_EXCEEDED[found.version]:
        return "time to live exceeded"
    return CODES[found.version].get(found.code, f"unreachable, code {found.code}")


class Unreachables:
    """ICMP errors, each for the connection whose packet it holds."""

    def __init__(self, connections: Connections, managers: Managers) -> None:
        self._connections = connections
        self._managers = managers

    def received(self, now: int, pair: Pair, version: int, data: bytes) -> None:
        """An ICMP message, which is ignored if it is about anything else."""
        if len(data) < 8 or data[0] not in (_UNREACHABLE[version], _TIME_EXCEEDED[version], _TOO_BIG_V6):
            return
        if data[0] == _TOO_BIG_V6 and version == 4:
            return
        error = Unreachable(version, split(pair)[0], data[0], data[1])
        if is_too_big(error):
            error.mtu = int.from_bytes(data[6:8] if version == 4 else data[4:8], "big")
        found = self._about(version, data[8:])
        if found is None:
            return
        connection, quoted = found
        error.about = int(quoted == connection.ends[1].address + connection.ends[0].address)
        error.last = now
        side = {connection.ends[0].address: 0, connection.ends[1].address: 1}.get(error.sender)
        name = "ICMP" if side is not None else f"ICMP from {address_text(error.sender)}"
        connection.note(now, side, name, describe(error), (version, error.type, error.code, error.mtu, error.sender))
        connection.last = max(connection.last, now)
        for known in connection.unreachable:
            if known.kind == error.kind:
                known.count += 1
                known.last = now
                known.mtu = error.mtu or known.mtu
                return
        if len(connection.unreachable) < 16:
            connection.unreachable.append(error)

    def _about(self, version: int, packet: bytes) -> tuple[Connection, Pair] | None:
        """The connection of the packet that an error quotes, and the addresses of that packet."""
        if version == 4:
            header = (packet[0] & 0xF) * 4 if packet else 0
            if header < 20 or len(packet) < header + 8:
                return None
            protocol, pair, at = packet[9], packet[12:20], header
        else:
            if len(packet) < 48:
                return None
            found = extensions(packet, packet[6], 40, len(packet))
            if found is None:
                return None
            (protocol, at), pair = found, packet[8:40]
        if len(packet) < at + 8:
            return None
        if protocol == 6:
            stream = self._connections.streams.get((pair, packet[at : at + 4]))
            return None if stream is None else (stream, pair)
        if protocol != 17 or int.from_bytes(packet[at + 2 : at + 4], "big") != ROCE_PORT:
            return None
        connection = self._of_rdma(pair, packet, at + 8) or self._connections.latest.get(pair)
        return None if connection is None else (connection, pair)

    def _of_rdma(self, pair: Pair, packet: bytes, bth: int) -> Connection | None:
        """The connection of a packet of RoCEv2, if the error quotes enough of it."""
        if len(packet) >= bth + 12:
            qpn = BTH_STRUCT.unpack_from(packet, bth)[3] & QPN_MASK
            # The connection's id is the first field of most messages, behind a DETH and the header of a MAD.
            if qpn == GSI_QPN and len(packet) >= bth + 48:
                comm_id = int.from_bytes(packet[bth + 44 : bth + 48], "big")
                found_id = self._managers.named(pair, comm_id)
                if found_id is not None:
                    return found_id
            half = self._connections.halves.get((pair, qpn))
            if half is not None:
                return half.connection
        return None
