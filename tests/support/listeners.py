"""Listeners that answer nobody, or reject everybody, in a network namespace."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rdmacm import CmId, EventChannel, PortSpace
from rdmacm.proto.cm.codes import MessageKind
from rdmacm.proto.cm.messages import REJ, REQ, unpack_message
from rdmacm.proto.constants import ROCE_PORT
from rdmacm.proto.mad import MAD_SIZE, Mad
from rdmacm.proto.roce.icrc import Icrc
from support.hostile import management
from support.netns import Host
from support.wires import packed

__all__ = ["asking_twice", "listening", "rejecting"]
#: Bytes before a MAD: BTH and DETH.
_HEADERS = 20


@contextmanager
def listening(host: Host, address: str, space: PortSpace = PortSpace.TCP, backlog: int = 0) -> Iterator[int]:
    """A listener of this process that rejects nobody and accepts nobody; its port."""
    with host.enter():
        channel = EventChannel()
        cmid = CmId(channel, space)
        cmid.bind_addr((address, 0))
        cmid.listen(backlog)
    with channel, cmid:
        yield cmid.src_port


@contextmanager
def asking_twice(host: Host, address: str, port: int) -> Iterator[None]:
    """Two requests for a connection, which is one more than a backlog of 1 takes."""
    with ExitStack() as stack:
        with host.enter():
            for _ in range(2):
                waiting = stack.enter_context(EventChannel())
                cmid = stack.enter_context(CmId(waiting, PortSpace.TCP))
                cmid.resolve_addr((address, port))
                waiting.get_event(5).ack()
                cmid.resolve_route()
                waiting.get_event(5).ack()
                cmid.create_qp()
                cmid.connect()
        yield


@contextmanager
def rejecting(host: Host, address: str, reason: int) -> Iterator[None]:
    """A peer without rdmacm, of IPv4, that rejects each request with a reason."""
    with host.enter():
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, IP_PMTUDISC_DO: the identification is 0
        sock.bind((address, ROCE_PORT))

    def serve() -> None:
        while True:
            packet, (peer, _) = sock.recvfrom(4096)
            if not packet:
                return
            mad = Mad.unpack(packet[_HEADERS : _HEADERS + MAD_SIZE])
            message = unpack_message(mad)
            if isinstance(message, REQ):
                answer = management(REJ(0, message.local_comm_id, MessageKind.REQ, reason), mad.transaction_id)
                seal = Icrc(packed(address), packed(peer), ROCE_PORT).seal([answer])
                sock.sendto(answer + seal, (peer, ROCE_PORT))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        with host.enter(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stop:
            stop.sendto(b"", (address, ROCE_PORT))
        thread.join()
        sock.close()
