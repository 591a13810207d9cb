"""Joins of multicast groups, and messages to a group, compared with bare sockets in the same run.

    python3 dev.py bench multicast [--json] [--rounds N] [--effort FACTOR]

Everything is on the loopback interface. A join is counted until MULTICAST_JOIN is fetched; each is of another group,
and is left again. The socket beside it is bound to the group and becomes a member, and its close ends that. A message
has 64 bytes, and is counted when each member of the group, all in one process, has its copy.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable

from rdmacm import CmId, EventChannel, PortSpace, UdParam
from rdmacm.verbs import AH, QPCap, QPInitAttr, QPType, RecvWR, SendFlag, SendWR, WROpcode

HERE = "127.0.0.1"
SIZE = 64
#: Receives that a member has posted, and messages that are under way at a time.
WINDOW = 32


def group(number: int) -> str:
    return f"239.77.{number >> 8 & 255}.{number & 255}"


def join_ids(channel: EventChannel, count: int, at_once: int) -> float:
    """Return the joins per second of one id, ``at_once`` groups at a time."""
    with CmId(channel, PortSpace.UDP) as cmid:
        cmid.bind_addr((HERE, 0))
        spent = 0.0
        for start in range(0, count, at_once):
            addresses = [(group(number), 0) for number in range(start, min(start + at_once, count))]
            began = time.perf_counter()
            for address in addresses:
                cmid.join_multicast(address)
            for _ in addresses:
                channel.get_event().ack()
            spent += time.perf_counter() - began
            for address in addresses:
                cmid.leave_multicast(address)
    return count / spent


def join_sockets(count: int) -> float:
    """Return the joins per second of sockets, one for each group."""
    spent = 0.0
    interface = socket.inet_aton(HERE)
    for number in range(count):
        address = group(number)
        began = time.perf_counter()
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind((address, 0))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(address) + interface)
        spent += time.perf_counter() - began
        sock.close()
    return count / spent


def send_messages(channel: EventChannel, count: int, members: int) -> float:
    """Return the messages per second to a group of so many queue pairs."""
    ids, regions = [], []
    attr = QPInitAttr(QPType.UD, cap=QPCap(WINDOW, WINDOW, 1, 1, SIZE))
    for _ in range(members):
        cmid = CmId(channel, PortSpace.UDP)
        cmid.bind_addr((HERE, 0))
        cmid.create_qp(attr.copy())
        regions.append(cmid.reg_msgs(bytearray(40 + SIZE)))
        cmid.join_multicast((group(0), 0))
        with channel.get_event() as event:
            param = event.param
        assert isinstance(param, UdParam)
        ids.append(cmid)
    sender = ids[0]
    with AH(sender.pd, param.ah_attr) as ah:
        message = SendWR(1, WROpcode.SEND, [bytes(SIZE)], SendFlag.SIGNALED | SendFlag.INLINE)
        message.set_wr_ud(ah, param.qp_num, param.qkey)
        began = time.perf_counter()
        for _ in range(0, count, WINDOW):
            for cmid, region in zip(ids, regions, strict=True):
                cmid.qp.post_recv([RecvWR(2, [region.sge()])] * WINDOW)
            sender.qp.post_send([message] * WINDOW)
            for cmid in ids:
                left = WINDOW
                while left:
                    left -= len(cmid.recv_cq.poll(left))
            left = WINDOW
            while left:
                left -= len(sender.send_cq.poll(left))
        spent = time.perf_counter() - began
    for cmid, region in zip(ids, regions, strict=True):
        cmid.destroy()
        region.close()
    return -(-count // WINDOW) * WINDOW / spent


def main() -> int:
    """Run everything in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rounds", type=int, default=5, help="rounds, of which the median counts (5)")
    parser.add_argument("--effort", type=float, default=1.0, help="factor of the numbers of joins and messages (1)")
    options = parser.parse_args()
    joins, messages = max(10, int(1000 * options.effort)), max(WINDOW, int(20_000 * options.effort))
    found: dict[str, list[float]] = defaultdict(list)
    with EventChannel() as channel:
        contestants: dict[str, Callable[[], float]] = {
            "joins, one at a time": lambda: join_ids(channel, joins, 1),
            "joins, 200 at a time": lambda: join_ids(channel, joins, 200),
            "joins of bare sockets": lambda: join_sockets(joins),
            "messages to 1 member": lambda: send_messages(channel, messages, 1),
            "messages to 8 members": lambda: send_messages(channel, messages, 8),
        }
        for _ in range(max(1, options.rounds)):
            for name, work in contestants.items():
                found[name].append(work())
    medians = {name: statistics.median(samples) for name, samples in found.items()}
    if options.json:
        print(json.dumps({"per_second": medians}))
        return 0
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} CPUs; medians of {options.rounds} rounds in turn\n")
    for name, value in medians.items():
        print(f"  {name + ' a second':<42}{value:>10,.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
