"""libibverbs's calls with C's names, and the structures with C's field names."""

from __future__ import annotations

import errno
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest

import rdmacm
from rdmacm import cma, verbs
from rdmacm.cma import refused as cma_refused
from rdmacm.cma import structures
from rdmacm.testing import Fabric


def refused(call: Callable[[], object], code: int = errno.EINVAL) -> rdmacm.RdmaError:
    with pytest.raises(rdmacm.RdmaError) as error:
        call()
    assert error.value.errno == code
    return error.value


@contextmanager
def loopback_context() -> Iterator[rdmacm.Context]:
    devices = cma.ibv_get_device_list()
    device = next(each for each in devices if cma.ibv_get_device_name(each) == "soft_lo")
    context = cma.ibv_open_device(device)
    cma.ibv_free_device_list(devices)
    assert devices == []
    yield context
    cma.ibv_close_device(context)


def init_attr(cq: rdmacm.verbs.CQ) -> cma.ibv_qp_init_attr:
    attr = cma.ibv_qp_init_attr(send_cq=cq, recv_cq=cq, qp_type=cma.IBV_QPT_RC)
    attr.cap.max_send_wr = attr.cap.max_recv_wr = 4
    attr.cap.max_send_sge = attr.cap.max_recv_sge = 1
    return attr


# -- structures -----------------------------------------------------------------------------------------


def test_structures_of_the_program_are_zero_at_first() -> None:
    for name in ("ibv_qp_cap", "ibv_srq_attr", "ibv_sge", "ibv_send_wr", "ibv_recv_wr", "rdma_conn_param"):
        made = getattr(cma, name)()
        fields = [each for base in type(made).__mro__ for each in getattr(base, "__slots__", ())]
        assert len(fields) > 1
        assert {field for field in fields if getattr(made, field)} == set(), name
    assert (cma.ibv_qp_attr().port_num, cma.ibv_qp_attr().path_mtu, cma.ibv_ah_attr().port_num) == (0, 0, 0)
    assert (cma.ibv_ah_attr().grh.hop_limit, cma.ibv_srq_init_attr().attr.max_wr) == (0, 0)
    assert cma.ibv_qp_init_attr().cap == cma.ibv_qp_cap()


@pytest.mark.parametrize("kind", [cma.ibv_send_wr, cma.ibv_recv_wr])
def test_elements_and_their_number_are_set_as_in_c(kind: type[cma.ibv_send_wr | cma.ibv_recv_wr]) -> None:
    first, second = cma.ibv_sge(1, 2, 3), cma.ibv_sge(4, 5, 6)
    wr = kind()
    wr.sg_list = first
    wr.num_sge = 1
    assert (wr.sg, wr.sg_list, wr.num_sge) == ([first], [first], 1)
    wr.sg_list = [first, second]
    assert (wr.sg, wr.num_sge) == ([first], 1), "the number stays, as in C"
    wr.num_sge = 0
    assert (list(wr.sg), wr.sg_list, wr.num_sge) == ([], [first, second], 0)
    wr.num_sge = 2
    assert wr.sg == [first, second]
    wr.sg_list = second
    assert (wr.sg, wr.num_sge) == ([second], 1)
    wr.sg = [first, second]
    wr.num_sge = 1
    assert wr.sg == [first]
    for count in (3, -1):
        with pytest.raises(ValueError, match=f"num_sge cannot be {count}: sg_list has 2"):
            wr.num_sge = count
    for wrong in (7, b"text", None):
        with pytest.raises(TypeError, match="sg_list takes an ibv_sge or a list of them"):
            wr.sg_list = wrong  # type: ignore[assignment]
    begun = kind()
    begun.num_sge = 1  # before the list
    assert begun.num_sge == 1
    begun.sg_list = first
    assert begun.sg == [first]


