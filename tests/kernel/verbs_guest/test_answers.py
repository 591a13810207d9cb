"""Our verbs on the kernel's device and rdma-core's pyverbs give the same answers."""

from __future__ import annotations

import json
from collections.abc import Callable


def test_answers_are_those_of_pyverbs(run_program: Callable[[str], str]) -> None:
    theirs = json.loads(run_program("-m interop.answers rxe0 all").splitlines()[-1])
    ours = json.loads(run_program("-m kernel.verbs_guest.kernel_answers rxe0").splitlines()[-1])
    assert len(theirs) > 100
    different = {name: (theirs[name], ours[name]) for name in theirs if theirs[name] != ours[name]}
    assert different == {}
