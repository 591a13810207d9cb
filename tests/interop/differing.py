"""The same questions to two libraries, and their differences compared with docs/parity.md.

Where a row of that document applies, its rule turns the C library's answer into the one that the row promises. A
difference that remains after all rules is a bug of one of the two.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from interop.differential import Json
from interop.machine.run import Machine

#: Another seed gives other questions; the count overrides the number of them.
SEED = int(os.environ.get("RDMACM_DIFFERENTIAL_SEED", "1"))
COUNT = os.environ.get("RDMACM_DIFFERENTIAL_COUNT")

#: Seconds. Half a minute in an emulated machine on an idle host may become ten times that on a busy one.
TIMEOUT = 600

#: Addresses of the host that is asked, except those that the kernel makes from a hardware address.
LOCAL = {"127.0.0.1", "::1", "10.0.0.1", "10.0.0.9", "10.1.0.1", "10.7.0.1"}
LOCAL |= {"fd00:0:0:1::1", "fd00:0:0:1::9", "fd01::1", "fd07::1", "fe80::1"}

#: Ids of the provider "kernel" and the C library's have one table of ports, and so they are asked one after the other.
_ASK = """
. /project/tests/interop/differential.sh
links
cd /tmp
ask MODULE c </mnt/share/MODULE.questions >c &
status=0
[ PROVIDER = soft ] || wait $! || status=1
ask MODULE PROVIDER </mnt/share/MODULE.questions >ours || status=1
wait $! || status=1
no_links
cp c /mnt/share/MODULE.c
cp ours /mnt/share/MODULE.ours
exit $status
"""


class Matching:
    """Equals every value that passes a test, where only a property of the answer is known."""

    def __init__(self, what: str, test: Callable[[Any], bool]) -> None:
        self.what, self.test = what, test

    def __eq__(self, other: object) -> bool:
        return self.test(other)

    def __hash__(self) -> int:
        raise TypeError

    def __repr__(self) -> str:
        return f"<{self.what}>"


def _settled(expected: Any, ours: Any) -> Any:
    """The expected answer, with ours in the place of each :class:`Matching` that it passes."""
    if isinstance(expected, Matching):
        return ours
    if isinstance(expected, dict) and isinstance(ours, dict):
        return {name: _settled(value, ours.get(name)) for name, value in expected.items()}
    if isinstance(expected, list) and isinstance(ours, list) and len(expected) == len(ours):
        return [_settled(*pair) for pair in zip(expected, ours, strict=True)]
    return expected


#: From a question and C's answer to ours; None where the row does not apply.
Expected = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Rule:
    """A row of docs/parity.md. After a ``last`` one that applies, no other rule is tried."""

    row: str
    expected: Expected
    last: bool


class Rules:
    """The rules for one kind of question, in the order in which our library checks their subjects."""

    def __init__(self, module: str, question: Callable[[Json], Any]) -> None:
        self.module = module
        self.question = question
        self.rules: list[Rule] = []

    def __call__(self, row: str, *, last: bool = False) -> Callable[[Expected], Expected]:
        """Decorates the function of a row, named by the row's first column."""

        def add(expected: Expected) -> Expected:
            self.rules.append(Rule(row, expected, last))
            return expected

        return add

    def explain(self, question: Json, c: Json, ours: Json) -> tuple[list[str], Any]:
        """The rows that lead from C's answer to ours, and the answer that ours should have been."""
        answer: Any = copy.deepcopy(c)
        rows = []
        asked = self.question(question)
        for rule in self.rules:
            expected = rule.expected(asked, copy.deepcopy(answer))
            if expected is None:
                continue
            if _settled(expected, ours) != _settled(answer, ours):
                rows.append(rule.row)
            answer = expected
            if rule.last:
                break
        return rows, answer

    def compare(
        self, provider: str, questions: list[Json], c: list[Json], ours: list[Json]
    ) -> tuple[Counter[str], list[str]]:
        """How often each row applied, and the questions whose answers no row explains."""
        seen: Counter[str] = Counter()
        unexplained = []
        for question, theirs, mine in zip(questions, c, ours, strict=True):
            rows, expected = self.explain(question, theirs, mine)
            if expected == mine:
                seen.update(rows)
                continue
            ask = f"ask {self.module} both {provider} {shlex.quote(json.dumps(question))}"
            again = f"tests/interop/guest {shlex.quote(f'. /project/tests/interop/differential.sh; links; {ask}')}"
            unexplained.append(f"{again}\n    C         {theirs}\n    ours      {mine}\n    expected  {expected}")
        return seen, unexplained

    def check(self, machine: Machine, questions: Iterable[Json], count: int, provider: str) -> Counter[str]:
        """Ask both libraries in the machine, ours with this provider; returns how often each row applied.

        Raises:
            AssertionError: with the questions whose answers no row explains.
        """
        asked = list(itertools.islice(questions, int(COUNT or count)))
        lines = "".join(f"{json.dumps(question)}\n" for question in asked)
        (machine.share / f"{self.module}.questions").write_text(lines, encoding="utf-8")
        script = _ASK.replace("MODULE", self.module).replace("PROVIDER", provider)
        done = machine.insist(script, TIMEOUT)
        assert done.status == 0, done.output
        files = [machine.share / f"{self.module}.{side}" for side in ("c", "ours")]
        answers = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]
        seen, unexplained = self.compare(provider, asked, *answers)
        assert not unexplained, "\n".join([f"{len(unexplained)} of {len(asked)} (seed {SEED}):", *unexplained])
        return seen
