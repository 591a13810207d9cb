"""Devices, ports and their tables: ibv_query_device(3), ibv_query_port(3), ibv_query_gid(3), ibv_query_pkey(3).

A :class:`Device` is a snapshot. A :class:`Context` is the open device; each query asks the provider again, so what it
returns is current.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn, Self

from rdmacm.address import Gid
from rdmacm.capabilities import Feature, absent
from rdmacm.errors import CmTimeoutError, CmWouldBlockError, check_timeout, cm_error
from rdmacm.interrupts.protection import finalize
from rdmacm.verbs.async_event import AsyncEvent
from rdmacm.verbs.attr import DeviceAttr
from rdmacm.verbs.attrex import DeviceAttrEx
from rdmacm.verbs.backend import AsyncQueueBackend, DeviceBackend
from rdmacm.verbs.enums import (
    GidType,
    LinkLayer,
    Mtu,
    NodeType,
    PortCapFlag,
    PortCapFlag2,
    PortFlag,
    PortState,
    TransportType,
)


@dataclass(frozen=True, slots=True)
class GidEntry:
    """One row of a port's GID table, ``struct ibv_gid_entry``, ibv_query_gid_ex(3).

    - ``gid``: the GID.
    - ``gid_index``: the row's number, from 0.
    - ``port_num``: the port's number, from 1.
    - ``gid_type``: IB, ROCE_V1 or ROCE_V2.
    - ``ndev_name``: the name of the network interface that has the address. On InfiniBand the first IPoIB interface of
      the GID; empty if there is none.
    - ``ndev_ifindex``: the index of that interface; 0 if there is none.
    """

    gid: Gid
    gid_index: int
    port_num: int
    gid_type: GidType
    ndev_name: str
    ndev_ifindex: int


@dataclass(frozen=True, slots=True)
class Port:
    """A port: ``struct ibv_port_attr``, ibv_query_port(3), and its tables.

    - ``port_num``: from 1.
    - ``state``: ACTIVE if it can send and receive.
    - ``link_layer``: InfiniBand or Ethernet.
    - ``max_mtu``: the largest path MTU of the device.
    - ``active_mtu``: the largest path MTU of the link at present; None if the link's MTU is too small for the smallest
      path MTU.
    - ``gids``: the rows of the GID table that are in use.
    - ``pkeys``: the P_Key table, 16 bits each.
    - ``gid_tbl_len``, ``pkey_tbl_len``: how many rows the GID table and the P_Key table have, with those not in use.
    - ``port_cap_flags``: the capabilities of the port (InfiniBand Architecture 14.2.5.6, CapabilityMask).
    - ``port_cap_flags2``: more of them (CapabilityMask2).
    - ``flags``: GRH_REQUIRED if every packet needs a GRH.
    - ``max_msg_sz``: the longest message, in bytes; 0 if the device moves no data.
    - ``bad_pkey_cntr``, ``qkey_viol_cntr``: packets with a wrong P_Key, and with a wrong Q_Key; 0 where the device does
      not count them (BAD_PKEY_CNTR, BAD_QKEY_CNTR in ``device_cap_flags``).
    - ``lid``, ``lmc``: the port's LID and the number of its low bits that may vary; 0 on Ethernet.
    - ``sm_lid``, ``sm_sl``: the LID and the service level of the subnet manager; 0 on Ethernet.
    - ``max_vl_num``: the number of virtual lanes, as a code: 1 is one lane (InfiniBand Architecture 14.2.5.6, VLCap). 0
      if unknown.
    - ``subnet_timeout``: how long a packet and its answer take in the subnet at most: exponent of 4.096 µs.
    - ``init_type_reply``: the initialization that the subnet manager has done (InitTypeReply).
    - ``active_width``: the lanes of the link: 1 is 1X, 2 is 4X, 4 is 8X, 8 is 12X, 16 is 2X; 0 if unknown.
    - ``active_speed``: the speed of a lane: 1 is 2.5 Gb/s, 2 is 5, 4 and 8 are 10, 16 is 14, 32 is 25, 64 is 50, 128 is
      100 or more; 0 if unknown.
    - ``active_speed_ex``: the same, and 256 is 200 Gb/s (XDR); 0 where :attr:`active_speed` tells it.
    - ``phys_state``: the state of the link: 2 is polling, 3 disabled, 5 up (InfiniBand Architecture 14.2.5.6,
      PortPhysicalState); 0 if unknown.
    """

    port_num: int
    state: PortState
    link_layer: LinkLayer
    max_mtu: Mtu
    active_mtu: Mtu | None
    gids: tuple[GidEntry, ...]
    pkeys: tuple[int, ...]
    gid_tbl_len: int = 0
    pkey_tbl_len: int = 0
    port_cap_flags: PortCapFlag = PortCapFlag(0)  # noqa: RUF009 (immutable)
    port_cap_flags2: PortCapFlag2 = PortCapFlag2(0)  # noqa: RUF009 (immutable)
    flags: PortFlag = PortFlag(0)  # noqa: RUF009 (immutable)
    max_msg_sz: int = 0
    bad_pkey_cntr: int = 0
    qkey_viol_cntr: int = 0
    lid: int = 0
    lmc: int = 0
    sm_lid: int = 0
    sm_sl: int = 0
    max_vl_num: int = 0
    subnet_timeout: int = 0
    init_type_reply: int = 0
    active_width: int = 0
    active_speed: int = 0
    phys_state: int = 0
    active_speed_ex: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """A device: ``struct ibv_device`` with its ports, as it was at one moment.

    - ``name``: its name, such as ``soft_eth0``.
    - ``index``: a number that no other device of the provider has.
    - ``provider``: the name of the provider.
    - ``node_type``: a channel adapter (CA) or another kind of node.
    - ``transport_type``: InfiniBand, also for RoCE, or iWARP.
    - ``node_guid``: 64 bits, as a number.
    - ``ports``: its ports, in the order of their numbers.
    - ``driver``: the name of the kernel's driver, such as ``mlx5_core``; empty for a software device.
    - ``fw_ver``: the version of its firmware; empty if it has none.
    """

    name: str
    index: int
    provider: str
    node_type: NodeType
    transport_type: TransportType
    node_guid: int
    ports: tuple[Port, ...]
    driver: str = ""
    fw_ver: str = ""

    @property
    def guid_text(self) -> str:
        """``0200:5eff:fe10:0001``, as ibv_devinfo(1) prints it."""
        digits = f"{self.node_guid:016x}"
        return ":".join(digits[i : i + 4] for i in range(0, 16, 4))


def _close_forgotten(queue: AsyncQueueBackend) -> None:
    with contextlib.suppress(Exception):  # nobody can handle it
        queue.close()


class Context:
    """An open device, ``struct ibv_context``; ``id.verbs`` of an id that is bound to a device.

    It is made by :func:`rdmacm.open_device` and by a provider.

    ``read`` returns the device as it is now, None once it has been removed. ``open`` returns the provider's backend,
    the same object each time; without it a context answers queries only. ``shared``: it is the context of all ids of
    the device, and cannot be closed.

    Attributes:

    - ``name``: the device's name when it was opened.
    - ``closed``: whether :meth:`close` has been called.
    """

    __slots__ = ("_async_queues", "_backend", "_on_close", "_open", "_read", "_shared", "closed", "name")

    def __init__(
        self,
        name: str,
        read: Callable[[], Device | None],
        open: Callable[[], DeviceBackend] | None = None,
        *,
        shared: bool = False,
    ) -> None:
        self.name: str = name
        self._read = read
        self._shared = shared
        self.closed: bool = False
        #: Called by :meth:`close`, for what waits for :attr:`async_fd` in an event loop.
        self._on_close: list[Callable[[], None]] = []
        self._open = open
        self._backend: DeviceBackend | None = None
        #: The queue of asynchronous events, once it is needed. In a dict, because setdefault() is atomic.
        self._async_queues: dict[None, AsyncQueueBackend] = {}

    @property
    def backend(self) -> DeviceBackend:
        """The provider's backend, opened at the first use; EOPNOTSUPP where there is none.

        Two contexts are of the same device if they have the same backend object.
        """
        if self._backend is None:
            if self._open is None:
                raise absent(Feature.VERBS, "open", self.name, "the provider")
            self._backend = self._open()
        return self._backend

    def query_device(self) -> DeviceAttr:
        """What the device is, and its limits, ibv_query_device(3)."""
        return self.backend.attr

    def query_device_ex(self) -> DeviceAttrEx:
        """The same with extended attributes, ibv_query_device_ex(3)."""
        return self.backend.attr_ex

    def query_rt_values_ex(self, comp_mask: int = 1) -> NoReturn:
        """Values of the device's clock, ibv_query_rt_values_ex(3). EOPNOTSUPP: no device has one."""
        raise absent(Feature.CLOCK, "query_rt_values", self.name, why=f"comp_mask is {comp_mask!r}")

    @property
    def device(self) -> Device:
        """The device as it is now; ENODEV once it has been removed."""
        device = self._read()
        if device is None:
            raise cm_error(errno.ENODEV, "the device has been removed", "device", self.name)
        return device

    def query_port(self, port_num: int = 1) -> Port:
        """State, MTU and tables of a port, ibv_query_port(3); EINVAL for a port the device lacks."""
        for port in self.device.ports:
            if port.port_num == port_num:
                return port
        raise cm_error(errno.EINVAL, f"no port {port_num}", "query_port", self.name, "context.device.ports")

    def query_gid(self, port_num: int, index: int) -> Gid:
        """One GID, ibv_query_gid(3): the zero GID where the row is empty; EINVAL for an index outside the table."""
        entry = self._gid_entry(port_num, index, "query_gid")
        return Gid() if entry is None else entry.gid

    def query_gid_ex(self, port_num: int, gid_index: int, flags: int = 0) -> GidEntry:
        """One row of a port's GID table, ibv_query_gid_ex(3).

        ENODATA: the row is empty; EINVAL: an index outside the table, or ``flags``, which is always 0.
        """
        _check_flags(flags, "query_gid_ex")
        entry = self._gid_entry(port_num, gid_index, "query_gid_ex")
        if entry is None:
            text = f"no GID at index {gid_index}"
            raise cm_error(errno.ENODATA, text, "query_gid_ex", self.name, "context.query_gid_table()")
        return entry

    def query_gid_table(self, max_entries: int | None = None, flags: int = 0) -> list[GidEntry]:
        """The rows of all ports' GID tables that are in use, ibv_query_gid_table(3).

        ``max_entries``: the most rows to return, None for all. EINVAL: there are more, or ``flags`` is not 0.
        """
        _check_flags(flags, "query_gid_table")
        found = [entry for port in self.device.ports for entry in port.gids]
        if max_entries is not None and len(found) > max_entries:
            raise cm_error(
                errno.EINVAL, f"{len(found)} GIDs, and max_entries is {max_entries}", "query_gid_table", self.name
            )
        return found

    def query_gid_type(self, port_num: int, index: int) -> GidType:
        """The type of one GID, as pyverbs' method of that name; ``GidType.IB`` where the row is empty.

        EINVAL: an index outside the table.
        """
        entry = self._gid_entry(port_num, index, "query_gid_type")
        return GidType.IB if entry is None else entry.gid_type

    def _gid_entry(self, port_num: int, index: int, step: str) -> GidEntry | None:
        port = self.query_port(port_num)
        for entry in port.gids:
            if entry.gid_index == index:
                return entry
        if not 0 <= index < port.gid_tbl_len:
            hint = f"an index below {port.gid_tbl_len}"
            raise cm_error(errno.EINVAL, f"no row {index} in the GID table", step, self.name, hint)
        return None

    def query_pkey(self, port_num: int, index: int) -> int:
        """One P_Key in host order, ibv_query_pkey(3); EINVAL for an index outside the table."""
        pkeys = self.query_port(port_num).pkeys
        if not 0 <= index < len(pkeys):
            hint = f"an index below {len(pkeys)}"
            raise cm_error(errno.EINVAL, f"no P_Key at index {index}", "query_pkey", self.name, hint)
        return pkeys[index]

    def get_pkey_index(self, port_num: int, pkey: int) -> int:
        """The index of a P_Key (16 bits, host order) in a port's table, ibv_get_pkey_index(3).

        The membership bit counts. EINVAL: the table does not have it.
        """
        pkeys = self.query_port(port_num).pkeys
        if pkey not in pkeys:
            hint = ", ".join(f"{each:#06x}" for each in pkeys)
            raise cm_error(errno.EINVAL, f"no P_Key {pkey!r} in the table", "get_pkey_index", self.name, hint)
        return pkeys.index(pkey)

    def query_counters(self) -> dict[str, int]:
        """The device's counters by name.

        Of a kernel's device, what ``rdma statistic`` shows: of all processes, with the ports added up. Of a software
        device, drops and errors of this process, on all queue pairs of the device; names are those of rdma_rxe and
        mlx5, and ``docs/debugging.md`` describes them. EOPNOTSUPP: the provider has no queue pairs here.
        """
        return self.backend.query_counters()

    # -- asynchronous events --------------------------------------------------------------------------

    @property
    def _async_queue(self) -> AsyncQueueBackend:
        """The provider's queue of this context's asynchronous events."""
        queue = self._async_queues.get(None)
        if queue is None:  # atomic: another thread may do the same
            queue = self._async_queues.setdefault(None, self.backend.create_async_queue(not self._shared))
        return queue

    def _forget_events(self, owner: object) -> None:
        """Drop the events of an object that is closed."""
        if self._async_queues:
            for queue in self._async_queues.values():
                queue.forget(owner)

    def get_async_event(self, timeout: float | None = None) -> AsyncEvent:
        """The next asynchronous event, ibv_get_async_event(3).

        These are the events of the queue pairs, completion queues and shared receive queues that were made from this
        context, and those of its device and ports. At most 1024 wait to be read: then the oldest is lost. An event is
        not repeated before it is read, and not delivered once its object is closed.

        ``timeout`` is in seconds: None waits for ever, 0 not at all. CmTimeoutError when the time runs out,
        CmWouldBlockError for 0; EBADF once the context is closed, also in threads that were waiting; EOPNOTSUPP: the
        provider has no queue pairs here; ValueError for a negative timeout.
        """
        check_timeout(timeout)
        if self.closed:
            raise cm_error(errno.EBADF, "the context is closed", "get_async_event", self.name)
        limit = None if timeout is None else time.monotonic() + timeout
        left = timeout
        while (found := self._async_queue.get(left)) is not None:
            event = AsyncEvent._of(*found)
            if event is not None:
                return event
            left = None if limit is None else max(0.0, limit - time.monotonic())
        if not timeout:
            raise CmWouldBlockError(errno.EAGAIN, "no event is waiting", "get_async_event", self.name)
        raise CmTimeoutError(errno.ETIMEDOUT, f"no event came within {timeout} s", "get_async_event", self.name)

    @property
    def async_fd(self) -> int:
        """A descriptor that polls readable when there may be an asynchronous event (try with ``timeout=0``).

        It is open until :meth:`close`; -1 from then on. A context of :func:`rdmacm.open_device` keeps the provider's
        descriptors open, once its events are read; for the context of an id, its channel has to.
        """
        return -1 if self.closed else self._async_queue.fileno()

    def fileno(self) -> int:
        """:attr:`async_fd`, for select(2) and event loops."""
        return self.async_fd

    def close(self) -> None:
        """Stop reporting asynchronous events and release :attr:`async_fd`, ibv_close_device(3).

        Objects that were made from the context stay usable; new ones are refused (EBADF). More than once does nothing.
        EBUSY: it is the context of an id, which all ids of the device share.
        """
        if self._shared:
            raise cm_error(errno.EBUSY, "the ids of the device share this context", "close", self.name)
        self.closed = True
        for queue in self._async_queues.values():
            queue.close()
        for call in tuple(self._on_close):
            call()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __del__(self, finalize: Callable[..., None] = finalize) -> None:
        queues = getattr(self, "_async_queues", None)
        if queues:
            finalize(self, _close_forgotten, queues[None])

    @property
    def num_comp_vectors(self) -> int:
        """How many completion vectors the device has: a :class:`~rdmacm.verbs.CQ` takes 0 to one less."""
        return self.backend.num_comp_vectors

    def __repr__(self) -> str:
        return f"<Context {self.name}>"


def _check_flags(flags: int, step: str) -> None:
    if flags != 0:
        raise cm_error(errno.EINVAL, f"no flags are defined, and flags is {flags!r}", step, hint="flags=0")


def named_context(
    name: str, devices: Callable[[], Iterable[Device]], backend: Callable[[], DeviceBackend] | None = None
) -> Context:
    """The context of the device ``name`` among those that ``devices()`` returns; ``backend`` opens the device."""
    return Context(name, lambda: next((device for device in devices() if device.name == name), None), backend)
