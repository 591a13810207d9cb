"""The Python of docs/porting.md beside the C. newcomer/ runs it."""

from __future__ import annotations

import re
from pathlib import Path

GUIDE = Path(__file__).parents[1] / "docs" / "porting.md"


def test_each_call_of_c_is_in_the_python_beside_it() -> None:
    """In the same order; both clients are preceded by the start of their server."""
    text = GUIDE.read_text(encoding="utf-8")
    calls = re.compile(r"\b((?:rdma|ibv)_\w+)\(")
    pairs = re.findall(r"^```c\n(.*?)^```.*?^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(pairs) == 3
    for c, python in pairs:
        in_python = iter(calls.findall(python))
        assert [call for call in calls.findall(c) if call not in in_python] == []
