"""The benchmark of path records runs and reports every measurement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infiniband.fabric import missing
from support.netns import python_environment

BENCH = Path(__file__).parents[2] / "bench" / "sa.py"


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **python_environment(), **environ}
    return subprocess.run(
        [sys.executable, BENCH, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.infiniband
def test_benchmark_reports_every_measurement() -> None:
    if reason := missing("ibsim", "opensm", "saquery"):
        pytest.skip(reason)
    done = run("--hosts", "32", "--paths", "100", "--processes", "1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["hosts"] == 32
    assert min(found.values()) > 0
