"""What a policy decides, and what it gets to see."""

from typing import Protocol

from ..decoding.proposal import Proposal

__all__ = ["Policy", "check_draft_tokens"]


class Policy(Protocol):
    """Chooses the number of draft tokens of every step."""

    def draft_tokens(self, most: int) -> int:
        """Before drafting: how many draft tokens the next step may verify.

        Args:
            most: what drafter, target and the length limit allow; at least 1.

        Returns:
            ``0 .. most``; 0 is a plain step, and nothing is drafted.
        """

    def select(self, proposal: Proposal, wanted: int) -> int:
        """After drafting: how many tokens to verify, ``0 .. wanted``.

        Whether token i is among them may depend on the confidences up to its own position, never on
        token i, what follows it or q: a draft token that is dropped because of its own value makes
        sampled output differ from the target's distribution.
        """

    def observe(self, offered: int, accepted: int, seconds: float) -> None:
        """Take note of a finished step.

        Args:
            offered: draft tokens verified; 0 for a plain step.
            accepted: how many of them were accepted.
            seconds: of the whole step: drafting, verification and commit.
        """


def check_draft_tokens(value: int | None) -> int | None:
    """Validate an upper limit of draft tokens; None is no limit.

    Raises:
        ValueError: it is not a positive integer.
    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"draft_tokens must be an integer >= 1 or None, got {value!r}")
    return value
