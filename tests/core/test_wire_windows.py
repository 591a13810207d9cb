"""Memory windows of a program that computes: the thread of the core binds them, and peers use and invalidate them."""

from __future__ import annotations

import select

import pytest

from core.test_wire import End, connected
from rdmacm.proto.core_choice import compiled
from rdmacm.verbs import SendFlag, SendWR, WCOpcode, WCStatus, WROpcode
from support.programs import python_program

pytestmark = pytest.mark.skipif(compiled is None, reason="the compiled core is not built (python3 dev.py core)")

#: A server that posts a bind behind a message for which its peer has no receive, and then computes without a pause of
#: the interpreter until the peer has written to the first byte of its memory.
_COMPUTING = """
import struct, sys
from rdmacm import CmId
from rdmacm.verbs import MR, MW, MWBindInfo, MWType, SendFlag, SendWR, WROpcode
from rdmacm.verbs.enums import AccessFlag
listener = CmId()
listener.bind_addr(("127.0.0.1", 0))
listener.listen()
print(listener.src_port, flush=True)
memory, shared = bytearray(64), bytearray(64)
peer = listener.get_request(20)
peer.create_qp()
access = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE
region = MR(peer.pd, memory, access)
target = MR(peer.pd, shared, AccessFlag.LOCAL_WRITE | AccessFlag.MW_BIND)
window = MW(peer.pd, MWType.TYPE_2)
for number in range(4):
    peer.post_recv(number, region, 32, 16)
peer.accept()
peer.post_send(0, struct.pack("!QI", region.addr, region.rkey), flags=SendFlag.INLINE | SendFlag.SIGNALED)
peer.get_send_comp(20)
for number in range(8):
    peer.get_recv_comp(20)
    peer.post_recv(number, region, 32, 16)
bind = SendWR(2, WROpcode.BIND_MW, send_flags=SendFlag.SIGNALED)
bind.set_bind_wr(window, MWBindInfo(target, target.addr + 8, 16, AccessFlag.REMOTE_WRITE | AccessFlag.ZERO_BASED))
key = struct.pack("!I", bind.rkey)
with peer.qp.backend._mux.runtime.lock:  # no other thread is in the midst of something
    sys.setswitchinterval(1000)  # and none gets the interpreter
peer.qp.post_send([
    SendWR(1, WROpcode.SEND, [b"wait"], SendFlag.INLINE | SendFlag.SIGNALED),
    bind,
    SendWR(3, WROpcode.SEND, [key], SendFlag.INLINE | SendFlag.SIGNALED),
])
while not memory[0]:
    pass
sys.setswitchinterval(0.005)
print(*(peer.get_send_comp(20).status.name for _ in range(3)), flush=True)
print(peer.get_recv_comp(20).invalidated_rkey == bind.rkey, shared[8:24].decode(), flush=True)
target.close()  # no window is bound to it
sys.stdin.readline()
"""


def write(end: End, data: bytes, address: int, rkey: int) -> WCStatus:
    wr = SendWR(5, WROpcode.RDMA_WRITE, [data], SendFlag.INLINE | SendFlag.SIGNALED, remote_addr=address, rkey=rkey)
    end.qp.post_send(wr)
    ((_, status, _, _),) = end.completions(of_sends=True)
    return status


def test_window_is_bound_used_and_invalidated_while_its_owner_computes() -> None:
    with python_program(_COMPUTING) as server:
        assert server.stdout is not None
        end, address, rkey = connected(int(server.stdout.readline()))
        for _ in range(8):
            end.send(b"ready")
            end.completions(of_sends=True)
        end.receive(2)
        assert [length for *_, length in end.completions(2)] == [4, 4]
        key = int.from_bytes(end.memory[:4], "big")
        for offset, data in (0, b"into the "), (9, b"window."):
            assert write(end, data, offset, key) is WCStatus.SUCCESS
        invalidation = SendWR(6, WROpcode.SEND_WITH_INV, send_flags=SendFlag.SIGNALED, invalidate_rkey=key)
        end.qp.post_send(invalidation)
        assert end.completions(of_sends=True) == [(6, WCStatus.SUCCESS, WCOpcode.SEND, 0)]
        assert not select.select([server.stdout], [], [], 0)[0], "it has computed all the time"
        assert write(end, b"x", address, rkey) is WCStatus.SUCCESS
        assert server.stdout.readline() == "SUCCESS SUCCESS SUCCESS\n"
        assert server.stdout.readline() == "True into the window.\n"
        assert write(end, b"too late", 0, key) is WCStatus.REM_ACCESS_ERR
        server.communicate("\n", timeout=20)
        assert server.returncode == 0
    end.region.close()
    end.cmid.close()
