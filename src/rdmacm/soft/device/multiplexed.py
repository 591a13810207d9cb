"""A queue pair as the multiplexer uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rdmacm.soft.wire.base import SocketAddress

if TYPE_CHECKING:
    from collections.abc import Hashable


class MultiplexedQP(Protocol):
    """A queue pair as the multiplexer uses it. All methods are called under the runtime's lock."""

    #: Set by :meth:`QPMultiplexer.attach`.
    qp_num: int

    def received(self, data: memoryview, segment: int, source: SocketAddress, destination: bytes, now: float) -> None:
        """Process a packet that has the queue pair's number, or with ``segment`` > 0 a train of such packets.

        Nothing else about it is checked.
        """

    def transmit(self, now: float, limit: int) -> int:
        """Send up to ``limit`` packets, and :meth:`QPMultiplexer.schedule` the deadline that follows.

        Return how many packets were sent: ``limit`` or more if there may be others left.
        """

    @property
    def deadline(self) -> float | None:
        """When :meth:`timer` has to be called; None for never."""

    def timer(self, now: float) -> None:
        """The deadline has come."""

    def ask_peer(self) -> Hashable:
        """Send the peer a packet that it answers and that has no other effect.

        Return a value that changes with every packet from the peer; None if there is no connected peer.
        """

    def count(self, counts: list[tuple[str, str, int]]) -> None:
        """Add what the compiled core has counted for it (:meth:`rdmacm.proto.engine.EngineCounters.add`)."""

    def cq_failed(self, cq: object) -> None:
        """A completion queue has overflowed: to the error state if it is one of this queue pair's."""

    def abort(self) -> None:
        """Its engine has raised an exception: to the error state, and use the engine no more."""


class GroupQP(MultiplexedQP, Protocol):
    """A queue pair that may be attached to multicast groups."""

    def received_from_group(self, data: memoryview, source: SocketAddress, key: bytes) -> None:
        """Process a packet of a group that it is attached to (:func:`rdmacm.soft.wire.base.group_key`)."""
