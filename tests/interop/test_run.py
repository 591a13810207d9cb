"""C programs on our library, started by ``rdmacm run``, beside the same programs on the kernel's device."""

from __future__ import annotations

import pytest

from interop.scenario import Guest

ROW = "librdmacm's programs on our library (`rdmacm run`): rping, ucmatose, udaddy, rdma_server, rdma_xserver"
RUN = "python3 -m rdmacm run --"
#: The commands of server and client; %s is the server's address.
PROGRAMS = {
    "rping": ("rping -s -a %s -C 5 -V -S 4000", "rping -c -a %s -C 5 -V -S 4000"),
    "ucmatose": ("ucmatose -b %s -C 20 -S 3000", "ucmatose -s %s -C 20 -S 3000"),
    "udaddy": ("udaddy -b %s", "udaddy -s %s"),
    "rdma_server": ("rdma_server -s %s", "rdma_client -s %s"),
    "rdma_xserver": ("rdma_xserver", "rdma_xclient -s %s"),
    "rstream": ("rstream -b %s -S 300000 -C 4 -I 1 -T v -T b", "rstream -s %s -S 300000 -C 4 -I 1 -T v -T b"),
    "riostream": ("riostream -b %s -S 4000 -C 20 -I 3 -T v", "riostream -s %s -S 4000 -C 20 -I 3 -T v"),
}
#: These serve IPv4 alone.
IPV4_ALONE = ("rdma_xserver",)
pytestmark = pytest.mark.parametrize(
    ("program", "family"),
    [
        pytest.param(program, family, id=f"{program}-IPv{family}")
        for program in PROGRAMS
        for family in (4, 6)
        if family == 4 or program not in IPV4_ALONE
    ],
)


def commands(program: str, address: str) -> tuple[str, str]:
    server, client = PROGRAMS[program]
    return server.replace("%s", address), client.replace("%s", address)


@pytest.mark.cell(ROW, "passive")
def test_our_server_serves_the_kernels_client(guest: Guest, program: str, family: int) -> None:
    server, client = commands(program, f"$SOFT{family}")
    done = guest.run(f"serve_soft {RUN} {server}\nrxe {client} || exit\nfinish")
    assert done.status == 0, done.output


@pytest.mark.cell(ROW, "active")
def test_our_client_talks_to_the_kernels_server(guest: Guest, program: str, family: int) -> None:
    server, client = commands(program, f"$RXE{family}")
    done = guest.run(f"serve_rxe {server}\nsoft {RUN} {client} || exit\nfinish")
    assert done.status == 0, done.output
