"""The exceptions of the package.

::

    OSError
     └── RdmaError                      errno, step, address, hint, explanation
          ├── GaiError                  also socket.gaierror; errno is an EAI code
          ├── CmStateError              the id is in the wrong state for the call
          ├── CmTimeoutError            also TimeoutError
          ├── CmPermissionError         also PermissionError
          ├── CmWouldBlockError         also BlockingIOError
          ├── CmRefusedError            also ConnectionRefusedError
          ├── CmRejectedError           also ConnectionRefusedError; reason, private_data
          └── CmDisconnectedError       also ConnectionResetError

The text is one line: the step that failed, the address, the cause, the name of the errno or EAI code, and what to try.
"""

from __future__ import annotations

import errno as _errno
import socket
from typing import TYPE_CHECKING

from rdmacm.constants import EAI

if TYPE_CHECKING:
    from rdmacm.explanation import Explanation


def printable(text: str) -> str:
    """``text`` on one line, with backslash escapes for unprintable characters, which a peer's name may contain."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class RdmaError(OSError):
    """The base class of the package's errors, with ``errno`` and ``strerror`` of OSError.

    ``step``: the call that failed, or the part of it (``"resolve_addr"``); ``address``: the address it was for, as
    text; ``hint``: what to try, or None; ``explanation``: for a failed resolution, its steps
    (:class:`rdmacm.explanation.Explanation`), else None; ``bad_wr``: the work request that a post refused,
    ibv_post_send(3), the object that was passed to the call, else None. Those before it are posted.
    """

    step: str
    address: str | None
    hint: str | None
    explanation: Explanation | None
    bad_wr: object = None

    def __init__(
        self,
        errno: int,
        strerror: str,
        step: str = "",
        address: str | None = None,
        hint: str | None = None,
        explanation: Explanation | None = None,
    ) -> None:
        super().__init__(errno, strerror)
        self.step = step
        self.address = address
        self.hint = hint
        self.explanation = explanation

    @property
    def code_name(self) -> str:
        """``ETIMEDOUT``, ``EAI_NONAME``: the name of ``errno``."""
        return errno_name(self.errno or 0)

    def __str__(self) -> str:
        head = " ".join(part for part in (self.step, self.address) if part)
        text = f"{head}: {self.strerror}" if head else str(self.strerror)
        text = f"{text} [{self.code_name}]"
        return printable(f"{text}; try: {self.hint}" if self.hint else text)

    def __reduce__(self) -> tuple[object, ...]:
        arguments = (self.errno, self.strerror, self.step, self.address, self.hint, self.explanation)
        state = self.__dict__.copy()
        state.pop("bad_wr", None)  # its buffers cannot be pickled
        return type(self), arguments, state


class GaiError(RdmaError, socket.gaierror):
    """A failed name or address lookup: ``errno`` is an EAI code (:class:`rdmacm.EAI`), rdma_getaddrinfo(3).

    ``system_errno`` is the errno behind ``EAI_SYSTEM``, else 0.
    """

    system_errno: int = 0

    @property
    def code_name(self) -> str:
        """``EAI_NONAME``: the name of ``errno``."""
        return gai_name(self.errno or 0)


class CmStateError(RdmaError):
    """EINVAL, or ENXIO after the device was removed: the state of the id does not allow the call."""


class CmTimeoutError(RdmaError, TimeoutError):
    """ETIMEDOUT."""


class CmPermissionError(RdmaError, PermissionError):
    """EACCES or EPERM."""


class CmWouldBlockError(RdmaError, BlockingIOError):
    """EAGAIN: the call would have to wait, and the id or channel is non-blocking."""


class CmRefusedError(RdmaError, ConnectionRefusedError):
    """ECONNREFUSED: no process is there; of a connection: the peer's host reports that its UDP port 4791 is closed."""


