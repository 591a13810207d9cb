"""Why a message is not acknowledged: the peer is gone, or long packets do not reach it.

While a long message waits for its acknowledgement, the peer is asked with short packets. If it answers those, a link on
the way has a smaller MTU than the path, and drops what is longer without a word. The device tries for some seconds
until it gives up. What is likely by then is told before, as a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from rdmacm.cmid import CmEvent, CmId, EventChannel
from rdmacm.constants import CmEventType, PortSpace
from rdmacm.diagnosis.holes import hole_error
from rdmacm.endpoint.dispatcher import Dispatcher, Observable, Routine, Wait
from rdmacm.errors import RdmaError
from rdmacm.proto.constants import BTH_LENGTH, ICRC_LENGTH
from rdmacm.provider.connparam import ConnParam
from rdmacm.verbs.enums import QPType
from rdmacm.verbs.qp import QP

#: Seconds from one question to the next. The device gives up after 4 s and more.
ASK_SECONDS = 0.5
#: Questions to the queue pair for one to the connection manager, if the device cannot ask the former.
MANAGER_INTERVAL = 4
#: Bytes of a message that every link carries: the smallest path MTU.
SHORT = 256
#: How long the peer's connection manager may take to answer, in seconds.
_ANSWER_SECONDS = 1.0
#: A port of the datagram services that nobody has, and a queue pair.
_NOBODY, _NO_QPN = 1, 0xFFFFFE
#: How often a message was sent again, while the peer has answered, until it is no accident that it is not acknowledged.
_NO_ACCIDENT = 2
#: After so many questions without an answer the peer no longer answers. A count, not a time: a program that is busy for
#: seconds asks nothing meanwhile. The retries take the time of eight questions, and a peer may end while they go on.
_UNANSWERED = 4
#: The same for the connection manager, which gets one question for four of these.
_MANAGER_UNANSWERED = 2 * MANAGER_INTERVAL
#: Bytes of IP and UDP header, by the length of an address; of the extended header of a question.
_IP_UDP = {4: 28, 16: 48}
_RETH_LENGTH = 16


class PeerWatch:
    """Whether the peer of a queue pair answers short packets."""

    __slots__ = ("_before", "_has_warned", "_qp", "_unanswered")

    def __init__(self, qp: QP) -> None:
        self._qp = qp
        #: What the queue pair had heard when it asked last; None before.
        self._before: Hashable = None
        #: How many questions were asked since the last answer; None before the first answer.
        self._unanswered: int | None = None
        self._has_warned = False

    def ask(self) -> bool:
        """Note whether the last question was answered, and ask again. The provider's lock is held.

        Return :attr:`answers`.
        """
        heard = self._qp.backend.ask_peer()
        if self._before is not None and heard not in (None, self._before):
            self._unanswered = 0
        elif self._unanswered is not None:
            self._unanswered += 1
        self._before = heard or self._before  # None once the queue pair has failed
        return self.answers

    def warn(self, sizes: Callable[[], PacketSizes], payload: int, operation: str, cmid: CmId) -> None:
        """Tell, once, that a message of so many bytes is not acknowledged so far, though the peer answers."""
        if self._has_warned or not self.answers or self._qp.backend.sent_again() < _NO_ACCIDENT:
            return
        known = sizes()
        if known.of(payload) <= known.arrived:
            return
        self._has_warned = True
        import logging

        logging.getLogger("rdmacm").warning(
            "%s %s: packets of up to %d bytes arrive, and one of %d does not so far: likely a link on the way has a "
            "smaller MTU (rdmacm doctor G8)",
            *(operation, cmid.peer_addr_text, known.arrived, known.of(payload)),
        )

    def answered(self) -> None:
        """Note an answer that came in another way."""
        self._unanswered = 0

    @property
    def can_ask(self) -> bool:
        """Whether the device can ask the peer's queue pair."""
        return self._before is not None

    @property
    def answers(self) -> bool:
        """Whether the peer has answered lately."""
        most = _UNANSWERED if self.can_ask else _MANAGER_UNANSWERED
        return self._unanswered is not None and self._unanswered < most


