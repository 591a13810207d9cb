"""The seam below the verbs objects: what a provider's devices offer.

:mod:`rdmacm.provider` has the rules for both halves of the seam: errors, threads and the lock, waiting, life, fork.

The verbs objects check what they are given against the device's limits, the state table of :mod:`rdmacm.verbs.qpstate`
and the operands that an opcode requires, and refuse it with EINVAL; each method says what it may rely on. A backend
checks what only the device knows. Completion queues, shared receive queues and channels passed to a device were made by
that device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol

from rdmacm.address import Gid
from rdmacm.capabilities import Capabilities
from rdmacm.verbs.attr import DeviceAttr, QPAttr, QPCap, SrqAttr
from rdmacm.verbs.attrex import DeviceAttrEx
from rdmacm.verbs.enums import (
    WC,
    AccessFlag,
    EventType,
    MWType,
    QPAttrMask,
    QPState,
    QPType,
    SendOpsFlag,
    SrqAttrMask,
    TransportType,
)
from rdmacm.verbs.wr import AddressHandle, RecvWR, SendWR

__all__ = [
    "AsyncQueueBackend",
    "CQBackend",
    "ChannelBackend",
    "DeviceBackend",
    "MRBackend",
    "MWBackend",
    "QPBackend",
    "SRQBackend",
    "XrcSRQBackend",
    "XrcTargetBackend",
]


class MRBackend(Protocol):
    """A memory region. Its attributes change by :meth:`rereg` only."""

    #: The keys that local requests and peers name it by, 32 bits each.
    lkey: int
    rkey: int
    #: The address of its first byte, 64 bits, and its length in bytes.
    addr: int
    length: int

    def rereg(self, pd: object | None, view: memoryview | None, access: AccessFlag | None) -> None:
        """Change the domain, the bytes or the access; None leaves it as it is.

        The view is as for :meth:`DeviceBackend.reg_mr`. A request posted before may still use the old memory. EBUSY: a
        memory window is bound to it; EOPNOTSUPP: the device cannot change this.
        """

    def dereg(self) -> None:
        """Revoke the keys: a request posted from now on, or a packet received from now on, that names one fails.

        A request posted before may still use the memory, so the device keeps the buffer until that is over. EBUSY: a
        memory window is bound to it; then it stays registered.
        """


class MWBackend(Protocol):
    """A memory window. As long as it is bound, it refers to the API's object of the region (``wr.bind_info.mr``)."""

    #: The key that it gets from the last bind which was posted, 32 bits; the one that it was allocated with before.
    rkey: int

    def dealloc(self) -> None:
        """Revoke the key, and take its region away."""


class ChannelBackend(Protocol):
    """A completion channel: armed completion queues report their completions here."""

    def fileno(self) -> int:
        """A descriptor to poll; -1 once closed."""

    def get(self, timeout: float | None) -> object | None:
        """The ``owner`` of the completion queue that reported first, waiting up to ``timeout`` seconds; None for none.

        There is one report for each time that a queue was armed. EBADF once the channel is closed, also in threads that
        were waiting.
        """

    def close(self) -> None:
        """Release the descriptor."""


class AsyncQueueBackend(Protocol):
    """The asynchronous events of one context that are not fetched yet, ibv_get_async_event(3).

    Each has an owner: an object that the API has given to :meth:`post`, or the number of the port, 0 for the device.
    The queue is bounded, as it may have no reader: when it is full, the oldest event is lost. An event of an owner that
    is in the queue already is not added again.
    """

    def post(self, owner: object, event: EventType) -> None:
        """Add an event. Called with the lock held, by a device or through ``async_events`` of its objects."""

    def forget(self, owner: object) -> None:
        """Drop the events of an owner, which is destroyed."""

    def get(self, timeout: float | None) -> tuple[EventType, object] | None:
        """The oldest event and its owner, waiting up to ``timeout`` seconds; None for none.

        EBADF once the queue is closed, also in threads that were waiting.
        """

    def fileno(self) -> int:
        """A descriptor to poll; -1 once closed."""

    def close(self) -> None:
        """Drop the events and release the descriptor."""


