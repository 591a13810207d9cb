"""Any contiguous buffer is sent, registered and read into without a copy; mypy --strict accepts each kind."""

from __future__ import annotations

import ctypes
import errno
import mmap
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rdmacm import Connection, RdmaError, RemoteRegion, connect, listen
from rdmacm.verbs import MR, AccessFlag
from rdmacm.verbs.buffers import byte_view


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[Connection, Connection]]:
    with listen(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, timeout=5)
        with connect(("127.0.0.1", listener.port), timeout=5) as active, accepted.result() as passive:
            yield active, passive


def test_every_kind_of_buffer_is_sent(ends: tuple[Connection, Connection]) -> None:
    active, passive = ends
    pages = mmap.mmap(-1, 4096)
    pages[:3] = b"abc"
    numbers = np.arange(6, dtype=np.int16).reshape(2, 3)

    def check(sent: bytes, expected: bytes) -> None:
        assert sent == expected

    active.send(bytearray(b"bytes"))
    check(passive.recv(), b"bytes")
    active.send(pages)
    check(passive.recv(), pages[:])
    active.send(array("d", [1.5]))
    check(passive.recv(), array("d", [1.5]).tobytes())
    active.send(memoryview(b"0123456789")[3:6])
    check(passive.recv(), b"345")
    active.send((ctypes.c_uint32 * 2)(1, 2))
    check(passive.recv(), bytes((ctypes.c_uint32 * 2)(1, 2)))
    active.send(numbers)
    check(passive.recv(), numbers.tobytes())
    active.send(np.asfortranarray(numbers))
    check(passive.recv(), numbers.tobytes("F"))
    active.send(np.asfortranarray(np.ones((40, 40))))
    check(passive.recv(), np.ones((40, 40)).tobytes())
    active.send(np.empty(0))
    check(passive.recv(), b"")


@pytest.mark.parametrize("order", ["C", "F"])
def test_peer_writes_into_an_array(ends: tuple[Connection, Connection], order: str) -> None:
    active, passive = ends
    grid = np.zeros((8, 8), order="F" if order == "F" else "C")
    with passive.register(grid, remote_write=True, remote_read=True) as region:
        line = region.remote[8 * 8 : 2 * 8 * 8]
        active.write(line, np.full(8, 3.0))
        assert (grid[:, 1] if order == "F" else grid[1]).tolist() == [3.0] * 8
        assert grid.sum() == 24
        into = np.zeros((8, 8), order="F" if order == "F" else "C")
        active.read(RemoteRegion(region.remote.addr, region.remote.rkey, region.remote.length), into)
        assert (into == grid).all()


def test_a_buffer_that_is_not_contiguous_is_refused(ends: tuple[Connection, Connection]) -> None:
    active, _ = ends
    for buffer in (memoryview(bytearray(8))[::2], np.zeros((4, 4))[:, 1]):
        with pytest.raises(BufferError):
            active.send(buffer)
        with pytest.raises(RdmaError, match="not contiguous") as caught:
            MR(active.id.pd, buffer, AccessFlag.LOCAL_WRITE)
        assert caught.value.errno == errno.EINVAL
    with pytest.raises(TypeError):
        active.send("text")  # type: ignore[arg-type]
    active.send(b"still open")
    assert ends[1].recv() == b"still open"


def test_a_byte_view_shares_the_memory_of_its_buffer() -> None:
    grid = np.zeros((2, 3), dtype=np.uint8, order="F")
    view = byte_view(grid)
    view[1] = 7
    assert grid[1, 0] == 7
    assert (view.format, view.ndim, len(view)) == ("B", 1, 6)
    assert byte_view(memoryview(b"").cast("I")).nbytes == 0
