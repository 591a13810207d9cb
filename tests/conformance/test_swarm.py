"""Swarms of simulations (:mod:`swarm`): some seeds, how they repeat, and that they find what is broken."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rdmacm.proto.cm.engine import Agent
from rdmacm.soft.device.completion import SoftCQ
from rdmacm.soft.device.memory import MemoryTable
from rdmacm.soft.device.multiplexer import QPMultiplexer
from rdmacm.verbs import WC
from swarm.script import Script, draw
from swarm.shrink import shrink
from swarm.world import Violation, simulate

TESTS = Path(__file__).parents[1]
#: A connection without any fault.
PLAIN = Script.parse(
    """
    fabric seed=1 mtu=1500
    0 start host=a
    0 start host=b
    0 listen host=b port=7471 backlog=8
    0 connect n=1 source=a host=b port=7471 server=accept space=TCP closer=both
    """
)


def swarm(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join(paths), PYTHONHASHSEED="7")
    command = [sys.executable, "-m", "swarm", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


#: For a longer run than CI's: 600 are 10,000 connections.
SEEDS = int(os.environ.get("RDMACM_SWARM_SEEDS", "50"))


def test_a_few_seeds() -> None:
    for seed in (1, 2, 3, 8, 9):
        simulate(draw(seed), log_limit=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_swarm_of_connections() -> None:
    found = swarm("--seeds", str(SEEDS), "--jobs", "2")
    assert found.returncode == 0, found.stdout + found.stderr
    counts = re.search(r"(\d+) connections, \d+ of them established, \d+ packets, 0 failures", found.stdout)
    assert counts is not None, found.stdout
    assert int(counts[1]) >= 16 * SEEDS


def test_seed_replays_to_the_byte_in_another_process() -> None:
    result = simulate(draw(7))
    assert result.packets > 100
    assert swarm("--replay", "7").stdout.split()[0] == result.digest


def test_script_is_text() -> None:
    for seed in range(50):
        assert Script.parse(str(draw(seed))) == draw(seed)


def _lose_a_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    add: Callable[[SoftCQ, list[WC]], None] = SoftCQ.add
    monkeypatch.setattr(SoftCQ, "add", lambda cq, found: add(cq, [wc for wc in found if wc.wr_id != 1]))


def _complete_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    add: Callable[[SoftCQ, list[WC]], None] = SoftCQ.add
    monkeypatch.setattr(SoftCQ, "add", lambda cq, found: add(cq, [*found, *found]))


def _keep_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryTable, "remove", lambda table, region: None)


def _keep_queue_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(QPMultiplexer, "detach", lambda mux, qp: None)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_lose_a_completion, r"active side on a: .*wr_id=2, status=<WCStatus.SUCCESS"),
        (_complete_twice, "completes as"),
        (_keep_regions, "memory regions"),
        (_keep_queue_pairs, "queue pairs left"),
    ],
)
def test_broken_promise_is_found(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[pytest.MonkeyPatch], None], text: str
) -> None:
    simulate(PLAIN)
    spoil(monkeypatch)
    with pytest.raises(Violation, match=text):
        simulate(PLAIN)


@pytest.mark.usefixtures("faults_expected")
def test_exception_of_an_engine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def timer(agent: Agent, now: float) -> None:
        raise ValueError

    monkeypatch.setattr(Agent, "timer", timer)
    with pytest.raises(Violation, match=r"internal errors: \{'connection': 1\}"):
        simulate(PLAIN)


def test_failing_script_is_made_short(monkeypatch: pytest.MonkeyPatch) -> None:
    _keep_regions(monkeypatch)

    def fails(script: Script) -> bool:
        try:
            simulate(script, log_limit=0)
        except Violation as error:
            return "memory regions" in str(error)
        return False

    script = draw(2)
    assert fails(script)
    short = shrink(script, fails, 60.0)
    assert [step.name for step in short.steps] == ["start", "start", "connect"] or len(short.steps) <= 4, str(short)
    assert (short.rules, set(short.fabric)) == ((), set())


def test_too_many_answers_to_a_silent_address_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that has asked once and vanished gets three datagrams; without that limit, all repetitions of the REP."""
    crash = Script.parse("0.00003 crash host=a").steps
    script = replace(PLAIN, steps=(*PLAIN.steps, *crash))
    simulate(script)
    monkeypatch.setattr("rdmacm.proto.cm.engine.AMPLIFICATION", 15)
    with pytest.raises(Violation, match="b sent 4 datagrams to an address that sent 1 and no answer"):
        simulate(script)
