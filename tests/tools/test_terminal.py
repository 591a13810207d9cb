"""Bold and dim text: on a terminal, unless the user does not want it."""

from __future__ import annotations

import sys

import pytest

from support.servers import Result, Run


@pytest.fixture
def run(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command with a terminal for its standard output."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def on_a_terminal(*argv: str) -> Result:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        return run(*argv)

    return on_a_terminal


def test_headings_are_bold_and_rejected_candidates_dim(run: Run) -> None:
    lines = run("explain", "127.0.0.1", "7471").out.splitlines()
    assert "\x1b[1mroute\x1b[0m" in lines
    assert any(line.startswith("\x1b[2m  no ") for line in lines)
    assert any(line.startswith("  -> ") for line in lines)
    assert run("devices").out.startswith("\x1b[1mDEVICE/PORT ")
    assert run("resolve", "127.0.0.1", "7471").out.startswith("\x1b[2mdestination ")
    assert run("devices", "--help").out.startswith("\x1b[1mNAME\x1b[0m\n")


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_colour_when_disabled(run: Run, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    for argv in (["explain", "::1"], ["devices"], ["getaddrinfo", "::1"], ["devices", "--help"]):
        assert "\x1b" not in run(*argv).out


def test_no_colour_in_json_or_errors(run: Run) -> None:
    for argv in (["explain", "::1", "--json"], ["devices", "--json"], ["resolve", "::1", "1", "--json"]):
        assert "\x1b" not in run(*argv).out
    assert "\x1b" not in run("explain", "x", "--numeric").err
