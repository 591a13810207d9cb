"""The command: what it shows, what it writes, and its errors."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from socket import AF_INET, SOCK_DGRAM
from xml.etree import ElementTree

import pytest

from rdmacm.tools.main import main
from rdmacm.trace import live
from rdmacm.trace.live import Growing, Interface
from rdmacm.trace.tracer import Tracer
from support.netns import Host, needs_netns, python_environment
from support.traces import PSN_A, Wire, pcap, pcapng

Run = Callable[..., tuple[int, str, str]]
DATA = Path(__file__).parents[1] / "data"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*argv: object) -> tuple[int, str, str]:
        status = main(["trace", *map(str, argv)])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def two() -> Wire:
    """A connection that works, and a request for another port that nothing answers."""
    wire = Wire()
    wire.connect()
    wire.write(0, PSN_A, 3)
    wire.ack(1, PSN_A + 2)
    wire.disconnect()
    wire.req(local_comm_id=0x44, port=99)
    return wire


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "two.pcap"
    path.write_bytes(pcap(two().frames))
    return path


def test_list(run: Run, file: Path) -> None:
    status, out, err = run(file)
    assert (status, err) == (0, "")
    assert re.search(r"^1 +RC +10.0.0.1:40000 +10.0.0.2:7471 +3072 bytes +healthy", out, re.MULTILINE)
    assert re.search(r"^2 +RC +10.0.0.1:40000 +10.0.0.2:99 +0 bytes +10.0.0.2 did not", out, re.MULTILINE)
    end = "10 packets in 9.0 ms, 10 of RDMA; 2 connections: 1 healthy, 0 with remarks, 1\n    failed\n"
    assert out.endswith(end)


def test_one_connection_in_detail(run: Run, file: Path) -> None:
    _, out, _ = run(file, "--connection", 1)
    assert out.startswith("1  RC  10.0.0.1:40000 -> 10.0.0.2:7471, port space TCP, MTU 1024\nhealthy: ")
    assert "WRITE 3072 bytes, 3.0 ms" in out
    assert re.search(r"^10.0.0.1 +WRITE +1 +3072 bytes +3.0 ms +3.0 ms$", out, re.MULTILINE)
    assert all(len(line) <= 90 for line in out.splitlines())


def test_the_guide_shows_what_it_prints(run: Run) -> None:
    _, out, _ = run(DATA / "captures" / "rxe-rping-3000.pcap")
    guide = (DATA.parents[1] / "docs" / "tools.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```\n(1  RC  .*?)^```$", guide, re.MULTILINE | re.DOTALL)
    begin, end = shown.split("...\n")
    assert out.startswith(begin)
    assert end in out


def test_filters(run: Run, file: Path) -> None:
    assert run(file, "--port", 99)[1].startswith("2  RC")
    assert "2 connections" in run(file, "--host", "10.0.0.2")[1]
    assert "no connection of this host or port" in run(file, "--host", "10.0.0.3")[1]
    status, _, err = run(file, "--connection", 3)
    assert (status, err.strip()) == (1, f"rdmacm: trace {file}: there is no connection 3, but 2 [ENOENT]")


def test_json(run: Run, file: Path) -> None:
    data = json.loads(run(file, "--json")[1])
    assert (data["packets"], data["rdma_packets"], data["notes"]) == (10, 10, [])
    first, second = data["connections"]
    assert (first["verdict"]["level"], second["verdict"]["rule"]) == ("ok", "C2")
    assert first["ends"][0] == {"address": "10.0.0.1", "port": 40000, "qpn": 0x11, "comm_id": 10, "psn": 5000}
    forth = first["directions"][0]
    assert (forth["packets"], forth["bytes"], forth["operations"]["WRITE"]["bytes"]) == (3, 3072, 3072)
    assert forth["spans"] == [
        {"operation": "WRITE", "bytes": 3072, "ns": 3 * 10**6, "took_ns": 3 * 10**6, "repeats": 0}
    ]
    assert [event["label"] for event in first["events"]] == ["REQ", "REP", "RTU", "DREQ", "DREP"]


def test_mermaid(run: Run, file: Path) -> None:
    one = run(file, "--mermaid", "--connection", 1)[1]
    assert one.startswith("sequenceDiagram\n")
    assert "A->>B: 3.0 ms: WRITE 3072 bytes, 3.0 ms" in one
    assert run(file, "--mermaid")[1].count("```mermaid\nsequenceDiagram\n") == 2


def test_svg(run: Run, file: Path, tmp_path: Path) -> None:
    path = tmp_path / "two.svg"
    assert run(file, "--svg", path)[0] == 0
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    texts = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text.startswith("WRITE 3072 bytes")]
    # It refers to nothing but itself.
    assert "http" not in path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    status, _, err = run(file, "--svg", tmp_path / "none" / "x.svg")
    assert status == 1
    assert "ENOENT" in err


def test_every_capture_can_be_drawn(run: Run, tmp_path: Path) -> None:
    for path in sorted([*DATA.glob("captures/*.pcap*"), *DATA.glob("traces/*.pcap*")]):
        out = tmp_path / "all.svg"
        status, text, _ = run(path, "--mermaid", "--svg", out)
        assert status == 0
        assert "sequenceDiagram" in text
        ElementTree.fromstring(out.read_text(encoding="utf-8"))


def test_check_fails_for_a_connection_that_failed(run: Run, file: Path, tmp_path: Path) -> None:
    status, _, err = run(file, "--check")
    assert (status, err) == (1, f"rdmacm: trace {file}: 1 of 2 connections failed [EIO]\n")
    assert run(file, "--check", "--connection", 1)[0] == 0
    empty = tmp_path / "empty.pcap"
    empty.write_bytes(pcap([]))
    status, out, err = run(empty, "--check")
    assert (status, err) == (1, f"rdmacm: trace {empty}: there is no connection [EIO]\n")
    assert out == "0 packets in 0.0 us, 0 of RDMA; no connection\n"


def test_errors(run: Run, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("this is no capture")
    for path, words in (
        (tmp_path / "none", "[ENOENT]"),
        (tmp_path, "[EISDIR]"),
        (text, "not a capture file (pcap or pcapng) [EINVAL]; try: a file of tcpdump"),
    ):
        status, out, err = run(path)
        assert (status, out) == (1, "")
        assert err.count("\n") == 1
        assert words in err
    for arguments in ((), (text, "-i", "lo"), (text, "--seconds", 1)):
        assert run(*arguments)[0] == 2


def test_a_file_that_is_damaged_is_read_up_to_there(run: Run, file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])
    status, out, _ = run(file)
    assert status == 0
    assert "the file ends within a packet, after " in out
    assert any("the file ends" in note for note in json.loads(run(file, "--json")[1])["notes"])


def test_compressed(run: Run, file: Path, tmp_path: Path) -> None:
    packed = tmp_path / "two.pcap.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert run(packed)[1] == run(file)[1]
    packed.write_bytes(packed.read_bytes()[:-20])
    assert run(packed)[0] == 1


def test_standard_input_and_a_terminal_without_unicode(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rdmacm", "trace", "-", "--connection", "1"],
        input=file.read_bytes(),
        capture_output=True,
        env={**python_environment(), "PYTHONIOENCODING": "ascii"},
        timeout=60,
        check=True,
    )
    text = done.stdout.decode("ascii")
    assert re.search(r"\|-+ REQ port 7471", text)
    assert "\\u" not in text


# -- live ----------------------------------------------------------------------------------------------------------


def test_a_file_is_followed(file: Path, tmp_path: Path) -> None:
    frames = two().frames
    growing = tmp_path / "growing.pcapng"
    data = pcapng(frames)
    growing.write_bytes(data[:300])
    rest = [data[300:700], data[700:]]

    def tick() -> None:
        if rest:
            with open(growing, "ab") as more:
                more.write(rest.pop(0))
        else:
            raise KeyboardInterrupt

    read = bytearray()
    with open(growing, "rb") as source:
        followed = Growing(source.fileno(), tick)
        with pytest.raises(KeyboardInterrupt):
            while True:
                read += followed.read(100)
    assert bytes(read) == data


def test_messages_of_a_followed_file_are_shown_at_once(run: Run, file: Path) -> None:
    status, out, _ = run(file, "--follow", "--seconds", 0.1)
    assert status == 0
    assert "0.0 us  10.0.0.1:40000 -> 10.0.0.2:7471  REQ port 7471 (TCP)" in out
    assert "10.0.0.1:40000 <- 10.0.0.2:7471  REP QP 0x000022" in out


def test_without_the_privilege_the_error_says_what_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(live, "Interface", refused)
    monkeypatch.setattr(live, "is_supported", lambda: True)
    status, out, err = run("-i", "eth0")
    assert (status, out) == (1, "")
    for words in ("eth0", "CAP_NET_RAW", "[EPERM]", "--pcap FILE", "tcpdump -i eth0 -w FILE udp port 4791"):
        assert words in err


def test_without_packet_sockets(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "is_supported", lambda: False)
    status, _, err = run("-i", "eth0")
    assert status == 1
    assert "[ENOSYS]" in err


@needs_netns
def test_an_interface_is_captured() -> None:
    wire = two()
    ticks: list[int] = []
    with Host() as host:
        with host.enter():
            interface = Interface("lo", lambda: ticks.append(1))
        with (
            interface,
            host.open_socket(AF_INET, SOCK_DGRAM) as receiver,
            host.open_socket(AF_INET, SOCK_DGRAM) as sender,
        ):
            receiver.bind(("127.0.0.1", 4791))
            for _, frame in wire.frames:
                sender.sendto(frame[42:], ("127.0.0.1", 4791))
            tracer = Tracer()
            tracer.feed(islice(interface, len(wire.frames)))
    assert (tracer.packets, tracer.rdma, interface.lost) == (len(wire.frames), len(wire.frames), 0)
    assert {each.port for each in tracer.found()} == {7471, 99}


@needs_netns
def test_an_interface_that_does_not_exist() -> None:
    with Host() as host, host.enter(), pytest.raises(OSError) as caught:
        Interface("none", lambda: None)
    assert caught.value.errno == errno.ENODEV