class PacketSizes:
    """The lengths of the packets of a connection, as IP counts them. ``sent``: of its longest message that arrived."""

    __slots__ = ("_headers", "_path_mtu", "arrived")

    def __init__(self, cmid: CmId, sent: int = 0) -> None:
        route = cmid.route
        self._headers = _IP_UDP[len(route.sgid.ip)] + BTH_LENGTH + ICRC_LENGTH
        self._path_mtu = next((path.mtu_bytes for path in route.path_rec), 0)
        #: The longest that is known to have arrived, provided that the peer answers.
        self.arrived: int = max(self._headers + _RETH_LENGTH, self.of(sent))

    def of(self, payload: int) -> int:
        """The length of the longest packet of a message."""
        return self._headers + min(payload, self._path_mtu)

    def error(self, payload: int, operation: str, cmid: CmId) -> RdmaError:
        """The error of a message that was not acknowledged, though the peer answers."""
        route = cmid.explain().route
        return hole_error(self.arrived, self.of(payload), operation, cmid.peer_addr_text, route)


class _Question(Observable):
    """A request for a datagram service that nobody has, which the peer's connection manager answers with a refusal."""

    def __init__(self) -> None:
        super().__init__()
        #: Whether it was answered; None until that is known.
        self.answered: bool | None = None

    def handle(self, event: CmEvent) -> None:
        """Process an event of the id whose context this is."""
        try:
            if event.type is CmEventType.ADDR_RESOLVED:
                event.id.resolve_route()
            elif event.type is CmEventType.ROUTE_RESOLVED:
                event.id.connect(ConnParam(qp_num=_NO_QPN))
            else:
                self._end(event.type is CmEventType.ESTABLISHED or event.status > 0)
        except RdmaError:
            self._end(False)

    def give_up(self) -> None:
        """The answer is not needed any more."""
        if self.answered is None:
            self._end(False)

    def _end(self, answered: bool) -> None:
        self.answered = answered
        self.changed()


def manager_answers(peer: CmId) -> bool:
    """As :func:`ask_manager`, in a thread that may wait."""
    source, destination = peer.local_addr, peer.peer_addr
    if not isinstance(source, tuple) or not isinstance(destination, tuple):
        return False
    question = _Question()
    try:
        with EventChannel(peer.channel.provider) as channel, CmId(channel, PortSpace.UDP, qp_type=QPType.UD) as cmid:
            cmid.resolve_addr((destination[0], _NOBODY, *destination[2:]), (source[0], 0, *source[2:]))
            while question.answered is None:
                with channel.get_event(_ANSWER_SECONDS) as event:
                    question.handle(event)
    except RdmaError:
        return False
    return question.answered


def ask_manager(dispatcher: Dispatcher, peer: CmId, watch: PeerWatch, until: Observable) -> Routine[None]:
    """Ask the connection manager of a peer whether it is there, for a device that cannot ask the queue pair.

    Not after the connection has ended: then the peer's program may end, too. A change of ``until`` ends the wait.
    """
    source, destination = peer.local_addr, peer.peer_addr
    if not isinstance(source, tuple) or not isinstance(destination, tuple):
        return
    question = _Question()
    try:
        cmid = CmId(dispatcher.channel, PortSpace.UDP, qp_type=QPType.UD)
    except RdmaError:
        return
    cmid.context = question
    until.wakers.append(question.give_up)
    try:
        cmid.resolve_addr((destination[0], _NOBODY, *destination[2:]), (source[0], 0, *source[2:]))
        yield Wait(question, lambda: question.answered is not None, dispatcher.clock() + _ANSWER_SECONDS)
    except RdmaError:
        return
    finally:
        until.wakers.remove(question.give_up)
        cmid.context = None
        cmid.destroy()
    if question.answered:
        watch.answered()
