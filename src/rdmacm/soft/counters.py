"""The counters of the software devices under the names of the kernel's, for ``query_counters``.

Of a device only what is rare is counted: drops and errors. Packets are counted for the process
(:data:`rdmacm.soft.wire.base.TRAFFIC`), work requests are not: ``rdma_sends``, ``rdma_recvs`` and ``ack_deferred`` of
rdma_rxe are not there.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rdmacm.proto.cm.codes import AttributeId
from rdmacm.proto.cm.connection import DropReason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rdmacm.proto.engine import EngineCounters
    from rdmacm.soft.connection_manager import ConnectionManager

#: Reason of :attr:`rdmacm.proto.engine.EngineCounters.dropped` → name of the counter.
_OF_DROPS = {
    "duplicate": "duplicate_request",
    "not ready": "send_rnr_err",
    "sequence": "out_of_sequence",
    "icrc": "rx_icrc_encapsulated",
    "refused": "refused_request",
    "answer": "unexpected_response",
    "no receive": "dropped_no_receive",
    "receive too short": "dropped_short_receive",
    **{reason: f"dropped_{reason}" for reason in ("length", "opcode", "version", "qpn", "state", "pkey", "qkey")},
}
_ERRORS = (
    "out_of_seq_request",
    "rcvd_rnr_err",
    "rcvd_seq_err",
    "implied_nak_seq_err",
    "local_ack_timeout_err",
    "completer_retry_err",
    "retry_exceeded_err",
    "retry_rnr_exceeded_err",
)


def hw_counters(engines: EngineCounters, link_downed: int) -> dict[str, int]:
    """The counters of one device (:meth:`rdmacm.Context.query_counters`)."""
    found = {name: engines.dropped[reason] for reason, name in _OF_DROPS.items()}
    found.update((name, engines.errors[name]) for name in _ERRORS)
    found["link_downed"] = link_downed
    return found


def cm_counters(managers: Iterable[ConnectionManager]) -> dict[str, int]:
    """The counters of connection managers together (:attr:`rdmacm.provider.counters.Counters.cm`)."""
    found = dict.fromkeys(
        (
            *(f"{direction}_{kind.name.lower()}" for direction in ("tx", "rx") for kind in AttributeId),
            "tx_retries",
            *(f"dropped_{reason.name.lower()}" for reason in DropReason),
        ),
        0,
    )
    for manager in managers:
        for kind in AttributeId:
            name, index = kind.name.lower(), kind & 0xFF
            found[f"tx_{name}"] += manager.sent[index]
            found[f"rx_{name}"] += manager.received[index]
        found["tx_retries"] += manager.retries
        for reason, count in manager.dropped.items():
            found[f"dropped_{reason.name.lower()}"] += count
    return found


def udp_counters(wire: Counter[str], dropped: Counter[str]) -> dict[str, int]:
    """The counters of the wire, and of packets for no queue pair: :attr:`rdmacm.provider.counters.Counters.udp`."""
    return {**wire, **{f"rx_{reason}": count for reason, count in dropped.items() if reason != "packet"}}
