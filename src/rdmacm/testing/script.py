"""Scripts of faults: what happens to packet n of a kind of a connection.

A :class:`FaultScript` is a list of rules. Each rule names packets by their kind, their place among those of that kind,
and, where needed, their connection and their hosts; and says what happens to them. A script is text or Python:

>>> from rdmacm.testing import Fabric, FaultRule, FaultScript
>>> script = FaultScript.parse('''
... lose REQ 1                       # the first request of all
... delay REP 1 connection 2 by 0.5  # the first reply of the second connection
... corrupt RC_SEND_* 3-5 from a     # three packets of SENDs that host a sends
... repeat ACK * copies 3
... ''')
>>> script.rules[0] == FaultRule("lose", "REQ")
True
>>> Fabric(seed=1).faults = script
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, get_args

from rdmacm.proto.cm.messages import REP, REQ, unpack_mad
from rdmacm.proto.constants import BTH_LENGTH, GSI_QPN, ICRC_LENGTH
from rdmacm.proto.roce.headers import AETH_STRUCT, AETH_TYPES
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.proto.wire import WireError
from rdmacm.testing.faults import MAD_OFFSET, FabricPacket, Verdict

#: What a rule does.
FaultAction: TypeAlias = Literal["lose", "corrupt", "delay", "repeat", "deliver"]

_ACTIONS: tuple[FaultAction, ...] = get_args(FaultAction)
#: The last number of a rule without an end.
_NO_END = 1 << 62
#: Connections that a script remembers; the oldest one is forgotten.
_MAX_CONNECTIONS = 1 << 16
#: The words of a rule's text that are followed by a value, the field, and what its value is.
_WORDS: dict[str, tuple[str, Callable[[str], object]]] = {
    "connection": ("connection", int),
    "from": ("source", str),
    "to": ("destination", str),
    "by": ("delay", float),
    "copies": ("copies", int),
    "bits": ("bits", int),
}


@dataclass(frozen=True, slots=True)
class FaultRule:
    """A rule of a :class:`FaultScript`. Raises ValueError for values out of range.

    - ``action``: ``lose``, ``corrupt``, ``delay``, ``repeat``, or ``deliver``: without any of the random faults.
    - ``kind``: a :attr:`FabricPacket.kind`, in which ``*`` stands for any characters; or ``ACK``, ``NAK`` or
      ``RNR_NAK``, the kinds of RC_ACKNOWLEDGE; or ``DATA``, any packet of a reliable connection but these.
    - ``first``, ``last``: the numbers of the packets, from 1, among those that the rest of the rule fits; ``last`` None
      for only ``first``, 0 for all from ``first`` on.
    - ``connection``: number of the connection, from 1, in the order of their first REQ; 0 for any packet.
    - ``source``, ``destination``: names of the hosts; empty for any.
    - ``delay``: seconds that ``delay`` adds.
    - ``copies``: how many copies of the packet ``repeat`` delivers, 2 to 64.
    - ``bits``: how many random bits ``corrupt`` inverts, at least 1.
    """

    action: FaultAction
    kind: str
    first: int = 1
    last: int | None = None
    connection: int = 0
    source: str = ""
    destination: str = ""
    delay: float = 0.001
    copies: int = 2
    bits: int = 1

    def __post_init__(self) -> None:
        if self.action not in _ACTIONS:
            raise ValueError(f"a rule can {', '.join(_ACTIONS)}, not {self.action!r}")
        if not self.kind or self.first < 1 or self.connection < 0 or (self.last and self.last < self.first):
            raise ValueError(f"packets {self.first} to {self.last} of kind {self.kind!r} of {self.connection} are none")
        if self.copies < 2 or self.bits < 1:
            raise ValueError(f"a fault has at least 2 copies and 1 bit, not {self.copies} and {self.bits}")
        self.verdict()

    @classmethod
    def parse(cls, text: str) -> FaultRule:
        """Return the rule of one line, which ``str`` of it gives back; ValueError for a line that is none.

        ``ACTION KIND NUMBERS``, then in any order ``connection N``, ``from HOST``, ``to HOST``, ``by SECONDS``,
        ``copies N`` and ``bits N``. NUMBERS is ``3``, ``3-5``, ``3-`` or ``*``.
        """
        given: dict[str, object] = {}
        try:
            action, kind, numbers, *rest = text.split()
            first, dash, last = ("1", "-", "") if numbers == "*" else numbers.partition("-")
            for word, value in zip(rest[::2], rest[1::2], strict=True):
                field, convert = _WORDS[word]
                given[field] = convert(value)
            end = None if not dash else int(last or "0")
            return cls(action, kind, int(first), end, **given)  # type: ignore[arg-type]
        except (KeyError, ValueError) as error:
            raise ValueError(f"no rule of faults: {text!r} ({error})") from error

    def __str__(self) -> str:
        last = "" if self.last is None else f"-{self.last or ''}"
        numbers = "*" if (self.first, self.last) == (1, 0) else f"{self.first}{last}"
        words = [self.action, self.kind, numbers]
        defaults = {field.name: field.default for field in fields(self)}
        for word, (name, _) in _WORDS.items():
            if (value := getattr(self, name)) != defaults[name]:
                words += [word, str(value)]
        return " ".join(words)

    def verdict(self) -> Verdict:
        """What happens to the packets."""
        match self.action:
            case "lose":
                return Verdict(copies=0)
            case "corrupt":
                return Verdict(flips=self.bits)
            case "delay":
                return Verdict(delay=self.delay)
            case "repeat":
                return Verdict(copies=self.copies)
            case _:
                return Verdict()

    def fits(self, packet: FabricPacket, connection: int) -> bool:
        """Whether the rule is about a packet of a connection (0 for none), whatever its number."""
        return (
            self.connection in (0, connection)
            and self.source in ("", packet.source)
            and self.destination in ("", packet.destination)
            and any(fnmatchcase(kind, self.kind) for kind in _kinds(packet))
        )


class FaultScript:
    """Rules for :attr:`Fabric.faults`. The first rule that a packet fits, by its number too, decides.

    Packets that fit none are left to chance. A script counts packets as they are sent, so it is for one fabric and one
    run. As text it has one rule a line; what follows ``#`` is a comment.

    Attributes:

    - ``rules``: the rules, in order.
    """

    def __init__(self, rules: Iterable[FaultRule] = ()) -> None:
        self.rules: tuple[FaultRule, ...] = tuple(rules)
        #: How many packets each rule has fitted.
        self._counts = [0] * len(self.rules)
        self._connections = _Connections()

    @classmethod
    def parse(cls, text: str) -> FaultScript:
        """Return the script of a text; ValueError for a line that is no rule."""
        lines = (line.partition("#")[0].strip() for line in text.splitlines())
        return cls(FaultRule.parse(line) for line in lines if line)

    def __call__(self, packet: FabricPacket) -> Verdict | None:
        connection = self._connections.number_of(packet)
        verdict = None
        for index, rule in enumerate(self.rules):
            if rule.fits(packet, connection):
                self._counts[index] += 1
                last = rule.first if rule.last is None else rule.last or _NO_END
                if verdict is None and rule.first <= self._counts[index] <= last:
                    verdict = rule.verdict()
        return verdict

    def __str__(self) -> str:
        return "\n".join(map(str, self.rules))

    def __repr__(self) -> str:
        return f"<FaultScript {len(self.rules)} rules>"


class _Connections:
    """The connections of a fabric, as their REQ and REP messages tell."""

    def __init__(self) -> None:
        self._count = 0
        #: Numbers of connections by host and communication id, and by host and queue pair number.
        self._by_id: dict[tuple[str, int], int] = {}
        self._by_qpn: dict[tuple[str, int], int] = {}

    def number_of(self, packet: FabricPacket) -> int:
        """The number of a packet's connection; 0 for none."""
        if packet.dest_qp != GSI_QPN:
            return self._by_qpn.get((packet.destination, packet.dest_qp), 0)
        try:
            message, _ = unpack_mad(packet.data[MAD_OFFSET:-ICRC_LENGTH])
        except WireError:
            return 0
        local = packet.source, getattr(message, "local_comm_id", 0)
        number = self._by_id.get((packet.destination, getattr(message, "remote_comm_id", 0))) or self._by_id.get(local)
        if isinstance(message, REQ) and not number:
            self._count += 1
            number = self._count
        if number and isinstance(message, REQ | REP):
            for table, key in ((self._by_id, local), (self._by_qpn, (packet.source, message.local_qpn))):
                table[key] = number
                if len(table) > _MAX_CONNECTIONS:
                    del table[next(iter(table))]
        return number or 0


def _kinds(packet: FabricPacket) -> tuple[str, ...]:
    """The names of a packet's kind that rules may use."""
    kind = packet.kind
    if kind == Opcode.RC_ACKNOWLEDGE.name:
        aeth = packet.data[BTH_LENGTH : BTH_LENGTH + AETH_STRUCT.size]
        return (kind, AETH_TYPES[aeth[0] >> 5].name) if len(aeth) == AETH_STRUCT.size else (kind,)
    return (kind, "DATA") if kind.startswith("RC_") else (kind,)
