"""Shared receive queues: ibv_create_srq(3)."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import replace

from rdmacm.errors import cm_error
from rdmacm.verbs.async_event import EventOwner
from rdmacm.verbs.attr import SrqAttr, SrqInitAttr
from rdmacm.verbs.backend import SRQBackend
from rdmacm.verbs.checks import check_kind, check_number, check_srq, flags
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import DeviceCapFlag, SrqAttrMask
from rdmacm.verbs.pd import PD
from rdmacm.verbs.posting import check_recv, first, post_list
from rdmacm.verbs.resource import Resource
from rdmacm.verbs.wr import RecvWR

__all__ = ["SRQ"]


class SRQ(Resource):
    """A shared receive queue (``struct ibv_srq``): the queue pairs made with it take their receives from it.

    ``pd``: its protection domain; ``srq_context``: the user's own object.

    It cannot be closed while a queue pair uses it. EINVAL: no room for a receive, or sizes beyond the device's; ENOMEM:
    too many shared receive queues.
    """

    __slots__ = {
        "pd": "Its protection domain.",
        "srq_context": "The user's own object.",
        "backend": "The provider's object (:mod:`rdmacm.verbs.backend`).",
        "_max_sge": "Elements in a receive.",
        "_event_owner": "The owner of its events, which refers to it weakly.",
    }

    def __init__(self, pd: PD, init_attr: SrqInitAttr | None = None) -> None:
        self._closed = True
        init = SrqInitAttr() if init_attr is None else init_attr
        check_kind("init_attr", init, SrqInitAttr, "create_srq")
        device = pd.context.backend
        check_srq(init.attr, device.attr)
        attr = replace(init.attr, srq_limit=0)
        self.pd = pd
        self.srq_context = init.srq_context
        self._max_sge = attr.max_sge
        self.backend: SRQBackend = self._make("create_srq", (pd,), lambda: device.create_srq(pd, attr))
        self._event_owner = self.backend.async_events = EventOwner(self)

    @property
    def context(self) -> Context:
        """The open device that it was made from."""
        return self.pd.context

    def post_recv(self, wr: RecvWR | Iterable[RecvWR]) -> None:
        """Queue receives, ibv_post_srq_recv(3); see :meth:`QP.post_recv <rdmacm.verbs.qp.QP.post_recv>`."""
        if self._closed:
            error = self._closed_error("post_srq_recv")
            error.bad_wr = first(wr)
            raise error
        wrs = (wr,) if isinstance(wr, RecvWR) else wr
        post_list(wrs, lambda each: check_recv(each, self._max_sge), self.backend.post_recv)

    def modify(self, attr: SrqAttr, comp_mask: int) -> None:
        """Set the attributes that ``comp_mask`` (a :class:`SrqAttrMask`) names, ibv_modify_srq(3).

        LIMIT sets ``srq_limit``, which arms SRQ_LIMIT_REACHED. If fewer receives are queued already, the next message
        raises the event, also when it finds the queue empty. MAX_WR resizes the queue; the receives in it are kept.
        EINVAL: ``srq_limit``, or the number of receives in the queue, is above ``max_wr``; ``max_wr`` is beyond the
        device's; unknown bits; the device does not resize (SRQ_RESIZE is not in its ``device_cap_flags``). Nothing is
        modified then.
        """
        if self._closed:
            raise self._closed_error("modify_srq")
        mask = flags(SrqAttrMask, comp_mask, "attribute bits", "modify_srq")
        check_kind("attr", attr, SrqAttr, "modify_srq")
        if mask & SrqAttrMask.MAX_WR:
            device = self.pd.context.backend.attr
            if not device.device_cap_flags & DeviceCapFlag.SRQ_RESIZE:
                hint = "SrqAttrMask.LIMIT alone, or a new queue"
                text = "the device does not resize shared receive queues"
                raise cm_error(errno.EINVAL, text, "modify_srq", hint=hint)
            check_number("max_wr", attr.max_wr, 1, device.max_srq_wr, "modify_srq")
        if mask & SrqAttrMask.LIMIT:
            most = attr.max_wr if mask & SrqAttrMask.MAX_WR else self.backend.query().max_wr
            check_number("srq_limit", attr.srq_limit, 0, most, "modify_srq")
        self.backend.modify(attr, mask)

    def query(self) -> SrqAttr:
        """Its sizes and its limit, ibv_query_srq(3)."""
        if self._closed:
            raise self._closed_error("query_srq")
        return self.backend.query()

    def _destroy(self) -> None:
        self.backend.destroy()
        self.pd.context._forget_events(self._event_owner)

    def __repr__(self) -> str:
        return f"<SRQ {self.pd.context.name}{' closed' if self._closed else ''}>"
