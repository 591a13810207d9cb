"""The examples in docstrings."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "module",
    [
        *["addrinfo", "cmid.identifier", "diagnosis.explain", "testing", "testing.fabric", "testing.subnet", "address"],
        *["proto.sa", "proto.sa.query", "verbs.device"],
        *["proto.roce.headers", "proto.roce.icrc", "proto.roce.psn"],
    ],
)
def test_examples_in_docstrings_give_their_results(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"rdmacm.{module}"))
    assert result.failed == 0


def test_package_docstring_has_examples() -> None:
    assert doctest.testmod(importlib.import_module("rdmacm")).attempted > 0
