"""A member of a multicast group: a stranger's packets neither end it nor reach it, except messages to the group."""

from __future__ import annotations

from collections.abc import Iterator

from fuzz.devices import no_errors_logged
from fuzz.harness import Source, target
from fuzz.wire_formats import roce_seeds
from rdmacm import CmId, EventChannel, PortSpace
from rdmacm.proto.constants import MULTICAST_QPN
from rdmacm.proto.roce.headers import BTH_DETH_STRUCT
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.testing import Fabric
from rdmacm.verbs import WCStatus
from support.hostile import sealed, throw

#: Two groups, a member's address and a stranger's; with the bit in the first step of an input those of IPv6.
_IPV4 = "239.1.2.3", "239.1.2.4", "10.0.0.1", "10.0.0.9"
_IPV6 = "ff1e::1:2", "ff1e::1:3", "fd00::1", "fd00::9"
_IPV6_BIT = 0x40
QKEY = 0x01234567
_ROOM = 200


def group_seeds() -> Iterator[bytes]:
    """Steps of :func:`group_member`: where to, whether the ICRC is right, the length, the packet."""
    good = BTH_DETH_STRUCT.pack(Opcode.UD_SEND_ONLY, 0, 0xFFFF, MULTICAST_QPN, 7, QKEY, 5) + b"good"
    wrong_key = BTH_DETH_STRUCT.pack(Opcode.UD_SEND_ONLY, 0, 0xFFFF, MULTICAST_QPN, 7, QKEY ^ 1, 5) + b"evil"
    for packet in (good, wrong_key, good[:20], *list(roce_seeds())[:8]):
        for kind in (0, 4, 1, 5, 2, 6, 4 | _IPV6_BIT):
            yield bytes((kind,)) + len(packet).to_bytes(2, "big") + packet


@target(group_seeds, 1200)
def group_member(data: bytes) -> None:
    """Packets to its group, to another group of its host, and to the host, for any queue pair."""
    source = Source(data)
    is_ipv6 = bool(data[:1]) and bool(data[0] & _IPV6_BIT)
    *groups, address, strangers = _IPV6 if is_ipv6 else _IPV4
    with no_errors_logged():
        fabric = Fabric()
        host, stranger = fabric.host("member", address), fabric.host("stranger", strangers)
        with EventChannel(host.provider) as channel, CmId(channel, PortSpace.UDP) as member:
            member.bind_addr((address, 0))
            member.create_qp()
            region = member.reg_msgs(bytearray(16 * _ROOM))
            for slot in range(16):
                member.post_recv(slot, region, slot * _ROOM, _ROOM)
            for group in groups:
                member.join_multicast((group, 0))
                channel.get_event(0).ack()
            member.qp.detach_mcast(groups[1] if is_ipv6 else f"::ffff:{groups[1]}")
            expected = 0
            for _ in range(8):
                if source.is_empty:
                    break
                kind = source.number()
                to, packet = (*groups, address)[kind % 4 % 3], source.take(source.number(2) % 1100)
                if kind & 4 and len(packet) >= 12:
                    packet = sealed(stranger, to, packet)
                throw(stranger, to, packet)
                fabric.run(seconds=0.001)
                is_for_group = to == groups[0] and packet[5:8] == b"\xff\xff\xff"
                is_for_it = to == address and packet[5:8] == member.qp.qp_num.to_bytes(3, "big")
                found = len(member.recv_cq.poll(16))
                assert found <= (is_for_group or is_for_it), "a packet for nobody has arrived"
                expected += found
            good = BTH_DETH_STRUCT.pack(Opcode.UD_SEND_ONLY, 0, 0xFFFF, MULTICAST_QPN, 7, QKEY, 5) + b"good"
            throw(stranger, groups[0], sealed(stranger, groups[0], good))
            fabric.run(seconds=0.001)
            (wc,) = member.recv_cq.poll(16)
            assert (wc.status, wc.wr_id, wc.byte_len) == (WCStatus.SUCCESS, expected, 44)
        region.close()
