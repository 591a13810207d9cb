"""The Python of docs/porting.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[1] / "docs" / "porting.md"


def test_programs_of_the_porting_guide_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)
    assert capsys.readouterr().out == "pong\npong\n"


def test_each_call_of_c_is_in_the_python_beside_it() -> None:
    """In the same order; both clients are preceded by the start of their server."""
    text = GUIDE.read_text(encoding="utf-8")
    calls = re.compile(r"\b((?:rdma|ibv)_\w+)\(")
    pairs = re.findall(r"^```c\n(.*?)^```.*?^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(pairs) == 3
    for c, python in pairs:
        in_python = iter(calls.findall(python))
        assert [call for call in calls.findall(c) if call not in in_python] == []
