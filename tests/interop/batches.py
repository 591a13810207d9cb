"""All operations between one pair of programs, as starting the programs takes long; each test then looks at its own."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from interop.machine.run import Result
from interop.scenario import Guest

__all__ = ["HEADERS", "Batch", "Batches"]

#: What a link's MTU has in addition to the path MTU, in bytes: enough for the headers, and for IPv6's minimum of 1280.
HEADERS = 400
_OTHER = {"request": "respond", "respond": "request", "both": "both"}
_LINE = re.compile(r"^(ok|FAILED) (request|respond|both) (\w+)(?:: (.*))?$", re.MULTILINE)


@dataclass(frozen=True)
class Batch:
    """The output of the two programs."""

    result: Result
    client: str
    server: str
    #: Whether the client is on our device.
    we_connect: bool

    def failure(self, name: str, part: str) -> str | None:
        """Why the operation failed at either end, where our device had that part; None if it succeeded."""
        ours, theirs = (self.client, self.server) if self.we_connect else (self.server, self.client)
        faults = []
        for whose, output, role in (("our", ours, part), ("the other", theirs, _OTHER[part])):
            # An operation has two lines if it was requested again, because an answer was lost.
            found = [line for line in _LINE.findall(output) if line[1:3] == (role, name)]
            if not found:
                faults.append(f"{whose} end did not reach it")
            faults += [f"{whose} end: {why}" for outcome, _, _, why in found if outcome == "FAILED"]
        return "\n".join([*faults, self.result.output]) if faults else None


@dataclass
class Batches:
    """The batches that have run, by their arguments."""

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
        attempt: int = 0,
    ) -> Batch:
        """The batch with these operations (all, unless named). It runs at the first call.

        ``link`` names the state of the link if that is not the usual one; ``guest.network`` then makes it. ``naks`` is
        as for ``Guest.run``. Another ``attempt`` runs the same operations again.
        """
        key = (type(guest.machine), family, listens, mtu, tuple(only), link, attempt)
        if key not in self._done:
            try:
                if not link:
                    guest.network = f"network {mtu + HEADERS}"
                self._done[key] = self._run(guest, family, listens, mtu, only, naks)
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
    ) -> Batch:
        connects = "soft" if listens == "rxe" else "rxe"
        address = f"${listens.upper()}{family} 7471 --mtu {mtu}"
        modules = {"rxe": "interop.verbs_peer", "soft": "interop.soft_peer"}
        script = (
            f"serve_{listens} python3 -m {modules[listens]} listen {address} || exit\n"
            f"{connects} python3 -m {modules[connects]} connect {address} --only '{','.join(only)}'\n"
            "status=$?; echo '=== server'; finish; exit $status"
        )
        result = guest.run(script, timeout=400, naks=naks)
        client, _, server = result.output.partition("=== server\n")
        return Batch(result, client, server, connects == "soft")
