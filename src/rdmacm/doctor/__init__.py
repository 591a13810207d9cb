"""``rdmacm doctor``: what keeps RDMA connections from working on this host, as a table of rules.

``collect.py`` measures a host, ``ask.py`` asks the network about a destination; what both find is a
:class:`rdmacm.doctor.view.Host`. The rules judge it, without reading anything themselves, and ``table.py`` has them
all. ``pages.py`` writes the rules for people, ``report.py`` a page of HTML.
"""

from __future__ import annotations

from rdmacm.doctor.collect import Sources, collect
from rdmacm.doctor.rule import QUESTIONS, Found, Quiet, Rule, Unasked
from rdmacm.doctor.table import BY_ID, RULES, Answer, Examination, examine
from rdmacm.doctor.view import Host

__all__ = [
    "BY_ID",
    "QUESTIONS",
    "RULES",
    "Answer",
    "Examination",
    "Found",
    "Host",
    "Quiet",
    "Rule",
    "Sources",
    "Unasked",
    "collect",
    "examine",
]
