"""Queue pairs, completion queues, memory regions and devices, with the names of pyverbs and the field names of C.

This page lists the public names; ``pydoc rdmacm.verbs.QP`` or ``help(rdmacm.verbs.QP)`` describes one. docs/verbs.md is
the guide. An object is closed by ``close()`` or at the end of its ``with`` block, after those that are made of it.

Objects
    Context                  an open device: rdmacm.open_device(), or ``id.verbs``
    PD, MR, DmaBufMR, MW     a protection domain, a memory region (of a dma-buf), a memory window
    CQ, CompChannel          a completion queue, a completion channel
    QP, SRQ                  a queue pair, a shared receive queue
    XRCD, OpenedQP           an XRC domain; another handle of an XRC_RECV, ibv_open_qp(3)
    QPEx, CQEX               a QP that posts by calls, ibv_wr_post(3); a CQ that is read by fields
    AH                       an address handle
    GRH, init_ah_from_wc     the header before a received datagram; the address vector of its sender
    AsyncEvent               an asynchronous event of a device: Context.get_async_event()

Work
    SendWR, RecvWR, SGE      work requests, and their scatter/gather elements
    MWBind, MWBindInfo       what to bind a memory window to: QP.bind_mw(), SendWR.set_bind_wr()
    inc_rkey                 the next key of a memory window
    WC                       a work completion: CQ.poll()
    Buffer, AddressHandle    what can be registered or sent: bytes, bytearray, numpy arrays ...; what has an AHAttr
    MemoryRegion, MemoryWindow              what a bind takes: MR, MW

Attributes
    QPInitAttr, QPCap        what a QP is created with
    QPInitAttrEx, DataBuffer, CqInitAttrEx, PollCqAttr
                             of QPEx and CQEX
    QPAttr, QPOpenAttr       ibv_modify_qp(3), ibv_query_qp(3); ibv_open_qp(3)
    SrqInitAttr, SrqAttr     ibv_create_srq(3), ibv_modify_srq(3), ibv_query_srq(3)
    SrqInitAttrEx, XRCDInitAttr             ibv_create_srq_ex(3), ibv_open_xrcd(3)
    AHAttr, GlobalRoute      an address vector and its global route, ibv_create_ah(3)
    DeviceAttr, UNLIMITED    ibv_query_device(3); the value of a limit that does not exist
    DeviceAttrEx, ODPCaps, TSOCaps, RSSCaps, PacketPacingCaps, TMCaps, CQModerationCaps, PCIAtomicCaps
                             ibv_query_device_ex(3)
    Device, Port, GidEntry   a device, its ports and their GIDs, as they were at one moment

Enumerations, with C's values
    AccessFlag               rights of a memory region or a queue pair
    AtomicCap, DeviceCapFlag                fields of DeviceAttr
    EventType, GidType       of AsyncEvent and of GidEntry
    MWType, ReregMRFlag      kinds of MW; what MR.rereg() changes
    LinkLayer, Mtu, PortState, PortFlag, PortCapFlag, PortCapFlag2
                             fields of Port
    NodeType, TransportType  fields of Device
    QPType, QPState, MigState               fields of QPInitAttr and QPAttr
    QPAttrMask, SrqAttrMask  which attributes modify() sets
    SRQType, SrqInitAttrMask, XRCDInitAttrMask   fields of SrqInitAttrEx and XRCDInitAttr
    SendOpsFlag, QPInitAttrMask, QPOpenAttrMask, CqWcFlag, CqInitAttrMask, CqAttrFlag
                             fields of QPInitAttrEx, QPOpenAttr and CqInitAttrEx
    WROpcode, SendFlag, PlacementType, SelectivityLevel
                             fields of SendWR
    WCStatus, WCOpcode, WCFlag              fields of WC

rdmacm.verbs.backend has the interfaces for other providers. The other modules of this package are internal.
"""

