"""Memory windows and re-registration as programs use them: binds at both ends, traffic, and what ends the access."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from rdmacm import CmId
from rdmacm.verbs import (
    MR,
    MW,
    PD,
    AccessFlag,
    MWBind,
    MWBindInfo,
    MWType,
    QPCap,
    QPInitAttr,
    RecvWR,
    ReregMRFlag,
    SendFlag,
    SendWR,
    WCStatus,
    WROpcode,
)
from support.pair import ends

SIZE = 1024
LOCAL, WRITE = AccessFlag.LOCAL_WRITE, AccessFlag.REMOTE_WRITE
SUCCESS, REFUSED = WCStatus.SUCCESS, WCStatus.REM_ACCESS_ERR


@dataclass
class Player:
    """One end of a connection, its memory, and a window on it."""

    cmid: CmId
    mr: MR
    mw: MW | None = None

    def post(self, wr: SendWR) -> WCStatus:
        self.cmid.qp.post_send(wr)
        return self.cmid.get_send_comp(60).status

    def open(self, mw_type: MWType) -> None:
        """Bind a window to the whole region."""
        info = MWBindInfo(self.mr, self.mr.addr, SIZE, LOCAL | WRITE)
        self.mw = self.mw or MW(self.cmid.pd, mw_type)
        if mw_type is MWType.TYPE_1:
            self.cmid.qp.bind_mw(self.mw, MWBind(info, SendFlag.SIGNALED))
            assert self.cmid.get_send_comp(60).status is SUCCESS
        else:
            bind = SendWR(1, WROpcode.BIND_MW)
            bind.set_bind_wr(self.mw, info)
            assert self.post(bind) is SUCCESS
            assert bind.rkey == self.mw.rkey

    def write(self, peer: Player, data: bytes) -> WCStatus:
        assert peer.mw is not None
        wr = SendWR(2, WROpcode.RDMA_WRITE, [data], SendFlag.INLINE | SendFlag.SIGNALED)
        wr.set_wr_rdma(peer.mw.rkey, peer.mr.addr)
        return self.post(wr)

    def close(self) -> None:
        for each in (self.mw, self.mr):
            if each is not None:
                each.close()


@pytest.fixture
def players() -> Iterator[tuple[Player, Player]]:
    with ends() as both:
        made = [
            Player(cmid, MR(cmid.pd, bytearray(SIZE), LOCAL | AccessFlag.MW_BIND))
            for cmid in both.connect(QPInitAttr(cap=QPCap(16, 16, 2, 2, 64)))
        ]
        yield made[0], made[1]
        for player in made:
            player.close()


@pytest.mark.parametrize("change", ["domain", "buffer", "access", "nothing"])
def test_posted_receive_after_rereg(players: tuple[Player, Player], change: str) -> None:
    """Its key is looked up when the message arrives, also by a connection whose packets the compiled core takes."""
    one, other = players
    peer, mr, context = other.cmid.qp, other.mr, other.cmid.verbs
    assert peer is not None
    assert context is not None
    for number in range(8):
        peer.post_recv(RecvWR(number, [mr.sge(0, 100)]))
        assert one.post(SendWR(number, WROpcode.SEND, [one.mr.sge(0, 100)])) is SUCCESS
        assert other.cmid.get_recv_comp(60).status is SUCCESS
    old = memoryview(mr.buf)
    peer.post_recv([RecvWR(20, [mr.sge(0, 100)]), RecvWR(21, [mr.sge(0, 100)])])
    one.mr.write(b"message!")
    with PD(context) as domain:
        if change == "domain":
            mr.rereg(ReregMRFlag.CHANGE_PD, pd=domain)
        elif change == "buffer":
            mr.rereg(ReregMRFlag.CHANGE_TRANSLATION, None, bytearray(SIZE))
        else:
            mr.rereg(ReregMRFlag.CHANGE_ACCESS, access=LOCAL if change == "nothing" else 0)
        status = one.post(SendWR(20, WROpcode.SEND, [one.mr.sge(0, 100)]))
        arrived = [other.cmid.get_recv_comp(60).status]
        if change == "nothing":
            assert (status, arrived) == (SUCCESS, [SUCCESS])
            assert bytes(old[:8]) == b"message!"
        else:
            assert (status, arrived) == (WCStatus.REM_OP_ERR, [WCStatus.LOC_QP_OP_ERR])
            assert bytes(old[:8]) == bytes(8)
            assert mr.read(8) == bytes(8)
        old.release()
        if change == "domain":
            mr.rereg(ReregMRFlag.CHANGE_PD, pd=other.cmid.pd)


@pytest.mark.parametrize("mw_type", MWType, ids=lambda mw_type: mw_type.name)
def test_both_ends_write_through_windows(players: tuple[Player, Player], mw_type: MWType) -> None:
    for _ in range(3):
        for player in players:
            player.open(mw_type)
        for number in range(10):
            for one, other in (players, players[::-1]):
                assert one.write(other, b"%d" % number * 16) is SUCCESS
                assert other.mr.read(16) == b"%d" % number * 16
        if mw_type is MWType.TYPE_2:
            for player in players:
                assert player.mw is not None
                assert player.post(SendWR(3, WROpcode.LOCAL_INV, invalidate_rkey=player.mw.rkey)) is SUCCESS


@pytest.mark.parametrize(
    ("mw_type", "way"),
    [
        *((MWType.TYPE_1, "bind of 0 bytes"), (MWType.TYPE_1, "deallocation")),
        *((MWType.TYPE_2, "LOCAL_INV"), (MWType.TYPE_2, "SEND_WITH_INV"), (MWType.TYPE_2, "deallocation")),
    ],
)
def test_windows_are_closed(players: tuple[Player, Player], mw_type: MWType, way: str) -> None:
    for player in players:
        player.open(mw_type)
    for one, other in (players, players[::-1]):
        mw, qp = one.mw, one.cmid.qp
        assert mw is not None
        assert qp is not None
        if way == "bind of 0 bytes":
            qp.bind_mw(mw, MWBind(MWBindInfo(one.mr, one.mr.addr, 0, 0), SendFlag.SIGNALED))
            assert one.cmid.get_send_comp(60).status is SUCCESS
        elif way == "LOCAL_INV":
            assert one.post(SendWR(3, WROpcode.LOCAL_INV, invalidate_rkey=mw.rkey)) is SUCCESS
        elif way == "SEND_WITH_INV":
            qp.post_recv(RecvWR(4))
            assert other.post(SendWR(3, WROpcode.SEND_WITH_INV, invalidate_rkey=mw.rkey)) is SUCCESS
            assert one.cmid.get_recv_comp(60).invalidated_rkey == mw.rkey
        else:
            key = mw.rkey
            mw.close()
            assert mw.rkey == key
    assert players[0].write(players[1], b"too late") is REFUSED
    assert players[1].mr.read(8) == bytes(8)


def test_region_lives_as_long_as_a_window_is_bound_to_it() -> None:
    with ends() as both:
        cmid, _ = both.connect()
        memory = bytearray(SIZE)
        player = Player(cmid, MR(cmid.pd, memory, LOCAL | AccessFlag.MW_BIND))
        player.open(MWType.TYPE_1)
        window, player.mw = player.mw, None
        del player
        gc.collect()
        with pytest.raises(BufferError):
            memory.append(1)
        with pytest.warns(ResourceWarning, match="unclosed <M"):
            del window
            gc.collect()
            both.fabric.run(seconds=0.1)
        memory.append(1)


def test_forgotten_cycle_of_a_window_and_its_region_is_released() -> None:
    with ends() as both:
        cmid, _ = both.connect()
        memory = bytearray(SIZE)
        player = Player(cmid, MR(cmid.pd, memory, LOCAL | AccessFlag.MW_BIND))
        player.open(MWType.TYPE_2)
        cycle: list[object] = [player]
        cycle.append(cycle)
        with pytest.warns(ResourceWarning, match="unclosed <M"):
            del player, cycle
            gc.collect()
            both.fabric.run(seconds=0.1)
        memory.append(1)


# -- ibv_rereg_mr(3) --------------------------------------------------------------------------------------------


def remote_write(one: Player, other: Player) -> WCStatus:
    wr = SendWR(2, WROpcode.RDMA_WRITE, [b"data"], SendFlag.INLINE | SendFlag.SIGNALED)
    wr.set_wr_rdma(other.mr.rkey, other.mr.addr)
    return one.post(wr)


def test_access_of_a_region_changes(players: tuple[Player, Player]) -> None:
    one, other = players
    other.mr.rereg(ReregMRFlag.CHANGE_ACCESS, access=LOCAL | WRITE)
    assert remote_write(one, other) is SUCCESS
    other.mr.rereg(ReregMRFlag.CHANGE_ACCESS, access=LOCAL)
    assert remote_write(one, other) is REFUSED


def test_domain_of_a_region_changes(players: tuple[Player, Player]) -> None:
    one, other = players
    with PD(one.cmid.pd.context) as domain:
        send = SendWR(2, sg=[one.mr.sge(0, 4)])
        other.cmid.post_recv(1, other.mr)
        one.mr.rereg(ReregMRFlag.CHANGE_PD, domain)
        one.mr.rereg(ReregMRFlag.CHANGE_PD, one.cmid.pd)
        assert one.post(send) is SUCCESS
        one.mr.rereg(ReregMRFlag.CHANGE_PD, domain)
        assert one.post(send) is WCStatus.LOC_PROT_ERR
        one.mr.rereg(ReregMRFlag.CHANGE_PD, one.cmid.pd)


def test_buffer_of_a_region_changes(players: tuple[Player, Player]) -> None:
    one, other = players
    before, after = other.mr.buf.obj, bytearray(2 * SIZE)
    other.mr.rereg(ReregMRFlag.CHANGE_TRANSLATION | ReregMRFlag.CHANGE_ACCESS, None, after, None, LOCAL | WRITE)
    assert remote_write(one, other) is SUCCESS
    assert after[:4] == b"data"
    assert isinstance(before, bytearray)
    before.append(1)
    assert not any(before[:-1])
