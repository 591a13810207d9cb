"""Several hosts in one process, in virtual time, on a simulated network with configurable faults.

A :class:`Fabric` is a network in memory. Its hosts run the same software device as a real host. Packets take virtual
time from one host to another, and may be lost, duplicated, reordered and corrupted on the way: at random, with given
probabilities, or as a script decides. Packets and timers are processed only in :meth:`Fabric.run` and in calls that
wait, always in the calling thread. Programs (:meth:`Host.start`) have threads, of which one runs at a time. So a run
depends on nothing but its seed and its calls.

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

import asyncio
import heapq
import math
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from random import Random
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from rdmacm.address import InetAddr, is_multicast
from rdmacm.interrupts.handlers import checkpoint
from rdmacm.interrupts.protection import run_finalizers
from rdmacm.proto.constants import ROCE_PORT
from rdmacm.proto.roce.icrc import icrc_between
from rdmacm.testing.clock import SimulationError, VirtualClock
from rdmacm.testing.faults import (
    DELIVER,
    FabricPacket,
    Outcome,
    Verdict,
    check_durations,
    check_probabilities,
    corrupted,
)
from rdmacm.testing.host import FabricRoute, Host
from rdmacm.testing.log import FabricLog, LogEntry
from rdmacm.testing.loop import FabricLoop, tasks_text
from rdmacm.testing.programs import Programs, current_program
from rdmacm.testing.scenario import Scenario

if TYPE_CHECKING:
    from rdmacm.net.types import Interface
    from rdmacm.progress.runtime import Runtime
    from rdmacm.testing.subnet import MemoryPort, MemorySubnet

T = TypeVar("T")

#: Maximum number of packets in flight; further ones are dropped.
_MAX_IN_FLIGHT = 1 << 16

#: Maximum number of hosts: the last two bytes of a MAC address are the host's number.
_MAX_HOSTS = 0xFFFF

#: Bytes of the IP and UDP headers.
_IPV4_UDP, _IPV6_UDP = 28, 48


class FabricLink:
    """One direction between two hosts: its faults, where they differ from the fabric's (:meth:`Fabric.link`).

    Each link has random numbers of its own, so traffic between other hosts does not change its faults.

    Attributes; None, the default, stands for the fabric's attribute of the same name:

    - ``loss``, ``duplicate``, ``reorder``, ``corrupt``: probabilities, 0 to 1.
    - ``latency``, ``jitter``: seconds.
    """

    __slots__ = ("_last_arrival", "_random", "corrupt", "duplicate", "jitter", "latency", "loss", "reorder")

    def __init__(self, seed: str) -> None:
        self.loss: float | None = None
        self.duplicate: float | None = None
        self.reorder: float | None = None
        self.corrupt: float | None = None
        self.latency: float | None = None
        self.jitter: float | None = None
        #: Source of the random numbers for this direction.
        self._random = Random(seed)
        #: Arrival time of the last packet that was not held back, in seconds.
        self._last_arrival = 0.0


class Fabric:
    """A simulated network.

    ``seed`` seeds every random number of the run: the faults, and the devices of the hosts. The other arguments are
    attributes, described below; all but ``log_limit`` (bytes) may be changed during a run. Raises ValueError for a
    probability outside 0 to 1, and for a time that is negative or not finite.

    Attributes:

    - ``seed``: seeds every random number of the run.
    - ``loss``: probability (0 to 1) that a packet is lost.
    - ``duplicate``: probability that a packet arrives twice.
    - ``reorder``: probability that a packet is held back, so that later ones overtake it.
    - ``corrupt``: probability that 1 to 8 random bits of a packet are inverted. If its ICRC is right all the same (one
      of 65,536 over IPv4, and bits that it does not cover), it is lost: UDP's checksum would show the damage.
    - ``latency``: time from sender to receiver, in seconds.
    - ``jitter``: maximum of the random additional time, in seconds. It never changes the order of packets.
    - ``reorder_delay``: maximum of the random additional delay of packets held back and of second copies, in seconds.
    - ``mtu``: MTU of new hosts' interfaces in bytes: 1500 gives a path MTU of 1024, 4200 one of 4096.
    - ``trains``: whether new hosts send several packets by one call, as with UDP_SEGMENT.
    - ``max_steps``: maximum number of moments that one :meth:`run` processes.
    - ``clock``: the virtual clock, which starts at 0; that of all hosts, unless one has its own (:meth:`drift`).
    - ``faults``: a script of faults, such as that of :func:`nth`: called with each packet sent, it returns a verdict,
      or None to leave the packet to chance.
    - ``log``: what happened to each packet.
    - ``hosts``: hosts by name, including crashed ones.
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
        check_probabilities(loss=loss, duplicate=duplicate, reorder=reorder, corrupt=corrupt)
        check_durations(latency=latency, jitter=jitter, reorder_delay=reorder_delay)
        self.seed = seed
        self.loss = loss
        self.duplicate = duplicate
        self.reorder = reorder
        self.corrupt = corrupt
        self.latency = latency
        self.jitter = jitter
        self.reorder_delay = reorder_delay
        self.mtu = mtu
        self.trains = trains
        self.max_steps = max_steps
        self.clock: VirtualClock = VirtualClock(0.0)
        self.faults: Callable[[FabricPacket], Verdict | None] | None = None
        self.log: FabricLog = FabricLog(log_limit)
        self.hosts: dict[str, Host] = {}
        #: The programs of all hosts (:meth:`Host.start`).
        self._programs = Programs(seed, self.clock, self.run)
        #: The thread that runs the fabric, while one does.
        self._runner: int | None = None
        #: InfiniBand subnets that runs drive too; see :meth:`attach`.
        self._subnets: list[MemorySubnet] = []
        #: Links by names of sender and receiver.
        self._links: dict[tuple[str, str], FabricLink] = {}
        #: Names of sender and receiver that are cut off from each other.
        self._partitioned: set[tuple[str, str]] = set()
        #: Heap of (arrival time, number of the copy, packet, its bytes).
        self._in_flight: list[tuple[float, int, FabricPacket, bytes]] = []
        #: Heap of (time, number, function) of :meth:`call_at`.
        self._calls: list[tuple[float, int, Callable[[], object]]] = []
        #: Numbers of copies scheduled, of packets sent, of hosts created, and of calls requested.
        self._copies_sent = self._packets_sent = self._hosts_made = self._calls_made = 0

    # -- hosts ----------------------------------------------------------------------------------------

    def host(self, name: str, *addresses: str, infiniband: Sequence[MemoryPort] = ()) -> Host:
        """Add a host with an interface ``eth0`` that has these addresses (``"10.0.0.1"``, ``"fd00::1/48"``).

        The default prefix length is 24 or 64; all other addresses on the fabric are on link as well. The name of a
        crashed host may be used again: the host reboots, without any state from before. ``infiniband``: its ports on
        attached subnets (:meth:`attach`). Raises ValueError for a name or an address in use, and for a port of a subnet
        that is not attached.
        """
        incarnation = self._next_incarnation(name)
        if self._hosts_made >= _MAX_HOSTS:
            raise ValueError(f"a fabric cannot have more than {_MAX_HOSTS} hosts")
        if any(port.subnet not in self._subnets for port in infiniband):
            raise ValueError("the subnet of an InfiniBand port is not attached to the fabric")
        self._hosts_made += 1
        host = Host(self, name, self._hosts_made, incarnation, addresses, infiniband)
        for other in self.hosts.values():
            if other.alive and (taken := set(other.addresses) & set(host.addresses)):
                raise ValueError(f"{', '.join(sorted(taken))} is an address of host {other.name}")
        self.hosts[name] = host
        return host

    def process(self, host: str, name: str) -> Host:
        """Add a process to a host: it shares the addresses, UDP port 4791 and the port numbers of rdma_bind_addr(3).

        The process is a :class:`Host` of its own with a name of its own, so :meth:`crash` kills it alone. Its packets
        are those for its queue pairs and communication ids, and the requests for its listeners. Its ``network`` is a
        copy: a change concerns one process. Raises ValueError for an unknown host, one that is down, and a name in
        use; EUSERS if the host's processes own all 4,095 slots.
        """
        first = self._host(host)
        if not first.alive:
            raise ValueError(f"host {host} is down")
        incarnation = self._next_incarnation(name)
        process = Host(self, name, first.number, incarnation, first.addresses, beside=first.processes)
        self.hosts[name] = process
        return process

    def _next_incarnation(self, name: str) -> int:
        before = self.hosts.get(name)
        if before is None:
            return 1
        if before.alive:
            raise ValueError(f"host {name} already exists")
        return before.incarnation + 1

    def attach(self, subnet: MemorySubnet) -> None:
        """Let the fabric's runs drive an InfiniBand subnet too; raises ValueError unless both use the same clock."""
        if subnet.clock is not self.clock:
            raise ValueError("the subnet does not use the fabric's clock")
        self._subnets.append(subnet)

    def crash(self, name: str) -> None:
        """Crash a host, or kill a process: its timers stop, and it neither sends nor receives packets.

        Raises ValueError for an unknown name.
        """
        host = self._host(name)
        host.alive = False
        self._programs.kill(host)
        if host in host.processes:
            host.processes.remove(host)
        host.wire.close()
        for port in host.infiniband:
            port.close()

    def pause(self, name: str) -> None:
        """Stop a host as SIGSTOP stops a process: packets wait in its queue, and what exceeds the queue is dropped.

        Raises ValueError for an unknown name.
        """
        self._host(name).paused = True

    def resume(self, name: str) -> None:
        """End :meth:`pause`: the host processes what has arrived, and timers that are overdue."""
        self._host(name).paused = False

    def slow(self, name: str, seconds: float) -> None:
        """Slow a host down: whenever it has done something, it is busy for so many seconds. 0 ends that.

        Something is: the packets and timers that are due at a moment, an event's handler, a program's turn. Raises
        ValueError for an unknown name, and for a time that is negative or not finite.
        """
        check_durations(lag=seconds)
        self._host(name).lag = seconds

    def drift(self, name: str, rate: float) -> None:
        """Let the clock of a host, and so its timers and timeouts, run at a rate from now on; 1 is the fabric's.

        Raises ValueError for an unknown name, and for a rate that is not positive or not finite.
        """
        self._host(name).clock.set_rate(rate)

    def jump(self, seconds: float, name: str | None = None) -> None:
        """Let the clocks of all hosts, or of one, jump forward, as after a suspended machine has been resumed.

        Nothing is processed in between: deadlines and arrivals that the jump has passed are due at once, in order.
        Raises ValueError for a time that is negative or not finite, and for an unknown name.
        """
        (self.clock if name is None else self._host(name).clock).advance(_checked_seconds(seconds))

    def link(self, source: str, destination: str) -> FabricLink:
        """Return the direction from one host to another, whose faults may differ from the fabric's.

        Raises ValueError for an unknown name.
        """
        for name in (source, destination):
            self._host(name)
        return self._link(source, destination)

    def partition(self, one: str | Iterable[str], other: str | Iterable[str], *, one_way: bool = False) -> None:
        """Drop all packets between two hosts or groups of hosts, including those in flight.

        With ``one_way`` only those from ``one``. Raises ValueError for an unknown name.
        """
        groups = [[side] if isinstance(side, str) else list(side) for side in (one, other)]
        for name in (*groups[0], *groups[1]):
            self._host(name)
        for source in groups[0]:
            for destination in groups[1]:
                self._partitioned.add((source, destination))
                if not one_way:
                    self._partitioned.add((destination, source))

    def heal(self) -> None:
        """End all partitions. The faults of the fabric and of its links stay as they are."""
        self._partitioned.clear()

    def call_at(self, when: float, function: Callable[[], object]) -> None:
        """Call ``function()`` at a time, in seconds; once, and at once if the time is over when the fabric runs.

        So faults begin and end by themselves, as in ``fabric.call_at(30, fabric.heal)``. The function is called in the
        run, after the packets of that time have been delivered, and may change the fabric. It must not wait. Raises
        ValueError for a time that is not finite.
        """
        self._calls_made += 1
        heapq.heappush(self._calls, (_checked_seconds(when), self._calls_made, function))

    def play(self, scenario: Scenario | str) -> None:
        """Let the events of a scenario, or of its text, happen in time (:class:`Scenario`); ValueError for no event."""
        (Scenario.parse(scenario) if isinstance(scenario, str) else scenario)._play(self)

    def _host(self, name: str) -> Host:
        host = self.hosts.get(name)
        if host is None:
            raise ValueError(f"no host {name}")
        return host

    def _owner_of(self, ip: bytes, asker: Host) -> Host | None:
        """Return the host with a packed address, as ``asker`` sees the network; a crashed one if no other has it."""
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

    def _can_talk(self, one: Host, other: Host) -> bool:
        """Return whether both hosts are up and packets pass both ways between them."""
        names = one.name, other.name
        return one.alive and other.alive and names not in self._partitioned and names[::-1] not in self._partitioned

    # -- time -----------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Virtual time in seconds, from 0."""
        return self.clock.now

    @overload
    def run(self, until: float | Callable[[], bool] | None = None, *, seconds: float | None = None) -> bool: ...

    @overload
    def run(self, until: Coroutine[Any, Any, T]) -> T: ...

    def run(self, until: Any = None, *, seconds: float | None = None) -> Any:
        """Let virtual time pass: deliver packets, fire timers, call handlers, give programs their turns.

        ``until`` is a time (everything due at that time is included), or a condition, which is evaluated after each
        moment with activity, or None to run until nothing is left to do. ``seconds`` limits the run, from now. The
        clock advances to ``until`` or to the limit even without activity.

        Returns whether the condition is true, or True without a condition. Raises SimulationError after ``max_steps``
        moments, ValueError for a time that is not finite.

        ``until`` may also be a coroutine, which is run as by ``asyncio.run``, but in virtual time
        (:meth:`asyncio_loop`). Returns what it returns. Coroutines themselves do not call this: the fabric runs while
        they wait. SimulationError if one does, as the others of its event loop would stop.
        """
        loop = asyncio._get_running_loop()
        if isinstance(loop, FabricLoop) and not loop.sleeps:
            if asyncio.iscoroutine(until):
                until.close()
            raise SimulationError(
                "the tasks of this event loop would stop while the fabric runs; try: await asyncio.sleep(seconds), "
                "await asyncio.to_thread(program.result)"
            )
        if asyncio.iscoroutine(until):
            with asyncio.Runner(loop_factory=self.asyncio_loop) as runner:
                return runner.run(until)
        done = until if callable(until) else None
        limit = math.inf if until is None or callable(until) else _checked_seconds(until)
        if seconds is not None:
            limit = min(limit, self.now + max(0.0, _checked_seconds(seconds)))
        if (program := current_program()) is not None:
            return bool(program.wait(done, limit)) or done is None
        return self._run(done, limit)

    def asyncio_loop(self) -> asyncio.AbstractEventLoop:
        """A new event loop of asyncio in virtual time: while it would sleep, the fabric runs."""
        if (program := current_program()) is not None:
            return program.new_event_loop()
        return FabricLoop(self.clock, self._block, lambda work: self._programs.start(None, work, "executor"))

    def close(self) -> None:
        """End all programs where they wait. The fabric's ``with`` statement does that, too."""
        self._programs.kill()
        self._programs.run_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _run(self, done: Callable[[], bool] | None, limit: float) -> bool:
        """As :meth:`run`, in a thread that is no program's, until ``limit``."""
        before, thread = self._runner, threading.get_ident()
        if before not in (None, thread):
            raise SimulationError("two threads run the fabric at a time; try: host.start(function) instead of a thread")
        self._runner = thread
        try:
            clock = self.clock
            for _ in range(self.max_steps):
                self._progress()
                checkpoint()
                run_finalizers()
                if done is not None and done():
                    return True
                at = self._next_deadline()
                if at is None or at > limit:
                    if limit < math.inf:
                        clock.now = max(clock.now, limit)
                    return done is None or done()
                clock.now = max(clock.now, at)
                self._deliver()
                while self._calls and self._calls[0][0] <= clock.now:
                    heapq.heappop(self._calls)[2]()
        finally:
            self._runner = before
        raise SimulationError(f"no end after {self.max_steps} steps, at {self.now:.9f} s; {self._pending_text()}")

    def _drive(self, runtime: Runtime, done: Callable[[], T], timeout: float | None) -> T:
        """Wait on one host: run until ``done()`` is true, for at most ``timeout`` virtual seconds.

        Returns the last value of ``done()``, which is called with the lock of the runtime held, and not again once it
        is true. Raises SimulationError for a wait without a timeout that nothing can end, and on a crashed host.
        """
        host = next((host for host in self.hosts.values() if host.provider.runtime is runtime), None)
        if host is None or not host.runs:
            state = "is paused" if host is not None and host.alive else "has crashed or is on another fabric"
            raise SimulationError(f"a host that {state} cannot wait")

        with runtime.lock:
            found = done()

        def is_done() -> bool:
            nonlocal found
            with runtime.lock:
                found = done()
            return bool(found)

        until = math.inf if timeout is None else host.clock.after(timeout)
        if found:
            return found
        if (program := current_program()) is not None:
            program.wait(is_done, until)
        elif not self._run(is_done, until) and timeout is None:
            raise SimulationError(
                f"host {host.name} waits for ever: at {self.now:.9f} s {self._pending_text()}; "
                "try: host.start(function) for what another host does meanwhile"
            )
        return found

    def _block(self, ready: Callable[[], Any], seconds: float | None) -> None:
        """Let an event loop wait until something is ready, for at most ``seconds``."""
        if not self._run(ready, math.inf if seconds is None else self.now + seconds) and seconds is None:
            raise SimulationError(f"asyncio waits for ever: at {self.now:.9f} s {self._pending_text()}{tasks_text()}")

    def _progress(self) -> None:
        """Let all hosts make progress until no handler has work left."""
        for _ in range(self.max_steps):
            hosts = (*self.hosts.values(),)  # a handler may add one
            called = False
            for host in hosts:
                if host._progress():
                    called = True
            if self._programs.run_ready():
                called = True
            # A subnet without latency delivers at once, perhaps to a host earlier in the list.
            if self._subnets and any(port.waiting for host in hosts if host._is_ready for port in host.infiniband):
                called = True
            if not called:
                for host in hosts:
                    if host._has_worked:
                        host._rest()
                return
        raise SimulationError(f"handlers trigger each other without end at {self.now:.9f} s")

    def _next_deadline(self) -> float | None:
        """The time of the next arrival or timer, in seconds; None without any."""
        at = self._programs.next_deadline()
        for heap in (self._in_flight, self._calls):
            if heap and heap[0][0] < at:
                at = heap[0][0]
        for host in self.hosts.values():
            if host.alive and not host.paused:
                deadline = host._next_deadline()
                if deadline is not None and deadline < at:
                    at = deadline
        for subnet in self._subnets:
            deadline = subnet.next_deadline()
            if deadline is not None and deadline < at:
                at = deadline
        return at if at < math.inf else None

    def _pending_text(self) -> str:
        """Packets in flight and hosts with timers, for error messages."""
        living = {name: host.provider.runtime for name, host in self.hosts.items() if host.runs}
        timers = [name for name, runtime in living.items() if runtime.next_deadline() is not None]
        waiting = self._programs.waiting_text()
        return f"packets in flight: {len(self._in_flight)}; hosts with timers: {', '.join(timers) or 'none'}{waiting}"

    # -- packets --------------------------------------------------------------------------------------

    def _transmit(self, host: Host, route: FabricRoute, data: bytes, identification: int) -> bool:
        """Send one packet of a host; return False when it cannot leave the host.

        ``identification``: the field of the IPv4 header.
        """
        path = route.path
        interface = host.network.interface_of(path.local)
        if is_multicast(path.remote):
            is_loopback = interface is not None and interface.is_loopback
            among = host.processes if is_loopback else self.hosts.values()
            peers = [peer for peer in among if peer.alive and peer.wire.is_member(path.remote, is_loopback)]
        else:
            peer = self._owner_of(path.remote, host)
            if peer is not None and len(peer.processes) > 1:
                peer = peer.process_for(data, path.remote)
            peers = [] if peer is None else [peer]
        left = True
        way = path.local, path.remote, route.source_port, ROCE_PORT
        for peer in peers or (None,):
            packet = self._sent(host, peer, *way, data, route.traffic_class, identification)
            left &= self._leave(host, interface, peer, packet)
        return left

    def _send_udp(self, host: Host, source: InetAddr, destination: InetAddr, data: bytes) -> bool:
        """Send a datagram of a UDP socket; return False when it cannot leave the host."""
        peer = self._owner_of(destination.ip, host)
        packet = self._sent(host, peer, source.ip, destination.ip, source.port, destination.port, data)
        return self._leave(host, host.network.interface_of(source.ip), peer, packet)

    def _sent(
        self,
        host: Host,
        peer: Host | None,
        local: bytes,
        remote: bytes,
        source_port: int,
        port: int,
        data: bytes,
        traffic_class: int = 0,
        identification: int = 0,
    ) -> FabricPacket:
        """The next packet of a host to one peer."""
        self._packets_sent += 1
        name = peer.name if peer else ""
        where = host.name, name, local, remote, source_port
        return FabricPacket(self._packets_sent, self.now, *where, traffic_class, identification, data, port)

    def _leave(self, host: Host, interface: Interface | None, peer: Host | None, packet: FabricPacket) -> bool:
        """Send a packet of a host to one peer; return False when it cannot leave the host."""
        data = packet.data
        if not host.alive:
            self._record(Outcome.CRASHED, packet, data)
            return False
        if interface is None or peer is None:
            self._record(Outcome.UNREACHABLE, packet, data)
            return interface is not None
        overhead = _IPV4_UDP if len(packet.remote) == 4 else _IPV6_UDP
        if peer is not host and len(data) + overhead > interface.mtu:
            self._record(Outcome.TOO_LONG, packet, data)
            return False
        if (host.name, peer.name) in self._partitioned:
            self._record(Outcome.PARTITIONED, packet, data)
            return True
        self._forward(packet)
        return True

    def _forward(self, packet: FabricPacket) -> None:
        """Apply faults to a packet and schedule the arrival of its copies."""
        link = self._link(packet.source, packet.destination)
        roll = link._random.random
        # Always draw the same number of random values, so that a script's verdict on one packet does not change the
        # faults of later ones.
        lost = roll() < (self.loss if link.loss is None else link.loss)
        twice = roll() < (self.duplicate if link.duplicate is None else link.duplicate)
        late = roll() < (self.reorder if link.reorder is None else link.reorder)
        damaged = roll() < (self.corrupt if link.corrupt is None else link.corrupt)
        jitter = roll() * (self.jitter if link.jitter is None else link.jitter)
        later, flips = roll() * self.reorder_delay, 1 + int(roll() * 8)
        damage = link._random.getrandbits(64)
        verdict = self.faults(packet) if self.faults is not None else None
        if verdict is None:
            verdict = DELIVER
            if lost or twice or late or damaged:
                verdict = Verdict(0 if lost else 1 + twice, later if late else 0.0, flips if damaged else 0)
        if not verdict.copies:
            self._record(Outcome.LOST, packet, packet.data)
            return
        data = packet.data if verdict.data is None else verdict.data
        if verdict.flips:
            data = corrupted(data, verdict.flips, Random(damage))
            if packet.port != ROCE_PORT:
                self._record(Outcome.LOST, packet, data)  # the checksum of UDP tells
                return
            if icrc_between(packet.local, packet.remote, packet.source_port).solve([data]) is not None:
                self._record(Outcome.LOST, packet, data)
                return
        if data != packet.data:
            self._record(Outcome.CORRUPTED, packet, data)
        if verdict.copies > 1:
            self._record(Outcome.DUPLICATED, packet, packet.data)
        latency = self.latency if link.latency is None else link.latency
        arrival = max(link._last_arrival, self.now + latency + jitter)
        if verdict.delay:
            self._record(Outcome.DELAYED, packet, data)
            arrival += verdict.delay
        else:
            link._last_arrival = arrival
        for copy in range(verdict.copies):
            self._schedule(arrival + copy * later, packet, packet.data if copy else data)

    def _link(self, source: str, destination: str) -> FabricLink:
        link = self._links.get((source, destination))
        if link is None:
            link = self._links[source, destination] = FabricLink(f"{self.seed}/{source}>{destination}")
        return link

    def _schedule(self, arrival: float, packet: FabricPacket, data: bytes) -> None:
        if len(self._in_flight) >= _MAX_IN_FLIGHT:
            self._record(Outcome.OVERRUN, packet, data)
            return
        self._copies_sent += 1
        heapq.heappush(self._in_flight, (arrival, self._copies_sent, packet, data))

    def _deliver(self) -> None:
        """Deliver all packets whose arrival time has come."""
        for subnet in self._subnets:
            subnet.settle()
        clock = self.clock
        while self._in_flight and self._in_flight[0][0] <= clock.now:
            _, _, packet, data = heapq.heappop(self._in_flight)
            host = self.hosts[packet.destination]
            to_group = is_multicast(packet.remote)
            if packet.port != ROCE_PORT:
                self._record(self._arrive_at_socket(packet, data, host), packet, data)
                continue
            if not host.alive and host.processes and not to_group:  # a process was killed, and others have its packets
                host = host.processes[0].process_for(data, packet.remote)
            if not host.alive:
                outcome = Outcome.CRASHED
            elif (packet.source, packet.destination) in self._partitioned:
                outcome = Outcome.PARTITIONED
            elif host.network.interface_of(packet.remote) is None and not to_group:
                outcome = Outcome.UNREACHABLE
            elif not host.wire.is_open:
                outcome = Outcome.REFUSED
                self._report_closed(packet, host)
            else:
                outcome = Outcome.DELIVERED if host.wire.arrive(packet, data) else Outcome.OVERRUN
            self._record(outcome, packet, data)

    def _arrive_at_socket(self, packet: FabricPacket, data: bytes, host: Host) -> Outcome:
        """Give a datagram to a UDP socket of any process of a host."""
        if (packet.source, packet.destination) in self._partitioned:
            return Outcome.PARTITIONED
        living = [process for process in host.processes if process.alive]
        if not living:
            return Outcome.CRASHED
        for socket in [socket for process in living for socket in process._udp]:
            if socket.takes(packet):
                return Outcome.DELIVERED if socket.arrive(packet, data) else Outcome.OVERRUN
        return Outcome.REFUSED

    def _report_closed(self, packet: FabricPacket, host: Host) -> None:
        """Tell the sender of a packet that UDP port 4791 is closed, as ICMP does; the report may be lost, too."""
        link = self._link(host.name, packet.source)
        loss, latency = (self.loss if link.loss is None else link.loss), link.latency
        if Random(f"{self.seed}/closed/{packet.number}").random() < loss:
            return

        def arrive() -> None:
            if (host.name, packet.source) not in self._partitioned:
                self.hosts[packet.source].wire.report_closed(packet)

        self.call_at(self.now + (self.latency if latency is None else latency), arrive)

    def _record(self, outcome: Outcome, packet: FabricPacket, data: bytes) -> None:
        self.log._append(LogEntry(self.now, outcome, packet, data))

    def __repr__(self) -> str:
        return f"<Fabric seed {self.seed!r} at {self.now:.9f} s, {len(self.hosts)} hosts>"


def _checked_seconds(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise ValueError(f"a time must be a finite number of seconds, not {seconds}")
    return float(seconds)
