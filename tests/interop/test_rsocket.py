"""librdmacm's rsockets on the kernel's device and ours on the software device exchange bytes."""

from __future__ import annotations

import pytest

from interop.machine.run import Result
from interop.scenario import Guest

OURS = "python3 -m rdmacm rstream"
#: Custom tests with checked data: bytes of a transfer, transfers, iterations.
SHAPES = pytest.mark.parametrize(
    "shape", ["-S 64 -C 1 -I 50", "-S 4000 -C 50 -I 3", "-S 300000 -C 20 -I 1"], ids=["short", "middle", "long"]
)
both_families = pytest.mark.parametrize("family", [4, 6], ids=["IPv4", "IPv6"])


def check_tests(done: Result) -> None:
    """Each end writes a line about its test."""
    assert done.status == 0, done.output
    assert "failed" not in done.output
    assert len([line for line in done.output.splitlines() if line.startswith("custom ")]) == 2, done.output


@pytest.mark.cell("rstream: 64 to 300,000 bytes, verified", "passive")
@both_families
@SHAPES
def test_librdmacms_rstream_connects_to_ours(guest: Guest, family: int, shape: str) -> None:
    done = guest.run(
        f"serve_soft {OURS} -b $SOFT{family} {shape} -T v\nrxe rstream -s $SOFT{family} {shape} -T v -T b\nfinish"
    )
    check_tests(done)


@pytest.mark.cell("rstream: 64 to 300,000 bytes, verified", "active")
@both_families
@SHAPES
def test_our_rstream_connects_to_librdmacms(guest: Guest, family: int, shape: str) -> None:
    done = guest.run(
        f"serve_rxe rstream -b $RXE{family} {shape} -T v -T b\nsoft {OURS} $RXE{family} {shape} -T v || exit\nfinish",
    )
    check_tests(done)


def test_librdmacms_rstream_does_not_block(guest: Guest) -> None:
    """Its default: it tries again at once. (With -T a it may take the end of the stream for an error.)"""
    shape = "-S 4000 -C 20 -I 2"
    done = guest.run(f"serve_soft {OURS} -b $SOFT4 {shape} -T v -T a\nrxe rstream -s $SOFT4 {shape} -T v\nfinish")
    check_tests(done)


@SHAPES
def test_the_kernels_provider(guest: Guest, shape: str) -> None:
    """Ours at both ends: each is the server once."""
    done = guest.run(
        f"serve_soft {OURS} -b $SOFT4 {shape} -T v\nrxe {OURS} $SOFT4 {shape} -T v --provider kernel || exit\nfinish"
    )
    check_tests(done)
    done = guest.run(
        f"serve_rxe {OURS} -b $RXE4 {shape} -T v --provider kernel\nsoft {OURS} $RXE4 {shape} -T v || exit\nfinish"
    )
    check_tests(done)


@SHAPES
def test_iwarp(guest: Guest, shape: str) -> None:
    """The kernel's provider on siw, where a message is a WRITE and a SEND, beside librdmacm's rstream."""
    guest.network = "iwarp_network"
    done = guest.run(
        f"serve_rxe {OURS} -b $IWARP4 {shape} -T v --provider kernel\n"
        f"iwarp rstream -s $IWARP4 {shape} -T v -T b || exit\nfinish",
        record=False,
    )
    check_tests(done)
    done = guest.run(
        f"serve_rxe rstream -b $IWARP4 {shape} -T v -T b\n"
        f"iwarp {OURS} $IWARP4 {shape} -T v --provider kernel || exit\nfinish",
        record=False,
    )
    check_tests(done)


@pytest.mark.cell("rcopy: a file of 1,000,003 bytes", "passive")
def test_librdmacms_rcopy_copies_to_ours(guest: Guest) -> None:
    done = guest.run(
        "head -c 1000003 /dev/urandom > /tmp/original\n"
        "serve_soft python3 -m rdmacm rcopy --directory /tmp\n"
        "rxe rcopy /tmp/original $SOFT4:copy || exit\n"
        '[ "$(sha256sum </tmp/original)" = "$(sha256sum </tmp/copy)" ] && echo same'
    )
    assert "same" in done.output, done.output
    assert "1000003 bytes in" in done.output


@pytest.mark.cell("rcopy: a file of 1,000,003 bytes", "active")
def test_our_rcopy_copies_to_librdmacms(guest: Guest) -> None:
    done = guest.run(
        "head -c 1000003 /dev/urandom > /tmp/original\n"
        "serve_rxe rcopy\n"
        "soft python3 -m rdmacm rcopy /tmp/original $RXE4:/tmp/copy || exit\n"
        '[ "$(sha256sum </tmp/original)" = "$(sha256sum </tmp/copy)" ] && echo same'
    )
    assert "same" in done.output, done.output
    assert "1000003 bytes in" in done.output
