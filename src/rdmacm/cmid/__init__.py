"""The connection identifier: rdma_create_id(3) and everything that is done with one id."""

from rdmacm.cmid.connecting import CmId, create_ep
from rdmacm.cmid.resolving import Route

__all__ = ["CmId", "Route", "create_ep"]
