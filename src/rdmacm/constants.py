"""The constants of ``rdma/rdma_cma.h``, as enumerations with the values of C.

The C spelling of each (``RDMA_PS_TCP``, ``RAI_PASSIVE``) lives in :mod:`rdmacm.cma`.
"""

from __future__ import annotations

import socket
from enum import IntEnum, IntFlag

__all__ = [
    "EAI",
    "AddressFamily",
    "CmEventType",
    "IbOption",
    "IdOption",
    "OptionLevel",
    "PathFlag",
    "PortSpace",
    "RaiFlag",
]


class AddressFamily(IntEnum):
    """Families of rdma_getaddrinfo(3): ``AF_INET``, ``AF_INET6`` and ``AF_IB`` (27 on Linux)."""

    UNSPEC = 0
    INET = socket.AF_INET
    INET6 = socket.AF_INET6
    IB = 27


class PortSpace(IntEnum):
    """``enum rdma_port_space``: the number space of a port, rdma_create_id(3)."""

    IPOIB = 0x0002
    TCP = 0x0106
    UDP = 0x0111
    IB = 0x013F


class RaiFlag(IntFlag):
    """``ai_flags`` of struct rdma_addrinfo, rdma_getaddrinfo(3).

    ``NUMERICHOST`` is 2, not the 4 of ``AI_NUMERICHOST``: do not pass the socket module's flags.
    """

    PASSIVE = 0x01
    NUMERICHOST = 0x02
    NOROUTE = 0x04
    FAMILY = 0x08
    SA = 0x10
    DNS = 0x20


class CmEventType(IntEnum):
    """``enum rdma_cm_event_type``, rdma_get_cm_event(3).

    ALTERNATE_PATH is not in librdmacm. Only an id that :meth:`rdmacm.CmId.allow_alternate_paths` was called on gets it.
    """

    ADDR_RESOLVED = 0
    ADDR_ERROR = 1
    ROUTE_RESOLVED = 2
    ROUTE_ERROR = 3
    CONNECT_REQUEST = 4
    CONNECT_RESPONSE = 5
    CONNECT_ERROR = 6
    UNREACHABLE = 7
    REJECTED = 8
    ESTABLISHED = 9
    DISCONNECTED = 10
    DEVICE_REMOVAL = 11
    MULTICAST_JOIN = 12
    MULTICAST_ERROR = 13
    ADDR_CHANGE = 14
    TIMEWAIT_EXIT = 15
    ADDRINFO_RESOLVED = 16
    ADDRINFO_ERROR = 17
    USER = 18
    ALTERNATE_PATH = 0x100

    def __str__(self) -> str:
        return f"RDMA_CM_EVENT_{self.name}"


class OptionLevel(IntEnum):
    """``level`` of rdma_set_option(3)."""

    ID = 0
    IB = 1


class IdOption(IntEnum):
    """``optname`` of rdma_set_option(3) at level ``RDMA_OPTION_ID``."""

    TOS = 0
    REUSEADDR = 1
    AFONLY = 2
    ACK_TIMEOUT = 3


class IbOption(IntEnum):
    """``optname`` of rdma_set_option(3) at level ``RDMA_OPTION_IB``."""

    PATH = 1


class McJoinFlag(IntEnum):
    """``join_flags`` of rdma_join_multicast_ex(3): send and receive, or only send."""

    FULLMEMBER = 0
    SENDONLY_FULLMEMBER = 1


class PathFlag(IntFlag):
    """``flags`` of struct ibv_path_data."""

    GMP = 1
    PRIMARY = 2
    ALTERNATE = 4
    OUTBOUND = 8
    INBOUND = 16
    INBOUND_REVERSE = 32
    BIDIRECTIONAL = 40


def _eai(name: str, glibc: int) -> int:
    # Where the platform lacks a code, glibc's value is used.
    return int(getattr(socket, name, glibc))


class EAI(IntEnum):
    """Error codes of rdma_getaddrinfo(3), with this platform's values of getaddrinfo(3).

    The manual page names ``QPTYPE``, but no header defines it. It has the value of ``EAI_SOCKTYPE``, which the C
    library returns instead.
    """

    BADFLAGS = _eai("EAI_BADFLAGS", -1)
    NONAME = _eai("EAI_NONAME", -2)
    AGAIN = _eai("EAI_AGAIN", -3)
    FAIL = _eai("EAI_FAIL", -4)
    NODATA = _eai("EAI_NODATA", -5)
    FAMILY = _eai("EAI_FAMILY", -6)
    QPTYPE = _eai("EAI_SOCKTYPE", -7)
    SERVICE = _eai("EAI_SERVICE", -8)
    ADDRFAMILY = _eai("EAI_ADDRFAMILY", -9)
    MEMORY = _eai("EAI_MEMORY", -10)
    SYSTEM = _eai("EAI_SYSTEM", -11)
