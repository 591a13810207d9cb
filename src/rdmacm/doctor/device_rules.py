"""Rules of devices, modules and permissions: D1 to D10."""

from __future__ import annotations

from rdmacm.doctor.rule import Evidence, Found, Outcome, Quiet, Rule, Unasked
from rdmacm.doctor.view import CAP_IPC_LOCK, UNLIMITED, Host

#: The least limit of locked memory that is no finding, in bytes.
LEAST_MEMLOCK = 64 << 20
#: rdma-core from which one device that cannot be opened does not spoil the others; and which takes GUID 0.
_OPENS_SOME, _TAKES_GUID_0 = 40, 56
#: Linux from which rxe does without IPv6.
_RXE_WITHOUT_IPV6 = (5, 13)
NO_DEVICE = Unasked("no RDMA device of the kernel")


def no_device(host: Host) -> Outcome:
    if host.devices:
        names = ", ".join(f"{device.name} ({device.driver or 'driver unknown'})" for device in host.devices)
        return Quiet(f"/sys/class/infiniband: {names}")
    text = "/sys/class/infiniband is empty: the kernel has no RDMA device, whatever the message of a program says"
    command = "modprobe the driver of the adapter (mlx5_ib, irdma, bnxt_re ...); or a software device: {}"
    rxe = "modprobe rdma_rxe && rdma link add rxe0 type rxe netdev IF"
    if not host.uses_kernel:
        text += "; rdmacm uses its software devices"
        return Found(text, f"for programs of libibverbs: rdmacm run -- PROGRAM; or {rxe}", is_note=True)
    return Found(text, command.format(rxe + "; or --provider soft"))


def no_ucma(host: Host) -> Outcome:
    if not host.devices:
        return NO_DEVICE
    if host.has_rdma_cm or host.has_ucma:
        return Quiet("rdma_ucm is loaded")
    text = f"{host.devices[0].name} is there, but /dev/infiniband/rdma_cm is not, nor rdma_ucm in /proc/modules"
    return Found(text, "modprobe rdma_ucm; echo rdma_ucm > /etc/modules-load.d/rdma.conf")


def no_library(host: Host) -> Outcome:
    if not host.devices:
        return NO_DEVICE
    if not host.has_libibverbs:
        return Found("libibverbs.so.1 is not installed", "apt install libibverbs1 ibverbs-providers (dnf: rdma-core)")
    missing = [device for device in host.devices if device.node and device.driver and not device.library]
    if not missing:
        return Quiet("each device has its library of libibverbs")
    names = ", ".join(f"{device.name} ({device.driver})" for device in missing)
    text = f"no library of libibverbs for {names}"
    others = [folder for folder in host.driver_folders if folder.startswith("/usr/local")]
    if others:
        return Found(f"{text}; its configuration is in {others[0]}", f"cp {others[0]}/*.driver /etc/libibverbs.d/")
    return Found(text, "apt install ibverbs-providers (dnf: rdma-core)")


def no_access(host: Host) -> Outcome:
    if not host.devices:
        return NO_DEVICE
    closed = [device.closed for device in host.devices if device.closed]
    if host.rdma_cm_closed and (host.has_ucma or host.has_rdma_cm):
        closed.append(host.rdma_cm_closed)
    if not closed:
        nodes = ", ".join(device.node for device in host.devices if device.node)
        return Quiet(f"{nodes or 'no uverbs node'} and rdma_cm can be opened")
    devices = "".join(f" --device=/dev/infiniband/{device.node}" for device in host.devices if device.node)
    command = f"in a container:{devices} --device=/dev/infiniband/rdma_cm --cap-add=IPC_LOCK; else chmod a+rw"
    return Found("; ".join(closed), command)


def some_closed(host: Host) -> Outcome:
    if not host.devices:
        return NO_DEVICE
    closed = [device.name for device in host.devices if device.closed]
    if not closed or len(closed) == len(host.devices):
        return Quiet(f"{len(closed)} of {len(host.devices)} devices may not be opened")
    if host.librdmacm >= _OPENS_SOME:
        return Quiet(
            f"{', '.join(closed)} may not be opened, which librdmacm of rdma-core {host.librdmacm} passes over"
        )
    version = f"of rdma-core {host.librdmacm}" if host.librdmacm else "of an unknown version"
    text = f"{', '.join(closed)} may not be opened while others may: librdmacm {version} then reports no device at all"
    return Found(text, f"rdma-core {_OPENS_SOME} or newer, or give the container all of /dev/infiniband")


