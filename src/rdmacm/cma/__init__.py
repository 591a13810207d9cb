"""The functions and constants of librdmacm under their C names, so that an example in C ports line by line.

Each function names its manual page, which says what it does; the docstring has the differences only. The arguments are
in the page's order. It raises an :class:`~rdmacm.errors.RdmaError` where C returns -1 and sets errno, and returns what
C fills in through a pointer. Ports are in host order; C's ``rdma_get_src_port`` returns network order. Private data and
option values are bytes, without an argument for their length.

:mod:`~rdmacm.cma.calls` has ``rdma/rdma_cma.h``; :mod:`~rdmacm.cma.verbs` has queue pairs, endpoints and
``rdma/rdma_verbs.h``; :mod:`~rdmacm.cma.constants` has the constants of both and of ``infiniband/verbs.h``.
"""

from rdmacm.cma.calls import *  # noqa: F403
from rdmacm.cma.constants import *  # noqa: F403
from rdmacm.cma.verbs import *  # noqa: F403
