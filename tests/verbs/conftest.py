"""A recording device and a context on it."""

from __future__ import annotations

import pytest

from rdmacm.verbs import Context
from support.verbs import RecordingDevice, context_of


@pytest.fixture
def device() -> RecordingDevice:
    return RecordingDevice()


@pytest.fixture
def context(device: RecordingDevice) -> Context:
    return context_of(device)
