"""As many draft tokens as pay: measured step times against measured acceptance."""

import math

from ..decoding.proposal import Proposal
from .base import check_draft_tokens
from .model import Acceptance, StepTimes, best_draft_tokens
from .report import AcceptanceReport

__all__ = ["CostPolicy"]

_FIRST_BURST, _LONGEST_BURST = 32, 512  # plain steps between two probes
_REFRESH = 32  # drafted steps after which a plain step, then one of full length is timed again


class CostPolicy:
    """Chooses the number of draft tokens that maximises expected tokens per second.

    A step with n draft tokens emits ``1 + sum over i <= n of P(the first i are accepted)`` tokens
    and takes ``t(n)`` seconds. Acceptance is counted per position, among tokens really offered;
    times are lower quartiles, made monotone in n, and interpolated between the lengths that were
    run. Where plain decoding wins, it runs in bursts that grow, with a probe between them, so that
    a drafter that starts to pay is found again; where it does not, it is timed now and then.

    Args:
        draft_tokens: never more than this; None takes the drafter's full block.

    Raises:
        ValueError: the limit is not a positive integer.
    """

    def __init__(self, draft_tokens: int | None = None) -> None:
        self.limit = check_draft_tokens(draft_tokens)
        self._times = StepTimes()
        self._acceptance = Acceptance()
        self._plain_left = 0
        self._burst = _FIRST_BURST
        self._drafted = 0  # steps since the last plain one
        self._full_next = False
        self._probing = False
        self._report = AcceptanceReport()

    def draft_tokens(self, most: int) -> int:
        """The best length by what is known; lengths not yet timed come first."""
        most = most if self.limit is None else min(self.limit, most)
        untimed = self._times.uncalibrated((most, 0, 1, (most + 1) // 2))
        if untimed is not None:
            return untimed
        if self._plain_left > 0:
            self._plain_left -= 1
            return 0
        if self._drafted >= _REFRESH:
            self._full_next = True
            return 0
        if self._full_next:
            self._full_next = False
            return most
        times = self.seconds(most)
        best = best_draft_tokens(self._acceptance.survival(most), times) if times else most
        self._probing = best == 0
        if best == 0:
            # The probe drafts now; if it does not change the picture, a longer burst follows.
            self._plain_left = self._burst
            self._burst = min(2 * self._burst, _LONGEST_BURST)
            return (most + 1) // 2
        self._burst = _FIRST_BURST
        return best

    def select(self, proposal: Proposal, wanted: int) -> int:
        """What was wanted, or less where the drafter's own confidence says so.

        Token by token: the next one is offered if some longer block promises more than stopping
        here. What is known then are the confidences up to that token; beyond it the average counts.
        Looking further would be a choice by the token's own value, and would bias sampled output.
        """
        wanted = min(wanted, proposal.tokens.shape[1])
        times = self.seconds(wanted)
        if proposal.confidence is None or proposal.confidence.shape[1] < wanted or not times:
            return wanted
        average = self._acceptance.survival(wanted)
        alive, expected = 1.0, 1.0
        for n, confidence in enumerate(proposal.confidence[0, :wanted].tolist()):
            alive *= confidence if math.isfinite(confidence) else 0.0
            # Drafting is paid for: at least one token is verified.
            if n > 0 and not self._worth(n, expected, alive, average, times):
                return n
            expected += alive
        return wanted

    @staticmethod
    def _worth(
        n: int, expected: float, alive: float, average: list[float], times: list[float]
    ) -> bool:
        """Whether any block longer than n promises more tokens per second than n.

        ``expected`` tokens come from the first n, ``alive`` from token n + 1.
        """
        stop = expected / times[n]
        scale = alive / average[n] if average[n] > 0 else 0.0
        for longer in range(n + 1, len(times)):
            expected += scale * average[longer - 1]
            if expected / times[longer] > stop:
                return True
        return False

    def observe(self, offered: int, accepted: int, seconds: float) -> None:
        """Take note of a finished step; times that cannot be are ignored."""
        self._times.observe(offered, seconds)
        self._drafted = self._drafted + 1 if offered else 0
        if offered == 0:
            return
        if self._probing and accepted > sum(self._acceptance.survival(offered)):
            self._plain_left, self._burst = 0, _FIRST_BURST  # better than thought: probe again now
        self._acceptance.observe(offered, accepted, self._probing)
        self._report.observe(offered, accepted)

    def seconds(self, most: int) -> list[float]:
        """Times of 0 .. most draft tokens: quartiles, monotone, interpolated; empty if unknown."""
        return self._times.seconds(most)
