"""Two queue pairs of this process, and sockets that fail by a script; prints what the wire has counted, as JSON.

Run by test_scripted_sockets.py, with the library of scripted_sockets.c and with either core.
"""

from __future__ import annotations

import ctypes
import errno
import json
import sys
import threading
from collections import Counter

from rdmacm import CmId
from rdmacm.provider import get_provider
from rdmacm.soft.provider import SoftProvider
from rdmacm.verbs import MR, QPCap, QPInitAttr, SendFlag, WCStatus

SIZE = 1 << 16
#: What fails: single packets, trains, datagrams that are read.
SINGLE, TRAIN, READ = range(3)
#: What is wrong with the next datagram: no address, no whole header, a train of impossible packets.
NO_CONTROL, CUT, GRO_OF_5, GRO_TOO_LONG = range(1, 5)


class Ends:
    """A client that writes, and its server."""

    def __init__(self) -> None:
        with CmId() as listener:
            listener.bind_addr(("127.0.0.1", 0))
            listener.listen()
            accepting = threading.Thread(target=self._accept, args=(listener,))
            accepting.start()
            self.client = CmId()
            self.client.resolve_addr(("127.0.0.1", listener.src_port))
            self.client.resolve_route()
            self.client.create_qp(QPInitAttr(cap=QPCap(64, 64, 1, 1, 64)))
            self.client.connect()
            accepting.join()
        self.source = self.client.reg_msgs(bytearray(SIZE))
        for _ in range(8):  # both have joined the core's wire
            self.write(64)

    def _accept(self, listener: CmId) -> None:
        self.server = listener.get_request(10)
        self.server.create_qp(QPInitAttr(cap=QPCap(64, 64, 1, 1, 64)))
        self.target: MR = self.server.reg_write(bytearray(SIZE))
        self.server.accept()

    def write(self, size: int) -> None:
        """A WRITE: one packet, or trains."""
        self.client.post_write(1, self.source, self.target.addr, self.target.rkey, length=size, flags=SendFlag.SIGNALED)
        wc = self.client.get_send_comp(20)
        assert wc.status is WCStatus.SUCCESS, wc


def main() -> None:
    script = ctypes.CDLL(None)
    provider = get_provider()
    assert isinstance(provider, SoftProvider)
    found: dict[str, object] = {}
    for name, errors, change, size in json.loads(sys.argv[1]):
        ends = Ends()
        before = Counter(provider.query_counters().udp)
        script.script_trains()
        for which, code in errors:
            script.script_error(which, getattr(errno, code))
        script.script_change(change)
        ends.write(size)
        left = script.script_left()
        script.script_trains()
        ends.write(SIZE)
        has_trains = script.script_trains() > 0
        counted = Counter(provider.query_counters().udp)
        counted.subtract(before)
        found[name] = {name: n for name, n in counted.items() if n}, left, has_trains
        for cmid, region in (ends.client, ends.source), (ends.server, ends.target):
            region.close()
            cmid.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
