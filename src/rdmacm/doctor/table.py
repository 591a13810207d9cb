"""The table of all rules, and what they say of a host."""

from __future__ import annotations

from dataclasses import dataclass

from rdmacm.doctor import address_table, connection_table, device_rules, gid_rules, namespace_rules
from rdmacm.doctor.rule import QUESTIONS, Found, Outcome, Quiet, Rule
from rdmacm.doctor.view import Host

#: All rules, in the order of docs/doctor.md.
RULES: tuple[Rule, ...] = (
    *device_rules.RULES,
    *namespace_rules.RULES,
    *address_table.RULES,
    *gid_rules.RULES,
    *connection_table.RULES,
)
BY_ID = {rule.id: rule for rule in RULES}


@dataclass(frozen=True)
class Answer:
    """A rule, and what it said."""

    rule: Rule
    outcome: Outcome

    @property
    def is_finding(self) -> bool:
        return isinstance(self.outcome, Found) and not self.outcome.is_note

    @property
    def is_note(self) -> bool:
        return isinstance(self.outcome, Found) and self.outcome.is_note

    @property
    def state(self) -> str:
        """``finding``, ``note``, ``ok`` or ``not asked``."""
        if isinstance(self.outcome, Found):
            return "note" if self.outcome.is_note else "finding"
        return "ok" if isinstance(self.outcome, Quiet) else "not asked"

    @property
    def saw(self) -> str:
        """What was measured, or why nothing was."""
        if isinstance(self.outcome, Found):
            return self.outcome.text
        return self.outcome.saw if isinstance(self.outcome, Quiet) else self.outcome.why


@dataclass(frozen=True)
class Examination:
    """What all rules say of a host, in the order of the questions."""

    host: Host
    answers: tuple[Answer, ...]

    @property
    def findings(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.is_finding]

    @property
    def notes(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.is_note]

    @property
    def first(self) -> str | None:
        """The first question with a finding; None without findings."""
        return self.findings[0].rule.question if self.findings else None

    def state(self, question: str) -> str:
        """``ok``, ``finding``, or ``not reached``: behind the first question with a finding."""
        if self.first is None or QUESTIONS.index(question) < QUESTIONS.index(self.first):
            return "ok"
        return "finding" if question == self.first else "not reached"


def examine(host: Host) -> Examination:
    """What all rules say of a host."""
    ordered = sorted(RULES, key=lambda rule: QUESTIONS.index(rule.question))
    return Examination(host, tuple(Answer(rule, rule.outcome(host)) for rule in ordered))
