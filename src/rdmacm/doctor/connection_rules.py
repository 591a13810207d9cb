"""Rules of connections: R1 and R2 (routes of InfiniBand), C1 to C5, J1 to J7 (rejected), Q1 to Q5 (later)."""

from __future__ import annotations

import errno
import os

from rdmacm.doctor.device_rules import NO_DEVICE
from rdmacm.doctor.namespace_rules import roce_ports
from rdmacm.doctor.rule import Found, Outcome, Quiet, Unasked
from rdmacm.doctor.view import CAP_SYS_PTRACE, Attempt, Host, KernelDevice, KernelPort
from rdmacm.verbs.enums import PortState

#: The variables that choose a device, and the traffic class of queue pairs.
_UCX_DEVICES = "UCX_NET_DEVICES"
DEVICE_VARIABLES = ("NCCL_IB_HCA", _UCX_DEVICES)
CLASS_VARIABLES = ("NCCL_IB_TC", "UCX_IB_TRAFFIC_CLASS")
_NO_ATTEMPT = Unasked("no connection was tried: --to ADDRESS --port N")
_NO_INFINIBAND = Unasked("no InfiniBand port")
#: The kernel's default of net.rdma_ucm.max_backlog.
_BACKLOG = 1024
#: Requests that came again, and the part of all requests, that are a finding.
_MANY_AGAIN, _PART_AGAIN = 10, 0.1
#: The bit of the taint flags that says that the kernel had a fault (TAINT_DIE).
_TAINT_DIE = 1 << 7
#: Phys. state of a port whose link is up.
_LINK_UP = 5


_OPEN_PORT = (
    "firewall-cmd --permanent --add-port=4791/udp && firewall-cmd --reload; or nft insert rule inet filter input udp "
    "dport 4791 accept; or iptables -I INPUT -p udp --dport 4791 -j ACCEPT; and the security group"
)


def _infiniband(host: Host) -> list[tuple[KernelDevice, KernelPort]]:
    return [(device, port) for device, port in host.kernel_ports() if port.is_infiniband]


def _attempt(host: Host, reason: int) -> Attempt | None:
    """The connection that was refused for a reason."""
    attempt = host.target.attempt if host.target is not None else None
    return attempt if attempt is not None and attempt.reason == reason else None


def _has_attempt(host: Host) -> bool:
    return host.target is not None and host.target.attempt is not None and bool(host.target.node)


def _where(host: Host) -> str:
    target = host.target
    return f"{target.node} port {target.port}" if target is not None else ""


def no_manager(host: Host) -> Outcome:
    if not _infiniband(host):
        return _NO_INFINIBAND
    for device, port in _infiniband(host):
        if port.port.phys_state == _LINK_UP and not port.port.sm_lid:
            text = (
                f"{device.name} port {port.port.port_num}: the link is up, sm_lid is 0: no subnet manager has been here"
            )
            return Found(
                text, "sminfo; systemctl start opensm (or the switch's); then a longer timeout and a path cache"
            )
    return Quiet("each linked InfiniBand port has a subnet manager")


def no_path(host: Host) -> Outcome:
    if not _infiniband(host):
        return _NO_INFINIBAND
    for device, port in _infiniband(host):
        number = port.port.port_num
        if port.port.state is not PortState.ACTIVE:
            return Found(
                f"port {number} of {device.name} is {port.port.state.name}, not ACTIVE", "ibstat; cable; opensm",
                is_note=any(other.port.state is PortState.ACTIVE for _, other in _infiniband(host)),
            )  # fmt: skip
        if not any(pkey & 0x8000 for pkey in port.port.pkeys):
            keys = " ".join(f"0x{pkey:04x}" for pkey in port.port.pkeys) or "none"
            text = f"{device.name} port {number} is a full member of no partition (P_Keys {keys})"
            return Found(f"{text}: limited members have no path to each other", "full membership in partitions.conf")
    return Quiet("each InfiniBand port is ACTIVE, and a full member of a partition")


