"""``rdmacm rping`` between two processes: its protocol, its output, and peers that do not keep to the protocol."""

from __future__ import annotations

import re
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rdmacm import CmId
from rdmacm.provider.connparam import ConnParam
from rdmacm.tools.main import main
from rdmacm.tools.measure import size_text
from rdmacm.tools.rping import ping_text
from support.netns import python_environment
from support.pcap import frames, roce
from support.servers import Run, Server

#: The part of the first ping's data that rping(1) prints.
FIRST = "rdma-ping-0: ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqr"
CAPTURES = Path(__file__).parents[1] / "data" / "captures"
TIMES = {"min", "mean", "p50", "p99", "max"}


@pytest.fixture(scope="module", params=["127.0.0.1", "::1"])
def persistent(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Address and port of a server for any number of clients."""
    with Server("rping", "-s", "-P", "-V", "-d", "-a", request.param, "-p", "0") as server:
        yield request.param, str(server.port)
        ended = server.end(signal.SIGINT)
        assert ended.status == 130
        assert [line for line in ended.err.splitlines() if not line.startswith("rdmacm: rping: ")] == []


class TestPattern:
    def test_first_pattern_matches_rping(self) -> None:
        assert ping_text(0, 64) == FIRST.encode() + b"\0"

    def test_pattern_shifts_by_one_each_time(self) -> None:
        assert ping_text(57, 26) == b"rdma-ping-57: zABCDEFGHIJ\0"
        assert ping_text(58, 26) == b"rdma-ping-58: ABCDEFGHIJK\0"
        long = ping_text(1, 65535)
        assert len(long) == 65535
        assert long[13:71] == bytes([*range(66, 123), 65])
        assert long[71:129] == long[13:71]

    def test_shortest_ping_has_room_for_the_greatest_number(self) -> None:
        assert ping_text(2**31 - 1, 23) == b"rdma-ping-2147483647: \0"

    def test_pattern_is_cut_after_a_long_iteration_number(self) -> None:
        assert (
            ping_text(2**31 - 1, 26)
            == b"rdma-ping-2147483647: " + bytes([(2**31 - 1) % 58 + 65 + i for i in range(3)]) + b"\0"
        )


class TestPings:
    @pytest.mark.parametrize("size", [23, 64, 4096, 65536])
    def test_data_of_all_sizes_is_validated(self, run: Run, persistent: tuple[str, str], size: int) -> None:
        address, port = persistent
        result = run("rping", "-c", "-a", address, "-p", port, "-V", "-C", "5", "-S", str(size))
        assert (result.status, result.err) == (0, "")
        peer = f"[{address}]" if ":" in address else address
        assert re.fullmatch(
            rf"5 pings of {re.escape(size_text(size))} to {re.escape(peer)}:{port} came back, all correct;"
            r" min [\d.]+ \w+, median [\d.]+ \w+, max [\d.]+ \w+\n",
            result.out,
        )

    @pytest.mark.parametrize(
        "argv",
        [["{host}:{port}"], ["{host}", "-p", "{port}"], ["-c", "-a", "{host}:{port}"], ["-c", "-a{host}:{port}"]],
    )
    def test_server_may_be_an_operand_and_have_its_port(
        self, run: Run, persistent: tuple[str, str], argv: list[str]
    ) -> None:
        address, port = persistent
        host = f"[{address}]" if ":" in address else address
        result = run("rping", *(each.format(host=host, port=port) for each in argv), "-C", "1")
        assert (result.status, result.err) == (0, "")
        assert result.out.startswith(f"1 ping of 64 B to {host}:{port} came back; ")

    def test_packets_may_go_to_standard_output(self, persistent: tuple[str, str]) -> None:
        address, port = persistent
        command = [sys.executable, "-m", "rdmacm", "rping", address, "-p", port, "-C", "1", "--pcap", "-"]
        done = subprocess.run(command, capture_output=True, check=True, timeout=60, env=python_environment())
        assert done.stdout.startswith(b"\n\r\r\n"), "a section header of pcapng"
        assert b"rdma-ping-0: " in done.stdout
        assert b"came back" in done.stderr

    def test_reader_of_packets_may_go(self) -> None:
        with Server("rping", "-s", "-P", "-p", "0") as server:
            command = [sys.executable, "-m", "rdmacm", "rping", f"127.0.0.1:{server.port}", "--pcap", "-"]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=python_environment()
            ) as process:
                assert process.stdout is not None
                assert process.stdout.read(4) == b"\n\r\r\n"
                process.stdout.close()
                assert process.wait(timeout=60) == 141

    def test_verbose_shows_the_data(self, run: Run) -> None:
        with Server("rping", "-s", "-v", "-d", "-a", "127.0.0.1", "-p", "0") as server:
            client = run("rping", "-c", "-a", "127.0.0.1", "-p", str(server.port), "-v", "-C", "2")
            served = server.end()
        second = "rdma-ping-1: BCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrs"
        assert client == (0, f"ping data: {FIRST}\nping data: {second}\n", "")
        assert (served.status, served.out) == (0, f"server ping data: {FIRST}\nserver ping data: {second}\n")

    def test_persistent_server_serves_three_clients_at_once(self, persistent: tuple[str, str]) -> None:
        address, port = persistent
        statuses: list[int] = []

        def client() -> None:
            statuses.append(main(["rping", "-c", "-a", address, "-p", port, "-V", "-C", "20"]))

        threads = [threading.Thread(target=client) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == [0, 0, 0]

    @pytest.mark.parametrize(("ours", "theirs"), [("-q", "-q"), ("-V", "-q")])
    def test_application_queue_pairs_can_be_used_at_both_ends(self, run: Run, ours: str, theirs: str) -> None:
        with Server("rping", "-s", "-V", "-d", "-a", "127.0.0.1", "-p", "0", theirs) as server:
            result = run("rping", "-c", "-a", "127.0.0.1", "-p", str(server.port), "-V", "-C", "3", ours)
            assert (result.status, result.err) == (0, "")
            assert server.end().status == 0

    def test_application_queue_pair_can_be_used_at_the_client_only(self, run: Run, persistent: tuple[str, str]) -> None:
        address, port = persistent
        assert run("rping", "-c", "-a", address, "-p", port, "-V", "-C", "3", "-q").status == 0

    def test_source_address_option_is_accepted(self, run: Run) -> None:
        with Server("rping", "-s", "-v", "-d", "-p", "0") as server:
            result = run("rping", "-c", "-a", "127.0.0.1", "-I", "127.0.0.1", "-p", str(server.port), "-C", "1")
            assert result.status == 0
            assert server.end().status == 0


def conversation(path: Path) -> list[tuple[str, str, bytes]]:
    """The operations in a capture of rping, without acknowledgements: ("client" or "server", operation, data).

    The data of a READ request is its RETH. The data of a WRITE is without the RETH.
    """
    said: list[tuple[str, str, bytes]] = []
    client = b"", b""
    for packet in roce(path):
        opcode, flags = packet.payload[0], packet.payload[1]
        body = packet.payload[12 : len(packet.payload) - 4 - (flags >> 4 & 3)]
        if opcode == 0x64 and body[24:26] == b"\x00\x10":  # a ConnectRequest has the client's QP number
            client = packet.source, body[64:67]
        if opcode not in _OPERATIONS:
            continue
        operation, header, begins = _OPERATIONS[opcode]
        # Both the address and the number: hosts may have equal QP numbers, and both ends may be on one host.
        who = "server" if (packet.destination, packet.payload[5:8]) == client else "client"
        if begins:
            said.append((who, operation, body[header:]))
        else:
            said[-1] = (who, operation, said[-1][2] + body[header:])
    return said


#: For opcodes of a reliable connection: the operation, the length of its extended headers, whether it is the first.
_OPERATIONS = {
    4: ("SEND", 0, True),
    12: ("READ", 0, True),
    13: ("DATA", 4, True),
    14: ("DATA", 0, False),
    15: ("DATA", 4, False),
    16: ("DATA", 4, True),
    6: ("WRITE", 16, True),
    7: ("WRITE", 0, False),
    8: ("WRITE", 0, False),
    10: ("WRITE", 16, True),
}


def check(said: list[tuple[str, str, bytes]], size: int, pings: int) -> None:
    """Assert that these are the operations of rping."""
    turn = [
        *(("client", "SEND"), ("server", "READ"), ("client", "DATA"), ("server", "SEND")),
        *(("client", "SEND"), ("server", "WRITE"), ("server", "SEND")),
    ]
    assert [(who, operation) for who, operation, _ in said] == turn * pings
    for ping in range(pings):
        advertised, asked, read, _, sink, written, _ = (data for _, _, data in said[7 * ping : 7 * ping + 7])
        assert read == written == ping_text(ping, size)
        assert advertised == asked[:8] + asked[8:12] + size.to_bytes(4, "big")  # the same as the RETH
        assert (len(sink), sink[12:]) == (16, size.to_bytes(4, "big"))


class TestProtocol:
    @pytest.mark.parametrize(("name", "size"), [("rxe-rping-ipv4", 64), ("rxe-rping-3000", 3000)])
    def test_librdmacms_capture_has_the_expected_protocol(self, name: str, size: int) -> None:
        said = conversation(CAPTURES / f"{name}.pcap")
        assert len(said) % 7 == 0
        check(said, size, len(said) // 7)

    @pytest.mark.parametrize("size", [64, 3000])
    def test_own_capture_has_the_same_protocol(
        self, run: Run, tmp_path: Path, persistent: tuple[str, str], size: int
    ) -> None:
        address, port = persistent
        file = tmp_path / "ours.pcapng"
        argv = ["-C", "3", "-S", str(size), "--pcap", str(file)]
        assert run("rping", "-c", "-a", address, "-p", port, *argv).status == 0
        check(conversation(file), size, 3)


class TestJson:
    def test_json_summaries_of_both_ends_agree(self, run: Run) -> None:
        with Server("rping", "-s", "-V", "-d", "-p", "0", "--json") as server:
            client = run(
                "rping", "-c", "-a", "127.0.0.1", "-p", str(server.port), "-C", "4", "-S", "100", "-v", "--json"
            )
            served = server.end()
        found = client.json
        assert set(found) == {"peer", "size", "pings", "bytes", "seconds", "validated", "round_trip_us"}
        assert (found["peer"], found["size"], found["pings"]) == (f"127.0.0.1:{server.port}", 100, 4)
        assert (found["bytes"], found["validated"]) == (800, False)
        assert set(found["round_trip_us"]) == TIMES
        assert 0 < found["round_trip_us"]["min"] <= found["round_trip_us"]["p50"] <= found["round_trip_us"]["max"]
        assert {**served.json, "peer": ""} == {"peer": "", "pings": 4, "bytes": 800, "validated": True}


class TestCapture:
    def test_capture_is_readable_by_scapy(self, run: Run, tmp_path: Path, persistent: tuple[str, str]) -> None:
        pytest.importorskip("scapy.layers.inet6")
        scapy_utils = pytest.importorskip("scapy.utils")
        address, port = persistent
        file = tmp_path / "rping.pcapng"
        assert run("rping", "-c", "-a", address, "-p", port, "-C", "2", "--pcap", str(file)).status == 0
        assert file.read_bytes()[:4] == b"\x0a\x0d\x0d\x0a"
        packets = scapy_utils.rdpcap(str(file))
        assert len(packets) == len(list(frames(file))) > 20
        assert all(packet["UDP"].dport == 4791 for packet in packets)
        assert any(b"rdma-ping-1: " in bytes(packet) for packet in packets)

    def test_capture_file_that_cannot_be_created_is_reported(self, run: Run, tmp_path: Path) -> None:
        result = run("rping", "-c", "-a", "127.0.0.1", "--pcap", str(tmp_path / "none" / "x"))
        assert result.status == 1
        assert result.err.endswith("none/x: No such file or directory [ENOENT]\n")


class TestFailures:
    def test_missing_server_is_reported(self, run: Run) -> None:
        with CmId() as free:
            free.bind_addr(("127.0.0.1", 0))
            port = free.src_port
        result = run("rping", "-c", "-a", "127.0.0.1", "-p", str(port))
        assert (result.status, result.out) == (1, "")
        assert result.err.startswith(
            f"rdmacm: connect 127.0.0.1:{port}: nobody listens on that port [ECONNREFUSED]; try: "
        )

    def test_port_in_use_is_reported(self, run: Run) -> None:
        with CmId() as taken:
            taken.bind_addr(("127.0.0.1", 0))
            result = run("rping", "-s", "-a", "127.0.0.1", "-p", str(taken.src_port))
        assert result.status == 1
        assert "[EADDRINUSE]" in result.err

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["-C", "1"], "one of -s and -c is needed, or the server's HOST"),
            (["-s", "-c"], "one of -s and -c is needed, or the server's HOST"),
            (["-c"], "the client needs HOST, the server's address"),
            (["-c", "-a", "::1", "-S", "22"], "argument -S/--size: '22' is not a number from 23 to 65536"),
            (["-c", "-a", "::1", "-S", "65537"], "argument -S/--size: '65537' is not a number from 23 to 65536"),
            (
                ["-c", "-a", "::1", "-C", "2147483648"],
                "argument -C/--count: '2147483648' is not a number from 0 to 2147483647",
            ),
            (["-c", "-a", "::1", "-p", "x"], "argument -p/--port: 'x' is not a number from 0 to 65535"),
        ],
    )
    def test_usage_errors_exit_2(self, run: Run, argv: list[str], message: str) -> None:
        result = run("rping", *argv)
        assert result == (2, "", f"rdmacm: rping: {message}; try: rdmacm rping --help\n")

    @pytest.mark.parametrize("kind", ["-P", "-V"])
    def test_interrupted_server_ends_its_client(self, kind: str) -> None:
        with (
            Server("rping", "-s", kind, "-d", "-a", "127.0.0.1", "-p", "0") as server,
            Client(server.port) as client,
        ):
            client.wait_until_it_pings()
            assert server.end(signal.SIGINT).status == 130
            status, _, err = client.end()
        assert status == 1
        assert err == f"rdmacm: transfer 127.0.0.1:{server.port}: the peer has ended the connection [ECONNRESET]\n"

    def test_interrupt_prints_the_progress(self) -> None:
        with Server("rping", "-s", "-d", "-a", "127.0.0.1", "-p", "0") as server, Client(server.port) as client:
            client.wait_until_it_pings()
            interrupted = client.end(signal.SIGINT)
            assert (interrupted.status, interrupted.err) == (130, "")
            assert server.end().status == 0


class Client(Server):
    """A client that pings for ever and prints its pings."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.start("rping", "-c", "-a", "127.0.0.1", "-p", str(port), "-v")

    def wait_until_it_pings(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"ping data: {FIRST}\n"


class TestInvalidPeers:
    """Clients that do not keep to rping's protocol."""

    @pytest.mark.parametrize(
        ("message", "complaint"),
        [
            (b"x" * 15, "a message of 15 bytes instead of 16"),
            (struct.pack(">QII", 4096, 1, 0), "a ping of 0 bytes"),
            (struct.pack(">QII", 4096, 1, 65537), "a ping of 65537 bytes"),
            (struct.pack(">QII", 4096, 1, 64), "a work request failed: REM_ACCESS_ERR"),
        ],
    )
    def test_invalid_messages_end_the_server_with_an_error(self, message: bytes, complaint: str) -> None:
        with Server("rping", "-s", "-d", "-a", "127.0.0.1", "-p", "0") as server, CmId() as stranger:
            stranger.resolve_addr(("127.0.0.1", server.port))
            stranger.resolve_route()
            stranger.create_qp()
            stranger.connect(ConnParam(responder_resources=1, initiator_depth=1))
            with stranger.reg_msgs(bytearray(message)) as region:
                stranger.post_send(1, region)
                stranger.channel.get_event(10).ack()  # the server disconnects
                stranger.disconnect()
            ended = server.end()
        assert ended.status == 1
        assert ended.err.splitlines()[-1].partition(": ")[2].partition(": ")[2].startswith(complaint)
