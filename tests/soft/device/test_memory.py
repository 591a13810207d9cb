"""Registered memory: keys, ranges, permissions, and the registered buffers."""

from __future__ import annotations

import ctypes
import errno
import mmap
import random

import pytest

from rdmacm import RdmaError
from rdmacm.progress.runtime import Runtime
from rdmacm.soft.device.memory import MemoryTable, RemoteMemory, SoftMR
from rdmacm.verbs.buffers import Buffer, byte_view
from rdmacm.verbs.enums import AccessFlag
from support.softdev import ALL

LOCAL, READ, WRITE = AccessFlag.LOCAL_WRITE, AccessFlag.REMOTE_READ, AccessFlag.REMOTE_WRITE
PD, OTHER = object(), object()


def table() -> MemoryTable:
    return MemoryTable(random.Random(1), Runtime())


def region(memory: MemoryTable, data: Buffer, access: AccessFlag = ALL) -> SoftMR:
    return memory.register(PD, byte_view(data), access)


def test_region_has_the_address_of_its_buffer() -> None:
    buffer = bytearray(b"0123456789")
    found = region(table(), memoryview(buffer)[3:])
    assert found.addr == ctypes.addressof(ctypes.c_char.from_buffer(buffer)) + 3
    assert (found.length, ctypes.string_at(found.addr, 4)) == (7, b"3456")


def test_any_buffer_can_be_registered() -> None:
    memory = table()
    text = b"constant"
    assert ctypes.string_at(region(memory, text, READ).addr, 8) == text
    words = memoryview(bytearray(16)).cast("I")
    assert region(memory, words).length == 16
    assert region(memory, bytearray()).length == 0
    with mmap.mmap(-1, 4096) as pages:
        found = region(memory, memoryview(pages))
        assert found.length == 4096
        found.dereg()


@pytest.mark.parametrize("access", [LOCAL, WRITE, AccessFlag.REMOTE_ATOMIC])
def test_read_only_memory_is_not_registered_for_writing(access: AccessFlag) -> None:
    with pytest.raises(RdmaError) as caught:
        region(table(), b"constant", access)
    assert caught.value.errno == errno.EACCES


def test_registered_bytearray_cannot_be_resized() -> None:
    buffer = bytearray(8)
    found = region(table(), buffer)
    with pytest.raises(BufferError):
        buffer.append(1)
    found.dereg()
    buffer.append(1)


def test_keys_are_unique_and_not_zero() -> None:
    memory = table()
    keys = {region(memory, bytearray(1)).rkey for _ in range(1000)}
    assert len(keys) == 1000
    assert 0 not in keys
    assert max(keys) > 1 << 31


def test_local_elements_are_checked() -> None:
    memory = table()
    buffer = bytearray(range(100))
    found = region(memory, buffer, READ)

    def local(key: int, offset: int, length: int, pd: object = PD, write: bool = False) -> bytes | None:
        view = memory.local(pd, key, found.addr + offset, length, write)
        return None if view is None else bytes(view)

    assert local(found.lkey, 10, 5) == bytes(range(10, 15))
    assert local(found.lkey, 0, 100) == bytes(buffer)
    assert local(found.lkey, 96, 5) is None
    assert local(found.lkey, -1, 5) is None
    assert local(found.lkey ^ 1, 10, 5) is None
    assert local(found.lkey, 10, 5, pd=OTHER) is None
    assert local(found.lkey, 10, 5, write=True) is None


def test_remote_access_is_checked() -> None:
    memory = table()
    found = region(memory, bytearray(range(100)), LOCAL | READ)
    remote = RemoteMemory(memory, PD)
    view = remote.remote(found.rkey, found.addr + 90, 10, READ)
    assert view is not None
    assert bytes(view) == bytes(range(90, 100))
    assert remote.remote(found.rkey, found.addr + 91, 10, READ) is None
    assert remote.remote(found.rkey, found.addr - 1, 10, READ) is None
    assert remote.remote(found.rkey, (1 << 64) - 1, (1 << 32) - 1, READ) is None
    assert remote.remote(found.rkey, 0, 1, READ) is None
    assert remote.remote(found.rkey ^ 1, found.addr, 10, READ) is None
    assert remote.remote(found.rkey, found.addr, 10, WRITE) is None
    assert remote.remote(found.rkey, found.addr, 8, AccessFlag.REMOTE_ATOMIC) is None
    assert RemoteMemory(memory, OTHER).remote(found.rkey, found.addr, 10, READ) is None


def test_deregistration_revokes_the_keys() -> None:
    memory = table()
    found = region(memory, bytearray(10))
    found.dereg()
    assert memory.local(PD, found.lkey, found.addr, 1, False) is None
    assert RemoteMemory(memory, PD).remote(found.rkey, found.addr, 1, READ) is None
    found.dereg()
    assert len(memory) == 0


def test_region_is_not_invalidated() -> None:
    memory = table()
    found = region(memory, bytearray(10))
    remote = RemoteMemory(memory, PD)
    assert not remote.invalidate(found.rkey)
    assert remote.remote(found.rkey, found.addr, 1, READ) is not None


def test_region_changes_and_keeps_its_keys() -> None:
    memory = table()
    found = region(memory, bytearray(10), LOCAL | READ)
    remote, other = RemoteMemory(memory, PD), RemoteMemory(memory, OTHER)
    key, addr = found.rkey, found.addr
    found.rereg(OTHER, None, None)
    assert remote.remote(key, addr, 10, READ) is None
    assert other.remote(key, addr, 10, READ) is not None
    found.rereg(None, None, LOCAL | WRITE)
    assert other.remote(key, addr, 10, READ) is None
    assert other.remote(key, addr, 10, WRITE) is not None
    buffer = bytearray(20)
    found.rereg(PD, memoryview(buffer), None)
    assert (found.rkey, found.length) == (key, 20)
    assert remote.remote(key, addr, 10, WRITE) is None
    view = remote.remote(key, found.addr + 10, 10, WRITE)
    assert view is not None
    view[:] = b"new memory"
    assert buffer[10:] == b"new memory"


def test_key_of_a_deregistered_region_comes_back_after_many_others() -> None:
    numbers = random.Random(1)
    memory = MemoryTable(numbers, Runtime())
    first = region(memory, bytearray(8))
    first.dereg()
    draws = iter([first.rkey, 77])
    drawn, numbers.getrandbits = numbers.getrandbits, lambda bits: next(draws)  # type: ignore[method-assign]
    assert region(memory, bytearray(8)).rkey == 77
    numbers.getrandbits = drawn  # type: ignore[method-assign]
    for _ in range(1024):
        region(memory, bytearray(8)).dereg()
    numbers.getrandbits = lambda bits: first.rkey  # type: ignore[method-assign]
    assert region(memory, bytearray(8)).rkey == first.rkey
