"""Attention over a paged KV cache, in float64, one query at a time."""

import torch
from torch import Tensor

__all__ = ["block_attention", "visible"]


def visible(query: int, key: int, window: int, causal: bool) -> bool:
    """Whether the query at one position may see the key at another."""
    if causal and key > query:
        return False
    if window > 0 and query - key >= window:
        return False
    return not (window > 0 and not causal and key - query >= window)


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
) -> Tensor:
    """Softmax attention of every row over its sequence's keys.

    Args:
        q: ``[rows, heads, head_dim]``.
        k_cache: ``[pages, page_size, kv_heads, head_dim]``, any float dtype.
        v_cache: like ``k_cache``.
        page_table: ``[sequences, pages of one]``.
        lengths: ``[sequences]``.
        cu_seqlens: ``[sequences + 1]``.
        scale: factor of the scores.
        window: 0 for none.
        causal: whether rows see only keys up to their own position.
        sinks: ``[heads]`` or None.
        gate: ``[rows, heads, head_dim]`` or None.
        value_scale: factor of the values.

    Returns:
        float64 ``[rows, heads * head_dim]``.
    """
    heads, page_size, group = q.shape[1], k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    out = torch.zeros(q.shape, dtype=torch.float64)
    starts = cu_seqlens.tolist()
    for s, length in enumerate(lengths.tolist()):
        rows = starts[s + 1] - starts[s]
        for i in range(rows):
            position = length - rows + i
            seen = [p for p in range(length) if visible(position, p, window, causal)]
            if not seen:
                continue
            at = torch.tensor(seen)
            page, offset = page_table[s].cpu().long()[at // page_size], at % page_size
            keys, values = (c.cpu()[page, offset].double() for c in (k_cache, v_cache))
            for h in range(heads):
                query = q[starts[s] + i, h].cpu().double()
                scores = scale * (keys[:, h // group] @ query)
                sink = [] if sinks is None else [sinks[h].cpu().double()[None]]
                p = torch.softmax(torch.cat([scores, *sink]), 0)[: len(seen)]
                out[starts[s] + i, h] = p @ values[:, h // group]
    out *= value_scale
    if gate is not None:
        out *= torch.sigmoid(gate.cpu().double())
    return out.flatten(1).to(q.device)
