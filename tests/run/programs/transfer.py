"""Mooncake's transfer engine: ``transfer.py ADDRESS DEVICE [PEER ADDRESS-OF-MEMORY]``. A client has a peer."""

import ctypes
import os
import sys

from mooncake.engine import TransferEngine

SIZE, ROUNDS = 128 << 20, 4  # a gigabyte, with both ways
address, device, *peer = sys.argv[1:]
engine = TransferEngine()
if engine.initialize(address, "P2PHANDSHAKE", "rdma", device):
    sys.exit("it cannot be initialized")
memory = (ctypes.c_char * SIZE)()
begin = ctypes.addressof(memory)
assert engine.register_memory(begin, SIZE) == 0
if peer:
    data = os.urandom(SIZE)
    for _ in range(ROUNDS):
        data = data[1:] + data[:1]  # each byte is another one than in the last round
        ctypes.memmove(begin, data, SIZE)
        assert engine.transfer_sync_write(peer[0], begin, int(peer[1]), SIZE) == 0
        ctypes.memset(begin, 0, SIZE)
        assert engine.transfer_sync_read(peer[0], begin, int(peer[1]), SIZE) == 0
        assert memory.raw == data
    print("done", flush=True)
else:
    print("ready", engine.get_rpc_port(), begin, flush=True)
    sys.stdin.read()
