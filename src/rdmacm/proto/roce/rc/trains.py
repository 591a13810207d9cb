"""Packets on their way out: sealed with their ICRCs, and joined to trains.

A train is many packets in one ``sendmsg(2)`` with UDP_SEGMENT: all of one size, except the last, which may be shorter.
The kernel gives packet i of a train the IPv4 identification i, and a packet sent alone 0. The ICRC covers the
identification, so a packet is sealed when its place is known. A packet joins the train before it if its size allows,
whatever message it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence

from rdmacm.proto.constants import ICRC_LENGTH, MOST_IN_TRAIN, SOLICITED_EVENT
from rdmacm.proto.engine import Datagram
from rdmacm.proto.roce.buffers import padded, slices
from rdmacm.proto.roce.headers import BTH_HALVES, RETH_STRUCT, WORD
from rdmacm.proto.roce.icrc import ICRC_STRUCT, Icrc, crc32
from rdmacm.proto.roce.rc.request_types import RequestType
from rdmacm.proto.wire import Buffer
from rdmacm.proto.work import SendWork

#: ``sendmsg`` takes 1024 pieces (UIO_MAXIOV). No packet joins a train with more than this: one adds as many pieces as
#: its request has buffers.
_MAX_PIECES = 800


class Trains:
    """Collects the packets of one call. ``train`` is how many bytes a train may have, 0 for no trains."""

    __slots__ = ("_buffers", "_count", "_datagrams", "_icrc", "_left", "_segment", "_train")

    def __init__(self, icrc: Icrc, train: int) -> None:
        #: The ICRC of the packets.
        self._icrc = icrc
        #: How many bytes a train may have.
        self._train = train
        #: The finished datagrams.
        self._datagrams: list[Datagram] = []
        #: The open train: its pieces, packets, the bytes of its first packet, and the packets it may still take.
        self._buffers: list[Buffer] = []
        self._count = 0
        self._segment = 0
        self._left = 0

    def _open(self, size: int) -> None:
        if self._count:
            self._close()
        self._segment = size
        self._left = min(self._train // size, MOST_IN_TRAIN) or 1

    def _close(self) -> None:
        self._datagrams.append((self._buffers, self._segment if self._count > 1 else 0))
        self._buffers = []
        self._count = 0

    def end_single(self) -> None:
        """Let nothing join a first packet that is alone so far: two calls cost less than a train of two packets."""
        if self._count == 1 and not self._datagrams:
            self._left = 0

    def add(self, headers: bytes, pieces: Sequence[Buffer], size: int, *, twice: bool = False) -> None:
        """Add a packet: its headers, its payload with the padding, and its bytes in all with the ICRC.

        ``twice``: it has no payload, and the ICRC is that of rxe for FLUSH (:mod:`rdmacm.proto.roce.icrc`).
        """
        if size > self._segment or not self._left or len(self._buffers) > _MAX_PIECES:
            self._open(size)
        # A shorter packet ends the train.
        self._left = self._left - 1 if size == self._segment else 0
        crc = crc32(headers, self._icrc.start(size, self._count))
        self._count += 1
        buffers = self._buffers
        buffers.append(headers)
        for piece in pieces:
            crc = crc32(piece, crc)
            buffers.append(piece)
        if twice:
            crc = crc32(headers, crc)
        buffers.append(ICRC_STRUCT.pack(crc))

    def add_part(self, work: SendWork, kind: RequestType, index: int, mtu: int, bth: int, word: int) -> None:
        """Add packet ``index`` of a SEND or WRITE.

        ``bth`` and ``word`` are the halves of its BTH (``BTH_HALVES``), without opcode, PadCnt and solicited event.
        """
        offset = index * mtu
        is_first, is_last = not index, work.length - offset <= mtu
        size = work.length - offset if is_last else mtu
        pieces, pad = padded(slices(work.segments, offset, size), size)
        if is_first:
            opcode = kind.only if is_last else kind.first
        else:
            opcode = kind.last if is_last else kind.middle
        bth |= opcode << 56 | pad << 52
        if is_last and work.solicited:
            bth |= SOLICITED_EVENT << 48
        headers = BTH_HALVES.pack(bth, word)
        if is_first and kind.is_write:
            headers += RETH_STRUCT.pack(work.remote_addr, work.rkey, work.length)
        if is_last and kind.with_immediate:
            headers += WORD.pack(work.imm)
        elif is_last and kind.with_invalidate:
            headers += WORD.pack(work.invalidate_rkey)
        self.add(headers, pieces, len(headers) + size + pad + ICRC_LENGTH)

    def close(self) -> list[Datagram]:
        """Return all datagrams."""
        if self._count:
            self._close()
        return self._datagrams
