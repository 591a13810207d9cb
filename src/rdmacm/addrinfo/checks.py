"""The errors of rdma_getaddrinfo(3), and the hints that it refuses."""

from __future__ import annotations

import errno
import re
import socket
from socket import AF_INET, AF_INET6

from rdmacm.address import AF_IB, SockAddr, SockAddrIB, format_address, parse_address
from rdmacm.addrinfo.info import (
    RAI_DNS,
    RAI_FAMILY,
    RAI_NOROUTE,
    RAI_NUMERICHOST,
    RAI_PASSIVE,
    RAI_SA,
    AddrInfo,
)
from rdmacm.constants import EAI, PortSpace
from rdmacm.errors import GaiError, errno_name, gai_strerror
from rdmacm.verbs.enums import QPType

#: A number as strtoul(3), and so getaddrinfo(3), reads it.
NUMBER = re.compile(r"[ \t-\r]*([+-]?)0*([0-9]+)")

#: Queue pair types that go with a stream socket.
STREAM_QP_TYPES = frozenset({QPType.RC, QPType.UC, QPType.XRC_SEND, QPType.XRC_RECV})
QP_TYPES: dict[int, QPType] = {int(qp_type): qp_type for qp_type in QPType}
PORT_SPACES: dict[int, PortSpace] = {int(port_space): port_space for port_space in PortSpace}

_KNOWN_FLAGS = RAI_PASSIVE | RAI_NUMERICHOST | RAI_NOROUTE | RAI_FAMILY | RAI_SA | RAI_DNS
_FAMILIES = frozenset((0, int(AF_INET), int(AF_INET6), AF_IB))
_FAMILY_NAMES = {int(AF_INET): "IPv4", int(AF_INET6): "IPv6", AF_IB: "AF_IB"}


def gai_error(
    code: EAI, node: str | None, service: str | None, cause: str, hint: str | None = None, system_errno: int = 0
) -> GaiError:
    """The error for an EAI code. Its text is that of gai_strerror(3), then ``cause`` in brackets.

    ``hint``: what to try; ``system_errno``: for EAI_SYSTEM.
    """
    if node is None:
        what = "(no node, no service)" if service is None else f":{service}"
    else:
        what = format_address((node, service)) if service is not None else node  # type: ignore[arg-type]
    text = f"{gai_strerror(code)} ({cause})" if cause else gai_strerror(code)
    error = GaiError(int(code), text, "getaddrinfo", what, hint)
    error.system_errno = system_errno
    return error


def check_hints(node: str | None, service: str | None, hints: AddrInfo, flags: int) -> None:
    """Raise the GaiError for hints with an unknown flag, family, QP type or port space, or an inconsistent pair.

    The family, the source and the destination of the hints must be of one address family.
    """
    unknown = flags & ~_KNOWN_FLAGS
    if unknown:
        hint = "members of rdmacm.RaiFlag (not socket.AI_*)"
        raise gai_error(EAI.BADFLAGS, node, service, f"unknown flags 0x{unknown:x}", hint)
    if hints.family not in _FAMILIES:
        raise gai_error(EAI.FAMILY, node, service, f"family {hints.family}", "AF_INET, AF_INET6, AF_IB or 0")
    check_types(node, service, hints.qp_type, hints.port_space)
    if hints.src_addr is None and hints.dst_addr is None:
        return
    source = family_of(hints.src_addr)
    destination = 0 if flags & RAI_PASSIVE else family_of(hints.dst_addr)
    if source and destination and source != destination:
        raise family_error(node, service, f"source {format_address(hints.src_addr)}", source, destination)
    for end, family, address in (("source", source, hints.src_addr), ("destination", destination, hints.dst_addr)):
        if hints.family and family and family != hints.family:
            raise family_error(node, service, f"{end} {format_address(address)}", family, hints.family)


def check_types(node: str | None, service: str | None, qp: int, ps: int) -> None:
    """EAI_QPTYPE for a QP type or port space that does not exist, or for two that do not go together; 0 is open."""
    if qp and qp not in QP_TYPES:
        raise gai_error(EAI.QPTYPE, node, service, f"unknown QP type {qp}", "a member of rdmacm.QPType")
    if ps and ps not in PORT_SPACES:
        raise gai_error(EAI.QPTYPE, node, service, f"unknown port space 0x{ps:x}", "a member of rdmacm.PortSpace")
    if qp and ps and not _is_consistent(qp, ps):
        cause = f"QP type {QP_TYPES[qp].name} does not go with port space {PORT_SPACES[ps].name}"
        raise gai_error(EAI.QPTYPE, node, service, cause, "RC with TCP or IB, UD with UDP, IPOIB or IB")


def family_of(address: SockAddr | None) -> int:
    """The address family; 0 for no address, and for a host name, which may stand for addresses of any family."""
    if address is None:
        return 0
    try:
        parsed = parse_address(address)
    except ValueError:
        return 0
    return AF_IB if isinstance(parsed, SockAddrIB) else int(parsed.family)


def family_error(node: str | None, service: str | None, what: str, family: int, wanted: int) -> GaiError:
    """EAI_ADDRFAMILY for ``what`` in the hints: an address of ``family``, where the rest is of ``wanted``."""
    name, other = _FAMILY_NAMES[family], _FAMILY_NAMES[wanted]
    return gai_error(EAI.ADDRFAMILY, node, service, f"the hints' {what} is {name}, not {other}", "one address family")


def _is_consistent(qp_type: int, port_space: int) -> bool:
    if qp_type == QPType.UD:
        return port_space != PortSpace.TCP
    return qp_type not in STREAM_QP_TYPES or port_space not in (PortSpace.UDP, PortSpace.IPOIB)


def resolver_error(error: Exception, node: str | None, service: str | None, family: int) -> GaiError:
    """The GaiError for what a resolver has raised."""
    if isinstance(error, socket.gaierror):
        return _from_gaierror(error.errno, node, service, family)
    if isinstance(error, UnicodeError):  # a label is too long, or has no encoding
        return gai_error(EAI.NONAME, node, service, f"not a host name: {error}")
    if isinstance(error, MemoryError):
        return gai_error(EAI.MEMORY, node, service, "")
    if isinstance(error, OSError):
        code = error.errno or errno.EIO
        cause = f"{error.strerror or error} [{errno_name(code)}]"
        return gai_error(EAI.SYSTEM, node, service, cause, None, code)
    return gai_error(EAI.NONAME, node, service, str(error))  # ValueError: an embedded NUL


def _from_gaierror(code: int | None, node: str | None, service: str | None, family: int) -> GaiError:
    try:
        eai = EAI(code)  # type: ignore[arg-type]
    except ValueError:
        eai = EAI.FAIL
    if eai is EAI.SERVICE and not _is_service(service):
        return gai_error(
            EAI.NONAME, node, service, f"there is no service {service!r}", "the spelling, or a port number"
        )
    kind = f"{_FAMILY_NAMES[family]} " if family else ""
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
    return gai_error(eai, node, service, cause, hint)


def _is_service(service: str | None) -> bool:
    """Whether services(5) has the service for any protocol; getaddrinfo(3) says EAI_SERVICE in both cases."""
    if service is None or NUMBER.fullmatch(service):
        return service is not None
    try:
        socket.getservbyname(service)
    except (OSError, ValueError):
        return False
    return True
