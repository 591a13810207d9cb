"""Questions of one InfiniBand port to its subnet administrator, asked without waiting.

:class:`SaSession` runs the engine (:class:`rdmacm.proto.sa.client.SaClient`) on a transport and a runtime: it sends the
queries, repeats them until their time is over, and calls back with the answer. Its questions are those of a connection
manager: paths to a GID, and services by name. A program that can wait uses :mod:`rdmacm.ib.access` instead.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any, TypeAlias, TypeVar

from rdmacm.address import ALL_BITS_64, Gid, SockAddrIB
from rdmacm.errors import cm_error
from rdmacm.failure import Failure
from rdmacm.ib.transport import IbPort, MadTransport
from rdmacm.progress.runtime import Runtime
from rdmacm.progress.timers import Timer
from rdmacm.proto.mad import MadAddress
from rdmacm.proto.sa import PathRecord
from rdmacm.proto.sa.client import SaClient, SaResponse
from rdmacm.proto.sa.mad import SaMethod, SaStatus, describe_status
from rdmacm.proto.sa.query import query_for
from rdmacm.proto.sa.subnet import ServiceRecord
from rdmacm.proto.wire import WireError

__all__ = ["Found", "SaSession", "administrator"]

R = TypeVar("R", PathRecord, ServiceRecord)
#: Called with the records found, and with the failure if there was one.
Found: TypeAlias = "Callable[[tuple[R, ...], Failure | None], None]"

#: Seconds that a search for services takes at most, as in Linux's rdma_cm.
_SERVICE_TIMEOUT = 2.0
#: Fields of the path that a caller has in mind; those that are not 0 restrict the query.
_RESTRICTIONS = (
    *("slid", "dlid", "flow_label", "hop_limit", "traffic_class", "qos_class", "sl"),
    *("mtu", "rate", "packet_life_time"),
)


class SaSession:
    """See the module. Used with the runtime's lock held."""

    def __init__(self, runtime: Runtime, random: Random, transport: MadTransport) -> None:
        self._runtime = runtime
        self._transport = transport
        #: The engine: queries, repetitions, segmented answers.
        self.client = SaClient(random, reassembles=transport.reassembles)
        #: Callback of each query that waits for its answer.
        self._asked: dict[int, Callable[[SaResponse], None]] = {}
        #: Set for the engine's next deadline, or an earlier one.
        self._timer: Timer | None = None
        self._is_dispatching = False

    # -- queries --------------------------------------------------------------------------------------

    def ask(
        self,
        port: IbPort,
        method: int,
        attribute: int,
        mask: int,
        record: bytes,
        timeout: float,
        done: Callable[[SaResponse], None],
    ) -> int:
        """Send a query; returns its number. ``done(answer)`` is called once, within ``timeout`` seconds.

        ``done`` is never called before this returns. ENETUNREACH when the port knows no subnet manager, ENOBUFS when
        too many queries are open.
        """
        if not port.sm_lid:
            raise cm_error(
                errno.ENETUNREACH,
                f"no subnet manager has been at {port.device} port {port.port_num}",
                "sa_query",
                hint="whether its link is up, and a subnet manager runs",
            )
        now = self._runtime.clock()
        query = self.client.query(method, attribute, mask, record, port.administrator, now, timeout=timeout)
        self._asked[query] = done
        self.dispatch()
        return query

    def cancel(self, query: int) -> None:
        """Forget a query; its callback is not called any more."""
        if self._asked.pop(query, None) is not None:
            self.client.cancel(query)
            self.dispatch()

    def ask_paths(
        self,
        port: IbPort,
        sgid: Gid,
        destination: SockAddrIB,
        timeout: float,
        done: Found[PathRecord],
        *,
        tos: int = 0,
        count: int = 1,
        like: PathRecord | None = None,
    ) -> int:
        """Query paths as rdma_cm does: by both GIDs, P_Key, service id and traffic class, usable in both directions.

        ``count`` is how many at most. ``like`` restricts the paths to its fields, where they are not 0. Raises what
        :meth:`ask` raises.
        """
        fields: dict[str, Any] = {
            "sgid": sgid,
            "dgid": destination.addr,
            "pkey": destination.pkey,
            "service_id": destination.sid,
            "traffic_class": tos or destination.flowinfo >> 20 & 0xFF,
            "reversible": True,
            "numb_path": count,
        }
        if like is not None:
            for name in _RESTRICTIONS:
                if value := getattr(like, name):
                    fields[name] = value
                    if hasattr(like, f"{name}_selector"):
                        fields[f"{name}_selector"] = getattr(like, f"{name}_selector")
        mask, record = query_for(PathRecord, **fields)
        method = SaMethod.GET if count == 1 else SaMethod.GET_TABLE

        def answered(answer: SaResponse) -> None:
            failure = _failure(answer, port, "path")
            paths = _unpacked(PathRecord, answer)
            if failure is None and not paths:
                message = f"{administrator(port)} knows no path to {destination.addr}"
                failure = Failure(errno.EINVAL, "path", message, "whether it is up ('rdmacm sa nodes')")
            done(paths, failure)

        return self.ask(port, method, record.ATTRIBUTE, mask, record.pack(), timeout, answered)

    def ask_services(self, port: IbPort, service: str, done: Found[ServiceRecord]) -> int:
        """Query the services of a name, or of an id if ``service`` is a number in C's notation."""
        number = _number(service)
        if number is None:
            mask, record = query_for(ServiceRecord, service_name=service.encode()[:63])
        else:
            mask, record = query_for(ServiceRecord, service_id=number)

        def answered(answer: SaResponse) -> None:
            failure = _failure(answer, port, "service")
            found = _unpacked(ServiceRecord, answer)
            if failure is None and not found:
                hint = "'rdmacm sa services' for those there are"
                failure = Failure(errno.ENODATA, "service", f"nobody has registered {service!r}", hint)
            done(found, failure)

        method, attribute = SaMethod.GET_TABLE, record.ATTRIBUTE
        return self.ask(port, method, attribute, mask, record.pack(), _SERVICE_TIMEOUT, answered)

    # -- progress -------------------------------------------------------------------------------------

    def mad_received(self, source: MadAddress, mad: bytes, now: float) -> None:
        """Take a datagram of the subnet administration class; :meth:`dispatch` is to follow."""
        self.client.mad_received(source, mad, now)

    def dispatch(self) -> None:
        """Send queries and deliver answers, those of queries that a callback makes included."""
        if self._is_dispatching:
            return
        self._is_dispatching = True
        try:
            more = True
            while more:
                mads, answers = self.client.mads_to_send(), self.client.events()
                for address, mad in mads:
                    self._transport.send(address, mad)
                for answer in answers:
                    done = self._asked.pop(answer.query, None)
                    if done is not None:
                        done(answer)
                if answers:  # another thread may wait for one of them
                    self._runtime.waiters.wake()
                more = bool(mads or answers)
        finally:
            self._is_dispatching = False
        deadline = self.client.next_deadline()
        if deadline is not None and (self._timer is None or deadline < self._timer.when):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._runtime.call_at(deadline, self._time)

    def _time(self, now: float) -> None:
        self._timer = None
        self.client.timer(now)
        self.dispatch()

    # -- the end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """End every query; their callbacks get an answer with an error, as a thread may wait for it."""
        asked = self._asked
        self.forget()
        for query, done in asked.items():
            done(SaResponse(query, 0, error="the port was closed"))

    def forget(self) -> None:
        """Drop every query without an answer."""
        for query in self._asked:
            self.client.cancel(query)
        self._asked = {}
        self.client.mads_to_send()
        self.client.events()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def administrator(port: IbPort) -> str:
    """The subnet administrator of a port, in words."""
    return f"the subnet administrator of {port.device} port {port.port_num}"


