"""Memory windows: ibv_alloc_mw(3), ibv_bind_mw(3)."""

from __future__ import annotations

from rdmacm.verbs.backend import MWBackend
from rdmacm.verbs.checks import member
from rdmacm.verbs.enums import MWType
from rdmacm.verbs.pd import PD, InDomain


class MW(InDomain):
    """A memory window, ``struct ibv_mw``: a key for a part of a region, with rights of its own.

    It opens memory to a peer when it is bound to a region, and closes it again without a new registration: type 1 by
    :meth:`QP.bind_mw`, type 2 by work requests (BIND_MW, LOCAL_INV, the peer's SEND_WITH_INV). Only the peer of the
    queue pair that bound it may use a window of type 2; of type 1, the peers of all queue pairs of its domain.

    A region cannot be closed while a window is bound to it. Closing a window takes its region away.

    EINVAL: not a type; EOPNOTSUPP: the device lacks the type; ENOMEM: ``max_mw`` windows.
    """

    __slots__ = {
        "type": "The :class:`MWType`.",
        "backend": "The provider's object (:mod:`rdmacm.verbs.backend`).",
    }

    _is_needed = False

    def __init__(self, pd: PD, mw_type: MWType) -> None:
        self._closed = True
        device = pd.context.backend
        self.pd = pd
        self.type: MWType = member(MWType, mw_type, "mw_type", "alloc_mw")
        self.backend: MWBackend = self._make("alloc_mw", (pd,), lambda: device.alloc_mw(pd, self.type))

    @property
    def rkey(self) -> int:
        """The key for the peer's work requests, 32 bits. It changes as soon as a bind is posted."""
        return self.backend.rkey

    def _destroy(self) -> None:
        self.backend.dealloc()

    def __repr__(self) -> str:
        return "<MW closed>" if self._closed else f"<MW {self.type.name} rkey=0x{self.rkey:x}>"
