"""How a subnet administrator matches records and paths against the components of a query.

The rules are OpenSM's, including its reading of the selectors for MTU, rate and packet lifetime.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntFlag

from rdmacm.proto.sa.attributes import Selector
from rdmacm.proto.sa.query import PathMask
from rdmacm.proto.sa.records import RATE_GBPS, PathRecord

#: Codes of MTU, rate and packet lifetime, in ascending order of what they stand for.
_MTUS = tuple(range(1, 6))
_RATES = tuple(sorted(RATE_GBPS, key=RATE_GBPS.__getitem__))
_LIFETIMES = tuple(range(64))


def has_pkey(pkeys: tuple[int, ...], pkey: int) -> bool:
    """Return whether a P_Key table has a partition, with full or limited membership."""
    return any(own & 0x7FFF == pkey & 0x7FFF for own in pkeys)


def common_pkeys(some: tuple[int, ...], others: tuple[int, ...]) -> list[int]:
    """Return the P_Keys with which two ports can communicate: at least one of them is a full member."""
    full = {pkey & 0x7FFF for pkey in others if pkey & 0x8000}
    limited = {pkey & 0x7FFF for pkey in others}
    return [pkey | 0x8000 for pkey in some if pkey & 0x7FFF in (limited if pkey & 0x8000 else full)]


def matches(record: object, query: object, mask: IntFlag) -> bool:
    """Return whether the fields selected by a component mask are equal."""
    for name, component in type(mask).__members__.items():
        bits = mask & component
        if not bits:
            continue
        value, wanted = getattr(record, name.lower()), getattr(query, name.lower())
        if bits != component:  # a component of several bits is an array, of which some elements are selected
            low = component & -component
            chosen = [index for index in range(len(value)) if bits & low << index]
            value, wanted = [value[index] for index in chosen], [wanted[index] for index in chosen]
        if value != wanted:
            return False
    return True


def is_valid_path_query(query: PathRecord, mask: PathMask) -> bool:
    """Return whether the query's codes of MTU and rate are defined."""
    wants_mtu = mask & PathMask.MTU and mask & PathMask.MTU_SELECTOR
    wants_rate = mask & PathMask.RATE and mask & PathMask.RATE_SELECTOR
    return not (wants_mtu and query.mtu not in _MTUS) and not (wants_rate and query.rate not in _RATES)


def fit_path(path: PathRecord, query: PathRecord, mask: PathMask) -> PathRecord | None:
    """Return a path as the answer to a query, or None when it does not satisfy the query.

    As OpenSM reads the specification, a path also serves queries for a smaller MTU than its own, but a query for an
    exact rate must name the path's own. The packet lifetime of a path is an upper limit, not a lower one.
    """
    if path.service_id and not (mask & PathMask.SERVICE_ID and path.service_id == query.service_id):
        return None
    if mask & PathMask.REVERSIBLE and query.reversible and not path.reversible:
        return None
    if mask & PathMask.PKEY and (path.pkey ^ query.pkey) & 0x7FFF:
        return None
    if mask & PathMask.SL and path.sl != query.sl:
        return None
    mtu: int | None = path.mtu
    if mask & PathMask.MTU and mask & PathMask.MTU_SELECTOR:
        mtu = _select(path.mtu, query.mtu, query.mtu_selector, _MTUS)
    rate: int | None = path.rate
    if mask & PathMask.RATE and mask & PathMask.RATE_SELECTOR:
        rate = _select(path.rate, query.rate, query.rate_selector, _RATES)
        if query.rate_selector == Selector.EXACTLY and rate != path.rate:
            return None
    lifetime: int | None = path.packet_life_time
    if mask & PathMask.PACKET_LIFE_TIME and mask & PathMask.PACKET_LIFE_TIME_SELECTOR:
        selector = query.packet_life_time_selector
        lifetime = _select(path.packet_life_time, query.packet_life_time, selector, _LIFETIMES)
    if mtu is None or rate is None or lifetime is None:
        return None
    return path.replace(mtu=mtu, rate=rate, packet_life_time=lifetime)


def _select(largest: int, wanted_code: int, selector: int, codes: Sequence[int]) -> int | None:
    """Return the code that satisfies a selector, or None. Available are ``largest`` and all codes before it."""
    if largest not in codes:
        return None
    limit, wanted = codes.index(largest), codes.index(wanted_code)
    if selector == Selector.EXACTLY:
        return wanted_code if wanted <= limit else None
    if selector == Selector.GREATER:
        return largest if limit > wanted else None
    if selector == Selector.LESS:
        return codes[min(limit, wanted - 1)] if wanted else None
    return largest
