"""Questions for the hardware address of a neighbour that get no answer: ARP (RFC 826), neighbour discovery (RFC 4861).

As long as nobody answers, a host does not send what is for the neighbour. So the questions are all that a capture has
of an attempt to connect. An answer may pass where the capture does not see it; but a host that got one does not ask
again at once.
"""

from __future__ import annotations

import struct

from rdmacm.trace.connection import ARP, ND, Connection, End, Pair, address_text, split

#: Hardware, protocol, lengths of their addresses, operation; hardware address and IP address of sender and target.
_PACKET = struct.Struct("!HHBBH6s4s6s4s")
_IPV4_OVER_ETHERNET = 1, 0x0800, 6, 4
_REQUEST = 1
_SOLICITATION, _ADVERTISEMENT = 135, 136
#: A solicitation or an advertisement has the address that it is about in these bytes.
_TARGET = slice(8, 24)
#: Nanoseconds until a question that got no answer is repeated, at most. Linux waits a second.
_REPEATED = 3_000_000_000
#: Questions that are kept.
_MOST = 1024


class Neighbours:
    """The questions of a capture, each as a connection of kind ARP or ND from who asks to who is asked for."""

    def __init__(self) -> None:
        #: By who is asked for, and by who asks; without those that got an answer.
        self._asked: dict[bytes, dict[bytes, Connection]] = {}
        self._count = 0

    def arp(self, now: int, data: bytes, at: int, end: int) -> bool:
        """A packet of ARP. False if it is none."""
        if at + _PACKET.size > end:
            return False
        *form, operation, _, sender, _, target = _PACKET.unpack_from(data, at)
        if tuple(form) == _IPV4_OVER_ETHERNET:
            self._is_there(sender)
            # A host that looks whether its own address is free asks for itself, or has no address yet.
            if operation == _REQUEST and sender != target and any(sender):
                self._ask(ARP, now, sender, target)
        return True

    def icmpv6(self, now: int, pair: Pair, message: bytes) -> None:
        """A message of ICMPv6; only those of neighbour discovery count."""
        target = message[_TARGET]
        if len(target) != 16:
            return
        sender, _ = split(pair)
        if message[0] == _ADVERTISEMENT:
            self._is_there(target)
        elif message[0] == _SOLICITATION and any(sender):
            self._ask(ND, now, sender, target)

    def unanswered(self) -> list[Connection]:
        """The questions that were repeated, and got no answer that the capture has."""
        return [each for asked in self._asked.values() for each in asked.values() if each.sent["question"] > 1]

    def _ask(self, kind: str, now: int, sender: bytes, target: bytes) -> None:
        found = self._asked.get(target, {}).get(sender)
        if found is None:
            if self._count == _MOST:
                self._is_there(next(iter(self._asked)))
            self._count += 1
        if found is None or now - found.last > _REPEATED:
            found = Connection(kind, (End(sender), End(target)), now, now, first_request=now)
            self._asked.setdefault(target, {})[sender] = found
        found.count("question")
        found.last = found.last_request = now
        found.note(now, 0, kind, f"who has {address_text(target)}?", (kind,))

    def _is_there(self, address: bytes) -> None:
        """Forget the questions for an address."""
        self._count -= len(self._asked.pop(address, ()))
