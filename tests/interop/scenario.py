"""Runs scripts in the machine, and records and checks their packets."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from interop.judge import judge
from interop.machine.run import Machine, Result
from support.waiting import without_waiting

__all__ = ["ATTEMPTS", "Guest", "require_kernel"]

#: Seconds that making the network may take.
NETWORK_SECONDS = 120
#: How often a script runs whose outcome depends on a race in the kernel's end, which up to one run in ten loses.
ATTEMPTS = 5


class Guest:
    """The machine as one test uses it."""

    def __init__(self, machine: Machine, recordings: Path) -> None:
        """``recordings`` is the path of the test's recordings, without number and suffix."""
        self.machine = machine
        #: The command of net.sh that makes the network of each script, unless it exists.
        self.network = "network"
        self._recordings = recordings
        self._count = 0

    def run(self, script: str, timeout: float = 60.0, *, naks: Container[int] = (), record: bool = True) -> Result:
        """Run a bash script that uses the functions of net.sh. The lines that say that a tool waits are left out.

        Args:
            script: the text.
            timeout: its limit in seconds.
            naks: the NAKs that the scenario explains, as syndromes of the AETH.
            record: whether to record and check the packets.

        Raises:
            AssertionError: a packet is malformed, has a wrong ICRC, or is a NAK that is not among ``naks``.
            MachineError: the machine failed, or the script exceeded its limit.
        """
        network = f"{self.network} || exit"
        if not record:
            return self.machine.insist(f"{network}\n{script}", timeout + NETWORK_SECONDS)
        self._count += 1
        name = f"{self._recordings.name}-{self._count}.pcap"
        result = self.machine.insist(
            f"{network}\nrecord /mnt/share/{name}\n(\n{script}\n)\nstatus=$?\nrecorded\nexit $status",
            timeout + NETWORK_SECONDS,
        )
        recorded, recording = self.machine.share / name, self._recordings.with_name(name)
        assert recorded.exists(), result.output  # without a network nothing was recorded
        assert "the recording is incomplete" not in result.output, result.output
        recorded.rename(recording)
        try:
            judge(recording, naks)
        except AssertionError as error:
            error.add_note(self.machine.run("dropped").output)
            raise
        return replace(result, output=without_waiting(result.output))

    def run_again(
        self, script: str, chances: Sequence[str], timeout: float, *, naks: Container[int] = (), record: bool = True
    ) -> Result:
        """:meth:`run`, repeated while the output has one of these texts, the signs of a race in the kernel's end."""
        for _ in range(ATTEMPTS):
            result = self.run(script, timeout, naks=naks, record=record)
            if not any(chance in result.output for chance in chances):
                break
        return result

    def preloaded(self, name: str, *libraries: str) -> str:
        """The path, in the machine, of a library to preload into a C program: a C file of this folder, compiled.

        The test is skipped where no compiler is installed.
        """
        if not shutil.which("gcc"):
            pytest.skip("gcc is needed")
        source, built = Path(__file__).with_name(f"{name}.c"), f"{name}.so"
        options = [f"-l{library}" for library in libraries]
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", self.machine.share / built, source, *options], check=True)
        return f"/mnt/share/{built}"


def require_kernel(guest: Guest, needed: tuple[int, int]) -> None:
    """Skip the test if the machine's kernel is older than a release, given by its first two numbers."""
    release = guest.machine.kernel
    if tuple(int(number) for number in release.split(".")[:2]) < needed:
        pytest.skip(f"rdma_rxe of Linux {release} does not have this; that of {needed[0]}.{needed[1]} has")
