"""Write docs/doctor.md from the table of rules: ``python3 docs/make_doctor.py``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from rdmacm.doctor import RULES  # noqa: E402 (after the path of the sources)
from rdmacm.doctor.pages import markdown  # noqa: E402

if __name__ == "__main__":
    (ROOT / "docs" / "doctor.md").write_text(markdown(RULES), encoding="utf-8")
