"""Rotary embedding and the norm of queries and keys, in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["angles", "head_norm", "rotate"]


def head_norm(x: Tensor, weight: Tensor | None, eps: float, plus_one: bool) -> Tensor:
    """RMS norm over the last dimension; ``weight`` None leaves x alone.

    Args:
        x: ``[..., head_dim]``.
        weight: ``[head_dim]`` or None.
        eps: added to the mean square.
        plus_one: multiply by ``1 + weight``.

    Returns:
        float64, shaped like ``x``.
    """
    x = x.double()
    if weight is None:
        return x
    w = weight.double() + (1.0 if plus_one else 0.0)
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * w


def angles(positions: Tensor, inv_freq: Tensor, sections: Sequence[int]) -> Tensor:
    """Angle of every frequency for every row, the product rounded to float32 as engines do.

    Args:
        positions: int64 ``[rows]`` or ``[3, rows]`` (temporal, height, width).
        inv_freq: float32 ``[frequencies]``.
        sections: empty, or the interleaved M-RoPE sections.

    Returns:
        float64 ``[rows, frequencies]``.
    """
    axes = positions if positions.dim() == 2 else positions.expand(3, -1)
    every = (axes[..., None].float() * inv_freq.float()).double()
    out = every[0].clone()
    for axis in (1, 2) if sections else ():
        chosen = slice(axis, 3 * sections[axis], 3)
        out[:, chosen] = every[axis][:, chosen]
    return out


def rotate(x: Tensor, angle: Tensor, scaling: float) -> Tensor:
    """Rotate the first ``2 * frequencies`` dims of every head, halves layout.

    Args:
        x: ``[rows, heads, head_dim]``.
        angle: ``[rows, frequencies]``.
        scaling: factor of sin and cos.

    Returns:
        float64, shaped like ``x``.
    """
    half = angle.shape[-1]
    sine, cosine = (scaling * f(angle.double())[:, None] for f in (torch.sin, torch.cos))
    x = x.double()
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=-1)
