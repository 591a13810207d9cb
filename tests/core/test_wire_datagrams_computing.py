"""Datagrams on the socket layer of the compiled core, whose receiver computes."""

from __future__ import annotations

import sys

import pytest

from core.test_wire_datagrams import Ends
from core.test_wire_groups import Members
from rdmacm.proto.core_choice import compiled
from support.programs import python_program

pytestmark = pytest.mark.skipif(compiled is None, reason="the compiled core is not built (python3 dev.py core)")

#: Receives datagrams while it computes without a pause of the interpreter: as argument 1 says, by receives of its own,
#: a shared receive queue, or from a group.
_COMPUTING = """
import sys
kind, *sys.path[:0] = sys.argv[1:]
from core.test_wire_datagrams import Ends, ROOM, make_end
from core.test_wire_groups import Members
from rdmacm.verbs import RecvWR
if kind == "group":
    ends = Members()
    right = ends.ends[1]
else:
    ends = Ends()
    right = ends.right
    right.receive(1)
if kind == "shared":
    right = make_end(srq=True)
    right.qp.srq.post_recv([RecvWR(n, [right.region.sge(0, ROOM)]) for n in range(2)])
    ends.left.qp.post_send(ends.wr(1, b"join", remote_qpn=right.qp.qp_num))
    right.completions(1)
memory, at = right.memory, 40 + ROOM * (kind == "group")
memory[at] = 0
with right.backend._mux.runtime.lock:  # no other thread is in the midst of something
    sys.setswitchinterval(1000)  # and none gets the interpreter
print(right.qp.qp_num, flush=True)
while not memory[at]:
    pass
sys.setswitchinterval(0.005)
(wc,) = right.completions(1)
print(wc.byte_len, flush=True)
if kind == "shared":
    srq = right.qp.srq
    right.qp.close()
    srq.close()
    right.close()
ends.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "shared", "group"])
def test_datagrams_are_received_while_the_application_computes(kind: str) -> None:
    ends = Members() if kind == "group" else Ends()
    with python_program(_COMPUTING, kind, *sys.path) as server:
        assert server.stdout is not None
        number = int(server.stdout.readline())
        if isinstance(ends, Members):
            ends.send(b"wake up")
        else:
            ends.left.qp.post_send(ends.wr(1, b"wake up", remote_qpn=number))
        assert int(server.stdout.readline()) == 47
        assert server.wait(20) == 0
    ends.close()
