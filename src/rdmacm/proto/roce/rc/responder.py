"""The responder of a reliable connection: how the peer's requests are executed and answered.

Requests are executed strictly in PSN order. One that comes too early gets a single NAK and is dropped, with all that
follow, until the expected one arrives. A duplicate is not executed again: a SEND or WRITE is acknowledged once more, a
READ, atomic or ATOMIC WRITE is answered from the resource that was kept, a FLUSH by its PSN. Checks are made in the
order of InfiniBand Architecture 9.7.4 and of rxe: opcode sequence, permission, resources, lengths, then the memory key;
only then is memory touched. A duplicate READ whose key is not valid any more is dropped: it may be a late copy of one
that is complete.

Responses leave in the order of their requests. A READ response is cut into packets when it is sent, from the memory as
it is then; consecutive acknowledgements become one. What is kept is bounded: ``max_dest_rd_atomic`` READs, atomics and
ATOMIC WRITEs, at most two responses for each of them, MAX_FLUSHES responses of FLUSHes, and an acknowledgement between
one response and the next.

FLUSH has nothing left to do once its permissions are checked: every write before it was made in the memory itself, by
this process, and the memory of this device is never persistent (registration refuses it). So a FLUSH is complete when
it is reached.

Memory may be deregistered whenever no packet is being processed, so it is looked up again by its key for each packet.
"""

from __future__ import annotations

import sys

from rdmacm.address import ALL_BITS_64
from rdmacm.enums import AccessFlag, SelectivityLevel, WCOpcode, WCStatus
from rdmacm.proto.constants import (
    ACK_SYNDROME,
    ACKNOWLEDGE,
    ATOMIC_ACKNOWLEDGE,
    FETCH_ADD,
    FLUSH,
    ICRC_LENGTH,
    LONGEST_MESSAGE,
    NAK_INVALID_REQUEST,
    NAK_PSN_SEQUENCE_ERROR,
    NAK_REMOTE_ACCESS_ERROR,
    NAK_REMOTE_OPERATIONAL_ERROR,
    PSN_MASK,
    READ_REQUEST,
    READ_RESPONSE_FIRST,
    READ_RESPONSE_LAST,
    READ_RESPONSE_MIDDLE,
    READ_RESPONSE_ONLY,
    RNR_NAK,
    SYNDROME_KIND,
)
from rdmacm.proto.plainints import ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE
from rdmacm.proto.roce.buffers import LocalProtectionError, padded, scatter, total
from rdmacm.proto.roce.headers import (
    AETH_STRUCT,
    ATOMIC_ACK_ETH_STRUCT,
    ATOMIC_ETH_STRUCT,
    BTH_HALVES,
    BTH_HALVES_AETH,
    FETH_STRUCT,
    RETH_STRUCT,
    WORD,
)
from rdmacm.proto.roce.opcodes import EXTENDED_HEADERS, IS_END, IS_START, OPERATION, ExtendedHeader, Operation
from rdmacm.proto.roce.psn import difference
from rdmacm.proto.roce.rc.failure import fail_receive
from rdmacm.proto.roce.rc.state import RcState, Resource, Response
from rdmacm.proto.roce.rc.trains import Trains
from rdmacm.proto.work import WC, Memory, RecvWork

