"""Subnet administration (InfiniBand Architecture 15): records, what is asked about them and how."""

from rdmacm.proto.sa.records import PATH_FLAGS, PathData, PathRecord

__all__ = ["PATH_FLAGS", "PathData", "PathRecord"]
