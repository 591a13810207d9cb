"""Write docs/states.md from the package's state tables: python3 docs/make_states.py."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

from rdmacm.proto.cm import states as cm_states  # noqa: E402
from rdmacm.provider.cmstate import OPTION_STATES, TRANSITIONS, State, Trigger  # noqa: E402
from rdmacm.verbs import QPAttrMask, QPState, qpstate  # noqa: E402

#: Nearly every state allows these; drawn, they would hide the others.
EVERYWHERE = (Trigger.DESTROY, Trigger.DEVICE_GONE, Trigger.MIGRATE)
#: Around a diagram of Mermaid, which the site leaves out, as the tables have it all.
DIAGRAM, END_OF_DIAGRAM = "<!-- diagram -->", "<!-- diagram: end -->"


def render() -> str:
    """The page."""
    return "\n".join(["# States", "", *ids(), "", *queue_pairs(), "", *connections()]) + "\n"


def ids() -> list[str]:
    """The states of an id."""
    out = [
        "## The states of an id",
        "",
        "`docs/make_states.py` writes this page from the tables of [`cmstate.py`](../src/rdmacm/provider/cmstate.py),",
        "which describes each state. Do not edit the page.",
        "",
        DIAGRAM,
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> IDLE",
    ]
    for state, row in TRANSITIONS.items():
        for trigger, after in row.items():
            if trigger not in EVERYWHERE:
                out.append(f"    {state.name} --> {after.name}: {trigger.value}")
    everywhere = ", ".join(trigger.value for trigger in EVERYWHERE)
    out += [
        "```",
        "",
        f"The diagram leaves out {everywhere}, since nearly every state allows them.",
        END_OF_DIAGRAM,
        "",
        "The table has the next state for each call and outcome. A call that the row of a state does not have raises",
        "EINVAL, or ENXIO once the device is gone.",
        "",
        "| state | next state, and what leads to it |",
        "|---|---|",
    ]
    for state, row in TRANSITIONS.items():
        leading: dict[State, list[str]] = {}
        for trigger, after in row.items():
            leading.setdefault(after, []).append(trigger.value)
        cell = "; ".join(f"**{after.name}**: {', '.join(triggers)}" for after, triggers in leading.items())
        out.append(f"| {state.name} | {cell} |")
    out += ["", "| option | may be set in |", "|---|---|"]
    for option, states in OPTION_STATES.items():
        out.append(f"| {option} | " + ", ".join(state.name for state in State if state in states) + " |")
    return out


def queue_pairs() -> list[str]:
    """The states of a queue pair, and the attributes of each transition."""
    out = [
        "## The states of a queue pair",
        "",
        "From the table of [`verbs/qpstate.py`](../src/rdmacm/verbs/qpstate.py), which describes each state.",
        "",
        DIAGRAM,
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> RESET",
    ]
    drawn = {pair: row for pair, row in qpstate.TRANSITIONS.items() if pair[1] not in (QPState.RESET, QPState.ERR)}
    for (before, after), row in drawn.items():
        types = "" if len(row) == 3 else f": {', '.join(kind.name for kind in row)}"
        out.append(f"    {before.name} --> {after.name}{types}")
    out += [
        "```",
        END_OF_DIAGRAM,
        "",
        "Besides these there are two transitions without attributes: from every state to RESET, and from every state",
        "but RESET to ERR. The device enters SQE by itself. Any other transition raises EINVAL.",
        "",
        "| transition | type | required besides STATE | optional |",
        "|---|---|---|---|",
    ]
    for (before, after), row in drawn.items():
        out += [
            f"| {before.name} → {after.name} | {kind.name} | {_cell(needs.required)} | {_cell(needs.optional)} |"
            for kind, needs in row.items()
        ]
    out += ["", "| work may be posted in | " + " | ".join(state.name for state in QPState) + " |"]
    out.append("|---" * (len(QPState) + 1) + "|")
    for name, states, meaning in (
        ("receives", qpstate.RECV_STATES, {QPState.ERR: "flushed"}),
        ("sends", qpstate.SEND_STATES, {QPState.ERR: "flushed", QPState.SQE: "flushed", QPState.SQD: "kept for later"}),
    ):
        cells = [meaning.get(state, "yes") if state in states else "" for state in QPState]
        out.append(f"| {name} | " + " | ".join(cells) + " |")
    return out


def connections() -> list[str]:
    """The states of a connection in the connection manager, whose table has a row for each transition."""
    out = [
        "## The states of a connection in the connection manager",
        "",
        "From the tables of [`proto/cm/states.py`](../src/rdmacm/proto/cm/states.py), which describes each state.",
        "Calls, messages and timers move a connection. A message that a state does not list is dropped and counted,",
        "and a call is refused. IDLE is also the state of messages that name no connection.",
        "",
        "| state | on | next state | on the way |",
        "|---|---|---|---|",
    ]
    for state, row in cm_states.TRANSITIONS.items():
        for trigger, step in row.items():
            if step is not None:
                after = "" if step.state is state else step.state.name
                doing = "; ".join(action.value for action in step.actions)
                out.append(f"| {state.name} | {trigger.value} | {after} | {doing} |")
    return out


def _cell(mask: QPAttrMask) -> str:
    return qpstate.names(mask) or "–"


if __name__ == "__main__":
    (HERE / "states.md").write_text(render(), encoding="utf-8")
