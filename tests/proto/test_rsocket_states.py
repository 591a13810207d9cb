"""Every cell of the table of a stream's states."""

from __future__ import annotations

import itertools

from rdmacm.proto.rsocket.messages import Control
from rdmacm.proto.rsocket.states import CONNECTED, RECEIVING, SENDING, TRANSITIONS, State, Trigger
from support.rows import for_each

_ENDED = (State.CLOSED, State.FAILED)
CELLS = list(itertools.product(State, Trigger))


@for_each("state, trigger", CELLS)
def test_each_cell(state: State, trigger: Trigger) -> None:
    """What a half of the stream becomes follows from what is known of both halves."""
    after, message = TRANSITIONS.get((state, trigger), (state, None))
    if state in _ENDED:
        assert (after, message) == (state, None)
        return
    if trigger is Trigger.LOST:
        assert (after, message) == (State.FAILED, None)
        return
    reads, writes = state in RECEIVING, state in SENDING
    if trigger is Trigger.PEER_DISCONNECT or (trigger is Trigger.DISCONNECT_DONE and state is State.CLOSING):
        assert (after, message) == (State.CLOSED, None)
        return
    if trigger in (Trigger.SHUT_READING, Trigger.SHUT_BOTH, Trigger.PEER_SHUTDOWN):
        reads = False
    if trigger in (Trigger.SHUT_WRITING, Trigger.SHUT_BOTH):
        writes = False
    assert (after in RECEIVING, after in SENDING) == (reads, writes)
    closes_the_last = after not in RECEIVING and after not in SENDING
    if after is state:
        assert message is None
    elif trigger is Trigger.PEER_SHUTDOWN:
        # The end of the last half needs no message: both ends know.
        assert (message, after is State.CLOSED) == (None, closes_the_last)
    elif closes_the_last:
        assert (after, message) == (State.CLOSING, Control.DISCONNECT)
    else:
        assert message is (Control.SHUTDOWN if trigger is Trigger.SHUT_WRITING else None)


def test_messages_go_out_in_the_connected_states_only() -> None:
    assert set(State) - set(_ENDED) == set(CONNECTED)
    assert {*SENDING, *RECEIVING} < set(CONNECTED)