def zero_guid(host: Host) -> Outcome:
    if not host.devices:
        return NO_DEVICE
    zero = [device.name for device in host.devices if not device.node_guid]
    if not zero:
        return Quiet("each device has a node GUID")
    if host.librdmacm >= _TAKES_GUID_0:
        return Quiet(f"{', '.join(zero)} has node GUID 0, which librdmacm of rdma-core {host.librdmacm} takes")
    return Found(
        f"the node GUID of {', '.join(zero)} is 0000:0000:0000:0000: librdmacm does not find the device of an id",
        "ip link set PF vf N node_guid 00:11:22:33:44:55:66:77; or rdma-core 56 or newer",
    )


def small_memlock(host: Host) -> Outcome:
    if not host.devices:
        return NO_DEVICE
    if host.memlock == UNLIMITED:
        return Quiet("RLIMIT_MEMLOCK is unlimited")
    size = f"RLIMIT_MEMLOCK is {host.memlock // 1024} KiB"
    if host.may(CAP_IPC_LOCK):
        return Quiet(f"{size}, which CAP_IPC_LOCK makes unlimited")
    if host.memlock >= LEAST_MEMLOCK:
        return Quiet(size)
    text = f"{size}: buffers and queues beyond it cannot be registered (ENOMEM)"
    return Found(
        text,
        "ulimit -l unlimited; in /etc/security/limits.d: '* - memlock unlimited', and log in again; a container: "
        "--ulimit memlock=-1; a unit of systemd: LimitMEMLOCK=infinity",
    )


def _is_large(limit: str) -> bool:
    """Whether a limit of systemd, such as ``64M`` or ``4G:8G``, is enough."""
    size = limit.partition(":")[0]
    if size == "infinity":
        return True
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    number, factor = (size[:-1], units[size[-1]]) if size[-1:] in units else (size, 1)
    return number.isdigit() and int(number) * factor >= LEAST_MEMLOCK


def closed_unit(host: Host) -> Outcome:
    if host.unit is None:
        return Unasked("no unit of systemd: --unit NAME")
    settings, faults, lines = host.unit.settings, [], []
    if settings.get("PrivateDevices", "").lower() in ("yes", "true", "1", "on"):
        faults.append("PrivateDevices=yes hides /dev/infiniband")
        lines.append("PrivateDevices=no")
    limit = settings.get("LimitMEMLOCK", "")
    if host.unit.is_asked and host.devices and not _is_large(limit):
        faults.append(f"LimitMEMLOCK={limit} caps locked memory" if limit else "no LimitMEMLOCK: 8 MiB or less")
        lines.append("LimitMEMLOCK=infinity")
    if settings.get("DevicePolicy", "auto") in ("closed", "strict") and "infiniband" not in settings.get(
        "DeviceAllow", ""
    ):
        faults.append(f"DevicePolicy={settings['DevicePolicy']} without DeviceAllow for infiniband")
        lines.append("DeviceAllow=char-infiniband_verbs rw")
        lines.append("DeviceAllow=/dev/infiniband/rdma_cm rw")
    if not faults:
        return Quiet(f"{host.unit.name}: nothing hides devices or caps memory")
    return Found(
        f"{host.unit.name}: {'; '.join(faults)}",
        f"systemctl edit {host.unit.name}: [Service] {' '.join(lines)}; systemctl restart {host.unit.name}",
    )


def no_ipv6(host: Host) -> Outcome:
    if host.has_ipv6:
        return Quiet("the kernel has IPv6")
    if host.release >= _RXE_WITHOUT_IPV6:
        return Quiet(f"no IPv6, which rxe of Linux {host.release[0]}.{host.release[1]} does without")
    if "rdma_rxe" in host.modules:
        return Quiet("no IPv6, but rdma_rxe is loaded")
    text = f"no IPv6 on Linux {host.release[0]}.{host.release[1]}: rdma_rxe cannot be loaded (err = -97)"
    return Found(text, "boot without ipv6.disable=1, or a kernel from 5.13 on", is_note=bool(host.devices))


