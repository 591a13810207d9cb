"""An agent of the communication manager that collects what it sends and reports, for a look at it afterwards."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, TypeAlias

from rdmacm.proto.cm import engine
from rdmacm.proto.cm.connection import CmConnection, CmListener, NetworkError
from rdmacm.proto.cm.messages import APR, LAP, REJ, REP, REQ, SIDR_REP, SIDR_REQ, Message
from rdmacm.proto.entropy import RandomSource


@dataclass(slots=True)
class ConnectRequest:
    comm_id: int
    listener: CmListener | None
    request: REQ
    path: Hashable


@dataclass(slots=True)
class SidrRequest:
    comm_id: int
    listener: CmListener | None
    request: SIDR_REQ
    path: Hashable


@dataclass(slots=True)
class ConnectReply:
    comm_id: int
    reply: REP


@dataclass(slots=True)
class Established:
    comm_id: int


@dataclass(slots=True)
class Rejected:
    comm_id: int
    reason: int
    ari: bytes
    private_data: bytes


@dataclass(slots=True)
class Unreachable:
    comm_id: int
    error: NetworkError | None = None


@dataclass(slots=True)
class PeerQuestion:
    comm_id: int


@dataclass(slots=True)
class DisconnectRequested:
    comm_id: int


@dataclass(slots=True)
class Disconnected:
    comm_id: int
    timed_out: bool = False


@dataclass(slots=True)
class PathOffered:
    comm_id: int
    lap: LAP


@dataclass(slots=True)
class PathAnswered:
    comm_id: int
    apr: APR | None


@dataclass(slots=True)
class TimewaitExit:
    comm_id: int
    local_qpn: int


@dataclass(slots=True)
class SidrReply:
    comm_id: int
    reply: SIDR_REP


Event: TypeAlias = (
    ConnectRequest
    | SidrRequest
    | ConnectReply
    | Established
    | Rejected
    | Unreachable
    | PeerQuestion
    | DisconnectRequested
    | Disconnected
    | PathOffered
    | PathAnswered
    | TimewaitExit
    | SidrReply
)


class _Recorder:
    """The user of an agent, and the owner of its connections."""

    def __init__(self) -> None:
        self.outbox: list[tuple[Hashable, bytes]] = []
        self.events: list[Event] = []
        self.retries = self.answers = 0

    def send(self, path: Hashable, mad: bytes) -> None:
        self.outbox.append((path, mad))

    def wake_at(self, when: float) -> None: ...

    def hold_qpn(self, qpn: int, until: float) -> None: ...

    def peer_answered(self) -> None:
        self.answers += 1

    def requested(self, connection: CmConnection, request: REQ | SIDR_REQ) -> None:
        connection.owner = self
        kind: Any = ConnectRequest if isinstance(request, REQ) else SidrRequest
        self.events.append(kind(connection.comm_id, connection.listener, request, connection.path))

    def peer_questioned(self, connection: CmConnection, _: Message | None) -> None:
        self.events.append(PeerQuestion(connection.comm_id))

    def raised(self, connection: CmConnection, error: Exception) -> None:
        raise error

    def replied(self, connection: CmConnection, rep: REP) -> None:
        self.events.append(ConnectReply(connection.comm_id, rep))

    def established(self, connection: CmConnection, _: Message | None) -> None:
        self.events.append(Established(connection.comm_id))

    def rejected(self, connection: CmConnection, rej: REJ) -> None:
        ari = rej.ari[: rej.reject_info_length]
        self.events.append(Rejected(connection.comm_id, rej.reason, ari, rej.private_data))

    def unreachable(self, connection: CmConnection, error: NetworkError | None) -> None:
        self.events.append(Unreachable(connection.comm_id, error))

    def disconnect_requested(self, connection: CmConnection, _: Message) -> None:
        self.events.append(DisconnectRequested(connection.comm_id))

    def disconnected(self, connection: CmConnection, answer: Message | None) -> None:
        self.events.append(Disconnected(connection.comm_id, answer is None))

    def path_offered(self, connection: CmConnection, lap: LAP) -> None:
        self.events.append(PathOffered(connection.comm_id, lap))

    def path_answered(self, connection: CmConnection, apr: APR | None) -> None:
        self.events.append(PathAnswered(connection.comm_id, apr))

    def timewait_over(self, connection: CmConnection, _: None) -> None:
        self.events.append(TimewaitExit(connection.comm_id, connection.local_qpn))

    def sidr_replied(self, connection: CmConnection, rep: SIDR_REP) -> None:
        self.events.append(SidrReply(connection.comm_id, rep))

    def failed(self, connection: CmConnection, was_established: bool) -> None:
        raise AssertionError(f"{connection} has failed")


class Agent(engine.Agent):
    """An agent that collects what it sends and reports. The names of the events are those of the state tables."""

    def __init__(self, guid: int, random: RandomSource, **options: Any) -> None:
        self.recorder = _Recorder()
        super().__init__(self.recorder, guid, random, **options)

    def mads_to_send(self) -> list[tuple[Hashable, bytes]]:
        """The (path, MAD) pairs that were sent since the last call."""
        mads, self.recorder.outbox = self.recorder.outbox, []
        return mads

    def events(self) -> list[Event]:
        """The events since the last call."""
        events, self.recorder.events = self.recorder.events, []
        return events

    def connect(self, path: Hashable, request: REQ, now: float, **options: Any) -> int:
        return super().connect(path, request, now, **{"owner": self.recorder, **options})

    def sidr_request(self, path: Hashable, request: SIDR_REQ, now: float, **options: Any) -> int:
        return super().sidr_request(path, request, now, **{"owner": self.recorder, **options})
