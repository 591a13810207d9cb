"""Failed completions in words."""

from __future__ import annotations

import errno

from rdmacm.errors import RdmaError, cm_error
from rdmacm.verbs.enums import WCStatus

__all__ = ["completion_error", "words"]

#: status: (errno, what happened, what to try)
_FAILURES: dict[WCStatus, tuple[int, str, str | None]] = {
    WCStatus.LOC_LEN_ERR: (errno.EMSGSIZE, "longer than the device or the buffer takes", None),
    WCStatus.LOC_QP_OP_ERR: (errno.EIO, "the queue pair could not carry it out", None),
    WCStatus.LOC_PROT_ERR: (errno.EFAULT, "our own memory is not registered, or not for this", "a Region in use"),
    WCStatus.BAD_RESP_ERR: (errno.EBADMSG, "the peer's answer made no sense", None),
    WCStatus.LOC_ACCESS_ERR: (errno.EFAULT, "our own memory may not be written", None),
    WCStatus.REM_INV_REQ_ERR: (
        errno.EREMOTEIO,
        "the peer could not take it: longer than its buffers, or not an operation it serves",
        "a shorter message, a larger max_message at the peer, or responder_resources",
    ),
    WCStatus.REM_ACCESS_ERR: (
        errno.EACCES,
        "the peer refused: wrong key, range or permission",
        "the RemoteRegion the peer sent, still registered, with remote_read, remote_write or remote_atomic",
    ),
    WCStatus.REM_OP_ERR: (errno.EREMOTEIO, "the peer failed while carrying it out", None),
    WCStatus.RETRY_EXC_ERR: (errno.ETIMEDOUT, "the peer does not answer", "whether it still runs, and the network"),
    WCStatus.RNR_RETRY_EXC_ERR: (errno.ETIMEDOUT, "the peer has no receive posted", "a peer that calls recv()"),
    WCStatus.REM_INV_RD_REQ_ERR: (errno.EREMOTEIO, "the peer takes fewer READs at a time", "initiator_depth"),
    WCStatus.REM_ABORT_ERR: (errno.ECONNABORTED, "the peer aborted it", None),
    WCStatus.RESP_TIMEOUT_ERR: (errno.ETIMEDOUT, "the peer's answer did not come in time", None),
    WCStatus.FATAL_ERR: (errno.EIO, "the device has failed", None),
}


def words(status: WCStatus) -> str:
    """What a status means."""
    known = _FAILURES.get(status)
    return known[1] if known else f"it failed with {status.name}"


def completion_error(status: WCStatus, operation: str, address: str, over: str | None) -> RdmaError:
    """The exception for a failed ``operation``; ``over`` says why the connection has ended, where that is known."""
    if status is WCStatus.WR_FLUSH_ERR:
        return cm_error(errno.ECONNRESET, over or "the connection has ended", operation, address)
    code, text, hint = _FAILURES.get(status, (errno.EIO, words(status), None))
    return cm_error(code, f"{text} ({status.name})", operation, address, hint)
