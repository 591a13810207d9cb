"""Queue pairs: ibv_create_qp(3), ibv_modify_qp(3), ibv_query_qp(3), ibv_post_send(3), ibv_post_recv(3)."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NoReturn

from rdmacm.address import Gid, is_multicast
from rdmacm.capabilities import Feature, absent
from rdmacm.errors import RdmaError, cm_error
from rdmacm.proto.plainints import QP_CUR_STATE, QP_PORT, QP_STATE
from rdmacm.verbs.async_event import EventOwner
from rdmacm.verbs.attr import QPAttr, QPCap
from rdmacm.verbs.backend import DeviceBackend, QPBackend
from rdmacm.verbs.checks import check_caps, check_kind, check_number, check_tables, check_values, flags, member
from rdmacm.verbs.cq import CQ
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import (
    AccessFlag,
    MigState,
    Mtu,
    MWType,
    QPAttrMask,
    QPInitAttrMask,
    QPState,
    QPType,
    SendOpsFlag,
    SRQType,
    TransportType,
    WROpcode,
)
from rdmacm.verbs.mw import MW
from rdmacm.verbs.pd import MR, PD
from rdmacm.verbs.posting import REFUSALS, REQUIRED_OPERANDS, SendRules, check_recv, first, post_list, refuse
from rdmacm.verbs.qpstate import RECV_STATES, SEND_STATES, find_fault, states_between, step_mask
from rdmacm.verbs.resource import Resource
from rdmacm.verbs.srq import SRQ
from rdmacm.verbs.wr import MWBind, MWBindInfo, RecvWR, SendWR
from rdmacm.verbs.xrcd import XRCD, check_xrc

_EXTENDED = QPInitAttrMask.PD | QPInitAttrMask.XRCD | QPInitAttrMask.CREATE_FLAGS | QPInitAttrMask.SEND_OPS_FLAGS
#: By state.
_MAY_SEND = [state in SEND_STATES for state in QPState]
_MAY_RECV = [state in RECV_STATES for state in QPState]
_XRC = (QPType.XRC_SEND, QPType.XRC_RECV)
_TO_ERROR = QPAttr(qp_state=QPState.ERR)


@dataclass(slots=True)
class QPInitAttr:
    """``struct ibv_qp_init_attr``, ibv_create_qp(3). A field has C's name unless its description gives another.

    - ``qp_type``: RC, UC, UD, XRC_SEND, or with a :class:`QPInitAttrEx` XRC_RECV.
    - ``qp_context``: the user's own object.
    - ``scq``: ``send_cq``: where sends complete. If None, :meth:`rdmacm.CmId.create_qp` makes one; :class:`QP` raises
      EINVAL.
    - ``rcq``: ``recv_cq``: where receives complete; None as for :attr:`scq`.
    - ``srq``: the shared receive queue to take receives from; None for a receive queue of its own. XRC_SEND has no
      receives, and XRC_RECV has no queues: what they lack is ignored.
    - ``cap``: the sizes of its queues.
    - ``sq_sig_all``: whether every send makes a completion, with or without ``SendFlag.SIGNALED``.
    """

    qp_type: QPType = QPType.RC
    qp_context: object = None
    scq: CQ | None = None
    rcq: CQ | None = None
    srq: SRQ | None = None
    cap: QPCap = field(default_factory=QPCap)
    sq_sig_all: bool | int = False

    def copy(self) -> QPInitAttr:
        """A copy, also of :attr:`cap`."""
        cap = self.cap  # replace() takes six times as long, and calls of the classes are two more of each connection
        if type(cap) is not QPCap:
            check_kind("cap", cap, QPCap, "create_qp")
        sizes = QPCap.__new__(QPCap)
        sizes.max_send_wr, sizes.max_send_sge = cap.max_send_wr, cap.max_send_sge
        sizes.max_recv_wr, sizes.max_recv_sge = cap.max_recv_wr, cap.max_recv_sge
        sizes.max_inline_data = cap.max_inline_data
        new = QPInitAttr.__new__(QPInitAttr)
        new.qp_type, new.qp_context, new.sq_sig_all = self.qp_type, self.qp_context, self.sq_sig_all
        new.scq, new.rcq, new.srq, new.cap = self.scq, self.rcq, self.srq, sizes
        return new


@dataclass(slots=True)
class QPInitAttrEx(QPInitAttr):
    """``struct ibv_qp_init_attr_ex``, ibv_create_qp_ex(3): :class:`QPInitAttr` with more fields.

    A field counts if it is set, whether or not ``comp_mask`` names it.

    - ``comp_mask``: a :class:`QPInitAttrMask`. EOPNOTSUPP: attributes that are not here.
    - ``pd``: the protection domain, if the queue pair is made from a :class:`Context`; XRC_RECV has none.
    - ``xrcd``: XRC_RECV: its XRC domain.
    - ``create_flags``, ``max_tso_header``, ``source_qpn``: 0; others are EOPNOTSUPP.
    - ``send_ops_flags``: a :class:`SendOpsFlag`: the operations that are used. 0 is every operation of the type.
    """

    comp_mask: int = 0
    pd: PD | None = None
    create_flags: int = 0
    max_tso_header: int = 0
    source_qpn: int = 0
    send_ops_flags: int = 0
    xrcd: XRCD | None = None

    def copy(self) -> QPInitAttrEx:
        """A copy, also of ``cap``."""
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(QPInitAttrEx)}
        return QPInitAttrEx(**{**values, "cap": QPInitAttr.copy(self).cap})

    def _check(self) -> None:
        """EOPNOTSUPP for attributes that no queue pair here has."""
        mask = flags(QPInitAttrMask, self.comp_mask, "comp_mask", "create_qp")
        if mask & ~_EXTENDED:
            why = f"comp_mask has {mask & ~_EXTENDED!r}"
            raise absent(Feature.QP_ATTRIBUTES, "create_qp", why=why, hint=repr(_EXTENDED))
        for name in ("create_flags", "max_tso_header", "source_qpn"):
            if value := getattr(self, name):
                raise absent(Feature.QP_ATTRIBUTES, "create_qp", why=f"{name} is {value!r}", hint=f"{name}=0")


class QP(Resource):
    """A queue pair, ``struct ibv_qp``; it begins in RESET.

    ``creator``: a :class:`PD`, or a :class:`Context` and a :class:`QPInitAttrEx` with ``pd``; for XRC_RECV a
    :class:`Context` and a :class:`QPInitAttrEx` with ``xrcd``. ``qp_attr``: move a
    datagram queue pair to RTS with these attributes, others to INIT. ``init_attr`` is copied. With a shared receive
    queue its ``max_recv_wr`` and ``max_recv_sge`` are ignored. EINVAL: no completion queues, no protection domain,
    sizes beyond the device's, or parts of different devices; EOPNOTSUPP: a type that this package or the
    device lacks; ENOMEM: too many queue pairs.
    """

    __slots__ = {
        "pd": "Its protection domain; None for XRC_RECV, as C's NULL.",
        "xrcd": "XRC_RECV: its XRC domain; else None.",
        "qp_type": "The :class:`QPType`.",
        "qp_num": "Its number, 24 bits.",
        "backend": "The provider's object (:mod:`rdmacm.verbs.backend`).",
        "_context": "The open device that it was made from.",
        "_is_iwarp": "Whether the device's transport is iWARP, which has other attributes than InfiniBand.",
        "_init_attr": "What it was made with.",
        "_max_recv_sge": "Elements in a receive.",
        "_event_owner": "The owner of its events, which refers to it weakly.",
        "_send_rules": "What a send work request may contain.",
    }

    qp_type: QPType
    xrcd: XRCD | None

    #: What an extended queue pair is made for, see :meth:`rdmacm.verbs.backend.DeviceBackend.create_qp`.
    _send_ops: SendOpsFlag | None = None
    _is_needed = False

    def __init__(self, creator: PD | Context, init_attr: QPInitAttr, qp_attr: QPAttr | None = None) -> None:
        self._closed = True
        if type(init_attr) is not QPInitAttr:
            check_kind("init_attr", init_attr, QPInitAttr, "create_qp")
        attr = self._init_attr = init_attr.copy()
        if type(attr.qp_type) is not QPType:
            attr.qp_type = member(QPType, attr.qp_type, "qp_type", "create_qp")
        self.qp_type = attr.qp_type
        if attr.qp_type not in REQUIRED_OPERANDS:
            raise absent(Feature.of_type(attr.qp_type), "create_qp")
        if type(creator) is PD and type(init_attr) is QPInitAttr and attr.qp_type not in _XRC:
            domain: PD | XRCD = creator
        else:
            domain = _domain(creator, init_attr, self.qp_type)
        # Typed as a PD, because a queue pair of any other type than XRC_RECV has one.
        pd = domain if isinstance(domain, PD) else None
        self.pd: PD = pd  # type: ignore[assignment]
        xrcd = self.xrcd = domain if isinstance(domain, XRCD) else None
        context = self._context = domain.context
        device = context._backend or context.backend
        self._is_iwarp = device.transport_type is TransportType.IWARP
        scq, rcq, srq = _check_queues(attr, context, device)
        check_caps(attr.cap, device.attr, with_receives=rcq is not None and srq is None)
        if rcq is None or srq is not None:
            attr.cap.max_recv_wr = attr.cap.max_recv_sge = 0
        needs = tuple(filter(None, (domain, scq, None if rcq is scq else rcq, srq)))
        queues = (
            None if scq is None else scq.backend,
            None if rcq is None else rcq.backend,
            None if srq is None else srq.backend,
        )
        key = pd if xrcd is None else xrcd.backend
        self.backend: QPBackend = self._make(
            "create_qp",
            needs,
            partial(device.create_qp, key, attr.qp_type, attr.cap, bool(attr.sq_sig_all), *queues, self._send_ops),
        )
        self._event_owner = self.backend.async_events = EventOwner(self)
        self.qp_num: int = self.backend.qp_num
        cap = attr.cap
        self._send_rules = SendRules(attr.qp_type, pd, cap.max_send_sge, cap.max_inline_data, device.attr.max_msg_sz)
        self._max_recv_sge = cap.max_recv_sge
        if qp_attr is not None:
            try:
                (self.to_rts if self.qp_type is QPType.UD else self.to_init)(qp_attr)
            except BaseException:
                self.close()
                raise

    # -- attributes -----------------------------------------------------------------------------------

    @property
    def context(self) -> Context:
        """The open device that it was made from."""
        return self._context

    @property
    def state(self) -> QPState:
        """The state. It changes to ERR by itself when the queue pair or its connection fails."""
        return self.backend.state

    @property
    def qp_state(self) -> QPState:
        """:attr:`state`, with pyverbs' name."""
        return self.backend.state

    @property
    def cap(self) -> QPCap:
        """The sizes of its queues that the device has granted, at least those that were asked for."""
        return replace(self._init_attr.cap)

    @property
    def scq(self) -> CQ | None:
        """Where sends complete."""
        return self._init_attr.scq

    @property
    def rcq(self) -> CQ | None:
        """Where receives complete."""
        return self._init_attr.rcq

    @property
    def send_cq(self) -> CQ | None:
        """:attr:`scq`, with C's name."""
        return self._init_attr.scq

    @property
    def recv_cq(self) -> CQ | None:
        """:attr:`rcq`, with C's name."""
        return self._init_attr.rcq

    @property
    def srq(self) -> SRQ | None:
        """The shared receive queue; None with a receive queue of its own."""
        return self._init_attr.srq

    @property
    def qp_context(self) -> object:
        """The user's own object, of ``init_attr``."""
        return self._init_attr.qp_context

    def query(self, attr_mask: int = 0) -> tuple[QPAttr, QPInitAttr]:  # noqa: ARG002 (pyverbs' argument)
        """Every attribute as it is now, and the attributes it was made with, ibv_query_qp(3).

        ``attr_mask`` is without effect.
        """
        self._check_open("query_qp")
        found = self.backend.query()
        found.path_mtu = Mtu(found.path_mtu)
        found.path_mig_state = MigState(found.path_mig_state)
        found.qp_access_flags = AccessFlag(found.qp_access_flags)
        return found, replace(self._init_attr, cap=self.cap)

    def query_data_in_order(self, op: int, flags: int = 0) -> int:
        """Whether received data reach the memory in order, ibv_query_qp_data_in_order(3): 0, there is no promise.

        ``op``: a :class:`WROpcode`; ``flags``: 0, or 1 to be told about parts of a message
        (IBV_QUERY_QP_DATA_IN_ORDER_RETURN_CAPS). EINVAL: no such operation, or other flags.
        """
        self._check_open("query_qp_data_in_order")
        member(WROpcode, op, "op", "query_qp_data_in_order")
        check_number("flags", flags, 0, 1, "query_qp_data_in_order")
        return 0

    def query_ece(self) -> NoReturn:
        """The vendor's options for its peer, ibv_query_ece(3). EOPNOTSUPP: no device has any."""
        self._refuse_ece("query_ece")

    def set_ece(self, ece: object) -> NoReturn:  # noqa: ARG002 (C's argument)
        """Use the options that the peer has sent, ibv_set_ece(3). EOPNOTSUPP, as for :meth:`query_ece`."""
        self._refuse_ece("set_ece")

    def _refuse_ece(self, step: str) -> NoReturn:
        self._check_open(step)
        raise absent(Feature.QP_ECE, step)

    # -- states ---------------------------------------------------------------------------------------

    def modify(self, attr: QPAttr, mask: int) -> None:
        """Change the attributes that ``mask`` names, with STATE also the state, ibv_modify_qp(3).

        ``mask``: a :class:`QPAttrMask`. docs/states.md has the attributes that each transition requires
        and allows. EINVAL: the transition, the mask or a value is not allowed, the send queue still drains (SQD to
        RTS), or the device has no alternate paths (ALT_PATH); ENODATA: the row of ``sgid_index`` is empty; EOPNOTSUPP:
        the device cannot change an optional attribute in this state; ENODEV: the device has been removed.
        """
        self._check_open("modify_qp")
        check_kind("attr", attr, QPAttr, "modify_qp")
        chosen = mask if type(mask) is QPAttrMask else flags(QPAttrMask, mask, "attribute bits", "modify_qp")
        bits = chosen.value
        state = self.backend.state
        after = member(QPState, attr.qp_state, "qp_state", "modify_qp") if bits & QP_STATE else state
        if bits & QP_CUR_STATE and attr.cur_qp_state != state:
            raise cm_error(errno.EINVAL, f"the queue pair is in {state.name}, not in cur_qp_state", "modify_qp")
        if not self._is_iwarp:  # there the specification leaves the attributes to the device
            fault = find_fault(self.qp_type, state, after, chosen)
            if fault is not None:
                raise cm_error(errno.EINVAL, fault, "modify_qp")
        check_values(self._context, attr, chosen)
        context = self._context
        if not context.backend.capabilities.checks_tables:
            check_tables(context, attr, chosen)
        try:
            self.backend.modify(attr, chosen)
        except RdmaError:
            if context.backend.capabilities.checks_tables:
                check_tables(context, attr, chosen)  # tells what the device has refused
            raise
        if self.qp_type is QPType.UD and bits & QP_PORT:
            port = self._context.query_port(attr.port_num)
            self._send_rules.max_message = (port.active_mtu or port.max_mtu).bytes

    def to_init(self, attr: QPAttr) -> None:
        """Move from RESET to INIT, with the attributes that this requires."""
        self._to(QPState.INIT, attr)

    def to_rtr(self, attr: QPAttr) -> None:
        """Move to RTR, from RESET through INIT, with the attributes that each step requires."""
        self._to(QPState.RTR, attr)

    def to_rts(self, attr: QPAttr) -> None:
        """Move to RTS, through the states before it, with the attributes that each step requires."""
        self._to(QPState.RTS, attr)

    def to_error(self) -> None:
        """Move to ERR: everything posted completes with WR_FLUSH_ERR. EINVAL in RESET, where nothing is posted."""
        self.modify(_TO_ERROR, QPAttrMask.STATE)

    def _to(self, state: QPState, attr: QPAttr) -> None:
        before = self.backend.state
        for after in states_between(before, state):
            self.modify(replace(attr, qp_state=after), step_mask(self.qp_type, before, after))
            before = after

    # -- work requests --------------------------------------------------------------------------------

    def post_send(self, wr: SendWR | Iterable[SendWR]) -> None:
        """Queue send requests, one or several in order, ibv_post_send(3).

        Where one of several is refused, those before it are queued, and the error's ``bad_wr`` is the refused one.
        Change neither a request nor the memory of its elements until it completes; inline data may be changed at once.
        Wrong memory (lkey, range, permission) raises nothing here: the request completes with LOC_PROT_ERR. EINVAL: the
        state, the type, a size or a value does not allow it; ENOMEM: the queue is full.
        """
        backend = self.backend
        core = backend.core
        if core is not None:
            rest = core.post_send(wr)
            if rest is None:
                return
            wr = rest
        if self._closed or not _MAY_SEND[backend.state]:
            raise self._takes_no_sends(wr)
        if isinstance(wr, SendWR):
            try:
                self._send_rules.check(wr)
            except REFUSALS as error:
                refuse(wr, error)
            backend.post_send([wr])
        else:
            post_list(wr, self._send_rules.check, backend.post_send)

    def bind_mw(self, mw: MW, mw_bind: MWBind) -> None:
        """Queue a request to bind a memory window of type 1, ibv_bind_mw(3). ``mw.rkey`` is its new key afterwards.

        A length of 0 takes the window's region away. The bind is done when it completes; messages posted to this queue
        pair after it may give the key to the peer. It completes with MW_BIND_ERR where InfiniBand Architecture 10.6.7.2
        does not allow it. EINVAL: a window of type 2 (it is bound by BIND_MW: :meth:`SendWR.set_bind_wr`), ZERO_BASED;
        EPERM: the region is of another domain; and the errors of :meth:`post_send`.
        """
        check_kind("mw", mw, MW, "bind_mw")
        check_kind("mw_bind", mw_bind, MWBind, "bind_mw")
        info = mw_bind.bind_info
        check_kind("bind_info", info, MWBindInfo, "bind_mw")
        access = flags(AccessFlag, info.mw_access_flags, "mw_access_flags", "bind_mw")
        if mw.type is not MWType.TYPE_1:
            raise cm_error(errno.EINVAL, "a window of type 2", "bind_mw", hint="post_send of BIND_MW")
        if access & AccessFlag.ZERO_BASED:
            raise cm_error(errno.EINVAL, "ZERO_BASED is for windows of type 2", "bind_mw")
        if isinstance(info.mr, MR) and info.mr.pd is not mw.pd:
            raise cm_error(errno.EPERM, "the region is of another protection domain", "bind_mw")
        wr = SendWR(mw_bind.wr_id, WROpcode.BIND_MW, (), mw_bind.send_flags)
        wr.set_bind_wr(mw, info)
        self.post_send(wr)

    def _takes_sends(self) -> bool:
        """Whether its state lets it take sends."""
        return not self._closed and _MAY_SEND[self.backend.state]

    def _takes_no_sends(self, wr: SendWR | Iterable[SendWR]) -> RdmaError:
        if self._closed:
            error = self._closed_error("post_send")
        else:
            text = f"a queue pair in {self.backend.state.name} takes no sends"
            error = cm_error(errno.EINVAL, text, "post_send", hint="connect() or accept() on its id, or to_rts()")
        error.bad_wr = first(wr)
        return error

    def post_recv(self, wr: RecvWR | Iterable[RecvWR]) -> None:
        """Queue receives, one or several in order, ibv_post_recv(3).

        Where one of several is refused, those before it are queued, and the error's ``bad_wr`` is the refused one.
        EINVAL: the state or a size does not allow it, or the queue pair has a shared receive queue; ENOMEM: the queue
        is full.
        """
        backend = self.backend
        core = backend.core
        if core is not None:
            rest = core.post_recv(wr)
            if rest is None:
                return
            wr = rest
        if self._closed or not _MAY_RECV[backend.state] or self._init_attr.srq is not None:
            raise self._takes_no_receives(wr)
        if isinstance(wr, RecvWR):
            try:
                check_recv(wr, self._max_recv_sge)
            except REFUSALS as error:
                refuse(wr, error)
            backend.post_recv([wr])
        else:
            post_list(wr, lambda each: check_recv(each, self._max_recv_sge), backend.post_recv)

    def _takes_no_receives(self, wr: RecvWR | Iterable[RecvWR]) -> RdmaError:
        if self._closed:
            error = self._closed_error("post_recv")
        elif self._init_attr.srq is not None and _MAY_RECV[self.backend.state]:
            text = "receives come from a shared receive queue"
            error = cm_error(errno.EINVAL, text, "post_recv", hint="srq.post_recv")
        else:
            error = cm_error(errno.EINVAL, "a queue pair in RESET takes no receives", "post_recv", hint="to_init()")
        error.bad_wr = first(wr)
        return error

    # -- multicast ------------------------------------------------------------------------------------

    def attach_mcast(self, gid: Gid | bytes | str, lid: int = 0) -> None:
        """Receive the packets for QP 0xFFFFFF of a multicast group, ibv_attach_mcast(3).

        ``gid``: the MGID, on RoCEv2 the group's IP address, of IPv4 mapped into IPv6. ``lid``: the group's on
        InfiniBand, else 0. The host joins the group as long as a queue pair is attached. A second call does nothing,
        and closing the queue pair detaches it. EINVAL: no multicast GID, or the queue pair is not UD; ENOMEM:
        ``max_mcast_grp`` groups, or ``max_mcast_qp_attach`` queue pairs in this one.
        """
        self.backend.attach_mcast(self._group(gid, "attach_mcast"), lid)

    def detach_mcast(self, gid: Gid | bytes | str, lid: int = 0) -> None:
        """Undo :meth:`attach_mcast`, ibv_detach_mcast(3); EINVAL: it is not attached."""
        self.backend.detach_mcast(self._group(gid, "detach_mcast"), lid)

    def _group(self, gid: Gid | bytes | str, call: str) -> Gid:
        self._check_open(call)
        found = gid if isinstance(gid, Gid) else Gid(gid)
        if not is_multicast(found.ip):
            raise cm_error(errno.EINVAL, "not the GID of a multicast group", call, str(found))
        if self.qp_type is not QPType.UD:
            raise cm_error(errno.EINVAL, "only a queue pair of type UD receives from groups", call, str(found))
        return found

    def _destroy(self) -> None:
        self.backend.destroy()
        self._context._forget_events(self._event_owner)

    def __repr__(self) -> str:
        state = "closed" if self._closed else self.backend.state.name
        return f"<QP {self.qp_type.name} 0x{self.qp_num:x} {state}>"


