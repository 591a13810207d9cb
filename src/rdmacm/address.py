"""Socket addresses, GIDs and service ids.

Users pass and get Python's tuples for IPv4 and IPv6, ``(host, port)`` or ``(host, port, flowinfo, scope_id)``, and
:class:`SockAddrIB` for InfiniBand. Inside the package an IP address is an :class:`InetAddr`, which holds it in binary:
a tuple is parsed once, where it enters the package.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from typing import NamedTuple, Self, TypeAlias

from rdmacm.constants import AddressFamily

AF_IB = int(AddressFamily.IB)

#: The mask of an exact service id, and of a 64-bit operand.
ALL_BITS_64 = (1 << 64) - 1

#: The P_Key of the default partition, full member (InfiniBand Architecture 10.9.1.2).
DEFAULT_PKEY = 0xFFFF

#: A socket address as users pass and get it: a Python socket address, or a :class:`SockAddrIB`.
SockAddr: TypeAlias = "tuple[str, int] | tuple[str, int, int, int] | SockAddrIB"

#: What precedes an IPv4 address that is mapped into IPv6.
V4_MAPPED = bytes(10) + b"\xff\xff"
_ANY = {AF_INET: bytes(4), AF_INET6: bytes(16)}
#: The packed wildcard addresses.
WILDCARDS = frozenset(_ANY.values())
_LOOPBACK = {AF_INET: bytes((127, 0, 0, 1)), AF_INET6: bytes(15) + b"\x01"}

_FAMILY = struct.Struct("=H")
_SOCKADDR_IN = struct.Struct("!H4s")
_SOCKADDR_IN6 = struct.Struct("!HI16s")
_SCOPE = struct.Struct("=I")


class Gid(bytes):
    """A 16-byte port address (InfiniBand Architecture, 4.1.1); prints in IPv6 text form.

    ``Gid("fe80::1")``, ``Gid("::ffff:10.0.0.1")`` and ``Gid(sixteen_bytes)`` create one; ValueError for other text or
    another length. A RoCEv2 GID is an IPv6 address, or an IPv4 address mapped into IPv6.
    """

    __slots__ = ()

    def __new__(cls, value: bytes | str = bytes(16)) -> Self:
        if isinstance(value, str):
            try:
                value = inet_pton(AF_INET6, value)
            except OSError:
                raise ValueError(f"not a GID: {value!r} (expected IPv6 text, such as fe80::1)") from None
        if len(value) != 16:
            raise ValueError(f"a GID has 16 bytes, not {len(value)}")
        return super().__new__(cls, value)

    @classmethod
    def from_ip(cls, packed: bytes) -> Gid:
        """The RoCEv2 GID of a packed IPv4 (4 bytes) or IPv6 (16 bytes) address."""
        return bytes.__new__(cls, V4_MAPPED + packed) if len(packed) == 4 else cls(packed)

    @property
    def ip(self) -> bytes:
        """The packed IP address of a RoCEv2 GID: 4 bytes if it is IPv4-mapped, else 16."""
        return self[12:] if self.startswith(V4_MAPPED) else self[:]  # slices are plain bytes

    @property
    def subnet_prefix(self) -> int:
        """The upper 64 bits."""
        return int.from_bytes(self[:8], "big")

    @property
    def interface_id(self) -> int:
        """The lower 64 bits."""
        return int.from_bytes(self[8:], "big")

    def __str__(self) -> str:
        return inet_ntop(AF_INET6, self)

    def __repr__(self) -> str:
        return f"Gid({str(self)!r})"


@dataclass(frozen=True, slots=True)
class SockAddrIB:
    """``struct sockaddr_ib``: an InfiniBand port and service. Field names are C's without ``sib_``.

    ``addr`` is the GID of the port. ``sid`` is the service id, 64 bits in host order, and ``sid_mask`` has the bits of
    it that count (:func:`service_id`). ``pkey`` is the P_Key, 16 bits. ``flowinfo`` and ``scope_id`` have no effect.
    """

    addr: Gid = Gid()  # noqa: RUF009 (immutable)
    sid: int = 0
    sid_mask: int = 0
    pkey: int = DEFAULT_PKEY
    flowinfo: int = 0
    scope_id: int = 0

    def pack(self) -> bytes:
        """The 48 bytes of the C structure: native family and scope, everything else big-endian."""
        return (
            struct.pack("=H", AF_IB)
            + struct.pack("!HI16sQQ", self.pkey, self.flowinfo, self.addr, self.sid, self.sid_mask)
            + struct.pack("=Q", self.scope_id)
        )

    @classmethod
    def unpack(cls, data: bytes) -> SockAddrIB:
        """The address in the 48 bytes of the C structure; ValueError for another length or family."""
        if len(data) != 48 or struct.unpack_from("=H", data)[0] != AF_IB:
            raise ValueError("not a sockaddr_ib")
        pkey, flowinfo, addr, sid, mask = struct.unpack_from("!HI16sQQ", data, 2)
        return cls(Gid(addr), sid, mask, pkey, flowinfo, struct.unpack_from("=Q", data, 40)[0])

    @property
    def port(self) -> int:
        """The port number in the service id, 0 if the mask leaves it open."""
        return self.sid & self.sid_mask & 0xFFFF

    def __str__(self) -> str:
        return f"[{self.addr}]:0x{self.sid:x}"


class InetAddr(NamedTuple):
    """An IPv4 or IPv6 socket address in binary. ``ip`` is packed: 4 or 16 bytes."""

    family: int
    ip: bytes
    port: int = 0
    flowinfo: int = 0
    scope_id: int = 0

    @property
    def is_any(self) -> bool:
        return self.ip in WILDCARDS

    @property
    def is_loopback(self) -> bool:
        return self.ip[0] == 127 if self.family == AF_INET else self.ip == _LOOPBACK[AF_INET6]

    @property
    def is_link_local(self) -> bool:
        return is_link_local(self.ip)

    @property
    def link(self) -> int:
        """The interface index of a link-local address; 0 for others, whose scope has no meaning."""
        return self.scope_id if self.scope_id and self.is_link_local else 0

    @property
    def is_multicast(self) -> bool:
        return is_multicast(self.ip)

    @property
    def host(self) -> str:
        return inet_ntop(self.family, self.ip)

    @property
    def sockaddr(self) -> tuple[str, int] | tuple[str, int, int, int]:
        """The tuple Python's sockets use."""
        if self.family == AF_INET:
            return inet_ntop(AF_INET, self.ip), self.port
        return inet_ntop(AF_INET6, self.ip), self.port, self.flowinfo, self.scope_id

    def pack(self) -> bytes:
        """``struct sockaddr_in`` or ``sockaddr_in6``: 16 or 28 bytes."""
        family = _FAMILY.pack(self.family)
        if self.family == AF_INET:
            return family + _SOCKADDR_IN.pack(self.port, self.ip) + bytes(8)
        return family + _SOCKADDR_IN6.pack(self.port, self.flowinfo, self.ip) + _SCOPE.pack(self.scope_id)

    def __str__(self) -> str:
        return format_address(self.sockaddr)

    @classmethod
    def any(cls, family: int, port: int = 0, scope_id: int = 0) -> InetAddr:
        """The wildcard address of a family."""
        return cls(family, _ANY[family], port, 0, scope_id)  # type: ignore[index]

    @classmethod
    def loopback(cls, family: int, port: int = 0) -> InetAddr:
        """127.0.0.1 or ::1."""
        return cls(family, _LOOPBACK[family], port)  # type: ignore[index]


