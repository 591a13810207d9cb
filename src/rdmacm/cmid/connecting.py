"""Listening and connecting: rdma_listen(3), rdma_connect(3), rdma_accept(3) and their kin."""

from __future__ import annotations

import errno
from dataclasses import replace
from functools import partial

from rdmacm.addrinfo import AddrInfo
from rdmacm.cmid.queues import QueueingId
from rdmacm.cmid.services import Service, register
from rdmacm.connparam import MAXIMUM, ConnParam, Ece, UdParam
from rdmacm.constants import CmEventType, IbOption, OptionLevel, RaiFlag
from rdmacm.errors import RdmaError, cm_error
from rdmacm.provider import IdBackend, Provider
from rdmacm.verbs.attr import DeviceAttr
from rdmacm.verbs.enums import QPType
from rdmacm.verbs.pd import PD
from rdmacm.verbs.qp import QPInitAttr

__all__ = ["CmId", "create_ep"]

#: Reasons an application may reject with: consumer defined, vendor option not supported.
_REJECT, _REJECT_ECE = 28, 35
#: What create_ep(3) allows an address and a route to take.
_EP_TIMEOUT_MS = 2000
#: Where numbers end that messages have so many bits for; retry counts are C's bytes.
_ENDS = (("qp_num", 1 << 24), ("qkey", 1 << 32), ("retry_count", 1 << 8), ("rnr_retry_count", 1 << 8))


_USUAL = ConnParam()


