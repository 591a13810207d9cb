"""The exceptions: their classes, messages and codes, and copies by pickle."""

from __future__ import annotations

import copy
import ctypes
import errno
import functools
import pickle
import platform
import socket
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmacm.constants import EAI
from rdmacm.errors import (
    CmPermissionError,
    CmRefusedError,
    CmStateError,
    CmTimeoutError,
    CmWouldBlockError,
    GaiError,
    RdmaError,
    cm_error,
    errno_name,
    gai_name,
    gai_strerror,
)
from rdmacm.explanation import Explanation
from support.rows import for_each

glibc_only = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the texts are glibc's")

KINDS: list[type[RdmaError]] = [
    RdmaError,
    GaiError,
    CmStateError,
    CmTimeoutError,
    CmPermissionError,
    CmWouldBlockError,
    CmRefusedError,
]


class TestFamilies:
    @for_each(
        ("number", "kind", "builtin"),
        [
            (errno.ETIMEDOUT, CmTimeoutError, TimeoutError),
            (errno.EACCES, CmPermissionError, PermissionError),
            (errno.EPERM, CmPermissionError, PermissionError),
            (errno.EAGAIN, CmWouldBlockError, BlockingIOError),
            (errno.ECONNREFUSED, CmRefusedError, ConnectionRefusedError),
            (errno.EINVAL, RdmaError, OSError),
            (errno.ENODEV, RdmaError, OSError),
            (errno.EADDRNOTAVAIL, RdmaError, OSError),
        ],
    )
    def test_errno_selects_the_exception_class(
        self, number: int, kind: type[RdmaError], builtin: type[OSError]
    ) -> None:
        error = cm_error(number, "no", "resolve_addr", "10.0.0.1:7471", "another")
        assert type(error) is kind
        assert isinstance(error, builtin)
        assert error.errno == number
        assert (error.strerror, error.step, error.address, error.hint) == (
            "no",
            "resolve_addr",
            "10.0.0.1:7471",
            "another",
        )
        with pytest.raises(builtin):
            raise error

    @for_each("kind", KINDS)
    def test_every_error_is_an_rdma_error(self, kind: type[RdmaError]) -> None:
        error = kind(errno.EINVAL, "no")
        assert isinstance(error, RdmaError)
        assert isinstance(error, OSError)
        assert (error.step, error.address, error.hint, error.explanation) == ("", None, None, None)
        assert error.args == (errno.EINVAL, "no")

    def test_lookup_errors_are_socket_gaierror(self) -> None:
        error = GaiError(int(EAI.NONAME), "unknown")
        assert isinstance(error, socket.gaierror)
        assert error.errno == socket.EAI_NONAME
        assert error.system_errno == 0

    def test_explanation_is_kept(self) -> None:
        explanation = Explanation("name.test", "7471", "soft", error="resolve_addr")
        assert cm_error(errno.ENODEV, "no", explanation=explanation).explanation is explanation


class TestMessage:
    @for_each(
        ("error", "text"),
        [
            (
                cm_error(errno.ETIMEDOUT, "no answer", "resolve_addr", "10.0.0.1:7471", "a longer timeout"),
                "resolve_addr 10.0.0.1:7471: no answer [ETIMEDOUT]; try: a longer timeout",
            ),
            (cm_error(errno.EINVAL, "no", "listen"), "listen: no [EINVAL]"),
            (cm_error(errno.EINVAL, "no", address="10.0.0.1:7471"), "10.0.0.1:7471: no [EINVAL]"),
            (cm_error(errno.EINVAL, "no"), "no [EINVAL]"),
            (cm_error(524, "no"), "no [errno 524]"),
            (
                GaiError(int(EAI.NONAME), "not known", "getaddrinfo", "name.test:1", "the spelling"),
                "getaddrinfo name.test:1: not known [EAI_NONAME]; try: the spelling",
            ),
            (GaiError(12345, "strange"), "strange [EAI 12345]"),
        ],
    )
    def test_message_has_step_address_cause_code_and_hint(self, error: RdmaError, text: str) -> None:
        assert str(error) == text

    @given(kind=st.sampled_from(KINDS), parts=st.tuples(*[st.text(max_size=20)] * 4))
    def test_message_is_one_printable_line(self, kind: type[RdmaError], parts: tuple[str, str, str, str]) -> None:
        cause, step, address, hint = parts
        text = str(kind(errno.EINVAL, cause, step, address, hint))
        assert text.splitlines() == [text]
        assert text.isprintable()

    def test_unprintable_characters_are_escaped(self) -> None:
        text = str(cm_error(errno.EINVAL, "no", "getaddrinfo", "a\nb\x1b[2J\ud800\xe9"))
        assert text == "getaddrinfo a\\nb\\x1b[2J\\ud800\xe9: no [EINVAL]"


def _pickled(error: RdmaError, protocol: int) -> RdmaError:
    again: RdmaError = pickle.loads(pickle.dumps(error, protocol))
    return again


