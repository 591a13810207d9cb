"""What a rule is, and what it may answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from rdmacm.doctor.view import Host


class Evidence(StrEnum):
    """How well a rule is known."""

    #: The fix was confirmed by those who had the fault.
    TESTED = "tested"
    #: A maintainer of the software gave cause or fix.
    MAINTAINER = "maintainer"
    #: Read in the source or documentation of the kernel, librdmacm or rdma-core.
    SOURCE = "source"
    #: Inferred of the source: what fires is likely, not certain.
    INFERRED = "likely"


#: The questions, in the order in which they are asked. The first that has a finding is the one to mend first.
QUESTIONS = (
    "device",
    "node and permission",
    "locked memory",
    "network namespace",
    "interface and address",
    "GID, its type and index",
    "source and route",
    "neighbour",
    "MTU",
    "UDP port 4791",
    "listener",
    "answer of the peer",
    "data",
    "class of traffic",
)


@dataclass(frozen=True)
class Found:
    """A fault. ``text`` has the measurement that shows it, ``command`` mends it.

    ``is_note``: it is worth knowing, and no fault of this host as it is used. ``is_sure``: the measurement proves it,
    also where the rule was inferred.
    """

    text: str
    command: str
    is_note: bool = False
    is_sure: bool = False


@dataclass(frozen=True)
class Quiet:
    """No fault; ``saw`` is what was looked at."""

    saw: str


@dataclass(frozen=True)
class Unasked:
    """The rule does not apply, or lacks what it needs; ``why``."""

    why: str


Outcome: TypeAlias = Found | Quiet | Unasked


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    - ``id``: such as ``C1``; its anchor in docs/doctor.md is that in lower case.
    - ``symptoms``: as users see them: messages of programs, which an index lists.
    - ``test``: what is measured, and when it is a finding.
    - ``finding``: what it means.
    - ``mend``: commands that mend it.
    - ``sources``: where it was reported or read.
    - ``check``: judges a host.
    """

    id: str
    title: str
    evidence: Evidence
    question: str
    symptoms: tuple[str, ...]
    test: str
    finding: str
    mend: str
    sources: str
    check: Callable[[Host], Outcome]

    @property
    def is_likely(self) -> bool:
        return self.evidence is Evidence.INFERRED

    def outcome(self, host: Host) -> Outcome:
        """What the rule says of a host."""
        return self.check(host)
