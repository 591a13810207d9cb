"""Two ends that connect without queue pairs of their own, to see the connection manager of each provider.

    python3 -m interop.kernel_ends PROVIDER passive ADDRESS
    python3 -m interop.kernel_ends PROVIDER active ADDRESS

The active end connects five times: nobody listens, it ends a connection, the peer ends one, the peer rejects, and the
peer names a queue pair for datagrams.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rdmacm import CmEvent, CmEventType, CmId, CmRejectedError, ConnParam, EventChannel, PortSpace, UdParam
from rdmacm.verbs import QPAttrMask, QPState

E = CmEventType
PORT = 7471
PATIENCE = 20
ACTIVE_QPN, PASSIVE_QPN = 0x456, 0x123


def event_of(channel: EventChannel, kind: CmEventType, status: int = 0) -> CmEvent:
    """The next event, acknowledged; AssertionError if it is another."""
    with channel.get_event(PATIENCE) as event:
        assert (event.type, event.status) == (kind, status), event
    return event


@contextmanager
def resolved(provider: str, address: str, port_space: PortSpace = PortSpace.TCP) -> Iterator[tuple[EventChannel, CmId]]:
    with EventChannel(provider) as channel, CmId(channel, port_space) as cmid:
        cmid.resolve_addr((address, PORT))
        event_of(channel, E.ADDR_RESOLVED)
        cmid.resolve_route()
        event_of(channel, E.ROUTE_RESOLVED)
        assert cmid.route.path_rec[0].dgid == cmid.route.dgid
        yield channel, cmid


def _connected(channel: EventChannel, cmid: CmId) -> None:
    cmid.connect(ConnParam(b"hello server", 3, 2, qp_num=ACTIVE_QPN))
    reply = event_of(channel, E.CONNECT_RESPONSE)
    assert isinstance(reply.param, ConnParam)
    assert reply.private_data == b"hello client".ljust(196, b"\0")
    assert (reply.param.responder_resources, reply.param.initiator_depth) == (2, 1)
    attr, mask = cmid.init_qp_attr(QPState.RTR)
    assert attr.dest_qp_num == PASSIVE_QPN
    assert mask & QPAttrMask.DEST_QPN
    assert attr.ah_attr.gr.dgid == cmid.route.dgid
    assert cmid.init_qp_attr(QPState.RTS)[1] & QPAttrMask.SQ_PSN
    cmid.establish()


def active(provider: str, address: str) -> None:
    with CmId(provider=provider) as cmid:
        cmid.resolve_addr((address, PORT + 1))
        cmid.resolve_route()
        reason = None
        try:
            cmid.connect(ConnParam(qp_num=ACTIVE_QPN))
        except CmRejectedError as error:
            reason = error.reason
        assert reason == 8
    with resolved(provider, address) as (channel, cmid):
        _connected(channel, cmid)
        cmid.disconnect()
        event_of(channel, E.DISCONNECTED)
        cmid.disconnect()
    with resolved(provider, address) as (channel, cmid):
        _connected(channel, cmid)
        event_of(channel, E.DISCONNECTED)
        cmid.disconnect()
    with resolved(provider, address) as (channel, cmid):
        cmid.connect(ConnParam(qp_num=ACTIVE_QPN))
        event = event_of(channel, E.REJECTED, 28)
        assert event.private_data == b"not today".ljust(148, b"\0")
        assert isinstance(event.error, CmRejectedError)
    with resolved(provider, address, PortSpace.UDP) as (channel, cmid):
        cmid.connect(ConnParam(b"datagrams?", qp_num=ACTIVE_QPN))
        event = event_of(channel, E.ESTABLISHED)
        assert isinstance(event.param, UdParam)
        assert (event.param.qp_num, event.param.qkey) == (PASSIVE_QPN, 0x01234567)
        assert event.param.ah_attr.gr.dgid == cmid.route.dgid
        assert event.private_data.rstrip(b"\0") == b"datagrams."


def _requested(channel: EventChannel, listener: CmId) -> CmEvent:
    event = event_of(channel, E.CONNECT_REQUEST)
    assert event.listen_id is listener
    assert event.id.src_port == PORT
    if event.id.ps is PortSpace.TCP:  # a datagram request has none in the kernel
        assert event.id.route.path_rec
    return event


def passive(provider: str, address: str) -> None:
    with EventChannel(provider) as channel, CmId(channel) as listener, CmId(channel, PortSpace.UDP) as datagrams:
        for each in (listener, datagrams):
            each.bind_addr((address, PORT))
            each.listen(4)
        for number in range(2):
            request = _requested(channel, listener)
            assert isinstance(request.param, ConnParam)
            assert request.private_data == b"hello server".ljust(56, b"\0")
            assert (request.param.responder_resources, request.param.initiator_depth) == (2, 3)
            assert request.param.qp_num == ACTIVE_QPN
            with request.id as cmid:
                cmid.accept(ConnParam(b"hello client", 1, 2, qp_num=PASSIVE_QPN))
                event_of(channel, E.ESTABLISHED)
                if number == 1:
                    cmid.disconnect()
                event_of(channel, E.DISCONNECTED)
        with _requested(channel, listener).id as cmid:
            cmid.reject(b"not today")
        request = _requested(channel, datagrams)
        assert isinstance(request.param, UdParam)
        with request.id as cmid:
            cmid.accept(ConnParam(b"datagrams.", qp_num=PASSIVE_QPN))


def main() -> None:
    provider, end, address = sys.argv[1:]
    {"active": active, "passive": passive}[end](provider, address)
    print(f"{end} end: as expected")


if __name__ == "__main__":
    main()
