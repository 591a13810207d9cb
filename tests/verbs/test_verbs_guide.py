"""The example of docs/verbs.md runs, on this host's loopback."""

from __future__ import annotations

import re
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "verbs.md"


def test_example_of_the_verbs_guide_runs() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    exec(compile(block, str(GUIDE), "exec"), {})
