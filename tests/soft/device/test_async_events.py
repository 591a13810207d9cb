"""Asynchronous events, ibv_get_async_event(3): which there are, how they are read, and that unread ones are bounded."""

from __future__ import annotations

import asyncio
import errno
import gc
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from rdmacm import CmId, CmTimeoutError, CmWouldBlockError, Context, EventChannel, RdmaError, aio, cma, open_device
from rdmacm.soft.device.async_events import MAX_EVENTS, SoftAsyncQueue
from rdmacm.soft.ib.ports import IbDevice
from rdmacm.testing import Fabric, Host
from rdmacm.verbs import (
    CQ,
    MR,
    PD,
    QP,
    SGE,
    SRQ,
    AccessFlag,
    AHAttr,
    AsyncEvent,
    CompChannel,
    DeviceCapFlag,
    EventType,
    GlobalRoute,
    QPAttr,
    QPAttrMask,
    QPCap,
    QPInitAttr,
    QPState,
    RecvWR,
    SendFlag,
    SendWR,
    SrqAttr,
    SrqAttrMask,
    SrqInitAttr,
)
from support.pair import ends

E = EventType


def connect(qp: QP, there: QP, state: QPState = QPState.RTS) -> None:
    route = GlobalRoute(dgid=there.pd.context.query_gid(1, 0), sgid_index=0, hop_limit=64)
    attr = QPAttr(ah_attr=AHAttr(is_global=True, gr=route), dest_qp_num=there.qp_num)
    attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
    attr.min_rnr_timer, attr.rnr_retry, attr.timeout, attr.retry_cnt = 12, 7, 10, 1
    (qp.to_rts if state is QPState.RTS else qp.to_rtr)(attr)


class Side:
    """A host of a fabric, its device opened, and a queue pair there."""

    def __init__(self, host: Host, srq: bool = False, cqe: int = 16) -> None:
        self.host = host
        self.context = open_device("soft_eth0", host.provider)
        self.pd, self.cq = PD(self.context), CQ(self.context, cqe)
        self.memory = MR(self.pd, bytearray(64), AccessFlag.LOCAL_WRITE)
        self.srq = SRQ(self.pd, SrqInitAttr(SrqAttr(8, 1))) if srq else None
        self.qp = QP(self.pd, QPInitAttr(scq=self.cq, rcq=self.cq, srq=self.srq, cap=QPCap(16, 16)))

    def events(self) -> list[tuple[EventType, object]]:
        """Every event that is unread, acknowledged."""
        found: list[tuple[EventType, object]] = []
        while True:
            try:
                with self.context.get_async_event(0) as event:
                    found.append((event.event_type, event.element))
            except CmWouldBlockError:
                return found

    def close(self) -> None:
        for thing in (self.qp, self.srq, self.memory, self.cq, self.pd):
            if thing is not None:
                thing.close()
        self.context.close()


class Sides:
    """Two sides, connected; the second, which ``arguments`` describe, may be left in RTR."""

    def __init__(self, state: QPState = QPState.RTS, **arguments: Any) -> None:
        self.fabric = Fabric()
        self.a = Side(self.fabric.host("a", "10.0.0.1"))
        self.b = Side(self.fabric.host("b", "10.0.0.2"), **arguments)
        connect(self.a.qp, self.b.qp)
        connect(self.b.qp, self.a.qp, state)

    def send(self, count: int = 1) -> None:
        """Send from a to b, and wait until it is complete."""
        for number in range(count):
            self.a.qp.post_send(SendWR(number))
            assert self.a.cq.wait(5)
            self.a.cq.poll()


@contextmanager
def sides(**arguments: Any) -> Iterator[Sides]:
    both = Sides(**arguments)
    try:
        yield both
    finally:
        both.a.close()
        both.b.close()


# -- which events there are -------------------------------------------------------------------------------------


