"""One test for all rows of a table, which reports each row that fails."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import pytest

Test: TypeAlias = Callable[..., None]


def for_each(
    names: str | Sequence[str], rows: Iterable[Any], ids: Callable[[Any], object] | Sequence[str] | None = None
) -> Callable[[Test], Test]:
    """``pytest.mark.parametrize`` for pure functions: one item that calls the test with every row.

    Thousands of items cost seconds to collect, and a row of a table does not need fixtures of its own. All rows run;
    at the end an AssertionError names each that failed and what it failed with. Several of these on one test make the
    product of their rows, as with ``parametrize``.
    """
    fields = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    table = list(rows)

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in fields]

        @functools.wraps(test, updated=())
        def run(*arguments: Any, **fixtures: Any) -> None:
            failures: list[tuple[str, BaseException]] = []
            for index, row in enumerate(table):
                values = (row,) if len(fields) == 1 else row
                try:
                    test(*arguments, **fixtures, **dict(zip(fields, values, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    failures.append((_name(ids, index, fields, values), error))
            if failures:
                lines = [f"  {name}: {type(error).__name__}: {error}" for name, error in failures]
                summary = f"{len(failures)} of {len(table)} rows failed"
                raise AssertionError("\n".join([summary, *lines])) from failures[0][1]

        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        if marks := getattr(test, "pytestmark", None):
            run.pytestmark = marks  # type: ignore[attr-defined]
        return run

    return decorate


def _name(
    ids: Callable[[Any], object] | Sequence[str] | None, index: int, fields: list[str], values: Sequence[Any]
) -> str:
    if callable(ids):
        return "-".join(str(ids(value)) for value in values)
    if ids is not None:
        return ids[index]
    return ", ".join(f"{field}={value!r}" for field, value in zip(fields, values, strict=True))
