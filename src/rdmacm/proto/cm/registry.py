"""How the engine finds a connection, a listener and the next timer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from math import inf

from rdmacm.proto.cm.connection import Accepts, CmConnection, CmListener
from rdmacm.proto.cm.messages import APR, DREP, DREQ, LAP, MRA, REJ, RTU
from rdmacm.proto.freed import FreedNumbers
from rdmacm.proto.timerheap import LazyTimerHeap

#: Communication ids of ended connections that are not given again yet: the TIMEWAIT of their peers may end later, and
#: until then a peer takes a request with such an id for a copy of an old one. They are few of the 2^20.
_FREED_IDS = 1 << 14


class Connections:
    """Connections by local communication id, by the peer's communication id, by the peer's queue pair, and by time.

    The peer chooses its GUID, ids and queue pair numbers, so they identify a connection only together with the path
    that its messages arrive on.
    """

    __slots__ = (
        *("_armed", "_by_remote_id", "_by_remote_qpn", "_wake_at"),
        *("by_id", "freed", "get", "of_peer", "of_qpn", "timers", "unasked"),
    )

    def __init__(self, wake_at: Callable[[float], None]) -> None:
        #: Has the timers that are due looked at, at a time.
        self._wake_at = wake_at
        #: When they are looked at, which is not after any deadline.
        self._armed = inf
        #: By local communication id.
        self.by_id: dict[int, CmConnection] = {}
        #: The communication ids of the connections that were removed last.
        self.freed = FreedNumbers(_FREED_IDS)
        #: (remote communication id, CA GUID, path) to connection. The GUID is None for a SIDR request.
        self._by_remote_id: dict[tuple[int, int | None, Hashable], CmConnection] = {}
        #: (remote QPN, CA GUID, path) to connection.
        self._by_remote_qpn: dict[tuple[int | None, int | None, Hashable], CmConnection] = {}
        #: The deadlines of the timers that run, by local communication id.
        self.timers: LazyTimerHeap[int] = LazyTimerHeap(self._deadline_of)
        #: The connection with a local communication id, or None.
        self.get: Callable[[int], CmConnection | None] = self.by_id.get
        #: The connection with a (remote communication id, CA GUID, path); with None as GUID, the SIDR request.
        self.of_peer: Callable[[tuple[int, int | None, Hashable]], CmConnection | None] = self._by_remote_id.get
        #: The connection that uses a queue pair of the peer: (remote QPN, CA GUID, path).
        self.of_qpn: Callable[[tuple[int | None, int | None, Hashable]], CmConnection | None] = self._by_remote_qpn.get
        #: Local communication ids of connections whose REP was neither answered nor sent early (``Agent.ask_peers``).
        self.unasked: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self.by_id)

    def __contains__(self, comm_id: int) -> bool:
        return comm_id in self.by_id

    def of_message(self, message: RTU | DREQ | DREP | REJ | MRA | LAP | APR) -> CmConnection | None:
        """The connection that both communication ids of a message belong to."""
        connection = self.by_id.get(message.remote_comm_id)
        if connection is None or connection.remote_comm_id != message.local_comm_id:
            return None
        return connection

    def requesting(self, comm_id: int) -> CmConnection | None:
        """The connection that has sent a REQ and does not know the peer's communication id yet."""
        connection = self.by_id.get(comm_id)
        if connection is None or not connection.is_active or connection.remote_comm_id is not None:
            return None
        return connection

    def add_remote(self, connection: CmConnection) -> None:
        """Index a connection by the peer's communication id and queue pair, if they are known."""
        if connection.remote_comm_id is not None:
            self._by_remote_id[connection.remote_comm_id, connection.remote_guid, connection.path] = connection
        if connection.remote_qpn is not None:
            self._by_remote_qpn[connection.remote_qpn, connection.remote_guid, connection.path] = connection

    def release_qpn(self, connection: CmConnection) -> None:
        """Let the peer use its queue pair for another connection."""
        if connection.remote_qpn is not None:
            key = connection.remote_qpn, connection.remote_guid, connection.path
            if self._by_remote_qpn.get(key) is connection:
                del self._by_remote_qpn[key]

    def release_peer_id(self, connection: CmConnection) -> None:
        """Let the peer use its communication id for another connection."""
        if connection.remote_comm_id is not None:
            key = connection.remote_comm_id, connection.remote_guid, connection.path
            if self._by_remote_id.get(key) is connection:
                del self._by_remote_id[key]

    def remove(self, connection: CmConnection) -> None:
        """Remove a connection, also one that is not in all tables."""
        comm_id, guid, path = connection.comm_id, connection.remote_guid, connection.path
        if connection.remote_comm_id is not None:
            key = connection.remote_comm_id, guid, path
            if self._by_remote_id.get(key) is connection:
                del self._by_remote_id[key]
        if self._by_remote_qpn.get((connection.remote_qpn, guid, path)) is connection:  # not released with TIMEWAIT
            self.release_qpn(connection)
        if self.by_id.pop(comm_id, None) is not None:
            self.freed.add(comm_id)
        self.unasked.pop(comm_id, None)
        if comm_id in self.timers.entry_times:  # not where TIMEWAIT is over, as nearly always
            self.timers.discard(comm_id)

    def clear(self) -> None:
        """Remove all connections."""
        for table in (self.by_id, self._by_remote_id, self._by_remote_qpn, self.unasked, self.timers):
            table.clear()

    # -- timers -----------------------------------------------------------------------------------------------

    def set_timer(self, connection: CmConnection, deadline: float) -> None:
        """Set the one timer of a connection. Assigning None to the connection's ``deadline`` stops it."""
        connection.deadline = deadline
        if self.timers.entry_times.get(connection.comm_id, inf) > deadline:  # mostly an earlier entry is there
            self.timers.schedule(connection.comm_id, deadline)
        if deadline < self._armed:  # rarely: nearly always an earlier timer is set
            self._armed = deadline
            self._wake_at(deadline)

    def arm(self) -> None:
        """Have the timers looked at when the next one is due: they were just now, and those due have fired."""
        deadline = self.timers.next_deadline()
        self._armed = inf if deadline is None else deadline
        if deadline is not None:
            self._wake_at(deadline)

    def _deadline_of(self, comm_id: int) -> float | None:
        connection = self.by_id.get(comm_id)
        return None if connection is None else connection.deadline


