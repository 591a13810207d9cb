"""The path record of a resolved IP address. RoCE has no subnet administrator: the host makes the record itself."""

from __future__ import annotations

import errno
from socket import AF_INET

from rdmacm.address import DEFAULT_PKEY, Gid
from rdmacm.errors import Failure
from rdmacm.net.types import Network
from rdmacm.proto.sa import PathRecord
from rdmacm.resolution.hosts import HostView, mtu_code
from rdmacm.resolution.lookup import Found, Lookup
from rdmacm.verbs.enums import Mtu

#: Packet lifetime exponent of RoCE paths without an ACK timeout: 4.096 µs · 2^16, a quarter of a second. Older Linux
#: kernels have 18: then a lost packet that no later packet reveals costs two seconds.
ROCE_PACKET_LIFETIME = 16

#: The least Mb/s for an ``ibv_rate``, as the kernel rates a RoCE port. A slower link has 0, the port's own rate.
_RATES = ((40000, 7), (30000, 4), (20000, 6), (10000, 3))


class PathMaker:
    """Makes the path records of one host.

    Rate and default hop limit of an interface are read from /sys and /proc, which is slow, and kept until
    :meth:`forget`.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        #: ``ibv_rate`` and default hop limit, by interface index and address family.
        self._link_attributes: dict[tuple[int, int], tuple[int, int]] = {}

    def forget(self) -> None:
        """Read rates and hop limits again: the interfaces have changed."""
        self._link_attributes.clear()

    def make(
        self,
        lookup: Lookup,
        src_port: int,
        *,
        dgid: Gid | None = None,
        service_id: int = 0,
        packet_life_time: int = ROCE_PACKET_LIFETIME,
    ) -> PathRecord:
        """The path record of a finished lookup, as rdma_resolve_route(3) makes it. ``dgid``: if it is known already.

        Failure (EINVAL) when the MTU is too small for RoCE.
        """
        destination, source, found = lookup.destination, lookup.source, lookup.found
        assert found is not None
        row = found.row
        key = row.ndev_ifindex, destination.family
        rate, default_hop_limit = self._link_attributes.get(key) or self._read_link_attributes(key, row.ndev_name)
        flow_label = (source.flowinfo if source is not None else 0) & 0xFFFFF or destination.flowinfo & 0xFFFFF
        return PathRecord(
            dgid=dgid or Gid.from_ip(destination.ip),
            sgid=found.row.gid,
            service_id=service_id,
            flow_label=flow_label or (src_port * 31 + destination.port) & 0xFFFFF,
            hop_limit=found.route.hop_limit or default_hop_limit,
            traffic_class=lookup.tos,
            pkey=DEFAULT_PKEY,
            mtu=_path_mtu(lookup.host, found),
            rate=rate,
            packet_life_time=packet_life_time,
        )

    def _read_link_attributes(self, key: tuple[int, int], name: str) -> tuple[int, int]:
        """``ibv_rate`` and default hop limit of an interface, which ``key`` gives with an address family."""
        network = self._network
        speed = network.link_speed(name)
        rate = next((code for floor, code in _RATES if speed >= floor), 0)
        setting = "net/ipv4/ip_default_ttl" if key[1] == AF_INET else f"net/ipv6/conf/{name}/hop_limit"
        attributes = self._link_attributes[key] = rate, network.setting(setting, 64)[0]
        return attributes


def _path_mtu(host: HostView, found: Found) -> Mtu:
    """The largest path MTU that the port, the interface of its GID and the route allow."""
    row, active_mtu = found.row, found.view.port.active_mtu
    interface = host.interfaces.get(row.ndev_ifindex)
    limit = interface.mtu if interface is not None else found.route.mtu
    if found.route.mtu:
        limit = min(limit, found.route.mtu)
    code = mtu_code(limit) if limit else active_mtu
    if code is None or active_mtu is None:
        name = row.ndev_name or found.view.device.name
        message = f"the MTU of {name}, {limit}, is too small for RoCE"
        raise Failure(errno.EINVAL, "path", message, f"'ip link set {name} mtu 1500'")
    return min(code, active_mtu)


def shown_path(path: PathRecord) -> dict[str, object]:
    """The fields of a path record that an explanation shows."""
    return {
        "sgid": str(path.sgid),
        "dgid": str(path.dgid),
        "mtu": path.mtu_bytes,
        **({"slid": path.slid, "dlid": path.dlid, "sl": path.sl} if path.dlid else {}),
        "hop_limit": path.hop_limit,
        "traffic_class": path.traffic_class,
        "flow_label": path.flow_label,
        "pkey": path.pkey,
    }
