"""Services of ours that the subnet administrator knows, and is told of again before their lease runs out."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TYPE_CHECKING

from rdmacm.errors import RdmaError, cm_error
from rdmacm.progress.timers import Timer
from rdmacm.proto.sa.client import SaResponse
from rdmacm.proto.sa.mad import SaMethod, describe_status
from rdmacm.proto.sa.query import ServiceMask
from rdmacm.proto.sa.subnet import LEASE_FOREVER, ServiceRecord

if TYPE_CHECKING:
    from rdmacm.soft.ib.subnet import Subnet
    from rdmacm.soft.provider import SoftProvider

__all__ = ["Registration"]

#: Seconds that the administrator has to answer.
_TIMEOUT = 2.0
#: What tells one record from another.
_IDENTITY = ServiceMask.SERVICE_ID | ServiceMask.SERVICE_GID | ServiceMask.SERVICE_PKEY
_CONTENT = ServiceMask.SERVICE_LEASE | ServiceMask.SERVICE_NAME | ServiceMask.SERVICE_DATA8


class Registration:
    """One record of ours. Used with the provider's lock held.

    It is told again after half of its lease, so one that the administrator has lost, as by starting anew, is there
    again by then. ``done`` is called once, with what went wrong or None.
    """

    def __init__(
        self,
        provider: SoftProvider,
        subnet: Subnet,
        record: ServiceRecord,
        done: Callable[[RdmaError | None], None],
    ) -> None:
        self.record = record
        self._provider = provider
        self._subnet = subnet
        self._done: Callable[[RdmaError | None], None] | None = done
        self.is_withdrawn = False
        self._timer: Timer | None = None
        self._query: int | None = None
        self._tell()

    def _tell(self, _now: float = 0.0) -> None:
        self._timer = None
        self._query = self._ask(SaMethod.SET, _IDENTITY | _CONTENT, self._told)
        if self._query is None:
            self._tell_again()

    def _ask(self, method: SaMethod, mask: ServiceMask, done: Callable[[SaResponse], None]) -> int | None:
        """The number of the question; None where it cannot be asked now."""
        view, record = self._subnet.view(), self.record
        try:
            if view is None:
                raise cm_error(errno.ENODEV, f"the port is gone: {self._subnet.why()}", "register_service", record.name)
            return self._subnet.ask(view, method, record.ATTRIBUTE, mask, record.pack(), _TIMEOUT, done)
        except RdmaError as problem:
            self._finish(problem)
            return None

    def _told(self, answer: SaResponse) -> None:
        self._query = None
        self._tell_again()
        self._finish(_refusal(answer, "register_service", self.record))

    def _tell_again(self) -> None:
        if not self.is_withdrawn and self.record.service_lease != LEASE_FOREVER:
            wait = max(self.record.service_lease / 2, 0.5)
            self._timer = self._provider.call_at(self._provider.clock() + wait, self._tell)

    def _finish(self, problem: RdmaError | None) -> None:
        done, self._done = self._done, None
        if done is not None:
            if problem is not None:
                self._stop()
            done(problem)
            self._provider.waiters.wake()

    def _stop(self) -> None:
        self.is_withdrawn = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._query is not None:
            self._subnet.cancel(self._query)
            self._query = None

    def withdraw(self, done: Callable[[RdmaError | None], None] | None = None) -> None:
        """Have the administrator forget it. More than once does nothing."""
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
    if answer.error is not None:
        code = errno.ETIMEDOUT if answer.error == "timeout" else errno.EIO
        return cm_error(code, f"the subnet administrator did not answer: {answer.error}", step, record.name)
    if answer.status:
        return cm_error(
            errno.EINVAL, f"the subnet administrator says: {describe_status(answer.status)}", step, record.name
        )
    return None
