"""Requests that are posted to a queue pair of iWARP whose connection has ended: they complete with WR_FLUSH_ERR.

siw's library writes a request into the queue, and its driver has flushed the queue when the connection ended, and does
not look at it again. So the request would never complete, and a thread that waits for it would wait for ever
(docs/interop.md). A request that is posted at the moment of the end may still meet that.
"""

from __future__ import annotations

from collections.abc import Sequence

from rdmacm.verbs.enums import WC, WCOpcode, WCStatus, WROpcode
from rdmacm.verbs.wr import RecvWR, SendWR

_OPCODES = {
    WROpcode.RDMA_WRITE: WCOpcode.RDMA_WRITE,
    WROpcode.RDMA_WRITE_WITH_IMM: WCOpcode.RDMA_WRITE,
    WROpcode.RDMA_READ: WCOpcode.RDMA_READ,
    WROpcode.LOCAL_INV: WCOpcode.LOCAL_INV,
    WROpcode.BIND_MW: WCOpcode.BIND_MW,
}


def flushed(wrs: Sequence[SendWR] | Sequence[RecvWR], qp_num: int) -> list[WC]:
    """The completions of requests that the device does not take any more."""
    return [
        WC(
            wr.wr_id,
            WCStatus.WR_FLUSH_ERR,
            _OPCODES.get(wr.opcode, WCOpcode.SEND) if isinstance(wr, SendWR) else WCOpcode.RECV,
            qp_num=qp_num,
        )
        for wr in wrs
    ]
