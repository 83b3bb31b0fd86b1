"""Norm, rotation and storage of queries, keys and values."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["qk_norm_rope_store"]


def qk_norm_rope_store(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    plus_one: bool,
    positions: Tensor,
    inv_freq: Tensor,
    attention_scaling: float,
    sections: Sequence[int],
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    r"""Normalise and rotate q and k per head, and write k and v into the cache.

    .. math::
        \hat x = x \, (\tfrac1{d} \textstyle\sum x^2 + \epsilon)^{-1/2} \, w, \quad
        (y_i, y_{i+f}) = (\hat x_i c - \hat x_{i+f} s,\; \hat x_{i+f} c + \hat x_i s)

    with ``c, s = attention_scaling * (cos, sin)(position * inv_freq[i])`` for the first
    ``2 f`` dims of a head, ``f = len(inv_freq)``; the other dims only take the norm.

    Args:
        q: queries ``[rows, heads, head_dim]``, float32, the first two strides free; None when only
            keys and values are to be stored.
        k: keys ``[rows, kv_heads, head_dim]``, float32, the first two strides free.
        v: values, like ``k``; neither normalised nor rotated.
        q_weight: norm weight ``[head_dim]``, float32, or None for no norm of q.
        k_weight: the same for k.
        eps: added to the mean square.
        plus_one: the norm multiplies by ``1 + weight``.
        positions: int64 ``[rows]``, or ``[3, rows]`` (temporal, height, width) with ``sections``;
            0 to 2^21 - 1.
        inv_freq: float32 ``[frequencies]``, at most ``head_dim / 2``.
        attention_scaling: factor of sin and cos (YaRN), 1 for none.
        sections: empty, or the M-RoPE sections ``[temporal, height, width]`` (a fourth must be 0):
            frequency ``i`` turns with the height if ``i % 3 == 1`` and ``i < 3 * height``, with the
            width if ``i % 3 == 2`` and ``i < 3 * width``, otherwise with the temporal position.
        slots: int64 ``[rows]``, flat row ``page * page_size + offset`` of the cache; negative:
            the row is not stored.
        k_cache: ``[pages, page_size, kv_heads, head_dim]``, float32, float16 or bfloat16; written.
        v_cache: like ``k_cache``; written.

    Returns:
        float32 ``[rows, heads, head_dim]``, the queries after norm and rotation; ``[0]`` without q.

    Raises:
        RuntimeError: a shape, dtype, device or layout above does not hold; on the CPU also a
            position or a slot outside its range.

    Source: RoFormer (arXiv:2104.09864), halves layout; interleaved M-RoPE of Qwen3.5.
    Formula: ``csrc/core/rope.h``. Backends: CPU, CUDA. Not differentiable.

    >>> cache = torch.zeros(1, 4, 1, 2)
    >>> x = torch.tensor([[[3.0, 4.0]]])
    >>> y = qk_norm_rope_store(
    ...     x, x, x, None, None, 1e-6, False, torch.tensor([0]), torch.ones(1), 1.0, [],
    ...     torch.tensor([2]), cache, cache.clone(),
    ... )
    >>> y.tolist(), cache[0, 2].tolist()
    ([[[3.0, 4.0]]], [[3.0, 4.0]])
    """
    return torch.ops.dflash.qk_norm_rope_store.default(
        q,
        k,
        v,
        q_weight,
        k_weight,
        eps,
        plus_one,
        positions,
        inv_freq,
        attention_scaling,
        sections,
        slots,
        k_cache,
        v_cache,
    )


@torch.library.register_fake("dflash::qk_norm_rope_store")
def _(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    plus_one: bool,
    positions: Tensor,
    inv_freq: Tensor,
    attention_scaling: float,
    sections: Sequence[int],
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    return k.new_empty((0,) if q is None else q.shape, dtype=torch.float32)
