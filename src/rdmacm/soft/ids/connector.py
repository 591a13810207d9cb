"""The seam between an id and how its wire connects: parameters and private data down, events up.

:class:`rdmacm.soft.ids.ib_cm.IbCmConnector` carries these in the messages of the InfiniBand connection manager (REQ,
REP, RTU, REJ, DREQ, SIDR), which RoCE and InfiniBand share. iWARP would carry them in MPA requests and replies.

All of it runs with the runtime's lock held. A connector changes the id's state only through :class:`ConnectorUser`, and
touches no queue pair: it fills in the attributes that one needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from rdmacm.connparam import ConnParam, Ece, UdParam
from rdmacm.verbs.attr import QPAttr
from rdmacm.verbs.enums import AccessFlag

__all__ = ["Connector", "ConnectorUser"]


class ConnectorUser(Protocol):
    """The id, as its connector reports to it."""

    def replied(self, param: ConnParam) -> None:
        """The passive side has accepted; :meth:`Connector.confirm` or :meth:`Connector.refuse` is to follow."""

    def established(self) -> None:
        """The active side has confirmed: data may flow both ways."""

    def rejected(self, reason: int, private_data: bytes, text: str) -> None:
        """The peer, or its connection manager, has refused; ``reason`` as in a REJ."""

    def unreachable(self, status: int, text: str) -> None:
        """The peer did not answer (a negative errno), or has no such service (a SIDR status)."""

    def datagram_resolved(self, param: UdParam) -> None:
        """The peer's datagram service is known: its queue pair number, Q_Key and address."""

    def disconnected(self, status: int, text: str) -> None:
        """The connection is over; -ETIMEDOUT when the peer never confirmed that."""

    def timewait_over(self) -> None:
        """The queue pair number may be used again."""


class Connector(Protocol):
    """Connects one id. CmStateError when the connection is not in a state that allows the call."""

    #: The peer's enhanced connection establishment options.
    peer_ece: Ece

    @property
    def is_open(self) -> bool:
        """Whether there is a connection, or one in the making."""

    # -- passive side ---------------------------------------------------------------------------------

    def listen(self, backlog: int) -> None:
        """Take requests for the id's address and port; more than ``backlog`` unanswered ones are dropped."""

    def unlisten(self) -> None:
        """Undo :meth:`listen`."""

    def delivered(self) -> None:
        """The application has fetched the request of this id: it leaves the backlog."""

    def prepare_accept(self, param: ConnParam) -> None:
        """Check what the request is to be accepted with; EINVAL when the peer has given up or data does not fit."""

    def accept(self, param: ConnParam, qp_num: int, ece: Ece) -> None:
        """Accept the request; :meth:`prepare_accept` comes first."""

    def accept_datagram(self, param: ConnParam, qp_num: int, qkey: int) -> None:
        """Answer a request for a datagram service; :meth:`prepare_accept` comes first."""

    def reject(self, private_data: bytes, reason: int) -> None:
        """Refuse the request on behalf of the application."""

    # -- active side ----------------------------------------------------------------------------------

    def prepare_connect(self, param: ConnParam, qp_num: int, ece: Ece) -> Callable[[], None]:
        """Check and build the request; calling the result sends it. EINVAL for what does not fit."""

    def confirm(self) -> None:
        """Confirm the reply: the connection is established."""

    def refuse(self) -> None:
        """Refuse on our own behalf: the queue pair could not be made ready."""

    # -- connected ------------------------------------------------------------------------------------

    def notify_established(self) -> None:
        """The application has seen data arrive before the confirmation; EISCONN when that has arrived as well."""

    def data_arrived(self) -> None:
        """The queue pair has seen data arrive before the confirmation, which may be lost."""

    def disconnect(self) -> bool:
        """End the connection; whether :meth:`ConnectorUser.disconnected` will follow."""

    def close(self) -> None:
        """The id is destroyed: stop listening, and end the connection."""

    # -- queue pair attributes ------------------------------------------------------------------------

    def connected_attributes(self, attr: QPAttr) -> None:
        """Fill in what takes a queue pair to RTR and to RTS; CmStateError before the peer's half is known."""

    def access(self) -> AccessFlag | None:
        """What the peer may do with our memory; None while there is no connection."""
