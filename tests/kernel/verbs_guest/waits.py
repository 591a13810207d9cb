"""Waiting on the kernel's device: completion channels, asynchronous events, threads, signals, fork, destruction."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import select
import signal
import threading
import warnings
from collections import Counter

from kernel.verbs_guest.pair import PATIENCE, Pair, open_context, refused, run_checks
from rdmacm.errors import CmTimeoutError, CmWouldBlockError
from rdmacm.kernel.verbs import runtime
from rdmacm.verbs import (
    CQ,
    MR,
    QP,
    CompChannel,
    EventType,
    QPAttr,
    QPAttrMask,
    QPCap,
    QPInitAttr,
    QPState,
    RecvWR,
    SendFlag,
    SendWR,
    WROpcode,
)
from support.clock import pause

OP = WROpcode


def readable(fd: int, seconds: float) -> bool:
    return bool(select.select([fd], [], [], seconds)[0])


def in_thread(call: object, *arguments: object) -> threading.Thread:
    assert callable(call)
    thread = threading.Thread(target=call, args=arguments)
    thread.start()
    return thread


def connected(pair: Pair, cq: CQ) -> tuple[QP, QP]:
    """Two queue pairs that receive on ``cq``; the first sends to the second, and sends complete on the pair's queue."""
    init = QPInitAttr(scq=pair.cq, rcq=cq, cap=QPCap(8, 8))
    source, target = QP(pair.pd, init), QP(pair.pd, init)
    attr = pair.second.query()[0]
    for one, other in ((source, target), (target, source)):
        attr.dest_qp_num = other.qp_num
        one.to_rts(attr)
    return source, target


def check_channel(name: str) -> None:
    with Pair(name) as pair, CompChannel(pair.context) as channel, CQ(pair.context, 10, channel) as cq:
        source, target = connected(pair, cq)
        with source, target:
            assert isinstance(refused(lambda: channel.get_cq_event(0)), CmWouldBlockError)
            assert isinstance(refused(lambda: channel.get_cq_event(0.05)), CmTimeoutError)
            fd = channel.fileno()
            target.post_recv([RecvWR(number) for number in range(1, 5)])
            send = SendWR(9, OP.SEND)
            cq.req_notify()
            assert not readable(fd, 0)
            source.post_send(send)
            assert readable(fd, PATIENCE)
            assert channel.get_cq_event(PATIENCE) is cq
            cq.ack_events()
            assert isinstance(refused(lambda: channel.get_cq_event(0)), CmWouldBlockError)
            assert not readable(fd, 0)
            assert cq.wait(PATIENCE)
            assert [wc.wr_id for wc in cq.poll(10)] == [1]
            # A wait arms the queue for itself: the program's channel has nothing of that.
            waiting = in_thread(cq.wait, PATIENCE)
            pause(0.1, "the thread begins to wait")
            source.post_send(send)
            waiting.join(PATIENCE)
            assert not waiting.is_alive()
            assert isinstance(refused(lambda: channel.get_cq_event(0)), CmWouldBlockError)
            assert [wc.wr_id for wc in cq.poll(10)] == [2]
            # Both are told.
            cq.req_notify()
            waiting = in_thread(cq.wait, PATIENCE)
            pause(0.1, "the thread begins to wait")
            source.post_send(send)
            assert channel.get_cq_event(PATIENCE) is cq
            cq.ack_events()
            waiting.join(PATIENCE)
            assert not waiting.is_alive()


def check_solicited(name: str) -> None:
    with Pair(name) as pair, CompChannel(pair.context) as channel, CQ(pair.context, 10, channel) as cq:
        source, target = connected(pair, cq)
        with source, target:
            target.post_recv([RecvWR(number) for number in (1, 2)])
            cq.req_notify(solicited_only=True)
            source.post_send(SendWR(1, OP.SEND))
            assert len(pair.completions(1)) == 1
            assert isinstance(refused(lambda: channel.get_cq_event(0.1)), CmTimeoutError)
            source.post_send(SendWR(1, OP.SEND, (), SendFlag.SIGNALED | SendFlag.SOLICITED))
            assert channel.get_cq_event(PATIENCE) is cq
            cq.ack_events()


def check_wait(name: str) -> None:
    with Pair(name) as pair:
        assert not pair.cq.wait(0)
        assert not pair.cq.wait(0.02)
        results: list[bool] = []
        threads = [in_thread(lambda: results.append(pair.cq.wait(PATIENCE))) for _ in range(3)]
        pause(0.1, "the threads begin to wait")
        pair.second.post_recv(RecvWR(2, [pair.mr.sge(0, 8)]))
        pair.first.post_send(SendWR(1, OP.SEND, [pair.mr.sge(0, 8)]))
        for thread in threads:
            thread.join(PATIENCE)
        assert results == [True] * 3
        assert len(pair.completions(2)) == 2
        with CQ(pair.context, 5) as other:
            waiting = in_thread(lambda: results.append(other.wait(0.3)))
            # Others' completions do not end it.
            pair.do(SendWR(1, OP.RDMA_WRITE, [pair.mr.sge(0, 8)], remote_addr=pair.mr.addr, rkey=pair.mr.rkey))
            waiting.join(PATIENCE)
            assert results[3:] == [False]


