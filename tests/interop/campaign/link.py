"""The link of a campaign in the machine: its impairment, its interface, and a recording of its packets."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from interop.campaign.draws import Link

__all__ = ["impaired", "interface", "keep_addresses", "recorded", "renew_device", "set_interface"]

#: The interfaces of each campaign: of the first namespace, and the other's namespace and interface.
_INTERFACES = {"rxe": ("va", "soft", "vb"), "siw": ("wa", "iwarp", "wb")}
#: Bytes of each packet that a recording has: the headers, and private data.
_SNAPPED = 400
#: Seconds until a command of the network counts as stuck.
_LIMIT = 60.0
#: How often to look whether a new device has the addresses of its interface.
_LOOKS = 200


def interface(campaign: str) -> str:
    return _INTERFACES[campaign][0]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_LIMIT)


def keep_addresses(campaign: str) -> None:
    """Linux removes the IPv6 addresses of an interface that goes down, unless it is told not to."""
    settings = Path("/proc/sys/net/ipv6/conf") / interface(campaign)
    (settings / "keep_addr_on_down").write_text("1")
    (settings / "accept_dad").write_text("0")


def set_interface(campaign: str, up: bool) -> None:
    _run("ip", "link", "set", interface(campaign), "up" if up else "down")


def renew_device(campaign: str) -> Generator[None, None, bool]:
    """Replace rxe0 if its queue pair 1 has failed; returns whether it had.

    rdma_rxe sets the queue pair to the state ERR when a MAD is sent while the interface is down, and nobody sets it
    back: until the device is made again, no program of the host can connect. The kernel waits until programs that do
    not give the device back, such as librdmacm's rping, have ended.
    """
    if campaign != "rxe":
        return False
    shown = subprocess.run(["rdma", "resource", "show", "qp"], check=True, capture_output=True, text=True).stdout
    if not any("type GSI state ERR" in line for line in shown.splitlines()):
        return False
    with subprocess.Popen(["rdma", "link", "delete", "rxe0"]) as removal:
        while removal.poll() is None:
            yield
    _run("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", interface(campaign))
    gids = Path("/sys/class/infiniband/rxe0/ports/1/gids")
    for _ in range(_LOOKS):
        if any("fd00:0000:0000:0001" in gid.read_text() for gid in gids.glob("[0-9]")):
            break
        time.sleep(0.05)
    return True


@contextlib.contextmanager
def impaired(campaign: str, link: Link) -> Iterator[None]:
    """Impair both directions of the link by netem."""
    if not link.netem:
        yield
        return
    first, namespace, second = _INTERFACES[campaign]
    inside = ("ip", "netns", "exec", namespace)
    _run("tc", "qdisc", "replace", "dev", first, "root", "netem", *link.netem)
    # Below tbf, which takes a train of packets apart, as in net.sh.
    limit = ("tbf", "rate", "10gbit", "burst", "70000", "limit", "10000000")
    _run(*inside, "tc", "qdisc", "replace", "dev", second, "root", "handle", "1:", *limit)
    _run(*inside, "tc", "qdisc", "replace", "dev", second, "parent", "1:", "handle", "2:", "netem", *link.netem)
    try:
        yield
    finally:
        _run("tc", "qdisc", "delete", "dev", first, "root")
        _run(*inside, "tc", "qdisc", "delete", "dev", second, "root")


@contextlib.contextmanager
def recorded(campaign: str, path: Path, what: Sequence[str] = ()) -> Iterator[None]:
    """Record the packets of the link while the block runs."""
    command = ["tcpdump", "-i", interface(campaign), "-Z", "root", "-U", "--immediate-mode", "-s", str(_SNAPPED)]
    errors = path.with_suffix(".err")
    with errors.open("wb") as written:
        recorder = subprocess.Popen(
            [*command, "-B", "16384", "-w", str(path), *what], stdout=subprocess.DEVNULL, stderr=written
        )
    try:
        while b"listening" not in errors.read_bytes() and recorder.poll() is None:
            time.sleep(0.01)
        yield
    finally:
        # It writes each packet at once, so only what has not reached it is missing.
        time.sleep(0.2)
        os.kill(recorder.pid, signal.SIGINT)
        recorder.wait()
        errors.unlink()
