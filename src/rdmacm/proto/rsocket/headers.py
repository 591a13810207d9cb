"""The bytes of the datagram protocol of rsocket(7), as librdmacm exchanges them.

A datagram socket is a UDP socket, and unreliable datagram queue pairs with the same port number. All fields are in
network byte order.

On the UDP socket: the service header
    Tag 0x55555555 (4 bytes), version 4 or 6 (1), operation (1), length of this header (1), 0 (1), number of the
    sender's queue pair (4, of which the upper 8 bits count for nothing), the sender's address (4 or 16). After
    operation 0, DATA, follows a datagram of the application. Operation 7, CONTROL, answers it, without data. So both
    ends learn where the other's queue pair is. librdmacm writes something else for an IPv6 address, and does not read
    the address: the sender is who the UDP socket says.

On the queue pairs: the source header
    Version 4 or 6 (1), length of this header (1), the sender's port (2), and its address: of IPv4 4 bytes, of IPv6 the
    flow information (4) and 16 bytes. The datagram follows. It is a SEND with the Q_Key 0x01234567.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from rdmacm.proto.wire import Buffer, WireError

TAG = 0x55555555
#: The Q_Key of the port space UDP.
QKEY = 0x01234567
#: Bytes of a receive without the GRH: the source header and a datagram.
MAX_LENGTH = 2048

_SERVICE = struct.Struct("!IBBBxI")
_SOURCE = struct.Struct("!BBH")
_FLOW = struct.Struct("!I")
_QPN_MASK = 0xFFFFFF
#: Bytes of an address, by version.
_ADDRESS_LENGTHS = {4: 4, 6: 16}
#: Bytes of each header, by version.
SERVICE_LENGTHS = {4: 16, 6: 28}
SOURCE_LENGTHS = {4: 8, 6: 24}


class ServiceOperation(IntEnum):
    """The operations of a service header."""

    DATA = 0
    CONTROL = 7


@dataclass(frozen=True, slots=True)
class ServiceHeader:
    """What precedes a datagram on the UDP socket (``struct ds_udp_header``).

    ``qpn``: the sender's queue pair, 24 bits; ``address``: its address, 4 or 16 bytes.
    """

    operation: ServiceOperation
    qpn: int
    address: bytes

    def pack(self) -> bytes:
        """The 16 or 28 bytes."""
        version = 4 if len(self.address) == _ADDRESS_LENGTHS[4] else 6
        fixed = _SERVICE.pack(TAG, version, self.operation, SERVICE_LENGTHS[version], self.qpn & _QPN_MASK)
        return fixed + self.address

    @classmethod
    def unpack(cls, data: Buffer, version: int) -> ServiceHeader:
        """The header at the start of a datagram that an address of a version has sent.

        WireError: too short, another tag, version or length, or an unknown operation.
        """
        length = SERVICE_LENGTHS[version]
        if len(data) < length:
            raise WireError(f"a service header has {length} bytes, not {len(data)}")
        tag, found, operation, stated, qpn = _SERVICE.unpack_from(data)
        if tag != TAG or found != version or stated != length:
            raise WireError(f"no service header of version {version}: tag {tag:#x}, version {found}, length {stated}")
        try:
            kind = ServiceOperation(operation)
        except ValueError:
            raise WireError(f"a service header with operation {operation}") from None
        return cls(kind, qpn & _QPN_MASK, bytes(data[_SERVICE.size : length]))


@dataclass(frozen=True, slots=True)
class SourceHeader:
    """What precedes a datagram on the queue pairs (``struct ds_header``): the sender's address and port.

    ``address`` has 4 or 16 bytes; ``flow``: the flow information of IPv6.
    """

    address: bytes
    port: int
    flow: int = 0

    def pack(self) -> bytes:
        """The 8 or 24 bytes."""
        if len(self.address) == _ADDRESS_LENGTHS[4]:
            return _SOURCE.pack(4, SOURCE_LENGTHS[4], self.port) + self.address
        return _SOURCE.pack(6, SOURCE_LENGTHS[6], self.port) + _FLOW.pack(self.flow) + self.address

    @classmethod
    def unpack(cls, data: Buffer, version: int) -> SourceHeader:
        """The header at the start of a message. WireError: too short, or another version or length."""
        length = SOURCE_LENGTHS[version]
        if len(data) < length:
            raise WireError(f"a source header has {length} bytes, not {len(data)}")
        found, stated, port = _SOURCE.unpack_from(data)
        if found != version or stated != length:
            raise WireError(f"no source header of version {version}: version {found}, length {stated}")
        flow = _FLOW.unpack_from(data, _SOURCE.size)[0] if version == 6 else 0
        return cls(bytes(data[length - _ADDRESS_LENGTHS[version] : length]), port, flow)
