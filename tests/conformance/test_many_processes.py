"""Many processes that share the port and are connected to each other, while some of them are killed."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from support import crowd, many_processes, many_qps
from support.clock import REAL, eventually
from support.netns import Host, needs_netns, python_environment
from support.scenario import free_port

PROCESSES = 6
KILLS = 8
#: Up to so many connections work between two kills.
BETWEEN_KILLS = 50


class Member:
    """A process of the group, and the messages it has written."""

    def __init__(self, index: int, ports: list[int], seed: str) -> None:
        self.index = index
        self.process = subprocess.Popen(
            [sys.executable, many_processes.__file__, str(index), json.dumps(ports), seed],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=python_environment(),
        )
        self.pid = self.process.pid
        self.messages: list[list[Any]] = []
        #: By the clock that the processes' own times are of.
        self.born = self.died = float("inf")
        self._rest = b""

    def read(self) -> bool:
        """Read its messages. Returns False at the end of its output."""
        assert self.process.stdout is not None
        chunk = self.process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self.messages.append(json.loads(line))
            if self.messages[-1] == ["ready"]:
                self.born = REAL()
        return bool(chunk)

    def wrote(self, word: str) -> bool:
        return [word] in self.messages

    def kill(self) -> None:
        self.died = REAL()
        self.process.send_signal(signal.SIGKILL)

    def close(self) -> str:
        """End the process. Returns its standard error."""
        self.process.kill()
        return self.process.communicate()[1].decode()


class Processes:
    def __init__(self, seed: int) -> None:
        self.seed = f"{seed}"
        base = free_port()
        self.ports = list(range(base + 20000, base + 20000 + PROCESSES))
        self.all: list[Member] = []
        self.current: dict[int, Member] = {}
        self.selector = selectors.DefaultSelector()
        for index in range(PROCESSES):
            self.start(index)

    def start(self, index: int) -> None:
        member = Member(index, self.ports, f"{self.seed}/{len(self.all)}")
        self.all.append(member)
        self.current[index] = member
        assert member.process.stdout is not None
        self.selector.register(member.process.stdout, selectors.EVENT_READ, member)

    def read_messages(self, until: Callable[[], bool], what: str) -> None:
        """Read messages until a condition holds."""

        def holds() -> bool:
            if not until():
                for key, _ in self.selector.select(0.1):
                    if not key.data.read():
                        self.selector.unregister(key.fileobj)
                return False
            return True

        try:
            eventually(holds)
        except AssertionError:
            raise AssertionError(f"{what}: " + "".join(member.close() for member in self.all)) from None

    def wait_for_all(self, word: str) -> None:
        self.read_messages(
            lambda: all(member.wrote(word) for member in self.current.values()), f"not every process wrote {word}"
        )

    def wait_for_connections(self, count: int) -> None:
        """Wait until so many more connections have worked."""
        count += self.worked()
        self.read_messages(lambda: self.worked() >= count, "too few connections work")

    def worked(self) -> int:
        return sum(message[0] == "worked" for member in self.all for message in member.messages)

    def lived_throughout(self, index: int, since: float, until: float) -> bool:
        """Whether one process listened on a port during the whole interval."""
        return any(member.index == index and member.born < since and until < member.died for member in self.all)

    def close(self) -> list[str]:
        self.selector.close()
        return [f"{member.index}: {stderr}" for member in self.all if (stderr := member.close())]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_killed_processes_do_not_disturb_the_others(seed: int) -> None:
    random = Random(seed)
    processes = Processes(seed)
    try:
        processes.wait_for_all("ready")
        for _ in range(KILLS):
            processes.wait_for_connections(random.randint(1, BETWEEN_KILLS))
            index = random.randrange(PROCESSES)
            processes.current[index].kill()
            processes.start(index)
        processes.wait_for_connections(BETWEEN_KILLS)
        processes.wait_for_all("ready")
        for member in processes.current.values():
            assert member.process.stdin is not None
            member.process.stdin.write(b"enough\n")
            member.process.stdin.flush()
        processes.wait_for_all("end")
    finally:
        stderrs = processes.close()
    worked = failed = 0
    for member in processes.all:
        for what, index, _, *rest in (message for message in member.messages if len(message) > 1):
            assert what != "wrong", f"{member.index} got wrong data from {index}: {rest}"
            worked += what == "worked"
            failed += what == "failed"
            if what == "failed":
                since, until, rounds, reason = rest
                assert not processes.lived_throughout(index, since, until), (
                    f"{member.index} lost {index} after {until - since:.3f} s and {rounds} rounds: {reason}"
                )
    assert not stderrs, "\n".join(stderrs)
    assert worked > 50, (worked, failed)
    assert failed, "no process noticed that others were killed"


#: For a larger crowd than CI's: 1,000 take two minutes, and 8 GB of memory.
CROWD = int(os.environ.get("RDMACM_CROWD", "300"))


@pytest.mark.slow
@needs_netns
@pytest.mark.timeout(300)
def test_crowd_shares_the_port() -> None:
    """All open the device at once and talk to each other; the slots of those that are killed are used again."""
    count, killed = CROWD, CROWD // 10
    with Host() as host:
        told = json.loads(host.python([crowd.__file__, str(count), str(killed), "1"], timeout=300).stdout)
    assert len(set(told["slots"])) == count
    assert sorted(told["reused"]) == sorted(told["killed"])
    assert len(told["opened"]) == count + killed
    assert len(told["talked"]) == count // 2 + killed


@pytest.mark.slow
@needs_netns
def test_process_takes_more_than_its_share_of_queue_pairs() -> None:
    with Host() as host:
        told = json.loads(host.python([many_qps.__file__, "4000"], timeout=60).stdout)
    for once in told:  # the second time, after all was closed: the slots of the first time are free
        assert len(once["slots"]) == 2
        assert sum(once["used"].values()) >= 2
        assert set(map(int, once["used"])) == set(once["slots"])
