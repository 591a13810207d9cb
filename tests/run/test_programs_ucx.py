"""UCX's ucx_perftest(1) on the library, over RC and over UD."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.clock import eventually
from support.run_command import datagrams, is_listening, running, started

ITERATIONS = 50
PORT = 13337
DEVICE = "soft_lo:1"
#: By transport: its tests of UCT, those of UCP, and what UCX_TLS has to be for UCP, which connects RC by UD.
RC, UD = "rc_verbs", "ud_verbs"
UCT = {
    RC: (
        "am_lat",
        "am_bw -D zcopy -s 8192",
        "put_lat",
        "put_bw -D zcopy -s 65536",
        "get -D bcopy",
        "add_mr",
        "fadd",
        "cswap",
    ),
    UD: ("am_lat", "am_bw -D zcopy -s 1000"),
}
UCP_TRANSPORTS = {RC: "rc_v", UD: UD}
UCP = (
    *("tag_lat", "tag_bw -s 100000", "tag_sync_lat", "tag_lat -U", "stream_lat", "stream_bw -s 100000"),
    *("ucp_put_lat", "ucp_put_bw -s 100000", "ucp_get -s 100000", "ucp_add", "ucp_fadd", "ucp_swap", "ucp_cswap"),
    *("ucp_am_lat", "ucp_am_bw -s 100000"),
)
#: Programs that sleep until there is a completion.
SLEEPING = ("tag_lat -E sleep -I", "stream_bw -s 100000 -E sleep -I")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("ucx_perftest") is None, reason="needs ucx-utils"),
    pytest.mark.parametrize("transport", [RC, UD]),
]


def measure(library: Path, tests: tuple[str, ...], folder: Path, options: str, **variables: str) -> None:
    """Run tests, all in one process on each side, and assert that their messages were sent by UDP."""
    batch, names = folder / "batch", [f"test{number}" for number in range(len(tests))]
    lines = (f"{name} -t {test} -n {ITERATIONS} -w 0 {options}\n" for name, test in zip(names, tests, strict=True))
    batch.write_text("".join(lines))
    command = ("ucx_perftest", "-p", str(PORT), "-b", str(batch), "-f")
    before = datagrams()
    with started(library, *command, **variables):
        eventually(lambda: is_listening(PORT))
        printed = running(library, *command, "127.0.0.1", **variables)
    assert [line.split()[0] for line in printed.splitlines() if line.split()[0] in names] == names, printed[-4000:]
    assert datagrams() - before >= ITERATIONS * len(tests)


def test_uct(library: Path, tmp_path: Path, transport: str) -> None:
    measure(library, UCT[transport], tmp_path, f"-x {transport} -d {DEVICE}")


@pytest.mark.parametrize("tests", [pytest.param(UCP, id="polling"), pytest.param(SLEEPING, id="sleeping")])
def test_ucp(library: Path, tmp_path: Path, transport: str, tests: tuple[str, ...]) -> None:
    measure(library, tests, tmp_path, "", UCX_TLS=UCP_TRANSPORTS[transport], UCX_NET_DEVICES=DEVICE)


def test_ucx_info(library: Path, transport: str) -> None:
    assert f"#      Transport: {transport}\n#         Device: {DEVICE}\n" in running(library, "ucx_info", "-d")
