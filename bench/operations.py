"""How many operations of each kind a connection of the software device does in a second, between two processes.

    python3 dev.py bench operations [--rounds 5] [--seconds 0.5] [--kinds send,write_imm] [--size 64] [--alone]

Requests are posted in lists of 16, with 64 outstanding. The kinds are measured in turn, so that each has the same share
of what else the machine does. A line has the best and the median of the rounds, and the best as a part of that of the
plain operation: SEND for those that send, WRITE for the others.

Then, unless --alone is given, come the best and the median of UCX over TCP, which ucx_perftest measures in the same
rounds, and our best as a multiple of its best. It has 64 requests outstanding too, each posted by a call of its own.
It sends tagged messages to receives of one element, those of send_4 with a list of four (-D iov); write, read and
fetch_add are its put, get and fadd, which it emulates over TCP: the other side answers when it looks, and in
ucx_perftest it looks rarely. The other kinds have no counterpart: ucx_perftest has no test of immediate data, and over
TCP there are no shared receive queues, UC or XRC. fi_pingpong of libfabric measures round trips of plain messages.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from peers import OURS, UCX_TCP, Missing, PeerError, times, ucx_transfer

from rdmacm import open_device
from rdmacm.verbs import (
    CQ,
    MR,
    PD,
    QP,
    SRQ,
    XRCD,
    AccessFlag,
    AHAttr,
    GlobalRoute,
    Mtu,
    QPAttr,
    QPCap,
    QPInitAttrEx,
    QPType,
    RecvWR,
    SendFlag,
    SendWR,
    SrqAttr,
    SrqInitAttr,
    SrqInitAttrEx,
    SRQType,
    WCStatus,
    WROpcode,
)

_LOCALHOST = bytes((127, 0, 0, 1))
BATCH, DEPTH = 16, 64
#: Receives that are posted before the first message.
RECEIVES = 4 * DEPTH
ACCESS = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_ATOMIC


class Kind(NamedTuple):
    opcode: WROpcode
    #: What it is compared with.
    plain: str
    elements: int = 1
    size: int | None = None
    qp_type: QPType = QPType.RC
    has_srq: bool = False
    takes_receive: bool = False
    #: The test of ucx_perftest, and about how many of its messages take a second.
    ucx: tuple[str, int] | None = None


KINDS = {
    "send": Kind(WROpcode.SEND, "send", takes_receive=True, ucx=("tag_bw", 400_000)),
    "send_4": Kind(WROpcode.SEND, "send", elements=4, takes_receive=True, ucx=("tag_bw", 400_000)),
    "send_imm": Kind(WROpcode.SEND_WITH_IMM, "send", takes_receive=True),
    "send_srq": Kind(WROpcode.SEND, "send", has_srq=True, takes_receive=True),
    "send_uc": Kind(WROpcode.SEND, "send", qp_type=QPType.UC, takes_receive=True),
    "send_xrc": Kind(WROpcode.SEND, "send", qp_type=QPType.XRC_SEND, has_srq=True, takes_receive=True),
    "write": Kind(WROpcode.RDMA_WRITE, "write", ucx=("ucp_put_bw", 400_000)),
    "write_imm": Kind(WROpcode.RDMA_WRITE_WITH_IMM, "write", takes_receive=True),
    "read": Kind(WROpcode.RDMA_READ, "write", ucx=("ucp_get", 20_000)),
    "fetch_add": Kind(WROpcode.ATOMIC_FETCH_AND_ADD, "write", size=8, ucx=("ucp_fadd", 10_000)),
}


class End:
    """A queue pair with what it needs, and a buffer that the peer may use."""

    def __init__(self, stack: ExitStack, kind: Kind, *, is_server: bool) -> None:
        self.context = stack.enter_context(open_device("soft_lo", "soft"))
        self.pd = stack.enter_context(PD(self.context))
        self.scq, self.rcq = (stack.enter_context(CQ(self.context, 4 * RECEIVES)) for _ in range(2))
        self.region = stack.enter_context(MR(self.pd, bytearray(1 << 16), ACCESS))
        self.srq: SRQ | None = None
        xrcd = stack.enter_context(XRCD(self.context)) if kind.qp_type is QPType.XRC_SEND and is_server else None
        attr = SrqAttr(max_wr=2 * RECEIVES, max_sge=1)
        if xrcd is not None:
            made = SrqInitAttrEx(attr, srq_type=SRQType.XRC, pd=self.pd, xrcd=xrcd, cq=self.rcq)
            self.srq = stack.enter_context(SRQ(self.context, made))
            init = QPInitAttrEx(QPType.XRC_RECV, xrcd=xrcd)
            self.qp = stack.enter_context(QP(self.context, init))
        else:
            if kind.has_srq and is_server:
                self.srq = stack.enter_context(SRQ(self.pd, SrqInitAttr(attr)))
            has_receives = kind.qp_type is not QPType.XRC_SEND
            cap = QPCap(2 * DEPTH, 2 * RECEIVES if has_receives else 0, 4, 1, 0)
            recv_cq = self.rcq if has_receives else None
            init = QPInitAttrEx(kind.qp_type, scq=self.scq, rcq=recv_cq, srq=self.srq, cap=cap)
            self.qp = stack.enter_context(QP(self.pd, init))

    def address(self) -> tuple[int, int, int, int]:
        number = self.srq.get_srq_num() if self.srq is not None and self.srq.srq_type is SRQType.XRC else 0
        return self.qp.qp_num, self.region.addr, self.region.rkey, number

    def connect(self, peer: int) -> None:
        gids = [self.context.query_gid(1, index) for index in range(self.context.query_port(1).gid_tbl_len)]
        index = next(i for i, gid in enumerate(gids) if gid.ip == _LOCALHOST)
        way = AHAttr(is_global=True, port_num=1, gr=GlobalRoute(gids[index], index, hop_limit=1))
        self.qp.to_rts(
            QPAttr(
                port_num=1, dest_qp_num=peer, path_mtu=Mtu.MTU_4096, timeout=14, retry_cnt=7, rnr_retry=7,
                min_rnr_timer=12, max_rd_atomic=16, max_dest_rd_atomic=16, ah_attr=way, qp_access_flags=ACCESS,
            )
        )  # fmt: skip


def taken(cq: CQ) -> int:
    found = cq.poll(DEPTH)
    for wc in found:
        if wc.status is not WCStatus.SUCCESS:
            raise SystemExit(f"failed: {wc!r}")
    return len(found)


def serve(kind: Kind, control: Connection) -> None:
    with ExitStack() as stack:
        end = End(stack, kind, is_server=True)
        control.send(end.address())
        receives = [RecvWR(1, [end.region.sge(0, 1 << 12)])] * BATCH
        post: Callable[[Any], object] = end.qp.post_recv if end.srq is None else end.srq.post_recv
        end.connect(control.recv()[0])
        if kind.takes_receive:
            for _ in range(RECEIVES // BATCH):
                post(receives)
        control.send("ready")
        waiting = 0
        while not control.poll():
            for _ in range(200):
                waiting += taken(end.rcq)
                while waiting >= BATCH:
                    post(receives)
                    waiting -= BATCH


class Client:
    """The end that posts, and its server, a process."""

    def __init__(self, stack: ExitStack, kind: Kind, size: int) -> None:
        self.control, theirs = multiprocessing.Pipe()
        self.server = multiprocessing.Process(target=serve, args=(kind, theirs), daemon=True)
        self.server.start()
        self.end = end = End(stack, kind, is_server=False)
        self.control.send(end.address())
        qp_num, addr, rkey, srqn = self.control.recv()
        end.connect(qp_num)
        assert self.control.recv() == "ready"
        size = kind.size or size
        part = size // kind.elements
        elements = [end.region.sge(number * part, part) for number in range(kind.elements)]
        wr = SendWR(1, kind.opcode, elements, SendFlag.SIGNALED, remote_addr=addr, rkey=rkey, imm_data=1, compare_add=1)
        if srqn:
            wr.set_qp_type_xrc(srqn)
        self.batch = [wr] * BATCH

    def rate(self, seconds: float) -> float:
        """Operations a second, of at least one, however busy the machine is."""
        qp, cq, batch = self.end.qp, self.end.scq, self.batch
        outstanding = done = 0
        began = time.perf_counter()
        until = began + seconds
        while not done or time.perf_counter() < until:
            while outstanding + BATCH <= DEPTH:
                qp.post_send(batch)
                outstanding += BATCH
            found = taken(cq)
            outstanding -= found
            done += found
        took = time.perf_counter() - began
        while outstanding:
            outstanding -= taken(cq)
        return done / took

    def stop(self) -> None:
        self.control.send("stop")
        self.server.join()


def measure(name: str, size: int, seconds: float) -> float:
    with ExitStack() as stack:
        client = Client(stack, KINDS[name], size)
        client.rate(min(seconds, 0.1))
        found = client.rate(seconds)
        client.stop()
        return found


def measure_ucx(kind: Kind, size: int, seconds: float) -> float | None:
    """The same of UCX; None if it does not have that kind."""
    if kind.ucx is None:
        return None
    test, per_second = kind.ucx
    parts = [str((kind.size or size) // kind.elements)] * kind.elements
    layout = ["-D", "iov,contig"] if kind.elements > 1 else []
    return 1e6 / ucx_transfer("tcp", test, times(per_second, seconds), DEPTH, "-s", ",".join(parts), *layout)[0]


def best_and_median(rates: list[float]) -> str:
    return f"{max(rates):10,.0f} {statistics.median(rates):10,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--size", type=int, default=64, help="bytes of a message")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    parser.add_argument("--alone", action="store_true", help="without UCX")
    args = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    rates: dict[str, list[float]] = {name: [] for name in args.kinds}
    theirs: dict[str, list[float]] = {name: [] for name in args.kinds}
    missing = None if args.alone else UCX_TCP.missing()
    for _ in range(args.rounds):
        for name in args.kinds:
            rates[name].append(measure(name, args.size, args.seconds))
            if args.alone or missing:
                continue
            try:
                if rate := measure_ucx(KINDS[name], args.size, args.seconds):
                    theirs[name].append(rate)
            except PeerError as error:
                missing = Missing(str(error))
    print(f"{'a second':10} {OURS:>10} {'median':>10} {'of plain':>10} {UCX_TCP.name:>10} {'median':>10} {'ratio':>10}")
    for name, found in rates.items():
        plain = rates.get(KINDS[name].plain)
        line = f"{name:10} {best_and_median(found)} " + (f"{max(found) / max(plain):10.2f}" if plain else " " * 10)
        if theirs[name]:
            line += f" {best_and_median(theirs[name])} {max(found) / max(theirs[name]):10.2f}"
        print(line.rstrip())
    if missing:
        print(f"{UCX_TCP.name}: {missing}")


if __name__ == "__main__":
    os.environ.setdefault("RDMACM_PROVIDER", "soft")
    main()
