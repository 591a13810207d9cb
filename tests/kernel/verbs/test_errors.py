"""What is missing or forbidden on a host is an error that says so, with the command that mends it."""

from __future__ import annotations

import errno
import resource
from pathlib import Path

import pytest

from rdmacm.enums import AccessFlag
from rdmacm.errors import RdmaError
from rdmacm.kernel.verbs import refusals
from rdmacm.kernel.verbs.library import Library, code_of


def test_no_library() -> None:
    with pytest.raises(RdmaError) as caught:
        Library("libibverbs-of-nobody.so.1")
    assert caught.value.errno == errno.ENOENT
    assert "libibverbs-of-nobody.so.1" in str(caught.value)
    assert "apt install libibverbs1" in str(caught.value)


def test_library_that_is_another_one() -> None:
    with pytest.raises(RdmaError) as caught:
        Library("libc.so.6")
    assert caught.value.errno == errno.ENOSYS
    assert "no ibv_get_device_list" in str(caught.value)


def test_memlock_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    error = refusals.refusal(errno.ENOMEM, "reg_mr", "rxe0")
    assert error.errno == errno.ENOMEM
    assert "64 KiB" in str(error)
    assert "ulimit -l unlimited" in str(error)


def test_no_memory_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert "ulimit" not in str(refusals.refusal(errno.ENOMEM, "reg_mr", "rxe0"))


def test_node_that_is_not_there() -> None:
    error = refusals.open_refusal("rxe0", "uverbs-of-nobody", errno.ENOENT)
    assert error.errno == errno.ENOENT
    assert "/dev/infiniband/uverbs-of-nobody" in str(error)
    assert "--device=" in str(error)


def test_neighbour_that_is_not_found() -> None:
    error = refusals.refusal(errno.ETIMEDOUT, "modify_qp", "rxe0")
    assert isinstance(error, TimeoutError)
    assert "hardware address" in str(error)


def test_results_of_drivers() -> None:
    assert code_of(errno.EINVAL) == errno.EINVAL
    assert code_of(-errno.EINVAL) == errno.EINVAL


def test_device_that_libibverbs_does_not_list(tmp_path: Path) -> None:
    """Which of these it is: no such device, no module, no node, no driver."""

    def why() -> str:
        error = refusals.absence("rxe0", ["rxe1"], str(tmp_path))
        assert error.errno in (errno.ENODEV, errno.ENOENT)
        return str(error)

    assert "one of: rxe1" in why()
    (tmp_path / "class/infiniband/rxe0").mkdir(parents=True)
    assert "modprobe ib_uverbs" in why()
    node = tmp_path / "class/infiniband_verbs/uverbs77"
    node.mkdir(parents=True)
    (node / "ibdev").write_text("rxe0\n")
    assert "there is no /dev/infiniband/uverbs77" in why()
    (node / "ibdev").write_text("rxe1\n")
    assert "apt install ibverbs-providers" in why()


@pytest.mark.parametrize(
    ("access", "code", "text"),
    [
        (AccessFlag.ON_DEMAND, errno.EOPNOTSUPP, "no on-demand paging"),
        (AccessFlag.HUGETLB, errno.EOPNOTSUPP, "no regions of huge pages"),
        (AccessFlag.ZERO_BASED, errno.EINVAL, "zero-based"),
        (AccessFlag.LOCAL_WRITE, errno.EOPNOTSUPP, "Operation not supported"),
    ],
)
def test_access_that_the_device_lacks(access: AccessFlag, code: int, text: str) -> None:
    error = refusals.not_registered(code, int(access), "rxe0")
    assert error.errno == code
    assert text in str(error)
