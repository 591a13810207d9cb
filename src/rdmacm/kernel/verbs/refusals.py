"""The errors of libibverbs' functions: what has failed, why, and the command that mends it."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

from rdmacm.capabilities import RARE_ACCESS, Feature, absent
from rdmacm.enums import AccessFlag
from rdmacm.errors import RdmaError, cm_error
from rdmacm.kernel.verbs.library import code_of, last_error

#: Calls that lock memory: ENOMEM may be the limit of RLIMIT_MEMLOCK.
_LOCKING = frozenset({"reg_mr", "rereg_mr", "create_cq", "resize_cq", "create_qp", "create_srq", "modify_srq"})
_MEMLOCK_HINT = (
    "'ulimit -l unlimited', '* - memlock unlimited' in /etc/security/limits.conf, for a container --ulimit memlock=-1, "
    "for a unit of systemd LimitMEMLOCK=infinity; 'ulimit -l' shows the limit (rdmacm doctor D7)"
)
#: What a driver lacks that answers EOPNOTSUPP.
_FEATURES = {
    "alloc_mw": Feature.MEMORY_WINDOWS,
    "create_ah": Feature.QP_UD,
    "open_xrcd": Feature.XRC,
    "reg_dmabuf_mr": Feature.DMA_BUFS,
}
_MODIFY_QP = {
    errno.ETIMEDOUT: (
        "the hardware address of the destination's GID was not found",
        "'ping -I SOURCE PEER' with the addresses of the two GIDs; 'ip neigh' shows what was found (rdmacm doctor A10)",
    ),
    errno.ENODEV: (
        "the device is gone, or the GID's network interface is in another network namespace",
        "'rdma link' and 'ip -br addr' show the interfaces here (rdmacm doctor N1)",
    ),
}


def refusal(code: int, step: str, device: str) -> RdmaError:
    """The error of a function that failed with ``code``."""
    text, hint = os.strerror(code), None
    if code == errno.EOPNOTSUPP and step in _FEATURES:
        return absent(_FEATURES[step], step, device, "the device")
    if code == errno.ENOMEM and step in _LOCKING:
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if limit != resource.RLIM_INFINITY:
            text = f"{text}; the limit of locked memory is {limit // 1024} KiB"
            hint = _MEMLOCK_HINT
    elif code == errno.EIO:
        text = f"{text}: the device has been removed, or has failed"
        hint = "'rdma link' shows the devices, 'dmesg' the driver's messages"
    elif step == "modify_qp" and code in _MODIFY_QP:
        text, hint = _MODIFY_QP[code]
    return cm_error(code, text, step, device, hint)


def check(result: int, step: str, device: str) -> None:
    """Raise for a function's result that is not 0."""
    if result:
        raise refusal(code_of(result), step, device)


def made(address: int | None, step: str, device: str) -> int:
    """The object that a function has made; raise for a null pointer."""
    if not address:
        raise refusal(last_error(), step, device)
    return address


def absence(name: str, others: list[str], sys: str = "/sys") -> RdmaError:
    """The error for a device that is not among those of libibverbs, ``others``. ``sys``: where sysfs is mounted."""
    if not os.path.exists(f"{sys}/class/infiniband/{name}"):
        hint = f"one of: {', '.join(others)}" if others else "'rdma link' shows the devices"
        return cm_error(errno.ENODEV, "there is no such device", "open_device", name, hint)
    nodes = {_ibdev(path): path.name for path in Path(sys, "class/infiniband_verbs").glob("uverbs*")}
    if not nodes:
        text = "the kernel module ib_uverbs is not loaded"
        hint = "'modprobe ib_uverbs'; 'ls /sys/class/infiniband_verbs' shows whether it is loaded"
    elif name in nodes and not os.path.exists(f"/dev/infiniband/{nodes[name]}"):  # libibverbs leaves such devices out
        return open_refusal(name, nodes[name], errno.ENOENT)
    else:
        text = "libibverbs has no driver for the device"
        hint = "'apt install ibverbs-providers'; 'ibv_devices' shows the devices with a driver (rdmacm doctor D3)"
    return cm_error(errno.ENODEV, text, "open_device", name, hint)


def _ibdev(path: Path) -> str:
    """The device that a node of ib_uverbs belongs to."""
    try:
        return (path / "ibdev").read_text().strip()
    except OSError:
        return ""


def not_registered(code: int, access: int, device: str) -> RdmaError:
    """The error of registering memory: the access that the device lacks, if that is why."""
    for flag, feature in RARE_ACCESS.items():
        # Linux before 6.2 says EINVAL of on-demand paging.
        if access & flag and (code == errno.EOPNOTSUPP or (code, flag) == (errno.EINVAL, AccessFlag.ON_DEMAND)):
            return absent(feature, "reg_mr", device, "the device", code=code)
    if code == errno.EINVAL and access & AccessFlag.ZERO_BASED:
        text = "the device has no zero-based regions, or the buffer does not begin at a page"
        return cm_error(code, text, "reg_mr", device, "access without ZERO_BASED, or a buffer of mmap")
    return refusal(code, "reg_mr", device)


def open_refusal(name: str, node: str, code: int) -> RdmaError:
    """The error of ibv_open_device(3): what is wrong with the device's node."""
    path = f"/dev/infiniband/{node}"
    if not os.path.exists(path):
        text = f"there is no {path}"
        shown = "'ls -l /dev/infiniband' shows the nodes (rdmacm doctor D4)"
        hint = f"'modprobe ib_uverbs', in a container --device={path}; {shown}"
        return cm_error(errno.ENOENT, text, "open_device", name, hint)
    if not os.access(path, os.R_OK | os.W_OK):
        text = f"no permission to open {path}"
        hint = f"'chmod a+rw {path}', or the group that owns it; 'ls -l {path}' shows mode and owner (rdmacm doctor D4)"
        return cm_error(errno.EACCES, text, "open_device", name, hint)
    if code in (errno.EPERM, errno.EACCES):
        text = f"{path} may not be opened: the device cgroup forbids it"
        hint = f"--device={path} of the container; 'cat /proc/self/cgroup' shows the cgroup (rdmacm doctor D4)"
        return cm_error(code, text, "open_device", name, hint)
    return refusal(code, "open_device", name)
