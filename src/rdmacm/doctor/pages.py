"""The rules and what they find, as text: for the terminal, as JSON data, and docs/doctor.md."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from rdmacm.doctor.rule import QUESTIONS, Found, Quiet, Rule
from rdmacm.doctor.table import Answer, Examination

_WIDTH = 120
_EVIDENCE = {
    "tested": "the fix was confirmed by those who had the fault",
    "maintainer": "a maintainer gave cause or fix",
    "source": "read in the source of the kernel, librdmacm or rdma-core",
    "likely": 'inferred of the source, and not confirmed: a finding says "likely"',
}


# -- the terminal --------------------------------------------------------------------------------------------


def text(found: Examination, *, verbose: bool = False) -> list[str]:
    """The findings as lines. With ``verbose``, each rule and what it saw."""
    lines: list[str] = []
    for answer in found.findings:
        if answer.rule.question == found.first:
            lines += _shown(answer, "")
    later = [answer for answer in found.findings if answer.rule.question != found.first]
    if later:
        lines.append("further on, and perhaps a consequence:")
        for answer in later:
            lines += _shown(answer, "  ")
    if found.first is not None:
        unreached = [question for question in QUESTIONS if found.state(question) == "not reached"]
        if unreached:
            lines.append(f"not reached: {', '.join(unreached)}")
    else:
        lines.append(f"nothing found; looked at: {looked_at(found)}")
    if found.host.provider_reason:
        lines.append(f"provider {found.host.provider}, because {found.host.provider_reason}")
    for answer in found.notes:
        lines += _shown(answer, "", "note ")
    if verbose:
        lines += ["", *_every(found)]
    return lines


def _shown(answer: Answer, indent: str, kind: str = "") -> list[str]:
    assert isinstance(answer.outcome, Found)
    likely = "likely: " if is_likely(answer) else ""
    return [
        f"{indent}{kind}{answer.rule.id} {answer.rule.title}",
        f"{indent}  {likely}{answer.outcome.text}",
        f"{indent}  try: {answer.outcome.command}",
    ]


def is_likely(answer: Answer) -> bool:
    """Whether a finding is inferred, and not proved by its measurement."""
    return answer.rule.is_likely and isinstance(answer.outcome, Found) and not answer.outcome.is_sure


def looked_at(found: Examination) -> str:
    """What was looked at, in a few words."""
    host = found.host
    devices = ", ".join(device.name for device in host.devices) or "none of the kernel"
    faces = ", ".join(face.name for face in host.rdma_interfaces()) or "none"
    asked = sum(isinstance(answer.outcome, Quiet) for answer in found.answers)
    target = host.target
    where = f", to {target.node}" if target is not None and target.node else ""
    return f"provider {host.provider}, devices: {devices}, interfaces: {faces}{where}; {asked} rules"


#: States as they stand before a rule, where they are shown otherwise.
_MARKS = {"finding": "!!", "not asked": "-"}


def _every(found: Examination) -> list[str]:
    lines = []
    for question in QUESTIONS:
        lines.append(question)
        for answer in found.answers:
            if answer.rule.question == question:
                mark = _MARKS.get(answer.state, answer.state)
                lines.append(f"  {mark:<4} {answer.rule.id:<3} {answer.saw}")
    return lines


def explanation(rule: Rule) -> list[str]:
    """A rule as lines, for ``rdmacm doctor RULE``."""
    parts = [("symptom", symptom) for symptom in rule.symptoms]
    parts += [("test", rule.test), ("finding", rule.finding), ("mend", rule.mend.replace("`", "'"))]
    parts += [("question", rule.question), ("evidence", f"{rule.evidence}: {_EVIDENCE[rule.evidence]}")]
    parts += [("seen in", rule.sources)]
    return [f"{rule.id} {rule.title}", *(f"  {name:<9} {value}" for name, value in parts)]


# -- JSON ----------------------------------------------------------------------------------------------------


def as_json(found: Examination) -> dict[str, Any]:
    """An examination as JSON data."""
    host = found.host
    return {
        "ok": not found.findings,
        "provider": host.provider,
        "provider_reason": host.provider_reason or None,
        "devices": [device.name for device in host.devices],
        "interfaces": [face.name for face in host.rdma_interfaces()],
        "questions": [{"question": each, "state": found.state(each)} for each in QUESTIONS],
        "findings": [_finding_json(answer) for answer in found.findings],
        "notes": [_finding_json(answer) for answer in found.notes],
        "rules": [_answer_json(answer) for answer in found.answers],
    }


def _finding_json(answer: Answer) -> dict[str, Any]:
    assert isinstance(answer.outcome, Found)
    rule = answer.rule
    return {
        "rule": rule.id,
        "title": rule.title,
        "evidence": str(rule.evidence),
        "likely": is_likely(answer),
        "question": rule.question,
        "finding": answer.outcome.text,
        "command": answer.outcome.command,
    }


def _answer_json(answer: Answer) -> dict[str, Any]:
    return {"rule": answer.rule.id, "state": answer.state, "saw": answer.saw}


def rule_json(rule: Rule) -> dict[str, Any]:
    """A rule as JSON data."""
    return {
        "rule": rule.id,
        "title": rule.title,
        "evidence": str(rule.evidence),
        "question": rule.question,
        "symptoms": list(rule.symptoms),
        "test": rule.test,
        "finding": rule.finding,
        "mend": rule.mend,
        "sources": rule.sources,
    }


# -- docs/doctor.md ------------------------------------------------------------------------------------------

_TITLES = {
    "D": "Devices, modules, permissions",
    "N": "Network namespaces and containers",
    "A": "Addresses, routes, neighbours",
    "G": "GIDs, RoCE versions, MTU",
    "R": "Routes of InfiniBand",
    "C": "Connections without an answer",
    "J": "Rejected connections",
    "Q": "Once connected",
}
_HEAD = """\
# rdmacm doctor

