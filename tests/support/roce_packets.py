"""RoCEv2 packets as dataclasses, which name and check every field: what the tests compare the engines' packets with.

:class:`RocePacket` is everything between the UDP header and the invariant CRC (InfiniBand Architecture, chapter 9).

Reserved bits are fields here: the invariant CRC covers them, so a packet that is decoded and encoded again has to come
out the same.

``pack`` raises WireError for a field that does not fit its bits, ``unpack`` for too few bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TypeAlias

from rdmacm.address import DEFAULT_PKEY
from rdmacm.proto.constants import BTH_LENGTH, PSN_MASK, QPN_MASK, RNR_TIMER_SECONDS
from rdmacm.proto.roce.headers import (
    AETH_STRUCT,
    AETH_TYPES,
    ATOMIC_ACK_ETH_STRUCT,
    ATOMIC_ETH_STRUCT,
    BTH_STRUCT,
    FETH_STRUCT,
    RETH_STRUCT,
    XRCETH_STRUCT,
    AethType,
)
from rdmacm.proto.roce.opcodes import EXTENDED_HEADERS, EXTENDED_LENGTH, HEADER_LENGTH, ExtendedHeader
from rdmacm.proto.wire import Buffer, WireError

DETH_STRUCT = struct.Struct("!II")
IETH_STRUCT = struct.Struct("!I")


def _check(header: object, **bits: int) -> None:
    """Raise WireError unless each named field is a number that fits the given width in bits."""
    for name, width in bits.items():
        value = getattr(header, name)
        if not 0 <= value < 1 << width:
            raise WireError(f"{type(header).__name__}.{name} has {width} bits; {value:#x} does not fit")


def _check_length(data: Buffer, size: int, what: str) -> None:
    if len(data) < size:
        raise WireError(f"{what} has {size} bytes, not {len(data)}")


def pad_count(length: int) -> int:
    """PadCnt of a payload: the bytes that pad ``length`` to a multiple of four."""
    return -length & 3


@dataclass(frozen=True, slots=True)
class BTH:
    """Base transport header, 12 bytes (InfiniBand Architecture 9.2).

    ``se`` is the solicited event bit, ``migreq`` the migration request, ``pad_cnt`` the number of pad bytes after
    the payload, ``tver`` the version (0); ``ack_req`` asks for an acknowledgement.
    """

    opcode: int
    dest_qpn: int
    psn: int
    ack_req: bool = False
    se: bool = False
    pad_cnt: int = 0
    pkey: int = DEFAULT_PKEY
    migreq: bool = False
    tver: int = 0
    fecn: bool = False
    becn: bool = False
    resv6: int = 0
    resv7: int = 0

    def pack(self) -> bytes:
        """The 12 bytes on the wire."""
        _check(self, opcode=8, dest_qpn=24, psn=24, pad_cnt=2, pkey=16, tver=4, resv6=6, resv7=7)
        return BTH_STRUCT.pack(
            self.opcode,
            bool(self.se) << 7 | bool(self.migreq) << 6 | self.pad_cnt << 4 | self.tver,
            self.pkey,
            bool(self.fecn) << 31 | bool(self.becn) << 30 | self.resv6 << 24 | self.dest_qpn,
            bool(self.ack_req) << 31 | self.resv7 << 24 | self.psn,
        )

    @classmethod
    def unpack(cls, data: Buffer) -> BTH:
        """The header at the start of ``data``, with any opcode."""
        _check_length(data, BTH_LENGTH, "BTH")
        opcode, flags, pkey, qpn, psn = BTH_STRUCT.unpack_from(data)
        return cls(
            opcode=opcode,
            dest_qpn=qpn & QPN_MASK,
            psn=psn & PSN_MASK,
            ack_req=bool(psn >> 31),
            se=bool(flags & 0x80),
            pad_cnt=flags >> 4 & 3,
            pkey=pkey,
            migreq=bool(flags & 0x40),
            tver=flags & 0xF,
            fecn=bool(qpn >> 31),
            becn=bool(qpn >> 30 & 1),
            resv6=qpn >> 24 & 0x3F,
            resv7=psn >> 24 & 0x7F,
        )

    def replace(self, **changes: object) -> BTH:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class XRCETH:
    """XRC extended transport header, 4 bytes (InfiniBand Architecture, annex A14): a shared receive queue's number."""

    srqn: int
    resv8: int = 0

    def pack(self) -> bytes:
        """The 4 bytes on the wire."""
        _check(self, srqn=24, resv8=8)
        return XRCETH_STRUCT.pack(self.resv8 << 24 | self.srqn)

    @classmethod
    def unpack(cls, data: Buffer) -> XRCETH:
        """The header at the start of ``data``."""
        _check_length(data, 4, "XRCETH")
        (word,) = XRCETH_STRUCT.unpack_from(data)
        return cls(word & QPN_MASK, word >> 24)


