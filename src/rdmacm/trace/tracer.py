"""Gives each packet of a capture to its connection.

Most packets of a large capture are of RoCEv2 over IPv4, in the middle of a message and in order. :meth:`Tracer.feed`
handles them itself, at fixed offsets; everything else goes through :meth:`Tracer.transport`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import chain

from rdmacm.proto.constants import (
    BTH_LENGTH,
    GRH_LENGTH,
    GSI_QPN,
    ICRC_LENGTH,
    LONGEST_MESSAGE,
    PKEY_BITS,
    PSN_MASK,
    QPN_MASK,
    ROCE_PORT,
)
from rdmacm.proto.mad import MAD_SIZE
from rdmacm.proto.roce.headers import BTH_STRUCT, RETH_STRUCT
from rdmacm.proto.roce.opcodes import HAS_PAYLOAD
from rdmacm.trace.connection import IWARP, Connection, Half, Pair
from rdmacm.trace.files import Packet
from rdmacm.trace.internet import Unreachables, extensions
from rdmacm.trace.iwarp import Streams
from rdmacm.trace.links import ARP_PACKET, ETHERNET, FINDERS, INFINIBAND, IPV4, IPV6, NOTHING, ROCE_V1
from rdmacm.trace.management import Managers
from rdmacm.trace.neighbours import Neighbours
from rdmacm.trace.opcodes import (
    ACKNOWLEDGE,
    AETH_AT,
    CNP,
    DATAGRAM,
    FIRST,
    KINDS,
    NAKS,
    ONLY,
    OPERATION_NAMES,
    OVERHEAD,
    QUERY,
    RESPONSE_END,
    RESPONSE_FIRST,
    RESPONSE_MIDDLE,
    RETH_AT,
    UNKNOWN,
)
from rdmacm.trace.registry import Connections

_RESPONSES = frozenset((ACKNOWLEDGE, RESPONSE_FIRST, RESPONSE_MIDDLE, RESPONSE_END))
#: Ethernet's type, an IPv4 header without options, a UDP header and a BTH.
_FAST = struct.Struct("!12xHBBHxxHxBxx8sHHHxxBBHII")
_FAST_LENGTH = _FAST.size
_TCP, _UDP, _ICMP, _ICMPV6 = 6, 17, 1, 58
_UDP_HEADER = struct.Struct("!HHHH")
#: A BTH and an ICRC: the shortest packet, so the least that a second one adds to the payload of the first.
_SHORTEST = BTH_LENGTH + ICRC_LENGTH
#: A BTH, a DETH, a MAD and an ICRC.
_MAD_PACKET = BTH_LENGTH + 8 + MAD_SIZE + 4
_CONGESTION_EXPERIENCED = 3


class Tracer:
    """The connections in the packets that it is fed with.

    - ``connections``: what was found.
    - ``packets``, ``octets``: all packets and their bytes on the wire; ``rdma``: those of a connection.
    - ``malformed``: packets that are none of their protocol.
    - ``cut``: those that lack bytes that matter, as the capture was told to keep less.
    - ``fragments``: of IP packets, which are not joined.
    - ``unread``: frames of a link type that is not known.
    - ``copies``: packets that are the one before once more, as a capture at two places has them.
    """

    copies: int
    cut: int
    fragments: int
    malformed: int
    octets: int
    packets: int
    rdma: int
    unread: int

    def __init__(self) -> None:
        self.connections: Connections = Connections()
        self.managers: Managers = Managers(self.connections)
        self.streams: Streams = Streams(self.connections)
        self.unreachables: Unreachables = Unreachables(self.connections, self.managers)
        self.neighbours: Neighbours = Neighbours()
        self.packets = self.octets = self.rdma = 0
        self.malformed = self.cut = self.fragments = self.unread = self.copies = 0
        self.first: int = 0
        self.last: int = 0
        #: The MAC addresses of the frame, to and from; empty on other links.
        self._macs = b""

    def feed(self, packets: Iterable[Packet]) -> None:
        """Take packets."""
        unpack, halves = _FAST.unpack_from, self.connections.halves
        overhead, kinds = OVERHEAD, KINDS
        count = octets = fast = 0
        source = iter(packets)
        one = next(source, None)
        if one is None:
            return
        now = one[0]
        if not self.packets:
            self.first = now
        try:
            for now, link_type, data, at, end, length in chain((one,), source):
                count += 1
                octets += length
                if link_type == ETHERNET and end - at >= _FAST_LENGTH:
                    (
                        kind,
                        version,
                        tos,
                        total,
                        fragment,
                        protocol,
                        pair,
                        _,
                        port,
                        size,
                        opcode,
                        flags,
                        pkey,
                        qpn,
                        psn,
                    ) = unpack(data, at)
                    if port == 4791 and kind == 0x0800 and version == 0x45 and protocol == 17 and not fragment & 0x3FFF:
                        kind = kinds[opcode]
                        if kind < 2:
                            half = halves.get((pair, qpn & 0xFFFFFF))
                            if half is not None:
                                payload = size - 8 - overhead[opcode] - (flags >> 4 & 3)
                                psn &= 0xFFFFFF
                                if kind:
                                    is_next = psn == half.next_response
                                else:
                                    is_next = psn == half.next_psn
                                if is_next and 0 <= payload <= half.limit and half.pkey == pkey & 0x7FFF:
                                    if kind:
                                        half.next_response = psn + 1 & 0xFFFFFF
                                    else:
                                        half.next_psn = psn + 1 & 0xFFFFFF
                                        half.message_octets += payload
                                    if tos & 3:
                                        half.markable += 1
                                        if tos & 3 == 3:
                                            half.marked += 1
                                    half.packets += 1
                                    half.octets += payload
                                    half.last = now
                                    half.latest = psn
                                    fast += 1
                                    if now >= half.series.end:
                                        half.series.roll(now, half.octets)
                                    continue
                        self._macs = data[at : at + 12]
                        self.transport(now, pair, tos, data, at + 42, end, min(size, total - 20) - 8, total)
                        continue
                self._macs = data[at : at + 12] if link_type == ETHERNET else b""
                self._frame(now, link_type, data, at, end)
        finally:
            self.last = now
            self.packets += count
            self.octets += octets
            self.rdma += fast

    def found(self) -> list[Connection]:
        """All connections by time, with what may have been meant to become one.

        That is a stream of TCP that was refused, and a question for a neighbour that got no answer: if the port is one
        of iWARP, or the addresses are those of a connection, elsewhere in the capture, or if it has no connection.
        """
        found = self.connections.ordered()
        for each in found:
            each.last = max([each.last, *(half.last for half in each.halves if half is not None)])
        ports = {each.ends[1].port for each in found if each.kind == IWARP}
        attempts = [each for each in self.streams.attempts() if not found or each.ends[1].port in ports]
        pairs = self.connections.latest
        unanswered = self.neighbours.unanswered()
        attempts += [each for each in unanswered if not found or each.ends[0].address + each.ends[1].address in pairs]
        return sorted([*found, *attempts], key=lambda each: each.first)

    # -- links and networks ------------------------------------------------------------------------------------

    def _frame(self, now: int, link_type: int, data: bytes, at: int, end: int) -> None:
        finder = FINDERS.get(link_type)
        if finder is None:
            self.unread += 1
            return
        kind, at = finder(data, at, end)
        if kind == IPV4:
            self._ipv4(now, data, at, end)
        elif kind == IPV6:
            self._ipv6(now, data, at, end)
        elif kind == ARP_PACKET:
            self.malformed += not self.neighbours.arp(now, data, at, end)
        elif kind == ROCE_V1:
            self._grh(now, data, at, end)
        elif kind == INFINIBAND:
            self._lrh(now, data, at, end)
        elif kind == NOTHING:
            self.malformed += 1

    def _ipv4(self, now: int, data: bytes, at: int, end: int) -> None:
        header = (data[at] & 0xF) * 4 if at < end else 0
        if header < 20 or at + header > end or data[at] >> 4 != 4:
            self.malformed += 1
            return
        # Offloading may leave the length at 0.
        total = int.from_bytes(data[at + 2 : at + 4], "big") or end - at
        if total < header:
            self.malformed += 1
            return
        fragment = int.from_bytes(data[at + 6 : at + 8], "big")
        if fragment & 0x1FFF:
            self.fragments += 1
            return
        if fragment & 0x2000:
            self.fragments += 1
        pair = data[at + 12 : at + 20]
        start = at + header
        self._internet(now, pair, data[at + 9], data[at + 1], data, start, min(end, at + total), total - header, total)

    def _ipv6(self, now: int, data: bytes, at: int, end: int) -> None:
        if at + 40 > end or data[at] >> 4 != 6:
            self.malformed += 1
            return
        length = int.from_bytes(data[at + 4 : at + 6], "big") or end - at - 40
        end = min(end, at + 40 + length)
        found = extensions(data, data[at + 6], at + 40, end)
        if found is None:
            self.fragments += 1
            return
        protocol, start = found
        tos = (data[at] << 4 | data[at + 1] >> 4) & 0xFF
        size = length - (start - at - 40)
        self._internet(now, data[at + 8 : at + 40], protocol, tos, data, start, end, size, length + 40)

    def _internet(
        self, now: int, pair: Pair, protocol: int, tos: int, data: bytes, at: int, end: int, size: int, wire: int
    ) -> None:
        if protocol == _UDP:
            if at + 8 > end:
                self.malformed += 1
                return
            _, port, length, _ = _UDP_HEADER.unpack_from(data, at)
            if port == ROCE_PORT:
                self.transport(now, pair, tos, data, at + 8, end, min(length or size, size) - 8, wire)
        elif protocol == _TCP:
            found = self.streams.segment(now, pair, data, at, end, size)
            if found is None:
                self.malformed += 1
            else:
                self.rdma += found
        elif protocol in (_ICMP, _ICMPV6):
            message = data[at:end]
            self.unreachables.received(now, pair, 4 if protocol == _ICMP else 6, message)
            if protocol == _ICMPV6:
                self.neighbours.icmpv6(now, pair, message)

    def _grh(self, now: int, data: bytes, at: int, end: int) -> None:
        if at + GRH_LENGTH > end or data[at + 6] != 0x1B:
            self.malformed += 1
            return
        length = int.from_bytes(data[at + 4 : at + 6], "big")
        tos = (data[at] << 4 | data[at + 1] >> 4) & 0xFF
        pair = data[at + 8 : at + 40]
        self.transport(now, pair, tos, data, at + GRH_LENGTH, end, length, length + GRH_LENGTH)

    def _lrh(self, now: int, data: bytes, at: int, end: int) -> None:
        """A packet of InfiniBand: its LRH, perhaps a GRH, and a BTH."""
        if at + 8 > end:
            self.malformed += 1
            return
        next_header = data[at + 1] & 3
        length = (int.from_bytes(data[at + 4 : at + 6], "big") & 0x7FF) * 4
        pair = data[at + 6 : at + 8] + data[at + 2 : at + 4]
        if next_header == 3:
            if at + 48 <= end:
                self._grh(now, data, at + 8, end)
            else:
                self.malformed += 1
        elif next_header == 2:
            self.transport(now, pair, 0, data, at + 8, end, length - 8, length)

    # -- the transport of InfiniBand ---------------------------------------------------------------------------

    def transport(self, now: int, pair: Pair, tos: int, data: bytes, at: int, end: int, size: int, wire: int) -> None:
        """A packet from its BTH at ``at`` on: of ``size`` bytes with its ICRC, in an IP packet of ``wire`` bytes."""
        if at + BTH_LENGTH > end or size < _SHORTEST:
            self.malformed += 1
            return
        opcode, flags, pkey, qpn, psn = BTH_STRUCT.unpack_from(data, at)
        qpn &= QPN_MASK
        psn &= PSN_MASK
        kind = KINDS[opcode]
        if kind == UNKNOWN:
            self.malformed += 1
            return
        self.rdma += 1
        if qpn <= GSI_QPN:
            if kind == DATAGRAM and qpn == GSI_QPN:
                self._management(now, pair, pkey & PKEY_BITS, data, at, end, size)
            return
        if kind == CNP:
            self._notice(pair, qpn, now)
            return
        source_qpn = None
        if kind == DATAGRAM:
            if at + 20 > end:
                self.cut += 1
                return
            source_qpn = int.from_bytes(data[at + 17 : at + 20], "big")
        is_response = kind in _RESPONSES
        half = self.connections.halves.get((pair, qpn))
        if half is None:
            half = self.connections.unannounced(pair, qpn, opcode, psn, source_qpn, is_response, now)
            if half is None:
                return
        elif half.reverse is None and is_response:
            self.connections.marry(half, psn)
        octets = size - OVERHEAD[opcode] - (flags >> 4 & 3)
        if octets < 0:
            self.malformed += 1
            return
        if octets >= _SHORTEST and (step := _segment(data, at, end, size)):
            self.rdma -= 1  # which each of its packets is, for itself
            headers = wire - size
            while size > 0:
                part = min(step, size)
                self.transport(now, pair, tos, data, at, min(end, at + part), part, headers + part)
                at, size = at + step, size - step
            return
        if half.is_copy(kind, opcode, psn, now):
            self.copies += 1
            return
        half.packets += 1
        half.octets += octets
        half.last = now
        half.tos = tos
        if half.macs != self._macs:
            half.take_macs(self._macs)
        connection = half.connection
        if tos & 3:
            half.markable += 1
            half.marked += tos & 3 == _CONGESTION_EXPERIENCED
        if half.pkey != pkey & PKEY_BITS:
            half.pkey = pkey & PKEY_BITS
            connection.add_pkey(half.pkey)
        if now >= half.series.end:
            half.series.roll(now, half.octets)
        if octets > half.longest_payload:  # noqa: PLR1730 (a call takes longer)
            half.longest_payload = octets
        if is_response:
            self._response(half, kind, opcode, psn, data, at, end, octets, now)
            half.remember(opcode, psn)
            return
        if kind == DATAGRAM:
            if source_qpn is not None and connection.ends[connection.halves.index(half)].qpn is None:
                connection.ends[connection.halves.index(half)].qpn = source_qpn
            # Datagrams have a PSN that means nothing.
            half.next_psn = -1
            half.request(ONLY, opcode, psn, octets, wire, now)
            return
        if kind == FIRST and not connection.mtu:
            connection.learn_mtu(octets)
        if kind == QUERY:
            octets = _asked(data, at, end, opcode)
        elif kind == FIRST:
            half.announced = _announced(data, at, end, opcode)
        if connection.established is None:
            connection.established = now
        half.request(kind, opcode, psn, octets, wire, now)
        half.remember(opcode, psn)

    def _response(
        self, half: Half, kind: int, opcode: int, psn: int, data: bytes, at: int, end: int, octets: int, now: int
    ) -> None:
        connection = half.connection
        requester = half.reverse
        if kind in (RESPONSE_FIRST, RESPONSE_MIDDLE) and not connection.mtu:
            connection.learn_mtu(octets)
        if opcode & 0x1F != 0x12 and kind != ACKNOWLEDGE:
            half.read_response(kind, psn)
        if kind == RESPONSE_MIDDLE:
            return
        if kind == RESPONSE_FIRST:
            # It acknowledges what was before it.
            upto: int | None = psn - 1 & PSN_MASK
        else:
            where = at + AETH_AT[opcode]
            if where >= end:
                self.cut += 1
                return
            syndrome = data[where]
            upto = half.response(psn, syndrome)
            type = syndrome >> 5 & 3
            if type:
                name = "RNR NAK" if type == 1 else f"NAK {NAKS.get(syndrome & 0x1F, syndrome & 0x1F)}"
                detail = "the receiver is not ready" if type == 1 else f"from PSN {psn:#08x} on"
                connection.note(now, connection.halves.index(half), name, detail, (name,))
        if requester is not None and upto is not None:
            requester.acknowledge(upto, now)

    def _management(self, now: int, pair: Pair, pkey: int, data: bytes, at: int, end: int, size: int) -> None:
        """Management datagrams; several, if their sender has left it to the network card to part them."""
        while size >= _MAD_PACKET:
            if at + _MAD_PACKET > end:
                self.cut += 1
                return
            if not self.managers.received(pair, data[at + 20 : at + 20 + MAD_SIZE], pkey, now):
                self.malformed += 1
            at, size = at + _MAD_PACKET, size - _MAD_PACKET

    def _notice(self, pair: Pair, qpn: int, now: int) -> None:
        half = self.connections.halves.get((pair, qpn))
        if half is None:
            half = self.connections.unannounced(pair, qpn, 0x11, 0, None, True, now)
        if half is not None:
            half.congestion_notices += 1
            connection = half.connection
            side = connection.halves.index(half)
            connection.note(now, side, "CNP", "send more slowly: packets were marked", ("CNP",))


def _announced(data: bytes, at: int, end: int, opcode: int) -> int:
    """The length in the RETH of a packet, or 0."""
    where = RETH_AT[opcode]
    if not where or at + where + RETH_STRUCT.size > end:
        return 0
    length: int = RETH_STRUCT.unpack_from(data, at + where)[2]
    return length if length <= LONGEST_MESSAGE else 0


def _asked(data: bytes, at: int, end: int, opcode: int) -> int:
    """Bytes that a READ asks for, or an atomic changes."""
    name = OPERATION_NAMES[opcode]
    return _announced(data, at, end, opcode) if name == "READ" else 0 if name == "FLUSH" else 8


def _segment(data: bytes, at: int, end: int, size: int) -> int:
    """The bytes of each packet in a train that its sender has left to the network card to part; 0 if it is none.

    The next packet has the P_Key and the queue pair of the first, and the PSN that follows, but behind a READ.
    """
    same = data[at + 2 : at + 8]
    opcode = data[at]
    if not HAS_PAYLOAD[opcode]:
        length = OVERHEAD[opcode]
        return length if data[at + length + 2 : at + length + 8] == same else 0
    psn = int.from_bytes(data[at + 9 : at + 12], "big")
    found = at + BTH_LENGTH
    while True:
        found = data.find(same, found, min(end, at + size))
        if found < 0:
            return 0
        start = found - 2
        following = data[start + 9 : start + 12]
        if start - at >= BTH_LENGTH + 4 and int.from_bytes(following, "big") == psn + 1 & PSN_MASK:
            return start - at
        found += 1