_NO_BYTES = memoryview(b"")
_SEND, _WRITE = int(Operation.SEND), int(Operation.RDMA_WRITE)
_READ, _ATOMIC = int(Operation.RDMA_READ), int(Operation.ATOMIC)
_FLUSH, _ATOMIC_WRITE = int(Operation.FLUSH), int(Operation.ATOMIC_WRITE)
_WITH_IMMEDIATE = frozenset(o for o in range(256) if EXTENDED_HEADERS[o] & ExtendedHeader.IMM_DT)
_WITH_INVALIDATE = frozenset(o for o in range(256) if EXTENDED_HEADERS[o] & ExtendedHeader.IETH)
_WITH_WORD = _WITH_IMMEDIATE | _WITH_INVALIDATE
_SUCCESS = WCStatus.SUCCESS
_RECV, _RECV_WITH_IMM = WCOpcode.RECV, WCOpcode.RECV_RDMA_WITH_IMM
#: Responses of FLUSHes that wait to be sent; rxe has at most as many PSNs outstanding. A FLUSH beyond that is dropped.
MAX_FLUSHES = 128
#: By the low six bits of a FETH: the permissions that the FLUSH needs, and whether it is for the whole region. Other
#: values have reserved bits, a reserved level, or no placement type.
_FLUSHES = {
    int(level) << 4 | global_ | persistent << 1: (
        (AccessFlag.FLUSH_GLOBAL if global_ else AccessFlag(0))
        | (AccessFlag.FLUSH_PERSISTENT if persistent else AccessFlag(0)),
        level is SelectivityLevel.MR,
    )
    for level in SelectivityLevel
    for global_, persistent in ((1, 0), (0, 1), (1, 1))
}

#: The bits of ``flags``: the BTH's solicited event bit, and its request for an acknowledgement.
FLAG_SOLICITED, FLAG_ACK_REQUEST = 0x80, 0x01


class _RefusedError(Exception):
    """A request that cannot be executed: the syndrome of the NAK, and the status of the receive in progress."""

    def __init__(self, syndrome: int, status: WCStatus | None = None) -> None:
        self.syndrome = syndrome
        self.status = status


#: By syndrome of the NAK: the status of the receive in progress.
_RECV_STATUS_OF_NAK = {
    NAK_INVALID_REQUEST: WCStatus.REM_INV_REQ_ERR,
    NAK_REMOTE_ACCESS_ERROR: WCStatus.REM_ACCESS_ERR,
    NAK_REMOTE_OPERATIONAL_ERROR: WCStatus.LOC_QP_OP_ERR,
}


# -- requests -------------------------------------------------------------------------------------------------


def received(rc: RcState, opcode: int, psn: int, flags: int, body: memoryview) -> bool:
    """Process a request; False if it is not executed.

    ``flags`` are FLAG_SOLICITED and FLAG_ACK_REQUEST. ``body`` is what follows the BTH, without padding; it has the
    extended headers of the opcode.
    """
    if psn != rc.expected_psn:
        _out_of_order(rc, opcode, psn, body)
        return False
    rc.nak_sent = False
    if opcode == FLUSH and _waiting_flushes(rc) >= MAX_FLUSHES:
        rc.counters.dropped["sequence"] += 1  # as if it had been lost: the peer sends it again
        return False
    try:
        _execute(rc, opcode, psn, flags, body)
    except _RefusedError as refused:
        respond(rc, psn, refused.syndrome)
        rc.nak_sent = True  # later requests are dropped without a NAK until this one comes again
        if refused.syndrome & SYNDROME_KIND == RNR_NAK:
            rc.counters.dropped["not ready"] += 1
        else:
            rc.counters.dropped["refused"] += 1
            fail_receive(rc, refused.status or _RECV_STATUS_OF_NAK[refused.syndrome])
        return False
    return True


def _out_of_order(rc: RcState, opcode: int, psn: int, body: memoryview) -> None:
    if difference(psn, rc.expected_psn) > 0:
        if not rc.nak_sent:
            rc.nak_sent = True
            rc.counters.errors["out_of_seq_request"] += 1
            respond(rc, rc.expected_psn, NAK_PSN_SEQUENCE_ERROR)
        rc.counters.dropped["sequence"] += 1
        return
    rc.counters.dropped["duplicate"] += 1
    if opcode == FLUSH:
        if _waiting_flushes(rc) < MAX_FLUSHES:
            rc.responses.append(Response(psn, ACK_SYNDROME, rc.msn, Resource(_FLUSH, psn, 1, 0, 0, 0), repeated=True))
    elif OPERATION[opcode] not in (_SEND, _WRITE):
        _respond_again(rc, opcode, psn, body)
    else:
        _acknowledge_again(rc)


