"""An end that uses ids and a channel itself, with the provider that RDMACM_PROVIDER names.

    python3 -m interop.campaign.ids serve ADDRESS PORT
    python3 -m interop.campaign.ids connect ADDRESS PORT CONNECTIONS MESSAGES SIZE

The private data of each REQ has a number, which decides what follows: the server rejects it, or either end
disconnects. Clients may die, so the server takes the events of its connections in any order. MESSAGES and SIZE are not
used: what moves is private data.
"""

from __future__ import annotations

import contextlib
import struct
import sys

from interop.ends import pattern
from rdmacm import CmEvent, CmEventType, CmId, ConnParam, EventChannel, RdmaError

E = CmEventType
PATIENCE = 60.0
_NUMBER = struct.Struct("!I")
#: Bytes of private data of each message, of which every device has room for more.
_ROOM = 40
_REJECTED, _SERVER_DISCONNECTS, _KINDS = 0, 1, 3


def private_data(number: int, salt: int) -> bytes:
    return _NUMBER.pack(number) + pattern(_ROOM - _NUMBER.size, number + salt)


def number_of(event: CmEvent) -> int:
    """The number in a REQ."""
    number: int = _NUMBER.unpack_from(event.private_data)[0]
    assert event.private_data.startswith(private_data(number, 0)), event.private_data
    return number


def serve(address: str, port: int) -> None:
    numbers: dict[CmId, int] = {}
    with EventChannel() as channel, CmId(channel) as listener:
        listener.bind_addr((address, port))
        listener.listen(8)
        print("listening", flush=True)
        while True:
            with channel.get_event() as event:
                kind, cmid = event.type, event.id
                number = number_of(event) if kind is E.CONNECT_REQUEST else numbers.get(cmid, -1)
            try:
                if kind is E.CONNECT_REQUEST:
                    answer(cmid, number)
                    if number % _KINDS != _REJECTED:
                        numbers[cmid] = number
                        continue
                elif kind is E.ESTABLISHED:
                    if number % _KINDS == _SERVER_DISCONNECTS:
                        cmid.disconnect()
                    continue
                elif kind in (E.TIMEWAIT_EXIT, E.ADDR_CHANGE):
                    continue
                elif kind is E.DISCONNECTED:
                    with contextlib.suppress(RdmaError):
                        cmid.disconnect()
                else:
                    print(f"a client is gone: {event}", flush=True)
            except RdmaError as error:
                print(f"a client is gone: {error}", flush=True)
            numbers.pop(cmid, None)
            cmid.destroy_qp()
            cmid.destroy()


def answer(cmid: CmId, number: int) -> None:
    if number % _KINDS == _REJECTED:
        cmid.reject(private_data(number, 2))
        return
    cmid.create_qp()
    cmid.accept(ConnParam(private_data(number, 1)))


def event_of(channel: EventChannel, *kinds: CmEventType) -> CmEvent:
    with channel.get_event(PATIENCE) as event:
        if event.type not in kinds:
            sys.exit(f"unexpected: {event}")
    return event


def connect(address: str, port: int, connections: int) -> None:
    for number in range(connections):
        with EventChannel() as channel, CmId(channel) as cmid:
            cmid.resolve_addr((address, port))
            event_of(channel, E.ADDR_RESOLVED)
            cmid.resolve_route()
            event_of(channel, E.ROUTE_RESOLVED)
            cmid.create_qp()
            cmid.connect(ConnParam(private_data(number, 0)))
            if number % _KINDS == _REJECTED:
                refused = event_of(channel, E.REJECTED)
                if not refused.private_data.startswith(private_data(number, 2)):
                    sys.exit(f"not rejected by the server: {refused}")
                continue
            established = event_of(channel, E.ESTABLISHED)
            assert established.private_data.startswith(private_data(number, 1)), established.private_data
            if number % _KINDS != _SERVER_DISCONNECTS:
                cmid.disconnect()
            event_of(channel, E.DISCONNECTED)
            with contextlib.suppress(RdmaError):
                cmid.disconnect()
            cmid.destroy_qp()
    print("as expected")


if __name__ == "__main__":
    role, address, port, *work = sys.argv[1:]
    try:
        if role == "serve":
            serve(address, int(port))
        else:
            connect(address, int(port), int(work[0]))
    except RdmaError as error:
        sys.exit(str(error))
