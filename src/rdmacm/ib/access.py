"""The subnet administrator as a program asks it that has time to wait: a port and a clock around :class:`SaClient`."""

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

from rdmacm.address import Gid
from rdmacm.errors import RdmaError, cm_error
from rdmacm.ib.transport import IbPort, MadTransport
from rdmacm.proto.sa.attributes import Attribute
from rdmacm.proto.sa.client import SaClient, SaResponse
from rdmacm.proto.sa.mad import SaMethod, SaStatus, describe_status
from rdmacm.proto.sa.query import PathMask, query_for
from rdmacm.proto.sa.records import PathRecord
from rdmacm.proto.sa.subnet import LEASE_FOREVER, ClassPortInfo, JoinState, MCMemberRecord, NodeRecord, ServiceRecord
from rdmacm.proto.wire import WireError

__all__ = ["SaQuery", "Records", "SaAccess"]

T = TypeVar("T")
#: What there is a component mask for.
R = TypeVar("R", PathRecord, ServiceRecord, MCMemberRecord, NodeRecord)

#: Of the question for one path.
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
    SaStatus.NO_RECORDS: "whether it is up ('rdmacm sa nodes'), or fewer conditions",
    SaStatus.TOO_MANY_RECORDS: "more conditions, or for all of them",
}


class Records(list[T]):
    """The records of a table. ``is_cut``: there are more, which a subnet administrator without RMPP keeps to itself."""

    def __init__(self, records: Iterable[T], is_cut: bool = False) -> None:
        super().__init__(records)
        self.is_cut = is_cut


@dataclass(frozen=True, slots=True)
class SaQuery(Generic[T]):
    """A question that has been asked; :meth:`SaAccess.result` has its answer."""

    number: int
    method: int
    #: What a record of the answer is made of.
    unpack: Callable[[bytes], T]
    #: For errors: what is asked, and about whom.
    step: str
    subject: str | None


