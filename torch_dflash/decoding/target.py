"""What a target is: tokens in, logits and target_hidden out, rollback of what was rejected."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from ..nn import Vocabulary

__all__ = ["Target", "Verification"]


class Verification(NamedTuple):
    """What one forward pass over an anchor and its proposal gives.

    Attributes:
        logits: float32 ``[rows, vocabulary]``; row i is the distribution of the token after row i.
        target_hidden: float32 ``[rows, captured layers * hidden]``, maybe without columns.
    """

    logits: Tensor
    target_hidden: Tensor


class Target(Protocol):
    """A model that verifies proposals; it keeps the state of one sequence."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Embedding and head, shared with drafters."""

    @property
    def length(self) -> int:
        """Committed tokens."""

    @property
    def max_rows(self) -> int:
        """Most rows of one verification."""

    def capture(self, layer_ids: Sequence[int]) -> None:
        """Choose the layers whose outputs (before the final norm) make up target_hidden."""

    def reset(self) -> None:
        """Forget the sequence."""

    def prefill(self, tokens: Tensor, sink: Callable[[Tensor], None] | None = None) -> Tensor:
        """Append and commit tokens.

        Args:
            tokens: int64 ``[n]``, n >= 1.
            sink: called with the target_hidden rows of every chunk, in order.

        Returns:
            logits of the last token, float32 ``[1, vocabulary]``.
        """

    def verify(self, tokens: Tensor) -> Verification:
        """Run the anchor and draft tokens behind the committed ones, committing none of them.

        Args:
            tokens: int64 ``[rows]``, ``1 <= rows <= max_rows``.
        """

    def commit(self, rows: int) -> None:
        """Keep the first ``rows`` rows of the last verification; the others never happened."""
