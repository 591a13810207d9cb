"""Every cell of the id's state tables, in the tables themselves and through real ids."""

from __future__ import annotations

import errno
import importlib.util
from pathlib import Path

import pytest

from rdmacm import CmId, CmStateError, EventChannel, IdOption, OptionLevel, PortSpace
from rdmacm.proto.sa import PathData, PathRecord
from rdmacm.provider.cmstate import OPTION_STATES, TRANSITIONS, State, Trigger, refusal
from rdmacm.testing import MemoryNetwork, VirtualClock, memory_provider
from support.rows import for_each

S, T = State, Trigger

# The states that allow each call, from the manual pages of rdma_cm(7) and the kernel's checks.
ALLOWED: dict[Trigger, set[State]] = {
    T.BIND_ADDR: {S.IDLE},
    T.RESOLVE_ADDR: {S.IDLE, S.ADDR_BOUND, S.ADDRINFO_RESOLVED},
    T.RESOLVE_IB_SERVICE: {S.ADDR_BOUND},
    T.RESOLVE_ROUTE: {S.ADDR_RESOLVED, S.ADDRINFO_RESOLVED},
    T.SET_PATH: {S.ADDR_RESOLVED},
    T.CONNECT: {S.ROUTE_RESOLVED},
    T.LISTEN: {S.IDLE, S.ADDR_BOUND},
    T.ACCEPT: {S.CONNECT},
    T.REJECT: {S.CONNECT, S.DISCONNECT},
    T.NOTIFY: {S.CONNECT, S.DISCONNECT},
    T.DISCONNECT: {S.CONNECT, S.DISCONNECT},
    T.JOIN_MULTICAST: {S.ADDR_BOUND, S.ADDR_RESOLVED},
    T.MIGRATE: set(S) - {S.DEVICE_REMOVAL, S.DESTROYING},
    T.DESTROY: set(S) - {S.DESTROYING},
}


@for_each("state", list(State), ids=lambda s: s.name)
@for_each("call", list(ALLOWED), ids=lambda t: t.name)
def test_each_call_is_allowed_in_its_states_only(call: Trigger, state: State) -> None:
    after = TRANSITIONS[state].get(call)
    assert (after is not None) == (state in ALLOWED[call])
    if after is None:
        gone = state in (S.DEVICE_REMOVAL, S.DESTROYING)
        assert refusal(state) == (errno.ENXIO if gone else errno.EINVAL)


def test_outcomes_follow_the_manual_pages() -> None:
    assert TRANSITIONS[S.ADDR_QUERY].get(T.ADDR_DONE) is S.ADDR_RESOLVED
    assert TRANSITIONS[S.ADDR_QUERY].get(T.ADDR_FAILED) is S.ADDR_BOUND, "a failed resolution may be repeated"
    assert TRANSITIONS[S.ROUTE_QUERY].get(T.ROUTE_DONE) is S.ROUTE_RESOLVED
    assert TRANSITIONS[S.ROUTE_QUERY].get(T.ROUTE_FAILED) is S.ADDR_RESOLVED
    assert TRANSITIONS[S.ADDRINFO_QUERY].get(T.SERVICE_FAILED) is S.ADDR_BOUND
    assert TRANSITIONS[S.CONNECT].get(T.DISCONNECTED) is S.DISCONNECT
    assert TRANSITIONS[S.CONNECT].get(T.CONNECT) is None, "a rejected id cannot connect again"
    for state in State:
        if state not in (S.DEVICE_REMOVAL, S.DESTROYING):
            assert TRANSITIONS[state].get(T.DEVICE_GONE) is S.DEVICE_REMOVAL


def test_every_state_can_be_reached() -> None:
    reached, frontier = {S.IDLE, S.CONNECT}, [S.IDLE, S.CONNECT]  # a connection request's id begins in CONNECT
    while frontier:
        for after in TRANSITIONS[frontier.pop()].values():
            if after not in reached:
                reached.add(after)
                frontier.append(after)
    assert reached == set(State)


# -- through real ids -----------------------------------------------------------------------------------


class World:
    """A host with one neighbour that answers, and an id in a state."""

    def __init__(self, state: State, port_space: PortSpace = PortSpace.TCP) -> None:
        network = MemoryNetwork()
        self.eth0 = network.add_interface("eth0", "10.0.0.1/24")
        network.add_neighbour(self.eth0, "10.0.0.2")
        self.channel = EventChannel(memory_provider(network, VirtualClock()))
        self.id = CmId(self.channel, port_space)
        if state is S.ADDR_BOUND:
            self.id.bind_addr(("10.0.0.1", 0))
        elif state is S.ADDR_QUERY:
            self.id.resolve_addr(("10.0.0.9", 1))
        elif state in (S.ADDR_RESOLVED, S.ROUTE_RESOLVED, S.DEVICE_REMOVAL):
            self.id.resolve_addr(("10.0.0.2", 1))
            if state is S.ROUTE_RESOLVED:
                self.id.resolve_route()
            if state is S.DEVICE_REMOVAL:
                network.remove_interface(self.eth0)
            self.drain()
        assert self.id.state is state

    def drain(self) -> None:
        while True:
            try:
                self.channel.get_event(0).ack()
            except BlockingIOError:
                return

    def close(self) -> None:
        self.id.destroy()
        self.channel.close()


