"""The queues of an id, and the helpers of ``rdma/rdma_verbs.h``: rdma_create_qp(3), rdma_create_srq(3)."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from rdmacm.cmid.state import IdState
from rdmacm.errors import CmTimeoutError, RdmaError, check_timeout, cm_error
from rdmacm.verbs.ah import AH
from rdmacm.verbs.attr import DeviceAttr, QPAttr, QPCap, SrqInitAttr
from rdmacm.verbs.buffers import Buffer, byte_view
from rdmacm.verbs.checks import check_kind, member
from rdmacm.verbs.cq import CQ, CompChannel
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import WC, AccessFlag, QPAttrMask, QPState, QPType, SRQType, WROpcode
from rdmacm.verbs.pd import MR, PD
from rdmacm.verbs.qp import QP, QPInitAttr, QPInitAttrEx
from rdmacm.verbs.qpex import QPEx
from rdmacm.verbs.srq import SRQ, SrqInitAttrEx
from rdmacm.verbs.wr import SGE, RecvWR, SendWR
from rdmacm.verbs.xrcd import XRCD

_NO_CQ, _NO_CHANNEL = "has no completion queue", "has made no completion channel"
_CHANNEL_HINT = "create_qp() without completion queues, or the comp_channel of yours"
_SEND, _READ, _WRITE = WROpcode.SEND, WROpcode.RDMA_READ, WROpcode.RDMA_WRITE


def _default_pd(context: Context) -> PD:
    """The protection domain that the ids of a device share, as in librdmacm."""
    pds = (context._backend or context.backend).default_pds
    if not pds:
        # Atomic, and so without a lock: in here the garbage collector may close an id, which takes the provider's lock.
        # The first domain counts if two threads make one.
        pds.append(PD(context))
    pd: PD = pds[0]
    return pd


def _default_xrcd(context: Context) -> XRCD:
    """The XRC domain that the ids of a device share, as in librdmacm."""
    domains = context.backend.default_xrcds
    if not domains:
        domains.append(XRCD(context))  # as above
    xrcd: XRCD = domains[0]
    return xrcd


class Queues(IdState):
    """The part of :class:`rdmacm.CmId` that has a queue pair, and posts to it."""

    __slots__ = ()

    # -- attributes -----------------------------------------------------------------------------------

    @property
    def pd(self) -> PD:
        """The protection domain: the queue pair's, else the one that all ids of the device share.

        CmStateError: the id is not bound to a device (:attr:`is_bound`).
        """
        if self._pd is None:
            self._pd = _default_pd(self._bound("pd"))
        return self._pd

    @pd.setter
    def pd(self, pd: PD | None) -> None:
        self._pd = pd

    @property
    def has_qp(self) -> bool:
        """Whether :meth:`create_qp` has made a queue pair."""
        return self._qp is not None

    @property
    def qp(self) -> QP:
        """The queue pair made by :meth:`create_qp`; CmStateError: there is none (:attr:`has_qp`)."""
        return self._qp or self._lacks("has no queue pair", "qp", "create_qp()")

    @property
    def has_srq(self) -> bool:
        """Whether :meth:`create_srq` has made a shared receive queue."""
        return self._srq is not None

    @property
    def srq(self) -> SRQ:
        """The shared receive queue made by :meth:`create_srq`; CmStateError: there is none (:attr:`has_srq`)."""
        return self._srq or self._lacks("has no shared receive queue", "srq", "create_srq()")

    @property
    def send_cq(self) -> CQ:
        """Where sends complete; CmStateError: there is no queue pair.

        Set it before :meth:`create_qp`, which takes it unless ``init_attr`` has one.
        """
        return self._send_cq or self._lacks(_NO_CQ, "send_cq", "create_qp()")

    @send_cq.setter
    def send_cq(self, cq: CQ | None) -> None:
        self._send_cq = cq

    @property
    def recv_cq(self) -> CQ:
        """Where receives complete; CmStateError: there is no queue pair. It may be set as :attr:`send_cq`."""
        return self._recv_cq or self._lacks(_NO_CQ, "recv_cq", "create_qp()")

    @recv_cq.setter
    def recv_cq(self, cq: CQ | None) -> None:
        self._recv_cq = cq

    @property
    def send_cq_channel(self) -> CompChannel:
        """The channel of :attr:`send_cq`, if :meth:`create_qp` made both; else CmStateError."""
        return self._send_cq_channel or self._lacks(_NO_CHANNEL, "send_cq_channel", _CHANNEL_HINT)

    @property
    def recv_cq_channel(self) -> CompChannel:
        """The channel of :attr:`recv_cq`, if :meth:`create_qp` or :meth:`create_srq` made both; else CmStateError."""
        return self._recv_cq_channel or self._lacks(_NO_CHANNEL, "recv_cq_channel", _CHANNEL_HINT)

    # -- queue pairs ----------------------------------------------------------------------------------

    def create_qp(self, init_attr: QPInitAttr | None = None, pd: PD | None = None) -> QP:
        """Create the id's queue pair, rdma_create_qp(3). Connecting moves it through its states; UD is in RTS at once.

        Without ``init_attr`` it is of the id's type, with room for 16 sends and 16 receives. Where neither
        ``init_attr`` nor the id has a completion queue, one is created, with a channel, and written to ``init_attr``,
        as in C. A queue pair of type UD has the Q_Key of the id: 0x01234567 in the port space UDP. With a QPInitAttrEx
        it is a :class:`~rdmacm.verbs.QPEx`, rdma_create_qp_ex(3). One of type XRC_RECV is in the XRC domain of
        ``init_attr``, else in the one that all ids of the device share. EINVAL: there is a queue pair already, the id
        is not bound, the domain is another device's, or the type is not the id's; :class:`rdmacm.verbs.QP` has the
        rest.
        """
        context = self._bound("create_qp")
        if self._qp is not None:
            raise cm_error(errno.EINVAL, "the id has a queue pair already", "create_qp", hint="destroy_qp()")
        attr = init_attr if init_attr is not None else _default_attr(self.qp_type, context.backend.attr)
        if pd is None:
            pd = (attr.pd if isinstance(attr, QPInitAttrEx) else None) or self._pd or _default_pd(context)
        if pd.context is not context and pd.context.backend is not context.backend:
            raise cm_error(errno.EINVAL, "the protection domain is of another device", "create_qp")
        if type(attr) is not QPInitAttr or type(attr.cap) is not QPCap:
            check_kind("init_attr", attr, QPInitAttr, "create_qp")
            check_kind("cap", attr.cap, QPCap, "create_qp")
        qp_type = attr.qp_type
        if qp_type is not self.qp_type:
            qp_type = member(QPType, qp_type, "qp_type", "create_qp")
        if qp_type is not self.qp_type:
            raise cm_error(
                errno.EINVAL, f"a queue pair of type {qp_type.name} on an id of {self.qp_type.name}", "create_qp"
            )
        for given, own in ((attr.scq, self._send_cq), (attr.rcq, self._recv_cq)):
            if given is not None and own is not None and given is not own:
                raise cm_error(errno.EINVAL, "the id has another completion queue", "create_qp")
        try:
            if qp_type is QPType.XRC_RECV:
                self._qp = _xrc_target(context, attr)
            else:
                if attr.srq is None and qp_type is not QPType.XRC_SEND:
                    attr.srq = self._srq
                if attr.scq is None or attr.rcq is None:
                    self._make_cqs(context, attr)
                self._send_cq = attr.scq
                if qp_type is not QPType.XRC_SEND:
                    self._recv_cq = attr.rcq
                self._qp = QPEx(pd, attr) if isinstance(attr, QPInitAttrEx) else QP(pd, attr)
            self._pd = pd
            self._backend.attach_qp(self._qp)
        except BaseException:
            self.destroy_qp()
            raise
        return self._qp

    def _make_cqs(self, context: Context, attr: QPInitAttr) -> None:
        """Make the completion queues that neither ``attr`` nor the id has."""
        attr.scq = attr.scq or self._send_cq
        if attr.scq is None:
            self._send_cq_channel, attr.scq = self._make_cq(context, attr.cap.max_send_wr)
        if attr.qp_type == QPType.XRC_SEND:
            return
        attr.rcq = attr.rcq or self._recv_cq
        if attr.rcq is None:
            size = attr.cap.max_recv_wr if attr.srq is None else attr.srq.query().max_wr
            self._recv_cq_channel, attr.rcq = self._make_cq(context, size)

    def _make_cq(self, context: Context, size: int) -> tuple[CompChannel, CQ]:
        channel = CompChannel(context)
        self._own_queues = channel, *self._own_queues
        cq = CQ(context, max(size, 1), channel, self)
        self._own_queues = cq, *self._own_queues
        return channel, cq

    def destroy_qp(self) -> None:
        """Close the queue pair and the completion queues that were created for it, rdma_destroy_qp(3)."""
        qp, self._qp = self._qp, None
        if qp is not None:
            if not self._closed:
                self._backend.attach_qp(None)
            qp.close()
        if self._own_queues:
            for queue in self._own_queues:  # each completion queue stands before its channel
                queue.close()
            self._send_cq = self._send_cq_channel = None
            if not self._srq_queues:
                self._recv_cq = self._recv_cq_channel = None
            self._own_queues = ()

    def create_srq(self, attr: SrqInitAttr | None = None, pd: PD | None = None) -> SRQ:
        """Create a shared receive queue, which the id's queue pair will use, rdma_create_srq(3).

        With a SrqInitAttrEx it is of that ``srq_type``, rdma_create_srq_ex(3); else of type XRC on an id of type
        XRC_RECV. The XRC domain of one of type XRC is that of ``attr``, else the one that all ids of the device share;
        its receives complete on the ``cq`` of ``attr``, else on :attr:`recv_cq`, which is created if there is none.
        """
        context = self._bound("create_srq")
        if self._srq is not None:
            raise cm_error(errno.EINVAL, "the id has a shared receive queue already", "create_srq")
        init = SrqInitAttr() if attr is None else attr
        check_kind("attr", init, SrqInitAttr, "create_srq")
        if not isinstance(init, SrqInitAttrEx) and self.qp_type is QPType.XRC_RECV:
            init = SrqInitAttrEx(init.attr, init.srq_context, srq_type=SRQType.XRC)
        if pd is None:
            pd = (init.pd if isinstance(init, SrqInitAttrEx) else None) or self.pd
        if isinstance(init, SrqInitAttrEx) and init.srq_type == SRQType.XRC:
            init.xrcd = init.xrcd or _default_xrcd(context)
            init.cq = init.cq or self._recv_cq
            if init.cq is None:
                channel = CompChannel(context)
                self._srq_queues = (channel,)
                self._recv_cq_channel = channel
                init.cq = CQ(context, max(init.attr.max_wr, 1), channel, self)
                self._srq_queues = init.cq, channel
            self._recv_cq = init.cq
        try:
            self._srq = SRQ(pd, init)
        except BaseException:
            self._close_srq_queues()
            raise
        return self._srq

    def _close_srq_queues(self) -> None:
        if self._srq_queues:
            for queue in self._srq_queues:  # the completion queue stands before its channel
                queue.close()
            self._srq_queues = ()
            self._recv_cq = self._recv_cq_channel = None

    def destroy_srq(self) -> None:
        """Close the shared receive queue, rdma_destroy_srq(3); EBUSY while a queue pair uses it."""
        if self._srq is not None:
            self._srq.close()
            self._srq = None
        self._close_srq_queues()

    def init_qp_attr(self, qp_state: int) -> tuple[QPAttr, QPAttrMask]:
        """The attributes that a queue pair of the user's own needs to get to a :class:`QPState`, rdma_init_qp_attr(3).

        EINVAL: no such state, the id is unbound, or what the peer sends is not known yet.
        """
        self._check_alive("init_qp_attr")
        return self._backend.init_qp_attr(member(QPState, qp_state, "qp_state", "init_qp_attr"))

    # -- memory ---------------------------------------------------------------------------------------

    def reg_msgs(self, buffer: Buffer) -> MR:
        """Register a writable buffer for messages, rdma_reg_msgs(3). Nothing is copied."""
        self._check_alive("reg_msgs")
        return MR(self.pd, buffer, AccessFlag.LOCAL_WRITE)

    def reg_read(self, buffer: Buffer) -> MR:
        """Register a writable buffer that the peer may read, rdma_reg_read(3)."""
        self._check_alive("reg_read")
        return MR(self.pd, buffer, AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_READ)

    def reg_write(self, buffer: Buffer) -> MR:
        """Register a writable buffer that the peer may write, rdma_reg_write(3)."""
        self._check_alive("reg_write")
        return MR(self.pd, buffer, AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE)

    # -- work requests --------------------------------------------------------------------------------
    #
    # ``context`` comes back as ``wc.wr_id``; ``flags`` are of SendFlag; ``length`` None is up to the region's end.
    # EINVAL without a queue pair, and as QP.post_send() and QP.post_recv() raise it. ENXIO once the id is destroyed.

    def post_recv(self, context: int, mr: MR, offset: int = 0, length: int | None = None) -> None:
        """Queue a receive into part of a region, rdma_post_recv(3)."""
        core = None if self._qp is None else self._qp.backend.core
        if core is not None and core.post_recv_part(context, mr, offset, length):
            return
        element = mr.sge(offset, length)
        queue = self._srq or self._qp or self._need_qp("post_recv")
        queue.post_recv(RecvWR(context, [element]))

    def post_recvv(self, context: int, sgl: Sequence[SGE]) -> None:
        """Queue a receive into several elements, rdma_post_recvv(3)."""
        queue = self._srq or self._qp or self._need_qp("post_recv")
        queue.post_recv(RecvWR(context, sgl))

    def post_send(
        self, context: int, data: MR | Buffer, offset: int = 0, length: int | None = None, flags: int = 0
    ) -> None:
        """Queue a send of part of a region, or with ``SendFlag.INLINE`` of any bytes, rdma_post_send(3)."""
        qp = self._qp or self._need_qp("post_send")
        core = qp.backend.core
        if core is None or not core.post_part(context, _SEND, data, offset, length, flags, 0, 0):
            qp.post_send(SendWR(context, _SEND, [_element(data, offset, length)], flags))

    def post_sendv(self, context: int, sgl: Sequence[SGE | Buffer], flags: int = 0) -> None:
        """Queue a send of several elements, rdma_post_sendv(3)."""
        qp = self._qp or self._need_qp("post_send")
        qp.post_send(SendWR(context, _SEND, sgl, flags))

    def post_read(
        self,
        context: int,
        mr: MR,
        remote_addr: int,
        rkey: int,
        offset: int = 0,
        length: int | None = None,
        flags: int = 0,
    ) -> None:
        """Queue an RDMA READ into part of a region, rdma_post_read(3)."""
        core = None if self._qp is None else self._qp.backend.core
        if core is None or not core.post_part(context, _READ, mr, offset, length, flags, remote_addr, rkey):
            self.post_readv(context, [mr.sge(offset, length)], remote_addr, rkey, flags)

    def post_readv(self, context: int, sgl: Sequence[SGE], remote_addr: int, rkey: int, flags: int = 0) -> None:
        """Queue an RDMA READ into several elements, rdma_post_readv(3)."""
        self._post_rdma(WROpcode.RDMA_READ, context, sgl, remote_addr, rkey, flags)

    def post_write(
        self,
        context: int,
        data: MR | Buffer,
        remote_addr: int,
        rkey: int,
        offset: int = 0,
        length: int | None = None,
        flags: int = 0,
    ) -> None:
        """Queue an RDMA WRITE of part of a region, or with ``SendFlag.INLINE`` of any bytes, rdma_post_write(3)."""
        core = None if self._qp is None else self._qp.backend.core
        if core is None or not core.post_part(context, _WRITE, data, offset, length, flags, remote_addr, rkey):
            self.post_writev(context, [_element(data, offset, length)], remote_addr, rkey, flags)

    def post_writev(
        self, context: int, sgl: Sequence[SGE | Buffer], remote_addr: int, rkey: int, flags: int = 0
    ) -> None:
        """Queue an RDMA WRITE of several elements, rdma_post_writev(3)."""
        self._post_rdma(WROpcode.RDMA_WRITE, context, sgl, remote_addr, rkey, flags)

    def _post_rdma(
        self, opcode: WROpcode, context: int, sgl: Sequence[SGE | Buffer], remote_addr: int, rkey: int, flags: int
    ) -> None:
        qp = self._qp or self._need_qp("post_read" if opcode is WROpcode.RDMA_READ else "post_write")
        qp.post_send(SendWR(context, opcode, sgl, flags, remote_addr=remote_addr, rkey=rkey))

    def post_ud_send(
        self,
        context: int,
        data: MR | Buffer,
        ah: AH,
        remote_qpn: int,
        remote_qkey: int,
        offset: int = 0,
        length: int | None = None,
        flags: int = 0,
    ) -> None:
        """Queue a datagram, rdma_post_ud_send(3); C's helper always uses the Q_Key 0x01234567."""
        sgl = [_element(data, offset, length)]
        wr = SendWR(context, _SEND, sgl, flags, ah=ah, remote_qpn=remote_qpn, remote_qkey=remote_qkey)
        self._need_qp("post_ud_send").post_send(wr)

    def _need_qp(self, step: str) -> QP:
        if self._qp is None:
            self._check_alive(step)
            self._lacks("has no queue pair", step, "create_qp()")
        return self._qp

    # -- completions ----------------------------------------------------------------------------------

    def get_send_comp(self, timeout: float | None = None) -> WC:
        """Wait for the next completion of a send, rdma_get_send_comp(3); CmTimeoutError after ``timeout`` seconds."""
        return self._completion(self._send_cq, "get_send_comp", timeout)

    def get_recv_comp(self, timeout: float | None = None) -> WC:
        """Wait for the next completion of a receive, rdma_get_recv_comp(3), as :meth:`get_send_comp` does."""
        return self._completion(self._recv_cq, "get_recv_comp", timeout)

    def _completion(self, cq: CQ | None, step: str, timeout: float | None) -> WC:
        check_timeout(timeout)
        if cq is None or self._closed:
            self._check_alive(step)
            self._lacks(_NO_CQ, step, "create_qp()")
        try:
            while True:
                found = cq.poll(1)
                if found:
                    return found[0]
                if not cq.wait(timeout):
                    raise CmTimeoutError(errno.ETIMEDOUT, f"nothing completed within {timeout} s", step)
        except RdmaError:
            self._check_alive(step)  # another thread may have destroyed the id meanwhile
            raise


def _xrc_target(context: Context, attr: QPInitAttr) -> QP:
    """A queue pair of type XRC_RECV."""
    if isinstance(attr, QPInitAttrEx):
        attr.xrcd = attr.xrcd or _default_xrcd(context)
        return QPEx(context, attr)
    return QP(context, QPInitAttrEx(QPType.XRC_RECV, attr.qp_context, xrcd=_default_xrcd(context)))


def _default_attr(qp_type: QPType, device: DeviceAttr) -> QPInitAttr:
    attr = QPInitAttr(qp_type, sq_sig_all=True)
    attr.cap.max_send_wr = attr.cap.max_recv_wr = 16
    attr.cap.max_send_sge = attr.cap.max_recv_sge = 4
    attr.cap.max_inline_data = min(256, device.max_inline_data)
    return attr


def _element(data: MR | Buffer, offset: int, length: int | None) -> SGE | Buffer:
    if isinstance(data, MR):
        return data.sge(offset, length)
    if type(data) is bytes and not offset and length is None:
        return data
    try:
        view = byte_view(data)
    except BufferError:
        raise cm_error(errno.EINVAL, "the buffer is not contiguous", "post_send", hint="a copy of it") from None
    return view[offset:] if length is None else view[offset : offset + length]
