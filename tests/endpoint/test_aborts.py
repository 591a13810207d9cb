"""After clients that abort at any step of the handshake, a listener of the software device serves the next one.

``RDMACM_ABORTS`` and ``RDMACM_ABORTS_SEED`` are those of ``interop/test_aborts.py``, which does the same with the
kernel's devices.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from interop.abort_servers import SERVERS

ABORTS = os.environ.get("RDMACM_ABORTS", "50")
SEED = os.environ.get("RDMACM_ABORTS_SEED", "1")
LONGEST = 300 + int(ABORTS)
LARGE = ["vanish"] if "RDMACM_ABORTS" in os.environ else []


@pytest.mark.timeout(LONGEST + 30)
@pytest.mark.slow
@pytest.mark.parametrize("kind", SERVERS)
def test_the_next_client_is_served_and_nothing_is_left_of_the_others(kind: str) -> None:
    command = [sys.executable, "-m", "interop.aborts", "soft", "127.0.0.1", kind, SEED, ABORTS, *LARGE]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=LONGEST)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "served after each batch; the counts are as before" in done.stdout
