"""Two hosts with a software device each, on a wire in memory and in virtual time."""

from __future__ import annotations

import heapq
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from ipaddress import ip_address

from rdmacm.address import Gid
from rdmacm.errors import cm_error
from rdmacm.proto.wire import Buffer
from rdmacm.soft.completion import SoftChannel, SoftCQ
from rdmacm.soft.memory import Region
from rdmacm.soft.qp import SoftQP, SoftSRQ
from rdmacm.soft.transport import Transport
from rdmacm.soft.verbs import SoftDevice
from rdmacm.soft.wire import Received, WirePath, WireRoute
from rdmacm.testing import VirtualClock
from rdmacm.verbs.attr import AHAttr, GlobalRoute, QPAttr, QPCap, QPInitAttr
from rdmacm.verbs.enums import WC, AccessFlag, Mtu, QPAttrMask, QPState
from rdmacm.verbs.wr import SGE

ALL = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_ATOMIC

_M = QPAttrMask
INIT_MASK = _M.STATE | _M.PKEY_INDEX | _M.PORT | _M.ACCESS_FLAGS
RTR_MASK = (
    _M.STATE | _M.AV | _M.PATH_MTU | _M.DEST_QPN | _M.RQ_PSN | _M.MAX_DEST_RD_ATOMIC | _M.MIN_RNR_TIMER
)  # fmt: skip
RTS_MASK = _M.STATE | _M.SQ_PSN | _M.TIMEOUT | _M.RETRY_CNT | _M.RNR_RETRY | _M.MAX_QP_RD_ATOMIC


class MemoryRoute:
    def __init__(self, path: WirePath, traffic_class: int) -> None:
        self.path = path
        self.traffic_class = traffic_class
        self.remote_host = str(ip_address(path.remote))
        self.source_port = 50_000


