"""``rdmacm stat``, and the counters that processes tell each other."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

import rdmacm
from rdmacm.provider import statistics
from rdmacm.provider.counters import Counters
from rdmacm.provider.statistics import PREFIX, CountersServer, process_counters
from rdmacm.tools.main import main
from support.servers import Run, Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("rping", "-s", "-P", "-p", "0") as server:
        yield server


def test_counters_of_another_process_are_told(run: Run, server: Server) -> None:
    def counted() -> Counters:
        (found,) = (each for each in process_counters() if each.pid == server.process.pid)
        assert found.command == "rdmacm rping -s -P -p 0"
        return found.counters

    before = counted()
    assert run("rping", f"127.0.0.1:{server.port}", "-C", "2").status == 0
    after = counted()
    assert after.cm["rx_req"] - before.cm["rx_req"] == 1
    assert set(after.devices) == {"soft_lo"}
    for packets, size in (("sent_pkts", "sent_bytes"), ("rcvd_pkts", "rcvd_bytes")):
        assert after.traffic[packets] - before.traffic[packets] >= 10
        assert after.traffic[size] - before.traffic[size] > 10 * 16


def test_text_has_what_was_counted(run: Run, server: Server) -> None:
    result = run("stat")
    assert (result.status, result.err) == (0, "")
    assert f"process {server.process.pid} (rdmacm rping -s -P -p 0)\n" in result.out
    assert " 0," not in result.out
    assert re.search(r"dropped_no_listener 0\b", " ".join(run("stat", "--all").out.split()))


def test_json_has_each_process(run: Run, server: Server) -> None:
    found = run("stat", "--json").json
    (process,) = (each for each in found["processes"] if each["pid"] == server.process.pid)
    assert set(process) == {"pid", "command", "devices", "cm", "udp", "errors", "traffic"}
    assert process["cm"]["rx_req"] >= 0


def test_openmetrics_has_each_family_once(run: Run, server: Server) -> None:
    lines = run("stat", "--openmetrics").out.splitlines()
    assert lines[-1] == "# EOF"
    families = [line.split()[2] for line in lines if line.startswith("# TYPE ")]
    assert len(families) == len(set(families))
    assert {"rdmacm_cm_rx_req", "rdmacm_traffic_sent_pkts"} <= set(families)
    family = ""
    for line in lines[:-1]:
        if line.startswith("#"):
            family = line.split()[2]
        else:
            assert re.fullmatch(rf'{family}_total(\{{(\w+="[^"]*",?)+\}})? \d+', line)
    assert any(f'pid="{server.process.pid}",command="rdmacm rping -s -P -p 0"' in line for line in lines)


def test_changes_are_watched(run: Run, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []

    def sleep(seconds: float) -> None:
        rounds.append(seconds)
        if len(rounds) == 3:
            raise KeyboardInterrupt
        if len(rounds) == 2:
            assert main(["rping", f"127.0.0.1:{server.port}", "-C", "1", "-v"]) == 0

    monkeypatch.setattr("rdmacm.tools.stat.time.sleep", sleep)
    result = run("stat", "--watch")
    assert result.status == 130
    assert rounds == [1.0, 1.0, 1.0]
    assert re.search(rf"^ *{server.process.pid}  cm +rx_req +\d+ +\+1$", result.out, re.MULTILINE)


def test_process_without_devices_is_not_there(run: Run) -> None:
    pid = os.getpid()
    with rdmacm.CmId(provider="soft") as cmid:
        cmid.bind_addr(("127.0.0.1", 0))
        cmid.listen()
        assert pid in [each.pid for each in process_counters()]
    with Server("rping", "-s", "-P", "-p", "0") as other:
        assert other.process.pid in [each.pid for each in process_counters()]
        other.end(signal.SIGINT)
        assert other.process.pid not in [each.pid for each in process_counters()]


def test_other_users_get_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = []

    def counters() -> Counters:
        answered.append(True)
        return Counters({}, {}, {}, {})

    server = CountersServer(counters)
    server.open()
    try:
        (name,) = (each for each in statistics._names() if each.startswith(f"{PREFIX}{os.getpid()}."))
        for user, expected in ((os.geteuid(), True), (os.geteuid() + 1, False)):
            monkeypatch.setattr(statistics, "_peer_of", lambda _, user=user: (1, user))
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(f"\0{name}")
                assert server.serve()
                told = sock.recv(1 << 16)
            assert bool(told) is expected
            assert not told or json.loads(told)["pid"] == os.getpid()
        assert answered == [True]
        assert not server.serve(), "nobody has asked"
    finally:
        server.close()
    assert server.filenos() == ()
    assert not server.serve()


def test_what_others_tell_is_checked() -> None:
    for told in (b"", b"x", b"[]", b'{"pid": 1}', b'{"pid": 1, "devices": 1, "cm": 1}'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{PREFIX}test.{os.urandom(4).hex()}")
            listener.listen()

            def answer(listener: socket.socket = listener, told: bytes = told) -> None:
                sock, _ = listener.accept()
                with sock:
                    sock.send(told)

            thread = threading.Thread(target=answer)
            thread.start()
            assert [each for each in process_counters() if each.command == "test"] == []
            thread.join()
