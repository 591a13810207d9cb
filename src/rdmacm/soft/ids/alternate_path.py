"""The alternate path of an established connection: loading another one, and answering what the peer offers.

The engine (:mod:`rdmacm.proto.cm.engine`) sends and repeats the LAP and the APR. Here is what they mean for the id: its
path records, and the addresses from which it takes messages.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from rdmacm.constants import CmEventType
from rdmacm.errors import CmStateError, RdmaError, cm_error
from rdmacm.proto.cm.codes import ApStatus, ap_text
from rdmacm.proto.cm.messages import APR, LAP, REQ
from rdmacm.proto.sa import PathRecord
from rdmacm.provider.cmstate import State
from rdmacm.soft.ids.request import alternate_of_request

if TYPE_CHECKING:
    from rdmacm.proto.cm.connection import CmConnection
    from rdmacm.provider import PathDone
    from rdmacm.soft.ids.id_state import IdState
    from rdmacm.soft.ids.link import Link


def why_no_alternate(primary: PathRecord, path: PathRecord) -> str:
    """Why a path cannot be the alternate one beside ``primary``, in words; empty if it can."""
    if (path.slid, path.dlid) == (primary.slid, primary.dlid):
        return f"LID {path.slid} -> {path.dlid} is the first path already"
    if path.mtu < primary.mtu or path.pkey != primary.pkey:
        return "an alternate path has the P_Key of the first path, and no smaller MTU"
    return ""


class AlternatePath:
    """See the module, and :class:`rdmacm.provider.AlternatePathBackend` for the calls."""

    __slots__ = ("_connection", "_core", "_done", "_is_allowed", "_link", "_loading", "offered")

    def __init__(self, core: IdState, link: Link, connection: CmConnection) -> None:
        self._core = core
        self._link = link
        self._connection = connection
        #: Whether the application answers what the peer offers.
        self._is_allowed = False
        #: See :class:`rdmacm.provider.AlternatePathBackend`.
        self.offered: PathRecord | None = None
        #: The path that is being loaded, and whom to tell; None while none is.
        self._loading: PathRecord | None = None
        self._done: PathDone | None = None

    # -- calls ----------------------------------------------------------------------------------------

    def allow(self) -> None:
        with self._core.runtime.lock:
            self._check("allow_alternate_paths")
            self._is_allowed = True

    def _check(self, call: str) -> None:
        """Refuse a call in a child of fork(2), or after the id was destroyed by another thread."""
        self._core.runtime.check_fork(call)
        if self._core.state is State.DESTROYING:
            raise self._core.refuse(call)

    def load(self, path: PathRecord, done: PathDone) -> None:
        core, link, connection = self._core, self._link, self._connection
        with core.runtime.lock:
            self._check("load_alternate_path")
            why = why_no_alternate(core.paths[0], path) or link.why_no_alternate(path)
            if why:
                raise cm_error(errno.EINVAL, why, "load_alternate_path", str(core.peer_addr))
            link.cm.agent.load_path(connection.comm_id, link.request_path(path), core.runtime.clock())
            self._loading, self._done = path, done

    def answer(self, status: int) -> None:
        core, link = self._core, self._link
        with core.runtime.lock:
            self._check("answer_alternate_path")
            path = self.offered
            if path is None:
                text = "the peer has offered no path"
                raise CmStateError(errno.EINVAL, text, "answer_alternate_path", str(core.peer_addr))
            self.offered = None
            link.cm.agent.answer_path(self._connection.comm_id, status, core.runtime.clock())
            if status == ApStatus.SUCCESS:
                self._take(path)

    # -- reports of the engine ------------------------------------------------------------------------

    def was_offered(self, lap: LAP) -> None:
        """The peer offers a path."""
        core, link, request = self._core, self._link, self._connection.request
        assert isinstance(request, REQ)
        alternate = lap.alternate
        record = alternate_of_request(request, alternate)
        status: ApStatus | None = ApStatus.UNSUPPORTED
        if self._is_allowed:
            is_current = (record.slid, record.dlid) == (core.paths[0].slid, core.paths[0].dlid)
            status = ApStatus.IS_CURRENT if is_current else link.path_fault(alternate)
        if status is not None:
            link.cm.agent.answer_path(self._connection.comm_id, status, core.runtime.clock())
            return
        self.offered = record
        core.post(CmEventType.ALTERNATE_PATH)

    def was_answered(self, apr: APR | None) -> None:
        """The peer has answered what :meth:`load` has offered, or has not."""
        path = self._loading
        if apr is None:
            self._finish(errno.ETIMEDOUT, "the peer did not answer the LAP")
        elif apr.ap_status == ApStatus.SUCCESS and path is not None:
            self._take(path)
            self._finish(0, "")
        else:
            code = errno.EOPNOTSUPP if apr.ap_status == ApStatus.UNSUPPORTED else errno.ECONNREFUSED
            self._finish(code, ap_text(apr.ap_status))

    def end(self, code: int, text: str) -> None:
        """The connection is over: nothing is offered, and a load has failed with this errno."""
        self.offered = None
        self._finish(code, text)

    def _take(self, path: PathRecord) -> None:
        core, link = self._core, self._link
        core.paths = (core.paths[0], path)
        link.cm.agent.set_alternate(self._connection.comm_id, link.cm_path(path))

    def _finish(self, code: int, text: str) -> None:
        done, self._done, self._loading = self._done, None, None
        if done is not None:
            error: RdmaError | None = None
            if code:
                error = cm_error(code, text, "load_alternate_path", str(self._core.peer_addr))
            done(error)
            self._core.runtime.waiters.wake()  # the thread that waits may not be the one that makes progress
