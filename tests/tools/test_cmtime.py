"""``rdmacm cmtime``: the time of every step, serially and concurrently, and the memory of open connections."""

from __future__ import annotations

import errno
import signal
from types import SimpleNamespace
from typing import Any, Self

import pytest

from rdmacm import CmEventType, CmTimeoutError, RdmaError
from rdmacm.errors import cm_error
from rdmacm.explanation import Explanation
from rdmacm.proto import core_choice
from rdmacm.tools import cmtime, connection
from rdmacm.tools.waiting import PeerWait
from support.servers import Run, Server

STEPS = [
    *("create id", "resolve addr", "resolve route", "create qp", "connect", "modify qp", "establish"),
    *("disconnect", "destroy"),
]


@pytest.mark.parametrize("mode", ["serial", "concurrent"])
def test_every_step_of_every_connection_is_timed(run: Run, mode: str) -> None:
    result = run("cmtime", "--local", "-c", "30", f"--{mode}", "--json")
    assert (result.status, result.err) == (0, "")
    found = result.json
    keys = {"server", "core", "connections", "mode", "hold", "steps", "seconds", "connections_per_second", "memory"}
    assert set(found) == keys
    assert found["core"] == core_choice.name
    assert (found["connections"], found["mode"], found["hold"], found["memory"]) == (30, mode, False, None)
    assert [step["name"] for step in found["steps"]] == STEPS
    for step in found["steps"]:
        assert set(step) == {"name", "count", "total_us", "min", "mean", "p50", "p99", "max"}
        assert step["count"] == 30
        assert 0 < step["min"] <= step["p50"] <= step["max"]
    assert found["connections_per_second"] == pytest.approx(30 / found["seconds"], rel=0.01)


@pytest.mark.slow
def test_memory_of_six_hundred_open_connections_is_reported(run: Run) -> None:
    result = run("cmtime", "--local", "--connections", "600", "--concurrent", "--hold", "--json")
    memory = result.json["memory"]
    assert memory["client_bytes"] < 100_000  # the system may take pages away meanwhile
    assert memory["server_bytes"] < 100_000


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_server_runs_until_interrupted(run: Run, address: str) -> None:
    with Server("cmtime", "-b", address, "-p", "0") as server:
        for _ in range(2):
            result = run("cmtime", "-s", address, "-b", address, "-p", str(server.port), "-c", "5", "--hold")
            assert (result.status, result.err) == (0, "")
        lines = result.out.splitlines()
        assert lines[0] == "step             total ms     max ms     min us  us / conn    p50 us    p99 us"
        assert [line[:14] for line in lines[1:3]] == ["create id    :", "bind addr    :"]
        assert {len(line) for line in lines[: 2 + len(STEPS)]} == {78}
        assert len(lines) == 1 + len(STEPS) + 1 + 3
        assert lines[-3] == f"software device {core_choice.description()}"
        assert "5 connections to " in lines[-2]
        assert lines[-1].startswith("memory for each of 5 open at once: client ")
        ended = server.end(signal.SIGINT)
    assert (ended.status, ended.out, ended.err) == (130, "", "")


def test_missing_server_is_reported(run: Run) -> None:
    result = run("cmtime", "-s", "127.0.0.1", "-p", "9", "-c", "3")
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith("rdmacm: connect 127.0.0.1:9: nobody listens on that port [ECONNREFUSED]; try: ")


class Event:
    """An event of a channel, as far as the command reads it."""

    def __init__(self, cmid: object, kind: CmEventType, error: RdmaError | None = None) -> None:
        self.id, self.type, self.error = cmid, kind, error
        self.status = 0 if error is None else -(error.errno or 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("retries", [0, 2])
def test_resolution_that_times_out_is_repeated(retries: int) -> None:
    each = SimpleNamespace(cmid=object())
    calls: list[object] = []
    late = cm_error(errno.ETIMEDOUT, "no answer", "resolve_addr")
    events = [Event(each.cmid, CmEventType.ADDR_ERROR, late) for _ in range(2)]
    events.append(Event(each.cmid, CmEventType.ADDR_RESOLVED))
    channel: Any = SimpleNamespace(get_event=lambda seconds: events.pop(0))
    timer = cmtime._StepTimer(channel, lambda context: pytest.fail("no queue"), PeerWait("peer", 10), 100, retries)
    batch: Any = [each]
    if not retries:
        with pytest.raises(CmTimeoutError, match="no answer"):
            timer.step("resolve addr", batch, calls.append, CmEventType.ADDR_RESOLVED)
    else:
        timer.step("resolve addr", batch, calls.append, CmEventType.ADDR_RESOLVED)
        assert timer.steps["resolve addr"].count == 1
    assert calls == [each] * (1 + retries)


def test_resolution_of_the_server_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def resolve(host: str, *_: object, **__: object) -> tuple[None, Explanation]:
        asked.append(host)
        return None, Explanation(host, "1", "soft", error="neighbour", errno=errno.ETIMEDOUT, message="late")

    monkeypatch.setattr(connection, "resolve", resolve)
    with pytest.raises(CmTimeoutError, match="late"):
        connection.find_server("10.7.0.9", 1, retries=2)
    assert asked == ["10.7.0.9"] * 3


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-s", "x", "--local"], "-s and --local exclude each other"),
        (["--serial", "--concurrent"], "--serial and --concurrent exclude each other"),
        (["-c", "0"], "argument -c/--connections: '0' is not a number from 1 to 100000"),
    ],
)
def test_usage_errors_exit_2(run: Run, argv: list[str], message: str) -> None:
    assert run("cmtime", *argv) == (2, "", f"rdmacm: cmtime: {message}; try: rdmacm cmtime --help\n")
