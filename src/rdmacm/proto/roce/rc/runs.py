"""Packets in the middle of a message, many at once: where nearly all the bytes of a transfer go by.

They have no headers but the BTH, which is the same for all of them but for the PSN; they are all of one size, and all
belong in one place. A loop that knows this needs half a microsecond a packet. What is not exactly as expected ends a
run, and is left to the code that knows all cases.
"""

from __future__ import annotations

from typing import NamedTuple

from rdmacm.proto.roce.icrc import RESIDUE, Icrc, crc32
from rdmacm.proto.roce.psn import PSN_MASK
from rdmacm.proto.roce.rc.codes import HALVES

__all__ = ["Run", "take_run"]


class Run(NamedTuple):
    """The packets that may come next: their opcode, the first PSN, where their payload goes, and how many."""

    opcode: int
    psn: int
    view: memoryview
    offset: int
    limit: int


def take_run(
    run: Run, common: int, data: memoryview, at: int, mtu: int, flow: Icrc, identification: int
) -> tuple[int, int]:
    """Check packets of a train and copy their payload, from byte ``at`` of it on, as long as they are as expected.

    ``common`` is the BTH without its last word, as a number, for opcode 0. Returns how many packets were taken, and
    which of them last asked for an acknowledgement (-1: none). Nothing of another packet is touched.
    """
    size = mtu + 16
    view, offset, psn = run.view, run.offset, run.psn
    common |= run.opcode << 56
    count = min(run.limit, (len(data) - at) // size, (len(view) - offset) // mtu)
    unpack = HALVES.unpack_from
    taken, asked = 0, -1
    for start in flow.starts(size, identification, count):
        half, word = unpack(data, at)
        if half != common or word & PSN_MASK != psn:
            break
        end = at + size
        if crc32(data[at:end], start) != RESIDUE:
            break
        try:
            view[offset : offset + mtu] = data[at + 12 : end - 4]
        except (ValueError, TypeError):  # released, or read-only
            break
        if word > 0x7FFFFFFF:
            asked = taken
        taken += 1
        offset += mtu
        psn = psn + 1 & PSN_MASK
        at = end
    return taken, asked
