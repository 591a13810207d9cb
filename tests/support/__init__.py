"""What the tests stand on: networks in namespaces and in memory, a name server that says what it is told, helpers."""

import pytest

# Their assertions are the tests': they say what they compared, as those in a test do.
pytest.register_assert_rewrite("support.lookups", "support.resolving", "support.world")
