"""Management datagrams for tests to send, and functions that await them."""

from __future__ import annotations

import select
import struct

from rdmacm.ib.transport import MadTransport, ReceivedMad
from rdmacm.proto.mad import Mad, MadAddress, Method, MgmtClass
from support.clock import LONGEST

_SA_HEADER = struct.Struct("!12xQHxxQ")
NODE_RECORD = 0x11
PORT_INFO_RECORD = 0x12
PATH_RECORD = 0x35


def arrivals(transport: MadTransport, count: int = 1) -> list[ReceivedMad]:
    """The next ``count`` datagrams, or fewer if no more arrive."""
    poll = select.poll()
    poll.register(transport.fileno(), select.POLLIN)
    found: list[ReceivedMad] = []
    while len(found) < count and poll.poll(1000 * LONGEST):
        found += transport.receive()
    return found


def message(number: int, body: bytes = b"") -> bytes:
    """A datagram of the connection manager's class."""
    return Mad(MgmtClass.COM_MGT, 2, Method.SEND, 0x10, number, data=body.ljust(232, b"\0")).pack()


def question(attribute: int, mask: int, record: bytes, number: int = 1, version: int = 2) -> bytes:
    """A Get of the subnet administrator."""
    data = (_SA_HEADER.pack(0, 0, mask) + record).ljust(232, b"\0")
    return Mad(MgmtClass.SUBN_ADM, version, Method.GET, attribute, number, data=data).pack()


def asked(transport: MadTransport, attribute: int, mask: int, record: bytes) -> tuple[int, bytes]:
    """Status and record of the answer."""
    transport.send(MadAddress(transport.port().sm_lid), question(attribute, mask, record, 0x1122334455667788))
    ((_, mad),) = arrivals(transport)
    answer = Mad.unpack(mad.ljust(256, b"\0"))
    assert answer.method == Method.GET_RESP
    assert answer.transaction_id & 0xFFFFFFFF == 0x55667788
    return answer.status, answer.data[32:]
