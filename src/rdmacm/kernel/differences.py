"""How does the kernel's provider differ from the software device, for each type of queue pair?

:data:`RULES` is what this room does by the type of an id or queue pair: the code that branches on a type reads it.
:data:`DIFFERENCES` is what a program can see of that, call by call; what is not there is the same on both.
``docs/parity.md`` has both as tables, which ``dev.py tables`` makes. What a device has at all is in
:mod:`rdmacm.capabilities`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from rdmacm.proto.cm.messages import REJ, REP, REQ, SIDR_REP, SIDR_REQ, Message
from rdmacm.verbs.enums import QPState, QPType


class To(Enum):
    """What tells a send request its destination."""

    CONNECTION = "the connection"
    HANDLE = "its address handle"
    QUEUE = "the connection, and its shared receive queue there"
    NOTHING = "nothing: it does not send"


@dataclass(frozen=True, slots=True)
class Rules:
    """What the kernel's provider does for ids and queue pairs of one type.

    - ``is_connected``: the id has a connection. Then attaching a queue pair takes it to INIT; accept and the peer's
      reply take it to RTS, with the attributes of rdma_init_qp_attr(3), and INIT is set again before, as the access
      flags depend on the request; the end of the connection takes it to ERR, and DISCONNECTED follows. Without one,
      attaching takes it to RTS, and nothing takes it from there.
    - ``to``: what tells a send request its destination.
    - ``after_failed_send``: where a send with an error leaves it; a receive with an error is always ERR.
    - ``in_xrc_domain``: it is made in an XRC domain, by ibv_create_qp_ex(3), without queues.
    - ``messages``: the message of a call on InfiniBand and RoCE, which limits its private data.
    """

    is_connected: bool = True
    to: To = To.CONNECTION
    after_failed_send: QPState = QPState.ERR
    in_xrc_domain: bool = False
    messages: Mapping[str, type[Message]] = field(
        default_factory=lambda: {"connect": REQ, "accept": REP, "reject": REJ}
    )


_RC = Rules()
RULES: Mapping[int, Rules] = {
    QPType.RC: _RC,
    QPType.UC: replace(_RC, after_failed_send=QPState.SQE),
    QPType.UD: Rules(
        is_connected=False,
        to=To.HANDLE,
        after_failed_send=QPState.SQE,
        messages={"connect": SIDR_REQ, "accept": SIDR_REP, "reject": SIDR_REP},
    ),
    QPType.XRC_SEND: replace(_RC, to=To.QUEUE),
    QPType.XRC_RECV: replace(_RC, to=To.NOTHING, in_xrc_domain=True),
}


def rules_of(qp_type: int) -> Rules:
    """The rules of an id; one of a type that has no queue pairs here connects as RC does."""
    return RULES.get(qp_type, _RC)


class Difference(NamedTuple):
    """What a call does on the software device, and what through the kernel."""

    types: tuple[QPType, ...]
    call: str
    soft: str
    kernel: str


_CONNECTED = (QPType.RC, QPType.UC, QPType.XRC_SEND, QPType.XRC_RECV)
_RELIABLE = (QPType.RC, QPType.XRC_SEND)
_SENDING = (QPType.RC, QPType.UC, QPType.UD, QPType.XRC_SEND)

DIFFERENCES = (
    Difference(
        _CONNECTED,
        "`accept`, `connect`: RTR and RTS of the queue pair",
        "set by the device, without a call",
        "ibv_modify_qp(3) with the attributes of rdma_init_qp_attr(3); on iWARP the connection sets them",
    ),
    Difference(
        _CONNECTED,
        "the peer's end of the connection",
        "is answered by `disconnect`",
        "is answered when DISCONNECTED is fetched; on iWARP the queue pair then is in ERR",
    ),
    Difference(_RELIABLE, "a retry count of 7", "7 retries", "6 retries on rdma_rxe, which takes 7 for no limit"),
    Difference(
        (QPType.RC,),
        "FLUSH, ATOMIC WRITE",
        "on every queue pair",
        "on a `QPEx` of a device that has them, by ibv_wr_post(3); the 8 bytes of ATOMIC WRITE inline",
    ),
    Difference(
        (QPType.UD,),
        "`create_qp` on an id: RTS of the queue pair",
        "set by the device, without a call",
        "three calls of ibv_modify_qp(3): INIT with the attributes of rdma_init_qp_attr(3), RTR, RTS with PSN 0",
    ),
    Difference((QPType.UD,), "`disconnect`", "the queue pair goes to ERR", "the queue pair stays in RTS"),
    Difference(
        (QPType.UD,),
        "`AH`",
        "never refused for its destination",
        "ibv_create_ah(3): the kernel looks for the neighbour; a device of iWARP refuses it",
    ),
    Difference(
        (QPType.UD,),
        "`join_multicast`",
        "every group of the family of the id's address",
        "on RoCEv2 groups of IPv4 only; none on iWARP",
    ),
    Difference(
        _SENDING,
        "inline data",
        "are sent from a copy",
        "the same; what is more than the device takes is copied to registered memory of the queue pair",
    ),
    Difference(
        (QPType.XRC_SEND, QPType.XRC_RECV),
        "the XRC domain of a file",
        "is shared by the contexts of a process",
        "ibv_open_xrcd(3): is shared by processes, on a device that has XRC, as rdma_rxe and siw have not",
    ),
    Difference(
        (QPType.XRC_RECV,),
        "`OpenedQP`",
        "opens the targets of this process",
        "ibv_open_qp(3): opens those of all processes",
    ),
)
