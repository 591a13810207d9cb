"""Scenarios: what happens to a fabric and its hosts, and when, as text.

>>> from rdmacm.testing import Fabric
>>> fabric = Fabric(seed=1)
>>> a, b = fabric.host("a", "10.0.0.1"), fabric.host("b", "10.0.0.2")
>>> fabric.play('''
... at 0    set loss 0.2                  # of the whole fabric
... at 0    set latency 0.05 from a to b  # of one direction
... at 1    partition a b
... at 2.5  heal
... at 3    slow b 0.01                   # busy for 10 ms whenever it has done something
... at 3    drift b 1.01                  # its clock gains 10 ms in a second
... at 9    crash b
... lose REQ 1                            # rules of faults, as of a FaultScript
... ''')
>>> fabric.run(until=10)
True
>>> b.alive
False
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from rdmacm.testing.faults import FabricPacket, Verdict, check_durations, check_probabilities
from rdmacm.testing.script import FaultRule, FaultScript

#: What "set" sets: attributes of a fabric and of its links, and what checks them.
_SETTINGS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("loss", "duplicate", "reorder", "corrupt"), check_probabilities),
    **dict.fromkeys(("latency", "jitter"), check_durations),
}

#: The actions, and what their words are: a host, hosts joined by commas, a number, a setting, or the word itself.
_FORMS: dict[str, tuple[str, ...]] = {
    "crash": ("crash HOST",),
    "pause": ("pause HOST",),
    "resume": ("resume HOST",),
    "partition": ("partition HOSTS HOSTS", "partition from HOSTS to HOSTS"),
    "heal": ("heal",),
    "slow": ("slow HOST NUMBER",),
    "drift": ("drift HOST NUMBER",),
    "jump": ("jump NUMBER", "jump HOST NUMBER"),
    "set": ("set SETTING NUMBER", "set SETTING NUMBER from HOST to HOST"),
}


class Stage(Protocol):
    """Where a scenario is played; :class:`rdmacm.testing.Fabric` is one."""

    faults: Callable[[FabricPacket], Verdict | None] | None

    def call_at(self, when: float, function: Callable[[], object]) -> None: ...

    def crash(self, name: str) -> None: ...

    def pause(self, name: str) -> None: ...

    def resume(self, name: str) -> None: ...

    def partition(self, one: str | Iterable[str], other: str | Iterable[str], *, one_way: bool = False) -> None: ...

    def heal(self) -> None: ...

    def slow(self, name: str, seconds: float) -> None: ...

    def drift(self, name: str, rate: float) -> None: ...

    def jump(self, seconds: float, name: str | None = None) -> None: ...

    def link(self, source: str, destination: str) -> object: ...


@dataclass(frozen=True, slots=True)
class ScenarioEvent:
    """An event of a :class:`Scenario`. Raises ValueError for words that are no action.

    - ``time``: in seconds of the fabric's clock; at once if it is over.
    - ``action``: the words after the time, such as ``partition a b``.
    """

    time: float
    action: str

    def __post_init__(self) -> None:
        self._parsed()

    def __str__(self) -> str:
        return f"at {self.time:g} {self.action}"

    def _parsed(self) -> tuple[str, list[Any]]:
        """The form of the action, and the values of its words in capitals."""
        words = self.action.split()
        forms = _FORMS.get(words[0] if words else "", ())
        for form in forms:
            parts = form.split()
            if len(parts) == len(words) and all(p == w for p, w in zip(parts, words, strict=True) if p.islower()):
                try:
                    values = [_value(p, w) for p, w in zip(parts, words, strict=True) if p.isupper()]
                    if parts[0] == "set":
                        _SETTINGS[values[0]](**{values[0]: values[1]})
                except ValueError as error:
                    raise ValueError(f"no event of a scenario: {self.action!r} ({error})") from error
                return form, values
        known = "; ".join(form for all_forms in _FORMS.values() for form in all_forms)
        raise ValueError(f"no event of a scenario: {self.action!r}; try: {'; '.join(forms) or known}")

    def _happen(self, stage: Stage) -> None:
        """Let it happen now; ValueError for an unknown host."""
        form, values = self._parsed()
        action = form.split()[0]
        if action == "set":
            setattr(stage if len(values) == 2 else stage.link(*values[2:]), *values[:2])
        elif action == "jump":
            stage.jump(*reversed(values))
        elif action == "partition":
            stage.partition(*values, one_way="from" in form)
        else:
            getattr(stage, action)(*values)


def _value(part: str, word: str) -> Any:
    if part == "SETTING" and word not in _SETTINGS:
        raise ValueError(f"{word!r} is none of {', '.join(_SETTINGS)}")
    return float(word) if part == "NUMBER" else word.split(",") if part == "HOSTS" else word


class Scenario:
    """Events, and rules of faults. As text one a line; what follows ``#`` is a comment.

    Attributes:

    - ``events``: the events, in the order of the text.
    - ``rules``: the rules of a :class:`FaultScript`.
    """

    def __init__(self, events: Iterable[ScenarioEvent] = (), rules: Iterable[FaultRule] = ()) -> None:
        self.events: tuple[ScenarioEvent, ...] = tuple(events)
        self.rules: tuple[FaultRule, ...] = tuple(rules)

    @classmethod
    def parse(cls, text: str) -> Scenario:
        """Return the scenario of a text; ValueError for a line that is neither an event nor a rule.

        An event is ``at SECONDS`` and one of: ``crash HOST``, ``pause HOST``, ``resume HOST``, ``partition HOSTS
        HOSTS``, ``partition from HOSTS to HOSTS`` (one way), ``heal``, ``slow HOST SECONDS``, ``drift HOST RATE``,
        ``jump SECONDS``, ``jump HOST SECONDS``, ``set NAME VALUE``, ``set NAME VALUE from HOST to HOST``. HOSTS are
        names joined by commas, NAME is one of ``loss``, ``duplicate``, ``reorder``, ``corrupt``, ``latency`` and
        ``jitter``. Other lines are rules (:meth:`FaultRule.parse`).
        """
        events, rules = [], []
        for line in text.splitlines():
            words = line.partition("#")[0].split()
            if words and words[0] == "at":
                try:
                    time = float(words[1])
                except (IndexError, ValueError) as error:
                    raise ValueError(f"no event of a scenario: {line.strip()!r} ({error})") from error
                events.append(ScenarioEvent(time, " ".join(words[2:])))
            elif words:
                rules.append(FaultRule.parse(" ".join(words)))
        return cls(events, rules)

    def _play(self, stage: Stage) -> None:
        """Let it happen on a fabric. Its rules replace the fabric's; without rules, these stay."""
        if self.rules:
            stage.faults = FaultScript(self.rules)
        for event in self.events:
            stage.call_at(event.time, partial(event._happen, stage))

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.events, *self.rules)))

    def __repr__(self) -> str:
        return f"<Scenario {len(self.events)} events, {len(self.rules)} rules>"
