"""rdmacm.getaddrinfo: nodes and services, the arguments and answers of a resolver, and every error."""

from __future__ import annotations

import errno
import socket
from socket import AF_INET, AF_INET6, SOCK_DGRAM, SOCK_RAW, SOCK_STREAM
from typing import Any

import pytest

from rdmacm.address import AF_IB, Gid, SockAddrIB
from rdmacm.addrinfo import AddrInfo, getaddrinfo, needs_lookup
from rdmacm.constants import EAI, RaiFlag
from rdmacm.errors import GaiError, RdmaError, gai_strerror
from support.lookups import (
    ALL_ONES,
    DNS,
    FAMILY,
    IB,
    IPOIB,
    NOROUTE,
    NUMERICHOST,
    PASSIVE,
    RAW_PACKET,
    RC,
    SA,
    TCP,
    UC,
    UD,
    UDP,
    XRC_RECV,
    XRC_SEND,
    Nowhere,
    Resolver,
    datagram,
    fails,
    glibc_only,
    h,
    ib,
    lo,
    no_such_name,
    on,
    stream,
    to,
    usual_services,
)
from support.rows import for_each

# -- answers of resolvers ------------------------------------------------------------------------------


class TestAnswers:
    def test_all_answers_are_returned_in_order(self) -> None:
        resolver = Resolver(
            stream("fd00::2", 80, 0, 0, name="canonical.test"),
            stream("10.0.0.9", 80),
            stream("fe80::1", 80, 0, 3),
            stream("10.0.0.1", 80),
        )
        found = getaddrinfo("name.test", "http", port_space=TCP, provider=Nowhere(), resolver=resolver)
        assert [info.dst_addr for info in found] == [
            ("fd00::2", 80, 0, 0),
            ("10.0.0.9", 80),
            ("fe80::1", 80, 0, 3),
            ("10.0.0.1", 80),
        ]
        assert {(info.qp_type, info.port_space, info.flags) for info in found} == {(RC, TCP, 0)}
        assert [info.family for info in found] == [AF_INET6, AF_INET, AF_INET6, AF_INET]

    def test_every_answer_has_the_canonical_name(self) -> None:
        resolver = Resolver(stream("10.0.0.9", 80, name="canonical.test"), stream("10.0.0.1", 80))
        for flags, names in ((0, (None, "canonical.test")), (PASSIVE, ("canonical.test", None))):
            found = getaddrinfo("alias.test", 80, flags=flags, provider=Nowhere(), resolver=resolver)
            assert [(info.src_canonname, info.dst_canonname) for info in found] == [names] * 2

    def test_duplicate_addresses_are_removed(self) -> None:
        resolver = Resolver(
            stream("10.0.0.9", 80),
            datagram("10.0.0.9", 80),
            (AF_INET, SOCK_RAW, 0, "", ("10.0.0.9", 80)),
            stream("fd00::9", 80, 0, 0),
            datagram("fd00::9", 80, 0, 0),
            stream("10.0.0.9", 80),
        )
        found = getaddrinfo("name.test", 80, provider=Nowhere(), resolver=resolver)
        assert found == [to(("10.0.0.9", 80)), to(("fd00::9", 80, 0, 0))]

    def test_link_local_addresses_are_unique_per_scope(self) -> None:
        resolver = Resolver(stream("fe80::1", 80, 0, 2), stream("fe80::1", 80, 0, 3))
        found = getaddrinfo("name.test", 80, provider=Nowhere(), resolver=resolver)
        assert [info.dst_addr for info in found] == [("fe80::1", 80, 0, 2), ("fe80::1", 80, 0, 3)]

    def test_stream_answers_are_preferred(self) -> None:
        resolver = Resolver(
            datagram("10.0.0.9", 80), stream("10.0.0.9", 80), datagram("10.0.0.1", 80), stream("10.0.0.1", 80)
        )
        found = getaddrinfo("name.test", 80, provider=Nowhere(), resolver=resolver)
        assert found == [to(("10.0.0.9", 80)), to(("10.0.0.1", 80))]

    def test_datagram_answers_give_ud_and_udp(self) -> None:
        resolver = Resolver(datagram("10.0.0.9", 69))
        assert getaddrinfo("name.test", "tftp", provider=Nowhere(), resolver=resolver) == [
            to(("10.0.0.9", 69), UD, UDP)
        ]

    @for_each(
        ("hints", "qp", "ps"),
        [
            (h(qp=RAW_PACKET, ps=IB), RAW_PACKET, IB),
            (h(qp=UC), UC, TCP),
            (h(qp=RC), RC, TCP),
            (h(ps=TCP), RC, TCP),
            (h(qp=UD), UD, UDP),
            (h(ps=UDP), UD, UDP),
            (h(ps=IPOIB), UD, IPOIB),
        ],
    )
    def test_hints_override_the_socket_type(self, hints: AddrInfo, qp: int, ps: int) -> None:
        """A resolver of the caller, for example a cache, may return other socket types than requested."""
        for answers in (
            [stream("10.0.0.9", 80)],
            [datagram("10.0.0.9", 80)],
            [stream("10.0.0.9", 80), datagram("10.0.0.9", 80)],
        ):
            found = getaddrinfo("name.test", 80, hints, provider=Nowhere(), resolver=Resolver(*answers))
            assert found == [to(("10.0.0.9", 80), qp, ps)]

    def test_unsupported_families_are_skipped(self) -> None:
        strange = (int(socket.AF_UNIX), int(SOCK_STREAM), 0, "", ("/run/name",))
        resolver = Resolver(strange, stream("10.0.0.9", 80))
        found = getaddrinfo("name.test", 80, provider=Nowhere(), resolver=resolver)
        assert found == [to(("10.0.0.9", 80))]
        assert fails("name.test", 80, resolver=Resolver(strange)).errno == EAI.NODATA

    def test_ipv6_answer_becomes_a_gid_with_rai_family(self) -> None:
        resolver = Resolver(stream("fe80::2:c903:1:2", 7471, 0, 0))
        found = getaddrinfo("name.test", 7471, h(FAMILY, AF_IB, ps=IB), provider=Nowhere(), resolver=resolver)
        assert found == [to(ib(0x13F1D2F), RC, IB)]

    def test_numeric_hosts_skip_the_resolver(self) -> None:
        resolver = no_such_name()
        for node in ("10.0.0.1", "fd00::1", "::ffff:10.0.0.1"):
            getaddrinfo(node, 7471, provider=Nowhere(), resolver=resolver)
        assert resolver.asked == []