class AsyncEvents(Protocol):
    """Takes the asynchronous events of one object; the API's (:class:`rdmacm.verbs.async_event.EventOwner`)."""

    def post(self, event: EventType) -> None:
        """The object has this event. Called with the lock held."""


class CQBackend(Protocol):
    """A completion queue.

    One that gets more completions than it has room for has overflowed: it takes no more, the queue pairs that report to
    it go to ERR, and once its last completion is polled, :meth:`poll` raises EOVERFLOW.
    """

    #: How many completions it has room for, at least as many as asked for. :meth:`resize` changes it.
    cqe: int
    #: Takes its asynchronous events (CQ_ERR). The API sets it.
    async_events: AsyncEvents | None

    @property
    def notify(self) -> Callable[[], None] | None:
        """Called after completions are added, and when a queue pair is reset or destroyed, which drops its completions.

        The thread that does it calls it, with the lock held. The API sets it.
        """

    @notify.setter
    def notify(self, notify: Callable[[], None] | None) -> None: ...

    def poll(self, num_entries: int) -> list[WC]:
        """Remove and return up to ``num_entries`` completions, oldest first. Never waits.

        Where callers make the progress, polling an empty queue makes it once. The completions of one queue pair are in
        the order of its requests, separately for sends and receives.
        """

    def wait(self, timeout: float | None) -> bool:
        """Wait up to ``timeout`` seconds until :meth:`poll` has something to return or raise; False on timeout.

        EBADF if the queue is destroyed meanwhile.
        """

    def req_notify(self, solicited_only: bool) -> None:
        """Arm the queue: its next completion makes one report to its channel. Completions in it already make none.

        ``solicited_only``: only a completion whose sender set SOLICITED, or with an error, makes the report. A queue
        that is armed for any completion stays so.
        """

    def resize(self, cqe: int) -> None:
        """Make room for 1 to ``max_cqe`` completions, and keep those in the queue and how it is armed.

        EINVAL: there are more in the queue, or it has overflowed. Nothing is changed then.
        """

    def destroy(self) -> None:
        """Drop its completions, and its reports on the channel. No queue pair reports to it any more."""


class ReceiveTaker(Protocol):
    """Takes receives for a shared receive queue, as :class:`WorkTaker` does for a queue pair."""

    def post(self, wr: RecvWR | Iterable[RecvWR], /) -> RecvWR | Iterable[RecvWR] | None: ...


class SRQBackend(Protocol):
    """A shared receive queue. Its receives go to its queue pairs in the order they are posted."""

    #: Takes its asynchronous events (SRQ_LIMIT_REACHED). The API sets it.
    async_events: AsyncEvents | None

    @property
    def core(self) -> ReceiveTaker | None:
        """Takes the usual receives more quickly than :meth:`post_recv`. None: all are posted there."""

    def post_recv(self, wrs: list[RecvWR]) -> None:
        """Queue receives, of ``max_sge`` elements at the most.

        ENOMEM: it is full; those before the error's ``bad_wr`` are queued.
        """

    def modify(self, attr: SrqAttr, mask: SrqAttrMask) -> None:
        """Set the attributes that ``mask`` names: ``srq_limit``, which is 0 to ``max_wr``.

        A device with SRQ_RESIZE in ``device_cap_flags`` also takes ``max_wr``, 1 to ``max_srq_wr``, and keeps the
        receives in the queue. EINVAL: there are more, or ``srq_limit`` is more. Nothing is changed then.
        """

    def query(self) -> SrqAttr:
        """Its sizes and limit, in a new object; the limit is 0 once it was reached."""

    def destroy(self) -> None:
        """Drop its receives without completion. No queue pair uses it any more."""


