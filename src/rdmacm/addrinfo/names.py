"""From a node and a service to IP addresses: numeric addresses directly, names through the resolver."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import lru_cache
from socket import AF_INET, AF_INET6, inet_aton, inet_pton
from typing import Any, NamedTuple, TypeAlias

from rdmacm.address import AF_IB, InetAddr, format_address, parse_address, scope_index
from rdmacm.addrinfo.checks import NUMBER, PORT_SPACES, QP_TYPES, STREAM_QP_TYPES, family_of, gai_error, resolver_error
from rdmacm.addrinfo.info import RAI_FAMILY, RAI_NUMERICHOST, RAI_PASSIVE, AddrInfo
from rdmacm.constants import EAI, PortSpace
from rdmacm.verbs.enums import QPType

#: One result of socket.getaddrinfo: (family, type, proto, canonname, sockaddr).
ResolverResult: TypeAlias = "tuple[int, int, int, str, tuple[Any, ...]]"

#: A replacement for socket.getaddrinfo: takes (host, service, family, type, proto, flags), returns its results.
Resolver: TypeAlias = Callable[
    [str | None, str | None, int, int, int, int], Sequence[tuple[int, int, int, str, tuple[Any, ...]]]
]

#: A plain int, as the operators of the enumeration are slow.
_NUMERICHOST = int(socket.AI_NUMERICHOST)
#: The flags that getaddrinfo(3) of glibc uses without hints.
_NO_HINTS_FLAGS = int(getattr(socket, "AI_V4MAPPED", 0)) | int(socket.AI_ADDRCONFIG)


class NamedAddress(NamedTuple):
    """An address that a node and service stand for."""

    address: InetAddr
    qp_type: int
    port_space: int
    canonical_name: str | None


def resolve_name(
    node: str | None, service: str | None, hints: AddrInfo | None, resolver: Resolver | None
) -> list[NamedAddress]:
    """The addresses of a node and service, in the resolver's order; at least one. GaiError if there is none.

    They are of the family of the hints, or else of the family of the hints' source.
    """
    source_family = 0
    if hints is None:
        family, socktype, proto, flags = 0, 0, 0, _NO_HINTS_FLAGS
        qp_hint = ps_hint = 0
    else:
        qp_hint, ps_hint = hints.qp_type, hints.port_space
        family, socktype, proto, flags = _socket_hints(int(hints.flags), hints.family, qp_hint, ps_hint)
        if not family and hints.src_addr is not None:
            family = source_family = _source_family(node, service, hints)
    port = _port(node, service)
    if node is not None and ("\0" in node or node == "*"):  # C reads a name up to its NUL, and "*" as NULL
        raise gai_error(EAI.NONAME, node, service, "not a host name", "a name or a numeric address")

    # A numeric node and service, as most callers give them, need no resolver.
    numeric = _parse_numeric(node) if node is not None else None
    if numeric is not None and port is not None and family in (0, numeric[0]):
        qp_type, port_space = qp_type_and_port_space(qp_hint, ps_hint, socktype, proto)
        return [NamedAddress(InetAddr(*numeric, port), qp_type, port_space, None)]

    if node is not None and not flags & _NUMERICHOST and not is_numeric(node):
        flags |= int(socket.AI_CANONNAME)
    ask = resolver or socket.getaddrinfo
    try:
        results = ask(node, service, family, socktype, proto, flags)
    except (OSError, ValueError, MemoryError) as error:
        failure = resolver_error(error, node, service, family)
        if node is not None and family and _has_another_family(error, node, flags, ask):
            failure = resolver_error(socket.gaierror(int(EAI.ADDRFAMILY), ""), node, service, family)
        if source_family and failure.errno == EAI.ADDRFAMILY:
            failure.hint = "a source of the node's address family"
        if node is not None and failure.errno == EAI.NONAME:
            _check_scope(node, service)
        raise failure from error
    found = _unique_addresses(results, family, is_open=not (socktype or proto), qp_hint=qp_hint, ps_hint=ps_hint)
    if not found:
        code = EAI.ADDRFAMILY if family and results else EAI.NODATA
        raise gai_error(code, node, service, "the resolver gave no address of the family asked for")
    return found


def resolve_service(service: str, hints: AddrInfo, port_space: int, resolver: Resolver | None) -> tuple[int, int, int]:
    """Port, QP type and port space of a service without a node; ``port_space`` stands for the hints'."""
    _, socktype, proto, _ = _socket_hints(0, 0, hints.qp_type, port_space)
    port = _port(None, service)
    if port is not None:
        return port, *qp_type_and_port_space(hints.qp_type, port_space, socktype, proto)
    first = resolve_name(None, service, AddrInfo(qp_type=hints.qp_type, port_space=port_space), resolver)[0]
    return first.address.port, first.qp_type, first.port_space


def _source_family(node: str | None, service: str | None, hints: AddrInfo) -> int:
    """The IP family of the hints' source, 0 without one; EAI_ADDRFAMILY if it is AF_IB, and the node is not."""
    family = family_of(hints.src_addr)
    if family == AF_IB:
        what = "this host" if node is None else node
        cause = f"the hints' source {format_address(hints.src_addr)} is AF_IB, and {what} is looked up as an IP address"
        hint = "a source of the node's family, or RAI_FAMILY with family AF_IB for a GID"
        raise gai_error(EAI.ADDRFAMILY, node, service, cause, hint)
    return family


def _check_scope(node: str, service: str | None) -> None:
    """EAI_NONAME with the interface, if the scope of a numeric address names none; the resolver does not say it."""
    if "%" in node and is_numeric(node):
        try:
            scope_index(node.partition("%")[2])
        except ValueError as problem:
            raise gai_error(EAI.NONAME, node, service, str(problem), "an interface of 'ip link'") from None


