"""A timeout is a number of seconds of 0 or more; anything else is a ValueError, and the object remains usable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

import rdmacm
from rdmacm import CmId, EventChannel, aio, connect, listen
from rdmacm.endpoint import Connection, Listener
from rdmacm.verbs import CQ, CompChannel
from support.endpoints import connected

#: Negative, and not a number.
INVALID = [-1, -0.001, float("nan"), float("-inf")]
pytestmark = pytest.mark.parametrize("timeout", INVALID, ids=str)


@pytest.fixture
def listener() -> Iterator[Listener]:
    with listen(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def both() -> Iterator[tuple[Connection, Connection]]:
    with connected() as ends:
        yield ends


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="is not a number of 0 or more"):
        call()


def test_endpoint_calls(both: tuple[Connection, Connection], timeout: float) -> None:
    one, other = both
    region = other.register(bytearray(8), remote_read=True, remote_write=True, remote_atomic=True)
    for call in (
        lambda: one.send(b"x", timeout=timeout),
        lambda: one.recv(timeout),
        lambda: one.recv_message(timeout),
        lambda: one.write(region.remote, b"x", timeout=timeout),
        lambda: one.read(region.remote, timeout=timeout),
        lambda: one.compare_swap(region.remote, 0, 0, timeout=timeout),
        lambda: one.fetch_add(region.remote, 0, timeout=timeout),
    ):
        refused(call)
    one.send(b"still connected")
    assert other.recv(10) == b"still connected"


def test_connecting_and_listening(listener: Listener, timeout: float) -> None:
    refused(lambda: connect(("127.0.0.1", listener.port), timeout=timeout))
    refused(lambda: listener.accept(timeout))
    refused(lambda: listener.get_request(timeout))


def test_asyncio(listener: Listener, timeout: float) -> None:
    refused(lambda: asyncio.run(aio.connect(("127.0.0.1", listener.port), timeout=timeout)))


def test_ids_channels_and_queues(timeout: float) -> None:
    with EventChannel() as channel, CmId() as cmid:
        refused(lambda: channel.get_event(timeout))
        cmid.bind_addr(("127.0.0.1", 0))
        cmid.listen()
        refused(lambda: cmid.get_request(timeout))
        refused(lambda: cmid.get_send_comp(timeout))
        refused(lambda: cmid.get_recv_comp(timeout))
        with CompChannel(cmid.verbs) as completions, CQ(cmid.verbs, 1) as cq:
            refused(lambda: completions.get_cq_event(timeout))
            refused(lambda: cq.wait(timeout))


def test_resolution(timeout: float) -> None:
    refused(lambda: rdmacm.explain("127.0.0.1", 1, timeout_ms=timeout))  # type: ignore[arg-type]
