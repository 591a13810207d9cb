"""Ethernet frames built around datagrams, compared with Linux's frames and with RFC 1071's checksum."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacm.proto.frames import hardware_address, udp_frame, unreachable_frame
from rdmacm.proto.wire import WireError
from support.pcap import datagram, frames

CAPTURES = Path(__file__).parent.parent / "data" / "captures"
V4 = bytes([192, 0, 2, 1]), bytes([192, 0, 2, 2])
V6 = bytes.fromhex("20010db8000000000000000000000001"), bytes.fromhex("20010db8000000000000000000000002")


def ones_complement_sum(data: bytes) -> int:
    """The sum of RFC 1071 over 16-bit words, which is 0xFFFF for data that contains its valid checksum."""
    data += bytes(len(data) & 1)
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def pseudo_header(packet: bytes) -> bytes:
    """The pseudo-header that the UDP checksum covers."""
    if packet[0] >> 4 == 4:
        return packet[12:20] + struct.pack("!HH", 17, len(packet) - 20)
    return packet[8:40] + struct.pack("!II", len(packet) - 40, 17)


addresses = st.sampled_from([4, 16]).flatmap(lambda size: st.tuples(*[st.binary(min_size=size, max_size=size)] * 2))
words = st.integers(0, 0xFFFF)


@given(addresses, words, words, st.binary(max_size=70), words, st.integers(0, 255), st.integers(0, 255))
def test_frame_has_valid_headers_and_checksums(
    pair: tuple[bytes, bytes], sport: int, dport: int, payload: bytes, identification: int, ttl: int, tos: int
) -> None:
    source, destination = pair
    frame = udp_frame(
        source, destination, sport, dport, memoryview(payload), identification=identification, ttl=ttl, tos=tos
    )
    packet = frame[14:]
    found = datagram(packet)
    assert found is not None
    assert (found.source, found.destination, found.sport, found.dport) == (source, destination, sport, dport)
    assert found.payload == payload
    assert frame[:12] == hardware_address(destination) + hardware_address(source)
    if len(source) == 4:
        assert frame[12:14] == b"\x08\x00"
        assert struct.unpack_from("!BBHHHBB", packet) == (0x45, tos, len(packet), identification, 0x4000, ttl, 17)
        assert ones_complement_sum(packet[:20]) == 0xFFFF
    else:
        assert frame[12:14] == b"\x86\xdd"
        assert struct.unpack_from("!IHBB", packet) == (6 << 28 | tos << 20, len(packet) - 40, 17, ttl)
    checksum = found.header[-2:]
    assert checksum != b"\0\0", "0 means no checksum"
    assert ones_complement_sum(pseudo_header(packet) + packet[len(packet) - 8 - len(payload) :]) == 0xFFFF


@pytest.mark.parametrize(("source", "destination"), [V4, V6])
def test_zero_checksum_is_sent_as_ffff(source: bytes, destination: bytes) -> None:
    frame = udp_frame(source, destination, 1, 2, bytes(2))
    # This payload makes the sum all ones, whose complement is 0.
    checksum = frame[-4:-2]
    assert udp_frame(source, destination, 1, 2, checksum)[-4:-2] == b"\xff\xff"


def test_frames_match_linux() -> None:
    compared = 0
    for path in sorted(CAPTURES.glob("*.pcap")):
        for _, frame in frames(path):
            found = datagram(frame[14:]) if frame[12:14] in (b"\x08\x00", b"\x86\xdd") else None
            if found is None or path.stem.endswith("gso"):
                continue
            v6 = len(found.source) == 16
            ours = udp_frame(
                *(found.source, found.destination, found.sport, found.dport, found.payload),
                identification=found.identification,
                ttl=frame[21] if v6 else frame[22],
                tos=0 if v6 else frame[15],
            )
            if v6:  # except the flow label, which Linux generates
                assert ours[18:54] == frame[18:54]
            else:
                assert ours[14:34] == frame[14:34]
            compared += 1
    assert compared > 300


@pytest.mark.parametrize(("pair", "size"), [(V4, 65507), (V6, 65527)])
def test_datagram_beyond_the_maximum_raises_wire_error(pair: tuple[bytes, bytes], size: int) -> None:
    found = datagram(udp_frame(*pair, 1, 2, bytes(size))[14:])
    assert found is not None
    assert len(found.payload) == size
    with pytest.raises(WireError):
        udp_frame(*pair, 1, 2, bytes(size + 1))


@pytest.mark.parametrize("pair", [(V4[0], V6[0]), (b"", b""), (b"12345", b"12345")])
def test_invalid_addresses_raise_wire_error(pair: tuple[bytes, bytes]) -> None:
    with pytest.raises(WireError):
        udp_frame(*pair, 1, 2, b"")


def test_mac_address_follows_the_ip_address() -> None:
    assert hardware_address(bytes([239, 129, 2, 3])) == bytes.fromhex("01005e010203")
    assert hardware_address(bytes.fromhex("ff0e") + bytes(10) + b"abcd") == b"\x33\x33abcd"
    unicast = [*V4, *V6, V6[0][:7] + b"\x01" + V6[0][8:]]
    macs = {hardware_address(address) for address in unicast}
    assert len(macs) == len(unicast)
    assert all(mac[0] & 3 == 2 for mac in macs), "locally administered unicast addresses"


@given(addresses, st.integers(0, 15), st.binary(max_size=100))
def test_icmp_errors_have_valid_checksums(pair: tuple[bytes, bytes], code: int, quoted: bytes) -> None:
    sender, receiver = pair
    packet = unreachable_frame(sender, receiver, code, quoted)[14:]
    if len(sender) == 4:
        header, icmp, pseudo = packet[:20], packet[20:], b""
        assert ones_complement_sum(header) == 0xFFFF
        assert (header[9], icmp[0]) == (1, 3)
        assert struct.unpack_from("!H", header, 2)[0] == len(packet)
    else:
        icmp = packet[40:]
        pseudo = packet[8:40] + struct.pack("!II", len(icmp), 58)
        assert (packet[6], icmp[0]) == (58, 1)
        assert struct.unpack_from("!H", packet, 4)[0] == len(icmp)
    assert ones_complement_sum(pseudo + icmp) == 0xFFFF
    assert (icmp[1], icmp[8:]) == (code, quoted)
