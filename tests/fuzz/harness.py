"""What every fuzz target has: a function that takes bytes, seeds, and a limit of their length.

A target raises an exception for a fault and nothing else. It keeps no state from one input to the next, so that an
input alone reproduces a fault. :mod:`fuzz.drive` runs targets with either of two drivers, ``test_corpus`` replays the
stored inputs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

__all__ = ["CORPUS", "Source", "Target", "load_targets", "stored_inputs", "target"]

T = TypeVar("T")

#: A file for each target, with an input in each line, in hexadecimal.
CORPUS = Path(__file__).parent / "corpus"

#: The modules with targets, one for each room of the package.
_MODULES = (
    "fuzz.wire_formats",
    "fuzz.engines",
    "fuzz.datagrams",
    "fuzz.unreliable",
    "fuzz.xrc",
    "fuzz.local_peers",
    "fuzz.text",
    "fuzz.devices",
    "fuzz.groups",
    "fuzz.windows",
    "fuzz.rsockets",
    "fuzz.traces",
)


@dataclass(frozen=True, slots=True)
class Target:
    """A decoder or engine to fuzz: ``run(data)`` raises an exception for a fault.

    ``seeds()`` returns valid inputs, made with the package's own encoders. ``max_size`` is in bytes.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    max_size: int


_targets: dict[str, Target] = {}


def target(
    seeds: Callable[[], Iterable[bytes]] = tuple, max_size: int = 512
) -> Callable[[Callable[[bytes], None]], Callable[[bytes], None]]:
    """Register a function as the target of its name."""

    def register(run: Callable[[bytes], None]) -> Callable[[bytes], None]:
        _targets[run.__name__] = Target(run.__name__, run, seeds, max_size)
        return run

    return register


def load_targets(*modules: str) -> dict[str, Target]:
    """The targets of some modules, or of all, by name."""
    for module in modules or _MODULES:
        importlib.import_module(module)
    return dict(_targets)


def stored_inputs(name: str) -> list[bytes]:
    """The inputs of a target in the corpus."""
    path = CORPUS / f"{name}.txt"
    return [bytes.fromhex(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


class Source:
    """Numbers and choices made from the bytes of an input, for targets whose input is a list of steps.

    After the last byte, everything is 0.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_empty(self) -> bool:
        return self._at >= len(self._data)

    def take(self, size: int) -> bytes:
        """The next bytes, fewer at the end of the input."""
        found = self._data[self._at : self._at + size]
        self._at += size
        return found

    def rest(self) -> bytes:
        return self.take(len(self._data))

    def number(self, size: int = 1) -> int:
        """A number of ``size`` bytes."""
        return int.from_bytes(self.take(size).ljust(size, b"\0"), "big")

    def choice(self, options: Sequence[T]) -> T:
        return options[self.number() % len(options)]
