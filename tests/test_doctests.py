"""The examples in docstrings say what happens."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "module",
    [
        *["addrinfo", "cmid.identifier", "explain", "testing", "testing.fabric", "testing.subnet", "address"],
        *["proto.sa", "proto.sa.query", "verbs.device"],
        *["proto.roce.headers", "proto.roce.icrc", "proto.roce.psn"],
    ],
)
def test_examples(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"rdmacm.{module}"))
    assert result.failed == 0


def test_modules_with_examples_are_found() -> None:
    assert doctest.testmod(importlib.import_module("rdmacm")).attempted > 0
