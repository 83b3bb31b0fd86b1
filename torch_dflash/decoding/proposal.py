"""What a drafter hands to the rest of a step."""

from dataclasses import dataclass, replace

from torch import Tensor

__all__ = ["Proposal"]


@dataclass(frozen=True)
class Proposal:
    """Draft tokens that a drafter offers after the anchor.

    Attributes:
        tokens: int64 ``[S, N]``, target ids.
        offered: int32 ``[S]``, how many of the N count.
        q: draft distribution that the tokens were drawn from, float32 ``[S, N, V]``, or
            ``[S, N, K]`` over ``q_ids``; None: the tokens were not drawn (greedy).
        q_ids: int64 ``[S, N, K]``, or None where q is dense.
        confidence: float32 ``[S, N]``, P(accepted | all before it accepted), or None.
        parents: int64 ``[S, N]``, row each token continues; None is a chain.
    """

    tokens: Tensor
    offered: Tensor
    q: Tensor | None = None
    q_ids: Tensor | None = None
    confidence: Tensor | None = None
    parents: Tensor | None = None

    def head(self, length: int) -> "Proposal":
        """The first ``length`` tokens of every sequence.

        Raises:
            ValueError: there are fewer.
        """
        if not 0 <= length <= self.tokens.shape[1]:
            raise ValueError(f"head: length must be 0..{self.tokens.shape[1]}, got {length}")
        if length == self.tokens.shape[1]:
            return self

        def cut(t: Tensor | None) -> Tensor | None:
            return None if t is None else t[:, :length]

        return replace(
            self,
            tokens=self.tokens[:, :length],
            offered=self.offered.clamp(max=length),
            q=cut(self.q),
            q_ids=cut(self.q_ids),
            confidence=cut(self.confidence),
            parents=cut(self.parents),
        )
