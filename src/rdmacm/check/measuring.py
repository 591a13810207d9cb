"""Measurements from this side alone. The peer may be any RoCEv2 host: it runs nothing for this."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from rdmacm.address import interface_text
from rdmacm.addrinfo import AddrInfo
from rdmacm.check.icmp import PortProbe, answers_echo, measure_sizes
from rdmacm.check.judging import length_of
from rdmacm.check.measured import Answer, Listener, Requests, Resolution, Sizes, Target
from rdmacm.cmid import CmId, EventChannel
from rdmacm.constants import CmEventType, IdOption, OptionLevel, PortSpace, RaiFlag
from rdmacm.diagnosis.explain import resolve
from rdmacm.errors import CmTimeoutError, RdmaError
from rdmacm.net import open_network
from rdmacm.provider.connparam import ConnParam
from rdmacm.verbs.attr import QPCap
from rdmacm.verbs.enums import Mtu, QPType, WCStatus
from rdmacm.verbs.qp import QPInitAttr

SPACES = {"tcp": (PortSpace.TCP, QPType.RC), "udp": (PortSpace.UDP, QPType.UD), "ib": (PortSpace.IB, QPType.RC)}
#: A port of datagram services that nobody has: it is privileged, and TCP's multiplexer has it elsewhere.
_NOBODY = 1
#: Requests to find out whether anybody answers, and from one to the next, in seconds.
_FIRST_REQUESTS, _REQUEST_SECONDS = 3, 0.3
#: How many are under way at a time afterwards on a path with a round trip above so many microseconds, and how many
#: have an id.
_WINDOW, _SLOW, _BATCH = 16, 5000.0, 64
#: How many there are if they measure the round trip alone.
_FEW = 20
#: The code of the acknowledgement timeout of a connection that measures, 134 ms, and how often its packet is sent
#: again: 0.8 s together, longer than a round trip, and much shorter than a program waits.
_ACK_TIMEOUT, _RETRIES = 15, 5
#: The number of a queue pair in requests that are not to be answered positively.
_NO_QPN = 0xFFFFFE


class Measurer:
    """Measures the way to one peer. ``timeout`` is in seconds, of each question."""

    def __init__(self, target: Target, provider: str | None, source: str | None, timeout: float, count: int) -> None:
        self._target = target
        self._provider = provider
        self._source = source
        self._timeout = timeout
        self._count = count
        self._hardware_address = ""

    # -- resolution -------------------------------------------------------------------------------------------

    def resolved(self, space: str, port: int, host: str | None = None) -> tuple[CmId | None, Resolution]:
        """An id with its route resolved, which the caller destroys; None if that fails."""
        port_space, qp_type = SPACES[space]
        source = None if self._source is None else (self._source, 0)
        hints = AddrInfo(flags=RaiFlag(0), qp_type=qp_type, port_space=port_space, src_addr=source)
        cmid, explanation = resolve(
            host or self._target.host,
            port or _NOBODY,
            hints,
            timeout_ms=max(1, int(self._timeout * 1000)),
            provider=self._provider,
        )
        if cmid is None:
            return None, Resolution(explanation)
        route = cmid.route
        near = explanation.neighbour
        return cmid, Resolution(
            explanation,
            source=_host(route.src_addr),
            destination=_host(route.dst_addr),
            path_mtu=next((path.mtu_bytes for path in route.path_rec), 0),
            interface_mtu=_mtu_of(explanation.route.interface) if explanation.route else 0,
            hardware_address=(near.link_layer_address or "") if near else "",
        )

    def measure_resolution(self) -> Resolution:
        """The resolution of the target."""
        cmid, found = self.resolved(self._target.space, self._target.port)
        if cmid is not None:
            cmid.destroy()
        before, known = self._hardware_address, found.hardware_address
        self._hardware_address = known or before
        return replace(found, hardware_address_before=before) if before and known and before != known else found

    # -- connection manager -----------------------------------------------------------------------------------

    def measure_requests(self, found: Resolution, *, is_helped: bool) -> Requests:
        """Ask the peer's connection manager for a service that nobody has, by datagrams to its queue pair 1.

        ``is_helped``: loss is measured in another way, so that few of them are enough.
        """
        count = min(self._count, _FEW) if is_helped else self._count
        try:
            probe = PortProbe(found.destination, found.source)
        except OSError as error:
            return Requests(0, error=error.strerror or str(error))
        trips: list[float] = []
        sent = 0
        try:
            with EventChannel(self._provider) as channel:
                for _ in range(_FIRST_REQUESTS):
                    # An adapter takes what is for it before IP sees it: what ICMP says counts without an answer only.
                    refused = probe.send()
                    sent += 1
                    is_last = sent == _FIRST_REQUESTS
                    trips += self._ask(channel, found, 1, self._timeout if is_last else _REQUEST_SECONDS)
                    if trips:
                        break
                    refused = refused or probe.report()
                    if refused is not None:
                        return Requests(sent, (), refused.refusal, refused.reporter)
                if not trips:
                    echo = answers_echo(found.destination, found.source, self._timeout)
                    return Requests(sent, echo=echo)
                before = len(trips)
                trips += self._ask(channel, found, count, self._timeout, _WINDOW if trips[0] > _SLOW else 1)
                # Requests before the first answer are not counted: the neighbour may have been asked for meanwhile.
                return Requests(count + before, tuple(trips))
        except RdmaError as error:
            return Requests(sent, tuple(trips), error=str(error.strerror), hint=error.hint or "")
        finally:
            probe.close()

    def _ask(
        self, channel: EventChannel, found: Resolution, count: int, seconds: float, window: int = 1
    ) -> list[float]:
        """Send requests; return the round trip times of those that are answered, in microseconds."""
        trips: list[float] = []
        for start in range(0, count, _BATCH):
            # All are resolved before the first is sent: the channel then has answers only.
            ids = [self._id(channel, found, "udp", _NOBODY) for _ in range(min(_BATCH, count - start))]
            try:
                trips += _answers(channel, ids, seconds, window)
            finally:
                for cmid in ids:
                    cmid.destroy()
        return trips

    def _id(self, channel: EventChannel, found: Resolution, space: str, port: int) -> CmId:
        """An id of the channel with its route resolved."""
        port_space, qp_type = SPACES[space]
        cmid = CmId(channel, port_space, qp_type=qp_type)
        try:
            cmid.resolve_addr((found.destination, port), (found.source, 0), max(1, int(self._timeout * 1000)))
            with channel.get_event(self._timeout + 1) as event:
                if event.error is not None:
                    raise event.error
            cmid.resolve_route(max(1, int(self._timeout * 1000)))
            with channel.get_event(self._timeout + 1) as event:
                if event.error is not None:
                    raise event.error
        except BaseException:
            cmid.destroy()
            raise
        return cmid

    # -- a listener -----------------------------------------------------------------------------------------------

    def measure_listener(self, found: Resolution) -> Listener:
        """Ask for a connection to the port, and end it. Of a connection, send the longest packet there is."""
        target = self._target
        try:
            listener = self._try_twice(found, target.space, True)
            if listener.answer is Answer.REJECTED and _is_nobody(target.space, listener.reason):
                others = [space for space in SPACES if space != target.space]
                with suppress(RdmaError):
                    there = tuple(space for space in others if _exists(space, self._try_twice(found, space, False)))
                    listener = Listener(
                        listener.answer, listener.microseconds, listener.reason, listener.text, elsewhere=there
                    )
        except RdmaError as error:
            return Listener(Answer.FAILED, text=str(error.strerror), hint=error.hint or "")
        return listener

    def _try_twice(self, found: Resolution, space: str, measures: bool) -> Listener:
        first = self._request(found, space, measures)
        return self._request(found, space, measures) if first.answer is Answer.SILENT else first

    def _request(self, found: Resolution, space: str, measures: bool) -> Listener:
        with EventChannel(self._provider) as channel:
            cmid = self._id(channel, found, space, self._target.port)
            with destroying(cmid):
                is_connected = SPACES[space][1] is QPType.RC
                if is_connected:
                    cap = QPCap(max_send_wr=2, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
                    cmid.create_qp(QPInitAttr(QPType.RC, cap=cap, sq_sig_all=True))
                    with suppress(RdmaError):  # an old kernel: it takes longer
                        cmid.set_option(OptionLevel.ID, IdOption.ACK_TIMEOUT, _ACK_TIMEOUT)
                begun = time.perf_counter()
                cmid.connect(ConnParam(retry_count=_RETRIES) if is_connected else ConnParam(qp_num=_NO_QPN))
                try:
                    event = channel.get_event(self._timeout)
                except CmTimeoutError:
                    return Listener(Answer.SILENT)
                took = (time.perf_counter() - begun) * 1e6
                with event:
                    error = event.error
                    if event.type is CmEventType.REJECTED or event.status > 0:
                        hint = (error.hint or "") if error is not None else ""
                        return Listener(Answer.REJECTED, took, event.status, event.message, hint)
                    if error is not None:
                        return Listener(Answer.FAILED, took, text=str(error.strerror), hint=error.hint or "")
                if not (is_connected and measures):
                    return Listener(Answer.ACCEPTED, took)
                arrived = _long_arrives(cmid, found.path_mtu)
                return Listener(
                    Answer.ACCEPTED, took, long_arrived=arrived, longest=length_of(found.path_mtu, found.source) + 8
                )

    # -- sizes ----------------------------------------------------------------------------------------------------

    def measure_sizes(self, found: Resolution) -> Sizes:
        """Packets of each path MTU up to that of the path, which the host's IP layer answers."""
        payloads = [mtu.bytes for mtu in Mtu if mtu.bytes <= found.path_mtu]
        lengths = [length_of(payload, found.source) for payload in payloads]
        return measure_sizes(found.destination, found.source, lengths, min(self._timeout, 0.5))


