"""The table of rules, and what is written of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rdmacm.doctor import BY_ID, QUESTIONS, RULES
from rdmacm.doctor.pages import markdown

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TESTS = "\n".join(path.read_text(encoding="utf-8") for path in HERE.glob("test_*.py"))
SOURCES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "src" / "rdmacm").rglob("*.py")}


def calls_of(what: str) -> set[str]:
    """The rules for which tests call a helper with a literal id."""
    call = rf"\b{what}\((?:(?!fires\(|silent\().){{0,300}}?\"([A-Z]\d+)\""
    return set(re.findall(call, TESTS, re.DOTALL))


def test_ids_and_questions() -> None:
    assert len(BY_ID) == len(RULES)
    assert {rule.question for rule in RULES} <= set(QUESTIONS)
    assert all(re.fullmatch(r"[A-Z]\d{1,2}", rule.id) and rule.symptoms and rule.sources for rule in RULES)


def test_each_rule_has_a_test_where_it_fires_and_one_where_it_is_silent() -> None:
    assert (BY_ID.keys() - calls_of("fires"), BY_ID.keys() - calls_of("silent")) == (set(), set())


def test_the_page_has_the_table() -> None:
    text = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert text == markdown(RULES)
    # A search for a message finds the rule.
    assert [symptom for rule in RULES for symptom in rule.symptoms if symptom not in text] == []


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if "rdmacm doctor" in SOURCES[path]], ids=lambda path: path.name
)
def test_messages_name_rules_that_exist(path: Path) -> None:
    assert set(re.findall(r"rdmacm doctor ([A-Z]\d+)", SOURCES[path])) <= BY_ID.keys()
