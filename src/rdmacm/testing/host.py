"""A simulated host: a network in memory, a wire to the fabric, and the software device that uses both."""

from __future__ import annotations

import contextlib
import errno
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from os import PathLike
from pathlib import Path
from random import Random
from socket import AF_INET, AF_INET6, inet_ntop
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from rdmacm.address import InetAddr, is_link_local, is_multicast
from rdmacm.cmid import CmEvent, EventChannel
from rdmacm.errors import CmWouldBlockError, cm_error
from rdmacm.net.types import Neighbour, NeighbourState
from rdmacm.progress.runtime import Runtime
from rdmacm.proto.constants import BTH_LENGTH, MAX_SLOT, MULTICAST_QPN, ROCE_PORT
from rdmacm.proto.wire import Buffer
from rdmacm.provider import RouteChoice, Tap
from rdmacm.provider.choice import CONTEXT_OPENER
from rdmacm.provider.udp import UdpSocket
from rdmacm.soft.event_queue import SoftQueue
from rdmacm.soft.port_table import PortOwner, PortTable
from rdmacm.soft.provider import SoftProvider
from rdmacm.soft.wire.base import (
    IpFields,
    PacketBuffer,
    Received,
    SocketAddress,
    Undelivered,
    Wire,
    WirePath,
    WireRoute,
    group_key,
)
from rdmacm.soft.wire.slot_filter import SERVICE_ID, is_request, qpn_of, slot_of, slot_of_sender
from rdmacm.testing.clock import HostClock, SimulationError
from rdmacm.testing.faults import FabricPacket
from rdmacm.testing.loop import FabricLoop
from rdmacm.testing.network import MemoryNetwork, PrivatePorts
from rdmacm.testing.programs import Program, Programs, Script, current_program
from rdmacm.testing.udp import SimUdp

if TYPE_CHECKING:
    from rdmacm.testing.clock import VirtualClock
    from rdmacm.testing.log import FabricLog
    from rdmacm.testing.subnet import MemoryPort

T = TypeVar("T")

#: Maximum number of packets that wait for :meth:`FabricWire.receive`; more are dropped, as by a full socket buffer.
_MAX_INBOX = 4096

#: Maximum number of packets that one call of :meth:`FabricWire.receive` returns.
_MAX_BATCH = 64

#: Limits of a train in bytes and packets, as for UDP_SEGMENT.
_MAX_TRAIN_BYTES = 65000
_MAX_TRAIN_PACKETS = 64


@dataclass(slots=True)
class FabricRoute:
    """A route on the fabric; see :class:`rdmacm.soft.wire.base.WireRoute`."""

    path: WirePath
    #: The destination address as text.
    remote_host: str
    #: UDP source port.
    source_port: int
    #: Traffic class or type of service of the IP header.
    traffic_class: int
    no_trains: bool = False


class Medium(Protocol):
    """What connects the hosts, as a host sees it. :class:`rdmacm.testing.Fabric` is one."""

    @property
    def seed(self) -> int | str:
        """Seeds every random number of a run."""

    @property
    def mtu(self) -> int:
        """MTU of the hosts' interfaces, in bytes."""

    @property
    def trains(self) -> bool:
        """Whether a host may send several packets by one call (UDP_SEGMENT)."""

    @property
    def clock(self) -> VirtualClock:
        """The clock that the clocks of all hosts follow."""

    @property
    def _programs(self) -> Programs:
        """The programs of all hosts."""

    @property
    def now(self) -> float:
        """The time of ``clock``, in seconds."""

    @property
    def log(self) -> FabricLog:
        """What happened to each packet."""

    def _transmit(self, host: Host, route: FabricRoute, data: bytes, identification: int) -> bool:
        """Send one packet of ``host``; False when it cannot leave the host."""

    def _send_udp(self, host: Host, source: InetAddr, destination: InetAddr, data: bytes) -> bool:
        """Send a datagram of a UDP socket; False when it cannot leave the host."""

    def _owner_of(self, ip: bytes, asker: Host) -> Host | None:
        """The host that owns a packed address, as ``asker`` sees the network."""

    def _can_talk(self, one: Host, other: Host) -> bool:
        """Whether both hosts are up and packets pass both ways between them."""

    def run(self, until: float | Callable[[], bool] | None = None, *, seconds: float | None = None) -> bool:
        """Let virtual time pass; see :meth:`rdmacm.testing.Fabric.run`."""

    def _drive(self, runtime: Runtime, done: Callable[[], T], timeout: float | None) -> T:
        """Run until ``done()`` is true, for ``timeout`` virtual seconds at most; return its last result."""


