"""A process of a simulated host that needs more queue pairs than its share of the numbers."""

from __future__ import annotations

import pytest

from rdmacm import CmEventType, CmId, EventChannel
from rdmacm.soft.device import multiplexer
from rdmacm.testing import Fabric, Host

PORT = 7471


class Server:
    """Accepts each request, and disconnects when the peer does."""

    def __init__(self, host: Host) -> None:
        self.accepted: list[CmId] = []
        self.channel = EventChannel(host.provider)
        self.cmid = CmId(self.channel)
        self.cmid.bind_addr((host.addresses[0], PORT))
        self.cmid.listen()
        host.on_event(self.channel, lambda event: self.handle(event.type, event.id))

    def handle(self, kind: CmEventType, cmid: CmId) -> None:
        if kind is CmEventType.CONNECT_REQUEST:
            cmid.create_qp()
            cmid.accept()
            self.accepted.append(cmid)
        elif kind is CmEventType.DISCONNECTED:
            cmid.disconnect()


def connect(client: Host, server: Server) -> tuple[CmId, CmId]:
    cmid = CmId(provider=client.provider)
    cmid.resolve_addr(("10.0.0.2", PORT))
    cmid.resolve_route()
    cmid.create_qp()
    cmid.connect()
    return cmid, server.accepted[-1]


def exchange(fabric: Fabric, one: CmId, other: CmId) -> None:
    """Send a message each way."""
    for source, target in ((one, other), (other, one)):
        memory = bytearray(16)
        with source.reg_msgs(bytearray(b"message")) as sent, target.reg_msgs(memory) as received:
            target.post_recv(1, received)
            source.post_send(2, sent)
            fabric.run(seconds=0.01)
            assert bytes(memory[:7]) == b"message"
            assert source.get_send_comp(1).status == target.get_recv_comp(1).status == 0


def slots_of(ids: list[CmId]) -> set[int]:
    return {each.qp.qp_num >> 12 for each in ids if each.has_qp}


def test_queue_pairs_in_several_slots_carry_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiplexer, "_SLOT_QPNS", 2)
    fabric = Fabric(seed=1)
    client, host = fabric.host("a", "10.0.0.1"), fabric.host("b", "10.0.0.2")
    beside = fabric.process("b", "b2")
    server = Server(host)
    pairs = [connect(client, server) for _ in range(6)]
    assert list(host.wire.slots) == [1, 3, 4], "slot 2 is the other process's"
    assert {1, 3} <= slots_of(server.accepted) <= {1, 3, 4}, "a number is in any of the slots"
    assert {1, 2} <= slots_of([cmid for cmid, _ in pairs]) <= set(client.wire.slots) == {1, 2, 3}
    for one, other in pairs:
        exchange(fabric, one, other)
    for one, other in pairs:
        one.disconnect()
        one.destroy()
        other.destroy()
    server.accepted.clear()
    fabric.run(seconds=100.0)  # until TIMEWAIT is over
    host.provider.host.mux._freed.clear()
    for _ in range(6):
        exchange(fabric, *connect(client, server))
    assert list(host.wire.slots) == [1, 3, 4], "the numbers of closed queue pairs are free"

    # The slots of a process that is killed are free, too.
    fabric.crash("b")
    again = fabric.process("b2", "b3")
    again.wire.claim_slot()
    assert (list(again.wire.slots), beside.wire.slot) == ([1, 3], 2)