#: Makes an InetAddr of a tuple with its five fields. The class's own constructor is a function in Python.
inet_addr: Callable[[tuple[int, bytes, int, int, int]], InetAddr] = partial(tuple.__new__, InetAddr)

#: A parsed address: no name and no text; ports in host order.
Address: TypeAlias = InetAddr | SockAddrIB


def unpack_address(data: bytes) -> Address | None:
    """The address in a socket address structure of C; None where it is unset, cut off or of another family.

    >>> unpack_address(InetAddr.loopback(AF_INET, 7471).pack()).host
    '127.0.0.1'
    """
    if len(data) < 2:
        return None
    (family,) = _FAMILY.unpack_from(data)
    if family == AF_INET and len(data) >= 8:
        port, ip = _SOCKADDR_IN.unpack_from(data, 2)
        return InetAddr(AF_INET, ip, port)
    if family == AF_INET6 and len(data) >= 28:
        port, flowinfo, ip = _SOCKADDR_IN6.unpack_from(data, 2)
        return InetAddr(AF_INET6, ip, port, flowinfo, _SCOPE.unpack_from(data, 24)[0])
    if family == AF_IB and len(data) >= 48:
        return SockAddrIB.unpack(data[:48])
    return None


def is_loopback_host(host: str) -> bool:
    """Whether a numeric address, or a name without asking a name server, is this host's loopback interface.

    >>> [is_loopback_host(host) for host in ("127.0.0.1", "::1", "localhost", "a.localhost.", "10.0.0.1", "host")]
    [True, True, True, True, False, False]
    """
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):  # RFC 6761, 6.3
        return True
    try:
        address = parse_address((host, 0))
    except ValueError:
        return False
    return isinstance(address, InetAddr) and address.is_loopback


def is_link_local(packed: bytes) -> bool:
    """Whether a packed IP address is a link-local one of IPv6 (RFC 4291: fe80::/10)."""
    return len(packed) == 16 and packed[0] == 0xFE and packed[1] & 0xC0 == 0x80


def is_multicast(packed: bytes) -> bool:
    """Whether a packed IP address is a multicast group: 224.0.0.0/4 or ff00::/8."""
    return packed[0] & 0xF0 == 0xE0 if len(packed) == 4 else packed[0] == 0xFF


def interface_text(index: int) -> str:
    """The name of an interface, as people write it in a scope; its number where there is none."""
    try:
        return socket.if_indextoname(index)
    except (OSError, OverflowError):
        return str(index)


