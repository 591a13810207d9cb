"""How many examples a property test tries: fewer in the quick suite, all where CI is set."""

from __future__ import annotations

import os

__all__ = ["EXAMPLES", "LOSS_SEEDS", "MANY_EXAMPLES"]

_IS_QUICK = not os.environ.get("CI")
EXAMPLES = 30 if _IS_QUICK else 100
#: For those that try arbitrary input.
MANY_EXAMPLES = 60 if _IS_QUICK else 300
#: Lossy networks for connections without acknowledgements, and for datagrams. For a longer run: 1,000 take a minute.
LOSS_SEEDS = int(os.environ.get("RDMACM_LOSS_SEEDS") or 200)
