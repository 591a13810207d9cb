"""Reliable connected service (InfiniBand Architecture 9.7) as Linux's rxe speaks it.

The requester turns work requests into packets and the peer's answers into completions; the responder executes what the
peer's packets ask for. :class:`~rdmacm.proto.roce.rc.engine.RcEngine` is both, with one stream of packets in and one
out. ``state.py`` has the state they share.
"""
