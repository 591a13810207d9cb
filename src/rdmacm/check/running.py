"""A check from start to end: measures what the sequence wants, and gives it back."""

from __future__ import annotations

from collections.abc import Callable

from rdmacm.check.exchange import Helper, find_helper
from rdmacm.check.findings import Finding
from rdmacm.check.measured import Target
from rdmacm.check.measuring import Measurer
from rdmacm.check.sequence import Sequence, Wanted


def run_check(
    target: Target,
    measurer: Measurer,
    *,
    control: tuple[str, int] | None,
    count: int,
    shown: Callable[[Finding], None] = lambda _: None,
) -> Sequence:
    """Check a peer; ``shown`` is called with each finding once it is known.

    ``control``: host and port of ``rdmacm check --serve``, the host "" for the target itself; None not to look for it.
    ``count``: the datagrams by which loss is measured.
    """
    sequence = Sequence(target)
    helper: Helper | None = None
    known = 0
    try:
        while sequence.wanted is not None:
            found = sequence.resolution
            match sequence.wanted:
                case Wanted.RESOLUTION:
                    sequence.take_resolution(measurer.measure_resolution())
                case Wanted.SERVER:
                    assert found is not None
                    helper = None if control is None else find_helper(found, *control)
                    sequence.take_server(helper is not None)
                case Wanted.REQUESTS:
                    assert found is not None
                    sequence.take_requests(measurer.measure_requests(found, is_helped=helper is not None))
                case Wanted.EXCHANGE:
                    assert helper is not None
                    sequence.take_exchange(helper.exchange(measurer, target, count))
                case Wanted.LISTENER:
                    assert found is not None
                    sequence.take_listener(measurer.measure_listener(found))
                case Wanted.SIZES:
                    assert found is not None
                    sequence.take_sizes(measurer.measure_sizes(found))
            for finding in sequence.findings[known:]:
                shown(finding)
            known = len(sequence.findings)
    finally:
        if helper is not None:
            helper.close()
    return sequence
