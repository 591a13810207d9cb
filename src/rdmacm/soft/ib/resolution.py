"""What an id on an InfiniBand port asks the subnet administrator: its route, and who offers a service.

A query is sent when the call is made; the answer, or that there was none in time, is the event.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING

from rdmacm import acm
from rdmacm.address import ALL_BITS_64, SockAddrIB
from rdmacm.cmstate import Trigger
from rdmacm.constants import CmEventType
from rdmacm.errors import RdmaError, cm_error
from rdmacm.explanation import Explanation, Step
from rdmacm.progress.timers import Timer
from rdmacm.proto.sa import PathData, PathRecord
from rdmacm.resolution.lookup import Failure, Lookup
from rdmacm.soft.cm.identifier import ResolvingId
from rdmacm.soft.ib.ports import IbLookup, IbView

if TYPE_CHECKING:
    from rdmacm.proto.sa.subnet import ServiceRecord
    from rdmacm.soft.event_queue import SoftQueue
    from rdmacm.soft.ib.services import Registration
    from rdmacm.soft.provider import SoftProvider

__all__ = ["AskingId"]

#: How many paths are asked for where an alternate one is wanted: those that come may share the way of the first.
_SEVERAL = 8
#: Seconds that a question has at least, when ibacm has used up the time.
_SOME_TIME = 0.001


class AskingId(ResolvingId):
    """See :class:`rdmacm.soft.cm.identifier.ResolvingId`."""

    __slots__ = ("_acm", "_asked", "_registrations", "services")

    def __init__(
        self, provider: SoftProvider, queue: SoftQueue, owner: object | None, port_space: int, qp_type: int
    ) -> None:
        super().__init__(provider, queue, owner, port_space, qp_type)
        #: What is being asked for this id, and of whom.
        self._asked: tuple[IbView, int] | None = None
        #: Ends the wait for ibacm's answer, which is of no interest to an id without it.
        self._acm: Timer | None = None
        self._registrations: list[Registration] = []
        self.services: tuple[ServiceRecord, ...] = ()

    def _stop_waiting(self) -> None:
        super()._stop_waiting()
        if self._acm is not None:
            self._acm.cancel()
            self._acm = None
        if self._asked is not None:
            view, query = self._asked
            self._asked = None
            view.subnet.cancel(query)
        for registration in self._registrations:
            registration.withdraw()
        self._registrations.clear()

    def _now(self, step: str) -> IbView:
        """The port as it is now: it may have another address, or another administrator."""
        view = self._device
        assert isinstance(view, IbView)
        fresh = view.subnet.view()
        if fresh is None:
            raise cm_error(errno.ENODEV, f"the port is gone: {view.subnet.why()}", step, view.device.name)
        self._device = fresh
        return fresh

    # -- the route ------------------------------------------------------------------------------------

    def resolve_route(self, timeout_ms: int, alternate: bool = False) -> None:  # a RoCE path has none beside it
        with self._provider.lock:
            if not isinstance(self._device, IbView):
                super().resolve_route(timeout_ms)
                return
            self._provider.check_fork("resolve_route")
            if not self._may(Trigger.RESOLVE_ROUTE):
                raise self._refuse(Trigger.RESOLVE_ROUTE.value)
            if timeout_ms <= 0:
                raise cm_error(errno.EINVAL, f"timeout {timeout_ms} ms is not positive", "resolve_route")
            started = perf_counter_ns()
            until = self._provider.clock() + timeout_ms / 1000
            if alternate or not self._ask_acm(until, started, timeout_ms / 1000):
                self._ask_route(until, alternate, started)
            self._move(Trigger.RESOLVE_ROUTE)

    def _ask_acm(self, until: float, started: int, timeout: float) -> bool:
        """Ask ibacm for a while; False where there is no such daemon."""
        local, peer, provider = self.local_addr, self.peer_addr, self._provider
        assert isinstance(peer, SockAddrIB) and isinstance(local, SockAddrIB)
        if provider.clock is not time.monotonic:
            return False
        patience = min(acm.DEADLINE, timeout / 2)  # the subnet administrator wants some of the time, too

        def answered(route: Sequence[PathData] | None) -> None:  # called by another thread
            with provider.lock:
                self._acm_answered(timer, until, started, route)

        # Those that have come before may keep the daemon longer than this one can wait.
        timer = provider.call_at(provider.clock() + patience, lambda _: self._acm_answered(timer, until, started, None))
        self._acm = timer
        if acm.paths_in_background(local, peer, answered, timeout=patience):
            return True
        timer.cancel()
        self._acm = None
        return False

    def _acm_answered(self, timer: Timer, until: float, started: int, route: Sequence[PathData] | None) -> None:
        """What ibacm knows, or that it has not said so in time."""
        if self._acm is not timer:
            return
        timer.cancel()
        self._acm = None
        if route is not None:
            self._note("path", started, "from ibacm")
            self._route_found((route[0].path,))
            return
        try:
            self._ask_route(until, False, started)
        except RdmaError as error:
            failure = Failure(error.errno or errno.EIO, "path", str(error.strerror), error.hint or "")
            self._route_failed(started, failure)

    def _ask_route(self, until: float, alternate: bool, started: int) -> None:
        view, peer = self._now("resolve_route"), self.peer_addr
        assert isinstance(peer, SockAddrIB)
        left = max(until - self._provider.clock(), _SOME_TIME)
        answered = partial(self._route_answered, view, alternate, started)
        tos, count = self.options.tos or 0, _SEVERAL if alternate else 1
        self._asked = view, view.subnet.ask_paths(view, self.sgid, peer, left, answered, tos=tos, count=count)

    def _route_answered(
        self, view: IbView, alternate: bool, started: int, paths: tuple[PathRecord, ...], failure: Failure | None
    ) -> None:
        self._asked = None
        if failure is not None:
            self._route_failed(started, failure)
            return
        self._note("path", started, f"from {view.subnet.administrator(view)}")
        if alternate:
            other = next((path for path in paths if (path.dlid, path.slid) != (paths[0].dlid, paths[0].slid)), None)
            paths = paths[:1] if other is None else (paths[0], other)
        self._route_found(paths)

    def _route_failed(self, started: int, failure: Failure) -> None:
        self._note("path", started, failure.message)
        explain = partial(self._explain_no_path, self._lookup, failure, self.steps) if self._lookup else None
        self._move(Trigger.ROUTE_FAILED)
        self._post(CmEventType.ROUTE_ERROR, -failure.errno, explain, failure.message)

    def _explain_no_path(self, lookup: Lookup | IbLookup, failure: Failure, steps: tuple[Step, ...]) -> Explanation:
        return self._explain_failure(lookup, failure).replace(steps=steps)

    def _route_found(self, paths: tuple[PathRecord, ...]) -> None:
        timeout = self.options.ack_timeout
        if timeout is not None:
            paths = tuple(path.replace(packet_life_time=max(0, timeout - 1)) for path in paths)
        self.paths = paths
        self._move(Trigger.ROUTE_DONE)
        self._post(CmEventType.ROUTE_RESOLVED)

    # -- services -------------------------------------------------------------------------------------

    def resolve_service(self, service: str) -> None:
        with self._provider.lock:
            self._provider.check_fork("resolve_addrinfo")
            view = self._device
            if view is None or not self._may(Trigger.RESOLVE_IB_SERVICE):
                raise self._refuse("resolve_addrinfo")
            if not isinstance(view, IbView):
                raise cm_error(
                    errno.EOPNOTSUPP,
                    f"{view.device.name} is RoCE and has no subnet administrator to ask",
                    "resolve_addrinfo",
                    service,
                    "RAI_DNS, or an id bound to an InfiniBand port",
                )
            view = self._now("resolve_addrinfo")
            answered = partial(self._service_answered, perf_counter_ns())
            self._asked = view, view.subnet.ask_services(view, service, answered)
            self.services = ()
            self._move(Trigger.RESOLVE_IB_SERVICE)

    def _service_answered(self, started: int, found: tuple[ServiceRecord, ...], failure: Failure | None) -> None:
        self._asked = None
        self._note("service", started, failure.message if failure else f"{len(found)} found")
        if failure is not None:
            self._move(Trigger.SERVICE_FAILED)
            self._post(CmEventType.ADDRINFO_ERROR, -failure.errno, None, failure.message)
            return
        self.services = found
        first, local = found[0], self.local_addr
        assert isinstance(local, SockAddrIB)
        self.pkey = first.service_pkey or self.pkey
        self.peer_addr = SockAddrIB(first.service_gid, first.service_id, ALL_BITS_64, self.pkey)
        self.dgid = first.service_gid
        self.local_addr = replace(local, pkey=self.pkey)
        self._move(Trigger.SERVICE_DONE)
        self._post(CmEventType.ADDRINFO_RESOLVED)

    def register_service(
        self, name: bytes, lease: int, data: bytes, done: Callable[[RdmaError | None], None]
    ) -> Registration:
        with self._provider.lock:
            self._provider.check_fork("register_service")
            local = self.local_addr
            if not isinstance(self._device, IbView) or not isinstance(local, SockAddrIB):
                where = self._device.device.name if self._device is not None else "the id"
                raise cm_error(
                    errno.EOPNOTSUPP if self._device is not None else errno.EINVAL,
                    f"{where} is on no InfiniBand port, whose subnet administrator would know the service",
                    "register_service",
                    hint="bind_addr() to a SockAddrIB with the port's GID",
                )
            subnet = self._now("register_service").subnet
            at = replace(local, addr=self.sgid, pkey=self.pkey)
            registration = subnet.register(at, lease, name, data, done)
            self._registrations = [one for one in self._registrations if not one.is_withdrawn]
            self._registrations.append(registration)
            return registration
