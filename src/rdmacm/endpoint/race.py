"""Connecting to whichever address of a host answers first, RFC 8305.

The addresses are tried in the resolver's order with the families taking turns. Each attempt is an id of its own; the
next begins a quarter of a second after the last one did, or at once when that has failed. The first to be established
wins, the others are destroyed.
"""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from rdmacm.address import InetAddr, SockAddr, SockAddrIB, format_address, parse_address
from rdmacm.addrinfo import AddrInfo
from rdmacm.cmid import CmEvent, CmId
from rdmacm.constants import CmEventType, IbOption, OptionLevel, PortSpace, RaiFlag
from rdmacm.endpoint.core import Core, Shape
from rdmacm.endpoint.hub import Expired, Hub, Steps, Wait, Watched
from rdmacm.errors import CmRejectedError, CmTimeoutError, RdmaError, cm_error
from rdmacm.explanation import Step
from rdmacm.verbs.enums import QPType

__all__ = ["Target", "connecting"]

#: What :func:`rdmacm.connect` connects to.
Target: TypeAlias = "SockAddr | AddrInfo | Sequence[AddrInfo]"

#: Seconds between the beginnings of two attempts (RFC 8305, section 8).
_ATTEMPT_DELAY = 0.25
#: Milliseconds for a neighbour, and for a route.
_RESOLVE_MS = 2000
_STALE = 10
_REJECTED_BY_APPLICATION = 28

_FAILURES = frozenset(
    (
        CmEventType.ADDR_ERROR,
        CmEventType.ROUTE_ERROR,
        CmEventType.CONNECT_ERROR,
        CmEventType.UNREACHABLE,
        CmEventType.REJECTED,
        CmEventType.DISCONNECTED,
        CmEventType.DEVICE_REMOVAL,
    )
)


def connecting(hub: Hub, address: Target, shape: Shape, source: SockAddr | None, family: int) -> Steps[Core]:
    """Connect; see :func:`rdmacm.connect`."""
    infos, name_step = yield from _look_up(hub, address, family)
    race = _Race(hub, infos, shape, source)
    try:
        hub.locked(race.start_next)
        while not (yield Wait(race, race.is_over, race.next_start)):
            hub.locked(race.start_next)
        return race.result(name_step)
    except Expired as expired:
        raise race.too_late(expired) from None
    finally:
        race.close()


class _Race(Watched):
    """The attempts, and which of them has won."""

    __slots__ = ("_attempts", "_hub", "_left", "_shape", "_source", "_winner", "next_start")

    def __init__(self, hub: Hub, infos: Sequence[AddrInfo], shape: Shape, source: SockAddr | None) -> None:
        super().__init__()
        self._hub = hub
        self._shape = shape
        self._source = source
        self._left = deque(interleaved(infos))
        self._attempts: list[_Attempt] = []
        self._winner: _Attempt | None = None
        #: When the next attempt begins; None when there is none.
        self.next_start: float | None = None

    def start_next(self) -> None:
        """Begin another attempt; where one cannot even begin, the one after it."""
        while self._left:
            attempt = _Attempt(self, self._left.popleft())
            self._attempts.append(attempt)
            attempt.begin(self._hub, self._source, self._shape)
            if attempt.error is None:
                break
        self.next_start = self._hub.clock() + _ATTEMPT_DELAY if self._left else None

    def failed(self) -> None:
        """An attempt has ended."""
        if self._winner is None:
            self.start_next()
        self.changed()

    def won(self, winner: _Attempt) -> None:
        """An attempt is established; the first is the one."""
        if self._winner is None:
            self._winner = winner
            self._left.clear()
            self.next_start = None
        self.changed()

    def is_over(self) -> bool:
        """Whether there is a winner, or nothing is left to hope for."""
        return self._winner is not None or all(attempt.error is not None for attempt in self._attempts)

    def result(self, name_step: tuple[Step, ...]) -> Core:
        """The connection, or the error of the attempt that came furthest with notes about all."""
        if self._winner is not None:
            core = self._winner.take()
            core.steps = (*name_step, *core.steps)
            return core
        errors = [attempt.error for attempt in self._attempts if attempt.error is not None]
        if len(errors) == 1:
            raise errors[0]
        error = max(errors, key=_usefulness)
        for attempt in self._attempts:
            error.add_note(f"tried {attempt.name}: {attempt.error}")
        raise error

    def too_late(self, expired: Expired) -> RdmaError:
        """The error for a race that was not over in time."""
        running = [attempt for attempt in self._attempts if attempt.error is None]
        where = ", ".join(f"{attempt.name} still in {attempt.step}" for attempt in running)
        error = CmTimeoutError(
            errno.ETIMEDOUT,
            f"not connected within {expired.timeout} s: {where}",
            running[0].step if len(running) == 1 else "connect",
            ", ".join(attempt.name for attempt in running),
            "a longer timeout, or whether the peer is there",
        )
        if len(self._attempts) + len(self._left) > 1:
            for attempt in self._attempts:
                error.add_note(f"tried {attempt.name}: {attempt.error or f'still in {attempt.step}'}")
            for info in self._left:
                error.add_note(f"not tried {format_address(info.dst_addr)}")
        return error

    def close(self) -> None:
        """Destroy what has not been taken."""
        self._left.clear()
        for attempt in self._attempts:
            attempt.close()


