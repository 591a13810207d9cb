"""A fabric that tells its faults as a script, and one on which nothing but that script happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from rdmacm.testing.fabric import Fabric
from rdmacm.testing.faults import DELIVER, FabricPacket, Outcome, Verdict
from rdmacm.testing.script import FaultRule, FaultScript

#: Which outcome of a packet is told, if it has several: a rule has one action.
_ORDER = (Outcome.LOST, Outcome.CORRUPTED, Outcome.DUPLICATED, Outcome.DELAYED)


class RecordedFabric(Fabric):
    """A :class:`Fabric` whose faults can be repeated. The other arguments are its.

    ``script``: rules that decide instead of chance and instead of :attr:`Fabric.faults`; None: as on any fabric. A
    verdict of ``faults`` with bytes of its own is kept, as no rule can say that.
    """

    def __init__(self, seed: int | str = 0, *, script: FaultScript | None = None, **options: Any) -> None:
        super().__init__(seed, **options)
        self._script = script
        #: How many packets of a kind went from one host to another, and which of them a packet is, by its number.
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._ordinals: dict[int, int] = {}

    def _forward(self, packet: FabricPacket) -> None:
        key = packet.source, packet.destination, packet.kind
        self._counts[key] += 1
        self._ordinals[packet.number] = self._counts[key]
        if self._script is None:
            super()._forward(packet)
            return
        given = self.faults
        self.faults = self._repeated(self._script, given)
        try:
            super()._forward(packet)
        finally:
            self.faults = given

    @staticmethod
    def _repeated(
        script: FaultScript, given: Callable[[FabricPacket], Verdict | None] | None
    ) -> Callable[[FabricPacket], Verdict | None]:
        def faults(packet: FabricPacket) -> Verdict:
            wanted = given(packet) if given is not None else None  # which may do more than decide
            decided = script(packet) or DELIVER
            return wanted if wanted is not None and wanted.data is not None else decided

        return faults

    def applied_faults(self) -> list[FaultRule] | None:
        """A rule for each fault that has happened, in order; None if the log is not complete."""
        if self.log.discarded:
            return None
        found: dict[int, dict[Outcome, FaultRule]] = {}
        arrivals: dict[int, float] = {}
        for entry in self.log:
            if entry.outcome is Outcome.DELIVERED:
                arrivals.setdefault(entry.packet.number, entry.time)
        for entry in self.log:
            packet, number = entry.packet, self._ordinals.get(entry.packet.number)
            if entry.outcome not in _ORDER or number is None:
                continue
            rule: dict[str, Any] = {"kind": packet.kind, "first": number}
            rule.update(source=packet.source, destination=packet.destination)
            match entry.outcome:
                case Outcome.LOST:
                    rule["action"] = "lose"
                case Outcome.CORRUPTED:
                    changed = int.from_bytes(entry.data, "big") ^ int.from_bytes(packet.data, "big")
                    rule.update(action="corrupt", bits=max(1, changed.bit_count()))
                case Outcome.DUPLICATED:
                    rule["action"] = "repeat"
                case _:
                    late = arrivals.get(packet.number, self.now) - entry.time - self.latency
                    rule.update(action="delay", delay=max(0.0, round(late, 12)))
            found.setdefault(packet.number, {})[entry.outcome] = FaultRule(**rule)
        return [next(rules[outcome] for outcome in _ORDER if outcome in rules) for rules in found.values()]