class XrcSRQBackend(SRQBackend, Protocol):
    """An XRC shared receive queue. Requests to the targets of its domain name it by its number."""

    #: Its number, 24 bits; unique on its device.
    srq_num: int


class WorkTaker(Protocol):
    """Takes work requests as the user has made them, without a check before, if they are of the usual ones.

    A method returns None if it has queued all, and else what it has not: the same object, or the end of a list. It has
    done nothing for that, and raises no error about it: the caller checks it, and posts it with :class:`QPBackend`.
    """

    def post_send(self, wr: SendWR | Iterable[SendWR]) -> SendWR | Iterable[SendWR] | None: ...

    def post_recv(self, wr: RecvWR | Iterable[RecvWR]) -> RecvWR | Iterable[RecvWR] | None: ...

    def post_part(
        self,
        wr_id: int,
        opcode: int,
        data: object,
        offset: int,
        length: int | None,
        flags: int,
        remote_addr: int,
        rkey: int,
        /,
    ) -> bool:
        """A send with part of an :class:`rdmacm.verbs.MR`, or inline bytes; False if nothing was done."""

    def post_recv_part(self, wr_id: int, region: object, offset: int, length: int | None, /) -> bool:
        """A receive into part of a region; False if nothing was done."""


class QPBackend(Protocol):
    """A queue pair.

    A request that fails completes with its error; the queue pair is then in ERR, and what was posted after it completes
    with WR_FLUSH_ERR. (After an error of sending, UC and UD go to SQE instead.)
    """

    #: The queue pair's number, 24 bits; unique on its device.
    qp_num: int
    #: Changes by :meth:`modify`, with the connection of an id (:meth:`rdmacm.provider.IdBackend.attach_qp`), and by
    #: itself to ERR or SQE. It is read before each post, without the lock.
    state: QPState
    #: Takes its asynchronous events. The API sets it.
    async_events: AsyncEvents | None

    @property
    def core(self) -> WorkTaker | None:
        """What is tried first with work requests, in a state that takes them; None: nothing."""

    def modify(self, attr: QPAttr, mask: QPAttrMask) -> None:
        """Change the attributes that ``mask`` names, and with STATE the state.

        The state table allows the transition, the required attributes are there, and each value is within the device's
        limits; the P_Key and the GID row were in the port's tables a moment ago, unless the device has
        ``checks_tables``. ERR completes everything posted with WR_FLUSH_ERR. RESET drops everything posted, and the
        completions of this queue pair that are not polled.
        EOPNOTSUPP: an optional attribute that the device cannot change in this state; EINVAL: an address vector that it
        cannot send to, ALT_PATH where it has no alternate paths, SQD to RTS before the send queue is drained; ENODEV:
        the device has been removed.
        """

    def query(self) -> QPAttr:
        """Every attribute as it is now, in a new object."""

    def ask_peer(self) -> Hashable:
        """Send the connected peer a packet that it answers and that has no other effect. The lock is held.

        Return a value that changes with every packet from the peer; None where the device cannot, and without a peer.
        """

    def sent_again(self) -> int:
        """How often the oldest request was sent again since the peer has acknowledged anything. The lock is held.

        0 where the device does not tell, and for a queue pair without acknowledgements.
        """

    def post_send(self, wrs: list[SendWR]) -> None:
        """Queue requests in order.

        Each is valid for the type of the queue pair: the opcode is one of its
        :data:`~rdmacm.verbs.posting.REQUIRED_OPERANDS`, the operands it requires are in range, there are at most
        ``max_send_sge`` elements, and the message is not longer than ``max_msg_sz`` (a datagram: the path MTU).
        Elements are SGEs; with INLINE, which only requests that send data have, they may be contiguous buffers, and
        hold at most ``max_inline_data`` bytes together. A READ or atomic writes to its elements; those of an atomic are
        8 bytes. BIND_MW has an open window of the API, whose key changes in the lower 8 bits only, and an open region
        or none; one of another device, or that the rules of InfiniBand Architecture 10.6.7.2 do not allow, is queued
        and completes with MW_BIND_ERR. LOCAL_INV of a key that may not be invalidated completes with LOC_QP_OP_ERR.

        Inline data are copied before this returns, and their keys are not checked. Other memory is the device's until
        the request completes. A request whose lkey, range or permission is wrong is queued as others are and completes
        with LOC_PROT_ERR. A request completes on the send queue's completion queue where it is SIGNALED, ``sq_sig_all``
        is set, or it fails. In SQD requests wait; in ERR they complete with WR_FLUSH_ERR. ENOMEM: the queue is full;
        EINVAL: the state has changed; in either case the requests before are queued, and the error's ``bad_wr`` is the
        refused request.
        """

    def post_send_all(self, wrs: list[SendWR]) -> None:
        """As :meth:`post_send`, but if one request is refused, none is queued."""

    def post_recv(self, wrs: list[RecvWR]) -> None:
        """Queue receives, of ``max_recv_sge`` SGEs at the most; the queue pair has no shared receive queue.

        Wrong memory, ERR, ENOMEM and EINVAL: as for :meth:`post_send`.
        """

    def attach_mcast(self, gid: Gid, lid: int, /) -> None:
        """Receive the packets of a multicast group. The queue pair is UD. Once attached, a second call does nothing.

        ``lid`` is the group's on InfiniBand. ENOMEM: too many groups, or queue pairs in one; also what joining the
        group on the port's network raises.
        """

    def detach_mcast(self, gid: Gid, lid: int, /) -> None:
        """Undo :meth:`attach_mcast`. EINVAL: it is not attached."""

    def destroy(self) -> None:
        """Drop what is posted, the completions of this queue pair that are not polled, and its multicast groups."""


