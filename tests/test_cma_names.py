"""C's names: those of the star import beside the installed headers, and those of fields on live objects."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from rdmacm import CmEvent, CmEventType, CmId, CmStateError, ConnParam, McJoinFlag, PortSpace, cma, getaddrinfo
from rdmacm.verbs import AH, GRH, MW, MWType
from support.pair import ADDRESSES, Ends, ends
from test_parity import name_lists, names_without_a_place, patterns_of

E = CmEventType
DATA = Path(__file__).parent / "data"
HEADERS = ("rdma/rdma_cma.h", "rdma/rdma_verbs.h", "infiniband/verbs.h")
#: Names of the headers that are part of their own implementation: include guards, and what libibverbs's inline
#: functions call.
OF_THE_HEADERS = {
    *("RDMA_CMA_H", "RDMA_VERBS_H", "INFINIBAND_VERBS_H"),
    *("verbs_context", "verbs_get_ctx", "verbs_get_ctx_op", "vext_field_avail"),
    *(
        "ETHERNET_LL_SIZE",
        "IB_GRH_FLOWLABEL_MASK",
        "IB_ROCE_UDP_ENCAP_VALID_PORT_MIN",
        "IB_ROCE_UDP_ENCAP_VALID_PORT_MAX",
    ),
}


def names_of(header: str) -> set[str]:
    """The functions, structures, enumerators and macros of a header, without names with a leading underscore."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", header, flags=re.DOTALL).replace("\\\n", " ")
    found = set(re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", text, re.MULTILINE))
    text = re.sub(r"^[ \t]*#.*$|extern\s+\"C\"\s*\{", "", text, flags=re.MULTILINE)
    found |= set(re.findall(r"\b(?:struct|union)\s+(\w+)\s*\{", text))
    for body in re.findall(r"\benum\s*\w*\s*\{(.*?)\}", text, re.DOTALL):
        found |= set(re.findall(r"(?:^|,)\s*([A-Z]\w+)", body))
    while (flat := re.sub(r"\{[^{}]*\}", ";", text)) != text:
        text = flat
    found |= set(re.findall(r"\b(\w+)\s*\([^()]*(?:\([^()]*\)[^()]*)*\)\s*;", text))
    return {name for name in found if not name.startswith("_")}


def starred() -> dict[str, object]:
    names: dict[str, object] = {}
    exec("from rdmacm.cma import *", names)
    return names


@pytest.mark.parametrize("header", HEADERS)
def test_star_import_has_the_names_of_the_installed_header(header: str) -> None:
    file = Path("/usr/include") / header
    if not file.exists():
        pytest.skip(f"needs {file} (librdmacm-dev, libibverbs-dev)")
    declared = names_of(file.read_text(encoding="utf-8")) - OF_THE_HEADERS
    assert len(declared) > 15
    assert declared - {name for section in name_lists("c_names.txt").values() for name in section} == set()
    assert names_without_a_place(declared - starred().keys()) == []


def test_star_import_has_each_listed_name_or_the_reason_is_in_parity() -> None:
    listed = {name for section in name_lists("c_names.txt").values() for name in section}
    missing = listed - starred().keys()
    assert names_without_a_place(missing) == []
    assert [each for each in patterns_of() if not any(fnmatchcase(name, each) for name in missing)] == []


def test_porting_guide_uses_only_names_of_the_star_import() -> None:
    guide = (DATA.parents[1] / "docs" / "porting.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", guide, re.DOTALL))
    used = set(re.findall(r"\b((?:rdma|ibv)_\w+|(?:RDMA|IBV|RAI)_\w+)\b", code))
    assert len(used) > 50
    assert used - starred().keys() == set()


# -- live objects -----------------------------------------------------------------------------------------------------


@pytest.fixture
def both() -> Iterator[Ends]:
    with ends() as both:
        yield both


def datagram_events(both: Ends) -> tuple[CmEvent, CmEvent]:
    """ESTABLISHED of a datagram id, and MULTICAST_JOIN."""
    both.b.listen(ADDRESSES["ipv4"][1], 7472, port_space=PortSpace.UDP)
    active = both.a.resolve(ADDRESSES["ipv4"][1], 7472, PortSpace.UDP)
    active.connect()
    both.b.event(E.CONNECT_REQUEST).id.accept(ConnParam(qp_num=0x10055, qkey=0x77))
    established = both.a.event(E.ESTABLISHED)
    member = both.a.id(PortSpace.UDP)
    member.bind_addr((ADDRESSES["ipv4"][0], 0))
    member.create_qp()
    member.join_multicast_ex(("239.1.2.3", 0), McJoinFlag.FULLMEMBER)
    return established, both.a.event(E.MULTICAST_JOIN)


def live_objects(both: Ends, stack: ExitStack) -> Iterator[tuple[str, Any]]:
    """Structures by C's names, each as a program meets it."""
    channel = both.a.channel
    active, request = both.request()
    request.id.create_qp()
    request.id.accept()
    established = both.a.event(E.ESTABLISHED)
    both.b.event(E.ESTABLISHED)
    yield "rdma_event_channel", channel
    for cmid in (active, request.id):
        yield "rdma_cm_id", cmid
        yield "rdma_route", cmid.route
        yield "rdma_addr", cmid.route.addr
        yield "rdma_ib_addr", cmid.route.addr.addr.ibaddr
        yield "ibv_sa_path_rec", cmid.route.path_rec[0]
    for event in (request, established):
        yield "rdma_cm_event", event
        yield "rdma_conn_param", event.param.conn
    for event in datagram_events(both):
        yield "rdma_cm_event", event
        yield "rdma_ud_param", event.param.ud
        yield "ibv_ah_attr", event.param.ud.ah_attr
        yield "ibv_global_route", event.param.ud.ah_attr.grh
    yield from verbs_of(active, stack)
    (info, *_) = cma.rdma_addrinfo.linked(getaddrinfo(ADDRESSES["ipv4"][1], 7471, provider=both.a.provider))
    yield "rdma_addrinfo", info
    yield "ibv_path_data", info.ai_route[0]
    yield "ibv_path_record", info.ai_route[0].path


