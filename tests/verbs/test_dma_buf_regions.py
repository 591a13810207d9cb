"""Memory regions of dma-bufs."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest

from rdmacm import RdmaError
from rdmacm.cma import ibv_reg_dmabuf_mr
from rdmacm.verbs import MR, PD, AccessFlag, Context, DmaBufMR
from support.verbs import RecordingDevice

_LOCAL = AccessFlag.LOCAL_WRITE


def refused(call: Callable[[], object], code: int) -> None:
    with pytest.raises(RdmaError) as caught:
        call()
    assert caught.value.errno == code


def test_a_region_of_a_dma_buf() -> None:
    device = RecordingDevice()
    with Context("mem0", lambda: None, lambda: device) as context, PD(context) as pd:
        with DmaBufMR(pd, 8192, _LOCAL, 5, 4096) as mr:
            assert isinstance(mr, MR)
            assert (mr.addr, mr.length, len(mr.buf)) == (4096, 8192, 0)
            sge = mr.sge(16, 32)
            assert (sge.addr, sge.length, sge.lkey) == (4112, 32, mr.lkey)
            for call in (lambda: mr.read(1), lambda: mr.write(b"x"), lambda: mr.rereg(1, pd)):
                refused(call, errno.EOPNOTSUPP)
        with ibv_reg_dmabuf_mr(pd, 0, 4096, 1 << 40, 6, _LOCAL) as mr:
            assert mr.addr == 1 << 40
        assert device.dmabufs == [(4096, 8192, 4096, 5), (0, 4096, 1 << 40, 6)]
        for length, access, fd, offset in (
            (0, _LOCAL, 5, 0),
            (4096, _LOCAL, -1, 0),
            (4096, _LOCAL, 5, -1),
            (4096, _LOCAL, 5, (1 << 64) - 4095),
            (4096, AccessFlag.REMOTE_WRITE, 5, 0),
            (4096, 1 << 30, 5, 0),
        ):
            refused(lambda: DmaBufMR(pd, length, access, fd, offset), errno.EINVAL)  # noqa: B023
        refused(lambda: DmaBufMR(pd, 4096, _LOCAL, 5, 0, (1 << 64) - 1), errno.EINVAL)


def test_software_devices_have_none() -> None:
    from rdmacm import open_device

    with open_device("soft_lo", provider="soft") as context, PD(context) as pd:
        refused(lambda: DmaBufMR(pd, 4096, _LOCAL, 0), errno.EOPNOTSUPP)
