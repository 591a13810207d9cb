"""Our transport sends and receives MADs through Linux's ib_umad, which serves rdma_rxe too."""

from __future__ import annotations

import json

from interop.scenario import Guest


def test_our_mads_pass_linuxs_ib_umad(guest: Guest) -> None:
    script = "python3 -W error /project/tests/interop/umad_rxe.py rxe0 $RXE6"
    done = guest.run(script, timeout=180, record=False)
    assert done.status == 0, done.output
    seen = json.loads(done.output.splitlines()[-1])
    assert "the port is Ethernet" in seen.pop("refused")
    assert seen == {
        "state": "ACTIVE",
        "from": ["fd00:0:0:1::1", 1],
        "answer": True,
        # The kernel refuses a transaction id that is still outstanding.
        "sent twice": [5, 5],
        # A table of many datagrams, too long for the first buffer.
        "table": True,
        "unanswered": [0, {"unanswered": 1}],
    }
