"""Two hosts with a software device each, on a network in memory in virtual time."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence, Sized
from ipaddress import ip_address
from typing import TypeVar

from rdmacm.address import Gid
from rdmacm.progress.runtime import Runtime
from rdmacm.proto.roce.grh import DEFAULT_HOP_LIMIT
from rdmacm.proto.wire import Buffer
from rdmacm.provider import Tap
from rdmacm.soft.device.completion import SoftChannel, SoftCQ
from rdmacm.soft.device.datagram_queue_pair import SoftUdQP
from rdmacm.soft.device.memory import SoftMR
from rdmacm.soft.device.queue_pair import SoftQP
from rdmacm.soft.device.shared_receive_queue import SoftSRQ
from rdmacm.soft.provider import SoftProvider
from rdmacm.soft.wire.base import (
    IpFields,
    PacketBuffer,
    Received,
    SocketAddress,
    Undelivered,
    WirePath,
    WireRoute,
    group_key,
)
from rdmacm.testing import MemoryNetwork, VirtualClock
from rdmacm.testing.network import PrivatePorts
from rdmacm.verbs.attr import AHAttr, GlobalRoute, QPAttr, QPCap
from rdmacm.verbs.enums import WC, AccessFlag, EventType, Mtu, QPAttrMask, QPState, QPType
from rdmacm.verbs.wr import SGE, AddressHandle

T = TypeVar("T")

ALL = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_ATOMIC

_M = QPAttrMask
INIT_MASK = _M.STATE | _M.PKEY_INDEX | _M.PORT | _M.ACCESS_FLAGS
RTR_MASK = (
    _M.STATE | _M.AV | _M.PATH_MTU | _M.DEST_QPN | _M.RQ_PSN | _M.MAX_DEST_RD_ATOMIC | _M.MIN_RNR_TIMER
)  # fmt: skip
RTS_MASK = _M.STATE | _M.SQ_PSN | _M.TIMEOUT | _M.RETRY_CNT | _M.RNR_RETRY | _M.MAX_QP_RD_ATOMIC
UD_STEPS = (
    (QPState.INIT, _M.STATE | _M.PKEY_INDEX | _M.PORT | _M.QKEY),
    (QPState.RTR, _M.STATE),
    (QPState.RTS, _M.STATE | _M.SQ_PSN),
)


class Heard(list[EventType]):
    """The asynchronous events of an object, in order."""

    post = list.append


class Handle:
    """An address handle without its protection domain."""

    def __init__(self, attr: AHAttr) -> None:
        self.attr = attr


class MemoryRoute:
    def __init__(self, path: WirePath, traffic_class: int, hop_limit: int) -> None:
        self.path = path
        self.traffic_class = traffic_class
        self.hop_limit = hop_limit
        self.remote_host = str(ip_address(path.remote))
        self.source_port = 50_000
        self.no_trains = False


class MemoryWire:
    """One host's wire on a :class:`MemoryNet`. It has no descriptor; calls make progress."""

    def __init__(self, net: MemoryNet, slot: int, train: int) -> None:
        self.slot = slot
        self.slots: Sequence[int] = (slot,)
        self.counters: Counter[str] = Counter()
        self.traffic: Counter[str] = Counter()
        self.tap: Tap | None = None
        self.leaves_peers = False
        self.hold_request: Callable[[memoryview, SocketAddress, bytes], bool] | None = None
        self.on_undelivered: Callable[[Undelivered], None] | None = None
        self.inbox: deque[Received] = deque()
        self.groups: set[bytes] = set()
        self._net = net
        self._train = train

    def open(self) -> None: ...

    def claim_slot(self) -> None:
        self.slots = (*self.slots, self.slots[-1] + 2)

    def close(self) -> None: ...

    def abandon(self) -> None: ...

    def filenos(self) -> Sequence[int]:
        return ()

    def unread_request_fds(self) -> Sequence[int]:
        return ()

    def resume_requests(self) -> bool:
        return False

    def receive(self, skip_poll: bool = False) -> Sequence[Received]:
        return [self.inbox.popleft() for _ in range(min(16, len(self.inbox)))]

    def route(self, path: WirePath, traffic_class: int = 0, hop_limit: int = 0) -> WireRoute:
        return MemoryRoute(path, traffic_class, hop_limit)

    def send(self, route: WireRoute, buffers: Sequence[Buffer], segment: int = 0) -> bool:
        assert isinstance(route, MemoryRoute)
        self._net.carry(route, b"".join(buffers), segment)
        return True

    def can_segment(self) -> int:
        return self._train

    def listen(self, service_id: int, local: bytes | None) -> object:
        raise NotImplementedError

    def unlisten(self, token: object) -> None:
        raise NotImplementedError

    def report_ip_fields(self) -> None: ...

    def join_group(self, group: bytes, ifindex: int) -> None:
        self.groups.add(group_key(group, ifindex))

    def leave_group(self, group: bytes, ifindex: int) -> None:
        self.groups.remove(group_key(group, ifindex))


