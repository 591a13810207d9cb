"""Connecting as in the manual pages, on a simulated network: states, events and limits."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from rdmacm import (
    CmEventType,
    CmId,
    CmStateError,
    ConnParam,
    Ece,
    IdOption,
    OptionLevel,
    PathData,
    PathFlag,
    PortSpace,
    QPType,
    State,
)
from rdmacm.testing import Verdict, nth
from rdmacm.verbs import CQ, Mtu, QPAttrMask, QPCap, QPInitAttr, QPState, SendFlag
from support.pair import ADDRESSES, PORT, Ends, ends, refused

E = CmEventType
A, B = ADDRESSES["ipv4"]
COMM_EST = 4


@pytest.fixture
def both() -> Iterator[Ends]:
    with ends() as both:
        yield both


# -- calls in each state --------------------------------------------------------------------------------


def _bound(both: Ends) -> CmId:
    cmid = both.a.id()
    cmid.bind_addr((A, 0))
    return cmid


def _querying(both: Ends) -> CmId:
    cmid = both.a.id()
    cmid.resolve_addr(("10.0.0.9", PORT))
    return cmid


def _addr_resolved(both: Ends) -> CmId:
    cmid = both.a.id()
    cmid.resolve_addr((B, PORT))
    both.a.event(E.ADDR_RESOLVED)
    return cmid


def _disconnected(both: Ends) -> CmId:
    active, _ = both.connect()
    active.disconnect()
    both.a.event(E.DISCONNECTED)
    return active


def _device_removed(both: Ends) -> CmId:
    active, _ = both.connect()
    network = both.a.host.network
    network.remove_interface(next(each.index for each in network.interfaces() if each.name == "eth0"))
    both.a.event(E.DEVICE_REMOVAL)
    return active


SITUATIONS: dict[str, tuple[State, Callable[[Ends], CmId]]] = {
    "idle": (State.IDLE, lambda both: both.a.id()),
    "bound": (State.ADDR_BOUND, _bound),
    "address query": (State.ADDR_QUERY, _querying),
    "address resolved": (State.ADDR_RESOLVED, _addr_resolved),
    "route resolved": (State.ROUTE_RESOLVED, lambda both: both.a.resolve(B)),
    "listening": (State.LISTEN, lambda both: both.a.listen(A, 0)),
    "connecting": (State.CONNECT, lambda both: both.request()[0]),
    "request received": (State.CONNECT, lambda both: both.request()[1].id),
    "connected, active": (State.CONNECT, lambda both: both.connect()[0]),
    "connected, passive": (State.CONNECT, lambda both: both.connect()[1]),
    "disconnected": (State.DISCONNECT, _disconnected),
    "device removed": (State.DEVICE_REMOVAL, _device_removed),
}
CALLS: dict[str, Callable[[CmId], object]] = {
    "listen": lambda cmid: cmid.listen(),
    "connect": lambda cmid: cmid.connect(ConnParam(qp_num=0x10010)),
    "accept": lambda cmid: cmid.accept(ConnParam(qp_num=0x10011)),
    "reject": lambda cmid: cmid.reject(),
    "notify": lambda cmid: cmid.notify(COMM_EST),
    "disconnect": lambda cmid: cmid.disconnect(),
}
#: Call → situations that allow it. In others it raises EINVAL, or the errno in OTHER_ERRNO.
ALLOWED = {
    "listen": {"idle", "bound"},
    "connect": {"route resolved"},
    "accept": {"request received"},
    "reject": {"request received"},
    "notify": set[str](),
    "disconnect": {"connecting", "request received", "connected, active", "connected, passive", "disconnected"},
}
OTHER_ERRNO = {
    ("notify", "connected, active"): errno.EISCONN,
    ("notify", "connected, passive"): errno.EISCONN,
    **{(call, "device removed"): errno.ENXIO for call in CALLS},
}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("call", CALLS)
def test_each_call_is_allowed_only_in_its_states(both: Ends, call: str, situation: str) -> None:
    state, make = SITUATIONS[situation]
    cmid = make(both)
    assert cmid.state is state
    if situation in ALLOWED[call]:
        CALLS[call](cmid)
    else:
        refused(lambda: CALLS[call](cmid), OTHER_ERRNO.get((call, situation), errno.EINVAL))
        assert cmid.state is state, "a refused call changes nothing"


def test_establish_is_for_application_queue_pairs(both: Ends) -> None:
    active, _ = both.connect()
    refused(active.establish)
    refused(both.a.resolve(B).establish)


def test_rejected_id_cannot_connect_again(both: Ends) -> None:
    active, request = both.request()
    request.id.reject()
    both.a.event(E.REJECTED)
    assert active.state is State.CONNECT
    refused(active.connect)
    refused(lambda: active.resolve_addr((B, PORT)))


def test_failed_connect_call_may_be_repeated(both: Ends) -> None:
    active = both.a.resolve(B)
    active.create_qp()
    refused(lambda: active.connect(ConnParam(b"x" * 57)))
    assert active.state is State.ROUTE_RESOLVED
    active.connect(ConnParam(b"x" * 56))


def test_connect_and_accept_need_a_qp_or_qpn(both: Ends) -> None:
    refused(both.a.resolve(B).connect)
    refused(both.a.resolve(B, port_space=PortSpace.IB).connect)
    _, request = both.request()
    refused(request.id.accept)
    request.id.accept(ConnParam(qp_num=0x10010))


# -- events ---------------------------------------------------------------------------------------------


def test_connect_request_carries_addresses_and_parameters(both: Ends) -> None:
    listener = both.b.listen(B)
    listener.context = "the listener's"
    active, event = both.request(ConnParam(b"hello", responder_resources=3, initiator_depth=5, rnr_retry_count=6))
    new = event.id
    assert (event.status, event.listen_id, new.context) == (0, listener, "the listener's")
    assert (new.ps, new.qp_type, new.channel) == (PortSpace.TCP, QPType.RC, both.b.channel)
    assert (new.local_addr, new.peer_addr) == ((B, PORT), (A, active.src_port))
    param = event.param
    assert isinstance(param, ConnParam)
    # The peer's responder resources are our initiator depth, and the reverse.
    assert (param.responder_resources, param.initiator_depth, param.rnr_retry_count) == (5, 3, 6)
    assert param.qp_num == active.qp.qp_num
    assert event.private_data == b"hello".ljust(56, b"\0")


def test_second_disconnect_does_nothing(both: Ends) -> None:
    active, passive = both.connect()
    active.disconnect()
    active.disconnect()
    assert both.b.event(E.DISCONNECTED).status == 0
    passive.disconnect()
    passive.disconnect()
    assert both.a.event(E.DISCONNECTED).status == 0
    both.a.event(E.TIMEWAIT_EXIT)
    both.b.event(E.TIMEWAIT_EXIT)
    both.fabric.run()
    assert both.a.quiet()
    assert both.b.quiet()


def test_unanswered_dreq_reports_a_timeout(both: Ends) -> None:
    active, _ = both.connect()
    both.fabric.crash("b")
    active.disconnect()
    assert both.a.event(E.DISCONNECTED).status == -errno.ETIMEDOUT


def test_unanswered_req_raises_unreachable(both: Ends) -> None:
    active = both.a.resolve(B)
    qp = active.create_qp()
    began = both.fabric.now
    active.connect()
    both.fabric.crash("b")
    event = both.a.event(E.UNREACHABLE)
    assert event.status == -errno.ETIMEDOUT
    assert isinstance(event.error, TimeoutError)
    assert both.fabric.now - began == pytest.approx(16 * 4.608)
    assert qp.state is QPState.ERR


def test_mra_gives_a_slow_application_time_to_accept(both: Ends) -> None:
    active, request = both.request()
    both.fabric.run(seconds=200)
    assert both.fabric.log.count(kind="MRA")
    request.id.create_qp()
    request.id.accept()
    assert both.a.event(E.ESTABLISHED).id is active
    both.b.event(E.ESTABLISHED)


def test_accept_fails_after_the_peer_gave_up(both: Ends) -> None:
    active, request = both.request()
    active.destroy()
    both.fabric.run(seconds=1)
    assert both.b.quiet(), "an unanswered request gets no event"
    request.id.create_qp()
    assert "given up" in str(refused(request.id.accept))


def test_active_side_connects_without_reading_events(both: Ends) -> None:
    _, request = both.request()
    request.id.create_qp()
    request.id.accept()
    both.b.event(E.ESTABLISHED)  # the RTU has arrived before a's events were read
    both.a.event(E.ESTABLISHED)


def test_qp_transition_failure_rejects_the_connection(both: Ends) -> None:
    active, request = both.request()
    active.qp.to_error()
    request.id.create_qp()
    request.id.accept()
    assert both.a.event(E.CONNECT_ERROR).status == -errno.EINVAL
    assert both.b.event(E.REJECTED).status == 28


def test_lost_answers_are_told_at_the_passive_side(both: Ends) -> None:
    """The peer gives up and says so, as a program that is ended does."""
    both.fabric.faults = lambda packet: Verdict(0) if packet.kind == "REP" else None
    active, request = both.request()
    request.id.create_qp()
    request.id.accept()
    active.destroy()
    found = both.b.event(E.REJECTED)
    assert found.status == 4
    assert found.message == "the peer has given up: the answer to its request (REP) did not reach it in time"
    assert "UDP port 4791 in the peer's firewall" in str(found.error)


def test_lost_confirmations_are_told_at_both_sides(both: Ends) -> None:
    both.fabric.faults = lambda packet: Verdict(0) if packet.kind == "RTU" else None
    active, request = both.request()
    request.id.create_qp()
    request.id.accept()
    both.a.event(E.ESTABLISHED)
    assert both.b.event(E.UNREACHABLE).message == "the peer's confirmation (RTU) has not arrived"
    active.destroy()


def test_data_before_the_rtu_establishes_the_connection() -> None:
    with ends() as both:
        both.fabric.faults = nth("RTU", 1, Verdict(0))
        active, request = both.request()
        request.id.create_qp()
        region = request.id.reg_msgs(bytearray(16))
        request.id.post_recv(1, region)
        request.id.accept()
        both.a.event(E.ESTABLISHED)
        active.post_send(1, b"early", flags=SendFlag.INLINE)
        both.b.event(E.ESTABLISHED)
        assert both.fabric.now < 1
        active.destroy()
        request.id.destroy()
        region.close()


def test_notify_establishes_an_application_queue_pair(both: Ends) -> None:
    both.fabric.faults = nth("RTU", 1, Verdict(0))
    _, request = both.request()
    request.id.accept(ConnParam(qp_num=0x10077))
    both.a.event(E.ESTABLISHED)
    refused(lambda: request.id.notify(5))
    request.id.notify(COMM_EST)
    both.b.event(E.ESTABLISHED)
    refused(lambda: request.id.notify(COMM_EST), errno.EISCONN)


def test_connected_id_of_a_removed_device_can_only_be_destroyed(both: Ends) -> None:
    active = _device_removed(both)
    refused(active.disconnect, errno.ENXIO)
    active.destroy()


# -- private data and resources -------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "fits"), [(148, True), (149, False)])
def test_private_data_of_a_rejection_is_limited(both: Ends, size: int, fits: bool) -> None:
    active, request = both.request()
    data = bytes(range(1, size + 1))
    if not fits:
        assert "148" in str(refused(lambda: request.id.reject(data)))
        return
    request.id.reject(data)
    event = both.a.event(E.REJECTED)
    assert (event.id, event.status, event.private_data) == (active, 28, data)


def test_negotiated_resources_are_the_minimum(both: Ends) -> None:
    active, request = both.request()  # the device's limit, 128, by default
    assert isinstance(request.param, ConnParam)
    assert (request.param.responder_resources, request.param.initiator_depth) == (128, 128)
    qp = request.id.create_qp()
    request.id.accept(ConnParam(responder_resources=2, initiator_depth=1))
    event = both.a.event(E.ESTABLISHED)
    assert isinstance(event.param, ConnParam)
    assert (event.param.responder_resources, event.param.initiator_depth) == (1, 2)
    ours, theirs = active.qp.query()[0], qp.query()[0]
    assert (ours.max_rd_atomic, ours.max_dest_rd_atomic) == (2, 1)
    assert (theirs.max_rd_atomic, theirs.max_dest_rd_atomic) == (1, 2)


def test_accept_defaults_to_the_requested_resources(both: Ends) -> None:
    _, request = both.request(ConnParam(responder_resources=7, initiator_depth=9))
    qp = request.id.create_qp()
    request.id.accept()
    both.b.event(E.ESTABLISHED)
    attr = qp.query()[0]
    assert (attr.max_dest_rd_atomic, attr.max_rd_atomic) == (9, 7)


@pytest.mark.parametrize("field", ["responder_resources", "initiator_depth"])
def test_resources_beyond_the_device_limits_are_refused(both: Ends, field: str) -> None:
    active = both.a.resolve(B)
    active.create_qp()
    assert field in str(refused(lambda: active.connect(ConnParam(**{field: 129}))))  # type: ignore[arg-type]


def test_retry_counts_are_capped_at_seven(both: Ends) -> None:
    active, request = both.request(ConnParam(retry_count=9, rnr_retry_count=200))
    assert isinstance(request.param, ConnParam)
    assert (request.param.retry_count, request.param.rnr_retry_count) == (7, 7)
    request.id.create_qp()
    request.id.accept(ConnParam(rnr_retry_count=99))
    both.a.event(E.ESTABLISHED)
    assert (active.qp.query()[0].retry_cnt, active.qp.query()[0].rnr_retry) == (7, 7)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [("qp_num", -1), ("qp_num", 1 << 24), ("qkey", 1 << 32), ("retry_count", -1), ("rnr_retry_count", 256)],
)
def test_parameters_out_of_range_are_refused(both: Ends, field: str, wrong: int) -> None:
    param = replace(ConnParam(qp_num=0x10010), **{field: wrong})  # type: ignore[arg-type]
    active, request = both.request()
    for cmid in (both.a.resolve(B), both.a.resolve(B, port_space=PortSpace.UDP)):
        assert field in str(refused(lambda cmid=cmid: cmid.connect(param)))  # type: ignore[misc]
    assert field in str(refused(lambda: request.id.accept(param)))
    request.id.accept(ConnParam(qp_num=0x10010))
    assert both.a.event(E.ESTABLISHED).id is active


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_private_data_may_be_any_buffer(both: Ends, kind: Callable[[bytes], bytes]) -> None:
    _, request = both.request(ConnParam(kind(b"ask")))
    assert request.private_data.rstrip(b"\0") == b"ask"
    request.id.accept(ConnParam(kind(b"answer"), qp_num=0x10010))
    assert both.a.event(E.ESTABLISHED).private_data.rstrip(b"\0") == b"answer"
    both.b.event(E.ESTABLISHED)
    _, request = both.request()
    request.id.reject(kind(b"no"))
    assert both.a.event(E.REJECTED).private_data.rstrip(b"\0") == b"no"


def test_connected_queue_pairs_have_short_timeouts(both: Ends) -> None:
    active, passive = both.connect()
    assert active.route.path_rec[0].packet_life_time == 16
    for cmid in (active, passive):
        assert cmid.qp.query()[0].min_rnr_timer == 12, "code 12 is 0.64 ms; rdma_cm's code 0 is 655 ms"


def test_ack_timeout_option_sets_the_qp_timeout(both: Ends) -> None:
    active = both.a.resolve(B)
    active.set_option(OptionLevel.ID, IdOption.ACK_TIMEOUT, 9)
    qp = active.create_qp()
    both.b.listen(B)
    active.connect()
    request = both.b.event(E.CONNECT_REQUEST)
    request.id.create_qp()
    request.id.accept()
    both.a.event(E.ESTABLISHED)
    assert qp.query()[0].timeout == 9


def test_path_mtu_beyond_the_peers_is_rejected(both: Ends) -> None:
    both.b.listen(B)
    active = _addr_resolved(both)
    path = both.a.resolve(B).route.path_rec[0]
    flags = PathFlag.GMP | PathFlag.PRIMARY | PathFlag.BIDIRECTIONAL
    larger = PathData(replace(path, mtu=Mtu.MTU_4096), flags)
    active.set_option(OptionLevel.IB, 1, larger.pack())
    both.a.event(E.ROUTE_RESOLVED)
    active.create_qp()
    active.connect()
    event = both.a.event(E.REJECTED)
    assert event.status == 26
    assert "mtu" in str(event.error)
    assert both.b.quiet()


# -- queues ---------------------------------------------------------------------------------------------


def test_get_recv_comp_works_with_any_queue(both: Ends) -> None:
    active, request = both.request()
    shared = CQ(request.id.verbs, 8)  # C's helpers assert that the id made the queue, and its channel
    request.id.create_qp(QPInitAttr(scq=shared, rcq=shared, cap=QPCap(4, 4)))
    region = request.id.reg_msgs(bytearray(16))
    request.id.post_recv(7, region)
    request.id.accept()
    both.a.event(E.ESTABLISHED)
    active.post_send(1, b"hello", flags=SendFlag.INLINE)
    assert request.id.get_recv_comp(timeout=1).wr_id == 7
    with pytest.raises(TimeoutError):
        request.id.get_recv_comp(timeout=1)
    active.destroy()
    request.id.destroy()
    shared.close()
    region.close()


def test_create_qp_refuses_invalid_arguments(both: Ends) -> None:
    refused(both.a.id().create_qp)
    cmid = both.a.resolve(B)
    cmid.create_qp()
    refused(cmid.create_qp)
    cmid.destroy_qp()
    assert not cmid.has_qp
    refused(lambda: cmid.send_cq)
    refused(lambda: cmid.create_qp(QPInitAttr(qp_type=QPType.UC)))
    with CQ(cmid.verbs, 1) as one, CQ(cmid.verbs, 1) as other:
        cmid.send_cq = one
        refused(lambda: cmid.create_qp(QPInitAttr(scq=other)))
        cmid.send_cq = None


def test_init_qp_attr_returns_attributes_and_mask(both: Ends) -> None:
    refused(lambda: both.a.id().init_qp_attr(QPState.INIT))
    cmid = both.a.resolve(B)
    refused(lambda: cmid.init_qp_attr(7))
    refused(lambda: cmid.init_qp_attr(QPState.RTR))
    attr, mask = cmid.init_qp_attr(QPState.INIT)
    assert (attr.qp_state, attr.port_num) == (QPState.INIT, 1)
    assert mask == QPAttrMask.STATE | QPAttrMask.ACCESS_FLAGS | QPAttrMask.PKEY_INDEX | QPAttrMask.PORT
    assert cmid.init_qp_attr(QPState.ERR)[1] == QPAttrMask.STATE


# -- enhanced connection establishment ------------------------------------------------------------------


def test_ece_is_exchanged(both: Ends) -> None:
    both.b.listen(B)
    active = both.a.resolve(B)
    active.set_local_ece(Ece(0x1234, 0x56))
    active.connect(ConnParam(qp_num=0x10010))
    request = both.b.event(E.CONNECT_REQUEST)
    assert request.id.get_remote_ece() == Ece(0x1234, 0x56)
    request.id.set_local_ece(Ece(0x1234, 0x02))
    request.id.accept(ConnParam(qp_num=0x10011))
    both.a.event(E.CONNECT_RESPONSE)
    assert active.get_remote_ece() == Ece(0x1234, 0x02)
    active.establish()
    both.b.event(E.ESTABLISHED)


def test_ece_rejection_reports_its_reason(both: Ends) -> None:
    _, request = both.request()
    request.id.reject_ece(b"older")
    event = both.a.event(E.REJECTED)
    assert (event.status, event.private_data.rstrip(b"\0")) == (35, b"older")


def test_ece_is_not_for_ids_with_a_queue_pair(both: Ends) -> None:
    cmid = both.a.resolve(B)
    for wrong in (Ece(0, 1), Ece(1 << 24), Ece(1, 1 << 32), Ece(-1)):
        refused(lambda wrong=wrong: cmid.set_local_ece(wrong))  # type: ignore[misc]
    cmid.create_qp()
    refused(lambda: cmid.set_local_ece(Ece(1, 1)))
    refused(cmid.get_remote_ece)


def test_state_errors_name_the_state(both: Ends) -> None:
    with pytest.raises(CmStateError, match="ADDR_BOUND"):
        _bound(both).connect(ConnParam(qp_num=1))
