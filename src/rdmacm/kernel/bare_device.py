"""A kernel device without libibverbs: it has limits, which connecting needs, and refuses everything else."""

from __future__ import annotations

import errno
from typing import Any, NoReturn

from rdmacm.errors import RdmaError, cm_error
from rdmacm.kernel.sysfs import Sysfs
from rdmacm.verbs.attr import UNLIMITED, DeviceAttr
from rdmacm.verbs.attrex import DeviceAttrEx
from rdmacm.verbs.enums import TransportType

__all__ = ["BareDevice"]

#: READs and atomics that adapters have outstanding; the peer's number limits it further.
_RD_ATOM = 16
#: Exponent of 4.096 µs.
_ACK_DELAY = 15


class BareDevice:
    """See :class:`rdmacm.verbs.backend.DeviceBackend`."""

    def __init__(self, name: str, sysfs: Sysfs, reason: RdmaError | None) -> None:
        self.name = name
        self.transport_type = TransportType.IWARP if sysfs.is_iwarp(name) else TransportType.IB
        #: Why the device could not be opened.
        self._reason = reason
        self._sysfs = sysfs
        self.num_comp_vectors = 1
        self.default_pds: list[Any] = []
        self.checks_tables = True
        self.locks_memory = True
        self.default_xrcds: list[Any] = []
        #: It has no queues and no regions. Their sizes are not limited, so that it is asked for one and says why not.
        self.attr = DeviceAttr(
            node_guid=sysfs.node_guid(name),
            max_mr_size=1 << 63,
            max_qp=0,
            max_qp_wr=UNLIMITED,
            max_sge=UNLIMITED,
            max_cq=0,
            max_cqe=UNLIMITED,
            max_mr=0,
            max_pd=0,
            max_qp_rd_atom=_RD_ATOM,
            max_qp_init_rd_atom=_RD_ATOM,
            max_srq=0,
            max_srq_wr=UNLIMITED,
            max_srq_sge=UNLIMITED,
            local_ca_ack_delay=_ACK_DELAY,
            max_inline_data=UNLIMITED,
            max_msg_sz=0,
        )

    @property
    def attr_ex(self) -> DeviceAttrEx:
        """See :class:`rdmacm.verbs.backend.DeviceBackend`."""
        return DeviceAttrEx.of(self.attr)

    def query_counters(self) -> dict[str, int]:
        return self._sysfs.counters(self.name)

    def _refuse(self, *_: object) -> NoReturn:
        if self._reason is not None:
            reason = self._reason
            code, text = reason.errno or errno.EIO, str(reason.strerror)
            raise cm_error(code, text, reason.step or "open_device", self.name, reason.hint)
        text = "queue pairs and memory of this device take libibverbs, which is not here"
        hint = "'apt install libibverbs1 ibverbs-providers', or a queue pair of your own (ConnParam.qp_num)"
        raise cm_error(errno.EOPNOTSUPP, text, "open_device", self.name, hint)

    reg_mr = reg_dmabuf_mr = alloc_mw = create_ah = create_channel = create_async_queue = _refuse
    create_cq = create_srq = create_qp = open_qp = open_xrcd = create_xrc_srq = _refuse
