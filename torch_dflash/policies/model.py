"""What a step is expected to emit, and what it costs; shared by policies that weigh the two."""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

__all__ = ["Acceptance", "StepTimes", "best_draft_tokens"]

_WINDOW = 15  # step times kept per length
_SKIP = 1  # first step of a length: allocations, cold code
_CALIBRATION = 3  # measured steps of each calibrated length before its time is believed
_DECAY = 0.98  # of the acceptance counts, per drafted step: about the last 50 steps count
_PROBE_DECAY = 0.7  # the same for a probe: it is rare, and has to count
_PRIOR = (4.0, 0.7)  # weight and value of the acceptance assumed at every position before evidence
_MARGIN = 1.04  # a length must promise this much more than plain decoding
_DRIFT = 5, 1.1  # steps that agree, and by what factor, before all times are taken to have changed


def _typical(times: Sequence[float]) -> float:
    """The lower quartile: what others do on the machine only ever adds time."""
    return sorted(times)[(len(times) - 1) // 4]


class Acceptance:
    """Acceptance per position, among tokens really offered; old steps fade."""

    def __init__(self) -> None:
        self._offered: list[float] = []
        self._accepted: list[float] = []

    def observe(self, offered: int, accepted: int, probing: bool = False) -> None:
        """Take note of one drafted step; a probe counts more, since it is rare."""
        while len(self._offered) < offered:
            self._offered.append(_PRIOR[0])
            self._accepted.append(_PRIOR[0] * _PRIOR[1])
        decay = _PROBE_DECAY if probing else _DECAY
        for i in range(min(accepted + 1, offered)):  # a later token was never judged
            self._offered[i] = self._offered[i] * decay + 1
            self._accepted[i] = self._accepted[i] * decay + (i < accepted)

    def survival(self, most: int) -> list[float]:
        """P(the first i draft tokens are accepted), i = 1 .. most."""
        out, alive = [], 1.0
        for i in range(most):
            known = i < len(self._offered)
            alive *= self._accepted[i] / self._offered[i] if known else _PRIOR[1]
            out.append(alive)
        return out


class StepTimes:
    """Seconds of a step by its number of draft tokens.

    A machine that is slower for a while is so for every length: when the latest steps agree that
    they take longer (or less long) than what was known of their lengths, all times change by that.
    """

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._seen: dict[int, int] = {}
        self._drift: deque[float] = deque(maxlen=_DRIFT[0])

    def observe(self, draft_tokens: int, seconds: float) -> None:
        """Take note of a step; times that cannot be are ignored."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        self._seen[draft_tokens] = self._seen.get(draft_tokens, 0) + 1
        if self._seen[draft_tokens] <= _SKIP:
            return
        times = self._times.setdefault(draft_tokens, deque(maxlen=_WINDOW))
        if len(times) >= _CALIBRATION:
            self._drift.append(seconds / _typical(times))
        times.append(seconds)
        full = len(self._drift) == self._drift.maxlen
        if full and (min(self._drift) > _DRIFT[1] or max(self._drift) < 1 / _DRIFT[1]):
            self._rescale(median(self._drift))

    def _rescale(self, factor: float) -> None:
        self._drift.clear()
        for n, times in self._times.items():
            now = _typical(times) * factor  # most of them are from before
            self._times[n] = deque([now] * _CALIBRATION, maxlen=_WINDOW)

    def uncalibrated(self, lengths: Sequence[int]) -> int | None:
        """The first of these lengths that was not timed often enough; None: all were."""
        for n in lengths:
            if self._seen.get(n, 0) < _SKIP + _CALIBRATION:
                return n
        return None

    def seconds(self, most: int) -> list[float]:
        """Times of 0 .. most draft tokens: quartiles, monotone, interpolated; empty if unknown."""
        known = sorted((n, _typical(t)) for n, t in self._times.items() if t)
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


def best_draft_tokens(
    survival: Sequence[float], times: Sequence[float], lengths: Sequence[int] | None = None
) -> int:
    """The number of draft tokens that promises most tokens per second; 0 is plain decoding.

    Args:
        survival: P(the first i draft tokens are accepted), i = 1 ..
        times: seconds of a step with 0 .. draft tokens, one longer than ``survival``.
        lengths: what may be chosen; None is all.

    >>> best_draft_tokens([0.9, 0.8, 0.1], [1.0, 1.2, 1.4, 1.6])
    2
    >>> best_draft_tokens([0.9, 0.8, 0.1], [1.0, 1.2, 1.4, 1.6], [0, 1, 3])
    3
    >>> best_draft_tokens([0.1], [1.0, 1.2])
    0
    """
    expected, best, best_rate = 1.0, 0, _MARGIN / times[0]
    for n in range(1, len(survival) + 1):
        expected += survival[n - 1]
        if expected / times[n] > best_rate and (lengths is None or n in lengths):
            best, best_rate = n, expected / times[n]
    return best
