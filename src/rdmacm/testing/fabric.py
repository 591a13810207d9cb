"""Several hosts in one process, in virtual time, on a network that does what it is told.

A :class:`Fabric` is a network in memory. Its hosts carry the same software device as a real one; packets take
virtual time from one to another, and may be lost, doubled, held back and damaged on the way: at random, in the
proportions asked for, or as a script says. Nothing happens but in :meth:`Fabric.run` or while a call waits, in the
thread that runs it or waits, so a run is a function of its seed.

>>> from rdmacm import CmId
>>> from rdmacm.testing import Fabric
>>> fabric = Fabric(seed=1, latency=20e-6)
>>> a, b = fabric.host("a", "10.0.0.1"), fabric.host("b", "10.0.0.2")
>>> with CmId(provider=a.provider) as cmid:
...     cmid.resolve_addr(("10.0.0.2", 7471))
...     cmid.verbs.name
'soft_eth0'
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, TypeVar

from rdmacm.testing.clock import VirtualClock
from rdmacm.testing.faults import Fate, Faults, Packet, Verdict, corrupted
from rdmacm.testing.host import FabricRoute, Host
from rdmacm.testing.log import FabricLog, LogEntry

if TYPE_CHECKING:
    from rdmacm.progress.runtime import Runtime
    from rdmacm.testing.subnet import MemoryPort, MemorySubnet

__all__ = ["Fabric", "SimulationError"]

T = TypeVar("T")

#: Packets under way at a time; more are dropped.
_MOST_IN_FLIGHT = 1 << 16

_MOST_HOSTS = 0xFFFF

#: What IP and UDP add to a packet.
_IPV4_UDP, _IPV6_UDP = 28, 48


class SimulationError(RuntimeError):
    """The simulation cannot go on as it was asked to: a wait that nothing will end, a run without an end.

    Not an OSError: code under test that catches those must not take it for one of the network's.
    """


class _Link:
    """One direction between two hosts. It has dice of its own: what others send does not change what they show."""

    __slots__ = ("last_arrival", "random")

    def __init__(self, seed: str) -> None:
        self.random = Random(seed)
        self.last_arrival = 0.0


class Fabric:
    """A simulated network.

    ``seed`` decides everything that is random, here and in the hosts' devices.

    Of packets, these parts (0..1) are lost, come twice, are held back and are damaged: ``loss``, ``duplicate``,
    ``reorder``, ``corrupt`` (1 to 8 bits flipped, anywhere). They may be changed at any time. A packet takes
    ``latency`` seconds and up to ``jitter`` more; that alone never lets one overtake another. One that is held back,
    and the second of two copies, takes up to ``reorder_delay`` more, and others overtake it.

    ``mtu`` is that of the hosts' interfaces (1500 for packets with 1024 bytes of data, 4200 for 4096). With
    ``trains`` False the hosts send packet by packet. ``max_steps`` bounds one :meth:`run`.

    ``faults``: a script, asked about each packet before chance decides; see :class:`Verdict` and :func:`nth`.
    ``log``: what became of each packet. ``hosts``: the hosts by name. ``clock``: the virtual clock.
    """

    def __init__(
        self,
        seed: int | str = 0,
        *,
        loss: float = 0.0,
        duplicate: float = 0.0,
        reorder: float = 0.0,
        corrupt: float = 0.0,
        latency: float = 20e-6,
        jitter: float = 0.0,
        reorder_delay: float = 200e-6,
        mtu: int = 1500,
        trains: bool = True,
        max_steps: int = 1_000_000,
        log_limit: int = 64 << 20,
    ) -> None:
        for name, part in {"loss": loss, "duplicate": duplicate, "reorder": reorder, "corrupt": corrupt}.items():
            if not 0 <= part <= 1:
                raise ValueError(f"{name} is a part, 0 to 1, not {part}")
        for name, seconds in {"latency": latency, "jitter": jitter, "reorder_delay": reorder_delay}.items():
            if not (math.isfinite(seconds) and seconds >= 0):
                raise ValueError(f"{name} is in seconds, 0 or more, not {seconds}")
        self.seed = seed
        self.loss, self.duplicate, self.reorder, self.corrupt = loss, duplicate, reorder, corrupt
        self.latency, self.jitter, self.reorder_delay = latency, jitter, reorder_delay
        self.mtu = mtu
        self.trains = trains
        self.max_steps = max_steps
        self.clock = VirtualClock(0.0)
        self.faults: Faults | None = None
        self.log = FabricLog(log_limit)
        self.hosts: dict[str, Host] = {}
        self._subnets: list[MemorySubnet] = []
        self._links: dict[tuple[str, str], _Link] = {}
        self._cut: set[tuple[str, str]] = set()
        self._flying: list[tuple[float, int, Packet, bytes]] = []
        self._copies = self._packets = 0
        self._macs = 0

    # -- hosts ----------------------------------------------------------------------------------------

    def host(self, name: str, *addresses: str, infiniband: Sequence[MemoryPort] = ()) -> Host:
        """A new host with an interface ``eth0`` that has these addresses (``"10.0.0.1"``, ``"fd00::1/48"``).

        Without a prefix length it is /24 or /64, and whatever else is on the fabric is reached directly too. The name
        of a crashed host may be used again: that is its reboot, and nothing of what it knew is left. ``infiniband``:
        its ports on subnets that are attached (:meth:`attach`). ValueError for a name or an address that is taken, and
        for a port of another subnet.
        """
        before = self.hosts.get(name)
        if before is not None and before.alive:
            raise ValueError(f"there is a host {name}")
        if self._macs >= _MOST_HOSTS:
            raise ValueError(f"a fabric has no more than {_MOST_HOSTS} hosts")
        if any(port.subnet not in self._subnets for port in infiniband):
            raise ValueError("a port's subnet is not attached")
        self._macs += 1
        host = Host(self, name, self._macs, before.incarnation + 1 if before else 1, addresses, infiniband)
        for other in self.hosts.values():
            if other.alive and (taken := set(other.addresses) & set(host.addresses)):
                raise ValueError(f"{', '.join(sorted(taken))} is {other.name}'s")
        self.hosts[name] = host
        return host

    def attach(self, subnet: MemorySubnet) -> None:
        """Let time pass on an InfiniBand subnet too; ValueError where its ``clock`` is not the fabric's."""
        if subnet.clock is not self.clock:
            raise ValueError("the subnet has a clock of its own")
        self._subnets.append(subnet)

    def crash(self, name: str) -> None:
        """A host is gone: its timers stop, nothing of it is sent or answered, nothing is delivered to it."""
        host = self._named(name)
        host.alive = False
        host.wire.close()
        for port in host.infiniband:
            port.close()

    def partition(self, one: str, other: str, *, one_way: bool = False) -> None:
        """Cut the network between two hosts, also for what is under way; or only what the first sends."""
        for name in (one, other):
            self._named(name)
        self._cut.add((one, other))
        if not one_way:
            self._cut.add((other, one))

    def heal(self) -> None:
        """Every host can reach every other again."""
        self._cut.clear()

    def _named(self, name: str) -> Host:
        host = self.hosts.get(name)
        if host is None:
            raise ValueError(f"there is no host {name}")
        return host

    def owner_of(self, ip: bytes, asker: Host) -> Host | None:
        """The host that has a packed address, as ``asker`` sees the world; also one that has crashed."""
        if asker.network.interface_of(ip) is not None:
            return asker
        crashed = None
        for host in self.hosts.values():
            interface = host.network.interface_of(ip)
            if interface is not None and not interface.is_loopback:
                if host.alive:
                    return host
                crashed = host
        return crashed

    def can_talk(self, one: Host, other: Host) -> bool:
        """Whether both hosts are up and packets get from each to the other."""
        names = one.name, other.name
        return one.alive and other.alive and names not in self._cut and names[::-1] not in self._cut

    # -- time -----------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Virtual time in seconds; a fabric begins at 0."""
        return self.clock.now

    def run(self, until: float | Callable[[], bool] | None = None, *, seconds: float | None = None) -> bool:
        """Let virtual time pass: packets arrive, timers fire, handlers are called.

        ``until``: a moment (what is due at that very moment happens too); or a condition, looked at after each
        moment at which something happened; or None, until nothing is left to do. ``seconds`` is a limit from now.
        Where nothing more happens before a moment or a limit, time goes there at once.

        Returns whether the condition holds, and True where there was none. SimulationError after ``max_steps``
        moments.
        """
        done = until if callable(until) else None
        limit = math.inf if until is None or callable(until) else _moment(until)
        if seconds is not None:
            limit = min(limit, self.now + max(0.0, _moment(seconds)))
        for _ in range(self.max_steps):
            self._turn()
            if done is not None and done():
                return True
            at = self._next()
            if at is None or at > limit:
                if limit < math.inf:
                    self.clock.now = max(self.now, limit)
                return done is None or done()
            self.clock.now = max(self.now, at)
            self._deliver()
        raise SimulationError(f"no end after {self.max_steps} steps, at {self.now:.9f} s; {self._agenda()}")

    def drive(self, runtime: Runtime, done: Callable[[], T], timeout: float | None) -> T:
        """Wait on one host: run until ``done()``, for ``timeout`` virtual seconds at most; its last answer.

        ``done`` is called with the runtime's lock held, and not again once it returns something true.
        SimulationError for a wait without a timeout that nothing can end any more, and on a host that has crashed.
        """
        host = next((host for host in self.hosts.values() if host.provider.runtime is runtime), None)
        if host is None or not host.alive:
            raise SimulationError("a host that is not, or no longer, on the fabric cannot wait")

        with runtime.lock:
            found = done()

        def look() -> bool:
            nonlocal found
            with runtime.lock:
                found = done()
            return bool(found)

        if found or self.run(look, seconds=timeout) or timeout is not None:
            return found
        raise SimulationError(f"host {host.name} waits for ever: at {self.now:.9f} s {self._agenda()}")

    def _turn(self) -> None:
        """Every host makes progress, until no handler has anything more to do."""
        for _ in range(self.max_steps):
            hosts = [host for host in self.hosts.values() if host.alive]
            called = [host.turn() for host in hosts]
            # A subnet may deliver at once, to one that has had its turn.
            if not any(called) and not any(port.waiting for host in hosts for port in host.infiniband):
                return
        raise SimulationError(f"handlers keep each other busy at {self.now:.9f} s")

    def _next(self) -> float | None:
        """When something happens next."""
        earliest = self._flying[0][0] if self._flying else None
        for subnet in self._subnets:
            deadline = subnet.next_deadline()
            if deadline is not None and (earliest is None or deadline < earliest):
                earliest = deadline
        for host in self.hosts.values():
            deadline = host.provider.runtime.next_deadline() if host.alive else None
            if deadline is not None and (earliest is None or deadline < earliest):
                earliest = deadline
        return earliest

    def _agenda(self) -> str:
        living = {name: host.provider.runtime for name, host in self.hosts.items() if host.alive}
        timers = [name for name, runtime in living.items() if runtime.next_deadline() is not None]
        return f"packets under way: {len(self._flying)}; hosts with timers: {', '.join(timers) or 'none'}"

    # -- packets --------------------------------------------------------------------------------------

    def transmit(self, host: Host, route: FabricRoute, data: bytes, identification: int) -> bool:
        """A host sends a packet; False where it cannot leave the host."""
        path = route.path
        peer = self.owner_of(path.remote, host)
        self._packets += 1
        packet = Packet(
            self._packets,
            self.now,
            host.name,
            peer.name if peer else "",
            path.local,
            path.remote,
            route.source_port,
            route.traffic_class,
            identification,
            data,
        )
        if not host.alive:
            self._note(Fate.CRASHED, packet, data)
            return False
        interface = host.network.interface_of(path.local)
        if interface is None or peer is None:
            self._note(Fate.UNREACHABLE, packet, data)
            return interface is not None
        overhead = _IPV4_UDP if len(path.remote) == 4 else _IPV6_UDP
        if peer is not host and len(data) + overhead > interface.mtu:
            self._note(Fate.TOO_LONG, packet, data)
            return False
        if (host.name, peer.name) in self._cut:
            self._note(Fate.PARTITIONED, packet, data)
            return True
        self._launch(packet)
        return True

    def _launch(self, packet: Packet) -> None:
        """Decide what becomes of a packet, and send its copies on their way."""
        key = packet.source, packet.destination
        link = self._links.get(key)
        if link is None:
            link = self._links[key] = _Link(f"{self.seed}/{packet.source}>{packet.destination}")
        roll = link.random.random
        # Always as many throws: a script that saves one packet does not turn the luck of those after it.
        lost, twice, late, damaged = (roll() < part for part in (self.loss, self.duplicate, self.reorder, self.corrupt))
        jitter, later, flips = roll() * self.jitter, roll() * self.reorder_delay, 1 + int(roll() * 8)
        damage = link.random.getrandbits(64)
        verdict = self.faults(packet) if self.faults is not None else None
        if verdict is None:
            copies = 0 if lost else 1 + twice
            verdict = Verdict(copies, later if late else 0.0, flips if damaged else 0)
        if not verdict.copies:
            self._note(Fate.LOST, packet, packet.data)
            return
        data = packet.data if verdict.data is None else verdict.data
        if verdict.flips:
            data = corrupted(data, verdict.flips, Random(damage))
        if data != packet.data:
            self._note(Fate.CORRUPTED, packet, data)
        if verdict.copies > 1:
            self._note(Fate.DUPLICATED, packet, packet.data)
        arrival = max(link.last_arrival, self.now + self.latency + jitter)
        if verdict.delay:
            self._note(Fate.DELAYED, packet, data)
            arrival += verdict.delay
        else:
            link.last_arrival = arrival
        for copy in range(verdict.copies):
            self._fly(arrival + copy * later, packet, packet.data if copy else data)

    def _fly(self, arrival: float, packet: Packet, data: bytes) -> None:
        if len(self._flying) >= _MOST_IN_FLIGHT:
            self._note(Fate.OVERRUN, packet, data)
            return
        self._copies += 1
        heapq.heappush(self._flying, (arrival, self._copies, packet, data))

    def _deliver(self) -> None:
        """Hand over what has arrived by now."""
        for subnet in self._subnets:
            subnet.settle()
        while self._flying and self._flying[0][0] <= self.now:
            _, _, packet, data = heapq.heappop(self._flying)
            host = self.hosts[packet.destination]
            if not host.alive:
                fate = Fate.CRASHED
            elif (packet.source, packet.destination) in self._cut:
                fate = Fate.PARTITIONED
            elif host.network.interface_of(packet.remote) is None:
                fate = Fate.UNREACHABLE
            elif not host.wire.is_open:
                fate = Fate.REFUSED
            else:
                fate = Fate.DELIVERED if host.wire.arrive(packet, data) else Fate.OVERRUN
            self._note(fate, packet, data)

    def _note(self, fate: Fate, packet: Packet, data: bytes) -> None:
        self.log.append(LogEntry(self.now, fate, packet, data))

    def __repr__(self) -> str:
        return f"<Fabric seed {self.seed!r} at {self.now:.9f} s, {len(self.hosts)} hosts>"


def _moment(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise ValueError(f"time is in seconds, not {seconds}")
    return float(seconds)
