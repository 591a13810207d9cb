"""Where the engine finds a connection or a listener again, and which timer is next."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable

from rdmacm.proto.cm.connection import Accepts, Connection, Listener

__all__ = ["Connections", "Listeners"]


class Connections:
    """Connections by local communication id, by what the peer calls them, by the peer's queue pair, and by time.

    GUID, ids and queue pair numbers are the peer's own words, so they name a connection only together with the path
    they came over.
    """

    __slots__ = ("_by_id", "_by_remote_id", "_by_remote_qpn", "get", "timers")

    def __init__(self) -> None:
        self._by_id: dict[int, Connection] = {}
        #: The connection of a local communication id, or None.
        self.get: Callable[[int], Connection | None] = self._by_id.get
        self._by_remote_id: dict[tuple[int, int | None, Hashable], Connection] = {}
        self._by_remote_qpn: dict[tuple[int, int | None, Hashable], Connection] = {}
        #: When which is due, a heap; what was stopped or set anew may still be in it.
        self.timers: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, comm_id: int) -> bool:
        return comm_id in self._by_id

    def of_peer(self, remote_comm_id: int, guid: int | None, path: Hashable) -> Connection | None:
        """The connection the peer calls ``remote_comm_id``; without a GUID, the SIDR request of that id."""
        return self._by_remote_id.get((remote_comm_id, guid, path))

    def of_qpn(self, qpn: int, guid: int, path: Hashable) -> Connection | None:
        """The connection that has the peer's queue pair."""
        return self._by_remote_qpn.get((qpn, guid, path))

    def add(self, connection: Connection) -> None:
        """Enter a new connection."""
        self._by_id[connection.comm_id] = connection
        self.learned(connection)

    def learned(self, connection: Connection) -> None:
        """The connection's remote names have become known."""
        if connection.remote_comm_id is not None:
            self._by_remote_id[connection.remote_comm_id, connection.remote_guid, connection.path] = connection
        if connection.remote_qpn is not None:
            self._by_remote_qpn[connection.remote_qpn, connection.remote_guid, connection.path] = connection

    def release_qpn(self, connection: Connection) -> None:
        """The peer may use its queue pair for another connection."""
        if connection.remote_qpn is not None:
            key = connection.remote_qpn, connection.remote_guid, connection.path
            if self._by_remote_qpn.get(key) is connection:
                del self._by_remote_qpn[key]

    def remove(self, connection: Connection) -> None:
        """Forget a connection."""
        self.release_qpn(connection)
        del self._by_id[connection.comm_id]
        if connection.remote_comm_id is not None:
            del self._by_remote_id[connection.remote_comm_id, connection.remote_guid, connection.path]

    # -- timers -----------------------------------------------------------------------------------------------

    def arm(self, connection: Connection, deadline: float) -> None:
        """Set the connection's one timer. Setting its ``deadline`` to None stops it."""
        connection.deadline = deadline
        heapq.heappush(self.timers, (deadline, connection.comm_id))
        # Timers that were stopped stay behind until they are due, which a busy agent has no room for.
        if len(self.timers) > 64 + 4 * len(self._by_id):
            self.timers[:] = [
                (waiting.deadline, comm_id) for comm_id, waiting in self._by_id.items() if waiting.deadline is not None
            ]
            heapq.heapify(self.timers)

    def next_deadline(self) -> float | None:
        """When the next timer is due, or None."""
        while self.timers:
            deadline, comm_id = self.timers[0]
            connection = self._by_id.get(comm_id)
            if connection is not None and connection.deadline == deadline:
                return deadline
            heapq.heappop(self.timers)
        return None

    def take_due(self, now: float) -> Connection | None:
        """A connection whose timer is due, and no longer set; None where there is no other."""
        deadline = self.next_deadline()
        if deadline is None or deadline > now:
            return None
        connection = self._by_id[heapq.heappop(self.timers)[1]]
        connection.deadline = None
        return connection


class Listeners:
    """Listeners by service id and mask."""

    __slots__ = ("_by_key", "_masks")

    def __init__(self) -> None:
        self._by_key: dict[tuple[int, int], list[Listener]] = {}
        self._masks: Counter[int] = Counter()

    def add(self, service_id: int, mask: int, backlog: int, accepts: Accepts | None) -> Listener | None:
        """A new listener, or None where the service id is taken."""
        key = service_id & mask, mask
        others = self._by_key.setdefault(key, [])
        if others and (accepts is None or any(other.accepts is None for other in others)):
            return None
        listener = Listener(service_id & mask, mask, backlog, 0, accepts)
        others.append(listener)
        self._masks[mask] += 1
        return listener

    def remove(self, listener: Listener) -> None:
        """Take a listener out, if it is still in."""
        key = listener.service_id, listener.mask
        others = self._by_key.get(key, [])
        if listener in others:
            others.remove(listener)
            self._masks[listener.mask] -= 1
            if not self._masks[listener.mask]:
                del self._masks[listener.mask]
            if not others:
                del self._by_key[key]

    def find(self, service_id: int) -> list[Listener]:
        """Who takes requests for a service id: of several masks that fit, those with the most bits."""
        for mask in sorted(self._masks, key=int.bit_count, reverse=True):
            listeners = self._by_key.get((service_id & mask, mask))
            if listeners:
                return listeners
        return []