class _Attempt:
    """One address: an id, from resolving the address to ESTABLISHED."""

    def __init__(self, race: _Race, info: AddrInfo) -> None:
        self.name = format_address(info.dst_addr)
        self.step = "resolve_addr"
        self.error: RdmaError | None = None
        self._race = race
        self._info = info
        self._cmid: CmId | None = None
        self._core: Core | None = None
        self._shape = Shape()
        self._hub: Hub | None = None
        self._source: SockAddr | None = None
        self._was_stale = False

    def begin(self, hub: Hub, source: SockAddr | None, shape: Shape) -> None:
        """Resolve the address; ``error`` tells whether that has failed already."""
        info = self._info
        self._hub, self._source, self._shape = hub, source, shape
        try:
            if info.dst_addr is None or info.qp_type == QPType.UD:
                raise cm_error(errno.EINVAL, "not the address of a listener of connections", "connect", self.name)
            self._cmid = CmId(hub.channel, info.port_space or PortSpace.TCP, qp_type=info.qp_type or None, context=self)
            self._cmid.resolve_addr(info.dst_addr, source or info.src_addr, _RESOLVE_MS)
        except RdmaError as error:
            self._fail(error)

    def handle(self, event: CmEvent) -> None:
        """An event of the id."""
        if self._cmid is None:
            return
        if event.type is CmEventType.REJECTED and event.status == _STALE and not self._was_stale:
            self._begin_again()
            return
        if event.type in _FAILURES:
            error = event.error or cm_error(
                errno.ECONNRESET, event.message or "the peer went away", self.step, self.name
            )
            self._fail(error)
            self._race.failed()
            return
        try:
            if event.type is CmEventType.ADDR_RESOLVED:
                self._resolve_route(self._cmid)
            elif event.type is CmEventType.ROUTE_RESOLVED:
                self._connect(self._cmid)
            elif event.type is CmEventType.ESTABLISHED:
                self._established(self._cmid, event)
        except RdmaError as error:
            self._fail(error)
            self._race.failed()

    def _begin_again(self) -> None:
        """Our queue pair's number is that of a dead process's connection, which the peer has let go of by now."""
        assert self._hub is not None
        self._was_stale = True
        self.close()
        self.begin(self._hub, self._source, self._shape)
        if self.error is not None:
            self._race.failed()

    def _resolve_route(self, cmid: CmId) -> None:
        self.step = "resolve_route"
        if self._info.route:
            path = b"".join(path.pack() for path in self._info.route)
            cmid.set_option(OptionLevel.IB, IbOption.PATH, path)
        else:
            cmid.resolve_route(_RESOLVE_MS)

    def _connect(self, cmid: CmId) -> None:
        self.step = "connect"
        assert self._hub is not None
        self._core = Core(self._hub, cmid, self._shape)
        self._core.open()
        param = self._shape.param()
        cmid.connect(replace(param, private_data=self._info.connect + param.private_data))

    def _established(self, cmid: CmId, event: CmEvent) -> None:
        core = self._core
        assert core is not None
        core.private_data = event.private_data
        core.established("connect")
        cmid.context = core
        self._race.won(self)

    def _fail(self, error: RdmaError) -> None:
        self.error = error
        self.close()

    def take(self) -> Core:
        """The connection, which from now on is somebody else's."""
        core, self._core, self._cmid = self._core, None, None
        assert core is not None
        return core

    def close(self) -> None:
        """Destroy the id and what hangs on it."""
        core, cmid = self._core, self._cmid
        self._core = self._cmid = None
        if core is not None:
            core.release()
        elif cmid is not None:
            cmid.destroy()


