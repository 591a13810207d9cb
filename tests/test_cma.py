"""The functions with C's names: clients, servers and helpers written as in the manual pages."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import rdmacm
from rdmacm import ConnParam, Ece, cma
from rdmacm.cma import (
    RDMA_CM_EVENT_ADDR_RESOLVED,
    RDMA_CM_EVENT_ADDRINFO_RESOLVED,
    RDMA_CM_EVENT_ROUTE_RESOLVED,
    RDMA_CM_EVENT_USER,
    RDMA_OPTION_ID,
    RDMA_OPTION_ID_REUSEADDR,
    RDMA_PS_TCP,
    rdma_ack_cm_event,
    rdma_bind_addr,
    rdma_create_event_channel,
    rdma_create_id,
    rdma_destroy_event_channel,
    rdma_destroy_id,
    rdma_event_str,
    rdma_free_devices,
    rdma_freeaddrinfo,
    rdma_get_cm_event,
    rdma_get_devices,
    rdma_get_dst_port,
    rdma_get_local_addr,
    rdma_get_peer_addr,
    rdma_get_src_port,
    rdma_getaddrinfo,
    rdma_migrate_id,
    rdma_query_addrinfo,
    rdma_resolve_addr,
    rdma_resolve_addrinfo,
    rdma_resolve_route,
    rdma_set_option,
    rdma_write_cm_event,
)
from rdmacm.tools.rping import ping_text


def test_client_resolves_over_loopback() -> None:
    res = rdma_getaddrinfo("127.0.0.1", "7471", rdmacm.AddrInfo(port_space=RDMA_PS_TCP))
    channel = rdma_create_event_channel()
    id = rdma_create_id(channel, "context", RDMA_PS_TCP)
    try:
        assert res[0].dst_addr is not None
        rdma_resolve_addr(id, None, res[0].dst_addr, 2000)
        event = rdma_get_cm_event(channel)
        assert (event.id, event.type, event.status) == (id, RDMA_CM_EVENT_ADDR_RESOLVED, 0)
        assert rdma_event_str(event.type) == "RDMA_CM_EVENT_ADDR_RESOLVED"
        rdma_ack_cm_event(event)
        rdma_resolve_route(id, 2000)
        event = rdma_get_cm_event(channel)
        assert event.type == RDMA_CM_EVENT_ROUTE_RESOLVED
        rdma_ack_cm_event(event)
        assert rdma_get_peer_addr(id) == ("127.0.0.1", 7471)
        assert rdma_get_local_addr(id) == ("127.0.0.1", rdma_get_src_port(id))
        assert rdma_get_dst_port(id) == 7471
        assert id.context == "context"
        rdma_freeaddrinfo(res)
        assert res == []
        rdma_freeaddrinfo(None)
    finally:
        rdma_destroy_id(id)
        rdma_destroy_event_channel(channel)


def test_options_migration_lookup_and_devices_work() -> None:
    channel = rdma_create_event_channel()
    id = rdma_create_id(channel)
    other = rdma_create_event_channel()
    try:
        rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, 1)
        rdma_bind_addr(id, ("127.0.0.1", 0))
        rdma_write_cm_event(id, RDMA_CM_EVENT_USER, 3, 4)
        rdma_migrate_id(id, other)
        event = rdma_get_cm_event(other)
        assert (event.type, event.status, event.arg) == (RDMA_CM_EVENT_USER, 3, 4)
        rdma_ack_cm_event(event)
        rdma_resolve_addrinfo(id, "127.0.0.1", "7471")
        event = rdma_get_cm_event(other)
        assert event.type == RDMA_CM_EVENT_ADDRINFO_RESOLVED
        rdma_ack_cm_event(event)
        assert rdma_query_addrinfo(id)[0].dst_addr == ("127.0.0.1", 7471)
        devices = rdma_get_devices()
        assert any(context.name == "soft_lo" for context in devices)
        assert devices[0].query_port(1).port_num == 1
        rdma_free_devices(devices)
        assert devices == []
    finally:
        rdma_destroy_id(id)
        rdma_destroy_event_channel(channel)
        rdma_destroy_event_channel(other)


def test_synchronous_id_resolves_and_raises() -> None:
    id = rdma_create_id(None)
    try:
        rdma_resolve_addr(id, None, ("127.0.0.1", 1), 2000)
        rdma_resolve_route(id, 2000)
        assert id.route.num_paths == 1
        with pytest.raises(rdmacm.CmStateError):
            rdma_bind_addr(id, ("127.0.0.1", 0))
    finally:
        rdma_destroy_id(id)


ROOT = Path(__file__).parents[1]


def refused(call: Callable[[], object], code: int = errno.EINVAL) -> None:
    with pytest.raises(rdmacm.RdmaError) as error:
        call()
    assert error.value.errno == code


def test_constants_have_the_values_of_the_headers() -> None:
    assert (cma.RDMA_MAX_RESP_RES, cma.RDMA_MAX_INIT_DEPTH, cma.RDMA_UDP_QKEY) == (255, 255, 0x01234567)
    assert (cma.IBV_ACCESS_LOCAL_WRITE, cma.IBV_ACCESS_REMOTE_ATOMIC) == (1, 8)
    assert (cma.IBV_WR_RDMA_WRITE, cma.IBV_WR_SEND, cma.IBV_WR_ATOMIC_FETCH_AND_ADD) == (0, 2, 6)
    assert (cma.IBV_SEND_FENCE, cma.IBV_SEND_SIGNALED, cma.IBV_SEND_INLINE) == (1, 2, 8)
    assert (cma.IBV_WC_SUCCESS, cma.IBV_WC_WR_FLUSH_ERR, cma.IBV_WC_RECV, cma.IBV_WC_WITH_IMM) == (0, 5, 128, 2)
    assert (cma.IBV_QPS_RTS, cma.IBV_QPT_RC, cma.IBV_QP_STATE, cma.IBV_MTU_1024) == (3, 2, 1, 3)
    assert (cma.IBV_EVENT_COMM_EST, cma.IBV_PATH_FLAG_BIDIRECTIONAL) == (4, 40)


def test_rdma_verbs_helpers_transfer_data() -> None:
    def serve() -> None:
        try:
            id = cma.rdma_get_request(listen_id)
            cma.rdma_create_srq(id, None, rdmacm.verbs.SrqInitAttr(rdmacm.verbs.SrqAttr(4)))
            cma.rdma_create_qp(id, None, attr())
            inbox = bytearray(32)
            mr = cma.rdma_reg_msgs(id, inbox)
            cma.rdma_post_recv(id, 1, inbox, 16, mr)
            cma.rdma_accept(id, ConnParam(b"welcome"))
            shared = cma.rdma_reg_write(id, window)
            readable = cma.rdma_reg_read(id, source, 8)
            wc = cma.rdma_get_recv_comp(id)
            assert (wc.status, wc.wr_id, wc.opcode) == (cma.IBV_WC_SUCCESS, 1, cma.IBV_WC_RECV)
            assert inbox[: wc.byte_len] == b"where to?"
            cma.rdma_post_recv(id, 2, mr.addr + 16, 16, mr)
            where = b"%d %d %d %d" % (shared.addr, shared.rkey, readable.addr, readable.rkey)
            cma.rdma_post_send(id, 3, where, len(where), None, cma.IBV_SEND_INLINE)
            assert cma.rdma_get_send_comp(id).wr_id == 3
            assert cma.rdma_get_recv_comp(id).wr_id == 2
            cma.rdma_disconnect(id)
            cma.rdma_destroy_qp(id)
            cma.rdma_destroy_srq(id)
            cma.rdma_destroy_id(id)
            for each in (mr, shared, readable):
                cma.rdma_dereg_mr(each)
        except BaseException as error:
            failures.append(error)

    def attr() -> rdmacm.verbs.QPInitAttr:
        cap = rdmacm.verbs.QPCap(8, 8, 2, 2, max_inline_data=128)
        return rdmacm.verbs.QPInitAttr(cap=cap, sq_sig_all=True)

    window, source, failures = bytearray(8), bytearray(b"readable beyond"), list[BaseException]()
    listen_id = rdma_create_id(None)
    rdma_bind_addr(listen_id, ("127.0.0.1", 0))
    cma.rdma_listen(listen_id, 1)
    thread = threading.Thread(target=serve)
    thread.start()

    id = rdma_create_id(None)
    rdma_resolve_addr(id, None, ("127.0.0.1", rdma_get_src_port(listen_id)), 2000)
    rdma_resolve_route(id, 2000)
    cma.rdma_create_qp_ex(id, attr())
    local = bytearray(64)
    mr = cma.rdma_reg_msgs(id, local, 64)
    cma.rdma_post_recvv(id, None, [mr.sge(0, 10), mr.sge(10, 54)])
    cma.rdma_connect(id, None)
    assert id.event.private_data.startswith(b"welcome")
    cma.rdma_post_sendv(id, None, [b"where ", b"to?"], cma.IBV_SEND_INLINE)
    assert cma.rdma_get_send_comp(id).wr_id == 0
    count = cma.rdma_get_recv_comp(id).byte_len
    write_addr, write_key, read_addr, read_key = map(int, local[:count].split())

    cma.rdma_post_read(id, None, mr.addr, 4, mr, 0, read_addr, read_key)
    cma.rdma_post_readv(id, None, [mr.sge(4, 4)], 0, read_addr + 4, read_key)
    for _ in range(2):
        assert cma.rdma_get_send_comp(id).opcode == cma.IBV_WC_RDMA_READ
    assert local[:8] == b"readable"
    cma.rdma_post_write(id, None, local, 4, mr, 0, write_addr, write_key)
    cma.rdma_post_writev(id, None, [mr.sge(4, 2)], 0, write_addr + 4, write_key)
    cma.rdma_post_write(id, None, b"!?", 2, None, cma.IBV_SEND_INLINE, write_addr + 6, write_key)
    cma.rdma_post_send(id, None, mr.addr + 4, 4, mr, 0)
    for _ in range(4):
        assert cma.rdma_get_send_comp(id).status == cma.IBV_WC_SUCCESS
    assert window == b"readab!?"

    refused(lambda: cma.rdma_post_recv(id, None, mr.addr + 60, 5, mr))
    refused(lambda: cma.rdma_post_send(id, None, bytearray(4), 4, mr, 0))
    refused(lambda: cma.rdma_post_send(id, None, mr.addr, 4, None, 0))
    refused(lambda: cma.rdma_post_send(id, None, b"abc", 4, None, cma.IBV_SEND_INLINE))
    refused(lambda: cma.rdma_reg_msgs(id, local, 65))
    cma.rdma_disconnect(id)
    cma.rdma_destroy_ep(id)
    cma.rdma_dereg_mr(mr)
    refused(lambda: cma.rdma_post_recv(id, None, local, 1, mr), errno.EBADF)
    thread.join()
    rdma_destroy_id(listen_id)
    assert not failures


def test_application_queue_pairs_connect_and_are_rejected() -> None:
    """Both ends on one channel."""
    channel = rdma_create_event_channel()
    listen_id = rdma_create_id(channel)
    rdma_bind_addr(listen_id, ("127.0.0.1", 0))
    cma.rdma_listen(listen_id, 0)

    def asked() -> tuple[rdmacm.CmId, rdmacm.CmId]:
        id = rdma_create_id(channel)
        rdma_resolve_addr(id, None, ("127.0.0.1", rdma_get_src_port(listen_id)), 2000)
        rdma_ack_cm_event(rdma_get_cm_event(channel))
        rdma_resolve_route(id, 2000)
        rdma_ack_cm_event(rdma_get_cm_event(channel))
        cma.rdma_set_local_ece(id, Ece(7, 8))
        cma.rdma_connect(id, ConnParam(qp_num=0x10020))
        return id, received(cma.RDMA_CM_EVENT_CONNECT_REQUEST)

    def received(kind: int) -> rdmacm.CmId:
        event = rdma_get_cm_event(channel)
        assert event.type == kind
        rdma_ack_cm_event(event)
        found: rdmacm.CmId = event.id
        return found

    id, child = asked()
    cma.rdma_reject(child, b"no")
    assert received(cma.RDMA_CM_EVENT_REJECTED) is id
    rdma_destroy_id(child)
    rdma_destroy_id(id)

    id, child = asked()
    cma.rdma_reject_ece(child)
    event = rdma_get_cm_event(channel)
    assert (event.type, event.status) == (cma.RDMA_CM_EVENT_REJECTED, 35)
    rdma_ack_cm_event(event)
    rdma_destroy_id(child)
    rdma_destroy_id(id)

    id, child = asked()
    assert cma.rdma_get_remote_ece(child) == Ece(7, 8)
    qp_attr = rdmacm.verbs.QPAttr(qp_state=cma.IBV_QPS_RTR)
    mask = cma.rdma_init_qp_attr(child, qp_attr)
    assert mask & cma.IBV_QP_DEST_QPN
    assert (qp_attr.qp_state, qp_attr.dest_qp_num) == (cma.IBV_QPS_RTR, 0x10020)
    cma.rdma_accept(child, ConnParam(qp_num=0x10021))
    assert received(cma.RDMA_CM_EVENT_CONNECT_RESPONSE) is id
    cma.rdma_establish(id)
    assert received(cma.RDMA_CM_EVENT_ESTABLISHED) is child
    refused(lambda: cma.rdma_notify(child, cma.IBV_EVENT_COMM_EST), errno.EISCONN)
    cma.rdma_disconnect(child)
    assert received(cma.RDMA_CM_EVENT_DISCONNECTED) is id
    for each in (id, child, listen_id):
        rdma_destroy_id(each)
    rdma_destroy_event_channel(channel)


def test_datagram_to_oneself() -> None:
    id = rdma_create_id(None, None, cma.RDMA_PS_UDP)
    rdma_resolve_addr(id, None, ("127.0.0.1", 1), 2000)
    address = cma.ibv_ah_attr(is_global=1, port_num=1, grh=cma.ibv_global_route(id.route.dgid, id.gid_index))
    with rdmacm.verbs.AH(id.pd, address) as ah:
        refused(lambda: cma.rdma_post_ud_send(id, None, b"x", 1, None, cma.IBV_SEND_INLINE, ah, 1))
        cap = cma.ibv_qp_cap(max_send_wr=4, max_recv_wr=4, max_send_sge=1, max_recv_sge=1, max_inline_data=16)
        cma.rdma_create_qp(id, None, cma.ibv_qp_init_attr(qp_type=cma.IBV_QPT_UD, cap=cap))
        buffer = bytearray(50)
        mr = cma.rdma_reg_msgs(id, buffer, 50)
        cma.rdma_post_recv(id, 7, buffer, 50, mr)
        cma.rdma_post_ud_send(id, None, b"myself", 6, None, cma.IBV_SEND_INLINE, ah, id.qp.qp_num)
        wc = cma.rdma_get_recv_comp(id)
        assert (wc.wr_id, wc.byte_len, wc.src_qp, bytes(buffer[40:46])) == (7, 46, id.qp.qp_num, b"myself")
        with cma.ibv_create_ah_from_wc(id.pd, wc, buffer, 1) as back:
            assert back.attr.gr.dgid == id.route.dgid
        cma.rdma_destroy_qp(id)
        cma.rdma_dereg_mr(mr)
    rdma_destroy_id(id)


def example(name: str, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / f"{name}.py"), *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def run_examples(server_args: list[str], client_args: list[str]) -> tuple[str, str]:
    """What the server, which begins with its port number, and the client print; both must succeed."""
    with example(*server_args, "-p", "0") as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().split()[-1]
            with example(*client_args, "-p", port) as client:
                client_out, _ = client.communicate(timeout=30)
                assert client.returncode == 0
            server_out, _ = server.communicate(timeout=30)
            assert server.returncode == 0
        finally:
            server.kill()
    return server_out, client_out


@pytest.mark.parametrize("pair", ["rdma_{}", "rdma_x{}"])
@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.slow)])
def test_example_programs_exchange_a_message(address: str, pair: str) -> None:
    at_server, at_client = pair.format("server"), pair.format("client")
    outputs = run_examples([at_server, "-s", address], [at_client, "-s", address])
    assert outputs == (f"{at_server}: end\n", f"{at_client}: end\n")


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", ["26", *(pytest.param(size, marks=pytest.mark.slow) for size in ("64", "20000"))])
def test_example_rping_pings(address: str, size: str) -> None:
    common = ["-a", address, "-S", size, "-v"]
    served, pinged = run_examples(["rping", "-s", *common], ["rping", "-c", "-C", "3", *common])
    assert pinged.splitlines() == [f"ping data: {ping_text(ping, int(size))[:-1].decode()}" for ping in range(3)]
    assert served == pinged.replace("ping data", "server ping data")


def test_example_cmtime_times_each_step() -> None:
    _, out = run_examples(["cmtime", "-b", "127.0.0.1", "-c", "20"], ["cmtime", "-s", "127.0.0.1", "-c", "20"])
    steps = [line.partition(":")[0].strip() for line in out.splitlines()[1:]]
    assert steps == [
        "create id", "resolve addr", "resolve route", "create qp", "connect", "disconnect", "destroy"
    ]  # fmt: skip
    assert all(float(value) > 0 for line in out.splitlines()[1:] for value in line.partition(":")[2].split())
