"""libibverbs, loaded at run time: its functions, and the errors of their failures.

Functions that take long or enter the kernel release the interpreter's lock. Those that only read or write a queue in
memory (post, poll, arm) keep it: to give it up and to get it back may take longer than the call, up to 5 ms where
another thread computes.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from ctypes import Structure, c_void_p
from functools import cache
from typing import Any

from rdmacm.errors import cm_error
from rdmacm.kernel.verbs.functions import MEMBERS, OPTIONAL, REQUIRED
from rdmacm.kernel.verbs.layouts import ibv_context, verbs_context

#: The library's file name.
LIBRARY = "libibverbs.so.1"

#: The functions that only read events which are there already.
_SHORT = frozenset({"ibv_get_cq_event", "ibv_ack_cq_events", "ibv_get_async_event", "ibv_ack_async_event"})


class Library:
    """libibverbs. Its functions are attributes with C's names; one that it lacks is None.

    ENOENT: there is no such library; ENOSYS: it lacks a function, as one before rdma-core 28 does.
    """

    def __init__(self, name: str = LIBRARY) -> None:
        try:
            # Each object has functions of its own, so that nobody else's argument types are changed.
            library = ctypes.CDLL(name, use_errno=True)
            short = ctypes.PyDLL(name, use_errno=True)
        except OSError as error:
            text = f"the library cannot be loaded: {error}"
            hint = "'apt install libibverbs1 ibverbs-providers'; 'ldconfig -p | grep ibverbs' shows what is there"
            raise cm_error(errno.ENOENT, text, "libibverbs", name, hint) from None
        for function, (result, arguments) in (REQUIRED | OPTIONAL).items():
            try:
                found: Any = getattr(short if function in _SHORT else library, function)
            except AttributeError:
                if function not in OPTIONAL:
                    text = f"the library has no {function}"
                    raise cm_error(errno.ENOSYS, text, "libibverbs", name, "rdma-core 28 or later") from None
                found = None
            else:
                found.restype, found.argtypes = result, arguments
            setattr(self, function, found)

    def fork_status(self) -> int:
        """``enum ibv_fork_status``; 0 from a library that cannot tell."""
        return 0 if self.ibv_is_fork_initialized is None else int(self.ibv_is_fork_initialized())

    def __getattr__(self, name: str) -> Any:  # for the type checker: __init__ sets all that are known
        raise AttributeError(name)


def last_error() -> int:
    """The errno of the last function of this thread that returned a null pointer or -1; EIO where it set none."""
    return ctypes.get_errno() or errno.EIO


def code_of(result: int) -> int:
    """The errno that a function's result stands for: drivers return it as it is, or negative, or -1 and set errno."""
    if result == -1:
        return last_error()
    return abs(result)


_library: Library | None = None
_lock = threading.Lock()


def load() -> Library:
    """The library, loaded once. ENOENT and ENOSYS: see :class:`Library`."""
    global _library
    with _lock:
        if _library is None:
            _library = Library()
        return _library


#: In front of an ``ibv_context`` if the library has it.
_EXTENDED = c_void_p(-1).value


@cache
def _prototype(name: str, is_short: bool) -> Any:
    result, arguments = MEMBERS[name]
    if is_short:
        return ctypes.PYFUNCTYPE(result, *arguments)
    return ctypes.CFUNCTYPE(result, *arguments, use_errno=True)


def short_function(owner: Structure, name: str) -> Any:
    """A function that a structure points to, which only reads or writes memory; None if the pointer is null."""
    address = getattr(owner, name)
    return _prototype(name, True)(address) if address else None


def _long_function(owner: Structure, name: str) -> Any:
    address = getattr(owner, name)
    return _prototype(name, False)(address) if address else None


class Operations:
    """The functions of one open device that the header calls through its context; None for what the device lacks."""

    def __init__(self, context: int) -> None:
        ops = ibv_context.from_address(context).ops
        self.poll_cq: Any = short_function(ops, "poll_cq")
        self.req_notify_cq: Any = short_function(ops, "req_notify_cq")
        self.post_send: Any = short_function(ops, "post_send")
        self.post_recv: Any = short_function(ops, "post_recv")
        self.post_srq_recv: Any = short_function(ops, "post_srq_recv")
        self.alloc_mw: Any = _long_function(ops, "alloc_mw")
        self.bind_mw: Any = _long_function(ops, "bind_mw")
        self.dealloc_mw: Any = _long_function(ops, "dealloc_mw")
        self._context = context
        self.query_device_ex: Any = self._extended("query_device_ex")
        self.query_port: Any = self._extended("query_port")
        self.create_qp_ex: Any = self._extended("create_qp_ex")
        self.open_qp: Any = self._extended("open_qp")
        self.create_srq_ex: Any = self._extended("create_srq_ex")
        self.get_srq_num: Any = self._extended("get_srq_num")
        self.open_xrcd: Any = self._extended("open_xrcd")
        self.close_xrcd: Any = self._extended("close_xrcd")

    def _extended(self, name: str) -> Any:
        """A function in front of the context; None where the library or the driver lacks it."""
        if ibv_context.from_address(self._context).abi_compat != _EXTENDED:
            return None
        front = verbs_context.from_address(self._context - verbs_context.context.offset)
        if front.sz < ctypes.sizeof(verbs_context) - getattr(verbs_context, name).offset:
            return None
        return _long_function(front, name)
