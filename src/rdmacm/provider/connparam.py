"""The parameters of connect, accept and connection events: ``struct rdma_conn_param`` and related structures."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Self

from rdmacm.errors import cm_error
from rdmacm.verbs.attr import AHAttr

#: ``RDMA_MAX_RESP_RES`` and ``RDMA_MAX_INIT_DEPTH``: as many as the device supports (on accept: and the peer).
MAXIMUM = 0xFF
#: Code of 0.64 ms, for a receiver that is not ready (InfiniBand Architecture 9.7.5.2.8). rdma_cm's 0 means 655 ms.
MIN_RNR_TIMER = 12


@dataclass(frozen=True, slots=True)
class ConnParam:
    """``struct rdma_conn_param``, rdma_connect(3) and rdma_accept(3).

    ``responder_resources``: outstanding READs and atomics accepted from the peer; ``initiator_depth``: outstanding
    READs and atomics sent to the peer; both 0..255, where 255 means as many as supported. ``retry_count`` (for connect
    only) and ``rnr_retry_count``: 0..7, and greater values mean 7; 7 RNR retries mean no limit. ``qp_num`` and ``srq``
    are used only if the id has no QP. ``flow_control`` is sent to the peer, and has no effect on the queue pair.
    ``qkey`` is for accepting on a datagram id. In an event, ``private_data`` is the whole field of the message, padded
    with zeros.
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

    @property
    def private_data_len(self) -> int:
        """The length of :attr:`private_data` in bytes."""
        return len(self.private_data)

    @property
    def conn(self) -> Self:
        """This object: C has it in an event as ``param.conn``."""
        return self

    @property
    def ud(self) -> UdParam:
        """EINVAL: C has parameters of datagrams in the same union."""
        raise cm_error(errno.EINVAL, "the parameters are those of a connection", "param.ud", hint="param.conn")


@dataclass(frozen=True, slots=True)
class UdParam:
    """``struct rdma_ud_param``: the parameters in an event of a datagram id.

    ``private_data`` is the whole field of the message, padded with zeros. In ESTABLISHED, the peer is reached by
    ``ah_attr``, an address vector, its queue pair number ``qp_num``, 24 bits, and its Q_Key ``qkey``, 32 bits. In
    CONNECT_REQUEST and UNREACHABLE these are empty.
    """

    private_data: bytes
    ah_attr: AHAttr
    qp_num: int
    qkey: int

    @property
    def private_data_len(self) -> int:
        """The length of :attr:`private_data` in bytes."""
        return len(self.private_data)

    @property
    def ud(self) -> Self:
        """This object: C has it in an event as ``param.ud``."""
        return self

    @property
    def conn(self) -> ConnParam:
        """EINVAL: C has parameters of connections in the same union."""
        raise cm_error(errno.EINVAL, "the parameters are those of a datagram id", "param.conn", hint="param.ud")


@dataclass(frozen=True, slots=True)
class Ece:
    """``struct ibv_ece``, enhanced connection establishment, rdma_set_local_ece(3).

    ``vendor_id`` is an IEEE OUI, 24 bits; ``options`` are the vendor's, 32 bits.
    """

    vendor_id: int
    options: int = 0
