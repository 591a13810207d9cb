"""Management datagrams: the messages of the communication manager, and queries to the subnet administrator."""

from __future__ import annotations

from contextlib import suppress
from typing import TypeAlias

from rdmacm.errors import printable
from rdmacm.proto.cm.codes import MessageKind, RejectReason, SidrStatus
from rdmacm.proto.cm.messages import (
    APR,
    DREP,
    DREQ,
    LAP,
    MRA,
    REJ,
    REP,
    REQ,
    RTU,
    SIDR_REP,
    SIDR_REQ,
    Message,
    unpack_mad,
)
from rdmacm.proto.cm.private_data import HEADER_SIZE, IP_VERSIONS, PrivateDataHeader
from rdmacm.proto.mad import MAD_SIZE, RESPONSE, MgmtClass
from rdmacm.proto.sa.attributes import Attribute
from rdmacm.proto.sa.mad import SaMad, SaMethod, describe_status
from rdmacm.proto.wire import WireError
from rdmacm.trace.connection import RC, SA, UC, UD, XRC, Connection, Pair, split
from rdmacm.trace.registry import MOST_CONNECTIONS, Connections

_Named: TypeAlias = MRA | REJ | REP | RTU | DREQ | DREP | LAP | APR
_KINDS = {0: RC, 1: UC, 3: XRC}
#: Replies to a request that may tell another id: after a restart of its sender, say.
_MOST_REPLIES = 8
#: Queries of one pair of ends that wait for an answer.
_MOST_QUERIES = 256
_MOST_HEARD = 65536
#: Nanoseconds within which no manager sends a message again: the same one is a copy, captured at two interfaces, say.
_COPY, _MOST_RECENT = 50_000_000, 64


def mtu_of(code: int) -> int:
    """Bytes of an MTU by its code, or 0."""
    return 128 << code if 1 <= code <= 5 else 0


