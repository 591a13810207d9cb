"""Fixtures of several test files, and how pytest-xdist distributes the tests."""

from __future__ import annotations

import gc
import logging
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from rdmacm import EventChannel
from rdmacm.soft.provider import SoftProvider
from rdmacm.testing import MemoryNetwork, VirtualClock, memory_provider

# Assertions in these modules report the compared values, as in tests. Must precede their import.
pytest.register_assert_rewrite("support.lookups", "support.resolving", "support.world")

from support.examples import EXAMPLES  # noqa: E402
from support.own_network import enter_own_network  # noqa: E402
from support.parts import Parts  # noqa: E402
from support.world import World  # noqa: E402

# A time limit per example fails on a machine that is busy; pytest-timeout ends what hangs.
settings.register_profile(
    "no deadline", settings.get_profile(settings.get_current_profile_name()), deadline=None, max_examples=EXAMPLES
)
settings.load_profile("no deadline")


#: Folders whose tests take longest, the longest first. They start first, so that the last file is a short one.
LONG = ("interop/", "newcomer/", "netns/", "tools/", "infiniband/", "conformance/", "soft/", "endpoint/")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # in a process of pytest-xdist
        items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[bool, int]:
    path = item.nodeid.removeprefix("tests/")
    place = next((place for place, start in enumerate(LONG) if path.startswith(start)), len(LONG))
    return not _is_emulated(item.nodeid), place


def _is_emulated(nodeid: str) -> bool:
    """Whether the test runs in the machine that QEMU starts."""
    return nodeid.startswith("tests/interop/") and re.search(r"\[(.*-)?qemu[-\]]", nodeid) is not None


def pytest_collection_finish() -> None:
    """Exempt modules and collected tests from the garbage collector: many tests run it, and would pay for them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the tests of a file to one process, and all that run in an emulated machine: it is started once."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return "emulated" if _is_emulated(nodeid) else nodeid.partition("::")[0]

    return Scheduler(config, log)


class _PartsReport:
    """Prints a line for each part of the tests, in the process that gets all reports."""

    def __init__(self) -> None:
        self.parts = Parts()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.parts.add(report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self.parts.lines():
            terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        # All software devices of a network share a port: one process's strays would reach the tests of another.
        enter_own_network()
    if os.environ.get("CI") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_PartsReport())


@pytest.fixture
def world() -> Iterator[World]:
    network = MemoryNetwork()
    eth0 = network.add_interface("eth0", "10.0.0.1/24", "fd00::1/64", "fe80::1/64")
    network.add_route("0.0.0.0/0", eth0, gateway="10.0.0.254", source="10.0.0.1")
    network.add_neighbour(eth0, "10.0.0.2")
    clock = VirtualClock()
    provider = memory_provider(network, clock)
    assert isinstance(provider, SoftProvider)
    with EventChannel(provider) as channel:
        yield World(network, eth0, clock, provider, channel)


class _InternalErrors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def faults_expected() -> None:
    """The test makes the package raise what it should not."""


@pytest.fixture(autouse=True)
def no_internal_errors(request: pytest.FixtureRequest) -> Iterator[None]:
    """A fault that was contained fails the test, unless it expects faults."""
    handler = _InternalErrors()
    logger = logging.getLogger("rdmacm")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not handler.messages or "faults_expected" in request.fixturenames, handler.messages
