"""Verbs objects: creation, references, close and garbage collection."""

from __future__ import annotations

import array
import ctypes
import errno
import gc
import mmap
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TextIO

import pytest

from rdmacm import CmTimeoutError, CmWouldBlockError, Gid, RdmaError
from rdmacm.verbs import (
    AH,
    CQ,
    MR,
    PD,
    QP,
    SRQ,
    AccessFlag,
    AHAttr,
    CompChannel,
    Context,
    DeviceCapFlag,
    GidType,
    GlobalRoute,
    QPAttr,
    QPAttrMask,
    QPCap,
    QPInitAttr,
    QPState,
    QPType,
    RecvWR,
    SendWR,
    SrqAttr,
    SrqAttrMask,
    SrqInitAttr,
)
from rdmacm.verbs.device import named_context
from support.verbs import GIDS, LIMITS, RecordingCQ, RecordingDevice, RecordingMR, RecordingQP, context_of, wc

LOCAL = AccessFlag.LOCAL_WRITE


@contextmanager
def fails(number: int, text: str | None = None) -> Iterator[None]:
    with pytest.raises(RdmaError, match=text) as raised:
        yield
    assert raised.value.errno == number


# -- contexts ---------------------------------------------------------------------------------------------------


def test_context_opens_the_device_on_first_use(device: RecordingDevice) -> None:
    opened = []

    def open_it() -> RecordingDevice:
        opened.append(1)
        return device

    context = Context("mem0", lambda: None, open_it)
    assert opened == []
    assert context.query_device() == LIMITS
    assert context.backend is context.backend is device
    assert opened == [1]


def test_device_without_verbs_raises_eopnotsupp() -> None:
    context = named_context("mem0", list)
    with fails(errno.EOPNOTSUPP, "the provider has no queue pairs, memory or completions"):
        context.query_device()
    with fails(errno.EOPNOTSUPP):
        PD(context)
    with fails(errno.EOPNOTSUPP):
        CQ(context, 1)
    with fails(errno.EOPNOTSUPP):
        CompChannel(context)


def test_gid_table(context: Context) -> None:
    assert [context.query_gid(1, index) for index in range(4)] == [*GIDS, Gid(), Gid()]
    assert [context.query_gid_ex(1, index).gid for index in range(2)] == list(GIDS)
    entry = context.query_gid_ex(1, 1)
    assert (entry.gid_index, entry.port_num, entry.gid_type, entry.ndev_ifindex) == (1, 1, GidType.ROCE_V2, 2)
    assert context.query_gid_table() == context.query_gid_table(2) == [context.query_gid_ex(1, 0), entry]
    assert [context.query_gid_type(1, index) for index in range(3)] == [GidType.ROCE_V2, GidType.ROCE_V2, GidType.IB]
    with fails(errno.ENODATA, "no GID at index 2"):
        context.query_gid_ex(1, 2)
    for query in (context.query_gid, context.query_gid_ex, context.query_gid_type):
        for index in (4, -1):
            with fails(errno.EINVAL, f"no row {index} in the GID table.*try: an index below 4"):
                query(1, index)
        with fails(errno.EINVAL, "no port 2"):
            query(2, 0)
    with fails(errno.EINVAL, "2 GIDs, and max_entries is 1"):
        context.query_gid_table(1)
    with fails(errno.EINVAL, "flags is 1"):
        context.query_gid_table(2, 1)
    with fails(errno.EINVAL, "flags is 1"):
        context.query_gid_ex(1, 0, 1)


def test_pkey_table(device: RecordingDevice) -> None:
    context = context_of(device, pkeys=(0xFFFF, 0x8001))
    assert [context.query_pkey(1, index) for index in range(2)] == [0xFFFF, 0x8001]
    assert [context.get_pkey_index(1, pkey) for pkey in (0xFFFF, 0x8001)] == [0, 1]
    for pkey in (0x7FFF, 0x0001, 0):  # other members of the same partitions
        with fails(errno.EINVAL, f"no P_Key {pkey} in the table.*try: 0xffff, 0x8001"):
            context.get_pkey_index(1, pkey)
    with fails(errno.EINVAL):
        context.query_pkey(1, 2)


