"""Packets that a host's firewall drops, rejects or counts: nftables in a network namespace."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Iterator

import pytest

from support.netns import Host, requirement

_TABLE = "rdmacm"
_CHAINS = ("input", "output", "forward")


@functools.cache
def _reason() -> str | None:
    """Why nftables cannot be used here, or None where it can."""
    if requirement() is not None:
        return requirement()
    if shutil.which("nft") is None:
        return "nft, of the package nftables, is not installed"
    with Host() as host:
        done = host.run(["nft", "list", "ruleset"], check=False)
    return None if done.returncode == 0 else f"nft cannot be used here: {done.stderr.strip()}"


needs_nft = pytest.mark.skipif(_reason() is not None, reason=_reason() or "nft can be used")


def add_rules(host: Host, *rules: str) -> None:
    """Add rules to a host's firewall, each after the name of its chain: ``input udp dport 4791 drop``."""
    lines = [f"add table inet {_TABLE}"]
    lines += [f"add chain inet {_TABLE} {chain} {{ type filter hook {chain} priority 0; }}" for chain in _CHAINS]
    lines += [f"add rule inet {_TABLE} {rule}" for rule in rules]
    host.run(["nft", "-f", "-"], input="\n".join(lines) + "\n")


@contextlib.contextmanager
def rules(host: Host, *texts: str) -> Iterator[None]:
    """:func:`add_rules`, for the block."""
    add_rules(host, *texts)
    try:
        yield
    finally:
        remove_rules(host)


def remove_rules(host: Host) -> None:
    """Remove all rules of :func:`add_rules`."""
    host.run(["nft", "delete", "table", "inet", _TABLE])
