"""Helpers for resolving on a real network: ids, their events and results, and failures with their explanations."""

from __future__ import annotations

import contextlib
import errno
import json
import select
from collections.abc import Iterator
from socket import AF_INET, AF_INET6, SOCK_DGRAM, inet_pton, socket
from typing import Protocol

import pytest

from rdmacm import (
    CmEvent,
    CmEventType,
    CmId,
    CmWouldBlockError,
    EventChannel,
    Explanation,
    Gid,
    PortSpace,
    RdmaError,
    SockAddr,
    State,
    devices,
    explain,
)
from support.netns import Host

PORT = 7471

#: Seconds within which an expected event arrives.
SOON = 3.0


@contextlib.contextmanager
def an_id(port_space: PortSpace = PortSpace.TCP) -> Iterator[tuple[EventChannel, CmId]]:
    with EventChannel() as channel, CmId(channel, port_space) as cmid:
        yield channel, cmid


class Reader(Protocol):
    """A way to wait for an event."""

    def __call__(self, channel: EventChannel, timeout: float = SOON, /) -> CmEvent: ...


def read_waiting(channel: EventChannel, timeout: float = SOON) -> CmEvent:
    return channel.get_event(timeout)


def read_epoll(channel: EventChannel, timeout: float = SOON) -> CmEvent:
    with select.epoll() as poller:
        poller.register(channel.fileno(), select.EPOLLIN)
        wakeups = 0
        while True:
            assert poller.poll(timeout), "the descriptor never became readable"
            wakeups += 1
            assert wakeups < 100, "the descriptor polls readable without progress"
            with contextlib.suppress(CmWouldBlockError):
                return channel.get_event(0)


def read_select(channel: EventChannel, timeout: float = SOON) -> CmEvent:
    channel.blocking = False
    wakeups = 0
    while True:
        assert select.select([channel], [], [], timeout)[0], "never readable"
        wakeups += 1
        assert wakeups < 100, "the descriptor polls readable without progress"
        with contextlib.suppress(CmWouldBlockError):
            return channel.get_event()


def expect(
    channel: EventChannel,
    kind: CmEventType,
    status: int = 0,
    read: Reader = read_waiting,
    timeout: float = 5.0,
) -> CmEvent:
    event = read(channel, timeout)
    event.ack()
    assert (event.type, event.status) == (kind, status), event.message
    return event


def no_event(channel: EventChannel) -> None:
    with pytest.raises(CmWouldBlockError):
        channel.get_event(0)


def resolve(
    channel: EventChannel, cmid: CmId, dst: SockAddr, src: SockAddr | None = None, timeout_ms: int = 5000
) -> None:
    """Both steps, each of which must succeed."""
    cmid.resolve_addr(dst, src, timeout_ms)
    expect(channel, CmEventType.ADDR_RESOLVED)
    assert state_of(cmid) is State.ADDR_RESOLVED
    cmid.resolve_route(timeout_ms)
    expect(channel, CmEventType.ROUTE_RESOLVED)
    assert state_of(cmid) is State.ROUTE_RESOLVED


def state_of(cmid: CmId) -> State:
    return cmid.state


def device_of(cmid: CmId) -> str:
    return cmid.verbs.name


def source_of(cmid: CmId) -> str:
    assert isinstance(cmid.local_addr, tuple)
    return cmid.local_addr[0]


def packed(address: str) -> bytes:
    return inet_pton(AF_INET6 if ":" in address else AF_INET, address)


def gid_of(address: str) -> Gid:
    return Gid.from_ip(packed(address))


def row_index(device: str, gid: Gid) -> int:
    (found,) = (d for d in devices() if d.name == device)
    (index,) = (row.gid_index for port in found.ports for row in port.gids if row.gid == gid)
    return index


def neighbours(host: Host) -> dict[str, str]:
    """Address → state of the neighbour entries that have been asked for."""
    return {entry["dst"]: entry["state"][0] for entry in json.loads(host.ip("-j", "neigh"))}


def connect_errno(family: int, host: str) -> int:
    """What a socket's connect() says of a destination."""
    with socket(family, SOCK_DGRAM) as sock:
        return sock.connect_ex((host, 4791))


def failure(dst: SockAddr, src: SockAddr | None = None, timeout_ms: int = 200) -> RdmaError:
    """The exception with which an address is not resolved; it must be raised at once, and no event follow."""
    with an_id() as (channel, cmid):
        with pytest.raises(RdmaError) as caught:
            cmid.resolve_addr(dst, src, timeout_ms)
        no_event(channel)
    return caught.value


def assert_explained(explanation: Explanation | None, step: str, number: int, hint: str = "") -> Explanation:
    assert explanation is not None
    assert not explanation.ok
    assert explanation.chosen is None
    assert (explanation.error, explanation.errno) == (step, number)
    assert explanation.errno_name == errno.errorcode[number]
    assert explanation.hint
    assert hint in explanation.hint
    text = explanation.text()
    assert f"FAILED at {step}" in text
    assert errno.errorcode[number] in text
    assert explanation.hint in text
    assert json.loads(json.dumps(explanation.as_dict()))["errno"] == number
    return explanation


def assert_agrees(explanation: Explanation | None, dst: str, timeout_ms: int = 200) -> None:
    """explain() names the same step, errno and hint for the destination."""
    other = explain(dst, PORT, timeout_ms=timeout_ms)
    assert explanation is not None
    assert (other.error, other.errno_name, other.message, other.hint) == (
        explanation.error,
        explanation.errno_name,
        explanation.message,
        explanation.hint,
    )
    assert other.route == explanation.route
