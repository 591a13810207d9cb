"""Listeners that answer nobody, in a network namespace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rdmacm import CmId, EventChannel, PortSpace
from support.netns import Host

__all__ = ["asking_twice", "listening"]


@contextmanager
def listening(host: Host, address: str, space: PortSpace = PortSpace.TCP, backlog: int = 0) -> Iterator[int]:
    """A listener of this process that rejects nobody and accepts nobody; its port."""
    with host.enter():
        channel = EventChannel()
        cmid = CmId(channel, space)
        cmid.bind_addr((address, 0))
        cmid.listen(backlog)
    with channel, cmid:
        yield cmid.src_port


@contextmanager
def asking_twice(host: Host, address: str, port: int) -> Iterator[None]:
    """Two requests for a connection, which is one more than a backlog of 1 takes."""
    with ExitStack() as stack:
        with host.enter():
            for _ in range(2):
                waiting = stack.enter_context(EventChannel())
                cmid = stack.enter_context(CmId(waiting, PortSpace.TCP))
                cmid.resolve_addr((address, port))
                waiting.get_event(5).ack()
                cmid.resolve_route()
                waiting.get_event(5).ack()
                cmid.create_qp()
                cmid.connect()
        yield
