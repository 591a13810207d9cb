"""The seam between an id and the connection protocol of its wire.

A :class:`Connector` takes parameters and private data, and reports to its :class:`ConnectorUser`, the id.
:class:`rdmacm.soft.ids.ib_cm.IbCmConnector` uses the messages of the InfiniBand connection manager (REQ, REP, RTU, REJ,
DREQ, SIDR), which RoCE and InfiniBand share. iWARP would use MPA requests and replies.

Every method of both is called with the runtime's lock held. A connector does not change the id's state, and no queue
pair: it fills in the attributes that a queue pair needs.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from rdmacm.provider import AlternatePathBackend
from rdmacm.provider.connparam import ConnParam, Ece, UdParam
from rdmacm.verbs.attr import QPAttr
from rdmacm.verbs.enums import AccessFlag


class ConnectorUser(Protocol):
    """The id, as its connector reports to it. ``text`` says why, for the event."""

    def replied(self, param: ConnParam) -> None:
        """The passive side has accepted. The id answers with :meth:`Connector.confirm` or :meth:`Connector.refuse`."""

    def established(self) -> None:
        """The active side has confirmed: data may flow both ways."""

    def rejected(self, reason: int, private_data: bytes, text: str) -> None:
        """The peer's application or connection manager has refused; ``reason`` is that of a REJ."""

    def unreachable(self, status: int, text: str, param: UdParam | None = None) -> None:
        """The peer did not answer or cannot be reached (a negative errno), or lacks the service (a SIDR status).

        ``param`` has the private data of a SIDR_REP.
        """

    def datagram_resolved(self, param: UdParam) -> None:
        """The peer has answered with queue pair number, Q_Key and address vector of its datagram service."""

    def disconnected(self, status: int, text: str) -> None:
        """The connection is over; ``status`` is 0, or -ETIMEDOUT when the peer did not confirm that."""

    def failed(self, was_established: bool, text: str) -> None:
        """A fault of this package has ended the connection, which has no connector's record any more."""

    def timewait_over(self) -> None:
        """The queue pair number may be used again."""


class Connector(Protocol):
    """Connects one id. A call that the state of the connection does not allow raises CmStateError."""

    #: The peer's options for enhanced connection establishment (ECE); ``Ece(0)`` if it has sent none.
    peer_ece: Ece

    @property
    def connection(self) -> object | None:
        """The connection, established or not; None if there is none."""

    @property
    def is_established(self) -> bool:
        """Whether there is a connection, and both sides know."""

    @property
    def is_put_off(self) -> bool:
        """Whether the peer has confirmed that it has the request, before its application has answered."""

    # -- passive side ---------------------------------------------------------------------------------

    def listen(self, backlog: int) -> None:
        """Accept requests for the id's address and port, until :meth:`close`.

        At most ``backlog`` requests wait for the application; further ones are dropped, without an answer.
        """

    def allow_requests(self, count: int) -> None:
        """Post at most ``count`` further requests, those of earlier calls included; the others stay in the backlog."""

    def prepare_accept(self, param: ConnParam) -> None:
        """Check the parameters of the reply; EINVAL when the peer has given up or the private data do not fit."""

    def accept(self, param: ConnParam, qp_num: int, ece: Ece) -> None:
        """Accept the request; :meth:`prepare_accept` comes first."""

    def accept_datagram(self, param: ConnParam, qp_num: int, qkey: int) -> None:
        """Answer a request for a datagram service; :meth:`prepare_accept` comes first."""

    def reject(self, private_data: bytes, reason: int) -> None:
        """Refuse the request on behalf of the application."""

    # -- active side ----------------------------------------------------------------------------------

    def connect(self, param: ConnParam, qp_num: int, ece: Ece) -> None:
        """Check and send the request. EINVAL when the private data do not fit."""

    def confirm(self) -> None:
        """Confirm the reply: the connection is established."""

    def refuse(self) -> None:
        """Refuse request or reply, because the queue pair could not be made ready."""

    # -- connected ------------------------------------------------------------------------------------

    def notify_established(self) -> None:
        """The application has received data before the confirmation; EISCONN when the connection is established."""

    def notify_migrated(self) -> None:
        """The queue pair uses the alternate path now; CmStateError where there is none."""

    def alternate_path(self) -> AlternatePathBackend:
        """The alternate path of the connection, whose wire has such paths."""

    def data_arrived(self) -> None:
        """The queue pair has received data before the confirmation, which may be lost."""

    def disconnect(self) -> bool:
        """End the connection. Returns whether :meth:`ConnectorUser.disconnected` will follow."""

    def close(self) -> None:
        """Stop listening and end the connection: the id is being destroyed."""

    # -- queue pair attributes ------------------------------------------------------------------------

    def connected_attributes(self, attr: QPAttr) -> Hashable:
        """Fill in what a queue pair needs to get to RTR and RTS, but for the address vector, which is the link's.

        Returns the path of the connection. CmStateError before the peer has sent its half.
        """

    def access(self) -> AccessFlag:
        """What the peer may do with local memory, once there is a connection."""
