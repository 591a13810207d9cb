"""The bytes of the stream protocol of rsocket(7), as librdmacm exchanges them.

Connection data
    40 bytes of private data in the REQ and in the REP, all in network byte order. They name two parts of the sender's
    memory that the peer may write: the *control memory*, and the receive buffer.

Control memory
    The target SGL, then the table of I/O mappings. The peer writes entries of 16 bytes into the first (where data may
    go next), and of 24 bytes into the second. An entry is in the byte order of the memory that it is in, so the writer
    swaps it if the flags of the two ends differ.

Immediate data
    Each message is an RDMA WRITE with 32 bits of immediate data: the operation in the upper 3 bits, its argument in the
    other 29. iWARP has no immediate data: there a WRITE is followed by a SEND of the same 4 bytes, in the sender's byte
    order.

====  =========  ===================================================================================================
 op   name       argument
====  =========  ===================================================================================================
 0    DATA       the number of bytes that were written where the receiver expects the next ones
 4    SGL        the number of messages that the peer may have sent in all, modulo 2**16; perhaps with a target entry
 6    IOMAP      the index of the I/O mapping that was written
 7    CONTROL    0 the connection ends, 1 nothing (the peer is alive), 2 the sender sends no more data
====  =========  ===================================================================================================

The other operations are not sent. librdmacm calls 2 WRITE, and uses it in its own work request numbers only.
"""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from rdmacm.proto.wire import Buffer, WireError

#: The only version of the connection data.
VERSION = 1
#: Entries of a target SGL in librdmacm, and here.
TARGETS = 2

_CONNECTION = struct.Struct("!BBH3xBQIIQII")
CONNECTION_LENGTH = _CONNECTION.size

_TARGET = {"little": struct.Struct("<QII"), "big": struct.Struct(">QII")}
_MAPPING = {"little": struct.Struct("<QQII"), "big": struct.Struct(">QQII")}
TARGET_LENGTH = _TARGET["little"].size
MAPPING_LENGTH = _MAPPING["little"].size

_ARGUMENT_BITS = 29
#: The greatest argument, and so the longest message in bytes.
MAX_ARGUMENT = (1 << _ARGUMENT_BITS) - 1

#: A table of I/O mappings has a size of 8 bits in the connection data: up to this number as it is, else in steps.
_EXACT_SIZES = 128
_SIZE_STEP = 256
#: The largest table.
MAX_MAPPINGS = (_EXACT_SIZES - 1) * _SIZE_STEP


class ConnectionFlag(IntFlag):
    """What the connection data say about their sender."""

    #: Its memory is big-endian.
    BIG_ENDIAN = 1
    #: It has a table of I/O mappings.
    MAPPINGS = 2


class Operation(IntEnum):
    """The operations of immediate data; the module describes them."""

    DATA = 0
    SGL = 4
    IOMAP = 6
    CONTROL = 7


class Control(IntEnum):
    """The arguments of :attr:`Operation.CONTROL`."""

    DISCONNECT = 0
    KEEPALIVE = 1
    SHUTDOWN = 2


def immediate(operation: int, argument: int) -> int:
    """The immediate data of a message, 32 bits."""
    return operation << _ARGUMENT_BITS | argument


def operation_of(imm: int) -> int:
    """The operation in immediate data, 3 bits; perhaps none of :class:`Operation`."""
    return imm >> _ARGUMENT_BITS


def argument_of(imm: int) -> int:
    """The argument in immediate data."""
    return imm & MAX_ARGUMENT


def byte_order(flags: int) -> str:
    """The byte order of the memory of the sender of connection data, as :data:`sys.byteorder`."""
    return "big" if flags & ConnectionFlag.BIG_ENDIAN else "little"


def own_flags() -> int:
    """The flags of this host."""
    order = ConnectionFlag.BIG_ENDIAN if sys.byteorder == "big" else ConnectionFlag(0)
    return int(ConnectionFlag.MAPPINGS | order)


