"""The network of a lab: what it may be, the names and addresses of its hosts, the switch that loses frames."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from rdmacm.lab import Wiring
from rdmacm.lab.crew import Task
from rdmacm.lab.switch import Switch
from rdmacm.lab.wiring import check_names, hosts_file

A, B, C, ALL = (bytes.fromhex(text) for text in ("020000000001", "020000000002", "020000000003", "ffffffffffff"))


@pytest.mark.parametrize(
    "wrong", [{"mtu": 1279}, {"mtu": 65001}, {"loss": 1.1}, {"loss": float("nan")}, {"delay": -1}, {"delay": 61}]
)
def test_values_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"the {next(iter(wrong))}|the MTU"):
        Wiring(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [[], ["a", "A"], ["localhost"], ["a b"], ["1a"], ["a-"], ["a" * 64], ["h"] * 201])
def test_names_that_hosts_cannot_have_are_refused(names: Sequence[str]) -> None:
    with pytest.raises(ValueError):
        check_names(names)


def test_names_lead_to_addresses() -> None:
    text = hosts_file(["h1", "h2"], "127.0.0.1 localhost\n10.1.1.1 other\n")
    assert text.splitlines() == [
        *("10.77.0.1 h1", "fd77::1 h1", "10.77.0.2 h2", "fd77::2 h2"),
        *("127.0.0.1 localhost", "10.1.1.1 other"),
    ]
    assert "127.0.0.1 localhost" in hosts_file(["h1"], "").splitlines()


def test_commands_of_hosts() -> None:
    assert Task.parse("h1: ls -l") == Task("h1", "ls -l")
    assert Task.parse(" h1 &: echo a: b ") == Task("h1", "echo a: b", True)
    for text in ("ls", "h1:", "h 1: ls", ": ls", "h1&&: ls"):
        with pytest.raises(ValueError, match=re.escape(repr(text))):
            Task.parse(text)


class TestSwitch:
    def test_frames_go_where_their_address_was_seen(self) -> None:
        switch = Switch(3, Wiring())
        switch.take(0, ALL + A, 0.0)  # too short for a frame
        assert [*switch.due(0.0)] == []
        broadcast, answer, unknown = ALL + A + b"xx", A + B + b"yy", C + A + b"zz"
        switch.take(0, broadcast, 0.0)
        assert [*switch.due(0.0)] == [(1, broadcast), (2, broadcast)]
        switch.take(1, answer, 0.0)
        assert [*switch.due(0.0)] == [(0, answer)]
        switch.take(0, unknown, 0.0)
        assert [*switch.due(0.0)] == [(1, unknown), (2, unknown)]

    def test_frames_are_held_up_in_order(self) -> None:
        switch = Switch(2, Wiring(delay=0.5))
        frames = [B + A + bytes([number, 0]) for number in range(3)]
        for number, frame in enumerate(frames):
            switch.take(0, frame, number * 0.1)
        assert switch.next_time() == 0.5
        assert [frame for _, frame in switch.due(0.6)] == frames[:2]
        assert [frame for _, frame in switch.due(9)] == frames[2:]
        assert switch.next_time() is None

    def test_a_seed_decides_which_are_lost(self) -> None:
        def arrived(seed: int, others: int) -> list[int]:
            switch = Switch(3, Wiring(loss=0.3, seed=seed))
            switch.take(1, ALL + B + b"xx", 0.0)
            switch.take(2, ALL + C + b"xx", 0.0)
            for number in range(200):
                switch.take(0, B + A + bytes([number, 0]), 0.0)
                for _ in range(others):
                    switch.take(1, C + B + b"xx", 0.0)
            return [frame[12] for port, frame in switch.due(0.0) if port == 1 and frame[6:12] == A]

        assert arrived(1, 0) == arrived(1, 3), "what goes to another host changes nothing"
        assert arrived(1, 0) != arrived(2, 0)
        assert 100 < len(arrived(1, 0)) < 180
