"""The scenarios of tests/conformance with the kernel's devices: rdma_rxe with itself and with soft, two of siw.

A scenario is skipped where a device reports that it lacks what the scenario needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest

from conformance.all_scenarios import NAMES
from interop.scenario import Guest
from interop.test_kernel_tools import row

PROGRAM = "python3 -m interop.conformance_run"
#: The ends, passive and active.
PAIRS = {
    "rxe-itself": "kernel,$RXE{0} kernel,$RXE{0}",
    "rxe-soft": "kernel,$RXE{0} soft,$SOFT{0},soft",
    "soft-rxe": "soft,$SOFT{0},soft kernel,$RXE{0}",
    "siw": "kernel,$IWARP{0} kernel,$PEER{0},iwarp",
}
#: The row of the table, and which end is the kernel's device.
ROWS = {
    "rxe-itself": ("rdma_rxe", "conformance scenarios", "both"),
    "rxe-soft": ("rdma_rxe", "conformance scenarios, the software device at the other end", "passive"),
    "soft-rxe": ("rdma_rxe", "conformance scenarios, the software device at the other end", "active"),
    "siw": ("siw", "conformance scenarios", "both"),
}
_OUTCOME = re.compile(r"^(ok|skipped|FAILED) (\w+)(.*(?:\n    .*|\n$)*)", re.MULTILINE)


@dataclass
class Runs:
    """What all scenarios between two ends came to, by name; they run at the first question."""

    _done: dict[tuple[str, int], dict[str, tuple[str, str]]] = field(default_factory=dict)

    def outcome(self, guest: Guest, pair: str, family: int, name: str) -> tuple[str, str]:
        """The first word of the scenario's line, and the rest."""
        found = self._done.get((pair, family))
        if found is None:
            found = self._done[pair, family] = {}
            is_iwarp = pair.startswith("siw")
            if is_iwarp:
                guest.network = "iwarp_network"
            ends = PAIRS[pair].format(family)
            done = guest.run(f"{PROGRAM} {ends}; true", 400, record=False)  # the data look like anything
            found.update({name: (word, rest) for word, name, rest in _OUTCOME.findall(done.output)})
            found[""] = "output", done.output
        return found.get(name) or ("FAILED", found[""][1])


@pytest.fixture(scope="module")
def runs() -> Runs:
    return Runs()


@pytest.mark.parametrize("family", [4, 6], ids=["IPv4", "IPv6"])
@pytest.mark.parametrize(
    "pair", [pytest.param(pair, marks=pytest.mark.cell(row(*where), end)) for pair, (*where, end) in ROWS.items()]
)
@pytest.mark.parametrize("name", NAMES)
def test_scenario_runs_with_a_kernel_device(guest: Guest, runs: Runs, family: int, pair: str, name: str) -> None:
    word, rest = runs.outcome(guest, pair, family, name)
    if word == "skipped":
        pytest.skip(f"the device has not:{rest.removeprefix(':')}")
    assert word == "ok", rest
