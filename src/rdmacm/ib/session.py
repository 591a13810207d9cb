"""Non-blocking queries of one InfiniBand port to its subnet administrator (SA).

:class:`SaSession` runs the engine (:class:`rdmacm.proto.sa.client.SaClient`) on a transport and a runtime: it sends the
queries, repeats them until their timeout, and calls back with the response. Its queries are those of a connection
manager: paths to a GID, services by name, and multicast groups. Blocking queries are in :mod:`rdmacm.ib.access`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any, TypeAlias, TypeVar

from rdmacm.address import Gid, SockAddrIB
from rdmacm.errors import Failure, cm_error
from rdmacm.ib.transport import IbPort, MadTransport
from rdmacm.progress.runtime import Runtime
from rdmacm.progress.timers import Timer
from rdmacm.proto.mad import MadAddress
from rdmacm.proto.sa import PathRecord
from rdmacm.proto.sa.attributes import Attribute
from rdmacm.proto.sa.client import SaClient, SaResponse
from rdmacm.proto.sa.mad import SaMethod, SaStatus, describe_status
from rdmacm.proto.sa.query import query_for
from rdmacm.proto.sa.restriction import set_fields
from rdmacm.proto.sa.subnet import ClassPortInfo, MCMemberRecord, ServiceRecord, service_name_bytes, service_number
from rdmacm.proto.wire import WireError

R = TypeVar("R", PathRecord, ServiceRecord, MCMemberRecord)
#: Called with the records found, and with the failure if there is one.
RecordsCallback: TypeAlias = "Callable[[tuple[R, ...], Failure | None], None]"

#: The timeout of a query for services in seconds, as in Linux's rdma_cm.
_SERVICE_TIMEOUT = 2.0
_NO_PATH = (
    "checking that it is up ('rdmacm sa nodes'), and that both ports are in one partition, one of them as a full "
    "member (P_Keys: 'rdmacm devices', partitions.conf; rdmacm doctor R2)"
)


class SaSession:
    """The queries of one port. Used with the runtime's lock held."""

    def __init__(self, runtime: Runtime, random: Random, transport: MadTransport) -> None:
        self._runtime = runtime
        self._transport = transport
        #: The engine: queries, repetitions, segmented responses.
        self.client: SaClient = SaClient(random, reassembles=transport.reassembles)
        #: The callback of each query without a response.
        self._callbacks: dict[int, Callable[[SaResponse], None]] = {}
        #: The timer for the engine's next deadline, or for an earlier time; None while the engine has no deadline.
        self._timer: Timer | None = None
        #: Whether :meth:`dispatch` runs: a callback may send a query.
        self._is_dispatching = False

    # -- queries --------------------------------------------------------------------------------------

    def query(
        self,
        port: IbPort,
        method: int,
        attribute: int,
        mask: int,
        record: bytes,
        timeout: float,
        done: Callable[[SaResponse], None],
    ) -> int:
        """Send a query; returns its number. ``done(response)`` is called once, within ``timeout`` seconds.

        ``done`` is not called before this returns. ENETUNREACH if no subnet manager has configured the port, ENOBUFS if
        too many queries are without a response.
        """
        if not port.sm_lid:
            raise cm_error(
                errno.ENETUNREACH,
                f"no subnet manager has configured {port.device} port {port.port_num}",
                "sa_query",
                hint="checking that its link is up, and that a subnet manager runs",
            )
        now = self._runtime.clock()
        query = self.client.query(method, attribute, mask, record, port.sa_address, now, timeout=timeout)
        self._callbacks[query] = done
        self.dispatch()
        return query

    def cancel(self, query: int) -> None:
        """Drop a query; its callback is no longer called."""
        if self._callbacks.pop(query, None) is not None:
            self.client.cancel(query)
            self.dispatch()

    def query_paths(
        self,
        port: IbPort,
        sgid: Gid,
        destination: SockAddrIB,
        timeout: float,
        done: RecordsCallback[PathRecord],
        *,
        tos: int = 0,
        qos_class: int = 0,
        count: int = 1,
        like: PathRecord | None = None,
    ) -> int:
        """Query paths as rdma_cm does: by both GIDs, P_Key, service id and traffic class, usable in both directions.

        ``tos`` replaces the traffic class of the destination. ``qos_class`` restricts the paths if it is not 0, and
        ``count`` is the most paths to return. ``like`` restricts the paths to its fields that are not 0. Raises what
        :meth:`query` raises.
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
        if qos_class:
            fields["qos_class"] = qos_class
        if like is not None:
            fields |= set_fields(like)
        mask, record = query_for(PathRecord, **fields)
        message = f"{describe_sa(port)} knows no path to {destination.addr}"
        no_path = Failure(errno.EINVAL, "path", message, _NO_PATH)
        method = SaMethod.GET if count == 1 else SaMethod.GET_TABLE
        return self._query_records(port, method, mask, record, timeout, no_path, done)

    def query_services(self, port: IbPort, service: str, done: RecordsCallback[ServiceRecord]) -> int:
        """Query services by name, or by service id if ``service`` is a number in C's notation.

        A name is cut to 63 bytes, as the kernel's interface does. EINVAL for a name that has no encoding, and the
        errors of :meth:`query`.
        """
        number = service_number(service)
        if number is None:
            try:
                name = service_name_bytes(service)
            except UnicodeEncodeError:
                raise cm_error(errno.EINVAL, "not a service name", "sa_query", repr(service)) from None
            mask, record = query_for(ServiceRecord, service_name=name[:63])
        else:
            mask, record = query_for(ServiceRecord, service_id=number)
        hint = "'rdmacm sa services' for the registered ones"
        no_service = Failure(errno.ENODATA, "service", f"no service {service!r} is registered", hint)
        return self._query_records(port, SaMethod.GET_TABLE, mask, record, _SERVICE_TIMEOUT, no_service, done)

    def query_group(self, port: IbPort, mgid: Gid, timeout: float, done: RecordsCallback[MCMemberRecord]) -> int:
        """Query a multicast group, also one of other hosts. Raises what :meth:`query` raises."""
        mask, record = query_for(MCMemberRecord, mgid=mgid)
        hint = "checking the partition of the interface"
        no_group = Failure(errno.ENODATA, "group", f"{describe_sa(port)} knows no group {mgid}", hint)
        return self._query_records(port, SaMethod.GET_TABLE, mask, record, timeout, no_group, done)

    def change_member(
        self,
        port: IbPort,
        method: SaMethod,
        timeout: float,
        done: RecordsCallback[MCMemberRecord],
        fields: dict[str, Any],
    ) -> int:
        """Join a multicast group (SET), or leave one (DELETE). Raises what :meth:`query` raises."""
        mask, record = query_for(MCMemberRecord, **fields)
        no_member = Failure(errno.EINVAL, "group", f"{describe_sa(port)} knows no such group or member")
        return self._query_records(port, method, mask, record, timeout, no_member, done)

    def query_capabilities(self, port: IbPort, timeout: float, done: Callable[[int, Failure | None], None]) -> int:
        """Query the capability mask 2 of the administrator (ClassPortInfo). Raises what :meth:`query` raises."""

        def finished(response: SaResponse) -> None:
            failure = _failure(response, port, "capabilities")
            mask2 = 0
            with suppress(WireError, IndexError):
                mask2 = ClassPortInfo.unpack(response.records[0]).capability_mask2
            done(mask2, failure)

        return self.query(port, SaMethod.GET, Attribute.CLASS_PORT_INFO, 0, b"", timeout, finished)

    def _query_records(
        self,
        port: IbPort,
        method: SaMethod,
        mask: int,
        record: R,
        timeout: float,
        nothing_found: Failure,
        done: RecordsCallback[R],
    ) -> int:
        """Query records like ``record``. Where none is found, the failure is ``nothing_found``."""

        def finished(response: SaResponse) -> None:
            failure = _failure(response, port, nothing_found.step)
            found = _unpacked(type(record), response)
            done(found, failure or (None if found else nothing_found))

        return self.query(port, method, record.ATTRIBUTE, mask, record.pack(), timeout, finished)

    # -- progress -------------------------------------------------------------------------------------

    def mad_received(self, source: MadAddress, mad: bytes, now: float) -> None:
        """Handle a MAD of the subnet administration class. The caller calls :meth:`dispatch` next."""
        self.client.mad_received(source, mad, now)

    def dispatch(self) -> None:
        """Send MADs and deliver responses, until there are no more: a callback may send another query."""
        if self._is_dispatching:
            return
        self._is_dispatching = True
        try:
            more = True
            while more:
                mads, responses = self.client.mads_to_send(), self.client.events()
                for address, mad in mads:
                    self._transport.send(address, mad)
                for response in responses:
                    done = self._callbacks.pop(response.query, None)
                    if done is not None:
                        done(response)
                if responses:  # another thread may be waiting for one
                    self._runtime.waiters.wake()
                more = bool(mads or responses)
        finally:
            self._is_dispatching = False
        deadline = self.client.next_deadline()
        if deadline is not None and (self._timer is None or deadline < self._timer.when):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._runtime.call_at(deadline, self._timer_due)

    def _timer_due(self, now: float) -> None:
        self._timer = None
        self.client.timer(now)
        self.dispatch()

    # -- the end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """End every query. Their callbacks get a response with an error, because a thread may be waiting for it."""
        callbacks = self._callbacks
        self.forget()
        for query, done in callbacks.items():
            done(SaResponse(query, 0, error="the port was closed"))

    def forget(self) -> None:
        """Drop every query without calling back."""
        for query in self._callbacks:
            self.client.cancel(query)
        self._callbacks = {}
        self.client.mads_to_send()
        self.client.events()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def describe_sa(port: IbPort) -> str:
    """The name of a port's subnet administrator, for error texts."""
    return f"the subnet administrator of {port.device} port {port.port_num}"


def _failure(response: SaResponse, port: IbPort, step: str) -> Failure | None:
    """The failure of a query: ETIMEDOUT without a response, EINVAL for an error status, as in Linux; else None."""
    name = describe_sa(port)
    if response.error == "timeout":
        hint = "checking that a subnet manager runs ('rdmacm sa info')"
        return Failure(errno.ETIMEDOUT, step, f"{name}, at LID {port.sm_lid}, did not respond in time", hint)
    if response.error is not None:
        return Failure(errno.EIO, step, f"no valid response from {name}: {response.error}")
    if response.status not in (SaStatus.OK, SaStatus.NO_RECORDS):
        return Failure(errno.EINVAL, step, f"{name} refused: {describe_status(response.status)}", "'rdmacm sa'")
    return None


def _unpacked(kind: type[R], response: SaResponse) -> tuple[R, ...]:
    """The records of a response, without malformed ones."""
    found: list[R] = []
    for data in response.records:
        with suppress(WireError):
            found.append(kind.unpack(data))
    return tuple(found)
