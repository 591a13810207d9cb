"""What each simulated process sends to a peer that has not answered yet: at most three times what came from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rdmacm.testing import Host

__all__ = ["Traffic"]

#: The destination queue pair number of management datagrams, as it is in a packet.
_GSI = b"\0\0\1"
_REQ, _REP, _SIDR_REQ, _SIDR_REP = b"\x00\x10", b"\x00\x13", b"\x00\x17", b"\x00\x18"
#: Where the fields of a packet are: of the BTH, of the MAD, of its message, and of a REP.
_DESTINATION = slice(5, 8)
_ATTRIBUTE = slice(36, 38)
_LOCAL_ID, _REMOTE_ID = slice(44, 48), slice(48, 52)
_REP_QPN = slice(56, 59)
#: RFC 9000, 8.1. All management datagrams have one length, so datagrams are counted instead of bytes.
_MOST = 3


@dataclass(slots=True)
class _Request:
    """A connection request that a process has received: how many copies, and how many answers it has sent."""

    copies: int = 0
    sent: int = 0
    is_answered: bool = False


class Traffic:
    """Sees each packet that a process sends or receives, through the tap of its wire.

    Each connection request stands for itself: copies of it permit three answers each, until its sender has answered
    one of these. Data may go only to an address that has sent more than requests, or was asked by the process itself.
    """

    def __init__(self) -> None:
        #: What has been broken; empty if nothing.
        self.violation = ""
        #: By process, address of the peer, and the peer's communication id.
        self._requests: dict[tuple[Host, bytes, bytes], _Request] = {}
        #: The request that a queue pair is for, by process and queue pair number, until data have arrived for it.
        self._queue_pairs: dict[tuple[Host, bytes], _Request] = {}
        #: The peers of each process that have answered, and those that it has asked.
        self._known: set[tuple[Host, bytes]] = set()

    def watch(self, host: Host) -> None:
        """See the packets of a process from now on."""
        host.wire.tap = self._tap(host)

    def _tap(self, host: Host) -> Callable[..., None]:
        known, queue_pairs = self._known, self._queue_pairs

        def tap(is_sent: bool, _local: bytes, peer: bytes, _port: int, _to: int, buffers: Any, _segment: int) -> None:
            (data,) = buffers
            if data[_DESTINATION] == _GSI:
                self._sent(host, peer, data) if is_sent else self._received(host, peer, data)
            elif is_sent:
                if (host, peer) not in known:
                    self.violation = f"{host.name} sent data to an address that has not answered"
            else:
                known.add((host, peer))
                if queue_pairs:
                    request = queue_pairs.pop((host, data[_DESTINATION]), None)
                    if request is not None:
                        request.is_answered = True

        return tap

    def _received(self, host: Host, peer: bytes, data: bytes) -> None:
        key = host, peer, data[_LOCAL_ID]
        if data[_ATTRIBUTE] in (_REQ, _SIDR_REQ):
            self._requests.setdefault(key, _Request()).copies += 1
            return
        self._known.add((host, peer))
        request = self._requests.get(key)
        if request is not None:
            request.is_answered = True

    def _sent(self, host: Host, peer: bytes, data: bytes) -> None:
        attribute = data[_ATTRIBUTE]
        if attribute in (_REQ, _SIDR_REQ):
            self._known.add((host, peer))
            return
        peer_id = data[_LOCAL_ID if attribute == _SIDR_REP else _REMOTE_ID]
        request = self._requests.get((host, peer, peer_id))
        if request is None or request.is_answered:
            return
        request.sent += 1
        if attribute == _REP:
            self._queue_pairs[host, data[_REP_QPN]] = request
        if request.sent > _MOST * request.copies:
            self.violation = (
                f"{host.name} sent {request.sent} datagrams to an address that sent {request.copies} and no answer"
            )