def test_communication_established() -> None:
    """The first packet raises it if it arrives in RTR, where the end awaits its peer."""
    for state, expected in ((QPState.RTR, [E.COMM_EST]), (QPState.RTS, [])):
        with sides(state=state) as both:
            both.b.qp.post_recv([RecvWR(1), RecvWR(2)])
            both.send(2)
            assert both.b.events() == [(event, both.b.qp) for event in expected]
            assert both.a.events() == []


def test_fatal_error_of_a_queue_pair() -> None:
    with sides() as both:
        both.fabric.loss = 1.0
        both.a.qp.post_send(SendWR(1))
        with both.a.context.get_async_event(60) as event:
            assert (event.event_type, event.element) == (E.QP_FATAL, both.a.qp)
        assert both.a.qp.state is QPState.ERR
        assert both.a.events() == []


def test_send_queue_drained() -> None:
    with sides() as both:
        both.b.qp.post_recv(RecvWR(1))
        both.a.qp.post_send(SendWR(1))
        mask = QPAttrMask.STATE | QPAttrMask.EN_SQD_ASYNC_NOTIFY
        both.a.qp.modify(QPAttr(qp_state=QPState.SQD, en_sqd_async_notify=1), mask)
        with both.a.context.get_async_event(60) as event:
            assert (event.event_type, event.element) == (E.SQ_DRAINED, both.a.qp)


def test_limit_and_end_of_a_shared_receive_queue() -> None:
    with sides(srq=True) as both:
        srq = both.b.srq
        assert srq is not None
        srq.post_recv([RecvWR(n) for n in range(4)])
        srq.modify(SrqAttr(srq_limit=3), SrqAttrMask.LIMIT)
        both.send(2)
        assert both.b.events() == [(E.SRQ_LIMIT_REACHED, srq)]
        assert srq.query().srq_limit == 0
        srq.modify(SrqAttr(srq_limit=2), SrqAttrMask.LIMIT)
        both.send(1)
        assert both.b.events() == [(E.SRQ_LIMIT_REACHED, srq)]
        both.b.qp.to_error()
        assert both.b.events() == [(E.QP_LAST_WQE_REACHED, both.b.qp)]


@pytest.mark.parametrize("posted", [0, 1])
def test_limit_above_the_number_of_receives_is_reported_by_the_next_message(posted: int) -> None:
    with sides(srq=True) as both:
        srq = both.b.srq
        assert srq is not None
        srq.post_recv([RecvWR(n) for n in range(posted)])
        srq.modify(SrqAttr(srq_limit=5), SrqAttrMask.LIMIT)
        assert (srq.query().srq_limit, both.b.events()) == (5, [])
        both.a.qp.post_send(SendWR(1))
        both.fabric.run(0.001)
        assert both.b.events() == [(E.SRQ_LIMIT_REACHED, srq)]
        both.fabric.run(0.01)  # the message is repeated
        assert (srq.query().srq_limit, both.b.events()) == (0, [])


def test_overflow_of_a_completion_queue() -> None:
    with sides(cqe=2) as both:
        both.b.qp.post_recv([RecvWR(n) for n in range(3)])
        both.send(2)
        both.a.qp.post_send(SendWR(2))
        both.fabric.run(1)
        assert both.b.events() == [(E.CQ_ERR, both.b.cq), (E.QP_FATAL, both.b.qp)]


def test_changes_of_a_port() -> None:
    host = Fabric().host("a", "10.0.0.1")
    side = Side(host)
    other = open_device("soft_eth0", host.provider)
    loopback = open_device("soft_lo", host.provider)
    (ifindex,) = (each.index for each in host.network.interfaces() if each.name == "eth0")
    assert side.context.query_device().device_cap_flags & DeviceCapFlag.PORT_ACTIVE_EVENT
    assert other.async_fd >= 0
    host.network.add_address(ifindex, "10.0.0.9/24")
    assert side.events() == [(E.GID_CHANGE, 1)]
    host.network.set_interface(ifindex, up=False)
    assert side.events() == [(E.PORT_ERR, 1)]
    host.network.set_interface(ifindex, up=True)
    assert side.events() == [(E.PORT_ACTIVE, 1)]
    side.close()
    host.network.remove_interface(ifindex)
    with other.get_async_event(0) as first, other.get_async_event(0) as second, other.get_async_event(0) as third:
        assert [each.event_type for each in (first, second, third)] == [E.GID_CHANGE, E.PORT_ERR, E.PORT_ACTIVE]
    with other.get_async_event(0) as event:
        assert (event.event_type, event.element) == (E.DEVICE_FATAL, 0)
    with pytest.raises(CmWouldBlockError):
        loopback.get_async_event(0)
    other.close()
    loopback.close()


