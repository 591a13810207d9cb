"""What is said of a provider is what its calls do; ``interop/test_kernel_provider.py`` tries the kernel's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from infiniband.hosts import IbHost
from infiniband.sites import Virtual
from rdmacm import PortSpace, open_device
from rdmacm.capabilities import (
    INFINIBAND,
    KERNEL_WITHOUT_LIBRARY,
    NOWHERE,
    PROVIDERS,
    SOFT,
    Capabilities,
    Feature,
    absent,
)
from rdmacm.kernel.bare_device import BareDevice
from rdmacm.kernel.sysfs import Sysfs
from rdmacm.provider import get_provider
from rdmacm.testing import Fabric
from rdmacm.verbs import Context, QPType
from support.capabilities import CALLS, OF_IDS, Place, check

OF_DEVICES = [feature for feature in CALLS if feature not in OF_IDS]
ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("feature", CALLS, ids=lambda feature: feature.name)
def test_software_devices(feature: Feature) -> None:
    provider = get_provider("soft")
    context = open_device("soft_lo", provider)
    assert context.backend.capabilities is provider.capabilities is SOFT
    place = Place(context, provider, ("127.0.0.1", 0), ("127.0.0.1", 7471))
    place.stack.enter_context(context)
    check(place, feature, SOFT)


@pytest.mark.parametrize("feature", CALLS, ids=lambda feature: feature.name)
def test_simulated_devices(feature: Feature) -> None:
    fabric = Fabric()
    provider = fabric.host("a", "10.0.0.1").provider
    fabric.host("b", "10.0.0.2")
    context = open_device("soft_eth0", provider)
    assert context.backend.capabilities is provider.capabilities is SOFT
    place = Place(context, provider, ("10.0.0.1", 0), ("10.0.0.2", 7471))
    place.stack.enter_context(context)
    check(place, feature, SOFT)


@pytest.mark.parametrize("feature", [each for each in CALLS if each is not Feature.CAPTURE], ids=lambda each: each.name)
def test_infiniband_ports(feature: Feature) -> None:
    """A capture is the provider's, of its software devices."""
    site = Virtual()
    with site.host("a") as a, site.host("b") as b:
        assert isinstance(b, IbHost)
        context = open_device(a.device, a.provider)
        assert context.backend.capabilities is INFINIBAND
        spaces = PortSpace.IB, PortSpace.UDP
        check(Place(context, a.provider, a.source, b.at(), spaces), feature, INFINIBAND)
        context.close()


@pytest.mark.parametrize("feature", OF_DEVICES, ids=lambda feature: feature.name)
def test_kernel_devices_without_libibverbs(feature: Feature, tmp_path: Path) -> None:
    device = BareDevice("rxe0", Sysfs(str(tmp_path)), None)
    assert device.capabilities is KERNEL_WITHOUT_LIBRARY
    check(Place(Context("rxe0", lambda: None, lambda: device)), feature, KERNEL_WITHOUT_LIBRARY)


@pytest.mark.parametrize("known", PROVIDERS, ids=str)
def test_each_feature_is_there_absent_or_the_devices(known: Capabilities) -> None:
    assert not set(known.lacks) & known.by_device
    assert not set(NOWHERE) & (set(known.lacks) | known.by_device)


def test_each_feature_has_a_call() -> None:
    assert set(Feature) - set(CALLS) == {Feature.MULTICAST_TO_OTHERS}


def test_each_type_of_queue_pair_is_a_feature() -> None:
    assert [Feature.of_type(each).text for each in QPType] == [f"queue pairs of type {each.name}" for each in QPType]


def test_error_says_who_lacks_what_why_and_what_to_try() -> None:
    error = absent(Feature.ALTERNATE_PATHS, "resolve_route", "10.0.0.2:7471", SOFT)
    assert str(error) == (
        "resolve_route 10.0.0.2:7471: the provider soft on RoCE has no alternate paths: a route has one path "
        "[EOPNOTSUPP]; try: the provider soft with RDMACM_IB"
    )
    assert (
        absent(Feature.DMA_BUFS, "reg_dmabuf_mr", "soft_lo", SOFT).hint == "the provider kernel, where its device can"
    )
    assert absent(Feature.DMA_BUFS, "reg_dmabuf_mr", "mlx5_0", "the device").hint is None
    assert absent(Feature.QP_UD, "create_qp", "siw0", "the device").hint == "the provider soft"
    assert str(absent(Feature.THREAD_DOMAINS, "alloc_td", "soft_lo")) == (
        "alloc_td soft_lo: no provider has thread domains: one lock guards a provider [EOPNOTSUPP]"
    )


def test_page_has_the_tables_of_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tables")
    sys.modules.pop("parity", None)
    import parity

    page = (ROOT / "docs" / "parity.md").read_text("utf-8")
    assert parity.with_tables(page) == page
