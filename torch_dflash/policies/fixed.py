"""The same number of draft tokens in every step."""

from ..decoding.proposal import Proposal
from .base import check_draft_tokens
from .report import AcceptanceReport

__all__ = ["FixedPolicy"]


class FixedPolicy:
    """Verify all that is drafted, up to a limit.

    Args:
        draft_tokens: the limit; None takes the drafter's full block.

    Raises:
        ValueError: the limit is not a positive integer.
    """

    def __init__(self, draft_tokens: int | None = None) -> None:
        self.limit = check_draft_tokens(draft_tokens)
        self._report = AcceptanceReport()

    def draft_tokens(self, most: int) -> int:
        """The limit, or all."""
        return most if self.limit is None else min(self.limit, most)

    def select(self, proposal: Proposal, wanted: int) -> int:
        """All that was wanted."""
        return min(wanted, proposal.tokens.shape[1])

    def observe(self, offered: int, accepted: int, seconds: float) -> None:
        """Only watched for a drafter that never pays."""
        self._report.observe(offered, accepted)
