"""A plugin for pytest: simulated hosts, hosts in namespaces, seeds, and the shortest faults that make a test fail.

docs/testing.md is the guide. pytest finds the plugin by its entry point, so this module imports the rest of the package
in the tests that use it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import pytest

if TYPE_CHECKING:
    from rdmacm.lab import LabHost
    from rdmacm.testing import Fabric, Host, Scenario
    from rdmacm.testing.recording import RecordedFabric

_FABRIC: pytest.StashKey[RecordedFabric] = pytest.StashKey()
#: The faults to repeat, and where the test has failed.
_SCRIPT: pytest.StashKey[Scenario] = pytest.StashKey()
_FAILURE: pytest.StashKey[tuple[str, str, int]] = pytest.StashKey()

#: What the mark may have besides the arguments of a Fabric.
_OF_MARK = frozenset(("seed", "seeds", "faults"))
_OF_FABRIC = frozenset(
    (
        *("loss", "duplicate", "reorder", "corrupt", "latency", "jitter", "reorder_delay", "mtu", "trains"),
        *("max_steps", "log_limit"),
    )
)
#: Entries of the log that a report shows.
_SHOWN = 60

Starter: TypeAlias = Callable[..., "subprocess.Popen[str]"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plugin."""
    group = parser.getgroup("rdmacm", "simulated RDMA networks (rdmacm)")
    group.addoption(
        "--rdmacm-seeds", type=int, metavar="N", help="Run each test of a fabric with N seeds, whatever its mark says."
    )
    group.addoption("--rdmacm-seed", type=int, metavar="S", help="Run each test of a fabric with this seed alone.")
    group.addoption(
        "--rdmacm-shrink",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="How long to look for the shortest faults that make a test fail; 0: not at all (default: 10).",
    )
    group.addoption(
        "--rdmacm-captures",
        metavar="DIR",
        help="Where the packets of failed tests go; default: the folder of the JUnit report, else a temporary one.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark."""
    config.addinivalue_line(
        "markers",
        "rdmacm(seeds=1, seed=0, faults=None, **options): the fabric of a test: how many seeds, the first one, a script"
        " of faults, and arguments of rdmacm.testing.Fabric, such as loss=0.2",
    )


def _settings(node: pytest.Item | pytest.FixtureRequest) -> dict[str, Any]:
    """What the marks of a test say; a mark that is nearer to it has precedence."""
    item = node if isinstance(node, pytest.Item) else node.node
    found: dict[str, Any] = {}
    for mark in reversed([*item.iter_markers("rdmacm")]):
        found.update(mark.kwargs)
        if mark.args or not found.keys() <= _OF_MARK | _OF_FABRIC:
            wrong = ", ".join([*map(repr, mark.args), *sorted(found.keys() - _OF_MARK - _OF_FABRIC)])
            raise pytest.UsageError(f"the mark rdmacm of {item.nodeid} takes no {wrong}")
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each seed."""
    if "rdmacm_seed" not in metafunc.fixturenames:
        return
    settings = _settings(metafunc.definition)
    first, count = settings.get("seed", 0), settings.get("seeds")
    options = metafunc.config.option
    if options.rdmacm_seed is not None:
        first, count = options.rdmacm_seed, 1
    elif options.rdmacm_seeds is not None:
        count = options.rdmacm_seeds
    if count is not None:
        seeds = range(first, first + count)
        metafunc.parametrize("rdmacm_seed", seeds, ids=[f"seed{seed}" for seed in seeds], indirect=True)


# -- fixtures -------------------------------------------------------------------------------------------------


@pytest.fixture
def rdmacm_seed(request: pytest.FixtureRequest) -> int:
    """The seed of the fabric: of the mark, or of an option."""
    seed: int = request.param if hasattr(request, "param") else _settings(request).get("seed", 0)
    return seed


@pytest.fixture
def fabric(request: pytest.FixtureRequest, rdmacm_seed: int) -> Iterator[Fabric]:
    """A simulated network, as the mark ``rdmacm`` describes it. Its faults are shrunk if the test fails."""
    from rdmacm.testing import FaultScript, Scenario
    from rdmacm.testing.recording import RecordedFabric

    settings = _settings(request)
    options = {name: value for name, value in settings.items() if name in _OF_FABRIC}
    stash = request.node.stash
    given = Scenario.parse(settings.get("faults") or "")
    repeated = stash.get(_SCRIPT, None)
    with (
        RecordedFabric(rdmacm_seed, script=repeated and FaultScript(repeated.rules), **options) as made,
        _new_loops(made.asyncio_loop if _is_coroutine(request.node) else None),
    ):
        made.play(Scenario((repeated or given).events, given.rules))
        if _SCRIPT not in stash:
            request.node.user_properties.append(("rdmacm_seed", rdmacm_seed))
        stash[_FABRIC] = made
        yield made


@pytest.fixture
def rdma_hosts(fabric: Fabric) -> tuple[Host, Host]:
    """Two hosts of the fabric: ``a`` (10.0.0.1, fd00::1) and ``b`` (10.0.0.2, fd00::2)."""
    return fabric.host("a", "10.0.0.1", "fd00::1"), fabric.host("b", "10.0.0.2", "fd00::2")


@pytest.fixture
def rdmacm_namespace(request: pytest.FixtureRequest) -> Iterator[tuple[LabHost, LabHost]]:
    """Two hosts, ``h1`` and ``h2``, in network namespaces of this user. Skips where the system refuses them.

    Of the mark ``rdmacm``, ``mtu``, ``loss``, ``latency`` and ``seed`` count.
    """
    from rdmacm.errors import RdmaError
    from rdmacm.lab import Lab, Wiring

    given = _settings(request)
    wiring = Wiring(given.get("mtu", 1500), given.get("loss", 0.0), given.get("latency", 0.0), given.get("seed", 0))
    try:
        lab = Lab(["h1", "h2"], wiring)
    except RdmaError as error:
        pytest.skip(str(error))
    with lab:
        yield lab.hosts["h1"], lab.hosts["h2"]


@pytest.fixture
def rdmacm_run() -> Iterator[Starter]:
    """Starts programs by ``rdmacm run``: ``rdmacm_run("rping", "-s", options=["--loss", "0.1"])`` returns the process.

    Its output and its errors are one text. What runs at the end of the test is ended.
    """
    started: list[subprocess.Popen[str]] = []

    def run(*command: str, options: Sequence[str] = ()) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "rdmacm", "run", *options, "--", *command]
        started.append(subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield run
    for process in started:
        process.terminate()
    for process in started:
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:  # what a program leaves behind may keep the other end open
            process.stdout.close()


# -- coroutines -----------------------------------------------------------------------------------------------


def _is_coroutine(item: pytest.Item) -> bool:
    return inspect.iscoroutinefunction(getattr(item, "obj", None))


@contextmanager
def _new_loops(factory: Callable[[], asyncio.AbstractEventLoop] | None) -> Iterator[None]:
    """Let the plugin that runs a coroutine, pytest-asyncio or anyio, have an event loop of this factory.

    Each has other ways to choose a loop, and other ones in other versions; all of them end in this function of asyncio.
    """
    with pytest.MonkeyPatch.context() as patch:
        if factory is not None:
            for module in (asyncio, sys.modules["asyncio.events"]):
                patch.setattr(module, "new_event_loop", factory)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Make the fabric of a coroutine before its other fixtures: an asynchronous one needs the event loop."""
    names: list[str] = getattr(item, "fixturenames", [])
    if "fabric" not in names or not _is_coroutine(item):
        return
    known = cast("pytest.Function", item)._fixtureinfo.name2fixturedefs
    names.remove("fabric")
    own = (place for place, name in enumerate(names) if name in known and known[name][-1].scope == "function")
    names.insert(next(own, len(names)), "fabric")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine on the loop of its fabric, unless another plugin runs it."""
    made = pyfuncitem.stash.get(_FABRIC, None)
    if made is None or not _is_coroutine(pyfuncitem):
        return None
    if "anyio_backend" in pyfuncitem.funcargs or pyfuncitem.get_closest_marker("trio"):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    made.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


# -- failures -------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note where a test has failed, and tell what happened on its fabric."""
    report = yield
    if call.when == "call" and report.failed and call.excinfo is not None:
        last = call.excinfo.traceback[-1]
        item.stash[_FAILURE] = (call.excinfo.typename, str(last.path), last.lineno)
        made = item.stash.get(_FABRIC, None)
        if made is not None and _SCRIPT not in item.stash:
            report.sections.append(("rdmacm fabric", _story(item, made)))
    return report


def _story(item: pytest.Item, made: Fabric) -> str:
    """The seed, how to repeat the test, the packets."""
    again = f"pytest {shlex.quote(item.nodeid)}"
    if item.config.option.rdmacm_seeds is not None or item.config.option.rdmacm_seed is not None:
        again += f" --rdmacm-seed {made.seed}"
    lines = [f"seed {made.seed}, to repeat: {again}", ""]
    lines += [made.log.to_diagram(_SHOWN) if len(made.log) else "no packet was sent", ""]
    try:
        path = _captures(item.config) / (re.sub(r"[^\w.-]+", "-", item.nodeid).strip("-") + ".pcapng")
        path.parent.mkdir(parents=True, exist_ok=True)
        made.log.write_pcapng(path)
        lines.append(f"packets: {path}")
    except OSError as error:
        lines.append(f"packets: not written: {error}")
    return "\n".join(lines)


def _captures(config: pytest.Config) -> Path:
    """The folder for packets: what was asked for, or beside a report, or a temporary one that pytest keeps."""
    if config.option.rdmacm_captures:
        return Path(config.option.rdmacm_captures).absolute()
    for name in ("xmlpath", "htmlpath"):
        if report := getattr(config.option, name, None):
            return Path(os.path.expanduser(report)).absolute().parent
    factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
    return factory.getbasetemp() / "rdmacm"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test of a fabric; if it fails, run it again with fewer faults, before its report is published."""
    seconds = item.config.option.rdmacm_shrink
    if "rdmacm_seed" not in getattr(item, "fixturenames", ()) or seconds <= 0 or item.config.option.usepdb:
        return None
    from _pytest.runner import runtestprotocol  # which may run a test more than once: it is made for that

    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    failed = next((report for report in reports if report.when == "call" and report.failed), None)
    if failed is not None and item.stash.get(_FABRIC, None) is not None:
        again = lambda: runtestprotocol(item, log=False, nextitem=nextitem)  # noqa: E731
        if text := _Shrinking(item, again, seconds).text():
            failed.sections.append(("rdmacm faults", text))
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


class _Shrinking:
    """The search for the shortest script of faults that makes a test fail as it has failed."""

    def __init__(self, item: pytest.Item, again: Callable[[], object], seconds: float) -> None:
        self._item = item
        self._again = again
        self._end = time.monotonic() + seconds
        self._failure = item.stash[_FAILURE]
        self._runs = 0

    def text(self) -> str:
        """What was found, for the report; empty if the network had no faults."""
        from rdmacm.testing import Scenario
        from rdmacm.testing.shrinking import shortest

        rules = self._item.stash[_FABRIC].applied_faults()
        if rules is None:
            return "the log of the fabric is not complete (log_limit), so its faults are not known"
        faults = [*Scenario.parse(_settings(self._item).get("faults") or "").events, *rules]
        if not faults:
            return ""
        try:
            if not self._fails(faults):
                return f"the {len(faults)} faults as rules do not repeat the failure; the seed does"
            found, is_shortest = shortest(faults, self._fails)
        finally:
            del self._item.stash[_SCRIPT]
        if not found:
            return f"it fails without any of its {len(faults)} faults, too ({self._runs} runs)"
        what = "the shortest script" if is_shortest else "the shortest script so far (--rdmacm-shrink)"
        head = f"{what} that fails has {len(found)} of {len(faults)} faults ({self._runs} runs):"
        settings = {name: value for name, value in _settings(self._item).items() if name in _KEPT}
        settings["seed"] = self._item.stash[_FABRIC].seed
        arguments = "".join(f"{name}={value!r}, " for name, value in settings.items())
        script = "".join(f"    {fault}\n" for fault in found)
        return f'{head}\n\n@pytest.mark.rdmacm({arguments}faults="""\n{script}""")'

    def _fails(self, faults: Sequence[Any]) -> bool | None:
        from rdmacm.testing import FaultRule, Scenario

        if self._runs and time.monotonic() > self._end:
            return None
        self._runs += 1
        rules = [fault for fault in faults if isinstance(fault, FaultRule)]
        self._item.stash[_SCRIPT] = Scenario([fault for fault in faults if fault not in rules], rules)
        self._item.stash[_FAILURE] = ("", "", 0)
        self._again()
        return self._item.stash[_FAILURE] == self._failure


#: What a mark keeps that has a script in the place of chance.
_KEPT = ("latency", "jitter", "reorder_delay", "mtu", "trains", "max_steps", "log_limit")
