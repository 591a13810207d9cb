"""Shared receive queues: ibv_create_srq(3)."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rdmacm.capabilities import Feature, absent
from rdmacm.errors import cm_error
from rdmacm.verbs.async_event import EventOwner
from rdmacm.verbs.attr import SrqAttr, SrqInitAttr
from rdmacm.verbs.backend import SRQBackend, XrcSRQBackend
from rdmacm.verbs.checks import check_kind, check_number, check_srq, flags, member
from rdmacm.verbs.cq import CQ
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import DeviceCapFlag, SrqAttrMask, SrqInitAttrMask, SRQType
from rdmacm.verbs.pd import PD, InDomain
from rdmacm.verbs.posting import check_recv, first, post_list
from rdmacm.verbs.wr import RecvWR
from rdmacm.verbs.xrcd import XRCD, check_xrc


@dataclass(slots=True)
class SrqInitAttrEx(SrqInitAttr):
    """``struct ibv_srq_init_attr_ex``, ibv_create_srq_ex(3): :class:`SrqInitAttr` with more fields.

    A field counts if it is set, whether or not ``comp_mask`` names it.

    - ``comp_mask``: a :class:`SrqInitAttrMask`.
    - ``srq_type``: a :class:`SRQType`: BASIC or XRC.
    - ``pd``: the protection domain, if the queue is made from a :class:`Context`.
    - ``xrcd``, ``cq``: XRC: its XRC domain, and where its receives complete.
    """

    comp_mask: int = 0
    srq_type: int = SRQType.BASIC
    pd: PD | None = None
    xrcd: XRCD | None = None
    cq: CQ | None = None


class SRQ(InDomain):
    """A shared receive queue (``struct ibv_srq``): the queue pairs made with it take their receives from it.

    ``creator``: its protection domain, or a :class:`Context` and a :class:`SrqInitAttrEx` with ``pd``. Of type XRC, it
    is for the queue pairs of type XRC_RECV in its XRC domain, and the peers name it by :meth:`get_srq_num`.

    It cannot be closed while a queue pair was made with it. EINVAL: no room for a receive, sizes beyond the device's,
    no protection domain, no XRC domain or completion queue for type XRC, or parts of different devices; EOPNOTSUPP: a
    type that the device lacks; ENOMEM: too many shared receive queues.
    """

    __slots__ = {
        "srq_context": "The user's own object.",
        "srq_type": "The :class:`SRQType`.",
        "xrcd": "Type XRC: its XRC domain; else None.",
        "cq": "Type XRC: where its receives complete; else None.",
        "backend": "The provider's object (:mod:`rdmacm.verbs.backend`).",
        "_max_sge": "Elements in a receive.",
        "_event_owner": "The owner of its events, which refers to it weakly.",
    }

    cq: CQ | None
    xrcd: XRCD | None

    def __init__(self, creator: PD | Context, init_attr: SrqInitAttr | None = None) -> None:
        self._closed = True
        init = SrqInitAttr() if init_attr is None else init_attr
        check_kind("init_attr", init, SrqInitAttr, "create_srq")
        extended = init if isinstance(init, SrqInitAttrEx) else SrqInitAttrEx()
        self.pd: PD = _domain(creator, extended)
        pd = self.pd
        self.srq_type: SRQType = member(SRQType, extended.srq_type, "srq_type", "create_srq")
        self.xrcd, self.cq = (extended.xrcd, extended.cq) if self.srq_type is SRQType.XRC else (None, None)
        device = pd.context.backend
        check_srq(init.attr, device.attr)
        attr = replace(init.attr, srq_limit=0)
        self.srq_context: object = init.srq_context
        self._max_sge = attr.max_sge
        self.backend: SRQBackend
        if self.srq_type is SRQType.XRC:
            xrcd, cq = self._xrc_parts()
            self.backend = self._make(
                "create_srq", (pd, xrcd, cq), lambda: device.create_xrc_srq(pd, attr, xrcd.backend, cq.backend)
            )
        else:
            self.backend = self._make("create_srq", (pd,), lambda: device.create_srq(pd, attr))
        self._event_owner = self.backend.async_events = EventOwner(self)

    def _xrc_parts(self) -> tuple[XRCD, CQ]:
        check_xrc(self.pd.context, "create_srq")
        xrcd, cq = self.xrcd, self.cq
        if xrcd is None or cq is None:
            text = "an XRC shared receive queue needs an XRC domain and a completion queue"
            raise cm_error(errno.EINVAL, text, "create_srq", hint="xrcd and cq")
        check_kind("xrcd", xrcd, XRCD, "create_srq")
        check_kind("cq", cq, CQ, "create_srq")
        device = self.pd.context.backend
        if xrcd.context.backend is not device or cq.context.backend is not device:
            raise cm_error(errno.EINVAL, "its parts are of different devices", "create_srq")
        return xrcd, cq

    def get_srq_num(self) -> int:
        """The number that peers name it by, 24 bits, ibv_get_srq_num(3). EINVAL: it is not of type XRC."""
        self._check_open("get_srq_num")
        if self.srq_type is not SRQType.XRC:
            raise cm_error(errno.EINVAL, "only a queue of type XRC has a number", "get_srq_num")
        backend: XrcSRQBackend = self.backend  # type: ignore[assignment]
        return backend.srq_num

    def post_recv(self, wr: RecvWR | Iterable[RecvWR]) -> None:
        """Queue receives, ibv_post_srq_recv(3); see :meth:`QP.post_recv <rdmacm.verbs.qp.QP.post_recv>`."""
        core = self.backend.core
        if core is not None:
            rest = core.post(wr)
            if rest is None:
                return
            wr = rest
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
        self._check_open("modify_srq")
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
        self._check_open("query_srq")
        return self.backend.query()

    def _destroy(self) -> None:
        self.backend.destroy()
        self.pd.context._forget_events(self._event_owner)

    def __repr__(self) -> str:
        return f"<SRQ {self.pd.context.name}{' closed' if self._closed else ''}>"


def _domain(creator: PD | Context, init_attr: SrqInitAttrEx) -> PD:
    """The protection domain that a shared receive queue is made in."""
    flags(SrqInitAttrMask, init_attr.comp_mask, "comp_mask", "create_srq")
    if init_attr.srq_type == SRQType.TM or init_attr.comp_mask & SrqInitAttrMask.TM:
        raise absent(Feature.TAG_MATCHING, "create_srq")
    pd = init_attr.pd
    if isinstance(creator, PD):
        if pd is not None and pd is not creator:
            raise cm_error(errno.EINVAL, "init_attr.pd is another protection domain", "create_srq")
        return creator
    check_kind("creator", creator, Context, "create_srq")
    if not isinstance(pd, PD) or pd.context.backend is not creator.backend:
        raise cm_error(errno.EINVAL, "no protection domain of the context", "create_srq", hint="SrqInitAttrEx(pd=PD)")
    return pd
