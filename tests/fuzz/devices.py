"""A whole software device: a server with a client, and packets of a stranger and of the client's host."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from fuzz.harness import Source, target
from fuzz.wire_formats import mad_seeds, roce_seeds
from rdmacm.proto.cm.messages import RTU, pack_message
from support.hostile import ADDRESSES, IPV6_ADDRESSES, PORT, asking, datagram, sealed, throw, trio

#: Bit of the first step of an input: the hosts have IPv6.
_IPV6 = 0x40
#: Where a MAD with a REQ has the IP version of the rdma_cm header.
_IP_VERSION = 24 + 140 + 1

#: The most connections that the steps of an input leave at the server.
_MOST = 40


@contextmanager
def no_errors_logged() -> Iterator[None]:
    """AssertionError for what the library logs as an error: an exception that it has contained is a fault too."""
    errors: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            errors.append(record.getMessage())

    logger, handler = logging.getLogger("rdmacm"), Handler(logging.ERROR)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    assert not errors, errors


def _step(kind: int, body: bytes) -> bytes:
    return bytes((kind,)) + len(body).to_bytes(2, "big") + body


def device_seeds() -> Iterator[bytes]:
    """Steps of :func:`device`: how the packet is made, its length, its bytes."""
    packets, mads = list(roce_seeds()), list(mad_seeds())
    yield b"".join(_step(0, packet + bytes(4)) + _step(1, packet) for packet in packets[:6])
    for start in range(0, len(packets), 12):
        yield b"".join(_step(1, packet) for packet in packets[start : start + 12])
    for start in range(0, len(mads), 12):
        yield b"".join(_step(2, mad.rstrip(b"\0")) for mad in mads[start : start + 12])
    for kind, (server, _, stranger) in ((2, ADDRESSES), (2 | _IPV6, IPV6_ADDRESSES)):
        req = pack_message(asking(stranger, server, 77), 5)
        yield _step(kind, req) + _step(2, req) + _step(2, pack_message(RTU(77, 0), 5)) + _step(4, b"")


@target(device_seeds, 1500)
def device(data: bytes) -> None:
    """Whatever a stranger sends, the server works, and its client's connection as well."""
    source = Source(data)
    addresses = IPV6_ADDRESSES if data[:1] and data[0] & _IPV6 else ADDRESSES
    to = addresses[0]
    with no_errors_logged(), trio(addresses) as (fabric, server, talk, stranger):
        for _ in range(12):
            if source.is_empty:
                break
            kind = source.number()
            body = source.take(source.number(2) % 1200)
            if kind & 7 == 4:
                fabric.run(seconds=len(body) + 0.1)
                continue
            if kind & 7 == 2:
                body = sealed(stranger, to, datagram(body[:256].ljust(256, b"\0")))
            elif kind & 7 == 1 and len(body) >= 12:
                body = sealed(stranger, to, body[:5] + talk.qpns[0].to_bytes(3, "big") + body[8:])
            # A packet of the client's host has no valid ICRC, or it would be the client's own.
            is_clients = kind & 0x80 and kind & 7 not in (1, 2)
            throw(talk.host if is_clients else stranger, to, body)
            fabric.run(seconds=0.001)
        agent = server.host.provider.host.cm.agent
        assert len(agent) <= _MOST
        assert len(server.host.provider.host.mux.dropped) <= 16
        talk.on(1)
        fabric.run(seconds=400)  # requests that stay unanswered time out


def request_seeds() -> Iterator[bytes]:
    for server, client, stranger in (ADDRESSES, IPV6_ADDRESSES):
        for address in (stranger, client):
            mad = pack_message(asking(address, server, 78), 5)
            yield mad
            yield mad[: 24 + 140] + bytes(92)
            yield mad[:74] + b"\xff\xff" + mad[76:]
        yield pack_message(asking(stranger, server, 78, PORT + 1), 5)


@target(request_seeds, 256)
def requests(data: bytes) -> None:
    """A REQ for a listener with any content: the application gets it, or the stranger a REJ."""
    addresses = IPV6_ADDRESSES if data[_IP_VERSION : _IP_VERSION + 1] == b"\x60" else ADDRESSES
    to = addresses[0]
    mad = bytearray(pack_message(asking(addresses[2], to, 78), 5))
    mad[24 : 24 + len(data[24:256])] = data[24:256]
    with no_errors_logged(), trio(addresses) as (fabric, server, talk, stranger):
        before = len(server.host.provider.host.cm.agent)
        throw(stranger, to, sealed(stranger, to, datagram(bytes(mad))))
        fabric.run(seconds=1)
        assert len(server.host.provider.host.cm.agent) <= before + 1
        talk.on(1)
        fabric.run(seconds=400)
