"""explain(): resolve a name as rdma_getaddrinfo, rdma_resolve_addr and rdma_resolve_route would, and say why."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter_ns
from typing import Unpack

from rdmacm.address import InetAddr, format_address, parse_address
from rdmacm.addrinfo import AddrInfo, HintFields, Resolver, getaddrinfo, make_hints
from rdmacm.cmid import CmId
from rdmacm.constants import PortSpace, RaiFlag
from rdmacm.errors import GaiError, RdmaError
from rdmacm.explanation import Candidate, Explanation, Step
from rdmacm.provider import Provider, get_provider
from rdmacm.verbs.device import Device

__all__ = ["devices", "explain", "resolve"]


def devices(provider: str | Provider | None = None) -> list[Device]:
    """Every device of the host, as it is now; rdma_get_devices(3) without the list to free."""
    return list(get_provider(provider).devices())


def resolve(
    node: str | None,
    service: str | int | None = None,
    hints: AddrInfo | None = None,
    *,
    timeout_ms: int = 2000,
    provider: str | Provider | None = None,
    resolver: Resolver | None = None,
) -> tuple[CmId | None, Explanation]:
    """Resolve as far as a route, trying the addresses of a name in order; the id that got there, and why.

    The caller destroys the id; it is None where no address could be resolved, and the explanation then says why
    for the first. Raises nothing but TypeError and ValueError for arguments that are none.
    """
    service = None if service is None else str(service)
    backend = get_provider(provider)
    empty = Explanation(node=node, service=service, provider=backend.name)
    wanted = make_hints(hints, flags=(0 if hints is None else int(hints.flags)) | RaiFlag.NOROUTE)
    started = perf_counter_ns()
    try:
        found = getaddrinfo(node, service, wanted, provider=backend, resolver=resolver)
    except RdmaError as error:
        step = Step("name", (perf_counter_ns() - started) / 1000, str(error.strerror))
        return None, _failed(replace(empty, steps=(step,)), error)
    name_step = Step("name", (perf_counter_ns() - started) / 1000, f"{len(found)} address{'es' * (len(found) > 1)}")
    names = tuple(format_address(info.dst_addr or info.src_addr) for info in found)

    winner: CmId | None = None
    result: Explanation | None = None
    failures: list[tuple[AddrInfo, RdmaError]] = []
    candidates: list[Candidate] = []
    for info in found:
        if winner is not None:
            candidates += _not_needed(info, backend)
            continue
        cmid = CmId(port_space=info.port_space or PortSpace.TCP, qp_type=info.qp_type or None, provider=backend)
        try:
            if info.dst_addr is None:
                cmid.bind_addr(info.src_addr or ("", 0))
            else:
                cmid.resolve_addr(info.dst_addr, info.src_addr, timeout_ms)
                cmid.resolve_route(timeout_ms)
        except RdmaError as error:
            cmid.destroy()
            failures.append((info, error))
            if error.explanation is not None:
                candidates += [
                    replace(c, kept=False, rule=error.explanation.error or "", reason=error.explanation.message)
                    if c.kept
                    else c
                    for c in error.explanation.candidates
                ]
            continue
        except BaseException:
            cmid.destroy()
            raise
        winner, result = cmid, cmid.explain()
        candidates += result.candidates
    notes = [f"{format_address(info.dst_addr)}: {error.strerror} [{error.code_name}]" for info, error in failures]
    if winner is not None and result is not None:
        return winner, replace(
            result,
            node=node,
            service=service,
            names=names,
            candidates=tuple(candidates),
            steps=(name_step, *result.steps),
            notes=tuple(notes),
        )
    info, first = failures[0]
    known = first.explanation or empty
    base = replace(
        known,
        node=node,
        service=service,
        names=names,
        candidates=tuple(candidates),
        steps=(name_step, *known.steps),
        notes=tuple(notes[1:]),
    )
    return None, base if not base.ok else _failed(base, first)


def _failed(base: Explanation, error: RdmaError) -> Explanation:
    step = "name" if isinstance(error, GaiError) or error.step == "getaddrinfo" else error.step
    return replace(
        base,
        error=step,
        errno=error.errno or 0,
        errno_name=error.code_name,
        message=str(error.strerror),
        hint=error.hint,
    )


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
    """Resolve and say why it came out so: every candidate with the rule that decided, routes, neighbours, times.

    Arguments are :func:`rdmacm.getaddrinfo`'s; ``timeout_ms`` is how long a neighbour may take. A resolution that
    fails raises nothing: the explanation then names the step, the errno librdmacm would give and what to try.

    >>> explain("127.0.0.1", 7471).chosen.device
    'soft_lo'
    """
    hints = make_hints(hints, **fields)
    cmid, explanation = resolve(node, service, hints, timeout_ms=timeout_ms, provider=provider, resolver=resolver)
    if cmid is not None:
        cmid.destroy()
    return explanation
