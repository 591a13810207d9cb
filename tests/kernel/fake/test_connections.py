"""A connection between two ids of the kernel's provider, on a connection manager that is no kernel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel.fake.fake_library import FakeLibrary
from kernel.fake.fake_rdma_cm import FakeRdmaCm
from rdmacm import CmEvent, CmEventType, CmId, ConnParam, EventChannel
from rdmacm.address import Gid
from rdmacm.kernel import KernelProvider, event_queue
from rdmacm.kernel import host as host_module
from rdmacm.kernel.sysfs import Sysfs
from rdmacm.net import open_network
from rdmacm.verbs import GidType, QPState

E = CmEventType
HOST = "192.0.2.1"
#: Seconds that a thread may take which has nothing to wait for.
PATIENCE = 20

pytestmark = pytest.mark.skipif(not hasattr(os, "eventfd"), reason="needs eventfd(2)")


@pytest.fixture
def provider(fake: FakeLibrary, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KernelProvider:
    fake.set_gids([(0, Gid(f"::ffff:{HOST}"), GidType.ROCE_V2, 1)])
    fake.add_device("mlx5_0")
    monkeypatch.setattr(event_queue, "Ucma", FakeRdmaCm(HOST).open)
    monkeypatch.setattr(host_module, "device_indices", lambda: {"mlx5_0": 0})
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "link_layer").write_text("Ethernet\n")
    (port.parents[1] / "node_type").write_text("1: CA\n")
    return KernelProvider(open_network(), sysfs=Sysfs(str(tmp_path)))


@pytest.fixture
def listener(provider: KernelProvider) -> Iterator[CmId]:
    with EventChannel(provider) as channel, CmId(channel) as made:
        made.bind_addr((HOST, 0))
        made.listen()
        yield made


def fetch(channel: EventChannel, kind: CmEventType) -> CmEvent:
    event = channel.get_event(PATIENCE)
    event.ack()
    assert (event.type, event.status, event.message) == (kind, 0, "")
    return event


def state(cmid: CmId) -> QPState:
    return cmid.qp.state


def test_a_connection_from_its_ids_to_its_end(provider: KernelProvider, listener: CmId) -> None:
    with EventChannel(provider) as channel, CmId(channel) as client:
        client.resolve_addr((HOST, listener.src_port))
        fetch(channel, E.ADDR_RESOLVED)
        assert (client.dst_port, client.port_num) == (listener.src_port, 1)
        client.resolve_route()
        fetch(channel, E.ROUTE_RESOLVED)
        assert client.route.dgid == Gid(f"::ffff:{HOST}")
        assert client.create_qp().state is QPState.INIT
        client.connect(ConnParam(b"question", retry_count=3))

        request = fetch(listener.channel, E.CONNECT_REQUEST)
        assert request.listen_id is listener
        assert isinstance(request.param, ConnParam)
        assert request.param.private_data == b"question"
        assert request.param.retry_count == 3
        with request.id as server:
            server.create_qp()
            server.accept(ConnParam(b"answer"))
            assert state(server) is QPState.RTS

            assert fetch(channel, E.ESTABLISHED).private_data == b"answer"
            assert state(client) is QPState.RTS
            assert fetch(listener.channel, E.ESTABLISHED).id is server

            client.disconnect()
            assert state(client) is QPState.ERR
            assert fetch(listener.channel, E.DISCONNECTED).id is server
            assert state(server) is QPState.RTS, "an ACK may still be on its way"
            server.disconnect()
            assert state(server) is QPState.ERR
            assert fetch(channel, E.DISCONNECTED).id is client