def _domain(creator: PD | Context, init_attr: QPInitAttr, qp_type: QPType) -> PD | XRCD:
    """The protection domain or, of an XRC_RECV, the XRC domain that a queue pair is made in."""
    pd = xrcd = None
    if isinstance(init_attr, QPInitAttrEx):
        init_attr._check()
        pd, xrcd = init_attr.pd, init_attr.xrcd
    if qp_type in _XRC:
        context = creator.context if isinstance(creator, PD) else creator
        check_kind("creator", context, Context, "create_qp")
        check_xrc(context, "create_qp", Feature.of_type(qp_type))
    if qp_type is QPType.XRC_RECV:
        if not isinstance(xrcd, XRCD):
            text = "a queue pair of type XRC_RECV needs an XRC domain"
            raise cm_error(errno.EINVAL, text, "create_qp", hint="QPInitAttrEx(xrcd=XRCD(context))")
        if context.backend is not xrcd.context.backend:
            raise cm_error(errno.EINVAL, "its parts are of different devices", "create_qp")
        return xrcd
    if not isinstance(creator, PD):
        check_kind("creator", creator, Context, "create_qp")
        if pd is None or pd.context.backend is not creator.backend:
            text = "no protection domain of the context"
            raise cm_error(errno.EINVAL, text, "create_qp", hint="QPInitAttrEx(pd=PD(context))")
        return pd
    if pd is not None and pd is not creator:
        raise cm_error(errno.EINVAL, "init_attr.pd is another protection domain", "create_qp")
    return creator


