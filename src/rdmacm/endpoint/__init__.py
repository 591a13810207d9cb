"""Connections and listeners that need no knowledge of queues: :func:`rdmacm.connect` and :func:`rdmacm.listen`."""

from rdmacm.endpoint.connection_state import Message
from rdmacm.endpoint.memory import Region, RemoteRegion
from rdmacm.endpoint.sync import Connection, Listener, Request, connect, listen

__all__ = ["Connection", "Listener", "Message", "Region", "RemoteRegion", "Request", "connect", "listen"]
