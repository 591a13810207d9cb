"""Further handles of an XRC target: ibv_open_qp(3)."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from rdmacm.errors import cm_error
from rdmacm.verbs import checks
from rdmacm.verbs.async_event import EventOwner
from rdmacm.verbs.backend import QPBackend
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import QPOpenAttrMask, QPType
from rdmacm.verbs.pd import PD
from rdmacm.verbs.posting import SendRules
from rdmacm.verbs.qp import QP, QPInitAttr
from rdmacm.verbs.resource import Resource
from rdmacm.verbs.xrcd import XRCD, check_xrc


@dataclass(slots=True)
class QPOpenAttr:
    """``struct ibv_qp_open_attr``, ibv_open_qp(3).

    - ``comp_mask``: a :class:`QPOpenAttrMask`. A field counts whether or not it is named.
    - ``qp_num``: the number of the queue pair.
    - ``xrcd``: its XRC domain, which this context may have opened by the domain's file.
    - ``qp_context``: the user's own object.
    - ``qp_type``: XRC_RECV.
    """

    comp_mask: int = 0
    qp_num: int = 0
    xrcd: XRCD | None = None
    qp_context: object = None
    qp_type: QPType = QPType.XRC_RECV


class OpenedQP(QP):
    """Another handle of an XRC_RECV queue pair of this process, ibv_open_qp(3).

    It is queried and modified as the first one is, and has the queue pair's events as well. The queue pair is destroyed
    when all its handles are closed. EINVAL: no XRC_RECV with this number is in the domain, or the domain is another
    device's; EOPNOTSUPP: the device has no XRC; EBADF: the context or the domain is closed.
    """

    __slots__ = {"_target": "The provider's object, as :attr:`backend`."}

    def __init__(self, context: Context, attr: QPOpenAttr) -> None:
        self._closed = True
        step = "open_qp"
        checks.check_context(context, step)
        checks.check_kind("attr", attr, QPOpenAttr, step)
        checks.flags(QPOpenAttrMask, attr.comp_mask, "comp_mask", step)
        checks.check_number("qp_num", attr.qp_num, 0, (1 << 24) - 1, step)
        qp_type = checks.member(QPType, attr.qp_type, "qp_type", step)
        if qp_type is not QPType.XRC_RECV:
            raise cm_error(errno.EINVAL, f"a queue pair of type {qp_type.name} has one handle", step, hint="XRC_RECV")
        check_xrc(context, step)
        checks.check_kind("xrcd", attr.xrcd, XRCD, step)
        xrcd = attr.xrcd
        assert xrcd is not None
        if xrcd.context.backend is not context.backend:
            raise cm_error(errno.EINVAL, "the domain is of another device", step)
        self._init_attr = QPInitAttr(qp_type, attr.qp_context)
        self.pd: PD = None  # type: ignore[assignment]  # as of the first handle
        self.xrcd: XRCD | None = xrcd
        self.qp_type = qp_type
        self._context = context
        self._is_iwarp = False  # XRC is InfiniBand's
        owner = EventOwner(self)
        needs: tuple[Resource, ...] = (xrcd,)
        self._target = self._make(step, needs, lambda: context.backend.open_qp(xrcd.backend, attr.qp_num, owner))
        self.backend: QPBackend = self._target
        self._event_owner = owner
        self.qp_num: int = self.backend.qp_num
        self._send_rules = SendRules(qp_type, None, 0, 0, context.backend.attr.max_msg_sz)
        self._max_recv_sge = 0

    def _destroy(self) -> None:
        self._target.close_opened(self._event_owner)
        self._context._forget_events(self._event_owner)