def _answers(channel: EventChannel, ids: list[CmId], seconds: float, window: int) -> list[float]:
    """Send the request of each id, a few at a time; return the round trip times of those that are answered."""
    trips: list[float] = []
    sent: dict[CmId, float] = {}
    waiting: dict[CmId, float] = {}
    to_send = list(reversed(ids))
    while to_send or waiting:
        while to_send and len(waiting) < window:
            cmid = to_send.pop()
            waiting[cmid] = sent[cmid] = time.perf_counter()
            cmid.connect(ConnParam(qp_num=_NO_QPN))
        first, since = next(iter(waiting.items()))
        try:
            event = channel.get_event(max(0.001, since + seconds - time.perf_counter()))
        except CmTimeoutError:
            del waiting[first]
            continue
        now = time.perf_counter()
        with event:
            waiting.pop(event.id, None)
            begun = sent.pop(event.id, None)  # also of one that is late
            if begun is not None and (event.type is CmEventType.ESTABLISHED or event.status > 0):
                trips.append((now - begun) * 1e6)
    return trips


def _is_nobody(space: str, reason: int) -> bool:
    return reason == (1 if space == "udp" else 8)


def _exists(space: str, listener: Listener) -> bool:
    """Whether there is a listener: without one, the connection manager would say so."""
    if listener.answer is Answer.REJECTED:
        return not _is_nobody(space, listener.reason)
    return listener.answer in (Answer.ACCEPTED, Answer.SILENT)


