"""Two ids of one provider that connect and part: the states of their queue pairs on the way."""

from __future__ import annotations

from contextlib import ExitStack

from rdmacm import CmEventType, CmId, EventChannel, PortSpace
from rdmacm.provider import Provider
from rdmacm.provider.connparam import ConnParam
from rdmacm.verbs import QP, QPCap, QPInitAttr, QPState, QPType

__all__ = ["states_of"]

_E = CmEventType
_PATIENCE = 10.0
_SPACES = {QPType.RC: PortSpace.TCP, QPType.UC: PortSpace.IB, QPType.UD: PortSpace.UDP}


def states_of(provider: str | Provider, address: str, qp_type: QPType) -> dict[str, QPState]:
    """The states by step: attached, accepted; disconnected of the side that ends; ended of its peer, with the event."""
    with ExitStack() as stack:

        def make() -> CmId:
            channel = stack.enter_context(EventChannel(provider))
            return stack.enter_context(CmId(channel, _SPACES[qp_type], qp_type=qp_type))

        def attach(cmid: CmId) -> QP:
            cmid.create_qp(QPInitAttr(qp_type, cap=QPCap(4, 4, 1, 1, 0)))
            stack.callback(cmid.destroy_qp)
            return cmid.qp

        def expect(cmid: CmId, kind: CmEventType) -> None:
            assert cmid.channel is not None
            with cmid.channel.get_event(_PATIENCE) as event:
                assert event.type is kind, event

        listener, active = make(), make()
        listener.bind_addr((address, 0))
        listener.listen()
        active.resolve_addr((address, listener.src_port))
        expect(active, _E.ADDR_RESOLVED)
        active.resolve_route()
        expect(active, _E.ROUTE_RESOLVED)
        qp = attach(active)
        states = {"attached": qp.state}
        active.connect(ConnParam())
        assert listener.channel is not None
        with listener.channel.get_event(_PATIENCE) as event:
            assert event.type is _E.CONNECT_REQUEST
            passive = stack.enter_context(event.id)
        peer_qp = attach(passive)
        passive.accept(ConnParam())
        states["accepted"] = peer_qp.state
        expect(active, _E.ESTABLISHED)
        if qp_type is not QPType.UD:
            expect(listener, _E.ESTABLISHED)
        active.disconnect()
        states["disconnected"] = qp.state
        if qp_type is not QPType.UD:
            expect(listener, _E.DISCONNECTED)
            states["ended"] = peer_qp.state
        return states