def test_names_and_numbers() -> None:
    names = """CQ_ERR QP_FATAL QP_REQ_ERR QP_ACCESS_ERR COMM_EST SQ_DRAINED PATH_MIG PATH_MIG_ERR DEVICE_FATAL
        PORT_ACTIVE PORT_ERR LID_CHANGE PKEY_CHANGE SM_CHANGE SRQ_ERR SRQ_LIMIT_REACHED QP_LAST_WQE_REACHED
        CLIENT_REREGISTER GID_CHANGE WQ_FATAL DEVICE_SPEED_CHANGE"""
    assert [event.name for event in E] == names.split()
    assert [int(event) for event in E] == list(range(21))
    assert [str(event) for event in E] == [f"IBV_EVENT_{name}" for name in names.split()]
    assert [getattr(cma, str(event)) for event in E] == list(E)
    assert repr(AsyncEvent(E.PORT_ERR, 1)) == "<AsyncEvent IBV_EVENT_PORT_ERR port 1>"


# -- ids --------------------------------------------------------------------------------------------------------


def test_queue_pairs_of_ids_report_to_their_context() -> None:
    with ends() as both:
        active, passive = both.connect()
        with passive.reg_msgs(bytearray(16)) as mr:
            passive.post_recv(1, mr)
            active.post_send(1, b"data", flags=SendFlag.INLINE)
            passive.get_recv_comp(60)
        active.qp.post_send(SendWR(2, sg=[SGE(addr=1, length=1, lkey=1)]))
        with active.verbs.get_async_event(60) as event:
            assert (event.event_type, event.element) == (E.QP_FATAL, active.qp)
        with pytest.raises(RdmaError, match="the ids of the device share this context") as raised:
            passive.verbs.close()
        assert raised.value.errno == errno.EBUSY


def test_context_of_ids_outlives_them() -> None:
    """The default protection domain belongs to the first context of the device, also after all ids are destroyed."""
    seen = []
    for _ in range(2):
        with CmId() as cmid:
            cmid.bind_addr(("127.0.0.1", 0))
            qp = cmid.create_qp()
            seen.append(cmid.verbs)
            assert qp.pd.context is cmid.verbs
    assert seen[0] is seen[1]


# -- reading ----------------------------------------------------------------------------------------------------


def test_nothing_to_read() -> None:
    with open_device("soft_lo") as context:
        with pytest.raises(CmWouldBlockError, match="get_async_event soft_lo: no event is waiting"):
            context.get_async_event(0)
        with pytest.raises(CmTimeoutError, match=r"within 0\.01 s"):
            context.get_async_event(0.01)
        with pytest.raises(ValueError, match="timeout -1"):
            context.get_async_event(-1)
    assert (context.closed, context.async_fd) == (True, -1)
    with pytest.raises(RdmaError, match="the context is closed") as raised:
        context.get_async_event(0)
    assert raised.value.errno == errno.EBADF
    context.close()


class Loopback:
    """A queue pair of the real loopback device."""

    def __init__(self) -> None:
        self.context = open_device("soft_lo")
        self.pd, self.cq = PD(self.context), CQ(self.context, 16)
        self.srq = SRQ(self.pd, SrqInitAttr(SrqAttr(8, 1)))
        self.qp = QP(self.pd, QPInitAttr(scq=self.cq, rcq=self.cq, srq=self.srq))
        self.qp.to_init(QPAttr())

    def fail(self) -> None:
        """Make QP_LAST_WQE_REACHED."""
        self.qp.to_error()

    def close(self) -> None:
        for thing in (self.qp, self.srq, self.cq, self.pd, self.context):
            thing.close()


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    made = Loopback()
    yield made
    made.close()