class Managers:
    """The connection managers of all hosts in a capture."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        #: By both addresses and the id that the sender of a message has given the connection.
        self._by_id: dict[tuple[Pair, int], Connection] = {}
        self._sidr: dict[tuple[Pair, int], Connection] = {}
        self._queries: dict[tuple[Pair, int], Connection] = {}
        #: Messages of connections whose beginning the capture does not have.
        self.strays: int = 0
        #: Addresses that have sent a message to another one, both joined.
        self.heard: set[Pair] = set()
        #: The last messages, and when they came; and how many came twice at once.
        self._recent: dict[tuple[Pair, bytes], int] = {}
        self.copies: int = 0

    def received(self, pair: Pair, data: bytes, pkey: int, now: int) -> bool:
        """A management datagram for a queue pair 1; False if it is malformed."""
        if len(data) != MAD_SIZE:
            return False
        if len(self.heard) < _MOST_HEARD:
            self.heard.add(pair)
        before = self._recent.pop((pair, data), None)
        if len(self._recent) >= _MOST_RECENT:
            del self._recent[next(iter(self._recent))]
        self._recent[pair, data] = now
        if before is not None and now - before < _COPY:
            self.copies += 1
            return True
        if data[1] == MgmtClass.SUBN_ADM:
            return self._administration(pair, data, now)
        if data[1] != MgmtClass.COM_MGT:
            return True
        try:
            message, tid = unpack_mad(data)
        except WireError:
            return False
        connection = self._take(pair, message, tid, now)
        if connection is None:
            self.strays += 1
        else:
            connection.last = max(connection.last, now)
            connection.add_pkey(pkey)
        return True

    def named(self, pair: Pair, comm_id: int) -> Connection | None:
        """The connection that the source of a pair calls by this id."""
        return self._by_id.get((pair, comm_id)) or self._sidr.get((pair, comm_id))

    def _find(self, pair: Pair, message: _Named) -> tuple[Connection | None, int]:
        """The connection of a message, and which of its ends is the sender."""
        source, destination = split(pair)
        local, remote = message.local_comm_id, message.remote_comm_id
        found = self._by_id.get((destination + source, remote)) if remote else None
        if found is not None:
            side = 1 if (found.ends[0].address, found.ends[0].comm_id) == (destination, remote) else 0
            # A REP tells the sender's id for the first time; a REJ of a request has none.
            if isinstance(message, REP) or not local or found.ends[side].comm_id in (None, local):
                return found, side
        found = self._by_id.get((pair, local)) if local and not isinstance(message, REP) else None
        if found is not None:
            return found, 0 if (found.ends[0].address, found.ends[0].comm_id) == (source, local) else 1
        return None, 0

    def _take(self, pair: Pair, message: Message, tid: int, now: int) -> Connection | None:
        if isinstance(message, REQ):
            return self._request(pair, message, tid, now)
        if isinstance(message, SIDR_REQ):
            return self._lookup(pair, message, now)
        if isinstance(message, SIDR_REP):
            return self._found(pair, message, now)
        connection, side = self._find(pair, message)
        if connection is None:
            connection, side = self._late(pair, message, now)
        if connection is None:
            return None
        name = type(message).__name__
        again = connection.count(name) > 1
        detail = ""
        if isinstance(message, REP):
            detail = self._reply(connection, pair, message, now, again)
        elif isinstance(message, RTU):
            connection.established = connection.established or now
        elif isinstance(message, REJ):
            connection.rejected, connection.rejected_by = message, side
            detail = f"{rejection_name(message.reason)}"
            if message.message_rejected != MessageKind.REQ:
                detail += " of the REP" if message.message_rejected == MessageKind.REP else " of the connection"
        elif isinstance(message, DREQ):
            connection.closed_by = side if connection.closed_by is None else connection.closed_by
        elif isinstance(message, MRA):
            detail = "the answer takes longer"
        elif isinstance(message, LAP):
            detail = f"alternate path to {message.alternate_remote_gid}"
        elif isinstance(message, APR):
            detail = f"status {message.ap_status}"
        connection.note(now, side, name, detail, (name, message.local_comm_id, message.remote_comm_id))
        return connection

    # -- the handshake -----------------------------------------------------------------------------------------

    def _request(self, pair: Pair, message: REQ, tid: int, now: int) -> Connection | None:
        key = pair, message.local_comm_id
        connection = self._by_id.get(key)
        if connection is None or not _same(connection.request, message):
            connection = self._connections.new(_KINDS.get(message.transport_service_type, RC), pair, now)
            if connection is None:
                return None
            self._by_id[key] = connection
            connection.request = message
            connection.first_request = now
            connection.mtu = mtu_of(message.path_mtu)
            connection.add_pkey(message.partition_key)
            first = connection.ends[0]
            first.comm_id, first.qpn, first.psn = message.local_comm_id, message.local_qpn, message.starting_psn
            _service(connection, message.service_id, message.private_data)
        connection.last_request = now
        connection.count("REQ")
        to = f"port {connection.port} ({connection.port_space})" if connection.port_space else ""
        to = to or f"service id {message.service_id:#x}"
        detail = f"{to}, QP {message.local_qpn:#08x}, PSN {message.starting_psn:#08x}, MTU {connection.mtu}"
        connection.note(now, 0, "REQ", detail, ("REQ", message.local_comm_id, tid & 0xFFFFFFFF))
        return connection

    def _reply(self, connection: Connection, pair: Pair, message: REP, now: int, again: bool) -> str:
        first, second = connection.ends
        # The passive side of XRC has its queue pair number where others have an EE context.
        qpn = message.local_eecn if connection.kind == XRC and message.local_eecn else message.local_qpn
        if not again or (second.comm_id != message.local_comm_id and connection.sent["REP"] <= _MOST_REPLIES):
            second.comm_id, second.qpn, second.psn = message.local_comm_id, qpn, message.starting_psn
            self._by_id[pair, message.local_comm_id] = connection
            forth = self._connections.add_half(connection, 0, qpn, now)
            # Each end says with which PSN the other one begins.
            forth.next_psn = message.starting_psn
            if first.qpn:
                back = self._connections.add_half(connection, 1, first.qpn, now)
                back.next_psn = -1 if first.psn is None else first.psn
        return f"QP {qpn:#08x}, PSN {message.starting_psn:#08x}"

    def _late(self, pair: Pair, message: Message, now: int) -> tuple[Connection | None, int]:
        """The connection of a message whose request is not in the capture."""
        source, destination = split(pair)
        if isinstance(message, DREQ):
            half = self._connections.halves.get((pair, message.remote_qpn_eecn))
            if half is None:
                return None, 0
            connection, side = half.connection, half.connection.halves.index(half)
            connection.ends[side].comm_id = message.local_comm_id
            if len(self._by_id) < 4 * MOST_CONNECTIONS:
                self._by_id[pair, message.local_comm_id] = connection
            return connection, side
        if not isinstance(message, REP | REJ) or not message.remote_comm_id:
            return None, 0
        begun = self._connections.new(RC, destination + source, now)
        if begun is not None:
            begun.ends[0].comm_id = message.remote_comm_id
            self._by_id[destination + source, message.remote_comm_id] = begun
        return begun, 1

    # -- datagrams ---------------------------------------------------------------------------------------------

    def _lookup(self, pair: Pair, message: SIDR_REQ, now: int) -> Connection | None:
        key = pair, message.request_id
        connection = self._sidr.get(key)
        if connection is None or connection.service_id != message.service_id or connection.status is not None:
            connection = self._connections.new(UD, pair, now)
            if connection is None:
                return None
            self._sidr[key] = connection
            connection.first_request = now
            connection.ends[0].comm_id = message.request_id
            connection.add_pkey(message.partition_key)
            _service(connection, message.service_id, message.private_data)
        connection.last_request = now
        connection.count("SIDR_REQ")
        to = f"port {connection.port} ({connection.port_space})" if connection.port_space else ""
        to = to or f"service id {message.service_id:#x}"
        connection.note(now, 0, "SIDR_REQ", to, ("SIDR_REQ", message.request_id))
        return connection

    def _found(self, pair: Pair, message: SIDR_REP, now: int) -> Connection | None:
        source, destination = split(pair)
        connection = self._sidr.get((destination + source, message.request_id))
        if connection is None:
            return None
        again = connection.count("SIDR_REP") > 1
        connection.status = message.status
        if message.status:
            connection.private_data = message.private_data
            with suppress(ValueError):
                connection.refusal = SidrStatus(message.status).name.lower().replace("_", " ")
            detail = connection.refusal or f"status {message.status}"
        else:
            detail = f"QP {message.qpn:#08x}, Q_Key {message.q_key:#x}"
            connection.established = connection.established or now
            if not again and (destination + source, message.qpn) not in self._connections.halves:
                self._connections.add_half(connection, 0, message.qpn, now)
        connection.note(now, 1, "SIDR_REP", detail, ("SIDR_REP", message.request_id))
        return connection

    # -- the subnet administrator ------------------------------------------------------------------------------

    def _administration(self, pair: Pair, data: bytes, now: int) -> bool:
        try:
            mad = SaMad.unpack(data)
        except WireError:
            return False
        source, destination = split(pair)
        is_answer = bool(mad.method & RESPONSE)
        ends = destination + source if is_answer else pair
        # The kernel has the upper half of the transaction id for itself.
        key = ends, mad.transaction_id & 0xFFFFFFFF
        connection = self._queries.get(key)
        if connection is None:
            latest = self._connections.latest.get(ends)
            if latest is not None and latest.kind == SA and latest.ends[0].address == ends[: len(ends) // 2]:
                connection = latest
            else:
                connection = self._connections.new(SA, ends, now)
            if connection is None:
                return True
            if len(self._queries) >= _MOST_QUERIES:
                del self._queries[next(iter(self._queries))]
            self._queries[key] = connection
        name = f"{_name(SaMethod, mad.method)} {_name(Attribute, mad.attribute_id)}"
        connection.last = max(connection.last, now)
        connection.attribute = _name(Attribute, mad.attribute_id)
        connection.count("answer" if is_answer else "query")
        if is_answer:
            connection.status = mad.status
            connection.refusal = describe_status(mad.status) if mad.status else ""
            connection.established = connection.established or now
            self._queries.pop(key, None)
        connection.note(now, 1 if is_answer else 0, name, connection.refusal if is_answer else "", (key[1], name))
        return True


def _name(kind: type[SaMethod | Attribute], value: int) -> str:
    try:
        return "".join(part.capitalize() for part in kind(value).name.split("_"))
    except ValueError:
        return f"{value:#x}"


def _same(known: REQ | None, message: REQ) -> bool:
    return (
        known is not None
        and known.local_qpn == message.local_qpn
        and known.starting_psn == message.starting_psn
        and known.service_id == message.service_id
    )


def _service(connection: Connection, service_id: int, private_data: bytes) -> None:
    """Take the port, and the addresses in the private data, of a request."""
    connection.service_id = service_id
    if not connection.port_space:
        return
    first, second = connection.ends
    second.port = service_id & 0xFFFF
    with suppress(WireError):
        header = PrivateDataHeader.unpack(private_data)
        if header.version == 0 and header.ip_version in IP_VERSIONS and connection.port_space != "IB":
            first.port = header.source_port
            connection.private_data = private_data[HEADER_SIZE:]


def rejection_name(reason: int) -> str:
    """A reject reason by number and name: ``28 (consumer defined)``."""
    try:
        return f"{reason} ({RejectReason(reason).name.lower().replace('_', ' ')})"
    except ValueError:
        return str(reason)


def private_text(data: bytes) -> str:
    """Private data for people: as text if it is, else in hexadecimal; "" if it is all zeros."""
    data = data.rstrip(b"\0")
    if not data:
        return ""
    if all(32 <= byte < 127 for byte in data):
        return printable(repr(data.decode("ascii")))
    return data[:32].hex() + ("..." if len(data) > 32 else "")