class FabricWire(Wire):
    """A host's end of the fabric, made by :meth:`Fabric.host`; see :class:`rdmacm.soft.wire.base.Wire`.

    Packets arrive only after :meth:`open`. The packets of a train are delivered one by one.

    Attributes:

    - ``is_open``: whether packets arrive; others are dropped.
    - ``counters``: always empty; the log of the fabric has what became of each packet.
    - ``slot``: the upper 12 bits of the process's communication ids, and of its first queue pair numbers, 1 to 4095.
    - ``slots``: the upper 12 bits of its queue pair numbers.
    - ``capacity``: how many packets may wait to be processed; more are dropped, as by a full socket buffer.
    - ``open_error``: the errno with which opening fails, such as EMFILE; 0 to open.
    - ``tap``: called with each packet sent and received, for captures.
    - ``on_undelivered``: called with each request to a host that has not opened its device.
    """

    def __init__(self, fabric: Medium, host: Host, trains: bool, slot: int = 1) -> None:
        self._fabric = fabric
        self._host = host
        #: Whether :meth:`send` accepts trains.
        self._trains = trains
        #: Packets that :meth:`receive` has not returned yet.
        self._inbox: deque[Received] = deque()
        #: Requests whose receiver has reported that its port is closed.
        self._reports: deque[Undelivered] = deque()
        #: Tokens of :meth:`listen`.
        self._listening: list[tuple[int, bytes | None]] = []
        #: The multicast groups that it has joined, and the interfaces.
        self._groups: dict[tuple[bytes, int], None] = {}
        self.is_open: bool = False
        self.counters: Counter[str] = Counter()
        self.traffic: Counter[str] = Counter()
        self.slot = slot
        self.slots: Sequence[int] = (slot,)
        self.capacity = _MAX_INBOX
        self.open_error = 0
        self.tap: Tap | None = None
        self.leaves_peers = False
        self.hold_request: Callable[[memoryview, SocketAddress, bytes], bool] | None = None
        self.on_undelivered: Callable[[Undelivered], None] | None = None

    def open(self) -> None:
        if self.open_error:
            raise cm_error(self.open_error, "the wire cannot be opened", "open_device", hint="open_error = 0")
        self.is_open = True

    def claim_slot(self) -> None:
        """Own one more slot: the lowest that no process of the host has."""
        self.slots = (*self.slots, self._host._free_slot())

    def close(self) -> None:
        self.is_open = False
        self.slots = (self.slot,)
        self._inbox.clear()
        self._reports.clear()
        self._listening.clear()
        self._groups.clear()

    abandon = close

    def filenos(self) -> Sequence[int]:
        """Return no descriptors: waiting means advancing virtual time; see :class:`SimRuntime`."""
        return ()

    @property
    def waiting(self) -> int:
        """Number of packets that :meth:`receive` has not returned yet, and of reports."""
        return len(self._inbox) + len(self._reports)

    def unread_request_fds(self) -> Sequence[int]:
        return ()

    def resume_requests(self) -> bool:
        return False

    def receive(self, skip_poll: bool = False) -> Sequence[Received]:
        while self._reports:
            report = self._reports.popleft()
            if self.on_undelivered is not None:
                self.on_undelivered(report)
        inbox = self._inbox
        return [inbox.popleft() for _ in range(min(_MAX_BATCH, len(inbox)))]

    def arrive(self, packet: FabricPacket, data: bytes) -> bool:
        """Queue a packet from the fabric; return False when the queue is full, or the packet was not forwarded."""
        if len(self._inbox) >= self.capacity or self._host._loses_request(data):
            return False
        host = inet_ntop(AF_INET if len(packet.local) == 4 else AF_INET6, packet.local)
        remote: tuple[str, int] | tuple[str, int, int, int] = (host, packet.source_port)
        if len(packet.local) == 16:
            interface = self._host.network.interface_of(packet.remote)
            scope_id = interface.index if interface and is_link_local(packet.local) else 0
            remote = (host, packet.source_port, 0, scope_id)
        if is_multicast(packet.remote):
            self._arrive_at_groups(packet, data, remote)
        else:
            self._inbox.append((_viewed(packet, data), 0, remote, packet.remote))
        if self.tap is not None:
            self.tap(False, packet.remote, packet.local, packet.source_port, ROCE_PORT, (data,), 0)
        return True

    def report_closed(self, packet: FabricPacket) -> None:
        """Queue the report that the receiver of a request has closed its port; one about any other packet is lost."""
        if self.is_open and is_request(packet.data) and slot_of_sender(packet.data) in self.slots:
            self._reports.append(Undelivered(packet.data, packet.remote, errno.ECONNREFUSED, packet.remote))

    def _arrive_at_groups(self, packet: FabricPacket, data: bytes, remote: SocketAddress) -> None:
        """Queue a multicast packet once for each interface where the process is a member of the group."""
        if len(data) < BTH_LENGTH or qpn_of(data) != MULTICAST_QPN:
            return
        sender = self._host.network.interface_of(packet.local)
        is_loopback = sender is not None and sender.is_loopback
        for ifindex in self._members(packet.remote, is_loopback):
            if is_link_local(packet.local):
                remote = (remote[0], remote[1], 0, ifindex)
            self._inbox.append((_viewed(packet, data), 0, remote, group_key(packet.remote, ifindex)))

    def _members(self, group: bytes, is_loopback: bool) -> list[int]:
        """The interfaces that are up where the process is a member: on the fabric, or on the loopback interface."""
        interfaces = {each.index: each for each in self._host.network.interfaces()}
        return [
            ifindex
            for joined, ifindex in self._groups
            if joined == group
            and (found := interfaces.get(ifindex)) is not None
            and found.is_up
            and found.is_loopback is is_loopback
        ]

    def is_member(self, group: bytes, is_loopback: bool) -> bool:
        """Whether the process receives from a group: packets of the fabric, or of the host's loopback interface."""
        return self.is_open and bool(self._members(group, is_loopback))

    def report_ip_fields(self) -> None:
        """Do nothing: a packet always has them. The fabric does not count hops."""

    def join_group(self, group: bytes, ifindex: int) -> None:
        if ifindex not in {each.index for each in self._host.network.interfaces()}:
            raise cm_error(errno.ENODEV, f"there is no interface {ifindex}", "join_multicast")
        self._groups[group, ifindex] = None

    def leave_group(self, group: bytes, ifindex: int) -> None:
        self._groups.pop((group, ifindex), None)

    def route(self, path: WirePath, traffic_class: int = 0, hop_limit: int = 0) -> WireRoute:
        family = AF_INET if len(path.remote) == 4 else AF_INET6
        return FabricRoute(path, inet_ntop(family, path.remote), ROCE_PORT, traffic_class)

    def send(self, route: WireRoute, buffers: Sequence[Buffer], segment: int = 0) -> bool:
        """Send a packet, or a train of packets of ``segment`` bytes; return False when one could not leave the host.

        Raises ValueError for a train longer than :meth:`can_segment` allows.
        """
        assert isinstance(route, FabricRoute)
        data = b"".join(buffers)
        if self.tap is not None:
            self.tap(True, route.path.local, route.path.remote, route.source_port, ROCE_PORT, (data,), segment)
        if not segment:
            return self._fabric._transmit(self._host, route, data, 0)
        if segment < 0 or len(data) > self.can_segment() or len(data) > segment * _MAX_TRAIN_PACKETS:
            raise ValueError(f"a train of {len(data)} bytes in packets of {segment} bytes is not possible")
        left = True
        for identification, start in enumerate(range(0, len(data), segment)):
            left &= self._fabric._transmit(self._host, route, data[start : start + segment], identification)
        return left

    def can_segment(self) -> int:
        return _MAX_TRAIN_BYTES if self._trains else 0

    def listen(self, service_id: int, local: bytes | None) -> tuple[int, bytes | None]:
        """Receive the requests for a service id if the host has several processes; return a token."""
        self._listening.append((service_id, local))
        return service_id, local

    def unlisten(self, token: object) -> None:
        with contextlib.suppress(ValueError):
            self._listening.remove(cast("tuple[int, bytes | None]", token))

    def listens(self, service_id: int, local: bytes) -> bool:
        """Whether the process takes the requests for a service id at a packed local address."""
        return any(service == service_id and ip in (None, local) for service, ip in self._listening)


