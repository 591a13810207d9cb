"""The same scenarios on a simulated network, between processes, and between network namespaces."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rdmacm.proto.core_choice import compiled, description
from rdmacm.testing import Fabric
from support.netns import Host, needs_netns, two_hosts
from support.scenario import Forker, Spawn, free_port, run_in_processes, run_on_fabric


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("conformance_scenarios", Path(__file__).with_name("all_scenarios.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


scenarios = _load()
SCENARIOS = pytest.mark.parametrize("name", scenarios.NAMES)
#: Slow between processes.
SLOW = ("datagrams", "extended", "extended_reliable", "multicast", "resized", "unreliable", "windows")
ON_A_FABRIC = {"ipv4": ("10.0.0.1", "10.0.0.2"), "ipv6": ("fd00::1", "fd00::2")}
ON_LOOPBACK = {"ipv4": ("127.0.0.1", "127.0.0.1"), "ipv6": ("::1", "::1")}
BETWEEN_HOSTS = {"ipv4": ("10.7.0.1", "10.7.0.2"), "ipv6": ("fd07::1", "fd07::2")}


def ends(name: str) -> tuple[Any, Any]:
    return getattr(scenarios, f"{name}_passive"), getattr(scenarios, f"{name}_active")


@SCENARIOS
@pytest.mark.parametrize("family", ON_A_FABRIC)
def test_scenario_runs_on_a_fabric(name: str, family: str) -> None:
    run_on_fabric(Fabric(seed=1), ON_A_FABRIC[family], *ends(name))


@SCENARIOS
@pytest.mark.parametrize("mtu", [600, 4200])
def test_scenario_runs_on_a_fabric_with_another_mtu(name: str, mtu: int) -> None:
    run_on_fabric(Fabric(seed=2, mtu=mtu, trains=mtu > 600), ON_A_FABRIC["ipv4"], *ends(name))


@pytest.mark.parametrize("name", [name for name in scenarios.NAMES if name != "permissions"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_scenario_runs_on_a_lossy_fabric(name: str, seed: int) -> None:
    # Not "permissions": a lost NAK is never repeated, because the queue pair that sent it is in the error state.
    fabric = Fabric(seed, loss=0.05, duplicate=0.05, reorder=0.1, corrupt=0.02)
    run_on_fabric(fabric, ON_A_FABRIC["ipv4"], *ends(name))


#: For a longer run than CI's: 1,000 take two minutes.
WINDOW_SEEDS = int(os.environ.get("RDMACM_WINDOW_SEEDS", "200"))


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.slow] * (first > 0)) for first in range(0, WINDOW_SEEDS, 20)]
)
def test_windows_work_despite_loss(first: int) -> None:
    """Binds, writes, reads, atomics and invalidations are each done once."""
    for seed in range(first, first + (20 if first else 2)):
        try:
            run_on_fabric(Fabric(seed, loss=0.1, duplicate=0.1, reorder=0.1), ON_A_FABRIC["ipv4"], *ends("windows"))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    with closing(Forker()) as made:
        yield made


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in scenarios.NAMES]
)
@pytest.mark.parametrize("family", ["ipv4", pytest.param("ipv6", marks=pytest.mark.slow)])
def test_scenario_runs_between_processes(name: str, family: str, forker: Forker) -> None:
    if (name, family) == ("multicast", "ipv6"):
        pytest.skip("the loopback interface has no route to IPv6 groups")
    run_in_processes(ON_LOOPBACK[family], *ends(name), free_port(), (forker, forker))


def with_core(core: str) -> Spawn:
    def spawn(command: list[str], fds: tuple[int, ...]) -> subprocess.Popen[Any]:
        return subprocess.Popen(command, pass_fds=fds, env={**os.environ, "RDMACM_CORE": core})

    return spawn


@pytest.fixture(scope="module")
def forkers_by_core() -> Iterator[dict[str, Forker]]:
    """A forker with the compiled core, and one with Python alone."""
    with closing(Forker(with_core("c"))) as c, closing(Forker(with_core("python"))) as python:
        yield {"c": c, "python": python}


@pytest.mark.slow
@pytest.mark.skipif(compiled is None, reason=f"runs {description()}")
@pytest.mark.parametrize("name", [name for name in scenarios.NAMES if name not in SLOW])
@pytest.mark.parametrize("cores", [("c", "python"), ("python", "c")], ids="-".join)
def test_scenario_runs_with_one_core_at_each_end(
    name: str, cores: tuple[str, str], forkers_by_core: dict[str, Forker]
) -> None:
    passive, active = (forkers_by_core[core] for core in cores)
    run_in_processes(ON_LOOPBACK["ipv4"], *ends(name), free_port(), (passive, active))


@pytest.fixture(scope="module")
def forkers() -> Iterator[tuple[Forker, Forker]]:
    """One forker on each of two hosts."""
    with two_hosts() as hosts, closing(Forker(spawner(hosts.a))) as a, closing(Forker(spawner(hosts.b))) as b:
        yield a, b


def spawner(host: Host) -> Spawn:
    def spawn(command: list[str], fds: tuple[int, ...]) -> subprocess.Popen[Any]:
        return host.popen_python(command[1:], pass_fds=fds)

    return spawn


@pytest.mark.slow
@needs_netns
@SCENARIOS
@pytest.mark.parametrize("family", BETWEEN_HOSTS)
def test_scenario_runs_between_namespaces(name: str, family: str, forkers: tuple[Forker, Forker]) -> None:
    run_in_processes(BETWEEN_HOSTS[family], *ends(name), free_port(), forkers)
