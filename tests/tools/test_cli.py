"""The ``rdmacm`` command for people and scripts: output, JSON, exit status, errors, help."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import socket
from collections.abc import Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any

import pytest

import rdmacm
from rdmacm import AddressFamily, PortSpace, QPType, RaiFlag
from rdmacm.capabilities import SOFT, Feature
from rdmacm.proto import core_choice
from rdmacm.tools import output
from rdmacm.tools.commands import COMMANDS, GROUPS
from rdmacm.tools.main import main, parser_of
from support.netns import TwoHosts, needs_netns, two_hosts
from support.rows import for_each
from support.servers import Run, Server

ADDRINFO_KEYS = [
    *("flags", "family", "qp_type", "port_space", "src_len", "dst_len", "src_addr", "dst_addr"),
    *("src_canonname", "dst_canonname", "route_len", "route", "connect_len", "connect"),
    *("device", "port_num", "gid_index"),
]
PATH_KEYS = {field.name for field in fields(rdmacm.PathRecord)}
SECTIONS = ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "ENVIRONMENT", "EXAMPLES", "SEE ALSO"]

#: The environment variables that a command uses. Output of rping and ucmatose is never bold or dim.
ENVIRONMENT = {
    "devices": {"RDMACM_PROVIDER", "RDMACM_IB", "RDMACM_CORE", "NO_COLOR"},
    "sa": {"RDMACM_IB", "IBSIM_SOCKNAME", "NO_COLOR"},
    "getaddrinfo": {"RDMACM_PROVIDER", "RDMACM_IB", "RDMACM_ACM_RUNDIR", "NO_COLOR"},
    "resolve": {"RDMACM_PROVIDER", "RDMACM_IB", "RDMACM_ACM_RUNDIR", "NO_COLOR"},
    "explain": {"RDMACM_PROVIDER", "RDMACM_IB", "RDMACM_ACM_RUNDIR", "NO_COLOR"},
    "demo": {"RDMACM_PROVIDER", "RDMACM_CORE", "NO_COLOR"},
    "rping": {"RDMACM_PROVIDER", "RDMACM_CORE"},
    "ucmatose": {"RDMACM_PROVIDER", "RDMACM_CORE"},
    "udaddy": {"RDMACM_PROVIDER"},
    "mckey": {"RDMACM_PROVIDER"},
    "rstream": {"RDMACM_PROVIDER", "RDMACM_CORE"},
    "riostream": {"RDMACM_PROVIDER", "RDMACM_CORE"},
    "rcopy": {"RDMACM_PROVIDER", "RDMACM_CORE"},
    "udpong": {"RDMACM_PROVIDER", "RDMACM_CORE"},
    "cmtime": {"RDMACM_PROVIDER", "RDMACM_CORE", "NO_COLOR"},
    "perf": {"RDMACM_PROVIDER", "RDMACM_CORE", "NO_COLOR"},
    "doctor": {"RDMACM_PROVIDER", "RDMACM_IB", "RDMACM_CORE", "NO_COLOR"},
    "check": {"RDMACM_PROVIDER", "RDMACM_CORE", "NO_COLOR"},
    "trace": {"NO_COLOR"},
    "stat": {"RDMACM_PROVIDER", "NO_COLOR"},
    "run": {"RDMACM_RUN_LIBRARY"},
    "lab": {"SHELL"},
    "completion": set(),
}


def sections_of(page: str) -> dict[str, str]:
    """The sections of a help page by their titles."""
    parts = re.split(r"^([A-Z][A-Z ]+)$\n", page, flags=re.MULTILINE)
    assert parts[0] == ""
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows_of(table: str) -> list[list[str]]:
    """The cells of a table whose columns are separated by at least two spaces."""
    return [re.split(r" {2,}", line) for line in table.splitlines()]


class TestDevices:
    def test_json_matches_the_api(self, run: Run) -> None:
        result = run("devices", "--json")
        assert (result.status, result.err) == (0, "")
        assert [set(each) for each in result.json] == [
            {
                *(
                    "name",
                    "index",
                    "provider",
                    "node_type",
                    "transport_type",
                    "node_guid",
                    "driver",
                    "fw_ver",
                    "core",
                    "capabilities",
                    "unused",
                    "ports",
                )
            }
        ] * len(rdmacm.devices())
        for found, device in zip(result.json, rdmacm.devices(), strict=True):
            assert found["name"] == device.name
            assert found["index"] == device.index
            assert found["provider"] == device.provider == "soft"
            assert found["node_type"] == "CA"
            assert found["transport_type"] == "IB"
            assert found["core"] == core_choice.name
            assert found["capabilities"]["transports"] == ["RoCEv2"]
            assert found["capabilities"]["families"] == ["AF_INET", "AF_INET6"]
            assert found["capabilities"]["features"] == {
                feature.name.lower(): SOFT.support(feature) for feature in Feature
            }
            assert found["node_guid"] == device.guid_text
            for each, port in zip(found["ports"], device.ports, strict=True):
                assert set(each) == {"port_num", "state", "link_layer", "max_mtu", "active_mtu", "gids", "pkeys"}
                assert each["port_num"] == port.port_num
                assert each["state"] == port.state.name
                assert each["link_layer"] == "ETHERNET"
                assert each["max_mtu"] == 4096
                assert each["active_mtu"] == (port.active_mtu.bytes if port.active_mtu else None)
                assert each["pkeys"] == [0xFFFF]
                for row, entry in zip(each["gids"], port.gids, strict=True):
                    assert row == {
                        "gid": str(entry.gid),
                        "gid_index": entry.gid_index,
                        "port_num": port.port_num,
                        "gid_type": "ROCE_V2",
                        "ndev_name": entry.ndev_name,
                        "ndev_ifindex": entry.ndev_ifindex,
                        "ipv4": socket.inet_ntoa(entry.gid.ip) if len(entry.gid.ip) == 4 else None,
                    }

    @needs_netns
    def test_table_has_a_line_per_port_and_gid(self, run: Run, net: TwoHosts) -> None:
        with net.a.enter():
            ports, lo_gids, va_gids, last = run("devices").out.split("\n\n")
            (_, va) = rdmacm.devices()
        first, *rows = rows_of(ports)
        assert first == ["DEVICE/PORT", "STATE", "LINK LAYER", "MTU", "NODE GUID", "P_KEYS"]
        assert [row[:4] for row in rows] == [
            ["soft_lo/1", "ACTIVE", "Ethernet", "4096"],
            ["soft_va/1", "ACTIVE", "Ethernet", "1024"],
        ]
        assert rows[1][4:] == [va.guid_text, "0xffff"]
        assert [line.split() for line in lo_gids.splitlines()] == [
            ["soft_lo/1,", "interface", "lo"],
            ["INDEX", "GID", "TYPE", "IPV4"],
            ["0", "::ffff:127.0.0.1", "RoCEv2", "127.0.0.1"],
            ["1", "::1", "RoCEv2", "-"],
        ]
        assert last == f"software devices {core_choice.description()}\n"
        assert [line.split() for line in va_gids.splitlines()] == [
            ["soft_va/1,", "interface", "va"],
            ["INDEX", "GID", "TYPE", "IPV4"],
            *(
                [str(entry.gid_index), str(entry.gid), "RoCEv2", ipv4]
                for entry, ipv4 in zip(va.ports[0].gids, ["-", "10.7.0.1", "-"], strict=True)
            ),
        ]

    @needs_netns
    def test_port_without_gids_is_listed(self, run: Run) -> None:
        with two_hosts() as net, net.a.enter():
            net.a.ip_batch("link set dev va mtu 128", "addr flush dev va", "addr flush dev lo")
            ports, rest, _ = run("devices").out.split("\n\n")
            found = run("devices", "--json").json
        assert rows_of(ports)[2][3] == "-"
        assert rest == "no GIDs"
        assert [port["active_mtu"] for device in found for port in device["ports"]] == [4096, None]
        assert [port["gids"] for device in found for port in device["ports"]] == [[], []]


class TestGetaddrinfo:
    def test_json_has_the_fields_of_rdma_addrinfo(self, run: Run) -> None:
        result = run("getaddrinfo", "127.0.0.1", "7471", "--json")
        assert (result.status, result.err) == (0, "")
        (found,) = result.json
        assert list(found) == ADDRINFO_KEYS
        (route,) = found.pop("route")
        assert found == {
            "flags": 0,
            "family": int(AddressFamily.INET),
            "qp_type": int(QPType.RC),
            "port_space": int(PortSpace.TCP),
            "src_len": 16,
            "dst_len": 16,
            "src_addr": {"family": "inet", "host": "127.0.0.1", "port": 0},
            "dst_addr": {"family": "inet", "host": "127.0.0.1", "port": 7471},
            "src_canonname": None,
            "dst_canonname": None,
            "route_len": 72,
            "connect_len": 0,
            "connect": None,
            "device": "soft_lo",
            "port_num": 1,
            "gid_index": 0,
        }
        assert set(route) == PATH_KEYS | {"flags"}
        (info,) = rdmacm.getaddrinfo("127.0.0.1", 7471)
        assert route["flags"] == int(info.route[0].flags)
        assert (route["sgid"], route["dgid"]) == ("::ffff:127.0.0.1", "::ffff:127.0.0.1")
        for key in PATH_KEYS - {"sgid", "dgid"}:
            assert route[key] == getattr(info.route[0].path, key)
            assert isinstance(route[key], bool if key == "reversible" else int)

    def test_ipv6_addresses_have_flow_and_scope(self, run: Run) -> None:
        (found,) = run("getaddrinfo", "::1", "7471", "--json").json
        assert (found["src_len"], found["dst_len"]) == (28, 28)
        assert found["dst_addr"] == {"family": "inet6", "host": "::1", "port": 7471, "flowinfo": 0, "scope_id": 0}

    def test_infiniband_addresses_have_a_service_id(self, run: Run) -> None:
        (found,) = run("getaddrinfo", "::1", "7471", "-f", "ib", "-s", "[::1]:5", "-P", "ib", "--json").json
        assert (found["family"], found["src_len"], found["dst_len"]) == (27, 48, 48)
        assert found["dst_addr"] == {
            "family": "ib",
            "gid": "::1",
            "sid": (PortSpace.IB << 16) + 7471,
            "sid_mask": 0xFFFFFFFFFFFFFFFF,
            "pkey": 0xFFFF,
            "flowinfo": 0,
            "scope_id": 0,
        }
        assert found["src_addr"] == {**found["dst_addr"], "sid": (PortSpace.IB << 16) + 5}
        assert (found["route"], found["device"]) == ([], None)

    @pytest.mark.parametrize(
        ("argv", "expected"),
        [
            (["localhost", "7471"], {}),
            (["localhost", "7471", "-f", "inet"], {"family": AddressFamily.INET}),
            (["127.0.0.1", "1", "-P", "udp"], {"port_space": PortSpace.UDP}),
            (["127.0.0.1", "--port-space", "UDP", "1"], {"port_space": PortSpace.UDP}),
            (["127.0.0.1", "1", "-P", "ipoib"], {"port_space": PortSpace.IPOIB}),
            (["127.0.0.1", "1", "-P", "ib", "--qp-type", "uc"], {"port_space": PortSpace.IB, "qp_type": QPType.UC}),
            (["127.0.0.1", "1", "--qp-type", "xrc_send"], {"qp_type": QPType.XRC_SEND}),
            (["127.0.0.1", "1", "--qp-type", "xrc-send"], {"qp_type": QPType.XRC_SEND}),
            (["::1", "1", "--numeric"], {"flags": RaiFlag.NUMERICHOST}),
            (["--noroute", "::1"], {"flags": RaiFlag.NOROUTE}),
            (["::1", "1", "--dns"], {"flags": RaiFlag.DNS}),
            (["127.0.0.1", "1", "--passive"], {"flags": RaiFlag.PASSIVE}),
            (["::1", "9", "-f", "ib"], {"flags": RaiFlag.FAMILY, "family": AddressFamily.IB}),
            (["127.0.0.1", "1", "-s", "127.0.0.1"], {"src_addr": ("127.0.0.1", 0)}),
            (["127.0.0.1", "1", "--source=127.0.0.1:5000"], {"src_addr": ("127.0.0.1", 5000)}),
            (["::1", "1", "-s", "::1"], {"src_addr": ("::1", 0, 0, 0)}),
            (["::1", "1", "-s", "[::1]:5000"], {"src_addr": ("::1", 5000, 0, 0)}),
            (["::1", "1", "-s", "[::1]"], {"src_addr": ("::1", 0, 0, 0)}),
            (["-", "7471"], {}),
            (["-", "7471", "--passive"], {"flags": RaiFlag.PASSIVE}),
            (["-", "-s", "127.0.0.1:7"], {"src_addr": ("127.0.0.1", 7)}),
            (["127.0.0.1", "1", "--provider", "soft"], {"provider": "soft"}),
        ],
        ids=" ".join,
    )
    def test_options_become_hints(self, run: Run, argv: list[str], expected: dict[str, Any]) -> None:
        operands = [each for i, each in enumerate(argv) if _is_operand(argv, i)]
        node, service = (None if operands[0] == "-" else operands[0]), (operands[1] if operands[1:] else None)
        result = run("getaddrinfo", *argv, "--json")
        assert (result.status, result.err) == (0, "")
        infos = rdmacm.getaddrinfo(node, service, **expected)
        assert len(infos) == len(result.json)
        for found, info in zip(result.json, infos, strict=True):
            assert list(found) == ADDRINFO_KEYS
            plain = set(ADDRINFO_KEYS) - {"src_addr", "dst_addr", "route", "connect"}
            assert {key: found[key] for key in plain} == {key: getattr(info, key) for key in plain}
            assert found["src_addr"] == output.address_json(info.src_addr)
            assert found["dst_addr"] == output.address_json(info.dst_addr)
            assert len(found["route"]) == len(info.route)
        text = run("getaddrinfo", *argv)
        assert (text.status, text.err) == (0, "")
        assert text.out.count("kind") == len(infos)

    def test_text_output_shows_each_entry(self, run: Run) -> None:
        assert run("getaddrinfo", "127.0.0.1", "7471", "--qp-type", "ud").out == (
            "127.0.0.1:7471\n"
            "  kind    IPv4, QP type UD, port space UDP\n"
            "  source  127.0.0.1:0\n"
            "  device  soft_lo port 1, GID index 0\n"
            "  route   ::ffff:127.0.0.1 -> ::ffff:127.0.0.1, MTU 4096, hop limit 64, P_Key\n"
            "          0xffff\n"
        )
        assert run("getaddrinfo", "127.0.0.1", "7471", "--passive").out == (
            "listen on 127.0.0.1:7471\n  kind    IPv4, QP type RC, port space TCP\n  device  soft_lo port 1\n"
        )

    def test_failed_lookup_is_reported(self, run: Run) -> None:
        text, found = (run("getaddrinfo", "no-number", "--numeric", *argv) for argv in ([], ["--json"]))
        assert (text.status, text.out, found.status) == (1, "", 1)
        for result in (text, found):
            assert result.error.startswith("getaddrinfo no-number: Name or service not known")
            assert "[EAI_NONAME]" in result.error
        assert (found.json["error"]["errno_name"], found.json["error"]["address"]) == ("EAI_NONAME", "no-number")


def _is_operand(argv: Sequence[str], i: int) -> bool:
    takes_value = ("-f", "-P", "-s", "--port-space", "--qp-type", "--provider")
    return argv[i] == "-" or (not argv[i].startswith("-") and not (i and argv[i - 1] in takes_value))


class TestResolve:
    def test_json_has_addresses_route_and_steps(self, run: Run) -> None:
        result = run("resolve", "127.0.0.1", "7471", "--json")
        assert (result.status, result.err) == (0, "")
        found = result.json
        assert list(found) == [
            *("node", "service", "dst_addr", "src_addr", "provider", "port_space", "qp_type", "device", "port_num"),
            *("gid_index", "sgid", "dgid", "pkey", "route", "steps"),
        ]
        assert found["dst_addr"] == {"family": "inet", "host": "127.0.0.1", "port": 7471}
        source_port = found["src_addr"].pop("port")
        assert found["src_addr"] == {"family": "inet", "host": "127.0.0.1"}
        assert 0 < source_port < 65536
        assert {key: found[key] for key in ("node", "service", "provider", "device", "port_num", "gid_index")} == {
            "node": "127.0.0.1",
            "service": "7471",
            "provider": "soft",
            "device": "soft_lo",
            "port_num": 1,
            "gid_index": 0,
        }
        assert (found["port_space"], found["qp_type"]) == (PortSpace.TCP, QPType.RC)
        assert found["sgid"] == found["dgid"] == found["route"]["sgid"] == "::ffff:127.0.0.1"
        assert found["pkey"] == found["route"]["pkey"] == 0xFFFF
        assert set(found["route"]) == PATH_KEYS
        assert found["route"]["service_id"] == (PortSpace.TCP << 16) + 7471
        assert {type(value) for key, value in found["route"].items() if key not in ("dgid", "sgid")} == {int, bool}
        assert [step["name"] for step in found["steps"]] == ["name", "bind", "route", "select", "path"]
        for step in found["steps"]:
            assert set(step) == {"name", "microseconds"}
            assert isinstance(step["microseconds"], float)
            assert step["microseconds"] > 0

    def test_udp_port_space_resolves_over_ipv6(self, run: Run) -> None:
        found = run("resolve", "-P", "udp", "::1", "7471", "--json").json
        assert set(found["dst_addr"]) == {"family", "host", "port", "flowinfo", "scope_id"}
        assert (found["port_space"], found["qp_type"]) == (PortSpace.UDP, QPType.UD)

    def test_source_option_sets_address_and_port(self, run: Run) -> None:
        with contextlib.closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        found = run("resolve", "127.0.0.1", "7471", "-s", f"127.0.0.1:{port}", "--json").json
        assert found["src_addr"] == {"family": "inet", "host": "127.0.0.1", "port": port}

    def test_passive_binds_and_has_no_route(self, run: Run) -> None:
        found = run("resolve", "127.0.0.1", "0", "--passive", "--json").json
        assert (found["dst_addr"], found["route"], found["device"]) == (None, None, "soft_lo")
        found = run("resolve", "-", "0", "--passive", "-f", "inet", "--json").json
        assert (found["dst_addr"], found["device"], found["port_num"]) == (None, None, 0)
        assert run("resolve", "-", "0", "--passive", "-f", "inet").status == 0

    def test_text_output_has_a_line_per_fact(self, run: Run) -> None:
        result = run("resolve", "127.0.0.1", "7471")
        lines = [re.split(r" {2,}", line, maxsplit=1) for line in result.out.splitlines()]
        facts = dict(lines)
        assert len(facts) == len(lines)
        assert facts["destination"] == "127.0.0.1:7471"
        assert facts["source"].startswith("127.0.0.1:")
        assert facts["device"] == "soft_lo (provider soft)"
        assert (facts["port"], facts["GID index"]) == ("1", "0")
        assert facts["source GID"] == facts["destination GID"] == "::ffff:127.0.0.1"
        assert facts["P_Key"] == "0xffff"
        assert (facts["QP type"], facts["port space"]) == ("RC", "TCP")
        assert facts["route"] == "local, interface lo"
        assert facts["path MTU"] == "4096 bytes"
        assert facts["service ID"] == "0x0000000001061d2f"
        assert [label for label in facts if label.startswith("step ")] == [
            "step name",
            "step bind",
            "step route",
            "step select",
            "step path",
        ]
        assert all(" us" in facts[label] for label in facts if label.startswith("step "))

    @needs_netns
    def test_next_hop_is_shown(self, run: Run, net: TwoHosts) -> None:
        with net.a.enter():
            text, found = run("resolve", "10.7.0.2", "7471"), run("resolve", "10.7.0.2", "7471", "--json").json
        assert f"next hop         10.7.0.2 at {net.vb.mac} (reachable)\n" in text.out
        assert "route            on link, interface va\n" in text.out
        assert max(map(len, text.out.splitlines())) <= 80
        assert found["device"] == "soft_va"
        assert found["sgid"] == "::ffff:10.7.0.1"
        assert found["dgid"] == "::ffff:10.7.0.2"
        assert "neighbour" in [step["name"] for step in found["steps"]]

    @needs_netns
    @pytest.mark.parametrize("json_too", [[], ["--json"]], ids=["text", "json"])
    @pytest.mark.parametrize(
        ("argv", "start", "code"),
        [
            (["10.9.9.9", "7471"], "route 10.9.9.9:7471: no route to 10.9.9.9", "ENETUNREACH"),
            (["-t", "20", "10.7.0.9", "7471"], "neighbour 10.7.0.9:7471: 10.7.0.9 did not answer", "ETIMEDOUT"),
            (["-s", "10.9.9.1", "10.7.0.2", "1"], "bind 10.7.0.2:1: 10.9.9.1 is not an address", "EADDRNOTAVAIL"),
            (["-s", "fd07::1", "10.7.0.2", "1"], "getaddrinfo 10.7.0.2:1: Address family", "EAI_ADDRFAMILY"),
            (["-f", "ib", "fd07::2", "1"], "select [fd07::2]:0x1060001: no InfiniBand port reaches", "ENODEV"),
            (["-f", "inet", "fd07::2", "1"], "getaddrinfo [fd07::2]:1: Address family", "EAI_ADDRFAMILY"),
        ],
        ids=["no route", "no answer", "foreign source", "families", "infiniband", "no address"],
    )
    def test_failed_resolution_is_one_line(
        self, run: Run, net: TwoHosts, argv: list[str], start: str, code: str, json_too: list[str]
    ) -> None:
        with net.a.enter():
            result = run("resolve", *argv, *json_too)
        assert result.status == 1
        assert result.error.startswith(start)
        assert f"[{code}]; try: " in result.error
        if json_too:
            error = result.json["error"]
            assert result.error == (
                f"{error['step']} {error['address']}: {error['message']} [{error['errno_name']}]; try: {error['hint']}"
            )
        else:
            assert result.out == ""


class TestExplain:
    def test_text_matches_the_explanation(self, run: Run) -> None:
        result = run("explain", "127.0.0.1", "7471")
        assert (result.status, result.err) == (0, "")
        lines = result.out.splitlines()
        assert lines[0] == "127.0.0.1:7471 (provider soft)"
        assert lines[-1] == "=> 127.0.0.1:7471 from 127.0.0.1, device soft_lo port 1 GID index 0"
        assert [line for line in lines[1:-1] if not line.startswith(" ")] == ["route", "candidates", "path", "steps"]
        for device in rdmacm.devices():
            for entry in device.ports[0].gids:
                row = rf"^       {re.escape(device.name)}/1 +GID {entry.gid_index} +{entry.gid}$"
                assert re.search(row, result.out, re.MULTILINE)

    def test_json_matches_the_explanation(self, run: Run) -> None:
        result = run("explain", "localhost", "--json")
        assert (result.status, result.err) == (0, "")
        found, same = result.json, json.loads(json.dumps(rdmacm.explain("localhost").as_dict()))
        assert found.keys() == same.keys()
        assert found["ok"] is True
        for key in ("node", "service", "provider", "names", "candidates", "chosen", "route", "neighbour", "notes"):
            assert found[key] == same[key]

    @needs_netns
    def test_text_shows_route_neighbour_and_candidates(self, run: Run, net: TwoHosts) -> None:
        with net.a.enter():
            result = run("explain", "10.7.0.2", "7471")
        assert (result.status, result.err) == (0, "")
        for part in (
            "route\n  10.7.0.2 on link, interface va (MTU 1500), source 10.7.0.1, table main\n",
            f"neighbour\n  10.7.0.2 on va: reachable at {net.vb.mac}\n",
            "  -> chosen: the only candidate that passes every rule\n       soft_va/1  GID 1  ::ffff:10.7.0.1\n",
            "  no source-address: the route prefers source 10.7.0.1\n       soft_lo/1  GID 0  ::ffff:127.0.0.1\n",
            "path\n  ::ffff:10.7.0.1 -> ::ffff:10.7.0.2\n  MTU 1024, hop limit 64, ",
        ):
            assert part in result.out
        assert result.out.count("address-family: the destination is IPv4, this GID is IPv6\n") == 1
        assert max(map(len, result.out.splitlines())) <= 100

    @needs_netns
    def test_failure_is_explained_and_summarized(self, run: Run, net: TwoHosts) -> None:
        with net.a.enter():
            text = run("explain", "10.7.0.9", "7471", "-t", "20")
            found = run("explain", "10.7.0.9", "7471", "-t", "20", "--json")
        assert (text.status, found.status) == (1, 1)
        message = "10.7.0.9 did not answer on va in time [ETIMEDOUT]"
        assert f"FAILED at neighbour: {message}\ntry: " in text.out
        assert text.error.startswith(f"neighbour 10.7.0.9:7471: {message}; try: ")
        assert found.error == text.error
        assert found.json["ok"] is False
        assert found.json["chosen"] is None
        assert (found.json["error"], found.json["errno_name"]) == ("neighbour", "ETIMEDOUT")

    def test_unknown_name_is_explained(self, run: Run) -> None:
        text, found = run("explain", "no-number", "--numeric"), run("explain", "no-number", "--numeric", "--json")
        assert (text.status, found.status) == (1, 1)
        assert "FAILED at name: Name or service not known" in text.out
        assert text.error.startswith("getaddrinfo no-number: Name or service not known")
        assert found.json["errno"] == rdmacm.EAI.NONAME

    @needs_netns
    def test_unreachable_address_is_noted_and_the_next_used(
        self, run: Run, net: TwoHosts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def both(*args: object) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
            return [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "both.test", (host, 7471)) for host in ("10.9.9.9", "10.7.0.2")
            ]

        monkeypatch.setattr(socket, "getaddrinfo", both)
        with net.a.enter():
            text = run("explain", "both.test", "7471").out
            fact = run("resolve", "both.test", "7471").out
        assert "names\n  10.9.9.9:7471\n  10.7.0.2:7471\n" in text
        note = "10.9.9.9:7471: no route to 10.9.9.9 [ENETUNREACH]\n"
        assert f"note: {note}" in text
        assert f"note             {note}" in fact
        assert fact.startswith("destination      10.7.0.2:7471\n")


class TestUsage:
    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--pcap", "x"], "no command is given; try: rdmacm --help"),
            (["devcies"], "no command 'devcies'; try: rdmacm devices"),
            (["getaddrnfo"], "no command 'getaddrnfo'; try: rdmacm getaddrinfo"),
            (["zzz"], "no command 'zzz'; try: rdmacm --help"),
            (["-"], "no command '-'; try: rdmacm --help"),
            (["--jsno"], "unrecognized arguments: --jsno; try: rdmacm --help"),
            (["devices", "--jsno"], "devices: unrecognized arguments: --jsno; try: rdmacm devices --help"),
            (["devices", "--js"], "devices: unrecognized arguments: --js; try: rdmacm devices --help"),
            (["getaddrinfo"], "getaddrinfo: the following arguments are required: NODE"),
            (["resolve"], "resolve: the following arguments are required: NODE"),
            (["run", "--pcap", "-", "--", "ls"], "run: --pcap - writes to standard output, which is PROGRAM's"),
            (["rping", "-s", "::1"], "rping: -s and HOST exclude each other"),
            (["rping", "-a", "::1", "::2"], "rping: HOST '::2' and '::1' are two servers"),
            (["cmtime", "[::1]:70000"], "cmtime: '[::1]:70000': '70000' is not a port from 0 to 65535"),
            (["udaddy", "localhost:x"], "udaddy: 'localhost:x': 'x' is not a port from 0 to 65535"),
            (["explain", "::1", "1", "2"], "explain: unrecognized arguments: 2"),
            (["resolve", "::1", "1", "-P", "sctp"], "resolve: argument -P/--port-space: invalid choice: 'sctp'"),
            (
                ["resolve", "::1", "1", "-t", "0"],
                "resolve: argument -t/--timeout-ms: '0' is not a number of milliseconds",
            ),
            (["resolve", "::1", "1", "-t", "9" * 30], "resolve: argument -t/--timeout-ms: '999"),
            (["explain", "::1", "-t", "x"], "explain: argument -t/--timeout-ms: 'x' is not"),
            (
                ["explain", "::1", "-s", "localhost"],
                "explain: argument -s/--source: not a numeric address: 'localhost'",
            ),
            (["explain", "::1", "-s", "[::1"], "explain: argument -s/--source: '[::1' is not [ADDRESS]:PORT"),
            (["explain", "::1", "-s", "[::1]5"], "explain: argument -s/--source: '[::1]5' is not [ADDRESS]:PORT"),
            (["explain", "::1", "-s", "1.2.3.4:x"], "explain: argument -s/--source: 'x' is not a port number"),
            (["explain", "::1", "-s", "1.2.3.4:99999"], "explain: argument -s/--source: port 99999 is outside"),
            (["explain", "::1", "-s", "fe80::1%no-such"], "explain: argument -s/--source: no interface 'no-such'"),
            (["explain", "::1", "-s", ""], "explain: argument -s/--source: '' has no address"),
            (["explain", "::1", "-f", "ib", "-s", "127.0.0.1"], "explain: with --family ib the source is a GID"),
        ],
        ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
    )
    def test_usage_errors_are_one_line_and_exit_2(self, run: Run, argv: list[str], message: str) -> None:
        result = run(*argv)
        assert (result.status, result.out) == (2, "")
        assert result.error.startswith(message)
        assert "; try: rdmacm" in result.error

    def test_options_are_accepted_in_any_position(self, run: Run) -> None:
        assert run("getaddrinfo", "--json", "::1", "-P", "udp", "7").json[0]["dst_addr"]["port"] == 7

    @pytest.mark.parametrize(
        ("argv", "message", "code"),
        [
            (["devices", "--provider", "none"], "provider: no provider 'none' (from the argument)", "ENODEV"),
            (["explain", "::1", "--provider", "none"], "provider: no provider 'none'", "ENODEV"),
            (["getaddrinfo", "--sa", "-", "7"], "getaddrinfo 7: no active InfiniBand port", "ENOENT"),
            (["getaddrinfo", "--sa", "::1", "7"], "getaddrinfo 7: RAI_SA does not go with a node", "E(OP)?NOTSUPP?"),
            (["getaddrinfo", "-"], "getaddrinfo (no node, no service): Name or service not known", "EAI_NONAME"),
            (["getaddrinfo", "::1", "70000"], "getaddrinfo [::1]:70000: Servname not supported", "EAI_SERVICE"),
            (["getaddrinfo", "::1", "-P", "tcp", "--qp-type", "ud"], "getaddrinfo ::1: ai_qp_type", "EAI_QPTYPE"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_errors_name_step_address_and_code(self, run: Run, argv: list[str], message: str, code: str) -> None:
        result = run(*argv)
        assert (result.status, result.out) == (1, "")
        assert result.error.startswith(message)
        assert re.search(rf"\[{code}\]; try: ", result.error)

    def test_unprintable_characters_are_escaped(self, run: Run) -> None:
        result = run("explain", "a\n\x1b[2Jb\udcff", "--numeric")
        assert result.status == 1
        assert r"a\n\x1b[2Jb\udcff" in result.error
        assert "\x1b" not in result.out

    def test_provider_is_taken_from_the_environment(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RDMACM_PROVIDER", "none")
        assert "environment variable RDMACM_PROVIDER" in run("devices").error
        assert run("devices", "--provider", "soft").status == 0

    @pytest.mark.parametrize("command", [*COMMANDS, ""])
    def test_json_reports_usage_errors(self, run: Run, command: str) -> None:
        result = run(*command.split(), "--nonsense", "--json")
        found = result.json["error"]
        assert result.status == 2
        assert result.error == f"{found['message']}; try: {found['hint']}"
        assert set(found) == {"message", "errno", "errno_name", "step", "address", "hint"}

    @pytest.mark.parametrize(
        ("argv", "code", "step"),
        [
            (["devices", "--provider", "none"], "ENODEV", "provider"),
            (["sa", "nodes", "--port", "ibsim:x@no-fabric"], "ECONNREFUSED", "open_device"),
            (["resolve", "no-number", "1", "--numeric"], "EAI_NONAME", "getaddrinfo"),
            (["rping", "-c", "-a", "127.0.0.1", "-p", "9"], "ECONNREFUSED", "connect"),
            (["rping", "-s", "-a", "192.0.2.1"], "EADDRNOTAVAIL", "bind_addr"),
            (["ucmatose", "-s", "127.0.0.1", "-p", "9"], "ECONNREFUSED", "connect"),
            (["cmtime", "-s", "127.0.0.1", "-p", "9"], "ECONNREFUSED", "connect"),
            (["perf", "-c", "127.0.0.1", "-p", "9"], "ECONNREFUSED", "connect"),
            (["perf", "-b", "192.0.2.1"], "EADDRNOTAVAIL", "second process"),
            (["demo", "--provider", "none"], "ENODEV", "provider"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_json_reports_failures(self, run: Run, argv: list[str], code: str, step: str) -> None:
        result = run(*argv, "--json")
        found = result.json["error"]
        assert (result.status, found["errno_name"], found["step"]) == (1, code, step)
        assert f"{found['message']} [{code}]" in result.error
        assert found["hint"] is None or result.error.endswith(f"; try: {found['hint']}")

    def test_explanation_with_an_error_is_one_object(self, run: Run) -> None:
        assert run("explain", "no-number", "--numeric", "--json").json["errno_name"] == "EAI_NONAME"

    def test_operations_of_sa_are_named(self, run: Run) -> None:
        assert run("sa").error == (
            "sa: WHAT is missing, one of paths, services, register, withdraw, join, leave, nodes, info; "
            "try: rdmacm sa --help"
        )

    @pytest.mark.parametrize(
        "argv",
        [["resolve", "fe80::1%nope", "1"], ["getaddrinfo", "fe80::1%nope"], ["rping", "-c", "-a", "fe80::1%nope"]],
    )
    def test_unknown_interface_of_a_scope_is_named(self, run: Run, argv: list[str]) -> None:
        result = run(*argv)
        assert result.status == 1
        assert "no interface 'nope' for the scope of an IPv6 address" in result.error
        assert "[EAI_NONAME]; try: an interface of 'ip link'" in result.error

    @pytest.mark.parametrize("address", [None, "127.0.0.1"], ids=["wildcard", "one address"])
    def test_port_in_use_names_the_process(self, run: Run, address: str | None) -> None:
        where = [] if address is None else ["-a", address]
        with Server("rping", "-s", "-p", "0", *where) as server:
            result = run("rping", "-s", "-p", str(server.port), *where)
        assert result.status == 1
        code = "EADDRNOTAVAIL" if address is None else "EADDRINUSE"  # as librdmacm
        assert re.search(
            rf"port {server.port} is in use by process {server.process.pid} \(python\S* -m rdmacm rping .*\) .*"
            rf"\[{code}\]; try: ending what uses it, or another port \(0 takes a free one\)$",
            result.error,
        )


class TestHelp:
    def test_version_is_printed(self, run: Run) -> None:
        assert run("--version") == (0, f"rdmacm {rdmacm.__version__}, {core_choice.description()}\n", "")

    def test_version_is_an_object(self, run: Run) -> None:
        found = run("--version", "--json").json
        assert (found["version"], found["core"]) == (rdmacm.__version__, core_choice.name)
        assert found["why"] == core_choice.description()

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--json", "devices"], "--json stands behind the command"),
            (["rping", "::1", "--pcap=-", "--json"], "rping: --json and --pcap - both write to standard output"),
        ],
    )
    def test_misplaced_json_is_refused(self, run: Run, argv: list[str], message: str) -> None:
        result = run(*argv)
        assert (result.status, result.json["error"]["message"]) == (2, message)

    def test_command_alone_shows_the_commands_by_purpose(self, run: Run) -> None:
        result = run()
        assert (result.status, result.err) == (0, "")
        lines = [line for line in result.out.splitlines() if line.startswith("  ")]
        assert [line.split()[0] for line in lines] == list(COMMANDS)
        assert all(title in result.out.splitlines() for title in GROUPS)
        assert max(map(len, result.out.splitlines())) <= 80

    def test_main_help_lists_the_commands(self, run: Run) -> None:
        result = run("--help")
        assert (result.status, result.err) == (0, "")
        sections = sections_of(result.out)
        assert [title for title in sections if title != "COMMANDS"] == SECTIONS
        assert [line.split()[0] for line in sections["COMMANDS"].splitlines() if line] == list(COMMANDS)
        assert run("-h") == run("help") == result

    @pytest.mark.parametrize(
        ("command", "operands"),
        [
            ("", "[COMMAND] [ARGUMENT]..."),
            ("devices", ""),
            ("getaddrinfo", "NODE [SERVICE]"),
            ("resolve", "NODE [SERVICE]"),
            ("explain", "NODE [SERVICE]"),
        ],
    )
    def test_synopsis_marks_optional_arguments(self, run: Run, command: str, operands: str) -> None:
        synopsis = sections_of(run(*command.split(), "--help").out)["SYNOPSIS"]
        assert " ".join(synopsis.split()) == " ".join(f"rdmacm {command} [OPTION]... {operands}".split())

    @pytest.mark.parametrize("command", COMMANDS)
    def test_each_command_has_a_help_page(self, run: Run, command: str) -> None:
        result = run(command, "--help")
        assert (result.status, result.err) == (0, "")
        assert run(command, "-h") == run("help", command) == result
        sections = sections_of(result.out)
        assert list(sections) == SECTIONS
        listed = {line.split()[0] for line in sections["ENVIRONMENT"].splitlines() if line[4:5].strip()}
        assert listed == {*ENVIRONMENT[command], "RDMACM_LOG"}
        assert " ".join(sections["NAME"].split()) == f"rdmacm {command} - {COMMANDS[command]}"
        assert sections["SYNOPSIS"].strip().startswith(f"rdmacm {command} [OPTION]...")
        for status in ("0 ", "1 ", "2 "):
            assert f"\n    {status}" in f"\n{sections['EXIT STATUS']}"
        assert "rdma" in sections["SEE ALSO"]
        assert max(map(len, result.out.splitlines())) < 80
        assert all(line == line.rstrip() for line in result.out.splitlines())

    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_argument_has_help(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        tool = import_module(f"rdmacm.tools.{command}")
        parser = output.Parser(tool.PAGE)
        tool.add_arguments(parser)
        main([command, "--help"])
        options = sections_of(capsys.readouterr().out)["OPTIONS"]
        assert tool.PAGE.command == command
        # argparse has no public list of a parser's arguments.
        assert parser._actions
        for action in parser._actions:
            term = ", ".join(action.option_strings) or str(action.metavar)
            assert re.search(rf"^    {re.escape(term)}( \S+)?\n        \S", options, re.MULTILINE)
        # The output of "run" and "lab" is the programs', and that of "completion" a script.
        assert ("--json" in options) == (command not in ("run", "lab", "completion"))

    @for_each("command", COMMANDS)
    def test_help_examples_parse(self, command: str) -> None:
        tool = import_module(f"rdmacm.tools.{command}")
        assert tool.PAGE.examples
        for example, _ in tool.PAGE.examples:
            program, name, *argv = shlex.split(example.partition(" | ")[0].partition(" > ")[0])
            assert (program, name) == ("rdmacm", command)
            parser_of(tool).parse_intermixed_args(argv)

    def test_defaults_are_shown(self, run: Run) -> None:
        assert "(default: 2000)" in " ".join(run("resolve", "--help").out.split())


class TestWidth:
    LONG = "fe80:1111:2222:3333:4444:5555:6666:7777"

    def test_tables_wrap_their_last_column(self) -> None:
        text = output.table(
            ("ID", "GID", "LEASE", "NAME"), [("0x1000", self.LONG, "for ever", "n" * 63), ("1", "::1", "5 s", "short")]
        )
        lines = text.splitlines()
        assert max(map(len, lines)) <= 80
        assert "".join(line[59:] for line in lines[1:5]).replace(" ", "").startswith("n" * 63)
        assert lines[-1].endswith("  5 s       short")

    def test_text_without_room_is_on_its_own_line(self) -> None:
        text = output.table(("A", "NAME"), [("a" * 70, "some words that need room here"), ("b", "")])
        assert text.splitlines() == ["A", "    NAME", "a" * 70, "    some words that need room here", "b", "    -"]

    def test_labelled_values_wrap_beside_their_label(self) -> None:
        text = output.labelled_lines([("route", f"{self.LONG} -> {self.LONG}, MTU 4096, P_Key 0xffff"), ("a", "b")], 2)
        assert text.splitlines() == [
            f"  route  {self.LONG} ->",
            f"         {self.LONG}, MTU 4096, P_Key 0xffff",
            "  a      b",
        ]

    def test_line_without_a_table_wraps_with_an_indent(self) -> None:
        assert output.wrapped_line(f"  {self.LONG} on link, interface eth0, source {self.LONG}") == [
            f"  {self.LONG} on link, interface eth0, source",
            f"      {self.LONG}",
        ]
        assert output.wrapped_line("x" * 80) == ["x" * 80]

    @pytest.mark.parametrize(
        "argv",
        [["devices"], ["getaddrinfo", "::1", "1"], ["resolve", "::1", "1"], ["explain", "::1", "1"]],
        ids=" ".join,
    )
    def test_output_fits_80_columns(self, run: Run, argv: list[str]) -> None:
        assert max(map(len, run(*argv).out.splitlines())) <= 80
