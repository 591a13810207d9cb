"""Work requests as libibverbs would read them."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterator, Sequence

from rdmacm.kernel.verbs import layouts
from rdmacm.kernel.verbs.posting import RecvArray, SendArray, refused
from rdmacm.verbs import SGE, QPType, RecvWR, SendFlag, SendWR, WROpcode
from rdmacm.verbs.buffers import Buffer

OP = WROpcode


def chain(kind: type[ctypes.Structure], address: int) -> Iterator[ctypes.Structure]:
    """The requests of a list, as the library follows it."""
    while address:
        wr = kind.from_address(address)
        yield wr
        address = wr.next or 0


def elements(wr: ctypes.Structure) -> list[tuple[int, int, int]]:
    found = (layouts.ibv_sge * wr.num_sge).from_address(wr.sg_list) if wr.num_sge else []
    return [(sge.addr, sge.length, sge.lkey) for sge in found]


def sent(wrs: Sequence[SendWR], qp_type: QPType = QPType.RC, handles: Sequence[int] = ()) -> list[ctypes.Structure]:
    array = SendArray(qp_type, 3, 20)
    assert array.fill(wrs, qp_type is QPType.XRC_SEND, handles) == len(wrs)
    found = [*chain(layouts.ibv_send_wr, array.address)]
    assert len(found) == len(wrs)
    _kept.append(array)
    return found


#: The memory that the structures are in.
_kept: list[SendArray] = []


def test_requests_follow_each_other() -> None:
    wrs = [SendWR(number, OP.SEND, [SGE(1, 2, 3)] * (number % 4)) for number in range(40)]
    found = sent(wrs)
    assert [wr.wr_id for wr in found] == [*range(40)]
    assert [elements(wr) for wr in found] == [[(1, 2, 3)] * (number % 4) for number in range(40)]


def test_operands() -> None:
    write, imm, inv, add, swap = sent(
        [
            SendWR(1, OP.RDMA_WRITE, [], 0, remote_addr=1 << 63, rkey=7),
            SendWR(2, OP.SEND_WITH_IMM, [], SendFlag.SOLICITED, imm_data=0x01020304),
            SendWR(3, OP.SEND_WITH_INV, [], invalidate_rkey=0x01020304),
            SendWR(4, OP.ATOMIC_FETCH_AND_ADD, [], remote_addr=8, rkey=9, compare_add=10),
            SendWR(5, OP.ATOMIC_CMP_AND_SWP, [], remote_addr=8, rkey=9, compare_add=10, swap=11),
        ]
    )
    assert (write.opcode, write.send_flags, write.wr.rdma.remote_addr, write.wr.rdma.rkey) == (0, 0, 1 << 63, 7)
    assert bytes(ctypes.c_uint32(imm.imm_data)) == bytes((1, 2, 3, 4))
    assert imm.send_flags == SendFlag.SOLICITED
    assert inv.imm_data == 0x01020304
    assert (add.wr.atomic.remote_addr, add.wr.atomic.rkey, add.wr.atomic.compare_add) == (8, 9, 10)
    assert swap.wr.atomic.swap == 11


def test_datagrams_and_xrc() -> None:
    wrs = [SendWR(number, OP.SEND, [], remote_qpn=5, remote_qkey=6) for number in range(2)]
    found = sent(wrs, QPType.UD, [100, 200])
    assert [(wr.wr.ud.ah, wr.wr.ud.remote_qpn, wr.wr.ud.remote_qkey) for wr in found] == [(100, 5, 6), (200, 5, 6)]
    (xrc,) = sent([SendWR(1, OP.SEND, [], remote_srqn=0xABCDEF)], QPType.XRC_SEND)
    assert xrc.qp_type.xrc.remote_srqn == 0xABCDEF


def test_inline_data_are_copied() -> None:
    data = bytearray(b"first")
    pieces: list[list[SGE | Buffer]] = [[data, b"", b"second"], [b"x" * 20], [SGE(1, 2, 3), memoryview(b"third"), b"4"]]
    found = sent([SendWR(number, OP.SEND, piece, SendFlag.INLINE) for number, piece in enumerate(pieces)])
    data[:] = b"-----"
    texts = [[ctypes.string_at(addr, length) for addr, length, _ in elements(wr)] for wr in found[:2]]
    assert texts == [[b"first", b"", b"second"], [b"x" * 20]]
    registered, *inline = elements(found[2])
    assert registered == (1, 2, 3)
    assert [ctypes.string_at(addr, length) for addr, length, _ in inline] == [b"third", b"4"]


def test_what_cannot_be_translated() -> None:
    wrs = [SendWR(1), SendWR(2, OP.SEND, [SGE(1 << 64, 1, 1)]), SendWR(3)]
    array = SendArray(QPType.RC, 1, 0)
    assert array.fill(wrs, False, ()) == 1
    assert [wr.wr_id for wr in chain(layouts.ibv_send_wr, array.address)] == [1]
    error = refused(wrs[1], "post_send", "rxe0")
    assert (error.errno, error.bad_wr) == (errno.EINVAL, wrs[1])
    flush = SendWR(1, OP.FLUSH)
    assert array.fill([flush], False, ()) == 0
    assert refused(flush, "post_send", "rxe0").errno == errno.EOPNOTSUPP


def test_numbers_of_the_user_have_64_bits() -> None:
    (wr,) = sent([SendWR(-1)])
    assert wr.wr_id == (1 << 64) - 1


def test_receives() -> None:
    array = RecvArray(2)
    for count in (1, 5, 100, 3):
        wrs = [RecvWR(number, [SGE(number, 2, 3), SGE(4, 5, 6)][: number % 3]) for number in range(count)]
        assert array.fill(wrs) == count
        found = [*chain(layouts.ibv_recv_wr, array.address)]
        assert [wr.wr_id for wr in found] == [*range(count)]
        expected = [[(number, 2, 3), (4, 5, 6)][: number % 3] for number in range(count)]
        assert [elements(wr) for wr in found] == expected
        assert [array.index_of(ctypes.addressof(wr)) for wr in found] == [*range(count)]
    assert array.fill([RecvWR(1), RecvWR(2, [SGE(-1, 1, 1)]), RecvWR(3)]) == 1
    assert [wr.wr_id for wr in chain(layouts.ibv_recv_wr, array.address)] == [1]
    assert array.index_of(None) == 0
