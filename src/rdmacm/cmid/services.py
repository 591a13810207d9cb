"""Services that the subnet administrator is told of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from rdmacm.errors import RdmaError
from rdmacm.provider import Provider, ServiceBackend

if TYPE_CHECKING:
    from rdmacm.proto.sa.subnet import ServiceRecord

__all__ = ["Service", "register"]

T = TypeVar("T")


class Service:
    """A service record of ours, made by :meth:`rdmacm.CmId.register_service`; it goes with its id at the latest.

    ``record``: what the subnet administrator was told.
    """

    __slots__ = ("_backend", "_provider")

    def __init__(self, backend: ServiceBackend, provider: Provider) -> None:
        self._backend = backend
        self._provider = provider

    @property
    def record(self) -> ServiceRecord:
        return self._backend.record

    def withdraw(self) -> None:
        """Have the administrator forget it, and wait until it has. More than once does nothing."""
        _wait(self._provider, self._backend.withdraw)

    def __repr__(self) -> str:
        return f"<Service {self.record.name!r} at [{self.record.service_gid}]:0x{self.record.service_id:x}>"


def register(provider: Provider, begin: Callable[[Callable[[RdmaError | None], None]], ServiceBackend]) -> Service:
    """Register by ``begin(done)`` and wait for the outcome."""
    return Service(_wait(provider, begin), provider)


def _wait(provider: Provider, begin: Callable[[Callable[[RdmaError | None], None]], T]) -> T:
    outcome: list[RdmaError | None] = []
    result = begin(outcome.append)
    provider.drive(lambda: outcome, None)
    if outcome[0] is not None:
        raise outcome[0]
    return result
