"""How long a READ takes while the other process computes in Python, beside one that waits for completions.

    python3 dev.py bench busy [--rounds 5] [--reads 2000]

The active side reads 64 bytes at a time and polls. The passive side waits for a completion in one half of a round, and
runs a loop of Python in the other. Prints p50 and p99 of each in microseconds, the medians of the rounds, and the ratio
of the p99s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import struct
import time

from rdmacm import CmId
from rdmacm.verbs import MR, SendFlag
from rdmacm.verbs.cq import CQ
from rdmacm.verbs.enums import AccessFlag, WCStatus

SIZE = 64
DESCRIPTOR = struct.Struct("!QI")
ACCESS = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_WRITE
#: What the client writes to the first byte of the server's memory: what to do until it is something else.
WAIT, COMPUTE, QUIT = 1, 2, 3


def queue(cq: CQ | None) -> CQ:
    assert cq is not None
    return cq


def serve(listener: CmId) -> None:
    """Wait for messages, and compute after each until the client writes to memory that this is enough."""
    with listener.get_request(10) as peer:  # its end sends the ACKs that are left
        peer.create_qp()
        memory = bytearray(SIZE)
        region, inbox = MR(peer.pd, memory, ACCESS), peer.reg_msgs(bytearray(1))
        for _ in range(2):
            peer.post_recv(0, inbox)
        peer.accept()
        peer.post_send(0, DESCRIPTOR.pack(region.addr, region.rkey), flags=SendFlag.INLINE | SendFlag.SIGNALED)
        while True:
            while not queue(peer.recv_cq).poll(1):
                queue(peer.recv_cq).wait(10)
            if memory[0] == QUIT:
                return
            peer.post_recv(0, inbox)
            while memory[0] == COMPUTE:
                pass


class Client:
    def __init__(self, port: int) -> None:
        self.id = CmId()
        self.id.resolve_addr(("127.0.0.1", port))
        self.id.resolve_route()
        self.id.create_qp()
        self.memory = bytearray(SIZE)
        self.region = self.id.reg_msgs(self.memory)
        self.id.post_recv(0, self.region)
        self.id.connect()
        self.take(queue(self.id.recv_cq))
        self.remote = DESCRIPTOR.unpack_from(self.memory)

    def take(self, cq: CQ) -> None:
        limit = time.monotonic() + 10
        while not (found := cq.poll(1)):
            if time.monotonic() > limit:
                raise SystemExit("no completion in 10 s")
        if found[0].status is not WCStatus.SUCCESS:
            raise SystemExit(f"failed: {found[0]!r}")

    def order(self, what: int) -> None:
        """Tell the server what to do."""
        self.id.post_write(0, bytes([what]), *self.remote, flags=SendFlag.INLINE | SendFlag.SIGNALED)
        self.take(queue(self.id.send_cq))
        self.id.post_send(0, b"!", flags=SendFlag.INLINE | SendFlag.SIGNALED)
        self.take(queue(self.id.send_cq))

    def reads(self, count: int) -> tuple[float, float]:
        """p50 and p99 of READs in microseconds."""
        clock, spent, cq = time.perf_counter, [], queue(self.id.send_cq)
        for _ in range(count):
            before = clock()
            self.id.post_read(0, self.region, *self.remote, length=SIZE)
            self.take(cq)
            spent.append(clock() - before)
        spent.sort()
        return spent[count // 2] * 1e6, spent[count * 99 // 100] * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reads", type=int, default=2000, help="READs in a half of a round")
    given = parser.parse_args()
    ready, tell = os.pipe()
    if not (server := os.fork()):
        listener = CmId()
        listener.bind_addr(("127.0.0.1", 0))
        listener.listen()
        os.write(tell, listener.src_port.to_bytes(2, "big"))
        serve(listener)
        os._exit(0)
    os.close(tell)
    client = Client(int.from_bytes(os.read(ready, 2), "big"))
    found: dict[int, list[tuple[float, float]]] = {WAIT: [], COMPUTE: []}
    for _ in range(given.rounds):
        for what, times in found.items():
            client.order(what)
            client.reads(200)  # warm up
            times.append(client.reads(given.reads))
    client.order(QUIT)
    os.waitpid(server, 0)
    p99s = []
    for what, name in ((WAIT, "waits"), (COMPUTE, "computes")):
        p50, p99 = (statistics.median(column) for column in zip(*found[what], strict=True))
        p99s.append(p99)
        print(f"the passive side {name:8}  p50 {p50:8.1f} us    p99 {p99:8.1f} us")
    print(f"ratio of the p99s: {p99s[1] / p99s[0]:.2f}")


if __name__ == "__main__":
    main()
