"""Rules of interfaces, addresses, routes and neighbours: A1 to A18. Most judge a destination (``--to``)."""

from __future__ import annotations

import errno
from collections import defaultdict

from rdmacm.address import is_link_local
from rdmacm.doctor.rule import Found, Outcome, Quiet, Unasked
from rdmacm.doctor.view import CAP_NET_BIND_SERVICE, Host, ip_text, packed
from rdmacm.explanation import Explanation
from rdmacm.net.tables import STANDARD_TABLES
from rdmacm.net.types import Interface, InterfaceAddress, InterfaceFlag
from rdmacm.verbs.enums import PortState

NO_TARGET = Unasked("no destination: --to ADDRESS")
_NO_SOURCE = Unasked("no source: --from ADDRESS")
_NO_PORT = Unasked("no port of this host: --port N without --to")
_WITHOUT_PRIVILEGE = "a port from 1024 on; or setcap cap_net_bind_service+ep PROGRAM"
#: Part of the free ports whose use is a finding, and fewer ports than this.
_MOSTLY_USED, _FEW_PORTS = 0.9, 1000
#: Linux from which a resolution of an address without ARP gives no zero MAC.
_REFUSES_NOARP = (6, 18)


def _failure(host: Host, *steps: str) -> Explanation | None:
    """The explanation of a target whose resolution failed in one of these steps."""
    found = host.target.explanation if host.target else None
    return found if found is not None and found.error in steps else None


def _is_local(host: Host, ip: bytes) -> bool:
    return host.owner_of(ip) is not None or (len(ip) == 4 and ip[:1] == b"\x7f") or ip == bytes(15) + b"\1"


def source_without_device(host: Host) -> Outcome:
    if host.target is None or not host.target.node:
        return NO_TARGET
    failed = _failure(host, "select", "resolve_addr")
    if failed is None or failed.errno != errno.ENODEV:
        return Quiet("the source of the route has a GID")
    route = failed.route
    if (route is not None and route.kind == "local") or not host.addresses:
        return Quiet("the destination is this host's")
    devices = [ip_text(each.ip) for face in host.rdma_interfaces() for each in host.addresses_of(face.index)]
    usable = [text for text in devices if not text.startswith("fe80")]
    egress = route.interface if route is not None else "an interface"
    text = f"the route to {host.target.node} leaves by {egress}, source {route.source if route else 'unknown'}"
    command = f"ip route replace {host.target.node} dev IF, IF with an RDMA device"
    if usable:
        command = f"bind the source to {' or '.join(usable[:3])} (--from, src_addr, -I); or {command}"
    return Found(f"{text}, which is in no GID table: {failed.message}", command)


def loopback_destination(host: Host) -> Outcome:
    target = host.target
    if target is None or not target.address:
        return NO_TARGET
    if not host.uses_kernel:
        return Quiet("software devices have the loopback interface")
    owner = host.owner_of(target.address)
    if not _is_local(host, target.address) or (owner is not None and not owner.is_loopback):
        return Quiet(f"{ip_text(target.address)} is not on the loopback interface")
    usable = [
        ip_text(each.ip)
        for face in host.rdma_interfaces()
        for each in host.addresses_of(face.index)
        if len(each.ip) == 4
    ]
    command = f"{usable[0]}, an address of an RDMA interface" if usable else "the address of an RDMA interface"
    text = f"{ip_text(target.address)} is on the loopback interface, which no device of the kernel is on"
    return Found(text, f"{command}; or --provider soft at both ends")


def no_route(host: Host) -> Outcome:
    target = host.target
    if target is None or not target.node:
        return NO_TARGET
    failed = _failure(host, "route", "resolve_addr", "bind")
    unreachable = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES)
    if failed is None or failed.errno not in unreachable:
        found = target.explanation
        route = found.route if found is not None else None
        return Quiet(f"route by {route.interface}, table {route.table}" if route else "the routing tables answered")
    tables = sorted({rule.table for rule in host.rules} - STANDARD_TABLES)
    more = f"; rules lead to tables {', '.join(map(str, tables))}" if tables else ""
    via = f" from {target.source}" if target.source else ""
    text = f"{failed.message} [{failed.errno_name}]{more}"
    return Found(text, f"ip route get {target.node}{via}; ip rule; ip route add {target.node} via GATEWAY dev IF")


