"""Checks capture files with tshark, Wireshark's command line.

Tests using this carry :data:`needs_tshark`, which skips them where it is not installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest

__all__ = ["dissect", "needs_tshark"]

_TestT = TypeVar("_TestT", bound=Callable[..., Any] | type)

#: Dissectors that guess the protocol of payloads.  They take bytes of tests for their protocols and report errors.
_GUESSES = ("fcoib", "infiniband_sdp", "iser", "lapbether", "lnet", "nvme-rdma", "rpcordma", "smb_direct", "smc")
_TROUBLE = ("_ws.malformed", "_ws.expert.message", "ip.checksum.status", "udp.checksum.status")
_GOOD, _ABSENT = "1", "3"


def dissect(path: Path, fields: Iterable[str] = (), *, no_checksum: bool = False) -> list[dict[str, str]]:
    """The fields of each packet of the file, by their names in Wireshark; "" where a packet has none.

    AssertionError if Wireshark reports a malformed packet, a wrong checksum or an expert message.
    ``no_checksum``: packets may lack a UDP checksum, as those of devices, which rely on the ICRC.
    """
    fields = (*fields, *_TROUBLE)
    command = ["tshark", "-n", "-r", str(path), "-T", "fields", "-E", "separator=/t", "-E", "occurrence=f"]
    for name in ("ip", "udp"):
        command += ["-o", f"{name}.check_checksum:TRUE"]
    command += ["-o", f"udp.ignore_ipv6_zero_checksum:{str(no_checksum).upper()}"]
    for name in _GUESSES:
        command += ["--disable-protocol", name]
    for name in fields:
        command += ["-e", name]
    # Without the user's Wireshark settings.
    environment = {**os.environ, "WIRESHARK_CONFIG_DIR": str(path.parent / "no-settings"), "LC_ALL": "C.UTF-8"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    packets = [dict(zip(fields, line.split("\t"), strict=True)) for line in done.stdout.splitlines()]
    for number, packet in enumerate(packets, 1):
        malformed, message, ip, udp = (packet.pop(name) for name in _TROUBLE)
        trouble = malformed or message
        assert not trouble, f"frame {number} of {path.name}: {trouble}"
        assert ip in ("", _GOOD), f"frame {number} of {path.name}: IP checksum"  # IPv6 has none
        assert udp == _GOOD or (no_checksum and udp == _ABSENT), f"frame {number} of {path.name}: UDP checksum"
    return packets


class _Marks(list[pytest.MarkDecorator]):
    """Several marks in one: a list, as ``pytestmark`` takes, and a decorator of a single test or class."""

    def __call__(self, test: _TestT) -> _TestT:
        for mark in self:
            test = mark(test)
        return test


#: ``pytestmark = needs_tshark``, or ``@needs_tshark``.
needs_tshark = _Marks(
    [
        pytest.mark.tshark,
        pytest.mark.skipif(shutil.which("tshark") is None, reason="tshark is not installed (Debian package tshark)"),
    ]
)
