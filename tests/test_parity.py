"""docs/parity.md lists every call, names tests that exist, and has a row for each rule of the differential tests."""

from __future__ import annotations

import re
from pathlib import Path

from rdmacm import cma

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")


def test_documented_calls_match_rdmacm_cma() -> None:
    table = TEXT[TEXT.index("## Calls") : TEXT.index("## rdma_getaddrinfo")]
    rows = re.findall(r"^\| (rdma_[^|]*) \| ([^|]*) \|", table, re.MULTILINE)
    names = {name: state.startswith("done") for row, state in rows for name in row.split(", ")}
    assert len(names) > 60
    assert {name: hasattr(cma, name) for name in names} == names
    assert {name for name in dir(cma) if name.startswith("rdma_")} <= set(names)


def test_named_tests_exist() -> None:
    sources = {path.relative_to(ROOT / "tests").as_posix(): path for path in (ROOT / "tests").rglob("*.py")}
    everything = "\n".join(path.read_text(encoding="utf-8") for path in sources.values())
    for name in re.findall(r"`([a-z/]*test_\w+\.py)`", TEXT):
        assert name.removeprefix("tests/") in sources
    for name in re.findall(r"`(test_\w+)`", TEXT):
        assert f"def {name}(" in everything
    for group in re.findall(r"conformance ((?:`\w+`(?:, )?)+)", TEXT):
        for name in re.findall(r"`(\w+)`", group):
            if not name.startswith("test_"):
                assert f"async def {name}_active(" in everything


def test_rules_of_the_differential_tests_are_rows() -> None:
    rows = set(re.findall(r"^\| ([^|]*?) \|", TEXT, re.MULTILINE))
    for name in ("test_differential.py", "test_differential_ids.py"):
        source = (ROOT / "tests" / "interop" / name).read_text(encoding="utf-8")
        rules = re.findall(r'^@rule\("(.+?)"', source, re.MULTILINE)
        assert len(rules) == source.count("@rule(") > 15
        assert set(rules) - rows == set()
