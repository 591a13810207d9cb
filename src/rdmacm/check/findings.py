"""What is found out about each step, as data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class Step(IntEnum):
    """The steps in order. The value is the exit status of a check that ends there."""

    NAME = 10
    ROUTE = 11
    NEIGHBOUR = 12
    PORT = 13
    MANAGER = 14
    MTU = 15
    LOSS = 16
    CLASS = 17

    @property
    def label(self) -> str:
        """The step as it is shown."""
        return _LABELS[self]


_LABELS = {
    Step.NAME: "name",
    Step.ROUTE: "route",
    Step.NEIGHBOUR: "neighbour",
    Step.PORT: "UDP 4791",
    Step.MANAGER: "manager",
    Step.MTU: "path MTU",
    Step.LOSS: "loss",
    Step.CLASS: "class",
}


class Sign(Enum):
    """How a step went. The value is the word in JSON."""

    GOOD = "good"
    BAD = "bad"
    #: It cannot be told from this side, or is only likely.
    UNKNOWN = "unknown"
    NOT_REACHED = "not reached"


@dataclass(frozen=True, slots=True)
class Finding:
    """One step.

    - ``figure``: what was measured, as text.
    - ``meaning``: what it means, of a step that is not good, or that will be noticed.
    - ``command``: what mends it, or tells more.
    - ``likely``: whether the meaning is an inference that this side alone cannot prove.
    - ``values``: the figures as data.
    - ``rule``: the rule of ``rdmacm doctor`` about this, "" if there is none.
    """

    step: Step
    sign: Sign
    figure: str
    meaning: str = ""
    command: str = ""
    likely: bool = False
    values: dict[str, object] | None = None
    rule: str = ""

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {
            "step": self.step.label,
            "result": self.sign.value,
            "figure": self.figure,
            "meaning": self.meaning or None,
            "likely": self.likely,
            "command": self.command or None,
            "rule": self.rule or None,
            **(self.values or {}),
        }