class MemoryWire:
    """One host's end of a :class:`MemoryNet`."""

    def __init__(self, net: MemoryNet, slot: int, train: int) -> None:
        self.slot = slot
        self.inbox: deque[Received] = deque()
        self._net = net
        self._train = train
        self._fd = -1

    def open(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def filenos(self) -> Sequence[int]:
        return (self._fd,) if self._fd >= 0 else ()

    def deliver(self, received: Received) -> None:
        self.inbox.append(received)
        if self._fd >= 0:
            os.eventfd_write(self._fd, 1)

    def receive(self) -> Sequence[Received]:
        found = [self.inbox.popleft() for _ in range(min(16, len(self.inbox)))]
        if found and not self.inbox:
            os.eventfd_read(self._fd)
        return found

    def route(self, path: WirePath, traffic_class: int = 0) -> WireRoute:
        return MemoryRoute(path, traffic_class)

    def send(self, route: WireRoute, buffers: Sequence[Buffer], segment: int = 0) -> bool:
        self._net.carry(route, b"".join(buffers), segment)
        return True

    def can_segment(self) -> int:
        return self._train

    def listen(self, service_id: int, local: bytes | None) -> object:
        raise NotImplementedError

    def unlisten(self, token: object) -> None:
        raise NotImplementedError


class MemoryNet:
    """What is sent to an address arrives there, unless ``lost(datagram)`` says otherwise."""

    def __init__(self) -> None:
        self.wires: dict[bytes, MemoryWire] = {}
        self.sent: list[tuple[WirePath, bytes, int]] = []
        self.lost: Callable[[bytes], bool] = lambda datagram: False

    def carry(self, route: WireRoute, datagram: bytes, segment: int) -> None:
        path = route.path
        self.sent.append((path, datagram, segment))
        if not self.lost(datagram) and path.remote in self.wires:
            self.inject(path, datagram, segment, route.source_port)

    def inject(self, path: WirePath, datagram: bytes, segment: int = 0, port: int = 50_000) -> None:
        host = str(ip_address(path.local))
        remote = (host, port) if len(path.local) == 4 else (host, port, 0, path.scope_id)
        self.wires[path.remote].deliver((memoryview(datagram), segment, remote, path.remote))


class Host:
    """A device with GIDs for its addresses, and a provider's part around it: timers, waiting."""

    def __init__(self, pair: Pair, addresses: Sequence[str], slot: int, train: int) -> None:
        self.pair = pair
        self.addresses = [ip_address(text).packed for text in addresses]
        self.wire = MemoryWire(pair.net, slot, train)
        for address in self.addresses:
            pair.net.wires[address] = self.wire
        self.lock = threading.RLock()
        self.timers: list[tuple[float, int, Callable[[float], None]]] = []
        self.transport = Transport(self.lock, pair.clock, self.call_at, self.wire, random.Random(slot))
        self.device = SoftDevice("soft_test", self.transport, self, self.find_source)
        self.pd: object = object()
        self.woken = 0
        self._count = 0

    def call_at(self, when: float, callback: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self.timers, (when, self._count, callback))

    def find_source(self, index: int) -> tuple[bytes, int]:
        if index >= len(self.addresses):
            raise cm_error(22, "no such GID", "modify_qp")
        return self.addresses[index], 7

    def fire(self) -> None:
        now = self.pair.clock()
        while self.timers and self.timers[0][0] <= now:
            heapq.heappop(self.timers)[2](now)

    def drive(self, done: Callable[[], bool], timeout: float | None) -> bool:
        return self.pair.run(done, timeout)

    def wake(self) -> None:
        self.woken += 1

    # -- making things --------------------------------------------------------------------------------

    def region(self, data: bytes | bytearray | int, access: AccessFlag = ALL) -> Region:
        buffer = bytearray(data) if not isinstance(data, bytearray) else data
        return self.device.reg_mr(self.pd, buffer, access)

    def cq(self, cqe: int = 256, channel: SoftChannel | None = None, owner: object = None) -> SoftCQ:
        return self.device.create_cq(cqe, channel, owner)

    def qp(
        self,
        cq: SoftCQ | None = None,
        *,
        recv_cq: SoftCQ | None = None,
        srq: SoftSRQ | None = None,
        sq_sig_all: bool = False,
        sends: int = 64,
        recvs: int = 64,
    ) -> SoftQP:
        cq = cq or self.cq()
        attr = QPInitAttr(cap=QPCap(sends, recvs, 8, 8, 256), sq_sig_all=sq_sig_all)
        return self.device.create_qp(self.pd, attr, cq, recv_cq or cq, srq)


class Pair:
    """Host ``a`` (10.0.0.1, fd00::1, fe80::1) and host ``b`` (.2), and the network between them."""

    def __init__(self, train: int = 65_507) -> None:
        self.clock = VirtualClock()
        self.net = MemoryNet()
        self.a = Host(self, ("10.0.0.1", "fd00::1", "fe80::1"), 1, train)
        self.b = Host(self, ("10.0.0.2", "fd00::2", "fe80::2"), 2, train)

    def close(self) -> None:
        for host in (self.a, self.b):
            host.transport.close()

    def settle(self) -> None:
        """Everything that happens without time passing."""
        while self.a.transport.progress() | self.b.transport.progress():
            pass

    def run(self, done: Callable[[], bool] = lambda: False, timeout: float | None = 60.0) -> bool:
        """Let things happen, and time pass to the next timer, until ``done()`` or nothing is left."""
        limit = self.clock.now + (60.0 if timeout is None else timeout)
        while True:
            self.settle()
            if done():
                return True
            due = min((host.timers[0][0] for host in (self.a, self.b) if host.timers), default=limit)
            if due >= limit:
                self.clock.now = max(limit, self.clock.now)
                return False
            self.clock.now = max(due, self.clock.now)
            self.a.fire()
            self.b.fire()

    def poll(self, host: Host, cq: SoftCQ, count: int = 1) -> list[WC]:
        """So many completions, waited for."""
        found: list[WC] = []
        while len(found) < count:
            if not cq.wait(30):
                raise AssertionError(f"only {found} of {count} completions came")
            found += cq.poll(count - len(found))
        return found

    def connect(self, first: SoftQP, second: SoftQP, *, family: int = 0, **more: int) -> None:
        """Bring two queue pairs to RTS; ``family`` is the GID index on both sides, ``more`` are attributes."""
        to_rtr(first, second.qp_num, self.b.addresses[family], family, **more)
        to_rtr(second, first.qp_num, self.a.addresses[family], family, **more)
        to_rts(first, **more)
        to_rts(second, **more)


def to_init(qp: SoftQP, access: AccessFlag = ALL) -> None:
    qp.modify(QPAttr(qp_state=QPState.INIT, qp_access_flags=access), INIT_MASK)


def to_rtr(qp: SoftQP, dest: int, remote: bytes, index: int, **more: int) -> None:
    if qp.state is QPState.RESET:
        to_init(qp)
    vector = AHAttr(is_global=True, gr=GlobalRoute(dgid=Gid.from_ip(remote), sgid_index=index))
    attr = QPAttr(
        qp_state=QPState.RTR,
        path_mtu=Mtu(more.get("path_mtu", Mtu.MTU_1024)),
        dest_qp_num=dest,
        rq_psn=100,
        max_dest_rd_atomic=4,
        min_rnr_timer=more.get("min_rnr_timer", 12),
        ah_attr=vector,
    )
    qp.modify(attr, RTR_MASK)


def to_rts(qp: SoftQP, **more: int) -> None:
    attr = QPAttr(
        qp_state=QPState.RTS,
        sq_psn=100,
        timeout=more.get("timeout", 14),
        retry_cnt=more.get("retry_cnt", 7),
        rnr_retry=more.get("rnr_retry", 7),
        max_rd_atomic=4,
    )
    qp.modify(attr, RTS_MASK)


def sge(region: Region, offset: int = 0, length: int | None = None) -> SGE:
    return SGE(region.addr + offset, region.length - offset if length is None else length, region.lkey)
