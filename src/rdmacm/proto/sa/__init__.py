"""Subnet administration (SA, InfiniBand Architecture 15): records, queries and the protocol."""

from rdmacm.proto.sa.records import PATH_FLAGS, PathData, PathRecord

__all__ = ["PATH_FLAGS", "PathData", "PathRecord"]
