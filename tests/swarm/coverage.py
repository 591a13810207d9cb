"""Which cells of the state tables a simulation has visited."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

from rdmacm.proto.cm import machine, states
from rdmacm.proto.cm.codes import MessageKind, RejectReason
from rdmacm.proto.cm.connection import DropReason
from rdmacm.proto.cm.engine import Agent
from rdmacm.proto.cm.messages import MRA, REJ, unpack_mad
from rdmacm.provider import cmstate
from rdmacm.soft.device.queue_pair import SoftQP
from rdmacm.verbs import qpstate
from rdmacm.verbs.enums import QPState

__all__ = ["Cell", "all_cells", "record"]

#: (table, state, trigger).
Cell = tuple[str, str, str]
Key = TypeVar("Key", bound=Enum)
Value = TypeVar("Value")


class _Row(dict[Key, Value]):
    """A row of a table that notes which of its cells are looked up."""

    def __init__(self, row: dict[Key, Value], place: tuple[str, str], visited: set[Cell]) -> None:
        super().__init__(row)
        self._place, self._visited = place, visited

    def get(self, key: Key, default: Any = None) -> Any:
        if key in self.keys():
            self._visited.add((*self._place, key.name))
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        if found and isinstance(key, Enum):
            self._visited.add((*self._place, key.name))
        return found


def record(visited: set[Cell]) -> None:
    """Note in ``visited`` each cell that is used from now on in this process."""
    for name, table in (
        ("proto/cm", states.TRANSITIONS),
        ("proto/cm", machine.PREPARED),
        ("cmstate", cmstate.TRANSITIONS),
    ):
        rows: dict[Any, Any] = table
        for state, row in rows.items():
            rows[state] = _Row(row, (name, state.name), visited)

    def noted(method: Callable[..., Any], after: Callable[[SoftQP], QPState] | None) -> Callable[..., Any]:
        def call(qp: SoftQP, *arguments: Any) -> Any:
            before = qp.state
            try:
                return method(qp, *arguments)
            finally:
                steps = qpstate.states_between(before, qp.state) if after is None else (after(qp),)
                for state in steps:
                    if (before, state) in qpstate.TRANSITIONS and (before is not state or after is not None):
                        visited.add(("qpstate", before.name, state.name))
                    before = state

        return call

    received = Agent.mad_received

    def mad_received(agent: Agent, data: Any, path: Any, now: float) -> DropReason | None:
        drop = received(agent, data, path, now)
        if drop is DropReason.UNKNOWN:
            message, _ = unpack_mad(data)
            if agent.connection(getattr(message, "remote_comm_id", 0)) is None:
                visited.add(("proto/cm", states.CmState.IDLE.name, _trigger(message)))
        return drop

    Agent.mad_received = mad_received  # type: ignore[method-assign,assignment]
    for name in ("advance", "modify", "_fail"):
        setattr(SoftQP, name, noted(getattr(SoftQP, name), (lambda qp: qp.state) if name == "modify" else None))


def _trigger(message: Any) -> str:
    """The name of the trigger that a message is."""
    if isinstance(message, MRA):
        return "MRA_REQ" if message.message_mraed == MessageKind.REQ else "MRA_REP"
    if isinstance(message, REJ) and message.reason == RejectReason.STALE_CONN:
        return "REJ_STALE"
    return type(message).__name__


def all_cells() -> set[Cell]:
    """Every cell of the tables."""
    cells = {("qpstate", before.name, after.name) for before, after in qpstate.TRANSITIONS}
    for name, table in (("proto/cm", states.TRANSITIONS), ("cmstate", cmstate.TRANSITIONS)):
        rows: dict[Any, Any] = table
        cells |= {(name, state.name, trigger.name) for state, row in rows.items() for trigger in row.keys()}  # noqa: SIM118
    return cells