def check_closing_ends_waits(name: str) -> None:
    context = open_context(name)
    channel = CompChannel(context)
    cq = CQ(context, 5)
    assert context.async_fd >= 0
    errors: list[int | None] = []
    calls = (
        lambda: channel.get_cq_event(PATIENCE),
        lambda: cq.wait(PATIENCE),
        lambda: context.get_async_event(PATIENCE),
    )
    threads = [in_thread(lambda call=call: errors.append(refused(call).errno)) for call in calls]
    pause(0.2, "the threads begin to wait")
    for part in (channel, cq, context):
        part.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert errors == [errno.EBADF] * 3


def check_interrupt(name: str) -> None:
    class Alarm(Exception):
        pass

    def ring(number: int, frame: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    with Pair(name) as pair, CompChannel(pair.context) as channel:
        for wait in (pair.cq.wait, channel.get_cq_event, pair.context.get_async_event):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            try:
                wait(PATIENCE)
            except Alarm:
                continue
            raise AssertionError("the wait was not interrupted")
    signal.signal(signal.SIGALRM, before)


def check_asynchronous_events(name: str) -> None:
    with Pair(name) as pair:
        context = pair.context
        fd = context.async_fd
        while True:  # COMM_EST, and changes of the port while the network was made
            try:
                context.get_async_event(0.2).ack()
            except CmTimeoutError:
                break
        assert not readable(fd, 0)
        pair.first.modify(QPAttr(qp_state=QPState.SQD), QPAttrMask.STATE | QPAttrMask.EN_SQD_ASYNC_NOTIFY)
        assert pair.first.state is QPState.SQD
        assert readable(fd, PATIENCE)
        with context.get_async_event(PATIENCE) as event:
            assert (event.event_type, event.element) == (EventType.SQ_DRAINED, pair.first)
            assert refused(pair.first.close).errno == errno.EBUSY


def check_overflow(name: str) -> None:
    with Pair(name) as pair, CQ(pair.context, 1) as small:
        room = small.cqe
        init = QPInitAttr(scq=small, rcq=small, cap=QPCap(4, room + 20))
        with QP(pair.pd, init) as qp:
            assert pair.context.async_fd >= 0
            qp.to_init(QPAttr(port_num=1))
            qp.post_recv([RecvWR(number) for number in range(room + 10)])
            qp.to_error()
            while True:
                with pair.context.get_async_event(PATIENCE) as event:
                    if event.event_type is EventType.CQ_ERR:
                        assert event.element is small
                        break
            assert len(small.poll(room + 50)) <= room
            assert refused(lambda: small.poll(1)).errno == errno.EOVERFLOW
            assert small.wait(PATIENCE)


def check_fork(name: str) -> None:
    with Pair(name) as pair, CompChannel(pair.context) as channel:
        assert pair.context.async_fd >= 0
        send = SendWR(1, OP.RDMA_WRITE, [pair.mr.sge(0, 8)], remote_addr=pair.mr.addr, rkey=pair.mr.rkey)
        child = os.fork()
        if child == 0:
            try:
                calls = (
                    lambda: pair.first.post_send(send),
                    lambda: pair.first.post_recv(RecvWR(1)),
                    lambda: pair.cq.poll(1),
                    lambda: pair.cq.wait(1),
                    pair.cq.req_notify,
                    lambda: channel.get_cq_event(1),
                    lambda: pair.context.get_async_event(1),
                    lambda: MR(pair.pd, bytearray(8), 1),
                    lambda: CQ(pair.context, 1),
                    pair.first.query,
                    pair.first.to_error,
                )
                codes = [refused(call).errno for call in calls]
                assert codes == [errno.EBADF] * len(calls), codes
                pair.close()
                channel.close()
                with Pair(name) as own:  # the child's own device
                    own.do(SendWR(1, OP.RDMA_WRITE, [own.mr.sge(0, 8)], remote_addr=own.mr.addr, rkey=own.mr.rkey))
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        pair.do(send)


def check_garbage(name: str) -> None:
    """Objects that are forgotten, in any order, leave nothing behind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for _ in range(20):
            parts = [Pair(name) for _ in range(3)]
            parts[0].other = parts  # type: ignore[attr-defined] # a cycle
            del parts
            gc.collect()
    gc.collect()
    with Pair(name) as last:
        last.cq.poll(1)
    runtime().drive(lambda: True, 0)  # what the collector has left to the next progress
    with os.popen("rdma resource show qp; rdma resource show mr; rdma resource show cq") as lines:
        left = [line for line in lines if f"pid {os.getpid()} " in line]
    assert left == [], left


def descriptors() -> dict[str, int]:
    """How many descriptors this process has of each kind."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return dict(Counter(names))


def check_many(name: str) -> None:
    """Making and destroying leaves no descriptor and no object."""
    with Pair(name) as first:
        first.cq.wait(0.01)  # the descriptor of one waiting thread is kept
        before = descriptors()
        for _ in range(100):
            with Pair(name) as pair, CompChannel(pair.context) as channel, CQ(pair.context, 5, channel) as cq:
                assert channel.fileno() >= 0
                assert pair.context.async_fd >= 0
                cq.req_notify()
                pair.do(SendWR(1, OP.SEND, []), receives=[RecvWR(2)])
        assert descriptors() == before, (descriptors(), before)


def check_device_is_closed(name: str) -> None:
    """The device is closed with the last object that refers to it."""
    with Pair(name) as pair:
        assert "/dev/infiniband/uverbs0" in descriptors()
    del pair
    gc.collect()
    runtime().drive(lambda: True, 0)  # what the collector has left to the next progress
    assert "/dev/infiniband/uverbs0" not in descriptors()


if __name__ == "__main__":
    run_checks(globals())