class SaAccess:
    """Questions of one port to the subnet administrator of its fabric, until ``with`` ends, which closes the port.

    A question is asked again every ``timeout / tries`` seconds and given up after ``timeout``. Every method that waits
    raises RdmaError: ETIMEDOUT (a TimeoutError) where there is no answer, ENETUNREACH where no subnet manager has
    been by, and for what the administrator refuses ENOENT, E2BIG, EINVAL, EACCES ... with its reason as text. Not for
    several threads at once.
    """

    def __init__(self, transport: MadTransport, *, timeout: float = 2.0, tries: int = 10) -> None:
        self.transport = transport
        self.timeout = timeout
        self.tries = tries
        self._client = SaClient(random.SystemRandom(), reassembles=transport.reassembles)
        self._answers: dict[int, SaResponse] = {}
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
        """The port as it was when last looked at: at first, and after a question nobody answered."""
        if self._port is None:
            self._port = self.transport.port()
        return self._port

    # -- what there is to ask ---------------------------------------------------------------------------------

    def path(self, dgid: Gid, **fields: Any) -> PathRecord:
        """The path from this port to another; ``fields`` are more of :class:`PathRecord`'s that it has to have."""
        return self.result(self.query_path(dgid, **fields))[0]

    def query_path(self, dgid: Gid, **fields: Any) -> SaQuery[PathRecord]:
        """As :meth:`path`, but without waiting for the answer."""
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
        """All services of this name, with these fields of :class:`ServiceRecord`."""
        if name is not None:
            fields["service_name"] = _name(name)
        return self.result(self.query(SaMethod.GET_TABLE, ServiceRecord, _shown(name), **fields))

    def register(
        self, service_id: int, name: str | bytes | None = None, *, lease: int = LEASE_FOREVER, **fields: Any
    ) -> ServiceRecord:
        """Tell others of a service at this port, for ``lease`` seconds; again, to renew or change it."""
        if name is not None:
            fields["service_name"] = _name(name)
        fields["service_lease"] = lease
        fields = {**self._identity(service_id), **fields}
        return self.result(self.query(SaMethod.SET, ServiceRecord, f"{service_id:#x}", **fields))[0]

    def withdraw(self, service_id: int, **fields: Any) -> ServiceRecord:
        """The end of a service at this port; the record it had."""
        wanted = {**self._identity(service_id), **fields}
        return self.result(self.query(SaMethod.DELETE, ServiceRecord, f"{service_id:#x}", **wanted))[0]

    def join(self, mgid: Gid, state: JoinState = JoinState.FULL_MEMBER, **fields: Any) -> MCMemberRecord:
        """Become a member of a multicast group; with the fields a new one needs, make it where there is none."""
        return self._member(SaMethod.SET, mgid, state, fields)

    def leave(self, mgid: Gid, state: JoinState = JoinState.FULL_MEMBER) -> None:
        """Be a member no longer."""
        self._member(SaMethod.DELETE, mgid, state, {})

    def nodes(self, **fields: Any) -> Records[NodeRecord]:
        """All ports with these fields of :class:`NodeRecord`, and their nodes."""
        return self.result(self.query(SaMethod.GET_TABLE, NodeRecord, None, **fields))

    def class_port_info(self) -> ClassPortInfo:
        """What the subnet administrator can do."""
        asked = self._send_query(SaMethod.GET, Attribute.CLASS_PORT_INFO, 0, b"")
        return self.result(SaQuery(asked, SaMethod.GET, ClassPortInfo.unpack, "get ClassPortInfo", None))[0]

    def _identity(self, service_id: int) -> dict[str, Any]:
        # Without the P_Key OpenSM stores one that no request can name.
        return {"service_id": service_id, "service_gid": self.port.gids[0], "service_pkey": self._pkey()}

    def _member(self, method: int, mgid: Gid, state: int, fields: dict[str, Any]) -> MCMemberRecord:
        wanted = {"mgid": mgid, "port_gid": self.port.gids[0], "join_state": int(state), **fields}
        return self.result(self.query(method, MCMemberRecord, str(mgid), **wanted))[0]

    # -- asking and waiting -----------------------------------------------------------------------------------

    def query(self, method: int, kind: type[R], subject: str | None, /, **fields: Any) -> SaQuery[R]:
        """Ask about records with these fields; several questions may be under way. ``subject`` is for errors' text."""
        mask, record = query_for(kind, **fields)
        number = self._send_query(method, kind.ATTRIBUTE, mask, record.pack())
        return SaQuery(number, method, kind.unpack, f"{_VERBS.get(method, 'ask for')} {kind.__name__}", subject)

    def _send_query(self, method: int, attribute: int, mask: int, data: bytes) -> int:
        if not self.port.sm_lid:
            self._port = None
            if not self.port.sm_lid:
                raise self._no_manager()
        now = time.monotonic()
        number = self._client.query(
            method, attribute, mask, data, self.port.administrator, now, timeout=self.timeout, tries=self.tries
        )
        self._send()
        return number

    def result(self, question: SaQuery[T]) -> Records[T]:
        """Wait for the answer."""
        while question.number not in self._answers:
            self._progress()
        answer = self._answers.pop(question.number)
        if answer.error is not None:
            raise self._unanswered(question, answer)
        is_table = question.method == SaMethod.GET_TABLE
        if answer.status and not (is_table and answer.status == SaStatus.NO_RECORDS):
            words = describe_status(answer.status)
            number = _ERRNOS.get(answer.status, errno.EINVAL)
            raise self._error(question, number, words, _HINTS.get(answer.status))
        try:
            records = Records((question.unpack(record) for record in answer.records), answer.truncated)
        except (WireError, ValueError) as problem:
            raise self._error(question, errno.EPROTO, f"the answer is no record: {problem}", None) from None
        if not records and not is_table:
            raise self._error(question, errno.EPROTO, "the answer has no record", None)
        return records

    def _send(self) -> None:
        for address, mad in self._client.mads_to_send():
            self.transport.send(address, mad)

    def _progress(self) -> None:
        """Wait for something to happen, and take it in."""
        client = self._client
        deadline = client.next_deadline()
        assert deadline is not None, "a question that nobody has asked, or whose answer has been fetched"
        ready = self._poll.poll(1000 * max(0.0, deadline - time.monotonic()))
        if self.transport.fileno() < 0 or (ready and not ready[0][1] & select.POLLIN):
            raise cm_error(errno.ENODEV, os.strerror(errno.ENODEV), "sa_query", self.transport.name)
        arrived = self.transport.receive()
        now = time.monotonic()
        for source, mad in arrived:
            client.mad_received(source, mad, now)
        client.timer(now)
        self._send()
        for answer in client.events():
            self._answers[answer.query] = answer

    def _pkey(self) -> int:
        return next(iter(self.port.pkeys), 0xFFFF)

    # -- errors -----------------------------------------------------------------------------------------------

    def _error(self, question: SaQuery[Any], number: int, text: str, hint: str | None) -> RdmaError:
        return cm_error(number, text, question.step, question.subject, hint)

    def _no_manager(self) -> RdmaError:
        return cm_error(
            errno.ENETUNREACH,
            "no subnet manager has been at this port",
            "sa_query",
            self.transport.name,
            "whether its link is up, and a subnet manager runs",
        )

    def _unanswered(self, question: SaQuery[Any], answer: SaResponse) -> RdmaError:
        # The subnet manager may be elsewhere by now.
        lid, self._port = self.port.sm_lid, None
        if answer.error != "timeout":
            return self._error(question, errno.EIO, f"the answer broke off: {answer.error}", None)
        why = f", but {describe_status(answer.status)}" if answer.status else ""
        return self._error(
            question,
            errno.ETIMEDOUT,
            f"no answer from the subnet administrator (LID {lid}) in {self.timeout:g} s{why}",
            "whether the subnet manager runs, or a longer timeout",
        )


_VERBS: dict[int, str] = {
    SaMethod.GET: "get",
    SaMethod.GET_TABLE: "get all",
    SaMethod.SET: "set",
    SaMethod.DELETE: "delete",
}


def _name(name: str | bytes) -> bytes:
    return name.encode() if isinstance(name, str) else name


def _shown(name: str | bytes | None) -> str | None:
    return None if name is None else repr(name)
