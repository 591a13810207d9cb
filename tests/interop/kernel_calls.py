"""Calls on ids of the provider ``kernel``, one function for each rule; every one is run.

python3 -m interop.kernel_calls [NAME...]
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial

from rdmacm import (
    CmEventType,
    CmId,
    CmStateError,
    CmTimeoutError,
    CmWouldBlockError,
    ConnParam,
    EventChannel,
    GaiError,
    IbOption,
    IdOption,
    OptionLevel,
    PathData,
    PathRecord,
    PortSpace,
    RaiFlag,
    RdmaError,
    capture,
    create_ep,
    devices,
    explain,
    getaddrinfo,
    query_counters,
)
from rdmacm.address import Gid
from rdmacm.constants import EAI
from rdmacm.kernel.verbs import runtime
from rdmacm.provider import get_provider
from rdmacm.provider.cmstate import State
from rdmacm.provider.connparam import UdParam
from rdmacm.verbs import QPInitAttr
from support.clock import eventually, pause

E = CmEventType
HERE, THERE = "10.0.0.1", "10.0.0.2"
PROVIDER = get_provider("kernel")


def refused(code: int, call: Callable[[], object], kind: type[RdmaError] = RdmaError) -> RdmaError:
    found: RdmaError | None = None
    try:
        call()
    except kind as error:
        found = error
    assert found is not None, f"no {errno.errorcode.get(code, code)}"
    assert found.errno == code, found
    return found


def librdmacm_is_not_loaded() -> None:
    with open("/proc/self/maps") as file:
        assert "librdmacm" not in file.read()


def devices_are_those_of_the_kernel() -> None:
    (device,) = devices("kernel")
    assert (device.name, device.provider) == ("rxe0", "kernel")
    (port,) = device.ports
    assert {str(row.gid) for row in port.gids} >= {"::ffff:10.0.0.1", "fd00:0:0:1::1"}
    assert {row.ndev_name for row in port.gids} == {"va"}
    assert "rx_bytes" in query_counters("kernel").devices["rxe0"] or query_counters("kernel").devices["rxe0"]
    assert "tx_req" in query_counters("kernel").cm


def an_id_binds_as_in_the_kernel() -> None:
    with EventChannel("kernel") as channel:
        first, second, third = (CmId(channel) for _ in range(3))
        first.bind_addr((HERE, 0))
        assert (first.state, first.port_num, first.verbs.name) == (State.ADDR_BOUND, 1, "rxe0")
        assert first.verbs.query_gid(1, first.gid_index) == first.route.sgid
        assert first.route.dst_addr is None
        port = first.src_port
        assert port
        refused(errno.EADDRINUSE, lambda: second.bind_addr((HERE, port)))
        refused(errno.EADDRNOTAVAIL, lambda: second.bind_addr(("", port)))
        error = refused(errno.ENODEV, lambda: second.bind_addr(("192.0.2.1", 0)))
        assert "not an address of this host" in str(error)
        refused(errno.EINVAL, lambda: first.bind_addr((HERE, 0)), CmStateError)
        assert second.state is State.IDLE
        second.bind_addr(("", 0))
        assert not second.is_bound
        assert second.src_port
        third.bind_addr(("::", 0))
        for each in (first, second, third):
            each.destroy()
        refused(errno.ENXIO, lambda: first.bind_addr((HERE, 0)))


def calls_that_the_state_does_not_allow_are_refused() -> None:
    with CmId(provider="kernel") as cmid:
        for call in (cmid.resolve_route, lambda: cmid.connect(ConnParam(qp_num=1)), cmid.disconnect, cmid.establish):
            refused(errno.EINVAL, call)
        refused(errno.EINVAL, lambda: cmid.notify(4))
        cmid.bind_addr((HERE, 0))
        refused(errno.EINVAL, cmid.resolve_route, CmStateError)
        refused(errno.EINVAL, lambda: cmid.resolve_addr((THERE, 1), (HERE, 1)))
        refused(errno.EINVAL, lambda: cmid.resolve_addr(("fd00:0:0:1::2", 1)))
        cmid.resolve_addr((THERE, 1))
        refused(errno.EINVAL, lambda: cmid.bind_addr((HERE, 0)), CmStateError)
        refused(errno.EINVAL, cmid.listen, CmStateError)
        for call in (lambda: cmid.resolve_route(alternate=True), cmid.allow_alternate_paths):
            assert "no alternate paths" in str(refused(errno.EOPNOTSUPP, call))
        cmid.resolve_route()
        refused(errno.EINVAL, cmid.resolve_route, CmStateError)
        refused(errno.EINVAL, lambda: cmid.connect(ConnParam(bytes(57), qp_num=1)))
        assert cmid.state is State.ROUTE_RESOLVED
        refused(errno.EINVAL, lambda: cmid.connect(ConnParam(bytes(256), qp_num=1)))


def a_resolution_is_explained() -> None:
    found = explain(THERE, 7471, provider="kernel")
    assert found.ok, found
    assert found.chosen is not None
    assert (found.chosen.device, found.chosen.gid, found.chosen.rule) == ("rxe0", "::ffff:10.0.0.1", "chosen")
    assert not found.notes
    assert found.path is not None
    assert found.path["dgid"] == "::ffff:10.0.0.2"
    loopback = explain("127.0.0.1", 7471, provider="kernel")
    assert (loopback.error, loopback.errno) == ("resolve_route", errno.ENODEV), loopback
    assert any("for a loopback address" in note for note in loopback.notes), loopback
    assert "10.0.0.1" in str(loopback.hint)
    failed = explain("192.0.2.1", 7471, provider="kernel")
    assert (failed.ok, failed.errno) == (False, errno.ENETUNREACH), failed


def a_failed_resolution_is_an_event_with_its_reason() -> None:
    with EventChannel("kernel") as channel, CmId(channel) as cmid:
        cmid.resolve_addr(("10.0.0.77", 7471), timeout_ms=50)
        during = cmid.state
        assert during is State.ADDR_QUERY
        with channel.get_event(10) as event:
            assert (event.type, event.status) == (E.ADDR_ERROR, -errno.ETIMEDOUT), event
            assert "neighbour" in event.message
            assert event.explanation is not None
            assert event.explanation.neighbour is not None
        assert cmid.state is State.ADDR_BOUND
        cmid.resolve_addr((THERE, 7471))
        with channel.get_event(10) as event:
            assert event.type is E.ADDR_RESOLVED


def a_call_may_be_ahead_of_the_events() -> None:
    """The route of an address whose event is not fetched yet: the kernel knows that it is resolved."""
    with EventChannel("kernel") as channel, CmId(channel) as cmid:
        cmid.resolve_addr((THERE, 7471))
        assert select.select([channel], [], [], 5)[0]
        cmid.resolve_route()
        assert [event_type(channel) for _ in range(2)] == [E.ADDR_RESOLVED, E.ROUTE_RESOLVED]
        assert cmid.state is State.ROUTE_RESOLVED


def event_type(channel: EventChannel) -> CmEventType:
    with channel.get_event(5) as event:
        return event.type


def options_are_passed_on() -> None:
    with CmId(provider="kernel") as cmid, CmId(provider="kernel") as other:
        for each in (cmid, other):
            each.set_option(OptionLevel.ID, IdOption.REUSEADDR, 1)
        cmid.set_option(OptionLevel.ID, IdOption.TOS, 96)
        cmid.set_option(OptionLevel.ID, IdOption.ACK_TIMEOUT, b"\x11")
        assert cmid.get_option(IdOption.TOS) == 96
        cmid.bind_addr((HERE, 0))
        other.bind_addr((HERE, cmid.src_port))
        refused(errno.EINVAL, lambda: cmid.set_option(OptionLevel.ID, IdOption.TOS, b"12"))
        refused(errno.EINVAL, lambda: cmid.set_option(OptionLevel.ID, IdOption.TOS, 256))
        refused(errno.ENOSYS, lambda: cmid.set_option(OptionLevel.ID, 77, 1))
        cmid.resolve_addr((THERE, 7471))
        cmid.resolve_route()
        path = cmid.route.path_rec[0]
        assert path.traffic_class == 96
        other.resolve_addr((THERE, 7471))
        from rdmacm.proto.sa import PathData

        refused(errno.EINVAL, lambda: other.set_option(OptionLevel.IB, IbOption.PATH, b"12"))
        other.set_option(OptionLevel.IB, IbOption.PATH, PathData(path).pack())
        assert other.state is State.ROUTE_RESOLVED


def events_move_with_an_id() -> None:
    with EventChannel("kernel") as old, EventChannel("kernel") as new, CmId(old) as cmid:
        cmid.write_cm_event(arg=1)
        cmid.resolve_addr((THERE, 7471))
        assert select.select([old], [], [], 5)[0]
        cmid.migrate(new)
        refused(errno.EAGAIN, lambda: old.get_event(0), CmWouldBlockError)
        assert [event_type(new) for _ in range(2)] == [E.USER, E.ADDR_RESOLVED]
        cmid.migrate(None)
        cmid.resolve_route()


def a_moved_event_wakes_a_thread_that_waits() -> None:
    with EventChannel("kernel") as old, EventChannel("kernel") as new, CmId(old) as cmid:
        cmid.resolve_addr((THERE, 7471))
        assert select.select([old], [], [], 5)[0]
        found: list[CmEventType] = []
        # Without a limit: at the end of one, a wait looks at the descriptor once more.
        thread = threading.Thread(target=lambda: found.append(new.get_event().type), daemon=True)
        thread.start()
        eventually(lambda: runtime().waiters.polling)
        cmid.migrate(new)
        thread.join(5)
        assert found == [E.ADDR_RESOLVED]


def a_moved_event_is_reported_by_epoll() -> None:
    """epoll(7) looks at a descriptor again only when that wakes it: so an event loop that waits sees nothing else."""
    with EventChannel("kernel") as old, EventChannel("kernel") as new, CmId(old) as cmid, select.epoll() as poller:
        poller.register(new.fileno(), select.EPOLLIN)
        assert not poller.poll(0)
        cmid.resolve_addr((THERE, 7471))
        assert select.select([old], [], [], 5)[0]
        cmid.migrate(new)
        assert poller.poll(5)
        assert event_type(new) is E.ADDR_RESOLVED
        refused(errno.EAGAIN, lambda: new.get_event(0), CmWouldBlockError)


def a_moved_event_is_seen_by_asyncio() -> None:
    async def move() -> CmEventType:
        loop = asyncio.get_running_loop()
        with EventChannel("kernel") as old, EventChannel("kernel") as new, CmId(old) as cmid:
            readable = asyncio.Event()
            loop.add_reader(new.fileno(), readable.set)
            cmid.resolve_addr((THERE, 7471))
            assert select.select([old], [], [], 5)[0]
            await asyncio.sleep(0)  # the loop has polled, and found nothing
            assert not readable.is_set()
            cmid.migrate(new)
            await asyncio.wait_for(readable.wait(), 5)
            loop.remove_reader(new.fileno())
            return event_type(new)

    assert asyncio.run(move()) is E.ADDR_RESOLVED


def the_descriptor_is_the_kernels_and_shows_user_events() -> None:
    with EventChannel("kernel") as channel, CmId(channel) as cmid:
        assert os.readlink(f"/proc/self/fd/{channel.fileno()}") == "/dev/infiniband/rdma_cm"
        assert not select.select([channel], [], [], 0)[0]
        for round_number in range(3):
            cmid.write_cm_event(status=7, arg=round_number)
            cmid.write_cm_event(arg=99)
            assert select.select([channel], [], [], 5)[0]
            with channel.get_event(0) as event:
                assert (event.type, event.status, event.arg) == (E.USER, 7, round_number)
            assert select.select([channel], [], [], 5)[0]
            with channel.get_event(0) as event:
                assert event.arg == 99
            refused(errno.EAGAIN, lambda: channel.get_event(0), CmWouldBlockError)
            assert not select.select([channel], [], [], 0.2)[0]
        cmid.resolve_addrinfo("127.0.0.1", 7471)
        assert select.select([channel], [], [], 5)[0]
        with channel.get_event(0) as event:
            assert event.type is E.ADDRINFO_RESOLVED
        assert cmid.query_addrinfo()


def a_wait_ends_in_time_by_a_signal_and_when_the_channel_is_closed() -> None:
    channel = EventChannel("kernel")
    refused(errno.ETIMEDOUT, lambda: channel.get_event(0.2), CmTimeoutError)

    class Interrupted(Exception):
        pass

    def handler(*_: object) -> None:
        raise Interrupted

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        channel.get_event(10)
    except Interrupted:
        pass
    else:
        raise AssertionError("not interrupted")
    closer = threading.Timer(0.2, channel.close)
    closer.start()
    refused(errno.EBADF, lambda: channel.get_event(10))
    closer.join()


def two_threads_get_one_event_each() -> None:
    with EventChannel("kernel") as channel, CmId(channel) as first, CmId(channel) as second:
        found: list[CmEventType] = []
        threads = [threading.Thread(target=lambda: found.append(event_type(channel))) for _ in range(2)]
        for thread in threads:
            thread.start()
        pause(0.1, "the threads begin to wait")
        for cmid in (first, second):
            cmid.resolve_addr((THERE, 7471))
        for thread in threads:
            thread.join(5)
        assert found == [E.ADDR_RESOLVED] * 2


def requests_wait_while_they_are_not_wanted() -> None:
    with EventChannel("kernel") as channel, CmId(channel) as listener:
        listener.bind_addr((HERE, 7500))
        listener.listen(8)
        listener.allow_requests(1)
        with EventChannel("kernel") as active, CmId(active) as first, CmId(active) as second:
            for number, cmid in enumerate((first, second), 5):
                cmid.resolve_addr((HERE, 7500))
                assert event_type(active) is E.ADDR_RESOLVED
                cmid.resolve_route()
                assert event_type(active) is E.ROUTE_RESOLVED
                cmid.connect(ConnParam(qp_num=number))
            with channel.get_event(5) as event:
                event.id.destroy()
            refused(errno.ETIMEDOUT, lambda: channel.get_event(0.3), CmTimeoutError)
            listener.allow_requests(5)
            with channel.get_event(5) as event:
                assert event.type is E.CONNECT_REQUEST
                event.id.reject()
                event.id.destroy()


def requests_beyond_the_backlog_are_rejected() -> None:
    """One is posted, one is kept for later as the backlog says, and no peer makes this process keep a third."""
    with EventChannel("kernel") as channel, CmId(channel) as listener, EventChannel("kernel") as active:
        listener.bind_addr((HERE, 7502))
        listener.allow_requests(1)
        listener.listen(1)
        clients = [CmId(active) for _ in range(3)]
        requests: list[CmId] = []
        for number, cmid in enumerate(clients, 5):
            cmid.resolve_addr((HERE, 7502))
            assert event_type(active) is E.ADDR_RESOLVED
            cmid.resolve_route()
            assert event_type(active) is E.ROUTE_RESOLVED
            cmid.connect(ConnParam(qp_num=number))
            if not requests:
                with channel.get_event(5) as event:
                    requests.append(event.id)
            else:
                refused(errno.ETIMEDOUT, lambda: channel.get_event(0.3), CmTimeoutError)
        with active.get_event(5) as event:
            assert event.type is E.REJECTED
            assert event.id is clients[2]
        listener.allow_requests(1)
        with channel.get_event(5) as event:
            requests.append(event.id)
        for cmid in (*requests, *clients):
            cmid.destroy()


def a_synchronous_pair_connects() -> None:
    with CmId(provider="kernel") as listener, CmId(provider="kernel") as active:
        listener.bind_addr((HERE, 7501))
        listener.listen()
        active.resolve_addr((HERE, 7501))
        active.resolve_route()
        thread = threading.Thread(target=lambda: active.connect(ConnParam(b"x", qp_num=5)))
        thread.start()
        request = listener.get_request(5)
        assert request.is_synchronous
        assert request.event.private_data[:1] == b"x"
        accepting = threading.Thread(target=lambda: request.accept(ConnParam(qp_num=6)))
        accepting.start()
        thread.join(5)
        active.establish()
        accepting.join(5)
        ending = threading.Thread(target=active.disconnect)
        ending.start()
        request.disconnect()
        ending.join(5)
        assert active.state is request.state is State.DISCONNECT
        request.destroy()


def the_route_of_the_hints_restricts() -> None:
    """With GIDs alone the peer connects; what no path has is EAI_NODATA, and no error of a later call."""
    like = PathRecord(dgid=Gid(f"::ffff:{HERE}"), sgid=Gid(f"::ffff:{HERE}"), pkey=0)
    with CmId(provider="kernel") as listener:
        listener.bind_addr((HERE, 7502))
        listener.listen()
        for restriction in (like, like.replace(mtu=2)):
            (info,) = getaddrinfo(HERE, 7502, route=[PathData(restriction)], provider="kernel")
            path = info.route[0].path
            assert path.mtu == (restriction.mtu or 3), path
            with create_ep(info, None, QPInitAttr(), provider="kernel") as active:
                thread = threading.Thread(target=active.connect)
                thread.start()
                with listener.get_request(5) as request:
                    request.create_qp()
                    request.accept()
                    thread.join(5)
                    assert active.qp.query()[0].path_mtu == path.mtu
                    ending = threading.Thread(target=active.disconnect)
                    ending.start()
                    request.disconnect()
                    ending.join(5)
    for change in ({"pkey": 0x8001}, {"sgid": Gid("::ffff:203.0.113.9")}, {"dgid": Gid("fe80::1")}, {"mtu": 5}):
        ask = partial(getaddrinfo, HERE, 7502, route=[PathData(like.replace(**change))], provider="kernel")
        refused(EAI.NODATA, ask, GaiError)
    with CmId(provider="kernel") as cmid:
        cmid.resolve_addr((HERE, 7502))
        refused(errno.EINVAL, lambda: cmid.set_option(OptionLevel.IB, IbOption.PATH, PathData(like).pack()))


def groups_are_joined_and_left() -> None:
    with EventChannel("kernel") as channel, CmId(channel, PortSpace.UDP) as cmid:
        cmid.bind_addr((HERE, 0))
        cmid.join_multicast(("239.1.2.3", 0), "mine")
        with channel.get_event(5) as event:
            assert (event.type, event.status, event.join_context) == (E.MULTICAST_JOIN, 0, "mine"), event
            assert isinstance(event.param, UdParam)
            assert (event.param.qp_num, event.param.qkey) == (0xFFFFFF, 0x01234567)
            assert str(event.param.ah_attr.gr.dgid).endswith("239.1.2.3"), event.param
        cmid.leave_multicast(("239.1.2.3", 0))
        refused(errno.EADDRNOTAVAIL, lambda: cmid.leave_multicast(("239.1.2.3", 0)))
        refused(errno.EINVAL, lambda: cmid.join_multicast(("0.0.0.0", 0)))


def services_are_of_infiniband_ports() -> None:
    with CmId(provider="kernel") as cmid:
        refused(errno.EINVAL, lambda: cmid.resolve_addrinfo(None, "storage", flags=RaiFlag.SA), CmStateError)
        cmid.bind_addr((HERE, 0))
        error = refused(errno.EOPNOTSUPP, lambda: cmid.resolve_addrinfo(None, "storage", flags=RaiFlag.SA))
        assert "no subnet administrator" in str(error)
        refused(errno.EOPNOTSUPP, lambda: cmid.register_service("storage"))


def packets_are_not_captured_here() -> None:
    error = refused(errno.EOPNOTSUPP, lambda: capture("/tmp/none.pcap", provider="kernel").__enter__())
    assert "tcpdump -i va" in str(error)


def a_child_of_fork_starts_anew() -> None:
    channel = EventChannel("kernel")
    cmid = CmId(channel)
    cmid.bind_addr((HERE, 0))
    child = os.fork()
    if not child:
        try:
            refused(errno.EBADF, lambda: cmid.resolve_addr((THERE, 1)))
            refused(errno.EBADF, lambda: channel.get_event(1))
            cmid.destroy()
            channel.close()
            with CmId(provider="kernel") as own:
                own.resolve_addr((THERE, 7471))
            os._exit(0)
        except BaseException as error:
            print("in the child:", repr(error), flush=True)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    cmid.resolve_addr((THERE, 7471))
    assert event_type(channel) is E.ADDR_RESOLVED
    cmid.destroy()
    channel.close()


def nothing_is_left_behind() -> None:
    gc.collect()  # errors of the rules before refer to their frames, and so to ids
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        with EventChannel("kernel") as channel:
            for _ in range(3):
                CmId(channel).bind_addr(("", 0))
        with CmId(provider="kernel") as cmid:
            cmid.bind_addr((HERE, 0))
    assert len(os.listdir("/proc/self/fd")) == before
    shown = os.popen("rdma resource show cm_id").read()
    assert f"pid {os.getpid()} " not in shown, shown


def the_device_may_be_removed() -> None:
    """An event for each id bound to it; what follows is an error, and destroying works."""
    with EventChannel("kernel") as channel:
        bound, listener, other = CmId(channel), CmId(channel), CmId(channel)
        bound.resolve_addr((THERE, 7471))
        assert event_type(channel) is E.ADDR_RESOLVED
        listener.bind_addr((HERE, 7502))
        listener.listen()
        other.bind_addr(("", 0))
        gone = set()
        with subprocess.Popen(["rdma", "link", "delete", "rxe0"]) as removal:  # ends once the device is let go of here
            for _ in range(2):
                with channel.get_event(5) as event:
                    assert event.type is E.DEVICE_REMOVAL, event
                    gone.add(event.id)
            while removal.poll() is None:
                PROVIDER.drive(lambda: None, 0.05)
        assert removal.returncode == 0
        assert gone == {bound, listener}
        assert bound.state is State.DEVICE_REMOVAL
        refused(errno.ENXIO, bound.resolve_route)
        assert devices("kernel") == []
        refused(errno.ENODEV, lambda: other.resolve_addr(("127.0.0.1", 1)))
        for each in (bound, listener, other):
            each.destroy()
    assert os.system("rdma link add rxe0 type rxe netdev va") == 0
    eventually(lambda: any(port.gids for device in devices("kernel") for port in device.ports))
    with CmId(provider="kernel") as cmid:
        cmid.resolve_addr((THERE, 7471))


RULES = (
    librdmacm_is_not_loaded,
    devices_are_those_of_the_kernel,
    an_id_binds_as_in_the_kernel,
    calls_that_the_state_does_not_allow_are_refused,
    a_resolution_is_explained,
    a_failed_resolution_is_an_event_with_its_reason,
    a_call_may_be_ahead_of_the_events,
    options_are_passed_on,
    events_move_with_an_id,
    a_moved_event_wakes_a_thread_that_waits,
    a_moved_event_is_reported_by_epoll,
    a_moved_event_is_seen_by_asyncio,
    the_descriptor_is_the_kernels_and_shows_user_events,
    a_wait_ends_in_time_by_a_signal_and_when_the_channel_is_closed,
    two_threads_get_one_event_each,
    requests_wait_while_they_are_not_wanted,
    requests_beyond_the_backlog_are_rejected,
    a_synchronous_pair_connects,
    the_route_of_the_hints_restricts,
    groups_are_joined_and_left,
    services_are_of_infiniband_ports,
    packets_are_not_captured_here,
    a_child_of_fork_starts_anew,
    nothing_is_left_behind,
    the_device_may_be_removed,
)


def main() -> None:
    for rule in RULES:
        if sys.argv[1:] and rule.__name__ not in sys.argv[1:]:
            continue
        try:
            rule()
        except BaseException:
            print(f"{rule.__name__}:", file=sys.stderr)
            raise
    print("as expected")


if __name__ == "__main__":
    main()
