"""As many draft tokens as the drafter itself believes in."""

import logging
import math

from ..decoding.proposal import Proposal
from .base import check_draft_tokens
from .report import AcceptanceReport

__all__ = ["ConfidencePolicy"]

_LOG = logging.getLogger("torch_dflash")


def _threshold(name: str, value: float) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and 0 <= value <= 1):
        raise ValueError(f"{name} must be a number in [0, 1], got {value!r}")
    return float(value)


class ConfidencePolicy:
    """Stop before the first token that is unlikely to be reached, or unlikely in itself.

    A token is offered or not by the confidences up to its own position alone. They depend on the
    tokens before it only, and so the choice cannot bias what is sampled.

    Args:
        survival: least probability that this token and all before it are accepted; 0 is off.
        confidence: least probability that this token is accepted if all before it were; 0 is off.
        draft_tokens: never more than this; None takes the drafter's full block.

    Raises:
        ValueError: a threshold outside [0, 1], or a limit that is not a positive integer.

    A proposal without scores, or with scores for a part of it only, is verified in full.
    """

    def __init__(
        self, survival: float = 0.35, confidence: float = 0.0, draft_tokens: int | None = None
    ) -> None:
        self._survival = _threshold("survival", survival)
        self._confidence = _threshold("confidence", confidence)
        self.limit = check_draft_tokens(draft_tokens)
        self._report = AcceptanceReport()
        self._told = False

    def draft_tokens(self, most: int) -> int:
        """The limit, or all: the scores come with the draft."""
        return most if self.limit is None else min(self.limit, most)

    def select(self, proposal: Proposal, wanted: int) -> int:
        """The tokens before the first doubtful one; 0 leaves a plain step."""
        wanted = min(wanted, proposal.tokens.shape[1])
        if proposal.confidence is None or proposal.confidence.shape[1] < wanted:
            if not self._told:
                self._told = True
                _LOG.warning(
                    "this drafter scores none or not all of its tokens: the confidence policy "
                    "verifies every one of them"
                )
            return wanted
        alive = 1.0
        for n, confidence in enumerate(proposal.confidence[0, :wanted].tolist()):
            alive *= confidence
            # the negated comparison also stops at NaN
            if not (alive >= self._survival and confidence >= self._confidence):
                return n
        return wanted

    def observe(self, offered: int, accepted: int, seconds: float) -> None:
        """Only watched for a drafter that never pays."""
        self._report.observe(offered, accepted)
