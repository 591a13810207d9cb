"""Destroyed ids are freed at once: ten thousand of them must not wait for the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from rdmacm import CmEventType, CmId, EventChannel, PortSpace
from rdmacm.soft.ids.identifier import SoftId
from rdmacm.testing import Fabric


def living_ids() -> int:
    return sum(type(each) is SoftId for each in gc.get_objects())


@contextmanager
def no_garbage() -> Iterator[None]:
    """Fail if the block leaves ids that only the garbage collector frees."""
    gc.collect()
    before = living_ids()
    gc.disable()
    try:
        yield
        assert living_ids() == before
    finally:
        gc.enable()


def resolve(channel: EventChannel) -> None:
    with CmId(channel, PortSpace.TCP) as cmid:
        cmid.resolve_addr(("127.0.0.1", 7471))
        channel.get_event(5).ack()
        cmid.resolve_route()
        with channel.get_event(5) as event:
            assert event.type is CmEventType.ROUTE_RESOLVED
        assert cmid.explain().path is not None
    assert cmid.explain().path is not None, "what was resolved is explained to the end"


def test_destroyed_ids_leave_no_garbage() -> None:
    with EventChannel() as channel:
        resolve(channel)
        with no_garbage():
            for _ in range(3):
                resolve(channel)


def test_a_provider_that_nobody_uses_is_collected() -> None:
    """With its device, and the protection domain that the ids of the device share."""
    fabric = Fabric()
    host = fabric.host("a", "10.0.0.1")
    with CmId(provider=host.provider) as cmid:
        cmid.bind_addr(("10.0.0.1", 7471))
        assert cmid.pd is cmid.pd
        provider = weakref.ref(host.provider)
    del fabric, host, cmid
    gc.collect()
    assert provider() is None
