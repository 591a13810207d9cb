"""The manual pages' names: an example in C ports line by line.

Each function is thin: arguments in the page's order, an exception where C returns -1 and sets errno, a return value
where C fills an out-parameter. Ports come in host order, where C's ``rdma_get_src_port`` gives network order. Private
data and option values are bytes, which know their own length.

:mod:`~rdmacm.cma.calls` has ``rdma_cma.h``, :mod:`~rdmacm.cma.verbs` queue pairs, endpoints and ``rdma_verbs.h``,
:mod:`~rdmacm.cma.constants` the constants of both and of ``infiniband/verbs.h``.
"""

from rdmacm.cma.calls import *  # noqa: F403
from rdmacm.cma.constants import *  # noqa: F403
from rdmacm.cma.verbs import *  # noqa: F403
