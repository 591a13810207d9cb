"""librdmacm's rping on the kernel's device and ours on the software device ping each other."""

from __future__ import annotations

import pytest

from interop.machine.run import Result
from interop.scenario import Guest

OURS = "python3 -m rdmacm rping"
EXAMPLE = "python3 -W error /project/examples/rping.py"
SIZES = pytest.mark.parametrize("size", [64, pytest.param(4000, marks=pytest.mark.debian_kernel), 20000])
pytestmark = pytest.mark.parametrize("family", [4, 6], ids=["IPv4", "IPv6"])


def pings(output: str, said: str) -> list[str]:
    """The first characters of the lines of data. The C program's last message may interrupt a line."""
    return [line.removeprefix(said)[:40] for line in output.splitlines() if line.startswith(said)]


def check_three_pings(done: Result) -> None:
    assert done.status == 0, done.output
    assert "data mismatch" not in done.output
    sent, received = pings(done.output, "ping data: "), pings(done.output, "server ping data: ")
    assert len(sent) == 3, done.output
    assert received == sent


@pytest.mark.cell("rping: 64, 4,000 and 20,000 bytes, verified", "passive")
@SIZES
def test_librdmacms_client_pings_our_server(guest: Guest, family: int, size: int) -> None:
    """-V compares the data on the client's side; -v prints it on both."""
    done = guest.run(
        f"serve_soft {OURS} -s -a $SOFT{family} -S {size} -C 3 -v -V\n"
        f"rxe rping -c -a $SOFT{family} -S {size} -C 3 -v -V\n"
        "finish"
    )
    check_three_pings(done)


@pytest.mark.cell("rping: 64, 4,000 and 20,000 bytes, verified", "active")
@SIZES
def test_our_client_pings_librdmacms_server(guest: Guest, family: int, size: int) -> None:
    done = guest.run(
        f"serve_rxe rping -s -a $RXE{family} -S {size} -C 3 -v -V\n"
        f"soft {OURS} -c -a $RXE{family} -S {size} -C 3 -v -V || exit\n"
        "finish_rping"
    )
    check_three_pings(done)


def test_librdmacms_client_pings_the_example(guest: Guest, family: int) -> None:
    done = guest.run(f"serve_soft {EXAMPLE} -s -a $SOFT{family} -v\nrxe rping -c -a $SOFT{family} -C 3 -v -V\nfinish")
    check_three_pings(done)


def test_the_example_pings_librdmacms_server(guest: Guest, family: int) -> None:
    done = guest.run(
        f"serve_rxe rping -s -a $RXE{family} -C 3 -v -V\n"
        f"soft {EXAMPLE} -c -a $RXE{family} -C 3 -v || exit\n"
        "finish_rping"
    )
    check_three_pings(done)
