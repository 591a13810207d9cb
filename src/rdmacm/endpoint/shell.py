"""What connections, requests and listeners are in threads and in event loops alike: all that does not wait."""

from __future__ import annotations

import sys
import warnings

from rdmacm.address import SockAddr, format_address
from rdmacm.cmid import CmId
from rdmacm.endpoint.core import Core
from rdmacm.endpoint.listening import Incoming, ListenerCore
from rdmacm.endpoint.memory import Region
from rdmacm.explanation import Explanation, Step
from rdmacm.verbs.enums import AccessFlag
from rdmacm.verbs.wr import Buffer

__all__ = ["ConnectionShell", "ListenerShell", "RequestShell"]


class ConnectionShell:
    """What a connection is."""

    def __init__(self, core: Core) -> None:
        self._core = core

    @property
    def id(self) -> CmId:
        """The id below, for what is not offered here."""
        return self._core.cmid

    @property
    def local_addr(self) -> SockAddr | None:
        """The address of this side."""
        return self._core.cmid.local_addr

    @property
    def peer_addr(self) -> SockAddr | None:
        """The address of the other side."""
        return self._core.cmid.peer_addr

    @property
    def private_data(self) -> bytes:
        """What the peer's connect or accept carried: the message's whole field, padded with zeros."""
        return self._core.private_data

    @property
    def max_message(self) -> int:
        """How many bytes a message to this side may have."""
        return self._core.shape.max_message

    @property
    def steps(self) -> tuple[Step, ...]:
        """What setting up the connection took: names and microseconds."""
        return self._core.steps

    @property
    def closed(self) -> bool:
        """Whether it was closed here."""
        return self._core.is_released

    def explain(self) -> Explanation:
        """Why it goes the way it goes: device, route, the rules that decided, times."""
        return self._core.explain()

    def register(
        self, buffer: Buffer, *, remote_read: bool = False, remote_write: bool = False, remote_atomic: bool = False
    ) -> Region:
        """Register memory, by reference: for the peer to use as the arguments say, and for operations of ours.

        Tell the peer ``region.remote``. The region ends with the connection at the latest. A read-only buffer
        can only be read (EINVAL).
        """
        access = AccessFlag(0)
        for wanted, flag in (
            (remote_read, AccessFlag.REMOTE_READ),
            (remote_write, AccessFlag.REMOTE_WRITE),
            (remote_atomic, AccessFlag.REMOTE_ATOMIC),
        ):
            if wanted:
                access |= flag
        return self._core.register(buffer, access)

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None and not core.is_released:
            warnings.warn(f"unclosed connection {self!r}", ResourceWarning, stacklevel=2, source=self)
            if not sys.is_finalizing():  # a thread that is gone may hold a lock
                core.release()

    def __repr__(self) -> str:
        ends = f"{format_address(self.local_addr)} -> {format_address(self.peer_addr)}"
        state = "closed" if self.closed else "ended" if self._core.over is not None else "established"
        return f"<{type(self).__name__} {ends} {state}>"


class RequestShell:
    """What a connection request is. One that is neither accepted nor rejected is dropped with its listener."""

    def __init__(self, incoming: Incoming) -> None:
        self._incoming = incoming
        #: What the peer's connect carried, padded with zeros.
        self.private_data = incoming.private_data
        self.local_addr = incoming.cmid.local_addr
        self.peer_addr = incoming.cmid.peer_addr

    def reject(self, private_data: bytes = b"") -> None:
        """Refuse, with up to 148 bytes for the peer's :class:`~rdmacm.CmRejectedError`."""
        self._incoming.reject(private_data)

    def __del__(self) -> None:
        incoming = getattr(self, "_incoming", None)
        if incoming is not None and not sys.is_finalizing():
            incoming.drop()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} from {format_address(self.peer_addr)}>"


class ListenerShell:
    """What a listener is."""

    def __init__(self, core: ListenerCore) -> None:
        self._core = core

    @property
    def id(self) -> CmId:
        """The listening id below."""
        return self._core.cmid

    @property
    def address(self) -> SockAddr | None:
        """The address it listens on, with the port it has got."""
        return self._core.cmid.local_addr

    @property
    def port(self) -> int:
        """That port."""
        return self._core.cmid.src_port

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._core.is_closed

    @property
    def last_error(self) -> Exception | None:
        """Why a request could not be accepted, the last time that happened: ``accept()`` goes on to the next."""
        return self._core.last_error

    def close(self) -> None:
        """Listen no more. Requests that wait are refused, connections that nobody has taken are ended."""
        self._core.close()

    def __del__(self) -> None:
        core = getattr(self, "_core", None)
        if core is not None and not core.is_closed:
            warnings.warn(f"unclosed listener {self!r}", ResourceWarning, stacklevel=2, source=self)
            if not sys.is_finalizing():
                core.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {format_address(self.address)}{' closed' if self.closed else ''}>"