def source_not_local(host: Host) -> Outcome:
    target = host.target
    if target is None or not target.source:
        return _NO_SOURCE
    ip = packed(target.source)
    if not ip or _is_local(host, ip) or not any(ip):
        return Quiet(f"{target.source} is an address of this host")
    local = [ip_text(each.ip) for face in host.rdma_interfaces() for each in host.addresses_of(face.index)]
    text = f"the source {target.source} is no address of this network namespace"
    return Found(text, f"one of {', '.join(local[:6]) or 'none'}; or ip addr add {target.source} dev IF")


def ports_used_up(host: Host) -> Outcome:
    words = host.sysctls.get("net/ipv4/ip_local_port_range", "").split()
    if len(words) != 2:
        return Unasked("net.ipv4.ip_local_port_range is not there")
    low, high = int(words[0]), int(words[1])
    width = high - low + 1
    used = f"{host.cm_ids} ids of rdma_cm" if host.cm_ids is not None else "ids of rdma_cm are not counted"
    if width >= _FEW_PORTS and (host.cm_ids or 0) < _MOSTLY_USED * width:
        return Quiet(f"{width} free ports in {low}..{high}; {used}")
    text = f"net.ipv4.ip_local_port_range {low} {high} has {width} ports; {used}: bind_addr gives EADDRNOTAVAIL (99)"
    command = "sysctl net.ipv4.ip_local_port_range='10000 65000'; reuse ids; spread over several source addresses"
    return Found(text, command)


def link_local_without_scope(host: Host) -> Outcome:
    target = host.target
    if target is None or not target.address:
        return NO_TARGET
    if not is_link_local(target.address) or "%" in target.node:
        return Quiet(f"{target.node} needs no scope")
    names = [face.name for face in host.rdma_interfaces()]
    text = f"{target.node} is link-local, and has no interface"
    return Found(text, " or ".join(f"{target.node}%{name}" for name in names[:4]) or f"{target.node}%IF")


def mixed_families(host: Host) -> Outcome:
    target = host.target
    if target is None or not target.address or not target.source:
        return _NO_SOURCE
    source = packed(target.source)
    if not source or len(source) == len(target.address):
        return Quiet("source and destination are of one family")
    names = {4: "IPv4", 16: "IPv6"}
    of_source, of_destination = names[len(source)], names[len(target.address)]
    text = f"the source {target.source} is {of_source}, the destination {target.node} {of_destination}"
    return Found(text, "take both from one entry of rdma_getaddrinfo; hint ai_family")


def source_port_taken(host: Host) -> Outcome:
    target = host.target
    if target is None or target.node or target.attempt is None:
        return _NO_PORT
    attempt = target.attempt
    taken = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
    if attempt.ok or attempt.step != "bind_addr" or attempt.errno not in taken or "port" not in attempt.text:
        return Quiet(f"port {target.port} could be bound")
    return Found(attempt.text, "source port 0, or another port; rdma resource show cm_id; end what holds it")


def privileged_port(host: Host) -> Outcome:
    target = host.target
    if target is None or target.node or not target.port:
        return _NO_PORT
    attempt = target.attempt
    if attempt is not None and attempt.step == "bind_addr" and attempt.errno == errno.EACCES:
        return Found(f"{attempt.text} [EACCES]", _WITHOUT_PRIVILEGE)
    least = 1024  # rdma_cm does not read net.ipv4.ip_unprivileged_port_start
    if target.port >= least or host.may(CAP_NET_BIND_SERVICE):
        return Quiet(f"port {target.port} may be bound")
    text = f"port {target.port} is below 1024, and this process lacks CAP_NET_BIND_SERVICE"
    return Found(text, _WITHOUT_PRIVILEGE)


def silent_neighbour(host: Host) -> Outcome:
    target = host.target
    if target is None or not target.node:
        return NO_TARGET
    failed = _failure(host, "neighbour", "resolve_addr")
    found = target.explanation
    if failed is None or failed.errno not in (errno.ETIMEDOUT, errno.EHOSTUNREACH) or failed.neighbour is None:
        entry = found.neighbour if found is not None else None
        return Quiet(f"{entry.address} on {entry.interface} is {entry.state}" if entry else "no next hop to be found")
    entry = failed.neighbour
    text = f"the next hop {entry.address} on {entry.interface} does not answer: its entry is {entry.state}"
    return Found(
        text, f"ping -I {entry.interface} {entry.address}; check cable, VLAN and peer; ip neigh show {entry.address}"
    )


