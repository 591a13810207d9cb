"""Buffered random numbers."""

from __future__ import annotations

import os

from rdmacm.soft.entropy import BufferedSystemRandom
from support.rows import for_each


@for_each("bits", [1, 8, 16, 24, 32, 33, 64, 128])
def test_every_bit_takes_both_values(bits: int) -> None:
    source = BufferedSystemRandom()
    drawn = [source.getrandbits(bits) for _ in range(2000)]
    ones = zeros = 0
    for number in drawn:
        assert 0 <= number < 1 << bits
        ones |= number
        zeros |= ~number
    assert ones & zeros & (1 << bits) - 1 == (1 << bits) - 1


def test_numbers_do_not_repeat() -> None:
    one, other = BufferedSystemRandom(), BufferedSystemRandom()
    drawn = [source.getrandbits(32) for source in (one, other) for _ in range(600)]
    assert len(set(drawn)) > 1190


def test_forked_child_draws_its_own_numbers() -> None:
    source = BufferedSystemRandom()
    source.getrandbits(32)
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            source.forget()
            os.write(writer, repr([source.getrandbits(32) for _ in range(8)]).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        theirs = answer.read().decode()
    os.waitpid(pid, 0)
    assert theirs
    assert theirs != repr([source.getrandbits(32) for _ in range(8)])
