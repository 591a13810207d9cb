"""Binding, resolving, options: rdma_bind_addr(3), rdma_resolve_addr(3), rdma_resolve_route(3), rdma_set_option(3)."""

from __future__ import annotations

import contextlib
import errno
from dataclasses import dataclass
from typing import Self, Unpack

from rdmacm.address import Address, Gid, InetAddr, SockAddr, lookup_address
from rdmacm.addrinfo import AddrInfo, HintFields, Resolver, from_services, getaddrinfo, make_hints, needs_lookup
from rdmacm.cmid.lookups import AddrinfoOutcome, NameLookup
from rdmacm.cmid.state import BIND_HINT, IdState
from rdmacm.constants import CmEventType, IdOption, OptionLevel, RaiFlag
from rdmacm.errors import GaiError, RdmaError, cm_error
from rdmacm.explanation import Explanation, Step
from rdmacm.proto.sa import PathRecord
from rdmacm.provider.choice import note_choice
from rdmacm.provider.cmstate import State
from rdmacm.verbs.device import Context


@dataclass(frozen=True, slots=True)
class Route:
    """``struct rdma_route``, as far as it is resolved.

    - ``src_addr``, ``dst_addr``: the addresses of both ends; None until known.
    - ``sgid``, ``dgid``: the GIDs of both ends; the zero GID until known.
    - ``pkey``: the P_Key, 16 bits.
    - ``path_rec``: the path records: the primary, then the alternate where there is one.
    """

    src_addr: SockAddr | None
    dst_addr: SockAddr | None
    sgid: Gid
    dgid: Gid
    pkey: int
    path_rec: tuple[PathRecord, ...]

    @property
    def num_paths(self) -> int:
        """How many path records there are."""
        return len(self.path_rec)

    @property
    def addr(self) -> Self:
        """This object: C has the addresses in ``route.addr``, and GIDs and P_Key in ``route.addr.addr.ibaddr``."""
        return self

    @property
    def src_sin(self) -> SockAddr | None:
        """:attr:`src_addr`, a member of C's union of addresses."""
        return self.src_addr

    @property
    def dst_sin(self) -> SockAddr | None:
        """:attr:`dst_addr`, a member of C's union of addresses."""
        return self.dst_addr

    src_sin6 = src_sin
    src_storage = src_sin
    dst_sin6 = dst_sin
    dst_storage = dst_sin

    @property
    def ibaddr(self) -> Self:
        """This object, as :attr:`addr`."""
        return self


def _user(address: Address | None) -> SockAddr | None:
    return address.sockaddr if isinstance(address, InetAddr) else address


