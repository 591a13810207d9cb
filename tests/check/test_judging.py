"""What measurements mean, and which comes next: without any socket."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rdmacm.check.findings import Sign, Step
from rdmacm.check.measured import (
    Answer,
    Direction,
    Exchange,
    Listener,
    Refusal,
    Requests,
    Resolution,
    Sizes,
    Target,
)
from rdmacm.check.sequence import Sequence, Wanted
from rdmacm.explanation import Explanation, NeighbourUsed, RouteUsed

ROUTE = RouteUsed("10.0.0.2", "unicast", "eth0", None, "10.0.0.1", 254, 0, 0)
NEIGHBOUR = NeighbourUsed("10.0.0.2", "eth0", "02:00:00:00:00:02", "reachable")
RESOLVED = Resolution(
    Explanation("peer", "7471", "soft", ("10.0.0.2:7471",), route=ROUTE, neighbour=NEIGHBOUR),
    *("10.0.0.1", "10.0.0.2", 4096, 9000, "02:00:00:00:00:02"),
)
ANSWERED = Requests(100, tuple(float(10 + each) for each in range(100)))
SILENT = Requests(3, echo=True)
PAYLOADS = (256, 512, 1024, 2048, 4096)


def direction(lost: tuple[int, ...] = (), each: int = 10, missing: int = 0, came: int = 0) -> Direction:
    """Datagrams of each payload; of those in ``lost`` none came, of 256 bytes ``missing`` did not."""
    sent = {(size, 0): each for size in PAYLOADS}
    received = {(size, 0): each - (missing if size == 256 else 0) for size in PAYLOADS if size not in lost}
    return Direction(sent, received, {0: came} if received else {})


HEALTHY = Exchange(direction(), direction(), path_mtu=4096)
SIZES = Sizes({308: True, 1076: True, 4148: True})


def checked(
    *,
    resolution: Resolution = RESOLVED,
    requests: Requests = ANSWERED,
    exchange: Exchange | None = None,
    listener: Listener | None = None,
    sizes: Sizes = SIZES,
    target: Target | None = None,
) -> Sequence:
    """A check with these measurements, each given when it is wanted."""
    sequence = Sequence(target or Target("peer", 7471 if listener else 0))
    order = []
    while sequence.wanted is not None:
        order.append(sequence.wanted)
        match sequence.wanted:
            case Wanted.RESOLUTION:
                sequence.take_resolution(resolution)
            case Wanted.SERVER:
                sequence.take_server(exchange is not None)
            case Wanted.REQUESTS:
                sequence.take_requests(requests)
            case Wanted.EXCHANGE:
                sequence.take_exchange(exchange)
            case Wanted.LISTENER:
                assert listener is not None
                sequence.take_listener(listener)
            case Wanted.SIZES:
                sequence.take_sizes(sizes)
    assert order == [wanted for wanted in Wanted if wanted in order], "each once, in the order of the table"
    assert [finding.step for finding in sequence.all_findings()] == list(Step)
    return sequence


def assert_failure(step: Step, text: str, command: str, **measured: object) -> None:
    """Assert where a check ends and what it says; the steps after that are not reached."""
    sequence = checked(**measured)  # type: ignore[arg-type]
    found = sequence.failure
    assert found is not None
    assert found.step is step, found
    assert text in found.meaning, found
    assert command in found.command, found
    assert sequence.status == int(step)
    if step < Step.LOSS:
        assert all(
            each.sign is (Sign.NOT_REACHED if each.step > step else each.sign) for each in sequence.all_findings()
        )


class TestHealthy:
    @pytest.mark.parametrize("exchange", [None, HEALTHY])
    @pytest.mark.parametrize(
        "listener",
        [
            None,
            Listener(Answer.ACCEPTED, 50.0, long_arrived=True, longest=4156),
            Listener(Answer.REJECTED, 50.0, 28, "refused"),
        ],
    )
    def test_nothing_is_found(self, exchange: Exchange | None, listener: Listener | None) -> None:
        sequence = checked(exchange=exchange, listener=listener)
        assert sequence.failure is None
        assert sequence.status == 0
        assert not [found for found in sequence.all_findings() if found.sign is Sign.NOT_REACHED]
        assert not [found for found in sequence.all_findings() if found.meaning]

    def test_what_one_side_cannot_know(self) -> None:
        unknown = [found.step for found in checked(sizes=Sizes(error="none")).findings if found.sign is Sign.UNKNOWN]
        assert unknown == [Step.MTU, Step.CLASS]

    def test_helper_that_goes_away(self) -> None:
        sequence = Sequence(Target("peer"))
        sequence.take_resolution(RESOLVED)
        sequence.take_server(True)
        sequence.take_requests(ANSWERED)
        sequence.take_exchange(None)
        assert sequence.wanted is Wanted.SIZES
        sequence.take_sizes(SIZES)
        assert sequence.status == 0


class TestResolution:
    @pytest.mark.parametrize(
        ("error", "step"),
        [
            ("name", Step.NAME),
            ("route", Step.ROUTE),
            ("select", Step.ROUTE),
            ("neighbour", Step.NEIGHBOUR),
            ("resolve_addr", Step.NEIGHBOUR),  # of the kernel
            ("path", Step.ROUTE),
        ],
    )
    def test_the_failed_step(self, error: str, step: Step) -> None:
        ex = replace(RESOLVED.explanation, error=error, errno=110, errno_name="ETIMEDOUT", message="m", hint="h")
        assert_failure(step, "m [ETIMEDOUT]", "h", resolution=Resolution(ex))

    def test_arp_flux(self) -> None:
        found = replace(
            HEALTHY,
            hardware_address="02:00:00:00:00:99",
            interface="eth1",
            interfaces={"02:00:00:00:00:99": "eth1", "02:00:00:00:00:02": "eth0"},
        )
        assert_failure(Step.NEIGHBOUR, "eth1, and its eth0 answers for it (ARP flux)", "arp_ignore=1", exchange=found)

    def test_hardware_address_of_a_middle_box(self) -> None:
        found = replace(HEALTHY, hardware_address="02:00:00:00:00:99", interfaces={"02:00:00:00:00:99": "eth1"})
        assert checked(exchange=found).status == 0

    def test_another_hardware_address_than_in_the_round_before(self) -> None:
        sequence = checked(resolution=replace(RESOLVED, hardware_address_before="02:00:00:00:00:99"))
        near = next(found for found in sequence.findings if found.step is Step.NEIGHBOUR)
        assert (near.sign, near.rule, sequence.status) == (Sign.GOOD, "C5", 0)
        assert near.meaning.startswith("it was 02:00:00:00:00:99 before")


class TestPort:
    @pytest.mark.parametrize(
        ("refusal", "text", "command"),
        [
            (Refusal.CLOSED, "nothing at the peer has UDP port 4791", "starting the program at peer"),
            (Refusal.PROHIBITED, "a firewall rejects UDP port 4791", "at 10.0.0.9: nft insert rule"),
            (Refusal.HOST, "not in use on its network", "ip neigh"),
            (Refusal.NETWORK, "no route to the peer", "ip route, at 10.0.0.9"),
        ],
    )
    def test_icmp(self, refusal: Refusal, text: str, command: str) -> None:
        assert_failure(Step.PORT, text, command, requests=Requests(1, refusal=refusal, reporter="10.0.0.9"))

    @pytest.mark.parametrize("reporter", ["", "10.0.0.1"])
    def test_own_firewall(self, reporter: str) -> None:
        asked = Requests(1, refusal=Refusal.CLOSED, reporter=reporter)
        assert_failure(Step.PORT, "a firewall of this host", "here: nft insert rule inet filter output", requests=asked)

    def test_silence(self) -> None:
        assert_failure(
            Step.PORT, "drops UDP port 4791, or the process at the peer is stopped", "--serve", requests=SILENT
        )
        assert checked(requests=SILENT).findings[-1].likely
        assert_failure(Step.PORT, "the host is down", "ping 10.0.0.2", requests=Requests(3, echo=False))

    @pytest.mark.parametrize(
        ("forward", "back", "text", "command"),
        [
            (PAYLOADS, (), "packets come back, and none reaches the peer", "at the peer: nft"),
            ((), PAYLOADS, "packets reach the peer, and none comes back", "here: nft"),
            (PAYLOADS, PAYLOADS, "dropped in both directions, though TCP passes", "on both sides: nft"),
        ],
    )
    def test_one_direction(self, forward: tuple[int, ...], back: tuple[int, ...], text: str, command: str) -> None:
        found = Exchange(direction(forward), direction(back), path_mtu=4096)
        assert_failure(Step.PORT, text, command, requests=SILENT, exchange=found)

    def test_nothing_is_sent_back(self) -> None:
        found = Exchange(direction(PAYLOADS), Direction(), path_mtu=4096)
        assert_failure(
            Step.PORT, "no packet reaches the peer, and none", "at the peer: nft", requests=SILENT, exchange=found
        )

    def test_no_way_back(self) -> None:
        found = Exchange(Direction(), Direction(), "no route to 10.0.0.1 [ENETUNREACH]", "'ip route get 10.0.0.1'")
        text = "the peer has no way back: no route to 10.0.0.1"
        assert_failure(Step.PORT, text, "at the peer: 'ip route get", requests=SILENT, exchange=found)

    def test_other_source(self) -> None:
        found = replace(HEALTHY, back=replace(direction(), other_source="10.9.9.9"))
        assert_failure(Step.PORT, "the peer sends from 10.9.9.9", "ip route get 10.0.0.1", exchange=found)

    def test_error_of_this_side(self) -> None:
        assert_failure(Step.PORT, "in use", "end it", requests=Requests(0, error="in use", hint="end it"))


class TestManager:
    def test_no_answer(self) -> None:
        assert_failure(Step.MANAGER, "its process is stopped", "'ps'", requests=SILENT, exchange=HEALTHY)

    @pytest.mark.parametrize(
        ("listener", "text", "command"),
        [
            (Listener(Answer.REJECTED, 1.0, 8), "nobody listens on port 7471 (tcp)", "starting the server at peer"),
            (
                Listener(Answer.REJECTED, 1.0, 8, elsewhere=("udp",)),
                "somebody in port space udp",
                "--port-space udp",
            ),
            (Listener(Answer.SILENT), "its backlog is full, or its process is stopped", "max_backlog"),
            (Listener(Answer.REJECTED, 1.0, 12, "rejected: invalid gid"), "this partition (P_Key)", "pkeys"),
            (Listener(Answer.REJECTED, 1.0, 10, "rejected: stale conn", "wait"), "stale conn", "wait"),
            (Listener(Answer.FAILED, text="no memory", hint="more"), "no memory", "more"),
        ],
    )
    def test_listener(self, listener: Listener, text: str, command: str) -> None:
        assert_failure(Step.MANAGER, text, command, listener=listener)

    def test_status_of_a_datagram_service(self) -> None:
        listener = Listener(Answer.REJECTED, 1.0, 1, elsewhere=("tcp",))
        text = "nobody listens on port 7471 (udp), and somebody in port space tcp"
        assert_failure(Step.MANAGER, text, "--port-space tcp", listener=listener, target=Target("peer", 7471, "udp"))


class TestMtu:
    @pytest.mark.parametrize("word", ["to the peer", "from the peer"])
    def test_hole(self, word: str) -> None:
        hole = direction((2048, 4096))
        ways = (hole, direction()) if word == "to the peer" else (direction(), hole)
        assert_failure(
            Step.MTU,
            f"packets of up to 1076 bytes arrive, longer ones {word} do not: a link on the way has a smaller MTU",
            "ip route replace 10.0.0.2 dev eth0 mtu 1500",
            exchange=Exchange(*ways, path_mtu=4096),
        )

    def test_one_sided_hole(self) -> None:
        sizes = Sizes({308: True, 1076: True, 4148: False})
        assert_failure(Step.MTU, "of up to 1076 bytes arrive, and of 4148 none does", "mtu 1500", sizes=sizes)

    def test_reported_mtu(self) -> None:
        sizes = Sizes({308: True, 1076: True, 4148: False}, 1400)
        assert_failure(Step.MTU, "reports MTU 1400", "dev eth0 mtu 1400", sizes=sizes)

    def test_different_ends(self) -> None:
        found = replace(HEALTHY, path_mtu=1024)
        assert_failure(Step.MTU, "4096 bytes here and 1024 at the peer: it rejects", "mtu 1120", exchange=found)
        text = "the path MTU is 4096 bytes here, and the peer's port has up to 512 bytes"
        assert_failure(Step.MTU, text, "same", listener=Listener(Answer.REJECTED, 1.0, 26, text, "the same"))

    def test_longest_packet_of_a_connection(self) -> None:
        listener = Listener(Answer.ACCEPTED, 1.0, long_arrived=False, longest=4156)
        assert_failure(Step.MTU, "one of 4156 bytes does not", "mtu 1500", listener=listener)


class TestLossAndClass:
    def test_loss(self) -> None:
        found = Exchange(direction(missing=3), direction(), path_mtu=4096)
        assert_failure(Step.LOSS, "packets are lost (3 of 50 there)", "ethtool -S", exchange=found)
        assert_failure(Step.LOSS, "(2 of 100 both ways)", "PFC", requests=Requests(100, (1.0,) * 98))

    @pytest.mark.parametrize(
        ("came", "text"), [(104, "with traffic class 0 arrive at the peer with 104"), (3, "congestion experienced")]
    )
    def test_class(self, came: int, text: str) -> None:
        found = Exchange(direction(came=came), direction(), path_mtu=4096)
        assert_failure(Step.CLASS, text, "switch", exchange=found)
