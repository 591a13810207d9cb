"""Packets for simulated hosts, and communication managers on their wires."""

from __future__ import annotations

from ipaddress import ip_address
from random import Random

from rdmacm.proto.mad import GSI_Q_KEY
from rdmacm.proto.roce.icrc import Icrc
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.soft.wire.base import Received, WirePath, WireRoute
from rdmacm.testing import Fabric, Host
from support.cm import GUIDS, SERVICE, reply, request
from support.cm_events import Agent, ConnectReply, ConnectRequest, Event
from support.roce_packets import BTH, DETH, RocePacket

ENDS = ("10.0.0.1", "10.0.0.2")
ENDS6 = ("fd00::1", "fd00::2")


def two(fabric: Fabric) -> tuple[Host, Host]:
    """Hosts a and b with open wires."""
    hosts = fabric.host("a", ENDS[0], ENDS6[0]), fabric.host("b", ENDS[1], ENDS6[1])
    for host in hosts:
        host.wire.open()
    return hosts


def route(host: Host, local: str, remote: str) -> WireRoute:
    """A route of a host's wire between two addresses."""
    return host.wire.route(WirePath(ip_address(local).packed, ip_address(remote).packed))


def sealed(way: WireRoute, payload: bytes, psn: int = 0, identification: int = 0) -> bytes:
    """An RC SEND with a valid ICRC."""
    packet = BTH(Opcode.RC_SEND_ONLY, 0x010012, psn).pack() + payload
    flow = Icrc(way.path.local, way.path.remote, way.source_port)
    return packet + flow.seal([packet], identification)


def received(host: Host) -> list[Received]:
    """All packets that a host has received."""
    found: list[Received] = []
    while batch := host.wire.receive():
        found += batch
    return found


class Managers:
    """The communication managers of hosts a and b; the passive one listens and accepts every request."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.hosts = two(fabric)
        self.agents = [
            Agent(guid, Random(str(host.random.random()))) for guid, host in zip(GUIDS, self.hosts, strict=True)
        ]
        self.routes = route(self.hosts[0], *ENDS), route(self.hosts[1], *ENDS[::-1])
        self.events: list[list[Event]] = [[], []]
        self.agents[1].listen(SERVICE)

    def connect(self) -> int:
        return self.agents[0].connect(1, request(), self.fabric.now)

    def pump(self) -> bool:
        """Process arrived packets and due timers, and send; returns whether the active side has an event."""
        now = self.fabric.now
        for side, (host, agent) in enumerate(zip(self.hosts, self.agents, strict=True)):
            back = self.routes[1 - side]
            flow = Icrc(back.path.local, back.path.remote, back.source_port)
            for data, _, _, _ in received(host):
                if flow.check([data]):
                    agent.mad_received(data[20:-4], 1 - side, now)
            agent.timer(now)
            for event in agent.events():
                self.events[side].append(event)
                if isinstance(event, ConnectRequest):
                    agent.accept(event.comm_id, reply(), now)
                elif isinstance(event, ConnectReply):
                    agent.send_rtu(event.comm_id, now)
            way = self.routes[side]
            for _, mad in agent.mads_to_send():
                packet = RocePacket(BTH(Opcode.UD_SEND_ONLY, 1, 0), deth=DETH(GSI_Q_KEY, 1), payload=mad).pack()
                host.wire.send(way, [packet, Icrc(way.path.local, way.path.remote, way.source_port).seal([packet])])
            deadline = agent.next_deadline()
            if deadline is not None:
                host.provider.runtime.call_at(deadline, lambda _: None)
        return bool(self.events[0])

    def run(self, seconds: float) -> None:
        """Let virtual time pass."""
        self.fabric.run(lambda: self.pump() and False, seconds=seconds)

    def kinds(self, side: int) -> list[str]:
        """The names of a side's events."""
        return [type(event).__name__ for event in self.events[side]]
