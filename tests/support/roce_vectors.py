"""RoCEv2 packets as bytes from the IP header to the ICRC, and their fields.

The first ones were made by an independent encoder and checked with two independent decoders: 192.0.2.1 and 192.0.2.2,
source port 50000, identification 0 unless the bytes say otherwise.  The ``kernel_`` ones were sent by Linux 6.1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rdmacm.proto.roce.opcodes import Opcode
from support.pcap import Datagram, datagram
from support.roce_packets import AETH, BTH, DETH, IETH, RETH, AtomicAckETH, AtomicETH, ImmDt, NakCode, RocePacket


def expand(text: str) -> bytes:
    """Bytes of a hexadecimal text in which ``{N}`` stands for N bytes of zero."""
    return bytes.fromhex(re.sub(r"\{(\d+)\}", lambda match: "00" * int(match[1]), text))


@dataclass(frozen=True)
class Vector:
    name: str
    data: bytes
    packet: RocePacket

    @property
    def datagram(self) -> Datagram:
        found = datagram(self.data)
        assert found is not None
        return found

    @property
    def body(self) -> bytes:
        """From the BTH to the last pad byte."""
        return self.datagram.payload[:-4]

    @property
    def icrc(self) -> bytes:
        return self.datagram.payload[-4:]


def _mad(text: str, psn: int) -> Vector:
    """A management datagram of 256 bytes between the general services queue pairs, as the kernel sends it."""
    name, _, text = text.partition(":")
    data = expand(text)
    bth = BTH(Opcode.UD_SEND_ONLY, 1, psn, ack_req=True)
    return Vector(name, data, RocePacket(bth, deth=DETH(0x80010000, 1), payload=data[-260:-4]))


def _vector(text: str, packet: RocePacket) -> Vector:
    name, _, text = text.partition(":")
    return Vector(name, expand(text), packet)


VECTORS = [
    _vector(
        "rc_send_only:"
        "45000034123440004011a481c0000201c0000202c35012b7002000000430ffff0000001380fedcba68656c6c6f000000"
        "97361772",
        RocePacket(BTH(Opcode.RC_SEND_ONLY, 0x13, 0xFEDCBA, ack_req=True, pad_cnt=3), payload=b"hello"),
    ),
    _vector(
        "rc_send_only_imm:"
        "45000038000040004011b6b1c0000201c0000202c35012b70024000005b0ffff0000001380fedcbbdeadbeef68656c6c"
        "6f0000000f77d441",
        RocePacket(
            BTH(Opcode.RC_SEND_ONLY_WITH_IMMEDIATE, 0x13, 0xFEDCBB, ack_req=True, se=True, pad_cnt=3),
            imm_dt=ImmDt(bytes.fromhex("deadbeef")),
            payload=b"hello",
        ),
    ),
    _vector(
        "rc_send_only_inv:"
        "45000038000040004011b6b1c0000201c0000202c35012b7002400001730ffff0000001380fedcbc00000b4268656c6c"
        "6f0000007ec43363",
        RocePacket(
            BTH(Opcode.RC_SEND_ONLY_WITH_INVALIDATE, 0x13, 0xFEDCBC, ack_req=True, pad_cnt=3),
            ieth=IETH(0xB42),
            payload=b"hello",
        ),
    ),
    _vector(
        "rc_write_only:"
        "45000044000040004011b6a5c0000201c0000202c35012b7003000000a00ffff0000001380fedcbd00007f0012345000"
        "00000a41000000084142434445464748597d9283",
        RocePacket(
            BTH(Opcode.RC_RDMA_WRITE_ONLY, 0x13, 0xFEDCBD, ack_req=True),
            reth=RETH(0x7F0012345000, 0xA41, 8),
            payload=b"ABCDEFGH",
        ),
    ),
    _vector(
        "rc_write_only_imm:"
        "45000048000040004011b6a1c0000201c0000202c35012b7003400000b00ffff0000001380fedcbe00007f0012345000"
        "00000a410000000801020304414243444546474805df1714",
        RocePacket(
            BTH(Opcode.RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE, 0x13, 0xFEDCBE, ack_req=True),
            reth=RETH(0x7F0012345000, 0xA41, 8),
            imm_dt=ImmDt(bytes([1, 2, 3, 4])),
            payload=b"ABCDEFGH",
        ),
    ),
    _vector(
        "rc_read_req:"
        "4500003c000040004011b6adc0000201c0000202c35012b7002800000c00ffff0000001380fedcbf00007f0012345000"
        "00000a410000080059d09541",
        RocePacket(
            BTH(Opcode.RC_RDMA_READ_REQUEST, 0x13, 0xFEDCBF, ack_req=True), reth=RETH(0x7F0012345000, 0xA41, 2048)
        ),
    ),
    _vector(
        "rc_read_resp_only:"
        "45000038000040004011b6b1c0000202c0000201c35012b7002400001000ffff0000001200fedcc11f00000731323334"
        "35363738656dd301",
        RocePacket(BTH(Opcode.RC_RDMA_READ_RESPONSE_ONLY, 0x12, 0xFEDCC1), aeth=AETH(0x1F, 7), payload=b"12345678"),
    ),
    _vector(
        "rc_cmp_swap:"
        "45000048000040004011b6a1c0000201c0000202c35012b7003400001300ffff0000001380fedcc200007f0012345008"
        "00000a411111111111111111222222222222222288d169bf",
        RocePacket(
            BTH(Opcode.RC_COMPARE_SWAP, 0x13, 0xFEDCC2, ack_req=True),
            atomic_eth=AtomicETH(0x7F0012345008, 0xA41, 0x1111111111111111, 0x2222222222222222),
        ),
    ),
    _vector(
        "rc_fetch_add:"
        "45000048000040004011b6a1c0000201c0000202c35012b7003400001400ffff0000001380fedcc300007f0012345008"
        "00000a41000000000000000500000000000000001d961891",
        RocePacket(
            BTH(Opcode.RC_FETCH_ADD, 0x13, 0xFEDCC3, ack_req=True), atomic_eth=AtomicETH(0x7F0012345008, 0xA41, 5)
        ),
    ),
    _vector(
        "rc_atomic_ack:"
        "45000038000040004011b6b1c0000202c0000201c35012b7002400001200ffff0000001200fedcc21f00000822222222"
        "222222228b606d14",
        RocePacket(
            BTH(Opcode.RC_ATOMIC_ACKNOWLEDGE, 0x12, 0xFEDCC2),
            aeth=AETH(0x1F, 8),
            atomic_ack_eth=AtomicAckETH(0x2222222222222222),
        ),
    ),
    _vector(
        "rc_ack:45000030000040004011b6b9c0000202c0000201c35012b7001c00001100ffff0000001200fedcba1f0000019cf5eb5e",
        RocePacket(BTH(Opcode.RC_ACKNOWLEDGE, 0x12, 0xFEDCBA), aeth=AETH.ack(1)),
    ),
    _vector(
        "rc_nak_seq:45000030000040004011b6b9c0000202c0000201c35012b7001c00001100ffff0000001200fedcbb60000001e66cd750",
        RocePacket(BTH(Opcode.RC_ACKNOWLEDGE, 0x12, 0xFEDCBB), aeth=AETH.nak(NakCode.PSN_SEQUENCE_ERROR, 1)),
    ),
    _vector(
        "rc_nak_acc:45000030000040004011b6b9c0000202c0000201c35012b7001c00001100ffff0000001200fedcbd62000003e130909b",
        RocePacket(BTH(Opcode.RC_ACKNOWLEDGE, 0x12, 0xFEDCBD), aeth=AETH.nak(NakCode.REMOTE_ACCESS_ERROR, 3)),
    ),
    _vector(
        "rc_rnr:45000030000040004011b6b9c0000202c0000201c35012b7001c00001100ffff0000001200fedcbb2e000001e8431c2b",
        RocePacket(BTH(Opcode.RC_ACKNOWLEDGE, 0x12, 0xFEDCBB), aeth=AETH.rnr_nak(14, 1)),
    ),
    _vector(
        "ud_send_only:"
        "4500003c000040004011b6adc0000201c0000202c35012b7002800006430ffff00000015000000000123456700000016"
        "68656c6c6f0000000f2846c8",
        RocePacket(BTH(Opcode.UD_SEND_ONLY, 0x15, 0x0, pad_cnt=3), deth=DETH(0x01234567, 0x16), payload=b"hello"),
    ),
    _vector(
        "ud_send_imm:"
        "45000040000040004011b6a9c0000201c0000202c35012b7002c00006530ffff00000015000000010123456700000016"
        "cafef00d68656c6c6f00000007ea693e",
        RocePacket(
            BTH(Opcode.UD_SEND_ONLY_WITH_IMMEDIATE, 0x15, 0x1, pad_cnt=3),
            deth=DETH(0x01234567, 0x16),
            imm_dt=ImmDt(bytes.fromhex("cafef00d")),
            payload=b"hello",
        ),
    ),
    _vector(
        "rc_send_only6:"
        "600000000020114020010db800000000000000000000000120010db8000000000000000000000002c35012b700200000"
        "0430ffff0000001380fedcba68656c6c6f000000d2ff0ac8",
        RocePacket(BTH(Opcode.RC_SEND_ONLY, 0x13, 0xFEDCBA, ack_req=True, pad_cnt=3), payload=b"hello"),
    ),
    _vector(
        "rc_ack6:"
        "62012345001c113f20010db800000000000000000000000220010db8000000000000000000000001c35112b7001c0000"
        "1100ffff0000001200fedcba1f00000172ccee6e",
        RocePacket(BTH(Opcode.RC_ACKNOWLEDGE, 0x12, 0xFEDCBA), aeth=AETH.ack(1)),
    ),
    _vector(
        "rc_read_resp_first:"
        "45000430000040004011b2b9c0000202c0000201c35012b7041c00000d00ffff0000001200fedcbf1f000006"
        + bytes(range(256)).hex() * 4
        + "2e3dd07b",
        RocePacket(
            BTH(Opcode.RC_RDMA_READ_RESPONSE_FIRST, 0x12, 0xFEDCBF), aeth=AETH.ack(6), payload=bytes(range(256)) * 4
        ),
    ),
    _vector(
        "rc_read_resp_last:"
        "45000430000040004011b2b9c0000202c0000201c35012b7041c00000f00ffff0000001200fedcc01f000006"
        + bytes(range(256)).hex() * 4
        + "036818dc",
        RocePacket(
            BTH(Opcode.RC_RDMA_READ_RESPONSE_LAST, 0x12, 0xFEDCC0), aeth=AETH.ack(6), payload=bytes(range(256)) * 4
        ),
    ),
    _mad(
        "kernel_req:"
        "45000134b734400040116e820a0000010a000002d87212b7012000006400ffff00000001800000008001000000000001"
        "010702030000000000000002eec5691400100000000000001469c5ee000000000000000001061d2f0434cbfffeca8fe2"
        "00000000000000000000118000000080000000a0c106caa7ffff37f0ffffffff00000000000000000000ffff0a000001"
        "00000000000000000000ffff0a00000289aef00000400098{45}40ca40{12}0a000001{12}0a000002{56}04f43e83",
        psn=0,
    ),
    _mad(
        "kernel_req6:"
        "6000000001201140fd{14}01fd{14}02d87212b7012000006400ffff0000000180000004800100000000000101070203"
        "0000000000000002eec5691500100000000000001569c5ee000000000000000001061d2f0434cbfffeca8fe200000000"
        "000000000000128000000080000000a00d82c5a7ffff37f0fffffffffd{14}01fd{14}0261ef300000400098{45}60b5"
        "bcfd{14}01fd{14}02{56}0ab48f06",
        psn=4,
    ),
    _mad(
        "kernel_sidr_req:"
        "45000134c640400040115f760a0000010a000002d87212b7012000006400ffff00000001800000078001000000000001"
        "010702030000000000000002eec5691600170000000000001669c5eeffff00000000000001111c060040df3e{12}0a00"
        "0001{12}0a000002{180}e10d491c",
        psn=7,
    ),
    _mad(
        "kernel_rep:"
        "45000134fa97400040112b1f0a0000010a000002d87212b7012000006400ffff00000001800000008001000000000001"
        "010702030000000000000007556677880013000000000000febdba4a55667788000000000000110000000000c78bc300"
        "010178e0b80608fffe367274{196}6060af0e",
        psn=0,
    ),
    _mad(
        "kernel_rej:"
        "45000134fba4400040112a120a0000010a000002d87212b7012000006400ffff00000001800000028001000000000001"
        "010702030000000000000007556677880012000000000000000000005566778800000008{220}c016b30f",
        psn=2,
    ),
    _mad(
        "kernel_sidr_rep:"
        "45000134036b40004011224c0a0000010a000002d87212b7012000006400ffff00000001800000058001000000000001"
        "0107020300000000000000081122334500180000000000001122334500000000000013000000000001111c0601234567"
        "{208}688b5411",
        psn=5,
    ),
    _vector(
        "kernel_send:4500003cb96a400040116d440a0000010a000002dacd12b7002800000400ffff0000007780111111{16}b70ee638",
        RocePacket(BTH(Opcode.RC_SEND_ONLY, 0x77, 0x111111, ack_req=True), payload=bytes(16)),
    ),
    _vector(
        "kernel_send6:6000000000281140fd{14}01fd{14}02deeb12b7002800000400ffff0000007780111111{16}7d4f57cf",
        RocePacket(BTH(Opcode.RC_SEND_ONLY, 0x77, 0x111111, ack_req=True), payload=bytes(16)),
    ),
    _vector(
        "kernel_ack:45000030b96c400040116d4e0a0000010a000002dacd12b7001c00001100ffff0000007700c106ca1f00000149558e69",
        RocePacket(BTH(Opcode.RC_ACKNOWLEDGE, 0x77, 0xC106CA), aeth=AETH.ack(1)),
    ),
    _vector(
        "kernel_nak_seq:"
        "45000030ccaa400040115a100a0000010a000002c13212b7001c00001100ffff00000012001783f060000000d5bfd5f0",
        RocePacket(BTH(Opcode.RC_ACKNOWLEDGE, 0x12, 0x1783F0), aeth=AETH.nak(NakCode.PSN_SEQUENCE_ERROR, 0)),
    ),
    _vector(
        "kernel_rnr:45000030cda84000401159120a0000010a000002c13212b7001c00001100ffff00000012001783f120000001db7bf013",
        RocePacket(BTH(Opcode.RC_ACKNOWLEDGE, 0x12, 0x1783F1), aeth=AETH.rnr_nak(0, 1)),
    ),
    _vector(
        "kernel_read_resp_empty:"
        "45000030cdaa4000401159100a0000010a000002c13212b7001c00001000ffff00000012001783f21f000003130e6c21",
        RocePacket(BTH(Opcode.RC_RDMA_READ_RESPONSE_ONLY, 0x12, 0x1783F2), aeth=AETH.ack(3)),
    ),
    _vector(
        "kernel_multicast:"
        "45000048e123400040115e7c0a000001ef010203e8ea12b7003400006500ffff00ffffff000000000123456700000014"
        "000000141150dd5c0500000000000000000000002f15cbaf",
        RocePacket(
            BTH(Opcode.UD_SEND_ONLY_WITH_IMMEDIATE, 0xFFFFFF, 0x0),
            deth=DETH(0x01234567, 0x14),
            imm_dt=ImmDt(bytes.fromhex("00000014")),
            payload=bytes.fromhex("1150dd5c05") + bytes(11),
        ),
    ),
]
