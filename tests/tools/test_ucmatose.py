"""``rdmacm ucmatose`` between two processes: its protocol, its output, and ends with different options."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from rdmacm import CmId
from rdmacm.proto.cm.messages import REQ
from rdmacm.provider.connparam import ConnParam
from rdmacm.tools import ucmatose
from support.cm import opened
from support.pcap import frames, roce
from support.pcap_cm import mad_of
from support.servers import Run, Server

CAPTURES = Path(__file__).parents[1] / "data" / "captures"
CLIENT = """\
cmatose: starting client
cmatose: connecting
receiving data transfers
sending replies
data transfers complete
test complete
return status 0
"""
SERVER = """\
cmatose: starting server
initiating data transfers
completing sends
receiving data transfers
data transfers complete
cmatose: disconnecting
disconnected
test complete
return status 0
"""


def serve(*argv: str, address: str = "127.0.0.1") -> Server:
    return Server("ucmatose", "-b", address, "-p", "0", *argv)


class TestTransfers:
    @pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
    def test_output_matches_ucmatose(self, run: Run, address: str) -> None:
        with serve("-V", address=address) as server:
            assert run("ucmatose", "-s", address, "-p", str(server.port)) == (0, CLIENT, "")
            assert server.end() == (0, SERVER, "")

    def test_fifty_connections_migrate_and_are_validated(self, run: Run) -> None:
        argv = ("-c", "50", "-C", "3", "-S", "5000", "-m", "--json")
        with serve("-V", *argv) as server:
            client = run("ucmatose", "-s", "127.0.0.1", "-b", "127.0.0.1", "-p", str(server.port), *argv).json
            served = server.end().json
        expected = {"connections": 50, "messages": 3, "size": 5000, "sent": 750_000, "received": 750_000}
        assert client.pop("seconds") > 0
        assert served.pop("seconds") > 0
        assert client == {"role": "client", "validated": False, **expected}
        assert served == {"role": "server", "validated": True, **expected}

    def test_migration_is_reported(self, run: Run) -> None:
        migrating = "migrating to new event channel\n"
        complete = "data transfers complete\n"
        with serve("-m") as server:
            client = run("ucmatose", "-s", "127.0.0.1", "-p", str(server.port), "-m")
            assert client.out == CLIENT.replace(complete, complete + migrating)
            assert server.end().out == SERVER.replace(complete, complete + migrating)

    @pytest.mark.parametrize("argv", [("-C", "0"), ("-S", "0")])
    def test_connections_without_messages_end(self, run: Run, argv: tuple[str, str]) -> None:
        with serve(*argv) as server:
            client = run("ucmatose", "-s", "127.0.0.1", "-p", str(server.port), *argv)
            assert client.out.splitlines()[2:] == ["test complete", "return status 0"]
            assert server.end().out.splitlines()[1:3] == ["cmatose: disconnecting", "disconnected"]

    def test_options_of_ucmatose_are_accepted(self, run: Run) -> None:
        argv = ("-P", "ib", "-f", "ip", "-a", "10", "-S", "300000")
        with serve("-V", *argv) as server:
            client = run("ucmatose", "-s", "127.0.0.1", "-b", "127.0.0.1", "-p", str(server.port), "-t", "32", *argv)
            assert client == (0, CLIENT, "")
            assert server.end().status == 0

    def test_requests_beyond_the_count_are_rejected(self, run: Run) -> None:
        with serve() as server, CmId() as early, CmId() as late:
            for cmid in (early, late):
                cmid.resolve_addr(("127.0.0.1", server.port))
                cmid.resolve_route()
                cmid.create_qp()
            # This client receives the server's messages, but does not answer yet.
            with early.reg_msgs(bytearray(100)) as region:
                for _ in range(10):
                    early.post_recv(0, region)
                early.connect(ConnParam(responder_resources=1, initiator_depth=1))
                with pytest.raises(ConnectionRefusedError) as caught:
                    late.connect()
                assert caught.value.reason == 28  # type: ignore[attr-defined]
                for _ in range(10):
                    early.post_send(0, region)
                early.channel.get_event(10).ack()
                early.disconnect()
            served = server.end()
        refused = served.out.splitlines()
        refused.remove("cmatose: failing connection request")
        assert (served.status, refused) == (0, SERVER.splitlines())


def conversation(path: Path) -> Counter[tuple[str, bytes]]:
    """The number of SENDs in a capture by sender ("client" or "server") and data."""
    said: Counter[tuple[str, bytes]] = Counter()
    client = b""
    for packet in roce(path):
        opcode, flags = packet.payload[0], packet.payload[1]
        body = packet.payload[12 : len(packet.payload) - 4 - (flags >> 4 & 3)]
        if opcode == 0x64 and body[24:26] == b"\x00\x10":  # a ConnectRequest has the client's QP number
            client = body[64:67]
        if opcode == 4:
            said["server" if packet.payload[5:8] == client else "client", body] += 1
    return said


class TestProtocol:
    @pytest.mark.parametrize("whose", ["librdmacm's", "ours"])
    def test_client_returns_the_received_data(self, run: Run, tmp_path: Path, whose: str) -> None:
        if whose == "ours":
            file, count = tmp_path / "ours.pcapng", 3
            with serve("-C", "3") as server:
                argv = ("-C", "3", "--pcap", str(file))
                assert run("ucmatose", "-s", "127.0.0.1", "-p", str(server.port), *argv).status == 0
        else:
            file, count = CAPTURES / "rxe-ucmatose.pcap", 2
        said = conversation(file)
        message = next(data for _, data in said)
        assert len(message) == 100
        assert said == {("server", message): count, ("client", message): count}

    def test_request_parameters_match_librdmacm(self, run: Run, tmp_path: Path) -> None:
        file = tmp_path / "ours.pcapng"
        with serve() as server:
            run("ucmatose", "-s", "127.0.0.1", "-p", str(server.port), "--pcap", str(file))
        asked = []
        for path in (CAPTURES / "rxe-ucmatose.pcap", file):
            request = next(opened(mad) for _, frame in frames(path) if (mad := mad_of(frame[14:])) is not None)
            assert isinstance(request, REQ)
            asked.append(
                (
                    request.responder_resources,
                    request.initiator_depth,
                    request.retry_count,
                    request.rnr_retry_count,
                    request.srq,
                    request.private_data[36:],
                )
            )
        assert asked[0] == asked[1]


class TestMismatchedOptions:
    """Each end reports the error, and neither waits for ever."""

    @pytest.mark.parametrize(
        ("server_argv", "client_argv", "server_says", "client_says"),
        [
            pytest.param(
                *("-C 3", "-C 1", "the peer expects fewer messages", "the peer has ended the connection"),
                marks=pytest.mark.slow,
            ),
            ("-S 101", "-S 100", "a message is longer than the receiver's buffer", "a message is longer than the"),
            ("-S 100", "-S 101", "a message is longer than the receiver's buffer", "a message is longer than the"),
            ("-c 1", "-c 2", "the peer has ended the connection", "connect"),
        ],
    )
    def test_mismatch_is_reported(
        self, run: Run, server_argv: str, client_argv: str, server_says: str, client_says: str
    ) -> None:
        with serve(*server_argv.split()) as server:
            client = run("ucmatose", "-s", "127.0.0.1", "-p", str(server.port), *client_argv.split())
            served = server.end()
        assert (client.status, served.status) == (1, 1)
        assert client_says in client.err
        assert server_says in served.err
        for result in (client, served):
            assert result.out.splitlines()[-2] == "test complete"
            assert result.out.splitlines()[-1].startswith("return status ")
            assert not result.out.endswith(" 0\n")

    def test_corrupted_data_is_reported(self) -> None:
        with serve("-V", "-C", "1") as server, CmId() as stranger:
            stranger.resolve_addr(("127.0.0.1", server.port))
            stranger.resolve_route()
            stranger.create_qp()
            with stranger.reg_msgs(bytearray(100)) as received, stranger.reg_msgs(bytearray(100)) as sent:
                stranger.post_recv(0, received)
                stranger.connect(ConnParam(responder_resources=1, initiator_depth=1))
                stranger.get_recv_comp(10)
                assert received.buf != sent.buf
                stranger.post_send(0, sent)
                stranger.channel.get_event(10).ack()
                stranger.disconnect()
            served = server.end()
        assert served.status == 1
        assert "message 1 was returned with wrong data [EIO]" in served.err

    def test_disconnected_client_is_reported(self) -> None:
        with serve("-C", "2") as server, CmId() as client:
            client.resolve_addr(("127.0.0.1", server.port))
            client.resolve_route()
            client.create_qp()
            client.connect()
            client.disconnect()
            served = server.end()
        assert served.status == 1
        assert served.err.endswith(": the peer has ended the connection [ECONNRESET]\n")


def test_server_may_be_an_operand(run: Run) -> None:
    with Server("ucmatose", "-p", "0") as server:
        assert run("ucmatose", f"[::1]:{server.port}").status == 0


class TestFailures:
    def test_missing_server_is_reported(self, run: Run) -> None:
        with CmId() as free:
            free.bind_addr(("127.0.0.1", 0))
            port = free.src_port
        result = run("ucmatose", "-s", "127.0.0.1", "-p", str(port), "-c", "3")
        assert result.status == 1
        assert result.out == (
            "cmatose: starting client\ncmatose: connecting\n"
            "cmatose: event: RDMA_CM_EVENT_REJECTED, error: 8\ntest complete\nreturn status 8\n"
        )
        assert result.err.startswith(f"rdmacm: connect 127.0.0.1:{port}: nobody listens on that port [ECONNREFUSED]")

    def test_rejection_is_reported_after_flushed_receives(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        take_events = ucmatose._Endpoint._take_events

        def take_completions_first(endpoint: ucmatose._Endpoint) -> None:
            for channel in endpoint._completion_channels.values():
                endpoint._take_completions(channel)
            take_events(endpoint)

        monkeypatch.setattr(ucmatose._Endpoint, "_take_events", take_completions_first)
        result = run("ucmatose", "-s", "127.0.0.1", "-p", "9")
        assert "return status 8" in result.out
        assert "nobody listens on that port [ECONNREFUSED]" in result.err

    @pytest.mark.parametrize(
        ("argv", "code"),
        [
            (["-f", "ip", "-s", "localhost"], "EAI_NONAME"),
            (["-f", "ipv6", "-s", "127.0.0.1"], "EAI_(NONAME|ADDRFAMILY)"),
            (["-f", "gid", "-s", "::ffff:127.0.0.1"], "ENODEV"),
            (["-f", "gid", "-b", "::ffff:127.0.0.1"], "ENODEV"),
            (["-b", "192.0.2.1"], "EADDRNOTAVAIL"),
            (["-s", "127.0.0.1", "-b", "192.0.2.1"], "EADDRNOTAVAIL"),
        ],
        ids=" ".join,
    )
    def test_unusable_addresses_are_reported(self, run: Run, argv: list[str], code: str) -> None:
        result = run("ucmatose", *argv)
        assert result.status == 1
        assert re.search(rf"\[{code}\]", result.err)

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["-c", "0"], "argument -c/--connections: '0' is not a number from 1 to 10000"),
            (["-C", "32769"], "argument -C/--messages: '32769' is not a number from 0 to 32768"),
            (["-t", "256", "-s", "::1"], "argument -t/--tos: '256' is not a number from 0 to 255"),
            (["-t", "1"], "-t is an option of the client, and needs HOST"),
            (["-s", "::1", "-V"], "-V is an option of the server, and excludes HOST"),
        ],
    )
    def test_usage_errors_exit_2(self, run: Run, argv: list[str], message: str) -> None:
        result = run("ucmatose", *argv)
        assert result == (2, "", f"rdmacm: ucmatose: {message}; try: rdmacm ucmatose --help\n")
