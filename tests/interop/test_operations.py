"""Every operation with rdma-core's libraries and the kernel's device, at both ends of it, whoever connects."""

from __future__ import annotations

import pytest

from interop.batches import LISTENERS, Batches
from interop.judge import REFUSAL, RNR
from interop.operations import OPERATIONS
from interop.scenario import Guest

PARTS = [
    pytest.param(
        operation.name,
        part,
        # Who requests is active, whoever it was that connected.
        marks=pytest.mark.cell(operation.row, {"request": "active", "respond": "passive"}.get(part, part)),
        id=f"{operation.name}-{part}",
    )
    for operation in OPERATIONS
    for part in operation.parts
]


@pytest.mark.parametrize("family", [4, 6], ids=["IPv4", "IPv6"])
@pytest.mark.parametrize("listens", LISTENERS)
@pytest.mark.parametrize(("name", "part"), PARTS)
def test_operation(guest: Guest, batches: Batches, family: int, listens: str, name: str, part: str) -> None:
    batch = batches.get(guest, family=family, listens=listens, naks=RNR | REFUSAL)
    assert batch.failure(name, part) is None
