"""What ``rdmacm check`` says of partitions: two ports of InfiniBand that share none have no path."""

from __future__ import annotations

from typing import Any, cast

import pytest

from infiniband.sites import Virtual
from infiniband.test_ipoib import IpoibHost
from rdmacm.check.findings import Sign, Step
from rdmacm.check.judging import judge_resolution
from rdmacm.check.measured import Target
from rdmacm.check.measuring import Measurer
from rdmacm.testing import MemoryNetwork

DEFAULT = (0xFFFF,)
NO_PATH = "the subnet administrator of HostA port 1 knows no path"


@pytest.mark.parametrize(
    ("here", "there", "text", "command"),
    [
        (DEFAULT, DEFAULT, "", ""),
        ((0x7FFF,), DEFAULT, "", ""),
        ((0x7FFF,), (0x7FFF,), NO_PATH, "one of them as a full member"),
        (DEFAULT, (0x8001,), NO_PATH, "both ports are in one partition"),
        ((0x8001,), DEFAULT, "P_Key 0xffff of ib0 is not in the table of HostA: 0x8001", "a port in that partition"),
    ],
)
def test_partitions(here: tuple[int, ...], there: tuple[int, ...], text: str, command: str) -> None:
    site = Virtual()
    with site.host("HostA", MemoryNetwork()) as a, site.host("HostB", MemoryNetwork()) as b:
        one, two = IpoibHost(a, 1), IpoibHost(b, 2)
        one.knows(two)
        site.subnet.change_port("HostA", pkeys=here)
        site.subnet.change_port("HostB", pkeys=there)
        measurer = Measurer(Target(two.ip), cast("Any", one.provider), None, 1.0, 1)
        last = judge_resolution(measurer.measure_resolution())[-1]
    if not text:
        assert (last.step, last.sign) == (Step.NEIGHBOUR, Sign.GOOD)
        return
    assert (last.step, last.sign, last.rule) == (Step.ROUTE, Sign.BAD, "R2")
    assert text in last.meaning
    assert command in last.command


def test_silent_administrator() -> None:
    site = Virtual()
    with site.host("HostA", MemoryNetwork()) as a, site.host("HostB", MemoryNetwork()) as b:
        one, two = IpoibHost(a, 1), IpoibHost(b, 2)
        one.knows(two)
        site.end_administrator()
        measurer = Measurer(Target(two.ip), cast("Any", one.provider), None, 1.0, 1)
        last = judge_resolution(measurer.measure_resolution())[-1]
    assert (last.step, last.sign, last.rule) == (Step.ROUTE, Sign.BAD, "R1")
    assert "did not respond" in last.meaning