_STREAM, _DGRAM = int(SOCK_STREAM), int(SOCK_DGRAM)
_NAME, _NUMBER, _ANY = int(socket.AI_CANONNAME), int(socket.AI_NUMERICHOST), int(socket.AI_PASSIVE)


class TestResolverArguments:
    """Family, type, protocol and flags of getaddrinfo(3)."""

    @for_each(
        ("hints", "question"),
        [
            (h(), (0, 0, 0, _NAME)),
            (h(PASSIVE), (0, 0, 0, _NAME | _ANY)),
            (h(NUMERICHOST), (0, 0, 0, _NUMBER)),
            (h(PASSIVE | NUMERICHOST | NOROUTE | DNS), (0, 0, 0, _NUMBER | _ANY)),
            (h(family=AF_INET), (AF_INET, 0, 0, _NAME)),
            (h(FAMILY, AF_INET6), (AF_INET6, 0, 0, _NAME)),
            (h(family=AF_IB), (0, 0, 0, _NAME)),
            (h(FAMILY, AF_IB), (AF_INET6, 0, 0, _NAME)),
            (h(qp=RC), (0, _STREAM, 0, _NAME)),
            (h(qp=UC), (0, _STREAM, 0, _NAME)),
            (h(qp=XRC_SEND), (0, _STREAM, 0, _NAME)),
            (h(qp=XRC_RECV), (0, _STREAM, 0, _NAME)),
            (h(qp=UD), (0, _DGRAM, 0, _NAME)),
            (h(qp=RAW_PACKET), (0, 0, 0, _NAME)),
            (h(ps=TCP), (0, 0, socket.IPPROTO_TCP, _NAME)),
            (h(ps=UDP), (0, 0, socket.IPPROTO_UDP, _NAME)),
            (h(ps=IPOIB), (0, 0, socket.IPPROTO_UDP, _NAME)),
            (h(ps=IB), (0, 0, 0, _NAME)),
            (h(qp=RC, ps=IB), (0, _STREAM, socket.IPPROTO_TCP, _NAME)),
            (h(qp=UD, ps=IB), (0, _DGRAM, socket.IPPROTO_UDP, _NAME)),
            (h(qp=UD, ps=IPOIB), (0, _DGRAM, socket.IPPROTO_UDP, _NAME)),
        ],
    )
    def test_resolver_arguments_follow_the_hints(self, hints: AddrInfo, question: tuple[int, int, int, int]) -> None:
        resolver = no_such_name()
        assert fails("name.test", "service", hints, resolver=resolver).errno == EAI.NONAME
        # An unknown name of one family may have an address of another.
        again = [("name.test", None, 0, 0, 0, question[3] & socket.AI_NUMERICHOST)] if question[0] else []
        assert resolver.asked == [("name.test", "service", *question), *again]

    def test_lookup_without_hints_uses_addrconfig(self) -> None:
        resolver = no_such_name()
        fails("name.test", 80, resolver=resolver)
        assert resolver.asked == [
            ("name.test", "80", 0, 0, 0, _NAME | int(socket.AI_ADDRCONFIG) | int(socket.AI_V4MAPPED))
        ]

    def test_lookup_without_a_node_asks_for_no_canonical_name(self) -> None:
        resolver = Resolver(stream("0.0.0.0", 80))
        found = getaddrinfo(None, "service", flags=PASSIVE, provider=Nowhere(), resolver=resolver)
        assert found == [on(("0.0.0.0", 80))]
        assert resolver.asked == [(None, "service", 0, 0, 0, _ANY)]


