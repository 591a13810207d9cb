"""Every operation between two queue pairs of the kernel's device."""

from __future__ import annotations

import errno
import struct

from kernel.verbs_guest.pair import FULL, PATIENCE, Pair, address, outcome, refused, run_checks
from rdmacm.verbs import (
    AH,
    MW,
    SRQ,
    AccessFlag,
    DeviceCapFlag,
    EventType,
    MWBind,
    MWBindInfo,
    MWType,
    PlacementType,
    QPAttr,
    QPAttrMask,
    QPCap,
    QPEx,
    QPInitAttrEx,
    QPState,
    QPType,
    RecvWR,
    SelectivityLevel,
    SendFlag,
    SendOpsFlag,
    SendWR,
    SrqAttr,
    SrqAttrMask,
    SrqInitAttr,
    WCOpcode,
    WCStatus,
    WROpcode,
)

OP = WROpcode
INLINE = SendFlag.INLINE | SendFlag.SIGNALED


def check_send(name: str) -> None:
    with Pair(name) as pair:
        pair.memory[:10] = b"0123456789"
        recv = RecvWR(2, [pair.mr.sge(1000, 4), pair.mr.sge(2000, 100)])
        sent, received = pair.do(SendWR(1, OP.SEND, [pair.mr.sge(5, 5), pair.mr.sge(0, 5)]), receives=[recv])
        assert (sent.opcode, sent.qp_num) == (WCOpcode.SEND, pair.first.qp_num)
        assert (received.opcode, received.byte_len, received.qp_num) == (WCOpcode.RECV, 10, pair.second.qp_num)
        assert pair.memory[1000:1004] + pair.memory[2000:2006] == b"5678901234"
        assert received.imm_data is None


def check_immediate_and_invalidate(name: str) -> None:
    with Pair(name) as pair:
        receives = [RecvWR(number, [pair.mr.sge(4096, 16)]) for number in (4, 5)]
        send = SendWR(1, OP.SEND_WITH_IMM, [pair.mr.sge(0, 4)], imm_data=0x01020304)
        write = SendWR(2, OP.RDMA_WRITE_WITH_IMM, [pair.mr.sge(0, 4)], imm_data=0xFFFFFFFE)
        write.set_wr_rdma(pair.mr.rkey, pair.mr.addr + 8192)
        found = pair.do(send, write, receives=receives)
        assert [wc.imm_data for wc in found[2:]] == [0x01020304, 0xFFFFFFFE]
        assert [wc.opcode for wc in found[2:]] == [WCOpcode.RECV, WCOpcode.RECV_RDMA_WITH_IMM]


def check_inline(name: str) -> None:
    with Pair(name) as pair:
        data = bytearray(b"abc")
        wrs = [
            SendWR(1, OP.SEND, [data, b"defg"], SendFlag.INLINE | SendFlag.SIGNALED),
            SendWR(2, OP.SEND, [pair.mr.sge(0, 2), memoryview(b"xyz"), b"", b"!"], SendFlag.INLINE | SendFlag.SIGNALED),
        ]
        pair.memory[:2] = b"??"
        receives = [RecvWR(3, [pair.mr.sge(100, 50)]), RecvWR(4, [pair.mr.sge(200, 50)])]
        pair.second.post_recv(receives)
        pair.first.post_send(wrs)
        data[:] = b"___"
        found = pair.completions(4)
        assert [wc.byte_len for wc in found[2:]] == [7, 6]
        assert pair.memory[100:107] == b"abcdefg"
        assert pair.memory[200:206] == b"??xyz!"


