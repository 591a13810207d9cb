"""The CRC-32 and the invariant CRC of the compiled core are those of zlib and of the Python engine."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

import pytest

from rdmacm.proto.roce.icrc import Icrc

core = pytest.importorskip("rdmacm.proto._core", reason="the compiled core is not built (python3 dev.py core)")

METHODS = pytest.mark.parametrize("crc32", [core.crc32, core.crc32_by_table], ids=[core.CRC32_METHOD, "table"])


@METHODS
def test_all_short_lengths_and_alignments(crc32: Callable[[memoryview, int], int]) -> None:
    data = memoryview(random.Random(1).randbytes(320))
    for length in range(301):
        for offset in range(17):
            piece = data[offset : offset + length]
            assert crc32(piece, 0x1234567) == zlib.crc32(piece, 0x1234567), (length, offset)


@METHODS
def test_long_lengths(crc32: Callable[[memoryview, int], int]) -> None:
    source = random.Random(2)
    data = memoryview(source.randbytes(300_000))
    for _ in range(200):
        offset = source.randrange(100)
        piece = data[offset : offset + source.choice((1024, 4096, 65536, source.randrange(290_000)))]
        start = source.getrandbits(32)
        assert crc32(piece, start) == zlib.crc32(piece, start), (len(piece), offset)


@pytest.mark.parametrize("address_length", [4, 16])
def test_icrc_of_a_flow(address_length: int) -> None:
    source = random.Random(address_length)
    for _ in range(200):
        ours, theirs, port = source.randbytes(address_length), source.randbytes(address_length), source.getrandbits(16)
        icrc = Icrc(ours, theirs, port)
        length = source.choice((16, 20, 32, 272, 1040, 4112, source.randrange(16, 60_000)))
        identification = source.choice((0, 1, source.getrandbits(16)))
        base, start = core.icrc_start(ours, theirs, port, 4791, length, identification)
        assert (base, start) == (icrc.base, icrc.start(length, identification))


@pytest.mark.parametrize("is_ipv6", [False, True])
def test_identification_is_solved_for(is_ipv6: bool) -> None:
    source = random.Random(3)
    address = bytes(16 if is_ipv6 else 4)
    icrc = Icrc(address, address, 4711)
    for _ in range(200):
        packet = bytearray(source.randbytes(source.choice((12, 28, 268, 4108, source.randrange(12, 8000)))))
        packet[4] = 0
        sealed = bytearray(packet + icrc.seal([packet], identification := source.getrandbits(16)))
        guess = source.getrandbits(16)
        found = core.icrc_solve(icrc.base, is_ipv6, sealed, guess)
        assert found == (guess if is_ipv6 else identification)
        bit = source.randrange(8 * len(sealed))
        sealed[bit >> 3] ^= 1 << (bit & 7)
        if not 32 <= bit < 40:
            expected = icrc.solve([sealed], guess)
            assert core.icrc_solve(icrc.base, is_ipv6, sealed, guess) == (-1 if expected is None else expected)
