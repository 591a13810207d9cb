"""``rdmacm udaddy`` between two processes: its protocol, its output, and ends with different options."""

from __future__ import annotations

from pathlib import Path

import pytest

from rdmacm import CmId, CmRejectedError, PortSpace
from support.pcap import roce
from support.roce_packets import RocePacket
from support.servers import Run, Server

CAPTURES = Path(__file__).parents[1] / "data" / "captures"
CLIENT = """\
udaddy: starting client
udaddy: connecting
initiating data transfers
receiving data transfers
data transfers complete
test complete
return status 0
"""
SERVER = """\
udaddy: starting server
receiving data transfers
sending replies
data transfers complete
test complete
return status 0
"""


def serve(*argv: str, address: str = "127.0.0.1") -> Server:
    return Server("udaddy", "-b", address, "--port", "0", *argv)


class TestTransfers:
    @pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.slow)])
    def test_output_matches_udaddy(self, run: Run, address: str) -> None:
        with serve(address=address) as server:
            assert run("udaddy", "-s", address, "--port", str(server.port)) == (0, CLIENT, "")
            assert server.end() == (0, SERVER, "")

    @pytest.mark.slow
    def test_fifty_queue_pairs(self, run: Run) -> None:
        argv = ("-c", "50", "-C", "3", "-S", "4096", "-p", "0x111", "--json")
        with serve(*argv) as server:
            client = run("udaddy", "-s", "127.0.0.1", "-b", "127.0.0.1", "--port", str(server.port), *argv).json
            served = server.end().json
        moved = {"connections": 50, "messages": 3, "size": 4096, "sent": 614_400, "received": 614_400}
        assert client.pop("seconds") > 0
        assert served.pop("seconds") > 0
        assert client == {"role": "client", **moved}
        assert served == {"role": "server", **moved}

    @pytest.mark.slow
    @pytest.mark.parametrize("argv", [("-C", "0"), ("-S", "0")])
    def test_queue_pairs_without_messages(self, run: Run, argv: tuple[str, str]) -> None:
        with serve(*argv) as server:
            client = run("udaddy", "-s", "127.0.0.1", "--port", str(server.port), *argv)
            assert client.out.splitlines()[2:] == ["test complete", "return status 0"]
            assert server.end().out.splitlines()[1:] == ["test complete", "return status 0"]


def immediates(path: Path) -> dict[int, set[int]]:
    """The immediate data of the datagrams in a capture, by the queue pair that sent them."""
    found: dict[int, set[int]] = {}
    for datagram in roce(path):
        packet = RocePacket.unpack(datagram.payload[:-4])
        if packet.bth.dest_qpn > 1 and packet.deth is not None and packet.imm_dt is not None:
            found.setdefault(packet.deth.src_qpn, set()).add(int.from_bytes(packet.imm_dt.data, "big"))
    return found


@pytest.mark.slow
def test_each_message_has_the_number_of_its_queue_pair(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "ours.pcapng"
    with serve("-C", "3") as server:
        run("udaddy", "-s", "127.0.0.1", "--port", str(server.port), "-C", "3", "--pcap", str(file))
    for path in (CAPTURES / "rxe-udaddy.pcap", file):
        found = immediates(path)
        assert len(found) == 2
        assert all(numbers == {qpn} for qpn, numbers in found.items())


def test_server_may_be_an_operand(run: Run) -> None:
    with Server("udaddy", "--port", "0") as server:
        assert run("udaddy", f"127.0.0.1:{server.port}").status == 0


class TestFailures:
    @pytest.mark.slow
    def test_missing_server_is_reported(self, run: Run) -> None:
        with CmId(port_space=PortSpace.UDP) as free:
            free.bind_addr(("127.0.0.1", 0))
            port = free.src_port
        result = run("udaddy", "-s", "127.0.0.1", "--port", str(port))
        assert result.status == 1
        assert result.out == (
            "udaddy: starting client\nudaddy: connecting\n"
            "udaddy: event: RDMA_CM_EVENT_UNREACHABLE, error: 1\ntest complete\nreturn status 1\n"
        )
        assert "nobody listens on that port" in result.err

    @pytest.mark.slow
    def test_messages_longer_than_the_mtu(self, run: Run) -> None:
        with serve("-S", "4097") as server, CmId(port_space=PortSpace.UDP) as client:
            result = run("udaddy", "-s", "127.0.0.1", "--port", str(server.port), "-S", "4097")
            assert result.status == 1
            assert "udaddy: message_size 4097 is larger than active mtu 4096\n" in result.out
            assert result.out.endswith("test complete\nreturn status -22\n")
            assert "longer than the port's MTU" in result.err
            client.resolve_addr(("127.0.0.1", server.port))
            client.resolve_route()
            with pytest.raises(CmRejectedError) as caught:
                client.connect()
            assert caught.value.reason == 2
            served = server.end()
        assert served.status == 1
        assert "udaddy: failing connection request\n" in served.out

    @pytest.mark.slow
    def test_client_misses_messages(self, run: Run) -> None:
        """The server waits for more messages than the client has."""
        with serve("-C", "5") as server:
            result = run("udaddy", "-s", "127.0.0.1", "--port", str(server.port), "-C", "4", "--timeout", "0.3")
        assert result.status == 1
        assert "1 of 1 queue pairs found, 0 of 4 messages received [ETIMEDOUT]" in result.err

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["-c", "0"], "argument -c/--connections: '0' is not a number from 1 to 10000"),
            (["-t", "1"], "-t is an option of the client, and needs HOST"),
        ],
    )
    def test_usage_errors_exit_2(self, run: Run, argv: list[str], message: str) -> None:
        result = run("udaddy", *argv)
        assert result == (2, "", f"rdmacm: udaddy: {message}; try: rdmacm udaddy --help\n")
