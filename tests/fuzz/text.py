"""Parsers of text and of structures that users pass: the documented exceptions and no others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from fuzz.harness import Source, target
from rdmacm.address import Gid, SockAddrIB, format_address, parse_address
from rdmacm.addrinfo.info import AddrInfo
from rdmacm.addrinfo.names import is_numeric, resolve_name
from rdmacm.constants import EAI
from rdmacm.enums import WCStatus
from rdmacm.errors import GaiError, RdmaError, gai_strerror
from rdmacm.proto.sa import PathData, PathRecord
from rdmacm.proto.sa.subnet import service_name_bytes

_TEXTS = (
    *(
        "10.0.0.1",
        "::1",
        "fe80::1%lo",
        "fe80::1%2",
        "::ffff:10.0.0.1",
        "1.2.3",
        "0x7f.1",
        "*",
        "",
        "host.example",
        "a%b",
    ),
    *("10.0.0.1 x", "\0", "fe80::1%4294967296", "\ud800", "-1", "+5", "65536", "00080", "http", "é", "1_0", "٣"),
)


def text_seeds() -> Iterator[bytes]:
    for text in _TEXTS:
        for service in ("", "7471", "http"):
            yield bytes((len(text),)) + text.encode(errors="surrogatepass") + service.encode()


@target(text_seeds, 200)
def addresses(data: bytes) -> None:
    """Addresses, GIDs and service names as text."""
    source = Source(data)
    host = source.take(source.number()).decode("utf-8", "surrogateescape")
    port = source.rest().decode("utf-8", "replace")
    with suppress(ValueError):
        gid = Gid(host)
        assert Gid(str(gid)) == gid
    for given in ((host, 7471), (host, port), (host, port, 0, 1), (host, 1, port, port)):
        with suppress(ValueError, TypeError):
            parsed = parse_address(given)  # type: ignore[arg-type]
            assert parse_address(parsed.sockaddr) == parsed  # type: ignore[union-attr]
        assert format_address(given)  # type: ignore[arg-type]
    assert is_numeric(host) in (True, False)
    with suppress(UnicodeEncodeError):
        assert service_name_bytes(host)[:0] == b""


def _no_resolver(*_: Any) -> Any:
    raise socket.gaierror(socket.EAI_NONAME, "none")


@target(text_seeds, 200)
def names(data: bytes) -> None:
    """A node and a service that the resolver does not know: results, or GaiError."""
    source = Source(data)
    try:
        node = source.take(source.number()).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return
    service = source.rest().decode("utf-8", "replace")
    for asked in (node, None):
        for hints in (None, AddrInfo(qp_type=2), AddrInfo(flags=2, family=socket.AF_INET6)):
            try:
                found = resolve_name(asked, service or None, hints, _no_resolver)
            except GaiError:
                pass
            else:
                assert found
                assert all(0 <= each.address.port <= 0xFFFF for each in found)


def route_seeds() -> Iterator[bytes]:
    gid = Gid("fe80::1")
    yield PathData(PathRecord(gid, gid)).pack() * 2
    yield SockAddrIB(gid, 5, 7).pack()


@target(route_seeds, 300)
def routes(data: bytes) -> None:
    """``ai_route`` and ``struct sockaddr_ib`` as bytes, and texts of numbers."""
    for start in range(0, len(data), PathData.SIZE):
        with suppress(ValueError):
            path = PathData.unpack(data[start : start + PathData.SIZE])
            again = PathData.unpack(path.pack())
            assert again == path
            info = AddrInfo(route=(path,))
            assert info.route == (path,)
            repr(info)
    with suppress(ValueError):
        address = SockAddrIB.unpack(data)
        assert address.pack() == data
        assert 0 <= address.port <= 0xFFFF
        assert str(address)
    number = int.from_bytes(data[:4], "big", signed=True)
    assert gai_strerror(number)
    with suppress(ValueError):
        assert WCStatus(number) or True
        assert EAI(number) or True
    with suppress(RdmaError):
        raise RdmaError(number & 0xFFFF, "text")
