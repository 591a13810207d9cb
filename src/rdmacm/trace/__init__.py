"""RDMA connections in captured packets: who connected to whom, how it went, and why it failed.

``files.py`` reads capture files, ``links.py`` finds the packet of IP or InfiniBand in a frame, and ``tracer.py`` gives
it to its connection, which ``registry.py`` finds. ``connection.py`` has what is known of a connection, ``halves.py``
the packets of one direction of it, ``management.py`` the messages of connection managers, ``iwarp.py`` the streams of
iWARP, ``internet.py`` ICMP. ``verdicts.py`` says in one sentence how a connection fared; ``rows.py`` has the rows of
its diagram, which ``text.py``, ``mermaid.py`` and ``svg.py`` draw, and ``report.py`` all of it as data.

Everything here is sans-IO but ``live.py``. Memory depends on the number of connections, which is bounded, and not on
that of packets.
"""
