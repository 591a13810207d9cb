"""A thousand connections open at once between two processes; ``dev.py bench connections`` does it with ten thousand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.netns import python_environment

COUNT = 1000
SCRIPT = Path(__file__).parent.parent / "bench" / "connections.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_thousand_open_connections_need_no_descriptors_of_their_own() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), str(COUNT), "--json"],
        env={**os.environ, **python_environment()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["answer_seconds"] < 5, "both ends answer while all connections are open"
    for side in (found["client"], found["server"]):
        before, during, after = side["before"], side["open"], side["after"]
        assert (during["connections"], during["queue_pairs"]) == (COUNT, COUNT)
        assert (after["connections"], after["queue_pairs"]) == (0, 0)
        # Some descriptors are opened when they are first needed, for waiting and for passing requests on.
        assert max(during["descriptors"], after["descriptors"]) < before["descriptors"] + 20
        assert max(during["timers"], after["timers"]) < 5 * COUNT, "stopped timers do not accumulate"
        assert side["bytes_per_connection"] < 20_000
