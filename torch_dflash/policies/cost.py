"""As many draft tokens as pay: measured step times against measured acceptance."""

import math
from collections import deque
from statistics import median

from ..decoding.proposal import Proposal
from .base import check_draft_tokens
from .report import AcceptanceReport

__all__ = ["CostPolicy"]

_WINDOW = 15  # step times kept per length; their median ignores outliers
_SKIP = 1  # first step of a length: allocations, cold code
_CALIBRATION = 3  # measured steps of each calibrated length before its time is believed
_DECAY = 0.98  # of the acceptance counts, per drafted step: about the last 50 steps count
_PROBE_DECAY = 0.7  # the same for a probe: it is rare, and has to count
_PRIOR = (4.0, 0.7)  # weight and value of the acceptance assumed at every position before evidence
_MARGIN = 1.02  # a length must promise this much more than plain decoding
_FIRST_BURST, _LONGEST_BURST = 32, 512  # plain steps between two probes


class CostPolicy:
    """Chooses the number of draft tokens that maximises expected tokens per second.

    A step with n draft tokens emits ``1 + sum over i <= n of P(the first i are accepted)`` tokens
    and takes ``t(n)`` seconds. Acceptance is counted per position, among tokens really offered;
    times are medians, made monotone in n, and interpolated between the lengths that were run.
    Where plain decoding wins, it runs in bursts that grow, with a probe between them, so that a
    drafter that starts to pay is found again.

    Args:
        draft_tokens: never more than this; None takes the drafter's full block.

    Raises:
        ValueError: the limit is not a positive integer.
    """

    def __init__(self, draft_tokens: int | None = None) -> None:
        self._limit = check_draft_tokens(draft_tokens)
        self._times: dict[int, deque[float]] = {}
        self._seen: dict[int, int] = {}
        self._offered: list[float] = []
        self._accepted: list[float] = []
        self._plain_left = 0
        self._burst = _FIRST_BURST
        self._probing = False
        self._report = AcceptanceReport()

    def draft_tokens(self, most: int) -> int:
        """The best length by what is known; lengths not yet timed come first."""
        most = most if self._limit is None else min(self._limit, most)
        for n in (most, 0, 1, (most + 1) // 2):
            if self._seen.get(n, 0) < _SKIP + _CALIBRATION:
                return n
        if self._plain_left > 0:
            self._plain_left -= 1
            return 0
        best = self._best(most, self._survival(most))
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
        average = self._survival(wanted)
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
        if math.isfinite(seconds) and seconds > 0:
            self._seen[offered] = self._seen.get(offered, 0) + 1
            if self._seen[offered] > _SKIP:
                self._times.setdefault(offered, deque(maxlen=_WINDOW)).append(seconds)
        if offered == 0:
            return
        while len(self._offered) < offered:
            self._offered.append(_PRIOR[0])
            self._accepted.append(_PRIOR[0] * _PRIOR[1])
        decay = _PROBE_DECAY if self._probing else _DECAY
        if self._probing and accepted > sum(self._survival(offered)):
            self._plain_left, self._burst = 0, _FIRST_BURST  # better than thought: probe again now
        for i in range(min(accepted + 1, offered)):  # a later token was never judged
            self._offered[i] = self._offered[i] * decay + 1
            self._accepted[i] = self._accepted[i] * decay + (i < accepted)
        self._report.observe(offered, accepted)

    def _survival(self, most: int) -> list[float]:
        """P(the first i draft tokens are accepted), i = 1 .. most."""
        out, alive = [], 1.0
        for i in range(most):
            known = i < len(self._offered)
            alive *= self._accepted[i] / self._offered[i] if known else _PRIOR[1]
            out.append(alive)
        return out

    def seconds(self, most: int) -> list[float]:
        """Times of 0 .. most draft tokens: medians, monotone, interpolated; empty if unknown."""
        known = sorted((n, median(t)) for n, t in self._times.items() if t)
        if not known or known[0][0] != 0:
            return []
        floor = 0.0
        points = []
        for n, t in known:
            floor = max(floor, t)
            points.append((n, floor))
        out = []
        for n in range(most + 1):
            below = max((p for p in points if p[0] <= n), key=lambda p: p[0])
            above = min((p for p in points if p[0] >= n), key=lambda p: p[0], default=None)
            if above is None:  # beyond what was run: as steep as between the two longest
                first = points[-2] if len(points) > 1 else (0, 0.0)
                slope = (below[1] - first[1]) / max(1, below[0] - first[0])
                out.append(below[1] + slope * (n - below[0]))
            elif above[0] == below[0]:
                out.append(below[1])
            else:
                share = (n - below[0]) / (above[0] - below[0])
                out.append(below[1] + share * (above[1] - below[1]))
        return out

    def _best(self, most: int, survival: list[float]) -> int:
        times = self.seconds(most)
        if not times:
            return most
        expected, best, best_rate = 1.0, 0, _MARGIN / times[0]
        for n in range(1, most + 1):
            expected += survival[n - 1]
            if expected / times[n] > best_rate:
                best, best_rate = n, expected / times[n]
        return best