# -- memory -----------------------------------------------------------------------------------------------------


BUFFERS: list[Any] = [
    bytearray(16),
    memoryview(bytearray(20))[2:18],
    array.array("d", [0, 0]),
    mmap.mmap(-1, 16),
    (ctypes.c_int * 4)(),
    memoryview(bytearray(16)).cast("B", (4, 4)),
]


@pytest.mark.parametrize("buffer", BUFFERS, ids=lambda b: type(b).__name__)
def test_buffers_are_registered_in_place(device: RecordingDevice, context: Context, buffer: Any) -> None:
    with PD(context) as pd, MR(pd, buffer, LOCAL) as mr:
        (backend,) = device.living
        assert isinstance(backend, RecordingMR)
        assert (backend.pd, backend.access) == (pd, LOCAL)
        assert (mr.lkey, mr.rkey, mr.addr, mr.length) == (backend.lkey, backend.rkey, backend.addr, 16)
        backend.buffer[3:6] = b"abc"
        assert bytes(memoryview(buffer).cast("B")[3:6]) == bytes(mr.buf[3:6]) == mr.read(3, 3) == b"abc"
    assert device.living == []


def test_registration_keeps_the_buffer_alive(context: Context) -> None:
    buffer = bytearray(16)
    pd = PD(context)
    mr = MR(pd, buffer, LOCAL)
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    mr.close()
    buffer.extend(b"more")

    mr = MR(pd, buffer, LOCAL)
    kept = mr.buf[:4]
    mr.close()
    kept[0] = 1
    assert buffer[0] == 1, "a view stays valid after close"


def test_region_is_read_and_written_within_its_bounds(context: Context) -> None:
    mr = MR(PD(context), bytearray(8), LOCAL)
    mr.write(b"abcdefgh")
    mr.write(b"XYZ", 2, 3)
    mr.write("é", offset=6)
    mr.write(array.array("H", [0x2020]), offset=0)
    assert mr.read(8) == b"  cXYf\xc3\xa9"
    assert mr.read(2, 3) == b"XY"
    assert mr.read(0, 8) == b""
    for call in (
        lambda: mr.read(1, 8),
        lambda: mr.read(-1),
        lambda: mr.read(1, -1),
        lambda: mr.write(b"ab", offset=7),
        lambda: mr.write(b"ab", 3),
        lambda: mr.write(b"ab", offset=-1),
        lambda: mr.write(b"ab", -1),
        lambda: mr.sge(9),
        lambda: mr.sge(4, 5),
        lambda: mr.sge(-1, 1),
        lambda: mr.sge(0, -1),
    ):
        with fails(errno.EINVAL):
            call()
    sge = mr.sge(2, 4)
    assert (sge.addr, sge.length, sge.lkey) == (mr.addr + 2, 4, mr.lkey)
    assert mr.sge().length == 8
    assert mr.sge(8).length == 0
    mr.close()
    for call in (mr.sge, lambda: mr.read(1), lambda: mr.write(b"")):
        with fails(errno.EBADF, "the MR is closed"):
            call()


def test_invalid_registrations_are_refused(device: RecordingDevice, context: Context) -> None:
    pd = PD(context)
    with fails(errno.EINVAL, "the buffer is read-only.*try: a bytearray"):
        MR(pd, b"constant", LOCAL)
    with fails(errno.EINVAL, "empty"):
        MR(pd, bytearray(), LOCAL)
    with fails(errno.EINVAL, "not contiguous"):
        MR(pd, memoryview(bytearray(8))[::2], LOCAL)
    with fails(errno.EINVAL, "at most 1048576"):
        MR(pd, bytearray(LIMITS.max_mr_size + 1), LOCAL)
    with fails(errno.EINVAL, "unknown access flags 0x80000"):
        MR(pd, bytearray(8), 1 << 19)
    for access in (AccessFlag.REMOTE_WRITE, AccessFlag.REMOTE_ATOMIC | AccessFlag.REMOTE_READ):
        with fails(errno.EINVAL, "need LOCAL_WRITE"):
            MR(pd, bytearray(8), access)
    not_a_buffer: Any = 8
    with pytest.raises(TypeError, match="needs a buffer such as a bytearray, not int"):
        MR(pd, not_a_buffer, LOCAL)
    assert device.living == []
    with MR(pd, b"constant", AccessFlag.REMOTE_READ) as mr:
        assert mr.read(5) == b"const"


