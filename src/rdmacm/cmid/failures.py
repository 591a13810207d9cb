"""The exceptions that events stand for."""

from __future__ import annotations

import errno

from rdmacm.constants import CmEventType
from rdmacm.errors import CmRejectedError, RdmaError, cm_error
from rdmacm.explanation import Explanation
from rdmacm.proto.cm.codes import RejectReason, SidrStatus

#: The events whose status says that the peer has no listener for the service id.
_NO_LISTENER = {
    (CmEventType.REJECTED, RejectReason.INVALID_SERVICE_ID),
    (CmEventType.UNREACHABLE, SidrStatus.UNSUPPORTED),
}

#: What to try after a REJ, by its reason.
_REJECTION_HINTS = {
    RejectReason.TIMEOUT: "accepting UDP port 4791 in the peer's firewall; 'rdmacm check PEER' from both sides",
    RejectReason.INVALID_MTU: "the same MTU at both ends ('ip link set IF mtu BYTES'), or that of the smaller one in"
    " the route of this side ('ip route replace PEER dev IF mtu BYTES')",
}

#: What to try after UNREACHABLE with an error of the network.
_NETWORK_HINTS = {
    -errno.ECONNREFUSED: "starting the peer (no process there has opened an RDMA device), or accepting UDP port 4791 in"
    " its firewall (rdmacm doctor C1)",
    -errno.EHOSTUNREACH: "checking that the peer is up, and the routes and firewalls on the way",
    -errno.ENETUNREACH: "checking the routes on the way",
    -errno.EACCES: "accepting UDP port 4791 in the firewalls of this host and on the way (rdmacm doctor C1);"
    " `ip route get`",
    -errno.EPERM: "accepting UDP port 4791 in the firewall of this host (rdmacm doctor C1)",
}

#: The call that a failure event belongs to.
STEPS = {
    CmEventType.ADDR_ERROR: "resolve_addr",
    CmEventType.ROUTE_ERROR: "resolve_route",
    CmEventType.ADDRINFO_ERROR: "resolve_addrinfo",
    CmEventType.CONNECT_ERROR: "connect",
    CmEventType.UNREACHABLE: "connect",
    CmEventType.REJECTED: "connect",
    CmEventType.MULTICAST_ERROR: "join_multicast",
}


def error_of(
    kind: CmEventType,
    status: int,
    message: str,
    address: str,
    private_data: bytes,
    explanation: Explanation | None,
) -> RdmaError:
    """The exception that a synchronous call raises for an event with a status; ``private_data`` are the peer's."""
    if kind is CmEventType.REJECTED or (kind is CmEventType.UNREACHABLE and status > 0):
        hint = (
            "checking that a listener runs there, and on that port (rdmacm doctor J1)"
            if (kind, status) in _NO_LISTENER
            else None
        )
        if kind is CmEventType.REJECTED and status in _REJECTION_HINTS:
            hint = _REJECTION_HINTS[RejectReason(status)]
        return CmRejectedError(message, address, hint, reason=status, private_data=private_data)
    hint = explanation.hint if explanation else None
    if kind is CmEventType.UNREACHABLE:
        hint = _NETWORK_HINTS.get(status)
    return cm_error(abs(status), message or str(kind), STEPS.get(kind, str(kind)), address, hint, explanation)
