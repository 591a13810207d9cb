"""The fabrics these tests run on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infiniband.fabric import SimulatedFabric, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and {"fabric", "own_fabric"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.infiniband)


@pytest.fixture(scope="module")
def fabric() -> Iterator[SimulatedFabric]:
    """HostA, HostB, HostC and HostM, which the tests of a file share: what they take they give back."""
    if reason := missing("ibsim", "opensm"):
        pytest.skip(reason)
    with SimulatedFabric() as fabric:
        yield fabric


@pytest.fixture
def own_fabric() -> Iterator[SimulatedFabric]:
    """The same for one test that breaks it."""
    if reason := missing("ibsim", "opensm"):
        pytest.skip(reason)
    with SimulatedFabric() as fabric:
        yield fabric
