"""Rotary embedding: frequencies, magnitude, and the row order of q and k."""

import math
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor

__all__ = ["RopeConfig", "RopeType", "magnitude", "neox_order"]

RopeType = Literal["default", "linear", "yarn"]


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding, used for q and k, of the context and of the block alike.

    Attributes:
        theta: base of the frequencies.
        rotary_dim: how many leading dimensions of a head rotate; even.
        type: ``default``, ``linear`` or ``yarn``.
        factor: context extension of ``linear`` and ``yarn``.
        original_max_position_embeddings: context before the extension; ``yarn`` only.
        beta_fast, beta_slow: rotations at which the ``yarn`` ramp begins and ends.
        attention_factor: magnitude of cos and sin; None: computed from the fields below.
        mscale, mscale_all_dim: if both are set, the magnitude is the ratio of theirs.
        truncate: whether the ends of the ramp are rounded outwards to whole dimensions.
        freq_factors: one divisor per frequency (a Llama 3 GGUF's ``rope_freqs.weight``), or None.

    >>> rope = RopeConfig(theta=1e7, rotary_dim=128, type="yarn", factor=32.0,
    ...                   original_max_position_embeddings=8192)
    >>> round(rope.attention_scaling, 6), rope.inv_freq()[14].item()
    (1.346574, 0.029427271336317062)
    """

    theta: float
    rotary_dim: int
    type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    freq_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Check what would otherwise surface as NaN frequencies.

        Raises:
            ValueError: a field is out of range.
        """
        if not (math.isfinite(self.theta) and self.theta > 1):
            raise ValueError(f"RopeConfig: theta must be above 1, got {self.theta}")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(
                f"RopeConfig: rotary_dim must be even and positive, got {self.rotary_dim}"
            )
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"RopeConfig: factor must be at least 1, got {self.factor}")
        original = self.original_max_position_embeddings
        if self.type == "yarn" and (original is None or original < 1):
            raise ValueError(
                "RopeConfig: original_max_position_embeddings must be at least 1 for yarn, "
                f"got {original}"
            )
        if not self.beta_fast >= self.beta_slow > 0:
            raise ValueError(
                "RopeConfig: beta_fast must be at least beta_slow, and both above 0, got "
                f"{self.beta_fast} and {self.beta_slow}"
            )
        factors = self.freq_factors
        if factors is not None and (
            len(factors) != self.rotary_dim // 2
            or not all(math.isfinite(f) and f > 0 for f in factors)
        ):
            raise ValueError(
                f"RopeConfig: freq_factors must be {self.rotary_dim // 2} numbers above 0, got "
                f"{len(factors)}, smallest {min(factors, default=math.nan)}"
            )

    def with_freq_factors(self, factors: Tensor) -> "RopeConfig":
        """The same rope with every frequency divided by its factor ``[rotary_dim / 2]``."""
        return replace(self, freq_factors=tuple(factors.to(torch.float64).tolist()))

    def inv_freq(self) -> Tensor:
        """Angle per position of every pair: float32 ``[rotary_dim / 2]``, rounded from float64."""
        k = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64, device="cpu")
        inv = self.theta ** (-k / self.rotary_dim)
        if self.type == "linear":
            inv = inv / self.factor
        elif self.type == "yarn":
            low, high = self._ramp()
            ramp = ((k / 2 - low) / (high - low)).clamp(0, 1)
            inv = inv / self.factor * ramp + inv * (1 - ramp)
        if self.freq_factors is not None:
            inv = inv / torch.tensor(self.freq_factors, dtype=torch.float64, device="cpu")
        return inv.to(torch.float32)

    @property
    def attention_scaling(self) -> float:
        """Magnitude of cos and sin; 1 unless the rope is ``yarn``."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return magnitude(self.factor, self.mscale) / magnitude(self.factor, self.mscale_all_dim)
        return magnitude(self.factor)

    def _ramp(self) -> tuple[float, float]:
        d, original = self.rotary_dim, cast(int, self.original_max_position_embeddings)

        def dimension(rotations: float) -> float:
            # a difference of logarithms: no quotient that could overflow
            turns = math.log(original) - math.log(rotations) - math.log(2 * math.pi)
            return d * turns / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, d - 1)
        return low, high + (0.001 if low == high else 0.0)


def magnitude(factor: float, mscale: float = 1.0) -> float:
    """YaRN's magnitude of cos and sin for a context extension ``factor``.

    >>> round(magnitude(32.0), 5)
    1.34657
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def neox_order(num_heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """Row order that turns interleaved rope (pairs 2k, 2k+1) into NeoX rope (k, k + rotary_dim/2).

    Taking the rows of q and k (and their norms and biases) in this order leaves every dot product
    between them as it was. GGUF files of ``llama`` hold their rows interleaved, so this is also the
    exact inverse of what their converter did.

    Args:
        num_heads: heads in the tensor; 1 for a q or k norm.
        head_dim: rows per head.
        rotary_dim: how many of them rotate; the rest keep their place.

    Returns:
        int64 ``[num_heads * head_dim]``: row ``i`` of the result is row ``order[i]`` of the file.

    >>> neox_order(2, 6, 4).tolist()
    [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    """
    head = torch.arange(head_dim, device="cpu")
    head[:rotary_dim] = head[:rotary_dim].view(-1, 2).t().reshape(-1)
    return (torch.arange(num_heads, device="cpu")[:, None] * head_dim + head).reshape(-1)
