"""What the provider ``auto`` is on a host with the kernel's devices, and what is said about it.

python3 -m interop.kernel_choice RULE

Each rule takes a process of its own: the choice is made once.
"""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import rdmacm
from rdmacm import CmId, EventChannel, RdmaError, explain

HERE, PEER = "10.0.0.1", "10.0.1.2"
CM_FILE, VERBS_FILE = "/dev/infiniband/rdma_cm", "/dev/infiniband/uverbs0"


def reason() -> str:
    """Why ``auto`` is soft, by explain(), whose text has the reason too."""
    found = explain(HERE, 7471)
    assert found.provider == "soft", found
    assert f"(provider soft, because {found.provider_reason})" in str(found), found
    return found.provider_reason


def refused(code: int, call: Callable[[], object]) -> RdmaError:
    found: RdmaError | None = None
    try:
        call()
    except RdmaError as error:
        found = error
    assert found is not None, f"no {errno.errorcode[code]}"
    assert found.errno == code, found
    return found


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rdmacm", *arguments], capture_output=True, text=True, check=False)


@contextmanager
def without(path: str) -> Iterator[None]:
    os.rename(path, f"{path}.hidden")
    try:
        yield
    finally:
        os.rename(f"{path}.hidden", path)


@contextmanager
def mode(path: str, bits: int) -> Iterator[None]:
    before = os.stat(path).st_mode & 0o777
    os.chmod(path, bits)
    try:
        yield
    finally:
        os.chmod(path, before)


def as_nobody(work: Callable[[], None]) -> None:
    """Run ``work`` in a child process without privileges."""
    child = os.fork()
    if not child:
        try:
            os.setuid(65534)
            work()
            os._exit(0)
        except BaseException as error:
            print("in the child:", repr(error), flush=True)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


# -- beside rdma_rxe --------------------------------------------------------------------------------------


def a_usable_device_is_chosen_without_a_reason() -> None:
    found = explain(HERE, 7471)
    assert (found.provider, found.provider_reason) == ("kernel", ""), found
    assert "auto" not in tool("devices").stdout


def a_connection_manager_that_may_not_be_opened() -> None:
    with mode(CM_FILE, 0o600):
        as_nobody(lambda: _starts(f"{CM_FILE}: no permission to read and write (mode 600)"))


def a_device_file_that_may_not_be_opened() -> None:
    with mode(VERBS_FILE, 0o600):
        as_nobody(lambda: _starts(f"{VERBS_FILE}, the file of rxe0, may not be opened"))


def _starts(text: str) -> None:
    found = reason()
    assert found.startswith(text), found


def a_module_that_is_not_loaded() -> None:
    with without(CM_FILE):
        _starts(f"the kernel module rdma_ucm is loaded, but {CM_FILE} is not there")


def a_library_that_is_missing() -> None:
    (library,) = {os.path.realpath(path) for path in ("/usr/lib/x86_64-linux-gnu/libibverbs.so.1",)}
    with without(library):
        shown = tool("explain", HERE).stdout
    assert "(provider soft, because the library cannot be loaded: libibverbs.so.1" in " ".join(shown.split()), shown


def a_port_that_is_down() -> None:
    subprocess.run(["ip", "link", "set", "va", "down"], check=True)
    assert reason() == "port 1 of rxe0 is DOWN"
    shown = tool("devices").stdout
    assert "provider auto is soft, because port 1 of rxe0 is DOWN" in shown, shown
    refused = tool("rping", "-c", "-a", HERE, "-C", "1")
    assert "rdmacm: provider soft, because port 1 of rxe0 is DOWN" in refused.stderr, refused


def a_loopback_address_is_not_the_kernels() -> None:
    """The kernel's driver has UDP port 4791, so the software device cannot be used either; the errors say what can."""
    for host in ("127.0.0.1", "::1", "localhost"):
        for call in (partial(rdmacm.listen, (host, 0)), partial(rdmacm.connect, (host, 7471))):
            error = refused(errno.EADDRINUSE, call)
            assert "modprobe -r rdma_rxe" in str(error.hint), error
            assert "rdmacm devices" in str(error.hint), error
            reason = f"the kernel's devices have no path to a loopback address such as {host}"
            assert f"provider soft, because {reason}" in error.__notes__, error.__notes__
    with rdmacm.listen((HERE, 0)) as listener:
        assert listener.id.channel.provider.name == "kernel"


