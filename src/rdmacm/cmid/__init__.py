"""Connection identifiers, event channels and events: rdma_create_id(3) and all that is done with one id."""

from rdmacm.cmid.ep import create_ep
from rdmacm.cmid.identifier import CmEvent, CmId, EventChannel, event_str
from rdmacm.cmid.resolving import Route
from rdmacm.cmid.services import Service

__all__ = ["CmEvent", "CmId", "EventChannel", "Route", "Service", "create_ep", "event_str"]
