"""Keys and values of one sequence, one page per layer."""

import torch
from torch import Tensor

__all__ = ["KVCache"]

_FIRST = 256  # rows of a fresh cache; it doubles from there


class KVCache:
    """Caches ``[1, capacity, kv_heads, head_dim]`` of every layer, growing as rows are reserved.

    Rows beyond the committed length are never read: what a rejected draft left there may stay.

    Args:
        layers: number of attention layers.
        kv_heads: heads of K and V.
        head_dim: values per head.
        dtype: float32, float16 or bfloat16; what is stored is what is read back.
        device: where the caches live.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        def empty() -> Tensor:
            return torch.zeros(1, 0, kv_heads, head_dim, dtype=dtype, device=device)

        self.k = [empty() for _ in range(layers)]
        self.v = [empty() for _ in range(layers)]
        self.page_table = torch.zeros(1, 1, dtype=torch.int32, device=device)

    @property
    def capacity(self) -> int:
        """Rows that fit without growing."""
        return self.k[0].shape[1] if self.k else 0

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` positions in total. Pointers change when it grows."""
        if rows <= self.capacity or not self.k:
            return
        capacity = max(_FIRST, self.capacity)
        while capacity < rows:
            capacity *= 2
        for caches in (self.k, self.v):
            for i, old in enumerate(caches):
                new = old.new_zeros(1, capacity, *old.shape[2:])
                new[:, : old.shape[1]] = old
                caches[i] = new
