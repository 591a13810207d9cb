"""The verdict of each way in which a connection fares, from packets that show it."""

from __future__ import annotations

import pytest

from rdmacm.check.icmp import _REFUSALS
from rdmacm.check.judging import judge_port
from rdmacm.check.measured import Requests, Resolution, Target
from rdmacm.constants import PortSpace
from rdmacm.explanation import Explanation
from rdmacm.proto.cm.codes import RejectReason, SidrStatus
from rdmacm.proto.cm.messages import DREQ, MRA, SIDR_REP, SIDR_REQ
from rdmacm.proto.roce.opcodes import Opcode
from rdmacm.trace.verdicts import FAILED, NOTE, OK, Verdict
from support.traces import ID_A, ID_B, MTU, PORT, PSN_A, PSN_B, QPN_B, Wire, pcap, traced, verdict, verdicts

V6 = bytes.fromhex("fd000000000000000000000000000001"), bytes.fromhex("fd000000000000000000000000000002")
RNR, SEQUENCE, INVALID, ACCESS, OPERATIONAL = 0x20 | 12, 0x60, 0x61, 0x62, 0x63


@pytest.fixture
def wire() -> Wire:
    return Wire()


def says(found: Verdict, level: str, rule: str, *words: str) -> None:
    assert (found.level, found.rule) == (level, rule), found
    assert [word for word in words if word not in found.text] == [], found.text


# -- no answer -----------------------------------------------------------------------------------------------------


def test_request_that_nothing_answers(wire: Wire) -> None:
    for _ in range(4):
        wire.req()
        wire.wait(2)
    wire.rej(RejectReason.TIMEOUT, side=0)
    says(verdict(wire), FAILED, "C1", "REQ was sent 4 times in 6.3 s", "firewall drops UDP 4791")


def test_request_that_a_host_does_not_answer_which_sends_to_others(wire: Wire) -> None:
    wire.req()
    wire.req()
    wire.packet(1, Opcode.RC_SEND_ONLY, 9, bytes(8), qpn=0x99)
    found = verdicts(wire)[0]
    says(found, FAILED, "C2", "sent twice", "backlog")


def test_request_that_is_only_deferred(wire: Wire) -> None:
    wire.req()
    wire.cm(1, MRA(0, ID_A, 0, 20))
    says(verdict(wire), FAILED, "C2", "asked for more time")


def test_request_in_a_partition_of_its_own(wire: Wire) -> None:
    wire.req(partition_key=0x8001)
    says(verdict(wire), FAILED, "R2", "P_Key 0x8001")


def test_request_for_another_partition_is_refused(wire: Wire) -> None:
    wire.req(partition_key=0x8001)
    wire.rej(RejectReason.INVALID_GID)
    says(verdict(wire), FAILED, "R2", "10.0.0.2 does not take", "P_Key 0x8001 is not in its table")


def test_reply_that_does_not_arrive(wire: Wire) -> None:
    wire.req()
    for _ in range(3):
        wire.rep()
    says(verdict(wire), FAILED, "C1", "REP was sent 3 times", "no RTU", "10.0.0.1")


def test_reply_that_does_not_arrive_and_the_client_gives_up(wire: Wire) -> None:
    wire.req()
    wire.rep()
    wire.rej(RejectReason.TIMEOUT, side=0)
    says(verdict(wire), FAILED, "C1", "REP was sent", "no RTU", "10.0.0.1")


@pytest.mark.parametrize("is_connected", [False, True], ids=["a request", "data"])
@pytest.mark.parametrize(
    ("code", "rule", "words"),
    [
        (0, "A3", "network unreachable"),
        (1, "A10", "host unreachable"),
        (3, "C1", "UDP port 4791 is closed"),
        (6, "A3", "network unknown"),
        (7, "A10", "host unknown"),
        (9, "C1", "administratively prohibited"),
        (10, "C1", "administratively prohibited"),
        (13, "C1", "a firewall refuses packets"),
    ],
)
def test_icmp_of_ipv4(wire: Wire, code: int, rule: str, words: str, is_connected: bool) -> None:
    if is_connected:
        rejected_data(wire, 3, code)
    else:
        wire.icmp(1, 3, code, wire.req())
    says(verdict(wire), FAILED, rule, words, "10.0.0.2")


