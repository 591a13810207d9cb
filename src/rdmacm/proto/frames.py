"""Ethernet frames around UDP datagrams, and of ICMP errors about them, as a capture on the wire would show them.

A socket sends and receives UDP payload without its headers. This module restores them: the fields that the invariant
CRC covers have the values they had on the wire, others (MAC addresses, TTL) have plausible values. Checksums are
computed.
"""

from __future__ import annotations

import struct
import zlib

from rdmacm.proto.wire import Buffer, WireError

_ETHERNET = struct.Struct("!6s6sH")
_IPV4 = struct.Struct("!BBHHHBBH4s4s")
_IPV6 = struct.Struct("!IHBB16s16s")
_UDP = struct.Struct("!HHHH")
_ETHERTYPE_IPV4, _ETHERTYPE_IPV6 = 0x0800, 0x86DD
_DONT_FRAGMENT = 0x4000
_PROTOCOL_UDP, _PROTOCOL_ICMP, _PROTOCOL_ICMPV6 = 17, 1, 58
_ICMP = struct.Struct("!BBHI")
#: Type of "destination unreachable", by the length of an address.
_UNREACHABLE = {4: 3, 16: 1}


def hardware_address(address: bytes) -> bytes:
    """The MAC address that represents a packed IP address: locally administered, and always the same.

    For a multicast address it is the MAC address of the multicast group (RFC 1112, RFC 2464).

    >>> hardware_address(bytes([192, 0, 2, 1])).hex(":")
    '02:00:c0:00:02:01'
    """
    if len(address) == 4:
        if address[0] >> 4 == 0xE:
            return bytes((0x01, 0x00, 0x5E, address[1] & 0x7F, address[2], address[3]))
        return b"\x02\x00" + address
    if address[0] == 0xFF:
        return b"\x33\x33" + address[12:]
    # No part of an IPv6 address is unique on every network, so all of it is hashed.
    return b"\x02\x06" + zlib.crc32(address).to_bytes(4, "big")


def word_sum(data: Buffer) -> int:
    """The ones' complement sum of the 16-bit words of ``data``, with 0 for 0xFFFF."""
    # 2^16 is 1 modulo 65535, so the data as one number and the sum of its words have the same remainder.
    number = int.from_bytes(data, "big")
    return (number << 8 if len(data) & 1 else number) % 0xFFFF


def udp_frame(
    source: bytes,
    destination: bytes,
    source_port: int,
    dest_port: int,
    payload: Buffer,
    *,
    identification: int = 0,
    ttl: int = 64,
    tos: int = 0,
) -> bytes:
    """The Ethernet frame of a UDP datagram, with "don't fragment" set.

    Both addresses are packed, 4 or 16 bytes. For IPv6, ``ttl`` and ``tos`` are the hop limit and the traffic class, and
    ``identification`` is ignored. WireError if the payload does not fit into an IP packet.
    """
    if len(source) != len(destination) or len(source) not in (4, 16):
        raise WireError(f"addresses have 4 or 16 bytes each, not {len(source)} and {len(destination)}")
    length = _UDP.size + len(payload)
    # The total length of IPv4 includes its header, the payload length of IPv6 does not.
    total = _IPV4.size + length if len(source) == 4 else length
    if total > 0xFFFF:
        raise WireError(f"an IP packet cannot carry {len(payload)} bytes of UDP payload")
    ports = _UDP.pack(source_port, dest_port, length, 0)
    # The UDP checksum includes a pseudo header: addresses, protocol and length. The order of the terms does not matter.
    added = word_sum(source) + word_sum(destination) + _PROTOCOL_UDP + length + word_sum(ports) + word_sum(payload)
    # A checksum of 0 means that there is none, so 0 is sent as 0xFFFF.
    udp = _UDP.pack(source_port, dest_port, length, -added % 0xFFFF or 0xFFFF)
    headers = _headers(source, destination, _PROTOCOL_UDP, length, identification, ttl, tos)
    return b"".join((headers, udp, payload))


def unreachable_frame(sender: bytes, receiver: bytes, code: int, quoted: bytes) -> bytes:
    """The Ethernet frame of an ICMP error "destination unreachable" about a packet of the receiver.

    ``quoted``: what is known of that packet, from the IP header on. Its lengths may be longer.
    """
    is_v4 = len(sender) == 4
    protocol = _PROTOCOL_ICMP if is_v4 else _PROTOCOL_ICMPV6
    length = _ICMP.size + len(quoted)
    added = word_sum(_ICMP.pack(_UNREACHABLE[len(sender)], code, 0, 0)) + word_sum(quoted)
    if not is_v4:
        added += word_sum(sender) + word_sum(receiver) + protocol + length
    icmp = _ICMP.pack(_UNREACHABLE[len(sender)], code, -added % 0xFFFF, 0)
    return b"".join((_headers(sender, receiver, protocol, length, 0, 64, 0), icmp, quoted))


def _headers(
    source: bytes, destination: bytes, protocol: int, length: int, identification: int, ttl: int, tos: int
) -> bytes:
    """The headers of Ethernet and IP. ``length`` is what follows."""
    if len(source) == 4:
        fields = (0x45, tos, _IPV4.size + length, identification, _DONT_FRAGMENT, ttl, protocol)
        checksum = -word_sum(_IPV4.pack(*fields, 0, source, destination)) % 0xFFFF
        ip = _IPV4.pack(*fields, checksum, source, destination)
        ethertype = _ETHERTYPE_IPV4
    else:
        ip = _IPV6.pack(6 << 28 | tos << 20, length, protocol, ttl, source, destination)
        ethertype = _ETHERTYPE_IPV6
    return _ETHERNET.pack(hardware_address(destination), hardware_address(source), ethertype) + ip
