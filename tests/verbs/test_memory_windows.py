"""Memory windows and the re-registration of regions: what the verbs objects check, and what reaches the device."""

from __future__ import annotations

import errno
import gc
from collections.abc import Iterator
from typing import Any

import pytest

from rdmacm import RdmaError, cma
from rdmacm.verbs import (
    CQ,
    MR,
    MW,
    PD,
    QP,
    AccessFlag,
    Context,
    MWBind,
    MWBindInfo,
    MWType,
    QPCap,
    QPInitAttr,
    QPState,
    ReregMRFlag,
    SendFlag,
    SendWR,
    WROpcode,
    inc_rkey,
)
from support.verbs import RecordingDevice, RecordingMR, RecordingQP, context_of

LOCAL, READ, WRITE = AccessFlag.LOCAL_WRITE, AccessFlag.REMOTE_READ, AccessFlag.REMOTE_WRITE
ONE, TWO = MWType
PD_, ACCESS, TRANSLATION = ReregMRFlag.CHANGE_PD, ReregMRFlag.CHANGE_ACCESS, ReregMRFlag.CHANGE_TRANSLATION


class Rig:
    """A queue pair ready to send, a region, and a window of each type."""

    def __init__(self, context: Context, device: RecordingDevice) -> None:
        self.pd, self.cq = PD(context), CQ(context, 16)
        self.mr = MR(self.pd, bytearray(64), LOCAL | AccessFlag.MW_BIND)
        self.one, self.two = MW(self.pd, ONE), MW(self.pd, TWO)
        self.qp = QP(self.pd, QPInitAttr(scq=self.cq, rcq=self.cq, cap=QPCap(max_send_wr=8)))
        backend = device.living[-1]
        assert isinstance(backend, RecordingQP)
        self.backend = backend
        backend.state = QPState.RTS

    def bind(self, **changes: Any) -> SendWR:
        """A bind of the window of type 2 to the region; ``changes`` are fields of the request and of its bind_info."""
        wr = SendWR(1, WROpcode.BIND_MW)
        wr.set_bind_wr(self.two, MWBindInfo(self.mr, self.mr.addr, 64, WRITE))
        for name, value in changes.items():
            setattr(wr if hasattr(wr, name) else wr.bind_info, name, value)
        return wr

    def close(self) -> None:
        for thing in (self.qp, self.one, self.two, self.mr, self.cq, self.pd):
            thing.close()


@pytest.fixture
def rig(context: Context, device: RecordingDevice) -> Iterator[Rig]:
    made = Rig(context, device)
    yield made
    made.close()
    assert device.living == []


# -- windows ----------------------------------------------------------------------------------------------------


def test_window_belongs_to_its_domain(rig: Rig, device: RecordingDevice) -> None:
    window = MW(rig.pd, 2)  # type: ignore[arg-type]
    assert (window.type, window.pd, window.context) == (TWO, rig.pd, rig.pd.context)
    assert repr(window) == f"<MW TYPE_2 rkey=0x{window.rkey:x}>"
    with pytest.raises(RdmaError, match="2 MW") as caught:
        PD(rig.pd.context).close()
        rig.qp.close()
        rig.cq.close()
        window.close()
        rig.pd.close()
    assert caught.value.errno == errno.EBUSY
    window.close()
    assert (window.closed, repr(window)) == (True, "<MW closed>")
    with pytest.warns(ResourceWarning, match="unclosed"):
        MW(rig.pd, ONE)
        gc.collect()


@pytest.mark.parametrize("mw_type", [0, 3, 1.0, None, "2"])
def test_other_types_are_refused(rig: Rig, mw_type: Any) -> None:
    for alloc in (MW, cma.ibv_alloc_mw):
        with pytest.raises(RdmaError, match=r"TYPE_1 \(1\), TYPE_2 \(2\)") as caught:
            alloc(rig.pd, mw_type)
        assert caught.value.errno == errno.EINVAL


def test_next_key_changes_the_lower_eight_bits() -> None:
    assert [inc_rkey(key) for key in (0x12345600, 0x123456FE, 0x123456FF, 0xFFFFFFFF)] == [
        *(0x12345601, 0x123456FF, 0x12345600, 0xFFFFFF00)
    ]
    assert cma.ibv_inc_rkey(0x1FF) == 0x100


# -- binds ------------------------------------------------------------------------------------------------------


