"""Write docs/states.md from the tables of rdmacm.cmstate: python3 docs/make_states.py."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

from rdmacm.cmstate import OPTION_STATES, TRANSITIONS, State, Trigger  # noqa: E402

#: Legal nearly everywhere: drawn, they would hide the rest.
EVERYWHERE = (Trigger.DESTROY, Trigger.DEVICE_GONE, Trigger.MIGRATE)


def render() -> str:
    """The page."""
    out = [
        "# The states of an id",
        "",
        "Written from the tables of [`cmstate.py`](../src/rdmacm/cmstate.py) by `docs/make_states.py`; do not edit.",
        "",
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
        f"Not drawn, because they are possible in every living state: {everywhere}.",
        "",
        "What a cell leaves empty is refused: EINVAL, or ENXIO once the device is gone.",
        "",
    ]
    triggers = [t for t in Trigger if any(t in row for row in TRANSITIONS.values())]
    out.append("| | " + " | ".join(state.name for state in State) + " |")
    out.append("|---" * (len(State) + 1) + "|")
    for trigger in triggers:
        cells = [TRANSITIONS[state].get(trigger) for state in State]
        out.append(f"| {trigger.value} | " + " | ".join(after.name if after else "" for after in cells) + " |")
    out += ["", "| option | may be set in |", "|---|---|"]
    for option, states in OPTION_STATES.items():
        out.append(f"| {option} | " + ", ".join(state.name for state in State if state in states) + " |")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    (HERE / "states.md").write_text(render(), encoding="utf-8")