def _subnets(host: Host, faces: list[Interface]) -> dict[str, list[tuple[Interface, InterfaceAddress]]]:
    """The IPv4 subnets of interfaces, each with its addresses."""
    found = defaultdict(list)
    for face in faces:
        for address in host.addresses_of(face.index):
            if len(address.ip) == 4 and address.prefix_length < 31:
                found[str(host.network_of(address))].append((face, address))
    return found


def arp_flux(host: Host) -> Outcome:
    shared = {
        subnet: list({face.name: face for face, _ in members}.values())
        for subnet, members in _subnets(host, host.rdma_interfaces()).items()
        if len({face.name for face, _ in members}) > 1
    }
    if not shared:
        return Quiet("no two RDMA interfaces are in one IPv4 subnet")
    for subnet, faces in shared.items():
        wrong = []
        for face in faces:
            values = {name: _of_interface(host, face, name) for name in ("arp_ignore", "arp_announce", "rp_filter")}
            if values["arp_ignore"] < 1:
                wrong.append(f"{face.name} arp_ignore {values['arp_ignore']}")
            if values["arp_announce"] < 2:
                wrong.append(f"{face.name} arp_announce {values['arp_announce']}")
            if values["rp_filter"] == 1:
                wrong.append(f"{face.name} rp_filter 1")
        if wrong:
            text = f"{', '.join(face.name for face in faces)} are in one subnet, {subnet}: {', '.join(wrong)}"
            return Found(
                f"{text}: another interface answers ARP for an address",
                "sysctl net.ipv4.conf.all.arp_ignore=2 net.ipv4.conf.all.arp_announce=2 net.ipv4.conf.all.rp_filter=2; "
                "a table and 'ip rule add from ADDRESS table N' for each address",
            )
    return Quiet(f"{', '.join(shared)}: arp_ignore, arp_announce and rp_filter suit several interfaces")


def _of_interface(host: Host, face: Interface, name: str) -> int:
    """The setting that acts: the greater of that of the interface and that of all."""
    own, all_ = (host.sysctl(f"net/ipv4/conf/{each}/{name}") for each in (face.name, "all"))
    return max(own or 0, all_ or 0)


def _two_own_addresses(host: Host) -> tuple[Interface, Interface] | None:
    """The interfaces of source and destination, where both are this host's and differ."""
    target = host.target
    if target is None or not target.address or not target.source:
        return None
    source, destination = host.owner_of(packed(target.source)), host.owner_of(target.address)
    if source is None or destination is None or source.index == destination.index or destination.is_loopback:
        return None
    return source, destination


def accept_local(host: Host) -> Outcome:
    pair = _two_own_addresses(host)
    if pair is None or not host.uses_kernel or host.target is None:
        return Unasked("no two addresses of this host: --from and --to, on devices of the kernel")
    faces = [face for face in pair if not _of_interface(host, face, "accept_local")]
    if not faces or len(host.target.address) != 4:
        return Quiet("accept_local is set")
    names = ", ".join(f"{face.name} accept_local 0" for face in faces)
    text = f"both addresses are this host's: {names}: it drops packets with its own source that come in"
    return Found(text, "sysctl net.ipv4.conf.all.accept_local=1")


def ipv6_between_own(host: Host) -> Outcome:
    pair = _two_own_addresses(host)
    if pair is None or not host.uses_kernel or host.target is None:
        return Unasked("no two addresses of this host: --from and --to, on devices of the kernel")
    if len(host.target.address) == 4:
        return Quiet("the addresses are IPv4")
    text = f"the IPv6 destination is on {pair[1].name}, the source on {pair[0].name}, both of this host"
    return Found(
        f"{text}: the kernel drops the request, whose route is by lo",
        "an address of the same interface; IPv4; a network namespace for each adapter; a newer kernel",
    )


