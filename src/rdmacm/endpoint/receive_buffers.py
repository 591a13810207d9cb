"""The receive buffers of a connection."""

from __future__ import annotations

import contextlib
from mmap import ACCESS_COPY, mmap

from rdmacm.errors import RdmaError
from rdmacm.verbs.enums import AccessFlag, TransportType
from rdmacm.verbs.pd import MR, PD
from rdmacm.verbs.qp import QP
from rdmacm.verbs.wr import RecvWR

#: Where registered memory is locked, a connection registers buffers of this many bytes first, but at least so many
#: buffers.
_FIRST_BYTES = 256 << 10
_FIRST_BUFFERS = 4


class ReceiveBuffers:
    """``depth`` buffers of ``size`` bytes; the number of a buffer is the wr_id of its receive.

    Where registered memory is locked, only the first ones are registered and posted at the beginning, and the others
    when half of the first hold messages. A peer that sends faster than that gets an RNR NAK and sends again. iWARP has
    no RNR NAK, so there all are posted at the beginning.

    Used with the provider's lock held. The constructor raises RdmaError when the device lacks resources.
    """

    def __init__(self, qp: QP, pd: PD, depth: int, size: int) -> None:
        self._qp = qp
        self._pd = pd
        self._depth = depth
        self._size = size
        # Untouched pages of a private mapping occupy no memory, so half-open connections cost little.
        self._memory = memoryview(mmap(-1, depth * size, access=ACCESS_COPY))
        device = qp.context.backend
        #: How many buffers were posted at the beginning.
        self._first = depth
        if device.capabilities.locks_memory and device.transport_type is not TransportType.IWARP:
            self._first = min(depth, max(_FIRST_BUFFERS, _FIRST_BYTES // size))
        #: The region of the first buffers, and that of the others.
        self._regions = [self._register(0, self._first)]

    def begin(self) -> None:
        """Post the first buffers. Raises RdmaError when the device lacks resources."""
        for number in range(self._first):
            self.post(number)

    def _register(self, start: int, stop: int) -> MR:
        return MR(self._pd, self._memory[start * self._size : stop * self._size], AccessFlag.LOCAL_WRITE)

    @property
    def can_grow(self) -> bool:
        """Whether there are buffers that are not registered."""
        return len(self._regions) == 1 and self._first < self._depth

    def grow(self, filled: int) -> None:
        """Register and post the other buffers if that is due while ``filled`` buffers hold messages.

        Where memory is short, the connection goes on with fewer.
        """
        if filled * 2 >= self._first:
            with contextlib.suppress(RdmaError):
                self._regions.append(self._register(self._first, self._depth))
                for number in range(self._first, self._depth):
                    self.post(number)

    def post(self, number: int) -> None:
        """Post a buffer that holds no message. Raises RdmaError when the queue pair takes no receives."""
        region, index = self._regions[0], number
        if number >= self._first:
            region, index = self._regions[1], number - self._first
        self._qp.post_recv(RecvWR(number, [region.sge(index * self._size, self._size)]))

    def read(self, number: int, length: int) -> bytes:
        """The first ``length`` bytes of a buffer."""
        start = number * self._size
        return bytes(self._memory[start : start + length])

    def close(self) -> None:
        """Deregister the memory."""
        for region in self._regions:
            region.close()
        self._memory = memoryview(b"")