@dataclass(frozen=True, slots=True)
class DETH:
    """Datagram extended transport header, 8 bytes (InfiniBand Architecture 9.3.2): Q_Key and source queue pair."""

    qkey: int
    src_qpn: int
    resv8: int = 0

    def pack(self) -> bytes:
        """The 8 bytes on the wire."""
        _check(self, qkey=32, src_qpn=24, resv8=8)
        return DETH_STRUCT.pack(self.qkey, self.resv8 << 24 | self.src_qpn)

    @classmethod
    def unpack(cls, data: Buffer) -> DETH:
        """The header at the start of ``data``."""
        _check_length(data, 8, "DETH")
        qkey, source = DETH_STRUCT.unpack_from(data)
        return cls(qkey, source & QPN_MASK, source >> 24)


@dataclass(frozen=True, slots=True)
class FETH:
    """FLUSH extended transport header, 4 bytes (InfiniBand Architecture, annex A19).

    ``sel`` is the selectivity level (:class:`rdmacm.enums.SelectivityLevel`), ``plt`` the placement type, bits of
    :class:`rdmacm.enums.PlacementType`. The other values of both are reserved.
    """

    sel: int
    plt: int
    resv26: int = 0

    def pack(self) -> bytes:
        """The 4 bytes on the wire."""
        _check(self, sel=2, plt=4, resv26=26)
        return FETH_STRUCT.pack(self.resv26 << 6 | self.sel << 4 | self.plt)

    @classmethod
    def unpack(cls, data: Buffer) -> FETH:
        """The header at the start of ``data``."""
        _check_length(data, 4, "FETH")
        (word,) = FETH_STRUCT.unpack_from(data)
        return cls(word >> 4 & 3, word & 0xF, word >> 6)


@dataclass(frozen=True, slots=True)
class RETH:
    """RDMA extended transport header, 16 bytes (InfiniBand Architecture 9.3.3).

    ``dma_length`` is the length of the whole message, not of the packet.
    """

    virtual_address: int
    rkey: int
    dma_length: int

    def pack(self) -> bytes:
        """The 16 bytes on the wire."""
        _check(self, virtual_address=64, rkey=32, dma_length=32)
        return RETH_STRUCT.pack(self.virtual_address, self.rkey, self.dma_length)

    @classmethod
    def unpack(cls, data: Buffer) -> RETH:
        """The header at the start of ``data``."""
        _check_length(data, 16, "RETH")
        return cls(*RETH_STRUCT.unpack_from(data))


@dataclass(frozen=True, slots=True)
class AtomicETH:
    """Atomic extended transport header, 28 bytes (InfiniBand Architecture 9.3.5).

    ``swap_add`` is the value that COMPARE & SWAP stores or FETCH & ADD adds; ``compare`` is the value that
    COMPARE & SWAP compares with.
    """

    virtual_address: int
    rkey: int
    swap_add: int
    compare: int = 0

    def pack(self) -> bytes:
        """The 28 bytes on the wire."""
        _check(self, virtual_address=64, rkey=32, swap_add=64, compare=64)
        return ATOMIC_ETH_STRUCT.pack(self.virtual_address, self.rkey, self.swap_add, self.compare)

    @classmethod
    def unpack(cls, data: Buffer) -> AtomicETH:
        """The header at the start of ``data``."""
        _check_length(data, 28, "AtomicETH")
        return cls(*ATOMIC_ETH_STRUCT.unpack_from(data))


class NakCode(IntEnum):
    """Why a request was refused, bits 4-0 of the syndrome of a NAK (InfiniBand Architecture, table 58)."""

    PSN_SEQUENCE_ERROR = 0
    INVALID_REQUEST = 1
    REMOTE_ACCESS_ERROR = 2
    REMOTE_OPERATIONAL_ERROR = 3
    INVALID_RD_REQUEST = 4


_NAK_CODES = tuple(NakCode)