def a_loopback_listener_of_the_kernel_warns() -> None:
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("rdmacm").addHandler(Handler())
    for loopback, other in (("127.0.0.1", HERE), ("::1", "fd00:0:0:1::1")):
        said.clear()
        with rdmacm.listen((loopback, 7471), provider="kernel") as listener:
            assert len(said) == 1, said
            assert "also from the network" in said[0], said
            assert f"try: {other}, an address of an RDMA device, or the provider soft at both ends" in said[0], said
            # What it warns of is so.
            thread = threading.Thread(target=lambda listener=listener: listener.accept().close())
            thread.start()
            rdmacm.connect((other, 7471), provider="kernel").close()
            thread.join()
        error = refused(errno.ENODEV, partial(rdmacm.connect, (loopback, 7471), provider="kernel"))
        assert error.step == "resolve_route", error
        assert error.hint == f"{other}, an address of an RDMA device, or the provider soft at both ends", error
    said.clear()
    with CmId(provider="kernel") as wildcard:
        wildcard.bind_addr(("", 0))
        wildcard.listen()
    assert not said


def a_host_without_sysfs() -> None:
    """The device is listed, predicted and connected all the same."""
    subprocess.run(["mount", "-t", "tmpfs", "none", "/sys"], check=True)
    try:
        listed = tool("devices").stdout
        found = explain(HERE, 7471)
        with rdmacm.listen((HERE, 0)) as listener:
            accepted = threading.Thread(target=lambda: listener.accept().close())
            accepted.start()
            rdmacm.connect((HERE, listener.port)).close()
            accepted.join()
    finally:
        subprocess.run(["umount", "/sys"], check=True)
    assert "rxe0/1" in listed, listed
    assert found.provider == "kernel", found
    assert "no device was expected" not in str(found), found


def the_port_of_a_deleted_device_stays_taken() -> None:
    subprocess.run(["rdma", "link", "delete", "rxe0"], check=True)
    error = refused(errno.EADDRINUSE, partial(rdmacm.listen, (HERE, 0)))
    assert "the kernel keeps the port when the last link is deleted" in str(error.hint), error
    # What the hint says does help.
    script = "import rdmacm; rdmacm.listen(('127.0.0.1', 0)).close()"
    subprocess.run(["ip", "netns", "exec", "soft", sys.executable, "-c", script], check=True)


# -- beside siw, in a network namespace without rdma_rxe ---------------------------------------------------


def a_loopback_address_is_the_software_devices() -> None:
    with EventChannel() as channel:
        assert channel.provider.name == "kernel"
    for host in ("127.0.0.1", "::1", "localhost"):
        with rdmacm.listen((host, 0)) as listener:
            accepted = threading.Thread(target=lambda listener=listener: listener.accept().close())
            accepted.start()
            with rdmacm.connect((host, listener.port)) as conn:
                assert conn.id.channel.provider.name == "soft"
            accepted.join()
        found = explain(host, 7471)
        assert (found.provider, found.ok) == ("soft", True), found
        assert "no path to a loopback address" in found.provider_reason, found
    rdmacm.listen((PEER, 0)).close()
    assert explain(PEER, 7471).provider == "kernel"


RULES = (
    a_usable_device_is_chosen_without_a_reason,
    a_connection_manager_that_may_not_be_opened,
    a_device_file_that_may_not_be_opened,
    a_module_that_is_not_loaded,
    a_library_that_is_missing,
    a_loopback_address_is_not_the_kernels,
    a_loopback_listener_of_the_kernel_warns,
    a_port_that_is_down,
    a_host_without_sysfs,
    the_port_of_a_deleted_device_stays_taken,
    a_loopback_address_is_the_software_devices,
)


def main() -> None:
    (rule,) = (rule for rule in RULES if rule.__name__ == sys.argv[1])
    rule()
    print("as expected")


if __name__ == "__main__":
    main()
