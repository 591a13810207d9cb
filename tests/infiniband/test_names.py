"""The names of InfiniBand ports."""

from __future__ import annotations

import errno

import pytest

from infiniband.fabric import SimulatedFabric
from rdmacm.errors import RdmaError
from rdmacm.ib import port_names_in, transport_of
from support.rows import for_each


@for_each(
    ("name", "meant"),
    [
        ("ibsim:HostA", "ibsim:HostA"),
        ("ibsim:HostA@lab", "ibsim:HostA@lab"),
        ("umad:mlx5_0/2", "umad:mlx5_0/2"),
        ("umad:mlx5_0", "umad:mlx5_0/1"),
        ("umad:rocep3s0f1.2-x/254", "umad:rocep3s0f1.2-x/254"),
    ],
)
def test_valid_port_names_are_normalized(name: str, meant: str) -> None:
    transport = transport_of(name)
    assert transport.name == meant
    assert transport.fileno() == -1


@for_each(
    "name",
    [
        "", ":", "HostA", "ibsim", "ibsim:", "ibsim:@lab", "ibsim:HostA@", "mlx5_0/1", "umad:", "umad:/1",
        "umad:mlx5_0/", "umad:mlx5_0/0", "umad:mlx5_0/255", "umad:mlx5_0/-1", "umad:mlx5_0/x", "umad:mlx5_0/²",
        "umad:../x/1", "umad:a/b/1", "umad:a\0b", "verbs:mlx5_0/1",
    ],
)  # fmt: skip
def test_invalid_port_names_raise(name: str) -> None:
    with pytest.raises(RdmaError, match="umad:mlx5_0/1") as raised:
        transport_of(name)
    assert raised.value.errno == errno.EINVAL
    if name.strip():
        with pytest.raises(RdmaError):
            port_names_in({"RDMACM_IB": f"ibsim:HostA,{name}"})


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ("", []),
        (" , ", []),
        ("ibsim:HostA", ["ibsim:HostA"]),
        ("umad:mlx5_0/1, ibsim:HostA@lab,,umad:mlx5_0/1", ["umad:mlx5_0/1", "ibsim:HostA@lab"]),
    ],
)
def test_environment_lists_the_ports(value: str, wanted: list[str]) -> None:
    assert port_names_in({"RDMACM_IB": value}) == wanted
    assert port_names_in({}) == []


def test_named_port_opens(fabric: SimulatedFabric) -> None:
    transport = transport_of(f"ibsim:HostC@{fabric.base}")
    transport.open()
    assert transport.port().lid
    transport.close()
    with pytest.raises(RdmaError, match="no node 'HostX'"):
        transport_of(f"ibsim:HostX@{fabric.base}").open()
