"""Packets on their way out: sealed, and joined to trains.

A train is many packets in one ``sendmsg(2)`` with UDP_SEGMENT: all of one size but the last, which may be shorter. The
kernel gives packet i of it the IPv4 identification i, and a packet sent alone 0; the ICRC covers that, so a packet is
sealed where it gets its place. A packet joins the train before it where its size lets it, whatever message it is of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from rdmacm.proto.roce.icrc import Icrc, crc32
from rdmacm.proto.roce.rc.codes import ACK_REQUEST, LITTLE, WORD
from rdmacm.proto.wire import Buffer

__all__ = ["Datagram", "Trains"]

#: The pieces of one ``sendmsg``, ICRCs included, and the segment size of a train (0: a single packet).
Datagram: TypeAlias = "tuple[list[Buffer], int]"

#: UDP_MAX_SEGMENTS of Linux until 6.8; it is 128 since. (Identifications up to 255 have their deltas at hand.)
_MAX_PACKETS = 64
#: ``sendmsg`` takes 1024 pieces (UIO_MAXIOV). With more than this no packet joins; a run that begins below it adds
#: three for each packet, and a packet of its own as many as its work request has buffers.
_MAX_PIECES = 800


class Trains:
    """Collects the packets of one turn. ``train`` is how many bytes a train may have, 0 for no trains."""

    __slots__ = ("_buffers", "_count", "_datagrams", "_deltas", "_flow", "_left", "_segment", "_start", "_train")

    def __init__(self, flow: Icrc, train: int) -> None:
        self._flow = flow
        self._deltas = flow.deltas
        self._train = train
        self._datagrams: list[Datagram] = []
        self._buffers: list[Buffer] = []
        self._segment = 0  # the size of the open train's first packet
        self._start = 0  # what the ICRC of that starts with
        self._count = 0  # packets in it
        self._left = 0  # packets it may still take

    def _open(self, size: int) -> None:
        self._close()
        self._segment = size
        self._start = self._flow.start(size)
        self._left = max(1, min(self._train // size, _MAX_PACKETS))

    def _close(self) -> None:
        if self._count:
            self._datagrams.append((self._buffers, self._segment if self._count > 1 else 0))
            self._buffers = []
            self._count = 0

    def add(self, header: bytes, pieces: Sequence[Buffer], size: int) -> None:
        """A packet: its headers, its payload with the padding, and the bytes of all that with the ICRC."""
        if size > self._segment or not self._left or len(self._buffers) > _MAX_PIECES:
            self._open(size)
        count = self._count
        if size == self._segment:
            self._left -= 1
            start = self._start ^ self._deltas[count]
        else:  # a shorter one ends the train
            self._left = 0
            start = self._flow.start(size, count)
        self._count = count + 1
        crc = crc32(header, start)
        buffers = self._buffers
        buffers.append(header)
        for piece in pieces:
            crc = crc32(piece, crc)
            buffers.append(piece)
        buffers.append(LITTLE.pack(crc))

    def add_run(
        self, prefix: bytes, psn: int, data: memoryview, offset: int, mtu: int, count: int, *, ack: bool = False
    ) -> None:
        """Packets in the middle of a message: ``count`` times ``mtu`` bytes of ``data``, from ``offset`` on.

        ``prefix`` is the BTH without its last word. The last packet asks for an acknowledgement with ``ack``. The PSNs
        do not wrap within a run.
        """
        size = 16 + mtu
        words = list(range(psn, psn + count))
        if ack:
            words[-1] |= ACK_REQUEST
        pack, seal = WORD.pack, LITTLE.pack
        done = 0
        while done < count:
            if size > self._segment or not self._left or len(self._buffers) > _MAX_PIECES:
                self._open(size)
            now = min(count - done, self._left) if size == self._segment else 1
            append = self._buffers.append
            for start, word in zip(self._flow.starts(size, self._count, now), words[done : done + now], strict=True):
                header = prefix + pack(word)
                piece = data[offset : offset + mtu]
                append(header)
                append(piece)
                append(seal(crc32(piece, crc32(header, start))))
                offset += mtu
            self._count += now
            self._left = self._left - now if size == self._segment else 0
            done += now

    def close(self) -> list[Datagram]:
        """All of it."""
        self._close()
        return self._datagrams
