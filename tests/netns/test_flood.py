"""Packets of strangers, 10,000 a second, through real sockets (``dev.py bench flood``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.netns import needs_netns, python_environment

BENCH = Path(__file__).parent.parent.parent / "bench" / "flood.py"
#: The tests look at outcomes, not at rates.
SHORT = ("--seconds", "1", "--newcomers", "1")


def flood(kind: str, sources: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--json", "--kind", kind, "--sources", sources, *SHORT],
        env={**os.environ, **python_environment()},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any]
    (found,) = json.loads(done.stdout)
    return found


@needs_netns
@pytest.mark.slow
@pytest.mark.wallclock
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "sources"), [("req", "one"), ("req", "many"), ("all", "many")])
def test_established_traffic_and_newcomers_in_a_flood(kind: str, sources: str) -> None:
    """Without protection, newcomers are refused.  How much of the rate is left, ``dev.py bench flood`` measures."""
    found = flood(kind, sources)
    assert found["flood"] > 0, found
    assert all(isinstance(seconds, float) for seconds in found["newcomers"]), found
    assert found["logged"] == []
    assert found["grown_kib"] < 40 << 10, "512 connections, requests that wait, and what was seen"
    if kind != "req":  # of these, thousands wait
        assert found["dropped"] > 0.8 * found["received"], found