# -- references and close ---------------------------------------------------------------------------------------


def test_object_in_use_cannot_be_closed(device: RecordingDevice, context: Context) -> None:
    channel = CompChannel(context)
    scq, rcq = CQ(context, 8, channel), CQ(context, 8, channel)
    pd = PD(context)
    mrs = [MR(pd, bytearray(8), LOCAL) for _ in range(2)]
    srq = SRQ(pd)
    ah = AH(pd, AHAttr(is_global=True, gr=GlobalRoute(dgid=GIDS[0])))
    qp = QP(pd, QPInitAttr(scq=scq, rcq=rcq, srq=srq))
    born = list(device.living)

    with fails(errno.EBUSY, r"still needed by 1 AH, 2 MR, 1 QP, 1 SRQ.*close those first"):
        pd.close()
    shared: list[CQ | SRQ] = [scq, rcq, srq]
    for resource in shared:
        with fails(errno.EBUSY, "still needed by 1 QP"):
            resource.close()
    with fails(errno.EBUSY, "still needed by 2 CQ"):
        channel.close()
    assert device.living == born
    assert not any(resource.closed for resource in (pd, scq, rcq, srq, channel))
    assert scq.poll() == [], "a refused close changes nothing"

    everything = (qp, ah, *mrs, srq, pd, rcq, scq, channel)
    for one in everything:
        one.close()
        assert one.closed
    assert device.living == []
    for one in everything:
        one.close()


def test_one_queue_can_serve_both_directions(context: Context) -> None:
    pd, cq = PD(context), CQ(context, 8)
    with QP(pd, QPInitAttr(scq=cq, rcq=cq)):
        with fails(errno.EBUSY, "still needed by 1 QP"):
            cq.close()
    cq.close()


def test_failed_creation_holds_no_reference(device: RecordingDevice, context: Context) -> None:
    channel = CompChannel(context)
    cq = CQ(context, 8, channel)
    pd = PD(context)
    device.refuses = OSError(errno.ENOMEM, "full")
    for make in (
        lambda: MR(pd, bytearray(8), LOCAL),
        lambda: SRQ(pd),
        lambda: QP(pd, QPInitAttr(scq=cq, rcq=cq)),
        lambda: CQ(context, 8, channel),
    ):
        with pytest.raises(OSError, match="full"):
            make()
    device.refuses = None
    cq.close()
    with fails(errno.EBADF, "the CQ is closed"):
        QP(pd, QPInitAttr(scq=cq, rcq=cq))
    pd.close()
    with fails(errno.EBADF, "reg_mr: the PD is closed"):
        MR(pd, bytearray(8), LOCAL)
    channel.close()
    with fails(errno.EBADF, "the CompChannel is closed"):
        CQ(context, 8, channel)
    assert device.living == []


def test_use_after_close_raises_ebadf(context: Context) -> None:
    pd, cq, channel = PD(context), CQ(context, 8), CompChannel(context)
    srq = SRQ(pd)
    qp = QP(pd, QPInitAttr(scq=cq, rcq=cq))
    for resource in (qp, srq, cq, pd, channel):
        resource.close()
        assert "closed" in repr(resource)
    for call in (
        cq.poll,
        cq.wait,
        cq.req_notify,
        channel.get_cq_event,
        lambda: qp.post_send(SendWR()),
        lambda: qp.post_recv(RecvWR()),
        qp.query,
        qp.to_error,
        lambda: srq.post_recv(RecvWR()),
        srq.query,
        lambda: srq.modify(SrqAttr(), SrqAttrMask.LIMIT),
    ):
        with fails(errno.EBADF, "is closed"):
            call()
    assert channel.fileno() == -1


