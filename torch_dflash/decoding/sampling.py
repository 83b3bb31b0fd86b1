"""How the next token is chosen from the target's distribution."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops

__all__ = ["GREEDY", "SamplingParams", "SamplingRows"]


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


class SamplingRows:
    """The sampling of one request for every row of a call, on the device.

    The tensors keep their addresses from request to request, so recorded passes can read them.

    Args:
        rows: most rows of a call.
        device: where the tensors live.
    """

    @torch.inference_mode(False)  # to be written from either mode
    def __init__(self, rows: int, device: torch.device) -> None:
        self.device = device
        self._sampling: SamplingParams | None = None
        self._temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self._top_p = torch.full((rows,), 1.0, dtype=torch.float32, device=device)
        self._seeds = torch.zeros(rows, dtype=torch.int64, device=device)

    def hold(self, sampling: SamplingParams) -> "SamplingRows":
        """Hold this request's values from here on."""
        if sampling != self._sampling:
            self._sampling = None  # an interrupt leaves nothing half written and believed
            self._temperature.fill_(sampling.temperature)
            self._top_k.fill_(sampling.top_k)
            self._top_p.fill_(sampling.top_p)
            self._seeds.fill_(sampling.seed)
            self._sampling = sampling
        return self

    def temperature(self, rows: int) -> Tensor:
        """float32 ``[rows]``."""
        return self._temperature[:rows]

    def probs(self, logits: Tensor) -> Tensor:
        """``[rows, vocabulary]`` logits -> probabilities."""
        rows = logits.shape[0]
        return ops.sampling_probs(
            logits, self._temperature[:rows], self._top_k[:rows], self._top_p[:rows]
        )

    def uniform(self, positions: Tensor, stream: int) -> Tensor:
        """Random numbers of these positions, float32 ``[rows]``."""
        return ops.uniform(self._seeds[: positions.shape[0]], positions, stream)
