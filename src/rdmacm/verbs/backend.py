"""What a provider offers below the verbs objects. The objects check; what crosses here is well-formed.

Every call raises :class:`rdmacm.RdmaError`. A provider may be entered from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rdmacm.verbs.attr import DeviceAttr, QPAttr, QPCap, SrqAttr
from rdmacm.verbs.enums import WC, AccessFlag, QPAttrMask, QPState, QPType
from rdmacm.verbs.wr import Buffer, RecvWR, SendWR

__all__ = ["CQBackend", "ChannelBackend", "DeviceBackend", "MRBackend", "QPBackend", "SRQBackend"]


class MRBackend(Protocol):
    """A memory region."""

    lkey: int
    rkey: int
    addr: int
    length: int

    def dereg(self) -> None:
        """Revoke the keys and let go of the buffer."""


class ChannelBackend(Protocol):
    """A completion channel: where completion queues that were armed report."""

    def fileno(self) -> int:
        """A descriptor that polls readable when :meth:`get` may have something."""

    def get(self, timeout: float | None) -> object | None:
        """The owner of a completion queue that has fired, waiting up to ``timeout`` seconds; None when none has.

        Waiting drives the provider.
        """

    def close(self) -> None: ...


class CQBackend(Protocol):
    """A completion queue."""

    cqe: int
    #: Called whenever a completion is added, by whichever thread adds it and with the provider's lock held.
    notify: Callable[[], None] | None

    def poll(self, num_entries: int) -> list[WC]:
        """Up to so many completions, oldest first. Makes progress where there is none; never waits."""

    def wait(self, timeout: float | None) -> bool:
        """Drive the provider until there is a completion; False when the time runs out."""

    def req_notify(self, solicited_only: bool) -> None:
        """Report to the channel at the next completion (after those there are)."""

    def destroy(self) -> None: ...


class SRQBackend(Protocol):
    """A shared receive queue."""

    def post_recv(self, wrs: list[RecvWR]) -> None: ...

    def modify(self, attr: SrqAttr) -> None:
        """Set ``srq_limit``."""

    def query(self) -> SrqAttr: ...

    def destroy(self) -> None: ...


class QPBackend(Protocol):
    """A queue pair. ``state`` changes by ``modify`` and, to ERR, by itself."""

    qp_num: int
    state: QPState

    def modify(self, attr: QPAttr, mask: QPAttrMask) -> None:
        """A transition that the state table allows, with the attributes it requires."""

    def query(self) -> QPAttr:
        """Every attribute as it is now."""

    def post_send(self, wrs: list[SendWR]) -> None:
        """Queue work in order; raises at the first that cannot be, with those before it queued."""

    def post_recv(self, wrs: list[RecvWR]) -> None: ...

    def destroy(self) -> None: ...


class DeviceBackend(Protocol):
    """An open device. ``pd`` arguments are opaque and unequal for protection domains that are not the same."""

    name: str
    attr: DeviceAttr

    def reg_mr(self, pd: object, buffer: Buffer, access: AccessFlag) -> MRBackend: ...

    def create_channel(self) -> ChannelBackend: ...

    def create_cq(self, cqe: int, channel: ChannelBackend | None, owner: object) -> CQBackend:
        """A completion queue; ``owner`` is what its channel hands out."""

    def create_srq(self, pd: object, attr: SrqAttr) -> SRQBackend: ...

    def create_qp(
        self,
        pd: object,
        qp_type: QPType,
        cap: QPCap,
        sq_sig_all: bool,
        send_cq: CQBackend,
        recv_cq: CQBackend,
        srq: SRQBackend | None,
    ) -> QPBackend:
        """A queue pair in RESET."""