`rdmacm doctor` asks what keeps RDMA connections from working on this host, and prints the finding, the measurement that
shows it, and a command that mends it. It changes nothing. [tools.md](tools.md#rdmacm-doctor) has its options and
output. Each rule below is a row of the table in `src/rdmacm/doctor`, and this page is written from it by
`python3 docs/make_doctor.py`.

The questions are asked in this order, and the first one with a finding is to be mended first: {questions}.

What is *likely* in the table was inferred from source and reports, and nobody has confirmed it. *Tested*: the fix was
confirmed by those who had the fault. *Maintainer*: a maintainer of the software gave cause or fix. *Source*: read in
the source of the kernel, librdmacm or rdma-core.

## Index of symptoms

Search this page for the message of the program.

| symptom | rule |
|---|---|
"""


def markdown(rules: Sequence[Rule]) -> str:
    """The text of docs/doctor.md."""
    questions = ", ".join(QUESTIONS)
    head = _HEAD.replace("{questions}", questions)
    parts = ["\n\n".join(textwrap.fill(part, _WIDTH, break_long_words=False, break_on_hyphens=False)
             if part.startswith("The questions") else part for part in head.rstrip("\n").split("\n\n"))]  # fmt: skip
    rows = sorted(((symptom, rule) for rule in rules for symptom in rule.symptoms), key=lambda row: row[0].lower())
    parts[0] += "\n" + "\n".join(
        f"| {_cell(symptom).replace('|', chr(92) + '|')} | [{rule.id}](#{anchor(rule)}) |" for symptom, rule in rows
    )
    letter = ""
    for rule in rules:
        if rule.id[0] != letter:
            letter = rule.id[0]
            parts.append(f"## {_TITLES[letter]}")
        parts.append(_section(rule))
    return "\n\n".join(parts) + "\n"


def anchor(rule: Rule) -> str:
    """The anchor of a rule's section, as GitHub makes it of the heading."""
    return "".join(c for c in f"{rule.id} {rule.title}".lower() if c.isalnum() or c in "-_ ").replace(" ", "-")


def _cell(symptom: str) -> str:
    return symptom.replace("<", "&lt;").replace("*", "\\*")


def _section(rule: Rule) -> str:
    rows = [
        ("symptom", "<br>".join(map(_cell, rule.symptoms))),
        ("test", rule.test),
        ("finding", rule.finding),
        ("mend", rule.mend),
        ("question", rule.question),
        ("evidence", f"{rule.evidence}: {rule.sources}"),
    ]
    table = "\n".join(f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in rows)
    return f"### {rule.id} {rule.title}\n\n| | |\n|---|---|\n{table}"