# "X as X" exports a name to type checkers. Without __all__, help() shows the list above instead of every class.
from rdmacm.proto.roce.grh import GRH as GRH
from rdmacm.verbs.ah import AH as AH
from rdmacm.verbs.ah import init_ah_from_wc as init_ah_from_wc
from rdmacm.verbs.async_event import AsyncEvent as AsyncEvent
from rdmacm.verbs.attr import UNLIMITED as UNLIMITED
from rdmacm.verbs.attr import AHAttr as AHAttr
from rdmacm.verbs.attr import DeviceAttr as DeviceAttr
from rdmacm.verbs.attr import GlobalRoute as GlobalRoute
from rdmacm.verbs.attr import QPAttr as QPAttr
from rdmacm.verbs.attr import QPCap as QPCap
from rdmacm.verbs.attr import SrqAttr as SrqAttr
from rdmacm.verbs.attr import SrqInitAttr as SrqInitAttr
from rdmacm.verbs.attrex import CQModerationCaps as CQModerationCaps
from rdmacm.verbs.attrex import DeviceAttrEx as DeviceAttrEx
from rdmacm.verbs.attrex import ODPCaps as ODPCaps
from rdmacm.verbs.attrex import PacketPacingCaps as PacketPacingCaps
from rdmacm.verbs.attrex import PCIAtomicCaps as PCIAtomicCaps
from rdmacm.verbs.attrex import RSSCaps as RSSCaps
from rdmacm.verbs.attrex import TMCaps as TMCaps
from rdmacm.verbs.attrex import TSOCaps as TSOCaps
from rdmacm.verbs.buffers import Buffer as Buffer
from rdmacm.verbs.cq import CQ as CQ
from rdmacm.verbs.cq import CompChannel as CompChannel
from rdmacm.verbs.cqex import CQEX as CQEX
from rdmacm.verbs.cqex import CqInitAttrEx as CqInitAttrEx
from rdmacm.verbs.cqex import PollCqAttr as PollCqAttr
from rdmacm.verbs.device import Context as Context
from rdmacm.verbs.device import Device as Device
from rdmacm.verbs.device import GidEntry as GidEntry
from rdmacm.verbs.device import Port as Port
from rdmacm.verbs.enums import WC as WC
from rdmacm.verbs.enums import AccessFlag as AccessFlag
from rdmacm.verbs.enums import AtomicCap as AtomicCap
from rdmacm.verbs.enums import CqAttrFlag as CqAttrFlag
from rdmacm.verbs.enums import CqInitAttrMask as CqInitAttrMask
from rdmacm.verbs.enums import CqWcFlag as CqWcFlag
from rdmacm.verbs.enums import DeviceCapFlag as DeviceCapFlag
from rdmacm.verbs.enums import EventType as EventType
from rdmacm.verbs.enums import GidType as GidType
from rdmacm.verbs.enums import LinkLayer as LinkLayer
from rdmacm.verbs.enums import MigState as MigState
from rdmacm.verbs.enums import Mtu as Mtu
from rdmacm.verbs.enums import MWType as MWType
from rdmacm.verbs.enums import NodeType as NodeType
from rdmacm.verbs.enums import PlacementType as PlacementType
from rdmacm.verbs.enums import PortCapFlag as PortCapFlag
from rdmacm.verbs.enums import PortCapFlag2 as PortCapFlag2
from rdmacm.verbs.enums import PortFlag as PortFlag
from rdmacm.verbs.enums import PortState as PortState
from rdmacm.verbs.enums import QPAttrMask as QPAttrMask
from rdmacm.verbs.enums import QPInitAttrMask as QPInitAttrMask
from rdmacm.verbs.enums import QPOpenAttrMask as QPOpenAttrMask
from rdmacm.verbs.enums import QPState as QPState
from rdmacm.verbs.enums import QPType as QPType
from rdmacm.verbs.enums import ReregMRFlag as ReregMRFlag
from rdmacm.verbs.enums import SelectivityLevel as SelectivityLevel
from rdmacm.verbs.enums import SendFlag as SendFlag
from rdmacm.verbs.enums import SendOpsFlag as SendOpsFlag
from rdmacm.verbs.enums import SrqAttrMask as SrqAttrMask
from rdmacm.verbs.enums import SrqInitAttrMask as SrqInitAttrMask
from rdmacm.verbs.enums import SRQType as SRQType
from rdmacm.verbs.enums import TransportType as TransportType
from rdmacm.verbs.enums import WCFlag as WCFlag
from rdmacm.verbs.enums import WCOpcode as WCOpcode
from rdmacm.verbs.enums import WCStatus as WCStatus
from rdmacm.verbs.enums import WROpcode as WROpcode
from rdmacm.verbs.enums import XRCDInitAttrMask as XRCDInitAttrMask
from rdmacm.verbs.mw import MW as MW
from rdmacm.verbs.pd import MR as MR
from rdmacm.verbs.pd import PD as PD
from rdmacm.verbs.pd import DmaBufMR as DmaBufMR
from rdmacm.verbs.qp import QP as QP
from rdmacm.verbs.qp import QPInitAttr as QPInitAttr
from rdmacm.verbs.qp import QPInitAttrEx as QPInitAttrEx
from rdmacm.verbs.qpex import DataBuffer as DataBuffer
from rdmacm.verbs.qpex import QPEx as QPEx
from rdmacm.verbs.qpopen import OpenedQP as OpenedQP
from rdmacm.verbs.qpopen import QPOpenAttr as QPOpenAttr
from rdmacm.verbs.srq import SRQ as SRQ
from rdmacm.verbs.srq import SrqInitAttrEx as SrqInitAttrEx
from rdmacm.verbs.wr import SGE as SGE
from rdmacm.verbs.wr import AddressHandle as AddressHandle
from rdmacm.verbs.wr import MemoryRegion as MemoryRegion
from rdmacm.verbs.wr import MemoryWindow as MemoryWindow
from rdmacm.verbs.wr import MWBind as MWBind
from rdmacm.verbs.wr import MWBindInfo as MWBindInfo
from rdmacm.verbs.wr import RecvWR as RecvWR
from rdmacm.verbs.wr import SendWR as SendWR
from rdmacm.verbs.wr import inc_rkey as inc_rkey
from rdmacm.verbs.xrcd import XRCD as XRCD
from rdmacm.verbs.xrcd import XRCDInitAttr as XRCDInitAttr
