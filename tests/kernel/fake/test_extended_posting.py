"""Extended queue pairs by the functions of ``struct ibv_qp_ex``."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kernel.fake.fake_library import FakeLibrary
from rdmacm.address import Gid
from rdmacm.errors import RdmaError
from rdmacm.verbs import (
    AH,
    CQ,
    MR,
    MW,
    PD,
    QP,
    WC,
    AccessFlag,
    AHAttr,
    Context,
    DeviceCapFlag,
    GidType,
    GlobalRoute,
    MWBindInfo,
    MWType,
    PlacementType,
    QPAttr,
    QPCap,
    QPEx,
    QPInitAttr,
    QPInitAttrEx,
    QPState,
    QPType,
    SelectivityLevel,
    SendFlag,
    SendOpsFlag,
    SendWR,
    WCOpcode,
    WROpcode,
)

OLDER = SendOpsFlag(0x3FF)
EVERY = OLDER | SendOpsFlag.FLUSH | SendOpsFlag.ATOMIC_WRITE
SIGNALED = SendFlag.SIGNALED


@dataclass
class Site:
    """Queue pairs of a device."""

    fake: FakeLibrary
    context: Context
    pd: PD
    cq: CQ
    memory: bytearray
    mr: MR
    made: list[QP] = field(default_factory=list)

    def pair(self, ops: int = 0, qp_type: QPType = QPType.RC, cap: QPCap | None = None) -> QPEx:
        attr = QPInitAttrEx(qp_type, scq=self.cq, rcq=self.cq, pd=self.pd, send_ops_flags=ops)
        attr.cap = cap or QPCap(8, 8, 4, 4, 64)
        qp = QPEx(self.context, attr)
        self.ready(qp)
        self.made.append(qp)
        return qp

    def ready(self, qp: QP) -> None:
        """To RTS, of which the library takes no notice."""
        attr = QPAttr(port_num=1, ah_attr=AHAttr(is_global=True, port_num=1, gr=GlobalRoute(Gid("fe80::1"), 0)))
        qp.to_rts(attr)

    def completions(self) -> list[WC]:
        return self.cq.poll(99)


@pytest.fixture
def site(fake: FakeLibrary) -> Iterator[Site]:
    context = fake.add_device(cap_flags_ex=int(DeviceCapFlag.FLUSH_GLOBAL | DeviceCapFlag.ATOMIC_WRITE))
    fake.controls.send_ops = int(EVERY)
    fake.set_gids([(0, Gid("fe80::1"), GidType.ROCE_V2, 1)])
    memory = bytearray(4096)
    pd = PD(context)
    site = Site(fake, context, pd, CQ(context, 64), memory, MR(pd, memory, AccessFlag.LOCAL_WRITE))
    yield site
    for qp in site.made:
        qp.close()
    for part in (site.mr, site.cq, pd, context):
        part.close()


def test_atomic_write_and_flush(site: Site) -> None:
    qp, mr = site.pair(EVERY), site.mr
    qp.wr_start()
    qp.wr_id, qp.wr_flags = 1, SIGNALED
    qp.wr_atomic_write(mr.rkey, mr.addr + 8, b"12345678")
    qp.wr_id = 2
    qp.wr_flush(mr.rkey, mr.addr, 64, PlacementType.GLOBAL, SelectivityLevel.RANGE)
    qp.wr_complete()
    assert site.memory[8:16] == b"12345678"
    assert site.fake.log() == [
        f"1 flags 2 atomic_write {mr.rkey:x} {mr.addr + 8:x} 12345678",
        f"2 flags 2 flush {mr.rkey:x} {mr.addr:x} 64 1 0",
    ]
    assert [(wc.wr_id, wc.opcode) for wc in site.completions()] == [(1, WCOpcode.ATOMIC_WRITE), (2, WCOpcode.FLUSH)]


def test_every_other_operation(site: Site) -> None:
    qp, mr = site.pair(), site.mr
    key, at = mr.rkey, mr.addr
    qp.wr_start()
    qp.wr_flags = SIGNALED
    qp.wr_send()
    qp.wr_set_sge_list(2, [mr.sge(0, 8), mr.sge(16, 8)])
    qp.wr_send_imm(0x01020304)
    qp.wr_set_inline_data(b"inline")
    qp.wr_send_inv(0x77)
    qp.wr_set_sge(mr.sge(0, 1))
    qp.wr_rdma_write(key, at)
    qp.wr_set_sge(mr.sge(0, 2))
    qp.wr_rdma_write_imm(key, at, 5)
    qp.wr_set_sge(mr.sge(0, 3))
    qp.wr_rdma_read(key, at)
    qp.wr_set_sge(mr.sge(0, 4))
    qp.wr_atomic_cmp_swp(key, at, 6, 7)
    qp.wr_set_sge(mr.sge(0, 8))
    qp.wr_atomic_fetch_add(key, at, 8)
    qp.wr_set_sge(mr.sge(0, 8))
    qp.wr_complete()
    assert [line.split(" ", 3)[3] for line in site.fake.log()] == [
        f"send 2 elements {at:x}+8 {at + 16:x}+8",
        "send_imm 1020304 inline inline",
        f"send_inv 77 1 elements {at:x}+1",
        f"rdma_write {key:x} {at:x} 1 elements {at:x}+2",
        f"rdma_write_imm {key:x} {at:x} 5 1 elements {at:x}+3",
        f"rdma_read {key:x} {at:x} 1 elements {at:x}+4",
        f"atomic_cmp_swp {key:x} {at:x} 6 7 1 elements {at:x}+8",
        f"atomic_fetch_add {key:x} {at:x} 8 1 elements {at:x}+8",
    ]


def test_datagrams(site: Site) -> None:
    qp = site.pair(SendOpsFlag.SEND, QPType.UD)
    ah = AH(site.pd, AHAttr(is_global=True, port_num=1, gr=GlobalRoute(Gid("fe80::1"), 0)))
    qp.wr_start()
    qp.wr_send()
    qp.wr_set_ud_addr(ah, 0x1234, 0x5678)
    qp.wr_set_sge(site.mr.sge(0, 8))
    qp.wr_complete()
    assert site.fake.log() == [f"0 flags 0 send to 1234 5678 1 elements {site.mr.addr:x}+8"]


def test_bind_of_a_window(site: Site) -> None:
    qp, mr = site.pair(), site.mr
    with MW(site.pd, MWType.TYPE_2) as mw:
        qp.wr_start()
        qp.wr_bind_mw(mw, mw.rkey + 1, MWBindInfo(mr, mr.addr + 16, 32, AccessFlag.REMOTE_WRITE))
        qp.wr_complete()
        assert site.fake.log() == [f"0 flags 0 bind_mw abc01 {mr.addr + 16:x}+32"]
        assert mw.rkey == 0xABC01
        qp.close()


def test_refused_batch_is_not_posted(site: Site) -> None:
    qp = site.pair()
    site.fake.controls.complete_errno = errno.ENOSPC
    qp.wr_start()
    qp.wr_send()
    qp.wr_set_sge(site.mr.sge(0, 8))
    with pytest.raises(RdmaError) as caught:
        qp.wr_complete()
    assert caught.value.errno == errno.ENOSPC
    site.fake.controls.complete_errno = 0
    assert site.fake.log() == []
    qp.wr_start()
    qp.wr_send()
    qp.wr_set_sge(site.mr.sge(0, 8))
    qp.wr_complete()
    assert len(site.fake.log()) == 1  # and no batch of the library's was left open


def test_operations_that_the_device_lacks(site: Site) -> None:
    """Named ones are refused when the queue pair is made; where none are named, it has those of the device."""
    site.fake.controls.send_ops = int(OLDER)
    for ops in (SendOpsFlag.ATOMIC_WRITE, SendOpsFlag.FLUSH | SendOpsFlag.SEND):
        with pytest.raises(RdmaError) as caught:
            site.pair(ops)
        assert caught.value.errno == errno.EOPNOTSUPP
        assert "the device has no" in str(caught.value)
    qp = site.pair()
    qp.wr_start()
    qp.wr_send()
    qp.wr_set_sge(site.mr.sge(0, 8))
    qp.wr_complete()
    assert "send 1 elements" in site.fake.log()[0]
    qp.wr_start()
    qp.wr_flush(site.mr.rkey, site.mr.addr, 8, PlacementType.GLOBAL, SelectivityLevel.RANGE)
    with pytest.raises(RdmaError) as caught:
        qp.wr_complete()
    assert caught.value.errno == errno.EOPNOTSUPP


def test_elements_of_different_lengths(site: Site) -> None:
    """By ibv_post_send(3), in order: rdma_rxe's wr_set_sge_list of rdma-core 44 sends the length of the first twice."""
    qp, mr = site.pair(EVERY), site.mr
    qp.wr_start()
    qp.wr_id = 1
    qp.wr_send()
    qp.wr_set_sge_list(2, [mr.sge(0, 8), mr.sge(16, 8)])
    qp.wr_id = 2
    qp.wr_send()
    qp.wr_set_sge_list(2, [mr.sge(0, 8), mr.sge(16, 4)])
    qp.wr_id = 3
    qp.wr_flush(mr.rkey, mr.addr, 8, PlacementType.GLOBAL, SelectivityLevel.RANGE)
    qp.wr_complete()
    log = site.fake.log()
    assert [line.split(" ")[:2] for line in log] == [["1", "flags"], ["post_send", "2"], ["3", "flags"]]


