"""One end of a stream, sans-IO: bytes and immediate data go in, work requests come out.

:class:`StreamEngine` is told what the application wants (:meth:`~StreamEngine.write`, :meth:`~StreamEngine.consume`,
:meth:`~StreamEngine.shut`), which immediate data have arrived (:meth:`~StreamEngine.received`) and how many of its
requests have completed (:meth:`~StreamEngine.completed`). What it wants posted, in order, is in
:attr:`StreamEngine.work`. The memory is its caller's, and registered: a ring that messages are sent from, a ring that
the peer writes, and the control memory (:mod:`rdmacm.proto.rsocket.messages`).

**Sending.** A message goes to the current target, whose address advances by it. A target without room is used up, and
the next entry of the target SGL takes its place. The peer writes entries at any time, so an entry is read once, when
the immediate data of an SGL message say that there may be one, and is zero afterwards. A message needs a credit, a
free entry of the send queue and room in the ring; the last is given back when it completes.

**Receiving.** The peer writes the ring in order, so a message is nothing but a number of bytes. Each time that the
application has taken half of the ring, that half becomes a target of the peer again; the second half is given at the
beginning. Each time that half of the receives were used, an SGL message renews the credits. An end posts a receive
again as soon as it has completed, so a credit does not wait for the application.

**Control messages** (SGL and CONTROL) need no credit. Four entries of the send queue are kept for them, and one that
finds none of them free waits for a completion.

**Hostile peers.** What a peer writes into the ring is the application's data, and is read once. Its targets are its own
memory: keys and addresses are checked there, and one that would have a 65th bit begins again at 0. What it says in
immediate data is checked here, and a :class:`Fault` ends the stream.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from rdmacm.address import ALL_BITS_64
from rdmacm.proto.rsocket.messages import (
    MAPPING_LENGTH,
    MAX_ARGUMENT,
    NO_MAPPING,
    TARGET_LENGTH,
    TARGETS,
    ConnectionData,
    Control,
    Mapping,
    Operation,
    Target,
    argument_of,
    byte_order,
    immediate,
    operation_of,
)
from rdmacm.proto.rsocket.states import CONNECTED, RECEIVING, SENDING, TRANSITIONS, State, Trigger

#: Entries of the send queue that are kept for control messages.
CONTROL_SLOTS = 4
#: The longest message in bytes.
MAX_MESSAGE = 1 << 16
#: Bytes of the ring that must be free before the application may send again, or half of it.
LOW_WATER = 2048

_SEQUENCE = 0xFFFF
_NO_TARGET = Target(0, 0, 0)


class Fault(Enum):
    """How a peer has broken the protocol."""

    MORE_BYTES = "the peer sent more bytes than it was given room for"
    MORE_MESSAGES = "the peer sent more messages than it had credits for"
    MORE_CREDITS = "the peer granted more credits than it has receives"
    MORE_TARGETS = "the peer gave more targets than the target SGL has entries"
    NO_SUCH_MAPPING = "the peer wrote an I/O mapping beyond the table"
    UNKNOWN_CONTROL = "the peer sent an unknown control message"
    UNKNOWN_OPERATION = "the peer sent an unknown operation"
    AFTER_THE_END = "the peer sent data after the end of its stream"


@dataclass(frozen=True, slots=True)
class Work:
    """A work request to post.

    ``remote_addr``, ``key``: where it writes. ``imm``: immediate data of an RDMA WRITE, or None. ``local``: pieces of
    the sending ring, each with its offset and length. ``inline``: bytes to send instead. ``is_send``: a SEND, which
    carries ``inline`` (iWARP's form of immediate data); else an RDMA WRITE.
    """

    remote_addr: int = 0
    key: int = 0
    imm: int | None = None
    local: tuple[tuple[int, int], ...] = ()
    inline: bytes = b""
    is_send: bool = False


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request that has not completed: the bytes of the ring it has, and whether it is of a control message."""

    size: int = 0
    is_control: bool = False
    is_disconnect: bool = False


class StreamEngine:
    """One end of a stream; the module describes it.

    ``own``, ``peer``: the connection data of both ends. ``control``, ``sending``, ``receiving``: the memory.
    ``own.buffer`` describes the first half of ``receiving``, whose length is even. ``send_slots``: entries of the send
    queue. ``has_immediates``: whether the device has immediate data; iWARP has none.
    """

    def __init__(
        self,
        own: ConnectionData,
        peer: ConnectionData,
        control: memoryview,
        sending: memoryview,
        receiving: memoryview,
        send_slots: int,
        *,
        has_immediates: bool = True,
    ) -> None:
        #: Requests to post, in this order. The caller takes them out.
        self.work: deque[Work] = deque()
        #: The state of the stream.
        self.state: State = State.OPEN
        #: Why the stream has failed, in words; None before, and of one that was closed.
        self.failure: str | None = None
        #: How the peer has broken the protocol; None if it has not.
        self.fault: Fault | None = None
        self._own = own
        self._peer = peer
        self._control = control
        self._sending = sending
        self._receiving = receiving
        self._has_immediates = has_immediates
        self._order = sys.byteorder
        self._peer_order = byte_order(peer.flags)
        # Sending.
        #: The size of the ring, bytes put into it since the beginning, free bytes, and how many are enough to send.
        self._size, self._put, self._room = len(sending), 0, len(sending)
        self._low_water = min(LOW_WATER, (len(sending) + 1) // 2)
        #: Messages sent, and how many may be sent in all, modulo 2**16.
        self._sent, self._credit_limit = 0, peer.credits
        #: Free entries of the send queue, for data and for control messages.
        self._slots, self._control_slots = send_slots - CONTROL_SLOTS, CONTROL_SLOTS
        #: Requests that have not completed, oldest first.
        self._outstanding: deque[_Sent] = deque()
        #: Where the next message goes, further targets, and the entry of the target SGL that is read next.
        self._target = peer.buffer
        self._targets: deque[Target] = deque()
        self._next_entry = 1
        # Receiving.
        self._half = len(receiving) // 2
        #: Bytes that the peer was given room for, and that the application has taken.
        self._granted, self._taken = self._half, 0
        #: Bytes that have arrived and that the application has not taken.
        self.unread: int = 0
        #: Messages that have arrived, and how many the peer may send in all.
        self._messages, self._message_limit = 0, own.credits
        #: The entry of the peer's target SGL that is written next.
        self._peer_entry = 1
        #: Whether the peer has said that it sends no more.
        self._peer_has_finished = False
        #: A control message that waits for an entry of the send queue.
        self._waiting: Control | None = None
        # I/O mappings.
        #: Of the peer: where it lets this end write, by index.
        self._mappings: dict[int, Mapping] = {}
        #: Of this end: entries of the peer's table to write, by index.
        self._mapping_changes: dict[int, Mapping] = {}
        self._grant()

    # -- sending --------------------------------------------------------------------------------------

    @property
    def is_writable(self) -> bool:
        """Whether :meth:`write` takes something."""
        return self.state in SENDING and self._can_send() and self._has_target()

    @property
    def is_idle(self) -> bool:
        """Whether everything that was sent has arrived."""
        return not self._outstanding and self._waiting is None

    @property
    def needs_completion(self) -> bool:
        """Whether nothing is sent before a request completes: the caller has the last one report that."""
        return not self._can_send()

    def _can_send(self) -> bool:
        return (
            self._room >= self._low_water
            and self._sent != self._credit_limit
            and self._slots >= (1 if self._has_immediates else 2)
        )

    def _has_target(self) -> bool:
        while not self._target.length and self._targets:
            self._target = self._targets.popleft()
        return self._target.length > 0

    def write(self, data: memoryview) -> int:
        """Send as much of ``data`` as can be sent now; return how many bytes that is."""
        done, length = 0, len(data)
        if self._mapping_changes:
            self._write_mappings()
        while done < length and not self._mapping_changes and self.is_writable:
            target = self._target
            size = min(length - done, MAX_MESSAGE, self._room, target.length)
            local = self._fill(data[done : done + size])
            self._target = Target(target.address + size & ALL_BITS_64, target.key, target.length - size)
            self._sent = self._sent + 1 & _SEQUENCE
            self._post_data(immediate(Operation.DATA, size), target, local, size)
            done += size
        return done

    def _fill(self, data: memoryview) -> tuple[tuple[int, int], ...]:
        """Copy data into the ring; return the pieces of it that they are in."""
        start, size = self._put % self._size, len(data)
        self._put += size
        self._room -= size
        first = self._size - start
        if size <= first:
            self._sending[start : start + size] = data
            return ((start, size),)
        self._sending[start:] = data[:first]
        self._sending[: size - first] = data[first:]
        return ((start, first), (0, size - first))

    def _post_data(self, imm: int, target: Target, local: tuple[tuple[int, int], ...], size: int) -> None:
        """Post a message that has a credit."""
        if self._has_immediates:
            self._post(Work(target.address, target.key, imm, local), _Sent(size))
        else:
            self._post(Work(target.address, target.key, None, local), _Sent(size))
            self._post(self._as_send(imm), _Sent())

    def _as_send(self, imm: int) -> Work:
        return Work(inline=imm.to_bytes(4, "little" if self._order == "little" else "big"), is_send=True)

    def _post(self, work: Work, sent: _Sent) -> None:
        if sent.is_control:
            self._control_slots -= 1
        else:
            self._slots -= 1
        self._outstanding.append(sent)
        self.work.append(work)

    def completed(self, count: int = 1) -> None:
        """The oldest ``count`` requests that were posted have completed."""
        for _ in range(min(count, len(self._outstanding))):
            sent = self._outstanding.popleft()
            self._room += sent.size
            if sent.is_control:
                self._control_slots += 1
            else:
                self._slots += 1
            if sent.is_disconnect:
                self._change(Trigger.DISCONNECT_DONE)
        if self._waiting is not None and self.state is not State.FAILED:
            self._send_control(self._waiting)
        self._grant()
        if self._mapping_changes:
            self._write_mappings()

    # -- receiving ------------------------------------------------------------------------------------

    @property
    def is_at_end(self) -> bool:
        """Whether nothing more arrives for the application."""
        return self.state not in RECEIVING

    def pieces(self, size: int, skip: int = 0) -> tuple[memoryview, ...]:
        """Up to ``size`` unread bytes after the first ``skip``, as one or two pieces of the ring."""
        size = min(size, self.unread - skip)
        if size <= 0:
            return ()
        start, length = (self._taken + skip) % (2 * self._half), 2 * self._half
        if start + size <= length:
            return (self._receiving[start : start + size],)
        return self._receiving[start:], self._receiving[: start + size - length]

    def consume(self, size: int) -> None:
        """The application has taken ``size`` unread bytes."""
        size = min(size, self.unread)
        self._taken += size
        self.unread -= size
        self._grant()

    def received(self, imm: int) -> None:
        """Immediate data have arrived."""
        if self.state not in CONNECTED:
            return
        handler = _HANDLERS.get(operation_of(imm))
        if handler is None:
            self._break(Fault.UNKNOWN_OPERATION)
        else:
            handler(self, argument_of(imm))

    def received_send(self, data: bytes | bytearray | memoryview) -> None:
        """The 4 bytes of a SEND have arrived, where the device has no immediate data."""
        if len(data) != 4:
            self._break(Fault.UNKNOWN_OPERATION)
        else:
            self.received(int.from_bytes(data, "big" if self._peer_order == "big" else "little"))

    def _data(self, size: int) -> None:
        if not self._count_message():
            return
        if size > self._granted - self._taken - self.unread:
            self._break(Fault.MORE_BYTES)
        elif self._peer_has_finished:
            self._break(Fault.AFTER_THE_END)
        else:
            self.unread += size
            self._grant()

    def _count_message(self) -> bool:
        """Count a message that needs a credit; False if the peer had none."""
        self._messages += 1
        if self._messages > self._message_limit:
            self._break(Fault.MORE_MESSAGES)
            return False
        return True

    def _sgl(self, limit: int) -> None:
        # librdmacm adds two numbers of 16 bits and masks neither, so there may be a 17th bit.
        limit &= _SEQUENCE
        if (limit - self._sent & _SEQUENCE) > self._peer.credits:
            self._break(Fault.MORE_CREDITS)
            return
        self._credit_limit = limit
        target = Target.unpack(self._control, self._next_entry, self._order)
        if target.length and self._has_target() and len(self._targets) == TARGETS:
            self._break(Fault.MORE_TARGETS)
            return
        if target.length:
            start = self._next_entry * TARGET_LENGTH
            self._control[start : start + TARGET_LENGTH] = bytes(TARGET_LENGTH)
            self._targets.append(target)
            self._next_entry = (self._next_entry + 1) % TARGETS
        if self._mapping_changes:
            self._write_mappings()

    def _iomap(self, index: int) -> None:
        if not self._count_message():
            return
        if index >= self._own.mappings:
            self._break(Fault.NO_SUCH_MAPPING)
            return
        mapping = Mapping.unpack(self._control[TARGETS * TARGET_LENGTH :], index, self._order)
        if mapping.length:
            self._mappings[index] = mapping
        else:
            self._mappings.pop(index, None)
        self._grant()

    def _control_message(self, kind: int) -> None:
        if kind == Control.DISCONNECT:
            self._change(Trigger.PEER_DISCONNECT)
        elif kind == Control.SHUTDOWN:
            self._peer_has_finished = True
            self._change(Trigger.PEER_SHUTDOWN)
        elif kind != Control.KEEPALIVE:
            self._break(Fault.UNKNOWN_CONTROL)

    def _grant(self) -> None:
        """Give the peer room and credits where half of either is used, and an entry of the send queue is free."""
        while self.state in RECEIVING:
            has_room = self._taken + 2 * self._half - self._granted >= self._half
            used = self._own.credits - (self._message_limit - self._messages)
            needed = 2 if has_room and not self._has_immediates else 1
            if not (has_room or 2 * used >= max(self._own.credits, 2)) or self._control_slots < needed:
                return
            self._message_limit = self._messages + self._own.credits
            imm = immediate(Operation.SGL, self._message_limit & _SEQUENCE)
            if has_room:
                self._give_half(imm)
            elif self._has_immediates:
                self._post(Work(imm=imm), _Sent(is_control=True))
            else:
                self._post(self._as_send(imm), _Sent(is_control=True))

    def _give_half(self, imm: int) -> None:
        buffer, control = self._own.buffer, self._peer.control
        offset = self._granted % (2 * self._half)
        self._granted += self._half
        entry = Target(buffer.address + offset, buffer.key, self._half).pack(self._peer_order)
        address = control.address + self._peer_entry * TARGET_LENGTH & ALL_BITS_64
        self._peer_entry = (self._peer_entry + 1) % control.length
        sent = _Sent(is_control=True)
        if self._has_immediates:
            self._post(Work(address, control.key, imm, inline=entry), sent)
        else:
            self._post(Work(address, control.key, None, inline=entry), sent)
            self._post(self._as_send(imm), sent)

    # -- the end --------------------------------------------------------------------------------------

    def shut(self, trigger: Trigger) -> None:
        """Close one half, or both: one of the first three triggers."""
        self._change(trigger)

    def lost(self, reason: str) -> None:
        """The connection is gone, or a request has failed. Of a stream that was closed, nothing."""
        if self.state in CONNECTED:
            self.failure = reason
        self._change(Trigger.LOST)

    def keepalive(self) -> None:
        """Have the peer's device acknowledge an empty WRITE, unless something is outstanding whose failure tells."""
        if self.state in CONNECTED and self.is_idle:
            self.probe()

    def probe(self) -> None:
        """Send an empty WRITE, which completes after all that were sent, if an entry of the send queue is free."""
        if self._control_slots:
            self._post(Work(), _Sent(is_control=True))

    def _break(self, fault: Fault) -> None:
        self.fault = fault
        self.lost(fault.value)

    def _change(self, trigger: Trigger) -> None:
        self.state, message = TRANSITIONS.get((self.state, trigger), (self.state, None))
        if message is not None:
            self._send_control(message)

    def _send_control(self, kind: Control) -> None:
        if not self._control_slots:
            self._waiting = kind  # DISCONNECT replaces a SHUTDOWN that waits
            return
        self._waiting = None
        imm = immediate(Operation.CONTROL, kind)
        sent = _Sent(is_control=True, is_disconnect=kind is Control.DISCONNECT)
        self._post(Work(imm=imm) if self._has_immediates else self._as_send(imm), sent)

    # -- I/O mappings ---------------------------------------------------------------------------------

    @property
    def peer_mappings(self) -> int:
        """The size of the peer's table."""
        return self._peer.mappings

    def map(self, index: int, mapping: Mapping) -> None:
        """Tell the peer an I/O mapping of this end's memory, or with :data:`NO_MAPPING` that there is none any more.

        It is written before any data that are sent after this call. ``index`` is less than :attr:`peer_mappings`.
        """
        self._mapping_changes[index] = mapping
        self._write_mappings()

    def unmap(self, index: int) -> None:
        """Take an I/O mapping of this end's memory back."""
        self.map(index, NO_MAPPING)

    def _write_mappings(self) -> None:
        control = self._peer.control
        while self._mapping_changes and self.state in SENDING and self._can_send() and self._room >= MAPPING_LENGTH:
            index = next(iter(self._mapping_changes))
            entry = self._mapping_changes.pop(index).pack(self._peer_order)
            local = self._fill(memoryview(entry))
            address = control.address + control.length * TARGET_LENGTH + index * MAPPING_LENGTH
            self._sent = self._sent + 1 & _SEQUENCE
            target = Target(address & ALL_BITS_64, control.key, MAPPING_LENGTH)
            self._post_data(immediate(Operation.IOMAP, index), target, local, MAPPING_LENGTH)

    def mapping_at(self, offset: int) -> Mapping | None:
        """The peer's mapping that contains an offset."""
        for mapping in self._mappings.values():
            if mapping.offset <= offset < mapping.offset + mapping.length:
                return mapping
        return None

    def write_mapped(self, data: memoryview, offset: int) -> int:
        """Write to the peer's mapped memory as much as can be written now; return how many bytes that is.

        Each mapping takes its part. Bytes beyond all mappings are not written.
        """
        done = 0
        while done < len(data) and self.state in SENDING and self._slots:
            mapping = self.mapping_at(offset + done)
            if mapping is None or not self._room:
                break
            inside = offset + done - mapping.offset
            size = min(len(data) - done, self._room, mapping.length - inside, MAX_ARGUMENT)
            local = self._fill(data[done : done + size])
            self._post(Work(mapping.address + inside & ALL_BITS_64, mapping.key, None, local), _Sent(size))
            done += size
        return done


_HANDLERS: dict[int, Callable[[StreamEngine, int], None]] = {
    Operation.DATA: StreamEngine._data,
    Operation.SGL: StreamEngine._sgl,
    Operation.IOMAP: StreamEngine._iomap,
    Operation.CONTROL: StreamEngine._control_message,
}
