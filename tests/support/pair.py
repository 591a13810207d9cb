"""Two hosts on a fabric and their event channels: connecting, one event at a time, in virtual time."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rdmacm import CmEvent, CmEventType, CmId, ConnParam, EventChannel, PortSpace, RdmaError
from rdmacm.testing import Fabric, Host
from rdmacm.verbs import QPInitAttr

PORT = 7471
ADDRESSES = {"ipv4": ("10.0.0.1", "10.0.0.2"), "ipv6": ("fd00::1", "fd00::2")}
#: Virtual seconds, more than any retries take.
PATIENCE = 300.0


class End:
    """A host, and a channel on it."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.provider = host.provider
        self.channel = EventChannel(host.provider)
        self.ids: list[CmId] = []

    def id(self, port_space: PortSpace = PortSpace.TCP, context: object = None, *, qp_type: int | None = None) -> CmId:
        cmid = CmId(self.channel, port_space, context=context, qp_type=qp_type)
        self.ids.append(cmid)
        return cmid

    def event(self, kind: CmEventType) -> CmEvent:
        """The next event, acknowledged; AssertionError if it is of another kind."""
        with self.channel.get_event(PATIENCE) as event:
            assert event.type is kind, event
        if event.type is CmEventType.CONNECT_REQUEST:
            self.ids.append(event.id)
        return event

    def quiet(self) -> bool:
        """Whether no event waits."""
        try:
            self.channel.get_event(0).ack()
        except BlockingIOError:
            return True
        return False

    def listen(self, address: str, port: int = PORT, backlog: int = 0, port_space: PortSpace = PortSpace.TCP) -> CmId:
        listener = self.id(port_space)
        listener.bind_addr((address, port))
        listener.listen(backlog)
        return listener

    def resolve(self, address: str, port: int = PORT, port_space: PortSpace = PortSpace.TCP) -> CmId:
        """An id that knows its route."""
        cmid = self.id(port_space)
        cmid.resolve_addr((address, port))
        self.event(CmEventType.ADDR_RESOLVED)
        cmid.resolve_route()
        self.event(CmEventType.ROUTE_RESOLVED)
        return cmid


class Ends:
    """The two ends; ``a`` is the active one."""

    def __init__(self, fabric: Fabric | None = None) -> None:
        self.fabric = fabric or Fabric()
        self.a, self.b = (
            End(self.fabric.host(name, *(pair[i] for pair in ADDRESSES.values()))) for i, name in enumerate("ab")
        )

    def request(self, param: ConnParam | None = None, attr: QPInitAttr | None = None) -> tuple[CmId, CmEvent]:
        """Connect from a, with a queue pair as ``attr``, to a listener of b: a's id, and the id of the request."""
        if not any(each.src_port == PORT for each in self.b.ids):
            self.b.listen(ADDRESSES["ipv4"][1])
        active = self.a.resolve(ADDRESSES["ipv4"][1])
        active.create_qp(attr)
        active.connect(param)
        return active, self.b.event(CmEventType.CONNECT_REQUEST)

    def connect(self, attr: QPInitAttr | None = None) -> tuple[CmId, CmId]:
        """Both ids of a connection. ``attr`` is for the active one's queue pair."""
        active, request = self.request(attr=attr)
        request.id.create_qp()
        request.id.accept()
        self.a.event(CmEventType.ESTABLISHED)
        self.b.event(CmEventType.ESTABLISHED)
        return active, request.id


@contextmanager
def ends(fabric: Fabric | None = None) -> Iterator[Ends]:
    """Two ends; asserts afterwards that no id is left."""
    both = Ends(fabric)
    try:
        yield both
    finally:
        for end in (both.a, both.b):
            for cmid in end.ids:
                cmid.destroy()
            end.channel.close()


def refused(call: Callable[[], object], code: int = errno.EINVAL) -> RdmaError:
    """The error of a call; AssertionError unless it has this code."""
    with pytest.raises(RdmaError) as error:
        call()
    assert error.value.errno == code, error.value
    return error.value
