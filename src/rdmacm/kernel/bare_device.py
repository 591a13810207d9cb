"""A kernel device without libibverbs, or one that libibverbs cannot open."""

from __future__ import annotations

import errno

from rdmacm.capabilities import KERNEL_WITHOUT_LIBRARY
from rdmacm.errors import RdmaError, cm_error
from rdmacm.kernel.sysfs import Sysfs
from rdmacm.provider import bare_device
from rdmacm.verbs.attr import UNLIMITED, DeviceAttr
from rdmacm.verbs.enums import TransportType

#: READs and atomics that adapters have outstanding; the peer's number limits it further.
_RD_ATOM = 16
#: Exponent of 4.096 µs.
_ACK_DELAY = 15


class BareDevice(bare_device.BareDevice):
    """See the module. ``reason``: why libibverbs could not open it."""

    hint = "'apt install libibverbs1 ibverbs-providers', or a queue pair of your own (ConnParam.qp_num)"

    def __init__(self, name: str, sysfs: Sysfs, reason: RdmaError | None) -> None:
        self._reason = reason
        self._sysfs = sysfs
        # Sizes are not limited, so that it is asked for a queue and says why it has none.
        attr = DeviceAttr(
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
        transport = TransportType.IWARP if sysfs.is_iwarp(name) else TransportType.IB
        super().__init__(name, transport, attr, KERNEL_WITHOUT_LIBRARY)

    def query_counters(self) -> dict[str, int]:
        return self._sysfs.counters(self.name)

    def refusal(self) -> RdmaError:
        reason = self._reason
        if reason is None:
            return super().refusal()
        code, text = reason.errno or errno.EIO, str(reason.strerror)
        return cm_error(code, text, reason.step or "open_device", self.name, reason.hint)