class XrcTargetBackend(QPBackend, Protocol):
    """A queue pair of type XRC_RECV. It is destroyed once :meth:`destroy` was called and no further handle is open."""

    def close_opened(self, events: AsyncEvents) -> None:
        """Close a handle of :meth:`DeviceBackend.open_qp`."""


class DeviceBackend(Protocol):
    """An open device.

    ``pd`` arguments stand for protection domains: the same object is the same domain. No method is called when a domain
    is made or closed, or an address handle is closed. A device that needs its own object for a domain makes it at the
    first call with that domain, and for an address handle in :meth:`create_ah`. It refers to both only weakly
    (:mod:`weakref`), and releases its object when they are collected. As long as one of its objects (a region, a queue)
    is in a domain, it may hold the domain itself.

    A device that has no queue pairs, such as one whose driver cannot be reached, raises EOPNOTSUPP in every method
    (:class:`rdmacm.provider.bare_device.BareDevice`).
    """

    #: The device's name.
    name: str
    #: InfiniBand, also for RoCE, or iWARP.
    transport_type: TransportType
    #: The device's limits. They do not change; connecting also reads them on devices that have no queue pairs.
    attr: DeviceAttr
    #: Completion vectors, at least 1 (``num_comp_vectors`` of ``struct ibv_context``).
    num_comp_vectors: int
    #: What it can do, as far as its provider knows.
    capabilities: Capabilities
    #: Empty at first. Ids keep the domain here that they share (:class:`rdmacm.verbs.PD`), which refers to the device.
    default_pds: list[Any]
    #: The same for their XRC domain (:class:`rdmacm.verbs.XRCD`).
    default_xrcds: list[Any]

    @property
    def attr_ex(self) -> DeviceAttrEx:
        """:attr:`attr` with the extended attributes."""

    def query_counters(self) -> dict[str, int]:
        """The device's counters by name, 0 included; the names are rdma_rxe's or mlx5's for what these count, too."""

    def reg_mr(self, pd: object, view: memoryview, access: AccessFlag) -> MRBackend:
        """Register the 1 to ``max_mr_size`` bytes of a view, writable where ``access`` says so.

        The device holds the view as long as it is registered. ENOMEM: ``max_mr`` regions; EOPNOTSUPP: access that the
        device lacks (ZERO_BASED, ON_DEMAND, HUGETLB).
        """

    def reg_dmabuf_mr(self, pd: object, offset: int, length: int, iova: int, fd: int, access: AccessFlag) -> MRBackend:
        """Register ``length`` bytes at ``offset`` of a dma-buf; the first has the address ``iova``.

        EOPNOTSUPP: the device accesses memory of the process only. Its ``rereg`` is not called.
        """

    def create_ah(self, pd: object, ah: AddressHandle) -> None:
        """An address handle is being made. Its address vector has been checked against the port's tables.

        EOPNOTSUPP: the device sends no datagrams; EINVAL, ENETUNREACH, ETIMEDOUT: not to that address.
        """

    def alloc_mw(self, pd: object, mw_type: MWType) -> MWBackend:
        """A memory window that is not bound. EOPNOTSUPP: the device lacks the type; ENOMEM: ``max_mw`` windows."""

    def create_channel(self) -> ChannelBackend:
        """A completion channel."""

    def create_async_queue(self, keep_open: bool) -> AsyncQueueBackend:
        """A queue of asynchronous events, for a context. Events of the device and its ports are in all its queues.

        ``keep_open``: from the first ``get`` or ``fileno`` on, it counts as an open event queue.
        """

    def create_cq(self, cqe: int, channel: ChannelBackend | None, owner: object, comp_vector: int, /) -> CQBackend:
        """A completion queue for 1 to ``max_cqe`` completions; its channel hands out ``owner`` for it.

        ``comp_vector``, below :attr:`num_comp_vectors`, signals the events of the channel.
        """

    def create_srq(self, pd: object, attr: SrqAttr) -> SRQBackend:
        """A shared receive queue with the sizes in ``attr``, which are within the device's limits."""

    def open_xrcd(self, inode: tuple[int, int] | None, create: bool, exclusive: bool) -> object:
        """The XRC domain that stands for a file (its device and inode), or a new one for None.

        It lives as long as something refers to it. This and :meth:`create_xrc_srq` are called only if the device has
        XRC in ``device_cap_flags``. EAGAIN: there is none, and not ``create``; EINVAL: there is one, and ``exclusive``.
        """

    def open_qp(self, domain: object, qp_num: int, events: AsyncEvents) -> XrcTargetBackend:
        """Another handle of an XRC_RECV queue pair, whose events go to ``events`` as well.

        EINVAL: no queue pair of that type with the number is in the domain.
        """

    def create_xrc_srq(self, pd: object, attr: SrqAttr, domain: object, cq: CQBackend) -> XrcSRQBackend:
        """An XRC shared receive queue, whose receives complete on ``cq``. ``domain`` is from :meth:`open_xrcd`."""

    def create_qp(
        self,
        pd: object,
        qp_type: QPType,
        cap: QPCap,
        sq_sig_all: bool,
        send_cq: CQBackend | None,
        recv_cq: CQBackend | None,
        srq: SRQBackend | None,
        send_ops: SendOpsFlag | None = None,
    ) -> QPBackend:
        """A queue pair in RESET, with the sizes in ``cap``, which are within the device's limits.

        A device that grants more than these writes what it has granted to ``cap``, and nothing changes it later.

        ``qp_type`` is RC, UC, UD, XRC_SEND, which has no ``recv_cq``, or XRC_RECV, which has no completion queue and
        whose ``pd`` is the XRC domain of :meth:`open_xrcd`. ``sq_sig_all``: every send request makes a completion.
        ``srq`` replaces its receive queue, whose sizes are then 0. ``send_ops``: an extended queue pair for these
        operations, which its type has, and 0 for all that the device has. EOPNOTSUPP: the device lacks the type, or an
        operation of ``send_ops``; ENOMEM: ``max_qp`` queue pairs.
        """