def _check_queues(attr: QPInitAttr, context: Context, device: DeviceBackend) -> tuple[CQ | None, CQ | None, SRQ | None]:
    """The queues that a queue pair uses: all that its type has. The others are taken out of ``attr``."""
    qp_type = attr.qp_type
    if qp_type in _XRC:
        attr.rcq = attr.srq = None
        if qp_type is QPType.XRC_RECV:
            attr.scq = None
            attr.cap = QPCap(0, 0, 0, 0, 0)
            return None, None, None
        if attr.scq is None:
            raise cm_error(errno.EINVAL, "a queue pair needs a completion queue", "create_qp", hint="scq")
    elif attr.scq is None or attr.rcq is None:
        raise cm_error(errno.EINVAL, "a queue pair needs two completion queues", "create_qp", hint="scq and rcq")
    scq, rcq, srq = attr.scq, attr.rcq, attr.srq
    try:
        for other in (scq, rcq, srq):
            if other is not None and other.context is not context and other.context.backend is not device:
                raise cm_error(errno.EINVAL, "its parts are of different devices", "create_qp")
    except AttributeError:
        check_kind("scq", scq, CQ, "create_qp")
        check_kind("rcq", rcq, CQ, "create_qp")
        check_kind("srq", srq, SRQ, "create_qp")
        raise
    if srq is not None and srq.srq_type is not SRQType.BASIC:
        text = "a shared receive queue of type XRC is for queue pairs of type XRC_RECV"
        raise cm_error(errno.EINVAL, text, "create_qp")
    return scq, rcq, srq
