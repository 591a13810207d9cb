"""Blocking queries to the subnet administrator (SA): a port and a clock around :class:`SaClient`."""

from __future__ import annotations

import errno
import os
import random
import select
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from rdmacm.address import DEFAULT_PKEY, Gid
from rdmacm.errors import RdmaError, check_timeout, cm_error
from rdmacm.ib.transport import IbPort, MadTransport
from rdmacm.interrupts.protection import interruptible
from rdmacm.proto.sa.attributes import Attribute
from rdmacm.proto.sa.client import SaClient, SaResponse
from rdmacm.proto.sa.mad import SaMethod, SaStatus, describe_status
from rdmacm.proto.sa.query import PathMask, query_for
from rdmacm.proto.sa.records import PathRecord
from rdmacm.proto.sa.subnet import (
    LEASE_FOREVER,
    ClassPortInfo,
    JoinState,
    MCMemberRecord,
    NodeRecord,
    ServiceRecord,
    service_name_bytes,
)
from rdmacm.proto.wire import WireError

T = TypeVar("T")
#: The records that have a component mask.
R = TypeVar("R", PathRecord, ServiceRecord, MCMemberRecord, NodeRecord)

#: The component mask of the usual query, for one path between two GIDs.
_PATH_MASK = int(PathMask.DGID | PathMask.SGID | PathMask.REVERSIBLE | PathMask.NUMB_PATH)

_ERRNOS: dict[int, int] = {
    SaStatus.BUSY: errno.EBUSY,
    SaStatus.UNSUPPORTED_METHOD: errno.EOPNOTSUPP,
    SaStatus.UNSUPPORTED_METHOD_ATTRIBUTE: errno.EOPNOTSUPP,
    SaStatus.NO_RESOURCES: errno.ENOBUFS,
    SaStatus.NO_RECORDS: errno.ENOENT,
    SaStatus.TOO_MANY_RECORDS: errno.E2BIG,
    SaStatus.REQ_INVALID_GID: errno.EADDRNOTAVAIL,
    SaStatus.REQ_DENIED: errno.EACCES,
}
_HINTS: dict[int, str] = {
    SaStatus.NO_RECORDS: "checking that the port or service exists ('rdmacm sa nodes', 'rdmacm sa services')",
    SaStatus.TOO_MANY_RECORDS: "more conditions, or a query for all matching records",
}


class Records(list[T]):
    """The records of a response. ``is_cut``: there are more, but the SA does not segment its responses (RMPP)."""

    def __init__(self, records: Iterable[T], is_cut: bool = False) -> None:
        super().__init__(records)
        self.is_cut = is_cut


@dataclass(frozen=True, slots=True)
class SaQuery(Generic[T]):
    """A query that has been sent; :meth:`SaAccess.result` waits for its response.

    - ``number``: the number that :meth:`SaClient.query` returned.
    - ``method``: :class:`SaMethod`.
    - ``unpack``: unpacks a record of the response.
    - ``step``: what the query asks for ("get PathRecord"), for the text of errors.
    - ``subject``: the GID, service or group that it is about, for the text of errors.
    """

    number: int
    method: int
    unpack: Callable[[bytes], T]
    step: str
    subject: str | None