def test_number_without_elements_is_not_posted() -> None:
    host = Fabric().host("a", "10.0.0.1/24")
    with rdmacm.CmId(provider=host.provider) as cmid:
        cmid.bind_addr(("10.0.0.1", 0))
        qp = cmid.create_qp(verbs.QPInitAttr(sq_sig_all=1))
        wr = cma.ibv_recv_wr(wr_id=4)
        wr.num_sge = 1
        with pytest.raises(rdmacm.RdmaError, match="wr_id 4: a buffer that is not registered") as caught:
            cma.ibv_post_recv(cmid.qp, wr)
        assert caught.value.errno == errno.EINVAL
        with pytest.raises(rdmacm.RdmaError, match=r"sg is SGE\(.*\), not a list of elements"):
            qp.post_recv(verbs.RecvWR(1, verbs.SGE(1, 2, 3)))  # type: ignore[arg-type]
        cmid.destroy_qp()


def test_what_an_unbound_id_lacks_is_refused() -> None:
    for call, what in (
        (lambda id: cma.ibv_alloc_pd(id.verbs), "device"),
        (lambda id: cma.ibv_create_cq(id.verbs, 1), "device"),
        (lambda id: cma.ibv_post_send(id.qp, cma.ibv_send_wr()), "queue pair"),
    ):
        with cma.rdma_cm_id(provider="soft") as cmid, pytest.raises(rdmacm.RdmaError, match=f"there is no {what}"):
            call(cmid)


def test_both_names_are_of_one_field() -> None:
    wr = cma.ibv_send_wr(sg_list=[cma.ibv_sge(1, 2, 3)])
    assert (wr.sg is wr.sg_list, wr.num_sge) == (True, 1)
    wr.sg_list = []
    assert wr.sg == []
    wr.wr.rdma.remote_addr, wr.wr.rdma.rkey = 4, 5
    assert (wr.remote_addr, wr.rkey) == (4, 5)
    wr.wr.atomic.compare_add, wr.wr.ud.remote_qpn = 6, 7
    assert (wr.compare_add, wr.remote_qpn) == (6, 7)
    recv = cma.ibv_recv_wr(sg_list=[cma.ibv_sge()])
    assert (recv.sg is recv.sg_list, recv.num_sge) == (True, 1)
    ah = cma.ibv_ah_attr(grh=cma.ibv_global_route(sgid_index=3))
    assert ah.gr is ah.grh
    assert replace(ah, gr=replace(ah.gr, sgid_index=4)).grh.sgid_index == 4
    hints = cma.rdma_addrinfo(ai_flags=cma.RAI_PASSIVE)
    hints.ai_port_space = cma.RDMA_PS_TCP
    hints.ai_src_addr = ("127.0.0.1", 1)
    assert (hints.flags, hints.port_space, hints.src_addr) == (1, cma.RDMA_PS_TCP, ("127.0.0.1", 1))
    assert (hints.ai_src_len, hints.ai_dst_len, hints.ai_next) == (16, 0, None)
    with pytest.raises(AttributeError):
        hints.ai_src_len = 5
    param = cma.rdma_conn_param(retry_count=3)
    param.private_data = b"data"
    assert (param.private_data_len, param.conn is param, replace(param, qp_num=1).retry_count) == (4, True, 3)
    for mutable in (hints, param):
        with pytest.raises(TypeError):
            hash(mutable)


def test_package_classes_have_c_names_and_are_the_same() -> None:
    assert (cma.rdma_cm_event, cma.ibv_wc) == (rdmacm.CmEvent, rdmacm.verbs.WC)
    assert issubclass(cma.rdma_cm_id, rdmacm.CmId)