def without_arp(host: Host) -> Outcome:
    if not host.devices:
        return Unasked("no RDMA device of the kernel")
    faces = [face for face in host.rdma_interfaces() if face.flags & InterfaceFlag.NOARP and not face.is_loopback]
    if not faces:
        return Quiet("each RDMA interface resolves neighbours")
    if host.release >= _REFUSES_NOARP:
        return Quiet(f"{faces[0].name} has NOARP, which Linux {host.release[0]}.{host.release[1]} handles")
    text = f"{faces[0].name} has the flag NOARP: packets go to the MAC 00:00:00:00:00:00, and vanish"
    return Found(text, f"ip link set {faces[0].name} arp on; Linux 6.18 or newer")


def vlan_on_bond(host: Host) -> Outcome:
    tables = sorted({rule.table for rule in host.rules} - STANDARD_TABLES)
    names = {face.name for face in host.rdma_interfaces()}
    stacked = [name for name, lower in host.vlans.items() if name in names and lower in host.bonds]
    if not stacked or len(tables) < 2 or not host.devices:
        return Quiet("no VLAN on a bond with several routing tables")
    text = f"{', '.join(stacked)} are VLANs on a bond, with rules to tables {', '.join(map(str, tables))}"
    return Found(text, "fewer rules (ip rule); bind to the device of one VLAN")


def name_on_loopback(host: Host) -> Outcome:
    target = host.target
    if target is None or not target.is_name:
        return Unasked("no name as destination: --to NAME")
    wrong = [ip for ip in target.addresses if ip[:1] == b"\x7f" or ip == b"\xff" * 4]
    if not wrong or target.node.partition(".")[0] in ("localhost", "ip6-localhost", "ip6-loopback"):
        return Quiet(f"{target.node} is {', '.join(map(ip_text, target.addresses)) or 'unknown'}")
    text = f"{target.node} is {ip_text(wrong[0])} here, which no other host can reach"
    return Found(text, f"getent hosts {target.node}; mend /etc/hosts, or use the name or address of the fabric")


def one_bad_address(host: Host) -> Outcome:
    target = host.target
    if target is None or not target.node:
        return NO_TARGET
    notes = target.explanation.notes if target.explanation is not None else ()
    bad = [note for note in notes if any(note.startswith((ip_text(ip), f"[{ip_text(ip)}")) for ip in target.addresses)]
    if not bad or len(target.addresses) < 2:
        return Quiet(f"{len(target.addresses)} addresses, each of which resolves or was not needed")
    text = f"of {len(target.addresses)} addresses of {target.node} some do not resolve: {'; '.join(bad[:3])}"
    return Found(text, "remove the address from DNS or /etc/hosts, or connect to one address", is_note=True)


def interface_down(host: Host) -> Outcome:
    down = []
    for device, port in host.kernel_ports():
        if port.port.state is PortState.ACTIVE or port.is_infiniband:
            continue
        names = {row.ndev_name for row in port.port.gids} | {device.parent}
        face = next((each for each in host.interfaces if each.name in names), None)
        why = f"interface {face.name} is {'up without carrier' if face.is_up else 'down'}" if face else "its cable?"
        down.append((f"port {port.port.port_num} of {device.name} is {port.port.state.name}: {why}", face))
    usable = [port for _, port in host.kernel_ports() if port.port.state is PortState.ACTIVE]
    if not host.uses_kernel and not host.devices:
        faces = [face for face in host.interfaces if not face.is_loopback]
        down = [(f"interface {face.name} is down", face) for face in faces if not face.is_up]
        target_face = _egress(host)
        if any(face.is_running and host.addresses_of(face.index) for face in faces) and target_face is None:
            return Quiet(f"up: {', '.join(face.name for face in faces if face.is_running)}")
        if target_face is not None:
            down = [(f"interface {target_face.name} is down, or has no carrier", target_face)]
        elif not down and any(not face.is_running for face in faces):
            down = [(f"interface {face.name} has no carrier", face) for face in faces if not face.is_running]
    if not down:
        return Quiet("each port is ACTIVE" if host.devices else "no interface is down")
    commands = dict.fromkeys(f"ip link set {face.name if face else 'IF'} up" for _, face in down[:3])
    command = "; ".join(commands)
    return Found(
        "; ".join(text for text, _ in down[:3]), f"{command}; check the cable and the peer", is_note=bool(usable)
    )


def _egress(host: Host) -> Interface | None:
    """The interface that the destination's route leaves by, if it is down."""
    failed = _failure(host, "select", "resolve_addr")
    if failed is None or failed.route is None:
        return None
    face = host.interface(failed.route.interface)
    return face if face is not None and not face.is_running else None