def verbs_of(cmid: CmId, stack: ExitStack) -> Iterator[tuple[str, Any]]:
    """The verbs objects of an id with a queue pair, and what can be queried of them."""
    context, qp = cmid.verbs, cmid.qp
    assert context is not None
    assert qp is not None
    yield "ibv_context", context
    yield "ibv_device", next(device for device in cmid._channel.provider.devices() if device.name == context.name)
    yield "ibv_device_attr", cma.ibv_query_device(context)
    yield "ibv_port_attr", cma.ibv_query_port(context, 1)
    yield "ibv_gid_entry", cma.ibv_query_gid_ex(context, 1, 0)
    yield "ibv_pd", cmid.pd
    yield "ibv_cq", cmid.recv_cq
    yield "ibv_comp_channel", stack.enter_context(cma.ibv_create_comp_channel(context))
    yield "ibv_qp", qp
    attr, made_with = cma.ibv_query_qp(qp, cma.IBV_QP_STATE)
    yield "ibv_qp_init_attr", made_with
    yield "ibv_qp_cap", made_with.cap
    initial = cma.ibv_qp_attr(qp_state=cma.IBV_QPS_RTR)
    cma.rdma_init_qp_attr(cmid, initial)
    for found in (attr, qp.query()[0], initial):
        yield "ibv_qp_attr", found
        yield "ibv_ah_attr", found.ah_attr
        yield "ibv_global_route", found.ah_attr.grh
    mr = stack.enter_context(cma.ibv_reg_mr(cmid.pd, bytearray(64), None, cma.IBV_ACCESS_LOCAL_WRITE))
    yield "ibv_mr", mr
    yield "ibv_mw", stack.enter_context(MW(cmid.pd, MWType.TYPE_1))
    yield "ibv_mw_bind", cma.ibv_mw_bind()
    yield "ibv_mw_bind_info", cma.ibv_mw_bind().bind_info
    srq = stack.enter_context(cma.ibv_create_srq(cmid.pd, cma.ibv_srq_init_attr(attr=cma.ibv_srq_attr(4, 1))))
    yield "ibv_srq", srq
    yield "ibv_srq_attr", cma.ibv_query_srq(srq)
    yield "ibv_srq_init_attr", cma.ibv_srq_init_attr()
    yield "ibv_ah", stack.enter_context(AH(cmid.pd, attr.ah_attr))
    yield "ibv_grh", GRH(cmid.route.sgid, cmid.route.dgid, 0)
    yield "ibv_async_event", cma.ibv_async_event(cma.IBV_EVENT_COMM_EST, qp)
    yield "ibv_send_wr", cma.ibv_send_wr()
    yield "ibv_recv_wr", cma.ibv_recv_wr()
    yield "ibv_sge", cma.ibv_sge()
    cma.ibv_post_send(qp, cma.ibv_send_wr(opcode=cma.IBV_WR_RDMA_WRITE, send_flags=cma.IBV_SEND_SIGNALED))
    yield "ibv_wc", cmid.get_send_comp(10)


def test_fields_of_live_objects_have_cs_names_or_a_reason(both: Ends) -> None:
    text = (DATA.parents[1] / "docs" / "parity.md").read_text(encoding="utf-8")
    table = text[text.index("### Fields of structures") : text.index("## Tools")]
    absent = {
        name for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    fields: dict[str, list[str]] = {}
    for line in (DATA / "c_fields.txt").read_text(encoding="utf-8").splitlines()[1:]:
        structure, *names = line.split()
        fields.setdefault(structure, []).extend(names)
    missing, seen = set(), set()
    with ExitStack() as stack:
        for structure, made in live_objects(both, stack):
            seen.add(structure)
            for name in fields[structure]:
                try:
                    with suppress(CmStateError):  # of an attribute that is not there yet
                        getattr(made, name)
                except AttributeError:
                    missing.add((structure, name, type(made).__name__))
    assert {one for one in missing if one[1] not in absent} == set()
    assert absent - {name for _, name, _ in missing} == set()
    assert fields.keys() - seen == set()


def test_members_of_cs_unions_are_the_addresses(both: Ends) -> None:
    active, request = both.request()
    for cmid in (active, request.id):
        addr = cmid.route.addr
        assert addr.src_sin == addr.src_sin6 == addr.src_storage == addr.src_addr == cmid.local_addr
        assert addr.dst_sin == addr.dst_sin6 == addr.dst_storage == addr.dst_addr == cmid.peer_addr
    established, joined = datagram_events(both)
    for event in (established, joined):
        assert isinstance(event.param, cma.rdma_ud_param)
        assert event.param.ah_attr.grh is event.param.ah_attr.gr
    path = active.route.path_rec[0].replace(flow_label=0x12345, hop_limit=7, traffic_class=9, qos_class=5, sl=3)
    assert (path.flowlabel_hoplimit, path.tclass, path.qosclass_sl) == (0x1234507, 9, 0x53)
    assert (path.reversible_numpath, path.packetlifetime) == (0x81, 0x80 | path.packet_life_time)