def test_bind_reaches_the_device(rig: Rig) -> None:
    wr = rig.bind()
    assert (wr.mw, wr.rkey) == (rig.two, inc_rkey(rig.two.rkey))
    rig.qp.post_send(wr)
    wr.set_bind_wr(rig.two, MWBindInfo(None, 0, 0, 0), rig.two.rkey + 7)
    rig.qp.post_send(wr)
    assert wr.rkey == rig.two.rkey + 7
    info = MWBindInfo(rig.mr, rig.mr.addr, 64, READ)
    rig.qp.bind_mw(rig.one, MWBind(info, SendFlag.SIGNALED | SendFlag.FENCE, 5))
    *_, posted = rig.backend.sent
    assert (posted.opcode, posted.wr_id, posted.bind_info) == (WROpcode.BIND_MW, 5, info)
    assert (posted.send_flags, posted.mw, posted.rkey) == (3, rig.one, inc_rkey(rig.one.rkey))
    rig.qp.post_send(SendWR(1, WROpcode.LOCAL_INV, invalidate_rkey=0xFFFFFFFF))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mw": None}, "needs a memory window"),
        ({"mw": object()}, "needs a memory window"),
        ({"bind_info": None}, "needs a memory window"),
        ({"bind_info": (1, 2, 3, 4)}, "needs a memory window"),
        ({"mr": 7}, "mr is 7, not of class MR"),
        ({"mr": None}, "addr and length of no region"),
        ({"rkey": 0x1100}, "more than 8 bits"),
        ({"rkey": -1}, "more than 8 bits"),
        ({"rkey": 1 << 32}, "more than 8 bits"),
        ({"rkey": 1.0}, "rkey is 1.0, not a whole number"),
        ({"addr": -1}, "addr .* more than 64 bits"),
        ({"addr": 1 << 64}, "addr .* more than 64 bits"),
        ({"length": 1 << 64}, "length .* more than 64 bits"),
        ({"length": -1}, "length .* more than 64 bits"),
        ({"length": 8.0}, "float"),
        ({"mw_access_flags": 1 << 30}, "unknown mw_access_flags 0x40000000"),
        ({"mw_access_flags": None}, "NoneType"),
        ({"sg": [b"x"], "send_flags": SendFlag.INLINE}, "BIND_MW has no elements|inline"),
    ],
)
def test_binds_are_checked(rig: Rig, changes: dict[str, Any], text: str) -> None:
    wr = rig.bind(**changes)
    with pytest.raises(RdmaError, match=text) as caught:
        rig.qp.post_send([wr])
    assert (caught.value.errno, caught.value.bad_wr) == (errno.EINVAL, wr)
    assert rig.backend.sent == []


def test_closed_windows_and_regions_are_not_bound(rig: Rig) -> None:
    with MR(rig.pd, bytearray(8), LOCAL) as mr, MW(rig.pd, TWO) as mw:
        requests = [rig.bind(mr=mr), rig.bind(mw=mw, rkey=mw.rkey)]
    for wr in requests:
        with pytest.raises(RdmaError, match="is closed") as caught:
            rig.qp.post_send(wr)
        assert caught.value.errno == errno.EBADF


def test_bind_mw_is_for_type_1(rig: Rig) -> None:
    def refused(mw: Any, bind: Any) -> int | None:
        with pytest.raises(RdmaError) as caught:
            rig.qp.bind_mw(mw, bind)
        return caught.value.errno

    info = MWBindInfo(rig.mr, rig.mr.addr, 8, WRITE)
    assert refused(rig.two, MWBind(info)) == errno.EINVAL
    assert refused(rig.one, info) == errno.EINVAL
    assert refused(rig.one, MWBind(None)) == errno.EINVAL  # type: ignore[arg-type]
    assert refused(None, MWBind(info)) == errno.EINVAL
    assert refused(rig.one, MWBind(MWBindInfo(rig.mr, 0, 8, AccessFlag.ZERO_BASED))) == errno.EINVAL
    assert refused(rig.one, MWBind(MWBindInfo(rig.mr, 0, 8, 1 << 30))) == errno.EINVAL
    with PD(rig.pd.context) as other, MR(other, bytearray(8), LOCAL) as foreign:
        assert refused(rig.one, MWBind(MWBindInfo(foreign, foreign.addr, 8, WRITE))) == errno.EPERM
    assert rig.backend.sent == []


@pytest.mark.parametrize("opcode", [WROpcode.LOCAL_INV, WROpcode.BIND_MW], ids=lambda opcode: opcode.name)
def test_local_operations_have_no_elements(rig: Rig, opcode: WROpcode) -> None:
    wr = rig.bind(opcode=opcode, sg=[rig.mr.sge(0, 8)])
    with pytest.raises(RdmaError, match=f"{opcode.name} has no elements"):
        rig.qp.post_send(wr)
    for key in (-1, 1 << 32):
        with pytest.raises(RdmaError, match="invalidate_rkey"):
            rig.qp.post_send(SendWR(1, WROpcode.LOCAL_INV, invalidate_rkey=key))


