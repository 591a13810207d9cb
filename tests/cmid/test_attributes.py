"""What an id has from some call on: an error before that names the state, and None in an id with C's names."""

from __future__ import annotations

import errno

import pytest

from rdmacm import CmEventType, CmId, CmStateError, PortSpace, RdmaError, cma
from rdmacm.testing import MemoryNetwork, VirtualClock, memory_provider
from rdmacm.verbs import CQ, QPInitAttr
from support.pair import ADDRESSES, PORT, ends, refused

#: The members of C's structure, and the addresses, which C has behind calls.
MEMBERS = ("verbs", "pd", "qp", "srq", "send_cq", "recv_cq", "send_cq_channel", "recv_cq_channel", "event")


@pytest.mark.parametrize("name", [*MEMBERS, "local_addr", "peer_addr"])
def test_attribute_that_an_id_does_not_have_yet_is_an_error_with_the_state(name: str) -> None:
    with CmId(provider=memory_provider(MemoryNetwork(), VirtualClock())) as cmid:
        with pytest.raises(CmStateError, match=rf"^{name}: the id .* \(state IDLE\) \[EINVAL\]; try: ") as error:
            getattr(cmid, name)
        assert error.value.errno == errno.EINVAL
        assert (cmid.is_bound, cmid.has_qp, cmid.has_srq) == (False, False, False)
        assert (cmid.route.src_addr, cmid.route.dst_addr) == (None, None)


def test_attributes_are_there_once_the_id_is_resolved_and_has_its_queues() -> None:
    with ends() as both:
        cmid = both.a.resolve(ADDRESSES["ipv4"][1])
        assert cmid.is_bound
        assert cmid.pd.context.backend is cmid.verbs.backend
        assert (cmid.local_addr, cmid.peer_addr) == (cmid.route.src_addr, cmid.route.dst_addr)
        srq = cmid.create_srq()
        qp = cmid.create_qp()
        assert (cmid.has_qp, cmid.qp, cmid.has_srq, cmid.srq) == (True, qp, True, srq)
        assert (cmid.send_cq, cmid.recv_cq) == (qp.send_cq, qp.recv_cq)
        assert (cmid.send_cq_channel, cmid.recv_cq_channel) == (cmid.send_cq.comp_channel, cmid.recv_cq.comp_channel)
        cmid.destroy_qp()
        cmid.destroy_srq()
        assert (cmid.has_qp, cmid.has_srq) == (False, False)


def test_completion_queue_of_the_application_has_no_channel_of_the_id() -> None:
    with ends() as both:
        cmid = both.a.resolve(ADDRESSES["ipv4"][1])
        with CQ(cmid.verbs, 4) as cq:
            cmid.create_qp(QPInitAttr(scq=cq, rcq=cq))
            assert (cmid.send_cq, cmid.recv_cq) == (cq, cq)
            refused(lambda: cmid.send_cq_channel)
            cmid.destroy()


@pytest.mark.parametrize("name", MEMBERS)
def test_member_of_an_id_with_cs_names_is_none_where_cs_is_null(name: str) -> None:
    with cma.rdma_cm_id(provider=memory_provider(MemoryNetwork(), VirtualClock())) as id:
        assert getattr(id, name) is None


def test_members_of_an_id_with_cs_names_are_those_of_the_id() -> None:
    id = cma.rdma_create_id(None)
    cma.rdma_resolve_addr(id, None, ("127.0.0.1", 7471), 2000)
    assert id.event.type == cma.RDMA_CM_EVENT_ADDR_RESOLVED
    pd = cma.ibv_alloc_pd(id.verbs)
    id.pd = pd
    cma.rdma_create_qp(id, None, cma.ibv_qp_init_attr(cap=cma.ibv_qp_cap(1, 1, 1, 1)))
    assert (id.pd, id.qp.pd) == (pd, pd)
    cma.rdma_destroy_id(id)
    cma.ibv_dealloc_pd(pd)


def test_id_of_a_request_to_a_listener_with_cs_names_is_one_too() -> None:
    with ends() as both:
        listen_id = cma.rdma_cm_id(both.b.channel)
        both.b.ids.append(listen_id)
        listen_id.bind_addr((ADDRESSES["ipv4"][1], PORT))
        listen_id.listen()
        _, event = both.request()
        assert isinstance(event.id, cma.rdma_cm_id)
        assert event.id.qp is None


def test_parameters_of_an_event_are_those_of_its_kind() -> None:
    with ends() as both:
        cmid = both.a.id()
        cmid.resolve_addr((ADDRESSES["ipv4"][1], PORT))
        with both.a.channel.get_event(1) as resolved:
            error = refused(lambda: resolved.param)
            assert error.strerror == "an event ADDR_RESOLVED has no parameters"
            assert resolved.private_data == b""
        _, request = both.request()
        assert request.param.conn is request.param
        with pytest.raises(RdmaError, match=r"of a connection \[EINVAL\]; try: param.conn"):
            _ = request.param.ud
        member = both.a.id(PortSpace.UDP)
        member.bind_addr((ADDRESSES["ipv4"][0], 0))
        member.create_qp()
        member.join_multicast(("239.1.2.3", 0))
        joined = both.a.event(CmEventType.MULTICAST_JOIN)
        assert joined.param.ud is joined.param
        with pytest.raises(RdmaError, match=r"of a datagram id \[EINVAL\]; try: param.ud"):
            _ = joined.param.conn


def test_address_that_an_entry_of_a_lookup_lacks_is_refused() -> None:
    with ends() as both:
        cmid = both.a.id()
        assert refused(lambda: cmid.resolve_addr(None)).strerror == "there is no destination"
        assert refused(lambda: cmid.bind_addr(None)).strerror == "there is no address"
