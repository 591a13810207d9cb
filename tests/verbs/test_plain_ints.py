"""Plain ints where an enumeration is expected, as in C; and the errors for numbers and types that are wrong."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from rdmacm import CmId, RdmaError, create_ep, event_str
from rdmacm.addrinfo import AddrInfo
from rdmacm.verbs import (
    AH,
    CQ,
    CQEX,
    MR,
    PD,
    QP,
    SRQ,
    AccessFlag,
    AHAttr,
    Context,
    CqInitAttrEx,
    GlobalRoute,
    MigState,
    Mtu,
    QPAttr,
    QPAttrMask,
    QPCap,
    QPEx,
    QPInitAttr,
    QPInitAttrEx,
    QPState,
    QPType,
    SendWR,
    SrqAttr,
    SrqInitAttr,
)
from support.verbs import GIDS

#: What no enumeration and no number field takes. A call raises EINVAL or TypeError for it.
WRONG: tuple[Any, ...] = (None, 1.5, "2", object(), [2])


class Bench(NamedTuple):
    """A device, and what calls need of it."""

    context: Context
    pd: PD
    cq: CQ
    qp: QP
    cmid: CmId


@pytest.fixture
def bench(context: Context) -> Iterator[Bench]:
    with PD(context) as pd, CQ(context, 16) as cq, QP(pd, QPInitAttr(scq=cq, rcq=cq)) as qp, CmId() as cmid:
        cmid.bind_addr(("127.0.0.1", 0))
        qp.backend.state = QPState.RTS
        yield Bench(context, pd, cq, qp, cmid)


def made_qp(b: Bench, **fields: Any) -> None:
    QP(b.pd, QPInitAttr(scq=b.cq, rcq=b.cq, **fields)).close()


def id_qp(b: Bench, **fields: Any) -> None:
    b.cmid.create_qp(QPInitAttr(**fields))
    b.cmid.destroy_qp()


def made_srq(b: Bench, **fields: Any) -> None:
    SRQ(b.pd, SrqInitAttr(SrqAttr(**fields))).close()


def made_ah(b: Bench, **fields: Any) -> None:
    AH(b.pd, AHAttr(is_global=True, gr=GlobalRoute(dgid=GIDS[0]), **fields)).close()


def routed_ah(b: Bench, **fields: Any) -> None:
    AH(b.pd, AHAttr(is_global=True, gr=GlobalRoute(**{"dgid": GIDS[0], **fields}))).close()


def modified(b: Bench, before: QPState, mask: QPAttrMask, **fields: Any) -> None:
    b.qp.backend.state = before
    try:
        b.qp.modify(QPAttr(**fields), mask)
    finally:
        b.qp.backend.state = QPState.RTS


def to_rtr(b: Bench, **fields: Any) -> None:
    mask = QPAttrMask.STATE | QPAttrMask.AV | QPAttrMask.PATH_MTU | QPAttrMask.DEST_QPN | QPAttrMask.RQ_PSN
    mask |= QPAttrMask.MAX_DEST_RD_ATOMIC | QPAttrMask.MIN_RNR_TIMER
    ah = AHAttr(is_global=True, gr=GlobalRoute(dgid=GIDS[0]))
    modified(b, QPState.INIT, mask, **{"qp_state": QPState.RTR, "ah_attr": ah, **fields})


def to_init(b: Bench, **fields: Any) -> None:
    mask = QPAttrMask.STATE | QPAttrMask.PKEY_INDEX | QPAttrMask.PORT | QPAttrMask.ACCESS_FLAGS
    modified(b, QPState.RESET, mask, **{"qp_state": QPState.INIT, **fields})


def from_rts(b: Bench, mask: QPAttrMask, **fields: Any) -> None:
    modified(b, QPState.RTS, mask, **fields)


def sent(b: Bench, opcode: Any = 2, flags: Any = 2) -> None:
    with MR(b.pd, bytearray(64), AccessFlag.LOCAL_WRITE) as mr:
        b.qp.post_send(SendWR(1, opcode, [mr.sge(0, 8)], flags))
        b.qp.backend.sent.clear()  # type: ignore[attr-defined]


def extended(b: Bench, **fields: Any) -> None:
    QPEx(b.pd, QPInitAttrEx(scq=b.cq, rcq=b.cq, **fields)).close()


def batch(b: Bench, flags: Any) -> None:
    with QPEx(b.pd, QPInitAttr(scq=b.cq, rcq=b.cq)) as qp:
        qp.backend.state = QPState.RTS
        qp.wr_start()
        qp.wr_flags = flags
        qp.wr_send()
        qp.wr_complete()


def polled(b: Bench, **fields: Any) -> None:
    CQEX(b.context, CqInitAttrEx(8, **fields)).close()


def registered(b: Bench, access: Any) -> None:
    MR(b.pd, bytearray(8), access).close()


def made_id(port_space: Any = 0x106, qp_type: Any = None) -> None:
    CmId(port_space=port_space, qp_type=qp_type).destroy()


def endpoint(**fields: Any) -> None:
    create_ep(AddrInfo(**{"flags": 1, "port_space": 0x106, "src_addr": ("127.0.0.1", 0), **fields})).destroy()


def initial(b: Bench, state: Any) -> None:
    b.cmid.init_qp_attr(state)


def option(b: Bench, level: Any = 0, name: Any = 0) -> None:
    b.cmid.set_option(level, name, 8)


STATE, MTU, MIG = QPAttrMask.STATE, QPAttrMask.PATH_MTU, QPAttrMask.PATH_MIG_STATE
#: Argument; the call with a value for it; numbers it takes; numbers it refuses with EINVAL.
ARGUMENTS: list[tuple[str, Callable[[Bench, Any], object], tuple[int, ...], tuple[int, ...]]] = [
    ("QPInitAttr.qp_type", lambda b, v: made_qp(b, qp_type=v), (2, 3, 4), (0, 99, -1)),
    ("create_qp: qp_type", lambda b, v: id_qp(b, qp_type=v), (2,), (3, 4, 8, 99, -1)),
    ("QPAttr.qp_state", lambda b, v: from_rts(b, STATE, qp_state=v), (0, 3, 4, 6), (2, 7, 99, -1)),
    ("QPAttr.cur_qp_state", lambda b, v: from_rts(b, QPAttrMask.CUR_STATE, cur_qp_state=v), (3,), (2, 99, -1)),
    ("QPAttr.path_mtu", lambda b, v: to_rtr(b, path_mtu=v), (1, 5), (0, 6, 99, -1)),
    ("QPAttr.path_mig_state", lambda b, v: from_rts(b, MIG, path_mig_state=v), (0, 1, 2), (3, 99, -1)),
    ("QPAttr.qp_access_flags", lambda b, v: to_init(b, qp_access_flags=v), (0, 2, 15), (1 << 19, 1 << 31, -1)),
    ("QPAttr.ah_attr", lambda b, v: to_rtr(b, ah_attr=v), (), (0, 99)),
    ("QPAttr.timeout", lambda b, v: to_rtr(b, min_rnr_timer=v), (0, 31), (32, -1)),
    ("modify: mask", lambda b, v: b.qp.modify(QPAttr(qp_state=QPState.RTS), v), (0, 1), (1 << 30, 128, -1)),
    ("modify: attr", lambda b, v: b.qp.modify(v, STATE), (), (0, 99)),
    ("MR: access", registered, (0, 1, 3, 7, 15), (2, 8, 1 << 19, -1)),
    ("SendWR.opcode", lambda b, v: sent(b, opcode=v), (0, 1, 2, 3, 4, 5, 6, 9, 15), (7, 8, 10, 11, 99, -1)),
    ("SendWR.send_flags", lambda b, v: sent(b, flags=v), (0, 1, 2, 4, 7), (32, 99, -1)),
    ("QPInitAttr.cap", lambda b, v: made_qp(b, cap=v), (), (0, 99)),
    ("create_qp: cap", lambda b, v: id_qp(b, cap=v), (), (0, 99)),
    ("QP: init_attr", lambda b, v: QP(b.pd, v), (), (0, 99)),
    ("QPCap.max_send_wr", lambda b, v: made_qp(b, cap=QPCap(max_send_wr=v)), (0, 64), (65, -1)),
    ("QPCap.max_recv_sge", lambda b, v: made_qp(b, cap=QPCap(max_recv_sge=v)), (0, 8), (9, -1)),
    ("SrqAttr.max_wr", lambda b, v: made_srq(b, max_wr=v), (1, 128), (0, 129, -1)),
    ("CQ: cqe", lambda b, v: CQ(b.context, v).close(), (1, 128), (0, 129, -1)),
    ("CQ.resize", lambda b, v: b.cq.resize(v), (1, 128), (0, 129, -1)),
    ("QPInitAttrEx.comp_mask", lambda b, v: extended(b, comp_mask=v), (0, 4, 65), (128, -1)),
    ("QPInitAttrEx.send_ops_flags", lambda b, v: extended(b, send_ops_flags=v), (0, 4, 0x27F), (1 << 13, -1)),
    ("QPEx.wr_flags", batch, (0, 2, 7), (32, -1)),
    ("QP.query_data_in_order: op", lambda b, v: b.qp.query_data_in_order(v), (0, 4), (99, -1)),
    ("QP.query_data_in_order: flags", lambda b, v: b.qp.query_data_in_order(0, v), (0, 1), (2, -1)),
    ("CqInitAttrEx.wc_flags", lambda b, v: polled(b, wc_flags=v), (0, 0x7F), (1 << 12, -1)),
    ("CqInitAttrEx.comp_mask", lambda b, v: polled(b, comp_mask=v), (0, 1), (4, -1)),
    ("CqInitAttrEx.flags", lambda b, v: polled(b, comp_mask=1, flags=v), (0, 1), (4, -1)),
    ("AHAttr.sl", lambda b, v: made_ah(b, sl=v), (0, 15), (16, -1)),
    ("AHAttr.static_rate", lambda b, v: made_ah(b, static_rate=v), (0, 2, 255), (256, -1)),
    ("GlobalRoute.dgid", lambda b, v: routed_ah(b, dgid=v), (), (0, 99)),
    ("GlobalRoute.hop_limit", lambda b, v: routed_ah(b, hop_limit=v), (0, 255), (256, -1)),
    ("GlobalRoute.sgid_index", lambda b, v: routed_ah(b, sgid_index=v), (0, 1), (4, 1 << 16, -1)),
    ("AHAttr.port_num", lambda b, v: made_ah(b, port_num=v), (1,), (0, 2, 256, -1)),
    ("QPAttr.port_num", lambda b, v: to_init(b, port_num=v), (1,), (0, 2, 256, -1)),
    ("QPAttr.pkey_index", lambda b, v: to_init(b, pkey_index=v), (0,), (1, 1 << 16, -1)),
    ("CmId: port_space", lambda b, v: made_id(port_space=v), (2, 0x106, 0x111, 0x13F), (0, 1, 99, -1)),
    ("CmId: qp_type", lambda b, v: made_id(0x13F, v), (2, 3, 4, 8, 9), (1, 99, -1)),
    ("CmId of TCP: qp_type", lambda b, v: made_id(0x106, v), (2, 4), (1, 99, -1)),
    ("create_ep: port_space", lambda b, v: endpoint(port_space=v), (0x106, 0x111), (0, 1, 99, -1)),
    ("create_ep: qp_type", lambda b, v: endpoint(qp_type=v), (0, 2), (99, -1)),
    ("init_qp_attr", initial, (1,), (7, 99, -1)),
    ("write_cm_event", lambda b, v: b.cmid.write_cm_event(v), (18,), (0, 17, 99, -1)),
]
#: What takes None for a default.
OPTIONAL = {"CmId: qp_type", "CmId of TCP: qp_type", "create_ep: qp_type"}


@contextmanager
def refusal(name: str, value: object, *kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except RdmaError as error:
        if error.errno != errno.EINVAL:
            raise
    except kinds:
        pass
    else:
        raise AssertionError(f"{name} = {value!r} is accepted")


def test_numbers_for_enumerations(bench: Bench) -> None:
    for name, call, good, bad in ARGUMENTS:
        for value in good:
            try:
                call(bench, value)
            except Exception as error:
                raise AssertionError(f"{name} = {value}") from error
        for value in bad:
            with refusal(name, value):
                call(bench, value)
        for wrong in WRONG:
            if wrong is not None or name not in OPTIONAL:
                with refusal(name, wrong, TypeError):
                    call(bench, wrong)


def test_types_that_exist_and_are_not_offered(bench: Bench) -> None:
    for value in (8, 9, 10, 255):
        with pytest.raises(RdmaError, match=f"queue pairs of type {QPType(value).name}") as raised:
            made_qp(bench, qp_type=value)
        assert raised.value.errno == errno.EOPNOTSUPP


def test_options_and_event_names(bench: Bench) -> None:
    for value in (99, -1, "0", 1.5):
        number: Any = value
        for arguments in ((number, 0, 8), (0, number, 8)):
            with pytest.raises(RdmaError) as raised:
                bench.cmid.set_option(*arguments)
            assert raised.value.errno == errno.ENOSYS
        with pytest.raises(RdmaError) as raised:
            bench.cmid.get_option(number)
        assert raised.value.errno == errno.ENOSYS
    bench.cmid.set_option(0, 0, 8)
    assert bench.cmid.get_option(0) == 8
    assert (event_str(0), event_str(99)) == ("RDMA_CM_EVENT_ADDR_RESOLVED", "UNKNOWN EVENT")


def test_queries_return_members(bench: Bench) -> None:
    """A device keeps what it was given."""
    found = QPAttr()
    plain: Any = (3, 1, 6)
    found.path_mtu, found.path_mig_state, found.qp_access_flags = plain
    bench.qp.backend.query = lambda: found  # type: ignore[method-assign]
    attr, _ = bench.qp.query()
    assert (attr.path_mtu, attr.path_mig_state) == (Mtu.MTU_1024, MigState.REARM)
    assert (type(attr.path_mtu), type(attr.path_mig_state)) == (Mtu, MigState)
    assert attr.qp_access_flags is AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_READ
    assert type(attr.qp_access_flags) is AccessFlag
