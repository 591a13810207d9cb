"""iWARP: RDMAP over DDP over MPA over TCP (RFC 5040, 5041, 5044, 6581).

A stream of TCP is one of iWARP if it begins with MPA's request. A stream that never gets so far is kept apart: a port
that refuses connections has nothing that says for what they were.

A stream is read in its order. Segments that come early wait, up to a bound; a stream that has lost more, or whose
frames have markers, is counted but not read any further.
"""

from __future__ import annotations

import struct

from rdmacm.trace.connection import IWARP, TCP, Connection, End, Half, Pair, split
from rdmacm.trace.halves import Span
from rdmacm.trace.management import private_text
from rdmacm.trace.registry import MOST_CONNECTIONS, Connections

_TCP = struct.Struct("!HHIIBBHHH")
_FIN, _SYN, _RST, _ACK = 1, 2, 4, 16
_SEQUENCES = 1 << 32
_HALF = 1 << 31

_KEYS = (b"MPA ID Req Frame", b"MPA ID Rep Frame")
_MPA = struct.Struct("!HH")
_MARKERS, _CRC, _REJECT, _ENHANCED = 0x8000, 0x4000, 0x2000, 0x1000
_MOST_PRIVATE = 512
#: The longest frame whose bytes are needed: a READ request.
_NEEDED = 2 + 18 + 28
#: Streams without MPA's request, and bytes of segments that came early.
_MOST_PENDING, _MOST_EARLY = 4096, 1 << 18

_TAGGED, _LAST = 0x8000, 0x4000
_WRITE, _READ_REQUEST, _READ_RESPONSE, _TERMINATE = 0, 1, 2, 7
_SENDS = (3, 4, 5, 6)
#: Errors of a TERMINATE: layer, type and code (RFC 5040, 4.8). None is any code.
_ERRORS = {
    (0, 1, 0): "invalid STag",
    (0, 1, 1): "base or bounds violation",
    (0, 1, 2): "access rights violation",
    (0, 1, 3): "STag not associated with the stream",
    (0, 2, 6): "unexpected opcode",
    (1, 1, 0): "invalid STag",
    (1, 1, 1): "base or bounds violation",
    (1, 1, 2): "STag not associated with the stream",
    (1, 2, 2): "no receive buffer",
    (1, 2, 3): "message sequence number out of range",
    (1, 2, 5): "message too long for the receive buffer",
    (2, 0, 2): "MPA CRC error",
    (2, 0, 6): "insufficient IRD",
    (2, 0, 7): "no matching RTR",
}
_LAYERS = {0: "RDMAP", 1: "DDP", 2: "MPA"}


class _Stream:
    """One direction."""

    __slots__ = ("broken", "early", "early_size", "greeted", "head", "next", "parts", "skip", "span")

    def __init__(self) -> None:
        #: The next sequence number, or -1.
        self.next = -1
        #: Whether MPA's request or reply has been read.
        self.greeted = False
        self.broken = False
        #: The beginning of a frame, and bytes of one that need not be read.
        self.head = b""
        self.skip = 0
        self.early: dict[int, tuple[bytes, int]] = {}
        self.early_size = 0
        #: The message that is being sent, by its opcode.
        self.span: dict[int, Span] = {}
        self.parts = 0


class _Pair:
    """A connection of TCP: ``forward`` is the end that has sent the SYN, or the first segment."""

    __slots__ = ("connection", "forward", "is_mpa", "repeats", "streams")

    def __init__(self, forward: tuple[Pair, bytes], connection: Connection) -> None:
        self.forward = forward
        self.connection = connection
        self.streams = (_Stream(), _Stream())
        self.is_mpa = False
        self.repeats = 0