def check_inline_data_beyond_the_device(name: str) -> None:
    """They are sent as they were when they were posted, also after the queue has gone round."""
    with Pair(name, inline=3000) as pair:
        for start in range(0, 200, 20):
            data = [bytearray(b"%d " % number * 500) for number in range(start, start + 20)]
            expected = [bytes(each[:2800]) for each in data]
            wrs = [SendWR(n, OP.SEND, [memoryview(each)[:2800]], INLINE) for n, each in enumerate(data)]
            pair.second.post_recv([RecvWR(100 + n, [pair.mr.sge(n * 3000, 3000)]) for n in range(20)])
            pair.first.post_send(wrs)
            for each in data:
                each[:] = bytes(len(each))
            found = pair.completions(40)
            assert all(wc.status is WCStatus.SUCCESS for wc in found), found
            received = [bytes(pair.memory[n * 3000 : n * 3000 + wc.byte_len]) for n, wc in enumerate(found[20:])]
            assert received == expected
        wrs = [SendWR(n, OP.SEND, [b"%04d" % n * 700], INLINE) for n in range(500)]
        error = refused(lambda: pair.first.post_send(wrs))  # nothing is received yet, so the queue fills up
        assert error.errno == errno.ENOMEM, error
        posted = [wr is error.bad_wr for wr in wrs].index(True)
        for _ in range(50):
            assert refused(lambda: pair.first.post_send(wrs[posted])).errno == errno.ENOMEM
        for n in range(posted):
            pair.second.post_recv(RecvWR(1000, [pair.mr.sge(0, 3000)]))
            assert len(pair.completions(2)) == 2
            assert pair.memory[:2800] == b"%04d" % n * 700


def check_write_read_atomics(name: str) -> None:
    with Pair(name) as pair:
        mr = pair.mr
        pair.memory[:6000] = bytes(number % 251 for number in range(6000))
        write = SendWR(1, OP.RDMA_WRITE, [mr.sge(0, 6000)], remote_addr=mr.addr + 8192, rkey=mr.rkey)
        read = SendWR(2, OP.RDMA_READ, [mr.sge(20000, 6000)], remote_addr=mr.addr + 8192, rkey=mr.rkey)
        found = pair.do(write, read)
        assert [wc.opcode for wc in found] == [WCOpcode.RDMA_WRITE, WCOpcode.RDMA_READ]
        assert pair.memory[20000:26000] == pair.memory[:6000]
        pair.memory[40000:40008] = struct.pack("=Q", 100)
        add, swap = (
            SendWR(number, opcode, [mr.sge(number * 8 + 30000, 8)])
            for number, opcode in ((1, OP.ATOMIC_FETCH_AND_ADD), (2, OP.ATOMIC_CMP_AND_SWP))
        )
        where = mr.addr + 40000
        where += -where % 8
        offset = where - mr.addr
        pair.memory[offset : offset + 8] = struct.pack("=Q", 100)
        add.set_wr_atomic(mr.rkey, where, 23)
        swap.set_wr_atomic(mr.rkey, where, 123, 1 << 63)
        found = pair.do(add, swap)
        assert [wc.opcode for wc in found] == [WCOpcode.FETCH_ADD, WCOpcode.COMP_SWAP]
        assert struct.unpack_from("=QQ", pair.memory, 30008) == (100, 123)
        assert struct.unpack_from("=Q", pair.memory, offset) == (1 << 63,)


def check_many_at_a_time(name: str) -> None:
    with Pair(name) as pair:
        wrs = [SendWR(number, OP.SEND, [pair.mr.sge(number, 1)]) for number in range(50)]
        receives = [RecvWR(100 + number, [pair.mr.sge(1000 + number, 1)]) for number in range(50)]
        pair.memory[:50] = bytes(range(50))
        pair.do(*wrs, receives=receives)
        assert pair.memory[1000:1050] == bytes(range(50))


def check_refused_request(name: str) -> None:
    """The queue has room for some of the requests: those before the error's are posted."""
    with Pair(name) as pair:
        wrs = [RecvWR(number, [pair.mr.sge(0, 1)]) for number in range(1000)]
        error = refused(lambda: pair.second.post_recv(wrs))
        assert error.errno == errno.ENOMEM, error
        posted = [wr is error.bad_wr for wr in wrs].index(True)
        assert posted >= 64
        pair.second.to_error()
        assert [wc.wr_id for wc in pair.completions(posted)] == list(range(posted))


