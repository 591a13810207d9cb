"""A call for each feature of a provider, and what it answers where the feature is absent."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cached_property
from mmap import mmap

from rdmacm import CmId, EventChannel, PortSpace, RaiFlag, RdmaError
from rdmacm.address import SockAddr
from rdmacm.capabilities import DEVICE, NO, YES, Capabilities, Feature
from rdmacm.cma import refused
from rdmacm.errors import CmWouldBlockError
from rdmacm.provider import Provider
from rdmacm.provider.connparam import Ece
from rdmacm.verbs import (
    CQ,
    CQEX,
    MR,
    MW,
    PD,
    QP,
    SRQ,
    XRCD,
    AccessFlag,
    Context,
    CqAttrFlag,
    CqInitAttrEx,
    CqInitAttrMask,
    CqWcFlag,
    DeviceCapFlag,
    DmaBufMR,
    MWType,
    QPCap,
    QPEx,
    QPInitAttrEx,
    QPType,
    SendOpsFlag,
    SrqInitAttr,
    SrqInitAttrEx,
    SRQType,
)

__all__ = ["CALLS", "OF_IDS", "Place", "check"]

_F = Feature
_ALL_ACCESS = AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_WRITE | AccessFlag.REMOTE_ATOMIC
_REPLIES_TO_SA = (errno.ENODATA, errno.ENOENT)


class Place:
    """Where calls are tried: a device, and for ids the provider, an address of the device, and a peer's."""

    def __init__(
        self,
        context: Context,
        provider: Provider | None = None,
        address: SockAddr = ("", 0),
        peer: SockAddr = ("", 0),
        spaces: tuple[PortSpace, PortSpace] = (PortSpace.TCP, PortSpace.UDP),
    ) -> None:
        self.context, self.provider, self.address, self.peer = context, provider, address, peer
        self.space, self.datagrams = spaces
        self.stack = ExitStack()

    @cached_property
    def pd(self) -> PD:
        return self.stack.enter_context(PD(self.context))

    @cached_property
    def cq(self) -> CQ:
        return self.stack.enter_context(CQ(self.context, 4))

    @cached_property
    def qp(self) -> QP:
        return self.make_qp(QPType.RC)

    def make_qp(self, qp_type: QPType) -> QP:
        xrcd = None
        if qp_type is QPType.XRC_RECV and self.context.backend.attr.device_cap_flags & DeviceCapFlag.XRC:
            xrcd = self.stack.enter_context(XRCD(self.context))
        attr = QPInitAttrEx(qp_type, scq=self.cq, rcq=self.cq, cap=QPCap(1, 1, 1, 1, 0), xrcd=xrcd)
        return self.stack.enter_context(QP(self.context if xrcd is not None else self.pd, attr))

    def make_extended(self, operations: SendOpsFlag) -> QP:
        attr = QPInitAttrEx(scq=self.cq, rcq=self.cq, cap=QPCap(1, 1, 1, 1, 0), send_ops_flags=operations)
        return self.stack.enter_context(QPEx(self.pd, attr))

    def register(self, access: AccessFlag) -> MR:
        return self.stack.enter_context(MR(self.pd, mmap(-1, 4096), AccessFlag.LOCAL_WRITE | access))

    def id(self, space: PortSpace | None = None) -> CmId:
        """A synchronous id that is bound to the address."""
        cmid = self.stack.enter_context(CmId(None, space or self.space, provider=self.provider))
        cmid.bind_addr(self.address)
        return cmid

    def resolved(self) -> CmId:
        cmid = self.id()
        cmid.resolve_addr(self.peer)
        return cmid


def _loopback(place: Place) -> None:
    cmid = place.stack.enter_context(CmId(provider=place.provider))
    cmid.resolve_addr(("127.0.0.1", 7471))


def _multicast(place: Place) -> None:
    place.id(place.datagrams).join_multicast(("239.7.7.7", 0))


def _services(place: Place) -> None:
    try:
        place.id().resolve_addrinfo(None, "storage", flags=RaiFlag.SA)
    except RdmaError as error:
        if error.errno not in _REPLIES_TO_SA:
            raise


def _migrate(place: Place) -> None:
    cmid = place.stack.enter_context(CmId(place.stack.enter_context(EventChannel(place.provider)), place.space))
    cmid.migrate(place.stack.enter_context(EventChannel(place.provider)))


def _capture(place: Place) -> None:
    assert place.provider is not None
    place.provider.tap = lambda *_: None
    place.provider.tap = None


def _event(place: Place) -> None:
    with suppress(CmWouldBlockError):
        place.context.get_async_event(0)


def _refused(name: str) -> Callable[[Place], object]:
    """A call of ``rdmacm.cma`` that no provider has."""
    call = getattr(refused, name)

    def try_it(place: Place) -> None:
        given = {"cmd_fd": 0, "context": place.context}
        wanted = call.__code__.co_varnames[: call.__code__.co_argcount]
        if "pd" in wanted:
            given["pd"] = place.pd
        if "cq" in wanted:
            given["cq"] = place.cq
        if "qp" in wanted:
            given["qp"] = place.qp
        if "srq" in wanted:
            given["srq"] = place.stack.enter_context(SRQ(place.pd, SrqInitAttr()))
        call(*[given.get(each, Ece(0)) for each in wanted])

    return try_it


