"""Work requests: ``struct ibv_send_wr``, ``ibv_recv_wr``, ``ibv_sge``, as pyverbs names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from rdmacm.verbs.attr import AHAttr
from rdmacm.verbs.enums import SendFlag, WROpcode

__all__ = ["SGE", "AddressHandle", "Buffer", "RecvWR", "SendWR"]

Buffer: TypeAlias = bytes | bytearray | memoryview


class AddressHandle(Protocol):
    """What a datagram's request says of its destination: an :class:`~rdmacm.verbs.ah.AH`, as a device sees it."""

    @property
    def attr(self) -> AHAttr:
        """The address vector."""


class SGE:
    """One piece of registered memory: ``length`` bytes at ``addr`` of the region with ``lkey``."""

    __slots__ = ("addr", "length", "lkey")

    def __init__(self, addr: int, length: int, lkey: int) -> None:
        self.addr = addr
        self.length = length
        self.lkey = lkey

    def __repr__(self) -> str:
        return f"SGE(addr=0x{self.addr:x}, length={self.length}, lkey=0x{self.lkey:x})"


class SendWR:
    """A send work request, ``struct ibv_send_wr``.

    ``sg``: :class:`SGE` s, gathered from (or, for READ and atomics, scattered to). With ``SendFlag.INLINE`` they may
    also be plain buffers, which need no registration and may be used again at once. ``imm_data`` is a number, sent
    in network order. ``remote_addr`` and ``rkey`` say what an RDMA operation or an atomic touches; ``compare_add``
    and ``swap`` are the operands of atomics; ``invalidate_rkey`` is for SEND_WITH_INV; ``ah``, ``remote_qpn`` and
    ``remote_qkey`` are for datagrams.
    """

    __slots__ = (
        "ah",
        "compare_add",
        "imm_data",
        "invalidate_rkey",
        "opcode",
        "remote_addr",
        "remote_qkey",
        "remote_qpn",
        "rkey",
        "send_flags",
        "sg",
        "swap",
        "wr_id",
    )

    def __init__(
        self,
        wr_id: int = 0,
        opcode: WROpcode = WROpcode.SEND,
        sg: Sequence[SGE | Buffer] = (),
        send_flags: int = SendFlag.SIGNALED,
        *,
        imm_data: int = 0,
        remote_addr: int = 0,
        rkey: int = 0,
        compare_add: int = 0,
        swap: int = 0,
        invalidate_rkey: int = 0,
        ah: AddressHandle | None = None,
        remote_qpn: int = 0,
        remote_qkey: int = 0,
    ) -> None:
        self.wr_id = wr_id
        self.opcode = opcode
        self.sg = sg
        self.send_flags = send_flags
        self.imm_data = imm_data
        self.remote_addr = remote_addr
        self.rkey = rkey
        self.compare_add = compare_add
        self.swap = swap
        self.invalidate_rkey = invalidate_rkey
        self.ah = ah
        self.remote_qpn = remote_qpn
        self.remote_qkey = remote_qkey

    def set_wr_rdma(self, rkey: int, addr: int) -> None:
        """What an RDMA READ or WRITE touches."""
        self.rkey, self.remote_addr = rkey, addr

    def set_wr_atomic(self, rkey: int, addr: int, compare_add: int, swap: int = 0) -> None:
        """What an atomic touches, and its operands."""
        self.rkey, self.remote_addr, self.compare_add, self.swap = rkey, addr, compare_add, swap

    def set_wr_ud(self, ah: AddressHandle, rqpn: int, rqkey: int) -> None:
        """Where a datagram goes."""
        self.ah, self.remote_qpn, self.remote_qkey = ah, rqpn, rqkey


class RecvWR:
    """A receive work request, ``struct ibv_recv_wr``: where a message is scattered to."""

    __slots__ = ("sg", "wr_id")

    def __init__(self, wr_id: int = 0, sg: Sequence[SGE] = ()) -> None:
        self.wr_id = wr_id
        self.sg = sg