def check_wrong_keys(name: str) -> None:
    with Pair(name) as pair:
        write = SendWR(1, OP.RDMA_WRITE, [pair.mr.sge(0, 8)], remote_addr=pair.mr.addr, rkey=pair.mr.rkey ^ 0xFF00)
        pair.first.post_send(write)
        (found,) = pair.completions(1)
        assert found.status is WCStatus.REM_ACCESS_ERR, found
        assert pair.first.state is QPState.ERR
        pair.first.post_send(SendWR(2, OP.SEND, [pair.mr.sge(0, 8)]))
        (found,) = pair.completions(1)
        assert found.status is WCStatus.WR_FLUSH_ERR
    with Pair(name) as pair:
        pair.first.post_send(SendWR(1, OP.SEND, [type(pair.mr.sge())(pair.mr.addr, 8, pair.mr.lkey ^ 0xFF00)]))
        (found,) = pair.completions(1)
        # rdma_rxe of Linux 6.12 flushes the request before it has said why the queue pair has failed; that of 6.1
        # finds a fault of the queue pair.
        assert found.status in (WCStatus.LOC_PROT_ERR, WCStatus.WR_FLUSH_ERR, WCStatus.LOC_QP_OP_ERR), found


def check_reset_drops_completions(name: str) -> None:
    with Pair(name) as pair:
        pair.second.post_recv(RecvWR(9, [pair.mr.sge(100, 5)]))
        pair.first.post_send(SendWR(1, OP.SEND, [pair.mr.sge(0, 5)]))
        assert [wc.wr_id for wc in pair.completions(2)] == [1, 9]
        pair.second.post_recv(RecvWR(9, [pair.mr.sge(100, 5)]))
        pair.second.to_error()
        assert pair.cq.wait(PATIENCE)  # the receive is flushed
        pair.second.modify(QPAttr(qp_state=QPState.RESET), QPAttrMask.STATE)
        assert pair.cq.poll(5) == []


def check_drained_queue_goes_on(name: str) -> None:
    """Requests that were posted before and during SQD are sent after it, without another post."""
    with Pair(name) as pair:
        pair.second.post_recv([RecvWR(100 + number, [pair.mr.sge(1000, 10)]) for number in range(20)])
        pair.first.post_send([SendWR(number, OP.SEND, [pair.mr.sge(0, 10)]) for number in range(6)])
        pair.first.modify(QPAttr(qp_state=QPState.SQD), QPAttrMask.STATE)
        pair.first.post_send([SendWR(number, OP.SEND, [pair.mr.sge(0, 10)]) for number in range(6, 12)])
        while pair.first.query()[0].sq_draining:
            pass
        pair.first.modify(QPAttr(qp_state=QPState.RTS), QPAttrMask.STATE)
        assert [wc.wr_id for wc in pair.completions(24)] == [*range(12), *range(100, 112)]


def check_shared_receive_queue(name: str) -> None:
    with Pair(name, srq=lambda pd: SRQ(pd, SrqInitAttr(SrqAttr(20, 2)))) as pair:
        srq = pair.srq
        assert srq is not None
        assert srq.query().max_wr >= 20
        assert pair.context.async_fd >= 0
        srq.post_recv([RecvWR(10 + number, [pair.mr.sge(1000 * number, 10)]) for number in (1, 2, 3)])
        srq.modify(SrqAttr(srq_limit=3), SrqAttrMask.LIMIT)
        pair.memory[:4] = b"abcd"
        pair.first.post_send(SendWR(1, OP.SEND, [pair.mr.sge(0, 4)]))
        found = pair.completions(2)
        assert [wc.wr_id for wc in found] == [1, 11]
        with pair.context.get_async_event(PATIENCE) as event:
            assert event.event_type is EventType.SRQ_LIMIT_REACHED
            assert event.element is srq
        assert srq.query().srq_limit == 0


def check_datagrams(name: str) -> None:
    with Pair(name, QPType.UD) as pair:
        handle = AH(pair.pd, address(pair.context))
        pair.memory[:6] = b"gram !"
        send = SendWR(1, OP.SEND_WITH_IMM, [pair.mr.sge(0, 6)], imm_data=77)
        send.set_wr_ud(handle, pair.second.qp_num, 0x11111111)
        _, received = pair.do(send, receives=[RecvWR(2, [pair.mr.sge(4096, 100)])])
        assert received.src_qp == pair.first.qp_num
        assert received.byte_len == 46
        assert received.has_grh
        assert received.imm_data == 77
        assert pair.memory[4136:4142] == b"gram !"
        answer = AH(pair.pd, wc=received, grh=pair.memory[4096:4136])
        assert answer.attr.gr.dgid == pair.context.query_gid(1, handle.attr.gr.sgid_index)
        answer.close()
        handle.close()
        del handle, answer, send


