"""How the next token is chosen from the target's distribution."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["GREEDY", "SamplingParams", "sampling_rows"]


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request; the defaults are greedy decoding.

    Attributes:
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set whose probability reaches this; 1 keeps all.
        seed: of the counter-based random numbers; the same seed gives the same text.

    Raises:
        ValueError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be finite and >= 0, got {self.temperature}")
        if not _whole(self.top_k) or self.top_k < 0:
            raise ValueError(f"top_k must be an integer >= 0 (0 keeps all), got {self.top_k!r}")
        if self.top_k >= 1 << 63:
            raise ValueError(f"top_k must be below 2^63, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not _whole(self.seed) or not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed must be an integer in [0, 2^63), got {self.seed!r}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


GREEDY = SamplingParams()


def sampling_rows(
    sampling: SamplingParams, rows: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """``(temperature, top_k, top_p)`` of one request for every row of a call."""
    return (
        torch.full((rows,), sampling.temperature, dtype=torch.float32, device=device),
        torch.full((rows,), sampling.top_k, dtype=torch.int64, device=device),
        torch.full((rows,), sampling.top_p, dtype=torch.float32, device=device),
    )
