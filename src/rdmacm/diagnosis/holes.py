"""A link in the middle of a path that drops long packets without a word: its MTU is smaller than the others'."""

from __future__ import annotations

import errno

from rdmacm.errors import RdmaError, cm_error
from rdmacm.explanation import RouteUsed

#: The MTU of Ethernet without jumbo frames: what a link in the middle has that lets no more through.
_USUAL_MTU = 1500
#: The least that has room for the smallest path MTU and all headers.
_LEAST_MTU = 256 + 96


def hole_error(arrived: int, lost: int, operation: str, peer: str, route: RouteUsed | None) -> RdmaError:
    """The error of a message that was not acknowledged, though the peer answers: ETIMEDOUT.

    ``arrived`` is the length of the longest packet that is known to have arrived, and ``lost`` that of one that has
    not, in bytes as IP counts them. ``route`` is that to the peer, None if it is not known.

    >>> print(hole_error(60, 4140, "send", "10.0.0.2", None))
    send 10.0.0.2: packets of up to 60 bytes arrive, and one of 4140 does not: a link on the way has a smaller MTU \
(RETRY_EXC_ERR) [ETIMEDOUT]; try: a route with MTU 1500 on the host that connects, or the same MTU on every link and \
switch of the way
    """
    text = (
        f"packets of up to {arrived} bytes arrive, and one of {lost} does not: a link on the way has a smaller MTU "
        "(RETRY_EXC_ERR)"
    )
    mtu = _USUAL_MTU if arrived <= _USUAL_MTU < lost else max(arrived, _LEAST_MTU)
    command = f"'{route.command_with_mtu(mtu)}'" if route else f"a route with MTU {mtu}"
    hint = f"{command} on the host that connects, or the same MTU on every link and switch of the way"
    return cm_error(errno.ETIMEDOUT, text, operation, peer, hint)