def check_unreliable_connection(name: str) -> None:
    with Pair(name, QPType.UC) as pair:
        pair.memory[:4] = b"uc!!"
        pair.do(SendWR(1, OP.SEND, [pair.mr.sge(0, 4)]), receives=[RecvWR(2, [pair.mr.sge(100, 4)])])
        assert pair.memory[100:104] == b"uc!!"


def check_window_of_type_2(name: str) -> None:
    with Pair(name, access=FULL | AccessFlag.MW_BIND) as pair:
        mr = pair.mr
        with MW(pair.pd, MWType.TYPE_2) as window:
            bind = SendWR(1, OP.BIND_MW, [])
            bind.set_bind_wr(window, MWBindInfo(mr, mr.addr + 4096, 4096, AccessFlag.REMOTE_WRITE))
            # The peer's requests are for the queue pair that has bound the window.
            pair.second.post_send(bind)
            assert [wc.opcode for wc in pair.completions(1)] == [WCOpcode.BIND_MW]
            assert window.rkey == bind.rkey
            assert refused(mr.close).errno == errno.EBUSY
            write = SendWR(2, OP.RDMA_WRITE, [mr.sge(0, 8)], remote_addr=mr.addr + 4096, rkey=window.rkey)
            pair.do(write)
            invalidate = SendWR(3, OP.SEND_WITH_INV, [mr.sge(0, 1)], invalidate_rkey=window.rkey)
            found = pair.do(invalidate, receives=[RecvWR(4, [mr.sge(100, 1)])])
            assert found[1].invalidated_rkey == window.rkey
            bind.set_bind_wr(window, MWBindInfo(mr, mr.addr + 4096, 4096, AccessFlag.REMOTE_WRITE))
            pair.second.post_send(bind)
            assert [wc.status for wc in pair.completions(1)] == [WCStatus.SUCCESS]
            write.rkey = window.rkey
            pair.do(write)
            invalidate.invalidate_rkey = window.rkey
            pair.do(invalidate, receives=[RecvWR(4, [mr.sge(100, 1)])])
            pair.first.post_send(write)
            assert [wc.status for wc in pair.completions(1)] == [WCStatus.REM_ACCESS_ERR]


def check_window_of_type_1(name: str) -> None:
    with Pair(name, access=FULL | AccessFlag.MW_BIND) as pair:
        mr = pair.mr
        if not pair.context.query_device().device_cap_flags & DeviceCapFlag.MEM_WINDOW:
            return
        window = MW(pair.pd, MWType.TYPE_1)
        with window:
            before = window.rkey
            info = MWBindInfo(mr, mr.addr + 4096, 4096, AccessFlag.REMOTE_WRITE)
            pair.second.bind_mw(window, MWBind(info, SendFlag.SIGNALED, 5))
            assert [wc.wr_id for wc in pair.completions(1)] == [5]
            assert window.rkey != before
            pair.do(SendWR(2, OP.RDMA_WRITE, [mr.sge(0, 8)], remote_addr=mr.addr + 4096, rkey=window.rkey))


def extended_pair(pair: Pair, ops: SendOpsFlag) -> QPEx:
    """An extended queue pair that is connected to the second one of a pair, in the place of the first."""
    init = QPInitAttrEx(QPType.RC, None, pair.cq, pair.cq, None, QPCap(64, 64, 4, 4, 128), pd=pair.pd)
    init.send_ops_flags = ops
    qp = QPEx(pair.context, init)
    pair.connect(qp, pair.second)
    pair.second.modify(QPAttr(qp_state=QPState.RESET), QPAttrMask.STATE)
    pair.connect(pair.second, qp)
    return qp