def test_waiting_thread_is_woken(loopback: Loopback) -> None:
    threading.Timer(0.05, loopback.fail).start()
    with loopback.context.get_async_event(10) as event:
        assert (event.event_type, event.element) == (E.QP_LAST_WQE_REACHED, loopback.qp)


def test_close_ends_a_wait(loopback: Loopback) -> None:
    threading.Timer(0.05, loopback.context.close).start()
    with pytest.raises(RdmaError) as raised:
        loopback.context.get_async_event(10)
    assert raised.value.errno == errno.EBADF


@pytest.mark.parametrize("kind", ["event channel", "completion channel", "completion queue"])
def test_closing_ends_the_wait_of_another_thread(loopback: Loopback, kind: str) -> None:
    made: EventChannel | CompChannel | CQ
    if kind == "event channel":
        made = EventChannel()
        wait: Callable[[float], object] = made.get_event
    elif kind == "completion channel":
        made = CompChannel(loopback.context)
        wait = made.get_cq_event
    else:
        made = CQ(loopback.context, 1)
        wait = made.wait
    threading.Timer(0.05, made.close).start()
    with pytest.raises(RdmaError, match="is closed") as raised:
        wait(10)
    assert raised.value.errno == errno.EBADF


def test_descriptor(loopback: Loopback) -> None:
    context = loopback.context
    fd = context.async_fd
    assert fd == context.fileno() == context.async_fd
    poll = select.poll()
    poll.register(context, select.POLLIN)

    def assert_nothing_to_fetch() -> None:
        while poll.poll(0):  # packets for other processes, which share the port, make it readable, too
            with pytest.raises(CmWouldBlockError):
                context.get_async_event(0)

    assert_nothing_to_fetch()
    loopback.fail()
    assert poll.poll(1000) == [(fd, select.POLLIN)]
    context.get_async_event(0).ack()
    assert_nothing_to_fetch()


def test_descriptor_for_an_event_before_it() -> None:
    made = Loopback()
    made.fail()
    assert select.select([made.context], [], [], 1)[0] == [made.context]
    made.qp.close()
    # The event of a closed queue pair is gone. Those of the port may come at any time, as other programs change it,
    # and packets for other processes make the descriptor readable, too.
    while select.select([made.context], [], [], 0)[0]:
        with suppress(CmWouldBlockError), made.context.get_async_event(0) as event:
            assert event.element is not made.qp
            assert event.event_type is not EventType.QP_FATAL
    made.close()


def test_asyncio(loopback: Loopback) -> None:
    async def main() -> list[EventType]:
        waiting = [asyncio.create_task(aio.get_async_event(loopback.context)) for _ in range(2)]
        await asyncio.sleep(0.01)
        waiting[0].cancel()
        loopback.fail()
        with await asyncio.wait_for(waiting[1], 5) as event:
            found = [event.event_type]
        loopback.qp.modify(QPAttr(qp_state=QPState.RESET), QPAttrMask.STATE)
        loopback.qp.to_init(QPAttr())
        asyncio.get_running_loop().call_later(0.01, loopback.fail)
        async with asyncio.timeout(5):
            async for event in aio.async_events(loopback.context):
                event.ack()
                return [*found, event.event_type]
        raise AssertionError

    assert asyncio.run(main()) == [E.QP_LAST_WQE_REACHED] * 2


def test_closing_the_context_ends_the_tasks_that_wait(loopback: Loopback) -> None:
    async def iterate() -> None:
        async for event in aio.async_events(loopback.context):
            event.ack()

    async def main() -> list[BaseException | None]:
        waiting = [asyncio.create_task(iterate()) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in waiting)
        await asyncio.to_thread(loopback.context.close)
        async with asyncio.timeout(5):
            await asyncio.wait(waiting)
        assert loopback.context._on_close == []
        return [task.exception() for task in waiting]

    for error in asyncio.run(main()):
        assert isinstance(error, RdmaError)
        assert (error.errno, "the context is closed" in str(error)) == (errno.EBADF, True)