def _long_arrives(cmid: CmId, path_mtu: int) -> bool | None:
    """Whether a WRITE of one whole packet arrives. Its R_Key is wrong, so that it changes nothing: the peer says so."""
    cq = cmid.send_cq
    if cq is None or not path_mtu:
        return None
    with cmid.reg_msgs(bytearray(path_mtu)) as region:
        cmid.post_write(1, region, 0, 0)
        until = time.monotonic() + 10
        while time.monotonic() < until:
            for wc in cq.poll(1):
                if wc.status is WCStatus.RETRY_EXC_ERR:
                    return False
                return None if wc.status is WCStatus.WR_FLUSH_ERR else True
            cq.wait(1.0)
    return None


@contextmanager
def destroying(cmid: CmId) -> Iterator[None]:
    """End the connection of an id and destroy it at the end of the block."""
    try:
        yield
    finally:
        with suppress(RdmaError):
            cmid.disconnect()
        cmid.destroy()


def _host(address: object) -> str:
    if not isinstance(address, tuple):
        return ""
    host, scope = str(address[0]), address[3] if len(address) > 3 else 0
    return f"{host}%{interface_text(scope)}" if scope and "%" not in host else host


def _mtu_of(name: str) -> int:
    network = open_network()
    try:
        return next((each.mtu for each in network.interfaces() if each.name == name), 0)
    finally:
        network.close()
