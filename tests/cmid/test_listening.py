"""Listeners, synchronous ids, migration and endpoints as in the manual pages, on a simulated network."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from rdmacm import (
    AddrInfo,
    CmEvent,
    CmEventType,
    CmId,
    ConnParam,
    EventChannel,
    IdOption,
    OptionLevel,
    PathData,
    PathFlag,
    PortSpace,
    QPType,
    RaiFlag,
    RdmaError,
    State,
    create_ep,
)
from rdmacm.testing import Verdict
from rdmacm.verbs import QPCap, QPInitAttr, QPState
from support.pair import ADDRESSES, PORT, Ends, ends, refused
from support.rows import for_each

E = CmEventType
A, B = ADDRESSES["ipv4"]
B6 = ADDRESSES["ipv6"][1]


@pytest.fixture
def both() -> Iterator[Ends]:
    with ends() as both:
        yield both


# -- listeners ------------------------------------------------------------------------------------------


@for_each(
    ("bound", "afonly", "reached"),
    [
        ("0.0.0.0", None, {B}),
        ("::", 0, {B, B6}),
        ("::", 1, {B6}),
        (B, None, {B}),
        (B6, None, {B6}),
        ("127.0.0.1", None, set()),
    ],
)
def test_listener_receives_requests_to_its_bound_address(bound: str, afonly: int | None, reached: set[str]) -> None:
    with ends() as both:
        listener = both.b.id()
        if afonly is not None:
            listener.set_option(OptionLevel.ID, IdOption.AFONLY, afonly)
        listener.bind_addr((bound, PORT))
        listener.listen()
        for address in (B, B6):
            active = both.a.resolve(address)
            active.create_qp()
            active.connect()
            if address in reached:
                request = both.b.event(E.CONNECT_REQUEST)
                assert isinstance(request.id.local_addr, tuple)
                assert request.id.local_addr[0] == address
            else:
                assert both.a.event(E.REJECTED).status == 28


def test_loopback_listener_receives_local_requests(both: Ends) -> None:
    both.a.listen("127.0.0.1")
    active = both.a.resolve("127.0.0.1")
    active.create_qp()
    active.connect()
    assert both.a.event(E.CONNECT_REQUEST).id.peer_addr == ("127.0.0.1", active.src_port)


def test_listeners_on_different_addresses_share_a_port(both: Ends) -> None:
    both.b.host.network.add_address(
        next(each.index for each in both.b.host.network.interfaces() if each.name == "eth0"), "10.0.0.22/24"
    )
    first, second = both.b.listen(B), both.b.listen("10.0.0.22")
    for address, listener in ((B, first), ("10.0.0.22", second)):
        active = both.a.resolve(address)
        active.create_qp()
        active.connect()
        assert both.b.event(E.CONNECT_REQUEST).listen_id is listener


def test_unbound_listener_gets_a_free_port(both: Ends) -> None:
    listener = both.b.id()
    listener.listen()
    assert listener.local_addr == ("0.0.0.0", listener.src_port)
    assert listener.src_port
    active = both.a.resolve(B, listener.src_port)
    active.create_qp()
    active.connect()
    assert both.b.event(E.CONNECT_REQUEST).id.src_port == listener.src_port


def test_conflicting_listeners_are_refused(both: Ends) -> None:
    first, second = both.b.id(), both.b.id()
    for each in (first, second):
        each.set_option(OptionLevel.ID, IdOption.REUSEADDR, 1)
        each.bind_addr((B, PORT))
    assert "in use by another id of this process" in str(refused(first.listen, errno.EADDRINUSE))
    assert first.state is State.ADDR_BOUND
    second.destroy()
    first.listen()
    third = both.b.id()
    third.set_option(OptionLevel.ID, IdOption.REUSEADDR, 1)
    refused(lambda: third.bind_addr((B, PORT)), errno.EADDRINUSE)
    third.bind_addr((B6, PORT))


def test_reuseaddr_cannot_be_set_after_listen(both: Ends) -> None:
    listener = both.b.listen(B)
    refused(lambda: listener.set_option(OptionLevel.ID, IdOption.REUSEADDR, 1))


def test_backlog_counts_unfetched_requests(both: Ends) -> None:
    both.b.listen(B, backlog=1)
    active = [both.a.resolve(B) for _ in range(2)]
    for each in active:
        each.create_qp()
        each.connect()
    both.fabric.run(seconds=20)
    first = both.b.event(E.CONNECT_REQUEST)
    # The second request was dropped, not rejected: its retransmission finds room.
    second = both.b.event(E.CONNECT_REQUEST)
    assert {first.id.dst_port, second.id.dst_port} == {each.src_port for each in active}
    assert both.a.quiet()


def test_destroyed_listener_rejects_waiting_requests(both: Ends) -> None:
    listener = both.b.listen(B)
    active = both.a.resolve(B)
    active.create_qp()
    active.connect()
    both.fabric.run(seconds=1)
    listener.destroy()
    assert both.a.event(E.REJECTED).status == 28
    assert both.b.quiet()


def test_destroyed_listener_keeps_its_connections(both: Ends) -> None:
    active, passive = both.connect()
    next(each for each in both.b.ids if each.state is State.LISTEN).destroy()
    active.disconnect()
    assert both.b.event(E.DISCONNECTED).id is passive


def test_fetched_request_outlives_its_listener(both: Ends) -> None:
    _, request = both.request()
    next(each for each in both.b.ids if each.state is State.LISTEN).destroy()
    request.id.create_qp()
    request.id.accept()
    both.a.event(E.ESTABLISHED)
    assert both.b.event(E.ESTABLISHED).id is request.id


def test_closed_channel_ends_its_connections(both: Ends) -> None:
    active, _ = both.connect()
    _, request = both.request()
    assert request.id.state is State.CONNECT
    both.b.channel.close()
    kinds = {both.a.channel.get_event(1).type for _ in range(2)}
    assert kinds == {E.DISCONNECTED, E.REJECTED}
    active.disconnect()


def test_simultaneous_disconnect_ends_both_sides(both: Ends) -> None:
    active, passive = both.connect()
    active.disconnect()
    passive.disconnect()
    assert both.a.event(E.DISCONNECTED).status == 0
    assert both.b.event(E.DISCONNECTED).status == 0


def test_destroyed_request_is_rejected(both: Ends) -> None:
    _, request = both.request()
    request.id.destroy()
    assert both.a.event(E.REJECTED).status == 28


# -- migration and synchronous ids ----------------------------------------------------------------------


def test_migrated_id_reports_events_on_its_new_channel(both: Ends) -> None:
    active, passive = both.connect()
    with EventChannel(both.a.provider) as ours, EventChannel(both.b.provider) as theirs:
        active.migrate(ours)
        passive.migrate(theirs)
        active.disconnect()
        for channel, cmid in ((theirs, passive), (ours, active)):
            with channel.get_event(10) as event:
                assert (event.type, event.id) == (E.DISCONNECTED, cmid)
            passive.disconnect()
        assert both.a.quiet()
        assert both.b.quiet()
        for cmid in (active, passive):
            cmid.destroy()


def test_migrated_listener_takes_its_waiting_requests_along(both: Ends) -> None:
    listener = both.b.listen(B)
    active = both.a.resolve(B)
    active.create_qp()
    active.connect()
    both.fabric.run(seconds=1)
    with EventChannel(both.b.provider) as other:
        listener.migrate(other)
        with other.get_event(10) as event:
            assert (event.type, event.listen_id, event.id.channel) == (E.CONNECT_REQUEST, listener, other)
        event.id.destroy()
        listener.destroy()


def _serve(both: Ends) -> None:
    """Have b accept each request, and disconnect when the peer does."""

    def serve(event: object) -> None:
        assert hasattr(event, "type")
        if event.type is E.CONNECT_REQUEST:
            event.id.create_qp()  # type: ignore[attr-defined]
            event.id.accept()  # type: ignore[attr-defined]
            both.b.ids.append(event.id)  # type: ignore[attr-defined]
        elif event.type is E.DISCONNECTED:
            event.id.disconnect()  # type: ignore[attr-defined]

    both.b.listen(B)
    both.b.host.on_event(both.b.channel, serve)


def test_synchronous_id_waits_for_each_step(both: Ends) -> None:
    _serve(both)
    with CmId(provider=both.a.provider) as cmid:
        cmid.resolve_addr((B, PORT))
        cmid.resolve_route()
        cmid.write_cm_event(E.USER, 5, 6)  # librdmacm's wait would end with any event
        qp = cmid.create_qp()
        cmid.connect()
        assert (cmid.event.type, qp.state) == (E.ESTABLISHED, QPState.RTS)
        cmid.disconnect()
        assert cmid.event.type is E.DISCONNECTED
        cmid.disconnect()


def test_synchronous_id_raises_event_errors(both: Ends) -> None:
    with CmId(provider=both.a.provider) as cmid:
        cmid.resolve_addr((B, PORT))
        cmid.resolve_route()
        cmid.create_qp()
        both.b.listen(B, PORT + 1)
        with pytest.raises(ConnectionRefusedError) as error:
            cmid.connect()
        assert error.value.errno == errno.ECONNREFUSED
        assert cmid.event.status == 8


def test_synchronous_accept_fails_after_the_peer_left(both: Ends) -> None:
    def disconnect(event: CmEvent) -> None:
        if event.type is E.ESTABLISHED:
            event.id.disconnect()

    both.fabric.faults = lambda packet: Verdict(0) if packet.kind == "RTU" else None
    with CmId(provider=both.b.provider) as listener:
        listener.bind_addr((B, PORT))
        listener.listen()
        active = both.a.resolve(B)
        active.create_qp()
        active.connect()
        both.a.host.on_event(both.a.channel, disconnect)
        with listener.get_request() as cmid:
            cmid.create_qp()
            with pytest.raises(ConnectionResetError, match="disconnected meanwhile"):
                cmid.accept()
            cmid.disconnect()


def test_get_request_is_for_synchronous_listeners(both: Ends) -> None:
    refused(both.b.listen(B).get_request)
    with CmId(provider=both.b.provider) as listener:
        listener.bind_addr((B, PORT + 1))
        listener.listen()
        with pytest.raises(TimeoutError):
            listener.get_request(timeout=1)
        both.b.host.network.remove_interface(
            next(each.index for each in both.b.host.network.interfaces() if each.name == "eth0")
        )
        refused(listener.get_request, errno.ENODEV)


def test_get_request_returns_a_synchronous_id(both: Ends) -> None:
    with CmId(provider=both.b.provider) as listener:
        listener.bind_addr((B, PORT))
        listener.listen()
        active = both.a.resolve(B)
        active.create_qp()
        active.connect(ConnParam(b"who"))
        with listener.get_request() as cmid:
            assert cmid.is_synchronous
            assert (cmid.event.type, cmid.event.private_data[:3]) == (E.CONNECT_REQUEST, b"who")
            cmid.create_qp()
            cmid.accept()
            assert cmid.event.type is E.ESTABLISHED
            both.a.event(E.ESTABLISHED)


# -- endpoints ------------------------------------------------------------------------------------------


def test_create_ep_makes_active_and_passive_endpoints(both: Ends) -> None:
    attr = QPInitAttr(cap=QPCap(2, 3), sq_sig_all=True)
    with create_ep(
        AddrInfo(flags=RaiFlag.PASSIVE, port_space=PortSpace.TCP, qp_type=QPType.RC, src_addr=(B, PORT)),
        None,
        attr,
        provider=both.b.provider,
    ) as listener:
        assert (listener.state, listener.has_qp) == (State.ADDR_BOUND, False)
        listener.listen()
        info = AddrInfo(port_space=PortSpace.TCP, qp_type=QPType.RC, dst_addr=(B, PORT), connect=b"prefix ")
        with create_ep(info, None, attr, provider=both.a.provider) as active:
            assert (active.state, attr.scq) == (State.ROUTE_RESOLVED, None), "create_ep does not change the attributes"
            assert active.qp.cap.max_recv_wr == 3
            with pytest.raises(RdmaError):
                active.connect(ConnParam(b"x" * 50))  # 57 with the prefix, which stays for the next try
            active.migrate(both.a.channel)
            active.connect(ConnParam(b"and more"))
            with listener.get_request() as cmid:
                assert cmid.qp.cap.max_recv_wr == 3
                assert cmid.event.private_data.rstrip(b"\0") == b"prefix and more"
                cmid.accept()
                both.a.event(E.ESTABLISHED)


def test_create_ep_uses_the_given_route(both: Ends) -> None:
    path = replace(both.a.resolve(B).route.path_rec[0], sl=5)
    flags = PathFlag.GMP | PathFlag.PRIMARY | PathFlag.BIDIRECTIONAL
    info = AddrInfo(port_space=PortSpace.TCP, qp_type=QPType.RC, dst_addr=(B, PORT), route=(PathData(path, flags),))
    with create_ep(info, provider=both.a.provider) as cmid:
        assert (cmid.state, cmid.has_qp) == (State.ROUTE_RESOLVED, False)
        assert cmid.route.path_rec[0].sl == 5


@pytest.mark.parametrize("is_record", [True, False])
def test_create_ep_uses_a_route_in_bytes(both: Ends, is_record: bool) -> None:
    path = replace(both.a.resolve(B).route.path_rec[0], sl=5)
    route: Any = path.pack() if is_record else PathData(path).pack()
    info = AddrInfo(port_space=PortSpace.TCP, qp_type=QPType.RC, dst_addr=(B, PORT), route=route)
    with create_ep(info, provider=both.a.provider) as cmid:
        assert (cmid.state, cmid.route.path_rec) == (State.ROUTE_RESOLVED, (path,))


def test_create_ep_with_an_arbitrary_route(both: Ends) -> None:
    random = Random(1)
    for _ in range(100):
        route: Any = random.randbytes(random.choice([64, 72]))
        info = AddrInfo(port_space=PortSpace.TCP, qp_type=QPType.RC, dst_addr=(B, PORT), route=route)
        with contextlib.suppress(RdmaError), create_ep(info, provider=both.a.provider) as cmid:
            cmid.migrate(both.a.channel)
            cmid.connect(ConnParam(qp_num=1))


def test_failed_create_ep_releases_its_port(both: Ends) -> None:
    for info in (
        AddrInfo(port_space=PortSpace.TCP, qp_type=QPType.RC),
        AddrInfo(flags=RaiFlag.PASSIVE, port_space=PortSpace.TCP, qp_type=QPType.RC),
    ):
        refused(lambda info=info: create_ep(info, provider=both.a.provider))  # type: ignore[misc]
    info = AddrInfo(port_space=PortSpace.TCP, qp_type=QPType.RC, src_addr=(A, PORT), dst_addr=("10.0.0.9", PORT))
    with pytest.raises(TimeoutError):
        create_ep(info, provider=both.a.provider)
    with CmId(provider=both.a.provider) as cmid:
        cmid.bind_addr((A, PORT))  # the port is free again
