"""Samples of block_attention; the oracle is torch_dflash.reference.attention."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...reference import attention
from .. import operator


def place(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    page_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    spare: int = 0,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Write dense ``[length, kv_heads, head_dim]`` sequences into shuffled pages; the rest is NaN.

    Returns k_cache, v_cache and page_table; every sequence has ``spare`` pages more than the
    longest needs.
    """
    pages_of_one = max(1, -(-max(map(len, keys), default=1) // page_size)) + spare
    pages = len(keys) * pages_of_one + 1
    order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(seed)) + 1
    table = order.view(len(keys), pages_of_one).to(torch.int32)
    caches = []
    for sequences in (keys, values):
        shape = sequences[0].shape[1:] if sequences else (1, 64)
        cache = torch.full((pages * page_size, *shape), float("nan"))
        for s, sequence in enumerate(sequences):
            at = torch.arange(len(sequence))
            cache[table[s].long()[at // page_size] * page_size + at % page_size] = sequence.float()
        caches.append(cache.view(pages, page_size, *shape).to(dtype))
    return caches[0], caches[1], table


def paged(
    device: torch.device,
    lengths: Sequence[int],
    rows: Sequence[int],
    *,
    heads: int = 2,
    kv_heads: int = 1,
    dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, ...]:
    """Random q, k_cache, v_cache, page_table, lengths, cu_seqlens; unused cache rows are NaN."""
    g = torch.Generator().manual_seed(seed)
    keys, values = ([torch.randn(n, kv_heads, dim, generator=g) for n in lengths] for _ in range(2))
    tensors = (
        torch.randn(sum(rows), heads, dim, generator=g),
        *place(keys, values, page_size, dtype=dtype, seed=seed),
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor([0, *rows]).cumsum(0).to(torch.int32),
    )
    return tuple(t.to(device) for t in tensors)


def _oracle(*args: Any) -> Tensor:
    return attention.block_attention(*args[:12]).float()


@operator("block_attention", oracle=_oracle)
def block_attention(device: torch.device) -> Iterator[tuple[Any, ...]]:
    g = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device)

    yield *paged(device, [], []), 0.125, 0, True
    yield *paged(device, [5, 0, 300], [1, 2, 3]), 0.125, 0, True
    yield *paged(device, [70], [4], heads=4, dim=128, page_size=300), 0.09, 8, False, rand(4)
    args = paged(device, [33, 9], [3, 2], heads=6, kv_heads=2, dim=24, dtype=torch.bfloat16)
    yield *args, 0.2, 0, False, None, rand(5, 6, 24), 0.5
    args = paged(device, [600], [2], dim=256, page_size=1, dtype=torch.float16)
    yield *args, 0.0625, 64, True, rand(2), rand(2, 2, 512)[..., :256]
    # more than a span, more queries than a block of threads takes at once
    args = paged(device, [1300, 0, 270], [9, 1, 3], heads=6, dim=256, dtype=torch.float16)
    yield *args, 0.0625, 0, True, None, rand(13, 6, 512)[..., :256]
    args = paged(
        device, [1100, 70], [8, 2], heads=8, kv_heads=2, dim=128, page_size=7, dtype=torch.bfloat16
    )
    yield *args, 0.09, 300, False, rand(8)
    yield *paged(device, [520], [5], heads=2, kv_heads=2, dim=256), 0.0625, 0, True