def _execute(rc: RcState, opcode: int, psn: int, flags: int, body: memoryview) -> None:
    operation = OPERATION[opcode]
    if operation not in (_SEND, _WRITE):
        if rc.operation:
            raise _RefusedError(NAK_INVALID_REQUEST)
        if operation == _READ:
            _execute_read(rc, psn, body)
        elif operation == _ATOMIC:
            _execute_atomic(rc, opcode, psn, body)
        elif operation == _ATOMIC_WRITE:
            _execute_atomic_write(rc, psn, body)
        else:
            _execute_flush(rc, psn, body)
        return
    is_start, is_end = IS_START[opcode], IS_END[opcode]
    if rc.operation != (0 if is_start else operation):
        raise _RefusedError(NAK_INVALID_REQUEST)
    if operation == _SEND:
        _execute_send(rc, opcode, is_start, is_end, flags, body)
    else:
        _execute_write(rc, opcode, is_start, is_end, flags, body)
    rc.expected_psn = expected = (psn + 1) & PSN_MASK
    if is_end:
        rc.operation = 0
        rc.msn = (rc.msn + 1) & PSN_MASK
        rc.executed_psn = expected
    else:
        rc.operation = operation
    if flags & FLAG_ACK_REQUEST:
        respond(rc, psn, ACK_SYNDROME)


def _check_size(rc: RcState, is_start: int, is_end: int, size: int) -> None:
    """First and middle packets have one MTU of payload, last packets at least a byte, only packets any number."""
    if not ((0 if is_start else 1) <= size <= rc.path_mtu if is_end else size == rc.path_mtu):
        raise _RefusedError(NAK_INVALID_REQUEST)


def _next_recv(rc: RcState) -> RecvWork:
    recv = None
    if rc.shared is not None:
        recv = rc.shared.take()
    elif rc.recv_queue:
        recv = rc.recv_queue.popleft()
    if recv is None:
        raise _RefusedError(RNR_NAK | rc.min_rnr_timer & 0x1F)
    return recv


def _execute_send(rc: RcState, opcode: int, is_start: int, is_end: int, flags: int, data: memoryview) -> None:
    immediate = rkey = None
    if opcode in _WITH_WORD:
        (word,) = WORD.unpack_from(data)
        data = data[4:]
        if opcode in _WITH_IMMEDIATE:
            immediate = word
        else:
            rkey = word
    size = len(data)
    _check_size(rc, is_start, is_end, size)
    if is_start:
        rc.current_recv = _next_recv(rc)
        rc.message_offset = 0
    recv = rc.current_recv
    assert recv is not None
    try:
        if is_start:
            rc.recv_capacity = total(recv.segments)
        offset = rc.message_offset
        rc.message_offset = end = offset + size
        if end > rc.recv_capacity:
            raise _RefusedError(NAK_INVALID_REQUEST, WCStatus.LOC_LEN_ERR)
        if rkey is not None and not rc.memory.invalidate(rkey):
            raise _RefusedError(NAK_REMOTE_ACCESS_ERROR, WCStatus.REM_INV_REQ_ERR)
        if size:
            scatter(recv.segments, offset, data)
    except LocalProtectionError:
        raise _RefusedError(NAK_REMOTE_OPERATIONAL_ERROR) from None
    if is_end:
        rc.current_recv = None
        is_solicited = flags & FLAG_SOLICITED != 0
        rc.completed.append(WC(recv.wr_id, _SUCCESS, _RECV, end, immediate, rkey, is_solicited, rc.qp_num))


def _find_memory(memory: Memory, rkey: int, address: int, length: int, access: AccessFlag) -> memoryview:
    """The memory that a request names; the R_Key of a request for 0 bytes is not checked."""
    if not length:
        return _NO_BYTES
    found = memory.remote(rkey, address, length, access)
    if found is None:
        raise _RefusedError(NAK_REMOTE_ACCESS_ERROR)
    return found


