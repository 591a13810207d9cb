"""What the responder of an unreliable connection does with a packet (InfiniBand Architecture 9.8.2.2).

There is no acknowledgement, so the responder can only accept or drop. It is in one of three states: between messages,
in a SEND, or in an RDMA WRITE. A packet is the start of a message (first or only), or the rest of one (middle or last).

- A start begins a message, whatever its PSN: packets before it may have been lost. If a message is in progress, the
  rest of that one was lost, so it is abandoned first.
- The rest continues the message in progress, if it is of the same operation and has the next PSN. Otherwise packets
  between them were lost: the message is abandoned, and this packet is dropped.
- The rest of a message that has not begun, or was abandoned, is dropped.

When a SEND is abandoned, its receive stays with the queue pair, and the next message that needs a receive is written
to it from its beginning. What an abandoned WRITE has written stays written.

rdma_rxe behaves alike, with one difference: after a message was abandoned in its middle, rdma_rxe drops the next
message as well.
"""

from __future__ import annotations

from enum import IntEnum


class UcState(IntEnum):
    """Which message is in progress."""

    BETWEEN = 0
    IN_SEND = 1
    IN_WRITE = 2


class Arrival(IntEnum):
    """What a packet is."""

    SEND_START = 0
    WRITE_START = 1
    #: A middle or last packet with the next PSN.
    SEND_REST = 2
    WRITE_REST = 3
    #: A middle or last packet with another PSN.
    GAP = 4


class Step(IntEnum):
    """What the responder does."""

    #: Begin a message with this packet.
    BEGIN = 0
    #: The packet is the next one of the message in progress.
    CONTINUE = 1
    #: Abandon the message in progress, and begin another one with this packet.
    RESTART = 2
    #: Abandon the message in progress, and drop the packet.
    ABANDON = 3
    #: Drop the packet.
    DROP = 4


_A, _S = Arrival, Step

#: The step for each state and packet.
TRANSITIONS: dict[UcState, dict[Arrival, Step]] = {
    UcState.BETWEEN: {
        _A.SEND_START: _S.BEGIN,
        _A.WRITE_START: _S.BEGIN,
        _A.SEND_REST: _S.DROP,
        _A.WRITE_REST: _S.DROP,
        _A.GAP: _S.DROP,
    },
    UcState.IN_SEND: {
        _A.SEND_START: _S.RESTART,
        _A.WRITE_START: _S.RESTART,
        _A.SEND_REST: _S.CONTINUE,
        _A.WRITE_REST: _S.ABANDON,
        _A.GAP: _S.ABANDON,
    },
    UcState.IN_WRITE: {
        _A.SEND_START: _S.RESTART,
        _A.WRITE_START: _S.RESTART,
        _A.SEND_REST: _S.ABANDON,
        _A.WRITE_REST: _S.CONTINUE,
        _A.GAP: _S.ABANDON,
    },
}
