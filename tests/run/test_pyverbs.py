"""rdma-core's own tests, which are in Python, on the library."""

from __future__ import annotations

import gzip
import re
import shutil
from pathlib import Path

import pytest

from support.netns import needs_netns, two_hosts
from support.run_command import datagrams, running, started

#: pyverbs is made for this one.
PYTHON = "/usr/bin/python3"
#: As Debian's python3-pyverbs has them: some are compressed.
TESTS = Path("/usr/share/doc/rdma-core/tests")
#: Those of adapters.
LEFT_OUT = ("test_cuda", "test_efa", "test_mlx5")
#: What the device does not have, as the tests call it; rdma_rxe has none of it either.
MISSING = (
    r"ODP is not supported|no huge pages|[Dd]evice memory is not supported|dma-?buf|Parent Domain is not supported|"
    r"Raw Packet QP|QP type 8 is not|Extended CQ is not supported|Importing a device is not|device real time"
)


def unpack(folder: Path) -> None:
    for path in TESTS.iterdir():
        if path.name.startswith(LEFT_OUT):
            continue
        if path.suffix == ".gz":
            (folder / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        else:
            shutil.copy(path, folder)


@needs_netns
@pytest.mark.slow
@pytest.mark.skipif(not TESTS.is_dir(), reason="needs python3-pyverbs, with its documentation")
def test_rdma_cores_own_tests_pass(library: Path, tmp_path: Path) -> None:
    """On a device that is not that of loopback: there, a bound id has no device, which pyverbs takes for granted."""
    unpack(tmp_path)
    with two_hosts() as net, net.a.enter():
        before = datagrams()
        command = ("env", "-u", "PYTHONPATH", PYTHON, str(tmp_path / "run_tests.py"))
        with started(library, *command, "-v", "--dev", f"soft_{net.va.name}") as program:
            printed, _ = program.communicate(timeout=100)
        assert datagrams() - before > 1000
        failed = re.findall(r"^(?:ERROR|FAIL): (\w+) \(", printed, re.MULTILINE)
        assert program.returncode == 0 or 0 < len(failed) <= 2, printed[-4000:]
        # Some send before the other player has posted a receive, and do not repeat that: on a busy machine they fail.
        for name in failed:
            running(library, *command, "-k", name, "--dev", f"soft_{net.va.name}")
    (count,) = re.findall(r"^Ran (\d+) tests", printed, re.MULTILINE)
    reasons = re.findall(r"skipped ['\"](.*)['\"]$", printed, re.MULTILINE)
    assert [reason for reason in reasons if not re.search(MISSING, reason)] == []
    assert int(count) - len(reasons) > 100
