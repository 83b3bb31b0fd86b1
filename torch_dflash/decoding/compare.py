"""Plain against speculative decoding of the same prompt: the same tokens, and how much faster."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..drafters.base import Drafter
from ..policies.base import Policy
from .loop import Generation, Session
from .sampling import GREEDY, SamplingParams
from .stop import StopChecker
from .target import Target

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True)
class Comparison:
    """Best of several interleaved pairs.

    Attributes:
        identical: whether every run gave the same tokens (greedy decoding only promises that).
        plain_tok_s, spec_tok_s: tokens per second of the fastest run of each kind.
        speedup: their ratio.
        acceptance_length: tokens per step of the target.
        acceptance_rate: accepted over offered draft tokens.
        tokens: new tokens of one run.
    """

    identical: bool
    plain_tok_s: float
    spec_tok_s: float
    speedup: float
    acceptance_length: float
    acceptance_rate: float
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Rounded numbers for JSON."""
        return {k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(self).items()}


def compare(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    pairs: int = 5,
    sampling: SamplingParams = GREEDY,
    policy: Policy | None = None,
    stop_ids: Sequence[int] = (),
) -> Comparison:
    """Run plain and speculative decoding in turn, ``pairs`` times.

    Args:
        target: the model.
        drafter: for it.
        prompt: token ids.
        max_new_tokens: at least 2.
        pairs: interleaved pairs; the best of each kind counts.
        sampling: greedy by default.
        policy: kept from run to run, so that what it measured counts.
        stop_ids: tokens that end the text.

    Raises:
        ValueError: no pairs, or less than 2 new tokens: the first one takes no step.
    """
    if pairs < 1 or max_new_tokens < 2:
        raise ValueError(
            f"compare: pairs must be >= 1 and max_new_tokens >= 2, got {pairs} and {max_new_tokens}"
        )

    def run(with_drafter: bool) -> Generation:
        session = Session(target, drafter, policy) if with_drafter else Session(target)
        return session.generate(prompt, max_new_tokens, sampling, StopChecker(stop_ids))

    plain, speculative = [], []
    for _ in range(pairs):
        plain.append(run(False))
        speculative.append(run(True))
    best_plain = max(g.stats.tokens_per_second for g in plain)
    best = max(speculative, key=lambda g: g.stats.tokens_per_second)
    fastest = best.stats.tokens_per_second
    return Comparison(
        identical=all(g.tokens == plain[0].tokens for g in plain + speculative),
        plain_tok_s=best_plain,
        spec_tok_s=fastest,
        speedup=fastest / best_plain if best_plain else 0.0,
        acceptance_length=best.stats.acceptance_length,
        acceptance_rate=best.stats.acceptance_rate,
        tokens=len(best.tokens),
    )
