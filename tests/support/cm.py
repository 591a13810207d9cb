"""Agents of the communication manager, an unreliable network between two of them, and a scripted peer."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Hashable
from typing import Any

from rdmacm.address import Gid
from rdmacm.proto.cm import engine
from rdmacm.proto.cm.messages import LAP, REP, REQ, Message, Path, pack_message, unpack_message
from rdmacm.proto.entropy import RandomSource
from rdmacm.proto.mad import Mad
from support.cm_events import Agent, ConnectReply, ConnectRequest, DisconnectRequested, Event, TimewaitExit

SERVICE = 0x01061D2F
GUIDS = (0x0200C0FFFE000201, 0x0200C0FFFE000202)
PEER, PEER_GUID = 0xA1B2C3D4, GUIDS[1]
ENDS = ("::ffff:10.0.0.1", "::ffff:10.0.0.2")


def request(**fields: Any) -> REQ:
    """A REQ as rdma_cm sends one on RoCEv2."""
    primary = Path(Gid(ENDS[0]), Gid(ENDS[1]), 0xFFFF, 0xFFFF, hop_limit=64, local_ack_timeout=19)
    return REQ(**{"service_id": SERVICE, "primary": primary, "local_qpn": 0x11, "path_mtu": 3, **fields})


def reply(**fields: Any) -> REP:
    """A REP as rxe sends one."""
    return REP(**{"local_qpn": 0x22, "target_ack_delay": 15, "rnr_retry_count": 7, **fields})


#: An alternate path of InfiniBand: between other LIDs than the first.
PATH = Path(Gid("fe80::1"), Gid("fe80::2"), 0x11, 0x21, sl=3, packet_rate=3, subnet_local=True, local_ack_timeout=18)


def lap(local_comm_id: int, remote_comm_id: int, remote_qpn: int, path: Path = PATH) -> LAP:
    """A LAP as the active side sends one."""
    message = LAP.loading(path)
    message.local_comm_id, message.remote_comm_id = local_comm_id, remote_comm_id
    message.remote_qpn_eecn, message.remote_cm_response_timeout = remote_qpn, 20
    return message


def opened(data: bytes) -> Message:
    """The message in a MAD."""
    return unpack_message(Mad.unpack(data))


class Scripted:
    """An agent whose peer is the test, which sends any message, from the agent's path or another."""

    def __init__(self, numbers: RandomSource | None = None, **options: Any) -> None:
        self.agent = Agent(GUIDS[0], numbers or random.Random(1), **options)
        self.now = 1000.0

    def say(self, message: Message, tid: int = 0x77, path: Hashable = "peer") -> None:
        self.agent.mad_received(pack_message(message, tid), path, self.now)

    def heard(self) -> list[Message]:
        return [opened(mad) for _, mad in self.agent.mads_to_send()]

    def wait(self) -> None:
        """Let virtual time pass until the next timer, and fire it."""
        deadline = self.agent.next_deadline()
        assert deadline is not None
        self.now = deadline
        self.agent.timer(self.now)

    def only_event(self) -> Any:
        (event,) = self.agent.events()
        return event


class Pair:
    """Two agents and the network between them, in virtual time.

    ``fate`` returns the delays in seconds of the copies of a MAD that arrive; an empty list loses it.
    """

    def __init__(
        self,
        seed: int = 1,
        fate: Callable[[Message], list[float]] = lambda message: [0.001],
        **options: Any,
    ) -> None:
        self.agents = [Agent(guid, random.Random(seed * 2 + i), **options) for i, guid in enumerate(GUIDS)]
        self.fate = fate
        self.now = 0.0
        self.flying: list[tuple[float, int, int, bytes]] = []
        self.count = 0
        self.accepted = 0
        self.log: list[tuple[int, Message]] = []
        self.events: list[list[Event]] = [[], []]
        self.times: list[list[float]] = [[], []]
        self.handlers: dict[type[Event], Callable[[Pair, int, Any], None]] = {
            ConnectRequest: lambda pair, i, event: pair.accept(i, event),
            ConnectReply: lambda pair, i, event: pair.agents[i].send_rtu(event.comm_id, pair.now),
            DisconnectRequested: lambda pair, i, event: pair.agents[i].disconnect(event.comm_id, pair.now),
        }

    def connect(self, side: int = 0, **fields: Any) -> int:
        """A connection from one side to the other."""
        return self.agents[side].connect(1 - side, request(**fields), self.now)

    def accept(self, side: int, event: ConnectRequest) -> None:
        """Accept with a new queue pair number; the first is 0x22."""
        self.agents[side].accept(event.comm_id, reply(local_qpn=0x22 + self.accepted), self.now)
        self.accepted += 1

    def settle(self) -> None:
        """Send the agents' MADs and collect their events."""
        busy = True
        while busy:
            busy = False
            for i, agent in enumerate(self.agents):
                for path, mad in agent.mads_to_send():
                    assert path == 1 - i
                    message = opened(mad)
                    self.log.append((i, message))
                    for delay in self.fate(message):
                        self.count += 1
                        heapq.heappush(self.flying, (self.now + delay, self.count, 1 - i, mad))
                for event in agent.events():
                    busy = True
                    self.events[i].append(event)
                    self.times[i].append(self.now)
                    handler = self.handlers.get(type(event))
                    if handler is not None:
                        handler(self, i, event)

    def run(self, until: float = 1e9) -> None:
        """Let virtual time pass until no MAD is in flight and no timer runs, or until a time."""
        while True:
            self.settle()
            due = [at for at in (agent.next_deadline() for agent in self.agents) if at is not None]
            at = min([*due, *(entry[0] for entry in self.flying[:1])], default=None)
            if at is None or at > until:
                self.now = max(self.now, until) if until < 1e9 else self.now
                return
            self.now = max(self.now, at)
            while self.flying and self.flying[0][0] <= self.now:
                _, _, to, mad = heapq.heappop(self.flying)
                self.agents[to].mad_received(mad, 1 - to, self.now)
            for agent in self.agents:
                agent.timer(self.now)

    def kinds(self, side: int) -> list[str]:
        """The names of a side's events without TimewaitExit."""
        return [type(event).__name__ for event in self.events[side] if not isinstance(event, TimewaitExit)]

    def sent(self) -> list[str]:
        """The sender and the kind of each MAD, in order."""
        return [f"{i}:{type(message).__name__}" for i, message in self.log]

    def is_empty(self) -> bool:
        """Whether nothing is left of any connection."""
        return all(map(is_empty, self.agents))


def is_empty(agent: engine.Agent) -> bool:
    """Whether nothing is left of any connection."""
    # Entries of ended connections in these indexes show nowhere else.
    return (
        len(agent) == 0
        and agent.next_deadline() is None
        and not agent._connections._by_remote_id
        and not agent._connections._by_remote_qpn
        and all(listener.pending == 0 for group in agent._listeners._by_key.values() for listener in group)
    )


def communication_ids(agent: engine.Agent) -> list[int]:
    """The ids of all connections. An application learns them one by one, from its calls and events."""
    return list(agent._connections.by_id)


def established(pair: Pair | None = None, **fields: Any) -> tuple[Pair, int, int]:
    """Connect the two agents; returns the communication id of each."""
    pair = pair or Pair()
    pair.agents[1].listen(SERVICE)
    active = pair.connect(**fields)
    pair.run()
    assert pair.kinds(0) == ["ConnectReply"]
    assert pair.kinds(1) == ["ConnectRequest", "Established"]
    return pair, active, pair.events[1][0].comm_id