def filtered(host: Host) -> Outcome:
    # Packets of adapters do not pass the filters of the host.
    is_filtered = not host.uses_kernel or any(device.driver == "rdma_rxe" for device in host.devices)
    verdicts = host.firewall.verdicts if is_filtered else ()
    sure = [verdict for verdict in verdicts if not verdict.is_partial]
    partial = [verdict for verdict in verdicts if verdict.is_partial]
    command = _OPEN_PORT
    if sure:
        return Found(f"{sure[0].direction}: UDP port 4791 is dropped by {sure[0].drops}", command, is_sure=True)
    silent = [
        (device.name, port.cm)
        for device, port in host.kernel_ports()
        if port.cm.get("tx_retries_req", 0) and not any(n for key, n in port.cm.items() if key.startswith("rx_"))
    ]
    if silent:
        name, counts = silent[0]
        sent = f"{counts.get('tx_req', 0)} requests and {counts['tx_retries_req']} repetitions"
        return Found(
            f"{name} sent {sent}, and no message came: UDP port 4791 is filtered on the way, or the peers are down",
            command,
        )
    attempt = host.target.attempt if host.target is not None and host.target.node else None
    unreachable = (errno.ETIMEDOUT, errno.EPERM, errno.EHOSTUNREACH)
    refused = attempt is not None and attempt.errno == errno.ECONNREFUSED and not attempt.reason
    if attempt is not None and attempt.step == "connect" and (refused or attempt.errno in unreachable):
        why = (
            "the host answers that UDP port 4791 is closed"
            if refused
            else "no answer came, of the network or the listener"
        )
        text = f"{_where(host)}: {why} ({attempt.text})"
        return Found(text, f"at the peer: rdmacm doctor, a listener; {command}")
    if partial:
        text = f"{partial[0].direction}: some packets to UDP port 4791 are dropped by {partial[0].drops}"
        return Found(text, command, is_note=True)
    read = ", ".join(host.firewall.sources) or "nothing"
    more = f"; not read: {'; '.join(host.firewall.unread)}" if host.firewall.unread else ""
    return Quiet(f"no rule drops UDP port 4791 ({read}){more}")


def busy_listener(host: Host) -> Outcome:
    backlog = host.sysctl("net/rdma_ucm/max_backlog")
    if backlog is not None and backlog < _BACKLOG:
        text = f"net.rdma_ucm.max_backlog is {backlog}, the default is {_BACKLOG}: a busy listener drops requests"
        return Found(
            text, f"sysctl net.rdma_ucm.max_backlog={_BACKLOG * 4}; staggered connects; a larger backlog of listen()"
        )
    for device, port in host.kernel_ports():
        again, all_ = port.cm.get("rx_duplicates_req", 0), port.cm.get("rx_req", 0)
        if again >= _MANY_AGAIN and again > _PART_AGAIN * max(all_, 1):
            text = f"{device.name} got {all_} requests and {again} repetitions: listeners here answer late"
            return Found(text, "staggered connects; a larger backlog of listen(); more threads that accept")
    return Quiet(
        f"net.rdma_ucm.max_backlog {backlog if backlog is not None else 'is not there'}; few requests came again"
    )


def unread_events(host: Host) -> Outcome:
    if not host.has_rdma_cm:
        return Unasked("no /dev/infiniband/rdma_cm")
    if not host.unread:
        return Quiet("no process that may be looked into leaves events of rdma_cm unread")
    pid, name = next(iter(host.unread.items()))
    text = f"process {pid} ({name}) does not read the events of its channel of rdma_cm"
    command = f"gdb -p {pid} -ex 'thread apply all bt' -ex quit; a thread that reads the channel, and acknowledges"
    return Found(text, command, is_note=True)


def moving_address(host: Host) -> Outcome:
    names = {face.name for face in host.rdma_interfaces()}
    names |= {host.vlans[name] for name in names if name in host.vlans}
    moving = sorted(name for name in names if name in host.bonds and host.bonds[name].moves_address)
    if not moving:
        return Quiet("no bond here changes its MAC address; a peer's change is seen by those who are connected only")
    name, bond = moving[0], host.bonds[moving[0]]
    text = f"{name} has another MAC address after a failure of a link ({bond.mode}), {bond.failures} so far"
    return Found(
        f"{text}: peers with Linux 6.0 or newer get UNREACHABLE on connections that work",
        "mode active-backup with fail_over_mac none, or 802.3ad; peers that take it as a disconnect, and connect again",
        is_note=True,
    )


def faulty_kernel(host: Host) -> Outcome:
    if not any(device.driver == "rdma_rxe" for device in host.devices):
        return Unasked("no rxe device")
    if not host.taint & _TAINT_DIE:
        return Quiet("the kernel had no fault (/proc/sys/kernel/tainted)")
    text = f"the kernel had a fault (tainted {host.taint}), and rxe may answer nobody since"
    return Found(text, "dmesg | grep -A20 'BUG\\|Oops'; restart; a newer kernel")


