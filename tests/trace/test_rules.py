"""The rules that verdicts name are those of the doctor."""

from __future__ import annotations

import re
from pathlib import Path

from rdmacm.doctor.table import RULES
from rdmacm.trace import verdicts


def test_each_rule_of_a_verdict_is_one_of_the_doctor() -> None:
    named = set(re.findall(r'"([A-Z]\d{1,2})"', Path(verdicts.__file__).read_text(encoding="utf-8")))
    assert {"A3", "C1", "G8", "J1", "Q3", "R2"} < named
    assert named <= {rule.id for rule in RULES}