class CmId(QueueingId):
    """A communication identifier, ``struct rdma_cm_id``: conceptually a socket.

    ``channel``: where its events go; None makes the id *synchronous*: each call then waits for its outcome and
    raises what went wrong. ``port_space``: a :class:`PortSpace`; ``qp_type``: RC, or UD for the port spaces UDP and
    IPOIB, unless given (only ``PortSpace.IB`` leaves a choice); ``context``: the caller's own, kept as it is.

    Calls that start work return as soon as it is started; the outcome is an event. EINVAL for an unknown port
    space, and for any call the id's state does not allow (:class:`CmStateError`).

    >>> with CmId(port_space=PortSpace.TCP) as cmid:
    ...     cmid.resolve_addr(("127.0.0.1", 7471))
    ...     cmid.resolve_route()
    ...     str(cmid.route.dgid)
    '::ffff:127.0.0.1'
    """

    __slots__ = ("_connect_prefix", "_qp_template", "_request")

    def _start(self) -> None:
        super()._start()
        #: What create_ep() keeps for later: the connect data of an address, the queue pair of each accepted id.
        self._connect_prefix = b""
        self._qp_template: QPInitAttr | None = None
        self._request: ConnParam | None = None

    # -- the passive side -----------------------------------------------------------------------------

    def listen(self, backlog: int = 0) -> None:
        """Take connection requests, rdma_listen(3): each is a CONNECT_REQUEST event with a new id.

        ``backlog``: how many may wait to be fetched; 0 or more than 1024 means 1024. What comes when it is full is
        dropped in silence, and the peer asks again. An unbound id is bound to any IPv4 address and a free port.
        EINVAL where the id is past that; EADDRINUSE or EADDRNOTAVAIL where another id has the port as well (who listens
        does not share, whatever REUSEADDR says); EACCES or EADDRINUSE where another program has UDP port 4791.
        """
        self._backend.listen(backlog)

    def take_request(self, backend: IdBackend, param: ConnParam | UdParam | None) -> CmId:
        """The id that a CONNECT_REQUEST event has brought (the reader of the event asks)."""
        new = type(self)._adopt(backend, self)
        new._request = param if isinstance(param, ConnParam) else None
        return new

    def get_request(self, timeout: float | None = None) -> CmId:
        """The next connection request of a synchronous listener as a synchronous id, rdma_get_request(3).

        Its ``event`` is the request (``event.param``, ``event.private_data``) until the next call that waits. A
        listener of :func:`create_ep` gives it a queue pair. CmTimeoutError after ``timeout`` seconds; EINVAL for an
        asynchronous listener.
        """
        if not self._private:
            raise cm_error(errno.EINVAL, "the listener has a channel: its requests are events there", "get_request")
        while True:
            self._release_event()
            event = self._channel.get_event(timeout)
            if event.type is CmEventType.CONNECT_REQUEST:
                break
            self.event = event
            if event.type is CmEventType.DEVICE_REMOVAL:
                raise event.error or cm_error(errno.ENODEV, "the device was removed", "get_request")
        new: CmId = event.id
        try:
            new.migrate(None)
            new.event = event
            if self._qp_template is not None:
                new.create_qp(_copy(self._qp_template), self._pd)
        except BaseException:
            new.event = None
            event.ack()
            new.destroy()
            raise
        return new

    def accept(self, param: ConnParam | None = None) -> None:
        """Accept a request, rdma_accept(3).

        Without ``param``, or where it says :data:`~rdmacm.connparam.MAXIMUM`, resources are as many as the peer asks
        for and the device has. A synchronous id waits until the connection is established. EINVAL where there is
        nothing to accept (any more), or private data is longer than 196 bytes (136 for datagrams).
        """
        self._backend.accept(self._resolved_param(param, self._request, "accept"))
        if self._private and self.qp_type is not QPType.UD:
            self._await(
                CmEventType.ESTABLISHED,
                CmEventType.REJECTED,
                CmEventType.UNREACHABLE,
                CmEventType.CONNECT_ERROR,
                CmEventType.DISCONNECTED,
            )

    def reject(self, private_data: bytes = b"") -> None:
        """Refuse a request, rdma_reject(3), with up to 148 bytes of private data (136 for datagrams)."""
        self._backend.reject(_bytes(private_data), _REJECT)

    def reject_ece(self, private_data: bytes = b"") -> None:
        """Refuse a request because of its ECE options, rdma_reject_ece(3)."""
        self._backend.reject(_bytes(private_data), _REJECT_ECE)

    def register_service(self, name: str, data: bytes = b"", *, lease: int = 60) -> Service:
        """Have the subnet administrator know of this listener by a name, for peers that resolve with ``RAI_SA``.

        The id is bound to an InfiniBand port. ``name`` has up to 63 bytes of UTF-8, ``data`` up to 16 for the peers to
        see; ``lease``, in seconds, is how long the record outlives this process: it is renewed while the id lives.
        Waits for the administrator's answer. EOPNOTSUPP where the id's port is not InfiniBand; EINVAL where it is
        unbound, the name or the data too long, or the administrator refuses; ETIMEDOUT where it does not answer.
        """
        encoded = name.encode()
        if not 0 < len(encoded) < 64 or "\0" in name or len(data) > 16 or not 0 < lease < 1 << 32:
            raise cm_error(
                errno.EINVAL,
                "a name of 1 to 63 bytes, up to 16 bytes of data, a lease of 1 or more",
                "register_service",
            )
        return register(self._channel.provider, partial(self._backend.register_service, encoded, lease, bytes(data)))

    # -- the active side ------------------------------------------------------------------------------

    def connect(self, param: ConnParam | None = None) -> None:
        """Ask the peer for a connection, or for its datagram queue pair, rdma_connect(3).

        Ends in ESTABLISHED (CONNECT_RESPONSE where the id has no queue pair: make yours ready, then
        :meth:`establish`), REJECTED (``event.status`` is the reason), UNREACHABLE (nobody answered) or CONNECT_ERROR.
        Up to 56 bytes of private data, 180 for datagrams; 36 more to an InfiniBand address. EINVAL: the route is not
        resolved, the data is too long, more resources than the device has, or neither a queue pair nor
        ``param.qp_num``.
        """
        resolved = self._resolved_param(param, None, "connect")
        if self._connect_prefix:
            resolved = replace(resolved, private_data=self._connect_prefix + resolved.private_data)
        self._backend.connect(resolved)
        self._connect_prefix = b""
        if self._private:
            outcome = CmEventType.ESTABLISHED
            if self._qp is None and self.qp_type is not QPType.UD:
                outcome = CmEventType.CONNECT_RESPONSE
            self._await(outcome, CmEventType.REJECTED, CmEventType.UNREACHABLE, CmEventType.CONNECT_ERROR)

    def establish(self) -> None:
        """Confirm a CONNECT_RESPONSE once the queue pair of the user's own is ready, rdma_establish(3)."""
        if self._qp is not None:
            raise cm_error(errno.EINVAL, "the id's own queue pair is established by itself", "establish")
        self._backend.establish()

    # -- both sides -----------------------------------------------------------------------------------

    def notify(self, event: int) -> None:
        """Report IBV_EVENT_COMM_EST (4) of a queue pair of the user's own, rdma_notify(3).

        EISCONN where the connection is established already, which is harmless; EINVAL for other events.
        """
        self._backend.notify(event)

    def disconnect(self) -> None:
        """End the connection, rdma_disconnect(3): outstanding work is flushed, both sides get DISCONNECTED.

        A second time, or where the peer was first, it does no harm. EINVAL where there never was a connection.
        """
        follows = self._backend.disconnect()
        if self._private and follows:
            self._await(CmEventType.DISCONNECTED)

    def set_local_ece(self, ece: Ece) -> None:
        """ECE options to send when connecting or accepting without an own queue pair, rdma_set_local_ece(3).

        EINVAL for a vendor of 0 or of more than the 24 bits a message has for it.
        """
        if self._qp is not None:
            raise cm_error(errno.EINVAL, "ECE is the queue pair's business", "set_local_ece")
        if not (0 < ece.vendor_id < 1 << 24 and 0 <= ece.options < 1 << 32):
            raise cm_error(errno.EINVAL, f"{ece} has no vendor of 24 bits, or options of more than 32", "set_local_ece")
        self._backend.set_local_ece(ece)

    def get_remote_ece(self) -> Ece:
        """ECE options the peer has sent, rdma_get_remote_ece(3)."""
        if self._qp is not None:
            raise cm_error(errno.EINVAL, "ECE is the queue pair's business", "get_remote_ece")
        return self._backend.remote_ece()

    def _resolved_param(self, param: ConnParam | None, asked: ConnParam | None, step: str) -> ConnParam:
        """``param`` with the device's (and the peer's) maxima, and the queue pair's own numbers."""
        param = param or _USUAL
        for name, end in _ENDS:
            if not 0 <= (value := getattr(param, name)) < end:
                raise cm_error(errno.EINVAL, f"{name} {value} is outside 0..{end - 1}", step)
        if type(param.private_data) is not bytes:
            param = replace(param, private_data=_bytes(param.private_data))
        if self.qp_type is QPType.UD:
            return param
        if self._qp is None and not param.qp_num:
            raise cm_error(
                errno.EINVAL, "the id has no queue pair, and none is named", step, self.peer_addr_text, "create_qp()"
            )
        limits: DeviceAttr = self._bound(step).query_device()
        resources, depth = param.responder_resources, param.initiator_depth
        if resources == MAXIMUM:
            resources = min(limits.max_qp_rd_atom, asked.responder_resources if asked else MAXIMUM)
        elif not 0 <= resources <= limits.max_qp_rd_atom:
            raise self._outside("responder_resources", resources, limits.max_qp_rd_atom, step)
        if depth == MAXIMUM:
            depth = min(limits.max_qp_init_rd_atom, asked.initiator_depth if asked else MAXIMUM)
        elif not 0 <= depth <= limits.max_qp_init_rd_atom:
            raise self._outside("initiator_depth", depth, limits.max_qp_init_rd_atom, step)
        return ConnParam(  # replace() takes four times as long
            param.private_data,
            resources,
            depth,
            param.flow_control,
            param.retry_count,
            param.rnr_retry_count,
            int(self._srq is not None) if self._qp is not None else param.srq,
            self._qp.qp_num if self._qp is not None else param.qp_num,
            param.qkey,
        )

    def _outside(self, name: str, wanted: int, most: int, step: str) -> RdmaError:
        return cm_error(errno.EINVAL, f"{name} {wanted} is outside 0..{most}", step, self.peer_addr_text)


