"""Queue pair 1 of the software devices, the general services interface (GSI), over RoCEv2.

It carries the management datagrams (MADs) of connection managers, each as a UD SEND of one packet.

How they leave is in :mod:`rdmacm.soft.device.mad_trains`; this is how they arrive.
"""

from __future__ import annotations

import struct
from collections import Counter
from socket import AF_INET, AF_INET6, inet_pton
from typing import TYPE_CHECKING, Protocol

from rdmacm.address import DEFAULT_PKEY
from rdmacm.proto.cm.admission import Admission
from rdmacm.proto.cm.codes import AttributeId
from rdmacm.proto.cm.connection import NetworkError
from rdmacm.proto.constants import GSI_QPN, ICRC_LENGTH, MOST_IN_TRAIN, RESIDUE
from rdmacm.proto.mad import GSI_Q_KEY
from rdmacm.proto.roce.headers import BTH_DETH_STRUCT
from rdmacm.proto.roce.icrc import Icrc, crc32, icrc_between
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.provider import UndeliveredTap
from rdmacm.soft.connection_manager import Triage
from rdmacm.soft.device.mad_trains import MAX_PEERS, PACKET_LENGTH, Carrier, MadTrains
from rdmacm.soft.wire.base import SocketAddress, Undelivered, WirePath
from rdmacm.soft.wire.slot_filter import SERVICE_ID, is_request

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from rdmacm.soft.connection_manager import OnUndelivered

_HEADERS_LENGTH = BTH_DETH_STRUCT.size
#: Of a request: where its transaction id and its communication id (of a SIDR_REQ the request id) begin.
_TRANSACTION_ID = struct.Struct(f"!{_HEADERS_LENGTH + 8}xQ")
_COMM_ID = struct.Struct(f"!{_HEADERS_LENGTH + 24}xI")
_COMM_ID_BYTES = slice(_HEADERS_LENGTH + 24, _HEADERS_LENGTH + 28)
#: The lower byte of its attribute id, and the service id.
_ATTRIBUTE_BYTE = _HEADERS_LENGTH + 17
_REQ, _REJ = int(AttributeId.REQ) & 0xFF, int(AttributeId.REJ) & 0xFF
_REQUESTS = (_REQ, int(AttributeId.SIDR_REQ) & 0xFF)
_SERVICE_ID = struct.Struct(f"!{SERVICE_ID}xQ")
_UD_SEND_ONLY = int(Opcode.UD_SEND_ONLY)
#: A host that has an address of IPv6 has 2**64 of them.
_SOURCE_BYTES = 8


class GsiCarrier(Carrier, Protocol):
    """What the GSI uses of :class:`rdmacm.soft.device.multiplexer.QPMultiplexer`, which says what each does."""

    dropped: Counter[str]
    undelivered_tap: UndeliveredTap | None

    def hold_qpn(self, qpn: int, until: float) -> None: ...

    def ask_peer(self, qpn: int) -> Hashable: ...


