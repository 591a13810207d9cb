"""Every operation between our device and the kernel's: each is requested at either end, whichever end connects."""

from __future__ import annotations

import pytest

from interop.batches import Batches
from interop.judge import REFUSAL, RNR
from interop.operations import OPERATIONS
from interop.scenario import Guest

PARTS = [
    pytest.param(
        operation.name,
        part,
        # The end that requests counts as the active one, whichever end connected.
        marks=pytest.mark.cell(operation.row, {"request": "active", "respond": "passive"}.get(part, part)),
        id=f"{operation.name}-{part}",
    )
    for operation in OPERATIONS
    if not operation.needs_loss
    for part in operation.parts
]


@pytest.mark.parametrize(
    ("listens", "family"),
    [
        pytest.param("rxe", 4, marks=pytest.mark.debian_kernel, id="rxe-IPv4"),
        pytest.param("soft", 4, id="soft-IPv4"),
        pytest.param("rxe", 6, id="rxe-IPv6"),
        pytest.param("soft", 6, id="soft-IPv6"),
    ],
)
@pytest.mark.parametrize(("name", "part"), PARTS)
def test_both_devices_do(guest: Guest, batches: Batches, family: int, listens: str, name: str, part: str) -> None:
    batch = batches.get(guest, family=family, listens=listens, naks=RNR | REFUSAL)
    assert batch.failure(name, part) is None
