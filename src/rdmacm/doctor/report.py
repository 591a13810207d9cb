"""An examination as one page of HTML, which needs no other file, no script and no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rdmacm.doctor.drawing import drawing
from rdmacm.doctor.matrix import Matrix, heat_map
from rdmacm.doctor.pages import is_likely, looked_at
from rdmacm.doctor.rule import QUESTIONS, Found
from rdmacm.doctor.table import Answer, Examination
from rdmacm.verbs.device import Device

_STYLE = """
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--text:#1b2027;--muted:#5b6572;--line:#d5dae1;--bad:#b3261e;
--badback:#fdecea;--note:#8a5a00;--ok:#1d7a3e;--heat:#1f5fb4;--onheat:#fff;--code:#eef1f5}
@media(prefers-color-scheme:dark){:root{--page:#14171c;--card:#1d2229;--text:#e6e9ee;--muted:#9aa5b3;--line:#38404b;
--bad:#ff8a80;--badback:#3a2020;--note:#ffc46b;--ok:#7bd99a;--heat:#7fb2f5;--onheat:#10151c;--code:#272e37}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
main{max-width:1180px;margin:0 auto;padding:24px 20px 48px}
h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:32px 0 10px}
p{margin:6px 0}.muted,.legend{color:var(--muted)}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 16px;margin:10px 0}
.card.bad{border-left:4px solid var(--bad)}.card.note{border-left:4px solid var(--note)}
.card h3{margin:0 0 4px;font-size:16px}.id{display:inline-block;min-width:2.6em;font-weight:700}
.bad .id{color:var(--bad)}.note .id{color:var(--note)}.tag{color:var(--muted);font-size:13px;font-weight:400}
code{background:var(--code);border-radius:4px;padding:1px 5px;font:13px/1.5 ui-monospace,monospace}
.command{display:block;padding:8px 10px;margin-top:8px;white-space:pre-wrap}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px}
svg{display:block}svg text{font:12px ui-monospace,"DejaVu Sans Mono","Liberation Mono",monospace;fill:var(--text)}
svg .head{fill:var(--muted)}svg .name{font-weight:700}svg rect{fill:var(--page);stroke:var(--line)}
svg .down rect{stroke:var(--bad)}svg .down .name{fill:var(--bad)}svg .muted text{fill:var(--muted)}
svg .edge{fill:none;stroke:var(--muted);stroke-opacity:.6}
ol.steps{list-style:none;display:flex;flex-wrap:wrap;gap:6px;padding:0;margin:10px 0}
ol.steps li{border:1px solid var(--line);border-radius:14px;padding:2px 10px;font-size:13px;background:var(--card)}
ol.steps .finding{background:var(--badback);border-color:var(--bad);color:var(--bad);font-weight:700}
ol.steps .reached{color:var(--ok)}ol.steps .unreached{color:var(--muted);border-style:dashed}
table.rules{border-collapse:collapse;width:100%;font-size:13px}
table.rules td{border-top:1px solid var(--line);padding:4px 8px 4px 0;vertical-align:top}
table.rules td:first-child,table.rules td:nth-child(2){white-space:nowrap}
table.heat{border-collapse:separate;border-spacing:2px;font-size:12px}
table.heat th{font-weight:400;white-space:nowrap;color:var(--muted);text-align:right;padding:0 6px}
table.heat th[scope=col]{vertical-align:bottom;padding:6px 0}
table.heat th[scope=col] span{writing-mode:vertical-rl;transform:rotate(180deg)}
table.heat td{min-width:34px;height:26px;text-align:center;border-radius:3px}
table.heat .failed{background:var(--badback);color:var(--bad);border:1px solid var(--bad);font-weight:700}
table.heat .none{background:transparent}
""" + "".join(
    f"table.heat .heat{step}{{background:color-mix(in srgb,var(--heat) {8 + step * 15}%,var(--card))"
    f"{';color:var(--onheat)' if step > 3 else ''}}}\n"
    for step in range(7)
)
_CLASSES = {"ok": "reached", "finding": "finding", "not reached": "unreached"}


def page(
    found: Examination, matrix: Matrix | None = None, soft: Sequence[Device] = (), *, name: str = "", when: str = ""
) -> str:
    """The page. ``soft``: the software devices; ``name``: the host's; ``when``: the time of the measurement."""
    count = len(found.findings)
    title = f"rdmacm doctor{f': {name}' if name else ''}"
    verdict = "nothing found" if not count else f"{count} finding{'s' * (count > 1)}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{escape(", ".join(part for part in (when, looked_at(found)) if part))}</p>',
        _reason(found),
        f"<h2>{verdict}</h2>",
        _questions(found),
        *(_card(answer, "bad") for answer in found.findings),
        *(_card(answer, "note") for answer in found.notes),
        "<h2>Routes, interfaces, devices, GIDs</h2>",
        f'<div class="scroll">{drawing(found.host, soft)}</div>',
    ]
    if matrix is not None:
        parts += ["<h2>All pairs of hosts</h2>", heat_map(matrix)]
    parts += ["<h2>Rules</h2>", f'<details class="card"><summary>what each rule saw</summary>{_rules(found)}</details>']
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main></body></html>\n"
    )


def _reason(found: Examination) -> str:
    reason = found.host.provider_reason
    return f'<p class="muted">provider {escape(found.host.provider)}, because {escape(reason)}</p>' if reason else ""


def _questions(found: Examination) -> str:
    items = []
    for question in QUESTIONS:
        state = found.state(question)
        items.append(f'<li class="{_CLASSES[state]}" title="{state}">{escape(question)}</li>')
    return f'<ol class="steps">{"".join(items)}</ol>'


def _card(answer: Answer, kind: str) -> str:
    assert isinstance(answer.outcome, Found)
    rule = answer.rule
    tags = [rule.question, "note" if kind == "note" else "", "likely" if is_likely(answer) else ""]
    return (
        f'<section class="card {kind}"><h3><span class="id">{rule.id}</span> {escape(rule.title)} '
        f'<span class="tag">{escape(", ".join(tag for tag in tags if tag))}</span></h3>'
        f"<p>{escape(answer.outcome.text)}</p><p>{escape(rule.finding)}</p>"
        f'<code class="command">{escape(answer.outcome.command)}</code></section>'
    )


def _rules(found: Examination) -> str:
    rows = []
    for answer in found.answers:
        cells = answer.rule.id, answer.state, escape(answer.rule.title), escape(answer.saw)
        rows.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f'<table class="rules">{"".join(rows)}</table>'
