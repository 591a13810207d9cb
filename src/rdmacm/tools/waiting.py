"""Waiting for a peer: a line on standard error after one second, and one clear error when the time is over."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self, TypeVar

from rdmacm.address import InetAddr, SockAddr, format_address, parse_address
from rdmacm.cmid import CmEvent, CmId, EventChannel
from rdmacm.errors import CmTimeoutError, RdmaError, cm_error
from rdmacm.proto.wire import Buffer
from rdmacm.provider import Provider
from rdmacm.tools.output import write_error

T = TypeVar("T")

#: Seconds of waiting after which a tool says whom it waits for.
NOTICE_SECONDS = 1.0
#: Seconds of a wait that do not count for its limit (PeerWait.briefly).
_BRIEFLY = 0.01


@contextmanager
def notice(whom: str) -> Iterator[None]:
    """Write a line about ``whom`` when the body takes more than a second. For calls that have a time limit."""
    timer = threading.Timer(NOTICE_SECONDS, write_error, (f"waiting for {whom} ...",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class PeerWait:
    """The waits of a client for its peer. Each wait without progress may take ``seconds`` (``--timeout``).

    ``whom``: the peer, as text for people. ``has_notice``: whether a line is written after one second. ``clock``:
    seconds that only go forward.
    """

    def __init__(
        self, whom: str, seconds: float, *, has_notice: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.whom = whom
        self.seconds = seconds
        #: The step that waits, for the error.
        self.step: str = "transfer"
        #: Returns what was sent and what came back, for the error.
        self.progress: Callable[[], str] = lambda: "nothing came back"
        #: What to try when the time is over.
        self.hint: str = f"checking that the program at {whom} runs and is not stopped, or a longer --timeout"
        self._has_notice = has_notice
        self._clock = clock
        #: When the wait began, in seconds of the clock.
        self._began = clock()
        #: Whether the notice of this wait was written, or is not wanted.
        self._is_noticed = not has_notice

    def restart(self) -> None:
        """Begin a wait; the time begins anew."""
        self._began = self._clock()
        self._is_noticed = not self._has_notice

    def left(self) -> float:
        """Return how many seconds the next call may wait, above 0.

        Writes the notice once it is due. CmTimeoutError when the time is over.
        """
        waited = self._clock() - self._began
        if waited >= self.seconds:
            text = f"no answer within {self.seconds:g} s: {self.progress()}"
            raise cm_error(errno.ETIMEDOUT, text, self.step, self.whom, self.hint)
        if not self._is_noticed:
            if waited < NOTICE_SECONDS:
                return min(NOTICE_SECONDS, self.seconds) - waited
            self._is_noticed = True
            write_error(f"waiting for an answer of {self.whom} ... (at most {self.seconds:g} s: --timeout)")
        return self.seconds - waited

    @contextmanager
    def connecting(self, cmid: CmId) -> Iterator[None]:
        """In the ``with`` block the error of :meth:`left` is that of a connection request without an answer."""
        before = self.step, self.progress, self.hint
        host = format_address(cmid.peer_addr).rpartition(":")[0]
        self.step = "connect"
        self.hint = (
            f"checking that a server listens on port {cmid.dst_port} of {host}, that firewalls let UDP port 4791 pass"
            " (rdmacm doctor C1), or a longer --timeout"
        )
        with PacketCounter(cmid) as packets:
            self.progress = packets.text
            yield
        self.step, self.progress, self.hint = before

    def briefly(self, wait: Callable[[float], T | None]) -> T:
        """As :meth:`until`, for what mostly comes at once: the time begins after 10 ms, without a clock read before."""
        return wait(_BRIEFLY) or self.until(wait)

    def until(self, wait: Callable[[float], T | None]) -> T:
        """Return the first true result of ``wait(seconds)``, which waits for up to so many seconds."""
        self.restart()
        while not (found := wait(self.left())):
            pass
        return found


def next_event(channel: EventChannel, seconds: float) -> CmEvent | None:
    """Return the next event of a channel, or None after so many seconds."""
    try:
        return channel.get_event(seconds)
    except CmTimeoutError:
        return None


class PacketCounter:
    """Counts the packets to and from the peer of an id, during the ``with`` block. A capture continues meanwhile."""

    received: int
    sent: int

    def __init__(self, cmid: CmId) -> None:
        #: Packets sent to the peer, and received from it.
        self.sent = self.received = 0
        self._provider: Provider = cmid.channel.provider
        self._local, self._peer = _ip(cmid.local_addr), _ip(cmid.peer_addr)
        #: The tap of a capture, which sees the packets as well.
        self._below = self._provider.tap
        #: Whether the provider shows its packets.
        self._is_counting = False

    def _see(
        self,
        outgoing: bool,
        local: bytes,
        remote: bytes,
        source_port: int,
        dest_port: int,
        data: Sequence[Buffer] | memoryview,
        segment: int,
        /,
    ) -> None:
        if remote == self._peer:
            if outgoing:
                self.sent += 1
            else:
                self.received += 1
        if self._below is not None:
            self._below(outgoing, local, remote, source_port, dest_port, data, segment)

    def text(self) -> str:
        """Say what was sent and what came back."""
        if not self._is_counting:
            return "the connection request was sent, nothing is known to have come back"
        sent = f"{self.sent} packet{'' if self.sent == 1 else 's'} sent"
        # To its own host a process may send packets that its own socket receives.
        return f"{sent}, none answered" if self._local == self._peer else f"{sent}, {self.received or 'none'} came back"

    def __enter__(self) -> Self:
        with suppress(RdmaError):  # a provider that does not show its packets
            self._provider.tap = self._see
            self._is_counting = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._is_counting:
            self._provider.tap = self._below


def _ip(address: SockAddr | None) -> bytes:
    """The packed IP address, or the GID, of a socket address."""
    if address is None:
        return b""
    parsed = parse_address(address)
    return parsed.ip if isinstance(parsed, InetAddr) else bytes(parsed.addr)
