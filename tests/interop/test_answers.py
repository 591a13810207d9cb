"""The same calls of the verbs on both devices: attributes, sizes, path migration, extended objects."""

from __future__ import annotations

import json

from interop.scenario import Guest


def test_answers_are_those_of_rdma_rxe(guest: Guest) -> None:
    done = guest.run("rxe python3 -m interop.answers rxe0 || exit\nsoft python3 -m interop.answers soft_vb", timeout=60)
    assert done.status == 0, done.output
    theirs, ours = map(json.loads, done.output.splitlines())
    assert len(theirs) > 100
    different = {name: (theirs[name], ours[name]) for name in theirs if theirs[name] != ours[name]}
    assert different == {}
