"""The requests of our own, beside the commands of rdma_cm: devices, sockets, channels, contexts."""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from socket import AF_INET, AF_INET6
from typing import Any, TypeAlias

from rdmacm.address import InetAddr
from rdmacm.errors import cm_error
from rdmacm.run import protocol
from rdmacm.run.commands import execute
from rdmacm.run.connections import Packet
from rdmacm.run.options import Options
from rdmacm.run.packing import pack_devices
from rdmacm.run.protocol import Request
from rdmacm.run.sessions import Session
from rdmacm.run.slots import open_group
from rdmacm.soft.provider import SoftProvider
from rdmacm.verbs.device import Device
from rdmacm.verbs.enums import PortState

#: Sends the reply: its body, and descriptors.
Answer: TypeAlias = Callable[[bytes, Sequence[int]], None]


def perform(session: Session, packet: Packet, answer: Answer) -> None:
    """Execute a request whose reply is known at once, and answer it. OSError with the errno of the reply instead."""
    if packet.type < Request.HELLO:
        answer(execute(session, packet.type, packet.channel, packet.body), ())
        return
    found = _REQUESTS.get(packet.type)
    if found is None:
        raise cm_error(errno.EINVAL, f"no request 0x{packet.type:x}", "request")
    found(session, packet, answer)


def _fields(layout: struct.Struct, body: bytes) -> tuple[Any, ...]:
    if len(body) < layout.size:
        raise cm_error(errno.EINVAL, f"the structure has {layout.size} bytes, not {len(body)}", "request")
    return layout.unpack_from(body)


def _devices(session: Session, _: Packet, answer: Answer) -> None:
    answer(pack_devices(shown_devices(session.provider, session.options)), ())


def shown_devices(provider: SoftProvider, options: Options) -> list[Device]:
    """The devices that programs see, in their order."""
    return sorted((each for each in provider.devices() if each.index > 0 and options.shows(each)), key=_rank)


def _rank(device: Device) -> int:
    """Programs take the first device where none is named: that of loopback comes late, one without use last."""
    port = device.ports[0]
    if port.state is not PortState.ACTIVE or not port.gids:
        return 2
    addresses = (InetAddr(AF_INET if len(row.gid.ip) == 4 else AF_INET6, row.gid.ip) for row in port.gids)
    return int(any(address.is_loopback for address in addresses))


def _slot(session: Session, _: Packet, answer: Answer) -> None:
    answer(*session.slots.claim())


def _group(_: Session, packet: Packet, answer: Answer) -> None:
    gid, ifindex = _fields(protocol.GROUP, packet.body)
    with open_group(gid, ifindex) as sock:  # the program's copy keeps the membership
        answer(b"", (sock.fileno(),))


def _channel_open(session: Session, _: Packet, answer: Answer) -> None:
    channel = session.open_channel()
    with ExitStack() as failed:
        failed.callback(session.close_channel, channel)
        answer(protocol.NUMBER.pack(channel.number), (channel.program_fileno(),))
        failed.pop_all()


def _channel_close(session: Session, packet: Packet, answer: Answer) -> None:
    session.close_channel(session.channel(packet.channel))
    answer(b"", ())


def _context_open(session: Session, packet: Packet, answer: Answer) -> None:
    (index,) = _fields(protocol.NUMBER, packet.body)
    if not packet.fds:
        raise cm_error(errno.EINVAL, "no descriptor for the events", "open_device")
    answer(protocol.NUMBER.pack(session.open_context(index, packet.fds[0])), ())


def _context_close(session: Session, packet: Packet, answer: Answer) -> None:
    (number,) = _fields(protocol.NUMBER, packet.body)
    session.close_context(number)
    answer(b"", ())


def _tap(session: Session, _: Packet, answer: Answer) -> None:
    if session.tapping is None:
        raise cm_error(errno.ENOENT, "packets are not captured", "request")
    answer(b"", (session.tapping.program_fileno(),))


def _counters(session: Session, _: Packet, answer: Answer) -> None:
    counters = session.share_counters()
    try:
        answer(b"", (counters.fd,))
    finally:
        counters.close_fd()


def _hole(session: Session, packet: Packet, answer: Answer) -> None:
    remote, length, qp_num, arrived, lost = _fields(protocol.HOLE, packet.body)
    if length not in (4, 16):
        raise cm_error(errno.EINVAL, f"an address has 4 or 16 bytes, not {length}", "request")
    session.teller.hole(session.provider.host.network, remote[:length], qp_num, arrived, lost)
    answer(b"", ())


_REQUESTS: dict[int, Callable[[Session, Packet, Answer], None]] = {
    Request.DEVICES: _devices,
    Request.SLOT: _slot,
    Request.GROUP: _group,
    Request.CHANNEL_OPEN: _channel_open,
    Request.CHANNEL_CLOSE: _channel_close,
    Request.CONTEXT_OPEN: _context_open,
    Request.CONTEXT_CLOSE: _context_close,
    Request.TAP: _tap,
    Request.COUNTERS: _counters,
    Request.HOLE: _hole,
}
