"""Address handles: ibv_create_ah(3)."""

from __future__ import annotations

from dataclasses import replace

from rdmacm.verbs.attr import AHAttr
from rdmacm.verbs.checks import check_av
from rdmacm.verbs.device import Context
from rdmacm.verbs.pd import PD
from rdmacm.verbs.resource import Resource

__all__ = ["AH"]


class AH(Resource):
    """An address handle (``struct ibv_ah``): the destination of a datagram.

    ``attr``: a copy of the address vector; ``pd``: the protection domain of the queue pairs that may use it.

    EINVAL: the device cannot send to that address vector.
    """

    __slots__ = {"pd": "Its protection domain.", "attr": "A copy of the address vector."}

    _warns = False

    def __init__(self, pd: PD, attr: AHAttr) -> None:
        self._closed = True
        check_av(pd.context, attr, "create_ah")
        self.pd = pd
        self.attr = replace(attr, gr=replace(attr.gr))
        self._make("create_ah", (pd,), lambda: None)

    @property
    def context(self) -> Context:
        """The open device that it was made from."""
        return self.pd.context

    def __repr__(self) -> str:
        return f"<AH {self.attr.gr.dgid}{' closed' if self._closed else ''}>"