class Streams:
    """All streams of iWARP, and those that have begun and may be."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._pairs: dict[tuple[Pair, bytes], _Pair] = {}
        #: Streams that have not got as far as MPA, in order.
        self._pending: dict[tuple[Pair, bytes], _Pair] = {}

    def segment(self, now: int, pair: Pair, data: bytes, at: int, end: int, size: int) -> int | None:
        """A segment of TCP of ``size`` bytes; whether it is one of iWARP, and None if it is malformed."""
        if at + 20 > end:
            return None
        sport, dport, seq, _, offset, flags, _, _, _ = _TCP.unpack_from(data, at)
        header = (offset >> 4) * 4
        if header < 20 or header > size:
            return None
        ports = data[at : at + 4]
        key = pair, ports
        found = self._pairs.get(key)
        payload = data[at + header : end] if at + header < end else b""
        length = size - header
        if found is None or flags & (_SYN | _ACK) == _SYN:
            source, destination = split(pair)
            if flags & (_SYN | _ACK) == _SYN:
                if found is None or found.is_mpa or found.forward != key or found.streams[0].next not in (seq + 1, -1):
                    found = self._begin(key, (destination + source, ports[2:] + ports[:2]), sport, dport, now)
            elif payload.startswith(_KEYS[0]):
                found = self._begin(key, (destination + source, ports[2:] + ports[:2]), sport, dport, now)
        if found is None:
            return 0
        side = 0 if found.forward == key else 1
        self._take(found, side, seq, flags, payload, length, now)
        return int(found.is_mpa)

    def _begin(self, key: tuple[Pair, bytes], back: tuple[Pair, bytes], sport: int, dport: int, now: int) -> _Pair:
        source, destination = split(key[0])
        connection = Connection(TCP, (End(source, sport), End(destination, dport)), now, now)
        found = _Pair(key, connection)
        for side in (0, 1):
            half = Half(connection, key[0] if side == 0 else back[0], 0, now)
            connection.halves[side] = half
        forth, reverse = connection.halves
        if forth is not None and reverse is not None:
            forth.reverse, reverse.reverse = reverse, forth
        if len(self._pending) >= _MOST_PENDING:
            self._forget(next(iter(self._pending)))
        self._pairs[key] = self._pairs[back] = self._pending[key] = found
        self._connections.streams[key] = self._connections.streams[back] = connection
        return found

    def _forget(self, key: tuple[Pair, bytes]) -> None:
        self._pending.pop(key, None)
        source, destination = split(key[0])
        for each in (key, (destination + source, key[1][2:] + key[1][:2])):
            self._pairs.pop(each, None)
            self._connections.streams.pop(each, None)

    def attempts(self) -> list[Connection]:
        """Streams that got no answer to their SYN, or an RST, and may have been meant for iWARP."""
        return [
            each.connection
            for each in self._pending.values()
            if each.connection.established is None and not each.is_mpa
        ]

    # -- TCP ---------------------------------------------------------------------------------------------------

    def _take(self, found: _Pair, side: int, seq: int, flags: int, payload: bytes, length: int, now: int) -> None:
        connection, stream = found.connection, found.streams[side]
        half = connection.halves[side]
        connection.last = max(connection.last, now)
        if half is None:
            return
        half.packets += 1
        half.last = now
        if flags & _SYN:
            name = "SYN, ACK" if flags & _ACK else "SYN"
            connection.count(name)
            if side == 0:
                connection.first_request = connection.first_request or now
                connection.last_request = now
            connection.note(now, side, name, f"port {connection.port}" if side == 0 else "", (name, seq))
            stream.next = (seq + 1) % _SEQUENCES
            return
        if length:
            self._ordered(found, side, seq, payload, length, now)
        if flags & _RST:
            connection.count("RST")
            connection.note(now, side, "RST", "", ("RST",))
        elif flags & _FIN:
            connection.count("FIN")
            connection.note(now, side, "FIN", "", ("FIN",))
            if connection.closed_by is None:
                connection.closed_by = side

    def _ordered(self, found: _Pair, side: int, seq: int, payload: bytes, length: int, now: int) -> None:
        stream = found.streams[side]
        half = found.connection.halves[side]
        if stream.broken or half is None:
            return
        if stream.next < 0:
            stream.next = seq
        ahead = (seq - stream.next) % _SEQUENCES
        if ahead >= _HALF:
            behind = _SEQUENCES - ahead
            half.repeated += 1
            if behind >= length:
                return
            payload, length = payload[behind:], length - behind
        elif ahead:
            half.missing += 1
            stream.early_size += len(payload)
            if stream.early_size > _MOST_EARLY or len(stream.early) >= 64:
                self._break(found, side, now, "bytes are missing")
                return
            stream.early[seq] = payload, length
            return
        self._deliver(found, side, payload, length, now)
        stream.next = (stream.next + length) % _SEQUENCES
        while stream.early and not stream.broken:
            for start in list(stream.early):
                if (stream.next - start) % _SEQUENCES < _HALF:
                    break
            else:
                return
            waiting, size = stream.early.pop(start)
            stream.early_size -= len(waiting)
            known = (stream.next - start) % _SEQUENCES
            if known < size:
                self._deliver(found, side, waiting[known:], size - known, now)
                stream.next = (stream.next + size - known) % _SEQUENCES

    def _break(self, found: _Pair, side: int, now: int, why: str) -> None:
        stream = found.streams[side]
        stream.broken, stream.head = True, b""
        stream.early.clear()
        if found.is_mpa:
            found.connection.note(now, None, "not read any further:", why, ("broken", side))

    # -- MPA ---------------------------------------------------------------------------------------------------

    def _deliver(self, found: _Pair, side: int, payload: bytes, length: int, now: int) -> None:
        """Bytes of a stream in order; of ``length`` bytes the capture may have fewer."""
        stream = found.streams[side]
        at = 0
        while at < len(payload) and not stream.broken:
            if stream.skip:
                step = min(stream.skip, len(payload) - at)
                stream.skip -= step
                at += step
                continue
            head = stream.head + payload[at:]
            if not stream.greeted:
                used = self._greeting(found, side, head, now)
            else:
                used = self._frame(found, side, head, now)
            if not used:
                stream.head = head
                break
            # A frame may end behind these bytes.
            at += used - len(stream.head)
            stream.head = b""
            if at > len(payload):
                stream.skip, at = at - len(payload), len(payload)
        missing = length - len(payload)
        if missing and not stream.broken:
            if stream.head or stream.skip < missing:
                self._break(found, side, now, "the capture has cut its packets")
            else:
                stream.skip -= missing

    def _greeting(self, found: _Pair, side: int, head: bytes, now: int) -> int:
        """MPA's request or reply; how many bytes it has, 0 if they are not all there."""
        connection, stream = found.connection, found.streams[side]
        if not _KEYS[side].startswith(head[:16]) and head[:16] != _KEYS[side]:
            if found.is_mpa:
                self._break(found, side, now, "no MPA reply")
            else:
                self._forget(found.forward)
                stream.broken = True
            return 0
        if len(head) < 20:
            return 0
        flags, size = _MPA.unpack_from(head, 16)
        if size > _MOST_PRIVATE:
            self._break(found, side, now, "malformed MPA frame")
            return 0
        used: int = 20 + size
        if len(head) < used:
            return 0
        private = head[20:used]
        if flags & _ENHANCED and size >= 4:
            private = private[4:]
        stream.greeted = True
        name = ("MPA request", "MPA reply")[side]
        details = [f"revision {flags & 0xFF}"]
        details += [text for bit, text in ((_CRC, "CRC"), (_MARKERS, "markers"), (_REJECT, "reject")) if flags & bit]
        if text := private_text(private):
            details.append(f"private data {text}")
        if not found.is_mpa:
            self._accept(found)
        connection.count(name)
        connection.note(now, side, name, ", ".join(details))
        if side == 0:
            connection.first_request = connection.last_request = now
        elif flags & _REJECT:
            connection.refusal, connection.private_data = "MPA reject", private
        else:
            connection.established = now
        if flags & _MARKERS:
            self._break(found, side, now, "its frames have markers")
        return used

    def _accept(self, found: _Pair) -> None:
        found.is_mpa = True
        self._pending.pop(found.forward, None)
        connection = found.connection
        connection.kind = IWARP
        if len(self._connections.all) >= MOST_CONNECTIONS:
            self._connections.left_out += 1
            self._forget(found.forward)
            return
        self._connections.all[id(connection)] = connection

    # -- DDP and RDMAP -----------------------------------------------------------------------------------------

    def _frame(self, found: _Pair, side: int, head: bytes, now: int) -> int:
        """A frame; how many bytes it has in all, 0 if those that matter are not there yet."""
        if len(head) < 4:
            return 0
        size = int.from_bytes(head[:2], "big")
        whole = 2 + size
        whole += -whole % 4 + 4
        if len(head) < min(whole, _NEEDED):
            return 0
        control = int.from_bytes(head[2:4], "big")
        opcode = control & 0xF
        header = 14 if control & _TAGGED else 18
        if size < header:
            self._break(found, side, now, "malformed frame")
            return 0
        payload = size - header
        connection = found.connection
        half = connection.halves[side]
        if half is None:
            return whole
        half.octets += payload if opcode != _READ_REQUEST else 0
        half.longest_payload = max(half.longest_payload, payload)
        if now >= half.series.end:
            half.series.roll(now, half.octets)
        if opcode == _TERMINATE and len(head) >= 22:
            connection.terminated = _error(head[20:24])
            connection.note(now, side, "TERMINATE", connection.terminated)
        elif opcode == _READ_REQUEST and payload >= 28:
            asked = int.from_bytes(head[20 + 12 : 20 + 16], "big")
            if len(half.outstanding) < 1024:
                half.outstanding.append(Span("READ", 0, now, asked, 0))
        elif opcode == _READ_RESPONSE:
            requester = half.reverse
            if requester is not None and requester.outstanding:
                first = found.streams[side].span.setdefault(opcode, requester.outstanding[0])
                if first is requester.outstanding[0] and first.repeats == 0:
                    first.repeats = -1  # its first response has come
                    requester.round_trips.add(now - first.start)
                if control & _LAST:
                    span = requester.outstanding.popleft()
                    span.repeats = 0
                    requester.finish(span, now)
                    found.streams[side].span.pop(opcode, None)
        elif opcode == _WRITE or opcode in _SENDS:
            spans = found.streams[side].span
            if opcode not in spans:
                spans[opcode] = Span("WRITE" if opcode == _WRITE else "SEND", 0, now, 0, 0)
            spans[opcode].octets += payload
            if control & _LAST:
                half.finish(spans.pop(opcode), now)
        return whole


def _error(word: bytes) -> str:
    """The error of a TERMINATE in words. siw has the halves of the first byte in the other order."""
    if len(word) < 3:
        return "unknown error"
    high, low, code = word[0] >> 4, word[0] & 0xF, word[1]
    layer, kind = (low, high) if word[2] & 7 and not word[2] & 0xE0 else (high, low)
    text = _ERRORS.get((layer, kind, code), f"type {kind}, code {code}")
    return f"{_LAYERS.get(layer, f'layer {layer}')}: {text}"
