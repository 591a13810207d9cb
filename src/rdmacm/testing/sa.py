"""A subnet administrator without a subnet: what it knows is what the test says, and it errs when it is told to.

Its answers are those of OpenSM, down to the status of what it refuses. It is an engine: datagrams and the time go
in by :meth:`SubnetAdministrator.mad_received` and :meth:`SubnetAdministrator.timer`, datagrams come out of
:meth:`SubnetAdministrator.mads_to_send`. :class:`rdmacm.testing.MemorySubnet` has one and ports that reach it.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntFlag
from random import Random
from typing import Any, TypeAlias

from rdmacm.address import Gid
from rdmacm.ib.transport import IbPort
from rdmacm.proto.mad import RESPONSE, MadAddress
from rdmacm.proto.sa.attributes import Attribute
from rdmacm.proto.sa.mad import SaMad, SaMethod, SaStatus
from rdmacm.proto.sa.query import MemberMask, NodeMask, PathMask, Selector, ServiceMask
from rdmacm.proto.sa.records import GIGABITS, PathRecord
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

__all__ = ["BROADCAST", "Misdeed", "SubnetAdministrator", "Tables"]

#: The group of IPoIB, which is always there: its Q_Key is that of all groups of IPoIB.
BROADCAST = Gid("ff12:401b:ffff::ffff:ffff")
_BROADCAST_Q_KEY = 0x0B1B
_FIRST_MLID = 0xC000

#: OpenSM's packet life time, 4.096 µs · 2^18, and what it says it can do.
_LIFE_TIME = 18
_CAPABILITIES = ClassPortInfo(capability_mask=0x2602, capability_mask2=0x16BD10 >> 5, resp_time_value=16)

#: Questions that are remembered for the test to look at.
_MOST_QUESTIONS = 4096


_MTUS = tuple(range(1, 6))
_RATES = tuple(sorted(GIGABITS, key=GIGABITS.__getitem__))
_LIFE_TIMES = tuple(range(64))

#: A question's status and the records of its answer.
Found: TypeAlias = "tuple[int, list[bytes]]"

_CREATES = (
    MemberMask.MGID
    | MemberMask.PORT_GID
    | MemberMask.Q_KEY
    | MemberMask.PKEY
    | MemberMask.TRAFFIC_CLASS
    | MemberMask.SL
    | MemberMask.FLOW_LABEL
    | MemberMask.JOIN_STATE
)
_JOINS = MemberMask.MGID | MemberMask.PORT_GID | MemberMask.JOIN_STATE
_NAMES_SERVICE = ServiceMask.SERVICE_ID | ServiceMask.SERVICE_GID


class Tables(Enum):
    """How the answer to GetTable goes out."""

    #: In segments, each to be acknowledged: as a subnet administrator does.
    SEGMENTS = "segments"
    #: As one, however long: as a transport that reassembles hands it on.
    WHOLE = "whole"
    #: In one datagram of 256 bytes, whatever has room there: as OpenSM does over ibsim.
    CUT = "cut"


class Misdeed(Enum):
    """What the administrator does instead of answering a question."""

    SILENCE = "silence"
    #: It says to try again later.
    BUSY = "busy"
    WRONG_METHOD = "wrong method"
    WRONG_ATTRIBUTE = "wrong attribute"
    WRONG_TRANSACTION = "wrong transaction"
    WRONG_VERSION = "wrong version"
    #: The datagram ends within its header.
    TRUNCATED = "truncated"
    #: It answers, but something nobody has asked first.
    UNSOLICITED = "unsolicited"


#: A script: what to do about a question, asked before chance decides; None for an answer.
Misdeeds: TypeAlias = Callable[[SaMad], "Misdeed | None"]


@dataclass(slots=True)
class _Group:
    """A multicast group: what all members have in common, and how each of them has joined."""

    record: MCMemberRecord
    members: dict[Gid, int] = field(default_factory=dict)


class SubnetAdministrator:
    """The subnet administrator at ``lid``.

    ``delay`` and up to ``jitter`` more seconds pass before a question is answered. Of the questions, these parts
    (0..1) get no answer, or are told to try again: ``silence``, ``busy``; ``misdeeds`` is a script that is asked first.
    ``tables`` says how long answers go out. All of these may be changed at any time.

    ``questions`` are the last ones that have arrived, as (when, from whom, datagram). ``dropped`` counts what was of no
    use, and what gets no answer from OpenSM either.
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
        tables: Tables = Tables.SEGMENTS,
    ) -> None:
        self.lid = lid
        self.delay, self.jitter = delay, jitter
        self.silence, self.busy = silence, busy
        self.tables = tables
        self.misdeeds: Misdeeds | None = None
        self.class_port_info = _CAPABILITIES
        self.ports: dict[Gid, IbPort] = {}
        self.questions: deque[tuple[float, MadAddress, SaMad]] = deque(maxlen=_MOST_QUESTIONS)
        self.dropped: Counter[str] = Counter()
        self._random = random or Random(0)
        self._descriptions: dict[Gid, str] = {}
        self._paths: dict[tuple[Gid, Gid], tuple[PathRecord, ...]] = {}
        self._services: dict[tuple[int, Gid, int], tuple[ServiceRecord, float | None]] = {}
        self._groups: dict[Gid, _Group] = {}
        self._now = 0.0
        self._mlid = _FIRST_MLID
        self._transfers: dict[tuple[int, int], tuple[Sender, MadAddress, SaMad]] = {}
        self._waiting: list[tuple[float, int, MadAddress, SaMad, Misdeed | None]] = []
        self._count = 0
        self._outbox: list[tuple[MadAddress, bytes]] = []
        broadcast = MCMemberRecord(BROADCAST, q_key=_BROADCAST_Q_KEY, pkey=0xFFFF, packet_life_time=_LIFE_TIME, scope=2)
        self.add_group(broadcast)
        self._handlers: dict[int, dict[int, Callable[[MadAddress, SaMad], Found]]] = {
            Attribute.CLASS_PORT_INFO: {SaMethod.GET: lambda _, __: (0, [self.class_port_info.pack()])},
            Attribute.PATH_RECORD: dict.fromkeys((SaMethod.GET, SaMethod.GET_TABLE), self._find_paths),
            Attribute.NODE_RECORD: dict.fromkeys((SaMethod.GET, SaMethod.GET_TABLE), self._find_nodes),
            Attribute.SERVICE_RECORD: {
                **dict.fromkeys((SaMethod.GET, SaMethod.GET_TABLE), self._find_services),
                SaMethod.SET: self._set_service,
                SaMethod.DELETE: self._delete_service,
            },
            Attribute.MC_MEMBER_RECORD: {
                **dict.fromkeys((SaMethod.GET, SaMethod.GET_TABLE), self._find_groups),
                SaMethod.SET: self._join,
                SaMethod.DELETE: self._leave,
            },
        }

    # -- what it knows ----------------------------------------------------------------------------------------

    def add_port(self, port: IbPort, description: str = "") -> None:
        """Know a port, or know it anew; ValueError where it has no LID or no GID."""
        if not port.lid or not port.gids:
            raise ValueError(f"{port.device} has no LID or no GID")
        self.ports[port.gids[0]] = port
        self._descriptions[port.gids[0]] = description or port.device

    def remove_port(self, gid: Gid) -> None:
        """Forget a port; its services stay until their lease ends."""
        self.ports.pop(gid, None)
        for group in self._groups.values():
            group.members.pop(gid, None)

    def set_paths(self, source: Gid, destination: Gid, *paths: PathRecord) -> None:
        """From now on these are the paths from one port (by its first GID) to another, in order of preference.

        None at all is a way that leads nowhere; the way back is not changed. A path with a service id is for that
        service alone, and found by nobody who does not ask for it.
        """
        self._paths[source, destination] = paths

    def reset_paths(self) -> None:
        """Every port can reach every other again, as computed."""
        self._paths.clear()

    def path(self, source: Gid, destination: Gid) -> PathRecord:
        """The computed path between two ports (by their first GIDs), for :meth:`set_paths` to begin with."""
        one, other = self.ports[source], self.ports[destination]
        return PathRecord(
            dgid=destination,
            sgid=source,
            dlid=other.lid,
            slid=one.lid,
            numb_path=0,
            pkey=next(iter(_common(one.pkeys, other.pkeys)), 0),
            mtu=min(one.active_mtu, other.active_mtu),
            rate=min(one.rate, other.rate, key=lambda code: GIGABITS.get(code, 0)),
            packet_life_time=_LIFE_TIME if one is not other else 0,
        )

    def add_service(self, record: ServiceRecord, now: float = 0.0) -> None:
        """Know a service, for as long as its lease says from ``now`` on."""
        forever = record.service_lease == LEASE_FOREVER
        ends = None if forever else now + record.service_lease
        self._services[record.service_id, record.service_gid, record.service_pkey] = record, ends

    def services(self, now: float) -> list[ServiceRecord]:
        """The services whose lease has not ended."""
        self._services = {key: it for key, it in self._services.items() if it[1] is None or now < it[1]}
        return [record for record, _ in self._services.values()]

    def add_group(self, record: MCMemberRecord) -> MCMemberRecord:
        """Have a multicast group, without members, that has what ``record`` leaves open filled in."""
        exactly: dict[str, Any] = dict.fromkeys(
            ("mtu_selector", "rate_selector", "packet_life_time_selector"), Selector.EXACTLY
        )
        record = record.replace(
            port_gid=Gid(),
            mlid=self._mlid,
            mtu=record.mtu or 4,
            rate=record.rate or 3,
            join_state=0,
            **exactly,
        )
        self._mlid += 1
        self._groups[record.mgid] = _Group(record)
        return record

    def members(self, mgid: Gid) -> dict[Gid, JoinState]:
        """Who has joined a group, and how."""
        group = self._groups.get(mgid)
        return {gid: JoinState(state) for gid, state in group.members.items()} if group else {}

    # -- the engine -------------------------------------------------------------------------------------------

    def mad_received(self, source: MadAddress, mad: Buffer, now: float) -> None:
        """A datagram has arrived: a question, or what belongs to the transfer of an answer."""
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
            self._acknowledged((source.lid, request.transaction_id), request.rmpp, now)
            return
        self.questions.append((now, source, request))
        misdeed = self._misdeed(request)
        if misdeed is Misdeed.SILENCE:
            return
        due = now + self.delay + self._random.random() * self.jitter
        self._count += 1
        heapq.heappush(self._waiting, (due, self._count, source, request, misdeed))
        self.timer(now)

    def timer(self, now: float) -> None:
        """Answer what has waited long enough, and send segments again."""
        self._now = now
        while self._waiting and self._waiting[0][0] <= now:
            _, _, source, request, misdeed = heapq.heappop(self._waiting)
            self._answer(source, request, misdeed, now)
        for key, (sender, _, _) in list(self._transfers.items()):
            sender.timer(now)
            self._pump(key)

    def next_deadline(self) -> float | None:
        """When :meth:`timer` has something to do, or None."""
        deadlines = [sender.next_deadline() for sender, _, _ in self._transfers.values()]
        deadlines.append(self._waiting[0][0] if self._waiting else None)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def mads_to_send(self) -> list[tuple[MadAddress, bytes]]:
        """(address, MAD) to be sent, in order; they are handed out once."""
        mads, self._outbox = self._outbox, []
        return mads

    def _misdeed(self, request: SaMad) -> Misdeed | None:
        scripted = self.misdeeds(request) if self.misdeeds is not None else None
        if scripted is not None:
            return scripted
        if self._random.random() < self.silence:
            return Misdeed.SILENCE
        return Misdeed.BUSY if self._random.random() < self.busy else None

    def _answer(self, source: MadAddress, request: SaMad, misdeed: Misdeed | None, now: float) -> None:
        if (source.lid, request.transaction_id) in self._transfers:
            self.dropped["repeated"] += 1  # the answer is on its way
            return
        handlers = self._handlers.get(request.attribute_id)
        if handlers is None:
            self.dropped["attribute"] += 1
            return
        method = SaMethod(request.method).response if request.method in set(SaMethod) else request.method | RESPONSE
        answer = replace(request, method=method, data=b"", status=0, attribute_offset=0)
        if misdeed is Misdeed.BUSY:
            self._send(source, replace(answer, status=SaStatus.BUSY))
            return
        if misdeed is not None:
            self._send(source, replace(answer, **_LIES.get(misdeed, {})), misdeed)
            if misdeed is not Misdeed.UNSOLICITED:
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
        except WireError:  # a question that is shorter than its record
            status, records = SaStatus.REQ_INVALID, []
        if request.method == SaMethod.GET_TABLE and status == 0:
            self._send_table(source, answer, records, now)
            return
        if request.method == SaMethod.GET and status == 0 and len(records) != 1:
            status, records = (SaStatus.TOO_MANY_RECORDS if records else SaStatus.NO_RECORDS), []
        self._send(source, _filled(answer, records, status))

    def _send(self, address: MadAddress, mad: SaMad, misdeed: Misdeed | None = None) -> None:
        packed = mad.pack(fill=False)
        if misdeed is Misdeed.TRUNCATED:
            packed = packed[:40]
        elif misdeed is Misdeed.WRONG_VERSION:
            packed = packed[:2] + b"\1" + packed[3:]
        self._outbox.append((address, packed))

    def _send_table(self, source: MadAddress, answer: SaMad, records: list[bytes], now: float) -> None:
        answer = _filled(answer, records, 0)
        if self.tables is Tables.SEGMENTS:
            key = source.lid, answer.transaction_id
            self._transfers[key] = Sender(answer.data, now), source, answer
            self._pump(key)
            return
        rmpp = RmppHeader(flags=RmppFlag.ACTIVE) if self.tables is Tables.CUT else answer.rmpp
        data = answer.data[:SEGMENT_SIZE] if self.tables is Tables.CUT else answer.data
        self._send(source, replace(answer, rmpp=rmpp, data=data))

    def _acknowledged(self, key: tuple[int, int], header: RmppHeader, now: float) -> None:
        if key not in self._transfers:
            self.dropped["rmpp"] += 1
            return
        self._transfers[key][0].received(header, now)
        self._pump(key)

    def _pump(self, key: tuple[int, int]) -> None:
        """Send what an answer in segments has to send, and forget it once it is done."""
        sender, source, answer = self._transfers[key]
        for header, data in sender.to_send():
            self._outbox.append((source, replace(answer, rmpp=header, data=data).pack()))
        if sender.is_done:
            del self._transfers[key]

    # -- paths ------------------------------------------------------------------------------------------------

    def _find_paths(self, _: MadAddress, request: SaMad) -> Found:
        asked, mask = PathRecord.unpack(request.data[: PathRecord.SIZE]), PathMask(request.component_mask)
        if not _makes_sense(asked, mask):
            return SaStatus.REQ_INVALID, []
        most = 1 if request.method == SaMethod.GET else asked.numb_path if mask & PathMask.NUMB_PATH else 0x7F
        sources = self._matching(mask & PathMask.SGID, asked.sgid, mask & PathMask.SLID, asked.slid)
        if mask & PathMask.DGID and asked.dgid[0] == 0xFF:
            is_any = not mask & (PathMask.SGID | PathMask.SLID)
            return self._find_multicast_path(asked, None if is_any else sources)
        destinations = self._matching(mask & PathMask.DGID, asked.dgid, mask & PathMask.DLID, asked.dlid)
        records = []
        for source in sources:
            for destination in destinations:
                fitting = (_fit(path, asked, mask) for path in self._between(source, destination, asked, mask))
                found = [path for path in fitting if path is not None]
                records += [path.pack() for path in found[:most]]
        return 0, records

    def _matching(self, by_gid: int, gid: Gid, by_lid: int, lid: int) -> list[IbPort]:
        """The ports that one end of a path can be."""
        return [
            port
            for port in self.ports.values()
            if not (by_gid and gid not in port.gids) and not (by_lid and lid >> port.lmc != port.lid >> port.lmc)
        ]

    def _between(self, source: IbPort, destination: IbPort, asked: PathRecord, mask: PathMask) -> Iterable[PathRecord]:
        given = self._paths.get((source.gids[0], destination.gids[0]))
        if given is not None:
            return given
        pkeys = _common(source.pkeys, destination.pkeys)
        if mask & PathMask.PKEY:
            pkeys = [pkey for pkey in pkeys if pkey & 0x7FFF == asked.pkey & 0x7FFF]
        # Who asks by another GID of a port, or another LID, is answered in his own words.
        given_names: dict[str, Any] = {
            name: getattr(asked, name) for name in ("dgid", "sgid", "dlid", "slid") if mask & PathMask[name.upper()]
        }
        path = self.path(source.gids[0], destination.gids[0]).replace(**given_names)
        return [path.replace(pkey=pkey) for pkey in pkeys[:1]]

    def _find_multicast_path(self, asked: PathRecord, sources: list[IbPort] | None) -> Found:
        group = self._groups.get(asked.dgid)
        if group is None or (sources is not None and not any(set(port.gids) & set(group.members) for port in sources)):
            return 0, []
        it = group.record
        path = PathRecord(
            asked.dgid,
            asked.sgid,
            dlid=it.mlid,
            flow_label=it.flow_label,
            hop_limit=it.hop_limit,
            traffic_class=it.traffic_class,
            reversible=False,
            pkey=it.pkey,
            sl=it.sl,
            mtu=it.mtu,
            rate=it.rate,
            packet_life_time=it.packet_life_time,
        )
        return 0, [path.pack()]

    # -- nodes ------------------------------------------------------------------------------------------------

    def _find_nodes(self, _: MadAddress, request: SaMad) -> Found:
        asked = NodeRecord.unpack(request.data[: NodeRecord.SIZE])
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
            if _matches(node, asked, NodeMask(request.component_mask)):
                records.append(node.pack())
        return 0, records

    # -- services ---------------------------------------------------------------------------------------------

    def _find_services(self, _: MadAddress, request: SaMad) -> Found:
        asked, mask = ServiceRecord.unpack(request.data[: ServiceRecord.SIZE]), ServiceMask(request.component_mask)
        found = [record for record in self.services(self._now) if _matches(record, asked, mask)]
        return 0, [_told(record).pack() for record in found]

    def _set_service(self, source: MadAddress, request: SaMad) -> Found:
        record, mask = ServiceRecord.unpack(request.data[: ServiceRecord.SIZE]), ServiceMask(request.component_mask)
        if mask & _NAMES_SERVICE != _NAMES_SERVICE:
            return SaStatus.REQ_INVALID, []
        if mask & ServiceMask.SERVICE_PKEY:
            at = [port for port in self.ports.values() if record.service_gid in port.gids]
            by = [port for port in self.ports.values() if port.lid == source.lid]
            if not all(_has(port.pkeys, record.service_pkey) for port in at + by) or not at:
                return SaStatus.REQ_INVALID, []
        else:
            record = record.replace(service_pkey=0)
        if not mask & ServiceMask.SERVICE_LEASE:
            record = record.replace(service_lease=LEASE_FOREVER)
        self.add_service(record, self._now)
        pkey = record.service_pkey if mask & ServiceMask.SERVICE_PKEY else 0xFFFF
        return 0, [_told(record).replace(service_pkey=pkey).pack()]

    def _delete_service(self, _: MadAddress, request: SaMad) -> Found:
        asked, mask = ServiceRecord.unpack(request.data[: ServiceRecord.SIZE]), ServiceMask(request.component_mask)
        self.services(self._now)
        pkey = asked.service_pkey if mask & ServiceMask.SERVICE_PKEY else 0
        found = self._services.pop((asked.service_id, asked.service_gid, pkey), None)
        return (0, [_told(found[0]).pack()]) if found else (SaStatus.NO_RECORDS, [])

    # -- multicast --------------------------------------------------------------------------------------------

    def _find_groups(self, _: MadAddress, request: SaMad) -> Found:
        asked, mask = MCMemberRecord.unpack(request.data[: MCMemberRecord.SIZE]), MemberMask(request.component_mask)
        # Who belongs to a group is told to nobody.
        found = [
            group.record.pack()
            for group in self._groups.values()
            if (not mask & MemberMask.PORT_GID or asked.port_gid in group.members)
            and _matches(group.record, asked, mask & ~(MemberMask.PORT_GID | MemberMask.JOIN_STATE))
        ]
        return 0, found

    def _join(self, _: MadAddress, request: SaMad) -> Found:
        asked, mask = MCMemberRecord.unpack(request.data[: MCMemberRecord.SIZE]), MemberMask(request.component_mask)
        if mask & _JOINS != _JOINS:
            return SaStatus.REQ_INSUFFICIENT_COMPONENTS, []
        if not asked.join_state or not any(asked.port_gid in port.gids for port in self.ports.values()):
            return SaStatus.REQ_INVALID, []
        group = self._groups.get(asked.mgid)
        if group is None:
            if mask & _CREATES != _CREATES:
                return SaStatus.REQ_INSUFFICIENT_COMPONENTS, []
            if not _may_be_created(asked):
                return SaStatus.REQ_INVALID, []
            self.add_group(asked)
            group = self._groups[asked.mgid]
        else:
            same = mask & (MemberMask.Q_KEY | MemberMask.PKEY | MemberMask.SL | MemberMask.FLOW_LABEL)
            if not _matches(group.record, asked, same):
                return SaStatus.REQ_INVALID, []
        state = group.members.get(asked.port_gid, 0) | asked.join_state
        group.members[asked.port_gid] = state
        return 0, [group.record.replace(port_gid=asked.port_gid, join_state=state).pack()]

    def _leave(self, _: MadAddress, request: SaMad) -> Found:
        asked, mask = MCMemberRecord.unpack(request.data[: MCMemberRecord.SIZE]), MemberMask(request.component_mask)
        if mask & _JOINS != _JOINS:
            return SaStatus.REQ_INSUFFICIENT_COMPONENTS, []
        group = self._groups.get(asked.mgid)
        state = group.members.get(asked.port_gid, 0) if group else 0
        if group is None or not state & asked.join_state:
            return SaStatus.REQ_INVALID, []
        left = state & ~asked.join_state
        if left:
            group.members[asked.port_gid] = left
        else:
            del group.members[asked.port_gid]
        has_full_member = any(state & JoinState.FULL_MEMBER for state in group.members.values())
        if not has_full_member and asked.mgid != BROADCAST:
            del self._groups[asked.mgid]
        none = dict.fromkeys(("q_key", "mlid", "mtu", "rate", "pkey", "packet_life_time"), 0)
        return 0, [group.record.replace(port_gid=asked.port_gid, **none).pack()]