def _usefulness(error: RdmaError) -> int:
    """An application's refusal says more than a closed port, that more than silence, and that more than no way."""
    if isinstance(error, CmRejectedError):
        return 3 if error.reason == _REJECTED_BY_APPLICATION else 2
    return 1 if isinstance(error, CmTimeoutError) else 0


def interleaved(infos: Sequence[AddrInfo]) -> list[AddrInfo]:
    """The families taking turns, in the order in which they appear (RFC 8305, section 4)."""
    queues: dict[int, deque[AddrInfo]] = {}
    for info in infos:
        queues.setdefault(info.family, deque()).append(info)
    found = []
    while queues:
        for family, queue in list(queues.items()):
            found.append(queue.popleft())
            if not queue:
                del queues[family]
    return found


# -- from what the user gives to addresses --------------------------------------------------------------------


def _look_up(hub: Hub, address: Target, family: int) -> Steps[tuple[list[AddrInfo], tuple[Step, ...]]]:
    """The addresses to try, and the step that found them."""
    if isinstance(address, AddrInfo):
        return [address], ()
    if not isinstance(address, SockAddrIB) and address and isinstance(address[0], AddrInfo):
        return [info for info in address if isinstance(info, AddrInfo)], ()
    if not address:
        raise cm_error(errno.EINVAL, "no address to connect to", "connect")
    numeric = _numeric(address)  # type: ignore[arg-type]
    if numeric is not None and family in (0, numeric.family):
        return [numeric], ()
    host, port = address[0], address[1]  # type: ignore[index]
    started = time.perf_counter()
    found = yield from _names(hub, str(host), str(port), family)
    took = (time.perf_counter() - started) * 1e6
    return found, (Step("name", took, f"{len(found)} address{'es' * (len(found) > 1)}"),)


def _numeric(address: SockAddr) -> AddrInfo | None:
    """The one address there is to try, None for a host name."""
    try:
        parsed = parse_address(address)
    except ValueError:
        host, port = address[0], address[1]  # type: ignore[index]
        if not host or not 0 <= int(port) <= 0xFFFF:
            raise
        return None
    if isinstance(parsed, InetAddr):
        return AddrInfo(family=parsed.family, port_space=PortSpace.TCP, dst_addr=parsed.sockaddr)
    return AddrInfo(family=27, port_space=PortSpace.TCP, dst_addr=parsed)


class _Names(Watched):
    """The event of a resolution under way."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        super().__init__()
        self.event: CmEvent | None = None

    def handle(self, event: CmEvent) -> None:
        self.event = event
        self.changed()


def _names(hub: Hub, host: str, port: str, family: int) -> Steps[list[AddrInfo]]:
    names = _Names()
    with CmId(hub.channel, context=names) as cmid:
        cmid.resolve_addrinfo(host, port, family=family, port_space=PortSpace.TCP, flags=RaiFlag.NOROUTE)
        try:
            event = yield Wait(names, lambda: names.event)
        except Expired as expired:
            text = f"the name was not looked up within {expired.timeout} s"
            raise CmTimeoutError(errno.ETIMEDOUT, text, "getaddrinfo", host, "a numeric address") from None
        if event.error is not None:
            raise event.error
        return cmid.query_addrinfo()
