"""The parameters, addresses and path of a connection, read from its REQ or SIDR_REQ."""

from __future__ import annotations

from functools import lru_cache

from rdmacm.address import Gid
from rdmacm.proto.cm.messages import REQ, SIDR_REQ, Path
from rdmacm.proto.cm.private_data import HEADER_SIZE, IP_VERSIONS, PrivateDataHeader
from rdmacm.proto.sa import PathRecord
from rdmacm.provider.connparam import ConnParam, UdParam
from rdmacm.verbs.attr import AHAttr
from rdmacm.verbs.enums import Mtu

#: The application, the listener and the link ask for the same one.
_unpacked = lru_cache(4)(PrivateDataHeader.unpack)


def header_of(request: REQ | SIDR_REQ) -> PrivateDataHeader | None:
    """The rdma_cm header in the private data, with the IP addresses; None for a request between AF_IB addresses."""
    data = request.private_data
    if len(data) < HEADER_SIZE or data[1] >> 4 not in IP_VERSIONS:
        return None
    return _unpacked(data)


def param_of_request(request: REQ | SIDR_REQ, has_header: bool) -> ConnParam | UdParam:
    """The parameters of CONNECT_REQUEST: private data without the header, and depths as seen from this side."""
    user = request.private_data[HEADER_SIZE:] if has_header else request.private_data
    if isinstance(request, SIDR_REQ):
        return UdParam(user, AHAttr(), 0, 0)  # it does not say which queue pair asks
    return ConnParam(  # by position, which takes less time
        user,
        request.initiator_depth,
        request.responder_resources,
        int(request.end_to_end_flow_control),
        request.retry_count,
        request.rnr_retry_count,
        int(request.srq),
        request.local_qpn,
    )


def path_of_request(request: REQ | SIDR_REQ, sgid: Gid, dgid: Gid, mtu: Mtu) -> PathRecord:
    """The path back to the peer; ``mtu`` is for a SIDR_REQ, which does not have one."""
    if isinstance(request, SIDR_REQ):
        return PathRecord(dgid, sgid, request.service_id, hop_limit=64, mtu=mtu)
    primary = request.primary
    return PathRecord(
        dgid=dgid,
        sgid=sgid,
        service_id=request.service_id,
        flow_label=primary.flow_label,
        hop_limit=primary.hop_limit,
        traffic_class=primary.traffic_class,
        pkey=request.partition_key,
        sl=primary.sl,
        mtu=request.path_mtu,
        packet_life_time=max(0, primary.local_ack_timeout - 1),
    )


def alternate_of_request(request: REQ, alternate: Path) -> PathRecord:
    """The alternate path back to the peer; ``alternate`` is that of the REQ, or of a later LAP."""
    return PathRecord(
        dgid=alternate.local_gid,
        sgid=alternate.remote_gid,
        service_id=request.service_id,
        slid=alternate.remote_lid,
        dlid=alternate.local_lid,
        flow_label=alternate.flow_label,
        hop_limit=alternate.hop_limit,
        traffic_class=alternate.traffic_class,
        pkey=request.partition_key,
        sl=alternate.sl,
        mtu=request.path_mtu,
        rate=alternate.packet_rate,
        packet_life_time=max(0, alternate.local_ack_timeout - 1),
    )
