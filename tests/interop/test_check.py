"""``rdmacm check`` of rxe, from the software device and the other way, alone and with help."""

from __future__ import annotations

import json

import pytest

from interop.mtu_hole import HOLE
from interop.scenario import Guest

CHECK = "python3 -m rdmacm check -n 100"
KERNEL = f"{CHECK} --provider kernel"
#: Starts the helper of one side, and waits until it has said so.
HELP = (
    ": >/tmp/helper.out\n{side} {check} --serve 2>/tmp/helper.out &\nHELPER=$!\n"
    "until grep -q helping /tmp/helper.out; do runs $HELPER || cat /tmp/helper.out; nap 0.05; done\n"
)
#: Runs a check, and has its status as that of the script.
DONE = "\nstatus=$?\nkill $HELPER $SERVER 2>/dev/null\nexit $status"


def lines(output: str) -> dict[str, str]:
    """What follows the sign, by the step."""
    return {line[2:13].strip(): line[0] + line[13:] for line in output.splitlines() if line[:1] in "✓✗?–"}


@pytest.mark.parametrize("family", [4, 6])
def test_rxe_alone(guest: Guest, family: int) -> None:
    done = guest.run(f"serve_rxe rping -s -P -a $RXE{family}\nsoft {CHECK} $RXE{family} 7174{DONE}", record=False)
    found = lines(done.output)
    assert done.status == 0, done.output
    assert "port 7174 (tcp) accepts" in found["manager"]
    assert found["path MTU"].startswith("✓1024"), done.output


def test_nobody_listens(guest: Guest) -> None:
    done = guest.run(f"serve_rxe rping -s -P -a $RXE4\nsoft {CHECK} $RXE4 9{DONE}", record=False)
    assert done.status == 14, done.output
    assert "nobody listens on port 9 (tcp)" in done.output


