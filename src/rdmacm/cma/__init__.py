"""The functions, structures and constants of librdmacm and libibverbs under C's names, to port C line by line.

Each function names its manual page, which says what it does; the docstring has the differences only. The arguments are
in the page's order. It raises an :class:`~rdmacm.errors.RdmaError` where C returns -1 and sets errno, and returns what
C fills in through a pointer. Ports are in host order; C's ``rdma_get_src_port`` returns network order. Private data and
option values are bytes, without an argument for their length.

Everything is imported from this package. Its modules are short pages for ``pydoc``, by header:

- ``rdmacm.cma.calls``: the functions of ``rdma/rdma_cma.h``
- ``rdmacm.cma.verbs``: queue pairs, endpoints and ``rdma/rdma_verbs.h``
- ``rdmacm.cma.ibverbs``: the functions of ``infiniband/verbs.h``
- ``rdmacm.cma.extended``: those of extended queue pairs, completion queues and queries
- ``rdmacm.cma.refused``: those that no device here supports, which raise EOPNOTSUPP
- ``rdmacm.cma.rsockets``: the functions of ``rdma/rsocket.h``
- ``rdmacm.cma.structures``, ``rdmacm.cma.constants``: the structures and the constants of all three

A structure that only the package makes is one of its classes, here with C's name as well:
``rdma_cm_event`` (CmEvent), ``rdma_event_channel`` (EventChannel), ``rdma_route`` (Route), ``rdma_ud_param`` (UdParam),
``sockaddr_ib`` (SockAddrIB), ``ibv_ah`` (AH), ``ibv_async_event`` (AsyncEvent),
``ibv_comp_channel`` (CompChannel), ``ibv_context`` (Context), ``ibv_cq`` (CQ), ``ibv_cq_ex`` (CQEX),
``ibv_cq_moderation_caps`` (CQModerationCaps), ``ibv_data_buf`` (DataBuffer), ``ibv_device`` (Device),
``ibv_device_attr`` (DeviceAttr), ``ibv_device_attr_ex`` (DeviceAttrEx), ``ibv_ece`` (Ece), ``ibv_gid`` (Gid),
``ibv_gid_entry`` (GidEntry), ``ibv_grh`` (GRH), ``ibv_mr`` (MR), ``ibv_mw`` (MW), ``ibv_odp_caps`` (ODPCaps),
``ibv_packet_pacing_caps`` (PacketPacingCaps), ``ibv_path_data`` (PathData), ``ibv_path_record`` (PathRecord),
``ibv_pci_atomic_caps`` (PCIAtomicCaps), ``ibv_pd`` (PD), ``ibv_poll_cq_attr`` (PollCqAttr), ``ibv_port_attr`` (Port),
``ibv_qp`` (QP), ``ibv_qp_ex`` (QPEx), ``ibv_qp_open_attr`` (QPOpenAttr), ``ibv_rss_caps`` (RSSCaps),
``ibv_sa_path_rec`` (PathRecord), ``ibv_srq`` (SRQ), ``ibv_tm_caps`` (TMCaps), ``ibv_tso_caps`` (TSOCaps), ``ibv_wc``
(WC), ``ibv_xrcd`` (XRCD). ``rdma_cm_id`` is a CmId whose ``verbs``, ``pd``, ``qp``, ``srq``, completion queues and
their channels, and ``event`` are None where C's are NULL: a CmId raises CmStateError there.

docs/porting.md is a guide.
"""

from typing import TYPE_CHECKING

from rdmacm.cma import calls, constants, extended, ibverbs, refused, rsockets, structures, verbs
from rdmacm.cma.calls import *  # noqa: F403
from rdmacm.cma.constants import *  # noqa: F403
from rdmacm.cma.extended import *  # noqa: F403
from rdmacm.cma.ibverbs import *  # noqa: F403
from rdmacm.cma.refused import *  # noqa: F403
from rdmacm.cma.rsockets import *  # noqa: F403
from rdmacm.cma.structures import *  # noqa: F403
from rdmacm.cma.verbs import *  # noqa: F403

if not TYPE_CHECKING:  # type checkers see the imports above
    __all__ = calls.__all__ + verbs.__all__ + ibverbs.__all__ + extended.__all__ + refused.__all__ + constants.__all__
    __all__ += structures.__all__ + rsockets.__all__


def __dir__() -> list[str]:
    """The names of pydoc's page, without C's names of the package's own classes: their texts would fill 4000 lines."""
    second = {name for name in vars(structures)["__all__"] if getattr(structures, name).__name__ != name}
    second.add("rdma_cm_id")  # of whose page a few lines are its own
    return sorted(globals().keys() - second)