def scope_index(text: str) -> int:
    """The interface index of the scope of a link-local address: a name or a number. ValueError for an unknown name."""
    try:
        return socket.if_nametoindex(text)  # first, as getaddrinfo(3) does: an interface name may be a number
    except (OSError, ValueError):
        if text.isascii() and text.isdigit() and int(text) < 1 << 32:
            return int(text)
        raise ValueError(f"no interface {text!r} for the scope of an IPv6 address") from None


def _uint(value: object, limit: int, what: str) -> int:
    if type(value) is int and 0 <= value <= limit:
        return value
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, not {type(value).__name__}")
    if not 0 <= value <= limit:
        raise ValueError(f"{what} {value} is outside 0..{limit}")
    return value


def parse_address(address: SockAddr) -> Address:
    """The binary form of a user's socket address.

    ``("10.0.0.1", 7471)``, ``("fe80::1%eth0", 7471)``, ``("fe80::1", 7471, 0, 2)`` and :class:`SockAddrIB` are
    accepted; an empty host is the IPv4 wildcard. ValueError for a host name, which :func:`rdmacm.getaddrinfo` resolves
    (and :func:`lookup_address`, which may block). TypeError for anything else.
    """
    if type(address) is not tuple and isinstance(address, InetAddr | SockAddrIB):
        return address
    if not isinstance(address, tuple) or not 2 <= len(address) <= 4 or not isinstance(address[0], str):
        raise TypeError(f"a socket address is (host, port[, flowinfo[, scope_id]]) or SockAddrIB, not {address!r}")
    host: str = address[0]
    port = address[1]
    if type(port) is not int or not 0 <= port <= 0xFFFF:
        port = _uint(port, 0xFFFF, "port")
    if len(address) == 2 and ":" not in host:
        try:
            return inet_addr((AF_INET, inet_pton(AF_INET, host) if host else _ANY[AF_INET], port, 0, 0))
        except (OSError, ValueError):
            raise ValueError(f"not a numeric address: {host!r}") from None
    flowinfo = _uint(address[2], 0xFFFFFFFF, "flowinfo") if len(address) > 2 else 0
    scope = _uint(address[3], 0xFFFFFFFF, "scope_id") if len(address) > 3 else 0
    host, percent, scope_text = host.partition("%")
    if percent and not scope:  # the resolver returns both, and the number is unambiguous
        scope = scope_index(scope_text)
    try:
        return InetAddr(AF_INET6, inet_pton(AF_INET6, host), port, flowinfo, scope)
    except (OSError, ValueError):
        raise ValueError(f"not a numeric address: {host!r}") from None


def lookup_address(address: SockAddr) -> Address:
    """As :func:`parse_address`, but a host name is resolved with getaddrinfo(3), in the calling thread.

    Returns the first result, as the socket module does. socket.gaierror for a name without an address.
    """
    try:
        return parse_address(address)
    except ValueError:
        if not isinstance(address, tuple) or not 0 <= int(address[1]) <= 0xFFFF:
            raise
        if address[0] == "*" or not {":", "\0"}.isdisjoint(address[0]):
            raise  # getaddrinfo(3) reads "*" as NULL, and a name up to its NUL
        try:
            answers = socket.getaddrinfo(address[0], int(address[1]), type=socket.SOCK_STREAM)
        except UnicodeError as error:
            raise socket.gaierror(socket.EAI_NONAME, f"not a host name: {error}") from error
        family, _, _, _, found = answers[0]
        if family not in (AF_INET, AF_INET6):
            raise
        return parse_address((str(found[0]), *found[1:]))


def format_address(address: SockAddr | InetAddr | None) -> str:
    """``10.0.0.1:7471``, ``[fe80::1%eth0]:7471``, ``[gid]:0xsid``, or ``-`` for None.

    An interface that does not exist here is its number. An invalid tuple raises no error.
    """
    if address is None:
        return "-"
    if isinstance(address, InetAddr):
        address = address.sockaddr
    if isinstance(address, SockAddrIB):
        return str(address)
    try:
        host, port = str(address[0]), address[1]
        if len(address) > 3 and address[3] and "%" not in host:
            host = f"{host}%{interface_text(address[3])}"
    except (IndexError, TypeError):
        return repr(address)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


#: Masks of the port space and of the port within a 64-bit service id.
RDMA_IB_IP_PS_MASK = 0xFFFFFFFFFFFF0000
RDMA_IB_IP_PORT_MASK = 0x000000000000FFFF


def service_id(port_space: int, port: int) -> int:
    """The 64-bit service id of a port: ``(port_space << 16) + port`` (InfiniBand Architecture annex A11)."""
    return (port_space << 16) + port


def service_id_mask(port_space: int, port: int) -> int:
    """The mask of :func:`service_id`: port 0 leaves the port open, and port space 0 the port space."""
    mask = RDMA_IB_IP_PS_MASK if port_space else 0
    return mask | RDMA_IB_IP_PORT_MASK if port else mask
