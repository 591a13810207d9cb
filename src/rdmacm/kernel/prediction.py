"""What the rules of this package predict for a destination, beside what the kernel has chosen.

The kernel resolves an address by itself. To explain its choice, the rules (:mod:`rdmacm.resolution`) are applied to the
same routing tables and to the GID tables that sysfs shows.
"""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from typing import NamedTuple

from rdmacm.address import Gid, InetAddr
from rdmacm.errors import Failure, errno_name
from rdmacm.explanation import Candidate, Explanation, Step
from rdmacm.kernel.host import KernelHost
from rdmacm.kernel.reasons import no_device
from rdmacm.proto.sa import PathRecord
from rdmacm.resolution.lookup import Lookup, find
from rdmacm.resolution.path import shown_path


class Choice(NamedTuple):
    """What the kernel has chosen for an id."""

    #: The name of the device, the number of the port, and the GID there; an empty name for none.
    device: str
    port_num: int
    sgid: Gid


def predict(
    host: KernelHost, destination: InetAddr, source: InetAddr | None, origin: str, tos: int = 0
) -> tuple[Lookup, Failure | None]:
    """What the rules choose, in :attr:`Lookup.found`, or why they choose nothing."""
    failure: Failure | None = None
    for fresh in (False, True):  # the GID table follows the addresses with a delay
        lookup = Lookup(host.view(fresh=fresh), destination, source, origin, tos)
        try:
            found = find(host.network, lookup)
        except Failure as error:
            failure = error
            if error.step != "select":
                break
            reason = no_device(host) if fresh and error.errno == errno.ENODEV else None
            if reason is not None:
                error.message, error.hint = reason
            continue
        if found.next_hop is not None:
            lookup.neighbour = host.network.neighbour(*found.next_hop)
        return lookup, None
    return lookup, failure


def explain_choice(
    lookup: Lookup, failure: Failure | None, choice: Choice, steps: tuple[Step, ...], paths: tuple[PathRecord, ...]
) -> Explanation:
    """The explanation of a resolution that has succeeded in the kernel."""
    found = lookup.explain(None, None)
    wanted = choice.device, choice.port_num, str(choice.sgid)
    own = None if found.chosen is None else _place(found.chosen)
    candidates = tuple(replace(c, chosen=False) for c in distinct(found.candidates))
    of_kernel = next((number for number, c in enumerate(candidates) if _place(c) == wanted and c.kept), None)
    notes: tuple[str, ...] = ()
    if own != wanted:
        notes = (_difference(lookup, failure, choice, own),)
    if of_kernel is not None:
        chosen = candidates[of_kernel]
        rule = chosen.rule if not notes else "kernel"
        changed = replace(chosen, chosen=True, kept=True, rule=rule, reason=chosen.reason if not notes else "")
        candidates = (*candidates[:of_kernel], changed, *candidates[of_kernel + 1 :])
    path = shown_path(paths[0]) if paths else None
    return replace(found, candidates=candidates, steps=steps, path=path, notes=notes)


def distinct(candidates: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
    """Each row of a GID table once, the best first: the GID of an iWARP port stands for all addresses there."""
    found: dict[tuple[object, ...], Candidate] = {}
    for each in candidates:
        source = each.interface and each.source  # the addresses of an IPoIB interface are told apart
        found.setdefault((each.device, each.port_num, each.gid_index, each.interface, source), each)
    return tuple(found.values())


def _place(candidate: Candidate) -> tuple[str, int, str]:
    return candidate.device, candidate.port_num, candidate.gid


def _difference(lookup: Lookup, failure: Failure | None, choice: Choice, own: tuple[str, int, str] | None) -> str:
    chosen = f"the kernel chose {choice.device} port {choice.port_num}, GID {choice.sgid}"
    if lookup.destination.is_loopback or lookup.destination.is_any:
        return f"{chosen}: for a loopback address it takes the first device that has an active port"
    if own is not None:
        return f"{chosen}; from the routes and GID tables, {own[0]} port {own[1]}, GID {own[2]} was expected"
    reason = f" ({failure.message})" if failure is not None else ""
    return f"{chosen}; from the routes and GID tables, no device was expected{reason}"


def explain_failure(
    lookup: Lookup | None, expected: Failure | None, code: int, step: str, message: str, steps: tuple[Step, ...]
) -> Explanation:
    """The explanation of a resolution that has failed in the kernel with an errno."""
    if lookup is None:
        found = Explanation(None, None, KernelHost.provider_name)
    else:
        found = lookup.explain(None, None)
    notes: tuple[str, ...] = ()
    if expected is not None and expected.errno != code:
        notes = (f"from the routes and GID tables, {errno_name(expected.errno)} was expected: {expected.message}",)
    elif expected is None and lookup is not None and step == "resolve_addr" and lookup.found is not None:
        device = lookup.found.view.device.name
        notes = (f"from the routes and GID tables, {device} with {lookup.found.row.gid} was expected",)
    hint = expected.hint if expected is not None and expected.errno == code else None
    return replace(
        found,
        candidates=tuple(replace(c, chosen=False) for c in distinct(found.candidates)),
        steps=steps,
        notes=notes,
        error=step,
        errno=code,
        errno_name=errno_name(code),
        message=message or os.strerror(code),
        hint=hint,
    )
