"""The counters of devices, connection managers and the UDP port."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rdmacm
from rdmacm import CmId, EventChannel, RdmaError
from rdmacm.enums import WROpcode
from rdmacm.provider.connparam import ConnParam
from rdmacm.soft.ib.ports import IbDevice
from rdmacm.testing import Fabric, MemoryNetwork, Verdict, nth
from rdmacm.verbs.wr import RecvWR, SendWR
from support.softdev import Connected, Pair, sge, told

GUIDE = Path(__file__).parents[2] / "docs" / "debugging.md"


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(train=0)
    yield pair
    pair.close()


def counted(counters: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counters.items() if count}


def test_packets_that_are_accepted_count_nothing(pair: Pair) -> None:
    ends = Connected(pair)
    inbox, outbox = pair.b.region(8000), pair.a.region(b"x" * 8000)
    ends.right.post_recv([RecvWR(1, [sge(inbox)])])
    ends.left.post_send([SendWR(1, sg=[sge(outbox)])])
    ends.at_left()
    for host in (pair.a, pair.b):
        found = host.device.query_counters()
        assert set(found.values()) == {0}


def test_lost_packet_is_a_sequence_error_at_both_ends(pair: Pair) -> None:
    ends = Connected(pair)
    target, outbox = pair.b.region(8192), pair.a.region(b"x" * 8192)
    to_lose = [True]
    pair.net.lost = lambda _: bool(to_lose) and to_lose.pop()
    write = SendWR(1, WROpcode.RDMA_WRITE, [sge(outbox)], remote_addr=target.addr, rkey=target.rkey)
    ends.left.post_send([write])
    assert told(ends.at_left()) == [(1, "SUCCESS")]
    sender, receiver = pair.a.device.query_counters(), pair.b.device.query_counters()
    assert counted(sender) == {"rcvd_seq_err": 1, "completer_retry_err": 1}
    assert counted(receiver) == {"out_of_seq_request": 1, "out_of_sequence": 7}


def test_receiver_not_ready_is_counted_at_both_ends(pair: Pair) -> None:
    ends = Connected(pair, rnr_retry=2)
    outbox = pair.a.region(b"impatience")
    ends.left.post_send([SendWR(1, sg=[sge(outbox)])])
    assert told(ends.at_left()) == [(1, "RNR_RETRY_EXC_ERR")]
    assert counted(pair.a.device.query_counters()) == {"rcvd_rnr_err": 3, "retry_rnr_exceeded_err": 1}
    assert counted(pair.b.device.query_counters()) == {"send_rnr_err": 3}


def test_counts_outlive_their_queue_pair(pair: Pair) -> None:
    ends = Connected(pair, retry_cnt=2)
    ends.right.destroy()
    ends.left.post_send([SendWR(1)])
    assert told(ends.at_left()) == [(1, "RETRY_EXC_ERR")]
    ends.left.destroy()
    assert counted(pair.a.device.query_counters()) == {
        "local_ack_timeout_err": 3,
        "completer_retry_err": 2,
        "retry_exceeded_err": 1,
    }
    assert pair.b.provider.query_counters().udp == {"rx_unknown_qp": 3}


def test_connection_counts_its_messages() -> None:
    fabric = Fabric()
    a, b = fabric.host("a", "10.0.0.1"), fabric.host("b", "10.0.0.2")
    fabric.faults = nth("REQ", 1, Verdict(0))
    accepted: list[CmId] = []

    def serve(event: rdmacm.CmEvent) -> None:
        if event.type is rdmacm.CmEventType.CONNECT_REQUEST:
            accepted.append(event.id)
            event.id.accept(ConnParam(qp_num=2))

    with EventChannel(b.provider) as channel, CmId(channel) as listener:
        listener.bind_addr(("10.0.0.2", 7471))
        listener.listen()
        b.on_event(channel, serve)
        with CmId(provider=a.provider) as cmid:
            cmid.resolve_addr(("10.0.0.2", 7471))
            cmid.resolve_route()
            cmid.connect(ConnParam(qp_num=1))
            cmid.establish()
            fabric.run(seconds=1)
        with CmId(provider=a.provider) as cmid:
            cmid.resolve_addr(("10.0.0.2", 7472))
            cmid.resolve_route()
            with pytest.raises(rdmacm.CmRejectedError):
                cmid.connect(ConnParam(qp_num=3))
        fabric.run(seconds=1)
        client, server = a.provider.query_counters().cm, b.provider.query_counters().cm
        for each in accepted:
            each.destroy()
    assert counted(client) == {"tx_req": 3, "tx_retries": 1, "rx_rep": 1, "tx_rtu": 1, "tx_dreq": 1, "rx_rej": 1}
    assert counted(server) == {
        "rx_req": 2,
        "tx_rep": 1,
        "rx_rtu": 1,
        "rx_dreq": 1,
        "tx_rej": 1,
        "dropped_no_listener": 1,
    }


def test_port_that_goes_down_is_counted(pair: Pair) -> None:
    network = pair.a.provider.host.network
    assert isinstance(network, MemoryNetwork)
    network.set_interface(pair.a.ifindex, up=False)
    pair.a.provider.host.view()
    assert pair.a.device.query_counters()["link_downed"] == 1


def test_device_without_queue_pairs_has_no_counters() -> None:
    with pytest.raises(RdmaError) as caught:
        IbDevice("HostA").query_counters()
    assert caught.value.errno == errno.EOPNOTSUPP


def test_guide_describes_each_counter(pair: Pair) -> None:
    described = set(re.findall(r"`([a-z_]+)`", GUIDE.read_text()))
    found = pair.a.provider.query_counters()
    assert not set(found.devices["soft_eth0"]) - described
    drops = {name for name in found.cm if name.startswith("dropped_")}
    assert not (drops | {"tx_retries"}) - described
