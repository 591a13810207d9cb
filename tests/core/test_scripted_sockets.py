"""What sockets do that fail or return nonsense: the wire of the compiled core counts and repairs as that in Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.scripted_program import CUT, GRO_OF_5, GRO_TOO_LONG, NO_CONTROL, READ, SINGLE, SIZE, TRAIN
from rdmacm.proto.core_choice import compiled
from support.netns import python_environment

pytestmark = [
    pytest.mark.skipif(compiled is None, reason="the compiled core is not built (python3 dev.py core)"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
]

SMALL, ONE_TRAIN, FINE = 64, 8192, 0
#: The name of a case, the errors that come next, what is wrong with the datagram that is read next, the bytes of the
#: WRITE that meets them; and what is counted, and whether trains are sent after it.
CASES: list[tuple[str, list[tuple[int, str]], int, int, dict[str, int], bool]] = [
    ("nothing", [], FINE, SIZE, {}, True),
    ("a report of an earlier packet", [(SINGLE, "ECONNREFUSED")], FINE, SMALL, {}, True),
    (
        "reports of three packets",
        [(SINGLE, c) for c in ("EHOSTUNREACH", "ECONNREFUSED", "EPERM")],
        FINE,
        SMALL,
        {},
        True,
    ),
    (
        "a fourth report",
        [(SINGLE, code) for code in ("EHOSTUNREACH", "ECONNREFUSED", "EPERM", "ENETUNREACH")],
        *(FINE, SMALL, {"ENETUNREACH": 1}, True),
    ),
    ("refused twice", [(SINGLE, "EPERM")] * 2, FINE, SMALL, {"EPERM": 1}, True),
    ("no room for a moment", [(SINGLE, "EAGAIN")], FINE, SMALL, {}, True),
    ("no room", [(SINGLE, "EAGAIN")] * 2, FINE, SMALL, {"no_room": 1}, True),
    ("no buffers", [(SINGLE, "ENOBUFS")] * 2, FINE, SMALL, {"no_room": 1}, True),
    ("packets too long for the path", [(TRAIN, "EMSGSIZE")] * 2, FINE, SIZE, {"trains_cut": 1}, True),
    (
        "a train whose packets are refused",
        [(TRAIN, "EINVAL"), (TRAIN, "EINVAL"), (SINGLE, "EPERM"), (SINGLE, "EPERM")],
        *(FINE, SIZE, {"trains_cut": 1, "EPERM": 1}, True),
    ),
    ("a train that is lost", [(TRAIN, "ENOBUFS")] * 2, FINE, SIZE, {"no_room": 1}, True),
    ("three reports before a datagram", [(READ, "ECONNREFUSED")] * 3, FINE, SMALL, {}, True),
    ("more reports before a datagram", [(READ, "ECONNREFUSED")] * 4, FINE, SMALL, {"ECONNREFUSED": 1}, True),
    ("a datagram without its address", [], NO_CONTROL, SMALL, {"short": 1}, True),
    ("a datagram without a header", [], CUT, SMALL, {"short": 1}, True),
    ("a train of packets without a header", [], GRO_OF_5, SMALL, {"short": 4}, True),
    ("a train of one packet", [], GRO_TOO_LONG, SMALL, {}, True),
    # The last: all connections to a peer share the path.
    ("no trains on the path", [(TRAIN, "EIO")] * 2, FINE, ONE_TRAIN, {"trains_cut": 1}, False),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("scripted") / "scripted_sockets.so"
    source = Path(__file__).with_name("scripted_sockets.c")
    subprocess.run(["gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True)
    return made


@pytest.fixture(scope="module", params=["c", "python"])
def found(request: pytest.FixtureRequest, library: Path) -> dict[str, Any]:
    cases = json.dumps([case[:4] for case in CASES])
    program = Path(__file__).with_name("scripted_program.py")
    preload = ":".join([*filter(None, [os.environ.get("LD_PRELOAD")]), str(library)])  # the sanitizer's comes first
    environment = python_environment({"LD_PRELOAD": preload, "RDMACM_CORE": request.param})
    done = subprocess.run(
        [sys.executable, program, cases], env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(("name", "counted", "has_trains"), [(name, *rest) for name, _, _, _, *rest in CASES])
def test_sockets_that_fail(found: dict[str, Any], name: str, counted: dict[str, int], has_trains: bool) -> None:
    assert found[name] == [counted, 0, has_trains]