class CmRejectedError(RdmaError, ConnectionRefusedError):
    """ECONNREFUSED: the peer rejected the connection.

    ``reason`` is the reason in the REJ (InfiniBand Architecture 12.6.7.2): 8 no listener on that port, 28 rejected by
    the application. Only with 28 is ``private_data`` meaningful; it has its full 148 bytes, padded with zeros. For a
    datagram id ``reason`` is the status in the SIDR_REP (12.11.2.1): 1 no listener, 2 rejected by the application.
    """

    def __init__(
        self,
        strerror: str,
        address: str | None = None,
        hint: str | None = None,
        *,
        reason: int = 0,
        private_data: bytes = b"",
    ) -> None:
        super().__init__(_errno.ECONNREFUSED, strerror, "connect", address, hint)
        self.reason = reason
        self.private_data = private_data

    def __reduce__(self) -> tuple[object, ...]:
        return _rejected, (self.strerror, self.address, self.hint, self.reason, self.private_data)


def _rejected(strerror: str, address: str | None, hint: str | None, reason: int, data: bytes) -> CmRejectedError:
    return CmRejectedError(strerror, address, hint, reason=reason, private_data=data)


class CmDisconnectedError(RdmaError, ConnectionResetError):
    """ECONNRESET: the connection has ended, so the call cannot be carried out."""


_FAMILIES: dict[int, type[RdmaError]] = {
    _errno.ETIMEDOUT: CmTimeoutError,
    _errno.EACCES: CmPermissionError,
    _errno.EPERM: CmPermissionError,
    _errno.EAGAIN: CmWouldBlockError,
    _errno.ECONNREFUSED: CmRefusedError,
    _errno.ECONNRESET: CmDisconnectedError,
}


def cm_error(
    errno: int,
    strerror: str,
    step: str = "",
    address: str | None = None,
    hint: str | None = None,
    explanation: Explanation | None = None,
) -> RdmaError:
    """The exception for an errno; where Python has a built-in class for that errno, a subclass of it."""
    return _FAMILIES.get(errno, RdmaError)(errno, strerror, step, address, hint, explanation)


def check_timeout(timeout: float | None) -> None:
    """Raise ValueError for a timeout that is negative or not a number. None means no limit."""
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"timeout {timeout!r} is not a number of 0 or more")


#: Some numbers have two names. These are the names in the manual pages.
_NAMES = {**_errno.errorcode, _errno.EOPNOTSUPP: "EOPNOTSUPP", _errno.EDEADLK: "EDEADLK", _errno.EAGAIN: "EAGAIN"}


def errno_name(errno: int) -> str:
    """``ETIMEDOUT`` for 110; ``errno 524`` for a number without a name."""
    return _NAMES.get(errno, f"errno {errno}")


def gai_name(code: int) -> str:
    """``EAI_NONAME`` for -2."""
    try:
        return f"EAI_{EAI(code).name}"
    except ValueError:
        return f"EAI {code}"


#: The texts of gai_strerror(3), which rdma_getaddrinfo(3) refers to.
_GAI_TEXT = {
    EAI.BADFLAGS: "Bad value for ai_flags",
    EAI.NONAME: "Name or service not known",
    EAI.AGAIN: "Temporary failure in name resolution",
    EAI.FAIL: "Non-recoverable failure in name resolution",
    EAI.NODATA: "No address associated with hostname",
    EAI.FAMILY: "ai_family not supported",
    EAI.QPTYPE: "ai_qp_type not supported",
    EAI.SERVICE: "Servname not supported for ai_socktype",
    EAI.ADDRFAMILY: "Address family for hostname not supported",
    EAI.MEMORY: "Memory allocation failure",
    EAI.SYSTEM: "System error",
}


def gai_strerror(code: int) -> str:
    """The text of an EAI code."""
    try:
        return _GAI_TEXT[EAI(code)]
    except ValueError:
        return "Unknown error"


class Failure(Exception):
    """A resolution has failed. The provider turns this into an RdmaError or an event; it never leaves the provider."""

    def __init__(self, code: int, step: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        #: A positive errno.
        self.errno = code
        #: The step that failed: "bind", "route", "select", "neighbour", "path" or "service".
        self.step = step
        #: The cause, in words.
        self.message = message
        #: What the user may try.
        self.hint = hint

    def explained(self, explanation: Explanation) -> Explanation:
        """``explanation``, which has the steps before, with this failure as its end."""
        from dataclasses import replace

        return replace(
            explanation,
            # A candidate that passed the rules is not "chosen" when the resolution failed afterwards.
            candidates=tuple(replace(c, chosen=False) for c in explanation.candidates),
            error=self.step,
            errno=self.errno,
            errno_name=errno_name(self.errno),
            message=self.message,
            hint=self.hint,
        )