def test_operations_that_only_the_library_knows(fake: FakeLibrary) -> None:
    """A driver's library may make queue pairs for operations that the device of an older kernel fails."""
    context = fake.add_device()
    fake.controls.send_ops = int(EVERY)
    with PD(context) as pd, CQ(context, 4) as cq:
        attr = QPInitAttrEx(QPType.RC, scq=cq, rcq=cq, pd=pd, send_ops_flags=SendOpsFlag.ATOMIC_WRITE)
        with pytest.raises(RdmaError) as caught:
            QPEx(context, attr)
        assert caught.value.errno == errno.EOPNOTSUPP
        assert "the device has no ATOMIC_WRITE" in str(caught.value)
    context.close()


def test_device_without_extended_queue_pairs(site: Site) -> None:
    site.fake.controls.send_ops = 0
    qp = site.pair(SendOpsFlag.SEND)
    qp.wr_start()
    qp.wr_id = 3
    qp.wr_send()
    qp.wr_set_sge(site.mr.sge(0, 8))
    qp.wr_complete()
    assert site.fake.log() == [f"post_send 3 opcode {int(WROpcode.SEND)}"]


def test_ordinary_posts_of_an_extended_queue_pair(site: Site) -> None:
    qp, mr = site.pair(EVERY), site.mr
    qp.post_send(SendWR(1, WROpcode.SEND, [mr.sge(0, 8)]))
    write = SendWR(2, WROpcode.ATOMIC_WRITE, [b"abcdefgh"], SIGNALED | SendFlag.INLINE)
    write.set_wr_rdma(mr.rkey, mr.addr)
    qp.post_send([SendWR(3, WROpcode.SEND, [mr.sge(0, 8)]), write])
    assert [line.split(" ")[:2] for line in site.fake.log()] == [["post_send", "1"], ["3", "flags"], ["2", "flags"]]
    assert site.memory[:8] == b"abcdefgh"
    registered = SendWR(4, WROpcode.ATOMIC_WRITE, [mr.sge(0, 8)])
    registered.set_wr_rdma(mr.rkey, mr.addr)
    with pytest.raises(RdmaError) as caught:
        qp.post_send(registered)
    assert (caught.value.errno, caught.value.bad_wr) == (errno.EINVAL, registered)


