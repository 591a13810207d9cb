"""One simulation: hosts, listeners and connections that do what a script says, and the checks."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

from rdmacm import CmEvent, CmEventType, CmId, EventChannel
from rdmacm.constants import PortSpace
from rdmacm.errors import RdmaError
from rdmacm.proto.constants import ICRC_LENGTH
from rdmacm.proto.roce.icrc import Icrc
from rdmacm.soft.device.device import SoftDevice
from rdmacm.testing import Fabric, FabricPacket, FaultScript, Host
from support.life_cycles import check_empty
from swarm.life import Life, Side, Violation, reset_arena
from swarm.script import HEAL, Script, Step
from swarm.traffic import Traffic

__all__ = ["Result", "Violation", "simulate"]

E = CmEventType
ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}
#: The attribute ids of messages.
_REQ, _REP = b"\x00\x10", b"\x00\x13"
#: The index of the interface of each process.
_ETH0 = 2
#: Virtual seconds. From when the network is whole again, how long operations may take, and applications wait.
PATIENCE = 600.0
GIVE_UP = 150.0
#: Virtual seconds after which a network that is whole has forgotten its faults.
CALM = 100.0
#: Management datagrams that are kept to be sent again.
_MOST_KEPT = 1000


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


class _Network(Fabric):
    """A fabric that keeps the management datagrams, to send some of them again."""

    def __init__(self, *arguments: Any, **given: Any) -> None:
        super().__init__(*arguments, **given)
        self.datagrams: list[FabricPacket] = []

    def _forward(self, packet: FabricPacket) -> None:
        if packet.data[5:8] == b"\0\0\1" and len(self.datagrams) < _MOST_KEPT:
            self.datagrams.append(packet)
        super()._forward(packet)

    def repeat(self, which: float, *, is_forged: bool) -> None:
        """Send one of the datagrams once more; or, forged, a new request for the queue pair of an earlier one."""
        found = self.datagrams
        if is_forged:  # one that was answered: nothing tells a forged request from a true one that comes later
            answered = {packet.data[48:52] for packet in found if packet.data[36:38] == _REP}
            found = [packet for packet in found if packet.data[36:38] == _REQ and packet.data[44:48] in answered]
        if which >= 0.5:  # one of the last
            which, found = 2 * which - 1, found[-20:]
        if found:
            packet = found[min(int(which * len(found)), len(found) - 1)]  # a script may have rounded it to 1
            data = packet.data
            if is_forged:
                data = data[:45] + bytes((data[45] ^ 0x55, data[46] ^ 0x33)) + data[47:-ICRC_LENGTH]
                data += Icrc(packet.local, packet.remote, packet.source_port).seal([data])
            self._schedule(self.now + self.latency, packet, data)


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
        """Listen, if there is an address and a descriptor for that."""
        if port in self.listeners:
            return
        self.listeners[port] = []
        for space in (PortSpace.TCP, PortSpace.UDP):
            cmid = CmId(self.channel, space)
            try:
                cmid.bind_addr((self.host.addresses[0], int(port)))
                cmid.listen(backlog)
            except RdmaError as error:
                cmid.destroy()
                self.unlisten(port)
                if error.errno not in (errno.EMFILE, errno.EADDRNOTAVAIL, errno.ENODEV):
                    raise Violation(f"{self.host.name} cannot listen: {error}") from error
                return
            self.listeners[port].append(cmid)

    def unlisten_all(self) -> None:
        for port in list(self.listeners):
            self.unlisten(port)

    def unlisten(self, port: str) -> None:
        for cmid in self.listeners.pop(port, ()):
            cmid.destroy()

    def handle(self, event: CmEvent) -> None:
        if event.type is E.CONNECT_REQUEST:
            life = self.world.lives[int.from_bytes(event.private_data[12:16], "big")]
            side = Side(life, self.host, False, self.channel)
            life.passive.append(side)
        elif event.id not in self.world.sides:  # a listener's
            if event.type is E.DEVICE_REMOVAL:
                self.world.later(0.0, self.unlisten_all)
            elif event.type is not E.ADDR_CHANGE:
                raise Violation(f"{self.host.name}: {event!r} of a listener")
            return
        else:
            side = self.world.sides[event.id]
        side.handle(event)
        side.life.is_told = True
        self.world.active[side.life.number] = side.life

    def close(self) -> None:
        self.unlisten_all()
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
        self.fabric = _Network(script.seed, log_limit=log_limit, **numbers)
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
        self.is_giving_up = self.is_healed = False
        #: Processes without a descriptor to open a wire, and those without a helper thread, with the seconds from one
        #: look of their application to the next.
        self.starved: set[str] = set()
        self.unhelped: dict[str, float] = {}
        #: Datagrams that were sent again.
        self.repeated = 0
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
            server.unlisten_all()
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
        for name in self.unhelped:
            self.fabric.pause(name)
        self.check_bounds()
        return False

    def take(self, step: Step) -> None:
        getattr(self, f"do_{step.name}")(**step.given)

    def heal(self) -> None:
        fabric = self.fabric
        fabric.heal()
        fabric.loss = fabric.duplicate = fabric.reorder = fabric.corrupt = 0.0
        fabric.faults = None
        self.unhelped.clear()
        for host in fabric.hosts.values():
            fabric.resume(host.name)
            host.forward_loss = 0.0
            host.wire.open_error = 0
            host.wire.capacity = 4096
            host.limit(max_qp=65000, max_mr=1 << 20)
            self.do_plug(host.name)
            self.do_interface(host.name, "1")
        for link in fabric._links.values():
            link.loss = None
        for name in list(self.servers):
            self.listen_again(name)
        self.later(CALM, self.probe)
        self.later(GIVE_UP, self.give_up)

    def probe(self) -> None:
        """Connect once more from each process to each port where a process listens: nothing may prevent that."""
        self.is_healed = True
        ports = [(name, port) for name, server in self.servers.items() for port in server.listeners]
        for number, (source, (target, port)) in enumerate(zip(self.servers, ports, strict=False), 1000):
            given = {"n": str(number), "source": source, "host": target, "port": port}
            self.do_connect(**given, server="accept", space="TCP", closer="both")

    def give_up(self) -> None:
        self.is_giving_up = True
        for life in self.active.values():
            life.give_up()

    # -- the steps ------------------------------------------------------------------------------------

    def do_start(self, host: str) -> None:
        if host in self.servers:
            return
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
        if host in self.starved:
            process.wire.open_error = errno.EMFILE
        self.traffic.watch(process)
        self.servers[host] = server = _Server(self, process)
        self.all_servers.append(server)
        if self.fabric.now:
            self.listen_again(host)

    def listen_again(self, host: str) -> None:
        """Listen at all ports, as a service that is restarted does."""
        for step in self.script.steps:
            if step.name == "listen" and step.given["host"] == host and step.at <= self.fabric.now:
                self.do_listen(**step.given)

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
        is_plain = is_plain and "own" not in given
        has_listener = server is not None and given["port"] in server.listeners
        is_calm = self.exposed.isdisjoint(hosts) and self.troubled.isdisjoint((given["n"], given["port"]))
        life = Life(self, given, is_plain and has_listener and (is_calm or self.is_healed))
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
                one.disconnect(again=True)

    def do_error(self, n: str, side: str) -> None:
        for one in self._sides(n, side):
            one.fail()

    def do_migrate(self, n: str, side: str) -> None:
        for one in self._sides(n, side):
            one.migrate(self.servers[one.host.name].spare)

    def do_sqd(self, n: str, side: str) -> None:
        for one in self._sides(n, side):
            one.drain()

    def do_reset(self, n: str, side: str) -> None:
        for one in self._sides(n, side):
            one.reset()

    def do_reject(self, n: str, side: str) -> None:
        for one in self._sides(n, side):
            one.reject()

    def do_notify(self, n: str, side: str) -> None:
        for one in self._sides(n, side):
            one.notify()

    def do_replay(self, which: str) -> None:
        self.repeated += 1
        self.fabric.repeat(float(which), is_forged=False)

    def do_forge(self, which: str) -> None:
        self.repeated += 1
        self.fabric.repeat(float(which), is_forged=True)

    def do_unplug(self, host: str) -> None:
        """Remove the interface, and with it the device."""
        if host in self.servers:
            network = self.servers[host].host.network
            if any(interface.index == _ETH0 for interface in network.interfaces()):
                network.remove_interface(_ETH0)

    def do_plug(self, host: str) -> None:
        if host in self.servers:
            process = self.servers[host].host
            if all(interface.index != _ETH0 for interface in process.network.interfaces()):
                mac = b"\2\0\0\0" + process.number.to_bytes(2, "big")
                process.network.add_interface("eth0", f"{ADDRESSES[host[0]]}/24", mtu=self.fabric.mtu, mac=mac)
                process.network.add_route("0.0.0.0/0", _ETH0)
                self.later(0.0, partial(self.listen_again, host))

    def do_descriptors(self, host: str, value: str) -> None:
        """From now on there is a descriptor for a wire, or none."""
        if value == "1":
            self.starved.discard(host)
        else:
            self.starved.add(host)
        if host in self.servers:
            self.servers[host].host.wire.open_error = errno.EMFILE if host in self.starved else 0
            if host not in self.starved:
                self.listen_again(host)

    def do_helper(self, host: str, value: str) -> None:
        """The helper thread has failed: packets and timers wait for the next call of the application."""
        if host in self.servers:
            period = float(value)
            if period:
                if host not in self.unhelped:
                    self.later(period, partial(self.look, host))
                self.unhelped[host] = period
            elif self.unhelped.pop(host, 0.0):
                self.fabric.resume(host)

    def look(self, host: str) -> None:
        """The application of a process without helper thread makes a call."""
        if host in self.unhelped:
            self.fabric.resume(host)
            self.later(self.unhelped[host], partial(self.look, host))

    def do_forward(self, host: str, value: str) -> None:
        if host in self.servers:
            self.servers[host].host.forward_loss = float(value)

    def do_interface(self, host: str, up: str) -> None:
        if host in self.servers:
            network = self.servers[host].host.network
            if any(interface.index == _ETH0 for interface in network.interfaces()):
                network.set_interface(_ETH0, up=up == "1")

    def do_partition(self, one: str, other: str, one_way: str) -> None:
        groups = [[name for name in group.split(",") if name in self.fabric.hosts] for group in (one, other)]
        self.fabric.partition(*groups, one_way=one_way == "1")

    def do_heal(self) -> None:
        self.fabric.heal()

    def do_crash(self, host: str) -> None:
        server = self.servers.pop(host, None)
        if server is not None:
            self.unhelped.pop(host, None)
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
        most = 4 * (len(self.lives) + self.repeated) + 8
        for server in self.servers.values():
            host = server.host.provider.host
            agent, mux, runtime = host.cm._agent, host.mux, host.runtime
            connections = 0 if agent is None else len(agent)
            if max(connections, len(mux), len(mux._held), host.bound_ids, len(runtime._timers.heap) // 4) > most:
                raise Violation(
                    f"{server.host.name}: {connections} connections, {len(mux)} queue pairs, {len(mux._held)} held "
                    f"numbers, {host.bound_ids} bound ids, {len(runtime._timers.heap)} timers for {len(self.lives)}"
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
_TROUBLE = frozenset(("destroy", "disconnect", "error", "unlisten", "reset", "reject"))
