"""``rdmacm run``: programs in C on the software devices, without hardware, kernel modules or privileges.

The library in the program's process (``core/library``) has the whole data path. What needs the host it asks of the
server here: devices, sockets, addresses, connections.

- :mod:`rdmacm.run.protocol` has the structures of the requests, and :mod:`rdmacm.run.packing` fills them in.
- :mod:`rdmacm.run.server` waits for descriptors, and :mod:`rdmacm.run.connections` has one connection of a program.
- :mod:`rdmacm.run.sessions` has what a process owns: event channels and ids, asynchronous events, sockets.
- :mod:`rdmacm.run.requests` and :mod:`rdmacm.run.commands` execute requests, the latter those of the kernel's rdma_cm.
- :mod:`rdmacm.run.tapping` captures packets, and :mod:`rdmacm.run.explanations` explains resolutions.
- :mod:`rdmacm.run.command` is the command, :mod:`rdmacm.run.options` its options; :mod:`rdmacm.run.rdma` is one for
  programs.
"""
