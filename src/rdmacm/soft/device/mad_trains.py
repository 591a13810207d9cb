"""Management datagrams on their way out: those to one process of a peer leave as a train.

- What is sent while packets are processed leaves at the end of that turn of progress.
- What the program sends while it has more events to fetch leaves with its next progress, or earlier with what does not
  wait. As the program may not come back, a MAD waits only while the helper thread looks for old ones
  (:mod:`rdmacm.soft.helper`).
- Everything else leaves at once.

A train is one system call for its sender, and one packet for the receiver's kernel until it is read. Its packets are
ordinary datagrams on the wire (:mod:`rdmacm.proto.roce.rc.trains`).

The kernel of a peer chooses the socket of a whole train by its first packet, so a train has datagrams for one slot
(:mod:`rdmacm.soft.wire.slot_filter`). Requests, which are for slot 0, are sent one by one to a peer that has sent
nothing yet: if it does not listen, the network reports one of a train as undelivered, and each request needs a report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rdmacm.address import DEFAULT_PKEY
from rdmacm.proto.cm.codes import AttributeId
from rdmacm.proto.constants import GSI_QPN, ICRC_LENGTH, MOST_IN_TRAIN, PSN_MASK
from rdmacm.proto.mad import GSI_Q_KEY, MAD_SIZE
from rdmacm.proto.roce.headers import BTH_DETH_STRUCT
from rdmacm.proto.roce.icrc import ICRC_STRUCT, Icrc, crc32, icrc_between
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.soft.wire.base import Wire, WirePath, WireRoute
from rdmacm.soft.wire.slot_filter import slot_of_mad

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from rdmacm.progress.runtime import Runtime
    from rdmacm.proto.wire import Buffer

PACKET_LENGTH = BTH_DETH_STRUCT.size + MAD_SIZE + ICRC_LENGTH
_UD_SEND_ONLY = int(Opcode.UD_SEND_ONLY)
#: The lower byte of the attribute id, and those of what ends a connection.
_ATTRIBUTE_BYTE = 17
_ENDS = (int(AttributeId.DREQ) & 0xFF, int(AttributeId.DREP) & 0xFF)
#: Peers whose addresses are kept.
MAX_PEERS = 256


class Carrier(Protocol):
    """What they leave through: :class:`rdmacm.soft.device.multiplexer.QPMultiplexer`."""

    runtime: Runtime
    wire: Wire
    random: Random
    #: How many bytes a train may have, 0 if trains cannot be sent.
    train: int

    @property
    def opened(self) -> bool: ...

    @property
    def is_processing(self) -> bool: ...

    def open(self) -> None: ...

    def acknowledge(self) -> None: ...

    def route(self, path: WirePath, traffic_class: int) -> WireRoute: ...


class _Peer:
    """A way to a peer."""

    __slots__ = ("icrc", "path", "route", "starts")

    def __init__(self, path: WirePath, route: WireRoute) -> None:
        self.path = path
        self.route = route
        self.icrc: Icrc = icrc_between(path.local, path.remote, route.source_port)
        #: The start values of the ICRC, by the place of a packet in its train.
        self.starts = [self.icrc.start(PACKET_LENGTH)]


class MadTrains:
    """The management datagrams that wait to be sent. Used with the runtime's lock held."""

    def __init__(self, mux: Carrier) -> None:
        self._mux = mux
        #: By path and traffic class.
        self._peers: dict[tuple[WirePath, int], _Peer] = {}
        #: The datagrams that wait, by peer and slot, and their number.
        self._waiting: dict[tuple[_Peer, int], list[bytes]] = {}
        self.count: int = 0
        #: How often :meth:`send` was called, so that a thread sees whether what waits is old.
        self.sends: int = 0
        #: Whether everything waits for :meth:`send`, as it does while packets are processed.
        self.is_held: bool = False
        #: Whether a caller may let a datagram wait, because a thread looks at those that do; and how often one has, or
        #: would have if it were allowed.
        self.may_wait: bool = False
        self.wishes = 0
        #: Paths from which something has arrived, and no report of an undelivered request since (:meth:`answered`).
        self.answering: set[WirePath] = set()
        #: The PSN of the last packet sent.
        self._psn = mux.random.getrandbits(24)

    def send_mad(self, path: WirePath, mad: Buffer, traffic_class: int = 0) -> None:
        """Send a MAD of 256 bytes to a peer's connection manager, now or with :meth:`send`."""
        mux = self._mux
        if not mux.opened:
            mux.open()
        if mad[_ATTRIBUTE_BYTE] in _ENDS:
            mux.wire.leaves_peers = True
        waits = mux.is_processing or self.is_held
        if not waits and mux.runtime.has_more_events:
            self.wishes += 1
            waits = self.may_wait
        peer = self._peers.get((path, traffic_class)) or self._new_peer(path, traffic_class)
        if not waits and not self.count:
            mux.acknowledge()
            self._send(peer, (mad,))
            return
        key = peer, slot_of_mad(mad)
        mads = self._waiting.get(key)
        if mads is None:
            self._waiting[key] = [bytes(mad)]
        else:
            mads.append(bytes(mad))
        self.count += 1
        if not waits or self.count >= MOST_IN_TRAIN:  # with as many as a train may have, none waits longer
            self.send()

    def send(self) -> None:
        """Send what waits, after the deferred ACKs: a peer gets its ACKs before it is told that a connection ends."""
        mux = self._mux
        self.sends += 1
        mux.acknowledge()
        waiting, self._waiting, self.count = self._waiting, {}, 0
        for (peer, slot), mads in waiting.items():
            is_train = len(mads) > 1 and (slot or peer.path in self.answering)
            if is_train and mux.train >= MOST_IN_TRAIN * PACKET_LENGTH and not peer.route.no_trains:
                self._send(peer, mads)
            else:
                for mad in mads:
                    self._send(peer, (mad,))

    def _send(self, peer: _Peer, mads: Sequence[Buffer]) -> None:
        starts = peer.starts
        while len(starts) < len(mads):
            starts.append(peer.icrc.start(PACKET_LENGTH, len(starts)))
        psn = self._psn
        buffers: list[Buffer] = []
        for mad, start in zip(mads, starts, strict=False):
            psn = (psn + 1) & PSN_MASK
            headers = BTH_DETH_STRUCT.pack(_UD_SEND_ONLY, 0, DEFAULT_PKEY, GSI_QPN, psn, GSI_Q_KEY, GSI_QPN)
            buffers += (headers, mad, ICRC_STRUCT.pack(crc32(mad, crc32(headers, start))))
        self._psn = psn
        try:
            self._mux.wire.send(peer.route, buffers, PACKET_LENGTH if len(mads) > 1 else 0)
        except Exception as error:
            self._mux.runtime.errors.report("gsi", "management datagrams are lost", error)

    def _new_peer(self, path: WirePath, traffic_class: int) -> _Peer:
        if len(self._peers) >= MAX_PEERS:
            self._peers.clear()
        peer = self._peers[path, traffic_class] = _Peer(path, self._mux.route(path, traffic_class))
        return peer

    def answered(self, path: WirePath) -> None:
        """Something has arrived on a path."""
        if len(self.answering) >= MAX_PEERS:
            self.answering.clear()
        self.answering.add(path)

    def undelivered(self, destination: bytes) -> None:
        """A request to a packed address was not delivered, as the network reports."""
        self.answering = {path for path in self.answering if path.remote != destination}

    def clear(self) -> None:
        """Forget what waits, and all peers."""
        self.may_wait = False
        self._waiting.clear()
        self.count = 0
        self._peers.clear()
        self.answering.clear()
