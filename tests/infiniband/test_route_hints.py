"""The route in the hints of getaddrinfo as OpenSM takes it: the answer has what is set, or there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from infiniband.hosts import PORT, IbHost
from infiniband.sites import Site
from rdmacm import AddressFamily, AddrInfo, GaiError, PathData, PathRecord, PortSpace, RaiFlag, create_ep, getaddrinfo
from rdmacm.address import Gid
from rdmacm.constants import EAI
from rdmacm.proto.sa.attributes import Selector
from rdmacm.proto.sa.restriction import meets
from rdmacm.soft import routes
from rdmacm.testing import MemoryNetwork

OPEN = PathRecord(Gid(), Gid(), pkey=0)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine keeps the administrator waiting for longer than users do."""
    monkeypatch.setattr(routes, "ROUTE_TIMEOUT", 20.0)


@pytest.fixture
def one(site: Site) -> Iterator[IbHost]:
    with site.host("HostA", MemoryNetwork()) as host:
        yield host


@pytest.fixture
def two(site: Site) -> Iterator[IbHost]:
    with site.host("HostB", MemoryNetwork()) as host:
        yield host


def lookup(one: IbHost, two: IbHost, like: PathRecord) -> AddrInfo:
    fields: dict[str, Any] = {"flags": RaiFlag.FAMILY, "family": AddressFamily.IB, "port_space": PortSpace.IB}
    (info,) = getaddrinfo(str(two.gid), PORT, route=[PathData(like)], provider=one.provider, **fields)
    return info


def answer(one: IbHost, two: IbHost, like: PathRecord) -> PathRecord | int | None:
    """The path of a lookup, or the code of its error."""
    try:
        return lookup(one, two, like).route[0].path
    except GaiError as error:
        return error.errno


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"mtu": 4},
        {"mtu": 3},
        {"mtu": 4, "mtu_selector": Selector.LESS},
        {"mtu": 1, "mtu_selector": Selector.GREATER},
        {"pkey": 0xFFFF},
    ],
)
def test_answer_has_what_is_set(one: IbHost, two: IbHost, fields: dict[str, Any]) -> None:
    info = lookup(one, two, OPEN.replace(**fields))
    (path,) = (data.path for data in info.route)
    assert meets(path, OPEN.replace(**fields))
    assert 0 not in (path.slid, path.dlid, path.mtu_bytes)
    with create_ep(info, provider=one.provider) as cmid:
        assert cmid.route.path_rec == (path,)


@pytest.mark.parametrize(
    "fields",
    [
        {"mtu": 5, "mtu_selector": Selector.GREATER},
        {"dlid": 0xBFFF},
        {"sgid": Gid("fe80::1:2:3")},
        {"dgid": Gid("fe80::1:2:3")},
        {"pkey": 0x8123},
    ],
)
def test_path_that_does_not_exist_is_nodata(one: IbHost, two: IbHost, fields: dict[str, Any]) -> None:
    with pytest.raises(GaiError) as caught:
        lookup(one, two, OPEN.replace(**fields))
    assert caught.value.errno == EAI.NODATA


@pytest.mark.parametrize(
    "fields",
    [
        {"sl": 5},
        {"traffic_class": 4},
        {"flow_label": 7},
        {"hop_limit": 9},
        {"qos_class": 3},
        {"packet_life_time": 17},
        {"rate": 2},
    ],
)
def test_field_that_an_administrator_may_ignore_is_met_or_refused(
    one: IbHost, two: IbHost, fields: dict[str, Any]
) -> None:
    """OpenSM takes any SL, and answers with traffic class, flow label and hop limit 0 whatever is asked for."""
    found = answer(one, two, OPEN.replace(**fields))
    assert found == EAI.NODATA or (isinstance(found, PathRecord) and meets(found, OPEN.replace(**fields)))