def test_c_names(rig: Rig) -> None:
    wr = cma.ibv_send_wr(opcode=cma.IBV_WR_BIND_MW, send_flags=cma.IBV_SEND_SIGNALED)
    mw = cma.ibv_alloc_mw(rig.pd, cma.IBV_MW_TYPE_2)
    wr.bind_mw.mw = mw
    wr.bind_mw.rkey = cma.ibv_inc_rkey(mw.rkey)
    info = wr.bind_mw.bind_info
    assert info is not None
    info.mr, info.addr, info.length, info.mw_access_flags = rig.mr, rig.mr.addr, 8, cma.IBV_ACCESS_REMOTE_READ
    cma.ibv_post_send(rig.qp, wr)
    bind = cma.ibv_mw_bind(send_flags=cma.IBV_SEND_SIGNALED, wr_id=3)
    cma.ibv_bind_mw(rig.qp, rig.one, bind)
    assert [wr.wr_id for wr in rig.backend.sent] == [0, 3]
    assert rig.backend.sent[1].bind_info is bind.bind_info
    assert bind.bind_info == cma.ibv_mw_bind_info(None, 0, 0, 0)
    cma.ibv_dealloc_mw(mw)
    cma.ibv_rereg_mr(rig.mr, cma.IBV_REREG_MR_CHANGE_ACCESS, None, None, 0, cma.IBV_ACCESS_LOCAL_WRITE)
    assert rig.mr.access is LOCAL
    assert cma.IBV_REREG_MR_FLAGS_SUPPORTED == 7


# -- regions ----------------------------------------------------------------------------------------------------


def test_region_changes_what_the_flags_name(rig: Rig) -> None:
    buffer = bytearray(100)
    backend = rig.mr.backend
    assert isinstance(backend, RecordingMR)
    before = (rig.mr.lkey, rig.mr.rkey)
    with PD(rig.pd.context) as other:
        rig.mr.rereg(ACCESS, other, buffer, 10, LOCAL | READ)
        assert (rig.mr.access, rig.mr.pd, rig.mr.length) == (LOCAL | READ, rig.pd, 64)
        assert (backend.access, backend.pd) == (LOCAL | READ, rig.pd)
        rig.mr.rereg(PD_, other, access=WRITE)
        assert (rig.mr.pd, backend.pd, rig.mr.access) == (other, other, LOCAL | READ)
        with pytest.raises(RdmaError, match="1 MR"):
            other.close()
        rig.mr.rereg(TRANSLATION, buffer=buffer, length=40)
        rig.mr.write(b"moved")
        assert (bytes(buffer[:5]), rig.mr.length, rig.mr.addr) == (b"moved", 40, backend.addr)
        rig.mr.rereg(TRANSLATION | PD_ | ACCESS, rig.pd, bytearray(7), None, WRITE | LOCAL)
        assert (rig.mr.pd, rig.mr.length, rig.mr.access) == (rig.pd, 7, WRITE | LOCAL)
        buffer.append(1)
    assert (rig.mr.lkey, rig.mr.rkey) == before


def test_region_stays_as_it_is_after_an_error(rig: Rig, device: RecordingDevice) -> None:
    def refused(*arguments: Any) -> int | None:
        with pytest.raises(RdmaError) as caught:
            rig.mr.rereg(*arguments)
        return caught.value.errno

    elsewhere = PD(context_of(RecordingDevice()))
    closed = PD(rig.pd.context)
    closed.close()
    for arguments in (
        *((0,), (8,), (None,), (PD_,), (PD_, 7), (PD_, elsewhere), (ACCESS, None, None, None, 1 << 30)),
        *((ACCESS, None, None, None, WRITE), (TRANSLATION,), (TRANSLATION, None, bytearray(0))),
        *((TRANSLATION, None, bytes(8)), (TRANSLATION, None, bytearray(8), 9), (TRANSLATION, None, bytearray(8), 0)),
        (TRANSLATION, None, bytearray(1 << 21)),
    ):
        assert refused(*arguments) == errno.EINVAL, arguments
    assert refused(PD_, closed) == errno.EBADF
    device.refuses = RdmaError(errno.EBUSY, "windows")
    with PD(rig.pd.context) as other:
        assert refused(PD_ | ACCESS, other, None, None, LOCAL) == errno.EBUSY
    device.refuses = None
    assert (rig.mr.pd, rig.mr.length, rig.mr.access) == (rig.pd, 64, LOCAL | AccessFlag.MW_BIND)
    constant = MR(rig.pd, b"constant", READ)
    with pytest.raises(RdmaError, match="read-only"):
        constant.rereg(ACCESS, access=LOCAL)
    constant.close()
    with pytest.raises(RdmaError, match="the MR is closed"):
        constant.rereg(ACCESS, access=0)
    elsewhere.close()


def test_region_with_windows_stays_open(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device refuses to deregister it, and it can be closed later."""

    def refuse(self: RecordingMR) -> None:
        raise RdmaError(errno.EBUSY, "memory windows are bound to it: 1")

    with monkeypatch.context() as patch:
        patch.setattr(RecordingMR, "dereg", refuse)
        with pytest.raises(RdmaError, match="memory windows are bound"):
            rig.mr.close()
    assert not rig.mr.closed
    rig.mr.write(b"still there")
