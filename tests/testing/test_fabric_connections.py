"""Connections between simulated hosts through the API: waiting takes virtual time, and a seed replays its run."""

from __future__ import annotations

import pytest

from rdmacm import CmEvent, CmEventType, CmId, EventChannel
from rdmacm.provider.connparam import ConnParam
from rdmacm.testing import Fabric, Host, Outcome
from support.rows import for_each

PORT = 7471


class Server:
    """Accepts every request with a made-up queue pair number, and disconnects when the peer does."""

    def __init__(self, host: Host) -> None:
        self.events: list[CmEventType] = []
        self.ids: list[CmId] = []
        self.channel = EventChannel(host.provider)
        self.listener = CmId(self.channel)
        self.listener.bind_addr((host.addresses[0], PORT))
        self.listener.listen()
        host.on_event(self.channel, self.serve)

    def serve(self, event: CmEvent) -> None:
        self.events.append(event.type)
        if event.type is CmEventType.CONNECT_REQUEST:
            self.ids.append(event.id)
            event.id.accept(ConnParam(qp_num=0x010022))
        elif event.type is CmEventType.DISCONNECTED:
            event.id.disconnect()

    def close(self) -> None:
        for cmid in (*self.ids, self.listener):
            cmid.destroy()
        self.channel.close()


def life(fabric: Fabric) -> list[CmEventType]:
    """Connect, wait a minute, disconnect; returns the server's events."""
    a, b = fabric.host("a", "10.0.0.1"), fabric.host("b", "10.0.0.2")
    server = Server(b)
    with CmId(provider=a.provider) as cmid:
        cmid.resolve_addr(("10.0.0.2", PORT))
        cmid.resolve_route()
        cmid.connect(ConnParam(qp_num=0x010011))
        cmid.establish()
        fabric.run(seconds=60)
        cmid.disconnect()
    fabric.run()
    server.close()
    return server.events


def test_synchronous_call_times_out_in_virtual_time() -> None:
    fabric = Fabric()
    a = fabric.host("a", "10.0.0.1")
    with CmId(provider=a.provider) as cmid, pytest.raises(TimeoutError, match="did not answer"):
        cmid.resolve_addr(("10.0.0.9", PORT), timeout_ms=3_600_000)
    assert fabric.now == 3600.0


@for_each("seed", range(10))
def test_connection_survives_a_lossy_network(seed: int) -> None:
    def run() -> str:
        fabric = Fabric(seed, loss=0.3, duplicate=0.1, reorder=0.2, corrupt=0.05)
        assert life(fabric) == [
            CmEventType.CONNECT_REQUEST,
            CmEventType.ESTABLISHED,
            CmEventType.DISCONNECTED,
            CmEventType.TIMEWAIT_EXIT,
        ]
        return fabric.log.to_text()

    assert run() == run()


def test_connection_on_a_lossless_network_sends_five_messages() -> None:
    fabric = Fabric()
    life(fabric)
    assert [entry.packet.kind for entry in fabric.log] == ["REQ", "REP", "RTU", "DREQ", "DREP"]
    assert {entry.outcome for entry in fabric.log} == {Outcome.DELIVERED}


def test_polling_takes_no_virtual_time() -> None:
    fabric = Fabric()
    a = fabric.host("a", "10.0.0.1")
    with EventChannel(a.provider) as channel, CmId(channel) as cmid:
        cmid.resolve_addr(("10.0.0.9", PORT), timeout_ms=100)
        for _ in range(10):
            with pytest.raises(BlockingIOError):
                channel.get_event(timeout=0)
        assert fabric.now == 0.0
        with pytest.raises(TimeoutError):
            channel.get_event(timeout=0.05)
        assert fabric.now == 0.05
        with channel.get_event() as event:
            assert (event.type, fabric.now) == (CmEventType.ADDR_ERROR, 0.1)
