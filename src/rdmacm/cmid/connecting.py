"""Listening and connecting: rdma_listen(3), rdma_connect(3), rdma_accept(3) and their kin."""

from __future__ import annotations

import errno
from dataclasses import replace
from functools import partial

from rdmacm.cmid.queues import QueueBase
from rdmacm.cmid.services import Service, register
from rdmacm.connparam import MAXIMUM, ConnParam, Ece
from rdmacm.constants import CmEventType, PortSpace
from rdmacm.errors import RdmaError, cm_error
from rdmacm.verbs.attr import DeviceAttr
from rdmacm.verbs.enums import QPType
from rdmacm.verbs.qp import QPInitAttr

__all__ = ["ConnectionBase"]

#: Reasons an application may reject with: consumer defined, vendor option not supported.
_REJECT, _REJECT_ECE = 28, 35
#: Where numbers end that messages have so many bits for; retry counts are C's bytes.
_ENDS = (("qp_num", 1 << 24), ("qkey", 1 << 32), ("retry_count", 1 << 8), ("rnr_retry_count", 1 << 8))


_USUAL = ConnParam()


class ConnectionBase(QueueBase):
    """The part of :class:`rdmacm.CmId` that listens and connects."""

    __slots__ = ("_connect_prefix", "_qp_template", "_request")

    def _prepare(self, ps: PortSpace, qp_type: QPType) -> None:
        super()._prepare(ps, qp_type)
        #: The connect data of a resolved address: goes ahead of the private data of the first connect().
        self._connect_prefix = b""
        #: What create_ep() gives a listener for the queue pairs of its accepted ids.
        self._qp_template: QPInitAttr | None = None
        #: The parameters of the request that made this id.
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


def _bytes(data: bytes) -> bytes:
    return bytes(memoryview(data))  # any buffer will do
