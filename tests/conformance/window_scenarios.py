"""Scenarios of two ends, one of which opens memory by windows; see support/scenario.py."""

from __future__ import annotations

import errno
import struct
from contextlib import ExitStack

from conformance.scenarios import REMOTE, SIGNALED, accepted, connected, ended, pattern, post, region_of
from rdmacm.verbs import MR, MW, AccessFlag, MWBindInfo, MWType, SendFlag, SendWR, WCOpcode, WROpcode
from support.scenario import Side, refused

ROUNDS, WINDOW = 2, 20_000
KINDS = MWType.TYPE_1, MWType.TYPE_2, MWType.TYPE_2
ZERO_BASED = AccessFlag.ZERO_BASED
KEYS = struct.Struct("!III")


def bind(window: MW, region: MR, place: int, access: AccessFlag = REMOTE, size: int = WINDOW) -> SendWR:
    """A request to bind a window to one of the places of a region."""
    wr = SendWR(place, WROpcode.BIND_MW)
    wr.set_bind_wr(window, MWBindInfo(region, region.addr + place * WINDOW, size, access))
    return wr


async def windows_passive(side: Side) -> None:
    listener, cmid, _ = await accepted(side, 2 * ROUNDS + 1, 64)
    region = region_of(cmid, bytes(3 * WINDOW), AccessFlag.LOCAL_WRITE | AccessFlag.MW_BIND)
    keys = region_of(cmid, bytes(KEYS.size))
    await side.completion(cmid.recv_cq)
    side.tell("memory", region.addr)
    with ExitStack() as windows:
        one, two, zero_based = (windows.enter_context(MW(cmid.pd, kind)) for kind in KINDS)
        for number in range(ROUNDS):
            binds = [bind(one, region, 0), bind(two, region, 1), bind(zero_based, region, 2, REMOTE | ZERO_BASED)]
            keys.write(KEYS.pack(*(wr.rkey for wr in binds)))
            post(cmid, *binds, SendWR(3, WROpcode.SEND, [keys.sge()], SIGNALED))
            for place in range(4):
                wc = await side.completion(cmid.send_cq)
                assert (wc.wr_id, wc.opcode) == (place, WCOpcode.BIND_MW if place < 3 else WCOpcode.SEND)
            with refused(errno.EBUSY):
                region.close()
            for wr in binds[:0:-1]:
                wc = await side.completion(cmid.recv_cq)
                assert wc.invalidated_rkey == wr.rkey
            for place in range(3):
                memory = bytearray(pattern(WINDOW, 3 * number + place))
                memory[-8:] = (int.from_bytes(memory[-8:], "little") + number + 1 & ~(-1 << 64)).to_bytes(8, "little")
                assert region.read(WINDOW, place * WINDOW) == memory
    side.tell("acknowledged", None)  # an earlier disconnect would lose the last ACKs
    await ended(side, cmid, listener, first=False)


async def windows_active(side: Side) -> None:
    cmid, inbox = await connected(side, ROUNDS, 64)
    post(cmid, SendWR(0, WROpcode.SEND, [], SIGNALED))  # repeated until it arrives, unlike an RTU
    await side.completion(cmid.send_cq)
    addr = await side.told("memory")
    local = region_of(cmid, bytes(WINDOW))
    value = region_of(cmid, bytes(8))
    for number in range(ROUNDS):
        wc = await side.completion(cmid.recv_cq)
        keys = KEYS.unpack(inbox.read(KEYS.size, wc.wr_id * 64))
        for place, (rkey, start) in enumerate(zip(keys, (addr, addr + WINDOW, 0), strict=True)):
            data = pattern(WINDOW, 3 * number + place)
            local.write(data)
            cmid.post_write(1, local, start, rkey, flags=SIGNALED)
            add = SendWR(2, WROpcode.ATOMIC_FETCH_AND_ADD, [value.sge()], SIGNALED)
            add.set_wr_atomic(rkey, start + WINDOW - 8, number + 1)
            post(cmid, add)
            await side.completion(cmid.send_cq)
            wc = await side.completion(cmid.send_cq)
            assert (wc.wr_id, value.read(8)) == (2, data[-8:])
            cmid.post_read(3, local, start, rkey, flags=SIGNALED)
            await side.completion(cmid.send_cq)
            assert local.read(WINDOW - 8) == data[:-8]
        for rkey in keys[:0:-1]:
            post(cmid, SendWR(4, WROpcode.SEND_WITH_INV, [], SIGNALED | SendFlag.FENCE, invalidate_rkey=rkey))
            await side.completion(cmid.send_cq)
    await side.told("acknowledged")
    await ended(side, cmid)