def create_ep(
    info: AddrInfo,
    pd: PD | None = None,
    qp_init_attr: QPInitAttr | None = None,
    *,
    provider: str | Provider | None = None,
) -> CmId:
    """A synchronous id from a resolved address, rdma_create_ep(3).

    Passive (``RAI_PASSIVE``): bound to ``info.src_addr``; ``listen()`` and ``get_request()`` come next, and each
    accepted id gets a queue pair as ``qp_init_attr`` says. Active: address and route resolved within 2 s each (the
    route that ``info`` brings is taken as it is), with a queue pair where ``qp_init_attr`` is given; ``connect()``
    comes next, and sends ``info.connect`` ahead of the caller's private data. Raises what the step that failed
    raises, and nothing is left behind.
    """
    cmid = CmId(None, info.port_space, qp_type=info.qp_type, provider=provider)
    try:
        if info.flags & RaiFlag.PASSIVE:
            if info.src_addr is None:
                raise cm_error(errno.EINVAL, "a passive address without source", "create_ep")
            cmid.bind_addr(info.src_addr)
            cmid._qp_template = _of_type(qp_init_attr, cmid.qp_type)
            cmid._pd = pd
            return cmid
        if info.dst_addr is None:
            raise cm_error(errno.EINVAL, "an active address without destination", "create_ep")
        cmid.resolve_addr(info.dst_addr, info.src_addr, _EP_TIMEOUT_MS)
        if info.route:
            cmid.set_option(OptionLevel.IB, IbOption.PATH, b"".join(path.pack() for path in info.route))
            cmid._await(CmEventType.ROUTE_RESOLVED, CmEventType.ROUTE_ERROR)
        else:
            cmid.resolve_route(_EP_TIMEOUT_MS)
        template = _of_type(qp_init_attr, cmid.qp_type)
        if template is not None:
            cmid.create_qp(template, pd)
        cmid._connect_prefix = info.connect
        return cmid
    except BaseException:
        cmid.destroy()
        raise


def _bytes(data: bytes) -> bytes:
    return bytes(memoryview(data))  # any buffer will do


def _copy(attr: QPInitAttr) -> QPInitAttr:
    return replace(attr, cap=replace(attr.cap))


def _of_type(attr: QPInitAttr | None, qp_type: QPType) -> QPInitAttr | None:
    return None if attr is None else replace(_copy(attr), qp_type=qp_type)