class TestServices:
    @for_each(("service", "port"), [(0, 0), (7471, 7471), (65535, 65535), ("00080", 80), ("0" * 30 + "80", 80)])
    def test_numeric_services_become_ports(self, service: str | int, port: int) -> None:
        (info,) = getaddrinfo("10.0.0.1", service, provider=Nowhere())
        assert info.dst_addr == ("10.0.0.1", port)

    @glibc_only
    @pytest.mark.parametrize("service", [" 7471", "\t7471", "+7471"])
    def test_services_in_strtoul_syntax_become_ports(self, service: str) -> None:
        (info,) = getaddrinfo("10.0.0.1", service, provider=Nowhere())
        assert info.dst_addr == ("10.0.0.1", 7471)

    @glibc_only
    @for_each(
        "service",
        [
            -1,
            -80,
            65536,
            1 << 64,
            (1 << 64) + 80,
            "+65536",
            " 70000",
            "-80",
            "-4294967216",  # 80 modulo 2**32
            "0" * 30 + "70000",
            "9" * 100,
        ],
    )
    def test_services_beyond_the_port_range_raise(self, service: str | int) -> None:
        for node in ("10.0.0.1", None):
            error = fails(node, service)
            assert EAI(error.errno or 0) is EAI.SERVICE
            assert str(service) in str(error)

    def test_very_long_numbers_are_parsed(self) -> None:
        assert fails("10.0.0.1", "1" * 10_000).errno == EAI.SERVICE
        (info,) = getaddrinfo("10.0.0.1", "0" * 10_000 + "80", provider=Nowhere())
        assert info.dst_addr == ("10.0.0.1", 80)

    def test_invalid_port_skips_the_resolver(self) -> None:
        resolver = Resolver(stream("10.0.0.1", 4464))
        assert fails("name.test", 70000, resolver=resolver).errno == EAI.SERVICE
        assert resolver.asked == []

    @glibc_only
    def test_service_names_depend_on_the_protocol(self) -> None:
        if (reason := usual_services()) is not None:
            pytest.skip(reason)
        assert getaddrinfo("10.0.0.1", "tftp", provider=Nowhere()) == [to(("10.0.0.1", 69), UD, UDP)]
        assert getaddrinfo("10.0.0.1", "http", provider=Nowhere()) == [to(("10.0.0.1", 80))]