def test_concurrent_close_closes_once(device: RecordingDevice, context: Context) -> None:
    pd = PD(context)
    for _ in range(20):
        mr = MR(pd, bytearray(8), LOCAL)
        start = threading.Barrier(4)

        def close(mr: MR = mr, start: threading.Barrier = start) -> None:
            start.wait()
            mr.close()  # the device asserts that it is closed once

        threads = [threading.Thread(target=close) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert device.living == []
    pd.close()


# -- garbage collection -----------------------------------------------------------------------------------------


def warnings_of(drop_references: Callable[[], None]) -> list[str]:
    """The texts of the warnings. pytest.warns would keep their objects alive."""
    texts: list[str] = []

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        assert category is ResourceWarning
        texts.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        drop_references()
        gc.collect()
    return texts


def test_unclosed_object_warns_and_is_released(device: RecordingDevice, context: Context) -> None:
    def drop_references() -> None:
        pd, cq = PD(context), CQ(context, 8)
        made = [MR(pd, bytearray(8), LOCAL), SRQ(pd), QP(pd, QPInitAttr(scq=cq, rcq=cq)), CompChannel(context)]
        assert len(device.living) == 1 + len(made)

    kinds = sorted(text.split()[1] for text in warnings_of(drop_references))
    assert kinds == ["<CQ", "<CompChannel", "<MR", "<QP", "<SRQ"]
    assert device.living == []


def test_unclosed_objects_in_a_reference_cycle_are_released(device: RecordingDevice, context: Context) -> None:
    """The collector finalizes the members in any order; the device still sees a valid order."""

    def drop_references() -> None:
        channel = CompChannel(context)
        cq = CQ(context, 8, channel)
        pd = PD(context)
        qp = QP(pd, QPInitAttr(scq=cq, rcq=cq))
        cq.cq_context = [channel, cq, pd, qp]

    assert len(warnings_of(drop_references)) == 3
    assert device.living == []


def test_events_do_not_keep_their_queue_alive(device: RecordingDevice, context: Context) -> None:
    with CompChannel(context) as channel:
        cq = CQ(context, 8, channel)
        backend = next(made for made in device.living if isinstance(made, RecordingCQ))
        cq.req_notify()
        backend.add(wc(1))
        with pytest.warns(ResourceWarning, match="unclosed <CQ"):
            del cq
        assert backend not in device.living
        with fails(errno.EAGAIN):
            channel.get_cq_event(0)


# -- completions ------------------------------------------------------------------------------------------------


def test_poll_returns_completions_in_order(device: RecordingDevice, context: Context) -> None:
    with CQ(context, 8) as cq:
        (backend,) = device.living
        assert isinstance(backend, RecordingCQ)
        assert cq.cqe == 9, "the device's number of entries"
        assert cq.wait(0) is False
        for wr_id in range(5):
            backend.add(wc(wr_id))
        assert cq.wait(0) is True
        assert [found.wr_id for found in cq.poll()] == [0]
        assert [found.wr_id for found in cq.poll(3)] == [1, 2, 3]
        assert [found.wr_id for found in cq.poll(3)] == [4]
        assert cq.poll(3) == []


def test_channel_returns_events_that_need_acknowledgement(device: RecordingDevice, context: Context) -> None:
    channel = CompChannel(context)
    cq = CQ(context, 8, channel, cq_context="mine")
    backend = next(made for made in device.living if isinstance(made, RecordingCQ))
    assert (cq.channel, cq.cq_context, cq.context) == (channel, "mine", context)
    with pytest.raises(CmWouldBlockError):
        channel.get_cq_event(0)
    with pytest.raises(CmTimeoutError, match=r"within 0\.01 s"):
        channel.get_cq_event(0.01)

    backend.add(wc(1))
    cq.req_notify(solicited_only=True)
    assert backend.armed == [True]
    with fails(errno.EAGAIN):  # completions before the arming raise no event
        channel.get_cq_event(0)
    threading.Timer(0.01, backend.add, [wc(2)]).start()
    assert channel.get_cq_event(5) is cq

    with fails(errno.EBUSY, r"1 events are not acknowledged.*try: ack_events"):
        cq.close()
    with fails(errno.EINVAL, "2 events, but the number of unacknowledged events is 1"):
        cq.ack_events(2)
    cq.ack_events(0)
    cq.ack_events()
    with fails(errno.EINVAL):
        cq.ack_events()
    cq.close()
    channel.close()


def test_context_manager_acknowledges_events(device: RecordingDevice, context: Context) -> None:
    with CompChannel(context) as channel, CQ(context, 8, channel) as cq:
        backend = next(made for made in device.living if isinstance(made, RecordingCQ))
        cq.req_notify()
        backend.add(wc(1))
        assert channel.get_cq_event(5) is cq
    assert device.living == []


def test_invalid_completion_queues_are_refused(context: Context) -> None:
    for cqe in (0, -1, LIMITS.max_cqe + 1):
        with fails(errno.EINVAL, f"cqe is {cqe}, and may be 1 to 128"):
            CQ(context, cqe)
    CQ(context, LIMITS.max_cqe).close()
    with CQ(context, 8) as cq:
        for cqe in (0, -1, LIMITS.max_cqe + 1):
            with fails(errno.EINVAL, f"cqe is {cqe}, and may be 1 to 128"):
                cq.resize(cqe)
        cq.resize(LIMITS.max_cqe)
        assert cq.cqe == LIMITS.max_cqe + 1, "the device's number of entries"
    with fails(errno.EBADF):
        cq.resize(1)
    with CompChannel(context_of(RecordingDevice())) as channel:
        with fails(errno.EINVAL, "of another device"):
            CQ(context, 1, channel)


def test_completion_vectors(device: RecordingDevice, context: Context) -> None:
    assert context.num_comp_vectors == 4
    for vector in (0, 3):
        CQ(context, 1, comp_vector=vector).close()
    assert device.comp_vectors == [0, 3]
    wrong: list[Any] = [4, -1, 1.0, None]
    for vector in wrong:
        with fails(errno.EINVAL, "comp_vector is"):
            CQ(context, 1, comp_vector=vector)
    assert device.living == []


# -- queue pairs ------------------------------------------------------------------------------------------------


def test_queue_pair_reports_its_attributes(device: RecordingDevice, context: Context) -> None:
    pd, scq, rcq = PD(context), CQ(context, 8), CQ(context, 8)
    init = QPInitAttr(QPType.RC, "mine", scq, rcq, cap=QPCap(4, 5, 2, 3, 64), sq_sig_all=True)
    qp = QP(pd, init)
    backend = device.living[-1]
    assert isinstance(backend, RecordingQP)
    assert backend.pd is pd
    assert backend.parts == (device.living[0], device.living[1], None)
    init.cap.max_send_wr = 1
    assert qp.cap == QPCap(4, 5, 2, 3, 64), "the attributes are copied"
    assert (qp.scq, qp.rcq, qp.srq, qp.qp_context, qp.qp_num) == (scq, rcq, None, "mine", backend.qp_num)
    assert qp.state is QPState.RESET
    attr, init_attr = qp.query()
    assert (attr.qp_state, attr.cap) == (QPState.RESET, qp.cap)
    assert init_attr == replace(init, cap=qp.cap)
    assert repr(qp) == f"<QP RC 0x{qp.qp_num:x} RESET>"
    qp.close()
    scq.close()
    rcq.close()


def test_objects_know_what_they_are_made_from(context: Context) -> None:
    with (
        PD(context) as pd,
        CompChannel(context) as channel,
        CQ(context, 4, channel) as scq,
        CQ(context, 4) as rcq,
        SRQ(pd) as srq,
        MR(pd, bytearray(1), AccessFlag.LOCAL_WRITE) as mr,
        QP(pd, QPInitAttr(scq=scq, rcq=rcq, srq=srq)) as qp,
    ):
        assert (qp.send_cq, qp.recv_cq, qp.srq, qp.pd, mr.pd, srq.pd) == (scq, rcq, srq, pd, pd, pd)
        assert {each.context for each in (pd, channel, scq, srq, mr, qp)} == {context}
        assert (scq.comp_channel, rcq.comp_channel) == (channel, None)
        assert channel.fd == channel.fileno()
    assert channel.fd == -1


def test_objects_outlive_their_context(context: Context) -> None:
    with PD(context) as pd, CQ(context, 4) as cq, QP(pd, QPInitAttr(scq=cq, rcq=cq)) as qp:
        context.close()
        qp.to_init(QPAttr())
        with SRQ(pd) as srq:
            assert srq.query().max_wr
        for make in (PD, CompChannel, lambda closed: CQ(closed, 4)):
            with pytest.raises(RdmaError, match="the context is closed") as raised:
                make(context)
            assert raised.value.errno == errno.EBADF


def test_arguments_of_another_class_are_refused(context: Context) -> None:
    wrong: Any = 5
    nothing: Any = None  # the context of an id that is not bound
    unlike: Any = SrqAttr()
    with PD(context) as pd, CQ(context, 4) as cq:
        for make, text in (
            (lambda: PD(nothing), "context is None, not of class Context"),
            (lambda: CQ(nothing, 4), "context is None"),
            (lambda: CompChannel(nothing), "context is None"),
            (lambda: CQ(context, 4, wrong), "channel is 5, not of class CompChannel"),
            (lambda: SRQ(pd, unlike), "init_attr is SrqAttr"),
            (lambda: QP(pd, QPInitAttr(scq=wrong, rcq=cq)), "scq is 5, not of class CQ"),
            (lambda: QP(pd, QPInitAttr(scq=cq, rcq=wrong)), "rcq is 5"),
            (lambda: QP(pd, QPInitAttr(scq=cq, rcq=cq, srq=wrong)), "srq is 5, not of class SRQ"),
        ):
            with pytest.raises(RdmaError, match=text) as raised:
                make()
            assert raised.value.errno == errno.EINVAL


def test_limit_is_not_armed_when_the_queue_is_made(context: Context) -> None:
    with PD(context) as pd, SRQ(pd, SrqInitAttr(SrqAttr(8, 1, srq_limit=4))) as srq:
        assert srq.query() == SrqAttr(8, 1, srq_limit=0)


def test_queue_pair_capacities_are_limited(context: Context) -> None:
    pd, cq = PD(context), CQ(context, 8)
    maximum = QPCap(64, 64, 8, 8, 256)
    QP(pd, QPInitAttr(scq=cq, rcq=cq, cap=maximum)).close()
    QP(pd, QPInitAttr(scq=cq, rcq=cq, cap=QPCap(0, 0, 0, 0, 0))).close()
    for name in ("max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge", "max_inline_data"):
        for value in (getattr(maximum, name) + 1, -1):
            cap = replace(maximum, **{name: value})
            with fails(errno.EINVAL, f"{name} is {value}"):
                QP(pd, QPInitAttr(scq=cq, rcq=cq, cap=cap))
    with SRQ(pd) as srq, QP(pd, QPInitAttr(scq=cq, rcq=cq, srq=srq, cap=QPCap(max_recv_wr=1000))) as qp:
        assert (qp.cap.max_recv_wr, qp.cap.max_recv_sge) == (0, 0), "receives come from the shared queue"
    cq.close()


def test_invalid_queue_pairs_are_refused(context: Context) -> None:
    elsewhere = context_of(RecordingDevice())
    pd, cq, other = PD(context), CQ(context, 8), CQ(elsewhere, 8)
    for init in (QPInitAttr(scq=cq), QPInitAttr(rcq=cq)):
        with fails(errno.EINVAL, "two completion queues"):
            QP(pd, init)
    with SRQ(PD(elsewhere)) as srq:
        for init in (QPInitAttr(scq=cq, rcq=other), QPInitAttr(scq=other, rcq=cq), QPInitAttr(scq=cq, rcq=cq, srq=srq)):
            with fails(errno.EINVAL, "of different devices"):
                QP(pd, init)
    with fails(errno.EOPNOTSUPP, "no queue pairs of type XRC_SEND"):
        QP(pd, QPInitAttr(qp_type=QPType.XRC_SEND, scq=cq, rcq=cq))
    cq.close()
    other.close()


def test_shared_receive_queue_is_queried_and_modified(context: Context) -> None:
    pd = PD(context)
    with SRQ(pd, SrqInitAttr(SrqAttr(max_wr=8, max_sge=2), "mine")) as srq:
        assert srq.srq_context == "mine"
        assert srq.query() == SrqAttr(8, 2, 0)
        srq.modify(SrqAttr(srq_limit=8), SrqAttrMask.LIMIT)
        assert srq.query() == SrqAttr(8, 2, 8)
        for limit in (9, -1):
            with fails(errno.EINVAL, f"srq_limit is {limit}"):
                srq.modify(SrqAttr(srq_limit=limit), SrqAttrMask.LIMIT)
        srq.modify(SrqAttr(4, 9, 1), 0)
        for mask in (SrqAttrMask.MAX_WR, 3):
            with fails(errno.EINVAL, "does not resize"):
                srq.modify(SrqAttr(max_wr=4, srq_limit=1), mask)
        with fails(errno.EINVAL, "unknown attribute bits 0x4"):
            srq.modify(SrqAttr(), 4)
        assert srq.query() == SrqAttr(8, 2, 8), "a refused change changes nothing"
    for attr in (SrqAttr(0), SrqAttr(129), SrqAttr(-1), SrqAttr(1, 5), SrqAttr(1, -1)):
        with fails(errno.EINVAL):
            SRQ(pd, SrqInitAttr(attr))


def test_shared_receive_queue_is_resized() -> None:
    limits = replace(LIMITS, device_cap_flags=DeviceCapFlag.SRQ_RESIZE)
    with PD(context_of(RecordingDevice(limits))) as pd, SRQ(pd, SrqInitAttr(SrqAttr(8, 2))) as srq:
        for size in (0, -1, LIMITS.max_srq_wr + 1):
            with fails(errno.EINVAL, f"max_wr is {size}, and may be 1 to 128"):
                srq.modify(SrqAttr(max_wr=size), SrqAttrMask.MAX_WR)
        with fails(errno.EINVAL, "srq_limit is 5"):
            srq.modify(SrqAttr(max_wr=4, srq_limit=5), 3)
        assert srq.query() == SrqAttr(8, 2, 0)
        srq.modify(SrqAttr(max_wr=20, srq_limit=20), 3)
        assert srq.query() == SrqAttr(20, 2, 20)


def test_address_handle_attributes_are_checked(context: Context) -> None:
    pd = PD(context)
    attr = AHAttr(is_global=True, gr=GlobalRoute(dgid=GIDS[0], sgid_index=1))
    with AH(pd, attr) as ah:
        attr.gr.sgid_index = 0
        assert (ah.pd, ah.attr.gr.sgid_index) == (pd, 1)
    with fails(errno.EINVAL, "create_ah: an address on Ethernet needs a GID"):
        AH(pd, AHAttr())
    for name, value in (("flow_label", 1 << 20), ("hop_limit", 256), ("traffic_class", -1)):
        bad = replace(attr, gr=replace(attr.gr))
        setattr(bad.gr, name, value)
        with fails(errno.EINVAL, f"{name} is {value}"):
            AH(pd, bad)
    for name, value in (("sl", 16), ("dlid", 1 << 16), ("static_rate", 256), ("src_path_bits", 128)):
        bad = replace(attr)
        setattr(bad, name, value)
        with fails(errno.EINVAL, f"{name} is {value}"):
            AH(pd, bad)


def test_address_vector_of_an_empty_row_is_refused(context: Context) -> None:
    attr = AHAttr(is_global=True, gr=GlobalRoute(dgid=GIDS[0], sgid_index=2))
    pd = PD(context)
    with fails(errno.ENODATA, "create_ah: port 1 has no GID at index 2"):
        AH(pd, attr)
    attr.gr.sgid_index = context.query_port(1).gid_tbl_len
    with fails(errno.EINVAL, "create_ah: port 1 has no GID at index 4"):
        AH(pd, attr)


def test_modify_accepts_a_plain_integer_mask(context: Context) -> None:
    pd, cq = PD(context), CQ(context, 8)
    plain: Any = 0b110001
    with QP(pd, QPInitAttr(scq=cq, rcq=cq)) as qp:
        with fails(errno.EINVAL, "missing ACCESS_FLAGS"):
            qp.modify(QPAttr(qp_state=QPState.INIT), plain)
        qp.modify(QPAttr(qp_state=QPState.INIT), plain | QPAttrMask.ACCESS_FLAGS)
        assert qp.state is QPState.INIT
    cq.close()
