"""The service ids that one process listens on, and where other processes of its port group forward their requests."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from rdmacm.errors import cm_error
from rdmacm.soft.wire.forwarding import ForwardReceiver
from rdmacm.soft.wire.port_group import PortGroup

#: A service id, and the local address or None for any.
ListenKey: TypeAlias = "tuple[int, bytes | None]"


class _Token:
    """One call of listen()."""

    __slots__ = ("key",)

    def __init__(self, key: ListenKey) -> None:
        self.key = key


class _Listening(NamedTuple):
    """A service id and address that this process listens on."""

    #: One for each call of listen().
    tokens: set[object]
    #: Receives requests that other processes forward; None if the port is not shared.
    receiver: ForwardReceiver | None


class Listeners:
    """See the module."""

    def __init__(self) -> None:
        #: What this process listens on.
        self.by_key: dict[ListenKey, _Listening] = {}

    def add(
        self, key: ListenKey, group: PortGroup | None, make_receiver: Callable[[socket.socket], ForwardReceiver]
    ) -> object:
        """Listen, and return the token for :meth:`remove`; EADDRINUSE if another process of ``group`` does.

        ``make_receiver`` watches a socket where the processes of the group forward requests.
        """
        if key not in self.by_key:
            receiver = None if group is None else make_receiver(_bind(key, group))
            self.by_key[key] = _Listening(set(), receiver)
        token = _Token(key)
        self.by_key[key].tokens.add(token)
        return token

    def remove(self, token: object) -> None:
        """Undo :meth:`add`; no error for another token."""
        if not isinstance(token, _Token):
            return
        listening = self.by_key.get(token.key)
        if listening is None or token not in listening.tokens:
            return
        listening.tokens.discard(token)
        if not listening.tokens:
            del self.by_key[token.key]
            if listening.receiver is not None:
                listening.receiver.close()

    def close(self) -> None:
        """Close what was opened, and forget every token."""
        for listening in self.by_key.values():
            if listening.receiver is not None:
                listening.receiver.close()
        self.by_key.clear()


def _bind(key: ListenKey, group: PortGroup) -> socket.socket:
    """The socket with the name of a service id; the name is free if no other process listens on it."""
    try:
        return group.bind_service(*key)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        text = f"another process listens on service id {key[0]:#x}"
        if not is_taken:
            text = f"requests for service id {key[0]:#x} cannot be received ({error.strerror})"
        raise cm_error(error.errno or errno.EIO, text, "listen") from error
