"""Whether a lab can be made here."""

from __future__ import annotations

import functools

import pytest

from rdmacm.errors import RdmaError
from rdmacm.lab import Lab


@functools.cache
def _reason() -> str | None:
    try:
        Lab(["h1"]).close()
    except RdmaError as error:
        return str(error)
    return None


#: ``pytestmark = needs_lab``, or ``@needs_lab``.
needs_lab = pytest.mark.skipif(_reason() is not None, reason=_reason() or "labs can be made")
