"""Requests written into the send queue of an rdma_rxe queue pair, whose memory the kernel shares with its user.

FLUSH and ATOMIC WRITE are in the driver since Linux 6.2, but in no libibverbs before version 45 (FLUSH) or only in
ibv_wr_post(3), for queue pairs that librdmacm did not make. So their requests are written as the driver reads them:
``struct rxe_send_wqe`` and ``struct rxe_queue_buf`` of ``rdma/rdma_user_rxe.h``, which are part of the kernel's stable
interface. The names below are those of the header.
"""

from __future__ import annotations

import ctypes as c
import os
import re
import struct
from typing import Any

__all__ = ["SendRing", "queue_maps"]

#: Offsets in ``struct rxe_queue_buf``.
_LOG2_ELEM_SIZE, _INDEX_MASK, _PRODUCER_INDEX, _DATA = 0, 4, 128, 384
#: Offsets in ``struct rxe_send_wqe``: the operands, the address that the driver counts up, and ``struct rxe_dma_info``
#: with the place of elements or inline data behind it.
_OPERANDS, _IOVA, _DMA, _INLINE = 24, 152, 184, 208
#: ``struct ib_uverbs_post_send`` with its header: command, words of the command and of the answer, address of the
#: answer, queue pair, requests, elements, and bytes of a request in this command.
_DOORBELL = struct.Struct("=IHHQIIII")
_POST_SEND, _REQUEST_SIZE = 28, 128
_MAP = re.compile(r"^([0-9a-f]+)-[0-9a-f]+ .* /dev/infiniband/uverbs\d+$", re.MULTILINE)


def queue_maps() -> set[int]:
    """The addresses of all queues that this process shares with the driver."""
    with open("/proc/self/maps") as maps:
        return {int(start, 16) for start in _MAP.findall(maps.read())}


class SendRing:
    """The send queue among the ``maps`` of a new queue pair: it has larger elements than the receive queue."""

    def __init__(self, maps: set[int], command_fd: int, qp_handle: int) -> None:
        self._fd, self._handle = command_fd, qp_handle
        self._base = max(maps, key=lambda base: self._word(base + _LOG2_ELEM_SIZE).value)
        self._mask = self._word(self._base + _INDEX_MASK).value
        self._size = 1 << self._word(self._base + _LOG2_ELEM_SIZE).value

    @staticmethod
    def _word(address: int) -> Any:
        return c.c_uint32.from_address(address)

    def post(self, wr_id: int, opcode: int, flags: int, addr: int, length: int, operands: bytes, data: bytes) -> None:
        """Queue a request; ``operands`` is its part of the union ``wr``, ``data`` what it sends."""
        producer = self._word(self._base + _PRODUCER_INDEX)
        at = self._base + _DATA + (producer.value & self._mask) * self._size
        wqe = bytearray(self._size)
        struct.pack_into("=QIII", wqe, 0, wr_id, 0, opcode, flags)
        wqe[_OPERANDS : _OPERANDS + len(operands)] = operands
        struct.pack_into("=Q", wqe, _IOVA, addr)
        struct.pack_into("=II", wqe, _DMA, length, length)
        wqe[_INLINE : _INLINE + len(data)] = data
        c.memmove(at, bytes(wqe), self._size)
        producer.value = producer.value + 1 & self._mask
        answer = c.c_uint32()
        os.write(self._fd, _DOORBELL.pack(_POST_SEND, 8, 1, c.addressof(answer), self._handle, 0, 0, _REQUEST_SIZE))
