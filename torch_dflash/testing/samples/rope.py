"""Samples of qk_norm_rope_store; the oracle is torch_dflash.reference.rope."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...reference import rope
from .. import operator


def _oracle(
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
    angle = rope.angles(positions, inv_freq, sections)
    keys = rope.rotate(rope.head_norm(k, k_weight, eps, plus_one), angle, attention_scaling)
    stored = slots >= 0
    for cache, rows in ((k_cache, keys), (v_cache, v)):
        cache.flatten(0, 1)[slots[stored]] = rows[stored].to(cache.dtype)
    if q is None:
        return k.new_empty(0)
    return rope.rotate(rope.head_norm(q, q_weight, eps, plus_one), angle, attention_scaling).float()


@operator("qk_norm_rope_store", oracle=_oracle)
def qk_norm_rope_store(device: torch.device) -> Iterator[tuple[Any, ...]]:
    g = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device)

    for rows, heads, kv_heads, dim, half, norm, plus_one, sections, dtype in [
        (0, 2, 1, 16, 8, True, False, [], torch.float32),
        (1, 2, 1, 256, 32, True, True, [11, 11, 10], torch.float16),
        (7, 4, 2, 128, 64, True, False, [], torch.float32),
        (5, 3, 3, 40, 7, False, False, [], torch.bfloat16),
        (4, 0, 2, 64, 32, True, False, [], torch.float16),
    ]:
        axes = (3,) if sections else ()
        positions = torch.randint(0, 1000, (*axes, rows), generator=g).to(device)
        inv_freq = (1e4 ** (-torch.arange(half) / half)).to(device)
        cache = torch.zeros(3, 4, kv_heads, dim, dtype=dtype, device=device)
        # each slot once, and one row that is not stored
        slots = (torch.arange(rows) * 5 % 12 - (torch.arange(rows) == 1) * 20).to(device)
        weight = rand(dim) if norm else None
        yield (
            rand(rows, heads, dim) if heads else None,
            rand(rows, kv_heads, dim),
            rand(rows, kv_heads, dim),
            weight if heads else None,
            weight,
            1e-6,
            plus_one,
            positions,
            inv_freq,
            1.25,
            sections,
            slots,
            cache,
            cache.clone(),
        )
