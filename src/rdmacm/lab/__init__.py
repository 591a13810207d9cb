"""Hosts in network namespaces, for any user: ``rdmacm lab``, and the fixture ``rdmacm_namespace`` of pytest.

>>> from rdmacm.lab import Lab, Wiring
>>> with Lab(["h1", "h2"], Wiring(mtu=4200)) as lab:  # doctest: +SKIP
...     lab.hosts["h1"].run(["ping", "-c", "1", "h2"])

This page lists the public names:

    Lab                 hosts on one network, until it is closed or its process ends
    LabHost             one of them: runs programs in it
    Wiring              MTU, loss and delay of the network

docs/testing.md is the guide. The other modules of this package are internal.
"""

# "X as X" exports a name to type checkers. Without __all__, help() shows the list above instead of every class.
from rdmacm.lab.lab import Lab as Lab
from rdmacm.lab.lab import LabHost as LabHost
from rdmacm.lab.wiring import Wiring as Wiring
