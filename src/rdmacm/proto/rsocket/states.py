"""The states of a stream, and what changes them.

A connection has two halves. Each end closes its sending half by a message, and either end may close both. There is no
message for the end of reading: what arrives afterwards is kept until the buffer is full, as with TCP.

- *OPEN*: both halves are open.
- *SEND_ONLY*: nothing more is read, because the peer has closed its sending half, or this end its reading half.
- *RECEIVE_ONLY*: this end has closed its sending half.
- *CLOSING*: this end has sent DISCONNECT, which has not completed.
- *CLOSED*: both ends know that the stream is over. Bytes that have arrived can still be read.
- *FAILED*: the connection has ended in another way, and bytes may be missing.

SHUTDOWN of the peer closes the last open half of a stream in RECEIVE_ONLY, and neither end says more. Closing the
sending half in SEND_ONLY is the end of the stream, so it sends DISCONNECT. In CLOSING, only the end of the connection
counts. Nothing changes CLOSED and FAILED.
"""

from __future__ import annotations

from enum import Enum

from rdmacm.proto.rsocket.messages import Control


class State(Enum):
    """The state of a stream; the module describes them."""

    OPEN = "open"
    SEND_ONLY = "send only"
    RECEIVE_ONLY = "receive only"
    CLOSING = "closing"
    CLOSED = "closed"
    FAILED = "failed"


class Trigger(Enum):
    """What changes the state of a stream."""

    #: shutdown() of this end: of reading, of writing, of both.
    SHUT_READING = "shut reading"
    SHUT_WRITING = "shut writing"
    SHUT_BOTH = "shut both"
    #: Messages of the peer.
    PEER_SHUTDOWN = "SHUTDOWN arrives"
    PEER_DISCONNECT = "DISCONNECT arrives"
    #: This end's DISCONNECT has arrived at the peer.
    DISCONNECT_DONE = "DISCONNECT completes"
    #: The connection is gone, or one of the two ends has broken the protocol.
    LOST = "connection lost"


_S, _T = State, Trigger
_SHUTDOWN, _DISCONNECT = Control.SHUTDOWN, Control.DISCONNECT

#: State and trigger → next state, and the message to send. What is missing changes nothing.
TRANSITIONS: dict[tuple[State, Trigger], tuple[State, Control | None]] = {
    (_S.OPEN, _T.SHUT_READING): (_S.SEND_ONLY, None),
    (_S.OPEN, _T.SHUT_WRITING): (_S.RECEIVE_ONLY, _SHUTDOWN),
    (_S.OPEN, _T.SHUT_BOTH): (_S.CLOSING, _DISCONNECT),
    (_S.OPEN, _T.PEER_SHUTDOWN): (_S.SEND_ONLY, None),
    (_S.OPEN, _T.PEER_DISCONNECT): (_S.CLOSED, None),
    (_S.OPEN, _T.LOST): (_S.FAILED, None),
    (_S.SEND_ONLY, _T.SHUT_WRITING): (_S.CLOSING, _DISCONNECT),
    (_S.SEND_ONLY, _T.SHUT_BOTH): (_S.CLOSING, _DISCONNECT),
    (_S.SEND_ONLY, _T.PEER_DISCONNECT): (_S.CLOSED, None),
    (_S.SEND_ONLY, _T.LOST): (_S.FAILED, None),
    (_S.RECEIVE_ONLY, _T.SHUT_READING): (_S.CLOSING, _DISCONNECT),
    (_S.RECEIVE_ONLY, _T.SHUT_BOTH): (_S.CLOSING, _DISCONNECT),
    (_S.RECEIVE_ONLY, _T.PEER_SHUTDOWN): (_S.CLOSED, None),
    (_S.RECEIVE_ONLY, _T.PEER_DISCONNECT): (_S.CLOSED, None),
    (_S.RECEIVE_ONLY, _T.LOST): (_S.FAILED, None),
    (_S.CLOSING, _T.PEER_DISCONNECT): (_S.CLOSED, None),
    (_S.CLOSING, _T.DISCONNECT_DONE): (_S.CLOSED, None),
    (_S.CLOSING, _T.LOST): (_S.FAILED, None),
}

# Tuples, as the hash of a member of an Enum is computed in Python.
#: The states in which the application may send.
SENDING = (State.OPEN, State.SEND_ONLY)
#: The states in which more bytes may arrive for the application.
RECEIVING = (State.OPEN, State.RECEIVE_ONLY)
#: The states in which messages go to the peer.
CONNECTED = (State.OPEN, State.SEND_ONLY, State.RECEIVE_ONLY, State.CLOSING)
