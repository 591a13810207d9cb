"""Write docs/states.md and its pictures from the package's state tables: python3 docs/make_states.py."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

from pictures import state_diagram  # noqa: E402 (after the path of the sources)

from rdmacm.proto.cm import states as cm_states  # noqa: E402
from rdmacm.proto.rsocket import peers as rsocket_peers  # noqa: E402
from rdmacm.proto.rsocket import states as rsocket_states  # noqa: E402
from rdmacm.provider.cmstate import OPTION_STATES, TRANSITIONS, State, Trigger  # noqa: E402
from rdmacm.verbs import QPAttrMask, QPState, QPType, qpstate  # noqa: E402

#: Nearly every state allows these; drawn, they would hide the others.
EVERYWHERE = (Trigger.DESTROY, Trigger.DEVICE_GONE, Trigger.MIGRATE)
#: From top to bottom: the way of a client, then the others.
DRAWN = (
    *(State.IDLE, State.ADDR_BOUND, State.ADDR_QUERY, State.ADDR_RESOLVED, State.ROUTE_QUERY, State.ROUTE_RESOLVED),
    *(State.CONNECT, State.DISCONNECT, State.LISTEN, State.ADDRINFO_QUERY, State.ADDRINFO_RESOLVED),
)
#: Transitions of a queue pair that have attributes.
MODIFIED = {pair: row for pair, row in qpstate.TRANSITIONS.items() if pair[1] not in (QPState.RESET, QPState.ERR)}


def render() -> str:
    """The page."""
    return "\n".join(["# States", "", *ids(), "", *queue_pairs(), "", *connections(), "", *rsockets()]) + "\n"


def drawn() -> dict[str, str]:
    """The pictures, by file name."""
    leading: dict[tuple[str, str], list[str]] = {}
    for state, row in TRANSITIONS.items():
        for trigger, after in row.items():
            if trigger not in EVERYWHERE:
                leading.setdefault((state.name, after.name), []).append(trigger.value)
    changes = {(old.name, new.name): [f"modify{_types(needs)}"] for (old, new), needs in MODIFIED.items()}
    return {
        "states-id.svg": state_diagram([state.name for state in DRAWN], leading),
        "states-qp.svg": state_diagram(list(dict.fromkeys(name for pair in changes for name in pair)), changes),
    }


def _types(needs: Mapping[QPType, object]) -> str:
    """The types of queue pairs that have a transition, unless all have it."""
    is_of_all = len(needs) == max(map(len, MODIFIED.values()))
    return "" if is_of_all else f" ({', '.join(kind.name for kind in needs)})"


def ids() -> list[str]:
    """The states of an id."""
    everywhere = ", ".join(trigger.value for trigger in EVERYWHERE)
    out = [
        "## The states of an id",
        "",
        "`docs/make_states.py` writes this page from the tables of [`cmstate.py`](../src/rdmacm/provider/cmstate.py),",
        "which describes each state. Do not edit the page.",
        "",
        "![What leads from one state to the next; the table below has the same, and more.](states-id.svg)",
        "",
        f"The picture leaves out {everywhere}, which nearly every state allows.",
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
        "![RESET, INIT, RTR and RTS follow each other; SQD and SQE lead back to RTS.](states-qp.svg)",
        "",
        "Besides these there are two transitions without attributes: from every state to RESET, and from every state",
        "but RESET to ERR. The device enters SQE by itself. Any other transition raises EINVAL.",
        "",
        "| transition | type | required besides STATE | optional |",
        "|---|---|---|---|",
    ]
    for (before, after), row in MODIFIED.items():
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


def rsockets() -> list[str]:
    """The states of a stream of rsocket(7), and of a peer of a datagram socket."""
    out = [
        "## The states of a stream of rsockets",
        "",
        (
            "From the table of [`proto/rsocket/states.py`](../src/rdmacm/proto/rsocket/states.py), "
            "which describes each state."
        ),
        "What a state does not list changes nothing. A peer that breaks the protocol is a lost connection.",
        "",
        "| state | on | next state | message to the peer |",
        "|---|---|---|---|",
    ]
    for (stream, on), (after, message) in rsocket_states.TRANSITIONS.items():
        out.append(f"| {stream.name} | {on.value} | {after.name} | {message.name if message is not None else ''} |")
    out += [
        "",
        "## The states of a peer of a datagram rsocket",
        "",
        (
            "From the table of [`proto/rsocket/peers.py`](../src/rdmacm/proto/rsocket/peers.py), "
            "which describes each state."
        ),
        "",
        "| state | on | next state | what is done |",
        "|---|---|---|---|",
    ]
    for (peer, cause), (later, action) in rsocket_peers.TRANSITIONS.items():
        out.append(f"| {peer.name} | {cause.value} | {later.name} | {action.value if action is not None else ''} |")
    return out


def _cell(mask: QPAttrMask) -> str:
    return qpstate.names(mask) or "–"


if __name__ == "__main__":
    for name, content in {"states.md": render(), **drawn()}.items():
        (HERE / name).write_text(content, encoding="utf-8")
