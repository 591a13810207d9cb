"""Which connection requests are processed at once, and which wait, when more arrive than peers answer.

A request costs its sender one datagram. It costs this host an answer, and the application an id, a queue pair and its
own work, so requests of strangers could take all time from the connections that are established. Therefore a request
needs a *permit*. There are :data:`PERMITS` of them. The peer gives its permit back when it answers the REP, which takes
a round trip and the application's time. Some peers answer only once all their requests were accepted. So when permits
run out, each REP without an answer is sent once more, which a real peer answers at once, with an MRA
(:meth:`rdmacm.proto.cm.engine.Agent.ask_peers`). Permits that nobody gives back are replaced slowly. So a host that is
asked by real peers never runs out of permits for long, and one that is asked by strangers processes a bounded number of
requests a second.

Without a permit, the datagram itself is kept and waits. The sources take turns: if one of them floods, a newcomer is
next. If each forged request has another source, turns do not help, since most requests are dropped. But a real peer
repeats its request, and one that was seen before goes before all that were not. What was seen is remembered in two
Bloom filters of fixed size, for 7 to 14 seconds: Linux repeats a REQ after 4.6 to 6.1 seconds, this package after 4.8.

A request that needs no application (a datagram service is asked, or nobody listens) has a permit of another kind, of
which there are many more. It does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from hashlib import blake2b
from typing import Generic, TypeVar

from rdmacm.proto.cm.fairqueue import FairQueue

T = TypeVar("T")

#: Requests for the application that peers have not answered yet, and how many permits are replaced a second.
PERMITS, RATE = 512, 64
#: The same for requests that need no application.
_SMALL_PERMITS, _SMALL_RATE = 1024, 1000
#: Requests that wait, of those seen before and of the others.
_MOST_WAITING = 4096
#: A source with more than so many requests in a queue that is full gets no more into it, and none is remembered.
_SMALL_SHARE = 8
#: A permit is there at the time that :meth:`Permits.next_time` gives, in spite of rounding.
_NEARLY_ONE = 1 - 1e-6
#: Bits of a Bloom filter, and seconds until it is replaced. 10,000 requests a second set 2 % of them.
_FILTER_BITS = 1 << 23
_FILTER_SECONDS = 7.0


class Permits:
    """A number of permits, ``rate`` of which are replaced a second, up to ``most``."""

    __slots__ = ("_at", "_left", "_most", "_rate")

    def __init__(self, most: float, rate: float) -> None:
        self._most = self._left = most
        self._rate = rate
        #: When ``_left`` was up to date, in seconds.
        self._at = 0.0

    def take(self, now: float) -> bool:
        """Take a permit; False if there is none."""
        left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        is_left = left >= _NEARLY_ONE
        self._left = left - is_left
        return is_left

    def give_back(self) -> None:
        """Return a permit."""
        self._left = min(self._most, self._left + 1)

    def next_time(self, now: float) -> float:
        """When there is a permit, if none is given back."""
        return max(now, self._at + (1 - self._left) / self._rate)


class _Seen:
    """Remembers keys for a while: those of the current period and of the one before."""

    __slots__ = ("_before", "_current", "_salt", "_until")

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._current = self._before = bytearray()
        self._until = 0.0

    def add(self, key: bytes, now: float) -> bool:
        """Remember a key, and return whether it was seen before; rarely, that is wrong."""
        if now >= self._until:
            is_recent = now < self._until + _FILTER_SECONDS
            self._before = self._current if is_recent else bytearray()
            self._current = bytearray(_FILTER_BITS // 8)
            self._until = now + _FILTER_SECONDS
        digest = int.from_bytes(blake2b(key, digest_size=8, key=self._salt).digest(), "big")
        first, second = digest % _FILTER_BITS, (digest >> 32) % _FILTER_BITS
        found = False
        for bits in (self._current, self._before):
            if bits and bits[first >> 3] >> (first & 7) & 1 and bits[second >> 3] >> (second & 7) & 1:
                found = True
        self._current[first >> 3] |= 1 << (first & 7)
        self._current[second >> 3] |= 1 << (second & 7)
        return found

    def forget(self, now: float) -> None:
        """Release the memory, if nothing was added for long."""
        if self._current and now >= self._until + _FILTER_SECONDS:
            self._current = self._before = bytearray()


class Admission(Generic[T]):
    """See the module. ``T`` is a request as it arrived. ``salt``: up to 64 random bytes, so that peers cannot know
    which keys are mistaken for each other.
    """

    def __init__(self, salt: bytes) -> None:
        self._permits = Permits(PERMITS, RATE)
        #: A peer has answered the REP: it gives back its permit.
        self.answered: Callable[[], None] = self._permits.give_back
        self._small_permits = Permits(_SMALL_PERMITS, _SMALL_RATE)
        #: The requests that wait, with their keys, by number. Below, the numbers of those that were seen before, and of
        #: the others.
        self.waiting: dict[int, tuple[bytes, T]] = {}
        #: The numbers of the requests that wait, by key.
        self._numbers: dict[bytes, int] = {}
        self._repeated: FairQueue[int] = FairQueue()
        self._new: FairQueue[int] = FairQueue()
        self._number = 0
        self._seen = _Seen(salt)

    def admit_small(self, now: float) -> bool:
        """Whether to process a request that needs no application. It is dropped otherwise."""
        return self._small_permits.take(now)

    def admit(self, now: float) -> bool:
        """Whether to process a request for the application now. It is given to :meth:`wait` otherwise."""
        return not self.waiting and self._permits.take(now)

    def wait(self, source: Hashable, key: bytes, request: T, now: float) -> bool:
        """Keep a request of ``source`` for :meth:`take`; False if a request was dropped for lack of room, this or
        another. ``key`` is what the copies of a request have in common, and no other request. The last copy is kept.
        """
        if len(self._new) >= _MOST_WAITING and self._new.count(source) > _SMALL_SHARE:
            return False
        self.withdraw(key)
        queue = self._repeated if self._seen.add(key, now) else self._new
        is_full = len(queue) >= _MOST_WAITING
        if is_full:
            displaced = queue.displaced_by(source)
            if displaced is None:
                return False
            queue.discard(displaced)
            del self._numbers[self.waiting.pop(displaced)[0]]
        self._number += 1
        self.waiting[self._number] = key, request
        self._numbers[key] = self._number
        queue.add(source, self._number)
        return not is_full

    def withdraw(self, key: bytes) -> None:
        """Drop a request, because its sender has given up; no error if it does not wait."""
        number = self._numbers.pop(key, None)
        if number is not None:
            del self.waiting[number]
            self._repeated.discard(number)
            self._new.discard(number)

    def take(self, now: float) -> T | None:
        """The next request to process; None if none waits, or there is no permit."""
        if not self.waiting or not self._permits.take(now):
            return None
        number = self._repeated.take()
        if number is None:
            number = self._new.take()
        assert number is not None
        if not self._new and not self._repeated:
            self._seen.forget(now)
        key, request = self.waiting.pop(number)
        del self._numbers[key]
        return request

    def next_time(self, now: float) -> float | None:
        """When :meth:`take` has a request, unless a peer answers before; None while none waits."""
        return self._permits.next_time(now) if self.waiting else None

    def clear(self) -> None:
        """Forget all requests that wait."""
        self.waiting.clear()
        self._numbers.clear()
        self._repeated, self._new = FairQueue(), FairQueue()
