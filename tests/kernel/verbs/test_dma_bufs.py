"""Regions of dma-bufs by libibverbs' function. A stub stands for the library: no device of the machine has them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
from types import SimpleNamespace
from typing import Any

import pytest

from rdmacm.errors import RdmaError
from rdmacm.kernel.verbs.layouts import ibv_mr
from rdmacm.kernel.verbs.memory import KernelDmaBufMR

_ARGUMENTS = (4096, 65536, 0x7F0000000000, 5, 7)


def device(register: Any) -> Any:
    """An open device whose library registers dma-bufs by this function."""
    released: list[int] = []

    def release(address: int) -> int:
        released.append(address)
        return 0

    library = SimpleNamespace(ibv_reg_dmabuf_mr=register, ibv_dereg_mr=release)
    return SimpleNamespace(
        name="mlx5_0",
        library=library,
        released=released,
        call=lambda step: contextlib.nullcontext(),
        hold=lambda *_: None,
        release=lambda part: release(part.address),
    )


def test_offset_length_address_and_descriptor_are_passed_on() -> None:
    made = ibv_mr(lkey=0x1100, rkey=0x1122)
    calls: list[tuple[int, ...]] = []

    def register(*arguments: int) -> int:
        calls.append(arguments)
        return ctypes.addressof(made)

    opened = device(register)
    region = KernelDmaBufMR(opened, SimpleNamespace(address=77), *_ARGUMENTS)  # type: ignore[arg-type]
    assert calls == [(77, *_ARGUMENTS)]
    assert (region.addr, region.length, region.lkey, region.rkey) == (0x7F0000000000, 65536, 0x1100, 0x1122)
    region.dereg()
    assert opened.released == [ctypes.addressof(made)]


@pytest.mark.parametrize(
    ("register", "code", "text"),
    [
        (None, errno.EOPNOTSUPP, "rdma-core 34"),
        (errno.EOPNOTSUPP, errno.EOPNOTSUPP, "no regions of dma-bufs"),
        (errno.EBADF, errno.EBADF, "reg_dmabuf_mr mlx5_0"),
    ],
)
def test_refusals(register: int | None, code: int, text: str) -> None:
    def refuse(*_: int) -> int:
        assert register is not None
        ctypes.set_errno(register)
        return 0

    opened = device(None if register is None else refuse)
    with pytest.raises(RdmaError) as caught:
        KernelDmaBufMR(opened, SimpleNamespace(address=77), *_ARGUMENTS)  # type: ignore[arg-type]
    assert caught.value.errno == code
    assert text in str(caught.value)
