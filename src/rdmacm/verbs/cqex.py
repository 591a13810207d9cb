"""Extended completion queues: ibv_create_cq_ex(3), which read one completion after the other, field by field.

::

    if cq.start_poll() == 0:
        while True:
            print(cq.wr_id, cq.status, cq.read_opcode())
            if cq.next_poll() != 0:
                break
        cq.end_poll()
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from rdmacm.capabilities import Feature, absent
from rdmacm.errors import cm_error
from rdmacm.verbs.checks import check_kind, flags
from rdmacm.verbs.cq import CQ, CompChannel
from rdmacm.verbs.device import Context
from rdmacm.verbs.enums import WC, CqAttrFlag, CqInitAttrMask, CqWcFlag, WCFlag, WCOpcode, WCStatus

_SUPPORTED = CqWcFlag.STANDARD


@dataclass(slots=True)
class CqInitAttrEx:
    """``struct ibv_cq_init_attr_ex``, ibv_create_cq_ex(3).

    - ``cqe``: completions that the queue has room for.
    - ``channel``: where it reports once it is armed, or None.
    - ``comp_vector``: the completion vector that signals its events.
    - ``wc_flags``: a :class:`CqWcFlag`: the fields of completions that are read.
    - ``comp_mask``: a :class:`CqInitAttrMask`: whether ``flags`` counts. There are no parent domains: PD is EOPNOTSUPP.
    - ``flags``: a :class:`CqAttrFlag`. SINGLE_THREADED changes nothing here; IGNORE_OVERRUN is EOPNOTSUPP.
    - ``cq_context``: the user's own object.
    """

    cqe: int = 100
    channel: CompChannel | None = None
    comp_vector: int = 0
    wc_flags: int = 0
    comp_mask: int = 0
    flags: int = 0
    cq_context: object = None


@dataclass(slots=True)
class PollCqAttr:
    """``struct ibv_poll_cq_attr``: the argument of :meth:`CQEX.start_poll`, without effect.

    - ``comp_mask``: 0; other values are EINVAL.
    """

    comp_mask: int = 0


class CQEX(CQ):
    """An extended completion queue, ``struct ibv_cq_ex``: a :class:`CQ` that also reads completions field by field.

    EOPNOTSUPP: fields, flags or attributes that the software devices lack, such as time stamps; :class:`CQ` has the
    other errors.

    From :meth:`start_poll` to :meth:`end_poll` there is a current completion, unless the last of these calls returned
    ENOENT. A field without one, or that ``wc_flags`` does not name, raises EINVAL. Completions are taken as they
    become the current one. One thread polls at a time: C makes others wait in ``start_poll``, where they get EBUSY
    here.
    """

    __slots__ = {
        "_current": "The current completion, or None.",
        "_is_polling": "Whether start_poll() has succeeded, and end_poll() was not called.",
        "_fields": "The fields that may be read, a mask.",
    }

    def __init__(self, context: Context, init_attr: CqInitAttrEx | None = None) -> None:
        self._closed = True
        init = CqInitAttrEx() if init_attr is None else init_attr
        check_kind("init_attr", init, CqInitAttrEx, "create_cq")
        fields = flags(CqWcFlag, init.wc_flags, "wc_flags", "create_cq")
        mask = flags(CqInitAttrMask, init.comp_mask, "comp_mask", "create_cq")
        if fields & ~_SUPPORTED:
            raise absent(Feature.COMPLETION_FIELDS, "create_cq", why=repr(fields & ~_SUPPORTED))
        if mask & CqInitAttrMask.PD:
            raise absent(Feature.PARENT_DOMAINS, "create_cq")
        if mask & CqInitAttrMask.FLAGS:
            asked = flags(CqAttrFlag, init.flags, "flags", "create_cq")
            if asked & CqAttrFlag.IGNORE_OVERRUN:
                raise absent(Feature.IGNORED_OVERRUN, "create_cq")
        self._fields = int(fields)
        self._current: WC | None = None
        self._is_polling = False
        super().__init__(context, init.cqe, init.channel, init.cq_context, init.comp_vector)

    # -- polling --------------------------------------------------------------------------------------

    def start_poll(self, attr: PollCqAttr | None = None) -> int:
        """Take the first completion, ibv_start_poll(3): 0, or ENOENT if there is none.

        Only after 0 there is something to end by :meth:`end_poll`. EBUSY: polling has started already; EOVERFLOW: as
        for :meth:`CQ.poll`.
        """
        if self._is_polling:
            raise cm_error(errno.EBUSY, "polling has started", "start_poll", hint="end_poll()")
        if attr is not None and attr.comp_mask:
            raise cm_error(errno.EINVAL, f"comp_mask is {attr.comp_mask!r}", "start_poll", hint="0")
        self._is_polling = self._take() == 0
        return 0 if self._is_polling else errno.ENOENT

    def next_poll(self) -> int:
        """Take the next completion, ibv_next_poll(3): 0, or ENOENT if there is none. EINVAL: polling has not started.

        EOVERFLOW: as for :meth:`CQ.poll`; polling is then still to be ended.
        """
        self._check_polling("next_poll")
        return self._take()

    def poll_next(self) -> int:
        """:meth:`next_poll`, with pyverbs' name."""
        return self.next_poll()

    def end_poll(self) -> None:
        """End polling, ibv_end_poll(3). EINVAL: it has not started."""
        self._check_polling("end_poll")
        self._is_polling = False
        self._current = None

    def _take(self) -> int:
        self._current = None
        found = self.poll(1)
        if not found:
            return errno.ENOENT
        self._current = found[0]
        return 0

    def _check_polling(self, step: str) -> None:
        if not self._is_polling:
            raise cm_error(errno.EINVAL, "polling has not started", step, hint="start_poll()")

    # -- the current completion -----------------------------------------------------------------------

    @property
    def wr_id(self) -> int:
        """The number that the work request was posted with."""
        return self._read("wr_id").wr_id

    @property
    def status(self) -> WCStatus:
        """SUCCESS, or why the request failed."""
        return self._read("status").status

    def read_opcode(self) -> WCOpcode:
        """The operation."""
        return self._read("read_opcode").opcode

    def read_vendor_err(self) -> int:
        """The vendor's code of an error; 0 from the software devices."""
        return self._read("read_vendor_err").vendor_err

    def read_wc_flags(self) -> WCFlag:
        """Which fields are valid: a :class:`WCFlag`."""
        return self._read("read_wc_flags").wc_flags

    def read_byte_len(self) -> int:
        """Number of bytes received or read (BYTE_LEN)."""
        return self._read("read_byte_len", CqWcFlag.BYTE_LEN).byte_len

    def read_imm_data(self) -> int:
        """Immediate data as a number, 0 without them (IMM)."""
        return self._read("read_imm_data", CqWcFlag.IMM).imm_data or 0

    def read_invalidated_rkey(self) -> int:
        """The remote key that the peer has invalidated, or 0 (IMM)."""
        return self._read("read_invalidated_rkey", CqWcFlag.IMM).invalidated_rkey or 0

    def read_qp_num(self) -> int:
        """The number of the queue pair (QP_NUM)."""
        return self._read("read_qp_num", CqWcFlag.QP_NUM).qp_num

    def read_src_qp(self) -> int:
        """Datagrams: the sender's queue pair number (SRC_QP)."""
        return self._read("read_src_qp", CqWcFlag.SRC_QP).src_qp

    def read_slid(self) -> int:
        """Datagrams on InfiniBand: the sender's LID (SLID)."""
        return self._read("read_slid", CqWcFlag.SLID).slid

    def read_sl(self) -> int:
        """Datagrams on InfiniBand: the service level (SL)."""
        return self._read("read_sl", CqWcFlag.SL).sl

    def read_dlid_path_bits(self) -> int:
        """Datagrams on InfiniBand: the low bits of the destination's LID (DLID_PATH_BITS)."""
        return self._read("read_dlid_path_bits", CqWcFlag.DLID_PATH_BITS).dlid_path_bits

    def _read(self, step: str, field: int = 0) -> WC:
        current = self._current
        if current is None:
            raise cm_error(errno.EINVAL, "there is no current completion", step, hint="start_poll() or next_poll()")
        if field & ~self._fields:
            raise cm_error(errno.EINVAL, f"wc_flags lacks {CqWcFlag(field)!r}", step, hint="CqInitAttrEx(wc_flags=...)")
        return current