def rejected_data(wire: Wire, kind: int, code: int) -> None:
    """A connection whose first WRITE, which is longer than the packets of the handshake, is rejected each time."""
    wire.connect()
    for _ in range(4):
        wire.write(0, PSN_A, 2)
        wire.icmp(1, kind, code, wire.frames[-1][1])


@pytest.mark.parametrize("code", _REFUSALS)
def test_icmp_means_the_same_to_a_check(code: tuple[int, int, int]) -> None:
    """Whether it is about a request or about data."""
    is_v4 = code[0] == 2
    found = Resolution(Explanation("", "", "soft"), source="10.0.0.1", destination="10.0.0.2")
    judged = judge_port(Target("10.0.0.2"), found, Requests(3, refusal=_REFUSALS[code], reporter="10.0.0.2"), None)
    early, late = (Wire() if is_v4 else Wire(*V6) for _ in range(2))
    early.icmp(1, *code[1:], early.req())
    rejected_data(late, *code[1:])
    assert [(each.level, each.rule) for each in (verdict(early), verdict(late))] == [(FAILED, judged.rule)] * 2


def test_icmp_of_before_does_not_explain_a_peer_that_stops(wire: Wire) -> None:
    wire.icmp(1, 3, 3, wire.req())
    wire.wait(1)
    wire.connect()
    wire.send(0, PSN_A)
    wire.ack(1, PSN_A)
    for _ in range(4):
        wire.send(0, PSN_A + 1)
        wire.wait(0.5)
    says(verdict(wire), FAILED, "", "10.0.0.2 stopped")


def test_icmp_about_responses_to_a_read(wire: Wire) -> None:
    """The firewall is the requester's: it rejects what it has asked for."""
    wire.connect()
    wire.send(0, PSN_A)
    wire.ack(1, PSN_A)
    for _ in range(4):
        wire.read(0, PSN_A + 1, 2 * MTU)
        wire.responses(1, PSN_A + 1, 2)
        wire.icmp(0, 3, 13, wire.frames[-1][1])
        wire.wait(1)
    says(verdict(wire), FAILED, "C1", "a firewall refuses packets to 10.0.0.1")


def test_icmp_of_a_router_says_which(wire: Wire) -> None:
    wire.icmp(1, 3, 1, wire.req(), sender=bytes((10, 0, 0, 254)))
    says(verdict(wire), FAILED, "A10", "host unreachable", "says 10.0.0.254")


def test_icmp_needs_fragmentation(wire: Wire) -> None:
    wire.icmp(1, 3, 4, wire.req(), mtu=1280, sender=bytes((10, 0, 0, 254)))
    says(verdict(wire), FAILED, "G8", "MTU 1280", "says 10.0.0.254")


@pytest.mark.parametrize(
    ("kind", "code", "rule", "words"),
    [
        (1, 0, "A3", "no route"),
        (1, 1, "C1", "administratively prohibited"),
        (1, 3, "A10", "address unreachable"),
        (1, 4, "C1", "UDP port 4791 is closed"),
        (1, 5, "C1", "policy"),
        (1, 6, "C1", "reject route"),
        (2, 0, "G8", "MTU 1280"),
        (3, 0, "A3", "time to live exceeded"),
    ],
)
def test_icmp_of_ipv6(kind: int, code: int, rule: str, words: str) -> None:
    wire = Wire(*V6)
    wire.icmp(1, kind, code, wire.req(), mtu=1280)
    says(verdict(wire), FAILED, rule, words)


# -- refusals ------------------------------------------------------------------------------------------------------


