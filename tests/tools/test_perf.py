"""``rdmacm perf``: measurements between two processes, and peers that do not keep to its protocol."""

from __future__ import annotations

import io
import random
import struct
from collections.abc import Iterator
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
from rdmacm.tools.measure import ProgressLine, Samples, size_text, time_text
from rdmacm.tools.perf_plan import Op, Plan
from rdmacm.verbs import QPType
from support.servers import Run, Server

KEYS = {
    *("type", "op", "size", "depth", "mode", "kind", "count", "lost", "received", "bytes", "seconds", "latency_us"),
    *("bytes_per_second", "messages_per_second", "intervals", "core"),
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
        assert [line.split("  ")[0] for line in result.out.splitlines()] == [
            *("latency", "send (half a round trip)", "send (half a round trip)", ""),
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


class TestInvalidPeers:
    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"rPf1",
            b"x" * 56,
            struct.pack(">4sBBHII", b"rPf1", 3, 0, 0, 64, 1),
            struct.pack(">4sBBHII", b"rPf1", 0, 8, 0, 64, 1),
            struct.pack(">4sBBHII", b"rPf1", 0, 5, 0, 64, 1),
            struct.pack(">4sBBHII", b"rPf1", 0, 0, 0, 0, 1),
            struct.pack(">4sBBHII", b"rPf1", 0, 0, 0, (16 << 20) + 1, 1),
            struct.pack(">4sBBHII", b"rPf1", 0, 0, 0, 64, 0),
            struct.pack(">4sBBHII", b"rPf1", 0, 0, 0, 64, 1025),
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
            data = b"rPf1" + chance.randbytes(chance.randrange(16))
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
