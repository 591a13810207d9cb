"""Wire constants against the specification's tables, which are copied here independently of the sources."""

from __future__ import annotations

from enum import IntEnum

from rdmacm.proto.cm.codes import (
    ApStatus,
    AttributeId,
    FailoverAccepted,
    RejectReason,
    SidrStatus,
    TransportServiceType,
)
from rdmacm.proto.mad import MadStatus, Method, MgmtClass
from rdmacm.proto.sa.attributes import Attribute, Selector
from rdmacm.proto.sa.mad import SaMethod, SaStatus
from rdmacm.proto.sa.query import MemberMask, NodeMask, PathMask, ServiceMask
from rdmacm.proto.sa.records import RATE_GBPS
from rdmacm.proto.sa.rmpp import RmppFlag, RmppStatus, RmppType
from rdmacm.proto.sa.subnet import JoinState, NodeInfoType
from support.rows import for_each

SPECIFIED = {
    # Connection manager: InfiniBand Architecture 12.6 and 12.11.
    AttributeId: """
        REQ=0x10 MRA=0x11 REJ=0x12 REP=0x13 RTU=0x14 DREQ=0x15 DREP=0x16 SIDR_REQ=0x17 SIDR_REP=0x18 LAP=0x19
        APR=0x1a
    """,
    TransportServiceType: """
        RC=0x0 UC=0x1 RD=0x2 EXTENDED=0x3
    """,
    RejectReason: """
        NO_QP=0x1 NO_EEC=0x2 NO_RESOURCES=0x3 TIMEOUT=0x4 UNSUPPORTED=0x5 INVALID_COMM_ID=0x6
        INVALID_COMM_INSTANCE=0x7 INVALID_SERVICE_ID=0x8 INVALID_TRANSPORT_TYPE=0x9 STALE_CONN=0xa RDC_NOT_EXIST=0xb
        INVALID_GID=0xc INVALID_LID=0xd INVALID_SL=0xe INVALID_TRAFFIC_CLASS=0xf INVALID_HOP_LIMIT=0x10
        INVALID_PACKET_RATE=0x11 INVALID_ALT_GID=0x12 INVALID_ALT_LID=0x13 INVALID_ALT_SL=0x14
        INVALID_ALT_TRAFFIC_CLASS=0x15 INVALID_ALT_HOP_LIMIT=0x16 INVALID_ALT_PACKET_RATE=0x17 PORT_CM_REDIRECT=0x18
        PORT_REDIRECT=0x19 INVALID_MTU=0x1a INSUFFICIENT_RESP_RESOURCES=0x1b CONSUMER_DEFINED=0x1c
        INVALID_RNR_RETRY=0x1d DUPLICATE_LOCAL_COMM_ID=0x1e INVALID_CLASS_VERSION=0x1f INVALID_FLOW_LABEL=0x20
        INVALID_ALT_FLOW_LABEL=0x21 VENDOR_OPTION_NOT_SUPPORTED=0x23
    """,
    SidrStatus: """
        SUCCESS=0x0 UNSUPPORTED=0x1 REJECT=0x2 NO_QP=0x3 REDIRECT=0x4 UNSUPPORTED_VERSION=0x5
    """,
    ApStatus: """
        SUCCESS=0x0 INVALID_COMM_ID=0x1 UNSUPPORTED=0x2 REJECT=0x3 REDIRECT=0x4 IS_CURRENT=0x5 INVALID_QPN_EECN=0x6
        INVALID_LID=0x7 INVALID_GID=0x8 INVALID_FLOW_LABEL=0x9 INVALID_TRAFFIC_CLASS=0xa INVALID_HOP_LIMIT=0xb
        INVALID_PACKET_RATE=0xc INVALID_SL=0xd
    """,
    FailoverAccepted: """
        ACCEPTED=0x0 UNSUPPORTED=0x1 REJECTED=0x2
    """,
    # Management datagrams: 13.4.
    MgmtClass: """
        SUBN_LID_ROUTED=0x1 SUBN_ADM=0x3 PERF=0x4 BM=0x5 DEV_MGT=0x6 COM_MGT=0x7 SNMP=0x8 DEV_ADM=0x10
        CONGESTION=0x21 SUBN_DIRECTED_ROUTE=0x81
    """,
    Method: """
        GET=0x1 SET=0x2 SEND=0x3 TRAP=0x5 REPORT=0x6 TRAP_REPRESS=0x7 GET_RESP=0x81 REPORT_RESP=0x86
    """,
    MadStatus: """
        OK=0x0 BUSY=0x1 REDIRECT=0x2 BAD_VERSION=0x4 UNSUPPORTED_METHOD=0x8 UNSUPPORTED_METHOD_ATTRIBUTE=0xc
        INVALID_ATTRIBUTE_VALUE=0x1c
    """,
    # Subnet administration: 13.6.2 (RMPP) and 15.2.
    Attribute: """
        CLASS_PORT_INFO=0x1 NOTICE=0x2 INFORM_INFO=0x3 NODE_RECORD=0x11 PORT_INFO_RECORD=0x12
        SL_TO_VL_MAPPING_TABLE_RECORD=0x13 SWITCH_INFO_RECORD=0x14 LINEAR_FORWARDING_TABLE_RECORD=0x15
        RANDOM_FORWARDING_TABLE_RECORD=0x16 MULTICAST_FORWARDING_TABLE_RECORD=0x17 SM_INFO_RECORD=0x18
        LINK_RECORD=0x20 GUID_INFO_RECORD=0x30 SERVICE_RECORD=0x31 PKEY_TABLE_RECORD=0x33 PATH_RECORD=0x35
        VL_ARBITRATION_TABLE_RECORD=0x36 MC_MEMBER_RECORD=0x38 TRACE_RECORD=0x39 MULTI_PATH_RECORD=0x3a
        SERVICE_ASSOCIATION_RECORD=0x3b INFORM_INFO_RECORD=0xf3
    """,
    SaMethod: """
        GET=0x1 SET=0x2 REPORT=0x6 GET_TABLE=0x12 GET_TRACE_TABLE=0x13 GET_MULTI=0x14 DELETE=0x15 GET_RESP=0x81
        REPORT_RESP=0x86 GET_TABLE_RESP=0x92 GET_MULTI_RESP=0x94 DELETE_RESP=0x95
    """,
    SaStatus: """
        OK=0x0 BUSY=0x1 REDIRECT=0x2 BAD_VERSION=0x4 UNSUPPORTED_METHOD=0x8 UNSUPPORTED_METHOD_ATTRIBUTE=0xc
        INVALID_ATTRIBUTE_VALUE=0x1c NO_RESOURCES=0x100 REQ_INVALID=0x200 NO_RECORDS=0x300 TOO_MANY_RECORDS=0x400
        REQ_INVALID_GID=0x500 REQ_INSUFFICIENT_COMPONENTS=0x600 REQ_DENIED=0x700 PRIORITY_SUGGESTED=0x800
    """,
    Selector: """
        GREATER=0x0 LESS=0x1 EXACTLY=0x2 LARGEST=0x3
    """,
    PathMask: """
        SERVICE_ID=0x3 DGID=0x4 SGID=0x8 DLID=0x10 SLID=0x20 RAW_TRAFFIC=0x40 FLOW_LABEL=0x100 HOP_LIMIT=0x200
        TRAFFIC_CLASS=0x400 REVERSIBLE=0x800 NUMB_PATH=0x1000 PKEY=0x2000 QOS_CLASS=0x4000 SL=0x8000
        MTU_SELECTOR=0x10000 MTU=0x20000 RATE_SELECTOR=0x40000 RATE=0x80000 PACKET_LIFE_TIME_SELECTOR=0x100000
        PACKET_LIFE_TIME=0x200000 PREFERENCE=0x400000
    """,
    ServiceMask: """
        SERVICE_ID=0x1 SERVICE_GID=0x2 SERVICE_PKEY=0x4 SERVICE_LEASE=0x10 SERVICE_KEY=0x20 SERVICE_NAME=0x40
        SERVICE_DATA8=0x7fff80 SERVICE_DATA16=0x7f800000 SERVICE_DATA32=0x780000000 SERVICE_DATA64=0x1800000000
    """,
    MemberMask: """
        MGID=0x1 PORT_GID=0x2 Q_KEY=0x4 MLID=0x8 MTU_SELECTOR=0x10 MTU=0x20 TRAFFIC_CLASS=0x40 PKEY=0x80
        RATE_SELECTOR=0x100 RATE=0x200 PACKET_LIFE_TIME_SELECTOR=0x400 PACKET_LIFE_TIME=0x800 SL=0x1000
        FLOW_LABEL=0x2000 HOP_LIMIT=0x4000 SCOPE=0x8000 JOIN_STATE=0x10000 PROXY_JOIN=0x20000
    """,
    NodeMask: """
        LID=0x1 BASE_VERSION=0x4 CLASS_VERSION=0x8 NODE_TYPE=0x10 NUM_PORTS=0x20 SYSTEM_IMAGE_GUID=0x40
        NODE_GUID=0x80 PORT_GUID=0x100 PARTITION_CAP=0x200 DEVICE_ID=0x400 REVISION=0x800 LOCAL_PORT_NUM=0x1000
        VENDOR_ID=0x2000 NODE_DESCRIPTION=0x4000
    """,
    RmppType: """
        NONE=0x0 DATA=0x1 ACK=0x2 STOP=0x3 ABORT=0x4
    """,
    RmppFlag: """
        ACTIVE=0x1 FIRST=0x2 LAST=0x4
    """,
    RmppStatus: """
        OK=0x0 NO_RESOURCES=0x1 TOTAL_TIME_TOO_LONG=0x76 BAD_LENGTH=0x77 BAD_SEGMENT=0x78 BAD_TYPE=0x79
        WINDOW_TOO_SMALL=0x7a SEGMENT_TOO_BIG=0x7b ILLEGAL_STATUS=0x7c UNSUPPORTED_VERSION=0x7d
        TOO_MANY_RETRIES=0x7e UNSPECIFIED=0x7f
    """,
    NodeInfoType: """
        CHANNEL_ADAPTER=0x1 SWITCH=0x2 ROUTER=0x3
    """,
    JoinState: """
        FULL_MEMBER=0x1 NON_MEMBER=0x2 SEND_ONLY_NON_MEMBER=0x4 SEND_ONLY_FULL_MEMBER=0x8
    """,
}

#: ``enum ibv_rate`` in Gb/s, from 2: InfiniBand Architecture 15.2.5.16.
RATES = [2.5, 10, 30, 5, 20, 40, 60, 80, 120, 14, 56, 112, 168, 25, 100, 200, 300, 28, 50, 400, 600, 800]


@for_each(("kind", "table"), SPECIFIED.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_enumerations_have_the_values_of_the_specification(kind: type[IntEnum], table: str) -> None:
    specified = {name: int(value, 16) for name, value in (entry.split("=") for entry in table.split())}
    assert {name: int(member) for name, member in kind.__members__.items()} == specified


def test_rate_codes_have_the_specified_gigabits() -> None:
    assert dict(enumerate(RATES, start=2)) == RATE_GBPS
