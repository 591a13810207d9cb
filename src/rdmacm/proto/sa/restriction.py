"""A path record as a restriction of paths: the route in the hints of rdma_getaddrinfo(3).

The page: "Routing paths may be restricted by setting desired routing data fields on input." A field that is 0 is open.
MTU, rate and packet life time are compared by their selectors, P_Keys by their partition (InfiniBand Architecture
15.2.5.16 and 10.9.3). ``reversible``, ``numb_path`` and ``preference`` restrict nothing: each path is usable in both
directions, and the others are about lists of paths.
"""

from __future__ import annotations

from typing import Any

from rdmacm.address import Gid
from rdmacm.proto.sa.attributes import Selector
from rdmacm.proto.sa.records import RATE_GBPS, PathRecord

#: The fields that are compared for equality.
_EQUAL = ("slid", "dlid", "flow_label", "hop_limit", "traffic_class", "qos_class", "sl")
#: The fields with a selector.
_SELECTED = ("mtu", "rate", "packet_life_time")
#: What a host writes into the headers of its packets. On RoCE nobody else has a say in it.
_OF_THE_HOST = ("service_id", "flow_label", "hop_limit", "traffic_class", "sl")
#: ``packet_life_time`` has 6 bits.
_LONGEST_LIFE_TIME = 63
_WORDS = {Selector.GREATER: "more than ", Selector.LESS: "less than ", Selector.EXACTLY: ""}


def set_fields(like: PathRecord) -> dict[str, Any]:
    """The fields that restrict a query by GIDs, P_Key and service id further, each with its selector if it has one."""
    found: dict[str, Any] = {name: value for name in _EQUAL if (value := getattr(like, name))}
    for name in _SELECTED:
        if value := getattr(like, name):
            found |= {name: value, f"{name}_selector": getattr(like, f"{name}_selector")}
    return found


def same_partition(pkey: int, wanted: int) -> bool:
    """Whether a P_Key is in the partition of another; of 0, in any."""
    return not wanted or not (pkey ^ wanted) & 0x7FFF


def why_unusable(path: PathRecord, *, has_lids: bool) -> str | None:
    """What a record lacks that a connection request needs: an MTU, and with ``has_lids`` the LID of the peer."""
    if not path.mtu_bytes:
        return f"the path has no MTU (code {path.mtu})"
    return "the path has no LID of the destination (dlid 0)" if has_lids and not path.dlid else None


def meets(path: PathRecord, like: PathRecord) -> bool:
    """Whether a path has each field of ``like`` that is set."""
    return (
        _is_end(path.sgid, like.sgid)
        and _is_end(path.dgid, like.dgid)
        and same_partition(path.pkey, like.pkey)
        and (path.service_id in (0, like.service_id) or not like.service_id)
        and all(getattr(path, name) == value for name in _EQUAL if (value := getattr(like, name)))
        and all(_is_selected(name, path, like) for name in _SELECTED)
    )


def _is_end(gid: Gid, wanted: Gid) -> bool:
    return not any(wanted) or gid == wanted


def _is_selected(name: str, path: PathRecord, like: PathRecord) -> bool:
    value, wanted, selector = getattr(path, name), getattr(like, name), getattr(like, f"{name}_selector")
    if not wanted or selector == Selector.LARGEST:
        return True
    if name == "rate":
        if value not in RATE_GBPS or wanted not in RATE_GBPS:  # 0 is the port's own rate, which is not known
            return False
        value, wanted = RATE_GBPS[value], RATE_GBPS[wanted]
    if selector == Selector.EXACTLY:
        return bool(value == wanted)
    return bool(value > wanted if selector == Selector.GREATER else value < wanted)


def made_like(path: PathRecord, like: PathRecord) -> PathRecord | None:
    """A path of RoCE, which the host makes itself, with what is asked for; None where that is not possible.

    ``path`` has the largest MTU. A smaller one is possible, and so is each value of what the host alone decides:
    service id, flow label, hop limit, traffic class, service level and packet life time.
    """
    changes: dict[str, Any] = {name: value for name in _OF_THE_HOST if (value := getattr(like, name))}
    if like.mtu and like.mtu_selector in (Selector.EXACTLY, Selector.LESS):
        changes["mtu"] = min(path.mtu, like.mtu - (like.mtu_selector == Selector.LESS))
    own, wanted = path.packet_life_time, like.packet_life_time
    if wanted:
        changes["packet_life_time"] = {
            Selector.GREATER: min(max(own, wanted + 1), _LONGEST_LIFE_TIME),
            Selector.LESS: min(own, wanted - 1),
            Selector.EXACTLY: wanted,
        }.get(Selector(like.packet_life_time_selector), own)
    made = path.replace(**changes)
    return made if why_unusable(made, has_lids=False) is None and meets(made, like) else None


def describe(like: PathRecord) -> str:
    """What a restriction asks for, in words."""
    found = [f"{name} {gid}" for name, gid in (("SGID", like.sgid), ("DGID", like.dgid)) if any(gid)]
    if like.pkey:
        found.append(f"P_Key 0x{like.pkey:04x}")
    if like.service_id:
        found.append(f"service id 0x{like.service_id:x}")
    found += [f"{name.replace('_', ' ')} {value}" for name in _EQUAL if (value := getattr(like, name))]
    for name in _SELECTED:
        value, selector = getattr(like, name), getattr(like, f"{name}_selector")
        if value and selector != Selector.LARGEST:
            shown = like.mtu_bytes or value if name == "mtu" else value
            found.append(f"{name.replace('_', ' ')} {_WORDS[selector]}{shown}")
    return ", ".join(found)