@glibc_only
class TestNodes:
    """Nodes and services that are not in the table of cases."""

    def test_gid_keeps_its_scope(self) -> None:
        if (reason := lo()) is not None:
            pytest.skip(reason)
        hints = h(FAMILY | NUMERICHOST, AF_IB, ps=IB)
        (info,) = getaddrinfo("fe80::1%lo", 1, hints, provider=Nowhere())
        assert info.dst_addr == SockAddrIB(Gid("fe80::1"), 0x13F0001, ALL_ONES, scope_id=1)

    def test_scope_may_be_numeric(self) -> None:
        (info,) = getaddrinfo("fe80::1%7", 1, flags=NUMERICHOST, provider=Nowhere())
        assert info.dst_addr == ("fe80::1", 1, 0, 7)

    @for_each("node", ["127.1", "0x7f000001", "017700000001", "2130706433", "fe80::1%7", "::1%1"])
    def test_numeric_hosts_have_no_canonical_name(self, node: str) -> None:
        (info,) = getaddrinfo(node, 1, provider=Nowhere())
        assert info.dst_canonname is None

    @pytest.mark.parametrize("flags", [0, PASSIVE, NUMERICHOST])
    def test_asterisk_is_unknown(self, flags: int) -> None:
        """getaddrinfo(3) takes ``*`` for NULL, that is the loopback address or a wildcard."""
        assert EAI(fails("*", 7471, flags=flags).errno or 0) is EAI.NONAME
        assert EAI(fails("127.0.0.1", "*", flags=flags).errno or 0) is EAI.NONAME

    @pytest.mark.parametrize("node", ["127.0.0.1\0.name.test", "localhost\0", "\0", "fe80::1\0%lo"])
    def test_node_with_a_nul_is_unknown(self, node: str) -> None:
        for flags in (0, NUMERICHOST):
            assert EAI(fails(node, 80, flags=flags).errno or 0) is EAI.NONAME

    @pytest.mark.parametrize("service", ["80\0", "80\0abc", "http\0", "\0"])
    def test_service_with_a_nul_is_unknown(self, service: str) -> None:
        assert EAI(fails("127.0.0.1", service).errno or 0) is EAI.NONAME

    def test_unencodable_service_is_unknown(self) -> None:
        assert EAI(fails("127.0.0.1", "\udc80").errno or 0) is EAI.NONAME

    @for_each("node", ["a" * 64, f"{'a' * 64}.test", "a..test", ".", "é" * 64, "\ud800"])
    def test_invalid_names_are_unknown(self, node: str) -> None:
        error = fails(node, 80, flags=NUMERICHOST)
        assert EAI(error.errno or 0) is EAI.NONAME
        assert error.errno == socket.EAI_NONAME

    def test_too_long_label_is_named_in_the_error(self) -> None:
        assert "too long" in str(fails("a" * 64, 80))


class TestNeedsLookup:
    @for_each(
        ("node", "hints", "needed"),
        [
            ("name.test", None, True),
            ("name.test", h(), True),
            ("name.test", h(PASSIVE), True),
            ("name.test", h(NUMERICHOST), False),
            (None, None, False),
            (None, h(PASSIVE), False),
            ("10.0.0.1", None, False),
            ("fd00::1", h(), False),
            ("127.1", None, False),
            ("0x7f000001", None, False),
            ("fe80::1%nosuch", None, False),
            ("127.1 x", None, True),
            ("1.2.3.4.5", None, True),
            ("g::1", None, True),
            (None, h(SA), False),
        ],
    )
    def test_only_names_need_a_lookup(self, node: str | None, hints: AddrInfo | None, needed: bool) -> None:
        assert needs_lookup(node, hints, Nowhere()) is needed


# -- errors ---------------------------------------------------------------------------------------------