def test_closed_queue_pair(site: Site) -> None:
    qp = site.pair()
    backend = qp.backend
    qp.wr_start()
    qp.wr_send()
    qp.wr_set_sge(site.mr.sge(0, 8))
    qp.close()
    for post in (backend.post_send, backend.post_send_all):
        with pytest.raises(RdmaError) as caught:
            post([SendWR(1, WROpcode.SEND, [site.mr.sge(0, 8)])])
        assert caught.value.errno == errno.EBADF


def test_capabilities_of_the_device(fake: FakeLibrary) -> None:
    context = fake.add_device(cap_flags_ex=0x1C001223C76)
    flags = context.query_device().device_cap_flags_ex
    assert flags == 0x1C001223C76
    assert DeviceCapFlag.ATOMIC_WRITE in flags
    assert DeviceCapFlag.FLUSH_GLOBAL in flags


def test_inline_data_beyond_the_device(site: Site) -> None:
    """They are copied to registered memory; the 8 bytes of an ATOMIC WRITE are not."""
    site.fake.controls.max_inline, site.fake.controls.inline_errno = 0, errno.E2BIG
    qp, mr = site.pair(EVERY), site.mr
    qp.wr_start()
    qp.wr_send()
    qp.wr_set_inline_data(b"data")
    qp.wr_atomic_write(mr.rkey, mr.addr, b"12345678")
    qp.wr_complete()
    send, write = site.fake.log()
    assert send.startswith("0 flags 0 send 1 elements")
    assert send.endswith("+4")
    assert write.endswith("12345678")


def test_sizes_are_those_that_the_device_grants(site: Site) -> None:
    site.fake.controls.granted_wr_step, site.fake.controls.granted_inline = 15, 16
    site.made.append(
        ordinary := QP(site.pd, QPInitAttr(QPType.RC, None, site.cq, site.cq, None, QPCap(10, 10, 1, 1, 10)))
    )
    for qp in (ordinary, site.pair(cap=QPCap(10, 10, 1, 1, 10))):
        assert qp.cap == QPCap(15, 15, 1, 1, 16)
        assert qp.query()[0].cap == QPCap(15, 15, 1, 1, 16)
        assert qp.query()[1].cap == QPCap(15, 15, 1, 1, 16)
        assert qp.qp_state in (QPState.RESET, QPState.RTS)
