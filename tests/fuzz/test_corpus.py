"""The seeds of every fuzz target, and the inputs in the corpus, raise no exception."""

from __future__ import annotations

import pytest

from fuzz.compiled import COMPILED
from fuzz.harness import CORPUS, Source, load_targets, stored_inputs
from support.rows import for_each

TARGETS = load_targets()


@for_each("name", list(TARGETS))
def test_inputs_of_the_corpus_are_handled(name: str) -> None:
    target = TARGETS[name]
    for data in (b"", *target.seeds(), *stored_inputs(name)):
        try:
            target.run(data)
        except Exception:
            pytest.fail(f"python3 dev.py fuzz {name} --input {data.hex()}")


def test_corpus_is_small_and_belongs_to_targets() -> None:
    files = list(CORPUS.iterdir())
    assert {path.stem for path in files} <= {*TARGETS, *COMPILED}
    assert sum(path.stat().st_size for path in files) < 300_000


def test_inputs_fit_their_targets() -> None:
    for name, target in TARGETS.items():
        longest = max(map(len, (*target.seeds(), *stored_inputs(name))), default=0)
        assert longest <= target.max_size, name


def test_source_ends_with_zeros() -> None:
    source = Source(b"\1\2\3")
    assert (source.number(), source.choice("abc"), source.is_empty) == (1, "c", False)
    assert (source.number(2), source.is_empty, source.rest(), source.number()) == (0x300, True, b"", 0)
