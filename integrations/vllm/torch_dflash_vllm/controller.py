"""How many draft tokens the next step of a batch gets: measured step times against acceptance."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from torch_dflash.policies.model import Acceptance, StepTimes, best_draft_tokens
from torch_dflash.policies.report import AcceptanceReport

__all__ = ["Controller", "tiers"]

_log = logging.getLogger("vllm.torch_dflash")

_PATIENCE: Final = 24  # decisions spent on timing one length, of which 4 steps have to be regular
_RETRY: Final = 512  # decisions until a batch size that could not be timed is tried again
_PROBE: Final = 2  # decisions of a probe: the second of two equal ones can be timed
_FIRST_BURST, _LONGEST_BURST = 32, 512  # plain steps between two probes
_REFRESH: Final = 256  # drafted steps after which plain ones are timed again
_SETTLED: Final = 8  # rows: with so many, the evidence of one probe is enough as it is
_LOG_EVERY: Final = 10.0  # seconds, as vLLM's own lines


def tiers(most: int) -> list[int]:
    """The lengths to choose among: 0, powers of two, and all.

    A GPU captures a graph for each, so they are few.

    >>> tiers(7), tiers(8), tiers(1)
    ([0, 1, 2, 4, 7], [0, 1, 2, 4, 8], [0, 1])
    """
    return sorted({0, most, *(1 << i for i in range(most.bit_length()) if 1 << i < most)})


class _Arm:
    """The decisions of one range of batch sizes."""

    def __init__(self, lengths: Sequence[int]) -> None:
        most = lengths[-1]
        self.lengths = lengths
        self.times = StepTimes()
        self.calibrated = [most, 0, 1, min(lengths, key=lambda n: abs(2 * n - most))]
        self.spent: Counter[int] = Counter()
        self.retry = 0
        self.plain_left = 0
        self.burst = _FIRST_BURST
        self.probe: tuple[int, int] = (0, 0)  # length, decisions left
        self.drafted = 0  # decisions since the last plain one
        self.news = False  # drafts were judged since the last look

    def choose(self, acceptance: Acceptance) -> int:
        chosen = self._choose(acceptance)
        self.drafted = self.drafted + 1 if chosen else 0
        return chosen

    def _choose(self, acceptance: Acceptance) -> int:
        most = self.lengths[-1]
        if self.retry > 0:
            self.retry -= 1
            return most
        untimed = self.times.uncalibrated(self.calibrated)
        if untimed is not None:
            self.spent[untimed] += 1
            if self.spent[untimed] <= _PATIENCE:
                return untimed
            # Steps of this batch size are never regular: prompts come in all the time, or drafts
            # are cut. Guessing would be worse than what vLLM does by itself.
            self.spent.clear()
            self.retry = _RETRY
            return most
        length, left = self.probe
        if left > 0:
            self.probe = (length, left - 1)
            return length
        if self.plain_left > 0:
            self.plain_left -= 1
            return 0
        best = best_draft_tokens(acceptance.survival(most), self.times.seconds(most), self.lengths)
        if best == 0:
            # The probe drafts now; what it finds is looked at when it has been verified.
            self.probe = (self.calibrated[-1], _PROBE - 1)
            self.plain_left = self.burst
            self.burst = min(2 * self.burst, _LONGEST_BURST)
            return self.calibrated[-1]
        if self.drafted >= _REFRESH:
            self.probe = (0, _PROBE - 1)
            return 0
        self.burst = _FIRST_BURST
        return best


class Controller:
    """Chooses the draft tokens of every step, and learns from what became of them.

    Acceptance is one for all requests; step times are kept by batch size, in powers of two.

    Args:
        lengths: what may be chosen, ascending, 0 first.

    Attributes:
        rows: verified rows by their number of draft tokens since the last :meth:`take_plain`.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        if not lengths or lengths[0] != 0 or len(lengths) < 2 or sorted({*lengths}) != [*lengths]:
            raise ValueError(f"lengths must ascend from 0, got {[*lengths]}")
        self._lengths = [*lengths]
        self._arms: dict[int, _Arm] = {}
        self._acceptance = Acceptance()
        self._report = AcceptanceReport()
        self._plain_rows = 0
        self._since_log: Counter[int] = Counter()
        self._accepted_since_log = [0, 0]
        self._logged = time.monotonic()

    def _arm(self, batch: int) -> _Arm:
        return self._arms.setdefault(batch.bit_length(), _Arm(self._lengths))

    def __getitem__(self, batch: int) -> int:
        """Draft tokens for the next step of ``batch`` requests; vLLM asks in this form."""
        chosen = self._arm(batch).choose(self._acceptance)
        self._since_log[chosen] += 1
        return chosen

    def observe(self, batch: int, offered: int, accepted: int) -> None:
        """One row that was verified: draft tokens that were judged, and accepted ones."""
        if offered <= 0:
            return
        arm = self._arm(batch)
        arm.news = True
        self._acceptance.observe(offered, accepted, arm.plain_left > 0 and batch < _SETTLED)
        self._report.observe(offered, accepted)
        self._accepted_since_log[0] += accepted
        self._accepted_since_log[1] += offered

    def observe_plain(self, rows: int) -> None:
        """Rows of a step that had no draft tokens."""
        self._plain_rows += rows

    def take_plain(self) -> int:
        """Rows without draft tokens since the last call."""
        rows, self._plain_rows = self._plain_rows, 0
        return rows

    def time(self, batch: int, draft_tokens: int, seconds: float) -> None:
        """A regular step: every row verified and then drafted ``draft_tokens`` tokens."""
        self._arm(batch).times.observe(draft_tokens, seconds)

    def line(self) -> str | None:
        """What was decided lately, for the log; None if it is not time yet."""
        now = time.monotonic()
        steps = sum(self._since_log.values())
        if now - self._logged < _LOG_EVERY or not steps:
            return None
        self._logged = now
        shares = ", ".join(
            f"{n}: {100 * count / steps:.0f} %" for n, count in sorted(self._since_log.items())
        )
        accepted, offered = self._accepted_since_log
        self._since_log.clear()
        self._accepted_since_log = [0, 0]
        judged = f", accepted {100 * accepted / offered:.0f} % of {offered}" if offered else ""
        times = [
            f"{'/'.join(f'{1000 * arm.times.seconds(n)[n]:.1f}' for n in arm.lengths)} ms at "
            f"batches of {1 << (size - 1)}..{(1 << size) - 1}"
            for size, arm in sorted(self._arms.items())
            if arm.times.seconds(0)
        ]
        measured = f"; steps of {'/'.join(map(str, self._lengths))}: {'; '.join(times)}"
        return f"adaptive speculation: draft tokens per step {shares} of {steps} steps{judged}" + (
            measured if times else ""
        )
