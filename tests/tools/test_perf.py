"""``rdmacm perf``: measurements between two processes, and peers that do not keep to its protocol."""

from __future__ import annotations

import io
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rdmacm import CmId
from rdmacm.errors import CmRejectedError
from rdmacm.proto import core_choice
from rdmacm.provider import get_provider
from rdmacm.provider.connparam import ConnParam
from rdmacm.soft.device.datagram_queue_pair import SoftUdQP
from rdmacm.soft.device.unreliable_queue_pair import SoftUcQP
from rdmacm.soft.provider import SoftProvider
from rdmacm.tools.measure import STATISTICS, ProgressLine, Samples, size_text, time_text
from rdmacm.tools.perf_plan import SUMMARY_SIZE, Op, Plan, Result, result_of, use_of
from rdmacm.tools.perf_report import Rows
from rdmacm.verbs import QPType
from support.netns import python_environment
from support.servers import Run, Server

KEYS = {
    *("type", "op", "size", "depth", "mode", "kind", "count", "lost", "received", "bytes", "seconds", "latency_us"),
    *("bytes_per_second", "messages_per_second", "processors", "interrupted", "intervals", "core"),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("perf", "-s", "-p", "0") as server:
        yield server
        assert server.process.poll() is None, "the server still runs after all its clients"


class TestMeasurements:
    @pytest.mark.parametrize("op", ["send", "write", "read"])
    @pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
    def test_bandwidth_is_measured(self, run: Run, server: Server, op: str, host: str) -> None:
        argv = ["--op", op, "--size", "10000", "--depth", "8", "--count", "100", "--json"]
        result = run("perf", "-c", host, "-p", str(server.port), *argv)
        assert (result.status, result.err) == (0, "")
        (found,) = result.json
        assert set(found) == KEYS
        assert (found["op"], found["size"], found["depth"], found["kind"]) == (op, 10000, 8, "bandwidth")
        assert (found["count"], found["bytes"], found["latency_us"]) == (100, 1_000_000, None)
        assert found["bytes_per_second"] == pytest.approx(1e6 / found["seconds"], rel=0.01)

    @pytest.mark.parametrize("op", ["send", "write", "read"])
    def test_operations_are_posted_in_lists(self, run: Run, server: Server, op: str) -> None:
        for length, count in ((1, 10), (3, 12), (8, 16)):
            argv = ["--op", op, "--depth", "8", "--count", "10", "-l", str(length), "--json"]
            (found,) = run("perf", "-c", "127.0.0.1", "-p", str(server.port), *argv).json
            assert (found["count"], found["depth"]) == (count, 8)

    @pytest.mark.parametrize("mode", ["polling", "blocking"])
    @pytest.mark.parametrize("op", ["send", "write", "read"])
    def test_latency_is_measured(self, run: Run, server: Server, op: str, mode: str) -> None:
        argv = ["--op", op, "--latency", "--count", "20", "--json", *(["--blocking"] if mode == "blocking" else [])]
        (found,) = run("perf", "-c", "127.0.0.1", "-p", str(server.port), *argv).json
        assert set(found) == KEYS
        assert (found["mode"], found["kind"], found["size"], found["count"]) == (mode, "latency", 64, 20)
        assert found["core"] == core_choice.name
        times = found["latency_us"]
        assert 0 < times["min"] <= times["p50"] <= times["p99"] <= times["max"]

    def test_duration_option_limits_the_time(self, run: Run, server: Server) -> None:
        (found,) = run("perf", "-c", "127.0.0.1", "-p", str(server.port), "--seconds", "0.1", "--json").json
        assert 0.1 <= found["seconds"] < 5
        assert found["count"] > 0

    def test_local_measurement_needs_no_server(self, run: Run) -> None:
        result = run("perf", "--count", "8")
        assert (result.status, result.err) == (0, "")
        assert [
            line[:10] if "RTT" in line or "latency" in line else line.split("  ")[0] for line in result.out.splitlines()
        ] == [
            *("latency   ", "send RTT/2", "send RTT/2", ""),
            *("bandwidth", "write", "write", "write", "read", "read", "read", ""),
            f"software device {core_choice.description()}",
        ]


@pytest.fixture(scope="module")
def servers(server: Server) -> Iterator[dict[str, Server]]:
    """A server for each type."""
    with Server("perf", "-s", "-p", "0", "--type", "uc") as uc, Server("perf", "-s", "-p", "0", "--type", "ud") as ud:
        yield {"rc": server, "uc": uc, "ud": ud}


class TestOtherTypes:
    @pytest.mark.parametrize(("kind", "op"), [("uc", "send"), ("uc", "write"), ("ud", "send")])
    def test_messages_that_arrive_are_counted(self, run: Run, servers: dict[str, Server], kind: str, op: str) -> None:
        argv = ["--type", kind, "--op", op, "--size", "1000", "--depth", "8", "--count", "100", "--json"]
        result = run("perf", "-c", "127.0.0.1", "-p", str(servers[kind].port), *argv)
        assert (result.status, result.err) == (0, "")
        (found,) = result.json
        assert set(found) == KEYS
        assert (found["type"], found["op"], found["count"], found["lost"]) == (kind, op, 100, 0)
        assert (found["received"], found["bytes"], found["intervals"]) == (None, 100_000, None)

    @pytest.mark.parametrize("kind", ["uc", "ud"])
    def test_latency_is_measured(self, run: Run, servers: dict[str, Server], kind: str) -> None:
        argv = ["--type", kind, "--latency", "--count", "20", "--json"]
        (found,) = run("perf", "-c", "::1", "-p", str(servers[kind].port), *argv).json
        assert (found["count"], found["lost"], found["kind"]) == (20, 0, "latency")
        assert 0 < found["latency_us"]["min"] <= found["latency_us"]["max"]

    @pytest.mark.parametrize(
        ("kind", "op"),
        [
            ("rc", "write"),
            ("ud", "send"),
            *(
                pytest.param(*each, marks=pytest.mark.slow)
                for each in (("rc", "send"), ("rc", "read"), ("uc", "write"))
            ),
        ],
    )
    def test_both_directions_are_summed(self, run: Run, servers: dict[str, Server], kind: str, op: str) -> None:
        argv = ["--type", kind, "--op", op, "--size", "1000", "--depth", "8", "--seconds", "0.05", "--bidirectional"]
        (found,) = run("perf", "-c", "127.0.0.1", "-p", str(servers[kind].port), *argv, "--json").json
        assert found["count"] > 0
        assert found["received"] > 0
        assert found["bytes"] == (found["count"] - (found["lost"] or 0) + found["received"]) * 1000

    def test_sweep_measures_each_power_of_two_up_to_the_mtu(self, run: Run, servers: dict[str, Server]) -> None:
        argv = ["-a", "--type", "ud", "--count", "4", "--depth", "4", "--json"]
        found = run("perf", "-c", "127.0.0.1", "-p", str(servers["ud"].port), *argv).json
        assert [each["size"] for each in found] == [1 << bits for bits in range(1, 13)]

    @pytest.mark.slow
    def test_sweep_limits_the_bytes_under_way(self, run: Run, servers: dict[str, Server]) -> None:
        argv = ["-a", "--op", "write", "--count", "1", "--json"]
        found = run("perf", "-c", "127.0.0.1", "-p", str(servers["rc"].port), *argv).json
        assert [each["size"] for each in found] == [1 << bits for bits in range(1, 24)]
        assert [each["depth"] for each in found[-3:]] == [4, 2, 1]

    def test_intervals_are_reported(self, run: Run, servers: dict[str, Server]) -> None:
        argv = ["perf", "-c", "127.0.0.1", "--type", "uc", "-p", str(servers["uc"].port), "--seconds", "0.1"]
        (found,) = run(*argv, "--interval", "0.03", "--json").json
        ends = [each["seconds"] for each in found["intervals"]]
        assert ends
        assert ends == sorted(ends)
        assert sum(each["count"] for each in found["intervals"]) <= found["count"]
        lines = run(*argv, "--interval", "0.03").out.splitlines()
        assert lines[0].split()[5] == "MB/s"
        assert lines[-4].split()[:2] == ["bandwidth", "size"]

    @pytest.mark.parametrize("kind", ["uc", "ud"])
    def test_messages_that_are_lost_are_counted(
        self, run: Run, servers: dict[str, Server], kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        provider = get_provider("soft")
        assert isinstance(provider, SoftProvider)
        wire, sent = provider.host.mux.wire, [0]
        real = wire.send

        def lossy(route: Any, buffers: Any, segment: int = 0) -> bool:
            is_message = sum(map(len, buffers)) > 400  # not one of the connection managers
            sent[0] += is_message
            return (is_message and sent[0] % 5 == 0) or real(route, buffers, segment)

        monkeypatch.setattr(wire, "send", lossy)
        for queue_pair in (SoftUcQP, SoftUdQP):  # the compiled core sends by itself
            monkeypatch.setattr(queue_pair, "_join_core", lambda *_: None)
        argv = ["--type", kind, "--size", "1000", "--depth", "8", "--count", "64", "--json"]
        (found,) = run("perf", "-c", "127.0.0.1", "-p", str(servers[kind].port), *argv).json
        assert found["count"] == 64
        assert 0 < found["lost"] < 64
        assert found["bytes"] == (64 - found["lost"]) * 1000

    def test_long_datagram_is_refused(self, run: Run, servers: dict[str, Server]) -> None:
        result = run("perf", "-c", "127.0.0.1", "-p", str(servers["ud"].port), "--type", "ud", "--size", "4097")
        assert (result.status, result.out) == (1, "")
        assert result.err == (
            "rdmacm: perf: a datagram has at most 4096 bytes here, not 4097 [EINVAL]; try: a smaller --size\n"
        )

    def test_server_of_another_type_is_not_found(self, run: Run, servers: dict[str, Server]) -> None:
        result = run("perf", "-c", "127.0.0.1", "-p", str(servers["uc"].port), "--count", "1")
        assert "nobody listens on that port" in result.err


class TestReports:
    """What the ends show, and when."""

    @pytest.mark.parametrize(
        "argv",
        [
            *(
                ["--op", "write"],
                ["--latency"],
                ["--op", "send", "--bidirectional"],
                ["--op", "read", "--bidirectional"],
            ),
            ["--size", str(SUMMARY_SIZE)],  # messages as long as what is told at the end
            ["--size", "8", "--latency"],
        ],
    )
    def test_server_shows_what_its_client_has_measured(self, run: Run, argv: list[str]) -> None:
        with Server("perf", "-s", "-p", "0", "--json") as server:
            (measured,) = run("perf", f"127.0.0.1:{server.port}", *argv, "--count", "20", "--json").json
            served = json.loads(_document(server))
            assert served.pop("peer").startswith("127.0.0.1:")
            del measured["core"]
            for each in (measured["processors"], served["processors"]):  # rounded on the way
                assert each.pop("client") >= 0
                assert each.pop("server") >= 0
            assert {**measured, "seconds": 0} == {**served, "seconds": 0}
            assert measured["seconds"] == pytest.approx(served["seconds"])

    @pytest.mark.parametrize("kind", ["uc", "ud"])
    def test_server_counts_what_has_arrived(self, run: Run, kind: str) -> None:
        with Server("perf", "-s", "-p", "0", "--type", kind) as server:
            argv = ["--type", kind, "--size", "100", "--depth", "8", "--count", "40"]
            assert run("perf", f"[::1]:{server.port}", *argv).status == 0
            assert server.process.stdout is not None
            line = server.process.stdout.readline()
        assert re.fullmatch(
            rf"\[::1\]:\d+  send \({kind.upper()}\) 100 B, depth 8: 40 in [\d.]+ s, 0 lost, [\d.]+ MB/s,"
            r" [\d,]+ messages/s; cpu \d+ % here, \d+ % there\n",
            line,
        )

    def test_client_that_goes_away_is_shown(self) -> None:
        with Server("perf", "-s", "-p", "0") as server:
            with CmId() as stranger:
                stranger.resolve_addr(("127.0.0.1", server.port))
                stranger.resolve_route()
                stranger.create_qp()
                stranger.connect(ConnParam(Plan(Op.WRITE, 4096, 4, False, True).pack()))
                stranger.disconnect()
            assert server.process.stdout is not None
            line = server.process.stdout.readline()
        assert re.fullmatch(r"127.0.0.1:\d+  write 4 KiB, depth 4: ended without a result\n", line)

    @pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
    @pytest.mark.parametrize(
        "argv", [["--op", "write"], ["--latency", "--blocking"], ["--type", "ud"], ["--type", "ud", "--latency"]]
    )
    def test_interrupted_client_shows_what_it_has_measured(
        self, servers: dict[str, Server], argv: list[str], sign: signal.Signals
    ) -> None:
        kind = "ud" if "ud" in argv else "rc"
        common = ["perf", f"127.0.0.1:{servers[kind].port}", *argv, "--seconds", "600", "--interval", "0.01"]
        with _process(*common) as process:
            assert process.stdout is not None
            assert process.stdout.readline().split()[5] == "MB/s", "it measures"
            process.send_signal(sign)
            out, err = process.communicate(timeout=30)
        assert process.returncode == 128 + sign
        assert re.search(r"^rdmacm: interrupted after [\d.]+ s of the last measurement$", err, re.MULTILINE)
        lines = out.splitlines()
        heads = [
            at for at, line in enumerate(lines) if line.split()[:2] in (["latency", "size"], ["bandwidth", "size"])
        ]
        assert len(heads) == 1
        assert lines[heads[0] + 1].startswith("write" if "write" in argv else "send")

    def test_interrupted_sweep_keeps_its_rows_as_json(self, server: Server, tmp_path: Path) -> None:
        """The capture shows when the third measurement has begun."""
        packets = tmp_path / "packets"
        os.mkfifo(packets)
        argv = ["-a", "--op", "write", "--count", "1", "--json", "--pcap", str(packets)]
        with _process("perf", f"127.0.0.1:{server.port}", *argv) as process:
            with packets.open("rb") as file:
                seen = b""
                while seen.count(b"rPf2") < 6:  # request and answer of each
                    seen += file.read1(4096)
                process.send_signal(signal.SIGINT)
                while file.read1(1 << 16):
                    pass
            out, _ = process.communicate(timeout=30)
        assert process.returncode == 130
        found = json.loads(out)
        assert [each["size"] for each in found] == [2 << at for at in range(len(found))]
        assert len(found) >= 2

    def test_rows_are_shown_as_they_come(self) -> None:
        plans = [
            Plan(Op.SEND, 64, 1, True, False),
            Plan(Op.WRITE, 4096, 64, False, True),
            Plan(Op.READ, 1 << 20, 8, False, True),
        ]
        rows = Rows(plans)
        times = dict.fromkeys(STATISTICS, 12.5)
        assert rows.row(Result(plans[0], 7, 1.0, times, client_use=1.0, server_use=0.5)) == (
            "latency     size  mode       count  min us  p50 us  p99 us   max us  cpu c/s\n"
            "send RTT/2  64 B  polling        7    12.5    12.5    12.5     12.5   100/50\n"
        )
        assert rows.row(Result(plans[1], 1000, 1.0, {})) == (
            "\nbandwidth  size   depth     count     MB/s  Gbit/s  messages/s  cpu c/s\n"
            "write      4 KiB     64      1000      4.1    0.03       1,000      -/-\n"
        )
        assert rows.row(Result(plans[2], 1000, 1.0, {})) == (
            "read       1 MiB      8      1000   1048.6    8.39       1,000      -/-\n"
        )

    def test_results_of_peers_are_checked(self) -> None:
        plan = Plan(Op.SEND, 64, 1, False, True)
        good = Result(plan, 5, 1.5, {}, client_use=0.25)
        assert result_of(good.pack(), plan, 0.5) == replace(good, server_use=0.5)
        assert result_of(good.pack()[:-1], plan, 0.5) is None
        assert result_of(replace(good, seconds=float("nan")).pack(), plan, None) is None
        assert result_of(replace(good, lost=6).pack(), plan, None) is None
        assert use_of(struct.pack(">d", float("inf"))) is None

    def test_bars_have_lengths_of_the_figures(self, run: Run, server: Server) -> None:
        result = run("perf", f"127.0.0.1:{server.port}", "--op", "write", "--count", "8", "--plot", "-")
        assert result.out.splitlines()[-2:] == ["write, MB/s", result.out.splitlines()[-1]]
        assert result.out.rstrip().endswith("█" * 40)

    def test_bars_replace_a_plot_without_matplotlib(
        self, run: Run, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        file = tmp_path / "a.svg"
        result = run("perf", f"127.0.0.1:{server.port}", "--op", "write", "--count", "8", "--plot", str(file))
        assert result.status == 1
        assert not file.exists()
        assert result.out.rstrip().endswith("█" * 40)
        assert result.error == (
            "plot: matplotlib is not installed [ENOENT]; try: pip install matplotlib, or --plot - for bars;"
            f" bars follow instead of {file}"
        )

    @pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
    def test_plot_is_written(self, run: Run, server: Server, tmp_path: Path, ending: str) -> None:
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
        file = tmp_path / f"a.{ending}"
        argv = [f"127.0.0.1:{server.port}", "--seconds", "0.1", "--interval", "0.02", "--plot", str(file)]
        assert run("perf", *argv).status == 0
        beginnings = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}
        assert file.read_bytes().startswith(beginnings[ending])
        result = run("perf", *argv[:-1], str(tmp_path / "none" / file.name))
        assert (result.status, "ENOENT" in result.err) == (1, True)


def _process(*argv: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rdmacm", *argv]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, env=python_environment(), text=True)  # type: ignore[call-overload,no-any-return]


def _document(server: Server) -> str:
    """The next JSON object of a server."""
    assert server.process.stdout is not None
    return "".join(iter(server.process.stdout.readline, "}\n")) + "}"


class TestInvalidPeers:
    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"rPf2",
            b"x" * 56,
            struct.pack(">4sBBHII", b"rPf2", 3, 0, 0, 64, 1),
            struct.pack(">4sBBHII", b"rPf2", 0, 8, 0, 64, 1),
            struct.pack(">4sBBHII", b"rPf2", 0, 5, 0, 64, 1),
            struct.pack(">4sBBHII", b"rPf2", 0, 0, 0, 0, 1),
            struct.pack(">4sBBHII", b"rPf2", 0, 0, 0, (16 << 20) + 1, 1),
            struct.pack(">4sBBHII", b"rPf2", 0, 0, 0, 64, 0),
            struct.pack(">4sBBHII", b"rPf2", 0, 0, 0, 64, 1025),
        ],
    )
    def test_invalid_requests_are_rejected(self, server: Server, data: bytes) -> None:
        with CmId() as stranger:
            stranger.resolve_addr(("127.0.0.1", server.port))
            stranger.resolve_route()
            stranger.create_qp()
            with pytest.raises(CmRejectedError) as caught:
                stranger.connect(ConnParam(data))
        assert caught.value.private_data.startswith(b"not a request of rdmacm perf")

    def test_operations_that_a_type_lacks_are_refused(self) -> None:
        for kind, ops in ((QPType.RC, Op), (QPType.UC, (Op.SEND, Op.WRITE)), (QPType.UD, (Op.SEND,))):
            for op in Op:
                plan = Plan.unpack(Plan(op, 64, 4, False, True).pack(), kind)
                assert (plan is not None) == (op in ops)
        assert Plan.unpack(Plan(Op.WRITE, 64, 4, True, True).pack(), QPType.UC) is None

    def test_arbitrary_requests_give_a_valid_plan_or_none(self) -> None:
        chance = random.Random(1)
        for _ in range(2000):
            data = b"rPf2" + chance.randbytes(chance.randrange(16))
            plan = Plan.unpack(data)
            assert plan is None or (0 < plan.size <= 16 << 20 and 0 < plan.depth <= 1024)

    def test_server_of_another_protocol_is_reported(self, run: Run) -> None:
        with Server("rping", "-s", "-d", "-p", "0") as other:
            result = run("perf", "-c", "127.0.0.1", "-p", str(other.port), "--count", "1")
        assert (result.status, result.out) == (1, "")
        assert result.err == (f"rdmacm: connect 127.0.0.1:{other.port}: the server is not 'rdmacm perf -s' [EPROTO]\n")

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["-s", "-c", "x"], "-s and -c exclude each other"),
            (["--count", "1", "--seconds", "1"], "--seconds and --count exclude each other"),
            (["--seconds", "0"], "argument --seconds: '0' is not a number of seconds from 0.001 to 86400"),
            (["--type", "ud", "--op", "write"], "UD has no WRITE"),
            (["--type", "uc", "--op", "read"], "UC has no READ"),
            (["--type", "uc", "--op", "write", "--latency"], "nothing tells the latency of WRITE over UC"),
            (["--latency", "--bidirectional"], "latency has no second direction"),
            (["-l", "5", "--depth", "4"], "lists of 5 are longer than the depth of 4"),
            (["-l", "5", "--latency"], "lists can be chosen for the bandwidth of one direction over RC"),
            (["-a", "--size", "1"], "-a and --size exclude each other"),
            (["-s", "--plot", "a.svg"], "--plot is an option of the client"),
            (["--plot", "a.txt"], "argument --plot: 'a.txt' does not end in .svg, .png, .pdf"),
            (["-c", "x", "y"], "HOST 'y' and 'x' are two servers"),
            (["-s", "y"], "-s and -c exclude each other"),
            (["x:65536"], "'x:65536': '65536' is not a port from 0 to 65535"),
            (["--seconds", "nan"], "argument --seconds: 'nan' is not a number of seconds from 0.001 to 86400"),
        ],
    )
    def test_usage_errors_exit_2(self, run: Run, argv: list[str], message: str) -> None:
        assert run("perf", *argv) == (2, "", f"rdmacm: perf: {message}; try: rdmacm perf --help\n")


