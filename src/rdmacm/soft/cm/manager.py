"""CmConnection managers: one agent for all the RoCE devices and one for each InfiniBand port, and whose ids their
connections are.

The agent (:mod:`rdmacm.proto.cm.engine`) knows no socket and no id. Here its MADs go out over QP 1, its events go to
the ids they are about, and its deadline becomes a timer. Communication ids carry the wire's slot in their upper byte,
by which everything but a request finds its process where several share the port.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Protocol

from rdmacm.progress.timers import Timer
from rdmacm.proto.cm.connection import Accepts, CmConnection, CmListener
from rdmacm.proto.cm.engine import Agent
from rdmacm.proto.cm.events import ConnectRequest, Event, SidrRequest, TimewaitExit
from rdmacm.proto.cm.states import CmState
from rdmacm.proto.wire import Buffer

if TYPE_CHECKING:
    from rdmacm.soft.cm.connecting import SoftId
    from rdmacm.soft.cm.listening import ListeningId
    from rdmacm.soft.ib.subnet import Subnet
    from rdmacm.soft.provider import SoftProvider

__all__ = ["ConnectionManager", "Gsi"]


_REQUESTS = (ConnectRequest, SidrRequest)


class Gsi(Protocol):
    """QP 1, the general services interface, as a connection manager sees it. Paths are the agent's."""

    #: Called with (MAD, path, now) for each MAD of connection managers that arrives; the MAD is valid during the call.
    on_mad: Callable[[memoryview, Any, float], None] | None

    @property
    def id_prefix(self) -> int | None:
        """The upper byte of communication ids, where several processes share QP 1; known once opened."""

    def open(self) -> None: ...

    def send_mad(self, path: Any, mad: Buffer) -> object: ...

    def listen(self, service_id: int, local: bytes | None, /) -> object:
        """Let requests for a service id (to one local address, or any) come to this process; returns a token."""

    def unlisten(self, token: object) -> None: ...

    def hold_qpn(self, qpn: int, until: float) -> None:
        """Give the number to no queue pair before ``until``."""


class ConnectionManager:
    """See the module. Used with the provider's lock held.

    ``gsi`` is where its MADs pass; ``subnet`` the InfiniBand port it is of, None for RoCE.
    """

    def __init__(self, provider: SoftProvider, gsi: Gsi, subnet: Subnet | None = None) -> None:
        self._provider = provider
        self._gsi = gsi
        self.subnet = subnet
        self._agent: Agent | None = None
        self._ids: dict[int, SoftId] = {}
        self._listeners: dict[CmListener, tuple[ListeningId, object]] = {}
        self._timer: Timer | None = None
        self._is_pumping = False

    @property
    def agent(self) -> Agent:
        """The agent; the wire is open once there is one."""
        if self._agent is None:
            provider, gsi = self._provider, self._gsi
            gsi.open()
            self._agent = Agent(provider.random.getrandbits(64), provider.random, id_prefix=gsi.id_prefix)
            gsi.on_mad = self._mad_received
        return self._agent

    def listen(
        self, owner: ListeningId, service_id: int, local: bytes | None, backlog: int, accepts: Accepts
    ) -> CmListener:
        """Take requests for a service id, to one local address or (None) to any."""
        listener = self.agent.listen(service_id, backlog=backlog, accepts=accepts)
        try:
            token = self._gsi.listen(service_id, local)
        except BaseException:
            self.agent.unlisten(listener)
            raise
        self._listeners[listener] = owner, token
        self._provider.descriptors_changed()
        return listener

    def unlisten(self, listener: CmListener) -> None:
        """Take no more."""
        found = self._listeners.pop(listener, None)
        if found is not None and self._agent is not None:
            self._agent.unlisten(listener)
            self._gsi.unlisten(found[1])
            self._provider.descriptors_changed()

    def own(self, comm_id: int, owner: SoftId) -> CmConnection:
        """From now on the events of a connection are this id's."""
        self._ids[comm_id] = owner
        connection = self.agent.connection(comm_id)
        assert connection is not None
        return connection

    def leave(self, connection: CmConnection) -> None:
        """The id of a connection is being destroyed: say goodbye to the peer."""
        self._ids.pop(connection.comm_id, None)
        if self._agent is not None and connection.state is not CmState.IDLE:
            was_over = connection.state is CmState.TIMEWAIT
            self._agent.destroy(connection.comm_id, self._provider.clock())
            self.pump()
            if not was_over:
                self.hold_qpn(connection)

    def hold_qpn(self, connection: CmConnection) -> None:
        """A connection in TIMEWAIT keeps its queue pair number from being used again."""
        if connection.state is CmState.TIMEWAIT and connection.deadline is not None:
            self._gsi.hold_qpn(connection.local_qpn, connection.deadline)

    def pump(self) -> None:
        """Send what the agent wants sent, hand out its events, and look at its deadline."""
        agent = self._agent
        if agent is None or self._is_pumping:
            return
        self._is_pumping = True
        send_mad = self._gsi.send_mad
        try:
            while agent.outbox or agent.pending_events:
                if agent.outbox:
                    for path, mad in agent.mads_to_send():
                        send_mad(path, mad)
                if agent.pending_events:
                    for event in agent.events():
                        self._dispatch(agent, event)
        finally:
            self._is_pumping = False
        self._set_timer(agent.next_deadline())

    def _set_timer(self, deadline: float | None) -> None:
        """Be called when the agent has something to do; a timer that is earlier anyway looks then."""
        if deadline is not None and (self._timer is None or deadline < self._timer.when):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._provider.call_at(deadline, self._time)

    def _time(self, now: float) -> None:
        self._timer = None
        if self._agent is not None:
            self._agent.timer(now)
            self.pump()

    def _mad_received(self, mad: memoryview, path: Hashable, now: float) -> None:
        if self._agent is not None:
            self._agent.mad_received(mad, path, now)
            self.pump()

    def _dispatch(self, agent: Agent, event: Event) -> None:
        if isinstance(event, _REQUESTS):
            found = self._listeners.get(event.listener)
            if found is not None:
                found[0].requested(event, self)
            else:  # it was destroyed while the request was on its way here
                agent.destroy(event.comm_id, self._provider.clock())
            return
        if isinstance(event, TimewaitExit):
            owner = self._ids.pop(event.comm_id, None)
        else:
            owner = self._ids.get(event.comm_id)
            connection = agent.connection(event.comm_id)
            if connection is not None:
                self.hold_qpn(connection)
        if owner is not None:
            owner.connection_event(event)

    def close(self) -> None:
        """The provider lets go of everything."""
        self._agent = None
        self._ids.clear()
        self._listeners.clear()
        self._timer = None
