"""What the tools show of the kernel's devices, beside the software devices and in other network namespaces."""

from __future__ import annotations

import json
import re

from interop.scenario import Guest

OURS = "env RDMACM_PROVIDER=kernel python3 -m rdmacm"


def test_devices_of_both_providers(guest: Guest) -> None:
    """Driver, firmware, types of GIDs and interfaces."""
    done = guest.run("rxe python3 -m rdmacm devices --json", record=False)
    assert done.status == 0, done.output
    found = {device["name"]: device for device in json.loads(done.output)}
    rxe, soft = found["rxe0"], found["soft_va"]
    assert (rxe["provider"], rxe["driver"], rxe["fw_ver"]) == ("kernel", "rdma_rxe", None)
    assert (soft["provider"], soft["driver"], soft["fw_ver"]) == ("soft", None, None)
    for device in (rxe, soft):
        (port,) = device["ports"]
        assert {(row["gid_type"], row["ndev_name"]) for row in port["gids"]} == {("ROCE_V2", "va")}
        assert "10.0.0.1" in {row["ipv4"] for row in port["gids"]}


def test_an_interface_of_another_namespace_is_not_shown(guest: Guest) -> None:
    """The kernel tells its index, which another interface may have here. A row that is not shown twice, either."""
    guest.network = "iwarp_network"
    done = guest.run(
        f"iwarp {OURS} devices | grep -o 'siw./1, .*'\nrxe {OURS} devices | grep -o 'siw./1, .*'\n"
        f"rxe {OURS} explain $PEER4 7471 | grep -c siw0/1",
        record=False,
    )
    elsewhere = "interface in another network namespace"
    shown = [f"siw0/1, {elsewhere}", "siw1/1, interface wb", "siw0/1, interface wa", f"siw1/1, {elsewhere}", "1"]
    assert done.output.splitlines() == shown, done.output


def test_rdma_of_programs_prints_what_iproute2_prints(guest: Guest) -> None:
    """By ``rdmacm run``: the same but for names and numbers, as text and in JSON."""
    commands = [f"{options} {words}" for options in ("", "-d", "-j", "-jp") for words in ("dev", "link show rxe0/1")]
    theirs = "\n".join(f"rdma {each}; echo ---" for each in commands)
    ours = theirs.replace("rxe0", "soft_vb")
    done = guest.run(f"{theirs}\nsoft python3 -m rdmacm run --device soft_vb -- sh -c '{ours}'", record=False)
    assert done.status == 0, done.output
    printed = done.output.split("---\n")[:-1]
    assert len(printed) == 2 * len(commands)
    changing = re.compile(r"[0-9a-f]{4}(:[0-9a-f]{4}){3}|rxe0|soft_vb|\bv[ab]\b|\b\d+\b(?!/)")
    for command, one, other in zip(commands, printed, printed[len(commands) :], strict=False):
        if "-j" in command:
            assert [[*device] for device in json.loads(one)] == [[*device] for device in json.loads(other)]
        else:  # the kernel's has capabilities and a setting besides, in detail
            fields = one.partition(" adaptive-moderation")[0]
            assert changing.sub("_", fields).strip() == changing.sub("_", other).strip()


def test_the_p_key_of_ethernet(guest: Guest) -> None:
    done = guest.run(f"rxe {OURS} resolve $SOFT4 7471", record=False)
    assert done.status == 0, done.output
    assert re.search("^P_Key +0xffff$", done.output, re.MULTILINE), done.output


def test_counters(guest: Guest) -> None:
    """The driver's and the connection manager's, by both calls; and in the log at the end of a process."""
    script = (
        "from rdmacm import open_device, query_counters\n"
        "found = query_counters('kernel')\n"
        "with open_device('rxe0', provider='kernel') as context:\n"
        "    assert context.query_counters().keys() == found.devices['rxe0'].keys()\n"
        "print(found.devices['rxe0']['sent_pkts'] > 0, found.cm['tx_req'] > 0, 'lifespan' in found.devices['rxe0'])"
    )
    done = guest.run(
        f"serve_rxe {OURS} rping -s -a $RXE4 -C 3 || exit\nrxe env RDMACM_LOG=device {OURS} rping -c -a $RXE4 -C 3\n"
        f'rxe python3 -c "{script}"',
        record=False,
    )
    assert done.status == 0, done.output
    assert done.output.splitlines()[-1] == "True True False", done.output
    assert re.search("counters of rxe0: .*sent_pkts [1-9]", done.output), done.output
    assert re.search("counters of connection managers: .*tx_req [1-9]", done.output), done.output


def test_counters_of_rdma_rxe_by_stat(guest: Guest) -> None:
    """Under the names that sysfs has, with and without the kernel's connection manager as the provider."""
    done = guest.run(
        f"serve_rxe {OURS} rping -s -a $RXE4 -C 3 || exit\nrxe {OURS} rping -c -a $RXE4 -C 3\n"
        f"echo ---; rxe env RDMACM_PROVIDER=auto python3 -m rdmacm stat --json\n"
        f"echo ---; rxe {OURS} stat --json; echo ---\n"
        "rxe ls /sys/class/infiniband/rxe0/ports/1/hw_counters",
        record=False,
    )
    assert done.status == 0, done.output
    *_, first, second, files = done.output.split("---\n")
    names = {*files.split()} - {"lifespan"}
    for shown in (first, second):
        counters = json.loads(shown)["kernel"]
        assert counters["devices"]["rxe0"].keys() >= names > {"sent_pkts", "rcvd_pkts", "rdma_sends", "send_err"}
        assert counters["devices"]["rxe0"]["sent_pkts"] > 0
        assert counters["cm"]["tx_req"] > 0


def test_libraries_of_a_process_that_has_moved_data(guest: Guest) -> None:
    ours = "python3 -m interop.libraries"
    done = guest.run(f"rxe {ours} kernel $RXE4 && soft {ours} soft $SOFT4", record=False)
    assert done.output.splitlines() == ["libibverbs", "none"], done.output


def test_the_port_that_rdma_rxe_has(guest: Guest) -> None:
    done = guest.run("rxe env RDMACM_PROVIDER=soft python3 -m rdmacm rping -s -a $RXE4", record=False)
    assert done.status == 1, done.output
    assert "by the kernel itself (rdma_rxe)" in done.output
    assert "'modprobe -r rdma_rxe'" in done.output
    assert "with an address that 'rdmacm devices' shows" in done.output