class TestErrors:
    @for_each("code", EAI)
    def test_resolver_error_codes_are_kept(self, code: EAI) -> None:
        cause = socket.gaierror(int(code), "whatever")
        error = fails("name.test", "65535", resolver=Resolver(error=cause))
        assert EAI(error.errno or 0) is code
        assert error.code_name == f"EAI_{code.name}"
        assert error.__cause__ is cause
        assert error.step == "getaddrinfo"
        text = str(error)
        for part in (gai_strerror(code), "name.test", "65535", f"[EAI_{code.name}]"):
            assert part in text

    @for_each("code", EAI)
    def test_resolver_errors_are_gai_errors(self, code: EAI) -> None:
        resolver = Resolver(error=socket.gaierror(int(code), ""))
        for kind in (GaiError, RdmaError, socket.gaierror, OSError):
            with pytest.raises(kind) as caught:
                getaddrinfo("name.test", 80, provider=Nowhere(), resolver=resolver)
            assert caught.value.errno == code

    @for_each(
        ("code", "part"),
        [
            (EAI.NONAME, "no such host or service"),
            (EAI.AGAIN, "no name server answered"),
            (EAI.FAIL, "refused"),
            (EAI.NODATA, "has no IPv6 address"),
            (EAI.ADDRFAMILY, "has no IPv6 address"),
            (EAI.SERVICE, "there is no service 'some-service'"),
            (EAI.QPTYPE, "do not go together"),
        ],
    )
    def test_resolver_error_messages_have_a_hint(self, code: EAI, part: str) -> None:
        resolver = Resolver(error=socket.gaierror(int(code), ""))
        error = fails("name.test", "some-service", family=AF_INET6, resolver=resolver)
        assert part in (error.strerror or "")
        assert error.hint
        assert str(error).endswith(f"; try: {error.hint}")

    def test_service_of_another_protocol(self) -> None:
        if (reason := usual_services()) is not None:
            pytest.skip(reason)
        resolver = Resolver(error=socket.gaierror(int(EAI.SERVICE), ""))
        error = fails("name.test", "tftp", port_space=TCP, resolver=resolver)
        assert error.errno == EAI.SERVICE
        assert "no service 'tftp' for this QP type and port space" in str(error)

    @for_each("code", [EAI.NONAME, EAI.NODATA])
    @for_each("hints", [h(family=AF_INET6), h(src=("fd00::1", 0)), h(FAMILY, AF_IB)])
    def test_name_of_another_family(self, hints: AddrInfo, code: EAI) -> None:
        def resolver(node: Any, service: Any, family: int, *rest: Any) -> Any:
            if family:
                raise socket.gaierror(int(code), "")
            return [stream("10.0.0.1", 0)]

        error = fails("name.test", 80, hints, resolver=resolver)
        assert error.errno == EAI.ADDRFAMILY
        assert "name.test has no IPv6 address" in str(error)
        assert error.hint

    def test_resolver_that_ignores_the_family(self) -> None:
        resolver = Resolver(stream("10.0.0.1", 80))
        assert fails("name.test", 80, family=AF_INET6, resolver=resolver).errno == EAI.ADDRFAMILY
        assert fails("name.test", 80, src_addr=("fd00::1", 0), resolver=resolver).errno == EAI.ADDRFAMILY

    @for_each(
        ("code", "node", "service", "hints", "part"),
        [
            (EAI.BADFLAGS, "10.0.0.1", "7471", h(0x40), "0x40"),
            (EAI.BADFLAGS, "10.0.0.1", "7471", h(-1), "flags"),
            (EAI.FAMILY, "10.0.0.1", "7471", h(family=99), "99"),
            (EAI.QPTYPE, "10.0.0.1", "7471", h(qp=77), "77"),
            (EAI.QPTYPE, "10.0.0.1", "7471", h(ps=0x1234), "0x1234"),
            (EAI.QPTYPE, "10.0.0.1", "7471", h(qp=UD, ps=TCP), "UD does not go with port space TCP"),
            (EAI.SERVICE, "10.0.0.1", "70000", h(), "65535"),
            (EAI.NONAME, None, None, None, "nothing to resolve"),
        ],
    )
    def test_own_errors_name_the_cause_and_have_a_hint(
        self, code: EAI, node: str | None, service: str | None, hints: AddrInfo | None, part: str
    ) -> None:
        error = fails(node, service, hints)
        assert EAI(error.errno or 0) is code
        assert error.hint
        for each in (gai_strerror(code), part, f"[EAI_{code.name}]", node or "", service or ""):
            assert each in str(error)

    def test_resolver_without_answers_is_eai_nodata(self) -> None:
        error = fails("name.test", 80, resolver=Resolver())
        assert EAI(error.errno or 0) is EAI.NODATA
        assert gai_strerror(EAI.NODATA) in str(error)

    def test_system_error_of_the_resolver_is_eai_system(self) -> None:
        cause = OSError(errno.EMFILE, "Too many open files")
        error = fails("name.test", 80, resolver=Resolver(error=cause))
        assert (error.errno, error.system_errno) == (EAI.SYSTEM, errno.EMFILE)
        assert error.__cause__ is cause
        for part in (gai_strerror(EAI.SYSTEM), "Too many open files", "EMFILE", "[EAI_SYSTEM]"):
            assert part in str(error)

    def test_system_error_without_errno_is_eio(self) -> None:
        error = fails("name.test", 80, resolver=Resolver(error=OSError("broken")))
        assert (error.errno, error.system_errno) == (EAI.SYSTEM, errno.EIO)
        assert "broken" in str(error)

    def test_other_codes_have_no_system_errno(self) -> None:
        assert fails("name.test", 80, resolver=no_such_name()).system_errno == 0

    def test_memory_error_of_the_resolver_is_eai_memory(self) -> None:
        cause = MemoryError()
        error = fails("name.test", 80, resolver=Resolver(error=cause))
        assert EAI(error.errno or 0) is EAI.MEMORY
        assert error.__cause__ is cause
        assert gai_strerror(EAI.MEMORY) in str(error)

    @pytest.mark.parametrize(
        "cause", [UnicodeError("label too long"), ValueError("embedded null character")], ids=["label", "nul"]
    )
    def test_encoding_error_of_the_resolver_is_eai_noname(self, cause: ValueError) -> None:
        error = fails("name.test", 80, resolver=Resolver(error=cause))
        assert EAI(error.errno or 0) is EAI.NONAME
        assert error.__cause__ is cause
        assert str(cause) in str(error)

    @pytest.mark.parametrize(
        "cause", [socket.gaierror(-99, "strange"), socket.gaierror(12345, ""), socket.gaierror("strange")]
    )
    def test_unknown_code_becomes_eai_fail(self, cause: socket.gaierror) -> None:
        error = fails("name.test", 80, resolver=Resolver(error=cause))
        assert EAI(error.errno or 0) is EAI.FAIL
        assert error.__cause__ is cause

    def test_message_shows_the_address_as_given(self) -> None:
        assert fails("fd00::1", "x", resolver=no_such_name()).address == "[fd00::1]:x"
        assert fails("name.test", None, resolver=no_such_name()).address == "name.test"
        assert fails(None, "x", resolver=no_such_name()).address == ":x"

    @pytest.mark.parametrize(
        ("node", "service", "flags", "part"),
        [
            ("10.0.0.1", "svc", SA, "a node"),
            (None, "svc", SA | DNS, "RAI_DNS"),
            (None, None, SA, "service"),
            (None, "svc", SA, "InfiniBand"),
        ],
    )
    def test_invalid_sa_lookups_raise(self, node: str | None, service: str | None, flags: RaiFlag, part: str) -> None:
        with pytest.raises(RdmaError, match=part) as caught:
            getaddrinfo(node, service, flags=flags, provider=Nowhere())
        assert caught.value.step == "getaddrinfo"
        assert not isinstance(caught.value, socket.gaierror)

    def test_arguments_of_a_wrong_type_raise(self) -> None:
        wrong: Any = 7
        with pytest.raises(TypeError):
            getaddrinfo(wrong, 80, provider=Nowhere())
        with pytest.raises(TypeError):
            getaddrinfo(dst_addr=wrong, provider=Nowhere())
