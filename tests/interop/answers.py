"""What a device answers to calls of the verbs, as JSON: rdma-core's pyverbs on the kernel's device, or ours.

    python3 -m interop.answers rxe0      by pyverbs
    python3 -m interop.answers soft_vb   by rdmacm.verbs
    python3 -m interop.answers rxe0 all  by pyverbs, with what only answers of the same device can be compared in

The names are the same in both, so the questions are. An answer is a value, or the name of the errno.
"""

from __future__ import annotations

import errno
import importlib
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from support.clock import pause

#: The fields of pyverbs' ``DeviceAttr`` that have C's names, and of ``PortAttr``. (Its counters of violations tell what
#: the device has received before.)
_DEVICE_FIELDS = """
    vendor_id vendor_part_id hw_ver page_size_cap max_sge max_sge_rd max_qp_rd_atom max_qp_init_rd_atom max_ee
    max_ee_rd_atom max_ee_init_rd_atom max_rdd max_raw_ethy_qp max_fmr max_map_per_fmr local_ca_ack_delay phys_port_cnt
"""
_PORT_FIELDS = """
    state max_mtu active_mtu gid_tbl_len port_cap_flags max_msg_sz pkey_tbl_len lid sm_lid
    lmc max_vl_num sm_sl subnet_timeout init_type_reply active_width active_speed phys_state link_layer flags
    port_cap_flags2
"""
_EXTENDED_FIELDS = """
    comp_mask completion_timestamp_mask hca_core_clock max_dm_size max_wq_type_rq phys_port_cnt_ex raw_packet_caps
"""
_CAPS = {
    "cq_mod_caps": "max_cq_count max_cq_period",
    "odp_caps": "general_caps rc_odp_caps uc_odp_caps ud_odp_caps xrc_odp_caps",
    "packet_pacing_caps": "qp_rate_limit_max qp_rate_limit_min supported_qpts",
    "pci_atomic_caps": "compare_swap fetch_add swap",
    "rss_caps": "max_rwq_indirection_table_size max_rwq_indirection_tables rx_hash_fields_mask rx_hash_function "
    "supported_qpts",
    "tm_caps": "flags max_num_tags max_ops max_rndv_hdr_size max_sge",
    "tso_caps": "max_tso supported_qpts",
}


def pyverbs() -> SimpleNamespace:
    """What the questions use, from rdma-core."""
    kinds = ("addr", "cq", "device", "enums", "pd", "qp", "srq", "wr")
    modules = {kind: importlib.import_module(f"pyverbs.{kind}") for kind in kinds}
    device, enums, wr = modules["device"], modules["enums"], modules["wr"]
    names = {name: value for module in modules.values() for name, value in vars(module).items()}
    return SimpleNamespace(
        **names,
        open=lambda name: device.Context(name=name),
        polled=lambda queue: queue.poll(99)[0],
        receive=lambda number: wr.RecvWR(number, 1, [wr.SGE(0, 0, 0)]),
        migration=lambda pair: pair.query(enums.IBV_QP_PATH_MIG_STATE)[0].path_mig_state,
    )


def ours() -> SimpleNamespace:
    """The same from this package."""
    import rdmacm.verbs
    from rdmacm import cma, open_device

    names = {**vars(cma), **vars(rdmacm.verbs)}
    return SimpleNamespace(
        **names,
        open=open_device,
        polled=lambda queue: len(queue.poll(99)),
        receive=lambda number: rdmacm.verbs.RecvWR(number, [rdmacm.verbs.SGE(0, 0, 0)]),
        migration=lambda pair: int(pair.query()[0].path_mig_state),
    )


