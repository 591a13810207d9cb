"""The tools on the kernel's devices, by the provider ``kernel``, with librdmacm's tools and with themselves."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest

from interop.scenario import Guest
from interop.test_mckey import send
from interop.test_rping import check_three_pings

OURS = "env RDMACM_PROVIDER=kernel python3 -m rdmacm"
FAMILIES = pytest.mark.parametrize("family", [4, 6], ids=["IPv4", "IPv6"])
#: The programs of the server and of the client, by the end that is ours; the other is librdmacm's.
ENDS = {"passive": (OURS, ""), "active": ("", OURS), "both": (OURS, OURS)}


class Device(NamedTuple):
    """A device, or two that are connected."""

    #: The command that makes the network.
    network: str
    #: The server's address without its family, and the command that runs the client.
    address: str
    client: str


DEVICES = {"rdma_rxe": Device("network", "$RXE", "rxe"), "siw": Device("iwarp_network", "$IWARP", "iwarp")}


def row(device: str, what: str) -> str:
    """The name of a row of the table."""
    return f"the kernel's provider on {device}: {what}"


def ends(what: str, *devices: str) -> pytest.MarkDecorator:
    """A test for each of these devices and each end that is ours, which the table counts in a row for each device."""
    return pytest.mark.parametrize(
        ("device", "ours"),
        [
            pytest.param(device, ours, marks=pytest.mark.cell(row(device, what), ours))
            for device in devices
            for ours in ENDS
        ],
    )


def exchange(guest: Guest, device: str, ours: str, family: int, server: str, client: str) -> str:
    """The script of a server and its client; the client's address is written ``@``."""
    used, (serving, connecting) = DEVICES[device], ENDS[ours]
    guest.network = used.network
    address = f"{used.address}{family}"
    return (
        f"serve_rxe {serving} {server.replace('@', address)} || exit\n"
        f"{used.client} {connecting} {client.replace('@', address)}"
    )


@FAMILIES
@ends("rping and cmtime", "rdma_rxe", "siw")
def test_rping(guest: Guest, family: int, device: str, ours: str) -> None:
    arguments = "-a @ -S 20000 -C 3 -v -V -p 7174"
    script = exchange(guest, device, ours, family, f"rping -s {arguments}", f"rping -c {arguments}")
    check_three_pings(guest.run(f"{script}\nfinish_rping", record=False))


@FAMILIES
@ends("ucmatose, udaddy and mckey", "rdma_rxe")
@pytest.mark.parametrize("arguments", ["-c 20 -C 2", "-C 20 -S 65536"])
def test_ucmatose(guest: Guest, family: int, device: str, ours: str, arguments: str) -> None:
    """Not on siw: the server sends first, which iWARP forbids (RFC 5044, 7.1), and some connections end for it."""
    check_status(guest, device, ours, family, f"ucmatose -b @ {arguments}", f"ucmatose -s @ {arguments}")


def check_status(guest: Guest, device: str, ours: str, family: int, server: str, client: str) -> None:
    """Run two tools that print their status, and see that both print success."""
    script = exchange(guest, device, ours, family, server, client)
    done = guest.run(f"{script} || exit\nfinish", record=False)
    assert done.status == 0, done.output
    assert done.output.count("return status 0") == 2, done.output


@FAMILIES
@ends("ucmatose, udaddy and mckey", "rdma_rxe")
@pytest.mark.parametrize("arguments", ["-c 20 -C 5 -S 1", "-C 100 -S 1024"])
def test_udaddy(guest: Guest, family: int, device: str, ours: str, arguments: str) -> None:
    check_status(guest, device, ours, family, f"udaddy -b @ {arguments}", f"udaddy -s @ {arguments}")


@FAMILIES
@ends("rping and cmtime", "rdma_rxe", "siw")
def test_cmtime(guest: Guest, family: int, device: str, ours: str) -> None:
    script = exchange(guest, device, ours, family, "cmtime -b @", "cmtime -s @ -c 20")
    done = guest.run(f"{script} || exit\nkill $SERVER", record=False)
    assert done.status == 0, done.output
    assert "error" not in done.output, done.output


@ends("ucmatose, udaddy and mckey", "rdma_rxe")
def test_mckey(guest: Guest, device: str, ours: str) -> None:
    """librdmacm joins IPv4 groups only."""
    arguments = "-m 239.1.2.3 -b $RXE4"
    receiving, sending = ENDS[ours]
    sends = f"{sending} mckey {arguments} -s" if sending else send(guest, 10, f"{arguments} -s")
    done = guest.run(
        f"{receiving} mckey {arguments} >/tmp/server.out 2>&1 &\nSERVER=$!\n"
        'until [[ $(ip maddr show dev va) == *239.1.2.3* ]]; do nap 0.05; runs "$SERVER" || break; done\nnap 0.5\n'
        f"{sends} || exit\nfinish",
        record=False,
    )
    assert done.status == 0, done.output
    assert done.output.count("return status 0") == 2, done.output


def measured(guest: Guest, family: int, options: str, server_options: str = "") -> dict[str, float]:
    """What ``perf`` measures between a server and a client on rdma_rxe."""
    done = guest.run(
        f"serve_rxe {OURS} perf -s -b $RXE{family} {server_options} || exit\n"
        f"rxe {OURS} perf -c $RXE{family} --op send {options} --json || exit\nkill $SERVER",
        record=False,
    )
    assert done.status == 0, done.output
    (found,) = json.loads(done.output[done.output.index("[") : done.output.rindex("]") + 1])
    assert isinstance(found, dict)
    return found


@FAMILIES
@pytest.mark.cell(row("rdma_rxe", "perf"), "both")
@pytest.mark.parametrize("qp_type", ["rc", "uc", "ud"])
def test_perf(guest: Guest, family: int, qp_type: str) -> None:
    kind = f"--type {qp_type}"
    assert measured(guest, family, f"{kind} --size 512 --count 200 --depth 16", kind)["bytes"] == 200 * 512


def test_perf_with_too_few_receives(guest: Guest) -> None:
    """A sender that is ahead of the receives, about 14 times here, waits 0.64 ms each time, not 655 ms: 9 s in all."""
    assert measured(guest, 4, "--size 64 --count 4000 --depth 64")["seconds"] < 6


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("devices", "rxe0/1"),
        ("explain $RXE4 7471", "chosen"),
        ("getaddrinfo $RXE6 7471", "rxe0 port 1"),
        ("resolve $SOFT4 7471", "rxe0 (provider kernel)"),
    ],
)
def test_the_tool_shows_the_kernels_device(guest: Guest, command: str, said: str) -> None:
    done = guest.run(f"rxe {OURS} {command}", record=False)
    assert done.status == 0, done.output
    assert said in done.output
