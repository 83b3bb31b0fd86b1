"""What a policy decides, and what it gets to see."""

from typing import TYPE_CHECKING, Protocol

from ..decoding.proposal import Proposal

if TYPE_CHECKING:
    from ..drafters.config import DrafterConfig

__all__ = ["Policy", "check_draft_tokens", "check_limit"]


class Policy(Protocol):
    """Chooses the number of draft tokens of every step.

    Attributes:
        limit: never more draft tokens than this; None: no limit of its own. A session refuses one
            beyond what its drafter's block holds.
    """

    limit: int | None

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


def check_limit(limit: int | None, config: "DrafterConfig", name: str) -> None:
    """Refuse a limit that a drafter's block does not reach: it would not be the one that holds.

    Args:
        limit: of a policy.
        config: of the drafter.
        name: of the limit, for the message.

    Raises:
        ValueError: it is more than the block holds.
    """
    most = config.max_draft_tokens
    if limit is not None and not 1 <= limit <= most:
        raise ValueError(
            f"{name} must be 1..{most}, what a block of this {config.kind} drafter holds, "
            f"got {limit}"
        )