def _viewed(packet: FabricPacket, data: bytes) -> memoryview:
    """The received bytes of a packet, with the fields of its IP header if they are not usual."""
    return memoryview(PacketBuffer(data, IpFields(packet.traffic_class)) if packet.traffic_class else data)


class SimNetwork(MemoryNetwork):
    """A host's network, in which every reachable host of the fabric answers ARP and neighbour discovery.

    Neighbours that a test has added take precedence.
    """

    def __init__(self, fabric: Medium, host: Host) -> None:
        super().__init__()
        self._fabric = fabric
        self._host = host

    def neighbour(self, family: int, ifindex: int, ip: bytes) -> Neighbour | None:
        scripted = super().neighbour(family, ifindex, ip)
        if scripted is not None:
            return scripted
        peer = self._fabric._owner_of(ip, self._host)
        if peer is None or not self._fabric._can_talk(self._host, peer):
            return None
        interface = peer.network.interface_of(ip)
        assert interface is not None
        return Neighbour(ifindex, ip, NeighbourState.REACHABLE, interface.address)


class SimPorts(PrivatePorts):
    """The port numbers of one process of a host; those that other processes of the host have are taken."""

    def __init__(self, low: int, high: int, first: int, processes: Sequence[Host]) -> None:
        super().__init__(low, high, first)
        self._processes = processes

    def _lock(self, owner: PortOwner, *, is_held: bool = False) -> tuple[int, int] | None:
        return owner.ranges()[0] if self._conflict(owner) else None

    def _find_holder(self, owner: PortOwner, blocked: tuple[int, int]) -> tuple[int, int]:
        return self._conflict(owner), 0

    def _conflict(self, owner: PortOwner) -> int:
        """The errno of the conflict with another process; 0 if there is none."""
        for process in self._processes:
            others = process.ports._owners if process.ports is not self else {}
            for other in others.get((owner.space, owner.port), ()):
                if code := owner.conflict(other):
                    return code
        return 0


