"""What the transports of streams and of datagrams in an event loop of asyncio share.

The dispatcher is the event loop's (:mod:`rdmacm.aio`), so changes of a socket are seen in the loop's thread. They are
handled in a callback of their own, because the protocol of a transport may call anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rdmacm.interrupts.protection import finalize
from rdmacm.rsocket.datagrams import DatagramState
from rdmacm.rsocket.stream import StreamState

#: Bytes that may wait to be sent: above the first, the protocol pauses, and below the second it goes on.
HIGH_WATER, LOW_WATER = 1 << 16, 1 << 14


class LoopTransport(asyncio.BaseTransport):
    """A transport that owns the state of a socket. ``extra``: what ``get_extra_info`` returns, by name."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        state: StreamState | DatagramState,
        protocol: asyncio.BaseProtocol,
        extra: dict[str, Any],
    ) -> None:
        super().__init__(extra)
        self._loop = loop
        self._state = state
        self._dispatcher = state.dispatcher
        self._protocol = protocol
        self._is_closing = self._has_ended = self._is_scheduled = False

    def _begin(self) -> None:
        """Tell the protocol, and follow the state from here on."""
        self._state.wakers.append(self._changed)
        self._loop.call_soon(self._protocol.connection_made, self)
        self._changed()

    def _changed(self) -> None:
        if not self._is_scheduled and not self._has_ended:
            self._is_scheduled = True
            self._loop.call_soon(self._work)

    def _work(self) -> None:
        raise NotImplementedError

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Set another protocol."""
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        """The protocol."""
        return self._protocol

    def is_closing(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._is_closing

    def __del__(self, finalize: Callable[..., None] = finalize) -> None:
        if not getattr(self, "_has_ended", True):
            self._has_ended = True
            finalize(self, self._state.release, unclosed="unclosed rsocket transport")