class Listeners:
    """Listeners by service id and mask."""

    __slots__ = ("_by_key", "_masks", "_ordered")

    def __init__(self) -> None:
        #: (service id & mask, mask) to the listeners.
        self._by_key: dict[tuple[int, int], list[CmListener]] = {}
        #: How many listeners use a mask, and the masks by falling number of bits.
        self._masks: Counter[int] = Counter()
        self._ordered: tuple[int, ...] = ()

    def add(
        self,
        service_id: int,
        mask: int,
        backlog: int,
        accepts: Accepts | None,
        transport: tuple[int, int] | None = None,
    ) -> CmListener | None:
        """Add a listener; None if the service id is taken."""
        key = service_id & mask, mask
        others = self._by_key.setdefault(key, [])
        if others and (accepts is None or any(other.accepts is None for other in others)):
            return None
        listener = CmListener(service_id & mask, mask, backlog, accepts, transport)
        others.append(listener)
        self._masks[mask] += 1
        self._order()
        return listener

    def _order(self) -> None:
        self._ordered = tuple(sorted(self._masks, key=int.bit_count, reverse=True))

    def remove(self, listener: CmListener) -> None:
        """Remove a listener; no error if it was removed before."""
        key = listener.service_id, listener.mask
        others = self._by_key.get(key, [])
        if listener in others:
            others.remove(listener)
            self._masks[listener.mask] -= 1
            if not self._masks[listener.mask]:
                del self._masks[listener.mask]
                self._order()
            if not others:
                del self._by_key[key]

    def find(self, service_id: int) -> list[CmListener]:
        """The listeners for a service id. Among several masks that match, the one with the most bits wins."""
        for mask in self._ordered:
            listeners = self._by_key.get((service_id & mask, mask))
            if listeners:
                return listeners
        return []
