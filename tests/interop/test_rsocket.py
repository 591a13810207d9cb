"""librdmacm's rsockets on the kernel's device and ours on the software device exchange bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from interop.machine.run import Result
from interop.scenario import Guest

OURS = "python3 -m rdmacm rstream"
#: Custom tests with checked data: bytes of a transfer, transfers, iterations.
SHORT, MIDDLE, LONG = "-S 64 -C 1 -I 50", "-S 4000 -C 50 -I 3", "-S 300000 -C 4 -I 1"
SHAPES = pytest.mark.parametrize("shape", [SHORT, LONG], ids=["short", "long"])
#: The shape does not depend on the family of the address: IPv6 has one of them.
both_families = pytest.mark.parametrize(
    ("family", "shape"),
    [
        pytest.param(4, SHORT, id="IPv4-short"),
        pytest.param(4, MIDDLE, id="IPv4-middle"),
        pytest.param(4, LONG, id="IPv4-long"),
        pytest.param(6, MIDDLE, id="IPv6"),
    ],
)


def check_tests(done: Result) -> None:
    """Each end writes a line about its test."""
    assert done.status == 0, done.output
    assert "failed" not in done.output
    assert len([line for line in done.output.splitlines() if line.startswith("custom ")]) == 2, done.output


@pytest.mark.cell("rstream: 64 to 300,000 bytes, verified", "passive")
@both_families
def test_librdmacms_rstream_connects_to_ours(guest: Guest, family: int, shape: str) -> None:
    done = guest.run(
        f"serve_soft {OURS} -b $SOFT{family} {shape} -T v\nrxe rstream -s $SOFT{family} {shape} -T v -T b\nfinish"
    )
    check_tests(done)


@pytest.mark.cell("rstream: 64 to 300,000 bytes, verified", "active")
@both_families
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


# -- mapped memory ---------------------------------------------------------------------------------------------

OUR_RIOSTREAM = "python3 -m rdmacm riostream"


@pytest.mark.cell("riostream: 64 to 300,000 bytes, verified", "passive")
@both_families
def test_librdmacms_riostream_writes_to_ours(guest: Guest, family: int, shape: str) -> None:
    done = guest.run(
        f"serve_soft {OUR_RIOSTREAM} -b $SOFT{family} {shape} -T v\n"
        f"rxe riostream -s $SOFT{family} {shape} -T v -T b\nfinish"
    )
    check_tests(done)


@pytest.mark.cell("riostream: 64 to 300,000 bytes, verified", "active")
@both_families
def test_our_riostream_writes_to_librdmacms(guest: Guest, family: int, shape: str) -> None:
    done = guest.run(
        f"serve_rxe riostream -b $RXE{family} {shape} -T v -T b\n"
        f"soft {OUR_RIOSTREAM} $RXE{family} {shape} -T v || exit\nfinish",
    )
    check_tests(done)


# -- datagrams -------------------------------------------------------------------------------------------------

OUR_UDPONG = "python3 -m rdmacm udpong"
#: Tests with and without echo; on a link with an MTU of 1500 bytes, 1,000 are the most with a header for IPv6.
ECHOED, COUNTED, ECHOED_LONG = "-S 16 -C 50 -T e", "-S 500 -C 200", "-S 1000 -C 50 -T e"
PONGS = pytest.mark.parametrize("pong", [ECHOED, COUNTED], ids=["echoed", "counted"])
both_pongs = pytest.mark.parametrize(
    ("family", "pong"),
    [
        pytest.param(4, ECHOED, id="IPv4-echoed"),
        pytest.param(4, COUNTED, id="IPv4-counted"),
        pytest.param(6, ECHOED_LONG, id="IPv6-echoed"),
    ],
)


@pytest.fixture
def their_udpong(guest: Guest) -> str:
    """librdmacm's udpong, with the address handles that a RoCE port needs, and an rpoll that ends."""
    if not Path("/usr/include/infiniband/verbs.h").exists():
        pytest.skip("libibverbs-dev is needed")
    return f"env LD_PRELOAD={guest.preloaded('mended_rsocket', 'ibverbs')} stdbuf -oL udpong"


def check_pong(done: Result) -> None:
    """The client writes a line about its test, and the server one about the client."""
    assert done.status == 0, done.output
    lines = done.output.splitlines()
    assert len([line for line in lines if line.startswith("custom ")]) == 1, done.output
    assert any(line.startswith("client login from ") for line in lines), done.output


@pytest.mark.cell("udpong: datagrams of 16 to 1,000 bytes", "passive")
@both_pongs
def test_librdmacms_udpong_asks_ours(guest: Guest, their_udpong: str, family: int, pong: str) -> None:
    done = guest.run(
        f"pong_soft {OUR_UDPONG} -b $SOFT{family}\n"
        f"rxe {their_udpong} -s $SOFT{family} {pong} -T b || exit\ncat /tmp/server.out"
    )
    check_pong(done)


@pytest.mark.cell("udpong: datagrams of 16 to 1,000 bytes", "active")
@both_pongs
def test_our_udpong_asks_librdmacms(guest: Guest, their_udpong: str, family: int, pong: str) -> None:
    done = guest.run(
        f"pong_rxe {their_udpong} -b $RXE{family} -T b\nsoft {OUR_UDPONG} $RXE{family} {pong} || exit\n"
        "cat /tmp/server.out"
    )
    check_pong(done)


@PONGS
def test_datagrams_of_the_kernels_provider(guest: Guest, pong: str) -> None:
    """Ours at both ends: each is the server once."""
    done = guest.run(
        f"pong_soft {OUR_UDPONG} -b $SOFT4\nrxe {OUR_UDPONG} $SOFT4 {pong} --provider kernel || exit\n"
        "cat /tmp/server.out"
    )
    check_pong(done)
    done = guest.run(
        f"pong_rxe {OUR_UDPONG} -b $RXE4 --provider kernel\nsoft {OUR_UDPONG} $RXE4 {pong} || exit\ncat /tmp/server.out"
    )
    check_pong(done)
