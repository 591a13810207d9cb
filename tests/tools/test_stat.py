"""``rdmacm stat``, and the counters that processes tell each other."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import rdmacm
from rdmacm import kernel
from rdmacm.kernel.sysfs import Sysfs
from rdmacm.provider import statistics
from rdmacm.provider.counters import Counters
from rdmacm.provider.statistics import PREFIX, CountersServer, ProcessCounters, process_counters
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


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices of the kernel, of which one has two ports, in a folder that is laid out as sysfs."""
    files = {
        "rxe0/ports/1/hw_counters/sent_pkts": "12",
        "rxe0/ports/1/hw_counters/rcvd_seq_err": "0",
        "rxe0/ports/1/cm_tx_msgs/req": "3",
        "mlx5_0/hw_counters/resets": "1",
        "mlx5_0/ports/1/counters/port_xmit_data": "5",
        "mlx5_0/ports/1/hw_counters/out_of_sequence": "7",
        "mlx5_0/ports/2/counters/port_xmit_data": "6",
    }
    for name, text in files.items():
        path = tmp_path / "class" / "infiniband" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    monkeypatch.setattr(kernel, "Sysfs", lambda _: Sysfs(str(tmp_path)))
    monkeypatch.setattr(kernel, "device_indices", dict)
    monkeypatch.delenv("RDMACM_PROVIDER", raising=False)


@pytest.mark.usefixtures("devices")
def test_devices_of_the_kernel_are_shown_beside_processes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("stat")
    assert (result.status, result.err) == (0, "")
    shown = result.out[result.out.index("kernel\n") :].splitlines()
    assert [line.split(maxsplit=1) for line in shown[1:]] == [
        ["mlx5_0", "resets 1, port_xmit_data 11, out_of_sequence 7"],
        ["rxe0", "sent_pkts 12"],
        ["cm", "tx_req 3"],
    ]
    assert run("stat", "--json").json["kernel"]["devices"]["rxe0"] == {"sent_pkts": 12, "rcvd_seq_err": 0}
    assert 'rdmacm_device_port_xmit_data_total{device="mlx5_0"} 11\n' in run("stat", "--openmetrics").out
    assert run("stat", "--json", "--provider", "soft").json["kernel"] is None
    monkeypatch.setattr(kernel, "device_indices", lambda: {"rxe0": 1})
    assert [*run("stat", "--json").json["kernel"]["devices"]] == ["rxe0"], "the other is in another network namespace"


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


def test_processes_that_are_too_many_for_a_packet_are_left_out() -> None:
    others = [ProcessCounters(2**30 + each, "x" * 2000, Counters({}, {}, {}, {})) for each in range(1000)]
    server = CountersServer(lambda: Counters({}, {}, {}, {}))
    server.others = lambda: others
    server.open()

    def serve() -> None:
        poll = select.poll()
        for fd in server.filenos():
            poll.register(fd, select.POLLIN)
        poll.poll()
        server.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    found = [each.pid for each in process_counters()]
    thread.join()
    server.close()
    assert os.getpid() in found
    told = [pid for pid in found if pid >= 2**30]
    assert 10 < len(told) < 1000
    assert told == [each.pid for each in others[: len(told)]]


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
