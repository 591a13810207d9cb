"""Packets of strangers, 10,000 a second, through real sockets (``dev.py bench flood``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.netns import needs_netns, python_environment

BENCH = Path(__file__).parent.parent.parent / "bench" / "flood.py"


@needs_netns
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kind", "sources"), [("req", "one"), ("req", "many"), ("all", "one"), ("dreq", "many")])
def test_established_traffic_and_newcomers_in_a_flood(kind: str, sources: str) -> None:
    """Other work of the machine can only lower the ratio, so the best of three runs counts.

    Requests are read in batches; other messages wake the server one by one.
    """
    least = 0.8 if kind == "req" else 0.5
    ratios: list[float] = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, str(BENCH), "--json", "--seconds", "4", "--kind", kind, "--sources", sources],
            env={**os.environ, **python_environment()},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        (found,) = json.loads(done.stdout)
        ratios.append(found["ratio"])
        assert all(isinstance(seconds, float) and seconds < 5.0 for seconds in found["newcomers"]), found
        assert found["logged"] == []
        assert found["grown_kib"] < 24 << 10, "the requests that wait, and the memory of those that were seen"
        if kind != "req":  # of these, thousands wait
            assert found["dropped"] > 0.8 * found["received"], found
        if ratios[-1] >= least:
            return
    pytest.fail(f"of the rounds without a flood, {max(ratios):.0%} are left")
