"""The peers of a datagram socket, and how a datagram gets to each.

To send by a queue pair one needs the number of the peer's, and an address handle. Until both are there, datagrams go
through the UDP socket.

- *UNKNOWN*: nothing was sent to the peer, and nothing has come from it. It is in no table.
- *ASKED*: datagrams were sent through UDP. Each asks for the number again, so any of them may be lost, or its answer.
- *RESOLVING*: the number is known; the address is being resolved.
- *KNOWN*: datagrams go to the peer's queue pair.

A number that differs from the known one, of a program that was started again, has the address resolved again. If
nothing was heard of a peer for a while, a datagram goes through UDP once: an answer tells whether the number is still
right. Otherwise datagrams to a program that was started again would be lost for ever.

Anyone can send to the UDP socket. So the table, and the addresses that are being resolved, are limited: the peer that
was used the longest time ago is forgotten, and a peer above the limit is resolved when it sends again.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from rdmacm.proto.rsocket.headers import (
    SERVICE_LENGTHS,
    SOURCE_LENGTHS,
    ServiceHeader,
    ServiceOperation,
    SourceHeader,
)
from rdmacm.proto.wire import WireError

#: An address of 4 or 16 bytes, a port, and the scope of a link-local address.
PeerKey: TypeAlias = tuple[bytes, int, int]

#: Peers in the table, and those that are being resolved.
MAX_PEERS, MAX_RESOLVING = 1024, 16
#: Seconds without anything of a known peer, after which a datagram goes through UDP.
CONFIRM_SECONDS = 10.0


class PeerState(Enum):
    """What is known of a peer; the module describes it."""

    UNKNOWN = "unknown"
    ASKED = "asked"
    RESOLVING = "resolving"
    KNOWN = "known"


class PeerTrigger(Enum):
    """What changes that."""

    SEND = "a datagram is sent"
    NUMBER = "its number arrives"
    RESOLVED = "its address is resolved"
    UNREACHABLE = "its address cannot be resolved, or the device is gone"


class PeerAction(Enum):
    """What the owner of the table has to do with a peer."""

    #: Send CONTROL through UDP.
    ANSWER = "answer"
    #: Make an address handle, and call :meth:`PeerTable.resolved` or :meth:`PeerTable.unreachable`.
    RESOLVE = "resolve"
    #: Destroy its address handle.
    FORGET = "forget"


_S, _T = PeerState, PeerTrigger

#: State and trigger → next state, and the action. What is missing changes nothing. NUMBER counts in KNOWN only if it is
#: another number.
TRANSITIONS: dict[tuple[PeerState, PeerTrigger], tuple[PeerState, PeerAction | None]] = {
    (_S.UNKNOWN, _T.SEND): (_S.ASKED, None),
    (_S.UNKNOWN, _T.NUMBER): (_S.RESOLVING, PeerAction.RESOLVE),
    (_S.ASKED, _T.NUMBER): (_S.RESOLVING, PeerAction.RESOLVE),
    (_S.RESOLVING, _T.RESOLVED): (_S.KNOWN, None),
    (_S.RESOLVING, _T.UNREACHABLE): (_S.ASKED, None),
    (_S.KNOWN, _T.NUMBER): (_S.RESOLVING, PeerAction.RESOLVE),
    (_S.KNOWN, _T.UNREACHABLE): (_S.ASKED, None),
}


@dataclass(slots=True)
class _Peer:
    state: PeerState = PeerState.UNKNOWN
    qpn: int = 0
    #: When it was last heard of, or asked.
    heard: float = 0.0


class PeerTable:
    """The peers of one socket, whose address has a version: 4 or 6. ``now`` is in seconds."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._peers: dict[PeerKey, _Peer] = {}
        self._resolving = 0
        #: What the owner has to do, in this order.
        self.work: deque[tuple[PeerAction, PeerKey]] = deque()
        #: How many messages were no messages of the protocol, by what they were thought to be.
        self.faults: Counter[str] = Counter()

    def state(self, key: PeerKey) -> PeerState:
        """What is known of a peer."""
        found = self._peers.get(key)
        return PeerState.UNKNOWN if found is None else found.state

    def send(self, key: PeerKey, now: float) -> int | None:
        """Where a datagram goes: the number of the peer's queue pair, or None for UDP."""
        peer = self._find(key)
        if peer.state is not PeerState.KNOWN:
            self._change(key, peer, PeerTrigger.SEND)
            return None
        if now - peer.heard > CONFIRM_SECONDS:
            peer.heard = now
            return None
        return peer.qpn

    def service_received(self, datagram: memoryview, source: PeerKey, now: float) -> memoryview | None:
        """A datagram on the UDP socket; returns the part that is the application's, None for nothing."""
        try:
            header = ServiceHeader.unpack(datagram, self._version)
        except WireError:
            self.faults["service"] += 1
            return None
        peer = self._find(source)
        peer.heard = now
        if header.operation is ServiceOperation.DATA:
            self.work.append((PeerAction.ANSWER, source))
        if peer.state is not PeerState.KNOWN or peer.qpn != header.qpn:
            peer.qpn = header.qpn
            self._change(source, peer, PeerTrigger.NUMBER)
        if header.operation is not ServiceOperation.DATA:
            return None
        return datagram[SERVICE_LENGTHS[self._version] :]

    def message_received(self, message: memoryview, scope: int, now: float) -> tuple[PeerKey, int, memoryview] | None:
        """A message on a queue pair; returns its source, the flow information and the application's part.

        ``scope``: that of the queue pair's address.
        """
        try:
            header = SourceHeader.unpack(message, self._version)
        except WireError:
            self.faults["message"] += 1
            return None
        key = header.address, header.port, scope
        peer = self._peers.get(key)
        if peer is not None:
            peer.heard = now
        return key, header.flow, message[SOURCE_LENGTHS[self._version] :]

    def resolved(self, key: PeerKey) -> None:
        """The address handle of a peer is there."""
        self._decide(key, PeerTrigger.RESOLVED)

    def unreachable(self, key: PeerKey) -> None:
        """There is no address handle: the next answer tries again."""
        self._decide(key, PeerTrigger.UNREACHABLE)

    def _decide(self, key: PeerKey, trigger: PeerTrigger) -> None:
        peer = self._peers.get(key)
        if peer is not None:
            self._resolving -= peer.state is PeerState.RESOLVING
            self._change(key, peer, trigger)

    def _change(self, key: PeerKey, peer: _Peer, trigger: PeerTrigger) -> None:
        state, action = TRANSITIONS.get((peer.state, trigger), (peer.state, None))
        if action is PeerAction.RESOLVE:
            if self._resolving >= MAX_RESOLVING:
                peer.state = PeerState.ASKED  # the next datagram of the peer tries again
                return
            self._resolving += 1
            self.work.append((action, key))
        peer.state = state

    def _find(self, key: PeerKey) -> _Peer:
        """The entry of a peer, as the last one used."""
        peer = self._peers.pop(key, None)
        if peer is None:
            peer = _Peer()
            if len(self._peers) >= MAX_PEERS:
                self._forget_one()
        self._peers[key] = peer
        return peer

    def _forget_one(self) -> None:
        # There are fewer peers in RESOLVING than in the table.
        oldest = next(key for key, peer in self._peers.items() if peer.state is not PeerState.RESOLVING)
        del self._peers[oldest]
        self.work.append((PeerAction.FORGET, oldest))
