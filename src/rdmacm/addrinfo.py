"""rdma_getaddrinfo(3): names and services to RDMA addresses.

Differences from the C library, each because the manual page says so, are listed in ``docs/parity.md``: no device is
needed, every answer of the resolver comes back, flags, QP types and port spaces are checked, and the source address,
device and route the host would use are filled in.
"""

from __future__ import annotations

import errno
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from socket import AF_INET, AF_INET6, inet_aton, inet_pton
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

from rdmacm import acm
from rdmacm.address import (
    AF_IB,
    ALL_BITS_64,
    Gid,
    InetAddr,
    SockAddr,
    SockAddrIB,
    format_address,
    parse_address,
    service_id,
    service_id_mask,
)
from rdmacm.constants import EAI, PortSpace, RaiFlag
from rdmacm.errors import GaiError, cm_error, errno_name, gai_strerror
from rdmacm.proto.sa import PATH_FLAGS, PathData, PathRecord
from rdmacm.provider import Provider, RouteChoice, get_provider
from rdmacm.verbs.device import GidEntry
from rdmacm.verbs.enums import LinkLayer, PortState, QPType

if TYPE_CHECKING:
    from rdmacm.proto.acm import AcmReply
    from rdmacm.proto.sa.subnet import ServiceRecord

__all__ = ["AddrInfo", "HintFields", "Resolver", "from_services", "getaddrinfo", "make_hints", "needs_lookup"]

#: One answer of socket.getaddrinfo: (family, type, proto, canonname, sockaddr).
Answer: TypeAlias = "tuple[int, int, int, str, tuple[Any, ...]]"

#: The shape of socket.getaddrinfo, which a caller may replace: (host, service, family, type, proto, flags).
Resolver: TypeAlias = Callable[[str | None, str | None, int, int, int, int], "Sequence[Answer]"]

# Flags as plain ints: testing IntFlags costs a function call each, and every lookup tests several.
_PASSIVE, _NUMERICHOST, _NOROUTE = int(RaiFlag.PASSIVE), int(RaiFlag.NUMERICHOST), int(RaiFlag.NOROUTE)
_FAMILY, _SA, _DNS = int(RaiFlag.FAMILY), int(RaiFlag.SA), int(RaiFlag.DNS)
_KNOWN_FLAGS = _PASSIVE | _NUMERICHOST | _NOROUTE | _FAMILY | _SA | _DNS
_NO_FLAGS = RaiFlag(0)

_STREAM_QPS = frozenset({QPType.RC, QPType.UC, QPType.XRC_SEND, QPType.XRC_RECV})
_QP_TYPES: dict[int, QPType] = {int(qp): qp for qp in QPType}
_PORT_SPACES: dict[int, PortSpace] = {int(ps): ps for ps in PortSpace}
_FAMILIES = frozenset((0, int(AF_INET), int(AF_INET6), AF_IB))

#: What getaddrinfo(3) does when it gets no hints (glibc).
_NO_HINTS_FLAGS = int(getattr(socket, "AI_V4MAPPED", 0)) | int(socket.AI_ADDRCONFIG)


@dataclass(frozen=True, slots=True)
class AddrInfo:
    """``struct rdma_addrinfo``; names are C's without ``ai_``. As hints, zeros and Nones mean "any".

    ``flags``: :class:`RaiFlag`; ``family``: ``AF_INET``, ``AF_INET6`` or ``AF_IB`` (27); ``qp_type``:
    :class:`QPType` or 0; ``port_space``: :class:`PortSpace` or 0. Addresses are Python socket addresses or
    :class:`SockAddrIB`, None where C has length 0. ``route`` holds ``ibv_path_data``; ``connect`` the bytes that must
    go out as private data ahead of the user's. ``device``, ``port_num`` and ``gid_index`` are ours: the device the
    host would use, None and 0 where there is none or it was not asked.
    """

    flags: int = _NO_FLAGS
    family: int = 0
    qp_type: int = 0
    port_space: int = 0
    src_addr: SockAddr | None = None
    dst_addr: SockAddr | None = None
    src_canonname: str | None = None
    dst_canonname: str | None = None
    route: tuple[PathData, ...] = ()
    connect: bytes = b""
    device: str | None = None
    port_num: int = 0
    gid_index: int = 0

    @property
    def src_len(self) -> int:
        """Bytes of the C sockaddr: 16, 28, 48, or 0 for none."""
        return _sockaddr_length(self.src_addr)

    @property
    def dst_len(self) -> int:
        """Bytes of the C sockaddr: 16, 28, 48, or 0 for none."""
        return _sockaddr_length(self.dst_addr)

    @property
    def route_len(self) -> int:
        """Bytes of the route: 72 a path."""
        return 72 * len(self.route)

    @property
    def connect_len(self) -> int:
        """Bytes of the connect data."""
        return len(self.connect)

    def __str__(self) -> str:
        side = f"from {format_address(self.src_addr)}" if self.src_addr else ""
        to = format_address(self.dst_addr) if self.dst_addr else ""
        return " ".join(part for part in (to, side, self.device) if part)


