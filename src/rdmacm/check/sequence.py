"""Which measurement comes next, and the findings so far: a state machine without input and output.

==============  ==========================================================  =========================================
state           is asked for                                                then
==============  ==========================================================  =========================================
RESOLUTION      the name, its route and the neighbour                       SERVER; a failure ends the check
SERVER          whether ``rdmacm check --serve`` runs at the peer           REQUESTS
REQUESTS        requests to the peer's connection manager                   EXCHANGE with a server, else LISTENER
EXCHANGE        datagrams in both directions                                LISTENER; no datagrams end the check
LISTENER        a connection request to the port, if one was named          SIZES without a server, else the end
SIZES           packets of several lengths that the host itself answers     the end
==============  ==========================================================  =========================================
"""

from __future__ import annotations

from enum import Enum

from rdmacm.check import judging
from rdmacm.check.findings import Finding, Sign, Step
from rdmacm.check.measured import Exchange, Listener, Requests, Resolution, Sizes, Target


class Wanted(Enum):
    """The next measurement."""

    RESOLUTION = "resolution"
    SERVER = "server"
    REQUESTS = "requests"
    EXCHANGE = "exchange"
    LISTENER = "listener"
    SIZES = "sizes"


class Sequence:
    """One check of one peer. Measurements go in by the ``take`` methods, in the order of :attr:`wanted`."""

    def __init__(self, target: Target) -> None:
        self.target = target
        #: The measurement to make next; None at the end.
        self.wanted: Wanted | None = Wanted.RESOLUTION
        #: The steps that are decided, in order.
        self.findings: list[Finding] = []
        self.resolution: Resolution | None = None
        self.requests: Requests | None = None
        self.exchange: Exchange | None = None
        self.listener: Listener | None = None
        self.sizes: Sizes | None = None
        #: Whether ``rdmacm check --serve`` runs at the peer.
        self._is_helped = False

    @property
    def failure(self) -> Finding | None:
        """The first step that is not good; None if all are."""
        return next((finding for finding in self.findings if finding.sign is Sign.BAD), None)

    @property
    def status(self) -> int:
        """The exit status: 0, or the number of the first step that is not good."""
        return 0 if self.failure is None else int(self.failure.step)

    def all_findings(self) -> list[Finding]:
        """One finding of each step; those after the end are "not reached"."""
        known = {finding.step: finding for finding in self.findings}
        return [known.get(step) or Finding(step, Sign.NOT_REACHED, "not reached") for step in Step]

    def _add(self, finding: Finding) -> bool:
        """Add a finding; False if the check ends with it: what follows would fail for the same reason."""
        self.findings.append(finding)
        if finding.sign is Sign.BAD and finding.step < Step.LOSS:
            self.wanted = None
            return False
        return True

    def take_resolution(self, found: Resolution) -> None:
        """The measurement of RESOLUTION."""
        self.resolution = found
        self.wanted = Wanted.SERVER
        for finding in judging.judge_resolution(found):
            if not self._add(finding):
                return

    def take_server(self, is_there: bool) -> None:
        """Whether the peer helps."""
        self._is_helped = is_there
        self.wanted = Wanted.REQUESTS

    def take_requests(self, asked: Requests) -> None:
        """The measurement of REQUESTS."""
        self.requests = asked
        if self._is_helped and not asked.error:
            self.wanted = Wanted.EXCHANGE
        else:
            self._judge_port()

    def take_exchange(self, found: Exchange | None) -> None:
        """The measurement of EXCHANGE; None if the peer's help has ended meanwhile."""
        self.exchange = found
        if found is not None and self.resolution is not None:
            flux = judging.judge_neighbour(self.resolution, found)
            if flux is not None:
                self.findings = [finding for finding in self.findings if finding.step is not Step.NEIGHBOUR]
                if not self._add(flux):
                    return
        self._judge_port()

    def _judge_port(self) -> None:
        assert self.resolution is not None
        assert self.requests is not None
        if not self._add(judging.judge_port(self.target, self.resolution, self.requests, self.exchange)):
            return
        if self.target.port and self.requests.round_trips:
            self.wanted = Wanted.LISTENER
        else:
            self._judge_manager()

    def take_listener(self, found: Listener) -> None:
        """The measurement of LISTENER."""
        self.listener = found
        self._judge_manager()

    def _judge_manager(self) -> None:
        assert self.requests is not None
        if not self._add(judging.judge_manager(self.target, self.requests, self.listener)):
            return
        listener = self.listener
        is_known = listener is not None and (listener.long_arrived is not None or self._is_mtu_refused())
        if self.exchange is None and not is_known:
            self.wanted = Wanted.SIZES
        else:
            self._finish()

    def _is_mtu_refused(self) -> bool:
        assert self.resolution is not None
        return judging.judge_mtu(self.target, self.resolution, self.listener, None, None).sign is Sign.BAD

    def take_sizes(self, found: Sizes) -> None:
        """The measurement of SIZES."""
        self.sizes = found
        self._finish()

    def _finish(self) -> None:
        assert self.resolution is not None
        assert self.requests is not None
        mtu = judging.judge_mtu(self.target, self.resolution, self.listener, self.sizes, self.exchange)
        if self._add(mtu):
            self._add(judging.judge_loss(self.requests, self.exchange))
            self._add(judging.judge_class(self.target, self.exchange))
        self.wanted = None
