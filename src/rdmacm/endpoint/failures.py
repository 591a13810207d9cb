"""Error messages for failed work completions."""

from __future__ import annotations

import errno

from rdmacm.errors import RdmaError, cm_error
from rdmacm.verbs.enums import WCStatus

#: Status: (errno, message, hint). Statuses as in ibv_poll_cq(3).
_FAILURES: dict[WCStatus, tuple[int, str, str | None]] = {
    WCStatus.LOC_LEN_ERR: (errno.EMSGSIZE, "longer than the device or the buffer allows", None),
    WCStatus.LOC_QP_OP_ERR: (errno.EIO, "the queue pair could not execute the operation", None),
    WCStatus.LOC_PROT_ERR: (
        errno.EFAULT,
        "local memory is not registered, or not for this operation",
        "a Region that is still open",
    ),
    WCStatus.BAD_RESP_ERR: (errno.EBADMSG, "the peer sent an invalid response", None),
    WCStatus.LOC_ACCESS_ERR: (errno.EFAULT, "local memory is not registered for writing", None),
    WCStatus.REM_INV_REQ_ERR: (
        errno.EREMOTEIO,
        "the peer rejected the request: longer than its buffers, or an operation it does not support",
        "a shorter message, or a larger max_message or responder_resources at the peer",
    ),
    WCStatus.REM_ACCESS_ERR: (
        errno.EACCES,
        "the peer refused access: wrong key, range or permission",
        "the RemoteRegion the peer sent, still registered, with remote_read, remote_write or remote_atomic",
    ),
    WCStatus.REM_OP_ERR: (errno.EREMOTEIO, "the operation failed at the peer", None),
    WCStatus.RETRY_EXC_ERR: (
        errno.ETIMEDOUT,
        "the peer does not answer",
        "checking that it still runs, and with 'rdmacm check' that packets of this length arrive",
    ),
    WCStatus.RNR_RETRY_EXC_ERR: (
        errno.ETIMEDOUT,
        "the peer has no receive posted",
        "calling recv() at the peer, or a larger depth there",
    ),
    WCStatus.REM_INV_RD_REQ_ERR: (
        errno.EREMOTEIO,
        "too many RDMA READs at a time for the peer",
        "a smaller initiator_depth",
    ),
    WCStatus.REM_ABORT_ERR: (errno.ECONNABORTED, "the peer aborted the operation", None),
    WCStatus.RESP_TIMEOUT_ERR: (errno.ETIMEDOUT, "the peer's response did not arrive in time", None),
    WCStatus.FATAL_ERR: (errno.EIO, "the device has failed", None),
}


def status_text(status: WCStatus) -> str:
    """Return the meaning of a completion status as text."""
    known = _FAILURES.get(status)
    return known[1] if known else f"the operation failed with {status.name}"


def status_hint(status: WCStatus) -> str | None:
    """What to try after a completion status, if anything helps."""
    known = _FAILURES.get(status)
    return known[2] if known else None


def completion_error(status: WCStatus, operation: str, address: str, close_reason: str | None) -> RdmaError:
    """Return the exception for an ``operation`` that completed with an error status.

    ``close_reason`` is why the connection had ended before that, or None. It explains a flushed work request.
    """
    if status is WCStatus.WR_FLUSH_ERR:
        return cm_error(errno.ECONNRESET, close_reason or "the connection has ended", operation, address)
    code, text, hint = _FAILURES.get(status, (errno.EIO, status_text(status), None))
    return cm_error(code, f"{text} ({status.name})", operation, address, hint)
