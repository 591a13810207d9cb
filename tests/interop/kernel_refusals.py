"""What a host lacks or forbids, and the error that says so, one function for each case.

python3 -m interop.kernel_refusals [NAME...]

Each case runs in a process of its own, as it changes limits, users and files that are put back afterwards.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rdmacm import (
    CmId,
    EventChannel,
    PortSpace,
    RdmaError,
    connect,
    devices,
    explain,
    open_device,
)
from rdmacm.kernel.verbs import library
from rdmacm.provider import get_provider
from rdmacm.verbs import MR, PD, AccessFlag, QPInitAttr, QPType

HERE, HERE6, SOFT = "10.0.0.1", "fd00:0:0:1::1", "10.0.0.2"
NODES = "/dev/infiniband"
#: Of a user without capabilities.
USER = 1000


def refused(code: int, call: Callable[[], object], *parts: str) -> None:
    """Fail unless ``call`` raises this errno with these parts in its text."""
    found: RdmaError | None = None
    try:
        call()
    except RdmaError as error:
        found = error
    assert found is not None, f"no {errno.errorcode[code]}"
    assert found.errno == code, found
    missing = [part for part in parts if part not in str(found)]
    assert not missing, (missing, str(found))


@contextmanager
def hidden(path: str) -> Iterator[None]:
    os.rename(path, path + ".hidden")
    try:
        yield
    finally:
        os.rename(path + ".hidden", path)


@contextmanager
def mode(path: str, bits: int) -> Iterator[None]:
    before = os.stat(path).st_mode & 0o777
    os.chmod(path, bits)
    try:
        yield
    finally:
        os.chmod(path, before)


def as_user(call: Callable[[], None]) -> None:
    """Run this in a child that is not root."""
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(USER)
            os.setuid(USER)
            call()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def channel() -> None:
    EventChannel("kernel").close()


def register(size: int) -> None:
    MR(PD(open_device("rxe0", provider="kernel")), bytearray(size), AccessFlag.LOCAL_WRITE).close()


def bind(address: str, port: int = 0, space: PortSpace = PortSpace.TCP) -> None:
    with EventChannel("kernel") as events, CmId(events, space) as cmid:
        cmid.bind_addr((address, port))


def no_node_of_the_connection_manager() -> None:
    with hidden(f"{NODES}/rdma_cm"):
        refused(errno.ENODEV, channel, f"{NODES}/rdma_cm is not there", "--device=", "'ls -l /dev/infiniband'")
        assert get_provider().name == "soft"


def no_permission_for_the_connection_manager() -> None:
    with mode(f"{NODES}/rdma_cm", 0o600):
        as_user(lambda: refused(errno.EACCES, channel, "mode 600", "'chmod 666", "'ls -l"))


def no_node_of_the_device() -> None:
    with hidden(f"{NODES}/uverbs0"):
        refused(errno.ENOENT, lambda: register(4096), f"there is no {NODES}/uverbs0", "modprobe ib_uverbs", "'ls -l")
        assert [device.name for device in devices("kernel")] == ["rxe0"]
        with EventChannel("kernel") as events, CmId(events) as cmid:
            cmid.bind_addr((HERE, 0))  # connecting needs no queue pair of its own
            refused(errno.ENOENT, lambda: cmid.create_qp(QPInitAttr(QPType.RC)), "uverbs0")


def no_permission_for_the_device() -> None:
    with mode(f"{NODES}/uverbs0", 0o600):
        as_user(lambda: refused(errno.EACCES, lambda: register(4096), f"permission to open {NODES}/uverbs0", "'ls -l"))


def too_little_locked_memory() -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        register(4096)
        refused(errno.ENOMEM, lambda: register(1 << 20), "64 KiB", "'ulimit -l unlimited'", "'ulimit -l' shows")

    as_user(limited)


def no_library() -> None:
    refused(errno.ENOENT, lambda: library.Library("libibverbs-of-nobody.so.1"), "apt install libibverbs1", "ldconfig")


def a_port_that_takes_a_capability() -> None:
    as_user(lambda: refused(errno.EACCES, lambda: bind(HERE, 80), "CAP_NET_BIND_SERVICE", "CapEff"))


def an_address_of_no_device() -> None:
    refused(errno.EADDRNOTAVAIL, lambda: bind("192.0.2.1"), "not an address of this host")
    refused(errno.EINVAL, lambda: bind("fe80::1"), "interface")


def groups_that_the_kernel_does_not_join() -> None:
    with EventChannel("kernel") as events, CmId(events, PortSpace.UDP) as cmid:
        cmid.bind_addr((HERE6, 0))
        join = lambda: cmid.join_multicast(("ff0e::1234", 0))  # noqa: E731
        refused(errno.EOPNOTSUPP, join, "join_multicast [ff0e::1234]:0", "no IPv6 groups on RoCEv2", "an IPv4 group")


def a_device_of_another_namespace() -> None:
    """Run in the namespace soft, where rxe0 is visible and its interface is not."""
    (device,) = devices("kernel")
    assert {row.ndev_name for port in device.ports for row in port.gids} == {""}
    why = "the network interface of rxe0 is in another network namespace", "'rdma system'"
    refused(errno.ENODEV, lambda: bind(SOFT), *why)
    refused(errno.EADDRNOTAVAIL, lambda: bind(HERE), "10.0.0.1 is an address of rxe0 in another network namespace")
    found = explain(HERE, 7471, provider="kernel")
    assert (found.ok, found.errno) == (False, errno.ENODEV), found
    assert why[0] in str(found.message), found
    assert "rdma dev set rxe0 netns" in str(found.hint), found
    refused(errno.ENODEV, lambda: connect((HERE, 7471), provider="kernel"), why[0])
    assert get_provider().name == "soft"


CASES = (
    no_node_of_the_connection_manager,
    no_permission_for_the_connection_manager,
    no_node_of_the_device,
    no_permission_for_the_device,
    too_little_locked_memory,
    no_library,
    a_port_that_takes_a_capability,
    an_address_of_no_device,
    groups_that_the_kernel_does_not_join,
)
#: Run by its name.
ELSEWHERE = (a_device_of_another_namespace,)


def main() -> None:
    failed = []
    chosen = [case for case in (*CASES, *ELSEWHERE) if case.__name__ in sys.argv[1:]] or CASES
    for case in chosen:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            try:
                case()
                os._exit(0)
            except BaseException:
                with suppress(BaseException):
                    print(f"{case.__name__}:", file=sys.stderr)
                    traceback.print_exc()
                    sys.stderr.flush()
                os._exit(1)
        if os.waitpid(child, 0)[1]:
            failed.append(case.__name__)
    print(f"failed: {', '.join(failed)}" if failed else "as expected")


if __name__ == "__main__":
    main()
