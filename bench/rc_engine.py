"""What the engine of a reliable connection costs, in microseconds of CPU a packet, without system calls.

    PYTHONPATH=src python bench/rc_engine.py [--mtu 4096] [--train 65507] [--profile write|read|one|send]

Two engines in one process exchange their datagrams; the time of each is measured by itself. "sender" is the one that
sends the payload, which for a READ is the responder. Copying a train into one buffer, as the kernel would, is not
counted. For each figure the lowest of many rounds is printed, then the median.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable

from rdmacm.enums import AccessFlag, WCStatus, WROpcode
from rdmacm.proto.engine import RtrAttributes, RtsAttributes
from rdmacm.proto.roce.icrc import crc32
from rdmacm.proto.roce.rc.engine import RcEngine
from rdmacm.proto.work import RecvWork, SendWork

SIZE = 1 << 20
BATCH = 32


class AnyMemory:
    """Memory that a peer may access with any key."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(SIZE))

    def remote(self, _rkey: int, address: int, length: int, _access: AccessFlag) -> memoryview | None:
        return self.view[address : address + length]

    def invalidate(self, _rkey: int) -> bool:
        return True


class Bench:
    def __init__(self, mtu: int, train: int, *, ipv6: bool) -> None:
        a, b = (bytes(15) + b"\1", bytes(15) + b"\2") if ipv6 else (b"\x7f\0\0\1", b"\x7f\0\0\2")
        self.train = train
        self.memory = (AnyMemory(), AnyMemory())
        self.ends = (RcEngine(1, self.memory[0]), RcEngine(2, self.memory[1]))
        for index, end in enumerate(self.ends):
            end.set_route((a, b)[index], (b, a)[index], 50000 + index)
            end.set_peer_port(50001 - index)
            end.ready_to_receive(RtrAttributes(2 - index, 0, path_mtu=mtu))
            end.ready_to_send(RtsAttributes(0))
        self.spent = [0.0, 0.0]
        self.packets = [0, 0]

    def call(self, index: int, function: Callable[[], None]) -> None:
        before = time.perf_counter()
        function()
        self.spent[index] += time.perf_counter() - before

    def turn(self, index: int) -> bool:
        """Deliver what one end sends to the other; whether there was anything."""
        clock = time.perf_counter
        before = clock()
        datagrams = self.ends[index].datagrams(before, 1000, self.train)
        self.spent[index] += clock() - before
        other = self.ends[1 - index]
        for buffers, segment in datagrams:
            data = memoryview(b"".join(buffers))
            self.packets[index] += -(-len(data) // segment) if segment else 1
            before = clock()
            other.received(data, segment, before)
            self.spent[1 - index] += clock() - before
        return bool(datagrams)

    def drain(self) -> None:
        """Take turns until neither end sends."""
        while self.turn(0) | self.turn(1):
            pass

    def check(self, index: int, count: int) -> None:
        found = self.ends[index].completions()
        assert len(found) == count
        assert all(c.status is WCStatus.SUCCESS for c in found)


def bulk(bench: Bench, opcode: WROpcode) -> None:
    work = SendWork(1, opcode, [bench.memory[0].view], remote_addr=0, rkey=1)
    bench.call(0, lambda: bench.ends[0].post_send(work))
    bench.drain()
    bench.call(0, lambda: bench.check(0, 1))


def sends(bench: Bench, count: int) -> None:
    a, b = bench.ends
    source, target = [bench.memory[0].view[:64]], [bench.memory[1].view[:64]]
    receives = [RecvWork(n, target) for n in range(count)]
    works = [SendWork(n, WROpcode.SEND, source) for n in range(count)]

    def post_receives() -> None:
        for work in receives:
            b.post_recv(work)

    def post_sends() -> None:
        for work in works:
            a.post_send(work)

    bench.call(1, post_receives)
    bench.call(0, post_sends)
    bench.drain()
    bench.call(0, lambda: bench.check(0, count))
    bench.call(1, lambda: bench.check(1, count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mtu", type=int, default=4096)
    parser.add_argument("--train", type=int, default=65507)
    parser.add_argument("--ipv6", action="store_true")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--profile", choices=["write", "read", "one", "send"])
    args = parser.parse_args()
    kinds: dict[str, tuple[str, Callable[[Bench], None], int]] = {
        "write": ("WRITE 1 MiB", lambda bench: bulk(bench, WROpcode.RDMA_WRITE), 0),
        "read": ("READ 1 MiB", lambda bench: bulk(bench, WROpcode.RDMA_READ), 1),
        "one": ("SEND 64 B, one by one", lambda bench: sends(bench, 1), 0),
        "send": (f"SEND 64 B, {BATCH} at a time", lambda bench: sends(bench, BATCH), 0),
    }
    print(f"{crc32.__module__}, path MTU {args.mtu}, trains of {args.train} bytes; us a packet: lowest / median")
    for kind, (name, function, sender) in kinds.items():
        if args.profile not in (None, kind):
            continue
        bench = Bench(args.mtu, args.train, ipv6=args.ipv6)
        if args.profile:
            with cProfile.Profile() as profile:
                for _ in range(args.rounds):
                    function(bench)
            pstats.Stats(profile).sort_stats("tottime").print_stats(20)
            continue
        taken: tuple[list[float], list[float]] = ([], [])
        for _ in range(args.rounds):
            bench.spent, bench.packets = [0.0, 0.0], [0, 0]
            function(bench)
            for index in (0, 1):
                taken[index].append(bench.spent[index] / bench.packets[sender] * 1e6)
        there, back = taken[sender], taken[1 - sender]
        print(
            f"{name:28}  sender {min(there):5.2f} / {statistics.median(there):5.2f}   "
            f"receiver {min(back):5.2f} / {statistics.median(back):5.2f}"
        )


if __name__ == "__main__":
    main()
