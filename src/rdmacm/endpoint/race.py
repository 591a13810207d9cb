"""Connecting to the address of a host that answers first (Happy Eyeballs, RFC 8305).

The addresses are tried in the resolver's order, alternating between the families. Each attempt has an id of its own.
The next attempt starts 250 ms after the previous one, or at once when that fails. The first attempt that is established
wins; the others are destroyed.
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
from rdmacm.constants import AddressFamily, CmEventType, IbOption, OptionLevel, PortSpace, RaiFlag
from rdmacm.endpoint.connection_state import ConnectionOptions, ConnectionState
from rdmacm.endpoint.dispatcher import Dispatcher, Expired, Observable, Routine, Wait
from rdmacm.errors import CmRefusedError, CmRejectedError, CmTimeoutError, RdmaError, cm_error
from rdmacm.explanation import Step
from rdmacm.proto.cm.codes import RejectReason
from rdmacm.verbs.enums import QPType

#: What :func:`rdmacm.connect` accepts as an address.
Target: TypeAlias = "SockAddr | AddrInfo | Sequence[AddrInfo]"

#: Connection Attempt Delay in seconds (RFC 8305, section 8).
_ATTEMPT_DELAY = 0.25
#: Timeout of resolve_addr and of resolve_route, in milliseconds.
_RESOLVE_TIMEOUT_MS = 2000

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


def connect_routine(
    dispatcher: Dispatcher, address: Target, options: ConnectionOptions, source: SockAddr | None, family: int
) -> Routine[ConnectionState]:
    """Connect. Arguments and errors are those of :func:`rdmacm.connect`."""
    infos, name_step = yield from _look_up(dispatcher, address, family)
    race = _Race(dispatcher, infos, options, source)
    try:
        dispatcher.drive_once(race.start_next)
        while not (yield Wait(race, race.is_decided, race.next_start)):
            dispatcher.drive_once(race.start_next)
        return race.result(name_step)
    except Expired as expired:
        raise race.timeout_error(expired) from None
    finally:
        race.close()


class _Race(Observable):
    """All connection attempts. Changes when one fails or wins."""

    __slots__ = ("_attempts", "_dispatcher", "_options", "_source", "_untried", "_winner", "next_start")

    def __init__(
        self, dispatcher: Dispatcher, infos: Sequence[AddrInfo], options: ConnectionOptions, source: SockAddr | None
    ) -> None:
        super().__init__()
        self._dispatcher = dispatcher
        self._options = options
        self._source = source
        #: Addresses not tried yet.
        self._untried = deque(_interleaved(infos))
        #: Attempts that have started, in order.
        self._attempts: list[_Attempt] = []
        #: The first attempt that was established.
        self._winner: _Attempt | None = None
        #: When the next attempt starts, in seconds of the dispatcher's clock; None when no address is left.
        self.next_start: float | None = None

    def start_next(self) -> None:
        """Start the next attempt. When it fails at once, start the one after it."""
        while self._untried:
            attempt = _Attempt(self, self._untried.popleft(), self._dispatcher, self._options, self._source)
            self._attempts.append(attempt)
            attempt.start()
            if attempt.error is None:
                break
        self.next_start = self._dispatcher.clock() + _ATTEMPT_DELAY if self._untried else None

    def failed(self) -> None:
        """Record that an attempt has failed."""
        if self._winner is None:
            self.start_next()
        self.changed()

    def won(self, winner: _Attempt) -> None:
        """Record that an attempt is established; the first one wins."""
        if self._winner is None:
            self._winner = winner
            self._untried.clear()
            self.next_start = None
        self.changed()

    def is_decided(self) -> bool:
        """Whether an attempt has won, or all have failed."""
        return self._winner is not None or all(attempt.error is not None for attempt in self._attempts)

    def result(self, name_step: tuple[Step, ...]) -> ConnectionState:
        """Return the connection, or raise the most informative error with a note about each attempt."""
        if self._winner is not None:
            state = self._winner.take()
            state.steps = (*name_step, *state.steps)
            return state
        errors = [attempt.error for attempt in self._attempts if attempt.error is not None]
        if len(errors) == 1:
            raise errors[0]
        error = max(errors, key=_informativeness)
        for attempt in self._attempts:
            error.add_note(f"tried {attempt.name}: {attempt.error}")
        raise error

    def timeout_error(self, expired: Expired) -> RdmaError:
        """Return the error for a race that was not decided in time."""
        running = [attempt for attempt in self._attempts if attempt.error is None]
        where = ", ".join(f"{attempt.name} {attempt.progress()}" for attempt in running)
        is_put_off = any(attempt.is_put_off for attempt in running)
        error = CmTimeoutError(
            errno.ETIMEDOUT,
            f"not connected within {expired.timeout} s: {where}",
            running[0].step if len(running) == 1 else "connect",
            ", ".join(attempt.name for attempt in running),
            "calling accept() or get_request() there, or a longer timeout"
            if is_put_off
            else "a longer timeout, or checking that the peer is up",
        )
        if len(self._attempts) + len(self._untried) > 1:
            for attempt in self._attempts:
                error.add_note(f"tried {attempt.name}: {attempt.error or attempt.progress()}")
            for info in self._untried:
                error.add_note(f"not tried {format_address(info.dst_addr)}")
        return error

    def close(self) -> None:
        """Destroy all attempts except a winner that was taken."""
        self._untried.clear()
        for attempt in self._attempts:
            attempt.close()


class _Attempt:
    """The attempt to connect to one address, from resolve_addr to ESTABLISHED."""

    def __init__(
        self,
        race: _Race,
        info: AddrInfo,
        dispatcher: Dispatcher,
        options: ConnectionOptions,
        source: SockAddr | None,
    ) -> None:
        #: The destination as text, for error messages.
        self.name = format_address(info.dst_addr)
        #: The current step, for error messages.
        self.step = "resolve_addr"
        #: Why the attempt has failed; None before that.
        self.error: RdmaError | None = None
        self._race = race
        #: The address to connect to.
        self._info = info
        self._dispatcher = dispatcher
        self._options = options
        #: The address to connect from; None for that of ``_info``.
        self._source = source
        #: The id, until the attempt fails or :meth:`take` returns its connection.
        self._cmid: CmId | None = None
        #: The connection, once the route is resolved.
        self._state: ConnectionState | None = None
        #: Whether the attempt was started again after a REJ with the reason "stale connection"; once is enough.
        self._was_stale = False

    def start(self) -> None:
        """Start resolving the address; sets ``error`` when that fails at once."""
        info = self._info
        try:
            if info.dst_addr is None or info.qp_type == QPType.UD:
                raise cm_error(errno.EINVAL, "not an address for a reliable connection", "connect", self.name)
            self._cmid = CmId(
                self._dispatcher.channel, info.port_space or PortSpace.TCP, qp_type=info.qp_type or None, context=self
            )
            self._cmid.resolve_addr(info.dst_addr, self._source or info.src_addr, _RESOLVE_TIMEOUT_MS)
        except RdmaError as error:
            self._fail(error)

    def handle(self, event: CmEvent) -> None:
        """Process an event of the id."""
        if self._cmid is None:
            return
        if event.type is CmEventType.REJECTED and event.status == RejectReason.STALE_CONN and not self._was_stale:
            self._restart()
            return
        if event.type in _FAILURES:
            error = event.error or cm_error(
                errno.ECONNRESET, event.message or "the peer disconnected", self.step, self.name
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

    def _restart(self) -> None:
        """Try again after a REJ with the reason "stale connection".

        The peer still had the connection of an ended process that had used the same queue pair number. With this REJ
        it has released that connection.
        """
        self._was_stale = True
        self.close()
        self.start()
        if self.error is not None:
            self._race.failed()

    def _resolve_route(self, cmid: CmId) -> None:
        self.step = "resolve_route"
        if self._info.route:
            path = b"".join(path.pack() for path in self._info.route)
            cmid.set_option(OptionLevel.IB, IbOption.PATH, path)
        else:
            cmid.resolve_route(_RESOLVE_TIMEOUT_MS)

    def _connect(self, cmid: CmId) -> None:
        self.step = "connect"
        self._state = ConnectionState(self._dispatcher, cmid, self._options)
        self._state.open()
        param = self._options.conn_param()
        cmid.connect(replace(param, private_data=self._info.connect + param.private_data))

    def _established(self, cmid: CmId, event: CmEvent) -> None:
        state = self._state
        assert state is not None
        state.private_data = event.private_data
        state.established("connect")
        cmid.context = state
        self._race.won(self)

    @property
    def is_put_off(self) -> bool:
        """Whether the peer has the request, and its application has not answered."""
        return self._cmid is not None and self._cmid._backend.is_put_off

    def progress(self) -> str:
        """How far it has come, for error messages."""
        return "has the request, and no program there has accepted it" if self.is_put_off else f"still in {self.step}"

    def end(self, reason: str) -> None:
        """Fail because of a fault in :meth:`handle`."""
        self._fail(cm_error(errno.EIO, reason, self.step, self.name))
        self._race.failed()

    def _fail(self, error: RdmaError) -> None:
        self.error = error
        self.close()

    def take(self) -> ConnectionState:
        """Return the connection, which the caller owns from now on."""
        state, self._state, self._cmid = self._state, None, None
        assert state is not None
        return state

    def close(self) -> None:
        """Destroy the id and its queue pair."""
        state, cmid = self._state, self._cmid
        self._state = self._cmid = None
        if state is not None:
            state.release()
        elif cmid is not None:
            cmid.destroy()


def _informativeness(error: RdmaError) -> int:
    """Rank an error: rejected by the application, by the connection manager, a closed port, timeout, any other."""
    if isinstance(error, CmRejectedError):
        return 4 if error.reason == RejectReason.CONSUMER_DEFINED else 3
    if isinstance(error, CmRefusedError):
        return 2
    return 1 if isinstance(error, CmTimeoutError) else 0


def _interleaved(infos: Sequence[AddrInfo]) -> list[AddrInfo]:
    """Sort addresses so that the families alternate, in order of first appearance (RFC 8305, section 4)."""
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


def hosts_of(address: Target) -> list[str]:
    """The names or numeric addresses in an argument of :func:`rdmacm.connect`; none of InfiniBand addresses."""
    if isinstance(address, AddrInfo):
        ends: list[object] = [address.dst_addr]
    elif isinstance(address, list | tuple) and address and isinstance(address[0], AddrInfo):
        ends = [info.dst_addr for info in address if isinstance(info, AddrInfo)]
    else:
        ends = [address]
    return [end[0] for end in ends if isinstance(end, tuple) and end and isinstance(end[0], str)]


# -- address lookup -------------------------------------------------------------------------------------------


def _look_up(dispatcher: Dispatcher, address: Target, family: int) -> Routine[tuple[list[AddrInfo], tuple[Step, ...]]]:
    """Return the addresses to try, and the timed step of the name lookup (an empty tuple without a lookup)."""
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
    found = yield from _look_up_name(dispatcher, str(host), str(port), family)
    took = (time.perf_counter() - started) * 1e6
    return found, (Step("name", took, f"{len(found)} address{'es' * (len(found) > 1)}"),)


def _numeric(address: SockAddr) -> AddrInfo | None:
    """Return a numeric address, or None for a host name; raises ValueError for an address that is neither."""
    try:
        parsed = parse_address(address)
    except ValueError:
        host, port = address[0], address[1]  # type: ignore[index]
        if not host or not 0 <= int(port) <= 0xFFFF:
            raise
        return None
    if isinstance(parsed, InetAddr):
        return AddrInfo(family=parsed.family, port_space=PortSpace.TCP, dst_addr=parsed.sockaddr)
    return AddrInfo(family=AddressFamily.IB, port_space=PortSpace.TCP, dst_addr=parsed)


class _NameLookup(Observable):
    """A name lookup under way. Changes when its event has arrived."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        super().__init__()
        self.event: CmEvent | None = None

    def handle(self, event: CmEvent) -> None:
        self.event = event
        self.changed()


def _look_up_name(dispatcher: Dispatcher, host: str, port: str, family: int) -> Routine[list[AddrInfo]]:
    lookup = _NameLookup()
    with CmId(dispatcher.channel, context=lookup) as cmid:
        cmid.resolve_addrinfo(host, port, family=family, port_space=PortSpace.TCP, flags=RaiFlag.NOROUTE)
        try:
            event = yield Wait(lookup, lambda: lookup.event)
        except Expired as expired:
            text = f"the name lookup took longer than {expired.timeout} s"
            raise CmTimeoutError(errno.ETIMEDOUT, text, "getaddrinfo", host, "a numeric address") from None
        if event.error is not None:
            raise event.error
        return cmid.query_addrinfo()