class MemoryNet:
    """Delivers datagrams to the host of their address, except those for which ``lost(datagram)`` is true."""

    def __init__(self) -> None:
        self.wires: dict[bytes, MemoryWire] = {}
        self.sent: list[tuple[WirePath, bytes, int]] = []
        self.lost: Callable[[bytes], bool] = lambda datagram: False

    def carry(self, route: MemoryRoute, datagram: bytes, segment: int) -> None:
        path = route.path
        self.sent.append((path, datagram, segment))
        if not self.lost(datagram) and path.remote in self.wires:
            packet = PacketBuffer(datagram, IpFields(route.traffic_class, route.hop_limit or DEFAULT_HOP_LIMIT))
            self.inject(path, packet, segment, route.source_port)

    def inject(self, path: WirePath, datagram: bytes | PacketBuffer, segment: int = 0, port: int = 50_000) -> None:
        host = str(ip_address(path.local))
        remote = (host, port) if len(path.local) == 4 else (host, port, 0, path.scope_id)
        self.wires[path.remote].inbox.append((memoryview(datagram), segment, remote, path.remote))


class PairRuntime(Runtime):
    """A runtime whose waits run the network and the virtual time of the pair."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair.clock)
        self._pair = pair

    def drive(self, done: Callable[[], T], timeout: float | None, result_queue: Sized = ()) -> T:
        return self._pair.run(done, timeout)


class Host:
    """A provider with one device, whose GIDs are ``addresses``."""

    def __init__(self, pair: Pair, addresses: Sequence[str], slot: int, train: int) -> None:
        self.addresses = [ip_address(text).packed for text in addresses]
        self.wire = MemoryWire(pair.net, slot, train)
        for address in self.addresses:
            pair.net.wires[address] = self.wire
        network = MemoryNetwork()
        self.ifindex = network.add_interface("eth0", *(f"{text}/24" for text in addresses))
        self.provider = SoftProvider(
            network, runtime=PairRuntime(pair), ports=PrivatePorts(), wire=self.wire, random=random.Random(slot)
        )
        self.mux = self.provider.host.mux
        self.device = self.provider.host.open_device(self.ifindex)
        self.pd: object = object()

    def gid_index(self, address: bytes) -> int:
        rows = self.provider.host.view().by_key[self.ifindex, 1].rows
        return next(row.gid_index for row in rows if row.gid.ip == address)

    # -- making things --------------------------------------------------------------------------------

    def region(self, data: bytes | bytearray | int, access: AccessFlag = ALL) -> SoftMR:
        buffer = bytearray(data) if not isinstance(data, bytearray) else data
        return self.device.reg_mr(self.pd, memoryview(buffer), access)

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
        qp_type: QPType = QPType.RC,
    ) -> SoftQP:
        cq = cq or self.cq()
        cap = QPCap(sends, recvs, 8, 8, 256)
        made = self.device.create_qp(self.pd, qp_type, cap, sq_sig_all, cq, recv_cq or cq, srq)
        assert isinstance(made, SoftQP)
        return made

    def ud(
        self,
        cq: SoftCQ | None = None,
        *,
        recv_cq: SoftCQ | None = None,
        srq: SoftSRQ | None = None,
        sends: int = 64,
        recvs: int = 64,
        state: QPState = QPState.RTS,
        qkey: int = 0x01234567,
    ) -> SoftUdQP:
        """A datagram queue pair in a state up to RTS."""
        cq = cq or self.cq()
        made = self.device.create_qp(self.pd, QPType.UD, QPCap(sends, recvs, 8, 8, 256), False, cq, recv_cq or cq, srq)
        assert isinstance(made, SoftUdQP)
        for step, mask in UD_STEPS:
            if step <= state:
                made.modify(QPAttr(qp_state=step, qkey=qkey, sq_psn=100), mask)
        return made

    def ah(self, remote: bytes, **more: int) -> AddressHandle:
        """An address handle for a packed address."""
        local = next(address for address in self.addresses if len(address) == len(remote))
        if remote[:2] == b"\xfe\x80":
            local = self.addresses[2]
        route = GlobalRoute(dgid=Gid.from_ip(remote), sgid_index=self.gid_index(local), **more)
        return Handle(AHAttr(is_global=True, gr=route))


class Pair:
    """Host ``a`` (10.0.0.1, fd00::1, fe80::1) and host ``b`` (.2), and the network between them."""

    def __init__(self, train: int = 65_507) -> None:
        self.clock = VirtualClock()
        self.net = MemoryNet()
        self.a = Host(self, ("10.0.0.1", "fd00::1", "fe80::1"), 1, train)
        self.b = Host(self, ("10.0.0.2", "fd00::2", "fe80::2"), 2, train)

    def close(self) -> None:
        """Release what tests left open, since a provider in use keeps its descriptors."""
        for host in (self.a, self.b):
            runtime = host.provider.runtime
            for user in runtime.users():
                runtime.release(user)
            assert host.provider.retire()

    def settle(self) -> None:
        """Process everything that happens without time passing."""
        while self.a.mux.progress() | self.b.mux.progress():
            pass

    def run(self, done: Callable[[], T], timeout: float | None = 60.0) -> T:
        """Process packets and let time pass to the next timer, until ``done()`` or for ``timeout`` seconds."""
        limit = self.clock.now + (60.0 if timeout is None else timeout)
        while True:
            self.settle()
            found = done()
            deadlines = [host.provider.runtime.next_deadline() for host in (self.a, self.b)]
            due = min((deadline for deadline in deadlines if deadline is not None), default=limit)
            if found or due >= limit:
                if not found:
                    self.clock.now = max(limit, self.clock.now)
                return found
            self.clock.now = max(due, self.clock.now)
            self.fire()

    def fire(self) -> None:
        """Fire the timers that are due."""
        self.a.provider.runtime.fire_timers()
        self.b.provider.runtime.fire_timers()

    def poll(self, host: Host, cq: SoftCQ, count: int = 1) -> list[WC]:
        """The next ``count`` completions, waited for."""
        found: list[WC] = []
        while len(found) < count:
            if not cq.wait(30):
                raise AssertionError(f"only {found} of {count} completions came")
            found += cq.poll(count - len(found))
        return found

    def connect(self, first: SoftQP, second: SoftQP, *, family: int = 0, **more: int) -> None:
        """Bring two queue pairs to RTS; ``family`` picks one of the addresses, ``more`` are attributes."""
        left, right = self.a.addresses[family], self.b.addresses[family]
        to_rtr(first, second.qp_num, right, self.a.gid_index(left), **more)
        to_rtr(second, first.qp_num, left, self.b.gid_index(right), **more)
        to_rts(first, **more)
        to_rts(second, **more)


class Connected:
    """Two connected queue pairs, each with a completion queue."""

    def __init__(self, pair: Pair, family: int = 0, *, qp_type: QPType = QPType.RC, **more: int) -> None:
        self.pair = pair
        self.left_cq, self.right_cq = pair.a.cq(), pair.b.cq()
        self.left = pair.a.qp(self.left_cq, qp_type=qp_type)
        self.right = pair.b.qp(self.right_cq, qp_type=qp_type)
        pair.connect(self.left, self.right, family=family, **more)

    def at_left(self, count: int = 1) -> list[WC]:
        return self.pair.poll(self.pair.a, self.left_cq, count)

    def at_right(self, count: int = 1) -> list[WC]:
        return self.pair.poll(self.pair.b, self.right_cq, count)


def told(found: list[WC]) -> list[tuple[int, str]]:
    return [(wc.wr_id, wc.status.name) for wc in found]


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
        max_dest_rd_atomic=more.get("max_dest_rd_atomic", 4),
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
        max_rd_atomic=more.get("max_rd_atomic", 4),
    )
    qp.modify(attr, RTS_MASK)


def modify_state(qp: SoftQP, state: QPState, **more: int) -> None:
    mask = QPAttrMask.STATE | (QPAttrMask.EN_SQD_ASYNC_NOTIFY if more else 0)
    qp.modify(QPAttr(qp_state=state, **more), QPAttrMask(mask))  # type: ignore[arg-type]


def sge(region: SoftMR, offset: int = 0, length: int | None = None) -> SGE:
    return SGE(region.addr + offset, region.length - offset if length is None else length, region.lkey)
