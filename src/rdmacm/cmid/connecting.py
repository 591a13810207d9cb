"""Listening and connecting: rdma_listen(3), rdma_connect(3), rdma_accept(3), rdma_reject(3), rdma_disconnect(3)."""

from __future__ import annotations

import errno
from dataclasses import replace
from functools import partial

from rdmacm.cmid.services import Service, register, wait_for
from rdmacm.cmid.state import IdState
from rdmacm.constants import CmEventType
from rdmacm.errors import RdmaError, cm_error
from rdmacm.proto.cm.codes import ApStatus, RejectReason
from rdmacm.proto.sa import PathRecord
from rdmacm.provider.choice import note_choice
from rdmacm.provider.connparam import MAXIMUM, ConnParam, Ece
from rdmacm.verbs.checks import member
from rdmacm.verbs.enums import QPType

#: The exclusive limits of fields: queue pair number and Q_Key have so many bits in a message, retry counts 8 in C.
_LIMITS = (("qp_num", 1 << 24), ("qkey", 1 << 32), ("retry_count", 1 << 8), ("rnr_retry_count", 1 << 8))
_DEFAULT_PARAM = ConnParam()


class Connecting(IdState):
    """The part of :class:`rdmacm.CmId` that listens and connects."""

    __slots__ = ()

    # -- passive side ---------------------------------------------------------------------------------

    def listen(self, backlog: int = 0) -> None:
        """Listen for connection requests, rdma_listen(3): each is a CONNECT_REQUEST event with a new id.

        ``backlog``: how many may wait to be fetched; 0 or more than 1024 means 1024. A request that finds it full is
        dropped without an answer, and the peer sends it again. An unbound id is bound to the IPv4 wildcard and a free
        port. EADDRINUSE or EADDRNOTAVAIL: another id has the port too (a listener does not share it, with REUSEADDR or
        without); EACCES, EADDRINUSE or EBUSY: the wire's own port cannot be opened, as when another program has UDP
        port 4791; EINVAL: the state.
        """
        self._check_alive("listen")
        try:
            self._backend.listen(backlog)
        except RdmaError as error:
            note_choice(error, self._channel._choice_reason)
            raise

    def allow_requests(self, count: int) -> None:
        """Post at most ``count`` further CONNECT_REQUEST events, beside those allowed before. Not in librdmacm.

        The others wait in the backlog, where a request takes no id and no queue pair, and no peer can crowd out others.
        Called before :meth:`listen`, and each time that there is room for more. Without a call, all are posted.
        """
        self._check_alive("allow_requests")
        self._backend.allow_requests(count)

    def accept(self, param: ConnParam | None = None) -> None:
        """Accept a connection request, rdma_accept(3).

        Without ``param``, or with 255 in it, ``responder_resources`` and
        ``initiator_depth`` are as many as the peer asks for and the device has. Up to 196 bytes of private data, 136
        for datagrams. A synchronous id waits until the connection is established. EINVAL: there is no request to
        accept (any more), the private data are too long, or more resources than the device has.
        """
        self._check_alive("accept")
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
        """Reject a connection request, rdma_reject(3), with up to 148 bytes of private data, 136 for datagrams."""
        self._check_alive("reject")
        self._backend.reject(_bytes(private_data), RejectReason.CONSUMER_DEFINED)

    def reject_ece(self, private_data: bytes = b"") -> None:
        """Reject a connection request because of its ECE options, rdma_reject_ece(3); else as :meth:`reject`."""
        self._check_alive("reject_ece")
        self._backend.reject(_bytes(private_data), RejectReason.VENDOR_OPTION_NOT_SUPPORTED)

    def register_service(self, name: str, data: bytes = b"", *, lease: int = 60) -> Service:
        """Register a service record of this listener, which peers find by its name with ``RAI_SA``.

        The id is bound to an InfiniBand port. ``name``: 1 to 63 bytes of UTF-8. ``data``: up to 16 bytes, which peers
        see. ``lease``, in seconds: the record is renewed while the id lives, and stays that long after a process that
        dies. Waits for the subnet administrator's answer. EOPNOTSUPP: the id's port is not InfiniBand; EINVAL: it is
        unbound, the name or the data are too long, or the administrator refuses; ETIMEDOUT: it does not answer.
        """
        self._check_alive("register_service")
        from rdmacm.proto.sa.subnet import service_name_bytes

        try:
            encoded = service_name_bytes(name)
        except UnicodeEncodeError:
            encoded = b""
        if not 0 < len(encoded) < 64 or b"\0" in encoded or len(data) > 16 or not 0 < lease < 1 << 32:
            text = "a service has a name of 1 to 63 bytes, up to 16 bytes of data and a lease of 1 second or more"
            raise cm_error(errno.EINVAL, text, "register_service", repr(name))
        return register(self._channel.provider, partial(self._backend.register_service, encoded, lease, bytes(data)))

    # -- active side ----------------------------------------------------------------------------------

    def connect(self, param: ConnParam | None = None) -> None:
        """Request a connection, or the queue pair of a datagram peer, rdma_connect(3).

        Ends in ESTABLISHED (without a queue pair of the id's in CONNECT_RESPONSE: make yours ready, then call
        :meth:`establish`), REJECTED (``event.status`` is the reason), UNREACHABLE or CONNECT_ERROR. Up to 56 bytes
        of private data, 180 for datagrams; 36 more to an InfiniBand address. EINVAL: the route is not resolved, the
        private data are too long, more resources than the device has, or neither a queue pair nor ``param.qp_num``.

        UNREACHABLE has the status -ETIMEDOUT if there was no answer. If the network reports that the request was not
        delivered, the status is -ECONNREFUSED (the peer's UDP port 4791 is closed), -EHOSTUNREACH, -ENETUNREACH or
        -EACCES (prohibited), and follows at once.
        """
        self._check_alive("connect")
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
        """Confirm a CONNECT_RESPONSE when the user's own queue pair is ready, rdma_establish(3).

        EINVAL: the id has a queue pair, which needs no confirmation, or there is nothing to confirm.
        """
        self._check_alive("establish")
        if self._qp is not None:
            raise cm_error(errno.EINVAL, "the id's own queue pair is established by itself", "establish")
        self._backend.establish()

    # -- both sides -----------------------------------------------------------------------------------

    def notify(self, event: int) -> None:
        """Report an event of the user's own queue pair, rdma_notify(3).

        IBV_EVENT_COMM_EST (4): data has arrived, so the connection is established; EISCONN: it is already, which does
        no harm. IBV_EVENT_PATH_MIG (6): the queue pair has changed to the alternate path, which :attr:`route` has first
        from now on, and messages of the connection manager take. EINVAL: another event, the state, no alternate path.
        """
        self._check_alive("notify")
        self._backend.notify(event)

    def load_alternate_path(self, path: PathRecord) -> None:
        """Offer the peer another alternate path, and wait for its answer. Not in librdmacm.

        The id is the active side of an established connection on InfiniBand. ``path`` begins at the id's port and
        differs from the first path of :attr:`route` in a LID; then it is the second. Load it into your queue pair with
        the ALT_PATH and PATH_MIG_STATE of ``init_qp_attr(QPState.RTS)``. ECONNREFUSED: the peer refuses the path, and
        the text has the status of its APR; EOPNOTSUPP: the peer takes no paths, or the id is on RoCE or the kernel's;
        ETIMEDOUT: no answer; ECONNRESET, ECANCELED: the connection or the id ended; EINVAL: the state, the path, the
        passive side, or another thread loads one.
        """
        self._check_alive("load_alternate_path")
        backend = self._backend.alternate_paths("load_alternate_path")
        wait_for(self._channel.provider, partial(backend.load, path))

    def allow_alternate_paths(self) -> None:
        """Take offers of alternate paths from the peer: each is an event ALTERNATE_PATH. Not in librdmacm.

        The event is answered by :meth:`answer_alternate_path`. Paths that do not lead to the id's port are refused
        without an event, and without this call all are. EOPNOTSUPP: the id is on RoCE or the kernel's; EINVAL: there is
        no connection.
        """
        self._check_alive("allow_alternate_paths")
        self._backend.alternate_paths("allow_alternate_paths").allow()

    @property
    def offered_path(self) -> PathRecord:
        """The alternate path that the peer offers, seen from this side, until it is answered; CmStateError: none."""
        self._check_alive("offered_path")
        offered = self._backend.alternate_paths("offered_path").offered
        return offered or self._lacks("has no offer of a path", "offered_path", "an event ALTERNATE_PATH")

    def answer_alternate_path(self, status: int = ApStatus.SUCCESS) -> None:
        """Answer an event ALTERNATE_PATH with an :class:`ApStatus`, which the peer's APR carries. Not in librdmacm.

        With SUCCESS the path is the second of :attr:`route`: load it into your queue pair as
        :meth:`load_alternate_path` says. EINVAL: none is offered (any more), or no such status.
        """
        self._check_alive("answer_alternate_path")
        chosen = member(ApStatus, status, "status", "answer_alternate_path")
        self._backend.alternate_paths("answer_alternate_path").answer(chosen)

    def disconnect(self) -> None:
        """End the connection, rdma_disconnect(3): outstanding work is flushed, and both sides get DISCONNECTED.

        A second call, or one after the peer's, does nothing. EINVAL: there never was a connection.
        """
        follows = self._backend.disconnect()
        if self._private and follows:
            self._await(CmEventType.DISCONNECTED)

    def set_local_ece(self, ece: Ece) -> None:
        """Set the ECE options to send with the next connect() or accept(), rdma_set_local_ece(3).

        For ids without a queue pair. EINVAL: the id has one; a vendor of 0 or of more than 24 bits.
        """
        self._check_alive("set_local_ece")
        if self._qp is not None:
            raise cm_error(errno.EINVAL, "ECE options are for ids without a queue pair", "set_local_ece")
        if not (0 < ece.vendor_id < 1 << 24 and 0 <= ece.options < 1 << 32):
            raise cm_error(errno.EINVAL, f"{ece} has no vendor of 24 bits, or options of more than 32", "set_local_ece")
        self._backend.set_local_ece(ece)

    def get_remote_ece(self) -> Ece:
        """The ECE options that the peer has sent, rdma_get_remote_ece(3); EINVAL: the id has a queue pair."""
        self._check_alive("get_remote_ece")
        if self._qp is not None:
            raise cm_error(errno.EINVAL, "ECE options are for ids without a queue pair", "get_remote_ece")
        return self._backend.remote_ece()

    def _resolved_param(self, param: ConnParam | None, asked: ConnParam | None, step: str) -> ConnParam:
        """``param`` with the id's queue pair, and MAXIMUM replaced by what the device has and the peer asked for."""
        param = param or _DEFAULT_PARAM
        if param is not _DEFAULT_PARAM:
            for name, limit in _LIMITS:
                if not 0 <= (value := getattr(param, name)) < limit:
                    raise cm_error(errno.EINVAL, f"{name} {value} is outside 0..{limit - 1}", step)
        if type(param.private_data) is not bytes:
            param = replace(param, private_data=_bytes(param.private_data))
        if self.qp_type is QPType.UD:
            return param
        if self._qp is None and not param.qp_num:
            raise cm_error(
                errno.EINVAL, "the id has no queue pair, and none is named", step, self.peer_addr_text, "create_qp()"
            )
        context = self._backend.verbs or self._bound(step)
        device, depths = (context._backend or context.backend).attr, []
        for name, limit in (
            ("responder_resources", device.max_qp_rd_atom),
            ("initiator_depth", device.max_qp_init_rd_atom),
        ):
            value = getattr(param, name)
            if value == MAXIMUM:  # what the device has, or what the peer asked for
                value = min(limit, getattr(asked, name) if asked else MAXIMUM)
            elif not 0 <= value <= limit:
                raise cm_error(errno.EINVAL, f"{name} {value} is outside 0..{limit}", step, self.peer_addr_text)
            depths.append(value)
        resources, depth = depths
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


def _bytes(data: bytes) -> bytes:
    return bytes(memoryview(data))  # of any buffer
