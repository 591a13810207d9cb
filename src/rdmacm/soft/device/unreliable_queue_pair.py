"""Unreliable connected (UC) queue pairs of the software device.

They connect and receive as reliable ones do, with another engine (:class:`rdmacm.proto.roce.uc.UcEngine`). A request
completes when its last packet is given to the system. A request whose memory cannot be read, or a bind or invalidation
that is not allowed, takes the queue pair to SQE; the receive side goes on (InfiniBand Architecture 10.3.1.6).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rdmacm.enums import QPState
from rdmacm.proto.roce.uc import UcEngine
from rdmacm.provider import log
from rdmacm.soft.device.queue_pair import SoftQP

if TYPE_CHECKING:
    from rdmacm.proto.engine import EngineFactory, QPEngine

__all__ = ["SoftUcQP"]


class SoftUcQP(SoftQP):
    """An unreliable connected queue pair; implements :class:`rdmacm.verbs.backend.QPBackend`."""

    __slots__ = ()

    def _make_engine(self) -> EngineFactory:
        return UcEngine

    def _after(self, engine: QPEngine) -> None:
        super()._after(engine)
        assert isinstance(engine, UcEngine)
        if engine.send_failed and self.state in (QPState.RTS, QPState.SQD):
            if log.enabled:
                self._log_change(self.state, "a request has failed", QPState.SQE)
            self.state = QPState.SQE

    def ask_peer(self) -> None:
        """Ask nothing: the peer answers no packet."""
