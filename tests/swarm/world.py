"""One simulation: hosts, listeners and connections that do what a script says, and the checks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

from rdmacm import CmEvent, CmEventType, CmId, EventChannel
from rdmacm.constants import PortSpace
from rdmacm.errors import RdmaError
from rdmacm.soft.device.device import SoftDevice
from rdmacm.testing import Fabric, FaultScript, Host
from support.life_cycles import check_empty
from swarm.life import Life, Side, Violation, reset_arena
from swarm.script import HEAL, Script, Step
from swarm.traffic import Traffic

__all__ = ["Result", "Violation", "simulate"]

E = CmEventType
ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
#: Virtual seconds. From when the network is whole again, how long operations may take, and applications wait.
PATIENCE = 600.0
GIVE_UP = 150.0


@dataclass(frozen=True, slots=True)
class Result:
    """What a simulation was."""

    #: Connections that were begun, and how many of them were established.
    lives: int
    established: int
    #: Packets sent, virtual seconds, and a hash of the packet log.
    packets: int
    seconds: float
    digest: str


def simulate(script: Script, *, log_limit: int = 64 << 20) -> Result:
    """Run a script. Raises an exception for a broken promise; its attribute ``digest`` is the hash of the log."""
    reset_arena()
    world = World(script, log_limit)
    try:
        world.run()
    except Exception as error:
        error.digest = world.digest()  # type: ignore[attr-defined]
        raise
    finally:
        world.abandon()
    established = sum(any(side.seen[E.ESTABLISHED] for side in life.sides) for life in world.lives.values())
    digest = world.digest() if log_limit else ""
    return Result(len(world.lives), established, world.fabric._packets_sent, world.fabric.now, digest)


class _Server:
    """The listeners of one process, and the channel of all its ids."""

    def __init__(self, world: World, host: Host) -> None:
        self.world, self.host = world, host
        self.channel = EventChannel(host.provider)
        self.listeners: dict[str, list[CmId]] = {}
        #: Where ids migrate to.
        self.spare = EventChannel(host.provider)
        for channel in (self.channel, self.spare):
            host.on_event(channel, self.handle)

    def listen(self, port: str, backlog: int) -> None:
        if port in self.listeners:
            return
        self.listeners[port] = []
        for space in (PortSpace.TCP, PortSpace.UDP):
            cmid = CmId(self.channel, space)
            try:
                cmid.bind_addr((self.host.addresses[0], int(port)))
                cmid.listen(backlog)
            except RdmaError:
                cmid.destroy()
                raise
            self.listeners[port].append(cmid)

    def unlisten(self, port: str) -> None:
        for cmid in self.listeners.pop(port, ()):
            cmid.destroy()

    def handle(self, event: CmEvent) -> None:
        if event.type is E.CONNECT_REQUEST:
            life = self.world.lives[int.from_bytes(event.private_data[12:16], "big")]
            side = Side(life, self.host, False, self.channel)
            life.passive.append(side)
        elif event.type is E.ADDR_CHANGE and event.id not in self.world.sides:
            return  # a listener's
        else:
            side = self.world.sides[event.id]
        side.handle(event)
        side.life.is_told = True
        self.world.active[side.life.number] = side.life

    def close(self) -> None:
        for port in list(self.listeners):
            self.unlisten(port)
        self.channel.close()
        self.spare.close()


class World:
    """See the module."""

    def __init__(self, script: Script, log_limit: int) -> None:
        self.script = script
        numbers: dict[str, Any] = {key: float(value) for key, value in script.fabric.items()}
        for key, convert in (("mtu", int), ("trains", bool)):
            if key in numbers:
                numbers[key] = convert(numbers[key])
        self.fabric = Fabric(script.seed, log_limit=log_limit, **numbers)
        if script.rules:
            self.fabric.faults = FaultScript.parse("\n".join(script.rules))
        #: All connections, and those that have something to do.
        self.lives: dict[int, Life] = {}
        self.active: dict[int, Life] = {}
        self.sides: dict[CmId, Side] = {}
        self.servers: dict[str, _Server] = {}
        #: All servers and sides, also of hosts that crashed.
        self.all_servers: list[_Server] = []
        self.exposed = script.exposed()
        trouble = [step.given for step in script.steps if step.name in _TROUBLE]
        self.troubled = {given.get("n") or given["port"] for given in trouble}
        self.is_giving_up = False
        self.traffic = Traffic()
        #: Whether something has been done since the last moment, other than by packets.
        self.is_changed = False

    def address(self, process: str) -> str:
        return ADDRESSES[process[0]]

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Call a function in ``seconds``."""

        def call() -> None:
            self.is_changed = True
            function()

        self.fabric.call_at(self.fabric.now + seconds, call)

    # -- the run --------------------------------------------------------------------------------------

    def run(self) -> None:
        for step in self.script.steps:
            self.later(step.at, partial(self.take, step))
        self.later(HEAL, self.heal)
        self.fabric.run(lambda: self.moment() or self.is_giving_up)
        if not self.fabric.run(lambda: self.moment() or not self.active, seconds=PATIENCE):
            stuck = [side for life in self.active.values() for side in life.sides if not side.is_over]
            raise Violation(
                "no end: "
                + "; ".join(
                    f"{side.fault('')} {side.cmid!r} {dict(side.seen)} {side.finished}/{len(side.plan.work)} "
                    f"{side.received}/{len(side.expected)} {side.error}"
                    for side in stuck[:3]
                )
            )
        for life in self.lives.values():
            life.check()
            for side in life.sides:
                side.close()
        for server in self.servers.values():
            for port in list(server.listeners):
                server.unlisten(port)
        self.fabric.run()
        self.check_end()

    def moment(self) -> bool:
        """What applications do at one moment; False, because the run goes on."""
        is_changed, self.is_changed = self.is_changed, False
        for number, life in list(self.active.items()):
            if is_changed or life.has_news:
                life.step()
                if life.is_over:
                    del self.active[number]
        self.check_bounds()
        return False

    def take(self, step: Step) -> None:
        getattr(self, f"do_{step.name}")(**step.given)

    def heal(self) -> None:
        fabric = self.fabric
        fabric.heal()
        fabric.loss = fabric.duplicate = fabric.reorder = fabric.corrupt = 0.0
        fabric.faults = None
        for host in fabric.hosts.values():
            fabric.resume(host.name)
            host.wire.capacity = 4096
            host.limit(max_qp=65000, max_mr=1 << 20)
            host.network.set_interface(2, up=True)
        for link in fabric._links.values():
            link.loss = None
        self.later(GIVE_UP, self.give_up)

    def give_up(self) -> None:
        self.is_giving_up = True
        for life in self.active.values():
            life.give_up()

    # -- the steps ------------------------------------------------------------------------------------

    def do_start(self, host: str) -> None:
        if host in self.servers:
            return
        ports = [step.given for step in self.script.steps if step.name == "listen" and step.given["host"] == host]
        if host == "b2":
            first = self.fabric.hosts.get("b")
            process = self.fabric.process("b", host) if first and first.alive else None
        else:
            siblings = self.fabric.hosts[host].processes if host in self.fabric.hosts else []
            process = (
                self.fabric.process(siblings[0].name, host) if siblings else self.fabric.host(host, ADDRESSES[host])
            )
        if process is None:
            return
        self.traffic.watch(process)
        self.servers[host] = server = _Server(self, process)
        self.all_servers.append(server)
        if self.fabric.now:  # listens again, as a service that is restarted does
            for given in ports:
                self.do_listen(**given)

    def do_listen(self, host: str, port: str, backlog: str) -> None:
        server = self.servers.get(host)
        if server is not None and server.host.runs:
            server.listen(port, int(backlog))

    def do_unlisten(self, host: str, port: str) -> None:
        server = self.servers.get(host)
        if server is not None and server.host.runs:
            server.unlisten(port)

    def do_connect(self, **given: str) -> None:
        source = self.servers.get(given["source"])
        if source is None or not source.host.runs:
            return
        hosts = given["source"][0], given["host"][0]
        server = self.servers.get(given["host"])
        is_plain = given["server"] == "accept" and given["space"] == "TCP" and given["closer"] != "destroy"
        has_listener = server is not None and given["port"] in server.listeners
        is_calm = self.exposed.isdisjoint(hosts) and self.troubled.isdisjoint((given["n"], given["port"]))
        life = Life(self, given, is_plain and has_listener and is_calm)
        self.lives[life.number] = self.active[life.number] = life
        life.active = Side(life, source.host, True, source.channel)
        life.active.begin()

    def _sides(self, n: str, side: str) -> list[Side]:
        life = self.lives.get(int(n))
        sides = life.sides if life is not None else []
        return [one for one in sides if one.is_active == (side == "active") and one.host.runs]

    def do_destroy(self, n: str, side: str) -> None:
        for one in self._sides(n, side):
            one.close()

    def do_disconnect(self, n: str, side: str) -> None:
        for one in self._sides(n, side):
            if one.seen[E.ESTABLISHED]:
                one.disconnect()

    def do_error(self, n: str, side: str) -> None:
        for one in self._sides(n, side):
            one.fail()

    def do_migrate(self, n: str, side: str) -> None:
        for one in self._sides(n, side):
            one.migrate(self.servers[one.host.name].spare)

    def do_interface(self, host: str, up: str) -> None:
        if host in self.servers:
            self.servers[host].host.network.set_interface(2, up=up == "1")

    def do_partition(self, one: str, other: str, one_way: str) -> None:
        groups = [[name for name in group.split(",") if name in self.fabric.hosts] for group in (one, other)]
        self.fabric.partition(*groups, one_way=one_way == "1")

    def do_heal(self) -> None:
        self.fabric.heal()

    def do_crash(self, host: str) -> None:
        server = self.servers.pop(host, None)
        if server is not None:
            self.fabric.crash(host)

    def do_pause(self, host: str) -> None:
        if host in self.servers:
            self.fabric.pause(host)

    def do_resume(self, host: str) -> None:
        if host in self.servers:
            self.fabric.resume(host)

    def do_jump(self, seconds: str) -> None:
        self.fabric.jump(float(seconds))

    def do_loss(self, one: str, other: str, value: str) -> None:
        if one in self.fabric.hosts and other in self.fabric.hosts:
            self.fabric.link(one, other).loss = float(value) or None

    def do_limit(self, host: str, value: str) -> None:
        if host in self.servers:
            self.servers[host].host.limit(max_qp=int(value), max_mr=4 * int(value))

    def do_capacity(self, host: str, value: str) -> None:
        if host in self.servers:
            self.servers[host].host.wire.capacity = int(value)

    def do_connections(self, host: str, value: str) -> None:
        if host in self.servers and self.servers[host].host.wire.is_open:
            self.servers[host].host.provider.host.cm.agent.max_connections = int(value)

    # -- checks ---------------------------------------------------------------------------------------

    def check_bounds(self) -> None:
        """Tables grow with the connections that were asked for, and not with the packets; and other promises that hold
        at every moment.
        """
        most = 4 * len(self.lives) + 8
        for server in self.servers.values():
            host = server.host.provider.host
            agent, mux, runtime = host.cm._agent, host.mux, host.runtime
            connections = 0 if agent is None else len(agent)
            if max(connections, len(mux), len(mux._held), host.bound_ids, len(runtime._timers._heap) // 4) > most:
                raise Violation(
                    f"{server.host.name}: {connections} connections, {len(mux)} queue pairs, {len(mux._held)} held "
                    f"numbers, {host.bound_ids} bound ids, {len(runtime._timers._heap)} timers for {len(self.lives)}"
                )
            if runtime.errors.counts:
                raise Violation(f"{server.host.name}: internal errors: {dict(runtime.errors.counts)}")
        if self.traffic.violation:
            raise Violation(self.traffic.violation)

    def check_end(self) -> None:
        """Every table of each living host is empty."""
        for server in self.servers.values():
            provider = server.host.provider
            try:
                check_empty(server.host)
            except AssertionError as error:
                raise Violation(str(error)) from error
            devices = provider.host._devices.values()
            left = {
                "memory regions": sum(len(device._memory) for device in devices if isinstance(device, SoftDevice)),
                "port numbers": len(server.host.ports._owners),
                "bound ids": provider.host.bound_ids,
                "owners of connections": len(provider.host.cm._owners),
                "listeners": len(provider.host.cm._listeners),
            }
            server.close()
            left |= {"users": len(provider.runtime.users()), "held numbers": len(provider.host.mux._held)}
            if any(left.values()):
                raise Violation(f"{server.host.name}: left are {left}")

    def digest(self) -> str:
        """A hash of the packet log: every packet, its bytes, its time and what happened to it."""
        found = blake2b(digest_size=16)
        for entry in self.fabric.log:
            found.update(f"{entry}\n".encode())
            found.update(entry.data)
        return found.hexdigest()

    def abandon(self) -> None:
        """Let go of everything, also after a failure and of hosts that crashed."""
        for side in list(self.sides.values()):
            self._ignore(side.release)
        for server in self.all_servers:
            self._ignore(server.close)

    @staticmethod
    def _ignore(call: Callable[[], object]) -> None:
        with contextlib.suppress(RdmaError, AssertionError, ValueError):
            call()  # what led here is reported; or the host has crashed


#: Steps that concern one connection or one port: what they name need not succeed.
_TROUBLE = frozenset(("destroy", "disconnect", "error", "unlisten"))
