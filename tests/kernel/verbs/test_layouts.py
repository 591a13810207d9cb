"""The structures are those of the C compiler, and the formats those of the structures."""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from rdmacm.kernel.verbs import layouts

HEADER = Path("/usr/include/infiniband/verbs.h")
#: Names of members, where ours differ: C's are reserved, or are inside a union.
C_NAMES = {
    ("ibv_device", "_dummy1"): "_ops",
    ("ibv_device", "_dummy2"): None,
    ("ibv_send_wr", "remote_srqn"): "qp_type.xrc.remote_srqn",
}


def members(kind: type[ctypes.Structure]) -> list[tuple[str, str]]:
    """The members of a structure as we and as C name them; those that libibverbs hides are left out."""
    found = []
    for name, *_ in kind._fields_:
        name = str(name)
        c_name = C_NAMES.get((kind.__name__, name), f"_compat{name}" if name.startswith("_") else name)
        if c_name is not None and not (kind is layouts.verbs_context and name.startswith("_")):
            found.append((name, c_name))
    return found


#: Members that an older header lacks. They are the last ones of their structures.
NEWER = {("ibv_port_attr", "active_speed_ex"), ("ibv_qp_ex", "wr_flush")}


def test_structures_are_those_of_the_compiler(tmp_path: Path) -> None:
    compiler = shutil.which("gcc")
    if compiler is None or not HEADER.exists():
        pytest.skip("needs gcc and libibverbs-dev")
    command = [compiler, "-E", "-x", "c", "-include", "infiniband/verbs.h", "/dev/null"]
    header = set(re.findall(r"\w+", subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    lines = ["#include <stdio.h>", "#include <stddef.h>", "#include <infiniband/verbs.h>", "int main(void) {"]
    ours: list[int] = []
    for kind in layouts.STRUCTURES:
        # The library's own objects end before their mutex here.
        if kind in (layouts.ibv_cq, layouts.ibv_qp):
            lines.append(f'printf("%zu\\n", offsetof(struct {kind.__name__}, mutex));')
        else:
            lines.append(f'printf("%zu\\n", sizeof(struct {kind.__name__}));')
        lacking = [name for owner, name in NEWER if owner == kind.__name__ and name not in header]
        ours.append(getattr(kind, lacking[0]).offset if lacking else ctypes.sizeof(kind))
        for name, c_name in members(kind):
            if name in lacking:
                continue
            lines.append(f'printf("%zu\\n", offsetof(struct {kind.__name__}, {c_name}));')
            ours.append(getattr(kind, name).offset)
    lines.append("return 0; }")
    source, program = tmp_path / "offsets.c", tmp_path / "offsets"
    source.write_text("\n".join(lines))
    subprocess.run([compiler, "-o", program, source], check=True)
    theirs = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()
    questions = [line for line in lines if "printf" in line]
    assert [*zip(questions, map(int, theirs), strict=True)] == [*zip(questions, ours, strict=True)]


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
