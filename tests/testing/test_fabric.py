"""Packets on a simulated network: delivery, faults, and replay by the seed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from ipaddress import ip_address
from random import Random

import pytest

from rdmacm.proto.roce.icrc import Icrc
from rdmacm.soft.wire.base import Wire, WirePath
from rdmacm.testing import CORRUPT, DELIVER, DUPLICATE, LOSE, Fabric, FabricPacket, Host, Outcome, Verdict, nth
from support.fabric import ENDS, ENDS6, Managers, received, route, sealed, two


def send_many(fabric: Fabric, count: int = 2000, gap: float = 1e-3) -> tuple[Host, Host]:
    """Send packets with consecutive PSNs from a to b, ``gap`` seconds apart."""
    a, b = two(fabric)
    way = route(a, *ENDS)
    for psn in range(count):
        assert a.wire.send(way, [sealed(way, psn.to_bytes(4, "big") * 8, psn)])
        fabric.run(seconds=gap)
    fabric.run()
    return a, b


def psns(host: Host) -> list[int]:
    return [int.from_bytes(data[9:12], "big") for data, *_ in received(host)]


# -- delivery -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [ENDS, ENDS6])
def test_packet_arrives_unchanged(ends: tuple[str, str]) -> None:
    fabric = Fabric(latency=5e-6)
    a, b = two(fabric)
    wire: Wire = a.wire
    way = wire.route(WirePath(ip_address(ends[0]).packed, ip_address(ends[1]).packed), 0x20)
    assert (way.remote_host, way.source_port) == (ends[1], 4791)
    data = sealed(way, b"hello...")
    assert wire.send(way, [data[:12], memoryview(data)[12:]])
    assert not received(b)
    fabric.run()
    ((view, segment, remote, local),) = received(b)
    assert (bytes(view), segment, local) == (data, 0, ip_address(ends[1]).packed)
    assert remote == ((ends[0], 4791) if ends is ENDS else (ends[0], 4791, 0, 0))
    back = b.wire.route(WirePath(local, ip_address(remote[0]).packed))
    assert back.remote_host == remote[0], "a peer has the same host in both directions"
    assert fabric.now == 5e-6
    (entry,) = fabric.log
    assert (entry.time, entry.outcome, entry.data) == (5e-6, Outcome.DELIVERED, data)
    assert (entry.packet.source, entry.packet.destination, entry.packet.traffic_class) == ("a", "b", 0x20)


def test_link_local_peer_has_a_scope() -> None:
    fabric = Fabric()
    a, b = fabric.host("a", "fe80::1"), fabric.host("b", "fe80::2")
    b.wire.open()
    a.wire.open()
    a.wire.send(route(a, "fe80::1", "fe80::2"), [bytes(16)])
    fabric.run()
    ((_, _, remote, _),) = received(b)
    (eth0,) = (interface.index for interface in b.network.interfaces() if interface.name == "eth0")
    assert remote == ("fe80::1", 4791, 0, eth0)


@pytest.mark.parametrize(("local", "remote"), [(ENDS[0], ENDS[0]), ("127.0.0.1", "127.0.0.1"), ("::1", ENDS6[0])])
def test_host_receives_its_own_packets(local: str, remote: str) -> None:
    fabric = Fabric(mtu=1500)
    a, b = two(fabric)
    assert a.wire.send(route(a, local, remote), [bytes(4000)]), "the loopback interface has a longer MTU"
    fabric.run()
    assert len(received(a)) == 1
    assert not received(b)


def test_train_is_split_into_packets() -> None:
    fabric = Fabric()
    a, b = two(fabric)
    way = route(a, *ENDS)
    train = [sealed(way, bytes([i]) * (64 if i < 4 else 8), i, i) for i in range(5)]
    assert len({len(packet) for packet in train[:4]}) == 1
    a.wire.send(way, train, len(train[0]))
    fabric.run()
    arrived = [bytes(data) for data, segment, *_ in received(b) if segment == 0]
    assert arrived == train
    assert [entry.packet.identification for entry in fabric.log] == [0, 1, 2, 3, 4]
    flow = Icrc(way.path.local, way.path.remote, way.source_port)
    assert all(flow.check([packet], i) for i, packet in enumerate(arrived))


def test_each_packet_of_a_train_has_its_own_outcome() -> None:
    fabric = Fabric(seed=3, loss=0.5)
    a, b = two(fabric)
    way = route(a, *ENDS)
    a.wire.send(way, [sealed(way, bytes(48), psn) for psn in range(64)], 64)
    fabric.run()
    arrived = psns(b)
    assert 10 < len(arrived) < 54
    assert arrived == sorted(arrived)
    assert fabric.log.count(Outcome.LOST) == 64 - len(arrived)


def test_trains_can_be_disabled_and_are_limited() -> None:
    assert not Fabric(trains=False).host("a", ENDS[0]).wire.can_segment()
    a, _ = two(Fabric())
    longest = a.wire.can_segment()
    assert longest > 32 << 10
    way = route(a, *ENDS)
    for size, segment in ((longest + 1, 4096), (65 * 64, 64), (64, -1)):
        with pytest.raises(ValueError, match="bytes is not possible"):
            a.wire.send(way, [bytes(size)], segment)
    assert not len(a.fabric.log)


def test_undeliverable_packets_are_counted() -> None:
    fabric = Fabric(mtu=1500)
    a, b = two(fabric)
    data = bytes(64)
    assert a.wire.send(route(a, ENDS[0], "10.0.0.9"), [data]), "a missing host does not answer"
    assert not a.wire.send(route(a, "10.0.0.9", ENDS[1]), [data]), "a source address must be the host's own"
    assert not a.wire.send(route(a, *ENDS), [bytes(1473)])
    assert a.wire.send(route(a, *ENDS), [bytes(1472)])
    assert not a.wire.send(route(a, *ENDS6), [bytes(1453)])
    assert a.wire.send(route(a, *ENDS6), [bytes(1452)])
    assert a.wire.send(route(a, ENDS[0], "127.0.0.1"), [data])
    b.wire.close()
    fabric.run()
    assert not received(b)
    assert len(received(a)) == 1
    assert Counter(entry.outcome for entry in fabric.log) == {
        Outcome.UNREACHABLE: 2,
        Outcome.TOO_LONG: 2,
        Outcome.REFUSED: 2,
        Outcome.DELIVERED: 1,
    }


def test_receive_queue_overflow_drops_packets() -> None:
    fabric = Fabric()
    a, b = two(fabric)
    way = route(a, *ENDS)
    for _ in range(5000):
        a.wire.send(way, [bytes(16)])
    fabric.run()
    assert 1000 < len(received(b)) < 5000
    assert fabric.log.count(Outcome.OVERRUN) + fabric.log.count(Outcome.DELIVERED) == 5000
    assert len(b.wire.receive()) == 0


def test_moved_address_receives_on_its_new_host() -> None:
    fabric = Fabric()
    a, b = two(fabric)
    c = fabric.host("c", "10.0.0.3")
    c.wire.open()
    b.network.remove_address(2, ENDS[1])
    c.network.add_address(2, f"{ENDS[1]}/24")
    a.wire.send(route(a, *ENDS), [bytes(16)])
    fabric.run()
    assert (len(received(b)), len(received(c))) == (0, 1)


def test_packets_in_flight_to_a_removed_address_are_undeliverable() -> None:
    fabric = Fabric(latency=1.0)
    a, b = two(fabric)
    a.wire.send(route(a, *ENDS), [bytes(16)])
    a.wire.send(route(a, *ENDS6), [bytes(16)])
    b.network.remove_address(2, ENDS[1])
    fabric.run()
    assert [entry.outcome for entry in fabric.log] == [Outcome.UNREACHABLE, Outcome.DELIVERED]
    b.wire.close()
    b.wire.open()
    assert not received(b), "closing a wire discards its packets"


def test_loopback_that_is_down_delivers_nothing() -> None:
    fabric = Fabric()
    a, b = two(fabric)
    a.network.set_interface(1, up=False)
    a.wire.send(route(a, ENDS[0], "127.0.0.1"), [bytes(16)])
    fabric.run()
    assert not received(a)
    assert not received(b)


def test_packets_in_flight_are_limited() -> None:
    fabric = Fabric(latency=1.0, log_limit=0)
    fabric.faults = lambda _: Verdict(copies=64)
    a, b = two(fabric)
    for _ in range(1100):
        a.wire.send(route(a, *ENDS), [bytes(16)])
    fabric.log.limit = 1 << 30
    a.wire.send(route(a, *ENDS), [bytes(16)])
    assert fabric.log.count(Outcome.OVERRUN) == 64
    assert b.alive


# -- random faults ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "rates"),
    [
        (Outcome.LOST, {"loss": 0.1}),
        (Outcome.DUPLICATED, {"duplicate": 0.1}),
        (Outcome.DELAYED, {"reorder": 0.1}),
        (Outcome.CORRUPTED, {"corrupt": 0.1}),
    ],
)
def test_fault_rates_are_met(outcome: Outcome, rates: dict[str, float]) -> None:
    fabric = Fabric(seed=7, **rates)  # type: ignore[arg-type]
    _, b = send_many(fabric, 2000, gap=0.0)
    # Five standard deviations of a binomial distribution.
    assert abs(fabric.log.count(outcome) - 200) < 5 * (2000 * 0.1 * 0.9) ** 0.5
    affected = {entry.packet.psn for entry in fabric.log.select(outcome)}
    arrived = psns(b)
    if outcome is Outcome.LOST:
        assert arrived == [psn for psn in range(2000) if psn not in affected]
    elif outcome is Outcome.DUPLICATED:
        assert Counter(arrived) == {psn: 2 if psn in affected else 1 for psn in range(2000)}
        assert arrived != sorted(arrived), "a copy may arrive after later packets"
    elif outcome is Outcome.DELAYED:
        assert sorted(arrived) == list(range(2000))
        assert [psn for psn in arrived if psn not in affected] == sorted(set(range(2000)) - affected)
        assert arrived != sorted(arrived)
    else:
        assert len(arrived) == 2000 - fabric.log.count(Outcome.LOST)
        assert fabric.log.count(Outcome.LOST) < 10, "those with damage that the ICRC does not show"


def test_packets_arrive_in_order_by_default() -> None:
    fabric = Fabric(seed=7, jitter=1e-4)
    _, b = send_many(fabric, 500, gap=1e-5)
    assert psns(b) == list(range(500)), "jitter alone does not reorder packets"
    assert {entry.outcome for entry in fabric.log} == {Outcome.DELIVERED}
    took = [entry.time - entry.packet.time for entry in fabric.log]
    assert min(took) >= 20e-6 - 1e-12
    assert max(took) > 60e-6


def test_full_loss_delivers_nothing() -> None:
    fabric = Fabric(loss=1.0)
    _, b = send_many(fabric, 50)
    assert not received(b)
    fabric.loss = 0.0
    a = fabric.hosts["a"]
    a.wire.send(route(a, *ENDS), [bytes(16)])
    fabric.run()
    assert len(received(b)) == 1


def test_corruption_flips_a_few_bits_anywhere() -> None:
    fabric = Fabric(seed=5, corrupt=1.0)
    send_many(fabric, 500)
    flips: Counter[int] = Counter()
    places: set[int] = set()
    for entry in fabric.log.select(Outcome.DELIVERED):
        difference = int.from_bytes(entry.data, "big") ^ int.from_bytes(entry.packet.data, "big")
        flips[difference.bit_count()] += 1
        places |= {bit >> 3 for bit in range(48 * 8) if difference >> bit & 1}
    assert set(flips) == set(range(1, 9))
    assert places == set(range(48))


def test_packet_is_lost_if_the_icrc_does_not_show_its_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = Fabric()
    a, b = two(fabric)
    way = route(a, *ENDS)
    wrong = sealed(way, bytes(32), 1)
    monkeypatch.setattr("rdmacm.testing.fabric.corrupted", lambda *_: wrong)
    fabric.faults = only(1, CORRUPT)
    packets = [sealed(way, bytes(range(32)), psn) for psn in (1, 2)]
    for packet in packets:
        assert a.wire.send(way, [packet])
    fabric.run()
    assert [entry.data for entry in fabric.log.select(Outcome.DELIVERED)] == packets[1:]
    assert [entry.packet.psn for entry in fabric.log.select(Outcome.LOST)] == [1]
    assert len(received(b)) == 1


def test_invalid_fault_arguments_raise() -> None:
    for wrong in ({"loss": 1.1}, {"corrupt": -0.1}, {"latency": -1.0}, {"jitter": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Fabric(**wrong)  # type: ignore[arg-type]
    for verdict in ({"copies": -1}, {"copies": 1000}, {"delay": -1.0}, {"delay": float("inf")}, {"flips": -1}):
        with pytest.raises(ValueError, match="not"):
            Verdict(**verdict)


# -- replay -------------------------------------------------------------------------------------------------------


def wild(seed: int | str) -> Fabric:
    fabric = Fabric(seed, loss=0.1, duplicate=0.1, reorder=0.1, corrupt=0.1, jitter=1e-5)
    send_many(fabric, 300, gap=1e-5)
    return fabric


def test_same_seed_replays_the_same_run() -> None:
    first, again, other = wild(1), wild(1), wild(2)
    assert first.log.to_text() == again.log.to_text()
    assert list(first.log) == list(again.log)
    assert first.log.to_text() != other.log.to_text()
    assert wild("a name").log.to_text() != first.log.to_text()


def test_same_seed_replays_in_another_process() -> None:
    def run(hash_seed: str) -> bytes:
        script = (
            "from rdmacm.testing import Fabric; from support.fabric import Managers;"
            "fabric = Fabric(3, loss=0.2, duplicate=0.2, reorder=0.2, corrupt=0.1); managers = Managers(fabric);"
            "managers.connect(); managers.run(60.0); print(fabric.log.to_text())"
        )
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True).stdout

    first = run("1")
    assert b"REQ" in first
    assert run("2") == first


def test_same_seed_replays_the_same_connection() -> None:
    def life(seed: int) -> str:
        fabric = Fabric(seed, loss=0.3, duplicate=0.1, reorder=0.1, corrupt=0.05)
        managers = Managers(fabric)
        managers.connect()
        managers.run(60.0)
        assert managers.kinds(0)[:1] == ["ConnectReply"]
        return fabric.log.to_text()

    assert life(4) == life(4)
    assert life(4) != life(5)


def test_links_draw_independent_random_numbers() -> None:
    def outcomes(disturb: bool) -> list[tuple[int, Outcome, bytes]]:
        fabric = Fabric(9, loss=0.2, reorder=0.2, corrupt=0.2)
        a, b = two(fabric)
        if disturb:
            fabric.host("c", "10.0.0.3").wire.open()
        for psn in range(200):
            way = route(a, *ENDS)
            a.wire.send(way, [sealed(way, bytes(8), psn)])
            if disturb:
                c = fabric.hosts["c"]
                c.wire.send(route(c, "10.0.0.3", ENDS[1]), [bytes(16)])
                b.wire.send(route(b, *ENDS[::-1]), [bytes(16)])
        fabric.run()
        mine = [entry for entry in fabric.log if entry.packet.source == "a"]
        return [(entry.packet.psn, entry.outcome, entry.data) for entry in mine]

    assert outcomes(False) == outcomes(True)


def test_hosts_draw_independent_random_numbers() -> None:
    def numbers(fabric: Fabric, *names: str) -> list[int]:
        return [fabric.host(name, f"10.0.0.{ord(name)}").random.getrandbits(64) for name in names]

    a, b = numbers(Fabric(1), "a", "b")
    assert a != b
    assert numbers(Fabric(1), "b", "a") == [b, a]
    assert numbers(Fabric(2), "a") != [a]


def test_log_text_has_a_line_per_packet() -> None:
    fabric = Fabric(seed=1)
    managers = Managers(fabric)
    fabric.faults = nth("REQ", 1)
    managers.connect()
    managers.run(30.0)
    a, b = managers.hosts
    a.wire.send(route(a, ENDS[0], "10.0.0.9"), [b"?"])
    lines = fabric.log.to_text().splitlines()
    assert lines[0].startswith("0.000000000 a > b #1 REQ qp 0x000001 psn 0x000000 280 bytes sum ")
    assert lines[0].endswith(" lost")
    assert lines[1].endswith(" delivered")
    assert [line.split()[5] for line in lines[1:4]] == ["REQ", "REP", "RTU"]
    sums = [line.partition(" sum ")[2].split()[0] for line in lines[:4]]
    assert sums[0] == sums[1], "the retransmitted REQ is the same packet"
    assert len(set(sums)) == 3, "REP and RTU are other packets"
    assert lines[-1].split()[1:6] == ["a", ">", "10.0.0.9", "#5", "?"]
    assert b.alive


def test_log_is_bounded() -> None:
    fabric = Fabric(log_limit=10_000)
    send_many(fabric, 100)
    assert 10 < len(fabric.log) < 34
    assert fabric.log.discarded == 100 - len(fabric.log)
    assert fabric.log[-1].packet.psn == 99
    assert fabric.log.to_text().startswith(f"... {fabric.log.discarded} earlier entries")


# -- scripts ------------------------------------------------------------------------------------------------------


def test_script_returning_none_leaves_packets_to_the_fault_rates() -> None:
    seen: list[FabricPacket] = []
    fabric = Fabric(seed=2, loss=0.3)

    def faults(packet: FabricPacket) -> None:
        seen.append(packet)

    fabric.faults = faults
    send_many(fabric, 100)
    assert [packet.psn for packet in seen] == list(range(100))
    assert {packet.kind for packet in seen} == {"RC_SEND_ONLY"}
    assert {packet.dest_qp for packet in seen} == {0x010012}
    unscripted = Fabric(seed=2, loss=0.3)
    send_many(unscripted, 100)
    assert fabric.log.to_text() == unscripted.log.to_text()


def only(psn: int, verdict: Verdict) -> Callable[[FabricPacket], Verdict]:
    return lambda packet: verdict if packet.psn == psn else DELIVER


@pytest.mark.parametrize(
    ("verdict", "arrived", "outcome"),
    [
        (LOSE, [0, 1, 3, 4], Outcome.LOST),
        (DUPLICATE, [0, 1, 2, 2, 3, 4], Outcome.DUPLICATED),
        (Verdict(copies=3), [0, 1, 2, 2, 2, 3, 4], Outcome.DUPLICATED),
        (Verdict(delay=1.0), [0, 1, 3, 4, 2], Outcome.DELAYED),
        (Verdict(data=bytes(9) + b"\0\0\x07" + bytes(4)), [0, 1, 7, 3, 4], Outcome.CORRUPTED),
    ],
)
def test_verdict_of_a_script_is_applied(verdict: Verdict, arrived: list[int], outcome: Outcome) -> None:
    fabric = Fabric(seed=2, loss=0.5, corrupt=0.5)
    fabric.faults = only(2, verdict)
    _, b = send_many(fabric, 5)
    assert psns(b) == arrived
    assert [entry.packet.psn for entry in fabric.log.select(outcome)] == [2]


def test_script_corrupts_a_packet() -> None:
    fabric = Fabric()
    fabric.faults = only(1, CORRUPT)
    send_many(fabric, 3)
    changed = [entry.packet.psn for entry in fabric.log if entry.data != entry.packet.data]
    assert changed == [1, 1], "one entry for the corruption, one for the delivery"
    fabric.faults = lambda _: Verdict(flips=10**9)
    a = fabric.hosts["a"]
    a.wire.send(route(a, *ENDS), [b"\x0f" * 16])
    fabric.run()
    assert fabric.log[-1].data == b"\xf0" * 16, "every bit flips at most once"


def test_arbitrary_packets_are_classified() -> None:
    dice = Random(1)
    kinds = set()
    for size in [*range(40), *[280] * 60]:
        for start in (b"", b"\x64\x40\xff\xff\0\0\0\1"):
            data = (start + dice.randbytes(size))[:size]
            packet = FabricPacket(
                1, 0.0, "a", "", ip_address(ENDS[0]).packed, ip_address(ENDS[1]).packed, 0, 0, 0, data
            )
            kinds.add(packet.kind)
            assert str(packet).startswith(f"a > {ENDS[1]} #1 {packet.kind} qp 0x")
    assert {"?", "UD_SEND_ONLY"} <= kinds


@pytest.mark.parametrize(("kind", "number"), [("REQ", 1), ("REP", 1), ("REP", 2), ("RTU", 1)])
def test_lost_message_is_retransmitted(kind: str, number: int) -> None:
    fabric = Fabric()
    managers = Managers(fabric)
    fabric.faults = nth(kind, number)
    managers.connect()
    managers.run(30.0)
    assert managers.kinds(0) == ["ConnectReply"]
    assert managers.kinds(1) == ["ConnectRequest", "Established"]
    lost = 0 if number == 2 else 1
    assert fabric.log.count(Outcome.LOST) == lost
    assert fabric.log.count(Outcome.LOST, kind) == lost


# -- partitions and crashes ---------------------------------------------------------------------------------------


def test_partition_drops_packets_in_flight() -> None:
    fabric = Fabric(latency=1.0)
    a, b = two(fabric)
    there, back = route(a, *ENDS), route(b, *ENDS[::-1])
    a.wire.send(there, [bytes(16)])
    fabric.run(seconds=0.5)
    fabric.partition("a", "b")
    a.wire.send(there, [bytes(16)])
    b.wire.send(back, [bytes(16)])
    a.wire.send(route(a, ENDS[0], ENDS[0]), [bytes(16)])
    fabric.run()
    assert fabric.log.count(Outcome.PARTITIONED) == 3
    assert (len(received(a)), len(received(b))) == (1, 0), "a host can still reach itself"
    fabric.heal()
    a.wire.send(there, [bytes(16)])
    b.wire.send(back, [bytes(16)])
    fabric.run()
    assert (len(received(a)), len(received(b))) == (1, 1)


def test_one_way_partition_drops_one_direction() -> None:
    fabric = Fabric()
    a, b = two(fabric)
    fabric.partition("a", "b", one_way=True)
    a.wire.send(route(a, *ENDS), [bytes(16)])
    b.wire.send(route(b, *ENDS[::-1]), [bytes(16)])
    fabric.run()
    assert (len(received(a)), len(received(b))) == (1, 0)


def test_crashed_host_is_unreachable() -> None:
    fabric = Fabric()
    managers = Managers(fabric)
    fabric.crash("b")
    managers.connect()
    managers.run(200.0)
    assert managers.kinds(0) == ["Unreachable"]
    assert not managers.events[1]
    assert {entry.outcome for entry in fabric.log} == {Outcome.CRASHED}


def test_crash_stops_all_activity_of_a_host() -> None:
    fabric = Fabric(latency=1.0)
    a, b = two(fabric)
    fired: list[float] = []
    b.provider.runtime.call_at(2.0, fired.append)
    b.wire.send(route(b, *ENDS[::-1]), [bytes(16)])
    a.wire.send(route(a, *ENDS), [bytes(16)])
    fabric.run(0.5)
    fabric.crash("b")
    assert not b.wire.send(route(b, *ENDS[::-1]), [bytes(16)])
    assert not b.wire.is_open
    fabric.run()
    assert not fired
    assert not received(b)
    assert len(received(a)) == 1, "a packet sent before the crash still arrives"
    assert [entry.outcome for entry in fabric.log] == [Outcome.CRASHED, Outcome.DELIVERED, Outcome.CRASHED]


def test_restarted_host_receives_packets() -> None:
    fabric = Fabric(latency=1.0)
    a, old = two(fabric)
    fabric.crash("b")
    new = fabric.host("b", *old.addresses)
    new.wire.open()
    assert new.random.getrandbits(64) != old.random.getrandbits(64)
    a.wire.send(route(a, *ENDS), [bytes(16)])
    fabric.run()
    assert (len(received(old)), len(received(new))) == (0, 1)
    fabric.crash("b")
    heir = fabric.host("c", *old.addresses)
    heir.wire.open()
    a.wire.send(route(a, *ENDS), [bytes(16)])
    fabric.run()
    assert len(received(heir)) == 1


def test_host_names_and_addresses_are_unique() -> None:
    fabric = Fabric()
    fabric.host("a", "10.0.0.1", "fd00::1/48")
    with pytest.raises(ValueError, match="host a already exists"):
        fabric.host("a", "10.0.0.2")
    with pytest.raises(ValueError, match=r"fd00::1 is an address of host a"):
        fabric.host("b", "fd00:0::1")
    with pytest.raises(ValueError, match="no host b"):
        fabric.partition("a", "b")
    with pytest.raises(ValueError, match="no host b"):
        fabric.crash("b")
    assert list(fabric.hosts) == ["a"]
