"""``rdmacm sa`` on a simulated fabric."""

from __future__ import annotations

import pytest

from infiniband.fabric import SimulatedFabric
from rdmacm.tools.main import main
from support.servers import Result, Run

HOST_A, HOST_B = "fe80::10:3", "fe80::10:5"
BROADCAST = "ff12:401b:ffff::ffff:ffff"


@pytest.fixture
def sa(capsys: pytest.CaptureFixture[str]) -> Run:
    """``rdmacm sa`` in this process."""

    def run(*argv: str) -> Result:
        status = main(["sa", *argv])
        return Result(status, *capsys.readouterr())

    return run


@pytest.fixture
def on_a(fabric: SimulatedFabric, sa: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``rdmacm sa`` with HostA's port in the environment."""
    monkeypatch.setenv("RDMACM_IB", f"ibsim:HostA@{fabric.base},ibsim:HostX")
    return sa


def test_paths_shows_the_path_to_a_gid(on_a: Run) -> None:
    result = on_a("paths", HOST_B)
    assert (result.status, result.err) == (0, "")
    head, row = result.out.splitlines()
    assert head.split() == ["DGID", "DLID", "SLID", "P_KEY", "SL", "MTU", "GB/S"]
    dgid, dlid, slid, *rest = row.split()
    assert (dgid, rest) == (HOST_B, ["0xffff", "0", "2048", "10"])
    (path,) = on_a("paths", HOST_B, "--json").json["records"]
    assert (path["dgid"], path["sgid"], path["dlid"], path["slid"]) == (HOST_B, HOST_A, int(dlid), int(slid))


def test_paths_without_a_gid_lists_all_and_notes_truncation(on_a: Run) -> None:
    lines = on_a("paths").out.splitlines()
    assert len(lines) == 1 + 3 + 1
    assert lines[-1] == "more records exist, but did not fit into the answer"
    found = on_a("paths", "--json").json
    assert (len(found["records"]), found["is_cut"]) == (3, True)


def test_paths_to_an_unknown_gid_fails(on_a: Run) -> None:
    result = on_a("paths", "fe80::dead")
    assert (result.status, result.out) == (1, "")
    assert "fe80::dead" in result.error


def test_port_option_precedes_the_environment(fabric: SimulatedFabric, on_a: Run) -> None:
    found = on_a("info", "--port", f"ibsim:HostB@{fabric.base}", "--json").json
    assert found["port"]["gids"] == [HOST_B]


def test_service_is_registered_listed_and_withdrawn(fabric: SimulatedFabric, on_a: Run) -> None:
    assert on_a("services", "demo.tool") == (0, "none\n", "")
    result = on_a("register", "0x20001", "demo.tool", "--lease", "3600")
    assert result.status == 0
    assert [line.split()[-1] for line in result.out.splitlines()] == ["demo.tool", HOST_A, "0xffff", "s"]
    assert on_a("services", "demo.tool").out.splitlines()[1].split()[:2] == ["0x20001", HOST_A]
    assert on_a("register", "0x20001", "demo.tool", "--json").json["service_lease"] == 0xFFFFFFFF
    (service,) = on_a("services", "demo.tool", "--json", "--port", f"ibsim:HostC@{fabric.base}").json["records"]
    assert (service["service_id"], service["service_gid"], service["service_name"]) == (0x20001, HOST_A, "demo.tool")
    assert on_a("withdraw", "0x20001", "--json").json["service_name"] == "demo.tool"
    assert "no record matches [ENOENT]" in on_a("withdraw", "0x20001").error


def test_group_is_joined_and_left(on_a: Run) -> None:
    member = on_a("join", BROADCAST, "--json").json
    assert (member["mgid"], member["port_gid"], member["q_key"]) == (BROADCAST, HOST_A, 0xB1B)
    assert on_a("join", BROADCAST).out.splitlines()[0].split() == ["group", BROADCAST]
    assert on_a("leave", BROADCAST, "--json").json == {"mgid": BROADCAST, "port_gid": HOST_A}
    on_a("join", BROADCAST)
    assert on_a("leave", BROADCAST) == (0, "", "")
    assert on_a("leave", BROADCAST).status == 1


def test_nodes_and_info_describe_the_fabric(on_a: Run) -> None:
    assert on_a("nodes").out.splitlines()[0].split() == ["LID", "TYPE", "PORT", "GUID", "PORTS", "DESCRIPTION"]
    (node,) = on_a("nodes", "--json").json["records"]
    assert {"lid", "node_guid", "port_guid", "node_description"} <= node.keys()
    assert "multicast" in on_a("info").out
    found = on_a("info", "--json").json
    assert (found["port"]["device"], found["port"]["state"]) == ("HostA", "ACTIVE")
    assert found["administrator"]["class_version"] == 2


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        ([], "WHAT"),
        (["pathes"], "pathes"),
        (["paths", "HostB"], "not a GID: 'HostB'"),
        (["paths", "::1", "::2"], "paths takes 0 or 1 operands, not 2"),
        (["withdraw"], "withdraw takes 1 operand, not 0"),
        (["register", "-1"], "-1"),
        (["register", "demo"], "not a service id: 'demo'"),
        (["register", "1", "x" * 65], "at most 64 bytes, not 65"),
        (["withdraw", str(1 << 64)], "not a service id"),
        (["nodes", "--lease", "5"], "nodes takes no --lease"),
        (["register", "1", "--lease", "0"], "--lease"),
        (["info", "--timeout", "nan"], "--timeout"),
        (["info", "--pcap", "file"], "--pcap"),
    ],
)
def test_usage_errors_exit_2(sa: Run, argv: list[str], error: str) -> None:
    result = sa(*argv)
    assert (result.status, result.out) == (2, "")
    assert error in result.error


@pytest.mark.parametrize(
    ("port", "error"),
    [
        ("", "no InfiniBand port is given [ENODEV]; try: --port umad:mlx5_0/1"),
        ("HostA", "not the name of an InfiniBand port [EINVAL]"),
        ("ibsim:HostA@rdmacm-none", "[ECONNREFUSED]"),
        ("umad:none0/1", "[ENODEV]"),
    ],
)
def test_unusable_port_is_reported(sa: Run, monkeypatch: pytest.MonkeyPatch, port: str, error: str) -> None:
    monkeypatch.setenv("RDMACM_IB", port)
    result = sa("info")
    assert (result.status, result.out) == (1, "")
    assert error in result.error


def test_names_that_are_not_utf8(sa: Run) -> None:
    """The bytes of a command line arrive as surrogates (PEP 383)."""
    result = sa("register", "1", "caf\udce9", "--port", "ibsim:Host\udce9@rdmacm-none\udce9")
    assert (result.status, result.out) == (1, "")
    assert "[ECONNREFUSED]" in result.error
