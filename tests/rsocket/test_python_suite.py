"""Python's own tests of sockets, run with rsockets in place of its sockets.

The modules ``test.test_socket`` and ``test.test_selectors`` of the interpreter are loaded once more, under other names,
and see a module ``socket`` whose sockets are rsockets. Each class runs whole, but for the tests in :data:`LEFT_OUT`.
"""

from __future__ import annotations

import importlib.util
import select
import socket
import sys
import types
import unittest
from collections.abc import Iterator
from typing import Any

import pytest

from rdmacm import rsocket

pytest.importorskip("test.test_socket", reason="needs Python's own tests, the package test")
pytest.importorskip("test.test_selectors", reason="needs Python's own tests, the package test")

# Some of these tests set an alarm, which is how a test is limited otherwise.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300, method="thread")]

#: The tests of test_socket.GeneralModuleTests that use sockets; the others are about functions of the module.
GENERAL = [
    "testDefaultTimeout",
    "testGetSockOpt",
    "testNewAttributes",
    "testSendAfterClose",
    "testSetSockOpt",
    "testSockName",
    "test_dealloc_warn",
    "test_flowinfo",
    "test_getsockaddrarg",
    "test_listen_backlog",
    "test_listen_backlog_overflow",
    "test_makefile_invalid_mode",
    "test_makefile_mode",
    "test_name_closed_socketio",
    "test_pickle",
    "test_sendall_interrupted",
    "test_sendall_interrupted_with_timeout",
    "test_socket_consistent_sock_type",
    "test_unusable_closed_socketio",
    "test_weakref",
]

#: Tests that measure time.
TIMED = [
    "testInsideTimeout",
    "testInterruptedSendTimeout",
    "testInterruptedSendmsgTimeout",
    "testInterruptedTimeout",
    "testReadAfterTimeout",
    "testTCPTimeout",
    "testTimeoutZero",
    "testWithTimeoutTriggeredSend",
    "test_select_interrupt_exc",
    "test_select_interrupt_noraise",
    "test_sendall_interrupted_with_timeout",
    "test_timeout",
]

#: The classes of each module that are about streams.
CLASSES = {
    "test.test_socket": [
        "GeneralModuleTests",
        "BasicTCPTest",
        "BasicTCPTest2",
        "TCPCloserTest",
        "NonBlockingTCPTests",
        "FileObjectClassTestCase",
        "UnbufferedFileObjectClassTestCase",
        "LineBufferedFileObjectClassTestCase",
        "SmallBufferedFileObjectClassTestCase",
        "UnicodeReadFileObjectClassTestCase",
        "UnicodeWriteFileObjectClassTestCase",
        "UnicodeReadWriteFileObjectClassTestCase",
        "SendmsgTCPTest",
        "RecvmsgTCPTest",
        "RecvmsgIntoTCPTest",
        "InterruptedSendTimeoutTest",
        "NetworkConnectionNoServer",
        "NetworkConnectionAttributesTest",
        "NetworkConnectionBehaviourTest",
        "TCPTimeoutTest",
        "TestExceptions",
        "BufferIOTest",
        "ContextManagersTest",
        "InheritanceTest",
        "NonblockConstantTest",
        "SendfileUsingSendTest",
        "BasicSocketPairTest",
        "CreateServerTest",
        "CreateServerFunctionalTest",
    ],
    "test.test_selectors": ["SelectSelectorTestCase"],
}

#: What a test of a class has instead of what it takes from the module: the public method or class.
INSTEAD: dict[str, dict[str, Any]] = {
    "SendfileUsingSendTest": {"meth_from_sock": lambda self, sock: sock.sendfile},
    "SelectSelectorTestCase": {"SELECTOR": rsocket.Selector},
}

_DESCRIPTOR = "the connection is not in a descriptor"
_CLOSED = "sending to a peer that has closed, or may have, fails at once; TCP's first send() succeeds"
_INTERNAL = "is about a name that is internal to the module socket"

#: Tests that are left out, by name, with the reason. docs/rsocket.md has what it means for programs.
LEFT_OUT = {
    # The descriptor of an rsocket tells when to call it, and is nothing else.
    "testDetach": _DESCRIPTOR,
    "testDup": _DESCRIPTOR,
    "testFromFd": _DESCRIPTOR,
    "testInitNonBlocking": _DESCRIPTOR,
    "testSetBlocking": _DESCRIPTOR,
    "testSetBlocking_overflow": _DESCRIPTOR,
    "test_SOCK_NONBLOCK": _DESCRIPTOR,
    "test_dup": _DESCRIPTOR,
    "test_get_inheritable_cloexec": _DESCRIPTOR,
    "test_set_inheritable": _DESCRIPTOR,
    "test_set_inheritable_cloexec": _DESCRIPTOR,
    "test_setblocking_invalidfd": _DESCRIPTOR,
    "testDefaults": "is about the family of Unix's socketpair()",
    # The insides of Python's module.
    "testNonRegularFile": _INTERNAL,
    "test_create_connection_timeout": _INTERNAL,
    # Differences.
    "testInterruptedSendtoTimeout": "a stream has one peer, and refuses an address (EISCONN); TCP's ignores it",
    "test_select_read_write": "what was sent arrives later; within a host, TCP's is there when send() returns",
    "testOutsideTimeout": _CLOSED,
    "testRecvFromIntoEmptyBuffer": _CLOSED,
    "testRecvFromIntoSmallBuffer": _CLOSED,
}


def _socketpair(family: int = socket.AF_INET, type: int = socket.SOCK_STREAM, proto: int = 0) -> tuple[Any, Any]:
    with rsocket.create_server(("127.0.0.1", 0)) as listener:
        client = rsocket.create_connection(listener.getsockname())
        return client, listener.accept()[0]


def _stand_in() -> types.ModuleType:
    module = types.ModuleType("socket")
    module.__dict__.update(vars(socket))
    module.__dict__.update(
        socket=rsocket.socket,
        SocketType=rsocket.socket,
        create_connection=rsocket.create_connection,
        create_server=rsocket.create_server,
        socketpair=_socketpair,
    )
    del module.__dict__["SO_REUSEPORT"]
    return module


def _load(name: str) -> types.ModuleType:
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.origin is not None
    spec = importlib.util.spec_from_file_location("rsocket_" + name.rpartition(".")[2], found.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    stand_in = _stand_in()
    vars(module).update(socket=stand_in, socketpair=_socketpair)
    if hasattr(module, "select"):
        vars(module)["select"] = types.SimpleNamespace(**{**vars(select), "select": rsocket.select})
    return module


def _build(module: types.ModuleType, name: str) -> type[unittest.TestCase]:
    base = getattr(module, name)
    changed: dict[str, Any] = dict(INSTEAD.get(name, {}))
    for test in unittest.defaultTestLoader.getTestCaseNames(base):
        if test in LEFT_OUT or (name == "GeneralModuleTests" and test not in GENERAL):
            changed[test] = None  # TestCase runs what can be called
        elif test in TIMED:
            pytest.mark.wallclock(getattr(base, test))
    return type(name, (base,), {"__module__": __name__, **changed})


for _name, _classes in CLASSES.items():
    _module = _load(_name)
    for _class in _classes:
        if hasattr(_module, _class):
            globals()[_class] = _build(_module, _class)


@pytest.fixture(scope="module", autouse=True)
def _provider() -> Iterator[None]:
    """The provider, with its thread, for the whole module: the tests count the threads that they start."""
    with rsocket.create_server(("127.0.0.1", 0)):
        yield
