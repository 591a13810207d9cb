"""IP over InfiniBand (RFC 4391): hardware addresses, and the GIDs of multicast groups."""

from __future__ import annotations

from typing import NamedTuple

from rdmacm.address import Gid
from rdmacm.proto.wire import Buffer, WireError

#: Bytes of an IPoIB hardware address.
HARDWARE_ADDRESS_SIZE = 20
_LINK_LOCAL_SCOPE = 2
#: The signatures of the GIDs of IPv4 and IPv6 groups.
_SIGNATURE_V4, _SIGNATURE_V6 = b"\x40\x1b", b"\x60\x1b"


class IpoibAddress(NamedTuple):
    """The hardware address of an IPoIB interface (RFC 4391, section 9.1.1)."""

    #: The GID of the port.
    gid: Gid
    #: The number of the interface's queue pair, 24 bits.
    qpn: int
    #: Bit 7 is set if the interface has a connected mode (RFC 4755); the other bits are reserved.
    flags: int = 0

    def pack(self) -> bytes:
        """20 bytes."""
        return bytes((self.flags,)) + self.qpn.to_bytes(3, "big") + self.gid

    @classmethod
    def unpack(cls, data: Buffer) -> IpoibAddress:
        """WireError unless there are 20 bytes."""
        raw = bytes(data)
        if len(raw) != HARDWARE_ADDRESS_SIZE:
            raise WireError(f"an IPoIB hardware address has {HARDWARE_ADDRESS_SIZE} bytes, not {len(raw)}")
        return cls(Gid(raw[4:]), int.from_bytes(raw[1:4], "big"), raw[0])


def broadcast_gid(pkey: int, scope: int = _LINK_LOCAL_SCOPE) -> Gid:
    """The GID of the broadcast group of a partition (RFC 4391, section 4)."""
    return _group_gid(_SIGNATURE_V4, pkey, scope, b"\xff\xff\xff\xff")


def multicast_gid(ip: bytes, pkey: int, scope: int = _LINK_LOCAL_SCOPE) -> Gid:
    """The GID of the group of a packed multicast address (RFC 4391, section 4): its low 28 or 80 bits."""
    if len(ip) == 4:
        return _group_gid(_SIGNATURE_V4, pkey, scope, bytes((ip[0] & 0x0F,)) + ip[1:])
    return _group_gid(_SIGNATURE_V6, pkey, scope, ip[6:])


def _group_gid(signature: bytes, pkey: int, scope: int, group: bytes) -> Gid:
    return Gid(bytes((0xFF, 0x10 | scope)) + signature + pkey.to_bytes(2, "big") + group.rjust(10, b"\0"))