def _execute_write(rc: RcState, opcode: int, is_start: int, is_end: int, flags: int, data: memoryview) -> None:
    if is_start:
        address, rkey, length = RETH_STRUCT.unpack_from(data)
        data = data[16:]
        if not rc.access & ACCESS_REMOTE_WRITE or length > LONGEST_MESSAGE:
            raise _RefusedError(NAK_INVALID_REQUEST)
        offset = 0
    else:
        rkey, address, length = rc.write_target
        offset = rc.message_offset
    immediate = None
    if opcode in _WITH_IMMEDIATE:
        (immediate,) = WORD.unpack_from(data)
        data = data[4:]
    size = len(data)
    _check_size(rc, is_start, is_end, size)
    view = _find_memory(rc.memory, rkey, address, length, AccessFlag.REMOTE_WRITE)
    end = offset + size
    if end != length if is_end else end >= length:
        raise _RefusedError(NAK_INVALID_REQUEST)
    recv = _next_recv(rc) if immediate is not None else None
    if size:
        view[offset:end] = data
    rc.write_target, rc.message_offset = (rkey, address, length), end
    if recv is not None:
        is_solicited = flags & FLAG_SOLICITED != 0
        wc = WC(recv.wr_id, _SUCCESS, _RECV_WITH_IMM, length, immediate, None, is_solicited, rc.qp_num)
        rc.completed.append(wc)


def _unanswered(rc: RcState) -> int:
    """Requests with a resource that is kept, whose first response is not sent yet."""
    return sum(1 for r in rc.responses if r.resource and not r.is_repeated and r.resource.operation != _FLUSH)


def _waiting_flushes(rc: RcState) -> int:
    """Responses of FLUSHes that wait to be sent."""
    return sum(1 for r in rc.responses if r.resource and r.resource.operation == _FLUSH)


def _keep(rc: RcState, resource: Resource) -> None:
    """Keep the resource of a READ, atomic or ATOMIC WRITE, and answer it."""
    rc.resources.append(resource)
    _answer(rc, resource)


def _answer(rc: RcState, resource: Resource) -> None:
    """Answer a request that was executed."""
    rc.expected_psn = rc.executed_psn = (resource.last_psn + 1) & PSN_MASK
    rc.msn = (rc.msn + 1) & PSN_MASK
    response = Response(resource.first_psn, ACK_SYNDROME, rc.msn, resource)
    response.last_psn, response.address, response.length = resource.last_psn, resource.address, resource.length
    rc.responses.append(response)