#: Faults of a server on rxe: commands that make them, the port asked for, the status, the rule, and the text.
FAULTS = {
    "stopped": ("kill -STOP $SERVER", "7174", 14, "C2", "its backlog is full, or its process is stopped or busy"),
    "space": (":", "-P udp 7174", 14, "J1", "nobody listens on port 7174 (udp), and somebody in port space tcp"),
    "full": (
        "kill -STOP $SERVER\nsoft python3 -m rdmacm ucmatose -c 8 -p 7174 -s $RXE4 >/dev/null 2>&1 &\nASKING=$!",
        "7174",
        14,
        "C2",
        "its backlog is full, or its process is stopped or busy",
    ),
    "silent": ("tc qdisc replace dev va root netem loss 100%", "7174", 13, "C1", "no answer, the host answers no ping"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_rxe(guest: Guest, fault: str) -> None:
    """A check names the cause, and a trace of its packets the same rule."""
    make, argument, status, rule, text = FAULTS[fault]
    check = f"soft {CHECK} --timeout 0.7 $RXE4 {argument}"
    mend = "tc qdisc delete dev va root 2>/dev/null; kill -CONT $SERVER; kill $SERVER $ASKING 2>/dev/null; echo =="
    done = guest.run(
        f"serve_rxe rping -s -P -a $RXE4\n{make}\nrecord /tmp/check.pcap\n{check}\nstatus=$?\nrecorded\n{mend}\n"
        f"soft python3 -m rdmacm trace --json /tmp/check.pcap\nexit $status",
        record=False,
    )
    assert done.status == status, done.output
    check_says, _, trace_says = done.output.partition("==\n")
    for each in (text, f"(rdmacm doctor {rule})"):
        assert each in " ".join(check_says.split()), done.output
    verdicts = [each["verdict"] for each in json.loads(trace_says)["connections"]]
    assert rule in {each["rule"] for each in verdicts if each["level"] == "failed"}, done.output


#: What a router between both hosts does with packets to rxe: the type of its route, the rule, and the text. The kernel
#: does not limit the number of its ICMP errors.
REJECTS = {
    "unreachable": ("A10", "10.0.3.1 reports that the host is unreachable"),
    "prohibit": ("C1", "10.0.3.1 reports that this is prohibited"),
    "none": ("A3", "10.0.3.1 reports that the network is unreachable"),
}
ROUTER = """
ip netns add way
ip -n soft link set vb netns way
ip link add s0 netns soft type veth peer name s1 netns way
ip -n soft address add 10.0.3.2/24 dev s0
ip -n way address add 10.0.3.1/24 dev s1
ip -n way address add $SOFT4/24 dev vb
for link in vb s1 lo; do ip -n way link set $link up; done
ip -n soft link set s0 up
ip netns exec way sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward; echo 0 >/proc/sys/net/ipv4/icmp_ratelimit'
echo 0 >/proc/sys/net/ipv4/route/error_cost
ip -n soft route add default via 10.0.3.1
ip route add 10.0.3.0/24 via $SOFT4
until [[ $(ip -n soft link show s0) == *"state UP"* ]]; do nap 0.05; done
"""
NO_ROUTER = "ip route delete 10.0.3.0/24\nip netns delete way\nno_network"


@pytest.mark.parametrize("route", REJECTS)
def test_router_rejects_packets_to_rxe(guest: Guest, route: str) -> None:
    """The way to rxe leads over a router whose route to it has gone away."""
    rule, text = REJECTS[route]
    check = f"soft {CHECK} --timeout 0.7 $RXE4 7174"
    lose = "ip -n way route delete 10.0.0.0/24" if route == "none" else f"ip -n way route add {route} $RXE4"
    done = guest.run(
        f"serve_rxe rping -s -P -a $RXE4\n{ROUTER}\n{lose}\n{check}\n"
        f"status=$?\nkill $SERVER\n{NO_ROUTER}\nexit $status",
        record=False,
    )
    assert done.status == 13, done.output
    for each in (text, f"(rdmacm doctor {rule})"):
        assert each in " ".join(done.output.split()), done.output


def test_dead_neighbour_of_rxe(guest: Guest) -> None:
    done = guest.run(f"rxe {KERNEL} --timeout 0.7 10.0.0.77", record=False)
    assert done.status == 12, done.output
    text = " ".join(done.output.split())
    assert "no neighbour has answered for the next hop [ETIMEDOUT]" in text, done.output
    assert "try: ping -I va 10.0.0.77 (rdmacm doctor A10)" in text, done.output


@pytest.mark.parametrize("family", [4, 6])
def test_rxe_helps(guest: Guest, family: int) -> None:
    helper = HELP.format(side="rxe", check=KERNEL)
    done = guest.run(f"{helper}soft {CHECK} -t 104 $RXE{family}{DONE}", record=False)
    found = lines(done.output)
    assert done.status == 0, done.output
    assert found["class"] == "✓104 (DSCP 26), as sent in both directions", done.output


@pytest.mark.parametrize("family", [4, 6])
def test_rxe_checks(guest: Guest, family: int) -> None:
    helper = HELP.format(side="soft", check=CHECK)
    done = guest.run(f"{helper}rxe {KERNEL} -t 104 $SOFT{family}{DONE}", record=False)
    assert done.status == 0, done.output
    assert lines(done.output)["loss"].startswith("✓0.0 % of"), done.output


def test_loss(guest: Guest) -> None:
    helper = HELP.format(side="rxe", check=KERNEL)
    script = f"{helper}impair loss 5%\nsoft {CHECK} -n 1000 $RXE4\nstatus=$?\nunimpaired\nkill $HELPER\nexit $status"
    done = guest.run(script, record=False)
    assert done.status == 16, done.output
    assert "packets are lost (" in done.output


def test_error_of_a_hole(guest: Guest) -> None:
    """The kernel's device cannot ask the peer's queue pair, and its connection manager answers."""
    program = "python3 -m interop.mtu_hole"
    script = f"network 9000\nserve_soft {program} serve\nrxe {program} read\nfinish\nno_network"
    done = guest.run(script, record=False, timeout=200)
    assert "packets of up to 1044 bytes arrive, and one of 3044 does not: a link on the way" in done.output
    assert "ip route replace 10.0.0.2 dev va mtu 1500" in done.output


def test_error_of_a_hole_by_a_tool(guest: Guest) -> None:
    perf = "python3 -m rdmacm perf"
    client = f"{perf} -c $SOFT4 --op read --size 8000 --count 4 --provider kernel"
    script = f"network 9000\n{HOLE}\nserve_soft {perf} -s -b $SOFT4\nrxe {client}\nkill $SERVER\nno_network"
    done = guest.run(script, record=False, timeout=200)
    assert "and one of 4140 does not: a link on the way has a smaller MTU" in done.output, done.output
