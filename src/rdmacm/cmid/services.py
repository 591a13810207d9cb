"""Service records that a subnet administrator keeps for an id."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from rdmacm.errors import RdmaError
from rdmacm.provider import Provider, ServiceBackend, ServiceDone

if TYPE_CHECKING:
    from rdmacm.proto.sa.subnet import ServiceRecord

T = TypeVar("T")


class Service:
    """A service record, made by :meth:`rdmacm.CmId.register_service`. Destroying its id withdraws it."""

    __slots__ = ("_backend", "_provider")

    def __init__(self, backend: ServiceBackend, provider: Provider) -> None:
        self._backend = backend
        self._provider = provider

    @property
    def record(self) -> ServiceRecord:
        """The record as it was registered."""
        return self._backend.record

    def withdraw(self) -> None:
        """Have the administrator delete the record, and wait for its answer. More than once does nothing.

        ETIMEDOUT: no answer; EINVAL: the administrator refuses.
        """
        wait_for(self._provider, self._backend.withdraw)

    def __repr__(self) -> str:
        return f"<Service {self.record.name!r} at [{self.record.service_gid}]:0x{self.record.service_id:x}>"


def register(provider: Provider, begin: Callable[[ServiceDone], ServiceBackend]) -> Service:
    """Register a record by ``begin(done)``, and wait for the outcome."""
    return Service(wait_for(provider, begin), provider)


def wait_for(provider: Provider, begin: Callable[[ServiceDone], T]) -> T:
    """Call ``begin(done)``, wait for ``done``, and raise its error; returns what ``begin`` has returned."""
    outcome: list[RdmaError | None] = []
    result = begin(outcome.append)
    provider.drive(lambda: outcome, None)
    if outcome[0] is not None:
        raise outcome[0]
    return result
