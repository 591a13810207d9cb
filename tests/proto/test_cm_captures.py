"""The CM agent sends the same bytes as Linux in captured handshakes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rdmacm.proto.cm.messages import REP, REQ
from rdmacm.proto.cm.timeouts import seconds
from support.cm import Scripted, opened
from support.cm_events import Agent, ConnectReply, ConnectRequest, Disconnected, DisconnectRequested, Established
from support.pcap_cm import mads as captured


class CapturedNumbers:
    """A random source that returns the numbers a kernel drew in a capture."""

    def __init__(self, comm_id: int, psn: int) -> None:
        self.numbers = {32: comm_id, 24: psn, 56: psn << 32}  # the last is for a PSN and a transaction id

    def getrandbits(self, k: int, /) -> int:
        number, self.numbers[k] = self.numbers[k], self.numbers[k] ^ 1
        return number


@pytest.mark.parametrize("name", ["rxe-rping-ipv4.pcap", "rxe-rping-ipv6.pcap"])
def test_passive_side_matches_linux(name: str) -> None:
    wire = [data for _, _, data in captured(name)]
    req, rep, *_ = (opened(data) for data in wire)
    assert isinstance(req, REQ)
    assert isinstance(rep, REP)
    agent = Agent(rep.local_ca_guid, CapturedNumbers(rep.local_comm_id, rep.starting_psn))
    agent.listen(req.service_id)
    agent.mad_received(wire[0], "a", 0.0)
    agent.accept(rep.local_comm_id, replace(rep, starting_psn=0, local_comm_id=0, local_ca_guid=0), 0.0)
    assert agent.mads_to_send() == [("a", wire[1])]
    agent.mad_received(wire[2], "a", 0.0)
    agent.mad_received(wire[3], "a", 0.0)
    agent.disconnect(rep.local_comm_id, 0.0)
    assert agent.mads_to_send() == [("a", wire[4])]
    assert [type(event) for event in agent.events()] == [ConnectRequest, Established, DisconnectRequested]
    assert agent.next_deadline() == seconds(19), "timewait"


@pytest.mark.parametrize("name", ["rxe-rping-ipv4.pcap", "rxe-rping-ipv6.pcap"])
def test_active_side_matches_linux(name: str) -> None:
    def without_tid(mad: bytes) -> bytes:
        return mad[:8] + mad[16:]

    wire = [data for _, _, data in captured(name)]
    req, rep, *_ = (opened(data) for data in wire)
    assert isinstance(req, REQ)
    agent = Agent(req.local_ca_guid, CapturedNumbers(req.local_comm_id, req.starting_psn))
    active = agent.connect("b", replace(req, starting_psn=0, local_comm_id=0), 0.0, packet_life_time=18)
    agent.mad_received(wire[1], "b", 0.0)
    agent.send_rtu(active, 0.0)
    agent.disconnect(active, 0.0)
    agent.mad_received(wire[4], "b", 0.0)
    assert [without_tid(mad) for _, mad in agent.mads_to_send()] == [without_tid(wire[i]) for i in (0, 2, 3)]
    assert agent.events() == [ConnectReply(active, rep), Disconnected(active)]  # type: ignore[arg-type]
    assert agent.next_deadline() == seconds(19), "timewait, from the peer's ACK delay and the packet life time"


def test_rejections_match_linux() -> None:
    for name in ("rxe-reject-nolistener.pcap", "rxe-udaddy-nolistener.pcap"):
        asked, refused = (data for _, _, data in captured(name))
        peer = Scripted()
        peer.agent.mad_received(asked, "a", 0.0)
        assert peer.agent.mads_to_send() == [("a", refused)]
        assert len(peer.agent) == 0
