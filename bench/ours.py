"""rdmacm itself, as a peer of ``bench/peers.py``: a server, and a client that measures.

``serve`` prints its port and runs until it is terminated; ``measure PORT EFFORT`` prints the figures as JSON. In
addition to the figures of all peers, it measures half a round trip with both ends sleeping instead of polling, and each
step of a connection. Transfers use the code of ``rdmacm perf``.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from peers import AT_ONCE, in_turn, quantiles, run_script, times

from rdmacm import CmEventType, CmId, ConnParam, EventChannel
from rdmacm.tools.connection import find_server
from rdmacm.tools.measure import ProgressLine
from rdmacm.tools.perf import Op, Plan, Result, measure, serve_client
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.cq import CQ
from rdmacm.verbs.qp import QPInitAttr

HOST = "127.0.0.1"
#: Private data of a client that only connects.
NOTHING = b"nothing"
SMALL, ROUND_TRIPS, CONNECTIONS = 64, 10_000, 2000
#: By size in bytes: outstanding messages, number of messages for bandwidth, and for ping-pong; at full effort.
SIZES = {4096: (64, 20_000, 5000), 65536: (32, 5000, 1000), 1 << 20: (8, 400, 100)}
#: Messages of SMALL bytes: outstanding, number, and how many are posted together.
MESSAGES, RATE = 128, 100_000
LISTS = {"one by one": 1, "in lists": 16}
CAP = QPCap(max_send_wr=1, max_recv_wr=1)
#: Maximum time to wait for an event, in seconds.
PATIENCE = 20.0


def serve() -> None:
    queues: list[CQ] = []
    connected = set()
    with EventChannel() as channel, CmId(channel) as listener:
        listener.bind_addr((HOST, 0))
        listener.listen()
        print(listener.src_port, flush=True)
        for event in channel:
            cmid = event.id
            if event.type is CmEventType.CONNECT_REQUEST and event.private_data.startswith(NOTHING):
                connected.add(cmid)
                make_qp(cmid, queues)
                cmid.accept()
            elif event.type is CmEventType.CONNECT_REQUEST:
                cmid.migrate(None)
                cmid._event = event  # acknowledged together with the id's next event
                serve_client(cmid)
                continue
            event.ack()
            if event.type is CmEventType.DISCONNECTED:
                cmid.disconnect()
                cmid.destroy()
                connected.discard(cmid)


def make_qp(cmid: CmId, queues: list[CQ]) -> None:
    if not queues:
        queues.append(CQ(cmid.verbs, 16))
    cmid.create_qp(QPInitAttr(scq=queues[0], rcq=queues[0], cap=CAP))


def transfer(port: int, plan: Plan) -> Result:
    cmid, _ = find_server(HOST, port)
    return measure(cmid, plan, 30.0, ProgressLine())


def half_round_trip(port: int, size: int, count: int, blocking: bool = False) -> float:
    """Return half the round-trip time in microseconds."""
    done = transfer(port, Plan(Op.SEND, size, 1, True, blocking, 0.0, count))
    return done.seconds / done.count / 2 * 1e6


def connections(port: int, count: int) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Open and close connections one after the other; return their total times, and the times of each step."""
    steps: dict[str, list[float]] = {}
    whole: list[float] = []
    queues: list[CQ] = []
    with EventChannel() as channel:

        def step(name: str, call: Callable[[], object], outcome: CmEventType | None = None) -> None:
            started = time.perf_counter()
            call()
            if outcome is not None:
                with channel.get_event(PATIENCE) as event:
                    if event.type is not outcome:
                        raise event.error or ConnectionError(f"{event.type.name} instead of {outcome.name}")
            steps.setdefault(name, []).append(time.perf_counter() - started)

        def one() -> None:
            started = time.perf_counter()
            cmid = CmId(channel)
            steps.setdefault("create_id", []).append(time.perf_counter() - started)
            step("resolve_addr", lambda: cmid.resolve_addr((HOST, port)), CmEventType.ADDR_RESOLVED)
            step("resolve_route", cmid.resolve_route, CmEventType.ROUTE_RESOLVED)
            step("create_qp", lambda: make_qp(cmid, queues))
            step("connect", lambda: cmid.connect(ConnParam(NOTHING)), CmEventType.ESTABLISHED)
            step("disconnect", cmid.disconnect, CmEventType.DISCONNECTED)
            step("destroy", cmid.destroy)
            whole.append(time.perf_counter() - started)

        for _ in range(count):
            one()
        for queue in queues:
            queue.close()
    return in_turn(whole), {name: quantiles(seconds) for name, seconds in steps.items()}


def connections_at_once(port: int, count: int) -> float:
    """Open and close connections, with AT_ONCE under way; return how many a second."""
    queues: list[CQ] = []
    under_way: set[CmId] = set()
    left = count
    with EventChannel() as channel:

        def start() -> None:
            nonlocal left
            left -= 1
            cmid = CmId(channel)
            under_way.add(cmid)
            cmid.resolve_addr((HOST, port))

        started = time.perf_counter()
        for _ in range(min(count, AT_ONCE)):
            start()
        ended = 0
        while ended < count:
            with channel.get_event(PATIENCE) as event:
                cmid, kind = event.id, event.type
                if kind is CmEventType.ADDR_RESOLVED:
                    cmid.resolve_route()
                elif kind is CmEventType.ROUTE_RESOLVED:
                    make_qp(cmid, queues)
                    cmid.connect(ConnParam(NOTHING))
                elif kind is CmEventType.ESTABLISHED:
                    cmid.disconnect()
                elif kind is not CmEventType.DISCONNECTED:
                    raise event.error or ConnectionError(f"{kind.name} instead of a connection")
            if kind is CmEventType.DISCONNECTED:
                cmid.destroy()
                under_way.discard(cmid)
                ended += 1
                if left:
                    start()
        seconds = time.perf_counter() - started
        for queue in queues:
            queue.close()
    return count / seconds


def figures(port: int, effort: float) -> dict[str, object]:
    bandwidth = {
        op.name.lower(): {
            size: transfer(port, Plan(op, size, depth, False, False, 0.0, times(count, effort))).bytes_per_second / 1e9
            for size, (depth, count, _) in SIZES.items()
        }
        for op in (Op.SEND, Op.WRITE, Op.READ)
    }
    bandwidth["ping-pong"] = {
        size: size / half_round_trip(port, size, times(count, effort)) / 1e3 for size, (_, _, count) in SIZES.items()
    }
    messages = {}
    for name, length in LISTS.items():
        plan = Plan(Op.SEND, SMALL, MESSAGES, False, False, 0.0, times(RATE, effort), post_list=length)
        messages[name] = transfer(port, plan).bytes_per_second / SMALL
    connected, steps = connections(port, times(CONNECTIONS, effort))
    return {
        "half_round_trip_us": half_round_trip(port, SMALL, times(ROUND_TRIPS, effort)),
        "half_round_trip_asleep_us": half_round_trip(port, SMALL, times(ROUND_TRIPS, effort), blocking=True),
        "bandwidth": bandwidth,
        "messages": messages,
        "connections": connected,
        "connections_at_once": connections_at_once(port, times(CONNECTIONS, effort)),
        "steps": steps,
    }


if __name__ == "__main__":
    run_script(serve, figures)
