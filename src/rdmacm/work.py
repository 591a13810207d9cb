"""Work requests and completions as devices and protocol engines exchange them, on every wire.

Buffers are memoryviews; keys and addresses are numbers. A device has checked the opcode and the local keys before it
makes a work request. Remote keys are checked by :class:`Memory` whenever a peer touches memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rdmacm.enums import AccessFlag, WCFlag, WCOpcode, WCStatus, WROpcode

__all__ = ["WC", "Memory", "RecvWork", "SendWork"]


class Memory(Protocol):
    """The registered memory that a queue pair's peer may touch."""

    def remote(self, rkey: int, address: int, length: int, access: AccessFlag) -> memoryview | None:
        """Return the ``length`` bytes at ``address``, or None if the key, the range or the permission is wrong."""

    def invalidate(self, rkey: int) -> bool:
        """Revoke a remote key, as SEND with invalidate asks. False if there is no such key or it may not be revoked."""


@dataclass(slots=True)
class SendWork:
    """A work request of the send queue.

    It is not the user's :class:`rdmacm.verbs.wr.SendWR` because a post copies: the user may change that one at once,
    while this one has the buffers its keys stood for, and the requester's progress.
    """

    #: Returned in the completion.
    wr_id: int
    opcode: WROpcode
    #: SEND and WRITE gather from these buffers; READ and atomics scatter to them.
    segments: Sequence[memoryview] = ()
    #: Whether success yields a completion. Failure always does.
    signaled: bool = True
    #: Whether the peer's completion is a solicited event.
    solicited: bool = False
    #: Whether to wait until earlier READs and atomics are complete.
    fence: bool = False
    #: First byte of the peer's memory that an RDMA operation or atomic touches.
    remote_addr: int = 0
    rkey: int = 0
    #: Immediate data: four bytes as a number in network order.
    imm: int = 0
    #: Operand of an atomic: the value to compare with, or to add.
    compare_add: int = 0
    #: Operand of COMPARE & SWAP: the value to store.
    swap: int = 0
    #: The remote key that SEND_WITH_INV revokes.
    invalidate_rkey: int = 0

    # The requester sets the rest when it begins with the request; an object is posted once.
    #: Bytes of the message, or of a READ's response.
    length: int = field(init=False, repr=False, compare=False)
    #: PSN of the first and of the last packet. A READ spans the PSNs of its response.
    first_psn: int = field(init=False, repr=False, compare=False)
    last_psn: int = field(init=False, repr=False, compare=False)
    #: READ: bytes of the response that have arrived.
    received_bytes: int = field(init=False, repr=False, compare=False)
    #: READ and atomics: packets of the response that have been requested, from the first on.
    requested_packets: int = field(init=False, repr=False, compare=False)


@dataclass(slots=True)
class RecvWork:
    """A work request of a receive queue: the message is scattered to ``segments``."""

    #: Returned in the completion.
    wr_id: int
    segments: Sequence[memoryview] = ()


@dataclass(slots=True)
class WC:
    """A work completion, ``struct ibv_wc``.

    After an error only ``wr_id``, ``status``, ``qp_num`` and ``vendor_err`` are meaningful.
    """

    wr_id: int
    status: WCStatus
    opcode: WCOpcode
    #: Bytes received or read. For a datagram this includes the 40 bytes of its GRH.
    byte_len: int = 0
    #: Immediate data as a number, from network order; None if there was none.
    imm_data: int | None = None
    #: The remote key the peer revoked; None if it revoked none.
    invalidated_rkey: int | None = None
    solicited: bool = False
    qp_num: int = 0
    #: Datagrams: the sender's queue pair number.
    src_qp: int = 0
    #: Datagrams: whether the first 40 bytes of the buffer are a GRH.
    has_grh: bool = False
    vendor_err: int = 0

    @property
    def wc_flags(self) -> WCFlag:
        """``ibv_wc.wc_flags``, from the fields above."""
        return (
            (WCFlag.GRH if self.has_grh else WCFlag(0))
            | (WCFlag.WITH_IMM if self.imm_data is not None else WCFlag(0))
            | (WCFlag.WITH_INV if self.invalidated_rkey is not None else WCFlag(0))
        )
