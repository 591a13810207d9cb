"""The machine that these tests share, its network, and the recording of what passes in each of them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Container, Generator, Iterator
from pathlib import Path

import pytest

from interop.batches import Batches
from interop.judge import judge
from interop.machine.packages import Unavailable, image
from interop.machine.run import Machine, Result
from interop.table import Outcome, inserted, table

#: Recordings of tests that failed.
ARTIFACTS = Path(__file__).parent / "artifacts"
#: Seconds that making the network may take.
MAKING = 120
#: Seconds that a test may take: emulated machines take their time, and a script may be given to two of them.
LONGEST = 1500

_failed = pytest.StashKey[bool]()
_outcomes = pytest.StashKey[list[Outcome]]()
_stuck = pytest.StashKey[list[str]]()
_circumstances = pytest.StashKey[str]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.interop)
            item.add_marker(pytest.mark.slow)
            if item.config.pluginmanager.has_plugin("timeout"):
                item.add_marker(pytest.mark.timeout(LONGEST))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_failed] = True
    cell = item.get_closest_marker("cell")
    if cell is not None and (report.when == "call" or report.failed):
        row, end = cell.args
        item.config.stash.setdefault(_outcomes, []).append(Outcome(row, end, report.passed))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """RDMACM_INTEROP_TABLE names the document that gets the table; ``python3 dev.py interop`` sets it."""
    document = os.environ.get("RDMACM_INTEROP_TABLE")
    outcomes = session.config.stash.get(_outcomes, [])
    if document and outcomes and _circumstances in session.config.stash:
        made = table(outcomes, session.config.stash[_circumstances])
        Path(document).write_text(inserted(Path(document).read_text(), made))


@pytest.fixture(scope="package")
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    try:
        running = Machine(image(), tmp_path_factory.mktemp("share"))
    except Unavailable as reason:
        pytest.skip(str(reason))
    with running:
        where = "an emulated machine" if running.accelerator == "tcg" else "a virtual machine"
        request.config.stash[_circumstances] = (
            f"Seen on {time.strftime('%-d %B %Y')} in {where}: {_library(running)} on rdma_rxe of Linux"
            f" {running.kernel}, and our software device. The numbers count tests; IPv4 and IPv6 each."
        )
        yield running
        request.config.stash[_stuck] = running.stuck


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for said in config.stash.get(_stuck, []):
        terminalreporter.section("the machine got stuck; a new one was given the script again")
        terminalreporter.write_line(said)


def _library(machine: Machine) -> str:
    version = re.search(r"so\.1\.\d+\.(\d+\.\d+)", machine.run("ls /usr/lib/*/librdmacm.so.1.*").output)
    return "librdmacm " + (version[1] if version else "of unknown version")


class Guest:
    """The machine as a test sees it: whatever its scripts send is recorded and judged.

    ``network`` is what makes the network that they need, unless it is there.
    """

    def __init__(self, machine: Machine, recordings: Path) -> None:
        self.machine = machine
        self.network = "network"
        self._recordings = recordings
        self._count = 0

    def run(self, script: str, timeout: float = 60.0, *, naks: Container[int] = (), record: bool = True) -> Result:
        """Run bash's ``script`` with the words of net.sh; ``timeout`` in seconds.

        AssertionError if a packet of it is malformed, has a wrong ICRC, or is a NAK that is not one of ``naks``
        (syndromes of the AETH).
        """
        network = f"{self.network} || exit"
        if not record:
            return self.machine.insist(f"{network}\n{script}", timeout + MAKING)
        self._count += 1
        name = f"{self._recordings.name}-{self._count}.pcap"
        result = self.machine.insist(
            f"{network}\nrecord /mnt/share/{name}\n(\n{script}\n)\nstatus=$?\nrecorded\nexit $status",
            timeout + MAKING,
        )
        recorded, recording = self.machine.share / name, self._recordings.with_name(name)
        assert recorded.exists(), result.output  # else there was no network
        recorded.rename(recording)
        try:
            judge(recording, naks)
        except AssertionError as error:
            error.add_note(self.machine.run("dropped").output)
            raise
        return result

    def run_again(self, script: str, said: str, timeout: float, *, naks: Container[int] = ()) -> Result:
        """:meth:`run`, and up to twice more where its output has ``said``: what the kernel's end may do by chance."""
        for _ in range(3):
            result = self.run(script, timeout, naks=naks)
            if said not in result.output:
                break
        return result


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
