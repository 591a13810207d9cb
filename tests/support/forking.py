"""A process with every kind of object, which forks many times: ``python forking.py COUNT SEED quiet|busy``.

Each child calls its parent's objects, which has to be refused, and closes all of them in random order, or
exits without closing them. At the end the connections of the parent transfer messages, and the parent closes all of
them itself.

quiet: nothing else happens in the parent, so that the packets sent are those of the children: their number is printed.
Every second child is forked while there is a capture, so that the compiled core is not used. busy: threads of the
parent are at work, so that each lock may be held when it forks.

The output is a JSON object. A child or a thread that has something to report does so on stderr.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import json
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import rdmacm
from rdmacm import CmEvent, CmEventType, CmId, ConnParam, EventChannel, PortSpace, RdmaError, aio
from rdmacm.verbs import (
    AH,
    CQ,
    CQEX,
    MR,
    MW,
    PD,
    QP,
    SRQ,
    XRCD,
    AccessFlag,
    AHAttr,
    CompChannel,
    GlobalRoute,
    MWBind,
    MWBindInfo,
    MWType,
    QPCap,
    QPEx,
    QPInitAttr,
    QPInitAttrEx,
    QPType,
    RecvWR,
    ReregMRFlag,
    SendFlag,
    SendWR,
    SrqInitAttr,
    SrqInitAttrEx,
    SRQType,
    WROpcode,
)
from support.clock import pause

#: Seconds after which a child hangs; no machine is that slow.
PATIENCE = 30.0
LOOPBACK = "127.0.0.1"
ALL = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_READ | AccessFlag.REMOTE_WRITE | AccessFlag.MW_BIND
CAP = QPCap(16, 16, 1, 1, 64)


class Owned:
    """The objects of the parent: what closes them, and calls that a child may not make."""

    def __init__(self) -> None:
        self.close: list[Callable[[], object]] = []
        self.refused: list[Callable[[], object]] = []
        #: Calls that exchange a message over a connection.
        self.exchange: list[Callable[[], None]] = []

    def add(self, found: Any, *refused: Callable[[], object]) -> Any:
        self.close.append(found.destroy if isinstance(found, CmId) else found.close)
        self.refused += refused
        return found


def event_of(channel: EventChannel, kind: CmEventType) -> CmEvent:
    event = channel.get_event(PATIENCE)
    assert event.type is kind, event
    return event


def resolved(owned: Owned, channel: EventChannel, space: PortSpace, kind: QPType, port: int) -> CmId:
    cmid = owned.add(CmId(channel, space, qp_type=kind))
    cmid.resolve_addr((LOOPBACK, port))
    event_of(channel, CmEventType.ADDR_RESOLVED).ack()
    cmid.resolve_route()
    event_of(channel, CmEventType.ROUTE_RESOLVED).ack()
    return cmid  # type: ignore[no-any-return]


def make_ids(owned: Owned, space: PortSpace, kind: QPType) -> None:
    """Two connected ids with queue pairs, with completions that nobody polls, and a request that nobody fetches."""
    channel = owned.add(EventChannel())
    channel.fileno()
    owned.refused.append(channel.get_event)
    listener = owned.add(CmId(channel, space, qp_type=kind))
    listener.bind_addr((LOOPBACK, 0))
    listener.listen()
    # The queues are made here and not by the ids: so they, too, are closed in any order.
    active = resolved(owned, channel, space, kind, listener.src_port)
    ends = []
    for cmid in (active, None):
        if cmid is None:
            active.connect()
            with event_of(channel, CmEventType.CONNECT_REQUEST) as event:
                cmid = owned.add(event.id)
        cq_channel = owned.add(CompChannel(active.verbs))
        cq_channel.fileno()
        cq = owned.add(CQ(active.verbs, 64, cq_channel), partial(cq_channel.get_cq_event, 0))
        cq.req_notify()
        pd = owned.add(PD(active.verbs))
        init = QPInitAttr(kind, cap=CAP, scq=cq, rcq=cq)
        cmid.create_qp(init, pd)
        owned.close.append(cmid.destroy_qp)
        region = owned.add(MR(pd, bytearray(4096), AccessFlag.LOCAL_WRITE))
        owned.add(MR(pd, bytearray(64), ALL))
        for slot in range(8):
            cmid.post_recv(slot, region, 0, 64)
        ends.append((cmid, cq, region))
        owned.refused += [partial(cq.poll, 1), partial(cq.wait, 0)]
        owned.refused += [partial(cmid.post_recv, 0, region, 0, 64), partial(post_nothing, cmid)]
    ends[1][0].accept()
    for _ in range(2):
        event_of(channel, CmEventType.ESTABLISHED).ack()

    def exchange() -> None:
        for (cmid, cq, region), (_, other, _) in zip(ends, reversed(ends), strict=True):
            cmid.post_recv(8, region, 0, 64)
            other.poll(64)
            cmid.post_send(7, region, 0, 8, SendFlag.SIGNALED)
            found = 0
            while found < 2:
                found += len(other.poll(64)) + len(cq.poll(64))

    owned.exchange.append(exchange)
    for cmid, _, region in ends:
        cmid.post_send(7, region, 0, 8, SendFlag.SIGNALED)
        if kind is QPType.RC:
            bind_windows(owned, cmid)
    for _, cq, _ in ends:
        cq.wait(PATIENCE)
    waiting = resolved(owned, channel, space, kind, listener.src_port)
    waiting.connect(ConnParam(qp_num=1))
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    assert poll.poll(1000 * PATIENCE), "the request that stays in the queue has not arrived"


def bind_windows(owned: Owned, cmid: CmId) -> None:
    region = owned.add(MR(cmid.pd, bytearray(64), ALL))
    info = MWBindInfo(region, region.addr, 8, AccessFlag.REMOTE_READ)
    one, two = (owned.add(MW(cmid.pd, kind)) for kind in (MWType.TYPE_1, MWType.TYPE_2))
    cmid.qp.bind_mw(one, MWBind(info))
    wr = SendWR(1, WROpcode.BIND_MW)
    wr.set_bind_wr(two, info)
    cmid.qp.post_send(wr)
    owned.refused.append(partial(cmid.qp.bind_mw, one, MWBind(info)))


def post_nothing(cmid: CmId) -> None:
    cmid.qp.post_send(SendWR(1, WROpcode.SEND, [], SendFlag.SIGNALED))


def make_verbs(owned: Owned) -> None:
    """The objects that need no connection."""
    context = owned.add(rdmacm.open_device("soft_lo"))
    owned.refused.append(lambda: context.get_async_event(0))
    assert context.async_fd >= 0
    pd = owned.add(PD(context))
    cq = owned.add(CQ(context, 64), lambda: cq.poll(1))
    extended = owned.add(CQEX(context))
    srq = owned.add(SRQ(pd, SrqInitAttr()))
    region = owned.add(MR(pd, bytearray(4096), ALL))
    owned.refused.append(lambda: region.rereg(ReregMRFlag.CHANGE_ACCESS, access=AccessFlag.LOCAL_WRITE))
    owned.refused.append(lambda: MR(pd, bytearray(8), AccessFlag.LOCAL_WRITE))
    owned.refused.append(lambda: CQ(context, 8))
    owned.refused.append(lambda: QP(pd, QPInitAttr(QPType.UD, scq=cq, rcq=cq)))
    srq.post_recv(RecvWR(1, [region.sge(0, 64)]))
    owned.refused.append(lambda: srq.post_recv(RecvWR(1, [region.sge(0, 64)])))
    for window in (MWType.TYPE_1, MWType.TYPE_2):
        owned.add(MW(pd, window))
    xrcd = owned.add(XRCD(context))
    owned.add(SRQ(pd, SrqInitAttrEx(srq_type=SRQType.XRC, xrcd=xrcd, cq=cq)))
    owned.add(QP(context, QPInitAttrEx(qp_type=QPType.XRC_RECV, xrcd=xrcd)))
    owned.add(QP(pd, QPInitAttr(QPType.XRC_SEND, scq=cq)))
    for kind in (QPType.RC, QPType.UC, QPType.UD):
        owned.add(QP(pd, QPInitAttr(kind, scq=cq, rcq=cq, cap=CAP)))
        owned.add(QP(pd, QPInitAttr(kind, scq=cq, rcq=extended, srq=srq)))
    owned.add(QPEx(pd, QPInitAttrEx(scq=cq, rcq=cq, cap=CAP)))
    route = GlobalRoute(dgid=context.query_gid(1, 0), sgid_index=0, hop_limit=64)
    owned.add(AH(pd, AHAttr(is_global=True, port_num=1, gr=route)))


def make_datagrams(owned: Owned) -> None:
    """Datagram ids: one with a message in flight to itself, one in a multicast group, one without a channel."""
    channel = owned.add(EventChannel())
    cmid = resolved(owned, channel, PortSpace.UDP, QPType.UD, 7)
    cmid.create_qp(QPInitAttr(QPType.UD, cap=CAP))
    region = owned.add(cmid.reg_msgs(bytearray(4096)))
    for slot in range(8):
        cmid.post_recv(slot, region, 0, 128)
    gr = GlobalRoute(dgid=cmid.verbs.query_gid(1, cmid.gid_index), sgid_index=cmid.gid_index, hop_limit=64)
    ah = owned.add(AH(cmid.pd, AHAttr(is_global=True, port_num=1, gr=gr)))
    wr = SendWR(1, WROpcode.SEND, [region.sge(128, 8)], SendFlag.SIGNALED)
    wr.set_wr_ud(ah, cmid.qp.qp_num, 0x01234567)
    cmid.qp.post_send(wr)
    cmid.get_send_comp(PATIENCE)
    cmid.qp.post_send(wr)
    owned.refused += [partial(cmid.qp.post_send, wr), partial(cmid.get_recv_comp, 0)]
    with suppress(RdmaError):  # the loopback interface may lack MULTICAST
        cmid.join_multicast(("239.1.2.3", 0))
    alone = owned.add(CmId(None, PortSpace.TCP))
    alone.bind_addr((LOOPBACK, 0))
    pending = owned.add(CmId(channel, PortSpace.TCP))
    pending.resolve_addr((LOOPBACK, 9))


def make_endpoints(owned: Owned, loop: asyncio.AbstractEventLoop) -> None:
    """Connections and listeners of `rdmacm` and of `rdmacm.aio`."""
    listener = owned.add(rdmacm.listen((LOOPBACK, 0)))
    owned.refused.append(lambda: listener.accept(0))
    accepted: list[rdmacm.Connection] = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept(PATIENCE)))
    thread.start()
    ours = owned.add(rdmacm.connect((LOOPBACK, listener.port), timeout=PATIENCE))
    thread.join()
    theirs = owned.add(accepted[0])
    owned.add(ours.register(bytes(64), remote_read=True))
    theirs.send(b"not fetched")
    owned.refused.append(lambda: ours.send(b"", timeout=0))

    def exchange() -> None:
        for one, other in ((ours, theirs), (theirs, ours)):
            one.send(b"message", timeout=PATIENCE)
            while other.recv(PATIENCE) != b"message":
                pass

    owned.exchange.append(exchange)

    async def make() -> tuple[aio.AsyncListener, aio.AsyncConnection, aio.AsyncConnection]:
        server = await aio.listen((LOOPBACK, 0))
        one, other = await asyncio.gather(aio.connect((LOOPBACK, server.port)), server.accept())
        await one.send(b"not fetched")
        return server, one, other

    server, one, other = asyncio.run_coroutine_threadsafe(make(), loop).result(PATIENCE)
    parent = os.getpid()
    for each in (one, other):

        def close(each: aio.AsyncConnection = each) -> None:
            if os.getpid() == parent:
                asyncio.run_coroutine_threadsafe(each.close(), loop).result(PATIENCE)
            else:  # no event loop runs in the child
                asyncio.run(each.close())

        owned.close.append(close)
    owned.close.append(lambda: loop.call_soon_threadsafe(server.close) if os.getpid() == parent else server.close())

    def exchange_async() -> None:
        async def run() -> None:
            for end, to in ((one, other), (other, one)):
                await end.send(b"message")
                while await to.recv() != b"message":
                    pass

        asyncio.run_coroutine_threadsafe(run(), loop).result(PATIENCE)

    owned.exchange.append(exchange_async)


# -- threads of the parent --------------------------------------------------------------------------------------------


@contextmanager
def at_work() -> Iterator[None]:
    """Threads that take each lock of the package again and again."""
    stop = threading.Event()
    listener = rdmacm.listen((LOOPBACK, 0))
    problems: list[BaseException] = []

    def echo() -> None:
        with listener.accept(PATIENCE) as connection:
            for message in connection:
                connection.send(message, timeout=PATIENCE)

    def talk() -> None:
        with rdmacm.connect((LOOPBACK, listener.port), timeout=PATIENCE) as connection:
            while not stop.is_set():
                connection.send(b"ping", timeout=PATIENCE)
                connection.recv(PATIENCE)

    def register() -> None:
        with rdmacm.open_device("soft_lo") as context, PD(context) as pd:
            while not stop.is_set():
                MR(pd, bytearray(64), ALL).close()

    def capture() -> None:
        while not stop.is_set():
            rdmacm.capture("/dev/null").close()
            pause(0.001, "the other threads use the compiled core, which they do not while there is a capture")

    def resolve() -> None:
        with EventChannel() as channel:
            while not stop.is_set():
                cmid = CmId(channel)
                cmid.resolve_addrinfo(LOOPBACK, "7")
                channel.get_event(PATIENCE).ack()
                cmid.destroy()

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=guarded, args=(each,)) for each in (echo, talk, register, capture, resolve)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        listener.close()
        if problems:
            raise problems[0]


# -- children ---------------------------------------------------------------------------------------------------------


def close_all(close: list[Callable[[], object]], random: Random) -> None:
    """Close in random order. What others need is refused until these are closed."""
    left = random.sample(close, len(close))
    while left:
        again = []
        for each in left:
            try:
                each()
            except RdmaError as error:
                if error.errno != errno.EBUSY:
                    raise
                again.append(each)
        assert len(again) < len(left), again
        left = again


def use(owned: Owned, random: Random) -> None:
    """What a child does."""
    for each in random.sample(owned.refused, len(owned.refused)):
        try:
            each()
        except RdmaError as error:
            if error.errno != errno.EBADF:
                raise
        else:
            raise AssertionError(f"{each}: a call of the parent's object is not refused")
    if random.random() < 0.2:
        sys.exit()
    close_all(owned.close, random)


def fork(owned: Owned, seed: int) -> bool:
    """Whether the child ended well, in time."""
    pid = os.fork()
    if not pid:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        try:
            use(owned, Random(seed))
        except Exception:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def packets_sent() -> int:
    """UDP packets that this network namespace has sent."""
    names, values = (line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line[:4] == "Udp:")
    by_ipv6 = dict(line.split() for line in Path("/proc/net/snmp6").read_text().splitlines())
    return int(values[names.index("OutDatagrams")]) + int(by_ipv6["Udp6OutDatagrams"])


def messages_sent() -> int:
    """Messages of connection managers that this process has sent."""
    counters = rdmacm.query_counters().cm
    return sum(number for name, number in counters.items() if name.startswith("tx_") and name != "tx_retries")


def packets_of_others() -> int:
    """Packets sent but for messages of this process, which repeats the requests that nobody fetches."""
    after, sent = messages_sent(), 0
    before = -1
    while before != after:
        before, sent, after = after, packets_sent(), messages_sent()
    return sent - after


def wait_until_quiet() -> None:
    """Wait until what the connections have to send is sent."""
    before = -1
    while before != (before := packets_sent()):
        pause(0.1, "the connections send what they have to send")


def main(count: int, seed: int, is_quiet: bool) -> None:
    owned, good, sent = Owned(), 0, 0
    loop = asyncio.new_event_loop()
    runner = threading.Thread(target=loop.run_forever, daemon=True)
    runner.start()
    make_ids(owned, PortSpace.TCP, QPType.RC)
    make_ids(owned, PortSpace.IB, QPType.UC)
    make_verbs(owned)
    make_datagrams(owned)
    make_endpoints(owned, loop)
    if is_quiet:
        wait_until_quiet()
        before = packets_of_others()
        for number in range(count):
            with ExitStack() as stack:
                if number % 2:
                    packets = stack.enter_context(rdmacm.capture("/dev/null"))
                    owned.close.append(packets.close)
                    stack.callback(owned.close.pop)
                good += fork(owned, seed + number)
        sent = packets_of_others() - before
    else:
        with at_work():
            for number in range(count):
                good += fork(owned, seed + number)
    for exchange in owned.exchange:
        exchange()
    close_all(owned.close, Random(seed))
    loop.call_soon_threadsafe(loop.stop)
    runner.join()
    loop.close()
    print(json.dumps({"good": good, "sent": sent}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "quiet")