class TestCopies:
    @for_each("kind", KINDS)
    @for_each(
        "again",
        [
            *(functools.partial(_pickled, protocol=each) for each in range(pickle.HIGHEST_PROTOCOL + 1)),
            copy.copy,
            copy.deepcopy,
        ],
        ids=[*(f"pickle{each}" for each in range(pickle.HIGHEST_PROTOCOL + 1)), "copy", "deepcopy"],
    )
    def test_copies_are_equal(self, kind: type[RdmaError], again: Callable[[RdmaError], RdmaError]) -> None:
        explanation = Explanation("name.test", "7471", "soft", notes=("a note",))
        error = kind(errno.EINVAL, "no", "resolve_addr", "10.0.0.1:7471", "another", explanation)
        other = again(error)
        assert other is not error
        assert type(other) is kind
        assert str(other) == str(error)
        assert (other.errno, other.strerror, other.args) == (error.errno, error.strerror, error.args)
        assert (other.step, other.address, other.hint) == (error.step, error.address, error.hint)
        assert other.explanation == explanation

    def test_copies_keep_the_system_errno(self) -> None:
        error = GaiError(int(EAI.SYSTEM), "System error", "getaddrinfo", "name.test:1")
        error.system_errno = errno.EMFILE
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert (again.errno, again.system_errno) == (EAI.SYSTEM, errno.EMFILE)

    def test_copies_keep_notes(self) -> None:
        error = cm_error(errno.EINVAL, "no")
        error.add_note("seen while listening")
        assert pickle.loads(pickle.dumps(error)).__notes__ == ["seen while listening"]


class TestErrnoName:
    @for_each(
        "name",
        [
            "EINVAL",
            "ENODEV",
            "ENXIO",
            "ENOENT",
            "ENOMEM",
            "ENOSYS",
            "EBADF",
            "EBUSY",
            "EIO",
            "EMFILE",
            "EPERM",
            "EACCES",
            "ETIMEDOUT",
            "EADDRINUSE",
            "EADDRNOTAVAIL",
            "ENETUNREACH",
            "EHOSTUNREACH",
            "ECONNREFUSED",
            "EALREADY",
            "ENODATA",
            # Of two names for a number, the one of the manual pages is used.
            "EAGAIN",
            "EOPNOTSUPP",
            "EDEADLK",
        ],
    )
    def test_errno_is_named_as_in_the_manual_pages(self, name: str) -> None:
        assert errno_name(getattr(errno, name)) == name
        assert cm_error(getattr(errno, name), "no").code_name == name

    def test_unknown_errno_is_named_by_its_number(self) -> None:
        assert errno_name(524) == "errno 524"
        assert errno_name(0) == "errno 0"


#: The error codes of rdma_getaddrinfo(3).
PAGE = [
    "ADDRFAMILY",
    "AGAIN",
    "BADFLAGS",
    "FAIL",
    "FAMILY",
    "MEMORY",
    "NODATA",
    "NONAME",
    "QPTYPE",
    "SERVICE",
    "SYSTEM",
]


class TestGaiCodes:
    def test_eai_codes_are_those_of_the_manual_page(self) -> None:
        assert sorted(code.name for code in EAI) == PAGE

    @for_each("code", EAI)
    def test_eai_numbers_match_the_platform(self, code: EAI) -> None:
        theirs = getattr(socket, "EAI_SOCKTYPE" if code is EAI.QPTYPE else f"EAI_{code.name}")
        assert code == theirs
        assert gai_name(code) == gai_name(int(code)) == f"EAI_{code.name}"

    def test_unknown_eai_number_has_a_text(self) -> None:
        assert gai_name(12345) == "EAI 12345"
        assert gai_strerror(12345) == "Unknown error"

    @glibc_only
    @for_each("code", [code for code in EAI if code is not EAI.QPTYPE])
    def test_eai_texts_match_the_platform(self, code: EAI) -> None:
        theirs = ctypes.CDLL(None).gai_strerror
        theirs.restype = ctypes.c_char_p
        assert gai_strerror(code) == theirs(int(code)).decode()

    def test_eai_qptype_has_its_own_text(self) -> None:
        assert gai_strerror(EAI.QPTYPE) == "ai_qp_type not supported"

    @glibc_only
    @for_each(
        ("code", "lookup"),
        [
            (EAI.NONAME, {"host": "256.1.1.1", "port": 1, "flags": socket.AI_NUMERICHOST}),
            (EAI.BADFLAGS, {"host": "127.0.0.1", "port": 1, "flags": 0x40000000}),
            (EAI.FAMILY, {"host": "127.0.0.1", "port": 1, "family": 99}),
            (EAI.SERVICE, {"host": "127.0.0.1", "port": "no-such-service"}),
            (EAI.ADDRFAMILY, {"host": "::1", "port": 1, "family": socket.AF_INET}),
        ],
    )
    def test_eai_texts_match_the_socket_module(self, code: EAI, lookup: dict[str, Any]) -> None:
        with pytest.raises(socket.gaierror) as caught:
            socket.getaddrinfo(**lookup)
        assert caught.value.errno == code
        assert caught.value.strerror == gai_strerror(code)
