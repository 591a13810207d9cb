"""What every device has without a connection: attributes, memory, queues. Makes the device where there is none."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

from kernel.verbs_guest.pair import open_context, outcome, refused, run_checks
from rdmacm.kernel import verbs
from rdmacm.verbs import (
    CQ,
    MR,
    PD,
    QP,
    SRQ,
    AccessFlag,
    CompChannel,
    DmaBufMR,
    NodeType,
    QPCap,
    QPInitAttr,
    QPState,
    QPType,
    RecvWR,
    ReregMRFlag,
    SrqAttr,
    SrqAttrMask,
    SrqInitAttr,
    TransportType,
)


def node_of(name: str) -> str:
    """``/dev/infiniband/uverbs0``."""
    for node in Path("/sys/class/infiniband_verbs").glob("uverbs*"):
        if (node / "ibdev").read_text().strip() == name:
            return f"/dev/infiniband/{node.name}"
    raise AssertionError(f"{name} has no node")


def check_attributes(name: str) -> None:
    assert name in verbs.device_names()
    device = verbs.open_device(name)
    assert verbs.open_device(name) is device
    found = verbs.read_device(name)
    is_iwarp = name.startswith("siw")
    assert found.name == name
    assert found.node_type is (NodeType.RNIC if is_iwarp else NodeType.CA)
    assert found.transport_type is (TransportType.IWARP if is_iwarp else TransportType.IB)
    (port,) = found.ports
    assert port.gids[0].ndev_name == "va"
    assert len(port.pkeys) == port.pkey_tbl_len
    with open(f"/sys/class/infiniband/{name}/node_guid") as file:
        assert found.guid_text == file.read().strip()
    assert device.attr.max_qp > 0
    assert device.attr_ex.orig_attr is device.attr
    with open_context(name) as context:
        assert context.query_device_ex() is device.attr_ex
    counters = device.query_counters()
    assert all(isinstance(value, int) for value in counters.values())
    error = refused(lambda: verbs.open_device("rdma-of-nobody"))
    assert error.errno == errno.ENODEV
    assert name in str(error)


def check_memory(name: str) -> None:
    with open_context(name) as context, PD(context) as pd, PD(context) as other:
        buffer = bytearray(10000)
        with MR(pd, buffer, AccessFlag.LOCAL_WRITE | AccessFlag.REMOTE_READ) as mr:
            assert mr.length == 10000
            mr.buf.release()
            try:
                buffer.append(1)
            except BufferError:
                pass
            else:
                raise AssertionError("a registered buffer was resized")
        buffer.append(1)
        with MR(pd, b"constant", 0) as constant:
            assert constant.length == 8
        with MR(pd, buffer, AccessFlag.LOCAL_WRITE) as mr:
            # Neither device's driver in rdma-core 44 has this.
            done = outcome(lambda: mr.rereg(ReregMRFlag.CHANGE_PD, pd=other))
            assert done in (None, errno.EOPNOTSUPP, errno.ENOSYS), done
            assert mr.pd is (other if done is None else pd)
        error = refused(lambda: MR(pd, buffer, AccessFlag.LOCAL_WRITE | AccessFlag.ON_DEMAND))
        assert error.errno in (errno.EOPNOTSUPP, errno.EINVAL), error
        assert "no on-demand paging" in str(error), error
        error = refused(lambda: DmaBufMR(pd, 4096, AccessFlag.LOCAL_WRITE, 0))
        assert error.errno == errno.EOPNOTSUPP, error
        assert "no regions of dma-bufs" in str(error), error


def check_queues(name: str) -> None:
    with open_context(name) as context, PD(context) as pd, CompChannel(context) as channel:
        with CQ(context, 10, channel) as cq, CQ(context, 20) as other:
            assert cq.cqe >= 10
            cq.req_notify()
            assert cq.poll(5) == []
            assert not other.wait(0.01)
            with SRQ(pd, SrqInitAttr(SrqAttr(10, 2))) as srq, MR(pd, bytearray(8), AccessFlag.LOCAL_WRITE) as mr:
                srq.post_recv([RecvWR(number, [mr.sge()]) for number in range(5)])
                assert srq.query().max_wr >= 10
                srq.modify(SrqAttr(srq_limit=3), SrqAttrMask.LIMIT)
                assert srq.query().srq_limit == 3
                with QP(pd, QPInitAttr(QPType.RC, None, cq, other, srq, QPCap(4, 0))) as qp:
                    assert qp.state is QPState.RESET
                    assert refused(srq.close).errno == errno.EBUSY
            with QP(pd, QPInitAttr(QPType.RC, None, cq, other, None, QPCap(4, 4, 2, 2))) as qp:
                # rdma_rxe and siw grant more than these.
                for cap in (qp.cap, qp.query()[0].cap, qp.query()[1].cap):
                    assert min(cap.max_send_wr, cap.max_recv_wr) >= 4
                    assert min(cap.max_send_sge, cap.max_recv_sge) >= 2
                assert refused(lambda: qp.post_send([])) is not None


def check_memlock_limit(name: str) -> None:
    """A user without privileges is told why memory cannot be registered."""
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        return
    import resource

    try:
        os.chmod(node_of(name), 0o666)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
        os.setuid(65534)
        with open_context(name) as context, PD(context) as pd:
            error = refused(lambda: MR(pd, bytearray(1 << 20), AccessFlag.LOCAL_WRITE))
            assert error.errno == errno.ENOMEM, error
            assert "64 KiB" in str(error), error
            assert "ulimit -l" in str(error), error
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def check_permission(name: str) -> None:
    """A user who may not open the node is told which."""
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        return
    try:
        os.chmod(node_of(name), 0o600)
        os.setuid(65534)
        error = refused(lambda: verbs.open_device(name))
        assert error.errno == errno.EACCES, error
        assert node_of(name) in str(error), error
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    name = sys.argv[1]
    if not os.path.exists(f"/sys/class/infiniband/{name}"):
        kind = name.rstrip("0123456789")
        subprocess.run(["rdma", "link", "add", name, "type", kind, "netdev", "va"], check=True)
    try:
        run_checks(globals())
    finally:
        for node in os.listdir("/dev/infiniband"):
            os.chmod(f"/dev/infiniband/{node}", 0o666)