class SaAccess:
    """Blocking queries from one port to the SA of its subnet. A context manager, which opens and closes the port.

    A query is repeated every ``timeout / tries`` seconds and given up after ``timeout`` seconds. Every method that
    waits raises RdmaError: ETIMEDOUT (a TimeoutError) without a response, ENETUNREACH if no subnet manager has
    configured the port, and ENOENT, E2BIG, EINVAL, EACCES and others for an error status, with its meaning as text.
    Not thread-safe.

    Attributes:

    - ``transport``: the port, as a transport of management datagrams.
    - ``timeout``, ``tries``: seconds until a query is given up, and how often it is sent until then.
    """

    def __init__(self, transport: MadTransport, *, timeout: float = 2.0, tries: int = 10) -> None:
        check_timeout(timeout)
        self.transport = transport
        self.timeout = timeout
        self.tries = tries
        self._client = SaClient(random.SystemRandom(), reassembles=transport.reassembles)
        #: Responses that have not been fetched, by query number.
        self._responses: dict[int, SaResponse] = {}
        #: The attributes of the port as last read; None to read them again.
        self._port: IbPort | None = None
        self._poll = select.poll()

    def __enter__(self) -> Self:
        self.transport.open()
        self._poll.register(self.transport.fileno(), select.POLLIN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.transport.close()

    @property
    def port(self) -> IbPort:
        """The attributes of the port, read at the first query and again after one without a response."""
        if self._port is None:
            self._port = self.transport.port()
        return self._port

    # -- queries ----------------------------------------------------------------------------------------------

    def path(self, dgid: Gid, **fields: Any) -> PathRecord:
        """The path from this port to another; ``fields`` of :class:`PathRecord` restrict it."""
        return self.result(self.query_path(dgid, **fields))[0]

    def query_path(self, dgid: Gid, **fields: Any) -> SaQuery[PathRecord]:
        """As :meth:`path`, but without waiting for the response."""
        sgid = fields.pop("sgid", None) or self.port.gids[0]
        if fields:
            wanted = {"dgid": dgid, "sgid": sgid, "reversible": True, "numb_path": 1, **fields}
            return self.query(SaMethod.GET, PathRecord, str(dgid), **wanted)
        record = PathRecord(dgid, sgid, numb_path=1).pack()
        number = self._send_query(SaMethod.GET, Attribute.PATH_RECORD, _PATH_MASK, record)
        return SaQuery(number, SaMethod.GET, PathRecord.unpack, "get PathRecord", str(dgid))

    def paths(self, **fields: Any) -> Records[PathRecord]:
        """All paths with these fields."""
        return self.result(self.query(SaMethod.GET_TABLE, PathRecord, None, **fields))

    def services(self, name: str | bytes | None = None, **fields: Any) -> Records[ServiceRecord]:
        """All services with a name and these fields of :class:`ServiceRecord`.

        UnicodeEncodeError for a name that has no encoding.
        """
        subject = None
        if name is not None:
            fields["service_name"], subject = service_name_bytes(name), repr(name)
        return self.result(self.query(SaMethod.GET_TABLE, ServiceRecord, subject, **fields))

    def register(
        self, service_id: int, name: str | bytes | None = None, *, lease: int = LEASE_FOREVER, **fields: Any
    ) -> ServiceRecord:
        """Register a service at this port for ``lease`` seconds, or renew or change it.

        UnicodeEncodeError for a name that has no encoding, ValueError for one of more than 64 bytes.
        """
        if name is not None:
            fields["service_name"] = service_name_bytes(name)
        fields["service_lease"] = lease
        fields = {**self._identity(service_id), **fields}
        return self.result(self.query(SaMethod.SET, ServiceRecord, f"{service_id:#x}", **fields))[0]

    def withdraw(self, service_id: int, **fields: Any) -> ServiceRecord:
        """Delete the record of a service at this port; returns the record."""
        wanted = {**self._identity(service_id), **fields}
        return self.result(self.query(SaMethod.DELETE, ServiceRecord, f"{service_id:#x}", **wanted))[0]

    def join(self, mgid: Gid, state: JoinState = JoinState.FULL_MEMBER, **fields: Any) -> MCMemberRecord:
        """Join a multicast group. A group that does not exist is created if ``fields`` has what a new one needs."""
        return self._member(SaMethod.SET, mgid, state, fields)

    def leave(self, mgid: Gid, state: JoinState = JoinState.FULL_MEMBER) -> None:
        """Leave a multicast group."""
        self._member(SaMethod.DELETE, mgid, state, {})

    def nodes(self, **fields: Any) -> Records[NodeRecord]:
        """The node records with these fields, one per port."""
        return self.result(self.query(SaMethod.GET_TABLE, NodeRecord, None, **fields))

    def class_port_info(self) -> ClassPortInfo:
        """The capabilities of the SA."""
        number = self._send_query(SaMethod.GET, Attribute.CLASS_PORT_INFO, 0, b"")
        return self.result(SaQuery(number, SaMethod.GET, ClassPortInfo.unpack, "get ClassPortInfo", None))[0]

    def _identity(self, service_id: int) -> dict[str, Any]:
        # Without a P_Key, OpenSM stores one that no query can match.
        pkey = next(iter(self.port.pkeys), DEFAULT_PKEY)
        return {"service_id": service_id, "service_gid": self.port.gids[0], "service_pkey": pkey}

    def _member(self, method: int, mgid: Gid, state: int, fields: dict[str, Any]) -> MCMemberRecord:
        wanted = {"mgid": mgid, "port_gid": self.port.gids[0], "join_state": int(state), **fields}
        return self.result(self.query(method, MCMemberRecord, str(mgid), **wanted))[0]

    # -- sending and waiting ----------------------------------------------------------------------------------

    def query(self, method: int, kind: type[R], subject: str | None, /, **fields: Any) -> SaQuery[R]:
        """Send a query for records of a kind with these fields, without waiting.

        ``method`` is a :class:`SaMethod`; ``subject`` is for the text of errors. TypeError for an unknown field.
        """
        mask, record = query_for(kind, **fields)
        number = self._send_query(method, kind.ATTRIBUTE, mask, record.pack())
        return SaQuery(number, method, kind.unpack, f"{_METHOD_WORDS.get(method, 'query')} {kind.__name__}", subject)

    def _send_query(self, method: int, attribute: int, mask: int, data: bytes) -> int:
        if not self.port.sm_lid:
            self._port = None
            if not self.port.sm_lid:
                raise cm_error(
                    errno.ENETUNREACH,
                    "no subnet manager has configured this port",
                    "sa_query",
                    self.transport.name,
                    "checking that its link is up, and that a subnet manager runs",
                )
        now = time.monotonic()
        number = self._client.query(
            method, attribute, mask, data, self.port.sa_address, now, timeout=self.timeout, tries=self.tries
        )
        self._send()
        return number

    def result(self, query: SaQuery[T]) -> Records[T]:
        """Wait for the response to a query."""
        while query.number not in self._responses:
            self._progress()
        response = self._responses.pop(query.number)
        if response.error is not None:
            raise self._no_response(query, response)
        is_table = query.method == SaMethod.GET_TABLE
        if response.status and not (is_table and response.status == SaStatus.NO_RECORDS):
            words = describe_status(response.status)
            number = _ERRNOS.get(response.status, errno.EINVAL)
            raise self._error(query, number, words, _HINTS.get(response.status))
        try:
            records = Records((query.unpack(record) for record in response.records), response.truncated)
        except (WireError, ValueError) as problem:
            raise self._error(query, errno.EPROTO, f"the response holds an invalid record: {problem}", None) from None
        if not records and not is_table:
            raise self._error(query, errno.EPROTO, "the response has no record", None)
        return records

    def _send(self) -> None:
        for address, mad in self._client.mads_to_send():
            self.transport.send(address, mad)

    def _progress(self) -> None:
        """Wait for a MAD or a deadline, and handle it."""
        client = self._client
        deadline = client.next_deadline()
        assert deadline is not None, "the query was not sent from here, or its response was fetched before"
        ready = self._wait(1000 * max(0.0, deadline - time.monotonic()))
        if self.transport.fileno() < 0 or (ready and not ready[0][1] & select.POLLIN):
            raise cm_error(errno.ENODEV, os.strerror(errno.ENODEV), "sa_query", self.transport.name)
        arrived = self.transport.receive()
        now = time.monotonic()
        for source, mad in arrived:
            client.mad_received(source, mad, now)
        client.timer(now)
        self._send()
        for response in client.events():
            self._responses[response.query] = response

    @interruptible
    def _wait(self, milliseconds: float) -> list[tuple[int, int]]:
        return self._poll.poll(milliseconds)

    # -- errors -----------------------------------------------------------------------------------------------

    def _error(self, query: SaQuery[Any], number: int, text: str, hint: str | None) -> RdmaError:
        return cm_error(number, text, query.step, query.subject, hint)

    def _no_response(self, query: SaQuery[Any], response: SaResponse) -> RdmaError:
        # Read the port again: the subnet manager may have moved.
        lid, self._port = self.port.sm_lid, None
        if response.error != "timeout":
            return self._error(query, errno.EIO, f"the response was aborted: {response.error}", None)
        status = f"; last status: {describe_status(response.status)}" if response.status else ""
        return self._error(
            query,
            errno.ETIMEDOUT,
            f"no response from the subnet administrator (LID {lid}) within {self.timeout:g} s{status}",
            "checking that the subnet manager runs, or a longer timeout",
        )


_METHOD_WORDS: dict[int, str] = {
    SaMethod.GET: "get",
    SaMethod.GET_TABLE: "get all",
    SaMethod.SET: "set",
    SaMethod.DELETE: "delete",
}
