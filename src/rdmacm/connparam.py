"""What connect and accept are given and what connection events carry: ``struct rdma_conn_param`` and its kin."""

from __future__ import annotations

from dataclasses import dataclass

from rdmacm.verbs.attr import AHAttr

__all__ = ["MAXIMUM", "ConnParam", "Ece", "UdParam"]

#: ``RDMA_MAX_RESP_RES`` and ``RDMA_MAX_INIT_DEPTH``: as many as the device (accepting: and the peer) can have.
MAXIMUM = 0xFF


@dataclass(frozen=True, slots=True)
class ConnParam:
    """``struct rdma_conn_param``, rdma_connect(3) and rdma_accept(3).

    ``responder_resources``: READs and atomics of the peer served at a time; ``initiator_depth``: READs and atomics of
    our own under way at a time; both 0..255, 255 for as many as can be. ``retry_count`` (connect only) and
    ``rnr_retry_count``: 0..7, above that means 7; seven RNR retries mean for ever. ``qp_num`` and ``srq`` count only
    where the id has no QP of its own; ``qkey`` is for the accepting side of datagram ids. In an event,
    ``private_data`` is the message's whole field, padded with zeros.
    """

    private_data: bytes = b""
    responder_resources: int = MAXIMUM
    initiator_depth: int = MAXIMUM
    flow_control: int = 0
    retry_count: int = 7
    rnr_retry_count: int = 7
    srq: int = 0
    qp_num: int = 0
    qkey: int = 0


@dataclass(frozen=True, slots=True)
class UdParam:
    """``struct rdma_ud_param``: what an event about a datagram id carries."""

    private_data: bytes
    ah_attr: AHAttr
    qp_num: int
    qkey: int


@dataclass(frozen=True, slots=True)
class Ece:
    """``struct ibv_ece``: enhanced connection establishment, a vendor (24 bits go along) and its options (32 bits)."""

    vendor_id: int
    options: int = 0