def test_nobody_listens(wire: Wire) -> None:
    wire.req()
    wire.rej(RejectReason.INVALID_SERVICE_ID)
    says(verdict(wire), FAILED, "J1", "nobody at 10.0.0.2 listens on port 7471 of port space TCP")


def test_port_space_is_wrong(wire: Wire) -> None:
    wire.req(space=PortSpace.IB, local_comm_id=0x33)
    wire.rep(remote_comm_id=0x33)
    wire.send(0, PSN_A)
    wire.req()
    wire.rej(RejectReason.INVALID_SERVICE_ID)
    says(verdicts(wire)[1], FAILED, "J1", "port space TCP is wrong", "listens on port 7471 in IB only")


def test_port_space_does_not_fit_the_service(wire: Wire) -> None:
    wire.req(space=PortSpace.UDP)
    wire.rej(RejectReason.INVALID_SERVICE_ID)
    says(verdict(wire), FAILED, "J1", "port space UDP does not fit RC")


def test_service_id_of_no_port(wire: Wire) -> None:
    wire.req(service_id=0x1000000000000005)
    wire.rej(RejectReason.INVALID_SERVICE_ID)
    says(verdict(wire), FAILED, "J1", "service id 0x1000000000000005")


def test_stale_connection(wire: Wire) -> None:
    wire.req()
    wire.rej(RejectReason.STALE_CONN)
    says(verdict(wire), FAILED, "J2", "QP 0x000011", "stale")


@pytest.mark.parametrize(
    ("data", "words"), [(b"", "without private data"), (b"full", "private data 'full'"), (b"\1\2", "private data 0102")]
)
def test_application_refuses(wire: Wire, data: bytes, words: str) -> None:
    wire.req()
    wire.rej(RejectReason.CONSUMER_DEFINED, private_data=data)
    says(verdict(wire), FAILED, "J3", "reason 28", words)


def test_mtu_is_refused_with_both_numbers(wire: Wire) -> None:
    wire.req(path_mtu=5)
    wire.rej(RejectReason.INVALID_MTU, ari=b"\x03")
    says(verdict(wire), FAILED, "G8", "path MTU of 4096", "takes 1024")


def test_peer_gives_up(wire: Wire) -> None:
    wire.req()
    wire.rej(RejectReason.TIMEOUT)
    says(verdict(wire), FAILED, "J5", "10.0.0.2 gave up")


def test_other_reasons_have_their_number_and_name(wire: Wire) -> None:
    wire.req()
    wire.rej(RejectReason.NO_RESOURCES)
    says(verdict(wire), FAILED, "", "3 (no resources)")
    wire = Wire()
    wire.req()
    wire.rej(999)
    says(verdict(wire), FAILED, "", "999")


def test_datagrams_are_refused(wire: Wire) -> None:
    wire.cm(0, SIDR_REQ(0x01110000 + PORT, request_id=5, private_data=wire.request().private_data))
    wire.cm(1, SIDR_REP(5, SidrStatus.UNSUPPORTED))
    says(verdict(wire), FAILED, "J1", "port 7471 of port space UDP")
    wire = Wire()
    wire.cm(0, SIDR_REQ(0x01110000 + PORT, request_id=5))
    wire.cm(1, SIDR_REP(5, SidrStatus.REJECT, private_data=b"no"))
    says(verdict(wire), FAILED, "J3", "reject", "'no'")
    wire = Wire()
    wire.cm(0, SIDR_REQ(0x01110000 + PORT, request_id=5))
    says(verdict(wire), FAILED, "C1", "SIDR_REQ was sent once")


# -- data ----------------------------------------------------------------------------------------------------------


