"""The kernel's provider of one network namespace: the seam on top of a :class:`rdmacm.kernel.host.KernelHost`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from rdmacm.address import Address, InetAddr, is_link_local
from rdmacm.capabilities import KERNEL, KERNEL_WITHOUT_LIBRARY, Capabilities, Feature
from rdmacm.errors import Failure
from rdmacm.explanation import Explanation
from rdmacm.interrupts import handlers
from rdmacm.kernel.arrivals import translate
from rdmacm.kernel.event_queue import KernelQueue
from rdmacm.kernel.host import IwarpPortView, KernelHost, verbs_module
from rdmacm.kernel.identifier import KernelId, create_id
from rdmacm.kernel.prediction import distinct, predict
from rdmacm.kernel.sysfs import PROVIDER, Sysfs
from rdmacm.net.types import Network
from rdmacm.proto.sa import PathRecord
from rdmacm.proto.sa.restriction import made_like
from rdmacm.provider import EventQueue, FoundServices, Owner, RouteChoice, Tap, log
from rdmacm.provider.counters import Counters
from rdmacm.provider.udp import UdpSocket, open_udp
from rdmacm.resolution.lookup import source_like
from rdmacm.resolution.path import PathMaker
from rdmacm.verbs.device import Device

if TYPE_CHECKING:
    from rdmacm.progress.runtime import Runtime
    from rdmacm.verbs.backend import DeviceBackend

T = TypeVar("T")


class KernelProvider:
    """See :class:`rdmacm.provider.Provider`. ``network`` is what it reads of the system for its explanations."""

    name = PROVIDER

    def __init__(self, network: Network, *, sysfs: Sysfs | None = None) -> None:
        self.host: KernelHost = KernelHost(network, sysfs or Sysfs())
        self.runtime: Runtime = self.host.runtime
        self.clock: Callable[[], float] = self.runtime.clock
        self._paths = PathMaker(network)

    # -- devices --------------------------------------------------------------------------------------

    def devices(self) -> tuple[Device, ...]:
        with self.runtime.lock:
            return self.host.devices()

    @property
    def capabilities(self) -> Capabilities:
        return KERNEL_WITHOUT_LIBRARY if verbs_module() is None else KERNEL

    def query_counters(self) -> Counters:
        """The kernel counts for all processes together, and so do these."""
        with self.runtime.lock:
            sysfs = self.host.sysfs
            devices = {name: sysfs.counters(name) for name in self.host.visible()}
            return Counters(devices, sysfs.cm_counters(), {}, dict(self.runtime.errors.counts))

    def fork_init(self) -> None:
        verbs = verbs_module()
        if verbs is not None:
            verbs.fork_init()

    def fork_status(self) -> int:
        verbs = verbs_module()
        return 2 if verbs is None else int(verbs.fork_status())

    def open_device(self, name: str) -> DeviceBackend:
        log.refresh()
        self.runtime.check_fork("open_device")
        return self.host.open_device(name)

    def owner_of(self, address: InetAddr) -> tuple[str, int] | None:
        with self.runtime.lock:
            for view, row, _ in self.host.view().by_ip.get(address.ip, ()):
                if address.link in (0, row.ndev_ifindex):
                    return view.device.name, view.port_num
        return None

    @property
    def tap(self) -> Tap | None:
        return None

    @tap.setter
    def tap(self, tap: Tap | None) -> None:
        if tap is None:
            return
        with self.runtime.lock:
            addresses = self.host.view().addresses
        view = addresses[0].view if addresses else None
        protocol = "udp port 4791" if view is None or not isinstance(view, IwarpPortView) else "tcp"
        command = f"'tcpdump -i {view.interface.name if view else 'INTERFACE'} -w FILE {protocol}'"
        self.capabilities.require(Feature.CAPTURE, "capture", hint=command)

    # -- ids ------------------------------------------------------------------------------------------

    def open_queue(self) -> KernelQueue:
        log.refresh()
        with self.runtime.lock:
            self.runtime.check_fork("create_event_channel")
            host = self.host
            queue = KernelQueue(self.runtime, host.descriptors, partial(translate, host), host.own_addresses)
            was_in_use = self.runtime.in_use
            self.runtime.use(queue)
            if was_in_use:  # the first user has looked at the handlers
                handlers.refresh()  # a handler of this call's deadline is new
            return queue

    def create_id(self, queue: EventQueue, owner: Owner, port_space: int, qp_type: int) -> KernelId:
        with self.runtime.lock:
            self.runtime.check_fork("create_id")
            assert isinstance(queue, KernelQueue)
            return create_id(self.host, queue, owner, port_space, qp_type)

    def drive(self, done: Callable[[], T], timeout: float | None) -> T:
        return self.runtime.drive(done, timeout)

    def open_udp(self, family: int, on_readable: Callable[[], None]) -> UdpSocket:
        return open_udp(family)

    # -- routes without an id -------------------------------------------------------------------------

    def find_route(
        self, destination: InetAddr, source: InetAddr | None, like: PathRecord | None = None
    ) -> RouteChoice | None:
        with self.runtime.lock:
            source = source_like(self.host.view(), destination, source, like)
            lookup, failure = predict(self.host, destination, source, "given")
            found = lookup.found
            if failure is not None or found is None:
                return None
            port, row = source.port if source else 0, found.row
            scope_id = row.ndev_ifindex if is_link_local(found.source) else 0
            chosen = InetAddr(destination.family, found.source, port, 0, scope_id)
            path: PathRecord | None = None
            if not isinstance(found.view, IwarpPortView):  # iWARP connects by TCP, and has no routing data
                try:
                    path = self._paths.make(lookup, 0)
                except Failure:  # the MTU is too small for RoCE
                    return None
                if like is not None and (path := made_like(path, like)) is None:
                    return None
            return RouteChoice(chosen, found.view.device.name, found.view.port_num, row.gid_index, path)

    def explain_route(self, destination: InetAddr, source: InetAddr | None) -> Explanation:
        with self.runtime.lock:
            lookup, failure = predict(self.host, destination, source, "given")
            found = lookup.explain(None, failure)
            return found.replace(candidates=distinct(found.candidates))

    def find_path(
        self, destination: Address, source: Address | None, port_space: int, like: PathRecord | None = None
    ) -> RouteChoice | None:
        return None

    def find_services(self, service: str) -> FoundServices | None:
        return None

    # -- the end --------------------------------------------------------------------------------------

    def leave(self) -> None:
        """The process ends: log the counters. The kernel destroys the ids that are left."""
        if log.enabled:
            for line in self.query_counters().lines():
                log.DEVICE.debug("%s", line)

    def retire(self) -> bool:
        """Close every descriptor if no channel is open; True if that was so."""
        if not self.runtime.retire():
            return False
        self.host.network.close()
        return True

    def abandon(self) -> None:
        """In a child of fork(2): close what is shared with the parent, and refuse objects made before."""
        queues = [user for user in self.runtime.users() if isinstance(user, KernelQueue)]
        self.runtime.abandon()
        for queue in queues:
            queue.abandon()
        self.host.descriptors.abandon()
        self.host.network.close()