def check_extended_posts(name: str) -> None:
    with Pair(name) as pair, extended_pair(pair, SendOpsFlag(0)) as qp:
        mr = pair.mr
        pair.memory[:8] = b"01234567"
        pair.second.post_recv([RecvWR(10, [mr.sge(4096, 100)]), RecvWR(11, [mr.sge(5000, 100)])])
        qp.wr_start()
        qp.wr_id, qp.wr_flags = 1, SendFlag.SIGNALED
        qp.wr_send()
        qp.wr_set_sge_list(2, [mr.sge(4, 4), mr.sge(0, 4)])
        qp.wr_id = 2
        qp.wr_send_imm(0x01020304)
        qp.wr_set_inline_data(b"inline data")
        qp.wr_id = 3
        qp.wr_rdma_write(mr.rkey, mr.addr + 8192)
        qp.wr_set_sge(mr.sge(0, 8))
        qp.wr_id = 4
        qp.wr_atomic_fetch_add(mr.rkey, mr.addr + 8192, 1)
        qp.wr_set_sge(mr.sge(9000, 8))
        qp.wr_complete()
        found = pair.completions(6)
        assert [(wc.wr_id, wc.status) for wc in found] == [(n, WCStatus.SUCCESS) for n in (1, 2, 3, 4, 10, 11)], found
        assert (found[5].byte_len, found[5].imm_data) == (11, 0x01020304)
        assert pair.memory[4096:4104] == b"45670123"
        assert pair.memory[5000:5011] == b"inline data"
        assert pair.memory[8192:8200] == b"11234567"


def check_atomic_write(name: str) -> None:
    with Pair(name) as pair:
        if DeviceCapFlag.ATOMIC_WRITE not in pair.context.query_device().device_cap_flags_ex:
            error = refused(lambda: extended_pair(pair, SendOpsFlag.ATOMIC_WRITE))
            assert error.errno == errno.EOPNOTSUPP, error
            return
        with extended_pair(pair, SendOpsFlag.ATOMIC_WRITE) as qp:
            qp.wr_start()
            qp.wr_id, qp.wr_flags = 7, SendFlag.SIGNALED
            qp.wr_atomic_write(pair.mr.rkey, pair.mr.addr + 64, b"abcdefgh")
            qp.wr_complete()
            (wc,) = pair.completions(1)
            assert (wc.wr_id, wc.status, wc.opcode) == (7, WCStatus.SUCCESS, WCOpcode.ATOMIC_WRITE)
            assert pair.memory[64:72] == b"abcdefgh"


def check_flush(name: str) -> None:
    """Where the device has FLUSH and the library knows it, which is since rdma-core 45."""
    with Pair(name) as pair:
        if DeviceCapFlag.FLUSH_GLOBAL not in pair.context.query_device().device_cap_flags_ex:
            assert refused(lambda: extended_pair(pair, SendOpsFlag.FLUSH)).errno == errno.EOPNOTSUPP
            return
    with Pair(name, access=FULL | AccessFlag.FLUSH_GLOBAL, qp_access=FULL | AccessFlag.FLUSH_GLOBAL) as pair:
        made = outcome(lambda: extended_pair(pair, SendOpsFlag.FLUSH | SendOpsFlag.RDMA_WRITE))
        if made == errno.EOPNOTSUPP:
            return
        assert isinstance(made, QPEx), made
        with made as qp:
            qp.wr_start()
            qp.wr_id, qp.wr_flags = 1, SendFlag.SIGNALED
            qp.wr_rdma_write(pair.mr.rkey, pair.mr.addr + 4096)
            qp.wr_set_sge(pair.mr.sge(0, 64))
            qp.wr_id = 2
            qp.wr_flush(pair.mr.rkey, pair.mr.addr + 4096, 64, PlacementType.GLOBAL, SelectivityLevel.RANGE)
            qp.wr_complete()
            found = pair.completions(2)
            assert [(wc.wr_id, wc.status) for wc in found] == [(1, WCStatus.SUCCESS), (2, WCStatus.SUCCESS)], found
            assert found[1].opcode is WCOpcode.FLUSH


def check_operations_that_a_queue_pair_was_not_made_for(name: str) -> None:
    with Pair(name) as pair:
        flush = SendWR(1, OP.FLUSH, [])
        flush.set_wr_flush(pair.mr.rkey, pair.mr.addr, 8, 1, 0)
        error = refused(lambda: pair.first.post_send([SendWR(0, OP.SEND, [], 0), flush]))
        assert (error.errno, error.bad_wr) == (errno.EOPNOTSUPP, flush)


if __name__ == "__main__":
    run_checks(globals())
