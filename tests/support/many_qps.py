"""A process with more queue pairs than a slot has numbers: ``python many_qps.py COUNT``.

It connects to itself until queue pairs in two slots have exchanged a message, closes everything, and does it again. The
output is a JSON list: for each time, the slots and how many of the connected queue pairs were in them, and the seconds
that creating the others took.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import rdmacm
from rdmacm.provider import get_provider
from rdmacm.soft.provider import SoftProvider
from rdmacm.verbs import CQ, PD, QP, QPInitAttr
from support.clock import Stopwatch

PATIENCE = 30.0


def run(count: int) -> dict[str, object]:
    provider = get_provider()
    assert isinstance(provider, SoftProvider)
    watch = Stopwatch()
    pool = ThreadPoolExecutor(1)
    with rdmacm.listen(("127.0.0.1", 0)) as listener, rdmacm.open_device("soft_lo") as context, PD(context) as pd:
        cq = CQ(context, 1)
        idle = [QP(pd, QPInitAttr(scq=cq, rcq=cq)) for _ in range(count)]
        created = watch.seconds
        used: Counter[int] = Counter()
        connections = []
        while len(used) < 2:
            accepted = pool.submit(listener.accept, PATIENCE)
            ours = rdmacm.connect(("127.0.0.1", listener.port), timeout=PATIENCE)
            theirs = accepted.result()
            connections += [ours, theirs]
            for one, other in ((ours, theirs), (theirs, ours)):
                one.send(b"message", timeout=PATIENCE)
                assert other.recv(PATIENCE) == b"message"
                qp = one._state.cmid.qp
                assert qp is not None
                used[qp.qp_num >> 12] += 1
        slots = list(provider.host.mux.wire.slots)
        for connection in connections:
            connection.close()
        for qp in idle:
            qp.close()
        cq.close()
    return {"slots": slots, "used": used, "seconds": created}


if __name__ == "__main__":
    print(json.dumps([run(int(sys.argv[1])) for _ in range(2)]))