class RoceGsi:
    """Sends and receives management datagrams; implements :class:`rdmacm.soft.connection_manager.Gsi`."""

    #: Any host can send from any address.
    trusts_sources = False

    def __init__(self, mux: GsiCarrier) -> None:
        self._mux = mux
        #: See :meth:`QPMultiplexer.hold_qpn`.
        self.hold_qpn: Callable[[int, float], None] = mux.hold_qpn
        #: Called with each MAD of 256 bytes, its path and the time. The MAD is valid during the call.
        self.on_mad: Callable[[memoryview, WirePath, float], None] | None = None
        #: See :class:`rdmacm.soft.connection_manager.Gsi`.
        self.triage: Callable[[memoryview], Triage] | None = None
        #: See :class:`rdmacm.soft.connection_manager.Gsi`.
        self.on_undelivered: OnUndelivered | None = None
        #: See :class:`rdmacm.soft.connection_manager.Gsi`.
        self.on_shortage: Callable[[], None] | None = None
        mux.wire.on_undelivered = self._undelivered
        #: The MADs that wait to be sent.
        self.outbox: MadTrains = MadTrains(mux)
        #: See :class:`rdmacm.soft.connection_manager.Gsi`.
        self.send_mad = self.outbox.send_mad
        #: By socket address of the peer and local address: the path, its ICRC, the start value of that, and what the
        #: CRC over a packet gives.
        self._sources: dict[tuple[SocketAddress, bytes], tuple[WirePath, Icrc, int, set[int]]] = {}
        #: What it gives for IPv4, as far as packets had identifications of trains, and for IPv6.
        self._residues = {RESIDUE}, {RESIDUE}
        #: Which requests are processed, and the datagrams with those that wait.
        self._admission: Admission[tuple[bytes, SocketAddress, bytes]] = Admission(
            mux.random.getrandbits(128).to_bytes(16, "big")
        )
        #: Whether a call is requested for the next request that waits.
        self._is_called = False
        #: The service ids that requests are received for, by the wire's token, and how often.
        self._tokens: dict[object, int] = {}
        self._services: Counter[int] = Counter()

    @property
    def id_prefix(self) -> int:
        """The upper 12 bits of this process's communication ids."""
        return self._mux.wire.slot

    def source_of(self, path: WirePath) -> Hashable:
        """The peer's IPv4 address, or the 64 bits of IPv6 that a host shares with nobody else on other links."""
        return path.remote[:_SOURCE_BYTES]

    def open(self) -> None:
        """Begin to receive, if that has not begun."""
        self._mux.open()

    def listen(self, service_id: int, local: bytes | None) -> object:
        """Receive requests for a service id (:meth:`rdmacm.soft.wire.base.Wire.listen`)."""
        token = self._mux.wire.listen(service_id, local)
        self._tokens[token] = service_id
        self._services[service_id] += 1
        return token

    def unlisten(self, token: object) -> None:
        """End a :meth:`listen`."""
        service_id = self._tokens.pop(token, None)
        if service_id is not None:
            self._services[service_id] -= 1
            if not self._services[service_id]:
                del self._services[service_id]
        self._mux.wire.unlisten(token)

    def ask_peer(self, qpn: int) -> Hashable:
        """See :meth:`rdmacm.soft.connection_manager.Gsi.ask_peer`."""
        return self._mux.ask_peer(qpn)

    def close(self) -> None:
        """Forget all peers, and their requests."""
        self._admission.clear()
        self._mux.wire.hold_request = None
        self._is_called = False
        self.outbox.clear()
        self._sources.clear()

    def received(
        self, data: memoryview, source: SocketAddress, destination: bytes, now: float, has_waited: bool = False
    ) -> None:
        """Process a packet for QP 1, if it is one of a connection manager. An exception is reported.

        ``has_waited``: it is a request that was not processed at once, and may be now.
        """
        dropped = self._mux.dropped
        try:
            if len(data) != PACKET_LENGTH:
                dropped["gsi_length"] += 1
                return
            opcode, flags, pkey, _, _, qkey, _ = BTH_DETH_STRUCT.unpack_from(data)
            if opcode != _UD_SEND_ONLY or flags & 0x3F:  # no padding, version 0
                dropped["gsi_opcode"] += 1
                return
            if qkey != GSI_Q_KEY or pkey & 0x7FFF != DEFAULT_PKEY & 0x7FFF:
                dropped["gsi_key"] += 1
                return
            attribute = data[_ATTRIBUTE_BYTE]
            if attribute in _REQUESTS and is_request(data):
                if not has_waited and not self._admits(data, source, destination, now):
                    return
            else:
                triage = Triage.PROCESS if self.triage is None else self.triage(data[_HEADERS_LENGTH:])
                if triage is Triage.DROPPED:
                    return
                if attribute == _REJ:  # its connection may not exist, because the REQ still waits
                    self._admission.withdraw(_key(data, source))
                if triage is Triage.PROCESS_SOME and not self._admits_small(now):
                    return
            known = self._sources.get((source, destination)) or self._new_source(source, destination)
            path, icrc, start, residues = known
            # Nearly every sender has the IPv4 identifications that this one has: the place of the packet in its train.
            crc = crc32(data, start)
            if crc not in residues:
                identification = icrc.solve((data,))
                if identification is None:
                    dropped["icrc"] += 1
                    return
                if identification < MOST_IN_TRAIN and not data[4]:  # which the start value takes for 0
                    residues.add(crc)
            if path not in self.outbox.answering:
                self.outbox.answered(path)
            if self.on_mad is not None:
                self.on_mad(data[_HEADERS_LENGTH:-ICRC_LENGTH], path, now)
        except Exception as error:
            self._mux.runtime.errors.report("gsi", "a management datagram is lost", error)

    def _admits_small(self, now: float) -> bool:
        """Whether to process a MAD that no application is asked about. Otherwise it is dropped."""
        if self._admission.admit_small(now):
            return True
        self._mux.dropped["request_flood"] += 1
        return False

    def _admits(self, data: memoryview, source: SocketAddress, destination: bytes, now: float) -> bool:
        """Whether to process a request now. Otherwise it waits, or is dropped."""
        (service_id,) = _SERVICE_ID.unpack_from(data)
        if service_id not in self._services or data[_ATTRIBUTE_BYTE] != _REQ:
            return self._admits_small(now)
        if self._admission.admit(now):
            return True
        self._wait(data, source, destination, now)
        if not self._is_called:
            self._process_waiting(now)
        return False

    def _wait(self, data: memoryview, source: SocketAddress, destination: bytes, now: float) -> None:
        if len(destination) == 4:
            share: Hashable = source[0]
        else:
            share = _packed_host(source[0], destination)[:_SOURCE_BYTES]
        if not self._admission.wait(share, _key(data, source), (bytes(data), source, destination), now):
            self._mux.dropped["request_flood"] += 1
        else:
            self._mux.wire.counters["request_waited"] += 1

    def _hold_request(self, data: memoryview, source: SocketAddress, destination: bytes) -> bool:
        """Let a request wait that has just been read. See :attr:`rdmacm.soft.wire.base.Wire.hold_request`."""
        if len(data) != PACKET_LENGTH or data[_ATTRIBUTE_BYTE] != _REQ or not is_request(data):
            return False
        (service_id,) = _SERVICE_ID.unpack_from(data)
        if service_id not in self._services:
            return False
        self._wait(data, source, destination, self._mux.runtime.clock())
        return True

    def _process_waiting(self, now: float) -> None:
        """Process the requests that may be, and have this called when the next one may."""
        self._is_called = False
        self._mux.wire.hold_request = None
        self.outbox.is_held = True
        try:
            while (request := self._admission.take(now)) is not None:
                data, source, destination = request
                self.received(memoryview(data), source, destination, now, has_waited=True)
        finally:
            self.outbox.is_held = False
            if self.outbox.count and not self._mux.is_processing:
                self.outbox.send()
        when = self._admission.next_time(now)
        if when is not None and not self._is_called:
            self._mux.wire.hold_request = self._hold_request
            self._is_called = True
            self._mux.runtime.call_at(when, self._process_waiting)
            if self.on_shortage is not None:
                self.on_shortage()

    def peer_answered(self) -> None:
        """See :meth:`rdmacm.soft.connection_manager.Gsi.peer_answered`."""
        self._admission.answered()
        if self._admission.waiting:
            now = self._mux.runtime.clock()
            request = self._admission.take(now)
            if request is not None:
                self.received(memoryview(request[0]), request[1], request[2], now, has_waited=True)

    def _undelivered(self, report: Undelivered) -> None:
        """Process the report that a request, which is whole up to its service id, was not delivered."""
        quote, destination, code, reporter = report
        if self._mux.undelivered_tap is not None and reporter:
            self._mux.undelivered_tap(quote, destination, code, reporter)
        opcode, _, _, _, _, qkey, source_qpn = BTH_DETH_STRUCT.unpack_from(quote)
        if opcode != _UD_SEND_ONLY or qkey != GSI_Q_KEY or source_qpn != GSI_QPN:
            self._mux.dropped["undelivered"] += 1
            return
        self.outbox.undelivered(destination)
        if self.on_undelivered is not None:
            (transaction_id,), (comm_id,) = _TRANSACTION_ID.unpack_from(quote), _COMM_ID.unpack_from(quote)

            def is_path(path: WirePath) -> bool:
                return path.remote == destination

            error = NetworkError(code, reporter)
            self.on_undelivered(comm_id, transaction_id, is_path, error, self._mux.runtime.clock())

    def _new_source(self, source: SocketAddress, destination: bytes) -> tuple[WirePath, Icrc, int, set[int]]:
        if len(self._sources) >= MAX_PEERS:
            self._sources.clear()
        remote = _packed_host(source[0], destination)
        icrc = icrc_between(remote, destination, source[1])
        path = WirePath(destination, remote, source[3] if len(source) == 4 else 0)
        found = path, icrc, icrc.start(PACKET_LENGTH), self._residues[icrc.is_ipv6]
        self._sources[source, destination] = found
        return found


def _key(data: memoryview, source: SocketAddress) -> bytes:
    """What the copies of a request, and its withdrawal, have in common: the sender and its communication id."""
    return source[0].encode() + data[_COMM_ID_BYTES]


def _packed_host(host: str, local: bytes) -> bytes:
    """The packed form of a host that a datagram to ``local`` came from."""
    if len(local) == 4:
        return inet_pton(AF_INET, host)
    return inet_pton(AF_INET6, host.partition("%")[0])