def test_healthy(wire: Wire) -> None:
    wire.connect()
    wire.send(0, PSN_A)
    wire.ack(1, PSN_A)
    wire.read(0, PSN_A + 1, 3 * MTU)
    wire.responses(1, PSN_A + 1, 3)
    wire.write(1, PSN_B, 2)
    wire.ack(0, PSN_B + 1)
    wire.disconnect()
    says(verdict(wire), OK, "", f"1 READ, 1 SEND, 1 WRITE of {64 + 5 * MTU} bytes", "ended by 10.0.0.1")


def test_connected_at_the_third_request(wire: Wire) -> None:
    wire.req()
    wire.req()
    wire.connect()
    says(verdict(wire), NOTE, "", "healthy", "the first 2 requests got no answer")


@pytest.mark.parametrize(
    ("syndrome", "words"),
    [(ACCESS, "remote access error"), (INVALID, "invalid request"), (OPERATIONAL, "remote operational error")],
)
def test_naks(wire: Wire, syndrome: int, words: str) -> None:
    wire.connect()
    wire.write(0, PSN_A, 1)
    wire.ack(1, PSN_A, syndrome)
    says(verdict(wire), FAILED, "", "10.0.0.2", words)


def test_receives_that_come_late(wire: Wire) -> None:
    wire.connect()
    wire.send(0, PSN_A)
    wire.ack(1, PSN_A, RNR)
    wire.send(0, PSN_A)
    wire.ack(1, PSN_A)
    says(verdict(wire), NOTE, "", "late once", "RNR NAK")


def test_receives_that_never_come(wire: Wire) -> None:
    wire.connect()
    for _ in range(7):
        wire.send(0, PSN_A)
        wire.ack(1, PSN_A, RNR)
    says(verdict(wire), FAILED, "", "never got ready", "7 RNR NAKs")


def test_peer_that_stops(wire: Wire) -> None:
    wire.connect()
    wire.send(0, PSN_A)
    wire.ack(1, PSN_A)
    for _ in range(4):
        wire.send(0, PSN_A + 1)
        wire.wait(0.5)
    says(verdict(wire), FAILED, "", "10.0.0.2 stopped", "sent again 3 times")


def test_short_packets_pass_and_long_ones_do_not(wire: Wire) -> None:
    wire.connect()
    wire.send(0, PSN_A, 64)
    wire.ack(1, PSN_A)
    for _ in range(4):
        wire.write(0, PSN_A + 1, 3)
    says(verdict(wire), FAILED, "G8", "path MTU is larger than the way", "packets of 1084 bytes", "10.0.0.2")


def test_responses_to_a_read_do_not_pass(wire: Wire) -> None:
    wire.connect()
    wire.send(0, PSN_A, 64)
    wire.ack(1, PSN_A)
    for _ in range(4):
        wire.read(0, PSN_A + 1, 5000)
        wire.wait(0.5)
    says(verdict(wire), FAILED, "G8", "responses to a READ, of 1024 bytes each", "10.0.0.2")


def test_capture_of_one_direction(wire: Wire) -> None:
    wire.req()
    wire.rtu()
    says(verdict(wire), OK, "", "the capture lacks what the other end has sent")


def test_router_says_why_long_packets_do_not_pass(wire: Wire) -> None:
    wire.connect()
    for _ in range(4):
        wire.write(0, PSN_A, 3)
        wire.icmp(1, 3, 4, wire.frames[-3][1], mtu=1000, sender=bytes((10, 0, 0, 254)))
    says(verdict(wire), FAILED, "G8", "10.0.0.254 says", "MTU 1000")


def test_queue_pair_that_was_connected_by_hand_and_never_answers(wire: Wire) -> None:
    for _ in range(4):
        wire.send(0, PSN_A)
    says(verdict(wire), FAILED, "G1", "never acknowledged anything")


def test_packets_that_were_lost_before_the_capture(wire: Wire) -> None:
    wire.connect()
    for number in range(100):
        if number % 20 != 7:
            wire.send(0, PSN_A + number)
        else:
            wire.send(0, PSN_A + number + 1)
            wire.ack(1, PSN_A + number, SEQUENCE)
            wire.send(0, PSN_A + number)
        wire.ack(1, PSN_A + number)
    says(verdict(wire), NOTE, "", "% of the packets were lost: 5 packets, 5 sent again", "100 SEND")


