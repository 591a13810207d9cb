"""rdma_getaddrinfo(3): names and services to RDMA addresses.

``info`` has the hints and the results, ``checks`` refuses bad hints, ``names`` asks the resolver, ``entries`` builds a
result with the route the host would use, ``infiniband`` adds the paths that ibacm and the subnet administrator know,
and ``lookup`` puts them together.
"""

from rdmacm.addrinfo.info import AddrInfo, HintFields, make_hints
from rdmacm.addrinfo.lookup import from_services, getaddrinfo, needs_lookup
from rdmacm.addrinfo.names import Resolver

__all__ = ["AddrInfo", "HintFields", "Resolver", "from_services", "getaddrinfo", "make_hints", "needs_lookup"]
