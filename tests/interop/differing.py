"""Two libraries asked the same, and their differences held against docs/parity.md.

A rule turns the C library's answer into the one that a row of that document promises, where the row applies. What is
different after all rules is a bug of one of the two.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interop.differential import HOSTS, SERVICES, Json
from interop.machine.run import Machine

PARITY = Path(__file__).parents[2] / "docs" / "parity.md"

#: Asks other questions; more or fewer of them.
SEED = int(os.environ.get("RDMACM_DIFFERENTIAL_SEED", "1"))
COUNT = os.environ.get("RDMACM_DIFFERENTIAL_COUNT")

#: Seconds; what takes half a minute on an idle host may take ten times that on a busy one, where all is emulated.
TIMEOUT = 600

#: Addresses of where the questions are asked, but for those that the kernel makes of a hardware address.
LOCAL = {"127.0.0.1", "::1", "10.0.0.1", "10.0.0.9", "10.1.0.1", "10.7.0.1"}
LOCAL |= {"fd00:0:0:1::1", "fd00:0:0:1::9", "fd01::1", "fd07::1", "fe80::1"}

#: More for ``link``: a second link with a device, "wa"; an interface without one, with a number for its name and
#: another for its index; secondary addresses, gateways, routes that refuse. Nobody has to wait for neighbours.
NETWORK = r"""
network
ip address add 10.0.0.9/24 dev va
ip address add fd00:0:0:1::9/64 dev va nodad
ip address add fe80::1/64 dev va nodad
ip link add wa type veth peer name wb netns soft
ip address add 10.1.0.1/24 dev wa
ip address add fd01::1/64 dev wa nodad
ip link set wa up
ip -n soft link set wb up
ip link add 7 index 70 type dummy
ip address add 10.7.0.1/24 dev 7
ip address add fd07::1/64 dev 7 nodad
ip link set 7 up
ip route add 10.9.0.0/16 via 10.0.0.2
ip route add fd09::/64 via fd00:0:0:1::2
ip route add 10.8.0.0/16 via 10.1.0.2 src 10.0.0.9
ip route add fd08::/64 via fd01::2
for kind in unreachable=66 blackhole=67 prohibit=68; do
    ip route add ${kind%=*} 10.${kind#*=}.0.0/16
    ip route add ${kind%=*} fd${kind#*=}::/64
done
for ip in 10.0.0.2 10.0.0.77 fd00:0:0:1::2 fe80::2; do
    ip neighbour replace $ip lladdr 02:00:00:00:00:0b dev va nud permanent
done
for ip in 10.1.0.2 fd01::2; do ip neighbour replace $ip lladdr 02:00:00:00:00:0b dev wa nud permanent; done
rdma link add rxe1 type rxe netdev wa
nought=0000:0000:0000
for gid in 0/0a00:0001 0/0a00:0009 0/0001:$nought:0009 0/fe80:$nought:$nought:0001 1/0a01:0001 1/fd01; do
    until grep -qs ${gid#*/} /sys/class/infiniband/rxe${gid%/*}/ports/1/gids/?; do nap 0.02; done
done
"""

#: And back: what is left to do is ``link``'s.
NO_NETWORK = r"""
rdma link delete rxe1
ip link delete wa
ip link delete 7
for kind in 66 67 68; do ip route delete 10.$kind.0.0/16; ip route delete fd$kind::/64; done
no_network
"""

_ASK = r"""
cd "$(mktemp -d)"
export PYTHONPATH=/project/src:/project/tests
cp /mnt/share/{hosts,services,nsswitch.conf,questions} .
for file in hosts services nsswitch.conf; do mount --bind $file /etc/$file; done
python3 -m interop.MODULE c <questions >c &
python3 -m interop.MODULE ours <questions >ours
status=$?
wait $! || status=1
cp c ours /mnt/share
exit $status
"""


class One:
    """Equals whatever passes a test: for what an answer must be like, where nobody can know which it is."""

    def __init__(self, what: str, test: Callable[[Any], bool]) -> None:
        self.what, self.test = what, test

    def __eq__(self, other: object) -> bool:
        return self.test(other)

    def __hash__(self) -> int:
        raise TypeError

    def __repr__(self) -> str:
        return f"<{self.what}>"


def _settled(expected: Any, ours: Any) -> Any:
    """What was expected, with our answer in the place of each :class:`One` it passes."""
    if isinstance(expected, One):
        return ours
    if isinstance(expected, dict) and isinstance(ours, dict):
        return {name: _settled(value, ours.get(name)) for name, value in expected.items()}
    if isinstance(expected, list) and isinstance(ours, list) and len(expected) == len(ours):
        return [_settled(*pair) for pair in zip(expected, ours, strict=True)]
    return expected


#: From a question and C's answer to ours; None where the row has no say.
Expected = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Rule:
    """A row of docs/parity.md. ``last``: it settles the whole answer, and later rules are not asked."""

    row: str
    expected: Expected
    last: bool


class Rules:
    """The rules for one kind of question, in the order in which our library comes to what they are about."""

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
        """The rows it takes to get from C's answer to ours, and what ours should have been."""
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

    def compare(self, questions: list[Json], c: list[Json], ours: list[Json]) -> tuple[Counter[str], list[str]]:
        """How often each row was seen, and the questions whose answers no row explains."""
        seen: Counter[str] = Counter()
        unexplained = []
        for question, theirs, mine in zip(questions, c, ours, strict=True):
            rows, expected = self.explain(question, theirs, mine)
            if expected == mine:
                seen.update(rows)
                continue
            again = f"python3 -m interop.{self.module} both {shlex.quote(json.dumps(question))}"
            unexplained.append(f"{again}\n    C         {theirs}\n    ours      {mine}\n    expected  {expected}")
        return seen, unexplained

    def hold(self, machine: Machine, questions: Iterable[Json], count: int) -> Counter[str]:
        """Ask both in the machine. AssertionError with all that is unexplained; else how often each row was seen."""
        asked = list(itertools.islice(questions, int(COUNT or count)))
        lines = "".join(f"{json.dumps(question)}\n" for question in asked)
        files = {"hosts": HOSTS, "services": SERVICES, "nsswitch.conf": "hosts: files\nservices: files\n"}
        for name, text in {**files, "questions": lines}.items():
            (machine.share / name).write_text(text, encoding="utf-8")
        ask = _ASK.replace("MODULE", self.module)
        done = machine.run(
            f"{NETWORK}\nunshare -m bash -c {shlex.quote(ask)}\nstatus=$?\n{NO_NETWORK}\nexit $status", 600
        )
        assert done.status == 0, done.output
        answers = [
            [json.loads(line) for line in (machine.share / side).read_text(encoding="utf-8").splitlines()]
            for side in ("c", "ours")
        ]
        seen, unexplained = self.compare(asked, *answers)
        assert not unexplained, "\n".join([f"{len(unexplained)} of {len(asked)} (seed {SEED}):", *unexplained])
        return seen

    def assert_rows(self) -> None:
        """Each rule's row is in docs/parity.md."""
        subjects = set(re.findall(r"^\| ([^|]*?) \|", PARITY.read_text(encoding="utf-8"), re.MULTILINE))
        assert {rule.row for rule in self.rules} <= subjects
