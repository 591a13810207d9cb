"""A simulated host: a network in memory, a wire to the fabric, and the software device that uses both."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from ipaddress import ip_address
from random import Random
from socket import AF_INET, AF_INET6, inet_ntop
from typing import TYPE_CHECKING, Protocol, TypeVar

from rdmacm.address import is_link_local
from rdmacm.cmid import CmEvent, EventChannel
from rdmacm.errors import CmWouldBlockError
from rdmacm.net.types import Neighbour, NeighbourState
from rdmacm.progress.runtime import Runtime
from rdmacm.proto.roce.headers import ROCE_PORT
from rdmacm.proto.wire import Buffer
from rdmacm.provider import Tap
from rdmacm.soft.provider import SoftProvider
from rdmacm.soft.wire.base import Received, SocketAddress, Undelivered, Wire, WirePath, WireRoute
from rdmacm.testing.faults import FabricPacket
from rdmacm.testing.network import MemoryNetwork, PrivatePorts

if TYPE_CHECKING:
    from rdmacm.testing.clock import VirtualClock
    from rdmacm.testing.log import FabricLog
    from rdmacm.testing.subnet import MemoryPort

__all__ = ["FabricRoute", "FabricWire", "Host", "Medium", "SimProvider"]

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
        """The clock that all hosts share."""

    @property
    def now(self) -> float:
        """The time of ``clock``, in seconds."""

    @property
    def log(self) -> FabricLog:
        """What happened to each packet."""

    def _transmit(self, host: Host, route: FabricRoute, data: bytes, identification: int) -> bool:
        """Send one packet of ``host``; False when it cannot leave the host."""

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
    - ``tap``: called with each packet sent and received, for captures.
    - ``on_undelivered``: never called: hosts of a fabric do not report undelivered packets.
    """

    slot = 1

    def __init__(self, fabric: Medium, host: Host, trains: bool) -> None:
        self._fabric = fabric
        self._host = host
        #: Whether :meth:`send` accepts trains.
        self._trains = trains
        #: Packets that :meth:`receive` has not returned yet.
        self._inbox: deque[Received] = deque()
        self.is_open = False
        self.counters: Counter[str] = Counter()
        self.tap: Tap | None = None
        self.hold_request: Callable[[memoryview, SocketAddress, bytes], bool] | None = None
        self.on_undelivered: Callable[[Undelivered], None] | None = None

    def open(self) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False
        self._inbox.clear()

    def abandon(self) -> None:
        self.close()

    def filenos(self) -> Sequence[int]:
        """Return no descriptors: waiting means advancing virtual time; see :class:`SimRuntime`."""
        return ()

    @property
    def waiting(self) -> int:
        """Number of packets that :meth:`receive` has not returned yet."""
        return len(self._inbox)

    def unread_request_fds(self) -> Sequence[int]:
        return ()

    def resume_requests(self) -> bool:
        return False

    def receive(self, skip_poll: bool = False) -> Sequence[Received]:
        inbox = self._inbox
        return [inbox.popleft() for _ in range(min(_MAX_BATCH, len(inbox)))]

    def arrive(self, packet: FabricPacket, data: bytes) -> bool:
        """Queue a packet from the fabric; return False when the queue is full."""
        if len(self._inbox) >= _MAX_INBOX:
            return False
        host = inet_ntop(AF_INET if len(packet.local) == 4 else AF_INET6, packet.local)
        remote: tuple[str, int] | tuple[str, int, int, int] = (host, packet.source_port)
        if len(packet.local) == 16:
            interface = self._host.network.interface_of(packet.remote)
            scope_id = interface.index if interface and is_link_local(packet.local) else 0
            remote = (host, packet.source_port, 0, scope_id)
        self._inbox.append((memoryview(data), 0, remote, packet.remote))
        if self.tap is not None:
            self.tap(False, packet.remote, packet.local, packet.source_port, ROCE_PORT, (data,), 0)
        return True

    def route(self, path: WirePath, traffic_class: int = 0) -> WireRoute:
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

    def listen(self, service_id: int, local: bytes | None) -> object:
        """Return a token. A simulated host is one process, which receives all requests anyway."""
        return service_id, local

    def unlisten(self, token: object) -> None:
        pass


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


class SimRuntime(Runtime):
    """A runtime whose waits run the fabric in virtual time."""

    def __init__(self, fabric: Medium) -> None:
        super().__init__(fabric.clock)
        self._fabric = fabric

    def drive(self, done: Callable[[], T], timeout: float | None, result_queue: Sized = ()) -> T:
        """Wait in virtual time (:meth:`Fabric._drive`). A call with ``timeout`` 0 takes no time."""
        if timeout is not None and timeout <= 0:
            return super().drive(done, timeout, result_queue)
        return self._fabric._drive(self, done, timeout)


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
        infiniband: Sequence[MemoryPort] = (),
    ) -> None:
        low, high = network.setting("net/ipv4/ip_local_port_range", 32768, 60999)
        first = low + int(random.random() * (high - low + 1))
        ports = PrivatePorts(low, high, first)
        runtime = SimRuntime(fabric)
        super().__init__(network, runtime=runtime, ports=ports, wire=wire, random=random, infiniband=infiniband)
        self.fabric = fabric


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
        if self.busy or self.channel.closed:
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
    - ``alive``: false after :meth:`Fabric.crash`.
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
    ) -> None:
        self.fabric = fabric
        self.name = name
        self.incarnation = incarnation
        self.addresses = tuple(str(ip_address(address.partition("/")[0])) for address in addresses)
        self.alive = True
        self.random = Random(f"{fabric.seed}/{name}/{incarnation}")
        self.network: MemoryNetwork = SimNetwork(fabric, self)
        mac = b"\2\0\0\0" + number.to_bytes(2, "big")
        eth0 = self.network.add_interface("eth0", *map(_with_prefix, addresses), mtu=fabric.mtu, mac=mac)
        for version, everywhere in ((4, "0.0.0.0/0"), (6, "::/0")):
            if any(ip_address(address).version == version for address in self.addresses):
                self.network.add_route(everywhere, eth0)
        self.wire = FabricWire(fabric, self, fabric.trains)
        self.infiniband = tuple(infiniband)
        self.provider = SimProvider(fabric, self.network, self.wire, self.random, self.infiniband)
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

    @property
    def waiting(self) -> int:
        """Number of packets and datagrams that have arrived and are not processed yet."""
        return self.wire.waiting + sum(port.waiting for port in self.infiniband)

    def _progress(self) -> bool:
        """Process everything that is due now; return whether a handler was called."""
        self.provider.runtime.progress()
        left = self.waiting
        while left:  # a provider processes a bounded number of packets at a time, and none when nothing listens
            self.provider.runtime.progress()
            left, before = self.waiting, left
            if left >= before:
                break
        called = [handler.serve() for handler in self._handlers if self.alive]
        return any(called)

    def __repr__(self) -> str:
        return f"<Host {self.name} {' '.join(self.addresses)}{'' if self.alive else ' down'}>"


def _with_prefix(address: str) -> str:
    if "/" in address:
        return address
    return f"{address}/{24 if ip_address(address).version == 4 else 64}"
