"""Work requests and completions, in the form in which devices and protocol engines exchange them.

Buffers are memoryviews; keys and addresses are numbers. A device checks the opcode and the local keys when a work
request is posted. :class:`Memory` checks the remote key of each access by a peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rdmacm.enums import AccessFlag, WCFlag, WCOpcode, WCStatus, WROpcode


class Memory(Protocol):
    """The registered memory that the peer of a queue pair may access."""

    def remote(self, rkey: int, address: int, length: int, access: AccessFlag) -> memoryview | None:
        """Return the ``length`` bytes at ``address``; None when the key, the range or the permission is wrong."""

    def permits(self, rkey: int, access: AccessFlag) -> bool:
        """Whether the whole region of a key may be accessed so; False when the key or the permission is wrong."""

    def invalidate(self, rkey: int) -> bool:
        """Invalidate a remote key, for SEND_WITH_INV of the peer and for LOCAL_INV.

        False for an unknown key, and for one that must stay valid.
        """

    def bind(self, bind: object) -> bool:
        """Bind a memory window as :attr:`SendWork.bind` says; False where the window or the region forbids it."""


@dataclass(slots=True)
class SendWork:
    """A work request of the send queue.

    Posting a :class:`rdmacm.verbs.wr.SendWR` copies it to such an object, because the user may change the original as
    soon as the call returns. The copy has buffers instead of local keys, and fields for the requester's progress.
    """

    #: Returned in the completion.
    wr_id: int
    opcode: WROpcode
    #: Local buffers: the source of SEND, WRITE and ATOMIC WRITE, the destination of READ and atomics.
    segments: Sequence[memoryview] = ()
    #: Whether success generates a completion. Failure always does.
    signaled: bool = True
    #: Whether the peer's completion is a solicited event.
    solicited: bool = False
    #: Whether the request starts only after earlier READs, atomics, FLUSHes and ATOMIC WRITEs have completed.
    fence: bool = False
    #: READ, WRITE, atomics, FLUSH and ATOMIC WRITE: virtual address and key of the peer's memory.
    remote_addr: int = 0
    rkey: int = 0
    #: Immediate data: the number whose four bytes are sent in network order.
    imm: int = 0
    #: Operand of an atomic: the value to compare with, or to add.
    compare_add: int = 0
    #: Operand of COMPARE & SWAP: the value to store.
    swap: int = 0
    #: The remote key that SEND_WITH_INV or LOCAL_INV invalidates.
    invalidate_rkey: int = 0
    #: BIND_MW: what to bind to what, for :meth:`Memory.bind`.
    bind: object = None
    #: FLUSH: bytes of the peer's memory, bits of ``PlacementType``, and a value of ``SelectivityLevel``.
    flush: tuple[int, int, int] = (0, 0, 0)
    #: XRC: the number of the peer's shared receive queue, 24 bits.
    remote_srqn: int = 0

    # The requester sets the following fields when it starts the request. An object is posted only once.
    #: Bytes of the message, of the response to a READ, or that a FLUSH names.
    length: int = field(init=False, repr=False, compare=False)
    #: PSN of the first and of the last packet. A READ uses as many PSNs as its response has packets.
    first_psn: int = field(init=False, repr=False, compare=False)
    last_psn: int = field(init=False, repr=False, compare=False)
    #: READ: number of bytes of the response that have arrived.
    received_bytes: int = field(init=False, repr=False, compare=False)
    #: READ, atomics, FLUSH and ATOMIC WRITE: number of packets of the response that have been requested.
    requested_packets: int = field(init=False, repr=False, compare=False)
    #: FLUSH: whether the last request had rxe's ICRC.
    had_icrc_twice: bool = field(init=False, repr=False, compare=False)


@dataclass(slots=True)
class RecvWork:
    """A work request of a receive queue."""

    #: Returned in the completion.
    wr_id: int
    #: The buffers for the message.
    segments: Sequence[memoryview] = ()
    #: The local keys of the buffers, for the device.
    lkeys: Sequence[int] = ()


@dataclass(slots=True)
class WC:
    """A work completion, ``struct ibv_wc`` (ibv_poll_cq(3)).

    After an error only ``wr_id``, ``status``, ``qp_num`` and ``vendor_err`` are meaningful.

    - ``wr_id``: the number that the work request was posted with.
    - ``status``: SUCCESS, or why the request failed.
    - ``opcode``: the operation.
    - ``byte_len``: number of bytes received or read. For a datagram this includes the 40 bytes of the GRH.
    - ``imm_data``: immediate data: its four bytes, in network order, as a number. None without immediate data.
    - ``invalidated_rkey``: the remote key that the peer has invalidated, or None.
    - ``solicited``: whether the completion is a solicited event.
    - ``qp_num``: the number of the queue pair, 24 bits.
    - ``src_qp``: datagrams: the sender's queue pair number.
    - ``has_grh``: datagrams: whether the first 40 bytes of the buffer are a GRH.
    - ``vendor_err``: the vendor's code of an error; 0 from the software devices.
    """

    wr_id: int
    status: WCStatus
    opcode: WCOpcode
    byte_len: int = 0
    imm_data: int | None = None
    invalidated_rkey: int | None = None
    solicited: bool = False
    qp_num: int = 0
    src_qp: int = 0
    has_grh: bool = False
    vendor_err: int = 0

    @property
    def pkey_index(self) -> int:
        """Datagrams: the row of the P_Key table. The software devices have one row, 0."""
        return 0

    @property
    def slid(self) -> int:
        """Datagrams on InfiniBand: the sender's LID. On Ethernet this and the next two are 0."""
        return 0

    @property
    def sl(self) -> int:
        """Datagrams on InfiniBand: the service level."""
        return 0

    @property
    def dlid_path_bits(self) -> int:
        """Datagrams on InfiniBand: the low bits of the destination's LID."""
        return 0

    @property
    def wc_flags(self) -> WCFlag:
        """``ibv_wc.wc_flags``, from the fields above."""
        return (
            (WCFlag.GRH if self.has_grh else WCFlag(0))
            | (WCFlag.WITH_IMM if self.imm_data is not None else WCFlag(0))
            | (WCFlag.WITH_INV if self.invalidated_rkey is not None else WCFlag(0))
        )
