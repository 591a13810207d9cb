"""Every operation between our device and the kernel's: each is requested at either end, whichever end connects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from interop.batches import Batches
from interop.judge import REFUSAL, RNR
from interop.operations import OPERATIONS, Operation
from interop.scenario import Guest, require_kernel


def parts(operations: Iterable[Operation]) -> list[Any]:
    """A parameter for each part of the operations."""
    return [
        pytest.param(
            operation.name,
            part,
            # The end that requests counts as the active one, whichever end connected.
            marks=pytest.mark.cell(operation.row, {"request": "active", "respond": "passive"}.get(part, part)),
            id=f"{operation.name}-{part}",
        )
        for operation in operations
        if not operation.needs_loss
        for part in operation.parts
    ]


NEW = [operation for operation in OPERATIONS if operation.since is not None]
CONNECTIONS = pytest.mark.parametrize(
    ("listens", "family"),
    [
        pytest.param("rxe", 4, marks=pytest.mark.debian_kernel, id="rxe-IPv4"),
        pytest.param("soft", 4, id="soft-IPv4"),
        pytest.param("rxe", 6, id="rxe-IPv6"),
        pytest.param("soft", 6, id="soft-IPv6"),
    ],
)


@CONNECTIONS
@pytest.mark.parametrize(("name", "part"), parts(each for each in OPERATIONS if each.since is None))
def test_both_devices_do(guest: Guest, batches: Batches, family: int, listens: str, name: str, part: str) -> None:
    batch = batches.get(guest, family=family, listens=listens, naks=RNR | REFUSAL)
    assert batch.failure(name, part) is None


@CONNECTIONS
@pytest.mark.parametrize(("name", "part"), parts(NEW))
def test_both_devices_of_a_newer_kernel_do(
    guest: Guest, batches: Batches, family: int, listens: str, name: str, part: str
) -> None:
    needed = next(operation.since for operation in NEW if operation.name == name)
    assert needed is not None
    require_kernel(guest, needed)
    names = [operation.name for operation in NEW]
    batch = batches.get(guest, family=family, listens=listens, only=names, naks=REFUSAL)
    assert batch.failure(name, part) is None
