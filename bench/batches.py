"""How many requests one library posts, and how many completions it polls, in a second on a kernel's device.

    python3 bench/batches.py rdmacm|pyverbs DEVICE GID_INDEX
    tests/interop/guest 'for library in pyverbs rdmacm; do python3 bench/batches.py $library rxe0 1; done'

Two reliable queue pairs of the device are connected to each other. A round posts 64 receives, posts 64 inline SENDs of
32 bytes, and polls the 64 completions of the receives once all have arrived; each of the three is timed by itself. Ours
takes lists. pyverbs takes chains of receives, and one SEND at a call. The work requests are made once. Prints the rates
as JSON. The second command runs both in the machine of the interop tests.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

#: Requests of a batch, and batches.
BATCH, ROUNDS = 64, 200
SIZE = 32


class Calls(NamedTuple):
    """One library's calls, with all arguments bound."""

    #: Each posts a whole batch.
    post_receives: Callable[[], object]
    post_sends: Callable[[], object]
    #: Each returns how many completions it has found, at most a batch.
    poll_receives: Callable[[], int]
    poll_sends: Callable[[], int]
    #: What has to live as long.
    parts: tuple[object, ...]


def rdmacm_calls(device: str, index: int) -> Calls:
    from rdmacm import open_device
    from rdmacm.verbs import (
        CQ,
        MR,
        PD,
        QP,
        AccessFlag,
        AHAttr,
        GlobalRoute,
        Mtu,
        QPAttr,
        QPCap,
        QPInitAttr,
        RecvWR,
        SendFlag,
        SendWR,
        WCStatus,
        WROpcode,
    )

    context = open_device(device, "kernel")
    pd = PD(context)
    scq, rcq = CQ(context, BATCH), CQ(context, BATCH)
    cap = QPCap(BATCH, BATCH, 1, 1, SIZE)
    qps = [QP(pd, QPInitAttr(scq=scq, rcq=rcq, cap=cap)) for _ in range(2)]
    way = AHAttr(is_global=True, port_num=1, gr=GlobalRoute(context.query_gid(1, index), index, hop_limit=1))
    for one, other in (qps, qps[::-1]):
        one.to_rts(
            QPAttr(
                port_num=1, dest_qp_num=other.qp_num, path_mtu=Mtu.MTU_1024, timeout=14, retry_cnt=7, rnr_retry=7,
                min_rnr_timer=12, max_rd_atomic=1, max_dest_rd_atomic=1, ah_attr=way,
            )
        )  # fmt: skip
    region = MR(pd, bytearray(SIZE), AccessFlag.LOCAL_WRITE)
    flags = SendFlag.SIGNALED | SendFlag.INLINE
    sends = [SendWR(1, WROpcode.SEND, [region.sge()], flags)] * BATCH
    receives = [RecvWR(2, [region.sge()])] * BATCH

    def polled(cq: CQ) -> int:
        found = cq.poll(BATCH)
        assert all(wc.status is WCStatus.SUCCESS for wc in found)
        return len(found)

    return Calls(
        lambda: qps[1].post_recv(receives),
        lambda: qps[0].post_send(sends),
        lambda: polled(rcq),
        lambda: polled(scq),
        (region, *qps),
    )


def pyverbs_calls(device: str, index: int) -> Calls:
    import pyverbs.enums as e
    from pyverbs.addr import AHAttr, GlobalRoute
    from pyverbs.cq import CQ
    from pyverbs.device import Context
    from pyverbs.mr import MR
    from pyverbs.pd import PD
    from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
    from pyverbs.wr import SGE, RecvWR, SendWR

    context = Context(name=device)
    pd = PD(context)
    scq, rcq = CQ(context, BATCH), CQ(context, BATCH)
    cap = QPCap(BATCH, BATCH, 1, 1, SIZE)
    qps = [QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=scq, rcq=rcq, cap=cap)) for _ in range(2)]
    for one, other in (qps, qps[::-1]):
        attr = QPAttr(port_num=1)
        attr.dest_qp_num, attr.path_mtu, attr.timeout = other.qp_num, e.IBV_MTU_1024, 14
        attr.retry_cnt = attr.rnr_retry = 7
        attr.min_rnr_timer, attr.max_rd_atomic, attr.max_dest_rd_atomic = 12, 1, 1
        gid = GlobalRoute(dgid=context.query_gid(1, index), sgid_index=index, hop_limit=1)
        attr.ah_attr = AHAttr(is_global=1, port_num=1, gr=gid)
        one.to_rts(attr)
    region = MR(pd, SIZE, e.IBV_ACCESS_LOCAL_WRITE)
    sge = SGE(region.buf, SIZE, region.lkey)
    send = SendWR(1, num_sge=1, sg=[sge], opcode=e.IBV_WR_SEND, send_flags=e.IBV_SEND_SIGNALED | e.IBV_SEND_INLINE)
    receives: list[Any] = []
    for _ in range(BATCH):
        receives.append(RecvWR(2, num_sge=1, sg=[sge], next_wr=receives[-1] if receives else None))

    def post_sends() -> None:
        for _ in range(BATCH):
            qps[0].post_send(send)

    def polled(cq: Any) -> int:
        count, found = cq.poll(BATCH)
        assert all(wc.status == e.IBV_WC_SUCCESS for wc in found)
        return int(count)

    return Calls(
        lambda: qps[1].post_recv(receives[-1]),
        post_sends,
        lambda: polled(rcq),
        lambda: polled(scq),
        (region, *qps),
    )


def rates(calls: Calls) -> dict[str, float]:
    """Requests posted and completions polled a second."""
    spent = dict.fromkeys(("receives posted", "SENDs posted", "completions polled"), 0.0)
    for _ in range(ROUNDS):
        at = [time.perf_counter()]
        calls.post_receives()
        at.append(time.perf_counter())
        calls.post_sends()
        at.append(time.perf_counter())
        sent = 0
        while sent < BATCH:  # a SEND completes after its receive
            time.sleep(0)
            sent += calls.poll_sends()
        at.append(time.perf_counter())
        received = calls.poll_receives()
        at.append(time.perf_counter())
        assert received == BATCH, received
        for name, first in zip(spent, (0, 1, 3), strict=True):
            spent[name] += at[first + 1] - at[first]
    return {name: BATCH * ROUNDS / seconds for name, seconds in spent.items()}


if __name__ == "__main__":
    library, device, index = sys.argv[1:]
    made = {"rdmacm": rdmacm_calls, "pyverbs": pyverbs_calls}[library](device, int(index))
    print(json.dumps(rates(made)))