class Questions:
    """Asks a device, and collects its answers by name."""

    def __init__(self, v: SimpleNamespace, name: str) -> None:
        self.v = v
        self.context = v.open(name)
        self.pd = v.PD(self.context)
        self.answers: dict[str, Any] = {}

    def ask(self, name: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        try:
            found = call(*arguments, **named)
        except Exception as error:
            code = getattr(error, "error_code", None) or getattr(error, "errno", None)
            found = errno.errorcode[code] if code else repr(error)
        self.answers[name] = int(found) if isinstance(found, int) else found or "done"

    def attributes(self) -> None:
        device, port = self.context.query_device(), self.context.query_port(1)
        extended = self.context.query_device_ex()
        for kind, found, names in (
            ("", device, _DEVICE_FIELDS.split()),
            ("", port, _PORT_FIELDS.split()),
            ("ex.", extended, _EXTENDED_FIELDS.split()),
        ):
            for name in names:
                self.ask(kind + name, getattr, found, name)
        for kind, members in _CAPS.items():
            for name in members.split():
                caps = getattr(extended, kind)
                self.ask(f"{kind}.{name}", getattr, caps, name)
        self.ask("query_rt_values_ex", self.context.query_rt_values_ex)

    def completion_queues(self) -> None:
        v, most = self.v, self.context.query_device().max_cqe
        cq = v.CQ(self.context, 10)
        for text, size in (("20", 20), ("1", 1), ("0", 0), ("-1", -1), ("max_cqe", most), ("max_cqe + 1", most + 1)):
            self.ask(f"cq.resize({text})", cq.resize, size)
        cq.close()
        # rxe's thread completes the receives after the call has returned; no call tells how many are complete.
        for seconds in (0, 0.2, 1, 5):
            self.full_completion_queue(seconds)
            first, last = (self.answers[name] for name in ("cq.resize(4) with 5 completions", "completions after that"))
            if first != "done" and last == 5:
                break

    def full_completion_queue(self, seconds: float) -> None:
        v = self.v
        cq = v.CQ(self.context, 20)
        qp = v.QP(self.pd, v.QPInitAttr(qp_type=v.IBV_QPT_RC, scq=cq, rcq=cq, cap=v.QPCap(1, 10)))
        qp.to_init(v.QPAttr(port_num=1))
        for number in range(5):
            qp.post_recv(v.receive(number))
        qp.modify(v.QPAttr(qp_state=v.IBV_QPS_ERR), v.IBV_QP_STATE)
        pause(seconds, "the receives are flushed")
        for size in (4, 5):
            self.ask(f"cq.resize({size}) with 5 completions", cq.resize, size)
        self.ask("completions after that", v.polled, cq)
        qp.close()
        cq.close()

    def shared_receive_queues(self) -> None:
        v, most = self.v, self.context.query_device().max_srq_wr
        srq = v.SRQ(self.pd, v.SrqInitAttr(v.SrqAttr(max_wr=10, max_sge=2)))

        def modify(mask: int, **attr: int) -> int:
            srq.modify(v.SrqAttr(**attr), mask)
            return int(srq.query().srq_limit)

        self.ask("srq_limit 5", modify, v.IBV_SRQ_LIMIT, srq_limit=5)
        for text, size in (
            *(("100", 100), ("4, below the limit", 4), ("0", 0), ("200", 200)),
            *(("max_srq_wr", most), ("max_srq_wr + 1", most + 1), ("7", 7)),
        ):
            self.ask(f"max_wr {text}", modify, v.IBV_SRQ_MAX_WR, max_wr=size)
        for limit in (8, 7, 0):
            self.ask(f"srq_limit {limit} of 7", modify, v.IBV_SRQ_LIMIT, srq_limit=limit)
        for number in range(5):
            srq.post_recv(v.receive(number))
        self.ask("max_wr 7 with 5 receives", modify, v.IBV_SRQ_MAX_WR, max_wr=7)
        # rdma_rxe refuses this and loses the queue, so it is the last question.
        self.ask("max_wr 3 with 5 receives", modify, v.IBV_SRQ_MAX_WR, max_wr=3)
        srq.close()

    def path_migration(self) -> None:
        v = self.v
        cq = v.CQ(self.context, 10)
        first, second = (v.QP(self.pd, v.QPInitAttr(qp_type=v.IBV_QPT_RC, scq=cq, rcq=cq)) for _ in range(2))

        def attr() -> Any:
            found = v.QPAttr(port_num=1)
            route = v.GlobalRoute(dgid=self.context.query_gid(1, 1), sgid_index=1)
            found.ah_attr = found.alt_ah_attr = v.AHAttr(gr=route, is_global=1, port_num=1)
            found.alt_port_num, found.alt_timeout = 1, 14
            found.dest_qp_num, found.path_mtu, found.min_rnr_timer = second.qp_num, v.IBV_MTU_1024, 12
            found.timeout, found.retry_cnt, found.rnr_retry = 14, 7, 7
            return found

        def modify(mask: int, state: int | None = None, path_mig_state: int = 0) -> int:
            changed = attr()
            changed.path_mig_state = path_mig_state
            if state is not None:
                changed.qp_state = state
                mask |= v.IBV_QP_STATE
            first.modify(changed, mask)
            return int(v.migration(first))

        first.to_init(attr())
        connecting = v.IBV_QP_AV | v.IBV_QP_PATH_MTU | v.IBV_QP_DEST_QPN | v.IBV_QP_RQ_PSN
        connecting |= v.IBV_QP_MAX_DEST_RD_ATOMIC | v.IBV_QP_MIN_RNR_TIMER
        self.ask("INIT to RTR, alternate path", modify, connecting | v.IBV_QP_ALT_PATH, v.IBV_QPS_RTR)
        self.ask("INIT to RTR", modify, connecting, v.IBV_QPS_RTR)
        ready = v.IBV_QP_STATE | v.IBV_QP_SQ_PSN | v.IBV_QP_TIMEOUT | v.IBV_QP_RETRY_CNT | v.IBV_QP_RNR_RETRY
        self.ask("RTR to RTS", modify, ready | v.IBV_QP_MAX_QP_RD_ATOMIC, v.IBV_QPS_RTS)
        self.ask("RTS, alternate path", modify, v.IBV_QP_ALT_PATH)
        for state in (v.IBV_MIG_REARM, v.IBV_MIG_ARMED, v.IBV_MIG_MIGRATED):
            self.ask(f"RTS, path_mig_state {int(state)}", modify, v.IBV_QP_PATH_MIG_STATE, None, state)
        self.ask("data in order", first.query_data_in_order, v.IBV_WR_RDMA_WRITE)
        for qp in (first, second):
            qp.close()
        cq.close()

    def extended(self) -> None:
        v = self.v
        cq = v.CQ(self.context, 10)
        pd_and_operations = v.IBV_QP_INIT_ATTR_PD | v.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS

        def make(qp_type: int, operations: int, mask: int = pd_and_operations, **more: int) -> None:
            init = v.QPInitAttrEx(
                qp_type=qp_type,
                scq=cq,
                rcq=cq,
                cap=v.QPCap(1, 1),
                comp_mask=mask,
                pd=self.pd,
                send_ops_flags=operations,
                **more,
            )
            v.QPEx(self.context, init).close()

        def make_queue(init: Any) -> None:
            v.CQEX(self.context, init).close()

        for name in ("RC", "UD"):
            for bit in (0, 1, 2, 3, 4, 5, 6, 9, 10):
                qp_type = getattr(v, f"IBV_QPT_{name}")
                self.ask(f"{name}, operation {bit}", make, qp_type, 1 << bit)
        flags = pd_and_operations | v.IBV_QP_INIT_ATTR_CREATE_FLAGS
        self.ask("create_flags", make, v.IBV_QPT_RC, 1, flags, create_flags=2)
        header = pd_and_operations | v.IBV_QP_INIT_ATTR_MAX_TSO_HEADER
        self.ask("max_tso_header", make, v.IBV_QPT_RC, 1, header)
        cq.close()
        for bit in range(12):
            init = v.CqInitAttrEx(cqe=9, wc_flags=1 << bit)
            self.ask(f"completions with field {bit}", make_queue, init)
        for bit in range(2):
            init = v.CqInitAttrEx(cqe=9, comp_mask=v.IBV_CQ_INIT_ATTR_MASK_FLAGS, flags=1 << bit)
            self.ask(f"completion queue with flag {bit}", make_queue, init)

    def kernel_device(self) -> None:
        """What only answers of the same device can be compared in."""
        v = self.v
        self.ask("device_cap_flags_ex", lambda: self.context.query_device_ex().device_cap_flags_ex)
        cq = v.CQ(self.context, 10)
        for inline in (0, 10, 100):
            init = v.QPInitAttr(qp_type=v.IBV_QPT_RC, scq=cq, rcq=cq, cap=v.QPCap(10, 10, 1, 1, inline))
            qp = v.QP(self.pd, init)
            cap = qp.query(v.IBV_QP_CAP)[0].cap
            for name in ("max_send_wr", "max_recv_wr", "max_send_sge", "max_recv_sge", "max_inline_data"):
                self.ask(f"{name} with {inline} bytes inline", getattr, cap, name)
            qp.close()
        mask = v.IBV_QP_INIT_ATTR_PD | v.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS
        for bit in (11, 12):  # FLUSH, ATOMIC WRITE
            init = v.QPInitAttrEx(
                *(v.IBV_QPT_RC, None, cq, cq),
                cap=v.QPCap(1, 1),
                comp_mask=mask,
                pd=self.pd,
                send_ops_flags=1 << bit,
            )
            self.ask(f"RC, operation {bit}", lambda init=init: v.QPEx(self.context, init).close())
        cq.close()


if __name__ == "__main__":
    device, *more = sys.argv[1:]
    questions = Questions(ours() if device.startswith("soft") else pyverbs(), device)
    questions.attributes()
    questions.completion_queues()
    questions.path_migration()
    questions.extended()
    questions.shared_receive_queues()
    if more:
        questions.kernel_device()
    questions.pd.close()
    questions.context.close()
    print(json.dumps(questions.answers))
