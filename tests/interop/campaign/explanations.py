"""Failures of draws that are the peer's; docs/interop.md describes each, under the name given here.

Those of librdmacm are told by what its program prints. Those of rdma_rxe are told by the draw (its kind, and a link
that is impaired) and by how a client failed; they can hide a fault of ours, so the recording of the block has to be
read before the cause is sure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from interop.campaign.draws import Draw

__all__ = ["explanation"]


class Explanation(NamedTuple):
    name: str
    #: Whether it explains a failure: of the draw, the outcome, and its details.
    explains: Callable[[Draw, str, str], bool]


def _refused_rping(draw: Draw, outcome: str, details: str) -> bool:
    return outcome.startswith("C rping client hangs") and "connect error" in details


def _no_queue_pair(draw: Draw, outcome: str, details: str) -> bool:
    return (
        draw.tool == "cmtime"
        and not draw.server.is_ours
        and "client fails" in outcome
        and "failure creating qp: No such file or directory" in details
    )


def _deaf_responder(draw: Draw, outcome: str, details: str) -> bool:
    return (
        draw.variant == ("uc", "write")
        and draw.server.device == "rxe"
        and bool(draw.link.netem)
        and "client fails" in outcome
        and "the peer has ended the connection" in details
    )


def _acknowledged_read(draw: Draw, outcome: str, details: str) -> bool:
    return bool(draw.link.netem) and draw.tool == "verbs" and "AssertionError: read: " in details


def _last_acknowledgement(draw: Draw, outcome: str, details: str) -> bool:
    return (
        draw.tool == "ucmatose"
        and draw.server.device == "rxe"
        and bool(draw.link.netem)
        and "client fails" in outcome
        and "receiving data transfers" in details
        and "the peer has ended the connection" in details
    )


def _for_ever(draw: Draw, outcome: str, details: str) -> bool:
    return (
        bool(draw.link.netem)
        and draw.tool == "verbs"
        and not draw.server.is_ours
        and "client fails" in outcome
        and "TimeoutError: no completion of a send: []" in details
    )


def _early_end(draw: Draw, outcome: str, details: str) -> bool:
    return (
        bool(draw.link.netem)
        and draw.client.device.startswith("siw")
        and "client fails" in outcome
        and "the peer has closed the connection before its answer arrived" in details
    )


EXPLANATIONS = (
    Explanation("librdmacm's rping does not end when it is refused", _refused_rping),
    Explanation("librdmacm's cmtime rejects as it cannot create a queue pair", _no_queue_pair),
    Explanation("rdma_rxe drops everything after an incomplete WRITE of UC", _deaf_responder),
    Explanation("rdma_rxe completes a READ by an acknowledgement", _acknowledged_read),
    Explanation("rdma_rxe repeats no acknowledgement after ucmatose has disconnected", _last_acknowledgement),
    Explanation("rdma_rxe repeats a request for ever", _for_ever),
    Explanation("siw does not read a reply that the end of the connection has overtaken", _early_end),
)


def explanation(draw: Draw, outcome: str, details: str) -> str:
    """The name of the explanation of a failure, or nothing."""
    for known in EXPLANATIONS:
        if known.explains(draw, outcome, details):
            return known.name
    return ""