def _sockaddr_length(address: SockAddr | None) -> int:
    if address is None:
        return 0
    if isinstance(address, SockAddrIB):
        return 48
    return 28 if len(address) > 2 or ":" in address[0] else 16


class HintFields(TypedDict, total=False):
    """The fields of hints, as keywords; None leaves one alone.

    ``route`` may also be bytes: one ``ibv_path_record``, or an array of ``ibv_path_data``.
    """

    flags: int | None
    family: int | None
    qp_type: int | None
    port_space: int | None
    src_addr: SockAddr | None
    dst_addr: SockAddr | None
    route: bytes | Sequence[PathData] | None


def make_hints(hints: AddrInfo | None = None, **fields: Unpack[HintFields]) -> AddrInfo | None:
    """Hints with some fields replaced; None when there is nothing to hint.

    ``route`` may be the bytes of one ``ibv_path_record`` (64) or of an array of ``ibv_path_data`` (72 each).
    ValueError for another length.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    if not given:
        return hints
    if "route" in given:
        given["route"] = _parse_route(given["route"])  # type: ignore[arg-type]
    return AddrInfo(**given) if hints is None else replace(hints, **given)  # type: ignore[arg-type]


_NO_HINTS = AddrInfo()


def _parse_route(route: bytes | Sequence[PathData]) -> tuple[PathData, ...]:
    if not isinstance(route, bytes | bytearray | memoryview):
        return tuple(route)
    if len(route) == 64:
        return (PathData(PathRecord.unpack(route)),)
    if not route or len(route) % 72:
        raise ValueError(f"a route is 64 bytes or a multiple of 72, not {len(route)}")
    return tuple(PathData.unpack(route[i : i + 72]) for i in range(0, len(route), 72))


def getaddrinfo(
    node: str | None = None,
    service: str | int | None = None,
    hints: AddrInfo | None = None,
    *,
    provider: str | Provider | None = None,
    resolver: Resolver | None = None,
    **fields: Unpack[HintFields],
) -> list[AddrInfo]:
    """Resolve a node and service to RDMA addresses, rdma_getaddrinfo(3).

    ``node``: a host name, an IPv4 address, an IPv6 address (``%scope`` allowed), or with ``RaiFlag.FAMILY`` and
    family ``AF_IB`` a GID; ``service``: a port number or a name of services(5). With neither, the hints' source,
    destination or route is resolved. The keywords are fields of the hints, and override those of ``hints``.
    ``resolver`` replaces socket.getaddrinfo for names.

    Returns a non-empty list, best first. On the active side each entry has the source address, device and route
    the host would use, unless ``RaiFlag.NOROUTE`` is set or the destination cannot be reached (rdma_resolve_addr
    will then say why). To an InfiniBand address it is the route that an ibacm daemon knows, else the subnet
    administrator, who is waited for up to 2 s; a route of the hints restricts what the administrator is asked for.
    Where ibacm knows an InfiniBand path to an IP address, another entry says so: an ``AF_IB`` address with that route,
    behind the entry of the same destination, but before it where only InfiniBand reaches it. Raises :class:`GaiError`,
    whose ``errno`` is an EAI code; for ``RaiFlag.SA``, RdmaError with EOPNOTSUPP (with a node or ``DNS``), EINVAL (no
    service) or ENOENT (no port's subnet administrator knows it).

    >>> getaddrinfo("127.0.0.1", 7471, port_space=PortSpace.TCP)[0].dst_addr
    ('127.0.0.1', 7471)
    """
    hints = make_hints(hints, **fields)
    if service is not None and not isinstance(service, str):
        service = str(service)
    wanted = 0
    if hints is not None:
        wanted = int(hints.flags)
        _check_hints(node, service, hints, wanted)
        if wanted & _SA:
            return _from_administrator(node, service, wanted, get_provider(provider))
    backend = None if wanted & _NOROUTE else get_provider(provider)
    if node is None and service is None:
        found = [_from_hints(hints, backend)]
    else:
        found = _from_names(node, service, hints, backend, resolver)
    if backend is None or not (acm.CLIENT.is_there() or found[0].family == AF_IB):
        return found
    return _with_paths(found, hints or _NO_HINTS, backend)


def needs_lookup(node: str | None, hints: AddrInfo | None, provider: Provider) -> bool:
    """Whether resolving ``node`` may ask a name server, ibacm or a subnet administrator, and so take long."""
    flags = 0 if hints is None else int(hints.flags)
    if flags & _SA:
        return False
    if node is not None and not flags & _NUMERICHOST and not _is_numeric(node):
        return True
    is_gid = hints is not None and (
        hints.family == AF_IB or bool(hints.route) or isinstance(hints.dst_addr, SockAddrIB)
    )
    is_asked = is_gid or acm.CLIENT.is_there()
    return is_asked and not flags & (_NOROUTE | _PASSIVE) and bool(_infiniband(provider))


# -- checking -------------------------------------------------------------------------------------------


def _error(
    code: EAI, node: str | None, service: str | None, cause: str, hint: str | None = None, system_errno: int = 0
) -> GaiError:
    if node is None:
        what = "(no node, no service)" if service is None else f":{service}"
    else:
        what = format_address((node, service)) if service is not None else node  # type: ignore[arg-type]
    text = f"{gai_strerror(code)} ({cause})" if cause else gai_strerror(code)
    error = GaiError(int(code), text, "getaddrinfo", what, hint)
    error.system_errno = system_errno
    return error


def _check_hints(node: str | None, service: str | None, hints: AddrInfo, flags: int) -> None:
    if flags & ~_KNOWN_FLAGS:
        raise _error(
            EAI.BADFLAGS,
            node,
            service,
            f"unknown flags 0x{flags & ~_KNOWN_FLAGS:x}",
            "members of rdmacm.RaiFlag (not socket.AI_*)",
        )
    if hints.family not in _FAMILIES:
        raise _error(EAI.FAMILY, node, service, f"family {hints.family}", "AF_INET, AF_INET6, AF_IB or 0")
    qp, ps = hints.qp_type, hints.port_space
    if qp and qp not in _QP_TYPES:
        raise _error(EAI.QPTYPE, node, service, f"unknown QP type {qp}", "a member of rdmacm.QPType")
    if ps and ps not in _PORT_SPACES:
        raise _error(EAI.QPTYPE, node, service, f"unknown port space 0x{ps:x}", "a member of rdmacm.PortSpace")
    if qp and ps and not _consistent(qp, ps):
        raise _error(
            EAI.QPTYPE,
            node,
            service,
            f"QP type {_QP_TYPES[qp].name} does not go with port space {_PORT_SPACES[ps].name}",
            "RC with TCP or IB, UD with UDP, IPOIB or IB",
        )


def _consistent(qp: int, ps: int) -> bool:
    if qp == QPType.UD:
        return ps != PortSpace.TCP
    return qp not in _STREAM_QPS or ps not in (PortSpace.UDP, PortSpace.IPOIB)


def _from_administrator(node: str | None, service: str | None, flags: int, backend: Provider) -> list[AddrInfo]:
    """RAI_SA asks the subnet administrator of each active InfiniBand port."""
    if node is not None or flags & _DNS:
        other = "a node" if node is not None else "RAI_DNS"
        raise cm_error(
            errno.EOPNOTSUPP, f"RAI_SA does not go with {other}", "getaddrinfo", service, f"RAI_SA without {other}"
        )
    if service is None:
        raise cm_error(errno.EINVAL, "RAI_SA needs a service name or id", "getaddrinfo", None, "a service")
    found = backend.find_services(service)
    if found is None:
        raise cm_error(
            errno.ENOENT,
            "no active InfiniBand port has a subnet administrator that knows the service",
            "getaddrinfo",
            service,
            "'rdmacm devices' for the ports, 'rdmacm sa services' for what they know; or a node name (RAI_DNS)",
        )
    return [
        replace(info, device=found.device, port_num=found.port_num) for info in from_services(found.records, found.gid)
    ]


def from_services(records: Sequence[ServiceRecord], source: Gid) -> list[AddrInfo]:
    """What service records say, an entry each, as rdma_getaddrinfo(3) has it; ``source`` is the port's that asked."""
    space = PortSpace.IB
    return [
        AddrInfo(
            RaiFlag.SA,
            AF_IB,
            0,
            space,
            SockAddrIB(source, service_id(space, 0), service_id_mask(space, 0), record.service_pkey),
            SockAddrIB(record.service_gid, record.service_id, ALL_BITS_64, record.service_pkey),
        )
        for record in records
    ]


# -- from hints alone -----------------------------------------------------------------------------------


def _from_hints(hints: AddrInfo | None, backend: Provider | None) -> AddrInfo:
    passive = hints is not None and bool(hints.flags & _PASSIVE)
    if hints is None or not (hints.src_addr or (hints.dst_addr and not passive) or hints.route):
        raise _error(
            EAI.NONAME, None, None, "nothing to resolve", "a node, a service, or hints with an address or route"
        )
    try:
        src = None if hints.src_addr is None else parse_address(hints.src_addr)
        dst = None if hints.dst_addr is None or passive else parse_address(hints.dst_addr)
    except ValueError as problem:
        raise _error(EAI.NONAME, None, None, str(problem)) from None
    qp, ps = _types(hints.qp_type, hints.port_space, 0, 0)
    if src is None and dst is None:
        src, dst = _route_ends(hints.route[0].path, hints.port_space or PortSpace.IB)
        qp, ps = _types(hints.qp_type, hints.port_space or PortSpace.IB, 0, 0)
    if passive:
        dst = None
    known = dst or src
    family = AF_IB if isinstance(known, SockAddrIB) else known.family if known else hints.family
    if hints.family and known is not None and family != hints.family:
        raise _error(
            EAI.ADDRFAMILY, None, None, f"the hints' address {known} is not of the hints' family {hints.family}"
        )
    flags = RaiFlag(hints.flags & _PASSIVE)
    info = AddrInfo(flags, int(family), qp, ps, _user(src), _user(dst), route=hints.route)
    return _completed(info, src, dst, backend)


def _route_ends(path: PathRecord, port_space: int) -> tuple[SockAddrIB, SockAddrIB]:
    """Both ends of a route, which names them by GID."""
    space_sid, space_mask = service_id(port_space, 0), service_id_mask(port_space, 0)
    sid, mask = (path.service_id, ALL_BITS_64) if path.service_id else (space_sid, space_mask)
    return (
        SockAddrIB(path.sgid, space_sid, space_mask, path.pkey),
        SockAddrIB(path.dgid, sid, mask, path.pkey, path.flow_label),
    )


def _user(address: InetAddr | SockAddrIB | None) -> SockAddr | None:
    return address.sockaddr if isinstance(address, InetAddr) else address


# -- from names -----------------------------------------------------------------------------------------


def _numeric(node: str) -> tuple[int, bytes] | None:
    """Family and bytes of a plainly numeric node, None for everything else (scopes and inet_aton forms too)."""
    try:
        return (AF_INET6, inet_pton(AF_INET6, node)) if ":" in node else (AF_INET, inet_pton(AF_INET, node))
    except (OSError, ValueError):
        return None


def _is_numeric(node: str) -> bool:
    """Whether getaddrinfo(3) reads a node as an address and does not look it up: with a scope, or as inet_aton(3)."""
    try:
        if ":" in node:
            return bool(inet_pton(AF_INET6, node.partition("%")[0]))
        # inet_aton(3) overlooks what follows a space, getaddrinfo(3) does not.
        return node.split() == [node] and bool(inet_aton(node))
    except (OSError, ValueError):
        return False


@lru_cache(1024)
def _types(qp: int, ps: int, socktype: int, proto: int) -> tuple[int, int]:
    """QP type and port space of an answer: the hints'; what one of them implies; else what the socket type does."""
    datagram = socktype == socket.SOCK_DGRAM or proto == socket.IPPROTO_UDP
    if ps in (PortSpace.TCP, PortSpace.UDP, PortSpace.IPOIB):
        datagram = ps != PortSpace.TCP
    elif qp == QPType.UD or qp in _STREAM_QPS:
        datagram = qp == QPType.UD
    usual_qp, usual_ps = (QPType.UD, PortSpace.UDP) if datagram else (QPType.RC, PortSpace.TCP)
    return _QP_TYPES[qp] if qp else usual_qp, _PORT_SPACES[ps] if ps else usual_ps


@lru_cache(1024)
def _socket_hints(wanted: int, family: int, qp: int, ps: int) -> tuple[int, int, int, int]:
    """family, type, protocol and flags for getaddrinfo(3)."""
    socktype = int(socket.SOCK_STREAM) if qp in _STREAM_QPS else int(socket.SOCK_DGRAM) if qp == QPType.UD else 0
    proto = 0
    if ps == PortSpace.TCP or (ps == PortSpace.IB and socktype == socket.SOCK_STREAM):
        proto = socket.IPPROTO_TCP
    elif ps in (PortSpace.UDP, PortSpace.IPOIB) or (ps == PortSpace.IB and socktype == socket.SOCK_DGRAM):
        proto = socket.IPPROTO_UDP
    if family == AF_IB:  # a GID is looked for among IPv6 addresses
        family = AF_INET6 if wanted & _FAMILY else 0
    flags = int(socket.AI_PASSIVE) if wanted & _PASSIVE else 0
    if wanted & _NUMERICHOST:
        flags |= socket.AI_NUMERICHOST
    return int(family), socktype, int(proto), int(flags)


#: What strtoul(3) reads as a number, and with it getaddrinfo(3).
_NUMBER = re.compile(r"[ \t-\r]*([+-]?)0*([0-9]+)")


def _port(node: str | None, service: str | None) -> int:
    """The port of a plainly numeric service, -1 for what getaddrinfo(3) has to look at; EAI_SERVICE for no port."""
    if service is None:
        return 0
    number = _NUMBER.fullmatch(service)
    if number is not None:
        sign, digits = number.groups()
        if len(digits) > 5 or int(digits) > 0xFFFF or (sign == "-" and digits != "0"):
            raise _error(EAI.SERVICE, node, service, "not a port number", "a port number, 0 to 65535")
        return int(digits) if service.isdigit() else -1
    if "\0" in service or service == "*" or not _is_text(service):
        raise _error(EAI.SERVICE, node, service, "no service has such a name", "a port number")
    return -1


def _is_text(name: str) -> bool:
    """Whether C can be given it: half of a surrogate pair has no encoding."""
    try:
        name.encode()
    except UnicodeError:
        return False
    return True


def _from_names(
    node: str | None,
    service: str | None,
    hints: AddrInfo | None,
    backend: Provider | None,
    resolver: Resolver | None,
) -> list[AddrInfo]:
    if hints is None:
        hints = _NO_HINTS
        family, socktype, proto, flags = 0, 0, 0, _NO_HINTS_FLAGS
    else:
        family, socktype, proto, flags = _socket_hints(int(hints.flags), hints.family, hints.qp_type, hints.port_space)
    port = _port(node, service)
    if node is not None and ("\0" in node or node == "*"):  # C would cut the one short, and read the other as NULL
        raise _error(EAI.NONAME, node, service, "not a host name", "a name or a numeric address")

    # A numeric node and service need no resolver: this is the whole way for most callers.
    numeric = _numeric(node) if node is not None else None
    if numeric is not None and port >= 0 and family in (0, numeric[0]):
        qp, ps = _types(hints.qp_type, hints.port_space, socktype, proto)
        return [_entry(InetAddr(*numeric, port), qp, ps, None, hints, node, service, backend)]

    if node is not None and not flags & socket.AI_NUMERICHOST and not _is_numeric(node):
        flags |= socket.AI_CANONNAME
    answers = _ask(resolver or socket.getaddrinfo, node, service, family, socktype, proto, flags)
    canonical = next((name for _, _, _, name, _ in answers if name), None)
    found: dict[tuple[int, bytes, int], AddrInfo] = {}
    for found_family, found_type, found_proto, _, where in answers:
        if found_family not in (AF_INET, AF_INET6):
            continue
        address = parse_address((str(where[0]), *where[1:]))
        assert isinstance(address, InetAddr)
        # With type and protocol open, each address comes once for each: the stream is the one.
        key = (address.family, address.ip, address.scope_id)
        stream = found_type == socket.SOCK_STREAM and not (socktype or proto)
        if key not in found or (stream and found[key].qp_type == QPType.UD):
            qp, ps = _types(hints.qp_type, hints.port_space, found_type, found_proto)
            found[key] = _entry(address, qp, ps, canonical, hints, node, service, backend)
    if not found:
        raise _error(EAI.NODATA, node, service, "the resolver gave no address")
    return list(found.values())


def _ask(
    resolver: Resolver, node: str | None, service: str | None, family: int, socktype: int, proto: int, flags: int
) -> Sequence[Answer]:
    try:
        return resolver(node, service, family, socktype, proto, flags)
    except socket.gaierror as error:
        raise _from_gaierror(error.errno, node, service, family) from error
    except UnicodeError as error:  # a label too long, or not a host name in any encoding
        raise _error(EAI.NONAME, node, service, f"not a host name: {error}") from error
    except ValueError as error:  # an embedded NUL
        raise _error(EAI.NONAME, node, service, str(error)) from error
    except MemoryError as error:
        raise _error(EAI.MEMORY, node, service, "") from error
    except OSError as error:
        code = error.errno or errno.EIO
        cause = f"{error.strerror or error} [{errno_name(code)}]"
        raise _error(EAI.SYSTEM, node, service, cause, None, code) from error


def _from_gaierror(code: int | None, node: str | None, service: str | None, family: int) -> GaiError:
    try:
        eai = EAI(code)  # type: ignore[arg-type]
    except ValueError:
        eai = EAI.FAIL
    kind = {int(AF_INET): "IPv4 ", int(AF_INET6): "IPv6 "}.get(family, "")
    other = "the other address family" if kind else "another name, or a numeric address"
    unknown = node if node is not None else service
    cause, hint = {
        EAI.NONAME: (f"no such host or service: {unknown!r}", "the spelling, /etc/hosts, or a numeric address"),
        EAI.AGAIN: (f"no name server answered for {node}", "again later, or a numeric address"),
        EAI.FAIL: (f"the name server refused {node}", "a numeric address"),
        EAI.NODATA: (f"{node} exists but has no {kind}address", other),
        EAI.ADDRFAMILY: (f"{node} has no {kind}address", other),
        EAI.SERVICE: (f"no service {service!r} for this QP type and port space", "a port number"),
        EAI.QPTYPE: ("QP type and port space do not go together", "RC with TCP, UD with UDP"),
    }.get(eai, ("", None))
    return _error(eai, node, service, cause, hint)


def _entry(
    address: InetAddr,
    qp: int,
    ps: int,
    canonical: str | None,
    hints: AddrInfo,
    node: str | None,
    service: str | None,
    backend: Provider | None,
) -> AddrInfo:
    family = int(address.family)
    if hints.family == AF_IB and hints.flags & _FAMILY:
        if family != AF_INET6:
            raise _error(EAI.ADDRFAMILY, node, service, f"{address.host} is not a GID", "a GID in IPv6 form")
        sid, mask = service_id(ps, address.port), service_id_mask(ps, address.port)
        gid = SockAddrIB(Gid(address.ip), sid, mask, 0xFFFF, address.flowinfo, address.scope_id)
        if hints.flags & _PASSIVE:
            return AddrInfo(RaiFlag.PASSIVE, AF_IB, qp, ps, gid, None, canonical)
        return AddrInfo(_NO_FLAGS, AF_IB, qp, ps, hints.src_addr, gid, None, canonical, hints.route)
    if hints.flags & _PASSIVE:
        info = AddrInfo(RaiFlag.PASSIVE, family, qp, ps, address.sockaddr, None, canonical)
        return _completed(info, address, None, backend)
    choice = source = None
    if backend is not None:
        source, usable = _hinted_source(hints, family)
        choice = backend.find_route(address, source) if usable else None
    if choice is None:
        return AddrInfo(_NO_FLAGS, family, qp, ps, hints.src_addr, address.sockaddr, None, canonical, hints.route)
    return AddrInfo(
        _NO_FLAGS,
        family,
        qp,
        ps,
        _user(choice.source) if source is None or source.is_any else hints.src_addr,
        address.sockaddr,
        None,
        canonical,
        hints.route or (PathData(choice.path),),
        b"",
        choice.device,
        choice.port_num,
        choice.gid_index,
    )


def _hinted_source(hints: AddrInfo, family: int) -> tuple[InetAddr | None, bool]:
    """The hints' source, and whether it leaves a choice of route to a destination of that family."""
    if hints.src_addr is None:
        return None, True
    try:
        source = parse_address(hints.src_addr)
    except ValueError:
        return None, False
    return (source, True) if isinstance(source, InetAddr) and source.family == family else (None, False)


def _completed(
    info: AddrInfo,
    src: InetAddr | SockAddrIB | None,
    dst: InetAddr | SockAddrIB | None,
    backend: Provider | None,
) -> AddrInfo:
    """An answer with the device of its listener, or with what the host would use to reach its destination."""
    if backend is None:
        return info
    if dst is None and isinstance(src, InetAddr) and not src.is_any:
        owner = backend.owner_of(src)
        return info if owner is None else replace(info, device=owner[0], port_num=owner[1])
    if not isinstance(dst, InetAddr) or not isinstance(src, InetAddr | None):
        return info
    if src is not None and src.family != dst.family:
        return info
    choice = backend.find_route(dst, src)
    if choice is None:
        return info
    return _by(info, choice, src is None or src.is_any, info.route or (PathData(choice.path),))


def _by(info: AddrInfo, choice: RouteChoice, wants_source: bool, route: tuple[PathData, ...]) -> AddrInfo:
    return replace(
        info,
        src_addr=_user(choice.source) if wants_source else info.src_addr,
        route=route,
        device=choice.device,
        port_num=choice.port_num,
        gid_index=choice.gid_index,
    )


# -- from ibacm and the subnet administrator ------------------------------------------------------------


def _infiniband(backend: Provider) -> dict[Gid, tuple[str, GidEntry]]:
    """What paths may begin at: the GIDs of active InfiniBand ports, with device and place in the table."""
    return {
        row.gid: (device.name, row)
        for device in backend.devices()
        for port in device.ports
        if port.link_layer is LinkLayer.INFINIBAND and port.state is PortState.ACTIVE
        for row in port.gids
    }


def _with_paths(infos: list[AddrInfo], hints: AddrInfo, backend: Provider) -> list[AddrInfo]:
    """The answers with what ibacm knows of InfiniBand paths to their destinations, or else the administrator."""
    if hints.flags & _PASSIVE:
        return infos
    ports = _infiniband(backend)
    if not ports:
        return infos
    limit = time.monotonic() + acm.DEADLINE
    found: list[AddrInfo] = []
    for info in infos:
        reply = None if hints.route else _ask_acm(info, hints, ports, limit - time.monotonic())
        paths = [data for data in reply.paths if data.flags == PATH_FLAGS] if reply is not None else []
        if reply is None or not paths or paths[0].path.sgid not in ports:
            found.append(_by_administrator(info, backend) if info.family == AF_IB else info)
        elif info.family == AF_IB:
            found.append(_routed(info, paths, ports))
        else:
            found += _alternatives(info, paths, reply.source, ports)
    return found


def _ask_acm(
    info: AddrInfo, hints: AddrInfo, ports: dict[Gid, tuple[str, GidEntry]], timeout: float
) -> AcmReply | None:
    """What ibacm knows of the way to an answer's destination, from the hints' source where they have one."""
    if info.dst_addr is None or timeout <= 0:
        return None
    destination, source = parse_address(info.dst_addr), _parsed(hints.src_addr)
    if isinstance(destination, SockAddrIB):
        if not isinstance(source, SockAddrIB) or not any(source.addr):
            near = [gid for gid in ports if gid.subnet_prefix == destination.addr.subnet_prefix]
            source = SockAddrIB(near[0] if near else next(iter(ports)))
        return acm.CLIENT.resolve(path=acm.path_template(source, destination), timeout=timeout)
    # The protocol has no scope to say which link is meant.
    local = destination.is_any or destination.is_loopback or destination.is_link_local
    if local or destination.is_multicast or isinstance(source, SockAddrIB):
        return None
    if source is not None and source.is_any:
        source = None
    nodelay = bool(hints.flags & _NUMERICHOST)
    return acm.CLIENT.resolve(source=source, destination=destination, nodelay=nodelay, timeout=timeout)


def _by_administrator(info: AddrInfo, backend: Provider) -> AddrInfo:
    """An answer that is an InfiniBand address, with the route that the subnet administrator knows."""
    source, destination = info.src_addr, info.dst_addr
    if not isinstance(destination, SockAddrIB) or not isinstance(source, SockAddrIB | None):
        return info
    choice = backend.find_path(destination, source, info.route[0].path if info.route else None)
    if choice is None:
        return info
    return _by(info, choice, source is None or not any(source.addr), (PathData(choice.path),))


def _routed(info: AddrInfo, paths: list[PathData], ports: dict[Gid, tuple[str, GidEntry]]) -> AddrInfo:
    """An answer that is an InfiniBand address, with its route and where that begins."""
    path = paths[0].path
    source = info.src_addr or _ib_address(path.sgid, path, info.port_space, 0)
    if [getattr(end, "addr", None) for end in (source, info.dst_addr)] != [path.sgid, path.dgid]:
        return info
    device, row = ports[path.sgid]
    return replace(
        info,
        src_addr=source,
        route=tuple(paths),
        device=device,
        port_num=row.port_num,
        gid_index=row.gid_index,
    )


def _alternatives(
    info: AddrInfo, paths: list[PathData], source: InetAddr | None, ports: dict[Gid, tuple[str, GidEntry]]
) -> list[AddrInfo]:
    """An answer that is an IP address and the InfiniBand address that leads to the same host, better one first.

    Where a RoCE device reaches the IP address it stays first: what a caller gets who takes the first entry does not
    depend on a daemon.
    """
    from rdmacm.proto.cm.private_data import PrivateDataHeader

    path = paths[0].path
    device, row = ports[path.sgid]
    carried = info.device is not None and all(info.device != name for name, _ in ports.values())
    if not carried:
        info = replace(info, route=tuple(paths), src_addr=info.src_addr or _user(source))
    here, there = _parsed(info.src_addr), _parsed(info.dst_addr)
    assert isinstance(there, InetAddr)
    if not isinstance(here, InetAddr) or here.family != there.family:
        here = InetAddr.any(there.family)
    infiniband = replace(
        info,
        family=AF_IB,
        src_addr=_ib_address(path.sgid, path, info.port_space, here.port),
        dst_addr=_ib_address(path.dgid, path, info.port_space, there.port),
        route=tuple(paths),
        # Without a port, as librdmacm makes it.
        connect=PrivateDataHeader.between(here._replace(port=0), there).pack(),
        device=device,
        port_num=row.port_num,
        gid_index=row.gid_index,
    )
    return [info, infiniband] if carried else [infiniband, info]


def _parsed(address: SockAddr | None) -> InetAddr | SockAddrIB | None:
    """An address in binary; None for none, and for a host name, which hints may have for a source."""
    try:
        return None if address is None else parse_address(address)
    except ValueError:
        return None


def _ib_address(gid: Gid, path: PathRecord, port_space: int, port: int) -> SockAddrIB:
    return SockAddrIB(gid, service_id(port_space, port), service_id_mask(port_space, port), path.pkey, path.flow_label)
