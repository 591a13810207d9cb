"""Work requests: ``struct ibv_send_wr``, ``ibv_recv_wr``, ``ibv_sge``, with pyverbs' names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Protocol

from rdmacm.verbs.attr import AHAttr
from rdmacm.verbs.buffers import Buffer
from rdmacm.verbs.enums import SendFlag, WROpcode


class AddressHandle(Protocol):
    """The destination of a datagram, as a device sees it; :class:`rdmacm.verbs.AH` is it."""

    @property
    def attr(self) -> AHAttr:
        """The address vector."""


class MemoryRegion(Protocol):
    """The region of a bind, as a device sees it; :class:`rdmacm.verbs.MR` is it."""

    @property
    def backend(self) -> Any:
        """The provider's object."""


class MemoryWindow(Protocol):
    """The window of a bind, as a device sees it; :class:`rdmacm.verbs.MW` is it."""

    @property
    def backend(self) -> Any:
        """The provider's object."""

    @property
    def rkey(self) -> int:
        """Its key, 32 bits."""


def inc_rkey(rkey: int) -> int:
    """The key with its lower 8 bits one greater, ibv_inc_rkey(3): one that a window may be bound with next."""
    return rkey & 0xFFFFFF00 | rkey + 1 & 0xFF


@dataclass(slots=True)
class MWBindInfo:
    """``struct ibv_mw_bind_info``, ibv_bind_mw(3): what a memory window is bound to.

    - ``mr``: the region, which allows MW_BIND; None, or any region, where ``length`` is 0.
    - ``addr``: the address of the window's first byte, 64 bits: ``mr.addr``, or more.
    - ``length``: its length in bytes; 0 takes its region away from a window of type 1.
    - ``mw_access_flags``: an :class:`AccessFlag`: what the peer may do. REMOTE_WRITE and REMOTE_ATOMIC require
      LOCAL_WRITE of the region. With ZERO_BASED, of type 2 only, the peer's addresses count from the window's start.
    """

    mr: MemoryRegion | None
    addr: int
    length: int
    mw_access_flags: int


@dataclass(slots=True)
class MWBind:
    """``struct ibv_mw_bind``, ibv_bind_mw(3): a work request for :meth:`QP.bind_mw`.

    - ``bind_info``: what to bind the window to.
    - ``send_flags``: a :class:`SendFlag`: FENCE, SIGNALED.
    - ``wr_id``: the user's number: comes back as ``wc.wr_id``.
    """

    bind_info: MWBindInfo
    send_flags: int = 0
    wr_id: int = 0


class SGE:
    """A scatter/gather element, ``struct ibv_sge``: ``length`` bytes at ``addr``, in the region with ``lkey``."""

    __slots__ = ("addr", "length", "lkey")

    def __init__(self, addr: int, length: int, lkey: int) -> None:
        self.addr: int = addr
        self.length: int = length
        self.lkey: int = lkey

    def __repr__(self) -> str:
        return f"SGE(addr=0x{self.addr:x}, length={self.length}, lkey=0x{self.lkey:x})"


