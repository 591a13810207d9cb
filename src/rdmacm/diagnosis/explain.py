"""explain(): resolve a name as rdma_getaddrinfo, rdma_resolve_addr and rdma_resolve_route do, and give the reasons."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import perf_counter_ns
from typing import Unpack

from rdmacm.address import InetAddr, format_address, parse_address
from rdmacm.addrinfo import AddrInfo, HintFields, Resolver, getaddrinfo, make_hints
from rdmacm.cmid import CmId
from rdmacm.constants import PortSpace, RaiFlag
from rdmacm.errors import GaiError, RdmaError, check_timeout
from rdmacm.explanation import Candidate, Explanation, Step
from rdmacm.provider import Provider, get_provider
from rdmacm.provider.choice import choose
from rdmacm.provider.counters import Counters
from rdmacm.verbs.device import Device


def devices(provider: str | Provider | None = None) -> list[Device]:
    """Return all RDMA devices of the host, as rdma_get_devices(3)."""
    return list(get_provider(provider).devices())


def query_counters(provider: str | Provider | None = None) -> Counters:
    """Return what the devices, connection managers and UDP port of this process have counted so far.

    >>> from rdmacm.testing import Fabric
    >>> host = Fabric().host("a", "10.0.0.1")
    >>> query_counters(host.provider).cm["dropped_backlog"]
    0
    """
    return get_provider(provider).query_counters()


def resolve(
    node: str | None,
    service: str | int | None = None,
    hints: AddrInfo | None = None,
    *,
    timeout_ms: int = 2000,
    provider: str | Provider | None = None,
    resolver: Resolver | None = None,
) -> tuple[CmId | None, Explanation]:
    """Resolve a destination up to its route; return the id and an explanation.

    The addresses of a name are tried in order until one is resolved. The caller destroys the id. When no address could
    be resolved, the id is None and the explanation has the error of the first address. ``timeout_ms``: how long the
    next hop may take to answer, in milliseconds. Raises only TypeError and ValueError, for invalid arguments.
    """
    check_timeout(timeout_ms)
    service = None if service is None else str(service)
    hosts = () if node is None else (node,)
    backend = get_provider(provider, hosts)
    reason = choose(provider, hosts).reason if isinstance(provider, str | None) else ""
    empty = Explanation(node=node, service=service, provider=backend.name, provider_reason=reason)
    wanted = make_hints(hints, flags=(0 if hints is None else int(hints.flags)) | RaiFlag.NOROUTE)
    started = perf_counter_ns()
    try:
        found = getaddrinfo(node, service, wanted, provider=backend, resolver=resolver)
    except RdmaError as error:
        step = Step("name", (perf_counter_ns() - started) / 1000, str(error.strerror))
        return None, _failed(replace(empty, steps=(step,)), error)
    name_step = Step("name", (perf_counter_ns() - started) / 1000, f"{len(found)} address{'es' * (len(found) > 1)}")
    attempts = _try_in_order(found, timeout_ms, backend)
    base = empty if attempts.explanation is None else attempts.explanation
    explanation = replace(
        base,
        node=node,
        service=service,
        provider_reason=reason,
        names=tuple(format_address(info.dst_addr or info.src_addr) for info in found),
        candidates=tuple(attempts.candidates),
        steps=(name_step, *base.steps),
        notes=(*base.notes, *attempts.notes()),
    )
    if attempts.winner is None and explanation.ok:
        explanation = _failed(explanation, attempts.failures[0][1])
    return attempts.winner, explanation


@dataclass(slots=True)
class _Attempts:
    """The results of trying the addresses of a name, one after the other."""

    #: The id of the address that was resolved; None when none was.
    winner: CmId | None = None
    #: The explanation of ``winner``. Without a winner, that of the first failure, or None when it has none.
    explanation: Explanation | None = None
    #: The addresses that could not be resolved, in order, each with its error.
    failures: list[tuple[AddrInfo, RdmaError]] = field(default_factory=list)
    #: The candidates of all addresses, in order.
    candidates: list[Candidate] = field(default_factory=list)

    def notes(self) -> list[str]:
        """The failures that the explanation itself does not report."""
        unreported = self.failures if self.winner is not None else self.failures[1:]
        return [f"{format_address(info.dst_addr)}: {error.strerror} [{error.code_name}]" for info, error in unreported]


def _try_in_order(found: list[AddrInfo], timeout_ms: int, provider: Provider) -> _Attempts:
    """Resolve the addresses one after the other until one succeeds."""
    attempts = _Attempts()
    for info in found:
        if attempts.winner is not None:
            attempts.candidates += _not_needed(info, provider)
            continue
        try:
            attempts.winner = _resolved_id(info, timeout_ms, provider)
        except RdmaError as error:
            if not attempts.failures:
                attempts.explanation = error.explanation
            attempts.failures.append((info, error))
            if error.explanation is not None:
                attempts.candidates += _dropped(error.explanation)
        else:
            attempts.explanation = attempts.winner.explain()
            attempts.candidates += attempts.explanation.candidates
    return attempts


def _resolved_id(info: AddrInfo, timeout_ms: int, provider: Provider) -> CmId:
    """Return an id with its address and route resolved, or bound to a passive address."""
    cmid = CmId(port_space=info.port_space or PortSpace.TCP, qp_type=info.qp_type or None, provider=provider)
    try:
        if info.dst_addr is None:
            cmid.bind_addr(info.src_addr or ("", 0))
        else:
            cmid.resolve_addr(info.dst_addr, info.src_addr, timeout_ms)
            cmid.resolve_route(timeout_ms)
    except BaseException:
        cmid.destroy()
        raise
    return cmid


def _failed(base: Explanation, error: RdmaError) -> Explanation:
    """Return an explanation with the error of a failed resolution."""
    step = "name" if isinstance(error, GaiError) or error.step == "getaddrinfo" else error.step
    return replace(
        base,
        error=step,
        errno=error.errno or 0,
        errno_name=error.code_name,
        message=str(error.strerror),
        hint=error.hint,
    )


def _dropped(failure: Explanation) -> list[Candidate]:
    """The candidates of an address that could not be resolved. The failed step drops those that the rules kept."""
    return [
        replace(c, kept=False, rule=failure.error or "", reason=failure.message) if c.kept else c
        for c in failure.candidates
    ]


def _not_needed(info: AddrInfo, provider: Provider) -> list[Candidate]:
    """The candidates of an address that was not tried because an earlier one was resolved."""
    if info.dst_addr is None:
        return []
    destination = parse_address(info.dst_addr)
    source = None if info.src_addr is None else parse_address(info.src_addr)
    if not isinstance(destination, InetAddr) or not isinstance(source, InetAddr | None):
        return []
    return [
        replace(c, kept=False, chosen=False, rule="name-order", reason="an earlier address of the name was resolved")
        if c.kept
        else c
        for c in provider.explain_route(destination, source).candidates
    ]


def explain(
    node: str | None,
    service: str | int | None = None,
    hints: AddrInfo | None = None,
    *,
    timeout_ms: int = 2000,
    provider: str | Provider | None = None,
    resolver: Resolver | None = None,
    **fields: Unpack[HintFields],
) -> Explanation:
    """Resolve a destination and explain the result: candidates with the rules that decided, route, neighbour, times.

    Arguments are those of :func:`rdmacm.getaddrinfo`. ``timeout_ms``: how long the next hop may take to answer, in
    milliseconds. A failed resolution raises no error: the explanation then has the failed step, the errno that
    librdmacm would report, and a hint.

    >>> explain("127.0.0.1", 7471).chosen.device
    'soft_lo'
    """
    hints = make_hints(hints, **fields)
    cmid, explanation = resolve(node, service, hints, timeout_ms=timeout_ms, provider=provider, resolver=resolver)
    if cmid is not None:
        cmid.destroy()
    return explanation
