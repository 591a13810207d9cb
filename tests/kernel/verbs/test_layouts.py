"""The formats of struct are those of the structures, which tests/test_c_headers.py compares with the C compiler's."""

from __future__ import annotations

import ctypes
import struct

from rdmacm.kernel.verbs import layouts


def test_sge_format() -> None:
    made = layouts.ibv_sge.from_buffer_copy(layouts.SGE.pack(1 << 63, 7, 9))
    assert (made.addr, made.length, made.lkey) == (1 << 63, 7, 9)
    assert layouts.SGE.size == ctypes.sizeof(layouts.ibv_sge)


def send_wr(form: struct.Struct, *values: int) -> layouts.ibv_send_wr:
    memory = bytearray(ctypes.sizeof(layouts.ibv_send_wr))
    form.pack_into(memory, 0, 1, 2, 3, 4, 5, 6, 7, *values)
    made = layouts.ibv_send_wr.from_buffer_copy(memory)
    head = made.wr_id, made.next, made.sg_list, made.num_sge, made.opcode, made.send_flags, made.imm_data
    assert head == (1, 2, 3, 4, 5, 6, 7)
    return made


def test_formats_of_send_requests() -> None:
    rdma = send_wr(layouts.RDMA_WR, 8, 9).wr.rdma
    assert (rdma.remote_addr, rdma.rkey) == (8, 9)
    atomic = send_wr(layouts.ATOMIC_WR, 8, 9, 10, 11).wr.atomic
    assert (atomic.remote_addr, atomic.compare_add, atomic.swap, atomic.rkey) == (8, 9, 10, 11)
    ud = send_wr(layouts.DATAGRAM_WR, 8, 9, 10).wr.ud
    assert (ud.ah, ud.remote_qpn, ud.remote_qkey) == (8, 9, 10)


def test_format_of_binds() -> None:
    memory = bytearray(ctypes.sizeof(layouts.ibv_send_wr))
    layouts.BIND_WR.pack_into(memory, layouts.ibv_send_wr.bind_mw.offset, 1, 2, 3, 4, 5, 6)
    bind = layouts.ibv_send_wr.from_buffer_copy(memory).bind_mw
    info = bind.bind_info
    assert (bind.mw, bind.rkey, info.mr, info.addr, info.length, info.mw_access_flags) == (1, 2, 3, 4, 5, 6)


def test_format_of_receives() -> None:
    memory = bytearray(ctypes.sizeof(layouts.ibv_recv_wr))
    layouts.RECV_WR.pack_into(memory, 0, 1, 2, 3, 4)
    made = layouts.ibv_recv_wr.from_buffer_copy(memory)
    assert (made.wr_id, made.next, made.sg_list, made.num_sge) == (1, 2, 3, 4)


def test_format_of_completions() -> None:
    assert layouts.WC.size == ctypes.sizeof(layouts.ibv_wc)
    made = layouts.ibv_wc(*range(1, 14))
    assert layouts.WC.unpack(bytes(made)) == tuple(range(1, 14))
