"""The software provider of one network namespace: the seam on top of a :class:`rdmacm.soft.host.SoftHost`."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, TypeVar

from rdmacm.address import Address, InetAddr
from rdmacm.capabilities import SOFT
from rdmacm.errors import Failure, cm_error
from rdmacm.explanation import Explanation
from rdmacm.interrupts import handlers
from rdmacm.net.types import Network
from rdmacm.progress.runtime import Runtime
from rdmacm.proto.sa import PathRecord
from rdmacm.provider import EventQueue, FoundServices, Owner, RouteChoice, Tap, UndeliveredTap, log
from rdmacm.provider.counters import Counters
from rdmacm.provider.udp import UdpSocket, open_udp
from rdmacm.resolution.ipoib import IpoibPortView
from rdmacm.resolution.lookup import Lookup, find
from rdmacm.soft.device.device import SoftDevice
from rdmacm.soft.devices import PROVIDER
from rdmacm.soft.entropy import BufferedSystemRandom
from rdmacm.soft.event_queue import SoftQueue
from rdmacm.soft.host import SoftHost
from rdmacm.soft.ib.ports import IbDevice
from rdmacm.soft.ids.identifier import SoftId
from rdmacm.soft.port_table import PortTable
from rdmacm.soft.routes import SubnetQueries, find_route
from rdmacm.soft.wire.base import Wire
from rdmacm.soft.wire.udp import UdpWire
from rdmacm.verbs.device import Device

if TYPE_CHECKING:
    from rdmacm.ib.transport import MadTransport

T = TypeVar("T")


class SoftProvider:
    """See :class:`rdmacm.provider.Provider`.

    ``network`` is what it reads of the system, ``wire`` carries its packets (default: UDP port 4791), and ``random``
    makes the numbers that peers must not guess. ``namespace`` names the port table that processes share; ``ports``
    replaces that table. ``infiniband`` are InfiniBand ports beside the RoCE devices of the network's interfaces.
    ``clock`` reads seconds and never goes back; ``runtime`` replaces the one that is made of it.
    """

    name = PROVIDER
    capabilities = SOFT

    def __init__(
        self,
        network: Network,
        *,
        namespace: str = "",
        clock: Callable[[], float] = time.monotonic,
        ports: PortTable | None = None,
        wire: Wire | None = None,
        random: Random | None = None,
        infiniband: Sequence[MadTransport] = (),
        runtime: Runtime | None = None,
    ) -> None:
        self.runtime: Runtime = runtime or Runtime(clock)
        self.clock: Callable[[], float] = self.runtime.clock
        self.host: SoftHost = SoftHost(
            self.runtime,
            network,
            wire or UdpWire(),
            random or BufferedSystemRandom(),
            namespace=namespace,
            ports=ports,
            infiniband=infiniband,
        )
        self.runtime.attach(self.host)
        self._queries = SubnetQueries(self.host)

    # -- devices --------------------------------------------------------------------------------------

    def devices(self) -> tuple[Device, ...]:
        return self.host.devices()

    def query_counters(self) -> Counters:
        with self.runtime.lock:
            return self.host.query_counters()

    def fork_init(self) -> None:
        pass  # registered memory is ordinary memory, which the parent keeps

    def fork_status(self) -> int:
        return 2

    def open_device(self, name: str) -> SoftDevice | IbDevice:
        log.refresh()
        with self.runtime.lock:
            self.runtime.check_fork("open_device")
            for device in self.host.devices():
                if device.name == name:
                    return self.host.open_device(device.index)
        raise cm_error(errno.ENODEV, "there is no such device", "open_device", name, "'rdmacm devices' lists them")

    def owner_of(self, address: InetAddr) -> tuple[str, int] | None:
        with self.runtime.lock:
            for view, row, _ in self.host.ip_view().by_ip.get(address.ip, ()):
                is_there = not isinstance(view, IpoibPortView) or view.infiniband is not None
                if is_there and address.link in (0, row.ndev_ifindex):
                    return view.device.name, view.port_num
        return None

    @property
    def tap(self) -> Tap | None:
        return self.host.mux.wire.tap

    @tap.setter
    def tap(self, tap: Tap | None) -> None:
        self.host.mux.wire.tap = tap

    @property
    def undelivered_tap(self) -> UndeliveredTap | None:
        return self.host.mux.undelivered_tap

    @undelivered_tap.setter
    def undelivered_tap(self, tap: UndeliveredTap | None) -> None:
        self.host.mux.undelivered_tap = tap

    # -- ids ------------------------------------------------------------------------------------------

    def open_queue(self) -> SoftQueue:
        log.refresh()
        with self.runtime.lock:
            self.runtime.check_fork("create_event_channel")
            queue = SoftQueue(self.runtime)
            was_in_use = self.runtime.in_use
            self.runtime.use(queue)
            if was_in_use:  # the first user has looked at the handlers
                handlers.refresh()  # a handler of this call's deadline is new
            return queue

    def create_id(self, queue: EventQueue, owner: Owner, port_space: int, qp_type: int) -> SoftId:
        if self.runtime.abandoned:
            self.runtime.check_fork("create_id")
        assert isinstance(queue, SoftQueue)
        return SoftId(self.host, queue, owner, port_space, qp_type)

    def drive(self, done: Callable[[], T], timeout: float | None) -> T:
        return self.runtime.drive(done, timeout)

    def open_udp(self, family: int, on_readable: Callable[[], None]) -> UdpSocket:  # noqa: ARG002
        return open_udp(family)

    # -- routes without an id -------------------------------------------------------------------------

    def find_route(
        self, destination: InetAddr, source: InetAddr | None, like: PathRecord | None = None
    ) -> RouteChoice | None:
        with self.runtime.lock:
            return find_route(self.host, destination, source, like)

    def explain_route(self, destination: InetAddr, source: InetAddr | None) -> Explanation:
        with self.runtime.lock:
            lookup = Lookup(self.host.ip_view(), destination, source, "given")
            failure: Failure | None = None
            try:
                find(self.host.network, lookup)
            except Failure as error:
                failure = error
            return lookup.explain(None, failure)

    def find_path(
        self, destination: Address, source: Address | None, port_space: int, like: PathRecord | None = None
    ) -> RouteChoice | None:
        return self._queries.find_path(destination, source, port_space, like)

    def find_services(self, service: str) -> FoundServices | None:
        return self._queries.find_services(service)

    # -- the end --------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Destroy the ids that are left, because the process ends: their peers get a DREQ or REJ."""
        with self.runtime.lock:
            if log.enabled:
                for line in self.query_counters().lines():
                    log.DEVICE.debug("%s", line)
            for user in self.runtime.users():
                if isinstance(user, SoftQueue):
                    user.close()
            self.host.helper.stop()
        self.host.helper.join()
        with self.runtime.lock:
            self.host.mux.close()  # as what is left uses the wire: another process answers for this one

    def retire(self) -> bool:
        """Close every descriptor if no channel or completion queue is open; True if that was so."""
        return self.runtime.retire()

    def abandon(self) -> None:
        """In a child of fork(2): close what is shared with the parent, and refuse objects made before."""
        self.runtime.abandon()
        if isinstance(self.host.random, BufferedSystemRandom):
            self.host.random.forget()
        self.host.abandon()