class Resolving(IdState):
    """The part of :class:`rdmacm.CmId` that binds to addresses and resolves them."""

    __slots__ = ()

    # -- attributes -----------------------------------------------------------------------------------

    @property
    def is_synchronous(self) -> bool:
        """Whether calls wait for their outcome."""
        return self._private

    @property
    def state(self) -> State:
        """The state of the id (docs/states.md)."""
        return self._backend.state

    @property
    def is_bound(self) -> bool:
        """Whether the id is bound to a device: :attr:`verbs` is there then, and :attr:`pd`."""
        return self._backend.verbs is not None

    @property
    def verbs(self) -> Context:
        """The device that the id is bound to; CmStateError before (:attr:`is_bound`)."""
        return self._backend.verbs or self._lacks("is not bound to a device", "verbs", BIND_HINT)

    @property
    def port_num(self) -> int:
        """The port of the device, from 1; 0 before the id is bound to one."""
        return self._backend.port_num

    @property
    def gid_index(self) -> int:
        """The row of the source GID in the port's GID table."""
        return self._backend.gid_index

    @property
    def route(self) -> Route:
        """Addresses, GIDs, P_Key and path records, as far as they are known."""
        b = self._backend
        return Route(_user(b.local_addr), _user(b.peer_addr), b.sgid, b.dgid, b.pkey, b.paths)

    @property
    def local_addr(self) -> SockAddr:
        """The source address, rdma_get_local_addr(3); CmStateError before there is one.

        ``route.src_addr`` is None then, as ``route.dst_addr`` without a destination.
        """
        return _user(self._backend.local_addr) or self._lacks("has no source address", "local_addr", BIND_HINT)

    @property
    def peer_addr(self) -> SockAddr:
        """The destination address, rdma_get_peer_addr(3); CmStateError before it is resolved, and of a listener."""
        return _user(self._backend.peer_addr) or self._lacks("has no destination", "peer_addr", "resolve_addr()")

    @property
    def src_port(self) -> int:
        """The source port in host order, rdma_get_src_port(3); 0 before the id is bound."""
        return _port(self._backend.local_addr)

    @property
    def dst_port(self) -> int:
        """The destination port in host order, rdma_get_dst_port(3)."""
        return _port(self._backend.peer_addr)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of binding and resolving so far, with their durations."""
        return self._backend.steps

    def explain(self) -> Explanation:
        """The last resolution of this id: every candidate, and the rule that chose or dropped it."""
        return self._backend.explain()

    # -- binding and resolving ------------------------------------------------------------------------

    def bind_addr(self, address: SockAddr | None) -> None:
        """Bind to a source address, rdma_bind_addr(3).

        A specific address also binds the id to its device; a wildcard does not. Port 0 takes a free port
        (:attr:`src_port`). A host *name* is looked up in the calling thread. EADDRNOTAVAIL: the address is not this
        host's, the port is taken by or for a wildcard, or no port is free; EADDRINUSE: address and port are taken;
        EACCES: a privileged port; ENODEV: a GID of no InfiniBand port; EPROTONOSUPPORT: a service id of another port
        space; EINVAL: None, bound already, a link-local address without scope, a P_Key that the port lacks.
        """
        self._check_alive("bind_addr")
        if address is None:
            raise cm_error(errno.EINVAL, "there is no address", "bind_addr")
        bound = lookup_address(address)
        try:
            self._backend.bind_addr(bound)
        except RdmaError as error:
            note_choice(error, self._channel._choice_reason)
            raise

    def resolve_addr(self, dst_addr: SockAddr | None, src_addr: SockAddr | None = None, timeout_ms: int = 2000) -> None:
        """Find device, port, GIDs and next hop for a destination, rdma_resolve_addr(3).

        Ends in ADDR_RESOLVED or ADDR_ERROR: -ETIMEDOUT (no neighbour answered in ``timeout_ms`` milliseconds),
        -ENODEV or -EINVAL (no device on the way, or none that will do), -EADDRNOTAVAIL (the source went away).
        ``src_addr`` binds an unbound id; on a bound id it must be the bound address. A host *name* is looked up in the
        calling thread; :meth:`resolve_addrinfo` does that without waiting.

        Raises, and no event follows: the errors of :meth:`bind_addr`; ENETUNREACH, EHOSTUNREACH, EACCES or EINVAL of
        the routing tables; ENODEV where no InfiniBand port will do; EINVAL for a negative timeout, another address
        family, a source other than the bound one, or ``dst_addr`` None, as the entry of a passive lookup has it.
        """
        if dst_addr is None:
            raise cm_error(errno.EINVAL, "there is no destination", "resolve_addr")
        destination = lookup_address(dst_addr)
        source = None if src_addr is None else lookup_address(src_addr)
        try:
            self._backend.resolve_addr(source, destination, timeout_ms)
        except RdmaError as error:
            note_choice(error, self._channel._choice_reason)
            raise
        if self._private:
            self._await(CmEventType.ADDR_RESOLVED, CmEventType.ADDR_ERROR)

    def resolve_route(self, timeout_ms: int = 2000, *, alternate: bool = False) -> None:
        """Find the path to the resolved destination, rdma_resolve_route(3).

        Ends in ROUTE_RESOLVED, with ``route.path_rec`` set, or ROUTE_ERROR. On InfiniBand the path record comes from
        the subnet administrator; ROUTE_ERROR is then -ETIMEDOUT (no answer in ``timeout_ms`` milliseconds) or -EINVAL
        (it refused, or knows no path). ``alternate`` also asks for a second path by other LIDs, which the connection
        request will carry; it is no failure where there is none. EOPNOTSUPP: ``alternate`` on RoCE, iWARP, or through
        the kernel; ENETUNREACH: no subnet administrator is known; EINVAL: a timeout of 0 or less, or the address is not
        resolved.
        """
        self._backend.resolve_route(timeout_ms, alternate)
        if self._private:
            self._await(CmEventType.ROUTE_RESOLVED, CmEventType.ROUTE_ERROR)

    def resolve_addrinfo(
        self,
        node: str | None = None,
        service: str | int | None = None,
        hints: AddrInfo | None = None,
        *,
        resolver: Resolver | None = None,
        **fields: Unpack[HintFields],
    ) -> None:
        """Resolve a name without waiting, rdma_resolve_addrinfo(3); the arguments are :func:`rdmacm.getaddrinfo`'s.

        Ends in ADDRINFO_RESOLVED (:meth:`query_addrinfo` then returns the list) or ADDRINFO_ERROR (``event.error`` is
        the GaiError, ``event.status`` its EAI code; with ``RAI_SA`` an RdmaError and a negative errno). EBUSY: the
        outcome of another resolution of this id is not fetched; EOPNOTSUPP: ``RAI_SA`` with a node, with ``RAI_DNS``,
        or on a port that is not InfiniBand; EINVAL: ``RAI_SA`` without a service or on an unbound id.
        """
        self._check_alive("resolve_addrinfo")
        hints = make_hints(hints, **fields)
        if self._addrinfo is not None:
            raise cm_error(
                errno.EBUSY, "a resolution of this id is not over", "resolve_addrinfo", node, "query_addrinfo() first"
            )
        if hints is not None and hints.flags & RaiFlag.SA:
            self._check_sa(node, service, hints)
            self._backend.resolve_service(str(service))
            self._addrinfo = AddrinfoOutcome(None)
        else:
            provider = self._channel.provider
            lookup = NameLookup(
                lambda: getaddrinfo(node, service, hints, provider=provider, resolver=resolver), self._resolved
            )
            self._addrinfo = AddrinfoOutcome(lookup)
            if resolver is None and not needs_lookup(node, hints, provider):
                lookup.run(contextlib.nullcontext())
            else:
                self._channel._lookups.submit(lookup)
        if self._private:
            self._await(CmEventType.ADDRINFO_RESOLVED, CmEventType.ADDRINFO_ERROR)

    @staticmethod
    def _check_sa(node: str | None, service: str | int | None, hints: AddrInfo) -> None:
        if hints.flags & RaiFlag.DNS or node is not None:
            other = "RAI_DNS" if hints.flags & RaiFlag.DNS else "a node"
            raise cm_error(errno.EOPNOTSUPP, f"RAI_SA does not go with {other}", "resolve_addrinfo", node)
        if service is None:
            raise cm_error(errno.EINVAL, "RAI_SA needs a service name or id", "resolve_addrinfo")

    def _resolved(self, found: list[AddrInfo] | None, failure: RdmaError | None) -> None:
        if self._closed or self._addrinfo is None:  # another thread has destroyed the id since the lookup was submitted
            return
        self._addrinfo.found, self._addrinfo.failure = found, failure
        if failure is None:
            self._post(CmEventType.ADDRINFO_RESOLVED)
            return
        code = failure.errno or errno.EIO
        status = code if isinstance(failure, GaiError) else -code
        self._post(CmEventType.ADDRINFO_ERROR, status, message=str(failure.strerror))

    def _addrinfo_failed(self) -> RdmaError | None:
        """The error of an ADDRINFO_ERROR that is being fetched; another resolution may start from now on."""
        outcome, self._addrinfo = self._addrinfo, None
        return None if outcome is None else outcome.failure

    def query_addrinfo(self) -> list[AddrInfo]:
        """The list that :meth:`resolve_addrinfo` found, rdma_query_addrinfo(3); once. ENOENT: there is none."""
        self._check_alive("query_addrinfo")
        outcome = self._addrinfo
        found = None if outcome is None else outcome.found
        if outcome is not None and outcome.lookup is None and self._backend.services:
            found = from_services(self._backend.services, self._backend.sgid)
        if found is None:
            raise cm_error(
                errno.ENOENT, "no resolved list is waiting", "query_addrinfo", hint="resolve_addrinfo() first"
            )
        self._addrinfo = None
        return found

    # -- options --------------------------------------------------------------------------------------

    def set_option(self, level: int, optname: int, optval: int | bytes) -> None:
        """Set an option, rdma_set_option(3). ``optval`` is a number, or the bytes that C would pass.

        ``OptionLevel.ID``: ``IdOption.TOS`` (0..255), ``REUSEADDR`` and ``AFONLY`` (0 or 1), ``ACK_TIMEOUT``
        (exponent of 4.096 µs); ``OptionLevel.IB``: ``IbOption.PATH`` (an array of ``struct ibv_path_data``: the path,
        with the flags GMP, PRIMARY and BIDIRECTIONAL, and on InfiniBand perhaps an alternate path, with ALTERNATE and
        BIDIRECTIONAL). EINVAL: the size, the value, the state; EOPNOTSUPP: an alternate path where the wire has none;
        ENOSYS: an unknown option; EADDRINUSE or EADDRNOTAVAIL: REUSEADDR or
        AFONLY would take a port that another id holds.
        """
        self._check_alive("set_option")
        self._backend.set_option(level, optname, optval)

    def get_option(self, optname: int) -> int | None:
        """The value of an option at ``OptionLevel.ID``, None while its default holds; C cannot read options."""
        self._check_alive("get_option")
        options = self._backend.options
        values = {
            IdOption.TOS: options.tos,
            IdOption.REUSEADDR: options.reuseaddr,
            IdOption.AFONLY: options.afonly,
            IdOption.ACK_TIMEOUT: options.ack_timeout,
        }
        if optname not in values:
            raise cm_error(errno.ENOSYS, f"no option {optname} at level {OptionLevel.ID}", "get_option")
        value = values[IdOption(optname)]
        return None if value is None else int(value)


def _port(address: Address | None) -> int:
    return 0 if address is None else address.port
