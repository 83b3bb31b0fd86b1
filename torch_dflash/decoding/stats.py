"""What a generation did, in numbers; the same definitions in the CLI, the API and vLLM."""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

__all__ = ["GenerationStats"]


@dataclass
class GenerationStats:
    """Counts and times of one generation.

    Attributes:
        prompt_tokens: tokens of the prompt.
        new_tokens: tokens generated.
        steps: forward passes of the target after the prompt.
        drafted_steps: those that verified at least one draft token.
        offered: draft tokens verified (after the policy cut the proposal).
        accepted: draft tokens accepted.
        emitted_lengths: tokens emitted by each step, cut at a stop and at the length limit.
        offered_at, accepted_at: the same by position in the block, 0 the first draft token.
        prefill_seconds, decode_seconds: wall-clock; recording a pass, once for every number of
            rows, counts as neither.
        step_seconds: target rows -> seconds of the steps with that many rows.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    drafted_steps: int = 0
    offered: int = 0
    accepted: int = 0
    emitted_lengths: list[int] = field(default_factory=list)
    offered_at: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    accepted_at: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    step_seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def record(self, offered: int, accepted: int, emitted: int, seconds: float) -> None:
        """Add one step."""
        self.steps += 1
        self.emitted_lengths.append(emitted)
        self.step_seconds[offered + 1].append(seconds)
        if offered:
            self.drafted_steps += 1
            self.offered += offered
            self.accepted += accepted
            for i in range(offered):
                self.offered_at[i] += 1
                self.accepted_at[i] += i < accepted

    @property
    def acceptance_rate(self) -> float:
        """Accepted over offered draft tokens; 0 if none was offered."""
        return self.accepted / self.offered if self.offered else 0.0

    @property
    def acceptance_length(self) -> float:
        """Tokens that a step emits on average: accepted draft tokens and the bonus token."""
        return sum(self.emitted_lengths) / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """New tokens over decoding time; the first token belongs to the prompt's pass."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "steps": self.steps,
            "drafted_steps": self.drafted_steps,
            "offered": self.offered,
            "accepted": self.accepted,
            "acceptance_rate": round(self.acceptance_rate, 4),
            "acceptance_length": round(self.acceptance_length, 4),
            "acceptance_at": [
                round(self.accepted_at[i] / n, 4) for i, n in sorted(self.offered_at.items())
            ],
            "prefill_seconds": round(self.prefill_seconds, 6),
            "decode_seconds": round(self.decode_seconds, 6),
            "tokens_per_second": round(self.tokens_per_second, 2),
        }
