"""docs/parity.md lists every call, names tests that exist, and has a row for each rule of the differential tests."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from rdmacm import cma

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")


def name_lists(file: str) -> dict[str, list[str]]:
    """The lists of names in a file of tests/data, by section."""
    lines = (ROOT / "tests" / "data" / file).read_text(encoding="utf-8").splitlines()
    lists: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("["):
            names = lists[line.strip("[]")] = []
        elif line and not line.startswith("#"):
            names += line.split()
    return lists


def test_documented_calls_match_rdmacm_cma() -> None:
    table = TEXT[TEXT.index("## Calls") : TEXT.index("## rdma_getaddrinfo")]
    rows = re.findall(r"^\| ((?!rdma_client)rdma_[^|]*) \| ([^|]*) \|", table, re.MULTILINE)
    names = {name: state.startswith("done") for row, state in rows for name in row.split(", ")}
    assert len(names) > 60
    assert {name: hasattr(cma, name) for name in names} == names
    functions = {name for name, _ in inspect.getmembers(cma, inspect.isfunction) if name.startswith("rdma_")}
    assert functions == {name for name, there in names.items() if there}


def test_every_call_and_tool_of_the_manual_pages_has_a_row() -> None:
    table = TEXT[TEXT.index("## Calls") : TEXT.index("### Names of the headers")]
    documented = {name for row in re.findall(r"^\| ([^|`]*) \|", table, re.MULTILINE) for name in row.split(", ")}
    lists = name_lists("librdmacm_calls.txt")
    assert [len(names) for names in lists.values()] == [61, 27, 13]
    assert {name for names in lists.values() for name in names} == documented - {"page", "---"}


def patterns_of() -> list[str]:
    """The patterns of the names that docs/parity.md gives reasons for."""
    table = TEXT[TEXT.index("### Names of the headers") : TEXT.index("### Fields of structures")]
    return [
        pattern
        for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
        for pattern in re.findall(r"`([^`]*)`", row)
    ]


def names_without_a_place(names: Iterable[str]) -> list[str]:
    """Those of some names that no pattern of docs/parity.md matches."""
    patterns = patterns_of()
    return sorted(name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns))


def test_lists_of_names_have_no_duplicates() -> None:
    names = [name for section in name_lists("c_names.txt").values() for name in section]
    assert len(names) == len(set(names)) > 790


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
    for name, least in (
        ("test_differential.py", 15),
        ("test_differential_ids.py", 15),
        ("test_differential_kernel.py", 2),
    ):
        source = (ROOT / "tests" / "interop" / name).read_text(encoding="utf-8")
        rules = re.findall(r'^@rule\("(.+?)"', source, re.MULTILINE)
        assert len(rules) == source.count("@rule(") >= least
        assert set(rules) - rows == set()
