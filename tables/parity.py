"""The tables of docs/parity.md that are made: what providers can do, and what the kernel's does by type."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from socket import AF_INET

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from rdmacm.address import AF_IB
from rdmacm.capabilities import DEVICE, NO, NOWHERE, PROVIDERS, Capabilities, Feature
from rdmacm.kernel.differences import DIFFERENCES, RULES, Rules
from rdmacm.proto.cm.messages import Message
from rdmacm.proto.cm.private_data import user_capacity
from rdmacm.verbs.enums import QPType

__all__ = ["with_tables"]


def with_tables(text: str) -> str:
    """The page with its tables as they should be."""
    for name, lines in (("capabilities", capabilities()), ("differences", differences())):
        begin, end = f"<!-- {name}: made by dev.py tables -->\n", "<!-- end -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        made = "\n".join((begin, *lines, "", end))
        text, count = pattern.subn(lambda _, made=made: made, text)  # type: ignore[misc]
        assert count == 1, name
    return text


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def capabilities() -> Iterator[str]:
    heads = ("", *(f"`{each.provider}` {each.part}".strip() for each in PROVIDERS))
    yield from table(
        heads,
        (
            ("transports", *(", ".join(each.transports) for each in PROVIDERS)),
            ("address families", *(", ".join(f"`{name}`" for name in each.families) for each in PROVIDERS)),
            *((f.text, *(_cell(each, f) for each in PROVIDERS)) for f in Feature if f not in NOWHERE),
        ),
    )
    yield ""
    yield "No provider has:"
    yield ""
    for feature, why in NOWHERE.items():
        yield f"- {feature.text}" + (f": {why}" if why else "")


def _cell(provider: Capabilities, feature: Feature) -> str:
    answer = provider.support(feature)
    if answer == NO:
        why = provider.lacks[feature]
        return f"no: {why}" if why else "no"
    return "device" if answer == DEVICE else "yes"


def _room(kind: type[Message]) -> str:
    by_ip = user_capacity(kind, AF_INET)
    room = user_capacity(kind, AF_IB)
    return f"{kind.__name__}: {room}" + (f", with IP addresses {by_ip}" if by_ip != room else "")


def differences() -> Iterator[str]:
    def row(name: str, of: Iterable[str]) -> tuple[str, ...]:
        return name, *of

    every: list[Rules] = list(RULES.values())
    yield from table(
        ("through the kernel", *(QPType(qp_type).name for qp_type in RULES)),
        (
            row("attaching a queue pair takes it to", ("INIT" if each.is_connected else "RTS" for each in every)),
            row("DISCONNECTED follows", ("yes" if each.is_connected else "no" for each in every)),
            row("a send goes to", (each.to.value for each in every)),
            row("a send that fails takes the queue pair to", (each.after_failed_send.name for each in every)),
            row("made in", ("an XRC domain" if each.in_xrc_domain else "a protection domain" for each in every)),
            *(
                row(f"message of `{call}`: bytes of private data", (_room(each.messages[call]) for each in every))
                for call in ("connect", "accept", "reject")
            ),
        ),
    )
    yield ""
    yield from table(
        ("type", "call", "`soft`", "`kernel`"),
        ((", ".join(t.name for t in each.types), each.call, each.soft, each.kernel) for each in DIFFERENCES),
    )
