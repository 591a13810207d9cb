"""Unreliable connected (UC) queue pairs of the software device.

They connect and receive as reliable ones do, with another engine (:mod:`rdmacm.proto.roce.uc`). A request
completes when its last packet is given to the system. A request whose memory cannot be read, or a bind or invalidation
that is not allowed, takes the queue pair to SQE; the receive side goes on (InfiniBand Architecture 10.3.1.6).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from rdmacm.enums import QPState
from rdmacm.proto.roce.engines import make_uc_engine
from rdmacm.provider import log
from rdmacm.soft.device.queue_pair import SoftQP

if TYPE_CHECKING:
    from rdmacm.proto.engine import EngineFactory, QPEngine
    from rdmacm.proto.roce.uc import UnreliableEngine
    from rdmacm.verbs.wr import SendWR


class SoftUcQP(SoftQP):
    """An unreliable connected queue pair; implements :class:`rdmacm.verbs.backend.QPBackend`."""

    __slots__ = ()

    def _make_engine(self) -> EngineFactory:
        return make_uc_engine

    def post_send(self, wrs: list[SendWR]) -> None:
        super().post_send(wrs)
        # No packet of the peer may ever come, which would make it join.
        with self._mux.runtime.lock:
            if self._established is not None:
                self._join_core()

    def _after(self, engine: QPEngine) -> None:
        super()._after(engine)
        if cast("UnreliableEngine", engine).send_failed and self.state in (QPState.RTS, QPState.SQD):
            if log.enabled:
                self._log_change(self.state, "a request has failed", QPState.SQE)
            self.state = QPState.SQE

    def ask_peer(self) -> None:
        """Ask nothing: the peer answers no packet."""