def _execute_read(rc: RcState, psn: int, body: memoryview) -> None:
    address, rkey, length = RETH_STRUCT.unpack_from(body)
    if not rc.access & ACCESS_REMOTE_READ or length > LONGEST_MESSAGE or _unanswered(rc) >= rc.max_dest_rd_atomic:
        raise _RefusedError(NAK_INVALID_REQUEST)
    _find_memory(rc.memory, rkey, address, length, AccessFlag.REMOTE_READ)
    resource = Resource(_READ, psn, max(1, -(-length // rc.path_mtu)), rkey, address, length)
    resource.memory = rc.memory
    _keep(rc, resource)


def _execute_atomic(rc: RcState, opcode: int, psn: int, body: memoryview) -> None:
    address, rkey, first, second = ATOMIC_ETH_STRUCT.unpack_from(body)
    if not rc.access & ACCESS_REMOTE_ATOMIC or address % 8 or _unanswered(rc) >= rc.max_dest_rd_atomic:
        raise _RefusedError(NAK_INVALID_REQUEST)
    target = _find_memory(rc.memory, rkey, address, 8, AccessFlag.REMOTE_ATOMIC)
    original = int.from_bytes(target, sys.byteorder)
    if opcode == FETCH_ADD:
        target[:] = ((original + first) & ALL_BITS_64).to_bytes(8, sys.byteorder)
    elif original == second:
        target[:] = first.to_bytes(8, sys.byteorder)
    _keep(rc, Resource(_ATOMIC, psn, 1, rkey, address, 8, original))


def _execute_atomic_write(rc: RcState, psn: int, body: memoryview) -> None:
    """Write 8 bytes at once. The checks are those of rxe and in its order; all of them come before the memory."""
    address, rkey, length = RETH_STRUCT.unpack_from(body)
    value = body[16:]
    if (
        not rc.access & ACCESS_REMOTE_WRITE
        or _unanswered(rc) >= rc.max_dest_rd_atomic
        or len(value) > rc.path_mtu
        or length > LONGEST_MESSAGE
    ):
        raise _RefusedError(NAK_INVALID_REQUEST)
    target = rc.memory.remote(rkey, address, length, AccessFlag.REMOTE_WRITE)
    if target is None:
        raise _RefusedError(NAK_REMOTE_ACCESS_ERROR)
    if length != 8 or len(value) != 8 or address % 8:
        raise _RefusedError(NAK_INVALID_REQUEST)
    # One store of a 64-bit word, which no other reader of the memory sees in part.
    target.cast("Q")[0] = int.from_bytes(value, sys.byteorder)
    _keep(rc, Resource(_ATOMIC_WRITE, psn, 1, rkey, address, 0))


def _execute_flush(rc: RcState, psn: int, body: memoryview) -> None:
    """Check what a FLUSH asks for. Unlike a READ or WRITE, one of 0 bytes has to have a valid key, as in rxe."""
    (word,) = FETH_STRUCT.unpack_from(body)
    address, rkey, length = RETH_STRUCT.unpack_from(body, 4)
    wanted = _FLUSHES.get(word & 0x3F)  # the other bits are reserved, and a receiver ignores them
    if wanted is None:
        raise _RefusedError(NAK_INVALID_REQUEST)
    access, is_whole_region = wanted
    if access & ~rc.access or length > LONGEST_MESSAGE:
        raise _RefusedError(NAK_INVALID_REQUEST)
    if is_whole_region:
        is_permitted = rc.memory.permits(rkey, access)
    else:
        is_permitted = rc.memory.remote(rkey, address, length, access) is not None
    if not is_permitted:
        raise _RefusedError(NAK_REMOTE_ACCESS_ERROR)
    _answer(rc, Resource(_FLUSH, psn, 1, rkey, address, 0))


# -- duplicates -----------------------------------------------------------------------------------------------


def _acknowledge_again(rc: RcState) -> None:
    """Answer a duplicate SEND or WRITE, unless a NAK is still to be sent: that acknowledges as much."""
    if rc.responses:
        last_syndrome = rc.responses[-1].syndrome
    else:
        last_syndrome = rc.ack_aeth >> 24 if rc.ack_psn >= 0 else ACK_SYNDROME
    if last_syndrome == ACK_SYNDROME:
        respond(rc, (rc.executed_psn - 1) & PSN_MASK, ACK_SYNDROME)


def _respond_again(rc: RcState, opcode: int, psn: int, body: memoryview) -> None:
    """Answer a duplicate READ, atomic or ATOMIC WRITE from its resource; a READ may ask for a part of its response.

    Address and key of an ATOMIC WRITE are not compared: rxe repeats it with the address 0.
    """
    for resource in rc.resources:
        if psn - resource.first_psn & PSN_MASK <= resource.last_psn - resource.first_psn & PSN_MASK:
            break
    else:
        return
    last_psn, address, length = psn, 0, 0
    if resource.operation != OPERATION[opcode]:
        return
    if opcode == READ_REQUEST:
        address, rkey, length = RETH_STRUCT.unpack_from(body)
        packets = max(1, -(-length // rc.path_mtu))
        if (
            rkey != resource.rkey
            or address < resource.address
            or address + length > resource.address + resource.length
            or packets > (resource.last_psn - psn & PSN_MASK) + 1
        ):
            return
        last_psn = (psn + packets - 1) & PSN_MASK
    # A requester that repeats itself has no use for what is left of an earlier repeated response: replace that.
    response = next((other for other in rc.responses if other.resource is resource and other.is_repeated), None)
    if response is None:
        response = Response(psn, ACK_SYNDROME, rc.msn, resource, repeated=True)
        rc.responses.append(response)
    response.psn, response.last_psn, response.address, response.length = psn, last_psn, address, length
    response.offset = 0


# -- responses ------------------------------------------------------------------------------------------------


def respond(rc: RcState, psn: int, syndrome: int) -> None:
    """Queue an ACK or NAK. It replaces one that is still to be sent directly before it, and acknowledges as much."""
    if not rc.responses:
        if rc.ack_psn < 0 or syndrome != ACK_SYNDROME or difference(psn, rc.ack_psn) > 0:
            rc.ack_psn = psn
        rc.ack_aeth = syndrome << 24 | rc.msn
        return
    last = rc.responses[-1]
    if last.resource is None:
        if difference(psn, last.psn) > 0 or syndrome != ACK_SYNDROME:
            last.psn = psn
        last.syndrome = syndrome
        last.msn = rc.msn
        return
    rc.responses.append(Response(psn, syndrome, rc.msn))


def packets(rc: RcState, out: Trains, limit: int) -> int:
    """Append up to ``limit`` packets; return how many."""
    left = limit
    responses = rc.responses
    if rc.ack_psn >= 0 and left > 0:
        out.add(BTH_HALVES_AETH.pack(ACKNOWLEDGE << 56 | rc.send_bth, rc.ack_psn, rc.ack_aeth), (), 20)
        rc.ack_psn = -1
        left -= 1
    while responses and left > 0:
        response = responses[0]
        resource, aeth = response.resource, response.syndrome << 24 | response.msn
        if resource is None:
            out.add(BTH_HALVES_AETH.pack(ACKNOWLEDGE << 56 | rc.send_bth, response.psn, aeth), (), 20)
        elif resource.operation == _ATOMIC:
            header = BTH_HALVES_AETH.pack(ATOMIC_ACKNOWLEDGE << 56 | rc.send_bth, response.psn, aeth)
            out.add(header + ATOMIC_ACK_ETH_STRUCT.pack(resource.original), (), 28)
        else:
            left -= _read_packets(rc, out, response, resource, left)
            continue
        left -= 1
        responses.popleft()
    return limit - left


def _read_packets(rc: RcState, out: Trains, response: Response, resource: Resource, limit: int) -> int:
    """Append more of a READ response; return how many packets. It leaves ``responses`` with its last packet."""
    try:
        memory = resource.memory or rc.memory
        data = _find_memory(memory, resource.rkey, response.address, response.length, AccessFlag.REMOTE_READ)
    except _RefusedError as refused:
        if response.is_repeated:  # the peer may have had the response long ago, and given up the key
            rc.counters.dropped["refused"] += 1
            rc.responses.popleft()
            return 0
        rc.responses.clear()
        respond(rc, response.psn, refused.syndrome)
        fail_receive(rc, WCStatus.REM_ACCESS_ERR)
        return 0
    mtu, done = rc.path_mtu, 0
    while done < limit:
        psn, offset = response.psn, response.offset
        is_first, is_last = psn == resource.first_psn, psn == response.last_psn
        size = min(mtu, len(data) - offset)
        pieces, pad = padded([data[offset : offset + size]] if size else [], size)
        if is_first:
            opcode = READ_RESPONSE_ONLY if is_last else READ_RESPONSE_FIRST
        else:
            opcode = READ_RESPONSE_LAST if is_last else READ_RESPONSE_MIDDLE
        headers = BTH_HALVES.pack(opcode << 56 | pad << 52 | rc.send_bth, psn)
        if is_first or is_last:
            headers += AETH_STRUCT.pack(ACK_SYNDROME << 24 | response.msn)
        out.add(headers, pieces, len(headers) + size + pad + ICRC_LENGTH)
        response.offset += size
        response.psn = (psn + 1) & PSN_MASK
        done += 1
        if is_last:
            rc.responses.popleft()
            break
    return done