def _rejected(host: Host, reason: int, meaning: str, command: str) -> Outcome:
    """Whether the connection was rejected with a reason, what that means, and what mends it."""
    if not _has_attempt(host):
        return _NO_ATTEMPT
    if _attempt(host, reason) is None:
        return Quiet(f"no reject with reason {reason}")
    return Found(f"{_where(host)}: reason {reason}, {meaning}", command)


def nobody_listens(host: Host) -> Outcome:
    return _rejected(
        host,
        8,
        "nobody listens on that port in that port space, on that device and namespace",
        "start the listener; bind it to :: or to that address; the same port space (TCP, UDP, IB)",
    )


def stale(host: Host) -> Outcome:
    return _rejected(
        host,
        10,
        "the peer still holds a connection with this queue pair number",
        "try again after its timewait (seconds); rdma resource show qp at the peer",
    )


def application(host: Host) -> Outcome:
    return _rejected(
        host,
        28,
        "the application refused (not ENOSPC)",
        "the log of the listener: version, limits, private data; try again where two ends connect at once",
    )


def gave_up(host: Host) -> Outcome:
    return _rejected(
        host,
        4,
        "the server could not make its queue pair, or gave up",
        "the server's log (rdma_create_qp ... error 22); lower max_wr and max_sge there",
    )


def reason_as_errno(host: Host) -> Outcome:
    if not _has_attempt(host):
        return _NO_ATTEMPT
    attempt = host.target.attempt if host.target is not None else None
    if attempt is None or not attempt.reason:
        return Quiet("no reject, so no reason that could be taken for an errno")
    text = f"{_where(host)}: status {attempt.reason} of REJECTED is a reason; as an errno, a program prints"
    return Found(
        f'{text} "{os.strerror(attempt.reason)}"',
        "rdma_event_str(event->event) and event->status as a number; perror() of -status only where it is negative",
        is_note=True,
    )


def no_ipoib(host: Host) -> Outcome:
    active = [device for device, port in _infiniband(host) if port.port.state is PortState.ACTIVE]
    if not active:
        return _NO_INFINIBAND
    faces = [face for face in host.interfaces if face.is_ipoib]
    if any(face.is_up for face in faces):
        return Quiet(f"IPoIB: {', '.join(face.name for face in faces if face.is_up)}")
    names = ", ".join(face.name for face in faces)
    text = f"{active[0].name} is ACTIVE, and no IPoIB interface is up ({names or 'none is there'})"
    return Found(
        f"{text}: ids have no address there", f"modprobe ib_ipoib; ip link set {faces[0].name if faces else 'ib0'} up"
    )


def iwarp_port(host: Host) -> Outcome:
    iwarp = [device.name for device in host.devices if device.is_iwarp]
    if not iwarp:
        return Unasked("no iWARP device")
    target = host.target
    if target is None or target.node or not target.port:
        return Unasked("no port of this host: --port N without --to")
    if target.port not in host.tcp_listeners:
        return Quiet(f"no TCP socket listens on {target.port}")
    text = f"a TCP socket listens on port {target.port}, and {iwarp[0]} is iWARP, whose ports are the host's TCP ports"
    return Found(text, f"another port; ss -ltnp 'sport = {target.port}'")


def _named_devices(host: Host, variable: str) -> list[str]:
    """The devices that a variable chooses; none if it chooses no device of this host."""
    value = host.environment.get(variable, "")
    is_but, is_exact = value.startswith("^"), "=" in value[:2] or variable == _UCX_DEVICES
    words = [word.partition(":")[0] for word in value.lstrip("^=").split(",") if word]
    names = [device.name for device in host.devices]
    found = [name for name in names if any(name == word or (not is_exact and name.startswith(word)) for word in words)]
    return [name for name in names if name not in found] if is_but else found


