"""Calls on a destroyed id: ENXIO, whatever the id was doing."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from rdmacm import (
    CmEventType,
    CmId,
    CmStateError,
    ConnParam,
    Ece,
    EventChannel,
    Gid,
    IdOption,
    OptionLevel,
    PathRecord,
    PortSpace,
    RaiFlag,
    RdmaError,
    State,
)
from rdmacm.verbs import QPInitAttr, QPState
from rdmacm.verbs.pd import MR
from rdmacm.verbs.wr import SGE
from support.rows import for_each
from support.world import World

PORT = 7471
NEIGHBOUR, SILENT = ("10.0.0.2", PORT), ("10.0.0.3", PORT)


@dataclass
class Arguments:
    """What some calls need: a region and a channel."""

    mr: MR
    world: World


@pytest.fixture
def arguments(world: World) -> Iterator[Arguments]:
    with CmId(world.channel) as cmid:
        cmid.bind_addr(("10.0.0.1", 0))
        mr = cmid.reg_msgs(bytearray(64))
    with mr:
        yield Arguments(mr, world)


#: Every call of an id, by its name.
CALLS: dict[str, Callable[[CmId, Arguments], object]] = {
    "bind_addr": lambda cmid, _: cmid.bind_addr(("10.0.0.1", 0)),
    "resolve_addr": lambda cmid, _: cmid.resolve_addr(NEIGHBOUR),
    "resolve_route": lambda cmid, _: cmid.resolve_route(),
    "resolve_addrinfo": lambda cmid, _: cmid.resolve_addrinfo("10.0.0.2", PORT),
    "resolve_addrinfo RAI_SA": lambda cmid, _: cmid.resolve_addrinfo(None, "name", flags=RaiFlag.SA),
    "query_addrinfo": lambda cmid, _: cmid.query_addrinfo(),
    "set_option": lambda cmid, _: cmid.set_option(OptionLevel.ID, IdOption.TOS, 1),
    "get_option": lambda cmid, _: cmid.get_option(IdOption.TOS),
    "listen": lambda cmid, _: cmid.listen(),
    "allow_requests": lambda cmid, _: cmid.allow_requests(1),
    "get_request": lambda cmid, _: cmid.get_request(0),
    "accept": lambda cmid, _: cmid.accept(),
    "accept with a queue pair": lambda cmid, _: cmid.accept(ConnParam(qp_num=7)),
    "reject": lambda cmid, _: cmid.reject(),
    "reject_ece": lambda cmid, _: cmid.reject_ece(),
    "register_service": lambda cmid, _: cmid.register_service("name"),
    "connect": lambda cmid, _: cmid.connect(),
    "connect with a queue pair": lambda cmid, _: cmid.connect(ConnParam(qp_num=7)),
    "establish": lambda cmid, _: cmid.establish(),
    "notify": lambda cmid, _: cmid.notify(4),
    "load_alternate_path": lambda cmid, _: cmid.load_alternate_path(PathRecord(Gid(), Gid())),
    "allow_alternate_paths": lambda cmid, _: cmid.allow_alternate_paths(),
    "answer_alternate_path": lambda cmid, _: cmid.answer_alternate_path(),
    "join_multicast": lambda cmid, _: cmid.join_multicast(("239.1.2.3", 0)),
    "join_multicast_ex": lambda cmid, _: cmid.join_multicast_ex(("239.1.2.3", 0), 1),
    "leave_multicast": lambda cmid, _: cmid.leave_multicast(("239.1.2.3", 0)),
    "disconnect": lambda cmid, _: cmid.disconnect(),
    "set_local_ece": lambda cmid, _: cmid.set_local_ece(Ece(1, 0)),
    "get_remote_ece": lambda cmid, _: cmid.get_remote_ece(),
    "create_qp": lambda cmid, _: cmid.create_qp(),
    "create_qp with attributes": lambda cmid, _: cmid.create_qp(QPInitAttr()),
    "create_srq": lambda cmid, _: cmid.create_srq(),
    "init_qp_attr": lambda cmid, _: cmid.init_qp_attr(QPState.INIT),
    "reg_msgs": lambda cmid, _: cmid.reg_msgs(bytearray(8)),
    "reg_read": lambda cmid, _: cmid.reg_read(bytearray(8)),
    "reg_write": lambda cmid, _: cmid.reg_write(bytearray(8)),
    "post_recv": lambda cmid, given: cmid.post_recv(1, given.mr),
    "post_recvv": lambda cmid, given: cmid.post_recvv(1, [given.mr.sge()]),
    "post_send": lambda cmid, given: cmid.post_send(1, given.mr),
    "post_sendv": lambda cmid, given: cmid.post_sendv(1, [b"data"]),
    "post_read": lambda cmid, given: cmid.post_read(1, given.mr, 0, 0),
    "post_readv": lambda cmid, given: cmid.post_readv(1, [given.mr.sge()], 0, 0),
    "post_write": lambda cmid, given: cmid.post_write(1, given.mr, 0, 0),
    "post_writev": lambda cmid, given: cmid.post_writev(1, [SGE(0, 0, 0)], 0, 0),
    "post_ud_send": lambda cmid, given: cmid.post_ud_send(1, given.mr, None, 1, 1),  # type: ignore[arg-type]
    "get_send_comp": lambda cmid, _: cmid.get_send_comp(0),
    "get_recv_comp": lambda cmid, _: cmid.get_recv_comp(0),
    "write_cm_event": lambda cmid, _: cmid.write_cm_event(),
    "migrate": lambda cmid, given: cmid.migrate(given.world.channel),
    "migrate to synchronous mode": lambda cmid, _: cmid.migrate(None),
}

#: Calls that have another name in errors.
STEPS = {
    "join_multicast_ex": "join_multicast",
    "post_recvv": "post_recv",
    "post_sendv": "post_send",
    "post_readv": "post_read",
    "post_writev": "post_write",
    "migrate": "migrate_id",
}

#: What remains possible: releasing, and looking at what was.
POSSIBLE = {"destroy", "close", "destroy_qp", "destroy_srq", "explain"}


def idle(world: World) -> CmId:
    cmid = CmId(world.channel)
    cmid.destroy()
    return cmid


def synchronous(world: World) -> CmId:
    cmid = CmId(provider=world.provider)
    cmid.resolve_addr(NEIGHBOUR)
    cmid.destroy()
    return cmid


def with_a_queue_pair(world: World) -> CmId:
    cmid = CmId(world.channel)
    cmid.bind_addr(("10.0.0.1", 0))
    cmid.create_srq()
    cmid.create_qp()
    cmid.destroy()
    return cmid


def with_queues_of_the_user(world: World) -> CmId:
    with CmId(world.channel) as other:
        other.bind_addr(("10.0.0.1", 0))
        attr = QPInitAttr(cap=other.create_qp().cap)
        cmid = CmId(world.channel)
        cmid.bind_addr(("10.0.0.1", 0))
        attr.scq = attr.rcq = other.send_cq
        cmid.create_qp(attr)
        cmid.destroy()
    return cmid


def listening(world: World) -> CmId:
    cmid = CmId(world.channel)
    cmid.listen()
    cmid.destroy()
    return cmid


def waiting_for_a_neighbour(world: World) -> CmId:
    cmid = CmId(world.channel)
    cmid.resolve_addr(SILENT)
    cmid.destroy()
    return cmid


def waiting_for_a_name(world: World) -> CmId:
    """Destroyed while a thread waits for its name server."""
    asked, answer = threading.Event(), threading.Event()

    def resolver(*question: Any) -> Any:
        asked.set()
        answer.wait(10)
        return []

    cmid = CmId(world.channel)
    cmid.resolve_addrinfo("name.test", PORT, resolver=resolver)
    assert asked.wait(10)
    cmid.destroy()
    answer.set()
    return cmid


def with_a_result(world: World) -> CmId:
    cmid = CmId(world.channel)
    cmid.resolve_addrinfo("10.0.0.2", PORT)
    cmid.destroy()
    return cmid


def of_a_closed_channel(world: World) -> CmId:
    channel = EventChannel(world.provider)
    cmid = CmId(channel)
    cmid.bind_addr(("10.0.0.1", 0))
    channel.close()
    return cmid


DESTROYED = [
    idle,
    synchronous,
    with_a_queue_pair,
    with_queues_of_the_user,
    listening,
    waiting_for_a_neighbour,
    waiting_for_a_name,
    with_a_result,
    of_a_closed_channel,
]


def test_the_table_has_every_call() -> None:
    public = {name for name in dir(CmId) if not name.startswith("_") and callable(getattr(CmId, name))}
    assert {name.partition(" ")[0] for name in CALLS} == public - POSSIBLE


@pytest.mark.parametrize("destroyed", DESTROYED)
def test_each_call_is_enxio(world: World, arguments: Arguments, destroyed: Callable[[World], CmId]) -> None:
    cmid = destroyed(world)
    world.events()

    def call(name: str) -> None:
        with pytest.raises(RdmaError) as caught:
            CALLS[name](cmid, arguments)
        error = caught.value
        assert (type(error), error.errno) == (CmStateError, errno.ENXIO)
        step = name.partition(" ")[0]
        step = STEPS.get(step, step)
        assert str(error) == f"{step}: the id has been destroyed [ENXIO]; try: a new id"

    for_each("name", list(CALLS))(call)()
    assert world.events() == []
    assert cmid.state is State.DESTROYING
    cmid.destroy()  # one of a closed channel is not released yet


@pytest.mark.parametrize("destroyed", DESTROYED)
def test_releasing_again_does_nothing(world: World, destroyed: Callable[[World], CmId]) -> None:
    cmid = destroyed(world)
    for release in (cmid.destroy_qp, cmid.destroy_srq, cmid.destroy, cmid.close, cmid.destroy):
        release()
    cmid.explain()
    assert repr(cmid).startswith("<CmId TCP DESTROYING")


def _ends_with_enxio(call: Callable[[], object], destroy: Callable[[], object], waits: Callable[[], bool]) -> None:
    """``call`` waits in a thread until ``destroy()``, and then raises ENXIO."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    deadline = threading.Event()
    while not waits() and thread.is_alive():
        deadline.wait(0.01)
    deadline.wait(0.1)
    destroy()
    thread.join(10)
    assert not thread.is_alive()
    assert [(type(error), getattr(error, "errno", None)) for error in raised] == [(CmStateError, errno.ENXIO)]


