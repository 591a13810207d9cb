"""rdma_set_option(3) on an id of the soft provider."""

from __future__ import annotations

import errno
import sys
from dataclasses import replace

from rdmacm.capabilities import Feature
from rdmacm.constants import CmEventType, IbOption, IdOption, OptionLevel, PathFlag
from rdmacm.errors import CmStateError, cm_error
from rdmacm.proto.sa import PATH_FLAGS, PathData
from rdmacm.proto.sa.restriction import why_unusable
from rdmacm.provider.cmstate import OPTION_STATES, Trigger, refusal
from rdmacm.soft.ids.alternate_path import why_no_alternate
from rdmacm.soft.ids.id_state import IdState
from rdmacm.verbs.enums import QPType

_MAX_INT32 = 0x7FFFFFFF
#: Bytes of struct ibv_path_data.
_PATH_DATA_SIZE = 72
#: The flags of an alternate path, with GMP or without.
_ALTERNATE = PathFlag.ALTERNATE | PathFlag.BIDIRECTIONAL


def set_option(core: IdState, level: int, name: int, value: int | bytes) -> None:
    """Set an option; ENOSYS for one that does not exist, EINVAL for a wrong value or state."""
    if level == OptionLevel.ID and name in (IdOption.TOS, IdOption.ACK_TIMEOUT):
        _set_byte(core, IdOption(name), _number(value, 1, 0xFF))
    elif level == OptionLevel.ID and name == IdOption.REUSEADDR:
        _set_reuseaddr(core, bool(_number(value, 4, _MAX_INT32)))
    elif level == OptionLevel.ID and name == IdOption.AFONLY:
        _set_afonly(core, bool(_number(value, 4, _MAX_INT32)))
    elif level == OptionLevel.IB and name == IbOption.PATH:
        _set_path(core, value)
    else:
        raise cm_error(errno.ENOSYS, f"no option {name} at level {level}", "set_option")


def _require_state(core: IdState, option: str) -> None:
    if core.state not in OPTION_STATES[option]:
        raise CmStateError(refusal(core.state), f"{option} cannot be set in state {core.state.name}", "set_option")


def _set_byte(core: IdState, name: IdOption, value: int) -> None:
    _require_state(core, name.name)
    if name is IdOption.TOS:
        core.options = replace(core.options, tos=value)
    elif core.qp_type != QPType.RC:
        raise cm_error(errno.EINVAL, "ACK_TIMEOUT is for ids whose QP type is RC", "set_option")
    else:
        core.options = replace(core.options, ack_timeout=value)


def _set_reuseaddr(core: IdState, on: bool) -> None:
    _require_state(core, "REUSEADDR on" if on else "REUSEADDR off")
    core.options = replace(core.options, reuseaddr=on)
    if on and core.port_owner is not None:
        core.host.ports.share(core.port_owner)


def _set_afonly(core: IdState, on: bool) -> None:
    _require_state(core, "AFONLY")
    if core.port_owner is not None:
        core.host.ports.set_afonly(core.port_owner, on)
    core.options = replace(core.options, afonly=on)


def _set_path(core: IdState, value: int | bytes) -> None:
    if not isinstance(value, bytes | bytearray | memoryview) or not value or len(value) % _PATH_DATA_SIZE:
        message = f"IB_PATH takes an array of {_PATH_DATA_SIZE}-byte ibv_path_data"
        raise cm_error(errno.EINVAL, message, "set_option")
    core.require(Trigger.SET_PATH)
    size = _PATH_DATA_SIZE
    records = [PathData.unpack(value[start : start + size]) for start in range(0, len(value), size)]
    primary = next((data.path for data in records if data.flags == PATH_FLAGS), None)
    alternate = next((data.path for data in records if data.flags & ~PathFlag.GMP == _ALTERNATE), None)
    if primary is None:
        wanted = f"no record with flags {int(PATH_FLAGS)} (GMP, PRIMARY, BIDIRECTIONAL)"
        raise cm_error(errno.EINVAL, wanted, "set_option")
    reason = why_unusable(primary, has_lids=core.is_infiniband)
    if reason is not None:
        raise cm_error(errno.EINVAL, reason, "set_option", hint="a path of getaddrinfo()")
    if alternate is not None:
        core.require_feature(Feature.ALTERNATE_PATHS, "set_option")
    why = "" if alternate is None else why_no_alternate(primary, alternate)
    if why:
        raise cm_error(errno.EINVAL, why, "set_option", str(core.peer_addr))
    core.paths = (primary,) if alternate is None else (primary, alternate)
    core.move(Trigger.SET_PATH)
    core.post(CmEventType.ROUTE_RESOLVED)


def _number(value: int | bytes, size: int, limit: int) -> int:
    """An option's value: a number, or the C representation of one."""
    if isinstance(value, bytes | bytearray):
        if len(value) != size:
            raise cm_error(errno.EINVAL, f"the option has {size} bytes, not {len(value)}", "set_option")
        value = int.from_bytes(value, sys.byteorder)
    if isinstance(value, float) or not isinstance(value, int) or not 0 <= value <= limit:
        raise cm_error(errno.EINVAL, f"the option takes 0..{limit}, not {value!r}", "set_option")
    return int(value)