def test_packets_that_were_lost_behind_the_capture(wire: Wire) -> None:
    wire.connect()
    for number in range(100):
        wire.send(0, PSN_A + number)
        if number % 20 == 7:
            wire.send(0, PSN_A + number)
        wire.ack(1, PSN_A + number)
    says(verdict(wire), NOTE, "", "% of the packets were lost: 5 packets, 5 sent again")


def test_packets_that_only_came_in_another_order(wire: Wire) -> None:
    wire.connect()
    for number in (0, 2, 1, 3):
        wire.send(0, PSN_A + number)
    wire.ack(1, PSN_A + 3)
    says(verdict(wire), OK, "", "4 SEND")


def test_packets_that_only_the_capture_lacks(wire: Wire) -> None:
    wire.connect()
    for number in range(100):
        if number % 20 != 7:
            wire.send(0, PSN_A + number)
        wire.ack(1, PSN_A + number)
    says(verdict(wire), NOTE, "", "the capture lacks packets, at least 5,", "95 SEND")


def test_congestion(wire: Wire) -> None:
    wire.connect()
    for number in range(10):
        wire.tos = 3 if number % 2 else 2
        wire.send(0, PSN_A + number)
    wire.tos = 0
    wire.notice(1)
    wire.ack(1, PSN_A + 9)
    says(verdict(wire), NOTE, "", "5 of 10 packets were marked", "1 CNP")


def test_both_bits_of_ecn_in_the_tos(wire: Wire) -> None:
    wire.connect()
    wire.tos = 0x1B
    for number in range(10):
        wire.send(0, PSN_A + number)
    wire.tos = 0
    wire.ack(1, PSN_A + 9)
    says(verdict(wire), NOTE, "Q3", "every packet of 10.0.0.1")


@pytest.mark.parametrize(("times", "level", "rule"), [(3, FAILED, "G8"), (1, NOTE, "")])
def test_responses_that_are_seen_and_asked_for_again(wire: Wire, times: int, level: str, rule: str) -> None:
    """The capture is at the end that responds: long responses pass there, and never arrive."""
    wire.connect()
    wire.send(1, PSN_B)
    wire.ack(0, PSN_B)
    for _ in range(1 + times):
        wire.read(1, PSN_B + 1, 2 * MTU)
        wire.responses(0, PSN_B + 1, 2)
        wire.wait(1)
    found = verdict(wire)
    assert (found.level, found.rule) == (level, rule), found
    if rule:
        assert "never got to 10.0.0.2, which asked for them again 3 times" in found.text


def test_ends_in_different_partitions(wire: Wire) -> None:
    wire.connect()
    wire.send(0, PSN_A)
    wire.pkey = 0x8001
    wire.send(1, PSN_B)
    says(verdict(wire), FAILED, "", "0x8001 and 0xffff")


def test_peer_that_is_gone_when_the_connection_ends(wire: Wire) -> None:
    wire.connect()
    for _ in range(3):
        wire.cm(0, DREQ(ID_A, ID_B, QPN_B))
    says(verdict(wire), NOTE, "", "10.0.0.2 did not answer 3 DREQs")


def test_class_that_is_set_at_one_end(wire: Wire) -> None:
    wire.connect()
    for number in range(4):
        wire.tos = 26 << 2
        wire.send(0, PSN_A + number)
        wire.tos = 0
        wire.ack(1, PSN_A + number)
    says(verdict(wire), NOTE, "Q4", "10.0.0.1 have DSCP 26", "10.0.0.2 0", "4 SEND")


def test_class_that_is_set_at_both_ends(wire: Wire) -> None:
    wire.connect()
    wire.tos = 26 << 2
    wire.send(0, PSN_A)
    wire.ack(1, PSN_A)
    says(verdict(wire), OK, "", "1 SEND")


