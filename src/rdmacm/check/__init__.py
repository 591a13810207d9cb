"""The way to a peer, step by step: name, route, neighbour, UDP port 4791, connection manager, path MTU, loss, class.

:mod:`~rdmacm.check.sequence` decides what to measure next, and :mod:`~rdmacm.check.judging` what it means; neither does
any input or output. :mod:`~rdmacm.check.measuring` measures from this side alone, against any RoCEv2 peer, and
:mod:`~rdmacm.check.exchange` with the help of ``rdmacm check --serve`` at the other side, which
:mod:`~rdmacm.check.serving` is.
"""