#: The credit code of a responder that does not count credits.
CREDITS_NOT_USED = 0x1F
#: Receive work requests a credit code 0..30 stands for (InfiniBand Architecture, table 59).
CREDITS = (
    *(0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
    *(1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768),
)


@dataclass(frozen=True, slots=True)
class AETH:
    """Acknowledge extended transport header, 4 bytes (InfiniBand Architecture 9.7.5).

    ``syndrome``, 8 bits: the type and its value. ``msn``, 24 bits: the messages that the responder has executed.
    """

    syndrome: int
    msn: int

    @classmethod
    def ack(cls, msn: int, credit_count: int = CREDITS_NOT_USED) -> AETH:
        """An acknowledgement, by default without credits."""
        return cls(credit_count, msn)

    @classmethod
    def rnr_nak(cls, timer: int, msn: int) -> AETH:
        """Receiver not ready: try again after the time that the code ``timer`` stands for."""
        return cls(AethType.RNR_NAK << 5 | timer, msn)

    @classmethod
    def nak(cls, code: NakCode, msn: int) -> AETH:
        """A refusal."""
        return cls(AethType.NAK << 5 | code, msn)

    @property
    def type(self) -> AethType:
        """The type of acknowledgement; RESERVED for syndromes without a meaning."""
        return AETH_TYPES[self.syndrome >> 5]

    @property
    def value(self) -> int:
        """The low five bits: a credit count code, timer code or NAK code, depending on the type."""
        return self.syndrome & 0x1F

    @property
    def nak_code(self) -> NakCode | None:
        """The NAK code; None for other types and for unknown codes."""
        if self.type is not AethType.NAK or self.value >= len(_NAK_CODES):
            return None
        return _NAK_CODES[self.value]

    @property
    def rnr_seconds(self) -> float | None:
        """Seconds to wait before trying again; None unless it is an RNR NAK."""
        return RNR_TIMER_SECONDS[self.value] if self.type is AethType.RNR_NAK else None

    @property
    def credits(self) -> int | None:
        """Receives that the responder has posted; None if it does not count them, or for other types."""
        if self.type is not AethType.ACK or self.value == CREDITS_NOT_USED:
            return None
        return CREDITS[self.value]

    def pack(self) -> bytes:
        """The 4 bytes on the wire."""
        _check(self, syndrome=8, msn=24)
        return AETH_STRUCT.pack(self.syndrome << 24 | self.msn)

    @classmethod
    def unpack(cls, data: Buffer) -> AETH:
        """The header at the start of ``data``."""
        _check_length(data, 4, "AETH")
        (word,) = AETH_STRUCT.unpack_from(data)
        return cls(word >> 24, word & PSN_MASK)


@dataclass(frozen=True, slots=True)
class AtomicAckETH:
    """Atomic acknowledge extended transport header, 8 bytes (InfiniBand Architecture 9.5.3).

    ``original`` is the value in memory before the atomic.
    """

    original: int

    def pack(self) -> bytes:
        """The 8 bytes on the wire."""
        _check(self, original=64)
        return ATOMIC_ACK_ETH_STRUCT.pack(self.original)

    @classmethod
    def unpack(cls, data: Buffer) -> AtomicAckETH:
        """The header at the start of ``data``."""
        _check_length(data, 8, "AtomicAckETH")
        return cls(*ATOMIC_ACK_ETH_STRUCT.unpack_from(data))


@dataclass(frozen=True, slots=True)
class ImmDt:
    """Immediate data, 4 bytes (InfiniBand Architecture 9.3.6).

    Bytes, not a number: they arrive as the application has them in memory.
    """

    data: bytes

    def pack(self) -> bytes:
        """The 4 bytes on the wire."""
        if len(self.data) != 4:
            raise WireError(f"immediate data has 4 bytes, not {len(self.data)}")
        return bytes(self.data)

    @classmethod
    def unpack(cls, data: Buffer) -> ImmDt:
        """The header at the start of ``data``."""
        _check_length(data, 4, "ImmDt")
        return cls(bytes(data[:4]))


@dataclass(frozen=True, slots=True)
class IETH:
    """Invalidate extended transport header, 4 bytes (InfiniBand Architecture 9.3.7): the R_Key to invalidate."""

    rkey: int

    def pack(self) -> bytes:
        """The 4 bytes on the wire."""
        _check(self, rkey=32)
        return IETH_STRUCT.pack(self.rkey)

    @classmethod
    def unpack(cls, data: Buffer) -> IETH:
        """The header at the start of ``data``."""
        _check_length(data, 4, "IETH")
        return cls(*IETH_STRUCT.unpack_from(data))


_Extended: TypeAlias = XRCETH | DETH | FETH | RETH | AtomicETH | AETH | AtomicAckETH | ImmDt | IETH

#: The field in a RocePacket and the class of each extended header.
_FIELDS: dict[ExtendedHeader, tuple[str, type[_Extended]]] = {
    ExtendedHeader.XRCETH: ("xrceth", XRCETH),
    ExtendedHeader.DETH: ("deth", DETH),
    ExtendedHeader.FETH: ("feth", FETH),
    ExtendedHeader.RETH: ("reth", RETH),
    ExtendedHeader.ATOMIC_ETH: ("atomic_eth", AtomicETH),
    ExtendedHeader.AETH: ("aeth", AETH),
    ExtendedHeader.ATOMIC_ACK_ETH: ("atomic_ack_eth", AtomicAckETH),
    ExtendedHeader.IMM_DT: ("imm_dt", ImmDt),
    ExtendedHeader.IETH: ("ieth", IETH),
}


def _plan(opcode: int) -> tuple[tuple[str, type[_Extended], int], ...]:
    """The extended headers of an opcode in the order of the wire: field, class, offset from the BTH."""
    plan = []
    offset = BTH_LENGTH
    for bit in ExtendedHeader:
        if EXTENDED_HEADERS[opcode] & bit:
            plan.append((*_FIELDS[bit], offset))
            offset += EXTENDED_LENGTH[bit]
    return tuple(plan)


_PLANS = tuple(_plan(opcode) for opcode in range(256))
_NAMES = tuple(name for name, _ in _FIELDS.values())


@dataclass(frozen=True, slots=True)
class RocePacket:
    """Everything between the UDP header and the invariant CRC.

    The extended headers are those the opcode asks for; others are None. ``payload`` of a decoded packet is a view of
    the bytes it was decoded from, without the pad bytes, whose values are not checked.
    """

    bth: BTH
    deth: DETH | None = None
    feth: FETH | None = None
    reth: RETH | None = None
    atomic_eth: AtomicETH | None = None
    aeth: AETH | None = None
    atomic_ack_eth: AtomicAckETH | None = None
    imm_dt: ImmDt | None = None
    ieth: IETH | None = None
    xrceth: XRCETH | None = None
    payload: Buffer = field(default=b"", hash=False)

    def pack(self) -> bytes:
        """The bytes on the wire, padded as ``bth.pad_cnt`` says."""
        opcode = self.bth.opcode
        parts: list[Buffer] = [self.bth.pack()]
        if not HEADER_LENGTH[opcode]:
            raise WireError(f"opcode {opcode:#04x} is not known")
        plan = _PLANS[opcode]
        for name, _, _ in plan:
            header = getattr(self, name)
            if header is None:
                raise WireError(f"a packet of opcode {opcode:#04x} lacks {name}")
            parts.append(header.pack())
        there = [name for name in _NAMES if getattr(self, name) is not None]
        if len(there) != len(plan):
            wrong = set(there).difference(name for name, _, _ in plan)
            raise WireError(f"a packet of opcode {opcode:#04x} does not have {', '.join(sorted(wrong))}")
        parts += [self.payload, bytes(self.bth.pad_cnt)]
        return b"".join(parts)

    @classmethod
    def unpack(cls, data: Buffer) -> RocePacket:
        """The packet in ``data``; WireError for an unknown opcode or a packet that is cut short.

        What only a queue pair can judge (transport, version, keys, lengths against the MTU) is not checked.
        """
        view = memoryview(data)
        bth = BTH.unpack(view)
        at = HEADER_LENGTH[bth.opcode]
        if not at:
            raise WireError(f"opcode {bth.opcode:#04x} is not known")
        end = len(view) - bth.pad_cnt
        if end < at:
            raise WireError(f"a packet of opcode {bth.opcode:#04x} has {at + bth.pad_cnt} bytes, not {len(view)}")
        headers = {name: header.unpack(view[offset:at]) for name, header, offset in _PLANS[bth.opcode]}
        return cls(bth, **headers, payload=view[at:end])  # type: ignore[arg-type]

    def replace(self, **changes: object) -> RocePacket:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]
