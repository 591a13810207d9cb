"""A service of ours that the subnet administrator knows, registered again before its lease runs out."""

from __future__ import annotations

import errno
from collections.abc import Callable

from rdmacm.errors import RdmaError, cm_error
from rdmacm.ib.session import SaSession
from rdmacm.ib.transport import IbPort
from rdmacm.progress.runtime import Runtime
from rdmacm.progress.timers import Timer
from rdmacm.proto.sa.client import SaResponse
from rdmacm.proto.sa.mad import SaMethod, describe_status
from rdmacm.proto.sa.query import ServiceMask
from rdmacm.proto.sa.subnet import LEASE_FOREVER, ServiceRecord

__all__ = ["Registration"]

#: Seconds that the administrator has to answer.
_TIMEOUT = 2.0
#: The component mask of the fields that identify a record, and of its content.
_IDENTITY = ServiceMask.SERVICE_ID | ServiceMask.SERVICE_GID | ServiceMask.SERVICE_PKEY
_CONTENT = ServiceMask.SERVICE_LEASE | ServiceMask.SERVICE_NAME | ServiceMask.SERVICE_DATA8


class Registration:
    """One ServiceRecord of ours. Used with the runtime's lock held.

    It is registered again after half of its lease, so that an administrator which lost it, as by a restart, has it
    again by then. ``find_port()`` returns the port as it is now and raises ENODEV when it is gone. ``done`` is called
    once, with the error of the first registration or None.
    """

    def __init__(
        self,
        runtime: Runtime,
        session: SaSession,
        find_port: Callable[[], IbPort],
        record: ServiceRecord,
        done: Callable[[RdmaError | None], None],
    ) -> None:
        self.record = record
        self.is_withdrawn = False
        self._runtime = runtime
        self._session = session
        self._find_port = find_port
        #: None once it has been called.
        self._done: Callable[[RdmaError | None], None] | None = done
        #: Set for the next registration.
        self._timer: Timer | None = None
        #: The query that waits for its answer.
        self._query: int | None = None
        self._register()

    def _register(self, _now: float = 0.0) -> None:
        self._timer = None
        self._query = self._ask(SaMethod.SET, _IDENTITY | _CONTENT, self._registered)
        if self._query is None:
            self._register_later()

    def _ask(self, method: SaMethod, mask: ServiceMask, done: Callable[[SaResponse], None]) -> int | None:
        """The number of the query; None if it cannot be asked now."""
        record = self.record
        try:
            port = self._find_port()
            return self._session.ask(port, method, record.ATTRIBUTE, mask, record.pack(), _TIMEOUT, done)
        except RdmaError as problem:
            self._finish(problem)
            return None

    def _registered(self, answer: SaResponse) -> None:
        self._query = None
        self._register_later()
        self._finish(_refusal(answer, "register_service", self.record))

    def _register_later(self) -> None:
        if not self.is_withdrawn and self.record.service_lease != LEASE_FOREVER:
            wait = max(self.record.service_lease / 2, 0.5)
            self._timer = self._runtime.call_at(self._runtime.clock() + wait, self._register)

    def _finish(self, problem: RdmaError | None) -> None:
        done, self._done = self._done, None
        if done is not None:
            if problem is not None:
                self._stop()
            done(problem)
            self._runtime.waiters.wake()

    def _stop(self) -> None:
        self.is_withdrawn = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._query is not None:
            self._session.cancel(self._query)
            self._query = None

    def withdraw(self, done: Callable[[RdmaError | None], None] | None = None) -> None:
        """Delete the record at the administrator. Further calls do nothing."""
        if self.is_withdrawn:
            if done is not None:
                done(None)
            return
        if self._done is not None:  # another thread waits for the first answer
            gone = cm_error(errno.ECANCELED, "the id was destroyed meanwhile", "register_service", self.record.name)
            self._finish(gone)
        self._stop()

        def answered(answer: SaResponse) -> None:
            if done is not None:
                done(_refusal(answer, "withdraw", self.record))

        if self._ask(SaMethod.DELETE, _IDENTITY, answered) is None and done is not None:
            done(None)


def _refusal(answer: SaResponse, step: str, record: ServiceRecord) -> RdmaError | None:
    """The error of an answer to a registration; None if there is none."""
    if answer.error is not None:
        code = errno.ETIMEDOUT if answer.error == "timeout" else errno.EIO
        return cm_error(code, f"the subnet administrator did not answer: {answer.error}", step, record.name)
    if answer.status:
        return cm_error(
            errno.EINVAL, f"the subnet administrator says: {describe_status(answer.status)}", step, record.name
        )
    return None