def encoded_size(mappings: int) -> int:
    """The size of a table of I/O mappings as connection data have it; sizes above 128 are rounded down."""
    return mappings if mappings <= _EXACT_SIZES else _EXACT_SIZES | mappings // _SIZE_STEP


def decoded_size(code: int) -> int:
    """The size of a table of I/O mappings from its 8 bits."""
    return code if code <= _EXACT_SIZES else code % _EXACT_SIZES * _SIZE_STEP


@dataclass(frozen=True, slots=True)
class Target:
    """Memory that the peer may write: ``address``, ``key`` and ``length`` in bytes (of a target SGL: its entries)."""

    address: int
    key: int
    length: int

    def pack(self, order: str) -> bytes:
        """The 16 bytes of an entry of a target SGL, in the byte order of the memory that it is written to."""
        return _TARGET[order].pack(self.address, self.key, self.length)

    @classmethod
    def unpack(cls, memory: Buffer, index: int, order: str) -> Target:
        """An entry of a target SGL; WireError where the memory is too short."""
        try:
            return cls(*_TARGET[order].unpack_from(memory, index * TARGET_LENGTH))
        except struct.error:
            raise WireError(f"no entry {index} in a target SGL of {len(memory)} bytes") from None


@dataclass(frozen=True, slots=True)
class Mapping:
    """An I/O mapping: the peer may write ``length`` bytes at ``address`` with ``key``, and calls them ``offset``."""

    offset: int
    address: int
    key: int
    length: int

    def pack(self, order: str) -> bytes:
        """The 24 bytes of an entry, in the byte order of the memory that it is written to."""
        return _MAPPING[order].pack(self.offset, self.address, self.key, self.length)

    @classmethod
    def unpack(cls, memory: Buffer, index: int, order: str) -> Mapping:
        """An entry of a table; WireError where the memory is too short."""
        try:
            return cls(*_MAPPING[order].unpack_from(memory, index * MAPPING_LENGTH))
        except struct.error:
            raise WireError(f"no entry {index} in a table of {len(memory)} bytes") from None


#: The entry of a mapping that was taken back.
NO_MAPPING = Mapping(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class ConnectionData:
    """What each end says in its REQ or REP (``struct rs_conn_data``).

    ``credits``: how many messages the peer may send at first; ``mappings``: the size of its table of I/O mappings;
    ``control``: its control memory, whose ``length`` is the number of entries in the target SGL; ``buffer``: the first
    half of its receive buffer.
    """

    credits: int
    mappings: int
    control: Target
    buffer: Target
    flags: int
    version: int = VERSION

    def pack(self) -> bytes:
        """The 40 bytes; ValueError for a field out of range."""
        control, buffer = self.control, self.buffer
        try:
            return _CONNECTION.pack(
                self.version,
                self.flags,
                self.credits,
                encoded_size(self.mappings),
                *(control.address, control.key, control.length),
                *(buffer.address, buffer.key, buffer.length),
            )
        except struct.error as problem:
            raise ValueError(f"a field of the connection data is out of range: {problem}") from None

    @classmethod
    def unpack(cls, data: Buffer) -> ConnectionData:
        """The data at the start of private data, which are padded with zeros.

        WireError: too short, another version, or a target SGL without entries.
        """
        if len(data) < CONNECTION_LENGTH:
            raise WireError(f"the connection data of an rsocket have {CONNECTION_LENGTH} bytes, not {len(data)}")
        version, flags, granted, size, *entries = _CONNECTION.unpack_from(data)
        if version != VERSION:
            raise WireError(f"version {version} of the connection data of an rsocket, not {VERSION}")
        control, buffer = Target(*entries[:3]), Target(*entries[3:])
        if not control.length:
            raise WireError("a target SGL without entries")
        return cls(granted, decoded_size(size), control, buffer, flags, version)