def another_device(host: Host) -> Outcome:
    target = host.target
    found = target.explanation if target is not None else None
    chosen = found.chosen if found is not None else None
    if target is None or found is None or chosen is None or not host.uses_kernel:
        return Unasked("no destination that devices of the kernel lead to: --to ADDRESS")
    path = int((found.path or {}).get("mtu", 0))
    taken = f"rdma_cm takes {chosen.device} port {chosen.port_num}, path MTU {path}, to {target.node}"
    for variable in DEVICE_VARIABLES:
        named = _named_devices(host, variable)
        if named and chosen.device not in named:
            command = f"{variable}={chosen.device}; or bind the id to an address of {named[0]}"
            return Found(f"{taken}, and {variable} names {', '.join(named)}", command)
    first = host.devices[0].name
    if first != chosen.device:
        text = f"{taken}; without -d, ib_write_bw and others take {first}"
        return Found(text, f"compare with ib_write_bw -d {chosen.device} -x {chosen.gid_index}", is_note=True)
    for device, port in host.kernel_ports():
        active = port.port.active_mtu
        if (device.name, port.port.port_num) == (chosen.device, chosen.port_num) and active and 0 < path < active.bytes:
            text = f"{taken}; without rdma_cm, queue pairs take the port's, {active.bytes}"
            return Found(text, f"ip route get {target.node}; compare with ib_write_bw -m {path}", is_note=True)
    return Quiet(f"{taken}, as programs without it do")


def class_at_one_end(host: Host) -> Outcome:
    ports = [(device.name, port.port.port_num, port.roce_tos or 0) for device, port in roce_ports(host)]
    if not ports:
        return Unasked("no RoCE port")
    where = "/sys/kernel/config/rdma_cm/{}/ports/{}/default_roce_tos"
    for variable in CLASS_VARIABLES:
        text = host.environment.get(variable, "")
        other = next((each for each in ports if text.isdigit() and each[2] >> 2 != int(text) >> 2), None)
        if other is not None:
            shown = f"{variable}={text} is DSCP {int(text) >> 2}, an id of {other[0]} that accepts has {other[2] >> 2}"
            return Found(shown, f"echo {text} > {where.format(*other)}; RDMA_OPTION_ID_TOS before listen, at both ends")
    with_class = [each for each in ports if each[2] >> 2]
    without = [each for each in ports if not each[2] >> 2]
    if with_class and without:
        name, _, tos = with_class[0]
        shown = f"default_roce_tos of {name} is {tos} (DSCP {tos >> 2}), and ids of {without[0][0]} have DSCP 0"
        return Found(shown, f"echo {tos} > {where.format(*without[0])}; the same at the peer", is_note=True)
    return Quiet(f"ids of each port have DSCP {ports[0][2] >> 2}; what the peer's have, a capture tells (rdmacm trace)")


def no_priority(host: Host) -> Outcome:
    if not host.devices:
        return NO_DEVICE
    for device, port in host.kernel_ports():
        if port.roce_tos is None:
            continue
        faces = {row.ndev_name for row in port.port.gids} & set(host.pfc)
        for name in faces:
            lossless = host.pfc[name]
            if lossless and 0 not in lossless and not port.roce_tos:
                priorities = ", ".join(map(str, sorted(lossless)))
                text = (
                    f"flow control (PFC) of {name} is on for priority {priorities}, and ids of {device.name} have tos 0"
                )
                where = f"/sys/kernel/config/rdma_cm/{device.name}/ports/{port.port.port_num}/default_roce_tos"
                return Found(text, f"echo 104 > {where} (DSCP 26); or rdma_set_option(RDMA_OPTION_ID_TOS)")
    return Quiet("no port has flow control for another class than its ids" if host.pfc else "no interface shows PFC")


def congested(host: Host) -> Outcome:
    if not host.devices:
        return NO_DEVICE
    for device, port in host.kernel_ports():
        if port.roce_tos is not None and port.roce_tos & 3 == 3:
            text = f"default_roce_tos of {device.name} is {port.roce_tos}: its low bits mark each packet as congested"
            where = f"/sys/kernel/config/rdma_cm/{device.name}/ports/{port.port.port_num}/default_roce_tos"
            return Found(text, f"echo {port.roce_tos & ~3 | 2} > {where}")
    return Quiet("no default tos has both ECN bits")


def no_ptrace(host: Host) -> Outcome:
    scope = host.sysctl("kernel/yama/ptrace_scope")
    if scope is None or scope < 1:
        return Quiet("ptrace_scope is 0, or there is no Yama")
    if host.may(CAP_SYS_PTRACE):
        return Quiet(f"ptrace_scope is {scope}, and this process has CAP_SYS_PTRACE")
    text = f"kernel.yama.ptrace_scope is {scope}, without CAP_SYS_PTRACE: no process_vm_readv of another process (CMA)"
    command = "sysctl kernel.yama.ptrace_scope=0; a container: --cap-add=SYS_PTRACE; UCX_TLS=^cma"
    return Found(text, command, is_note=scope == 1)
