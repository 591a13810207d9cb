"""Packets on their way out: sealed with their ICRCs, and joined to trains.

A train is many packets in one ``sendmsg(2)`` with UDP_SEGMENT: all of one size, except the last, which may be shorter.
The kernel gives packet i of a train the IPv4 identification i, and a packet sent alone 0. The ICRC covers the
identification, so a packet is sealed when its place is known. A packet joins the train before it if its size allows,
whatever message it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence

from rdmacm.proto.constants import ACK_REQUEST, MOST_IN_TRAIN
from rdmacm.proto.engine import Datagram
from rdmacm.proto.roce.headers import BTH_HALVES
from rdmacm.proto.roce.icrc import ICRC_STRUCT, Icrc, crc32
from rdmacm.proto.wire import Buffer

__all__ = ["Trains"]

#: ``sendmsg`` takes 1024 pieces (UIO_MAXIOV). No packet joins a train with more than this: a run of middle packets adds
#: three pieces a packet, any other packet as many as its request has buffers.
_MAX_PIECES = 800


class Trains:
    """Collects the packets of one call. ``train`` is how many bytes a train may have, 0 for no trains."""

    __slots__ = ("_buffers", "_count", "_datagrams", "_deltas", "_icrc", "_left", "_segment", "_start", "_train")

    def __init__(self, icrc: Icrc, train: int) -> None:
        #: The ICRC of the packets, and for speed its deltas.
        self._icrc = icrc
        self._deltas = icrc.deltas
        #: How many bytes a train may have.
        self._train = train
        #: The finished datagrams.
        self._datagrams: list[Datagram] = []
        #: The open train: its pieces, packets, the bytes of its first packet, and the packets it may still take.
        self._buffers: list[Buffer] = []
        self._count = 0
        self._segment = 0
        self._left = 0
        #: What the CRC of its first packet starts with.
        self._start = 0

    def _open(self, size: int) -> None:
        if self._count:
            self._close()
        self._segment = size
        self._start = self._icrc.start(size)
        self._left = min(self._train // size, MOST_IN_TRAIN) or 1

    def _close(self) -> None:
        self._datagrams.append((self._buffers, self._segment if self._count > 1 else 0))
        self._buffers = []
        self._count = 0

    @property
    def is_single(self) -> bool:
        """Whether there is one packet so far."""
        return self._count == 1 and not self._datagrams

    def add(self, headers: bytes, pieces: Sequence[Buffer], size: int, *, twice: bool = False) -> None:
        """Add a packet: its headers, its payload with the padding, and its bytes in all with the ICRC.

        ``twice``: it has no payload, and the ICRC is that of rxe for FLUSH (:mod:`rdmacm.proto.roce.icrc`).
        """
        if size > self._segment or not self._left or len(self._buffers) > _MAX_PIECES:
            self._open(size)
        count = self._count
        if size == self._segment:
            self._left -= 1
            start = self._start ^ self._deltas[count]
        else:  # a shorter packet ends the train
            self._left = 0
            start = self._icrc.start(size, count)
        self._count = count + 1
        crc = crc32(headers, start)
        buffers = self._buffers
        buffers.append(headers)
        for piece in pieces:
            crc = crc32(piece, crc)
            buffers.append(piece)
        if twice:
            crc = crc32(headers, crc)
        buffers.append(ICRC_STRUCT.pack(crc))

    def add_middles(
        self, bth: int, psn: int, data: memoryview, offset: int, mtu: int, count: int, *, ack: bool = False
    ) -> None:
        """Add ``count`` middle packets with ``mtu`` bytes of ``data`` each, from ``offset`` on.

        ``bth`` is the first half of their BTH. The last packet asks for an acknowledgement if ``ack``. The PSNs do not
        wrap.
        """
        size = 16 + mtu
        words = list(range(psn, psn + count))
        if ack:
            words[-1] |= ACK_REQUEST
        pack, seal = BTH_HALVES.pack, ICRC_STRUCT.pack
        done = 0
        while done < count:
            if size > self._segment or not self._left or len(self._buffers) > _MAX_PIECES:
                self._open(size)
            now = min(count - done, self._left) if size == self._segment else 1
            append = self._buffers.append
            for start, word in zip(self._icrc.starts(size, self._count, now), words[done : done + now], strict=True):
                header = pack(bth, word)
                piece = data[offset : offset + mtu]
                append(header)
                append(piece)
                append(seal(crc32(piece, crc32(header, start))))
                offset += mtu
            self._count += now
            self._left = self._left - now if size == self._segment else 0
            done += now

    def close(self) -> list[Datagram]:
        """Return all datagrams."""
        if self._count:
            self._close()
        return self._datagrams
