"""All operations in one pair of programs, as it takes seconds to start them; each test then looks at its own."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from interop.machine.run import Result

if TYPE_CHECKING:
    from interop.conftest import Guest

__all__ = ["HEADERS", "LISTENERS", "Batch", "Batches"]

#: Which device's program listens.
LISTENERS = ("rxe", "soft")
#: Bytes that a link has room for beside a path's MTU: no more than it needs, and IPv6's 1280 in all.
HEADERS = 400
_OTHER = {"request": "respond", "respond": "request", "both": "both"}
_LINE = re.compile(r"^(ok|FAILED) (request|respond|both) (\w+)(?:: (.*))?$", re.MULTILINE)


@dataclass(frozen=True)
class Batch:
    """What two programs have said."""

    result: Result
    client: str
    server: str
    #: Whether the client is on our device.
    we_connect: bool

    def failure(self, name: str, part: str) -> str | None:
        """What went wrong at either end with an operation in which our device had that part."""
        ours, theirs = (self.client, self.server) if self.we_connect else (self.server, self.client)
        faults = []
        for whose, output, role in (("our", ours, part), ("the other", theirs, _OTHER[part])):
            found = [line for line in _LINE.findall(output) if line[1:3] == (role, name)]
            # What was asked for again, because an answer was lost, has been done twice.
            if not found:
                faults.append(f"{whose} end has not come to it")
            faults += [f"{whose} end: {why}" for outcome, _, _, why in found if outcome == "FAILED"]
        return "\n".join([*faults, self.result.output]) if faults else None


@dataclass
class Batches:
    """Those that have been run, by what they were asked for."""

    _done: dict[object, Batch | AssertionError] = field(default_factory=dict)

    def get(
        self,
        guest: Guest,
        *,
        family: int,
        listens: str,
        mtu: int = 1024,
        only: Sequence[str] = (),
        link: str = "",
        naks: Container[int] = (),
        record: bool = True,
    ) -> Batch:
        """The batch with these operations (all, without), run unless it has been.

        ``link``: what there is about the link, to tell batches apart. Other arguments are as for ``Guest.run``.
        """
        key = (family, listens, mtu, tuple(only), link)
        if key not in self._done:
            try:
                if not link:
                    guest.network = f"network {mtu + HEADERS}"
                self._done[key] = self._run(guest, family, listens, mtu, only, naks, record)
            except AssertionError as error:
                self._done[key] = error
        done = self._done[key]
        if isinstance(done, AssertionError):
            raise done
        return done

    @staticmethod
    def _run(
        guest: Guest,
        family: int,
        listens: str,
        mtu: int,
        only: Sequence[str],
        naks: Container[int],
        record: bool,
    ) -> Batch:
        connects = "soft" if listens == "rxe" else "rxe"
        address = f"${listens.upper()}{family} 7471 --mtu {mtu}"
        modules = {"rxe": "interop.verbs_peer", "soft": "interop.soft_peer"}
        script = (
            f"serve_{listens} python3 -m {modules[listens]} listen {address} || exit\n"
            f"{connects} python3 -m {modules[connects]} connect {address} --only '{','.join(only)}'\n"
            "status=$?; echo '=== server'; finish; exit $status"
        )
        result = guest.run(script, timeout=400, naks=naks, record=record)
        client, _, server = result.output.partition("=== server\n")
        return Batch(result, client, server, connects == "soft")
