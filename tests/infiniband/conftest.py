"""The fabrics these tests run on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infiniband.fabric import SimulatedFabric, missing
from infiniband.hosts import IbHost
from infiniband.sites import SITES, Embedded, OpenSM, Site, Virtual
from rdmacm import CmId


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here not in item.path.parents:
            continue
        params = getattr(getattr(item, "callspec", None), "params", {}).values()
        if "opensm" in params or {"fabric", "own_fabric", "lmc_fabric"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.infiniband)
            item.add_marker(pytest.mark.slow)  # the same tests run in memory, except those of the fabric itself


def _site(request: pytest.FixtureRequest, fabric: str) -> Site:
    if request.param == "opensm":
        return OpenSM(request.getfixturevalue(fabric))
    return Embedded() if request.param == "embedded" else Virtual()


@pytest.fixture(params=SITES)
def site(request: pytest.FixtureRequest) -> Site:
    """A subnet; the test must leave it as it was."""
    return _site(request, "fabric")


@pytest.fixture(params=SITES)
def own_site(request: pytest.FixtureRequest) -> Site:
    """A subnet for a test that changes it."""
    return _site(request, "own_fabric")


@pytest.fixture
def a(site: Site) -> Iterator[IbHost]:
    with site.host("HostA") as host:
        yield host


@pytest.fixture
def b(site: Site) -> Iterator[IbHost]:
    with site.host("HostB") as host:
        yield host


@pytest.fixture
def offered(b: IbHost) -> Iterator[CmId]:
    """A listener of host B that is registered as ``storage``."""
    with b.listening() as listener:
        listener.register_service("storage", b"v1")
        yield listener


@pytest.fixture(scope="module")
def fabric() -> Iterator[SimulatedFabric]:
    """HostA, HostB, HostC and HostM. The tests of a file share them and release what they use."""
    if reason := missing("ibsim", "opensm"):
        pytest.skip(reason)
    with SimulatedFabric() as fabric:
        yield fabric


@pytest.fixture
def lmc_fabric() -> Iterator[SimulatedFabric]:
    """The same for one test, with two LIDs for each port."""
    if reason := missing("ibsim", "opensm"):
        pytest.skip(reason)
    with SimulatedFabric(lmc=1) as fabric:
        yield fabric


@pytest.fixture
def own_fabric() -> Iterator[SimulatedFabric]:
    """The same for one test, which may break it."""
    if reason := missing("ibsim", "opensm"):
        pytest.skip(reason)
    with SimulatedFabric() as fabric:
        yield fabric