def _has_another_family(error: Exception, node: str, flags: int, ask: Resolver) -> bool:
    """Whether a name without an address in one family has one in another; getaddrinfo(3) does not tell them apart."""
    if not isinstance(error, socket.gaierror) or error.errno not in (EAI.NONAME, EAI.NODATA):
        return False
    try:
        return bool(ask(node, None, 0, 0, 0, flags & _NUMERICHOST))
    except (OSError, ValueError, MemoryError):
        return False


def _unique_addresses(
    results: Sequence[ResolverResult], wanted: int, *, is_open: bool, qp_hint: int, ps_hint: int
) -> list[NamedAddress]:
    """Each IP address of the results once; only those of the family ``wanted``, unless that is 0.

    ``is_open``: the hints have neither socket type nor protocol, so each address comes once per socket type; its stream
    result is taken.
    """
    canonical = next((name for _, _, _, name, _ in results if name), None)
    found: dict[tuple[int, bytes, int], NamedAddress] = {}
    for family, socktype, proto, _, where in results:
        if family not in (AF_INET, AF_INET6) or (wanted and family != wanted):
            continue
        address = parse_address((str(where[0]), *where[1:]))
        assert isinstance(address, InetAddr)
        key = (address.family, address.ip, address.scope_id)
        is_stream = is_open and socktype == socket.SOCK_STREAM
        if key not in found or (is_stream and found[key].qp_type == QPType.UD):
            qp_type, port_space = qp_type_and_port_space(qp_hint, ps_hint, socktype, proto)
            found[key] = NamedAddress(address, qp_type, port_space, canonical)
    return list(found.values())


def is_numeric(node: str) -> bool:
    """Whether getaddrinfo(3) reads a node as an address: also with a scope, or in a form of inet_aton(3)."""
    try:
        if ":" in node:
            return bool(inet_pton(AF_INET6, node.partition("%")[0]))
        # inet_aton(3) ignores what follows a space, getaddrinfo(3) does not.
        return node.split() == [node] and bool(inet_aton(node))
    except (OSError, ValueError):
        return False


def _parse_numeric(node: str) -> tuple[int, bytes] | None:
    """Family and bytes of a plain numeric address; None for names, scopes and the other forms of inet_aton(3)."""
    try:
        return (AF_INET6, inet_pton(AF_INET6, node)) if ":" in node else (AF_INET, inet_pton(AF_INET, node))
    except (OSError, ValueError):
        return None


def _port(node: str | None, service: str | None) -> int | None:
    """The port number of a service, 0 without one; None if only the resolver can tell.

    EAI_SERVICE for a number that is no port, EAI_NONAME for what is no name.
    """
    if service is None:
        return 0
    number = NUMBER.fullmatch(service)
    if number is not None:
        sign, digits = number.groups()
        if len(digits) > 5 or int(digits) > 0xFFFF or (sign == "-" and digits != "0"):
            raise gai_error(EAI.SERVICE, node, service, "not a port number", "a port number, 0 to 65535")
        return int(digits) if service.isdigit() else None
    if "\0" in service or service == "*" or not _is_encodable(service):
        raise gai_error(EAI.NONAME, node, service, "no service has such a name", "a port number")
    return None


def _is_encodable(name: str) -> bool:
    """Whether a name can be passed to C; a lone surrogate has no encoding."""
    try:
        name.encode()
    except UnicodeError:
        return False
    return True


@lru_cache(1024)
def qp_type_and_port_space(qp_type: int, port_space: int, socktype: int, proto: int) -> tuple[int, int]:
    """QP type and port space of a result: as hinted, else implied by the other of the two, else by the socket type."""
    is_datagram = socktype == socket.SOCK_DGRAM or proto == socket.IPPROTO_UDP
    if port_space in (PortSpace.TCP, PortSpace.UDP, PortSpace.IPOIB):
        is_datagram = port_space != PortSpace.TCP
    elif qp_type == QPType.UD or qp_type in STREAM_QP_TYPES:
        is_datagram = qp_type == QPType.UD
    usual_qp_type, usual_port_space = (QPType.UD, PortSpace.UDP) if is_datagram else (QPType.RC, PortSpace.TCP)
    return (
        QP_TYPES[qp_type] if qp_type else usual_qp_type,
        PORT_SPACES[port_space] if port_space else usual_port_space,
    )


@lru_cache(1024)
def _socket_hints(rai_flags: int, family: int, qp_type: int, port_space: int) -> tuple[int, int, int, int]:
    """Family, type, protocol and flags for getaddrinfo(3)."""
    socktype = 0
    if qp_type in STREAM_QP_TYPES:
        socktype = int(socket.SOCK_STREAM)
    elif qp_type == QPType.UD:
        socktype = int(socket.SOCK_DGRAM)
    proto = 0
    if port_space == PortSpace.TCP or (port_space == PortSpace.IB and socktype == socket.SOCK_STREAM):
        proto = socket.IPPROTO_TCP
    elif port_space in (PortSpace.UDP, PortSpace.IPOIB) or (
        port_space == PortSpace.IB and socktype == socket.SOCK_DGRAM
    ):
        proto = socket.IPPROTO_UDP
    if family == AF_IB:  # a GID is resolved as an IPv6 address
        family = AF_INET6 if rai_flags & RAI_FAMILY else 0
    flags = int(socket.AI_PASSIVE) if rai_flags & RAI_PASSIVE else 0
    if rai_flags & RAI_NUMERICHOST:
        flags |= _NUMERICHOST
    return int(family), socktype, int(proto), flags
