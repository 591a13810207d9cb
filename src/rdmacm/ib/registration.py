"""The registration of a service at the subnet administrator (SA), renewed before its lease expires."""

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

#: The timeout of a query in seconds.
_TIMEOUT = 2.0
#: The component mask of the fields that identify a record, and of its content.
_IDENTITY = ServiceMask.SERVICE_ID | ServiceMask.SERVICE_GID | ServiceMask.SERVICE_PKEY
_CONTENT = ServiceMask.SERVICE_LEASE | ServiceMask.SERVICE_NAME | ServiceMask.SERVICE_DATA8


class Registration:
    """The registration of one service record. Used with the runtime's lock held.

    It is renewed after half of its lease, which also restores it after a restart of the SA. ``find_port()`` returns the
    current attributes of the port, or raises ENODEV if it is gone. ``done(error)`` is called once, when the first
    registration has succeeded (None) or failed.
    """

    def __init__(
        self,
        runtime: Runtime,
        session: SaSession,
        find_port: Callable[[], IbPort],
        record: ServiceRecord,
        done: Callable[[RdmaError | None], None],
    ) -> None:
        #: The record as it is registered.
        self.record = record
        #: Whether it was withdrawn, or could not be registered.
        self.is_withdrawn: bool = False
        self._runtime = runtime
        self._session = session
        self._find_port = find_port
        #: Called with the result of the first registration; None after that.
        self._done: Callable[[RdmaError | None], None] | None = done
        #: The timer of the next renewal, or None.
        self._timer: Timer | None = None
        #: The number of the query that waits for its response, or None.
        self._query: int | None = None
        self._register()

    def _register(self, _now: float = 0.0) -> None:
        self._timer = None
        self._query = self._send_query(SaMethod.SET, _IDENTITY | _CONTENT, self._registered)
        if self._query is None:
            self._register_later()

    def _send_query(self, method: SaMethod, mask: ServiceMask, done: Callable[[SaResponse], None]) -> int | None:
        """Send a query; returns its number, or None if that fails."""
        record = self.record
        try:
            port = self._find_port()
            return self._session.query(port, method, record.ATTRIBUTE, mask, record.pack(), _TIMEOUT, done)
        except RdmaError as problem:
            self._finish(problem)
            return None

    def _registered(self, response: SaResponse) -> None:
        self._query = None
        self._register_later()
        self._finish(_refusal(response, "register_service", self.record))

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
        """Delete the record at the SA. Further calls have no effect.

        ``done(error)`` is called once, with the SA's refusal; with None if there is none or the query cannot be sent.
        """
        if self.is_withdrawn:
            if done is not None:
                done(None)
            return
        if self._done is not None:  # another thread waits for the first response
            gone = cm_error(
                errno.ECANCELED, "the id was destroyed in the meantime", "register_service", self.record.name
            )
            self._finish(gone)
        self._stop()

        def finished(response: SaResponse) -> None:
            if done is not None:
                done(_refusal(response, "withdraw", self.record))

        if self._send_query(SaMethod.DELETE, _IDENTITY, finished) is None and done is not None:
            done(None)


def _refusal(response: SaResponse, step: str, record: ServiceRecord) -> RdmaError | None:
    """The error of a registration or deletion, or None."""
    if response.error == "timeout":
        hint = "checking that a subnet manager runs ('rdmacm sa info')"
        return cm_error(errno.ETIMEDOUT, "the subnet administrator did not respond in time", step, record.name, hint)
    if response.error is not None:
        text = f"no valid response from the subnet administrator: {response.error}"
        return cm_error(errno.EIO, text, step, record.name)
    if response.status:
        return cm_error(
            errno.EINVAL, f"the subnet administrator refused: {describe_status(response.status)}", step, record.name
        )
    return None