#: What a lie changes in an answer.
_LIES: dict[Misdeed, dict[str, Any]] = {
    Misdeed.WRONG_METHOD: {"method": SaMethod.REPORT_RESP},
    Misdeed.WRONG_ATTRIBUTE: {"attribute_id": Attribute.TRACE_RECORD},
    Misdeed.WRONG_TRANSACTION: {"transaction_id": 0xBAD_0000_0000},
    Misdeed.UNSOLICITED: {"transaction_id": 0x5EE_0000_0000},
}


def _filled(answer: SaMad, records: list[bytes], status: int) -> SaMad:
    """The answer with its records, each filled up to a multiple of 8 bytes."""
    size = -(-len(records[0]) // 8) * 8 if records else 0
    data = b"".join(record.ljust(size, b"\0") for record in records)
    return replace(answer, status=status, data=data, attribute_offset=size // 8)


def _has(pkeys: tuple[int, ...], pkey: int) -> bool:
    return any(own & 0x7FFF == pkey & 0x7FFF for own in pkeys)


def _common(some: tuple[int, ...], others: tuple[int, ...]) -> list[int]:
    """The partitions in which two ports may talk: at least one of them is a full member."""
    full = {pkey & 0x7FFF for pkey in others if pkey & 0x8000}
    limited = {pkey & 0x7FFF for pkey in others}
    return [pkey | 0x8000 for pkey in some if pkey & 0x7FFF in (limited if pkey & 0x8000 else full)]


def _told(record: ServiceRecord) -> ServiceRecord:
    """A service as it is told to everybody: without its key."""
    return record.replace(service_key=bytes(16))


def _may_be_created(asked: MCMemberRecord) -> bool:
    """What OpenSM makes groups of: not for librdmacm's signature on one link, and IPoIB's have one Q_Key."""
    if asked.mgid[0] != 0xFF or not asked.mgid[1] & 0xF or not asked.join_state & JoinState.FULL_MEMBER:
        return False
    signature, scope = asked.mgid[2:4], asked.mgid[1] & 0xF
    if signature == b"\xa0\x1b":
        return scope != 2
    return signature not in (b"\x40\x1b", b"\x60\x1b") or asked.q_key == _BROADCAST_Q_KEY


def _matches(record: object, asked: object, mask: IntFlag) -> bool:
    """Whether the fields that count are equal."""
    for name, component in type(mask).__members__.items():
        bits = mask & component
        if not bits:
            continue
        value, wanted = getattr(record, name.lower()), getattr(asked, name.lower())
        if bits != component:  # some of a service's numbers
            low = component & -component
            chosen = [index for index in range(len(value)) if bits & low << index]
            value, wanted = [value[index] for index in chosen], [wanted[index] for index in chosen]
        if value != wanted:
            return False
    return True


def _makes_sense(asked: PathRecord, mask: PathMask) -> bool:
    """Whether the codes of MTU and rate are ones."""
    wants_mtu = mask & PathMask.MTU and mask & PathMask.MTU_SELECTOR
    wants_rate = mask & PathMask.RATE and mask & PathMask.RATE_SELECTOR
    return not (wants_mtu and asked.mtu not in _MTUS) and not (wants_rate and asked.rate not in _RATES)


def _fit(path: PathRecord, asked: PathRecord, mask: PathMask) -> PathRecord | None:
    """The path as an answer to the question; None where it is none.

    A path has room for a smaller MTU than its own, but a rate that is meant exactly has to be its own, and its packet
    life time is the longest, not the shortest: all that is OpenSM's reading.
    """
    if path.service_id and not (mask & PathMask.SERVICE_ID and path.service_id == asked.service_id):
        return None
    if mask & PathMask.REVERSIBLE and asked.reversible and not path.reversible:
        return None
    if mask & PathMask.PKEY and (path.pkey ^ asked.pkey) & 0x7FFF:
        return None
    if mask & PathMask.SL and path.sl != asked.sl:
        return None
    mtu: int | None = path.mtu
    if mask & PathMask.MTU and mask & PathMask.MTU_SELECTOR:
        mtu = _select(path.mtu, asked.mtu, asked.mtu_selector, _MTUS)
    rate: int | None = path.rate
    if mask & PathMask.RATE and mask & PathMask.RATE_SELECTOR:
        rate = _select(path.rate, asked.rate, asked.rate_selector, _RATES)
        if asked.rate_selector == Selector.EXACTLY and rate != path.rate:
            return None
    life_time: int | None = path.packet_life_time
    if mask & PathMask.PACKET_LIFE_TIME and mask & PathMask.PACKET_LIFE_TIME_SELECTOR:
        selector = asked.packet_life_time_selector
        life_time = _select(path.packet_life_time, asked.packet_life_time, selector, _LIFE_TIMES)
    if mtu is None or rate is None or life_time is None:
        return None
    return path.replace(mtu=mtu, rate=rate, packet_life_time=life_time)


def _select(most: int, asked: int, selector: int, codes: Sequence[int]) -> int | None:
    """The code to use where ``most`` and, in order of size, all before it can be had; None where none will do."""
    if most not in codes:
        return None
    limit, wanted = codes.index(most), codes.index(asked)
    if selector == Selector.EXACTLY:
        return asked if wanted <= limit else None
    if selector == Selector.GREATER:
        return most if limit > wanted else None
    if selector == Selector.LESS:
        return codes[min(limit, wanted - 1)] if wanted else None
    return most