MAC, OTHER = bytes.fromhex("0c42a1112233"), bytes.fromhex("0c42a1445566")


@pytest.mark.parametrize("is_answered", [True, False])
def test_next_hop_with_another_mac(wire: Wire, is_answered: bool) -> None:
    wire.connect()
    wire.mac = MAC
    wire.send(0, PSN_A)
    wire.ack(1, PSN_A)
    wire.mac = OTHER
    for _ in range(1 if is_answered else 4):
        wire.send(0, PSN_A + 1)
    if is_answered:
        wire.ack(1, PSN_A + 1)
    words = f"{MAC.hex(':')} became {OTHER.hex(':')}", "packets of 10.0.0.1 go to"
    says(verdict(wire), NOTE if is_answered else FAILED, "C5", *words)


def test_two_next_hops_in_turn(wire: Wire) -> None:
    wire.connect()
    for number in range(4):
        wire.mac = (MAC, OTHER)[number % 2]
        wire.send(0, PSN_A + number)
        wire.ack(1, PSN_A + number)
    says(verdict(wire), OK, "", "4 SEND")


# -- neighbours ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["ARP", "ND"])
def link(request: pytest.FixtureRequest) -> Wire:
    return Wire() if request.param == "ARP" else Wire(*V6)


def ask(link: Wire, times: int = 3) -> None:
    for _ in range(times):
        link.neighbour(0)
        link.wait(1)


def test_dead_neighbour(link: Wire) -> None:
    ask(link)
    a, b, how = ("10.0.0.1", "10.0.0.2", "ARP") if len(link.hosts[0]) == 4 else ("fd00::1", "fd00::2", "neighbour")
    says(verdict(link), FAILED, "A10", f"{b} does not answer {how}", f"{a} asked 3 times in 2.0 s for its hardware")


def test_neighbour_that_answers(link: Wire) -> None:
    ask(link, 2)
    link.neighbour(1, is_answer=True)
    assert verdicts(link) == []


def test_neighbour_that_asks_is_there(wire: Wire) -> None:
    ask(wire, 2)
    wire.neighbour(1)
    assert verdicts(wire) == []


def test_neighbour_whose_answer_is_not_in_the_capture(link: Wire) -> None:
    """Who got no answer asks again after a second. Who got one does not."""
    for _ in range(3):
        link.neighbour(0)
        link.wait(60)
    assert verdicts(link) == []


def test_address_that_is_looked_for_by_its_new_owner(link: Wire) -> None:
    for _ in range(3):
        link.neighbour(0, sender=bytes(len(link.hosts[0])))
    assert verdicts(link) == []


def test_dead_neighbour_of_others(wire: Wire) -> None:
    """Beside connections, only questions between their ends count."""
    wire.connect()
    wire.send(0, PSN_A)
    wire.ack(1, PSN_A)
    wire.disconnect()
    healthy, hosts = len(wire.frames), wire.hosts
    wire.hosts = hosts[0], bytes((10, 0, 0, 77))
    ask(wire)
    says(verdict(wire), OK, "", "1 SEND")
    del wire.frames[healthy:]
    wire.hosts = hosts
    ask(wire)
    says(verdicts(wire)[1], FAILED, "A10", "10.0.0.2 does not answer ARP")


def test_questions_for_neighbours_are_bounded(wire: Wire) -> None:
    for number in range(3000):
        wire.hosts = bytes((10, 0, 0, 1)), bytes((10, 1, *divmod(number, 256)))
        wire.neighbour(0)
        wire.neighbour(0)
    assert len(verdicts(wire)) == 1024


def test_short_packet_of_arp_is_malformed(wire: Wire) -> None:
    wire.neighbour(0)
    time, frame = wire.frames[0]
    tracer, _ = traced(pcap([(time, frame[:-1])]))
    assert tracer.malformed == 1
