"""Debug messages: who sends which, and that there are none unless a logger takes them."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rdmacm import CmEvent, CmEventType, CmId, CmRejectedError, CmTimeoutError, EventChannel
from rdmacm.enums import WROpcode
from rdmacm.provider import log
from rdmacm.provider.connparam import ConnParam
from rdmacm.testing import Fabric
from rdmacm.verbs.wr import RecvWR, SendWR
from support.rows import for_each
from support.softdev import Connected, Pair, sge

PORT = 7471


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[str], list[str]]]:
    """Turns every logger on; returns what one has logged, without the addresses in front."""

    def of(name: str) -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == f"rdmacm.{name}"]

    caplog.set_level(logging.DEBUG, "rdmacm")
    log.refresh()
    yield of
    caplog.set_level(logging.NOTSET, "rdmacm")
    log.refresh()


def connect(fabric: Fabric) -> None:
    a, b = fabric.host("a", "10.0.0.1"), fabric.host("b", "10.0.0.2")
    accepted: list[CmId] = []

    def serve(event: CmEvent) -> None:
        if event.type is CmEventType.CONNECT_REQUEST:
            accepted.append(event.id)
            event.id.accept(ConnParam(qp_num=2))

    with EventChannel(b.provider) as channel, CmId(channel) as listener:
        listener.bind_addr(("10.0.0.2", PORT))
        listener.listen()
        b.on_event(channel, serve)
        with CmId(provider=a.provider) as cmid:
            cmid.resolve_addr(("10.0.0.2", PORT))
            cmid.resolve_route()
            cmid.connect(ConnParam(qp_num=1))
            cmid.establish()
            fabric.run(seconds=1)
        fabric.run(seconds=1)
        for each in accepted:
            each.destroy()


def test_life_of_a_connection(messages: Callable[[str], list[str]]) -> None:
    connect(Fabric())
    ids = messages("id")
    assert [text.partition(":7471: ")[2] for text in ids if "-> 10.0.0.2:7471: " in text][:3] == [
        "ADDR_QUERY -> ADDR_RESOLVED (address resolved)",
        "event ADDR_RESOLVED, status 0",
        "ADDR_RESOLVED -> ROUTE_QUERY (resolve_route)",
    ]
    assert "TCP 10.0.0.2:7471: ADDR_BOUND -> LISTEN (listen)" in ids
    assert any(text.endswith("CONNECT by a request of the peer") for text in ids)
    kinds = [(text.split()[0], text.split()[1], text.split()[2]) for text in messages("cm")]
    assert kinds[:6] == [
        ("to", "10.0.0.2:", "REQ"),
        ("from", "10.0.0.1:", "REQ"),
        ("to", "10.0.0.1:", "REP"),
        ("from", "10.0.0.2:", "REP"),
        ("to", "10.0.0.2:", "RTU"),
        ("from", "10.0.0.1:", "RTU"),
    ]
    found, path = messages("resolution")
    assert found.endswith("soft_eth0 port 1, GID index 0: ::ffff:10.0.0.1 -> ::ffff:10.0.0.2")
    assert path.endswith("path ::ffff:10.0.0.1 -> ::ffff:10.0.0.2, MTU 1024, P_Key 0xffff")


def test_dropped_and_rejected_messages_say_why(messages: Callable[[str], list[str]]) -> None:
    fabric = Fabric()
    a, b = fabric.host("a", "10.0.0.1"), fabric.host("b", "10.0.0.2")
    with EventChannel(b.provider) as channel, CmId(channel) as listener, CmId(provider=a.provider) as cmid:
        listener.bind_addr(("10.0.0.2", PORT))
        listener.listen()
        cmid.resolve_addr(("10.0.0.2", PORT + 1))
        cmid.resolve_route()
        with pytest.raises(CmRejectedError):
            cmid.connect(ConnParam(qp_num=1))
    _, received, sent, why, answer = messages("cm")
    assert received.endswith("service 0x1061d30")
    assert sent.endswith(", reason 8")
    assert why.endswith(": dropped: no listener for the service id")
    assert answer.endswith(", reason 8")


def test_failed_resolution_says_why(messages: Callable[[str], list[str]]) -> None:
    a = Fabric().host("a", "10.0.0.1")
    with CmId(provider=a.provider) as cmid, pytest.raises(CmTimeoutError):
        cmid.resolve_addr(("10.0.0.9", PORT))
    (text,) = messages("resolution")
    assert text.endswith(": 10.0.0.9 did not answer on eth0 in time")


@for_each(
    "case",
    [
        ("RETRY_EXC_ERR", lambda pair, ends: ends.right.destroy()),
        ("REM_ACCESS_ERR", lambda pair, ends: None),
    ],
)
def test_queue_pair_says_why_it_failed(
    case: tuple[str, Callable[[Pair, Connected], None]], messages: Callable[[str], list[str]]
) -> None:
    status, spoil = case
    pair = Pair()
    ends = Connected(pair, retry_cnt=1)
    spoil(pair, ends)
    before = len(messages("qp"))
    ends.left.post_send([SendWR(1, WROpcode.RDMA_WRITE, [sge(pair.a.region(b"x"))], remote_addr=1, rkey=1)])
    ends.at_left()
    ends_of = f"QP 0x{ends.left.qp_num:06x} (to 0x{ends.right.qp_num:06x}): RTS -> ERR, {status}"
    assert ends_of in messages("qp")[before:]
    if status == "REM_ACCESS_ERR":
        assert messages("qp")[before].endswith("RTS -> ERR, REM_ACCESS_ERR of a request of the peer")
    pair.close()


def test_data_is_not_logged(messages: Callable[[str], list[str]], caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair()
    ends = Connected(pair)
    inbox, outbox = pair.b.region(8000), pair.a.region(b"x" * 8000)
    before = len(caplog.records)
    ends.right.post_recv([RecvWR(1, [sge(inbox)])])
    ends.left.post_send([SendWR(1, sg=[sge(outbox)])])
    ends.at_left()
    assert len(caplog.records) == before
    pair.close()


def test_loggers_are_off_unless_one_takes_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rdmacm")
    connect(Fabric())
    assert (log.enabled, caplog.records) == (False, [])
    caplog.set_level(logging.DEBUG, "rdmacm.cm")
    connect(Fabric())
    assert {record.name for record in caplog.records} == {"rdmacm.cm"}
    caplog.set_level(logging.NOTSET, "rdmacm.cm")
    log.refresh()
    assert not log.enabled


def run(program: str, wanted: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, log.ENVIRONMENT: wanted, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)


BIND = """
import rdmacm
from rdmacm.testing import Fabric
with rdmacm.CmId(provider=Fabric().host("a", "10.0.0.1").provider) as cmid:
    cmid.bind_addr(("10.0.0.1", 7471))
"""


def test_environment_variable_turns_messages_on() -> None:
    wrong, *messages = run(BIND, "id,packets").stderr.splitlines()
    assert wrong.endswith("RDMACM_LOG: no messages 'packets'; debug (all), or some of id, cm, qp, resolution, device")
    texts = [each.partition(" rdmacm.")[2] for each in messages]
    assert texts == [
        "id: TCP 10.0.0.1:7471: IDLE -> ADDR_BOUND (bind_addr)",
        "id: TCP 10.0.0.1:7471: ADDR_BOUND -> DESTROYING (destroy_id)",
    ]


def test_examples_of_the_guide() -> None:
    guide = (Path(__file__).parents[1] / "docs" / "debugging.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    assert "tx_req" in run("".join(blocks)).stdout
