"""What can a provider do?

Each kind of device has a :class:`Capabilities`: the software devices (of simulated hosts, too), InfiniBand ports
without a driver, the kernel's devices, and these without libibverbs. It says of each :class:`Feature` whether the
provider has it, lacks it and why, or leaves that to the device: the kernel's drivers differ, and are asked by the call.
``docs/parity.md`` has all of this as a table, which ``dev.py tables`` makes.

A call that needs a feature asks :meth:`Capabilities.require`, and the answer of a device goes through :func:`absent`.
So every such error is EOPNOTSUPP with the same sentence: who has no what, why, and what to try. A provider of one's own
declares an object of its own.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from rdmacm.enums import AccessFlag
from rdmacm.errors import RdmaError, cm_error

#: The answers of :meth:`Capabilities.support`.
YES, NO, DEVICE = "yes", "no", "device"


class Feature(Enum):
    """What a provider may lack: its name in a sentence, and what to try without it, if it is not another provider."""

    # -- ids
    LOOPBACK_ADDRESSES = "path to a loopback address"
    MULTICAST = "multicast groups"
    ALTERNATE_PATHS = "alternate paths"
    SUBNET_ADMINISTRATOR = "subnet administrator", "RAI_DNS, or an id bound to an InfiniBand port"
    SERVICE_REGISTRATION = "registration of services"
    MIGRATION = "migration of ids"
    CAPTURE = "packets to capture"
    # -- queue pairs and memory
    VERBS = "queue pairs, memory or completions", "a queue pair of your own, named by ConnParam(qp_num=...)"
    QP_RC = "queue pairs of type RC"
    QP_UC = "queue pairs of type UC"
    QP_UD = "queue pairs of type UD"
    QP_XRC_SEND = "queue pairs of type XRC_SEND"
    QP_XRC_RECV = "queue pairs of type XRC_RECV"
    XRC = "XRC domains"
    EXTENDED = "extended queue pairs"
    ATOMICS = "atomics"
    ATOMIC_WRITE = "ATOMIC_WRITE"
    FLUSH = "FLUSH"
    MEMORY_WINDOWS = "memory windows"
    DMA_BUFS = "regions of dma-bufs"
    ON_DEMAND = (
        "on-demand paging",
        "access without ON_DEMAND; query_device_ex().odp_caps has what the device pages on demand",
    )
    HUGETLB = "regions of huge pages", "access without HUGETLB"
    ZERO_BASED = "zero-based regions", "access without ZERO_BASED"
    EVENTS = "asynchronous events"
    # -- of no provider
    QP_RAW_PACKET = "queue pairs of type RAW_PACKET", "RC, UC, UD or XRC"
    QP_DRIVER = "queue pairs of type DRIVER", "RC, UC, UD or XRC"
    QP_ATTRIBUTES = "attributes of queue pairs for raw packets"
    QP_ECE = "options that a queue pair tells its peer's"
    QP_RATE_LIMIT = "limits of a queue pair's rate"
    COMPLETION_FIELDS = "completions with time stamps, VLANs, flow tags or tags", "CqWcFlag.STANDARD"
    COMPLETION_MODERATION = "moderation of the events of completion queues"
    IGNORED_OVERRUN = "completion queues that overflow"
    TAG_MATCHING = "tag matching", "SRQType.BASIC or XRC"
    PARENT_DOMAINS = "parent domains"
    THREAD_DOMAINS = "thread domains"
    CLOCK = "clocks of devices"
    DEVICE_MEMORY = "memory of a device"
    EMPTY_REGIONS = "regions without memory"
    PAGING_ADVICE = "advice on paging"
    FLOW_STEERING = "flow steering"
    FLOW_COUNTERS = "counters of flows"
    RECEIVE_SCALING = "receive-side scaling"
    SHARED_OBJECTS = "objects that processes share"
    MULTICAST_TO_OTHERS = "multicast without the receivers of the sender's host"

    def __init__(self, text: str, hint: str = "") -> None:
        self.text = text
        self.hint = hint

    @classmethod
    def of_type(cls, qp_type: Enum) -> Feature:
        """Queue pairs of a :class:`rdmacm.verbs.QPType`."""
        return cls[f"QP_{qp_type.name}"]


_EVERY = list(Feature)
_FIRST_OF_NONE = _EVERY.index(Feature.QP_RAW_PACKET)
_NOT_RAW = "there are no queue pairs for raw packets"
#: What no provider has, and why where there is more to say.
NOWHERE: Mapping[Feature, str] = dict.fromkeys(_EVERY[_FIRST_OF_NONE:], "") | {
    Feature.IGNORED_OVERRUN: "a queue that overflows takes no more",
    Feature.PARENT_DOMAINS: "one lock guards a provider",
    Feature.THREAD_DOMAINS: "one lock guards a provider",
    Feature.DEVICE_MEMORY: "regions are of the process's memory, or of dma-bufs",
    Feature.FLOW_STEERING: _NOT_RAW,
    Feature.FLOW_COUNTERS: _NOT_RAW,
    Feature.RECEIVE_SCALING: _NOT_RAW,
}
#: What takes queue pairs, memory or completions.
_OF_VERBS = _EVERY[_EVERY.index(Feature.VERBS) + 1 : _FIRST_OF_NONE]


@dataclass(frozen=True, slots=True, eq=False)
class Capabilities:
    """What one kind of device can do, with the ids on it.

    - ``provider``: the name of its provider; ``part``: which of the provider's devices, in words.
    - ``use``: how a user gets it, for hints; empty where it is no advice.
    - ``transports``, ``families``: the names of its transports, and of the address families of its ids.
    - ``lacks``: what it has not, and why. ``by_device``: what the device decides. It has everything else, except
      what is :data:`NOWHERE`.
    - ``checks_tables``: whether its queue pairs refuse by themselves a port, P_Key or GID row that is not there.
    - ``locks_memory``: whether registered memory is locked in memory, and counts towards RLIMIT_MEMLOCK.
    """

    provider: str
    part: str
    use: str
    transports: tuple[str, ...]
    families: tuple[str, ...]
    lacks: Mapping[Feature, str]
    by_device: frozenset[Feature] = frozenset()
    checks_tables: bool = False
    locks_memory: bool = False

    def __str__(self) -> str:
        return f"the provider {self.provider} {self.part}".strip()

    def support(self, feature: Feature) -> str:
        """YES, NO, or DEVICE."""
        if feature in self.lacks or feature in NOWHERE:
            return NO
        return DEVICE if feature in self.by_device else YES

    def require(self, feature: Feature, step: str, address: str | None = None, hint: str = "") -> None:
        """Raise what :func:`absent` makes, unless the provider has a feature or its device may have it."""
        if self.support(feature) == NO:
            raise absent(feature, step, address, self, hint=hint)


def absent(
    feature: Feature,
    step: str,
    address: str | None = None,
    who: Capabilities | str = "",
    *,
    why: str = "",
    hint: str = "",
    code: int = errno.EOPNOTSUPP,
) -> RdmaError:
    """The error of a call that needs a feature which ``who`` lacks: a provider, or a device, in words.

    ``who`` does not matter for a feature that is :data:`NOWHERE`. ``why`` and ``hint`` replace what is known here;
    without any hint of the feature's own, it is the providers that have it.
    """
    text = f"no provider has {feature.text}" if feature in NOWHERE else f"{who} has no {feature.text}"
    why = why or NOWHERE.get(feature) or (who.lacks.get(feature, "") if isinstance(who, Capabilities) else "")
    others = [each for each in PROVIDERS if each.use and each is not who]
    found = [each.use for each in others if each.support(feature) == YES]
    if not found and isinstance(who, Capabilities):
        found = [f"{each.use}, where its device can" for each in others if each.support(feature) == DEVICE]
    hint = hint or feature.hint or " or ".join(found)
    return cm_error(code, f"{text}: {why}" if why else text, step, address, hint or None)


#: Access to a region that few devices have.
RARE_ACCESS = {
    AccessFlag.ON_DEMAND: Feature.ON_DEMAND,
    AccessFlag.HUGETLB: Feature.HUGETLB,
    AccessFlag.ZERO_BASED: Feature.ZERO_BASED,
}
_IP = ("AF_INET", "AF_INET6")

#: The software devices, also those of simulated hosts (:mod:`rdmacm.testing`).
SOFT = Capabilities(
    provider="soft",
    part="on RoCE",
    use="the provider soft",
    transports=("RoCEv2",),
    families=_IP,
    lacks={
        Feature.ALTERNATE_PATHS: "a route has one path",
        Feature.SUBNET_ADMINISTRATOR: "",
        Feature.SERVICE_REGISTRATION: "there is no subnet administrator to keep them",
        Feature.DMA_BUFS: "",
        Feature.ON_DEMAND: "",
        Feature.HUGETLB: "",
        Feature.ZERO_BASED: "a region has the addresses of its buffer",
    },
)
#: InfiniBand ports of RDMACM_IB, which are reached without their driver.
INFINIBAND = Capabilities(
    provider="soft",
    part="on InfiniBand",
    use="the provider soft with RDMACM_IB",
    transports=("InfiniBand",),
    families=("AF_IB", *_IP),
    lacks={
        Feature.VERBS: "moving data takes the adapter's driver",
        **dict.fromkeys(_OF_VERBS, ""),
        Feature.CAPTURE: "they are none of RoCEv2",
    },
)
_OF_KERNEL: Mapping[Feature, str] = {
    Feature.LOOPBACK_ADDRESSES: "its devices have no loopback interface",
    Feature.ALTERNATE_PATHS: "rdma_cm has no command for them",
    Feature.SERVICE_REGISTRATION: "rdma_cm has no command for it",
    Feature.CAPTURE: "they do not pass through this process",
}
#: The kernel's devices, by libibverbs.
KERNEL = Capabilities(
    provider="kernel",
    part="",
    use="the provider kernel",
    transports=("RoCE", "InfiniBand", "iWARP"),
    families=("AF_IB", *_IP),
    lacks=_OF_KERNEL,
    by_device=frozenset({Feature.MULTICAST, Feature.SUBNET_ADMINISTRATOR, *_OF_VERBS})
    - {Feature.EXTENDED, Feature.EVENTS},
    checks_tables=True,
    locks_memory=True,
)
#: The kernel's devices where libibverbs is not installed, or does not open the device.
KERNEL_WITHOUT_LIBRARY = replace(
    KERNEL,
    part="without libibverbs",
    use="",
    lacks={**_OF_KERNEL, Feature.VERBS: "", **dict.fromkeys(_OF_VERBS, "")},
    by_device=KERNEL.by_device - set(_OF_VERBS),
)
#: In the order of the tables.
PROVIDERS = (SOFT, INFINIBAND, KERNEL, KERNEL_WITHOUT_LIBRARY)
