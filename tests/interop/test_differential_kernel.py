"""Ids of the provider ``kernel`` and of librdmacm on the same devices differ only as the rows of docs/parity.md say."""

from __future__ import annotations

from typing import Any

from interop.differential import Json
from interop.differential_ids import Questions
from interop.differing import SEED, Rules
from interop.machine.run import Machine
from interop.test_differential_ids import ANYTHING, Question, family

rule = Rules("differential_ids", lambda question: Question(**question))


@rule("a source address other than the one bound to", last=True)
def _(q: Question, c: Json) -> Any:
    """The kernel ignores it."""
    if not q.bind or not q.src or not q.dst or "bound" not in c or family(q.bind) != family(q.dst):
        return None
    number, port = (2, 0xFFFF) if q.src[0] == "ib" else (1, 0xFFFF)
    host = 1 if q.src[0] == "ib" else 0
    is_same = family(q.bind) == family(q.src) and q.bind[host] == q.src[host]
    if is_same and q.src[number] & port in (0, q.bind[number] & port):
        return None
    return {"create": "ok", "bind": "ok", "bound": c["bound"], "resolve": "EINVAL"}


@rule("flow label of a path")
def _(q: Question, c: Json) -> Any:
    """The kernel's is the source's, or follows from the ports, and has more bits than a flow label."""
    if not c.get("path") or c["path"]["flow_label"] == "free":
        return None
    is_free = (q.src or q.bind or ["", 0])[1] == 0
    return {**c, "path": {**c["path"], "flow_label": ANYTHING if is_free else c["path"]["flow_label"] & 0xFFFFF}}


def test_ids_are_those_of_librdmacm(machine: Machine) -> None:
    seen = rule.check(machine, Questions(SEED + 1), 600, "kernel")
    print(*(f"{count:6} {row}" for row, count in seen.most_common()), sep="\n")
