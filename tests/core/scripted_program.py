"""Connections to a server, and sockets that fail by a script; prints what the wire has counted, as JSON.

Run by test_scripted_sockets.py, with the library of scripted_sockets.c and with either core.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import struct
import subprocess
import sys
from collections import Counter

from rdmacm import CmId, ConnParam
from rdmacm.provider import get_provider
from rdmacm.soft.provider import SoftProvider
from rdmacm.verbs import QPCap, QPInitAttr, SendFlag, WCStatus

SIZE = 1 << 16
#: What fails: single packets, trains, datagrams that are read.
SINGLE, TRAIN, READ = range(3)
#: What is wrong with the next datagram: no address, no whole header, a train of impossible packets.
NO_CONTROL, CUT, GRO_OF_5, GRO_TOO_LONG = range(1, 5)


_ADDRESS = struct.Struct("!QI")


def serve() -> None:
    """Accept connections, and let their peers write. The sockets of this process do not fail."""
    kept = []
    with CmId() as listener:
        listener.bind_addr(("127.0.0.1", 0))
        listener.listen()
        print(listener.src_port, flush=True)
        while True:
            peer = listener.get_request()
            peer.create_qp(QPInitAttr(cap=QPCap(64, 64, 1, 1, 64)))
            target = peer.reg_write(bytearray(SIZE))
            peer.accept(ConnParam(private_data=_ADDRESS.pack(target.addr, target.rkey)))
            kept.append((peer, target))


class Client:
    """A connection that writes. It is not closed: nothing else of this process sends or receives meanwhile."""

    def __init__(self, port: int) -> None:
        self.cmid = CmId()
        self.cmid.resolve_addr(("127.0.0.1", port))
        self.cmid.resolve_route()
        self.cmid.create_qp(QPInitAttr(cap=QPCap(64, 64, 1, 1, 64)))
        self.cmid.connect()
        self.address, self.rkey = _ADDRESS.unpack_from(self.cmid.event.private_data)
        self.source = self.cmid.reg_msgs(bytearray(SIZE))
        for _ in range(8):  # it has joined the core's wire
            self.write(64)

    def write(self, size: int) -> None:
        """A WRITE: one packet, or trains."""
        self.cmid.post_write(1, self.source, self.address, self.rkey, length=size, flags=SendFlag.SIGNALED)
        wc = self.cmid.get_send_comp(20)
        assert wc.status is WCStatus.SUCCESS, wc


def run(port: int) -> dict[str, object]:
    script = ctypes.CDLL(None)
    provider = get_provider()
    assert isinstance(provider, SoftProvider)
    found: dict[str, object] = {}
    kept = []
    for name, errors, change, size in json.loads(sys.argv[1]):
        client = Client(port)
        kept.append(client)
        before = Counter(provider.query_counters().udp)
        for which, code in errors:
            script.script_error(which, getattr(errno, code))
        script.script_change(change)
        scripted = script.script_left()
        client.write(size)
        while (left := script.script_left()) == scripted > 0:  # another thread was inside the call that read the answer
            client.write(size)
        script.script_trains()
        client.write(SIZE)
        has_trains = script.script_trains() > 0
        counted = Counter(provider.query_counters().udp)
        counted.subtract(before)
        found[name] = {name: n for name, n in counted.items() if n}, left, has_trains
    return found


def main() -> None:
    # Without the scripted sockets, which come last.
    environment = {**os.environ, "LD_PRELOAD": os.environ["LD_PRELOAD"].rpartition(":")[0]}
    command = [sys.executable, __file__, "serve"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = run(int(server.stdout.readline()))
        server.kill()
    print(json.dumps(found), flush=True)
    os._exit(0)  # without closing the connections, whose server is gone


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    main()
