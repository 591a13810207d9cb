"""Base classes of the blocking and the asyncio API: everything that does not wait."""

from __future__ import annotations

from collections.abc import Callable

from rdmacm.address import SockAddr, format_address
from rdmacm.cmid import CmId
from rdmacm.endpoint.connection_state import ConnectionState
from rdmacm.endpoint.listening import IncomingRequest, ListenerState
from rdmacm.endpoint.memory import Region
from rdmacm.explanation import Explanation, Step
from rdmacm.interrupts.protection import finalize
from rdmacm.verbs.buffers import Buffer
from rdmacm.verbs.enums import AccessFlag
from rdmacm.verbs.pd import PD


class ConnectionBase:
    """Properties of a connection, and memory registration."""

    def __init__(self, state: ConnectionState) -> None:
        self._state = state

    @property
    def id(self) -> CmId:
        """The connection's :class:`rdmacm.CmId`, for operations this class does not offer."""
        return self._state.cmid

    @property
    def local_addr(self) -> SockAddr:
        """The local socket address."""
        return self._state.cmid.local_addr

    @property
    def peer_addr(self) -> SockAddr:
        """The peer's socket address."""
        return self._state.cmid.peer_addr

    @property
    def private_data(self) -> bytes:
        """The peer's private data from connect or accept: the whole field of the REQ or REP, padded with zeros."""
        return self._state.private_data

    @property
    def max_message(self) -> int:
        """The longest message this side can receive, in bytes."""
        return self._state.options.max_message

    @property
    def pd(self) -> PD:
        """Its protection domain: the peer can access regions of this domain only."""
        return self._state.cmid.pd

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of the connection setup, each with its duration in microseconds."""
        return self._state.steps

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._state.is_released

    def explain(self) -> Explanation:
        """Explain the choice of device and route: candidates, the rules that decided, and the time of each step."""
        return self._state.explain()

    def register(
        self, buffer: Buffer, *, remote_read: bool = False, remote_write: bool = False, remote_atomic: bool = False
    ) -> Region:
        """Register memory for local operations, and for the peer's operations that the arguments allow.

        The buffer is referenced, not copied. Send ``region.remote`` to the peer. Closing the connection closes the
        region. Raises EINVAL for a read-only buffer with ``remote_write`` or ``remote_atomic``.
        """
        access = AccessFlag(0)
        for is_allowed, flag in (
            (remote_read, AccessFlag.REMOTE_READ),
            (remote_write, AccessFlag.REMOTE_WRITE),
            (remote_atomic, AccessFlag.REMOTE_ATOMIC),
        ):
            if is_allowed:
                access |= flag
        return self._state.register(buffer, access)

    def __del__(self, finalize: Callable[..., None] = finalize) -> None:
        state = getattr(self, "_state", None)
        if state is not None and not state.is_released:
            finalize(self, state.release, unclosed="unclosed connection")

    def __repr__(self) -> str:
        ends = f"{format_address(self.local_addr)} -> {format_address(self.peer_addr)}"
        state = "closed" if self.closed else "ended" if self._state.close_reason is not None else "established"
        return f"<{type(self).__name__} {ends} {state}>"


class RequestBase:
    """A connection request. A request that is garbage-collected without an answer is rejected."""

    def __init__(self, incoming: IncomingRequest) -> None:
        self._incoming = incoming
        #: Private data of the peer's connect, padded with zeros.
        self.private_data: bytes = incoming.private_data
        #: The local socket address.
        self.local_addr: SockAddr = incoming.cmid.local_addr
        #: The peer's socket address.
        self.peer_addr: SockAddr = incoming.cmid.peer_addr

    def reject(self, private_data: bytes = b"") -> None:
        """Reject the request, with up to 148 bytes of private data for the peer's :class:`~rdmacm.CmRejectedError`.

        Raises EINVAL for longer private data, and for a request that has already been answered.
        """
        self._incoming.reject(private_data)

    def __del__(self, finalize: Callable[..., None] = finalize) -> None:
        incoming = getattr(self, "_incoming", None)
        if incoming is not None:
            finalize(self, incoming.drop)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} from {format_address(self.peer_addr)}>"


class ListenerBase:
    """Properties of a listener."""

    def __init__(self, state: ListenerState) -> None:
        self._state = state

    @property
    def id(self) -> CmId:
        """The listening :class:`rdmacm.CmId`.

        Close the listener rather than the id: calls that wait for a connection do not notice that the id is destroyed.
        """
        return self._state.cmid

    @property
    def address(self) -> SockAddr:
        """The local socket address, with the port that was assigned."""
        return self._state.cmid.local_addr

    @property
    def port(self) -> int:
        """The port number of :attr:`address`."""
        return self._state.cmid.src_port

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._state.is_closed

    @property
    def last_error(self) -> Exception | None:
        """The error of the last request that could not be accepted; ``accept()`` skips such requests."""
        return self._state.last_error

    def close(self) -> None:
        """Stop listening. Pending requests are rejected; connections that ``accept`` has not returned are closed.

        Closing twice is allowed.
        """
        self._state.close()

    def __del__(self, finalize: Callable[..., None] = finalize) -> None:
        state = getattr(self, "_state", None)
        if state is not None and not state.is_closed:
            finalize(self, state.close, unclosed="unclosed listener")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {format_address(self.address)}{' closed' if self.closed else ''}>"