def _failure(answer: SaResponse, port: IbPort, step: str) -> Failure | None:
    """What is wrong with an answer: ETIMEDOUT if there was none, EINVAL for a status, as in Linux."""
    asked = administrator(port)
    if answer.error == "timeout":
        hint = "whether a subnet manager runs ('rdmacm sa info')"
        return Failure(errno.ETIMEDOUT, step, f"{asked}, at LID {port.sm_lid}, did not answer in time", hint)
    if answer.error is not None:
        return Failure(errno.EIO, step, f"{asked} answered wrongly: {answer.error}")
    if answer.status not in (SaStatus.OK, SaStatus.NO_RECORDS):
        return Failure(errno.EINVAL, step, f"{asked} says: {describe_status(answer.status)}", "'rdmacm sa'")
    return None


def _number(text: str) -> int | None:
    """``text`` as strtoull(3) reads it with base 0; None if it is not a number as a whole."""
    digits = text.strip().lower().removeprefix("+")
    sign = digits.startswith("-")
    digits = digits[sign:]
    base = 16 if digits.startswith("0x") else 8 if digits.startswith("0") else 10
    if not digits[:1].isdigit() or "_" in digits or not digits.isascii():
        return None
    try:
        value = int(digits, base)
    except ValueError:
        return None
    return None if value > ALL_BITS_64 else -value & ALL_BITS_64 if sign else value


def _unpacked(kind: type[R], answer: SaResponse) -> tuple[R, ...]:
    """The records of an answer; malformed ones are left out."""
    found: list[R] = []
    for data in answer.records:
        with suppress(WireError):
            found.append(kind.unpack(data))
    return tuple(found)
