"""Attention of a block of rows over a KV cache."""

import torch
from torch import Tensor

from .act import new_activations

__all__ = ["block_attention"]


def block_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int,
    causal: bool,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
    value_scale: float = 1.0,
    act_mode: int = 0,
) -> Tensor:
    r"""Attend from every row of every sequence to the keys of its sequence.

    .. math::
        o = \frac{\sum_j e^{s_j} v_j}{\sum_j e^{s_j} + e^{\text{sink}}} \cdot
            \text{value\_scale} \cdot \sigma(\text{gate}), \quad s_j = \text{scale} \; q \cdot k_j

    Row ``i`` of the ``n`` rows of a sequence stands at position ``length - n + i``; its keys are
    those of its own block too, read back as they were stored. A key at position ``k`` is visible to
    a query at ``p`` iff ``k <= p`` (causal) and ``p - k < window``; without causality a window also
    wants ``k - p < window``. Other keys are never read into the result, whatever they hold.

    A row's result depends on its own inputs, its position and the visible keys only: not on other
    rows, pages, capacity or threads.

    Args:
        q: float32 ``[rows, heads, head_dim]``, the rows of all sequences back to back;
            ``head_dim <= 1024``, ``heads`` a multiple of ``kv_heads``.
        k_cache: ``[pages, page_size, kv_heads, head_dim]``, float32, float16 or bfloat16.
        v_cache: like ``k_cache``.
        page_table: int32 ``[sequences, pages of one]``; page ``p // page_size`` of a sequence holds
            position ``p``. Entries of pages that no row sees are not looked at.
        lengths: int32 ``[sequences]``, keys of a sequence, its own rows included (0: an empty one,
            whose rows are zeros).
        cu_seqlens: int32 ``[sequences + 1]``, where the rows of a sequence begin.
        scale: factor of the scores, usually ``head_dim ** -0.5``.
        window: sliding window that counts the query itself; 0 for none.
        causal: whether rows see only keys up to their own position.
        sinks: float32 ``[heads]``, one more logit in the softmax denominator of each head.
        gate: float32 ``[rows, heads, head_dim]``, the first two strides free; the output is
            multiplied by its sigmoid.
        value_scale: factor of the values.
        act_mode: 0 for float32, 1 or 2 for the packed activations of :func:`quant_act`.

    Returns:
        float32 ``[rows, heads * head_dim]``, or packed as by :func:`quant_act`. A row that
        sees no key is zero.

    Raises:
        RuntimeError: a shape, dtype, device or layout above does not hold; on the CPU also a
            length, an offset or a page outside its range.

    Order of the sums: ``csrc/core/attention.h``; mask: ``csrc/core/mask.h``. Backends: CPU, CUDA.
    Not differentiable.

    >>> q = torch.zeros(1, 1, 16)
    >>> kv = torch.arange(4.0).view(1, 4, 1, 1).expand(1, 4, 1, 16).contiguous()
    >>> i32 = lambda *x: torch.tensor(x, dtype=torch.int32)
    >>> block_attention(q, kv, kv, i32(0).view(1, 1), i32(3), i32(0, 1), 0.25, 0, True)[0, 0]
    tensor(1.)
    """
    return torch.ops.dflash.block_attention.default(
        q,
        k_cache,
        v_cache,
        page_table,
        lengths,
        cu_seqlens,
        scale,
        window,
        causal,
        sinks,
        gate,
        value_scale,
        act_mode,
    )


@torch.library.register_fake("dflash::block_attention")
def _(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int,
    causal: bool,
    sinks: Tensor | None = None,
    gate: Tensor | None = None,
    value_scale: float = 1.0,
    act_mode: int = 0,
) -> Tensor:
    rows, heads, head_dim = q.shape
    return new_activations(q, rows, heads * head_dim, act_mode)