PATH = PathData(PathRecord(dgid=b"\x01" * 16, sgid=b"\x02" * 16, mtu=5)).pack()  # type: ignore[arg-type]
CALLS = {
    T.BIND_ADDR: lambda w: w.id.bind_addr(("", 0)),
    T.RESOLVE_ADDR: lambda w: w.id.resolve_addr(("10.0.0.2", 1)),
    T.RESOLVE_ROUTE: lambda w: w.id.resolve_route(),
    T.SET_PATH: lambda w: w.id.set_option(OptionLevel.IB, 1, PATH),
}


@for_each(
    "state",
    [S.IDLE, S.ADDR_BOUND, S.ADDR_QUERY, S.ADDR_RESOLVED, S.ROUTE_RESOLVED, S.DEVICE_REMOVAL],
    ids=lambda s: s.name,
)
@for_each("call", list(CALLS), ids=lambda t: t.name)
def test_ids_follow_the_table(call: Trigger, state: State) -> None:
    world = World(state)
    try:
        if state in ALLOWED[call]:
            CALLS[call](world)
            assert world.id.state is not state
        else:
            with pytest.raises(CmStateError) as refused:
                CALLS[call](world)
            assert refused.value.errno == refusal(state)
            assert state.name in str(refused.value)
            assert world.id.state is state, "a refused call does not change the state"
            with pytest.raises(BlockingIOError):
                world.channel.get_event(0)
    finally:
        world.close()


OPTIONS = {
    "TOS": (IdOption.TOS, 32),
    "ACK_TIMEOUT": (IdOption.ACK_TIMEOUT, 20),
    "REUSEADDR on": (IdOption.REUSEADDR, 1),
    "REUSEADDR off": (IdOption.REUSEADDR, 0),
    "AFONLY": (IdOption.AFONLY, 1),
}


@for_each(
    "state",
    [S.IDLE, S.ADDR_BOUND, S.ADDR_QUERY, S.ADDR_RESOLVED, S.ROUTE_RESOLVED, S.DEVICE_REMOVAL],
    ids=lambda s: s.name,
)
@for_each("option", list(OPTIONS))
def test_each_option_is_accepted_in_its_states_only(option: str, state: State) -> None:
    world = World(state)
    name, value = OPTIONS[option]
    try:
        if state in OPTION_STATES[option]:
            world.id.set_option(OptionLevel.ID, name, value)
            assert world.id.get_option(name) == value
        else:
            with pytest.raises(CmStateError) as refused:
                world.id.set_option(OptionLevel.ID, name, value)
            assert refused.value.errno == refusal(state)
        assert world.id.state is state
    finally:
        world.close()


@for_each(
    ("level", "name", "value", "code"),
    [
        (OptionLevel.ID, IdOption.TOS, 256, errno.EINVAL),
        (OptionLevel.ID, IdOption.TOS, -1, errno.EINVAL),
        (OptionLevel.ID, IdOption.TOS, b"\0\0", errno.EINVAL),
        (OptionLevel.ID, IdOption.REUSEADDR, b"\1", errno.EINVAL),
        (OptionLevel.ID, IdOption.AFONLY, b"", errno.EINVAL),
        (OptionLevel.ID, 9, 1, errno.ENOSYS),
        (7, 0, 1, errno.ENOSYS),
        (OptionLevel.IB, 2, b"", errno.ENOSYS),
    ],
)
def test_invalid_options_raise(level: int, name: int, value: int | bytes, code: int) -> None:
    world = World(S.IDLE)
    try:
        with pytest.raises(OSError) as refused:
            world.id.set_option(level, name, value)
        assert refused.value.errno == code
    finally:
        world.close()


def test_ack_timeout_needs_rc() -> None:
    world = World(S.IDLE, PortSpace.UDP)
    try:
        with pytest.raises(OSError) as refused:
            world.id.set_option(OptionLevel.ID, IdOption.ACK_TIMEOUT, 14)
        assert refused.value.errno == errno.EINVAL
    finally:
        world.close()


@pytest.mark.parametrize("value", [b"", b"\0" * 71, b"\0" * 72, 5])
def test_ib_path_option_rejects_unusable_records(value: bytes | int) -> None:
    world = World(S.ADDR_RESOLVED)
    try:
        with pytest.raises(OSError) as refused:
            world.id.set_option(OptionLevel.IB, 1, value)
        assert refused.value.errno == errno.EINVAL
        assert world.id.state is S.ADDR_RESOLVED
    finally:
        world.close()


def test_ib_path_option_sets_the_route() -> None:
    world = World(S.ADDR_RESOLVED)
    try:
        world.id.set_option(OptionLevel.IB, 1, b"\0" * 72 + PATH)
        with world.channel.get_event(0) as event:
            assert str(event.type) == "RDMA_CM_EVENT_ROUTE_RESOLVED"
        assert world.id.route.path_rec[0].dgid == b"\x01" * 16
        assert world.id.state is S.ROUTE_RESOLVED
    finally:
        world.close()


def test_page_and_pictures_match_the_tables() -> None:
    docs = Path(__file__).parent.parent / "docs"
    spec = importlib.util.spec_from_file_location("make_states", docs / "make_states.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, made in {"states.md": module.render(), **module.drawn()}.items():
        assert (docs / name).read_text(encoding="utf-8") == made, f"{name}: run docs/make_states.py"