class SimRuntime(Runtime):
    """A runtime whose waits run the fabric in virtual time."""

    def __init__(self, fabric: Medium, clock: HostClock) -> None:
        super().__init__(clock)
        self._fabric = fabric
        #: How many calls of :meth:`drive` are in progress that do not wait.
        self._depth = 0

    def poll(self, result_queue: Sized = ()) -> bool:
        """As :meth:`Runtime.poll`, without yielding the processor: no other process has anything to send."""
        self._empty_polls = 0
        found = super().poll(result_queue)
        self._polled(found)
        return found

    def drive(self, done: Callable[[], T], timeout: float | None, result_queue: Sized = ()) -> T:
        """Wait in virtual time (:meth:`Fabric._drive`). A call with ``timeout`` 0 takes no time, unless it is repeated
        by a program (:meth:`Program.polled`)."""
        if timeout is None or timeout > 0:
            return self._fabric._drive(self, done, timeout)
        self._depth += 1
        try:
            found = super().drive(done, timeout, result_queue)
        finally:
            self._depth -= 1
        self._polled(found)
        return found

    def _polled(self, found: object) -> None:
        # A call inside of another one has the lock, with which no program may wait.
        if not found and not self._depth and (program := current_program()) is not None:
            program.polled()


class SimProvider(SoftProvider):
    """The software device of a simulated host.

    ``wire`` carries its packets, and all its random numbers come from ``random``. A call that waits advances virtual
    time on the whole fabric (:class:`SimRuntime`).
    """

    name = "sim"

    def __init__(
        self,
        fabric: Medium,
        network: MemoryNetwork,
        wire: FabricWire,
        random: Random,
        ports: PortTable,
        infiniband: Sequence[MemoryPort] = (),
        clock: HostClock | None = None,
    ) -> None:
        runtime = SimRuntime(fabric, clock or HostClock(fabric.clock))
        super().__init__(network, runtime=runtime, ports=ports, wire=wire, random=random, infiniband=infiniband)
        self.fabric = fabric
        self._fabric_wire = wire

    def open_udp(self, family: int, on_readable: Callable[[], None]) -> UdpSocket:
        return SimUdp(self._fabric_wire._host, family, on_readable)

    def open_queue(self) -> SoftQueue:
        queue = super().open_queue()
        program = current_program()
        if program is not None and program.script is not None:
            program.script.at_exit.append(partial(self._close_queue, queue))
        return queue

    def _close_queue(self, queue: SoftQueue) -> None:
        """A script has ended: its ids are destroyed, as :meth:`leave` does at the end of a process."""
        with self.runtime.lock:
            queue.close()

    def check_event_loop(self, loop: object) -> None:
        """Raise SimulationError for a loop that would wait in real time, and so for ever."""
        if not isinstance(loop, FabricLoop):
            raise SimulationError("this event loop waits in real time; try: fabric.run(main())")


