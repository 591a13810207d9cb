"""``for_each``, the decorator that runs one test with every row of a table."""

from __future__ import annotations

import pytest

from support.rows import for_each


def test_all_rows_run_and_each_failing_one_is_named() -> None:
    seen = []

    @for_each("number", range(5))
    @for_each(("word", "size"), [("ab", 2), ("abc", 3)], ids=lambda value: value)
    def check(number: int, word: str, size: int) -> None:
        seen.append((number, word))
        assert len(word) == size
        assert number not in (1, 3) or word != "abc", "not this one"

    with pytest.raises(AssertionError) as failed:
        check()
    assert len(seen) == 10
    lines = str(failed.value).splitlines()
    assert lines[0] == "2 of 5 rows failed"
    assert [line.split(":")[0].strip() for line in lines if "number=" in line] == ["number=1", "number=3"]
    assert sum("abc-3: AssertionError: not this one" in line for line in lines) == 2


def test_missing_exception_is_a_failing_row() -> None:
    @for_each("value", [1, 0])
    def check(value: int) -> None:
        with pytest.raises(ZeroDivisionError):
            1 / value

    with pytest.raises(AssertionError, match="value=1: Failed: DID NOT RAISE"):
        check()


@for_each("value", [1, 2])
def test_fixtures_are_passed_on(value: int, request: pytest.FixtureRequest) -> None:
    assert request.node.name == "test_fixtures_are_passed_on"
    assert value in (1, 2)