# -- acknowledging ----------------------------------------------------------------------------------------------


def test_unacknowledged_event_keeps_its_object_open(loopback: Loopback) -> None:
    loopback.fail()
    event = loopback.context.get_async_event(0)
    with pytest.raises(RdmaError, match=r"still needed by 1 AsyncEvent.*try: ack\(\) the events") as raised:
        loopback.qp.close()
    assert raised.value.errno == errno.EBUSY
    event.ack()
    event.ack()
    loopback.qp.close()


def test_dropped_event_acknowledges_itself(loopback: Loopback) -> None:
    loopback.fail()
    loopback.context.get_async_event(0)
    gc.collect()
    loopback.qp.close()


def test_leaving_the_block_of_an_object_acknowledges_its_events(loopback: Loopback) -> None:
    with QP(loopback.pd, QPInitAttr(scq=loopback.cq, rcq=loopback.cq, srq=loopback.srq)) as qp:
        qp.to_init(QPAttr())
        qp.to_error()
        event = loopback.context.get_async_event(0)
        assert event.element is qp
    assert qp.closed
    event.ack()


def test_closed_object_has_no_events(loopback: Loopback) -> None:
    loopback.fail()
    loopback.qp.close()
    with pytest.raises(CmWouldBlockError):
        loopback.context.get_async_event(0)


def test_forgotten_object_has_no_events(loopback: Loopback) -> None:
    qp = QP(loopback.pd, QPInitAttr(scq=loopback.cq, rcq=loopback.cq, srq=loopback.srq))
    qp.to_init(QPAttr())
    qp.to_error()
    with pytest.warns(ResourceWarning, match="unclosed <QP"):
        del qp
        gc.collect()
    with pytest.raises(CmWouldBlockError):
        loopback.context.get_async_event(0)


# -- bounds -----------------------------------------------------------------------------------------------------


def queue_of(context: Context) -> SoftAsyncQueue:
    queue = context._async_queue
    assert isinstance(queue, SoftAsyncQueue)
    return queue


def test_unread_events_are_bounded() -> None:
    with open_device("soft_lo") as context:
        queue = queue_of(context)
        owners = [object() for _ in range(MAX_EVENTS + 10)]
        for owner in owners:
            queue.post(owner, E.COMM_EST)
            queue.post(owner, E.COMM_EST)
        assert (len(queue._events), len(queue._events_of)) == (MAX_EVENTS, MAX_EVENTS)
        assert queue.get(0) == (E.COMM_EST, owners[10]), "the oldest are lost"
        for owner in owners[11:]:
            queue.forget(owner)
        assert (len(queue._events), len(queue._events_of)) == (0, 0)


def test_queue_pairs_without_a_reader_leave_nothing(loopback: Loopback) -> None:
    for _ in range(50):
        with QP(loopback.pd, QPInitAttr(scq=loopback.cq, rcq=loopback.cq, srq=loopback.srq)) as qp:
            qp.to_init(QPAttr())
            qp.to_error()
    queue = queue_of(loopback.context)
    assert (len(queue._events), len(queue._events_of)) == (0, 0)


def test_context_without_a_reader_keeps_nothing_open() -> None:
    provider = Fabric().host("a", "10.0.0.1").provider
    context = open_device("soft_eth0", provider)
    with CompChannel(context):
        pass
    assert not provider.runtime.in_use
    with pytest.raises(CmWouldBlockError):
        context.get_async_event(0)
    assert provider.runtime.in_use, "a reader follows the device"
    context.close()
    assert not provider.runtime.in_use
    context = open_device("soft_eth0", provider)
    assert context.async_fd >= 0
    del context
    gc.collect()
    assert not provider.runtime.in_use


def test_device_without_driver_has_no_events() -> None:
    context = Context("mlx5_0", lambda: None, lambda: IbDevice("mlx5_0"))
    with pytest.raises(RdmaError) as raised:
        context.get_async_event(0)
    assert raised.value.errno == errno.EOPNOTSUPP
    context.close()