class TestMeasure:
    def test_samples_give_percentiles_in_microseconds(self) -> None:
        samples = Samples()
        assert samples.microseconds() == {}
        for value in range(100, 0, -1):
            samples.add(value / 1e6)
        assert samples.microseconds() == {"min": 1.0, "mean": 50.5, "p50": 51.0, "p99": 100.0, "max": 100.0}
        assert samples.microseconds(0.5)["max"] == 50.0

    def test_sizes_and_times_are_printed_with_units(self) -> None:
        assert [size_text(size) for size in (64, 4096, 1 << 20, 5000, 3 << 30)] == [
            *("64 B", "4 KiB", "1 MiB", "5000 B", "3 GiB")
        ]
        assert [time_text(each) for each in (8.44, 12345.0, 1.2e6)] == ["8.4 us", "12.3 ms", "1.20 s"]

    def test_progress_is_shown_on_terminals_only(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert not ProgressLine().is_due(1e12)

    def test_progress_line_is_overwritten_and_cleared(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        terminal = Terminal()
        monkeypatch.setattr("sys.stderr", terminal)
        progress = ProgressLine()
        assert not progress.is_due(0)
        assert progress.is_due(1e12)
        progress.show("long text")
        progress.show("short")
        progress.close()
        assert terminal.getvalue() == "\rlong text\rshort    \r     \r"
