"""What an errno of the kernel means for a call."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rdmacm.address import lookup_address
from rdmacm.errors import RdmaError
from rdmacm.kernel.bare_device import BareDevice
from rdmacm.kernel.reasons import no_group, reason_of
from rdmacm.kernel.sysfs import Sysfs
from rdmacm.kernel.ucma import Ucma
from rdmacm.verbs import MR, PD, AccessFlag
from rdmacm.verbs.device import Context


def test_an_errno_that_is_not_known_has_its_own_text() -> None:
    assert reason_of("bind_addr", errno.EADDRINUSE).text == "address and port are taken"
    assert reason_of("bind_addr", errno.EILSEQ) == (os.strerror(errno.EILSEQ), None)


@pytest.mark.parametrize(
    ("is_ethernet", "group", "send_only", "text"),
    [
        (True, "ff0e::1", True, "no IPv6 groups on RoCEv2"),
        (False, "ff0e::1", True, "for sending only"),
        (False, "239.1.2.3", False, "does not join this group"),
    ],
)
def test_groups(is_ethernet: bool, group: str, send_only: bool, text: str) -> None:
    assert text in no_group(is_ethernet, lookup_address((group, 0)), send_only).text


def test_no_device_file(tmp_path: Path) -> None:
    """Without the module, and with it but without the file: the cause, what to do, and the command that shows it."""
    for parts in (("rdma_ucm is not loaded", "'modprobe rdma_ucm'", "'ls /sys"), ("is not there", "--device=")):
        with pytest.raises(RdmaError) as caught:
            Ucma(str(tmp_path / "dev"), str(tmp_path))
        assert caught.value.errno == errno.ENODEV
        assert all(part in str(caught.value) for part in parts), caught.value
        (tmp_path / "class/misc/rdma_cm").mkdir(parents=True, exist_ok=True)
        (tmp_path / "class/misc/rdma_cm/abi_version").write_text("4\n")


def test_a_device_without_libibverbs_says_why(tmp_path: Path) -> None:
    """Its limits do not refuse anything before it can tell."""
    device = BareDevice("rxe0", Sysfs(str(tmp_path)), None)
    context = Context("rxe0", lambda: None, lambda: device)
    for memory in (bytearray(1), bytearray(1 << 20)):
        with pytest.raises(RdmaError) as caught:
            MR(PD(context), memory, AccessFlag.LOCAL_WRITE)
        assert caught.value.errno == errno.EOPNOTSUPP
        assert "apt install libibverbs1" in str(caught.value)
    assert context.query_device_ex().orig_attr is device.attr
    context.close()