class _EventHandler:
    """An event channel and the function that handles its events, one at a time."""

    def __init__(self, channel: EventChannel, handler: Callable[[CmEvent], object]) -> None:
        self.channel = channel
        self.handler = handler
        #: Whether the handler is running.
        self.busy = False

    def serve(self) -> bool:
        """Handle one event; return whether there was one."""
        # A handler that waits runs the fabric, which must not call the same handler again.
        if self.busy or self.channel.closed or not cast("SoftQueue", self.channel._queue).ready:
            return False
        try:
            event = self.channel.get_event(timeout=0)
        except CmWouldBlockError:
            return False
        self.busy = True
        try:
            with event:
                self.handler(event)
        finally:
            self.busy = False
        return True


class Host:
    """A host on a fabric, made by :meth:`Fabric.host`.

    Attributes:

    - ``fabric``: the fabric that the host is on.
    - ``name``: the name that is unique among the running hosts of the fabric.
    - ``incarnation``: how often the host has booted.
    - ``addresses``: the addresses of ``eth0`` as text, without prefix lengths.
    - ``number``: counts the hosts of the fabric, from 1; the processes of a host have one number.
    - ``alive``: false after :meth:`Fabric.crash`.
    - ``paused``: true between :meth:`Fabric.pause` and :meth:`Fabric.resume`.
    - ``processes``: the processes of this host that run, in order of their start, each a :class:`Host`.
    - ``forward_loss``: probability (0 to 1) that a request for this process is lost if another one of the host has read
      it and has to forward it. Any of them may read it.
    - ``clock``: the host's clock, in seconds; that of all its processes (:meth:`Fabric.drift`).
    - ``lag``: seconds for which the host is busy whenever it has done something (:meth:`Fabric.slow`).
    - ``random``: the host's own random stream, seeded by the fabric.
    - ``network``: interfaces ``lo`` and ``eth0`` with their routes. Tests may change it; added interfaces are on the
      fabric too.
    - ``wire``: carries the provider's packets.
    - ``infiniband``: the host's InfiniBand ports.
    - ``provider``: for ``CmId(provider=...)``, ``EventChannel(...)`` and ``connect(..., provider=...)``.
    """

    def __init__(
        self,
        fabric: Medium,
        name: str,
        number: int,
        incarnation: int,
        addresses: Sequence[str],
        infiniband: Sequence[MemoryPort] = (),
        beside: list[Host] | None = None,
    ) -> None:
        """``beside``: the other processes of the host, for a process that :meth:`Fabric.process` adds."""
        self.fabric = fabric
        self.name = name
        self.number = number
        self.incarnation = incarnation
        self.addresses: tuple[str, ...] = tuple(str(ip_address(address.partition("/")[0])) for address in addresses)
        self.alive = True
        self.paused = False
        self.processes: list[Host] = [] if beside is None else beside
        self.forward_loss: float = 0.0
        #: Decides which requests are lost; made when it is needed.
        self._forward_random: Random | None = None
        self.clock: HostClock = self.processes[0].clock if self.processes else HostClock(fabric.clock)
        self.lag: float = 0.0
        self._busy_until = 0.0
        self._has_worked = False
        self._fabric_clock = fabric.clock
        self.random: Random = Random(f"{fabric.seed}/{name}/{incarnation}")
        self.network: MemoryNetwork = SimNetwork(fabric, self)
        mac = b"\2\0\0\0" + number.to_bytes(2, "big")
        eth0 = self.network.add_interface("eth0", *map(_with_prefix, addresses), mtu=fabric.mtu, mac=mac)
        for version, everywhere in ((4, "0.0.0.0/0"), (6, "::/0")):
            if any(ip_address(address).version == version for address in self.addresses):
                self.network.add_route(everywhere, eth0)
        self.wire: FabricWire = FabricWire(fabric, self, fabric.trains, self._free_slot())
        self.infiniband: tuple[MemoryPort, ...] = tuple(infiniband)
        low, high = self.network.setting("net/ipv4/ip_local_port_range", 32768, 60999)
        #: The port numbers of this process.
        self.ports = SimPorts(low, high, low + int(self.random.random() * (high - low + 1)), self.processes)
        self.provider = SimProvider(
            fabric, self.network, self.wire, self.random, self.ports, self.infiniband, self.clock
        )
        self._runtime = self.provider.runtime
        #: The UDP sockets of this process.
        self._udp: list[SimUdp] = []
        self.processes.append(self)
        #: Handlers registered by :meth:`on_event`.
        self._handlers: list[_EventHandler] = []

    def on_event(self, channel: EventChannel, handler: Callable[[CmEvent], object]) -> None:
        """Call ``handler(event)`` for each event of one of this host's channels, whenever the fabric runs.

        This is how a server answers while a client waits in a synchronous call. The event is acknowledged when the
        handler returns. An exception of the handler is raised by :meth:`Fabric.run`. A handler may wait; meanwhile
        further events of its channel are queued. Raises ValueError for a channel of another provider.
        """
        if channel.provider is not self.provider:
            raise ValueError(f"the channel does not belong to host {self.name}")
        self._handlers.append(_EventHandler(channel, handler))

    @contextmanager
    def as_default(self) -> Iterator[None]:
        """Let this host's provider stand for None in the block, and in the tasks of asyncio that begin there."""
        token = CONTEXT_OPENER.set(lambda: self.provider)
        try:
            yield
        finally:
            CONTEXT_OPENER.reset(token)

    def start(self, target: Callable[..., T], *args: object, name: str | None = None) -> Program[T]:
        """Run ``target(*args)`` on this host, in a thread that the fabric schedules, whenever the fabric runs.

        It may wait in any call of the package, sleep, start threads and wait for them, and run an event loop of
        asyncio, all in virtual time. This host's provider stands for None.
        """
        with self.as_default():
            named = name or str(getattr(target, "__name__", target))
            return self.fabric._programs.start(self, partial(target, *args), named)

    def script(self, path: str | PathLike[str], *arguments: str) -> Program[None]:
        """As :meth:`start`, for a file of Python and its arguments. OSError, SyntaxError: it cannot be run.

        It ends as a process does: its daemon threads end, and what it has not closed is destroyed.
        """
        code = compile(Path(path).read_bytes(), str(path), "exec")
        names: dict[str, object] = {"__name__": "__main__", "__file__": str(path)}
        with self.as_default():
            return self.fabric._programs.start(
                self, lambda: exec(code, names), Path(path).name, [str(path), *arguments], Script(names)
            )

    def limit(self, *, max_qp: int | None = None, max_mr: int | None = None) -> None:
        """Let queue pairs or memory regions run out: beyond the limit, creating one raises ENOMEM.

        The limits are those of ``Device.attr`` of the same names, and count from now on; None leaves one as it is.
        """
        self.provider.host.limit_devices(max_qp, max_mr)

    @property
    def runs(self) -> bool:
        """Whether the host makes progress: it is alive and not paused."""
        return self.alive and not self.paused

    @property
    def _is_ready(self) -> bool:
        """Whether the host can do something now: it runs, and is not busy."""
        return self.alive and not self.paused and self._busy_until <= self._fabric_clock.now

    def _worked(self) -> None:
        """The host has done something at this moment."""
        self._has_worked = True

    def _rest(self) -> None:
        """A moment is over in which the host has done something: a slow one is busy."""
        self._has_worked = False
        self._busy_until = self._fabric_clock.now + self.lag

    def _next_deadline(self) -> float | None:
        """When the host has to make progress next, in seconds of the fabric's clock; None without a reason."""
        deadline = self._runtime.next_deadline()
        at = None if deadline is None else self.clock.when(deadline)
        if self._busy_until > self._fabric_clock.now:  # packets may wait for it
            return self._busy_until if at is None else max(at, self._busy_until)
        return at

    def _find_source(self, destination: InetAddr) -> RouteChoice | None:
        """See :class:`rdmacm.testing.udp.UdpHost`."""
        return self.provider.find_route(destination, None)

    def _send_udp(self, source: InetAddr, destination: InetAddr, data: bytes) -> bool:
        """See :class:`rdmacm.testing.udp.UdpHost`."""
        return self.fabric._send_udp(self, source, destination, data)

    def process_for(self, data: bytes, local: bytes) -> Host:
        """The process of this host that gets a packet to a packed local address.

        A request goes to the process that listens for its service id, else to the oldest one; any other packet to the
        process in whose slot its queue pair number or communication id is. For a slot without a process, this host.
        """
        slot = slot_of(data) if len(data) >= BTH_LENGTH else 0
        if slot:
            return next((process for process in self.processes if slot in process.wire.slots), self)
        if is_request(data):
            service_id = int.from_bytes(data[SERVICE_ID : SERVICE_ID + 8], "big")
            for process in self.processes:
                if process.wire.listens(service_id, local):
                    return process
        return next(iter(self.processes), self)

    def _loses_request(self, data: bytes) -> bool:
        """Whether a packet for this process is lost, because another process has read it and failed to forward it."""
        others = len(self.processes) - 1
        if not self.forward_loss or others < 1 or not is_request(data):
            return False
        if self._forward_random is None:
            self._forward_random = Random(f"{self.fabric.seed}/{self.name}/{self.incarnation}/forward")
        return self._forward_random.random() < self.forward_loss * others / (others + 1)

    def _free_slot(self) -> int:
        """The lowest slot that no other process of the host has: a new process takes that of one that was killed."""
        taken = {slot for process in self.processes for slot in process.wire.slots}
        slot = next((slot for slot in range(1, MAX_SLOT + 1) if slot not in taken), 0)
        if not slot:
            raise cm_error(errno.EUSERS, f"the processes of a host own all {MAX_SLOT} slots", "open_device")
        return slot

    @property
    def waiting(self) -> int:
        """Number of packets and datagrams that have arrived and are not processed yet."""
        waiting = self.wire.waiting + sum(socket.is_due for socket in self._udp)
        return waiting + sum(port.waiting for port in self.infiniband) if self.infiniband else waiting

    def _progress(self) -> bool:
        """Process everything that is due now, if the host is ready; return whether a handler was called."""
        if not self.alive or self.paused or self._busy_until > self._fabric_clock.now:
            return False
        runtime = self._runtime
        for socket in [socket for socket in self._udp if socket.is_due]:
            socket.is_due = False
            self._worked()
            socket.on_readable()
        is_due = self.wire.waiting > 0
        if not is_due:
            deadline = runtime.next_deadline()
            is_due = deadline is not None and deadline <= self.clock()
        if is_due:
            self._worked()
        if is_due or self.infiniband or self.network.has_changed:
            runtime.progress()
            left = self.waiting
            while left:  # a provider processes a bounded number of packets at a time, and none when nothing listens
                runtime.progress()
                left, before = self.waiting, left
                if left >= before:
                    break
        called = False
        for handler in self._handlers:
            if self.runs and handler.serve():
                self._worked()
                called = True
        return called

    def __repr__(self) -> str:
        state = "" if self.runs else " paused" if self.alive else " down"
        return f"<Host {self.name} {' '.join(self.addresses)}{state}>"


def _with_prefix(address: str) -> str:
    if "/" in address:
        return address
    return f"{address}/{24 if ip_address(address).version == 4 else 64}"