@dataclass(slots=True, eq=False, repr=False)
class SendWR:
    """A send work request, ``struct ibv_send_wr``. C's field name is given where it differs.

    Attributes:

    - ``wr_id``: the user's number: comes back as ``wc.wr_id``.
    - ``opcode``: the operation.
    - ``sg``: ``sg_list``: the memory to send from, or for READ and atomics the memory to write to. With
      ``SendFlag.INLINE`` also plain buffers, which need no registration and may be changed at once. 8 bytes for atomics
      and ATOMIC_WRITE, none for FLUSH.
    - ``send_flags``: a :class:`~rdmacm.verbs.SendFlag`.
    - ``imm_data``: the immediate data, 32 bits, as a number; C has it in network order.
    - ``remote_addr``, ``rkey``: ``wr.rdma`` and ``wr.atomic``: the peer's memory, an address of 64 bits and its key of
      32 bits. FLUSH and ATOMIC_WRITE use them as well; C has these two in ibv_wr_post(3) only.
    - ``compare_add``, ``swap``: ``wr.atomic``: the operands, 64 bits each.
    - ``invalidate_rkey``: the key that SEND_WITH_INV revokes at the peer, and LOCAL_INV on this side, 32 bits.
    - ``mw``, ``bind_info``: ``bind_mw``: the window that BIND_MW binds, and to what. ``rkey`` is the window's new key:
      its present one with other lower 8 bits (:func:`inc_rkey`).
    - ``flush_length``, ``flush_type``, ``flush_level``: ``len``, ``type`` and ``level`` of ibv_wr_flush(): how many
      bytes of the peer's memory, 0 to 2**31, the :class:`~rdmacm.verbs.PlacementType` and the
      :class:`~rdmacm.verbs.SelectivityLevel`.
    - ``ah``, ``remote_qpn``, ``remote_qkey``: ``wr.ud``: a datagram's destination, with its queue pair number (24 bits)
      and Q_Key (32 bits).
    - ``remote_srqn``: ``qp_type.xrc``: XRC_SEND: the number of the peer's shared receive queue (24 bits).
    """

    wr_id: int = 0
    opcode: WROpcode = WROpcode.SEND
    sg: Sequence[SGE | Buffer] = ()
    send_flags: int = SendFlag.SIGNALED
    _: KW_ONLY
    imm_data: int = 0
    remote_addr: int = 0
    rkey: int = 0
    compare_add: int = 0
    swap: int = 0
    invalidate_rkey: int = 0
    flush_length: int = 0
    flush_type: int = 0
    flush_level: int = 0
    ah: AddressHandle | None = None
    remote_qpn: int = 0
    remote_qkey: int = 0
    mw: MemoryWindow | None = None
    bind_info: MWBindInfo | None = None
    remote_srqn: int = 0

    def set_wr_rdma(self, rkey: int, addr: int) -> None:
        """Set the peer's memory of an RDMA READ or WRITE."""
        self.rkey, self.remote_addr = rkey, addr

    def set_wr_atomic(self, rkey: int, addr: int, compare_add: int, swap: int = 0) -> None:
        """Set the peer's memory of an atomic, and its operands."""
        self.rkey, self.remote_addr, self.compare_add, self.swap = rkey, addr, compare_add, swap

    def set_wr_flush(self, rkey: int, addr: int, length: int, type: int, level: int) -> None:
        """Set the peer's memory of a FLUSH, its placement type and selectivity level; the order is ibv_wr_flush()'s."""
        self.rkey, self.remote_addr = rkey, addr
        self.flush_length, self.flush_type, self.flush_level = length, type, level

    def set_wr_ud(self, ah: AddressHandle, rqpn: int, rqkey: int) -> None:
        """Set the destination of a datagram."""
        self.ah, self.remote_qpn, self.remote_qkey = ah, rqpn, rqkey

    def set_qp_type_xrc(self, remote_srqn: int) -> None:
        """Set the number of the peer's shared receive queue, on a queue pair of type XRC_SEND."""
        self.remote_srqn = remote_srqn

    def set_bind_wr(self, mw: MemoryWindow, bind_info: MWBindInfo, rkey: int | None = None) -> None:
        """Set the window to bind, what to bind it to, and its new key; None for the next one (:func:`inc_rkey`)."""
        self.mw, self.bind_info = mw, bind_info
        self.rkey = inc_rkey(mw.rkey) if rkey is None else rkey


class RecvWR:
    """A receive work request, ``struct ibv_recv_wr``.

    Attributes:

    - ``wr_id``: the user's number: comes back as ``wc.wr_id``.
    - ``sg``: ``sg_list``: the memory that the message is written to.
    """

    __slots__ = ("sg", "wr_id")

    def __init__(self, wr_id: int = 0, sg: Sequence[SGE] = ()) -> None:
        self.wr_id: int = wr_id
        self.sg: Sequence[SGE] = sg
