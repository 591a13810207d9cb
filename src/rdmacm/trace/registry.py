"""All connections of a capture, and how a packet finds its own. Their number is bounded."""

from __future__ import annotations

from rdmacm.trace.connection import RC, UC, UD, XRC, Connection, End, Half, Pair, split
from rdmacm.trace.opcodes import SERVICES

#: Connections that are kept; packets of others are counted.
MOST_CONNECTIONS = 16384
#: Halves between two addresses whose other half is not known.
_MOST_ALONE = 64


class Connections:
    """The connections of a capture."""

    def __init__(self) -> None:
        self.all: dict[int, Connection] = {}
        #: By the addresses of a packet, and the queue pair that it is for.
        self.halves: dict[tuple[Pair, int], Half] = {}
        #: The connection that has been made last between two addresses.
        self.latest: dict[Pair, Connection] = {}
        #: Those of TCP, by the addresses of a packet and both ports, of either direction.
        self.streams: dict[tuple[Pair, bytes], Connection] = {}
        #: How often there was no room for one more.
        self.left_out: int = 0
        self._alone: dict[Pair, list[Half]] = {}

    def new(self, kind: str, pair: Pair, now: int) -> Connection | None:
        """A connection between these addresses; None if there are too many."""
        if len(self.all) >= MOST_CONNECTIONS:
            self.left_out += 1
            return None
        source, destination = split(pair)
        found = Connection(kind, (End(source), End(destination)), now, now)
        self.all[id(found)] = found
        self.latest[pair] = self.latest[destination + source] = found
        return found

    def remove(self, connection: Connection) -> None:
        """Forget a connection."""
        del self.all[id(connection)]

    def add_half(self, connection: Connection, side: int, qpn: int, now: int) -> Half:
        """The half of the packets of ``ends[side]``, which are for this queue pair."""
        source, destination = connection.ends[side].address, connection.ends[1 - side].address
        half = Half(connection, source + destination, qpn, now)
        connection.join(side, half)
        self.halves[half.pair, qpn] = half
        return half

    def ordered(self) -> list[Connection]:
        """All connections by the time of their first packet."""
        return sorted(self.all.values(), key=lambda each: each.first)

    # -- connections whose handshake the capture does not have ---------------------------------------------------

    def unannounced(
        self, pair: Pair, qpn: int, opcode: int, psn: int, source_qpn: int | None, is_response: bool, now: int
    ) -> Half | None:
        """The half of a packet for a queue pair that no handshake has named; None if there are too many."""
        kind = SERVICES.get(opcode & 0xE0, RC)
        source, destination = split(pair)
        back = destination + source
        if kind == UD:
            other = self.halves.get((back, source_qpn or 0))
            if other is not None and other.reverse is None and other.connection.kind == UD:
                return self.add_half(other.connection, 1 - other.connection.halves.index(other), qpn, now)
        elif is_response:
            for other in self._alone.get(back, ()):
                if other.connection.kind in (RC, XRC) and other.awaits(psn):
                    self._alone[back].remove(other)
                    side = 1 - other.connection.halves.index(other)
                    return self.add_half(other.connection, side, qpn, now)
        connection = self.new(kind, back if is_response else pair, now)
        if connection is None:
            return None
        half = self.add_half(connection, 1 if is_response else 0, qpn, now)
        if kind != UC:
            alone = self._alone.setdefault(pair, [])
            if len(alone) >= _MOST_ALONE:
                del alone[0]
            alone.append(half)
        return half

    def marry(self, half: Half, psn: int) -> None:
        """Find the half whose requests are answered by one without a reverse."""
        source, destination = split(half.pair)
        back = destination + source
        for other in self._alone.get(back, ()):
            if other is not half and other.reverse is None and other.awaits(psn):
                break
        else:
            return
        self._alone[back].remove(other)
        if half in self._alone.get(half.pair, ()):
            self._alone[half.pair].remove(half)
        mine, theirs = half.connection, other.connection
        if mine is theirs:
            return
        theirs.join(1 - theirs.halves.index(other), half)
        theirs.first = min(mine.first, theirs.first)
        theirs.events = sorted(theirs.events + mine.events, key=lambda event: event.time)
        theirs.pkeys |= mine.pkeys
        theirs.mtu = theirs.mtu or mine.mtu
        theirs.unreachable += mine.unreachable
        self.remove(mine)