def port_taken(host: Host) -> Outcome:
    strangers = [owner for owner in host.owners if not owner.is_ours]
    if not strangers:
        who = f"{len(host.owners)} sockets of rdmacm" if host.owners else "free"
        return Quiet(f"UDP port 4791 is {who}")
    owner = strangers[0]
    if owner.is_kernel:
        text = (
            f"UDP port 4791 of {owner.address} is the kernel's (rdma_rxe): no software device of rdmacm can be opened"
        )
        command = (
            "--provider kernel, with an address that rdmacm devices shows; another network namespace; or modprobe -r "
            "rdma_rxe (the port stays taken when the last link is deleted)"
        )
        return Found(text, command, is_note=host.uses_kernel)
    who = f"process {owner.pid} ({owner.process})" if owner.pid else "a process that is not shown"
    command = f"kill {owner.pid}, or another network namespace" if owner.pid else "ss -uanp 'sport = 4791' as root"
    return Found(f"UDP port 4791 of {owner.address} is taken by {who}", command)


RULES = (
    Rule(
        "D1",
        "No RDMA device",
        Evidence.MAINTAINER,
        "device",
        (
            "rdma_create_event_channel: No such device",
            "Bad value for ai_flags",
            "No RDMA devices were detected",
            "No IB devices found",
        ),
        "/sys/class/infiniband is empty.",
        "The kernel has no RDMA device at all; the message of the program names another thing. Where rdmacm uses its "
        "software devices, this is a note.",
        "`modprobe` the adapter's driver; `modprobe rdma_rxe && rdma link add rxe0 type rxe netdev IF`; or `rdmacm run "
        "-- PROGRAM`, which needs no device",
        "linux-rdma/rdma-core#368, axboe/fio#159, openucx/ucx#11261",
        no_device,
    ),
    Rule(
        "D2",
        "rdma_ucm is not loaded",
        Evidence.MAINTAINER,
        "node and permission",
        (
            'RDMA device "rdma_cm" not found',
            "Error 7 listening on the 'rdma' transport",
            "unable to open /dev/infiniband/rdma_cm",
            "the kernel module rdma_ucm is not loaded",
        ),
        "A device is there, but no /dev/infiniband/rdma_cm, and rdma_ucm is neither in /proc/modules nor built in.",
        "The kernel's connection manager is not offered to programs: ENODEV although `ibv_devices` lists devices.",
        "`modprobe rdma_ucm`; a line `rdma_ucm` in /etc/modules-load.d/rdma.conf",
        "Mellanox/k8s-rdma-shared-dev-plugin#192, ovis-hpc/ldms#127",
        no_ucma,
    ),
    Rule(
        "D3",
        "No library of libibverbs for the device",
        Evidence.TESTED,
        "node and permission",
        (
            "libibverbs: Warning: no userspace device-specific driver found for",
            "rdma_getaddrinfo: No such device",
        ),
        "uverbsN is there, but no libX-rdmavNN.so of the device's driver, or its .driver file is below /usr/local.",
        "The provider library is not installed, or its configuration is under another prefix.",
        "`apt install ibverbs-providers` (dnf: rdma-core); "
        "`cp /usr/local/etc/libibverbs.d/*.driver /etc/libibverbs.d/`",
        "SoftRoCE/rxe-dev#65, zrlio/urdma#23",
        no_library,
    ),
    Rule(
        "D4",
        "A device file may not be opened",
        Evidence.TESTED,
        "node and permission",
        (
            "Failed to open device",
            "Call to ibv_open_device failed",
            "ibv_devices is empty although /sys/class/infiniband is not",
            "the device cgroup of this container forbids it",
        ),
        "access(2) for reading and writing of each /dev/infiniband/uverbsN and of rdma_cm.",
        "The character device was not passed into the container, or its mode or the device cgroup forbids it.",
        "`--device=/dev/infiniband/uverbsN --device=/dev/infiniband/rdma_cm --cap-add=IPC_LOCK`, or a device plugin; "
        "`chmod a+rw`",
        "NVIDIA/nccl#451, hustcat/k8s-rdma-device-plugin#8, apache/brpc#2298, "
        "infiniband-radar/infiniband-radar-daemon#21",
        no_access,
    ),
    Rule(
        "D5",
        "One closed device hides the others",
        Evidence.MAINTAINER,
        "node and permission",
        ("No such device, although most devices can be opened",),
        "Some devices may be opened, at least one may not, and librdmacm is of rdma-core before 40, or unknown.",
        "An old librdmacm gave up when any one device could not be opened.",
        "a newer rdma-core; or pass all uverbs nodes to the container",
        "linux-rdma/rdma-core#1060, #357, #1314",
        some_closed,
    ),
    Rule(
        "D6",
        "Node GUID 0",
        Evidence.TESTED,
        "device",
        ("a crash, or verbs is NULL, after RDMA_CM_EVENT_ADDR_RESOLVED",),
        "node_guid is 0000:0000:0000:0000, and librdmacm is of rdma-core before 56, or unknown.",
        "librdmacm skips devices with GUID 0, as virtual functions have it that were given none.",
        "`ip link set PF vf N node_guid GUID`; rdma-core 56 or newer",
        "linux-rdma/rdma-core#1547, openucx/ucx#2534",
        zero_guid,
    ),
    Rule(
        "D7",
        "Little locked memory",
        Evidence.TESTED,
        "locked memory",
        (
            "ibv_reg_mr failed: Cannot allocate memory",
            "ibv_create_cq(cqe=4096) failed: Cannot allocate memory",
            "The RLIMIT_MEMLOCK is too small",
            "the limit of locked memory is",
        ),
        "RLIMIT_MEMLOCK below 64 MiB without CAP_IPC_LOCK, on a host with devices of the kernel.",
        "Registered memory is locked, and the limit is used up: 64 KiB can be registered, 16 MiB cannot.",
        "`ulimit -l unlimited`; `* - memlock unlimited` in /etc/security/limits.d, and log in again; `docker run "
        "--ulimit memlock=-1`; `LimitMEMLOCK=infinity` in a unit of systemd",
        "openucx/ucx#8229, #7930, NVIDIA/nccl-tests#206, tarickb/the-geek-in-the-corner#6, ceph/ceph#13655",
        small_memlock,
    ),
    Rule(
        "D8",
        "systemd hides devices, or caps memory",
        Evidence.TESTED,
        "locked memory",
        ("a daemon fails under systemd, and works from a shell",),
        "The files of the unit (`--unit NAME`, or that of this process): PrivateDevices, LimitMEMLOCK, DevicePolicy.",
        "PrivateDevices=yes hides /dev/infiniband; without LimitMEMLOCK the default is small.",
        "`systemctl edit NAME`: `[Service]`, `PrivateDevices=no`, `LimitMEMLOCK=infinity`",
        "ceph/ceph#13305",
        closed_unit,
    ),
    Rule(
        "D9",
        "rxe without IPv6",
        Evidence.INFERRED,
        "device",
        (
            "modprobe: ERROR: could not insert 'rdma_rxe': Operation not permitted",
            "rdma_rxe: failed to create udp socket. err = -97",
        ),
        "/proc/sys/net/ipv6 is not there, on Linux before 5.13, and rdma_rxe is not loaded.",
        "rxe of old kernels wants a tunnel socket of IPv6.",
        "boot without `ipv6.disable=1`, or a newer kernel",
        "linux-rdma list e90348d34",
        no_ipv6,
    ),
    Rule(
        "D10",
        "UDP port 4791 is taken",
        Evidence.SOURCE,
        "UDP port 4791",
        ("bind: Address already in use (UDP port 4791)", "open_device UDP port 4791: the port is in use"),
        "/proc/net/udp and udp6: who has port 4791 in this network namespace, if not rdmacm.",
        "The kernel's rxe has the port in this namespace, or another program has.",
        "`--provider kernel`; another network namespace for one of the two; `modprobe -r rdma_rxe`; end the program",
        "Linux 6.1 in experiments; linux-rdma list 32dc312a9",
        port_taken,
    ),
)
