"""A user's send request as the engine takes it.

A request with an element that is not registered memory of its protection domain is queued like others: the engine gets
a buffer that cannot be accessed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rdmacm.enums import WROpcode
from rdmacm.errors import RdmaError, cm_error
from rdmacm.proto.core_choice import compiled
from rdmacm.proto.plainints import SEND_FENCE, SEND_INLINE, SEND_SIGNALED, SEND_SOLICITED
from rdmacm.proto.work import SendWork
from rdmacm.soft.device.memory import INACCESSIBLE, SoftMR
from rdmacm.soft.device.memory_window import Bind, SoftMW
from rdmacm.verbs.ah import AH
from rdmacm.verbs.buffers import Buffer, byte_view, bytes_at
from rdmacm.verbs.pd import MR
from rdmacm.verbs.wr import SGE, RecvWR, SendWR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rdmacm.soft.device.memory import MemoryTable

_FETCHING_ATOMICS = (WROpcode.ATOMIC_CMP_AND_SWP, WROpcode.ATOMIC_FETCH_AND_ADD)
#: Members by number. Engines compare by identity, and a user may post a plain int.
_OPCODES = {int(opcode): opcode for opcode in WROpcode}
#: By opcode of work requests: whether the local memory is written.
_WRITES_LOCALLY = [opcode in (WROpcode.RDMA_READ, *_FETCHING_ATOMICS) for opcode in range(max(WROpcode) + 1)]


class UnsignaledWrId(int):
    """The ``wr_id`` of a request that wants no completion.

    The engine completes such a request as well, because its place in the send queue becomes free; the queue pair drops
    the completion.
    """

    __slots__ = ()


def send_work(wr: SendWR, table: MemoryTable, pd: object, signal_all: bool) -> SendWork:
    """Make the engine's request from the user's, which :mod:`rdmacm.verbs.posting` has checked.

    ``signal_all``: the queue pair's ``sq_sig_all``.
    """
    opcode, elements = _OPCODES[wr.opcode], wr.sg
    flags = int(wr.send_flags)
    segments: Sequence[memoryview]
    if opcode is WROpcode.BIND_MW:
        segments = ()
    elif len(elements) == 1 and not isinstance(element := elements[0], SGE):
        segments = (memoryview(bytes(byte_view(element))),)
    elif flags & SEND_INLINE:
        segments = _inline_copy(elements, table, pd)
    else:
        segments = table.gather(pd, elements, _WRITES_LOCALLY[opcode])
    work = SendWork(
        wr.wr_id if flags & SEND_SIGNALED or signal_all else UnsignaledWrId(wr.wr_id),
        opcode,
        segments,
        True,
        flags & SEND_SOLICITED != 0,
        flags & SEND_FENCE != 0,
        wr.remote_addr,
        wr.rkey,
        wr.imm_data,
        wr.compare_add,
        wr.swap,
        wr.invalidate_rkey,
        _bind(wr) if opcode is WROpcode.BIND_MW else None,
    )
    if opcode is WROpcode.FLUSH:
        work.flush = wr.flush_length, wr.flush_type, wr.flush_level
    return work


def _inline_copy(elements: Sequence[SGE | Buffer], table: MemoryTable, pd: object) -> Sequence[memoryview]:
    """A copy of inline data; INACCESSIBLE if the process cannot read them. They need no registration."""
    parts: list[bytes | memoryview] = []
    for element in elements:
        if not isinstance(element, SGE):
            parts.append(byte_view(element))
        elif element.length:
            # ibv_post_send(3): the L_Key of inline data is not checked. The bytes of a region are found without a call.
            part = table.local(pd, element.lkey, element.addr, element.length, False)
            found = part if part is not None else bytes_at(element.addr, element.length)
            if found is None:
                return INACCESSIBLE
            parts.append(found)
    return (memoryview(b"".join(parts)),)


if compiled is not None:
    compiled.configure_requests(SendWR, RecvWR, SGE, MR, AH, UnsignaledWrId)


def _bind(wr: SendWR) -> Bind:
    """What a BIND_MW binds. The window has the new key from now on, for the user."""
    assert wr.mw is not None
    assert wr.bind_info is not None
    window, info = wr.mw.backend, wr.bind_info
    region = info.mr.backend if info.mr is not None else None
    bind = Bind(
        window if isinstance(window, SoftMW) else None,
        wr.rkey,
        region if isinstance(region, SoftMR) else None,
        info.mr,
        info.addr,
        info.length,
        int(info.mw_access_flags),
    )
    if isinstance(window, SoftMW):
        window.posted(bind)
    else:
        window.rkey = wr.rkey
    return bind


def refused(wr: SendWR | RecvWR, code: int, why: str, step: str) -> RdmaError:
    """The error of a post; ``wr`` is its ``bad_wr``."""
    error = cm_error(code, why, step)
    error.bad_wr = wr
    return error
