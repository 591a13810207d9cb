"""Latency and bandwidth of the software device's data path, between two processes over loopback.

    python3 dev.py bench datapath [--rounds 10] [--messages 300] [--megabytes 32]

The latency is half the round trip of a message of 64 bytes, while both sides poll and while both sleep until a
completion arrives. The bandwidth is that of WRITE, READ and SEND with 16 requests outstanding. Each is measured in
short rounds, of which the best and the median are printed: on a machine with other work the best is closest to the cost
of the code. The last figure is the CPU time of a process with an open, idle connection.
"""

from __future__ import annotations

import argparse
import os
import statistics
import struct
import sys
import time
from collections.abc import Callable

from rdmacm import CmId
from rdmacm.verbs.cq import CQ
from rdmacm.verbs.enums import SendFlag, WCStatus
from rdmacm.verbs.pd import MR

SMALL = 64
LARGEST = 1 << 20
DEPTH = 16
SIZES = (4096, 65536, LARGEST)
DESCRIPTOR = struct.Struct("!QI")
#: A command to the server is a message of so many bytes.
POLL, BLOCK, QUIT = 1, 2, 3


def queue(cq: CQ | None) -> CQ:
    assert cq is not None
    return cq


def take(cq: CQ, *, blocking: bool, at_most: int = 1) -> int:
    """Wait for completions; return the ``byte_len`` of the last one."""
    while not (found := cq.poll(at_most)):
        if blocking and not cq.wait(10):
            raise SystemExit("no completion in 10 s")
    for wc in found:
        if wc.status is not WCStatus.SUCCESS:
            raise SystemExit(f"failed: {wc!r}")
    return found[-1].byte_len


def serve(listener: CmId, client: int) -> None:
    """Echo small messages, discard large ones, let the client read and write."""
    peer = listener.get_request(10)
    peer.create_qp()
    memory = bytearray(DEPTH * LARGEST)
    messages, target = peer.reg_msgs(memory), bytearray(LARGEST)
    written = peer.reg_write(target)
    readable = peer.reg_read(target)
    for index in range(DEPTH):
        peer.post_recv(index, messages, index * LARGEST, LARGEST)
    peer.accept()
    descriptors = DESCRIPTOR.pack(written.addr, written.rkey) + DESCRIPTOR.pack(readable.addr, readable.rkey)
    peer.post_send(0, descriptors, flags=SendFlag.INLINE | SendFlag.SIGNALED)
    echo = memoryview(memory)[:SMALL].tobytes()
    sends, recvs = queue(peer.send_cq), queue(peer.recv_cq)
    blocking, size = False, 0
    while size != QUIT:
        while not (found := recvs.poll(1)):
            if blocking:
                recvs.wait(10)
            if os.getppid() != client:
                return
        size = found[0].byte_len
        if found[0].status is not WCStatus.SUCCESS:
            break
        if size == SMALL:
            peer.post_send(0, echo, flags=SendFlag.INLINE)
        elif size in {POLL, BLOCK}:
            blocking = size == BLOCK
        peer.post_recv(found[0].wr_id, messages, found[0].wr_id * LARGEST, LARGEST)
        sends.poll(DEPTH)


class Client:
    def __init__(self, port: int) -> None:
        self.id = CmId()
        self.id.resolve_addr(("127.0.0.1", port))
        self.id.resolve_route()
        self.id.create_qp()
        self.messages = self.id.reg_msgs(bytearray(DEPTH * SMALL))
        self.data: MR = self.id.reg_msgs(bytearray(LARGEST))
        descriptors = bytearray(2 * DESCRIPTOR.size)
        self.id.post_recv(0, self.id.reg_msgs(descriptors))
        for index in range(1, DEPTH):
            self.id.post_recv(index, self.messages, index * SMALL, SMALL)
        self.id.connect()
        self.sends, self.recvs = queue(self.id.send_cq), queue(self.id.recv_cq)
        take(self.recvs, blocking=True)
        self.written = DESCRIPTOR.unpack_from(descriptors)
        self.readable = DESCRIPTOR.unpack_from(descriptors, DESCRIPTOR.size)
        self.id.post_recv(0, self.messages, 0, SMALL)

    def command(self, size: int) -> None:
        self.id.post_send(0, bytes(size), flags=SendFlag.INLINE | SendFlag.SIGNALED)
        take(self.sends, blocking=False)

    def latency(self, count: int, *, blocking: bool) -> float:
        """Microseconds one way, the median of ``count``."""
        clock, spent, ping = time.perf_counter, [], bytes(SMALL)
        for index in range(count):
            before = clock()
            self.id.post_send(0, ping, flags=SendFlag.INLINE | SendFlag.SIGNALED)
            take(self.recvs, blocking=blocking)
            spent.append(clock() - before)
            self.id.post_recv(index, self.messages, 0, SMALL)
            take(self.sends, blocking=blocking)
        return statistics.median(spent) * 5e5

    def bandwidth(self, operation: str, size: int, total: int) -> float:
        """Gigabytes per second."""
        post: Callable[[], None] = {
            "WRITE": lambda: self.id.post_write(0, self.data, *self.written, length=size),
            "READ": lambda: self.id.post_read(0, self.data, *self.readable, length=size),
            "SEND": lambda: self.id.post_send(0, self.data, length=size),
        }[operation]
        left = count = max(2 * DEPTH, total // size)
        outstanding = 0
        before = time.perf_counter()
        while left or outstanding:
            while left and outstanding < DEPTH:
                post()
                left -= 1
                outstanding += 1
            for wc in self.sends.poll(DEPTH):
                if wc.status is not WCStatus.SUCCESS:
                    raise SystemExit(f"{operation} failed: {wc!r}")
                outstanding -= 1
        return count * size / (time.perf_counter() - before) / 1e9


def run(client: Client, rounds: int, messages: int, total: int) -> None:
    for blocking in (False, True):
        client.command(BLOCK if blocking else POLL)
        found = [client.latency(messages, blocking=blocking) for _ in range(rounds)]
        how = "sleeping" if blocking else "polling"
        print(f"SEND 64 B, {how:8}  best {min(found):8.1f} us    p50 {statistics.median(found):8.1f} us", flush=True)
    client.command(POLL)
    for operation in ("WRITE", "READ", "SEND"):
        for size in SIZES:
            found = [client.bandwidth(operation, size, total) for _ in range(rounds)]
            best, middle = max(found), statistics.median(found)
            print(f"{operation:5} {size:7} B      best {best:8.2f} GB/s  p50 {middle:8.2f} GB/s", flush=True)
    client.command(BLOCK)
    time.sleep(0.1)  # the helper thread still looks up for a while after the last packet
    before = time.process_time()
    time.sleep(1)
    print(f"idle for a second     {(time.process_time() - before) * 1e6:8.0f} us of CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--messages", type=int, default=300, help="round trips in a round")
    parser.add_argument("--megabytes", type=int, default=32, help="data in a round")
    given = parser.parse_args()
    ready, tell = os.pipe()
    client = os.getpid()
    server = os.fork()
    if not server:
        listener = CmId()
        listener.bind_addr(("127.0.0.1", 0))
        listener.listen()
        os.write(tell, listener.src_port.to_bytes(2, "big"))
        serve(listener, client)
        sys.stdout.flush()
        os._exit(0)
    os.close(tell)
    port = os.read(ready, 2)
    if not port:
        raise SystemExit("the server ended before it listened")
    end = Client(int.from_bytes(port, "big"))
    run(end, given.rounds, given.messages, given.megabytes << 20)
    end.command(QUIT)
    os.waitpid(server, 0)


if __name__ == "__main__":
    main()