#: The features of ids, which take a provider.
OF_IDS: dict[Feature, Callable[[Place], object]] = {
    _F.LOOPBACK_ADDRESSES: _loopback,
    _F.MULTICAST: _multicast,
    _F.ALTERNATE_PATHS: lambda place: place.resolved().resolve_route(alternate=True),
    _F.SUBNET_ADMINISTRATOR: _services,
    _F.SERVICE_REGISTRATION: lambda place: place.id().register_service("storage"),
    _F.MIGRATION: _migrate,
    _F.CAPTURE: _capture,
}

#: A call that takes a feature. ``rdmacm mckey -l`` is that of MULTICAST_TO_OTHERS (tools/test_mckey.py).
CALLS: dict[Feature, Callable[[Place], object]] = OF_IDS | {
    _F.VERBS: lambda place: place.cq,
    **{Feature.of_type(each): lambda place, each=each: place.make_qp(each) for each in QPType},  # type: ignore[misc]
    _F.XRC: lambda place: place.stack.enter_context(XRCD(place.context)),
    _F.EXTENDED: lambda place: place.make_extended(SendOpsFlag.SEND),
    _F.ATOMICS: lambda place: place.register(_ALL_ACCESS),
    _F.ATOMIC_WRITE: lambda place: place.make_extended(SendOpsFlag.ATOMIC_WRITE),
    _F.FLUSH: lambda place: place.make_extended(SendOpsFlag.FLUSH),
    _F.MEMORY_WINDOWS: lambda place: place.stack.enter_context(MW(place.pd, MWType.TYPE_1)),
    _F.DMA_BUFS: lambda place: DmaBufMR(place.pd, 4096, AccessFlag.LOCAL_WRITE, 0),
    _F.ON_DEMAND: lambda place: place.register(AccessFlag.ON_DEMAND),
    _F.HUGETLB: lambda place: place.register(AccessFlag.HUGETLB),
    _F.ZERO_BASED: lambda place: place.register(AccessFlag.ZERO_BASED),
    _F.EVENTS: _event,
    _F.QP_ATTRIBUTES: lambda place: QP(place.pd, QPInitAttrEx(scq=place.cq, rcq=place.cq, create_flags=1)),
    _F.QP_ECE: _refused("ibv_query_ece"),
    _F.QP_RATE_LIMIT: _refused("ibv_modify_qp_rate_limit"),
    _F.COMPLETION_FIELDS: lambda place: CQEX(place.context, CqInitAttrEx(4, wc_flags=CqWcFlag.COMPLETION_TIMESTAMP)),
    _F.COMPLETION_MODERATION: _refused("ibv_modify_cq"),
    _F.IGNORED_OVERRUN: lambda place: CQEX(
        place.context, CqInitAttrEx(4, comp_mask=CqInitAttrMask.FLAGS, flags=CqAttrFlag.IGNORE_OVERRUN)
    ),
    _F.TAG_MATCHING: lambda place: SRQ(place.pd, SrqInitAttrEx(srq_type=SRQType.TM)),
    _F.PARENT_DOMAINS: _refused("ibv_alloc_parent_domain"),
    _F.THREAD_DOMAINS: _refused("ibv_alloc_td"),
    _F.CLOCK: lambda place: place.context.query_rt_values_ex(),
    _F.DEVICE_MEMORY: _refused("ibv_alloc_dm"),
    _F.EMPTY_REGIONS: _refused("ibv_alloc_null_mr"),
    _F.PAGING_ADVICE: _refused("ibv_advise_mr"),
    _F.FLOW_STEERING: _refused("ibv_create_flow"),
    _F.FLOW_COUNTERS: _refused("ibv_create_counters"),
    _F.RECEIVE_SCALING: _refused("ibv_create_wq"),
    _F.SHARED_OBJECTS: _refused("ibv_import_pd"),
}


def check(place: Place, feature: Feature, known: Capabilities) -> None:
    """Fail unless the call for a feature does what is said of the provider."""
    said, text = known.support(feature), ""
    with place.stack:
        try:
            CALLS[feature](place)
        except RdmaError as error:
            text = str(error)
            if error.errno != errno.EOPNOTSUPP and (said, error.errno) != (DEVICE, errno.ENOSYS):  # of the kernel
                raise
    if said == YES:
        assert not text, text
    elif said == NO:
        lacking = [feature, *([_F.VERBS] if _F.VERBS in known.lacks else [])]
        sentences = [f"no provider has {feature.text}"]
        sentences += [f"{who} has no {each.text}" for each in lacking for who in (known, "the device")]
        assert any(each in text for each in sentences), (feature, text)
    else:
        assert said == DEVICE
        assert not text or f"has no {feature.text}" in text, text