def test_destroyed_during_a_synchronous_lookup(world: World) -> None:
    asked, answer = threading.Event(), threading.Event()

    def resolver(*question: Any) -> Any:
        asked.set()
        answer.wait(10)
        return []

    cmid = CmId(provider=world.provider)
    _ends_with_enxio(lambda: cmid.resolve_addrinfo("name.test", PORT, resolver=resolver), cmid.destroy, asked.is_set)
    answer.set()


def test_destroyed_during_a_synchronous_resolution(world: World) -> None:
    cmid = CmId(provider=world.provider)
    _ends_with_enxio(lambda: cmid.resolve_addr(SILENT), cmid.destroy, lambda: cmid.state is State.ADDR_QUERY)


def test_destroyed_while_waiting_for_a_request(world: World) -> None:
    cmid = CmId(provider=world.provider)
    cmid.bind_addr(("10.0.0.1", 0))
    cmid.listen()
    _ends_with_enxio(cmid.get_request, cmid.destroy, lambda: True)


def test_destroyed_while_waiting_for_a_completion(world: World) -> None:
    cmid = CmId(world.channel)
    cmid.bind_addr(("10.0.0.1", 0))
    cmid.create_qp()
    _ends_with_enxio(cmid.get_recv_comp, cmid.destroy, lambda: True)


def test_lookup_in_progress_posts_nothing(world: World) -> None:
    """The lookup of a destroyed id posts no event, and a new id may look up at once."""
    waiting_for_a_name(world)
    with CmId(world.channel, PortSpace.TCP) as cmid:
        cmid.resolve_addrinfo("10.0.0.2", PORT)
        world.one(CmEventType.ADDRINFO_RESOLVED)
