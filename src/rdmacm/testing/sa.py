"""A simulated subnet administrator (SA), with records set by the test and with configurable faults.

Its answers are those of OpenSM, including the status codes of errors. It is a sans-IO engine:
:meth:`SubnetAdministrator.mad_received` and :meth:`SubnetAdministrator.timer` take datagrams and the time, and
:meth:`SubnetAdministrator.mads_to_send` returns the datagrams to send. :class:`rdmacm.testing.MemorySubnet` connects
one to simulated ports.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import product
from random import Random
from typing import Any, TypeAlias

from rdmacm.address import Gid
from rdmacm.ib.transport import IbPort
from rdmacm.proto.mad import RESPONSE, MadAddress
from rdmacm.proto.sa.attributes import Attribute, Selector
from rdmacm.proto.sa.mad import SaMad, SaMethod, SaStatus
from rdmacm.proto.sa.query import MemberMask, NodeMask, PathMask, ServiceMask
from rdmacm.proto.sa.records import RATE_GBPS, PathRecord
from rdmacm.proto.sa.rmpp import SEGMENT_SIZE, RmppFlag, RmppHeader, Sender
from rdmacm.proto.sa.subnet import (
    LEASE_FOREVER,
    ClassPortInfo,
    JoinState,
    MCMemberRecord,
    NodeRecord,
    ServiceRecord,
)
from rdmacm.proto.wire import Buffer, WireError
from rdmacm.testing.sa_matching import common_pkeys, fit_path, has_pkey, is_valid_path_query, matches

#: The broadcast group of IPoIB, which always exists. All groups of IPoIB have its Q_Key.
BROADCAST = Gid("ff12:401b:ffff::ffff:ffff")
_BROADCAST_Q_KEY = 0x0B1B
_FIRST_MLID = 0xC000

#: OpenSM's packet lifetime, 4.096 µs · 2^18 (about 1 s), and its capabilities.
_LIFETIME = 18
_CAPABILITIES = ClassPortInfo(capability_mask=0x2602, capability_mask2=0x16BD10 >> 5, resp_time_value=16)

#: Maximum length of :attr:`SubnetAdministrator.requests`.
_MAX_REQUESTS = 4096

#: The status of an answer, and its records.
Answer: TypeAlias = "tuple[int, list[bytes]]"

#: Components that OpenSM requires in a request that creates a group, joins one, or registers a service.
_REQUIRED_TO_CREATE = (
    MemberMask.MGID
    | MemberMask.PORT_GID
    | MemberMask.Q_KEY
    | MemberMask.PKEY
    | MemberMask.TRAFFIC_CLASS
    | MemberMask.SL
    | MemberMask.FLOW_LABEL
    | MemberMask.JOIN_STATE
)
_REQUIRED_TO_JOIN = MemberMask.MGID | MemberMask.PORT_GID | MemberMask.JOIN_STATE
#: The fields that the path to a multicast group has from the group.
_FIELDS_OF_GROUP = ("flow_label", "hop_limit", "traffic_class", "pkey", "sl", "mtu", "rate", "packet_life_time")
_IDENTIFIES_SERVICE = ServiceMask.SERVICE_ID | ServiceMask.SERVICE_GID


class TableMode(Enum):
    """How the answer to GetTable is sent."""

    #: In RMPP segments, which the requester acknowledges: the standard way.
    SEGMENTS = "segments"
    #: As one datagram of any length: what a transport that reassembles segments delivers.
    WHOLE = "whole"
    #: As one datagram of 256 bytes, with the records that fit: what OpenSM does over ibsim.
    CUT = "cut"


class SaFault(Enum):
    """What the administrator does instead of answering a request correctly."""

    #: It does not answer.
    SILENCE = "silence"
    #: It answers with the status BUSY.
    BUSY = "busy"
    #: The answer has another method, attribute, transaction id or class version.
    WRONG_METHOD = "wrong method"
    WRONG_ATTRIBUTE = "wrong attribute"
    WRONG_TRANSACTION = "wrong transaction"
    WRONG_VERSION = "wrong version"
    #: The answer is shorter than its header.
    TRUNCATED = "truncated"
    #: Before the correct answer it sends one to a request that was never made.
    UNSOLICITED = "unsolicited"


@dataclass(slots=True)
class _Group:
    """A multicast group: the properties of the group, and the join state of each member."""

    record: MCMemberRecord
    #: Join states by port GID.
    members: dict[Gid, int] = field(default_factory=dict)


class SubnetAdministrator:
    """A subnet administrator.

    ``random`` is the source of all chance. The other arguments are attributes, described below, and may be changed at
    any time.

    Attributes:

    - ``lid``: the administrator's own LID.
    - ``delay``: time before a request is answered, in seconds.
    - ``jitter``: maximum of the random additional time, in seconds.
    - ``silence``: probability (0 to 1) that a request is not answered.
    - ``busy``: probability (0 to 1) that a request is answered with the status BUSY.
    - ``table_mode``: how answers to GetTable are sent.
    - ``faults``: a script of faults: called with each request, it returns a fault, or None to leave the request to
      chance.
    - ``class_port_info``: the answer to a request for ClassPortInfo.
    - ``ports``: known ports, by their first GID.
    - ``requests``: the last 4096 requests: (arrival time in seconds, source address, datagram).
    - ``dropped``: counts dropped datagrams by reason: invalid ones, and those that OpenSM does not answer either.
    """

    def __init__(
        self,
        random: Random | None = None,
        *,
        lid: int = 1,
        delay: float = 0.0,
        jitter: float = 0.0,
        silence: float = 0.0,
        busy: float = 0.0,
        table_mode: TableMode = TableMode.SEGMENTS,
    ) -> None:
        self.lid = lid
        self.delay = delay
        self.jitter = jitter
        self.silence = silence
        self.busy = busy
        self.table_mode = table_mode
        self.faults: Callable[[SaMad], SaFault | None] | None = None
        self.class_port_info = _CAPABILITIES
        self.ports: dict[Gid, IbPort] = {}
        self.requests: deque[tuple[float, MadAddress, SaMad]] = deque(maxlen=_MAX_REQUESTS)
        self.dropped: Counter[str] = Counter()
        self._random = random or Random(0)
        #: Node descriptions, by the port's first GID.
        self._descriptions: dict[Gid, str] = {}
        #: Paths set by the test, by first GIDs of source and destination.
        self._paths: dict[tuple[Gid, Gid], tuple[PathRecord, ...]] = {}
        #: Services and the end of their leases in seconds, by service id, GID and P_Key.
        self._services: dict[tuple[int, Gid, int], tuple[ServiceRecord, float | None]] = {}
        #: Multicast groups, by MGID.
        self._groups: dict[Gid, _Group] = {}
        #: The time of the last call of the engine, in seconds.
        self._now = 0.0
        #: The MLID of the next new group.
        self._next_mlid = _FIRST_MLID
        #: Segmented answers under way, by LID and transaction id of the requester.
        self._transfers: dict[tuple[int, int], tuple[Sender, MadAddress, SaMad]] = {}
        #: Heap of requests that wait for their delay: (due time, number, source address, request, fault).
        self._delayed: list[tuple[float, int, MadAddress, SaMad, SaFault | None]] = []
        #: Number of requests that have been in ``_delayed``.
        self._count = 0
        #: Datagrams that :meth:`mads_to_send` has not returned yet.
        self._outbox: list[tuple[MadAddress, bytes]] = []
        broadcast = MCMemberRecord(BROADCAST, q_key=_BROADCAST_Q_KEY, pkey=0xFFFF, packet_life_time=_LIFETIME, scope=2)
        self.add_group(broadcast)
        #: The function that answers a request, by attribute id and method.
        self._handlers: dict[int, dict[int, Callable[[MadAddress, SaMad], Answer]]] = {
            Attribute.CLASS_PORT_INFO: {SaMethod.GET: lambda _, __: (0, [self.class_port_info.pack()])},
            Attribute.PATH_RECORD: dict.fromkeys((SaMethod.GET, SaMethod.GET_TABLE), self._get_paths),
            Attribute.NODE_RECORD: dict.fromkeys((SaMethod.GET, SaMethod.GET_TABLE), self._get_nodes),
            Attribute.SERVICE_RECORD: {
                **dict.fromkeys((SaMethod.GET, SaMethod.GET_TABLE), self._get_services),
                SaMethod.SET: self._set_service,
                SaMethod.DELETE: self._delete_service,
            },
            Attribute.MC_MEMBER_RECORD: {
                **dict.fromkeys((SaMethod.GET, SaMethod.GET_TABLE), self._get_groups),
                SaMethod.SET: self._join,
                SaMethod.DELETE: self._leave,
            },
        }

    # -- records ----------------------------------------------------------------------------------------------

    def add_port(self, port: IbPort, description: str = "") -> None:
        """Add or update a port; raises ValueError for a port without a LID or GID."""
        if not port.lid or not port.gids:
            raise ValueError(f"{port.device} has no LID or no GID")
        self.ports[port.gids[0]] = port
        self._descriptions[port.gids[0]] = description or port.device

    def remove_port(self, gid: Gid) -> None:
        """Remove a port by its first GID. Its services stay until their leases end."""
        self.ports.pop(gid, None)
        for group in self._groups.values():
            group.members.pop(gid, None)

    def set_paths(self, source: Gid, destination: Gid, *paths: PathRecord) -> None:
        """Set the paths from one port to another, by their first GIDs, in order of preference.

        Without paths the destination is unreachable. The reverse direction does not change. A path with a service id is
        returned only to queries for that service.
        """
        self._paths[source, destination] = paths

    def reset_paths(self) -> None:
        """Undo all :meth:`set_paths`: all ports reach each other by computed paths."""
        self._paths.clear()

    def path(self, source: Gid, destination: Gid) -> PathRecord:
        """Return the computed path between two ports, by their first GIDs; a start for :meth:`set_paths`."""
        one, other = self.ports[source], self.ports[destination]
        return PathRecord(
            dgid=destination,
            sgid=source,
            dlid=other.lid,
            slid=one.lid,
            numb_path=0,
            pkey=next(iter(common_pkeys(one.pkeys, other.pkeys)), 0),
            mtu=min(one.active_mtu, other.active_mtu),
            rate=min(one.rate, other.rate, key=lambda code: RATE_GBPS.get(code, 0)),
            packet_life_time=_LIFETIME if one is not other else 0,
        )

    def add_service(self, record: ServiceRecord, now: float = 0.0) -> None:
        """Add a service until its lease ends, counted in seconds from ``now``."""
        forever = record.service_lease == LEASE_FOREVER
        ends = None if forever else now + record.service_lease
        self._services[record.service_id, record.service_gid, record.service_pkey] = record, ends

    def services(self, now: float) -> list[ServiceRecord]:
        """Return the services whose lease has not ended at ``now`` (seconds)."""
        self._services = {key: it for key, it in self._services.items() if it[1] is None or now < it[1]}
        return [record for record, _ in self._services.values()]

    def add_group(self, record: MCMemberRecord) -> MCMemberRecord:
        """Add a multicast group without members; return its record with an MLID and defaults for MTU and rate."""
        exactly: dict[str, Any] = dict.fromkeys(
            ("mtu_selector", "rate_selector", "packet_life_time_selector"), Selector.EXACTLY
        )
        record = record.replace(
            port_gid=Gid(),
            mlid=self._next_mlid,
            mtu=record.mtu or 4,
            rate=record.rate or 3,
            join_state=0,
            **exactly,
        )
        self._next_mlid += 1
        self._groups[record.mgid] = _Group(record)
        return record

    def members(self, mgid: Gid) -> dict[Gid, JoinState]:
        """Return the members of a multicast group by port GID, with their join states."""
        group = self._groups.get(mgid)
        return {gid: JoinState(state) for gid, state in group.members.items()} if group else {}

    # -- the engine -------------------------------------------------------------------------------------------

    def mad_received(self, source: MadAddress, mad: Buffer, now: float) -> None:
        """Process a datagram: a request, or an acknowledgement of a segmented answer. ``now`` is in seconds."""
        self._now = now
        try:
            request = SaMad.unpack(mad)
        except WireError:
            self.dropped["malformed"] += 1
            return
        if request.method & RESPONSE:
            self.dropped["response"] += 1
            return
        if request.rmpp.is_active:
            self._ack_received((source.lid, request.transaction_id), request.rmpp, now)
            return
        self.requests.append((now, source, request))
        fault = self._choose_fault(request)
        if fault is SaFault.SILENCE:
            return
        due = now + self.delay + self._random.random() * self.jitter
        self._count += 1
        heapq.heappush(self._delayed, (due, self._count, source, request, fault))
        self.timer(now)

    def timer(self, now: float) -> None:
        """Answer the requests that are due, and retransmit segments."""
        self._now = now
        while self._delayed and self._delayed[0][0] <= now:
            _, _, source, request, fault = heapq.heappop(self._delayed)
            self._answer(source, request, fault, now)
        for key, (sender, _, _) in list(self._transfers.items()):
            sender.timer(now)
            self._send_segments(key)

    def next_deadline(self) -> float | None:
        """Return the time in seconds at which :meth:`timer` must be called, or None."""
        deadlines = [sender.next_deadline() for sender, _, _ in self._transfers.values()]
        deadlines.append(self._delayed[0][0] if self._delayed else None)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def mads_to_send(self) -> list[tuple[MadAddress, bytes]]:
        """Return the datagrams to send, in order, each once, as (destination address, MAD)."""
        mads, self._outbox = self._outbox, []
        return mads

    def _choose_fault(self, request: SaMad) -> SaFault | None:
        scripted = self.faults(request) if self.faults is not None else None
        if scripted is not None:
            return scripted
        if self._random.random() < self.silence:
            return SaFault.SILENCE
        return SaFault.BUSY if self._random.random() < self.busy else None

    def _answer(self, source: MadAddress, request: SaMad, fault: SaFault | None, now: float) -> None:
        if (source.lid, request.transaction_id) in self._transfers:
            self.dropped["repeated"] += 1  # its answer is under way
            return
        handlers = self._handlers.get(request.attribute_id)
        if handlers is None:
            self.dropped["attribute"] += 1
            return
        method = SaMethod(request.method).response if request.method in set(SaMethod) else request.method | RESPONSE
        answer = replace(request, method=method, data=b"", status=0, attribute_offset=0)
        if fault is SaFault.BUSY:
            self._send(source, replace(answer, status=SaStatus.BUSY))
            return
        if fault is not None:
            self._send(source, replace(answer, **_ALTERED_FIELDS.get(fault, {})), fault)
            if fault is not SaFault.UNSOLICITED:
                return
        handler = handlers.get(request.method)
        if handler is None:
            if request.method not in (SaMethod.GET_TABLE, SaMethod.GET_MULTI):
                self.dropped["method"] += 1
                return
            is_info = request.attribute_id == Attribute.CLASS_PORT_INFO
            refusal = SaStatus.REQ_INVALID if is_info else SaStatus.UNSUPPORTED_METHOD_ATTRIBUTE
            self._send(source, replace(answer, status=refusal))
            return
        try:
            status, records = handler(source, request)
        except WireError:  # the request is shorter than its record
            status, records = SaStatus.REQ_INVALID, []
        if request.method == SaMethod.GET_TABLE and status == 0:
            self._send_table(source, answer, records, now)
            return
        if request.method == SaMethod.GET and status == 0 and len(records) != 1:
            status, records = (SaStatus.TOO_MANY_RECORDS if records else SaStatus.NO_RECORDS), []
        self._send(source, _with_records(answer, records, status))

    def _send(self, address: MadAddress, mad: SaMad, fault: SaFault | None = None) -> None:
        packed = mad.pack(fill=False)
        if fault is SaFault.TRUNCATED:
            packed = packed[:40]
        elif fault is SaFault.WRONG_VERSION:
            packed = packed[:2] + b"\1" + packed[3:]
        self._outbox.append((address, packed))

    def _send_table(self, source: MadAddress, answer: SaMad, records: list[bytes], now: float) -> None:
        answer = _with_records(answer, records, 0)
        if self.table_mode is TableMode.SEGMENTS:
            key = source.lid, answer.transaction_id
            self._transfers[key] = Sender(answer.data, now), source, answer
            self._send_segments(key)
            return
        rmpp = RmppHeader(flags=RmppFlag.ACTIVE) if self.table_mode is TableMode.CUT else answer.rmpp
        data = answer.data[:SEGMENT_SIZE] if self.table_mode is TableMode.CUT else answer.data
        self._send(source, replace(answer, rmpp=rmpp, data=data))

    def _ack_received(self, key: tuple[int, int], header: RmppHeader, now: float) -> None:
        if key not in self._transfers:
            self.dropped["rmpp"] += 1
            return
        self._transfers[key][0].received(header, now)
        self._send_segments(key)

    def _send_segments(self, key: tuple[int, int]) -> None:
        """Send the next segments of an answer; end the transfer once all are acknowledged."""
        sender, source, answer = self._transfers[key]
        for header, data in sender.to_send():
            self._outbox.append((source, replace(answer, rmpp=header, data=data).pack()))
        if sender.is_done:
            del self._transfers[key]

    # -- paths ------------------------------------------------------------------------------------------------

    def _get_paths(self, _: MadAddress, request: SaMad) -> Answer:
        query, mask = PathRecord.unpack(request.data[: PathRecord.SIZE]), PathMask(request.component_mask)
        if not is_valid_path_query(query, mask):
            return SaStatus.REQ_INVALID, []
        limit = 1 if request.method == SaMethod.GET else query.numb_path if mask & PathMask.NUMB_PATH else 0x7F
        sources = self._matching_ports(mask & PathMask.SGID, query.sgid, mask & PathMask.SLID, query.slid)
        if mask & PathMask.DGID and query.dgid[0] == 0xFF:
            is_any = not mask & (PathMask.SGID | PathMask.SLID)
            return self._find_multicast_path(query, None if is_any else sources)
        destinations = self._matching_ports(mask & PathMask.DGID, query.dgid, mask & PathMask.DLID, query.dlid)
        records = []
        for source in sources:
            for destination in destinations:
                paths = self._paths_between(source, destination, query, mask)
                fitting = (fit_path(path, query, mask) for path in paths)
                found = [path for path in fitting if path is not None]
                records += [path.pack() for path in found[:limit]]
        return 0, records

    def _matching_ports(self, by_gid: int, gid: Gid, by_lid: int, lid: int) -> list[IbPort]:
        """Return the ports that match one end of a path query."""
        return [
            port
            for port in self.ports.values()
            if not (by_gid and gid not in port.gids) and not (by_lid and lid >> port.lmc != port.lid >> port.lmc)
        ]

    def _paths_between(
        self, source: IbPort, destination: IbPort, query: PathRecord, mask: PathMask
    ) -> Iterable[PathRecord]:
        """Return the paths that the test has set, or the computed ones: between LIDs of equal rank first, as OpenSM."""
        given = self._paths.get((source.gids[0], destination.gids[0]))
        if given is not None:
            return given
        pkeys = common_pkeys(source.pkeys, destination.pkeys)
        if mask & PathMask.PKEY:
            pkeys = [pkey for pkey in pkeys if pkey & 0x7FFF == query.pkey & 0x7FFF]
        # A query by another GID or LID of a port is answered with that GID or LID.
        asked: dict[str, Any] = {
            name: getattr(query, name) for name in ("dgid", "sgid", "dlid", "slid") if mask & PathMask[name.upper()]
        }
        path = self.path(source.gids[0], destination.gids[0]).replace(**asked)
        slids = [path.slid] if "slid" in asked else source.lids
        dlids = [path.dlid] if "dlid" in asked else destination.lids
        ranks = sorted(product(range(len(slids)), range(len(dlids))), key=lambda pair: pair[0] != pair[1])
        return [path.replace(pkey=pkey, slid=slids[i], dlid=dlids[j]) for pkey in pkeys[:1] for i, j in ranks]

    def _find_multicast_path(self, query: PathRecord, sources: list[IbPort] | None) -> Answer:
        group = self._groups.get(query.dgid)
        if group is None or (sources is not None and not any(set(port.gids) & set(group.members) for port in sources)):
            return 0, []
        of_group: dict[str, Any] = {name: getattr(group.record, name) for name in _FIELDS_OF_GROUP}
        path = PathRecord(query.dgid, query.sgid, dlid=group.record.mlid, reversible=False, **of_group)
        return 0, [path.pack()]

    # -- nodes ------------------------------------------------------------------------------------------------

    def _get_nodes(self, _: MadAddress, request: SaMad) -> Answer:
        query = NodeRecord.unpack(request.data[: NodeRecord.SIZE])
        records = []
        for gid, port in self.ports.items():
            node = NodeRecord(
                lid=port.lid,
                system_image_guid=port.node_guid,
                node_guid=port.node_guid,
                port_guid=port.port_guid,
                partition_cap=max(1, len(port.pkeys)),
                local_port_num=port.port_num,
                node_description=self._descriptions[gid].encode()[:64],
            )
            if matches(node, query, NodeMask(request.component_mask)):
                records.append(node.pack())
        return 0, records

    # -- services ---------------------------------------------------------------------------------------------

    def _get_services(self, _: MadAddress, request: SaMad) -> Answer:
        query, mask = ServiceRecord.unpack(request.data[: ServiceRecord.SIZE]), ServiceMask(request.component_mask)
        found = [record for record in self.services(self._now) if matches(record, query, mask)]
        return 0, [_without_key(record).pack() for record in found]

    def _set_service(self, source: MadAddress, request: SaMad) -> Answer:
        record, mask = ServiceRecord.unpack(request.data[: ServiceRecord.SIZE]), ServiceMask(request.component_mask)
        if mask & _IDENTIFIES_SERVICE != _IDENTIFIES_SERVICE:
            return SaStatus.REQ_INVALID, []
        if mask & ServiceMask.SERVICE_PKEY:
            owners = [port for port in self.ports.values() if record.service_gid in port.gids]
            requesters = [port for port in self.ports.values() if port.lid == source.lid]
            if not all(has_pkey(port.pkeys, record.service_pkey) for port in owners + requesters) or not owners:
                return SaStatus.REQ_INVALID, []
        else:
            record = record.replace(service_pkey=0)
        if not mask & ServiceMask.SERVICE_LEASE:
            record = record.replace(service_lease=LEASE_FOREVER)
        self.add_service(record, self._now)
        pkey = record.service_pkey if mask & ServiceMask.SERVICE_PKEY else 0xFFFF
        return 0, [_without_key(record).replace(service_pkey=pkey).pack()]

    def _delete_service(self, _: MadAddress, request: SaMad) -> Answer:
        query, mask = ServiceRecord.unpack(request.data[: ServiceRecord.SIZE]), ServiceMask(request.component_mask)
        self.services(self._now)
        pkey = query.service_pkey if mask & ServiceMask.SERVICE_PKEY else 0
        found = self._services.pop((query.service_id, query.service_gid, pkey), None)
        return (0, [_without_key(found[0]).pack()]) if found else (SaStatus.NO_RECORDS, [])

    # -- multicast --------------------------------------------------------------------------------------------

    def _get_groups(self, _: MadAddress, request: SaMad) -> Answer:
        query, mask = MCMemberRecord.unpack(request.data[: MCMemberRecord.SIZE]), MemberMask(request.component_mask)
        # Like OpenSM, report groups but not their members.
        found = [
            group.record.pack()
            for group in self._groups.values()
            if (not mask & MemberMask.PORT_GID or query.port_gid in group.members)
            and matches(group.record, query, mask & ~(MemberMask.PORT_GID | MemberMask.JOIN_STATE))
        ]
        return 0, found

    def _join(self, _: MadAddress, request: SaMad) -> Answer:
        query, mask = MCMemberRecord.unpack(request.data[: MCMemberRecord.SIZE]), MemberMask(request.component_mask)
        if mask & _REQUIRED_TO_JOIN != _REQUIRED_TO_JOIN:
            return SaStatus.REQ_INSUFFICIENT_COMPONENTS, []
        if not query.join_state or not any(query.port_gid in port.gids for port in self.ports.values()):
            return SaStatus.REQ_INVALID, []
        group = self._groups.get(query.mgid)
        if group is None:
            if mask & _REQUIRED_TO_CREATE != _REQUIRED_TO_CREATE:
                return SaStatus.REQ_INSUFFICIENT_COMPONENTS, []
            if not _may_be_created(query):
                return SaStatus.REQ_INVALID, []
            self.add_group(query)
            group = self._groups[query.mgid]
        else:
            same = mask & (MemberMask.Q_KEY | MemberMask.PKEY | MemberMask.SL | MemberMask.FLOW_LABEL)
            if not matches(group.record, query, same):
                return SaStatus.REQ_INVALID, []
        state = group.members.get(query.port_gid, 0) | query.join_state
        group.members[query.port_gid] = state
        return 0, [group.record.replace(port_gid=query.port_gid, join_state=state).pack()]

    def _leave(self, _: MadAddress, request: SaMad) -> Answer:
        query, mask = MCMemberRecord.unpack(request.data[: MCMemberRecord.SIZE]), MemberMask(request.component_mask)
        if mask & _REQUIRED_TO_JOIN != _REQUIRED_TO_JOIN:
            return SaStatus.REQ_INSUFFICIENT_COMPONENTS, []
        group = self._groups.get(query.mgid)
        state = group.members.get(query.port_gid, 0) if group else 0
        if group is None or not state & query.join_state:
            return SaStatus.REQ_INVALID, []
        left = state & ~query.join_state
        if left:
            group.members[query.port_gid] = left
        else:
            del group.members[query.port_gid]
        has_full_member = any(state & JoinState.FULL_MEMBER for state in group.members.values())
        if not has_full_member and query.mgid != BROADCAST:
            del self._groups[query.mgid]
        none = dict.fromkeys(("q_key", "mlid", "mtu", "rate", "pkey", "packet_life_time"), 0)
        return 0, [group.record.replace(port_gid=query.port_gid, **none).pack()]


#: The fields of the answer that a fault changes.
_ALTERED_FIELDS: dict[SaFault, dict[str, Any]] = {
    SaFault.WRONG_METHOD: {"method": SaMethod.REPORT_RESP},
    SaFault.WRONG_ATTRIBUTE: {"attribute_id": Attribute.TRACE_RECORD},
    SaFault.WRONG_TRANSACTION: {"transaction_id": 0xBAD_0000_0000},
    SaFault.UNSOLICITED: {"transaction_id": 0x5EE_0000_0000},
}


def _with_records(answer: SaMad, records: list[bytes], status: int) -> SaMad:
    """Return the answer with its records, each padded to a multiple of 8 bytes."""
    size = -(-len(records[0]) // 8) * 8 if records else 0
    data = b"".join(record.ljust(size, b"\0") for record in records)
    return replace(answer, status=status, data=data, attribute_offset=size // 8)


def _without_key(record: ServiceRecord) -> ServiceRecord:
    """Return a service record without its key, which the administrator keeps secret."""
    return record.replace(service_key=bytes(16))


def _may_be_created(query: MCMemberRecord) -> bool:
    """Return whether OpenSM would create this group.

    It refuses librdmacm's signature with link-local scope, and another Q_Key than the broadcast group's for IPoIB.
    """
    if query.mgid[0] != 0xFF or not query.mgid[1] & 0xF or not query.join_state & JoinState.FULL_MEMBER:
        return False
    signature, scope = query.mgid[2:4], query.mgid[1] & 0xF
    if signature == b"\xa0\x1b":
        return scope != 2
    return signature not in (b"\x40\x1b", b"\x60\x1b") or query.q_key == _BROADCAST_Q_KEY
