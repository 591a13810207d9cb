"""The machine that these tests share, its network, and a recording of each test's packets.

RDMACM_GUEST_MACHINE chooses the machine: ``uml``, ``qemu``, or ``both``, which runs all tests in the first and those
marked ``debian_kernel`` in the second as well.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Generator, Iterator
from dataclasses import astuple
from pathlib import Path

import pytest

from interop.batches import Batches
from interop.machine.cache import Unavailable
from interop.machine.choice import MACHINES, chosen
from interop.machine.run import Machine
from interop.scenario import Guest
from interop.table import Kernel, Outcome, inserted, table

#: Recordings of tests that failed.
ARTIFACTS = Path(__file__).parent / "artifacts"
#: Seconds that a test may take: the first builds a kernel, and a script may run in two emulated machines.
LONGEST = 1500

_IN_CI = bool(os.environ.get("CI"))

_failed = pytest.StashKey[bool]()
_outcomes = pytest.StashKey[list[Outcome]]()
_stuck = pytest.StashKey[list[str]]()
_kernel = pytest.StashKey[Kernel]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "machine" in metafunc.fixturenames:
        metafunc.parametrize("machine", chosen(), indirect=True, scope="package")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark(Path(__file__).parent, config, items)


def mark(folder: Path, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests in ``folder``, which need the machine, and leave out what the second machine does not run.

    The second machine has an emulated processor and takes ten times as long, so it runs the tests with IPv4 alone, and
    in CI only some of them.
    """
    mine = [item for item in items if folder in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.interop)
        item.add_marker(pytest.mark.slow)
        if item.config.pluginmanager.has_plugin("timeout"):
            item.add_marker(pytest.mark.timeout(LONGEST))
    if len(chosen()) > 1:
        _, selecting = chosen()
        left_out = [
            item
            for item in mine
            if isinstance(item, pytest.Function)
            and hasattr(item, "callspec")
            and item.callspec.params.get("machine") == selecting
            and not _runs_on_debian_kernel(item)
        ]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _runs_on_debian_kernel(item: pytest.Function) -> bool:
    marker = item.get_closest_marker("debian_kernel")
    return marker is not None and "IPv6" not in item.callspec.id and (marker.kwargs.get("in_ci", True) or not _IN_CI)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_failed] = True
    cell = item.get_closest_marker("cell")
    has_outcome = report.failed or (report.when == "call" and not report.skipped)
    if cell is not None and has_outcome and _kernel in item.config.stash:
        row, end = cell.args
        # Passed in the report: with pytest-xdist, another process than this one writes the table.
        report.user_properties.append(("cell", [row, end, astuple(item.config.stash[_kernel]), report.passed]))
    return report


class Outcomes:
    """Collects the outcomes from the reports of all processes."""

    def __init__(self, config: pytest.Config) -> None:
        self._outcomes = config.stash.setdefault(_outcomes, [])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == "cell" and isinstance(value, list):
                row, end, kernel, passed = value
                self._outcomes.append(Outcome(row, end, Kernel(*kernel), passed))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes(config))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """RDMACM_INTEROP_TABLE names the document that gets the table; ``python3 dev.py interop --write`` sets it."""
    document = os.environ.get("RDMACM_INTEROP_TABLE")
    outcomes = session.config.stash.get(_outcomes, [])
    if document and outcomes and not hasattr(session.config, "workerinput"):
        made = table(outcomes, time.strftime("%-d %B %Y"))
        Path(document).write_text(inserted(Path(document).read_text(), made))


@pytest.fixture(scope="package")
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    try:
        running = MACHINES[request.param](tmp_path_factory.mktemp("share"))
    except Unavailable as reason:
        pytest.skip(str(reason))
    with running:
        request.config.stash[_kernel] = Kernel(running.kernel, running.description, _librdmacm(running))
        yield running
        request.config.stash[_stuck] = running.stuck
    del request.config.stash[_kernel]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for known in config.stash.get(_stuck, []):
        terminalreporter.section("the machine stopped responding; the script ran again in a new one")
        terminalreporter.write_line(known)


def _librdmacm(machine: Machine) -> str:
    version = re.search(r"so\.1\.\d+\.(\d+\.\d+)", machine.run("ls /usr/lib/*/librdmacm.so.1.*").output)
    return version[1] if version else "of unknown version"


@pytest.fixture
def guest(machine: Machine, request: pytest.FixtureRequest) -> Iterator[Guest]:
    ARTIFACTS.mkdir(exist_ok=True)
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    recordings = ARTIFACTS / f"{request.path.stem}-{name}"
    for old in ARTIFACTS.glob(f"{recordings.name}-*.pcap"):
        old.unlink()
    yield Guest(machine, recordings)
    if not request.node.stash.get(_failed, False):
        for recording in ARTIFACTS.glob(f"{recordings.name}-*.pcap"):
            recording.unlink()


@pytest.fixture(scope="session")
def batches() -> Batches:
    return Batches()