def test_star_import_and_pydoc_have_functions_structures_and_constants() -> None:
    names: dict[str, object] = {}
    exec("from rdmacm.cma import *", names)
    assert {"rdma_connect", "ibv_post_send", "gai_strerror", "ibv_send_wr", "AF_IB", "EAI_NONAME"} <= set(names)
    assert set(vars(structures)["__all__"]) <= set(names)
    assert not {"TYPE_CHECKING", "verbs", "structures"} & set(names)
    done = subprocess.run(
        [sys.executable, "-m", "pydoc", "rdmacm.cma"], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.count("\n") < 2500
    functions = done.stdout[done.stdout.index("\nFUNCTIONS\n") : done.stdout.index("\nDATA\n")]
    assert all(f"    {name}(" in functions for name in ("rdma_connect", "ibv_poll_cq", "rdma_getaddrinfo"))


def test_resolved_entries_have_c_names_and_are_linked() -> None:
    hints = cma.rdma_addrinfo(ai_port_space=cma.RDMA_PS_TCP)
    found = cma.rdma_getaddrinfo("127.0.0.1", "7471", hints)
    assert (found[0].ai_dst_addr, found[0].ai_family) == (("127.0.0.1", 7471), cma.AF_INET)
    linked = [found[0]]
    while (following := linked[-1].ai_next) is not None:
        linked.append(following)
    assert linked == found
    with pytest.raises(rdmacm.GaiError) as error:
        cma.rdma_getaddrinfo(None, None, hints)
    assert error.value.errno == cma.EAI_NONAME
    assert cma.gai_strerror(cma.EAI_NONAME) == "Name or service not known"


def test_events_and_routes_have_c_names() -> None:
    channel = cma.rdma_create_event_channel()
    listen_id = cma.rdma_create_id(channel, None, cma.RDMA_PS_TCP)
    cma.rdma_bind_addr(listen_id, ("127.0.0.1", 0))
    cma.rdma_listen(listen_id, 1)
    assert channel.fd == channel.fileno() >= 0

    def next_id(kind: int) -> rdmacm.CmId:
        event = cma.rdma_get_cm_event(channel)
        assert event.event == event.type == kind
        if kind == cma.RDMA_CM_EVENT_CONNECT_REQUEST:
            assert isinstance(event.param, rdmacm.ConnParam)
            assert event.param.conn.private_data[:5] == b"hello"
            assert event.param.conn.private_data_len == len(event.private_data)
        cma.rdma_ack_cm_event(event)
        return event.id

    id = cma.rdma_create_id(channel, None, cma.RDMA_PS_TCP)
    cma.rdma_resolve_addr(id, None, ("127.0.0.1", cma.rdma_get_src_port(listen_id)), 2000)
    next_id(cma.RDMA_CM_EVENT_ADDR_RESOLVED)
    cma.rdma_resolve_route(id, 2000)
    next_id(cma.RDMA_CM_EVENT_ROUTE_RESOLVED)
    assert id.route.addr.dst_addr == id.peer_addr
    assert id.route.addr.addr.ibaddr.sgid == id.route.sgid == rdmacm.Gid("::ffff:127.0.0.1")
    cma.rdma_connect(id, cma.rdma_conn_param(private_data=b"hello", qp_num=0x10))
    child = next_id(cma.RDMA_CM_EVENT_CONNECT_REQUEST)
    cma.rdma_reject(child)
    assert next_id(cma.RDMA_CM_EVENT_REJECTED) is id
    for each in (child, id, listen_id):
        cma.rdma_destroy_id(each)
    cma.rdma_destroy_event_channel(channel)


# -- calls ----------------------------------------------------------------------------------------------


def test_devices_are_listed_opened_and_queried() -> None:
    device = cma.ibv_get_device_list()[0]
    assert cma.ibv_get_device_index(device) == device.index
    assert cma.ibv_get_device_guid(device) == device.node_guid
    with loopback_context() as context:
        assert cma.ibv_query_device(context).max_qp > 0
        assert cma.ibv_query_device_ex(context).orig_attr == cma.ibv_query_device(context)
        found = cma.ibv_query_device_ex(context)
        assert not found.odp_caps.general_caps & (cma.IBV_ODP_SUPPORT | cma.IBV_ODP_SUPPORT_IMPLICIT)
        assert not found.tm_caps.flags & cma.IBV_TM_CAP_RC
        assert cma.ibv_is_qpt_supported(cma.ibv_query_device_ex(context).tso_caps.supported_qpts, cma.IBV_QPT_UD) == 0
        assert cma.ibv_is_qpt_supported(1 << cma.IBV_QPT_UD, cma.IBV_QPT_UD) == 1
        refused(lambda: cma.ibv_query_rt_values_ex(context, cma.IBV_VALUES_MASK_RAW_CLOCK), errno.EOPNOTSUPP)
        port = cma.ibv_query_port(context, 1)
        assert (port.state, port.link_layer) == (cma.IBV_PORT_ACTIVE, cma.IBV_LINK_LAYER_ETHERNET)
        gid = cma.ibv_query_gid(context, 1, 0)
        assert cma.ibv_query_gid_ex(context, 1, 0).gid == gid == cma.ibv_query_gid_table(context, 8)[0].gid
        assert cma.ibv_get_pkey_index(context, 1, cma.ibv_query_pkey(context, 1, 0)) == 0
    cma.ibv_fork_init()
    assert cma.ibv_is_fork_initialized() == cma.IBV_FORK_UNNEEDED


def connected(
    context: rdmacm.Context,
    pd: rdmacm.verbs.PD,
    cq: rdmacm.verbs.CQ,
    srq: rdmacm.verbs.SRQ | None = None,
    pair: Sequence[rdmacm.verbs.QP] = (),
) -> Sequence[rdmacm.verbs.QP]:
    """Two queue pairs of one device that are each other's peer; those of ``pair``, if there are any."""
    attr_of_both = init_attr(cq)
    attr_of_both.srq = srq
    pair = pair or [cma.ibv_create_qp(pd, attr_of_both) for _ in range(2)]
    for qp, peer in zip(pair, reversed(pair), strict=True):
        attr = cma.ibv_qp_attr()
        attr.qp_state = cma.IBV_QPS_INIT
        attr.port_num = 1
        attr.qp_access_flags = cma.IBV_ACCESS_REMOTE_WRITE
        mask = cma.IBV_QP_STATE | cma.IBV_QP_PKEY_INDEX | cma.IBV_QP_PORT | cma.IBV_QP_ACCESS_FLAGS
        cma.ibv_modify_qp(qp, attr, mask)
        attr.qp_state = cma.IBV_QPS_RTR
        attr.path_mtu = cma.IBV_MTU_1024
        attr.dest_qp_num = peer.qp_num
        attr.min_rnr_timer = 12
        attr.ah_attr.is_global = True
        attr.ah_attr.port_num = 1
        attr.ah_attr.gr.dgid = cma.ibv_query_gid(context, 1, 0)
        attr.ah_attr.gr.hop_limit = 1
        mask = cma.IBV_QP_STATE | cma.IBV_QP_AV | cma.IBV_QP_PATH_MTU | cma.IBV_QP_DEST_QPN | cma.IBV_QP_RQ_PSN
        cma.ibv_modify_qp(qp, attr, mask | cma.IBV_QP_MAX_DEST_RD_ATOMIC | cma.IBV_QP_MIN_RNR_TIMER)
        attr.qp_state = cma.IBV_QPS_RTS
        attr.timeout, attr.retry_cnt, attr.rnr_retry = 14, 7, 7
        mask = cma.IBV_QP_STATE | cma.IBV_QP_TIMEOUT | cma.IBV_QP_RETRY_CNT | cma.IBV_QP_RNR_RETRY
        cma.ibv_modify_qp(qp, attr, mask | cma.IBV_QP_SQ_PSN | cma.IBV_QP_MAX_QP_RD_ATOMIC)
    return pair


def test_work_requests_are_posted_and_completed() -> None:
    with loopback_context() as context:
        pd = cma.ibv_alloc_pd(context)
        channel = cma.ibv_create_comp_channel(context)
        cq = cma.ibv_create_cq(context, 8, "mine", channel, 0)
        cma.ibv_req_notify_cq(cq, 0)
        a, b = connected(context, pd, cq)
        memory = bytearray(b"one two " + bytes(8))
        mr = cma.ibv_reg_mr(pd, memory, None, cma.IBV_ACCESS_LOCAL_WRITE)
        refused(lambda: cma.ibv_reg_mr(pd, memory, 17, 0))

        second = cma.ibv_recv_wr(wr_id=2, sg_list=[cma.ibv_sge(mr.addr + 12, 4, mr.lkey)])
        cma.ibv_post_recv(b, cma.ibv_recv_wr(wr_id=1, next=second, sg_list=[cma.ibv_sge(mr.addr + 8, 4, mr.lkey)]))
        last = cma.ibv_send_wr(wr_id=4, opcode=cma.IBV_WR_SEND_WITH_IMM, imm_data=7)
        last.sg_list = [cma.ibv_sge(mr.addr + 4, 4, mr.lkey)]
        first = cma.ibv_send_wr(wr_id=3, next=last, opcode=cma.IBV_WR_SEND, send_flags=cma.IBV_SEND_SIGNALED)
        first.sg_list = [cma.ibv_sge(mr.addr, 4, mr.lkey)]
        cma.ibv_post_send(a, first)

        completed: dict[int, rdmacm.verbs.WC] = {}
        while len(completed) < 3:
            assert cma.ibv_get_cq_event(channel) == (cq, "mine")
            cma.ibv_ack_cq_events(cq, 1)
            cma.ibv_req_notify_cq(cq, 0)
            completed |= {wc.wr_id: wc for wc in cma.ibv_poll_cq(cq, 8)}
        assert sorted(completed) == [1, 2, 3]
        assert (completed[2].opcode, completed[2].imm_data) == (cma.IBV_WC_RECV, 7)
        assert memory[8:] == b"one two "

        bad = cma.ibv_send_wr(opcode=cma.IBV_WR_SEND, sg_list=[cma.ibv_sge()] * 2)
        assert refused(lambda: cma.ibv_post_send(a, [bad])).bad_wr is bad
        attr, made_with = cma.ibv_query_qp(a, cma.IBV_QP_STATE)
        assert (attr.qp_state, attr.dest_qp_num, attr.port_num) == (cma.IBV_QPS_RTS, b.qp_num, 1)
        assert isinstance(attr.ah_attr, cma.ibv_ah_attr)
        assert attr.ah_attr.grh.dgid == cma.ibv_query_gid(context, 1, 0)
        assert (made_with.send_cq, made_with.recv_cq, made_with.cap.max_send_wr) == (cq, cq, 4)
        for qp in (a, b):
            cma.ibv_destroy_qp(qp)
        cma.ibv_dereg_mr(mr)
        cma.ibv_destroy_cq(cq)
        cma.ibv_destroy_comp_channel(channel)
        cma.ibv_dealloc_pd(pd)


def test_extended_queue_pairs_post_and_complete() -> None:
    with loopback_context() as context:
        pd = cma.ibv_alloc_pd(context)
        cq = cma.ibv_create_cq_ex(context, cma.ibv_cq_init_attr_ex(cqe=8, wc_flags=cma.IBV_WC_STANDARD_FLAGS))
        assert cma.ibv_cq_ex_to_cq(cq) is cq
        attr = cma.ibv_qp_init_attr_ex(
            send_cq=cq,
            recv_cq=cq,
            cap=cma.ibv_qp_cap(8, 8, 2, 2, 16),
            comp_mask=cma.IBV_QP_INIT_ATTR_PD | cma.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            pd=pd,
            send_ops_flags=cma.IBV_QP_EX_WITH_SEND | cma.IBV_QP_EX_WITH_RDMA_WRITE,
        )
        made = [cma.ibv_create_qp_ex(context, attr) for _ in range(2)]
        a, b = connected(context, pd, cq, pair=made)
        mr = cma.ibv_reg_mr(pd, bytearray(b"12345678"), 8, cma.IBV_ACCESS_LOCAL_WRITE | cma.IBV_ACCESS_REMOTE_WRITE)
        cma.ibv_post_recv(b, cma.ibv_recv_wr(wr_id=1, sg_list=[cma.ibv_sge(mr.addr + 4, 4, mr.lkey)]))
        qp = cma.ibv_qp_to_qp_ex(a)
        cma.ibv_wr_start(qp)
        cma.ibv_wr_abort(qp)
        cma.ibv_wr_start(qp)
        qp.wr_id, qp.wr_flags = 2, cma.IBV_SEND_SIGNALED
        cma.ibv_wr_rdma_write(qp, mr.rkey, mr.addr)
        cma.ibv_wr_set_inline_data_list(qp, 1, [cma.ibv_data_buf(b"ab--", 2)])
        qp.wr_id = 3
        cma.ibv_wr_send(qp)
        cma.ibv_wr_set_sge(qp, mr.lkey, mr.addr + 2, 2)
        cma.ibv_wr_complete(qp)
        read: dict[int, tuple[int, int]] = {}
        while len(read) < 3:
            assert cq.wait(10)
            assert cma.ibv_start_poll(cq, cma.ibv_poll_cq_attr()) == 0
            assert cq.status == cma.IBV_WC_SUCCESS
            read[cq.wr_id] = (cma.ibv_wc_read_opcode(cq), cma.ibv_wc_read_qp_num(cq))
            assert cma.ibv_wc_read_wc_flags(cq) == cma.ibv_wc_read_vendor_err(cq) == 0
            cma.ibv_end_poll(cq)
        assert read == {
            1: (cma.IBV_WC_RECV, b.qp_num),
            2: (cma.IBV_WC_RDMA_WRITE, a.qp_num),
            3: (cma.IBV_WC_SEND, a.qp_num),
        }
        assert mr.read(8) == b"ab343478"
        for qp in made:
            cma.ibv_destroy_qp(qp)
        plain = connected(context, pd, cq)
        assert cma.ibv_query_qp_data_in_order(plain[0], cma.IBV_WR_RDMA_WRITE, 0) == 0
        refused(lambda: cma.ibv_query_qp_data_in_order(plain[0], 99, 0))
        assert cma.ibv_query_qp_data_in_order(plain[0], cma.IBV_WR_SEND, 1) == 0
        refused(lambda: cma.ibv_query_qp_data_in_order(plain[0], cma.IBV_WR_SEND, 2))
        refused(lambda: cma.ibv_qp_to_qp_ex(plain[0]), errno.EOPNOTSUPP)
        for each in plain:
            cma.ibv_destroy_qp(each)
        cma.ibv_dereg_mr(mr)
        cma.ibv_destroy_cq(cq)
        cma.ibv_dealloc_pd(pd)


def test_shared_receive_queue_reports_its_limit() -> None:
    with loopback_context() as context:
        pd = cma.ibv_alloc_pd(context)
        cq = cma.ibv_create_cq(context, 8)
        srq = cma.ibv_create_srq(pd, cma.ibv_srq_init_attr(attr=cma.ibv_srq_attr(max_wr=4, max_sge=1)))
        pair = connected(context, pd, cq, srq)
        mr = cma.ibv_reg_mr(pd, bytearray(8), 8, cma.IBV_ACCESS_LOCAL_WRITE)
        cma.ibv_post_srq_recv(srq, [cma.ibv_recv_wr(sg_list=[cma.ibv_sge(mr.addr, 8, mr.lkey)])] * 2)
        cma.ibv_modify_srq(srq, cma.ibv_srq_attr(srq_limit=2), cma.IBV_SRQ_LIMIT)
        assert (cma.ibv_query_srq(srq).srq_limit, cma.ibv_query_srq(srq).max_wr) == (2, 4)
        cma.ibv_modify_srq(srq, cma.ibv_srq_attr(max_wr=9), cma.IBV_SRQ_MAX_WR)
        assert (cma.ibv_query_srq(srq).srq_limit, cma.ibv_query_srq(srq).max_wr) == (2, 9)
        cma.ibv_resize_cq(cq, 3)
        assert cq.cqe == 3
        cma.ibv_post_send(pair[0], cma.ibv_send_wr(opcode=cma.IBV_WR_SEND, send_flags=cma.IBV_SEND_SIGNALED))
        assert cq.wait(10)
        event = cma.ibv_get_async_event(context)
        assert (event.event_type, event.element) == (cma.IBV_EVENT_SRQ_LIMIT_REACHED, srq)
        cma.ibv_ack_async_event(event)
        for qp in pair:
            cma.ibv_destroy_qp(qp)
        cma.ibv_dereg_mr(mr)
        cma.ibv_destroy_srq(srq)
        cma.ibv_destroy_cq(cq)
        address = cma.ibv_ah_attr(is_global=1, port_num=1)
        address.grh.dgid = cma.ibv_query_gid(context, 1, 0)
        ah = cma.ibv_create_ah(pd, address)
        assert ah.attr.gr.dgid == address.gr.dgid
        cma.ibv_destroy_ah(ah)
        cma.ibv_dealloc_pd(pd)


def test_texts_and_rates_are_those_of_libibverbs() -> None:
    assert cma.ibv_wc_status_str(cma.IBV_WC_SUCCESS) == "success"
    assert cma.ibv_wc_status_str(cma.IBV_WC_TM_RNDV_INCOMPLETE) == "TM software rendezvous"
    assert cma.ibv_node_type_str(cma.IBV_NODE_CA) == "InfiniBand channel adapter"
    assert cma.ibv_port_state_str(cma.IBV_PORT_ACTIVE) == "active"
    assert cma.ibv_event_type_str(cma.IBV_EVENT_COMM_EST) == "communication established"
    for text in (cma.ibv_wc_status_str, cma.ibv_node_type_str, cma.ibv_port_state_str, cma.ibv_event_type_str):
        assert (text(-1), text(99)) == ("unknown", "unknown")
    for kinds, text in (
        (rdmacm.verbs.WCStatus, cma.ibv_wc_status_str),
        (rdmacm.verbs.NodeType, cma.ibv_node_type_str),
        (rdmacm.verbs.PortState, cma.ibv_port_state_str),
        (rdmacm.verbs.EventType, cma.ibv_event_type_str),
    ):
        assert "unknown" not in map(text, kinds)
    assert (cma.ibv_rate_to_mult(cma.IBV_RATE_40_GBPS), cma.ibv_rate_to_mult(cma.IBV_RATE_100_GBPS)) == (16, -1)
    assert (cma.ibv_rate_to_mbps(cma.IBV_RATE_100_GBPS), cma.ibv_rate_to_mbps(99)) == (103125, -1)
    assert (cma.mult_to_ibv_rate(16), cma.mult_to_ibv_rate(-1)) == (cma.IBV_RATE_40_GBPS, cma.IBV_RATE_MAX)
    assert (cma.mbps_to_ibv_rate(25781), cma.mbps_to_ibv_rate(1)) == (cma.IBV_RATE_25_GBPS, cma.IBV_RATE_MAX)
    assert cma.ibv_flow_label_to_udp_sport(0xFFFFF) == 0xC000 | 0x3FC0


# -- calls that no device supports ----------------------------------------------------------------------


def test_calls_that_no_device_supports_are_refused_as_on_rxe() -> None:
    with (
        loopback_context() as context,
        cma.ibv_alloc_pd(context) as pd,
        cma.ibv_create_cq(context, 4) as cq,
        cma.ibv_create_qp(pd, init_attr(cq)) as qp,
        cma.ibv_create_srq(pd, rdmacm.verbs.SrqInitAttr()) as srq,
    ):
        objects = {"context": context, "pd": pd, "cq": cq, "qp": qp, "srq": srq}
        for name in vars(cma_refused)["__all__"]:
            function = getattr(cma, name)
            arguments = [objects.get(each, 0) for each in inspect.signature(function).parameters]
            error = refused(partial(function, *arguments), errno.EOPNOTSUPP)
            assert error.step == name.removeprefix("ibv_")
    refused(qp.query_ece, errno.EBADF)
